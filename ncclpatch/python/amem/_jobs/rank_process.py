"""A rank of a job that `amem doctor` starts, under AMem by preload or without it. NCCL and the driver through ctypes, no PyTorch.

The process that started it gets what the rank found out by a pipe, or {"failure": why}; until then {"said": value}, which it answers by the
values of all ranks. Values are JSON. The rank ends with that process.
"""

import ctypes
import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

FLOAT32, SUM = 7, 0
WITH_SHARED_GPUS = 23000  # from this NCCL on several ranks of a communicator may be on one GPU, if it is asked for


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class Failed(Exception):
    pass


class Wrong(Failed):
    """A result or contents that are not what they must be."""


class Driver:
    """The CUDA driver: on one device, or only asked about devices, which leaves no context behind (device None)."""

    def __init__(self, device):
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Failed("the CUDA driver cannot be loaded: %s" % error) from None
        self.simulated = hasattr(self.cuda, "stand_in_cuda_at")
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.count = count.value
        if device is None or device >= self.count:
            return
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(result, ctypes.byref(text))
            raise Failed("%s answered %d (%s)" % (name, result, (text.value or b"unknown error").decode()))

    def allocate(self, count):
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(count))
        return pointer

    def write(self, pointer, data):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), data, ctypes.c_size_t(len(data)))

    def read(self, pointer, count):
        back = ctypes.create_string_buffer(count)
        self.call("cuMemcpyDtoH_v2", back, ctypes.c_uint64(pointer), ctypes.c_size_t(count))
        return back.raw

    def fill(self, pointer, byte, count):
        self.call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(byte), ctypes.c_size_t(count))

    def synchronize(self):
        self.call("cuCtxSynchronize")

    def used_bytes(self):
        """Of the whole device, by all processes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    def name(self, device):
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, 256, device)
        return text.value.decode(errors="replace")

    def uuid(self, device):
        """As NVML has it, without "GPU-" or "MIG-"."""
        raw = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", raw, device)
        text = bytes(raw).hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


class Job:
    """What the ranks of one job share: NCCL on one device, communicators, and meetings by the pipe."""

    def __init__(self, rank, size, pipe, nccl, device):
        self.rank, self.size, self.pipe = rank, size, pipe
        self.driver = Driver(device)
        if device >= self.driver.count:
            raise Failed("rank %d has no GPU: %d are visible" % (rank, self.driver.count))
        self.nccl = ctypes.CDLL(nccl)
        self.nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self.nccl.ncclAllReduce.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self.communicators = []

    def barrier(self, value=None):
        """Waits for all ranks; the values that they gave, by rank."""
        send(self.pipe, {"said": value})
        return json.loads(self.pipe.recv_bytes())

    def check(self, name, *arguments):
        result = getattr(self.nccl, name)(*arguments)
        if result:
            raise Failed("%s answered %d (%s)" % (name, result, self.nccl.ncclGetErrorString(result).decode()))

    def version(self):
        """As NCCL writes it: 22809 is 2.28.9."""
        number = ctypes.c_int()
        self.check("ncclGetVersion", ctypes.byref(number))
        return number.value

    def make_communicator(self):
        """One of all ranks."""
        unique = UniqueId()
        if self.rank == 0:
            self.check("ncclGetUniqueId", ctypes.byref(unique))
        unique.internal[:] = bytes.fromhex(self.barrier(bytes(unique.internal).hex())[0])
        communicator = ctypes.c_void_p()
        self.check("ncclCommInitRank", ctypes.byref(communicator), self.size, unique, self.rank)
        self.communicators.append(communicator)
        return communicator

    def timed(self, function):
        self.barrier()
        began = time.monotonic()
        function()
        return time.monotonic() - began


def send(pipe, value):
    pipe.send_bytes(json.dumps(value).encode())


def main(work):
    """`work(pipe, **settings)`, whose answer is the rank's; the command line has the pipe and the settings."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing is left behind
    pipe = Connection(int(sys.argv[1]))
    try:
        result = work(pipe, **json.loads(sys.argv[2]))
    except Exception as error:  # pylint: disable=broad-except  # whatever it is goes into the result
        result = {"failure": str(error) or type(error).__name__, "wrong": isinstance(error, Wrong)}
    send(pipe, result)
    sys.stdout.flush()
    os._exit(1 if "failure" in result else 0)  # communicators are not destroyed: that waits for every rank
