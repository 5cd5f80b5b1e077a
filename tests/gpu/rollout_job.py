#!/usr/bin/env python3
"""A training job with rollouts, with and without amem.rl.RolloutOffload: FSDP2, DDP and, where it is installed, DeepSpeed's ZeRO-3, with AdamW.

    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so PYTHONPATH=ncclpatch/python torchrun --standalone --nproc-per-node 2 rollout_job.py

For each strategy the same training runs twice from the same seed, the second time with the offload. Losses and parameters must be equal to the
last bit. During each rollout the memory of parameters, gradients, optimizer states and NCCL must be free, its account must be the driver's to 32 MiB,
and most of what is free is allocated and overwritten. A CUDA graph that reads the parameters and has a collective is captured before the first rollout and must
give what eager execution gives after each. Rank 0 prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused
(NCCL_NVLS_ENABLE is not 0). With --device cpu it tries itself out under gloo, and nothing is given back.
"""
import argparse
import datetime
import gc
import importlib.util
import os
import statistics
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import amem  # noqa: E402
import amem.rl  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402
from torch_job import MIB, Meeting  # noqa: E402

STRATEGIES = ("fsdp2", "ddp", *(["zero3"] if importlib.util.find_spec("deepspeed") else []))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=20, help="rollouts, each followed by a step (default 20)")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help=f"of {', '.join(STRATEGIES)}")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4, help="of 8 x width x width parameters each")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--time-limit", type=int, default=150, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def local(tensor):
    """This rank's part of a DTensor; other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)


class Training:
    """Model and optimizer of one strategy; the same whenever it is made."""

    def __init__(self, strategy, options, rank, size):
        self.strategy, self.options, self.rank = strategy, options, rank
        torch.manual_seed(7)
        with torch.device(options.device):
            model = nn.Sequential(*[Block(options.width) for _ in range(options.layers)])
        if strategy == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh(options.device, (size,))
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif strategy == "ddp":
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if strategy == "zero3":
            import deepspeed

            deepspeed.init_distributed("gloo" if options.device == "cpu" else "nccl")
            self.model, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config={
                "train_micro_batch_size_per_gpu": 64, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}})
        self.random = torch.Generator(options.device).manual_seed(11 + rank)
        # DDP's buckets hold the gradients' memory all the time; FSDP2's gradients have to stay to be there in a rollout.
        self.set_to_none = strategy == "ddp"
        self.losses = []

    def samples(self):
        return torch.randn(64, self.options.width, device=self.options.device, generator=self.random)

    def step(self, samples):
        loss = (self.model(samples) - samples.roll(1, 1)).square().mean()
        if self.strategy == "zero3":
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
        self.losses.append(loss.detach())

    def parameters(self):
        """Of this rank: shards, or whole ones."""
        return [local(getattr(p, "ds_tensor", p).detach()) for p in self.model.parameters()]

    def bytes(self):
        """Of parameters, gradients and optimizer states, each storage once. DDP's buckets have the size of the parameters."""
        states = [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        storages = {s._cdata: s.nbytes() for s in (local(t).untyped_storage() for t in [*self.parameters(), *gradients, *states])
                    if s.device.type == self.options.device}
        buckets = sum(p.nbytes for p in self.parameters()) if self.strategy == "ddp" and self.losses and not gradients else 0
        return sum(storages.values()) + buckets

    def result(self):
        """(losses, parameters) as they are now, on the host."""
        return [loss.item().hex() for loss in self.losses], [p.cpu() for p in self.parameters()]


class Graph:
    """A CUDA graph that reads parameters and sums what all ranks found."""

    def __init__(self, training):
        self.read = training.parameters()[:6]
        self.out = torch.zeros(len(self.read), device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.compute()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.compute()
        torch.cuda.synchronize()
        self.replays = 0

    def compute(self):
        self.out.copy_(torch.stack([p.sum() for p in self.read]))
        dist.all_reduce(self.out)

    def differs(self):
        self.out.fill_(-7.0)
        self.graph.replay()
        replayed = self.out.clone()
        self.compute()
        self.replays += 1
        return not torch.equal(replayed, self.out) or bool(replayed.isnan().any())


class Measured:
    """What rollouts freed and how long they took."""

    def __init__(self):
        self.accounts = []
        self.rows = {"share": [], "freed_mib": [], "pause_ms": [], "resume_ms": [], "complete_ms": []}

    def add(self, **values):
        for name, value in values.items():
            self.rows[name].append(value)

    def summary(self, everyone):
        """The least share of any rank and rollout; of times the median over the rollouts, of the slowest rank."""
        later = [{name: values[1:] or values for name, values in rows.items()} for rows in everyone]
        found = {name: round(max(statistics.median(rows[name]) for rows in later), 2)
                 for name in ("freed_mib", "pause_ms", "resume_ms", "complete_ms") if later[0][name]}
        found["share"] = round(min(min(rows["share"]) for rows in later), 4) if later[0]["share"] else None
        found["first_pause_ms"] = round(max(rows["pause_ms"][0] for rows in everyone), 2)
        return found


def timed(call):
    began = time.monotonic()
    call()
    return 1e3 * (time.monotonic() - began)


def nccl_bytes():
    return next((row["bytes"] for row in amem.memory()["tags"] if row["tag"] == "nccl"), 0)


def overwrite(free):
    """Uses memory that a rollout has, so that nothing can be back by having stayed."""
    scratch = torch.empty(int(0.9 * free) // 4, dtype=torch.float32, device="cuda")
    scratch.fill_(float("nan"))
    torch.cuda.synchronize()


def check_account(offload, used_before, adopted_before):
    """What the rollout took and what it left are what the driver had given out, where this rank has a GPU of its own; in MiB. A rollout that adopts
    gives memory back before its pause, so only of others the beginning can be compared, too."""
    if torch.cuda.device_count() < dist.get_world_size():
        return None
    # DeepSpeed's engine makes a number in each step, the norm of all gradients.
    if left := [one for one in offload.left if one.bytes > 8]:
        raise RuntimeError(f"tensors of the model or its optimizer stay: {left}")
    account = offload.freed
    adopts = any(one is not adopted_before.get(kind) for kind, one in offload.adopted.items())
    if not adopts and abs(account.used - used_before) > rank_main.CLOSE:
        raise RuntimeError(f"the account says that {account.used} bytes were used, the driver {used_before}")
    return rank_main.checked_account(account.used, account.bytes, account.left)


def one_rollout(offload, training, measured, number, cpu):
    """Every other time everything is waited for and timed; the other times the optimizer's states come behind the step."""
    if cpu:
        with offload.rollout():
            return training.samples()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    wanted = training.bytes() + nccl_bytes()
    before, adopted = rank_main.used(), dict(offload.adopted)
    pause_ms = timed(offload.pause)
    freed = before - rank_main.used()
    measured.accounts.append(check_account(offload, before, adopted))
    if number:
        overwrite(freed)
    samples = training.samples()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    began = time.monotonic()
    measured.add(share=freed / wanted, freed_mib=freed / MIB, pause_ms=pause_ms, resume_ms=timed(offload.resume))
    if number % 2 == 0:
        offload.wait()
        torch.cuda.synchronize()
        measured.add(complete_ms=1e3 * (time.monotonic() - began))
    return samples


def compare(training, wanted, report):
    losses, parameters = training.result()
    report["losses_differ"] = sum(a != b for a, b in zip(losses, wanted[0]))
    report["parameters_differ"] = sum(not torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(parameters, wanted[1]))
    report["last_loss"] = losses[-1]


def train(strategy, options, rank, size, meeting):
    """Both runs of one strategy; the row of the report."""
    cpu = options.device == "cpu"
    training = Training(strategy, options, rank, size)
    for _ in range(options.cycles):
        training.step(training.samples())
    wanted = training.result()
    del training
    if not cpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    training = Training(strategy, options, rank, size)
    offload = amem.rl.RolloutOffload(training.model, training.optimizer, nccl=not cpu, name=f"rollout.{strategy}")
    adopted = offload.adopt()
    graph, measured, row = None if cpu else Graph(training), Measured(), {"cycles": options.cycles, "graph_differs": 0}
    for number in range(options.cycles):
        meeting.gather("before the rollout")
        samples = one_rollout(offload, training, measured, number, cpu)
        row["graph_differs"] += graph.differs() if graph else 0
        training.step(samples)
    offload.wait()
    compare(training, wanted, row)
    row["graph_replays"] = graph.replays if graph else 0
    row["gib"] = round(training.bytes() / (1 << 30), 3)
    row["adopted"] = {kind: [one.storages, one.bytes] for kind, one in {**adopted, **offload.adopted}.items()}
    row["kept"] = {} if cpu else {one["tag"]: one["kept"] for one in amem.memory()["tags"] if one.get("kept")}
    everyone = meeting.gather({"row": row, "times": measured.rows})
    for key in ("losses_differ", "parameters_differ", "graph_differs"):
        row[key] = sum(one["row"][key] for one in everyone)
    if accounts := [one for one in measured.accounts if one]:
        row["account"] = {**accounts[-1], "off_mib": round(max(one["off_mib"] for one in accounts), 1)}
    if not cpu:
        row.update(measured.summary([one["times"] for one in everyone]))
    del graph  # a live graph would keep the process group from going down
    offload.close()
    return row


def job(options, rank, size, report):
    cpu = options.device == "cpu"
    if not cpu:
        torch.cuda.set_device(rank_main.device(rank))
        report["gpu"] = torch.cuda.get_device_name()
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo" if cpu else "nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size)
    report["torch"] = torch.__version__
    report["strategies"] = {}
    for strategy in options.strategies.split(","):
        row = report["strategies"][strategy] = train(strategy, options, rank, size, meeting)
        if rank == 0:
            print(f"{strategy}: {row}", file=sys.stderr, flush=True)
        gc.collect()  # models and optimizers are in cycles, and have gigabytes
        if not cpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(rank_main.run("rollout_job", job, arguments, ("cycles", "width", "layers", "device")))
