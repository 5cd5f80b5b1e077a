#!/usr/bin/env python3
"""Reinforcement learning as people run it: a trainer and a vLLM in the same processes take turns on the same GPU, one step after the other.

    NCCL_NVLS_ENABLE=0 python3 rl_loop.py --json plain.json
    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so python3 rl_loop.py --backend amem --json amem.json --same-as plain.json

--trainer bare: a Llama under FSDP2 and AdamW, whose parameters vLLM (tensor parallel over the same ranks) is handed by collective_rpc before each
rollout, with amem.rl.RolloutOffload around it. --trainer trl: TRL's GRPOTrainer, vLLM colocated, its sleep mode on, a vLLM for each rank,
amem.frameworks.trl. With --backend cumem there is no AMem: vLLM's own allocator, and training's memory stays. Losses, norms of gradients, tokens and
final parameters are the same to the last bit, or exit code 1. --one-gpu has all ranks on the first GPU, for which NCCL must be of 2.30 or later. Every
process has an alarm.
"""
import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import vllm_job  # noqa: E402

MIB = 1 << 20
PROMPT, ANSWER, PROMPTS, GROUP = 16, 16, 4, 4
COMPARED = ("losses", "norms", "tokens", "parameters")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trainer", choices=("bare", "trl"), default="bare")
    parser.add_argument("--backend", choices=("cumem", "amem"), default="cumem", help="cumem is vLLM's own, without AMem anywhere")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--time-limit", type=int, default=170, help="seconds for everything")
    parser.add_argument("--json", default="", help="the report of rank 0 goes there")
    parser.add_argument("--same-as", default="", help="a report of another run; what both computed must be equal")
    return parser.parse_args()


def digest(tensors):
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().float().cpu().numpy().tobytes())
    return total.hexdigest()


def engine_options(options):
    """Of every vLLM here: small, without compilation, graphs of three sizes."""
    return {"kv_cache_memory_bytes": 2048 * MIB // options.ranks, "disable_custom_all_reduce": True, "enable_prefix_caching": False,
            "worker_extension_cls": "vllm_worker.Calls",
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 8]}}


