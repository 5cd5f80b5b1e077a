#!/usr/bin/env python3
"""GRPO on one set of GPUs: a small transformer learns to sort digits, by sampling answers, checking them, and learning from the better ones.

    torchrun --standalone --nproc-per-node 2 grpo_job.py --strategy fsdp2 --json off.json
    torchrun --standalone --nproc-per-node 2 grpo_job.py --strategy fsdp2 --json on.json --rl-amem-offload-during-rollout
    python3 grpo_plot.py off.json on.json -o memory.svg

Training (FSDP2 or DDP, AdamW) and generation (an engine with bfloat16 weights of its own and a KV cache) take turns on the same GPUs.
With the flag, training's parameters, gradients, optimizer states and NCCL's memory are given back while the engine generates, and the
engine's weights while training works. Losses are the same to the last bit; rank 0 prints them in full, and compares them with those
of another run's file with --same-as. It needs PyTorch and AMem (see README.md of the tree for LD_PRELOAD or import).

Without torchrun it is one process, and without a GPU it runs on the CPU (gloo), where the flag does nothing. Larger: --width 2048 --layers 24.
Exit code 0: all well, 1: losses differ from those of --same-as, or an error.
"""
import argparse
import contextlib
import json
import os
import sys
import threading
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import amem.rl  # noqa: E402  (after PyTorch, before init_process_group)

DIGITS, SEPARATOR, TOKENS = 10, 10, 11
MIB = 1 << 20
ENGINE_TAG = "grpo.engine"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--strategy", choices=("fsdp2", "ddp"), default="fsdp2", help="how training is parallel under torchrun")
    parser.add_argument("--iterations", type=int, default=20, help="rollouts, each followed by --epochs steps")
    parser.add_argument("--epochs", type=int, default=2, help="optimizer steps for each rollout")
    parser.add_argument("--prompts", type=int, default=16, help="prompts for each rank and rollout")
    parser.add_argument("--group", type=int, default=16, help="answers for each prompt; advantages are relative to their mean")
    parser.add_argument("--digits", type=int, default=5, help="digits to sort")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0, help="default: 3e-4 at a width of 256, and less in proportion where it is wider")
    parser.add_argument("--clip", type=float, default=0.2, help="PPO's bound on the ratio of probabilities")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", default="", help="where losses, rewards, times and memory over time go; rank 0's")
    parser.add_argument("--same-as", default="", help="a file of --json; the losses must be equal to its")
    options = amem.rl.add_arguments(parser).parse_args()
    if options.rl_amem_offload_during_rollout and options.device == "cpu":
        print("grpo_job.py: without a GPU there is nothing to give back; the flag does nothing", file=sys.stderr)
        options.rl_amem_offload_during_rollout = False
    return options


# ---- the model -------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward part, by matrix products alone: deterministic forward and backward."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cache=None, at=0):
        """x: (batch, new tokens, width). `cache`: a pair of (batch, heads, tokens, width of a head) that the new tokens, which begin
        at position `at`, are written to; None: the tokens of x are all there are."""
        batch, count, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0][:, :, at:at + count], cache[1][:, :, at:at + count] = k, v
            k, v = cache[0][:, :, :at + count], cache[1][:, :, :at + count]
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        allowed = torch.ones(count, at + count, dtype=torch.bool, device=x.device).tril(at)
        mixed = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, count, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Next-token logits, (batch, tokens, TOKENS), of token numbers (batch, tokens)."""

    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, options.width)
        self.positions = nn.Embedding(2 * options.digits + 1, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.width), nn.Linear(options.width, TOKENS, bias=False)

    def forward(self, tokens, caches=None, at=0):
        x = self.tokens(tokens) + self.positions(torch.arange(at, at + tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            x = block(x, caches[number] if caches else None, at)
        return self.head(self.norm(x)).float()


class Engine:
    """Generation with weights of its own, as an inference engine has them; synchronized from training before each rollout."""

    def __init__(self, options, device):
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device("meta"):  # nothing is allocated in between, which a pool would keep
            model = Transformer(options).to(self.dtype).requires_grad_(False)
        self.model = model.to_empty(device=device)  # synchronize() fills it
        self.options = options

    @torch.no_grad()
    def synchronize(self, trained):
        """Collective under FSDP2: each parameter is gathered from its shards."""
        own = dict(self.model.named_parameters())
        for name, parameter in trained.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            own[name.removeprefix("module.")].copy_(whole)

    @torch.no_grad()
    def generate(self, prompts, generator):
        """Answers, (batch, digits), to prompts, (batch, digits + 1), sampled with a KV cache."""
        batch, start = prompts.shape
        head = self.options.width // self.options.heads
        shape = (batch, self.options.heads, start + self.options.digits, head)
        caches = [[torch.zeros(shape, dtype=self.dtype, device=prompts.device) for _ in range(2)] for _ in self.model.blocks]
        answers, tokens, at = [], prompts, 0
        for _ in range(self.options.digits):
            logits = self.model(tokens, caches, at)[:, -1]
            at += tokens.shape[1]
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            answers.append(tokens)
        return torch.cat(answers, 1)


# ---- the algorithm ---------------------------------------------------------------------------------------------------------------


def rewards_of(prompts, answers):
    """The share of digits that are where sorting puts them, and one more for an answer that is right altogether."""
    right = answers == prompts[:, :-1].sort(1).values
    return right.float().mean(1) + right.all(1).float()


def log_probabilities(model, prompts, answers):
    """Of each token of the answers: (batch, digits). A mask in place of gather(), whose gradient adds in no order on GPUs."""
    logits = model(torch.cat([prompts, answers[:, :-1]], 1))[:, prompts.shape[1] - 1:]
    others = answers.unsqueeze(2) != torch.arange(TOKENS, device=answers.device)
    return logits.log_softmax(-1).masked_fill(others, 0.0).sum(-1)


def policy_loss(new, old, advantages, clip):
    """PPO's clipped loss without a KL term; advantages, (batch), hold for all tokens of an answer."""
    ratio = (new - old).exp()
    advantages = advantages.unsqueeze(1)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


