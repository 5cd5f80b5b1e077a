#!/usr/bin/env python3
"""Memory that two processes share past NCCL, under AMEM_SCOPE=shared: pauses and resumes on one GPU.

    NCCL_NVLS_ENABLE=0 AMEM_SCOPE=shared LD_PRELOAD=libamem_nccl.so PYTHONPATH=ncclpatch/python \\
        torchrun --standalone --nproc-per-node 2 sharing_job.py --kinds ipc,handle,torch --cycles 20

Rank 0 makes memory of each kind, rank 1 opens it: cudaMalloc and cudaIpc (ipc), cuMemCreate and a descriptor over a socket (handle), a
tensor by PyTorch's own reduction (torch), PyTorch's symmetric memory, whose barrier runs after each resume (symmetric), the same on
NVSHMEM's heap (nvshmem; not with symmetric), the buffer of FlashInfer's flashinfer.comm.cuda_ipc (flashinfer). Symmetric memory of ranks
that share a GPU needs TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1; TORCH_SYMM_MEM_DISABLE_MULTICAST and, for nvshmem, NVSHMEM_DISABLE_NVLS
must be 1. In each cycle rank 0 writes, rank 1 reads that and writes, both pause all tags, resume them,
and read what was there; half of the memory is written by each. The ranks agree by gloo, so NCCL is not used.
Rank 0 prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import os
import pickle
import socket
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402

MIB = 1 << 20


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default="ipc,handle,torch")
    parser.add_argument("--own-gpus", action="store_true", help="a GPU for each rank; kinds symmetric and nvshmem only")
    parser.add_argument("--mib", type=int, default=256, help="of each kind (default 256)")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--time-limit", type=int, default=90, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


class Array:
    """Memory at an address, as what PyTorch takes for an array of int32."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {"shape": (size // 4,), "typestr": "<i4", "data": (address, False), "version": 3}


class Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_type", ctypes.c_int), ("location", ctypes.c_int),
                ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int)]


class IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def check(result, what):
    if result != 0:
        raise RuntimeError(f"{what} returned {result}")


def from_first(rank, value):
    """What rank 0 gives to all."""
    sent = [value if rank == 0 else None]
    dist.broadcast_object_list(sent)
    return sent[0]


def by_ipc(rank, size):
    with open("/proc/self/maps") as maps:
        runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart.so" in line))
    handle, pointer = IpcHandle(), ctypes.c_void_p()
    if rank == 0:
        check(runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)), "cudaMalloc")
        check(runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer), "cudaIpcGetMemHandle")
    sent = from_first(rank, ctypes.string_at(ctypes.byref(handle), 64))
    if rank == 1:
        ctypes.memmove(ctypes.byref(handle), sent, 64)
        check(runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, ctypes.c_uint(1)), "cudaIpcOpenMemHandle")

    def end():
        if rank == 1:
            check(runtime.cudaIpcCloseMemHandle(pointer), "cudaIpcCloseMemHandle")
        dist.barrier()
        if rank == 0:
            check(runtime.cudaFree(pointer), "cudaFree")

    return torch.as_tensor(Array(pointer.value, size), device="cuda"), end


def by_handle(rank, size):
    driver = ctypes.CDLL("libcuda.so.1")
    handle, address, bytes_ = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t(size)
    path = from_first(rank, os.path.join(tempfile.mkdtemp(prefix="amem-sharing-"), "descriptor"))
    if rank == 0:
        properties, descriptor = Properties(1, 1, 1, torch.cuda.current_device(), None), ctypes.c_int(-1)
        check(driver.cuMemCreate(ctypes.byref(handle), bytes_, ctypes.byref(properties), ctypes.c_ulonglong(0)), "cuMemCreate")
        check(driver.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, 1, ctypes.c_ulonglong(0)), "cuMemExportToShareableHandle")
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        dist.barrier()
        connection, _ = server.accept()
        socket.send_fds(connection, [b"x"], [descriptor.value])
        os.close(descriptor.value)
    else:
        dist.barrier()
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        descriptor = socket.recv_fds(client, 1, 1)[1][0]
        check(driver.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(descriptor), 1), "cuMemImportFromShareableHandle")
        os.close(descriptor)
    check(driver.cuMemAddressReserve(ctypes.byref(address), bytes_, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)), "cuMemAddressReserve")
    check(driver.cuMemMap(address, bytes_, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)), "cuMemMap")
    access = Access(1, torch.cuda.current_device(), 3)
    check(driver.cuMemSetAccess(address, bytes_, ctypes.byref(access), ctypes.c_size_t(1)), "cuMemSetAccess")

    def end():
        check(driver.cuMemUnmap(address, bytes_), "cuMemUnmap")
        check(driver.cuMemRelease(handle), "cuMemRelease")
        check(driver.cuMemAddressFree(address, bytes_), "cuMemAddressFree")

    return torch.as_tensor(Array(address.value, size), device="cuda"), end