class Bare:
    """FSDP2 and AdamW by hand; vLLM is tensor parallel over the trainer's ranks."""

    def __init__(self, options, rank, folder):
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from transformers import LlamaConfig, LlamaForCausalLM

        dist.init_process_group("nccl")
        torch.manual_seed(7)
        self.options, self.rank = options, rank
        model_folder = vllm_job.model_folder(folder, options.layers, options.width)
        with torch.device("cuda"):
            self.model = LlamaForCausalLM(LlamaConfig.from_pretrained(model_folder, attn_implementation="eager", dtype="float32")).float()
        mesh = dist.device_mesh.init_device_mesh("cuda", (options.ranks,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        torch.cuda.empty_cache()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        import vllm

        self.llm = vllm.LLM(model=model_folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", tensor_parallel_size=options.ranks,
                            distributed_executor_backend="external_launcher", enable_sleep_mode=True, max_model_len=64, max_num_seqs=PROMPTS * GROUP,
                            gpu_memory_utilization=0.05, seed=0, **engine_options(options))
        self.sampling = [vllm.SamplingParams(temperature=1.0, seed=number, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
                         for number in range(PROMPTS * GROUP)]
        self.prompts = [[(7 * prompt + 13 * place) % 997 + 3 for place in range(PROMPT)] for prompt in range(PROMPTS) for _ in range(GROUP)]
        self.offload = contextlib.nullcontext
        if options.backend == "amem":
            import amem.rl

            # NCCL's memory stays: vLLM's ranks need it
            self.offloaded = amem.rl.RolloutOffload(self.model, self.optimizer, nccl=False)
            self.offload = self.offloaded.rollout
        self.llm.sleep(level=2)

    def hand_over(self):
        for name, parameter in self.model.named_parameters():
            self.llm.collective_rpc("engines_take", args=([(name, parameter.detach().full_tensor())],))

    def generate(self):
        found = self.llm.generate([{"prompt_token_ids": one} for one in self.prompts], self.sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    def step(self, number, row):
        """One rollout and what is learnt from it. Level 2 in sleeping: the next weights come anyway."""
        row["wake_weights_ms"] = vllm_job.timed(self.llm.wake_up, ["weights"])
        row["hand_over_ms"] = vllm_job.timed(self.hand_over)
        with contextlib.ExitStack() as rollout:
            row["give_back_ms"] = vllm_job.timed(rollout.enter_context, self.offload())
            row["wake_cache_ms"] = vllm_job.timed(self.llm.wake_up, ["kv_cache"])
            answers = self.generate()
            if number == 1:  # the same weights once more, after a sleep that saves them
                self.llm.sleep(level=1)
                self.llm.wake_up()
                vllm_job.check(self.generate() == answers, "the same weights said something else after a sleep")
            row["rollout_mib"] = vllm_job.used_mib()
            row["sleep_ms"] = vllm_job.timed(self.llm.sleep, 2)
            row["bring_back_ms"] = vllm_job.timed(rollout.close)
        loss, norm = self.learn(answers)
        row["training_mib"] = vllm_job.used_mib()
        return loss, norm, answers

    def learn(self, answers):
        import torch
        import torch.distributed as dist
        from torch.nn import functional as F

        ids = torch.tensor([prompt + answer for prompt, answer in zip(self.prompts, answers)], device="cuda")
        rewards = (ids[:, PROMPT:] < 16000).float().mean(1).view(PROMPTS, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1)
        mine = slice(self.rank, None, self.options.ranks)
        self.optimizer.zero_grad()
        logits = self.model(input_ids=ids[mine], use_cache=False).logits[:, PROMPT - 1:-1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[mine, PROMPT:].flatten(), reduction="none").view(-1, ANSWER)
        loss = (losses * advantages[mine, None]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item(), getattr(norm, "full_tensor", lambda: norm)().item()

    def run(self, report):
        report.update(losses=[], norms=[], tokens=[], steps=[])
        for number in range(self.options.steps):
            row = {}
            loss, norm, answers = self.step(number, row)
            report["losses"].append(loss.hex())
            report["norms"].append(norm.hex())
            report["tokens"].append(hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16])
            report["steps"].append({key: round(value, 1) for key, value in row.items()})
            if self.rank == 0:
                print("step %d: loss %+.6f, norm %.4f, %s" % (number, loss, norm, report["steps"][-1]), flush=True)
        report["parameters"] = digest(parameter.detach().full_tensor() for parameter in self.model.parameters())
        vllm_job.check(len(set(report["tokens"])) > 1 and any(float.fromhex(one) for one in report["norms"]), "nothing was learnt")


class Trl:
    """GRPOTrainer, vLLM colocated and asleep while it trains."""

    def __init__(self, options, rank, folder):
        import torch
        import vllm
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer
        from trl.generation import vllm_generation

        words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(10)), "sort", ":"])}
        made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
        torch.manual_seed(3)
        config = LlamaConfig(vocab_size=len(words), hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
                             max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=False)
        folder = os.path.join(folder, "model")
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        mine = engine_options(options)

        class Engine(vllm.LLM):
            def __init__(self, **named):
                super().__init__(**{**named, **mine})

            def generate(self, *arguments, **named):
                found = super().generate(*arguments, **named)
                seen.append([list(one.token_ids) for answer in found for one in answer.outputs])
                return found

        seen = self.seen = []
        vllm_generation.LLM = Engine
        settings = GRPOConfig(
            output_dir=os.path.join(folder, "out"), report_to=[], max_steps=options.steps, per_device_train_batch_size=8, num_generations=4, bf16=False,
            max_completion_length=ANSWER, save_strategy="no", disable_tqdm=True, learning_rate=1e-3, beta=0.0, seed=5, logging_steps=1, use_vllm=True,
            vllm_mode="colocate", vllm_gpu_memory_utilization=0.05, vllm_enable_sleep_mode=True, vllm_max_model_length=128,
            gradient_checkpointing=False, model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"})
        data = Dataset.from_dict({"prompt": ["sort : 3 1 2", "sort : 9 8 7", "sort : 4 6 5", "sort : 0 2 1"] * 16})

        def reward(completions, **_):
            return [float(len(set(one.split()))) for one in completions]

        self.trainer = GRPOTrainer(folder, reward_funcs=reward, args=settings, train_dataset=data, processing_class=tokenizer)
        if options.backend == "amem":
            import amem.frameworks.trl

            self.trainer.add_callback(amem.frameworks.trl.callback(self.trainer))

    def run(self, report):
        self.trainer.train()
        rows = [row for row in self.trainer.state.log_history if "loss" in row]
        report["losses"] = [float(row["loss"]).hex() for row in rows]
        report["norms"] = [float(row["grad_norm"]).hex() for row in rows]
        report["tokens"] = [hashlib.sha256(json.dumps(one).encode()).hexdigest()[:16] for one in self.seen]
        report["parameters"] = digest(self.trainer.model.parameters())
        vllm_job.check(len(rows) == self.trainer.args.max_steps and any(row["grad_norm"] for row in rows), "nothing was learnt")


def one_rank(options):
    """A rank's whole life; rank 0 writes the report."""
    rank, left = int(os.environ["RANK"]), max(5, int(float(os.environ["ENGINES_END"]) - time.time()))
    signal.alarm(left)
    faulthandler.dump_traceback_later(max(1, left - 5), exit=False)
    import torch

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True, warn_only=True)  # vLLM, in this process, has operations that cannot
    torch.utils.deterministic.fill_uninitialized_memory = False
    if options.backend == "amem":
        import amem  # noqa: F401
    vllm_job.choose_backend(options.backend)
    report = {"program": "rl_loop", "ok": False, "trainer": options.trainer, "backend": options.backend, "ranks": options.ranks, "one_gpu": options.one_gpu}
    try:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            job = {"bare": Bare, "trl": Trl}[options.trainer](options, rank, folder)
            report["start_s"] = round(time.monotonic() - began, 1)
            job.run(report)
            report["seconds"] = round(time.monotonic() - began, 1)
            if options.backend == "amem":
                report["tags"] = {row["tag"]: row["last_pause_ms"] for row in amem.memory()["tags"] if row["bytes"]}
                report["nccl_pauses"] = amem.stats()["pauses"]["done"]
                paused = [tag for tag in ("amem.rl.parameters", "amem.rl.optimizer", "vllm.weights", "vllm.kv_cache") if not report["tags"].get(tag)]
                vllm_job.check(not paused, "never paused: %s" % ", ".join(paused))
                if options.trainer == "trl" and options.ranks > 1:
                    vllm_job.check(report["nccl_pauses"] >= options.steps, "NCCL's memory was paused %d times" % report["nccl_pauses"])
        report["ok"] = True
    except Exception as error:
        import traceback

        traceback.print_exc()
        report["error"] = "rank %d: %s: %s" % (rank, type(error).__name__, error)
    if rank == 0 or not report["ok"]:
        with open("%s.%d" % (os.environ["ENGINES_REPORT"], rank), "w", encoding="utf-8") as file:
            json.dump(report, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if report["ok"] else 1)  # taking vLLM down in order could hang