def relative(rewards, group):
    """Advantages of answers relative to the others of their group."""
    grouped = rewards.view(-1, group)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1)


# ---- the job ---------------------------------------------------------------------------------------------------------------------


class Memory(threading.Thread):
    """What is used of the device, some two hundred times a second, and when which phase began."""

    def __init__(self, device):
        super().__init__(daemon=True)
        self.device, self.began = device, time.monotonic()
        self.samples, self.phases, self.ended = [], [], threading.Event()

    def run(self):
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            while not self.ended.wait(0.005):
                free, total = torch.cuda.mem_get_info(self.device)
                self.samples.append((round(time.monotonic() - self.began, 4), round((total - free) / MIB, 1)))

    def phase(self, name):
        self.phases.append((round(time.monotonic() - self.began, 4), name))


class Job:
    """One rank: model, optimizer, engine, and the loop."""

    def __init__(self, options):
        self.options = options
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", 0)) if options.device == "cuda" else None)
        if options.device == "cuda":
            torch.cuda.set_device(self.device)
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        torch.use_deterministic_algorithms(True)
        self.on = options.rl_amem_offload_during_rollout
        torch.manual_seed(options.seed)
        self.model = self.parallel(Transformer(options).to(self.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate or 3e-4 * 256 / options.width)
        with amem.pool(ENGINE_TAG, policy="discard") if self.on else contextlib.nullcontext():
            self.engine = Engine(options, self.device)
        self.offload = amem.rl.RolloutOffload(self.model, self.optimizer, enabled=self.on)
        self.random = torch.Generator(self.device).manual_seed(options.seed + 1000 * (self.rank + 1))
        self.memory = Memory(self.device)

    def parallel(self, model):
        if not dist.is_initialized():
            return model
        if self.options.strategy == "ddp":
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh(self.options.device, (self.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def roll_out(self):
        """Prompts and answers, one row each. In it the memory is the engine's."""
        options, device = self.options, self.device
        self.memory.phase("synchronize")
        if self.on:
            amem.resume(ENGINE_TAG)
        self.engine.synchronize(self.model)
        with self.offload.rollout():
            self.memory.phase("rollout")
            digits = torch.randint(DIGITS, (options.prompts, options.digits), device=device, generator=self.random)
            prompts = torch.cat([digits, torch.full((options.prompts, 1), SEPARATOR, device=device)], 1)
            prompts = prompts.repeat_interleave(options.group, 0)
            answers = self.engine.generate(prompts, self.random)
            if self.on:
                amem.pause(ENGINE_TAG)
        self.memory.phase("training")
        return prompts, answers

    def learn(self, prompts, answers):
        """(mean loss of the last step, mean reward) of this rank."""
        rewards = rewards_of(prompts, answers)
        advantages = relative(rewards, self.options.group)
        with torch.no_grad():
            old = log_probabilities(self.model, prompts, answers)
        for _ in range(self.options.epochs):
            loss = policy_loss(log_probabilities(self.model, prompts, answers), old, advantages, self.options.clip)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([loss.detach(), rewards.mean()])

    def run(self):
        rows = []
        self.memory.start()
        for iteration in range(self.options.iterations):
            began = time.monotonic()
            prompts, answers = self.roll_out()
            rolled = time.monotonic()
            means = self.learn(prompts, answers)
            if dist.is_initialized():
                dist.all_reduce(means)
            loss, reward = (means / self.ranks).tolist()
            row = {"loss": loss.hex(), "reward": reward, "rollout_s": round(rolled - began, 4),
                   "training_s": round(time.monotonic() - rolled, 4)}
            rows.append(row)
            if self.rank == 0:
                print("iteration %3d   loss %+.8f (%s)   reward %.3f   rollout %.3f s   training %.3f s" % (
                    iteration, loss, row["loss"], reward, row["rollout_s"], row["training_s"]), flush=True)
        self.memory.ended.set()
        self.memory.join()
        return {"flag": self.on, "strategy": self.options.strategy, "ranks": self.ranks, "device": str(self.device),
                "parameters": sum(p.numel() for p in self.model.parameters()), "iterations": rows, "memory_mib": self.memory.samples,
                "phases": self.memory.phases, "tags": amem.memory()["tags"] if self.on else []}


def compare(result, other):
    """How many losses differ from those of another run; all of them where every answer of a group is alike, and nothing is learned."""
    pairs = [(one["loss"], two["loss"]) for one, two in zip(result["iterations"], other["iterations"])]
    if not any(float.fromhex(one) for one, _ in pairs):
        print("losses: all are zero, and prove nothing; try a smaller --learning-rate")
        return len(pairs) + 1
    wrong = sum(one != two for one, two in pairs) + abs(len(result["iterations"]) - len(other["iterations"]))
    print("losses: %d of %d are equal to the last bit" % (len(pairs) - sum(one != two for one, two in pairs), len(pairs)))
    return wrong


def main():
    options = arguments()
    job = Job(options)
    result = job.run()
    code = 0
    if job.rank == 0:
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(result, file)
        if options.same_as:
            with open(options.same_as, encoding="utf-8") as file:
                code = 1 if compare(result, json.load(file)) else 0
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
