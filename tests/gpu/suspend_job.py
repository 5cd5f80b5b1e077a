#!/usr/bin/env python3
"""Communicators of an engine's own, made and suspended through ctypes as inference engines do: no word of AMem in what they call.

    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so torchrun --standalone --nproc-per-node 2 suspend_job.py --nccl PATH/libnccl.so.2
    NCCL_NVLS_ENABLE=0 AMEM_ENABLE=0 torchrun --standalone --nproc-per-node 2 suspend_job.py --nccl PATH/libnccl.so.2

Two communicators on the NCCL at that path, whatever its version. In each cycle both are suspended and resumed one after the other; results must
be bit-identical, ncclCommMemStats must say what was done, the memory must be free meanwhile (--frees: as AMem serves it also with
NCCL_CUMEM_ENABLE=0), and a suspended communicator must refuse to be used. In the end one is destroyed while it is suspended, and another is made.
Rank 0 prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import datetime
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402
from two_nccls_job import FLOAT32, MIB, SUM, UNIQUE_ID_BYTES, UniqueId  # noqa: E402

SUSPEND_MEM = 1
INVALID_ARGUMENT, INVALID_USAGE = 4, 5
SUSPENDABLE, SUSPENDED, PERSISTENT, TOTAL = range(4)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nccl", required=True, help="the libnccl.so.2 that the engine opens")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--frees", type=float, default=0.9, help="this share of what the communicators can suspend must be free meanwhile")
    parser.add_argument("--one-stays", action="store_true", help="once, the last rank does not suspend: the others' call fails at AMem's "
                                                                  "deadline (AMEM_TIMEOUT_MS), all run on, and another suspend works")
    parser.add_argument("--groups", action="store_true", help="a group of all suspends behind a collective, and of all resumes before one, as "
                                                              "NCCL launches them from 2.30.3 on")
    parser.add_argument("--time-limit", type=int, default=90, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


class Engine:
    """What an engine's wrapper of NCCL does, and no more."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        version = ctypes.c_int()
        self.check("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def code(self, name, *arguments_):
        return getattr(self.library, name)(*arguments_)

    def check(self, name, *arguments_):
        if (result := self.code(name, *arguments_)) != 0:
            raise RuntimeError(f"{name} returned {result}")

    def init(self, rank, size, store, name):
        unique = UniqueId()
        if rank == 0:
            self.check("ncclGetUniqueId", ctypes.byref(unique))
            store.set("id/" + name, bytes(unique.internal))
        ctypes.memmove(unique.internal, store.get("id/" + name), UNIQUE_ID_BYTES)
        comm = ctypes.c_void_p()
        self.check("ncclCommInitRank", ctypes.byref(comm), size, unique, rank)
        return comm

    def all_reduce(self, comm, tensor, stream):
        return self.code("ncclAllReduce", ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(tensor.data_ptr()),
                         ctypes.c_size_t(tensor.numel()), FLOAT32, SUM, comm, ctypes.c_void_p(stream.cuda_stream))

    def figure(self, comm, which):
        value = ctypes.c_uint64()
        self.check("ncclCommMemStats", comm, which, ctypes.byref(value))
        return value.value


def one_stays(engine, comms, meeting, stays):
    """The last rank does not suspend: the call that would have paused fails there, its communicator is as before, and so it can be done again."""
    problems = []
    if not stays:
        engine.check("ncclCommSuspend", comms[0], SUSPEND_MEM)
        if engine.code("ncclCommSuspend", comms[1], SUSPEND_MEM) == 0:
            problems.append("a suspend succeeded though one rank did not come")
        suspended = [engine.figure(comm, SUSPENDED) for comm in comms]
        if suspended != [1, 0]:
            problems.append(f"suspended after the failed call: {suspended}")
    meeting.gather("one stayed")
    if stays:
        engine.check("ncclCommSuspend", comms[0], SUSPEND_MEM)
    engine.check("ncclCommSuspend", comms[1], SUSPEND_MEM)
    meeting.gather("all suspended")
    for comm in comms:
        engine.check("ncclCommResume", comm)
    return problems


def in_groups(engine, comms, meeting, tensor, fill, stream):
    """Suspends in the group of an all-reduce, and resumes in that of the next: neither loses one. The sums of both."""
    import torch
    found = []
    for suspends in (True, False):
        fill(tensor)
        torch.cuda.synchronize()
        meeting.gather(f"group {suspends}")
        engine.check("ncclGroupStart")
        codes = [] if suspends else [engine.code("ncclCommResume", comm) for comm in comms]
        codes.append(engine.all_reduce(comms[0], tensor, stream))
        codes += [engine.code("ncclCommSuspend", comm, SUSPEND_MEM) for comm in comms] if suspends else []
        codes.append(engine.code("ncclGroupEnd"))
        if any(codes):
            raise RuntimeError(f"a group with {'suspends' if suspends else 'resumes'} returned {codes}")
        torch.cuda.synchronize()
        found.append(tensor.double().sum().item())
    return found


def job(options, rank, size, report):
    import torch
    import torch.distributed as dist
    from torch_job import Meeting
    torch.cuda.set_device(rank_main.device(rank))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.time_limit))
    store = dist.distributed_c10d._get_default_store()
    meeting = Meeting(store, rank, size)
    tensors = [torch.empty(count, device="cuda", dtype=torch.float32) for count in (1024, 1 << 24)]
    stream = torch.cuda.current_stream()
    free_before = torch.cuda.mem_get_info()[0]
    engine = Engine(options.nccl)
    comms = [engine.init(rank, size, store, str(number)) for number in range(2)]
    report["version"] = engine.version
    problems = []

    def fill(tensor):
        tensor.copy_((torch.arange(tensor.numel(), device="cuda") % 1013).float() * (rank + 1) * 1.1e-3)

    def results(comm):
        found = []
        for tensor in tensors:
            fill(tensor)
            if (code := engine.all_reduce(comm, tensor, stream)) != 0:
                raise RuntimeError(f"ncclAllReduce returned {code}")
            torch.cuda.synchronize()
            found.append(tensor.double().sum().item())
        return found

    expected = [results(comm) for comm in comms]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    meeting.gather("started")
    running = torch.cuda.mem_get_info()[0]
    held = free_before - running
    figures = [[engine.figure(comm, which) for which in range(4)] for comm in comms]
    for row in figures:
        if row[SUSPENDED] != 0 or row[TOTAL] != row[SUSPENDABLE] + row[PERSISTENT]:
            problems.append(f"ncclCommMemStats before a suspend: {row}")
    suspends, resumes, freed = [], [], []
    for cycle in range(1, options.cycles + 1):
        torch.cuda.empty_cache()  # of what checking the results took
        meeting.gather("idle")
        began = time.monotonic()
        for comm in comms:
            engine.check("ncclCommSuspend", comm, SUSPEND_MEM)
        suspends.append(1e3 * (time.monotonic() - began))
        meeting.gather("suspended")
        freed.append((torch.cuda.mem_get_info()[0] - running) / MIB)
        if cycle == 1:
            problems += [f"figure {which} of a suspended communicator is {engine.figure(comms[0], which)}"
                         for which, value in ((SUSPENDED, 1), (TOTAL, figures[0][TOTAL])) if engine.figure(comms[0], which) != value]
            for what, code, wanted in (("a collective", engine.all_reduce(comms[0], tensors[0], stream), INVALID_USAGE),
                                       ("a second suspend", engine.code("ncclCommSuspend", comms[0], SUSPEND_MEM), INVALID_USAGE),
                                       ("a suspend of null", engine.code("ncclCommSuspend", None, SUSPEND_MEM), INVALID_ARGUMENT)):
                if code != wanted:
                    problems.append(f"{what} returned {code} while suspended, not {wanted}")
        meeting.gather("memory read")
        began = time.monotonic()
        for comm in comms:
            engine.check("ncclCommResume", comm)
        resumes.append(1e3 * (time.monotonic() - began))
        again = [results(comm) for comm in comms]
        if again != expected:
            problems.append(f"cycle {cycle}: {again} in place of {expected}")
    report.update(held_mib=round(held / MIB, 1), freed_mib=round(min(freed), 1), suspend_ms=round(statistics.median(suspends[1:] or suspends), 2),
                  first_suspend_ms=round(suspends[0], 2), resume_ms=round(statistics.median(resumes[1:] or resumes), 2), figures=figures)
    # What was held has the program's kernels in it, too, which stay.
    if min(freed) < options.frees * sum(row[SUSPENDABLE] for row in figures) / MIB:
        problems.append(f"{min(freed):.0f} MiB are free while suspended, of {sum(row[SUSPENDABLE] for row in figures) / MIB:.0f}")
    meeting.gather("cycles done")
    for _ in range(3 if options.groups else 0):
        grouped = in_groups(engine, comms, meeting, tensors[1], fill, stream)
        if grouped != [expected[0][1]] * 2:
            problems.append(f"in groups: {grouped} in place of {expected[0][1]}")
    if options.one_stays:
        problems += one_stays(engine, comms, meeting, rank == size - 1)
        if [results(comm) for comm in comms] != expected:
            problems.append("other results after one rank did not suspend")
    for comm in comms:
        engine.check("ncclCommSuspend", comm, SUSPEND_MEM)
    engine.check("ncclCommDestroy", comms.pop())
    comms.append(engine.init(rank, size, store, "another"))
    if results(comms[-1]) != expected[0]:
        problems.append("a communicator that was made after one was destroyed while suspended gives other results")
    engine.check("ncclCommResume", comms[0])
    if results(comms[0]) != expected[0]:
        problems.append("the communicator that stayed suspended gives other results")
    everyone = meeting.gather(problems)
    if any(everyone):
        raise RuntimeError(str(everyone))
    for comm in comms:
        engine.check("ncclCommDestroy", comm)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(rank_main.run("suspend_job", job, arguments, ("cycles",)))
