#!/usr/bin/env python3
"""Several ranks on one GPU, which NCCL 2.30 and later allow: pauses of NCCL's memory, of a tag, and of a tag that all ranks share.

    NCCL_NVLS_ENABLE=0 NCCL_MULTI_RANK_GPU_ENABLE=1 LD_PRELOAD=libamem_nccl.so:libnccl.so.2 \\
        torchrun --standalone --nproc-per-node 4 shared_gpu_job.py --cycles 7 --tag-gib 4

AMem and, where PyTorch brings an older one, a libnccl.so.2 from 2.30 on must be preloaded. The last part allocates under a tag, registers
that memory as a symmetric window on every rank, so that all ranks import it from each other, and pauses the tag everywhere. All-reduces
of whole numbers are checked after every cycle, tags hold a pattern.
Rank 0 prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import datetime
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402
from torch_job import MIB, Meeting, Nccl  # noqa: E402

PRESERVE, SYMMETRIC = 0, 1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=7, help="pauses and resumes in each part (default 7)")
    parser.add_argument("--groups", type=int, default=3, help="communicators beside the first (default 3)")
    parser.add_argument("--tag-gib", type=float, default=1, help="of each rank's tag (default 1)")
    parser.add_argument("--parts", default="nccl,tag,window", help="which to run (default all)")
    parser.add_argument("--time-limit", type=int, default=120, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


class Memory:
    """Memory from amem_alloc, as what PyTorch takes for an array."""

    def __init__(self, library, tag, size):
        check(library, library.amem_pool(tag, PRESERVE), "amem_pool")
        check(library, library.amem_pool_enter(tag), "amem_pool_enter")
        self.address = library.amem_alloc(size, 0, None)
        check(library, library.amem_pool_leave(), "amem_pool_leave")
        if not self.address:
            raise RuntimeError("amem_alloc: " + library.amem_last_error().decode())
        self.size = size
        self.__cuda_array_interface__ = {"shape": (size // 4,), "typestr": "<f4", "data": (self.address, False), "version": 3}


def check(library, result, what):
    if result != 0:
        raise RuntimeError("%s returned %d: %s" % (what, result, library.amem_last_error().decode()))


def amem():
    library = ctypes.CDLL(None)
    library.amem_last_error.restype = ctypes.c_char_p
    library.amem_alloc.restype = ctypes.c_void_p
    library.amem_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return library


class Tag:
    """Pauses and resumes of one tag, in milliseconds."""

    def __init__(self, library, name):
        self.library, self.names = library, (ctypes.c_char_p * 1)(name)

    def pause(self):
        start = time.monotonic()
        check(self.library, self.library.amem_pause(self.names, ctypes.c_size_t(1), 0, None), "amem_pause")
        return 1e3 * (time.monotonic() - start)

    def resume(self):
        start = time.monotonic()
        check(self.library, self.library.amem_resume(self.names, ctypes.c_size_t(1), 0, 0), "amem_resume")
        return 1e3 * (time.monotonic() - start)


def cycles(options, meeting, what, looks_right):
    """Pauses and resumes `what` on all ranks; the slowest rank's medians, without the first cycle."""
    pauses, resumes, freed = [], [], []
    for cycle in range(options.cycles + 1):
        torch.cuda.synchronize()
        meeting.gather("idle")
        before = torch.cuda.mem_get_info()[0]
        meeting.gather("measured")
        paused = what.pause()
        meeting.gather("paused")
        gone = (torch.cuda.mem_get_info()[0] - before) / MIB  # of all ranks
        meeting.gather("measured")
        resumed = what.resume()
        meeting.gather("resumed")
        wrong = looks_right()
        if any(meeting.gather(wrong)):
            raise RuntimeError("after cycle %d: %s" % (cycle, wrong or "another rank's contents are wrong"))
        if cycle > 0:
            pauses.append(paused)
            resumes.append(resumed)
            freed.append(gone)
    own = [statistics.median(pauses), statistics.median(resumes)]
    slowest = [max(values) for values in zip(*meeting.gather(own))]
    return {"pause_ms": round(slowest[0], 1), "resume_ms": round(slowest[1], 1), "freed_mib": round(statistics.median(freed))}


