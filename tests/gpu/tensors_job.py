#!/usr/bin/env python3
"""amem.pool, amem.adopt and amem.wrap on PyTorch's tensors and a GPU: each claim by itself.

    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so PYTHONPATH=ncclpatch/python torchrun --standalone --nproc-per-node 1 tensors_job.py

Prints one JSON line, last, with "claims": each by name with what was wrong, or null. Exit code 0: all hold, 1: not, 2: refused
(NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import os
import sys
import threading

import torch

import amem
import amem.rl
from amem import _pools

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402

MIB = 1 << 20
CLOSE = 32 * MIB  # what contexts and libraries may take or give back during a claim


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--time-limit", type=int, default=100, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


def row(tag):
    return next(one for one in amem.memory()["tags"] if one["tag"] == tag)


def numbers(mib, seed=1):
    return torch.arange(seed, seed + mib * MIB // 4, dtype=torch.int32, device="cuda")


def check(good, text):
    if not good:
        raise AssertionError(text)


def free_mib():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / MIB


def a_pool_is_allocated_from_paused_and_resumed():
    with amem.pool("claim1"):
        tensor = numbers(256)
    address, wanted = tensor.data_ptr(), numbers(256)
    check(row("claim1")["bytes"] >= 256 * MIB, f"the pool holds {row('claim1')['bytes']} bytes")
    before = free_mib()
    with amem.paused("claim1"):
        # The driver may take a granule of 2 MiB for itself meanwhile.
        check(free_mib() - before >= 254, f"a pause freed {free_mib() - before} MiB")
        numbers(200, 7)  # somebody else has the memory
        torch.cuda.empty_cache()
    check(tensor.data_ptr() == address and torch.equal(tensor, wanted), "contents or the address differ")


def the_innermost_of_nested_pools_is_allocated_from():
    with amem.pool("claim2a"):
        with amem.pool("claim2b"):
            inner = numbers(64)
            with amem.pool("claim2a"):
                again = numbers(32)
        outer = numbers(32)
    check(row("claim2a")["bytes"] >= 64 * MIB and row("claim2b")["bytes"] >= 64 * MIB, str(amem.memory()))
    wanted = [tensor.clone() for tensor in (outer, again)]
    with amem.paused("claim2b"):
        check(torch.equal(outer, wanted[0]) and torch.equal(again, wanted[1]), "the outer pool went, too")
    check(torch.equal(inner, numbers(64)), "contents differ")


def another_thread_is_outside_of_the_pool():
    made = []
    with amem.pool("claim3"):
        thread = threading.Thread(target=lambda: made.append(numbers(64)))
        thread.start()
        thread.join()
    check(row("claim3")["bytes"] == 0, "the other thread's tensor is in the pool")


def adopted_tensors_keep_objects_views_and_contents():
    layer = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 4096, device="cuda")).sum().backward()
    optimizer.step()
    view, weight = layer.weight.detach()[7:9], layer.weight
    before = [p.detach().clone() for p in layer.parameters()] + [optimizer.state[weight]["exp_avg"].clone()]
    size = weight.untyped_storage().nbytes()
    first = amem.adopt([layer.parameters(), [p.grad for p in layer.parameters()]], "claim4")
    second = amem.adopt(optimizer.state, "claim4")
    check(first.storages == 4 and second.storages == 4 and second.bytes >= 2 * size, f"{first} {second}")
    check(row("claim4")["part_bytes"] >= 4 * size, str(row("claim4")))
    held = free_mib()
    with amem.paused("claim4"):
        check(free_mib() - held >= 4 * size / MIB, f"a pause freed {free_mib() - held} MiB")
    after = [*layer.parameters(), optimizer.state[weight]["exp_avg"]]
    check(layer.weight is weight and all(torch.equal(a, b) for a, b in zip(after, before)), "contents or objects differ")
    view.fill_(3.0)
    check(layer.weight[7:9].eq(3.0).all().item(), "a view is no view any more")
    check(amem.adopt(layer.parameters(), "claim4").storages == 0, "what is there is moved again")


def memory_of_a_cuda_graph_and_of_others_stays():
    static, graph = torch.ones(MIB, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = static * 2
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        others = torch.ones(MIB, device="cuda")
    done = amem.adopt([result, others, torch.ones(4)], "claim5")
    reasons = {one.reason: one.tensors for one in done.skipped}
    check(done.storages == 0 and sorted(reasons.values()) == [1, 2], str(done))
    graph.replay()
    check(result.eq(2).all().item(), "the graph does not replay")


def a_graph_captured_after_adopting_replays_after_a_resume():
    weight = torch.nn.Parameter(torch.full((MIB,), 3.0, device="cuda"))
    amem.adopt(weight, "claim6")
    out, graph = torch.zeros(MIB, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out.copy_(weight * 2)
    for _ in range(3):
        out.zero_()
        with amem.paused("claim6"):
            pass
        graph.replay()
        check(out.eq(6).all().item(), "the graph reads something else")


def a_stream_waits_for_a_resume_and_priorities_are_accepted():
    with amem.pool("claim7a"), amem.pool("claim7b"):
        pass
    tensors = {}
    for tag in ("claim7a", "claim7b"):
        with amem.pool(tag):
            tensors[tag] = numbers(512)
    wanted, side = numbers(512), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        amem.pause("claim7a", "claim7b", wait=False, stream=torch.cuda.current_stream())
        amem.resume("claim7a", wait=False)
        amem.resume("claim7b", wait=False, priority=2)
        for tag, tensor in tensors.items():
            amem.wait(tag, side)
            with torch.cuda.stream(side):
                check(torch.equal(tensor, wanted), f"{tag} was read too early")


def too_little_memory_is_pytorchs_error_and_loses_nothing():
    with amem.pool("claim8"):
        kept = numbers(16)
        try:
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
            raise AssertionError("4 TiB were found")
        except torch.cuda.OutOfMemoryError:
            pass
        more = numbers(16)
    check(torch.equal(kept, more), "contents differ")


def discarded_memory_comes_back_and_torch_memory_savers_calls_work():
    saver = amem.wrap()
    with saver.region("claim9", enable_cpu_backup=False):
        cache = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    with saver.region("claim9w", enable_cpu_backup=True):
        weights = numbers(64)
    saver.pause()  # the first one of a tag makes its stream, which takes memory of the driver's
    saver.resume()
    before = free_mib()
    saver.pause()
    check(free_mib() - before >= 319, f"a pause freed {free_mib() - before} MiB")
    saver.resume()
    cache.fill_(5)
    check(cache.eq(5).all().item() and torch.equal(weights, numbers(64)), "contents differ")


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def the_account_of_a_pause_is_the_drivers():
    with amem.pool("claim10"):
        weights = numbers(256)
    others, graph = numbers(128), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = others * 2
    before = used()
    with amem.paused("claim10") as freed:
        check(abs(freed.used - before) <= CLOSE, f"used is {freed.used}, the driver's {before}")
        check(abs(freed.used - freed.bytes - sum(freed.left.values())) <= CLOSE, f"taken and left are not what was used: {freed!r}")
        check(abs(sum(freed.left.values()) - used()) <= CLOSE, f"left is {freed.left}, used {used()}")
        account = amem.account(others=others, weights=weights)
        (gpu,) = account.gpus
        check(abs(gpu.used - used()) <= CLOSE and gpu.used == sum(gpu.left.values()), f"{account}")
        check(gpu.taken["claim10"] >= 256 * MIB and gpu.left["PyTorch's tensors"] >= 128 * MIB, f"{account}")
        check(gpu.left["PyTorch's private pools (CUDA graphs)"] >= 128 * MIB, f"{account}")
        check([one.path for one in account.held] == ["others"], f"{account.held}")
    check(torch.equal(weights, numbers(256)) and result is not None, "contents differ")


class Quantized(torch.Tensor):
    """A wrapper without PyTorch's protocol, as Transformer Engine's were until 2026."""

    @staticmethod
    def __new__(cls, data, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)
        made._data, made._scale_inv = data, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments_=(), named=None):
        if function is torch.ops.aten.detach.default:
            return Quantized(arguments_[0]._data, arguments_[0]._scale_inv)
        plain = lambda one: one._data.to(torch.bfloat16) * one._scale_inv if isinstance(one, Quantized) else one  # noqa: E731
        return function(*torch.utils._pytree.tree_map(plain, arguments_), **torch.utils._pytree.tree_map(plain, named or {}))


def parameters_that_wrap_others_caches_and_shards_go_whole():
    model = torch.nn.Module()
    data = torch.randint(0, 100, (8192, 8192), dtype=torch.uint8, device="cuda")
    model.weight = torch.nn.Parameter(Quantized(data, torch.ones(1, device="cuda", dtype=torch.bfloat16)), requires_grad=False)
    model.plain = torch.nn.Linear(4096, 4096, device="cuda")
    model._fp8_workspaces = {"weight": numbers(64)}
    model.plain.weight.ds_tensor = numbers(32)
    optimizer = torch.optim.AdamW(model.plain.parameters())
    model.plain(torch.randn(4, 4096, device="cuda")).sum().backward()
    optimizer.step()
    kept, before = data.clone(), used()
    offload = amem.rl.RolloutOffload(model, optimizer, nccl=False, name="claim11")
    with offload.rollout():
        check(len(offload.account().held) == 0, "an account inside of a rollout")
        freed = before - used()
        check(freed >= (64 + 4 * 64 + 64 + 32) * MIB - CLOSE, f"{freed / MIB:.0f} MiB were freed")
        check(abs(offload.freed.used - offload.freed.bytes - sum(offload.freed.left.values())) <= CLOSE, f"{offload.freed!r}")
    check(torch.equal(model.weight._data, kept) and torch.equal(model._fp8_workspaces["weight"], numbers(64)), "contents differ")
    check(offload.left == [], f"{offload.left} stayed")
    offload.close()


def a_graph_that_was_captured_into_a_tag_replays_after_its_pause():
    static, graph = torch.full((64 * MIB,), 2.0, device="cuda"), torch.cuda.CUDAGraph()
    (static * 3).sum()
    torch.cuda.synchronize()
    with _pools.capturing("claim12") as pool:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = (static * 3).sqrt()
    check(row("claim12")["part_bytes"] >= 256 * MIB, f"the capture did not take from the pool: {row('claim12')}")
    for _ in range(3):
        before = free_mib()
        with amem.paused("claim12"):
            check(free_mib() - before >= 250, f"a pause freed {free_mib() - before} MiB")
            torch.full((32 * MIB,), float("nan"), device="cuda")
        graph.replay()
        check(torch.equal(result, torch.full_like(result, 6.0 ** 0.5)), "the graph gives something else")


# Wrapped parameters first: once a graph has been captured, what modules hold beside their parameters stays where it is.
CLAIMS = (parameters_that_wrap_others_caches_and_shards_go_whole, a_pool_is_allocated_from_paused_and_resumed, the_innermost_of_nested_pools_is_allocated_from, another_thread_is_outside_of_the_pool,
          adopted_tensors_keep_objects_views_and_contents, memory_of_a_cuda_graph_and_of_others_stays,
          a_graph_captured_after_adopting_replays_after_a_resume, a_stream_waits_for_a_resume_and_priorities_are_accepted,
          too_little_memory_is_pytorchs_error_and_loses_nothing, discarded_memory_comes_back_and_torch_memory_savers_calls_work,
          the_account_of_a_pause_is_the_drivers, a_graph_that_was_captured_into_a_tag_replays_after_its_pause)


def job(options, rank, size, report):
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    torch.ones(1, device="cuda")
    report["gpu"], report["torch"] = torch.cuda.get_device_name(), torch.__version__
    report["claims"] = {}
    for claim in CLAIMS:
        try:
            claim()
            report["claims"][claim.__name__] = None
        except Exception as error:  # the others are of interest, too
            report["claims"][claim.__name__] = f"{type(error).__name__}: {error}"
            print(f"rank {rank}: {claim.__name__}: {error}", file=sys.stderr, flush=True)
    wrong = [name for name, reason in report["claims"].items() if reason]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(CLAIMS)} claims do not hold: {', '.join(wrong)}")


if __name__ == "__main__":
    sys.exit(rank_main.run("tensors_job", job, arguments))