def by_torch(rank, size):
    tensor = torch.empty(size // 4, dtype=torch.int32, device="cuda") if rank == 0 else None
    make, given = pickle.loads(from_first(rank, pickle.dumps(reduce_tensor(tensor)) if rank == 0 else None))
    return (tensor if rank == 0 else make(*given)), lambda: None


def no_multicast(variable):
    if os.environ.get(variable) != "1":
        raise RuntimeError(f"{variable} must be 1: multicast objects can put a shared GPU host out of service")


def by_symmetric(rank, size, backend=""):
    no_multicast("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    from torch.distributed import _symmetric_memory as symmetric
    if backend:
        symmetric.set_backend(backend)
    own = symmetric.empty(size // 4, dtype=torch.int32, device=torch.device("cuda", torch.cuda.current_device()))
    handle = symmetric.rendezvous(own, dist.group.WORLD.group_name)
    of_first = own if rank == 0 else handle.get_buffer(0, (size // 4,), torch.int32)

    def meet():
        if not backend:
            handle.barrier(channel=0)  # kernels of both ranks wait for each other's signals
        return own

    return of_first, lambda: None, meet


def by_nvshmem(rank, size):
    no_multicast("NVSHMEM_DISABLE_NVLS")
    return by_symmetric(rank, size, "NVSHMEM")


def by_flashinfer(_rank, size):
    from flashinfer.comm import cuda_ipc
    pointers = cuda_ipc.create_shared_buffer(size)
    return torch.as_tensor(Array(pointers[0], size), device="cuda"), lambda: cuda_ipc.free_shared_buffer(pointers)


MAKE = {"ipc": by_ipc, "handle": by_handle, "torch": by_torch, "symmetric": by_symmetric, "nvshmem": by_nvshmem, "flashinfer": by_flashinfer}


def job(options, rank, size, report):
    import amem
    torch.cuda.set_device(rank_main.device(rank) if options.own_gpus else 0)
    dist.init_process_group("gloo")
    report["gpu"] = torch.cuda.get_device_name()
    torch.zeros(1, device="cuda")
    made = {kind: MAKE[kind](rank, options.mib * MIB) for kind in options.kinds.split(",")}
    pieces = {kind: one[:2] for kind, one in made.items()}
    meetings = [meet for one in made.values() for meet in one[2:]]
    half = options.mib * MIB // 8  # of the int32s

    def write(cycle):
        for number, (tensor, _) in enumerate(pieces.values()):
            mine = tensor[:half] if rank == 0 else tensor[half:]
            mine.copy_(torch.arange(half, dtype=torch.int32, device="cuda") * (cycle + 1) + 1000 * number + rank)
        torch.cuda.synchronize()
        dist.barrier()

    def wrong(cycle):
        step = torch.arange(half, dtype=torch.int32, device="cuda") * (cycle + 1)
        return [kind for number, (kind, (tensor, _)) in enumerate(pieces.items())
                if not (torch.equal(tensor[:half], step + 1000 * number) and torch.equal(tensor[half:], step + 1000 * number + 1))]

    def everybody(what, cycle):
        found = [None] * size
        dist.all_gather_object(found, wrong(cycle))
        if any(found):
            raise RuntimeError(f"cycle {cycle}: {what}: of ranks, what they share and is wrong: {found}")

    write(0)
    everybody("before any pause", 0)
    tags = sorted(row["tag"] for row in amem.memory()["tags"] if row["tag"] not in ("nccl", "user"))
    report["tags"] = tags
    times = {"pause": [], "resume": []}
    freed = []
    for cycle in range(options.cycles):
        write(cycle)
        everybody("shared", cycle)
        torch.cuda.synchronize()
        dist.barrier()
        free = torch.cuda.mem_get_info()[0]
        dist.barrier()
        for name, act in (("pause", amem.pause), ("resume", amem.resume)):
            began = time.monotonic()
            act(*tags)
            times[name].append(1e3 * (time.monotonic() - began))
            dist.barrier()
            if name == "pause":
                freed.append((torch.cuda.mem_get_info()[0] - free) / MIB)
                dist.barrier()
        everybody("after a resume", cycle)
        for meet in meetings:
            meet()
    for name, values in times.items():
        report[f"{name}_ms"], report[f"first_{name}_ms"] = round(statistics.median(values[1:]), 1), round(values[0], 1)
    report["freed_mib"] = round(statistics.median(freed))
    report["kept_mib"] = round(sum(row.get("kept_bytes", 0) for row in amem.memory()["tags"] if row["tag"] in tags) / MIB)
    for tensor, end in pieces.values():
        dist.barrier()
        end()
    dist.barrier()


if __name__ == "__main__":
    sys.exit(rank_main.run("sharing_job", job, arguments, ("kinds", "mib", "cycles")))