def job(options, rank, size, report):
    torch.cuda.set_device(rank_main.device(rank))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size)
    library, parts = amem(), options.parts.split(",")
    report["gpu"] = torch.cuda.get_device_name()
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    report["nccl"] = version.value
    groups = [dist.group.WORLD] + [dist.new_group(list(range(size))) for _ in range(options.groups)]

    def all_reduces():
        for group in groups:
            for count in (1024, 1 << 22):
                ones = torch.full((count,), float(rank + 1), device="cuda")
                dist.all_reduce(ones, group=group)
                if not bool((ones == size * (size + 1) / 2).all()):
                    return "an all-reduce of %d is wrong" % count
        torch.cuda.synchronize()
        return ""

    if all_reduces():
        raise RuntimeError("an all-reduce is wrong before anything was paused")
    if "nccl" in parts:
        report["of_nccl"] = cycles(options, meeting, Nccl(), all_reduces)

    def holds(memory, of):
        step = 1 << 24
        for first in range(0, memory.numel(), step):
            part = memory[first:first + step]
            wanted = (torch.arange(first, first + part.numel(), device="cuda", dtype=torch.int64) % 8191 + of).float()
            if not torch.equal(part, wanted):
                return "memory under a tag has lost its contents"
        return ""

    if "tag" in parts:
        own = Memory(library, b"private", int(options.tag_gib * (1 << 30)))
        tensor = torch.as_tensor(own, device="cuda")
        step = 1 << 24
        for first in range(0, tensor.numel(), step):
            part = tensor[first:first + step]
            part.copy_((torch.arange(first, first + part.numel(), device="cuda", dtype=torch.int64) % 8191 + rank).float())
        report["of_a_tag"] = cycles(options, meeting, Tag(library, b"private"), lambda: holds(tensor, rank))
    if "window" in parts:
        report["of_a_shared_tag"] = shared_tag(options, rank, size, library, meeting)
    dist.destroy_process_group()


def shared_tag(options, rank, size, library, meeting):
    """Memory under a tag as a symmetric window: every rank imports that of the others."""
    memory = Memory(library, b"shared", 64 << 20)
    tensor = torch.as_tensor(memory, device="cuda")
    tensor.fill_(float(rank + 1))
    torch.cuda.synchronize()
    nccl = ctypes.CDLL("libnccl.so.2")
    comm = ctypes.c_void_p(dist.group.WORLD._get_backend(torch.device("cuda"))._comm_ptr())
    window = ctypes.c_void_p()
    result = nccl.ncclCommWindowRegister(comm, ctypes.c_void_p(memory.address), ctypes.c_size_t(memory.size), ctypes.byref(window), SYMMETRIC)
    if any(meeting.gather(result)) or not window.value:
        return {"skipped": "ncclCommWindowRegister returned %d, window %s" % (result, window.value)}

    def looks_right():
        if not bool((tensor == float(rank + 1)).all()):
            return "memory of a shared tag has lost its contents"
        meeting.gather("looked at")
        dist.all_reduce(tensor)  # through the window, where NCCL has symmetric kernels
        right = bool((tensor == size * (size + 1) / 2).all())
        tensor.fill_(float(rank + 1))
        torch.cuda.synchronize()
        meeting.gather("used")
        return "" if right else "an all-reduce in a shared tag is wrong"

    wrong = looks_right()
    if any(meeting.gather(wrong)):
        raise RuntimeError("before the first cycle: %s" % wrong)
    told = cycles(options, meeting, Tag(library, b"shared"), looks_right)
    result = nccl.ncclCommWindowDeregister(comm, window)
    if result != 0:
        raise RuntimeError("ncclCommWindowDeregister returned %d" % result)
    return told


if __name__ == "__main__":
    sys.exit(rank_main.run("shared_gpu_job", job, arguments, ("cycles", "groups", "tag_gib")))
