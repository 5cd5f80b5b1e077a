#!/usr/bin/env python3
"""A PyTorch job as users write them: torchrun, process groups, collectives. Nothing in it knows AMem but the two calls.

Start it with nothing but LD_PRELOAD of libamem_nccl.so:

    LD_PRELOAD=DIR/libamem_nccl.so NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 4 torch_job.py --cycles 20

ncclPause and ncclResume are found through ctypes, as a PyNccl wrapper finds them. The data are whole numbers, so every result is
known exactly; it is checked before the first cycle and after each, in outputs that were poisoned. A CUDA graph that was captured before the first pause must replay after each resume.
Rank 0 prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import datetime
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402

MIB = 1 << 20


class Nccl:
    """What vLLM's and SGLang's PyNccl wrappers do: the library by its soname, functions with their types."""

    def __init__(self):
        self.where = None
        for name in ("libnccl.so.2", None):  # None: whatever the process has loaded, for a preloaded libamem_nccl.so
            try:
                library = ctypes.CDLL(name)
                self.pause_function, self.resume_function = library.ncclPause, library.ncclResume
            except (OSError, AttributeError):
                continue
            self.where = name or "process"
            break
        if self.where is None:
            raise RuntimeError("no ncclPause in libnccl.so.2 nor in the process: was the patched library preloaded?")
        for function in (self.pause_function, self.resume_function):
            function.restype = ctypes.c_int
            function.argtypes = [ctypes.c_void_p]
        self.error_function = getattr(library, "amem_last_error", None)
        if self.error_function is not None:
            self.error_function.restype = ctypes.c_char_p

    def call(self, function, what):
        start = time.monotonic()
        result = function(None)
        if result != 0:
            reason = self.error_function().decode() if self.error_function is not None else "no reason given"
            raise RuntimeError(f"{what} returned {result}: {reason}")
        return 1e3 * (time.monotonic() - start)

    def pause(self):
        return self.call(self.pause_function, "ncclPause")

    def resume(self):
        return self.call(self.resume_function, "ncclResume")


class Meeting:
    """Barriers and exchanges between the ranks without NCCL, which may be paused: through the job's own store."""

    def __init__(self, store, rank, size):
        self.store, self.rank, self.size, self.count = store, rank, size, 0

    def gather(self, value):
        self.count += 1
        self.store.set(f"meeting/{self.count}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"meeting/{self.count}/{rank}")) for rank in range(self.size)]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=20, help="pauses and resumes (default 20)")
    parser.add_argument("--elements", default="256,65536,1048576,33554432", help="message sizes in float32")
    parser.add_argument("--time-limit", type=int, default=240, help="seconds; the process ends itself then")
    parser.add_argument("--no-graph", action="store_true", help="leave the CUDA graph out")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: gloo, no GPU; to try this script out")
    return parser.parse_args()


POISON = -7.0  # no input and no sum of inputs has this value


def result_of(op, group, members, source):
    """One collective; the tensor it made. `source` is this rank's data, its length divides by the size of the group."""
    size = len(members)
    if op == "all_reduce":
        out = source.clone()
        dist.all_reduce(out, group=group)
    elif op == "all_gather":
        part = source[: source.numel() // size]
        out = torch.full((part.numel() * size,), POISON, device=source.device)
        dist.all_gather_into_tensor(out, part.contiguous(), group=group)
    elif op == "reduce_scatter":
        out = torch.full((source.numel() // size,), POISON, device=source.device)
        dist.reduce_scatter_tensor(out, source, group=group)
    elif op == "broadcast":
        out = source.clone()
        dist.broadcast(out, src=members[0], group=group)
    elif op == "all_to_all":
        out = torch.full_like(source, POISON)
        dist.all_to_all_single(out, source, group=group)
    elif op == "ring":
        me = members.index(dist.get_rank())
        out = torch.full_like(source, POISON)
        if size == 1:
            return source.clone()
        work = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, source, members[(me + 1) % size], group=group),
            dist.P2POp(dist.irecv, out, members[(me - 1) % size], group=group),
        ])
        for request in work:
            request.wait()
    else:
        raise ValueError(op)
    return out


OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "ring")


def expected_of(op, members, sources):
    """What that collective must give this rank; `sources` are the data of all members, in their order."""
    size, me = len(members), members.index(dist.get_rank())
    part = sources[0].numel() // size
    if op == "all_reduce":
        return sum(sources)
    if op == "all_gather":
        return torch.cat([source[:part] for source in sources])
    if op == "reduce_scatter":
        return sum(source[me * part : (me + 1) * part] for source in sources)
    if op == "broadcast":
        return sources[0].clone()
    if op == "all_to_all":
        return torch.cat([source[me * part : (me + 1) * part] for source in sources])
    if op == "ring":
        return sources[(me - 1) % size].clone()
    raise ValueError(op)


def make_groups(rank, size):
    """The world three times, and pairs; every rank makes every group, as torch wants it."""
    world = list(range(size))
    groups = [("world", dist.group.WORLD, world)]
    for i in (1, 2):
        groups.append((f"world{i}", dist.new_group(world), world))
    half = size // 2
    for name, pairs in (("neighbours", [[2 * i, 2 * i + 1] for i in range(half)]),
                        ("halves", [[i, i + half] for i in range(half)])):
        for members in pairs:
            group = dist.new_group(members)
            if rank in members:
                groups.append((name, group, members))
    return groups


