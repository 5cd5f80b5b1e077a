#!/usr/bin/env python3
"""The Python interface without a GPU: NCCL and the CUDA driver are stand-ins, AMem is the real library. ./run trial starts it.

    trial.py            shows the calls and what they answer
    trial.py SCRIPT     runs a script of yours there; `nccl`, `gpu_bytes` and `gpu_alloc` are defined in it
"""
import ast
import ctypes
import os
import sys

cuda = ctypes.CDLL("libcuda.so.1")
cuda.stand_in_cuda_bytes_in_use.restype = ctypes.c_uint64
context = ctypes.c_void_p()
if cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context):
    sys.exit("trial: the stand-in driver does not start")
nccl = ctypes.CDLL("libnccl.so.2")


def gpu_bytes():
    """What the process holds on the stand-in GPU."""
    return cuda.stand_in_cuda_bytes_in_use(0)


def gpu_alloc(size):
    """Memory as PyTorch asks for it inside of amem.pool; returns its address."""
    library = ctypes.CDLL(os.environ["AMEM_LIBRARY"])
    library.amem_alloc.restype = ctypes.c_void_p
    library.amem_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return library.amem_alloc(size, 0, None)


def communicator():
    """A communicator of one rank, for which NCCL allocates."""
    class UniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_char * 128)]

    made, name = ctypes.c_void_p(), UniqueId()
    if nccl.ncclGetUniqueId(ctypes.byref(name)) or nccl.ncclCommInitRank(ctypes.byref(made), 1, name, 0):
        sys.exit("trial: the stand-in NCCL makes no communicator")
    return made


STEPS = """
import amem                             # after NCCL is loaded, before it is used
comm = communicator()                   # NCCL allocates
gpu_bytes()

with amem.paused() as freed:            # NCCL's memory goes back to the driver
    print(gpu_bytes(), "bytes on the GPU;", freed)
gpu_bytes()                             # the same addresses, the same contents

with amem.pool("weights"):              # with PyTorch: model = Model().cuda()
    weights = gpu_alloc(64 << 20)
with amem.pool("kv_cache", policy="discard"):
    cache = gpu_alloc(128 << 20)
with amem.paused("weights", "kv_cache", "nccl") as freed:
    print(freed)
[(tag["tag"], tag["state"], tag["bytes"]) for tag in amem.memory()["tags"]]

amem.pause("kv_cache").bytes            # without a block
amem.pause("kv_cache").already          # nothing changes a second time
amem.resume("kv_cache")

try:
    amem.pause("wieghts")
except amem.AmemError as error:
    print(error)

amem.stats()["session"]                 # the name of its journal
"""


def show(steps, names):
    """Runs each statement as the interactive interpreter does, with its text before what it prints."""
    lines = steps.strip("\n").split("\n")
    for statement in ast.parse(steps.strip("\n")).body:
        for number, line in enumerate(lines[statement.lineno - 1:statement.end_lineno]):
            print(("... " if number else ">>> ") + line)
        exec(compile(ast.Interactive([statement]), "trial", "single"), names)  # pylint: disable=exec-used


def main():
    names = {"nccl": nccl, "gpu_bytes": gpu_bytes, "gpu_alloc": gpu_alloc, "communicator": communicator, "__name__": "__main__"}
    if len(sys.argv) > 1:
        with open(sys.argv[1], encoding="utf-8") as file:
            sys.argv = sys.argv[1:]
            exec(compile(file.read(), sys.argv[0], "exec"), names)  # pylint: disable=exec-used
        return
    show(STEPS, names)
    print("\nNext, look at what was recorded, or run a script of yours here:\n  build/bin/amem-replay ls\n  build/bin/amem-replay log\n"
          "  ./run trial SCRIPT.py")


if __name__ == "__main__":
    main()
