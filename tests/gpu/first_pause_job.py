#!/usr/bin/env python3
"""The first pause of a job, right after its start-up, and what it does on devices that are other ranks'.

    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so AMEM_USER_MEMORY=release torchrun --standalone --nproc-per-node 2 first_pause_job.py

Each rank fills --mib of ncclMemAlloc memory with what is not zero and pauses at once. The pause must take at most --at-most-ms, the memory must come
back bit-identical, and no rank may have opened a context on a device that is not its own: the memory used on every device of the host is
read before, while paused, and after, and for devices that no rank has it must not change. Rank 0 prints one JSON line, last.
Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import datetime
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402

MIB = 1 << 20
CONTEXT_MIB = 100  # a context takes hundreds


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="memory that is not zero, for each rank")
    parser.add_argument("--at-most-ms", type=float, default=100.0)
    parser.add_argument("--time-limit", type=int, default=60, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


def used_mib():
    """Of every device of the host, as its management library says."""
    done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True,
                          env={**os.environ, "LD_PRELOAD": ""})
    return [int(line) for line in done.stdout.split()]


def contexts():
    """How many processes have a context on each device; empty where that cannot be told."""
    done = subprocess.run(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"], capture_output=True, text=True, check=False,
                          env={**os.environ, "LD_PRELOAD": ""})
    counts = {}
    for line in done.stdout.splitlines():
        device = line.split(",")[0].strip()
        counts[device] = counts.get(device, 0) + 1
    return counts


class Memory:
    """Device memory of ncclMemAlloc as PyTorch sees it."""

    def __init__(self, pointer, count):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<i4", "data": (pointer, False), "version": 3}


def job(options, rank, size, report):
    import torch
    import torch.distributed as dist
    from torch_job import Meeting
    amem = ctypes.CDLL(None)
    amem.amem_last_error.restype = ctypes.c_char_p
    torch.cuda.set_device(rank_main.device(rank))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size)
    dist.all_reduce(torch.ones(1 << 20, device="cuda"))
    pointer = ctypes.c_void_p()
    nccl = ctypes.CDLL("libnccl.so.2")
    if nccl.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(options.mib * MIB)) != 0:
        raise RuntimeError("ncclMemAlloc failed")
    tensor = torch.as_tensor(Memory(pointer.value, options.mib * MIB // 4), device="cuda")
    torch.arange(1, tensor.numel() + 1, out=tensor)
    torch.cuda.synchronize()
    checksum = tensor.sum(dtype=torch.int64).item()
    meeting.gather("ready")
    before = used_mib() if rank == 0 else []
    report["contexts_before"] = contexts() if rank == 0 else {}
    meeting.gather("read before")
    times = []
    for cycle in range(3):
        for name in ("ncclPause", "ncclResume"):
            began = time.monotonic()
            if getattr(amem, name)(None) != 0:
                raise RuntimeError(f"{name}: {amem.amem_last_error().decode()}")
            times.append(round(1e3 * (time.monotonic() - began), 2))
            meeting.gather(f"{name} {cycle}")
            if cycle == 0 and rank == 0:
                report["paused_mib" if name == "ncclPause" else "after_mib"] = used_mib()
                report["contexts_paused" if name == "ncclPause" else "contexts_after"] = contexts()
            meeting.gather(f"{name} {cycle} read")
    problems = []
    if tensor.sum(dtype=torch.int64).item() != checksum or tensor[-1].item() != tensor.numel():
        problems.append("the memory came back with other contents")
    if times[0] > options.at_most_ms:
        problems.append(f"the first pause took {times[0]:.1f} ms (bar: {options.at_most_ms:g} ms)")
    if rank == 0:
        report.update(before_mib=before, pause_ms=times[0::2], resume_ms=times[1::2])
        for device, (was, paused, after) in enumerate(zip(before, report["paused_mib"], report["after_mib"])):
            if device >= size and max(paused, after) > was + CONTEXT_MIB:
                problems.append(f"device {device} is nobody's, and its memory went from {was} to {paused} and {after} MiB")
            if device < size and after > was + CONTEXT_MIB:
                problems.append(f"device {device} has {after} MiB in use after the resume, and had {was} before")
        if report["contexts_before"] != report["contexts_after"]:
            problems.append(f"contexts were {report['contexts_before']} and are {report['contexts_after']}")
    everyone = meeting.gather(problems)
    if any(everyone):
        raise RuntimeError(str(everyone))
    nccl.ncclMemFree(pointer)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(rank_main.run("first_pause_job", job, arguments, ("mib",)))
