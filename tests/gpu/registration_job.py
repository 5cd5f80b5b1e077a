#!/usr/bin/env python3
"""Collectives on memory that NCCL knows in advance, as frameworks register it: PyTorch's MemPool with NCCL's allocator registered
with and without symmetric windows, ncclCommRegister on a whole buffer and on a part of it, and a CUDA graph whose buffers NCCL
registers by itself (NCCL_GRAPH_REGISTER=1).

    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 registration_job.py --cycles 20 [--stock]

With --stock nothing is paused: times and kernels to compare with. Otherwise AMem must be preloaded. The data are whole numbers, so
every result is known exactly, outputs are poisoned before each call, and each collective is checked before and after each cycle. At
the end a MemPool and a communicator are dropped while NCCL is paused.
Rank 0 prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import datetime
import gc
import json
import os
import statistics
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402
from torch_job import MIB, Meeting, Nccl  # noqa: E402

KINDS = ("plain", "pool", "window", "registered", "part", "graph")
SIZES = (16384, 1 << 20, 1 << 24)  # float32 elements
NCCL_ALLOCATOR_KINDS = ("pool", "window", "graph")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=20, help="pauses and resumes for each kind of memory (default 20)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--stock", action="store_true", help="without AMem: no pauses")
    parser.add_argument("--time-limit", type=int, default=150, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


def input_of(rank, count, round_):
    return (torch.arange(count, device="cuda", dtype=torch.float32) % 509 + rank * 3 + round_) % 1021


class Registration:
    """ncclCommRegister through ctypes, on the communicator of a process group."""

    def __init__(self, group, address, size):
        self.library = ctypes.CDLL("libnccl.so.2")
        self.comm = ctypes.c_void_p(group._get_backend(torch.device("cuda"))._comm_ptr())
        self.handle = ctypes.c_void_p()
        result = self.library.ncclCommRegister(self.comm, ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.byref(self.handle))
        if result != 0:
            raise RuntimeError(f"ncclCommRegister returned {result}")

    def remove(self):
        result = self.library.ncclCommDeregister(self.comm, self.handle)
        if result != 0:
            raise RuntimeError(f"ncclCommDeregister returned {result}")


class Buffers:
    """One kind of memory with a communicator of its own, its collectives and what they must give."""

    def __init__(self, kind, rank, size):
        self.kind, self.rank, self.size = kind, rank, size
        self.group = dist.new_group(list(range(size)))
        backend = self.group._get_backend(torch.device("cuda"))
        dist.all_reduce(torch.ones(1, device="cuda"), group=self.group)  # makes the communicator
        torch.cuda.synchronize()
        self.pool, self.registrations, self.graph = None, [], None
        if kind in NCCL_ALLOCATOR_KINDS:
            self.pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(self.pool):
                self.make_tensors()
            if kind == "window":
                backend.register_mem_pool(self.pool, symm=True)
            elif kind == "pool":
                backend.register_mem_pool(self.pool)
        else:
            self.make_tensors()
        if kind in ("registered", "part"):
            offset = (1 << 20) if kind == "part" else 0
            for tensor in (self.input, self.output, self.gathered):
                length = tensor.numel() * 4 - 2 * offset
                self.registrations.append(Registration(self.group, tensor.data_ptr() + offset, length))
        if kind == "graph":
            self.capture()

    def make_tensors(self):
        most = max(SIZES)
        self.input = torch.empty(most, device="cuda")
        self.output = torch.empty(most, device="cuda")
        self.gathered = torch.empty(most * self.size, device="cuda")

    def all_reduce(self, count):
        dist.all_reduce(self.output[:count], group=self.group)

    def all_gather(self, count):
        dist.all_gather_into_tensor(self.gathered[: count * self.size], self.input[:count], group=self.group)

    def capture(self):
        count = SIZES[1]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.all_reduce(count)
                self.all_gather(count)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.all_reduce(count)
            self.all_gather(count)
        torch.cuda.synchronize()

    def check(self, round_):
        """What is wrong, in words."""
        wrong = []
        for count in (SIZES[1],) if self.graph else SIZES:
            own = input_of(self.rank, count, round_)
            self.input[:count].copy_(own)
            self.output[:count].copy_(own)
            self.gathered[: count * self.size].fill_(-7)
            if self.graph:
                self.graph.replay()
            else:
                self.all_reduce(count)
                self.all_gather(count)
            torch.cuda.synchronize()
            everyone = [input_of(rank, count, round_) for rank in range(self.size)]
            if not torch.equal(self.output[:count], sum(everyone)):
                wrong.append(f"{self.kind}: all-reduce of {count}")
            if not torch.equal(self.gathered[: count * self.size], torch.cat(everyone)):
                wrong.append(f"{self.kind}: all-gather of {count}")
        return wrong

    def time_us(self, runs=40):
        """The time of each collective, by events on the stream: the best of some groups of five, because a host that is busy
        with something else only ever makes them longer."""
        times = {}
        calls = {"graph": (self.graph.replay, SIZES[1])} if self.graph else {
            f"{name} {count}": ((lambda f=function, c=count: f(c)), count)
            for name, function in (("all_reduce", self.all_reduce), ("all_gather", self.all_gather)) for count in SIZES}
        for name, (call, _) in calls.items():
            for _ in range(5):
                call()
            measured = []
            for _ in range(runs):
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                first.record()
                for _ in range(5):
                    call()
                last.record()
                last.synchronize()
                measured.append(200 * first.elapsed_time(last))
            times[name] = round(min(measured), 2)
        return times

    def kernels(self):
        """Names of the kernels that NCCL launches for these collectives."""
        if self.graph:
            return []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for count in SIZES:
                self.all_reduce(count)
                self.all_gather(count)
            torch.cuda.synchronize()
        return sorted({event.key.split("(")[0] for event in profile.key_averages() if "nccl" in event.key.lower() and "Kernel" in event.key})

    def remove(self):
        for registration in self.registrations:
            registration.remove()
        backend = self.group._get_backend(torch.device("cuda"))
        if self.kind in ("pool", "window"):
            backend.deregister_mem_pool(self.pool)
        self.graph = None
        self.input = self.output = self.gathered = None
        self.pool = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.destroy_process_group(self.group)


def drop_while_paused(nccl, meeting):
    """A MemPool with NCCL's allocator goes while NCCL is paused, and a communicator as well; what is left works on."""
    group = dist.new_group(list(range(meeting.size)))
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    pool = torch.cuda.MemPool(group._get_backend(torch.device("cuda")).mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    meeting.gather("idle")
    nccl.pause()
    before = torch.cuda.mem_get_info()[0]
    del tensor, pool
    gc.collect()
    torch.cuda.empty_cache()
    freed = (torch.cuda.mem_get_info()[0] - before) / MIB
    dist.destroy_process_group(group)
    meeting.gather("dropped")
    nccl.resume()
    meeting.gather("resumed")
    ones = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(ones)
    torch.cuda.synchronize()
    if int(ones.sum()) != meeting.size << 20:
        raise RuntimeError("an all-reduce is wrong after a MemPool was dropped while paused")
    return round(freed, 1)


def job(options, rank, size, report):
    torch.cuda.set_device(rank_main.device(rank))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size)
    nccl = None if options.stock else Nccl()
    report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    report["gpu"] = torch.cuda.get_device_name()
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    report["kinds"] = {}
    for kind in options.kinds.split(","):
        row = report["kinds"][kind] = {}
        free = torch.cuda.mem_get_info()[0]
        buffers = Buffers(kind, rank, size)
        problems = buffers.check(0)
        row["us"] = buffers.time_us()
        row["kernels"] = buffers.kernels()
        pauses, resumes, freed = [], [], []
        for cycle in range(1, (0 if options.stock else options.cycles) + 1):
            torch.cuda.synchronize()
            meeting.gather("idle")
            before = torch.cuda.mem_get_info()[0]
            pauses.append(nccl.pause())
            freed.append((torch.cuda.mem_get_info()[0] - before) / MIB)
            buffers.input.fill_(cycle)  # the program's memory stays the program's while NCCL is paused
            if int(buffers.input[-1]) != cycle:
                problems.append(f"{kind}: the program's tensor lost what was written to it in pause {cycle}")
            torch.cuda.synchronize()
            meeting.gather("paused")
            resumes.append(nccl.resume())
            meeting.gather("resumed")
            problems += buffers.check(cycle)
            if problems:
                break
        if pauses:
            row.update(pause_ms=round(statistics.median(pauses), 2), resume_ms=round(statistics.median(resumes), 2),
                       freed_mib=round(statistics.median(freed), 1), us_after=buffers.time_us())
        everyone = meeting.gather({"problems": problems, "us": row["us"], "us_after": row.get("us_after", {})})
        for key in ("us", "us_after"):
            row[key] = {name: max(item[key][name] for item in everyone) for name in row.get(key, {})}
        buffers.remove()
        del buffers
        gc.collect()  # a process group and its work refer to each other
        torch.cuda.empty_cache()
        row["left_mib"] = round((free - torch.cuda.mem_get_info()[0]) / MIB, 1)
        if any(item["problems"] for item in everyone):
            raise RuntimeError(json.dumps([item["problems"][:4] for item in everyone]))
        print(f"rank {rank}: {kind}: {row}", file=sys.stderr, flush=True) if rank == 0 else None
    if not options.stock:
        report["freed_by_dropping_while_paused_mib"] = drop_while_paused(nccl, meeting)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(rank_main.run("registration_job", job, arguments, ("cycles", "stock")))
