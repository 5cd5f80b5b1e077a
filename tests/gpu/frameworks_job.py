#!/usr/bin/env python3
"""The adapters for vLLM, SGLang and slime on real memory and a real NCCL: the projects' classes are those of tests/ncclpatch/python/frameworks
(stand-ins with the released signatures), everything of AMem, PyTorch and NCCL is real.

    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so PYTHONPATH=ncclpatch/python torchrun --standalone --nproc-per-node 2 frameworks_job.py

In each project an engine has weights, a cache, and a CUDA graph with a product and an all-reduce, captured before the first pause. In each cycle
it releases what that project releases, most of what is free is overwritten by others, and after the return weights are what they were to
the last bit and the graph gives what it gave; where each rank has a GPU of its own, the account of each pause is the driver's to 32 MiB. Rank 0 prints one JSON line, last: per project the medians of pause_ms and resume_ms, freed_mib,
and nccl_mib of it. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0). --device cpu tries the script out on a stand-in for
the library under gloo, where nothing is freed.
"""
import argparse
import contextlib
import datetime
import os
import statistics
import sys
import time
import types
from unittest import mock

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../ncclpatch/python"), os.path.join(HERE, "../ncclpatch/python/frameworks")]
sys.dont_write_bytecode = True
import rank_main  # noqa: E402
import stand_ins  # noqa: E402
from torch_job import MIB, Meeting  # noqa: E402

import amem  # noqa: E402
import amem_plugins  # noqa: E402

PROJECTS = ("vllm", "sglang", "slime")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=7, help="releases and returns in each project (default 7)")
    parser.add_argument("--projects", default=",".join(PROJECTS), help=f"of {', '.join(PROJECTS)}")
    parser.add_argument("--weights-mib", type=int, default=2048)
    parser.add_argument("--cache-mib", type=int, default=4096)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--time-limit", type=int, default=150, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


def check(good, text):
    if not good:
        raise AssertionError(text)