def run_all(groups, sources):
    """Every op on every group at every size, against what it must give; what is wrong, in words. `sources`: all ranks' data."""
    different = []
    for name, group, members in groups:
        for op in OPS:
            for count in sources:
                data = [sources[count][rank][: count // len(members) * len(members)] for rank in members]
                out = result_of(op, group, members, data[members.index(dist.get_rank())])
                if not torch.equal(out, expected_of(op, members, data)):
                    different.append(f"{op} of {count} on {name}")
    return different


class Graph:
    """An all-reduce and an all-gather in one CUDA graph, captured once."""

    def __init__(self, count, rank, size):
        self.input = torch.zeros(count, device="cuda")
        self.reduced = torch.zeros_like(self.input)
        self.gathered = torch.zeros(count * size, device="cuda")
        self.rank, self.size = rank, size
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.work()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.work()
        torch.cuda.synchronize()

    def work(self):
        self.reduced.copy_(self.input)
        dist.all_reduce(self.reduced)
        dist.all_gather_into_tensor(self.gathered, self.input)

    def replay(self, seed):
        """New input, poisoned output; the results must be what the input says, so a stale or half replay cannot pass."""
        index = torch.arange(self.input.numel(), device="cuda", dtype=torch.float32) % 1024
        self.input.copy_(index + (self.rank + 1) * seed)
        self.reduced.fill_(-1)
        self.gathered.fill_(-1)
        self.graph.replay()
        torch.cuda.synchronize()
        ranks = torch.arange(1, self.size + 1, device="cuda", dtype=torch.float32)
        expected = index * self.size + ranks.sum() * seed  # whole numbers below 2^24: exact in any order
        if not torch.equal(self.reduced, expected):
            return f"graph replay {seed}: the all-reduce is wrong in {int((self.reduced != expected).sum())} of {expected.numel()} elements"
        expected = (index[None, :] + ranks[:, None] * seed).reshape(-1)
        if not torch.equal(self.gathered, expected):
            return f"graph replay {seed}: the all-gather is wrong in {int((self.gathered != expected).sum())} of {expected.numel()} elements"
        return None


def free_bytes(device):
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def job(options, rank, size, report):
    cpu = options.device == "cpu"
    if not cpu:
        torch.cuda.set_device(rank_main.device(rank))
    dist.init_process_group("gloo" if cpu else "nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size)
    nccl = None if cpu else Nccl()
    report["found_through"] = None if cpu else nccl.where
    report["torch"] = torch.__version__
    report["nccl"] = None if cpu else ".".join(map(str, torch.cuda.nccl.version()))
    report["gpu"] = None if cpu else torch.cuda.get_device_name()

    counts = [int(item) for item in options.elements.split(",")]
    longest = []  # of each rank: whole numbers, so that sums are exact in any order, and every rank knows every result
    for one in range(size):
        generator = torch.Generator().manual_seed(1234 + one)
        longest.append(torch.randint(1, 1 << 12, (max(counts),), generator=generator).to(torch.float32).to("cpu" if cpu else "cuda"))
    sources = {count: [data[:count] for data in longest] for count in counts}
    synchronize(options.device)
    before = free_bytes(options.device)
    start = time.monotonic()
    groups = make_groups(rank, size)
    different = run_all(groups, sources)
    synchronize(options.device)
    report["first_results_ms"] = round(1e3 * (time.monotonic() - start), 1)
    report["results_per_cycle"] = len(groups) * len(OPS) * len(counts)
    if different:
        raise RuntimeError(f"results are wrong even without a pause: {different[:3]}")
    graph = None
    if not cpu and not options.no_graph:
        graph = Graph(262144, rank, size)
        wrong = graph.replay(3)
        if wrong:
            raise RuntimeError("before any pause: " + wrong)
    report["nccl_and_torch_hold_mib"] = round((before - free_bytes(options.device)) / MIB, 1)

    cycles = []
    for cycle in range(1, options.cycles + 1):
        if not cpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        meeting.gather("idle")
        running = free_bytes(options.device)
        meeting.gather("memory read")
        pause_ms = 0.0 if cpu else nccl.pause()
        meeting.gather("paused")
        paused = free_bytes(options.device)
        meeting.gather("memory read while paused")
        resume_ms = 0.0 if cpu else nccl.resume()
        meeting.gather("resumed")
        resumed = free_bytes(options.device)
        problems = []
        if graph is not None:
            wrong = graph.replay(cycle)
            if wrong:
                problems.append(wrong)
        problems += run_all(groups, sources)
        if not cpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        after = free_bytes(options.device)
        if cycle == 1:
            after_first = after
        elif after_first - after > 32 * MIB:  # PyTorch's own few blocks may vary
            problems.append(f"{(after_first - after) / MIB:.1f} MiB more are held after cycle {cycle} than after cycle 1")
        cycles.append({"pause_ms": pause_ms, "resume_ms": resume_ms, "freed_mib": (paused - running) / MIB,
                       "held_again_mib": (paused - resumed) / MIB, "free_after_mib": after / MIB})
        everybody = meeting.gather({"cycle": cycles[-1], "problems": problems[:5]})
        if any(item["problems"] for item in everybody):
            raise RuntimeError(f"cycle {cycle}: " + json.dumps([item["problems"] for item in everybody]))
        if not cpu and size > 1 and min(item["cycle"]["freed_mib"] for item in everybody) <= 0:
            raise RuntimeError(f"cycle {cycle}: nothing was freed on some rank: {[item['cycle']['freed_mib'] for item in everybody]}")
        cycles[-1] = {key: (min if key.startswith("free") else max)(item["cycle"][key] for item in everybody) for key in cycles[-1]}
    report["first"] = cycles[0] if cycles else {}
    report["last"] = cycles[-1] if cycles else {}
    later = cycles[1:] or cycles
    report["median"] = {key: round(statistics.median(item[key] for item in later), 2) for key in later[0]} if later else {}
    report["graph_replays"] = 0 if graph is None else len(cycles)
    del graph  # a live graph would keep the process group from going down
    if not cpu:
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(rank_main.run("torch_job", job, arguments, ("cycles",)))