def compared(mine, other):
    """Where two runs differ, in words."""
    wrong = []
    for key in COMPARED:
        if mine[key] != other[key]:
            differing = sum(a != b for a, b in zip(mine[key], other[key])) if isinstance(mine[key], list) else 1
            wrong.append("%s differ from those without AMem (%d of %d)" % (key, differing, len(mine[key]) if isinstance(mine[key], list) else 1))
    return wrong


def launch(options):
    """All ranks, until all have ended, or one failed, or time is up; the report of rank 0, or of the first that failed."""
    end = time.time() + options.time_limit
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(options.ranks):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": "0" if options.one_gpu else str(rank), "WORLD_SIZE": str(options.ranks),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ENGINES_END": str(end - 3), "ENGINES_REPORT": options.json}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=environment, start_new_session=True))
    try:
        while any(one.poll() is None for one in ranks) and not any(one.poll() for one in ranks) and time.time() < end:
            time.sleep(0.2)
        time.sleep(0.5)  # another rank may have the reason
    finally:
        for one in ranks:
            with contextlib.suppress(OSError):
                os.killpg(one.pid, signal.SIGKILL)
        codes = [one.wait() for one in ranks]
    report = {"ok": False, "error": "ranks ended with %s, of which none reported" % codes}
    for rank in reversed(range(options.ranks)):
        with contextlib.suppress(OSError), open("%s.%d" % (options.json, rank), encoding="utf-8") as file:
            found = json.load(file)
            report = found if report.get("error", "").startswith("ranks") or not found["ok"] else report
            os.unlink(file.name)
    if report["ok"] and any(codes):
        report.update(ok=False, error="ranks ended with %s" % codes)
    return report


def main():
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("rl_loop.py: refused: NCCL_NVLS_ENABLE must be 0", file=sys.stderr)
        return 2
    options = arguments()
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false",
                        "PYTHONPATH": ":".join(filter(None, [HERE, os.environ.get("PYTHONPATH")])), **vllm_job.ENVIRONMENT}.items():
        os.environ[name] = value
    if "ENGINES_REPORT" in os.environ:
        one_rank(options)
    with tempfile.TemporaryDirectory() as folder:
        options.json = options.json or os.path.join(folder, "report")
        report = launch(options)
    if report["ok"] and options.same_as:
        with open(options.same_as, encoding="utf-8") as file:
            wrong = compared(report, json.load(file))
        report.update(ok=not wrong, error="; ".join(wrong))
    with contextlib.suppress(OSError), open(options.json, "w", encoding="utf-8") as file:
        json.dump(report, file)
    print(json.dumps(report), flush=True)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
