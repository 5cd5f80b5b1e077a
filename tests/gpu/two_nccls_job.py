#!/usr/bin/env python3
"""Two NCCLs of different versions in one process: PyTorch's own, and one that is opened by its path as an engine's ctypes wrapper does.

    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so torchrun --standalone --nproc-per-node 2 two_nccls_job.py --second PATH/libnccl.so.2
    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 two_nccls_job.py --second PATH/libnccl.so.2 --attach PATH/libamem_nccl.so

Both must give right results before and after each cycle, a pause must free the memory of both, and the statistics must name both. With
--stock nothing is paused. Rank 0 prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import datetime
import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402

FLOAT32, SUM = 7, 0
MIB = 1 << 20
UNIQUE_ID_BYTES = 128


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--second", required=True, help="the other libnccl.so.2")
    parser.add_argument("--attach", default="", help="libamem_nccl.so, which is attached after both are loaded; else it is preloaded")
    parser.add_argument("--stock", action="store_true", help="without AMem: no pauses")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--time-limit", type=int, default=90, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class Second:
    """The other NCCL, through ctypes."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        version = ctypes.c_int()
        self.check("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def check(self, name, *arguments_):
        result = getattr(self.library, name)(*arguments_)
        if result != 0:
            raise RuntimeError(f"{name} of the second NCCL returned {result}")

    def init(self, rank, size, store):
        unique = UniqueId()
        if rank == 0:
            self.check("ncclGetUniqueId", ctypes.byref(unique))
            store.set("second/id", bytes(unique.internal))
        ctypes.memmove(unique.internal, store.get("second/id"), UNIQUE_ID_BYTES)
        self.comm = ctypes.c_void_p()
        self.library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self.check("ncclCommInitRank", ctypes.byref(self.comm), size, unique, rank)

    def all_reduce(self, tensor, stream):
        self.check("ncclAllReduce", ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(tensor.data_ptr()),
                   ctypes.c_size_t(tensor.numel()), FLOAT32, SUM, self.comm, ctypes.c_void_p(stream.cuda_stream))

    def destroy(self):
        self.check("ncclCommDestroy", self.comm)


def amem_of(options):
    library = ctypes.CDLL(options.attach) if options.attach else ctypes.CDLL(None)
    if options.attach and library.amem_attach() != 0:
        library.amem_last_error.restype = ctypes.c_char_p
        raise RuntimeError("amem_attach: " + library.amem_last_error().decode())
    for name in ("ncclPause", "ncclResume"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.amem_last_error.restype = ctypes.c_char_p
    return library


def statistics_of(amem):
    size = ctypes.c_size_t(1 << 20)
    text = ctypes.create_string_buffer(size.value)
    if amem.amem_json(b"stats", text, ctypes.byref(size)) != 0:
        raise RuntimeError("amem_json: " + amem.amem_last_error().decode())
    return json.loads(text.value.decode())


def job(options, rank, size, report):
    second = Second(options.second)  # both are loaded, and neither has called the driver
    import torch
    import torch.distributed as dist
    from torch_job import Meeting
    amem = None if options.stock else amem_of(options)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    store = dist.distributed_c10d._get_default_store()
    meeting = Meeting(store, rank, size)
    second.init(rank, size, store)
    report["versions"] = [".".join(map(str, torch.cuda.nccl.version())), second.version]
    stream = torch.cuda.current_stream()
    counts = (1024, 1 << 22)

    def check(round_):
        wrong = []
        for count in counts:
            expected = sum((torch.arange(count, device="cuda", dtype=torch.float32) % 101) + one + round_ for one in range(size))
            for name in ("first", "second"):
                tensor = (torch.arange(count, device="cuda", dtype=torch.float32) % 101) + rank + round_
                dist.all_reduce(tensor) if name == "first" else second.all_reduce(tensor, stream)
                torch.cuda.synchronize()
                if not torch.equal(tensor, expected):
                    wrong.append(f"all-reduce of {count} by the {name} NCCL in round {round_}")
        return wrong

    problems = check(0)
    freed, pauses, resumes = [], [], []
    for cycle in range(1, 1 if options.stock else options.cycles + 1):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        meeting.gather("idle")
        before = torch.cuda.mem_get_info()[0]
        for name, times in (("ncclPause", pauses), ("ncclResume", resumes)):
            began = time.monotonic()
            if getattr(amem, name)(None) != 0:
                raise RuntimeError(f"{name} in cycle {cycle}: {amem.amem_last_error().decode()}")
            times.append(1e3 * (time.monotonic() - began))
            meeting.gather(name)
            if name == "ncclPause":
                freed.append((torch.cuda.mem_get_info()[0] - before) / MIB)
                if cycle == 1:
                    report["paused"] = statistics_of(amem)
                meeting.gather("memory read")
        problems += check(cycle)
    if freed:
        report.update(freed_mib=round(min(freed), 1), pause_ms=round(statistics.median(pauses), 2), resume_ms=round(statistics.median(resumes), 2))
        report["nccl_libraries"] = statistics_of(amem).get("nccl_libraries")
        known = [row for row in report["nccl_libraries"] or [] if row["under_amem"]]
        if len(known) < 2:
            problems.append(f"the statistics name {len(known)} NCCLs under AMem: {report['nccl_libraries']}")
        if report["paused"].get("kept_bytes") and sum(report["paused"]["kept_bytes"].values()) > 0:
            problems.append(f"memory was kept: {report['paused']['kept_bytes']}")
        report.pop("paused")
    everyone = meeting.gather(problems)
    if any(everyone):
        raise RuntimeError(json.dumps(everyone))
    second.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(rank_main.run("two_nccls_job", job, arguments, ("cycles", "stock")))
