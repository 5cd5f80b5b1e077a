"""One process with a stock libnccl under AMem, on the stand-in driver. It prints what became of each call as JSON.

It goes as far as NCCL goes. A stock NCCL has the CUDA runtime linked into it, which looks up all that it may ever need and then
accepts no driver but NVIDIA's; so a communicator cannot be made here. No memory call means no session of AMem's and no journal:
therefore the stand-in for NCCL follows in the same process. AMem journals what was looked up before with the first memory call of
any NCCL.
"""

import argparse
import ctypes
import json
import os


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def drive(nccl):
    """The calls that a program makes first, and what each answered (an ncclResult_t); None where this NCCL lacks the call."""
    version, unique_id, communicator, memory = ctypes.c_int(), UniqueId(), ctypes.c_void_p(), ctypes.c_void_p()
    answers = {"ncclGetVersion": nccl.ncclGetVersion(ctypes.byref(version)), "version": version.value,
               "ncclGetUniqueId": nccl.ncclGetUniqueId(ctypes.byref(unique_id))}
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    answers["ncclCommInitRank"] = nccl.ncclCommInitRank(ctypes.byref(communicator), 1, unique_id, 0)
    if hasattr(nccl, "ncclMemAlloc"):
        nccl.ncclMemAlloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        answers["ncclMemAlloc"] = nccl.ncclMemAlloc(ctypes.byref(memory), 1 << 20)
    return answers


def lines_of(file):
    if not os.path.exists(file):
        return 0
    with open(file, "rb") as text:
        return text.read().count(b"\n")


def start_a_session(amem, second):
    """Allocates through the stand-in for NCCL, so that AMem has something to pause, and a journal."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
    nccl = ctypes.CDLL(second)
    amem.amem_attach()  # refused for a stock NCCL that has used the driver; this one has not
    nccl.ncclMemAlloc.argtypes, nccl.ncclMemFree.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p]
    assert nccl.ncclMemAlloc(ctypes.byref(memory), 2 << 20) == 0 and nccl.ncclMemFree(memory) == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nccl", required=True, help="the stock libnccl.so.2, or its patched copy")
    parser.add_argument("--amem", required=True, help="libamem_nccl.so")
    parser.add_argument("--second", required=True, help="the stand-in for NCCL")
    parser.add_argument("--attach", action="store_true")
    options = parser.parse_args()
    nccl = ctypes.CDLL(options.nccl)
    amem = ctypes.CDLL(options.amem)  # where it was preloaded, or came with the patched copy, this is the same library again
    amem.amem_last_error.restype = ctypes.c_char_p
    answers = {}
    if options.attach:
        answers["amem_attach"] = amem.amem_attach()
        answers["amem_last_error"] = (amem.amem_last_error() or b"").decode()
    answers.update(drive(nccl))
    answers["look_ups"] = lines_of(os.environ["STAND_IN_LOOK_UPS"])
    answers["direct_look_ups"] = lines_of(os.environ["STAND_IN_WITNESS"])
    start_a_session(amem, options.second)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