class Engine:
    """Weights, a cache, and a graph: the cache's first rows become the sum over the ranks of input x weights."""

    def __init__(self, options, rank):
        self.options, self.rank, self.device = options, rank, options.device

    def load(self, weights_pool, cache_pool, graph_of=None):
        torch.manual_seed(self.rank + 1)
        width = 1024
        with weights_pool:
            self.weights = [torch.randn(width, width, device=self.device) for _ in range(self.options.weights_mib * MIB // (4 * width * width))]
        with cache_pool:
            self.cache = torch.zeros(self.options.cache_mib * MIB // (4 * width), width, device=self.device)
        self.wanted = [weight.clone().cpu() for weight in self.weights[:4]] + [self.weights[-1].clone().cpu()]
        self.inputs = torch.randn(16, width, device=self.device)
        self.step()  # communicators exist before the capture
        self.graph = None
        if self.device == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with (graph_of or torch.cuda.graph)(cuda_graph=self.graph, pool=None, stream=None, capture_error_mode="thread_local"):
                self.step()
        self.first = self.run()

    def step(self):
        value = self.inputs @ self.weights[0] + self.inputs @ self.weights[-1]
        dist.all_reduce(value)
        self.cache[:16].copy_(value)

    def run(self):
        self.cache[:16].fill_(-7.0)
        if self.graph:
            self.graph.replay()
        else:
            self.step()
        return self.cache[:16].clone().cpu()

    def check(self):
        here = self.weights[:4] + [self.weights[-1]]
        check(all(torch.equal(weight.cpu(), wanted) for weight, wanted in zip(here, self.wanted)), "weights differ after the return")
        check(torch.equal(self.run(), self.first), "the graph's result differs after the return")

    def bytes(self):
        return self.options.weights_mib + self.options.cache_mib


class Vllm:
    """Worker.sleep and wake_up, level 1 and 2 in turns; weights first and the cache after them, as RL loops wake it up."""

    frees_tensors = True

    def __init__(self, engine, stack):
        modules = stack.enter_context(stand_ins.imported(stand_ins.vllm(), without=["amem.frameworks.vllm"]))
        amem_plugins.vllm()
        config = types.SimpleNamespace(model_config=types.SimpleNamespace(sleep_mode_backend="amem", enable_sleep_mode=True),
                                       parallel_config=types.SimpleNamespace(distributed_executor_backend="mp"))
        with mock.patch.object(dist, "is_initialized", return_value=False):  # a worker of vLLM's own makes its groups later
            self.worker, self.level = modules["vllm.v1.worker.gpu_worker"].Worker(config, 0, 0, ""), 1
        pool = self.worker._maybe_get_memory_pool_context
        engine.load(pool("weights"), pool("kv_cache"))

    def pause(self):
        self.worker.sleep(self.level)
        self.level = 3 - self.level

    def resume(self):
        self.worker.wake_up(["weights"])
        self.worker.wake_up(["kv_cache"])


class Sglang:
    """release_memory_occupation of all tags; the graph is captured through the memory saver."""

    frees_tensors = True

    def __init__(self, engine, stack):
        savers = stack.enter_context(stand_ins.imported(stand_ins.torch_memory_saver()))
        saver = savers["torch_memory_saver"].torch_memory_saver
        modules = stack.enter_context(stand_ins.imported(stand_ins.sglang(saver), without=["amem.frameworks.sglang"]))
        stack.enter_context(mock.patch.dict(os.environ, AMEM_ENABLE="1"))
        amem_plugins.sglang()
        modules["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()
        adapter = modules["sglang.srt.utils.torch_memory_saver_adapter"]._TorchMemorySaverAdapterReal()
        manager = modules["sglang.srt.managers.scheduler_components.weight_updater"].SchedulerWeightUpdaterManager
        self.manager = manager(adapter)
        engine.load(adapter.region("weights", enable_cpu_backup=True), adapter.region("kv_cache"), adapter.cuda_graph)

    def pause(self):
        self.manager.release_memory_occupation(types.SimpleNamespace(tags=None))

    def resume(self):
        self.manager.resume_memory_occupation(types.SimpleNamespace(tags=["weights"]))
        self.manager.resume_memory_occupation(types.SimpleNamespace(tags=["kv_cache", "cuda_graph"]))


class Slime:
    """Groups that would be destroyed and made anew stay; the tensors are the project's own to offload, and stay here."""

    frees_tensors = False

    def __init__(self, engine, stack):
        from amem.frameworks import groups

        modules = stack.enter_context(stand_ins.imported(stand_ins.slime()))
        groups.slime()
        self.actor = modules["slime.backends.megatron_utils.actor"].MegatronTrainRayActor()
        self.calls = modules[groups.SLIME].calls
        engine.load(contextlib.nullcontext(), contextlib.nullcontext())

    def pause(self):
        self.actor.sleep()

    def resume(self):
        self.actor.wake_up()
        check("reload" not in self.calls and "destroy" not in self.calls, "groups were destroyed")


def free_mib(device):
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] // MIB


def timed(function, device):
    began = time.monotonic()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.monotonic() - began)


def overwrite(options):
    """Somebody else uses what was freed, and leaves it dirty."""
    if options.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        torch.full((int(free * 0.8) // 4,), 3.0, device="cuda")
        torch.cuda.empty_cache()


def checked_account(options, used_before):
    """The account of a pause against the driver, where this rank has a GPU of its own; in MiB."""
    if options.device == "cpu" or torch.cuda.device_count() < dist.get_world_size():
        return None
    (gpu,) = amem.account().gpus
    return rank_main.checked_account(used_before, sum(gpu.taken.values()), gpu.left)


def cycle(project, engine, options, meeting):
    before = free_mib(options.device)
    used_before = rank_main.used() if options.device == "cuda" else 0
    pause_ms = timed(project.pause, options.device)
    freed = free_mib(options.device) - before
    account = checked_account(options, used_before)
    meeting.gather("paused")
    overwrite(options)
    nccl = next(row for row in amem.memory()["tags"] if row["tag"] == "nccl")
    check(nccl["state"] == "paused", f"NCCL's memory is {nccl['state']}")
    meeting.gather("overwritten")
    resume_ms = timed(project.resume, options.device)
    check(not any(row["state"] == "paused" for row in amem.memory()["tags"]), "something is still paused")
    engine.check()
    tensors = engine.bytes() if project.frees_tensors else 0
    # Where NCCL has no peers, and tensors went, less than a granule of its own may be there; where nothing else is freed, something must be.
    least = tensors - 2 * (dist.get_world_size() == 1) if project.frees_tensors else 0
    check(options.device == "cpu" or freed > least, f"{freed} MiB were freed, and tensors alone had {tensors}")
    return {"pause_ms": pause_ms, "resume_ms": resume_ms, "freed_mib": freed, "nccl_mib": freed - tensors}, account


def run_project(name, options, rank, meeting):
    with contextlib.ExitStack() as stack:
        engine = Engine(options, rank)
        project = {"vllm": Vllm, "sglang": Sglang, "slime": Slime}[name](engine, stack)
        rows, accounts = zip(*(cycle(project, engine, options, meeting) for _ in range(options.cycles)))
        later = rows[1:] or rows
        del engine.weights, engine.cache, engine.graph
        free_mib(options.device)
    medians = {key: round(statistics.median(row[key] for row in later), 1) for key in later[0]}
    account = {"account": {**accounts[-1], "off_mib": round(max(one["off_mib"] for one in accounts), 1)}} if all(accounts) else {}
    return {**medians, **account, "first_pause_ms": round(rows[0]["pause_ms"], 1), "cycles": len(rows)}


def job(options, rank, size, report):
    if options.device == "cuda":
        torch.cuda.set_device(rank_main.device(rank))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=60))
    meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size)
    with contextlib.ExitStack() as stack:
        if options.device == "cpu":
            import fake_library

            library, _ = stack.enter_context(fake_library.installed(torch))
            library.nccl_libraries = [{"under_amem": True}]
        report["projects"] = {}
        for name in options.projects.split(","):
            rows = meeting.gather(run_project(name, options, rank, meeting))
            slowest = {key: max(row[key] for row in rows) for key in ("pause_ms", "resume_ms", "first_pause_ms")}
            report["projects"][name] = {**rows[0], **slowest}
    if options.device == "cuda":
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(rank_main.run("frameworks_job", job, arguments, echo=("cycles", "weights_mib", "cache_mib", "device")))
