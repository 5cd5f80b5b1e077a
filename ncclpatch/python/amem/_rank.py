"""One rank of `amem doctor --measure`, under AMem by preload: RANK SIZE PIPE NCCL CYCLES. NCCL and the driver through ctypes, no PyTorch.

The process that started it gets what was measured by the pipe, or {"failure": why}; until then {"said": value}, which it answers by the values
of all ranks. It ends with that process.
"""

import ctypes
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

COMMUNICATORS = 4
BYTES = 16 << 20  # of each all-reduce
FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class Failed(Exception):
    pass


class Driver:
    """The CUDA driver on one device."""

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

    def used_bytes(self):
        """Of the whole device, by all processes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value


class Job:
    def __init__(self, rank, size, pipe, nccl):
        self.rank, self.size, self.pipe = rank, size, pipe
        self.driver = Driver(rank)
        if rank >= self.driver.count:
            raise Failed("rank %d has no GPU: %d are visible" % (rank, self.driver.count))
        self.nccl = ctypes.CDLL(nccl)
        self.nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self.nccl.ncclAllReduce.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self.floats = (64 << 10 if self.driver.simulated else BYTES) // 4
        self.send, self.receive = self.driver.allocate(4 * self.floats), self.driver.allocate(4 * self.floats)
        self.communicators = []

    def barrier(self, value=None):
        """Waits for all ranks; the values that they gave, by rank."""
        self.pipe.send({"said": value})
        return self.pipe.recv()

    def check(self, name, *arguments):
        result = getattr(self.nccl, name)(*arguments)
        if result:
            raise Failed("%s answered %d (%s)" % (name, result, self.nccl.ncclGetErrorString(result).decode()))

    def make_communicators(self):
        for _ in range(COMMUNICATORS):
            unique = UniqueId()
            if self.rank == 0:
                self.check("ncclGetUniqueId", ctypes.byref(unique))
            unique.internal[:] = self.barrier(bytes(unique.internal))[0]
            communicator = ctypes.c_void_p()
            self.check("ncclCommInitRank", ctypes.byref(communicator), self.size, unique, self.rank)
            self.communicators.append(communicator)

    def reduce(self):
        """An all-reduce on each communicator, whose sums are compared. Returns the seconds without the comparisons."""
        expected = bytes(ctypes.c_float(sum(range(1, self.size + 1)))) * self.floats
        own = ctypes.c_uint32.from_buffer_copy(ctypes.c_float(self.rank + 1))
        self.driver.call("cuMemsetD32_v2", self.send, own, ctypes.c_size_t(self.floats))
        back, seconds = ctypes.create_string_buffer(4 * self.floats), 0.0
        for communicator in self.communicators:
            self.driver.call("cuMemsetD8_v2", self.receive, ctypes.c_ubyte(0xff), ctypes.c_size_t(4 * self.floats))
            self.driver.call("cuCtxSynchronize")
            began = time.monotonic()
            self.check("ncclAllReduce", self.send.value, self.receive.value, self.floats, FLOAT32, SUM, communicator, None)
            self.driver.call("cuCtxSynchronize")
            seconds += time.monotonic() - began
            self.driver.call("cuMemcpyDtoH_v2", back, self.receive, ctypes.c_size_t(4 * self.floats))
            if back.raw != expected:
                raise Failed("an all-reduce gave wrong sums")
        return seconds

    def timed(self, function):
        self.barrier()
        began = time.monotonic()
        function()
        return time.monotonic() - began


def measure(rank, size, pipe, nccl, cycles):
    job = Job(rank, size, pipe, nccl)
    before = job.driver.used_bytes()
    result = {"simulated": job.driver.simulated, "start_seconds": job.timed(job.make_communicators)}
    job.barrier()
    result["first_seconds"] = job.reduce()
    job.barrier()
    result["device_bytes"] = job.driver.used_bytes() - before
    import amem
    stats = amem.stats()
    if not stats.get("session"):
        raise Failed("NCCL is not under AMem: %s" % (stats.get("reason") or stats["nccl_libraries"]))
    result["held_bytes"] = sum(one["bytes"] for one in stats["communicators"])
    result["kept_bytes"] = sum(stats["kept_bytes"].values()) + stats["legacy_kept_bytes"]
    result["nccl"] = [one["version"] for one in stats["nccl_libraries"] if one["under_amem"]]
    result["pause_seconds"], result["resume_seconds"] = [], []
    for _ in range(cycles):
        result["pause_seconds"].append(job.timed(amem.pause))
        job.barrier()
        result["freed_bytes"] = before + result["device_bytes"] - job.driver.used_bytes()
        result["resume_seconds"].append(job.timed(amem.resume))
        job.reduce()
    job.barrier()
    return result


def main():
    rank, size, pipe, nccl, cycles = int(sys.argv[1]), int(sys.argv[2]), Connection(int(sys.argv[3])), sys.argv[4], int(sys.argv[5])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing is left behind
    try:
        result = measure(rank, size, pipe, nccl, cycles)
    except Exception as error:  # pylint: disable=broad-except  # whatever it is goes into the result
        result = {"failure": str(error) or type(error).__name__}
    pipe.send(result)
    sys.stdout.flush()
    os._exit(1 if "failure" in result else 0)  # communicators are not destroyed: that waits for every rank


if __name__ == "__main__":
    main()
