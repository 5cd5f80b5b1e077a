#!/usr/bin/env python3
"""What host memory costs the driver's checkpoint of processes, by the way in which that memory is pinned.

    python3 checkpoint_pins.py --gpus 2 --host-gb 8 --device-gb 1 --json pins.json

One process per GPU holds device memory, and host memory that is pinned in one way; this program, which is none of them, has the driver
lock, checkpoint, restore and unlock them (cuCheckpointProcess*, driver 570 and newer), as `amem freeze` does. For each way of pinning
there are several orders: all processes at the same moment, one after the other, one a while after the other, and one process alone.
Python and ctypes only; nothing is compiled.

Every process ends by itself, after it is restored; none is ended by force, also not when this program fails. A process checks after
each restore that its memory, on the device and on the host, has its contents, and that the device reads the host memory.

A table comes before the last line, which is JSON. Exit code 0: all well, 1: something failed (the table has it), 2: cannot be run here.
"""
import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time

HUGE = 2 << 20
PORTABLE, DEVICEMAP, READ_ONLY = 1, 2, 8  # of cuMemHostAlloc and of cuMemHostRegister; the last one of the latter only
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2

# How the memory is had: (what, flags, options).
WAYS = {
    "none": ("none", 0, {}),
    "touched, not pinned": ("map", None, {}),
    "alloc": ("alloc", 0, {}),
    "alloc portable": ("alloc", PORTABLE, {}),
    "alloc portable devicemap": ("alloc", PORTABLE | DEVICEMAP, {}),
    "register huge": ("map", 0, {}),
    "register huge portable": ("map", PORTABLE, {}),  # AMem's, replay/driver/cuda/pinned.cpp
    "register huge portable, own GPU only": ("map", PORTABLE, {"own_gpu": True}),
    "register huge portable devicemap": ("map", PORTABLE | DEVICEMAP, {}),
    "register huge portable read-only": ("map", PORTABLE | READ_ONLY, {}),
    "register huge portable, 64 pieces": ("map", PORTABLE, {"pieces": 64}),
    "register small portable": ("map", PORTABLE, {"huge": False}),
    "register shared portable": ("map", PORTABLE, {"shared": True}),
    "create on the host": ("create", 0, {}),
    "unpinned before, pinned after": ("map", PORTABLE, {"unpin": True}),
}
ORDERS = ("together", "in turn", "staggered", "alone")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=2, help="processes, one GPU each (2)")
    parser.add_argument("--host-gb", type=float, default=8, help="host memory of each process (8)")
    parser.add_argument("--device-gb", type=float, default=1, help="device memory of each process (1)")
    parser.add_argument("--ways", default=";".join(WAYS), help="of pinning, by ';': " + "; ".join(WAYS))
    parser.add_argument("--orders", default=",".join(ORDERS), help="by ',': " + ", ".join(ORDERS))
    parser.add_argument("--repeat", type=int, default=2, help="each order so often for each way (2)")
    parser.add_argument("--stagger-ms", type=float, default=150, help="between the beginnings, of the order \"staggered\" (150)")
    parser.add_argument("--time-limit", type=float, default=480, help="seconds, after which no other way of pinning is begun (480)")
    parser.add_argument("--libcuda", default="libcuda.so.1")
    parser.add_argument("--json", default="", help="the last line goes there too")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)  # this is a process that is checkpointed
    parser.add_argument("--gpu", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


class Failed(Exception):
    pass


class Cuda:
    """The driver's calls; an answer other than 0 is an exception."""

    def __init__(self, name):
        self.library = ctypes.CDLL(name)

    def __call__(self, name, *parameters):
        result = self.answer(name, *parameters)
        if result != 0:
            raise Failed(f"{name}: {result}")

    def answer(self, name, *parameters):
        try:
            function = getattr(self.library, name)
        except AttributeError:
            raise Failed(f"{name}: this driver has none") from None
        return function(*parameters)


def milliseconds(function):
    began = time.monotonic()
    function()
    return 1e3 * (time.monotonic() - began)


# ---- a process that is checkpointed ----------------------------------------------------------------------------------------


class AllocationProperties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location_type", ctypes.c_int), ("location_id", ctypes.c_int),
                ("windows", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int)]


DEVICE, HOST_NUMA = 1, 3  # CUmemLocationType


class HostMemory:
    """Host memory of `size` bytes that is had in one of the ways of WAYS."""

    def __init__(self, cuda, way, size, device):
        self.cuda, self.size, self.device = cuda, size, device
        self.what, self.flags, self.options = WAYS[way]
        self.times = {"populate": 0.0, "pin": 0.0, "unpin": 0.0}
        self.data = self.pinned = None
        if self.what == "map":
            self.times["populate"] = milliseconds(self.map)
        self.pin()

    def map(self):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        visibility = 0x01 if self.options.get("shared") else 0x02
        at = libc.mmap(None, self.size + HUGE, 3, visibility | 0x20 | 0x4000, -1, 0)  # ANONYMOUS | NORESERVE
        if at in (None, ctypes.c_void_p(-1).value):
            raise Failed(f"mmap: errno {ctypes.get_errno()}")
        self.data = (at + HUGE - 1) // HUGE * HUGE
        libc.madvise(at, self.size + HUGE, 14 if self.options.get("huge", True) else 15)  # MADV_HUGEPAGE, MADV_NOHUGEPAGE
        for done in range(0, self.size, 64 * HUGE):  # as AMem does, in pieces, but not as small: this is Python
            piece = min(64 * HUGE, self.size - done)
            if libc.madvise(self.data + done, piece, 23) != 0:  # MADV_POPULATE_WRITE
                ctypes.memset(self.data + done, 0, piece)

    def pieces(self):
        count = self.options.get("pieces", 1)
        each = self.size // count // HUGE * HUGE or self.size
        return [(begin, min(each, self.size - begin)) for begin in range(0, self.size, each)]

    def pin(self):
        self.times["pin"] = milliseconds(getattr(self, "pin_" + self.what))

    def pin_none(self):
        pass

    def pin_map(self):
        if self.flags is None:
            return
        for begin, size in self.pieces():
            self.cuda("cuMemHostRegister_v2", ctypes.c_void_p(self.data + begin), ctypes.c_size_t(size), self.flags)
        self.pinned = True

    def pin_alloc(self):
        pointer = ctypes.c_void_p()
        self.cuda("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(self.size), self.flags)
        self.data, self.pinned = pointer.value, True

    def pin_create(self):
        node = ctypes.c_int()
        self.cuda("cuDeviceGetAttribute", ctypes.byref(node), 134, self.device)  # HOST_NUMA_ID
        made = AllocationProperties(type=1, location_type=HOST_NUMA, location_id=max(node.value, 0))
        handle, at = ctypes.c_ulonglong(), ctypes.c_ulonglong()
        self.size = (self.size + HUGE - 1) // HUGE * HUGE
        size = ctypes.c_size_t(self.size)
        self.cuda("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(made), ctypes.c_ulonglong(0))
        self.cuda("cuMemAddressReserve", ctypes.byref(at), size, ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))
        self.cuda("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        access = (Access * 2)(Access(DEVICE, self.device, 3), Access(HOST_NUMA, max(node.value, 0), 3))
        self.cuda("cuMemSetAccess", at, size, access, ctypes.c_size_t(2))
        self.cuda("cuMemRelease", handle)
        self.data, self.pinned = at.value, True

    def unpin(self):
        """Of registered memory: its pages stay."""

        def all_pieces():
            for begin, _ in self.pieces():
                self.cuda("cuMemHostUnregister", ctypes.c_void_p(self.data + begin))

        if self.what == "map" and self.pinned:
            self.times["unpin"] = milliseconds(all_pieces)
            self.pinned = None


class Process:
    """The process that is checkpointed. It says on standard output what it did, and does what it reads from standard input."""

    PLACES = 64

    def __init__(self, options):
        way = options.worker
        own = WAYS[way][2].get("own_gpu")
        if own:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(options.gpu)
        self.cuda = Cuda(options.libcuda)
        self.cuda("cuInit", 0)
        self.device = ctypes.c_int()
        self.cuda("cuDeviceGet", ctypes.byref(self.device), 0 if own else options.gpu)
        context = ctypes.c_void_p()
        self.cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.cuda("cuCtxSetCurrent", context)
        self.on_device, self.device_bytes = ctypes.c_ulonglong(), max(int(options.device_gb * 1e9), 1 << 20)
        self.cuda("cuMemAlloc_v2", ctypes.byref(self.on_device), ctypes.c_size_t(self.device_bytes))
        self.cuda("cuMemsetD8_v2", self.on_device, ctypes.c_ubyte(0x5A), ctypes.c_size_t(self.device_bytes))
        self.cuda("cuCtxSynchronize")
        self.host = HostMemory(self.cuda, way, int(options.host_gb * 1e9) // HUGE * HUGE, self.device)
        self.places = range(0, self.host.size - 8, max(self.host.size // self.PLACES, 8)) if self.host.data else ()
        for place in self.places:
            ctypes.c_uint64.from_address(self.host.data + place).value = place ^ 0xA5A5A5A5

    def check(self):
        """What is wrong; empty: nothing."""
        value = ctypes.c_ubyte()
        for place in (0, self.device_bytes // 2, self.device_bytes - 1):
            self.cuda("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_ulonglong(self.on_device.value + place), ctypes.c_size_t(1))
            if value.value != 0x5A:
                return f"device memory at {place}"
        for place in self.places:
            if ctypes.c_uint64.from_address(self.host.data + place).value != place ^ 0xA5A5A5A5:
                return f"host memory at {place}"
        if self.host.pinned:
            place, back = self.places[-1], ctypes.c_uint64()
            at = ctypes.c_ulonglong(self.on_device.value)
            self.cuda("cuMemcpyHtoD_v2", at, ctypes.c_void_p(self.host.data + place), ctypes.c_size_t(8))
            self.cuda("cuMemcpyDtoH_v2", ctypes.byref(back), at, ctypes.c_size_t(8))
            self.cuda("cuMemsetD8_v2", at, ctypes.c_ubyte(0x5A), ctypes.c_size_t(8))
            self.cuda("cuCtxSynchronize")
            if back.value != place ^ 0xA5A5A5A5:
                return "what the device reads of the host's memory"
        return ""

    def serve(self):
        def say(**what):
            print(json.dumps(what), flush=True)

        say(ok=True, times=self.host.times)
        for line in sys.stdin:
            command = line.strip()
            if command == "end":
                break
            try:
                wrong = ""
                if command == "check":
                    wrong = self.check()
                else:
                    getattr(self.host, command)()
                say(ok=not wrong, wrong=wrong, times=self.host.times)
            except Failed as why:
                say(ok=False, wrong=str(why), times=self.host.times)


# ---- the program that has them checkpointed --------------------------------------------------------------------------------


class LockArguments(ctypes.Structure):  # CUcheckpointLockArgs
    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7)]


class Worker:
    def __init__(self, options, way, gpu):
        command = [sys.executable, os.path.abspath(__file__), "--worker", way, "--gpu", str(gpu), "--host-gb", str(options.host_gb),
                   "--device-gb", str(options.device_gb), "--libcuda", options.libcuda]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pid = self.process.pid

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            raise Failed((self.process.stderr.read().strip().splitlines() or ["the process has ended"])[-1])
        heard = json.loads(line)
        if not heard["ok"]:
            raise Failed(heard["wrong"])
        return heard

    def tell(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def end(self):
        try:
            self.tell("end")
        except (BrokenPipeError, ValueError):
            pass
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


def on_all(workers, function, order="together", stagger_s=0.0):
    """The milliseconds of each, and of all together. The first failure is raised after all have ended."""
    took, failures = [0.0] * len(workers), []

    def one(index):
        try:
            if order == "staggered":
                time.sleep(index * stagger_s)
            took[index] = milliseconds(lambda: function(workers[index]))
        except Failed as why:
            failures.append(why)

    began = time.monotonic()
    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(workers))]
    for thread in threads:
        thread.start()
        if order == "in turn":
            thread.join()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return took, 1e3 * (time.monotonic() - began)


class Checkpoints:
    def __init__(self, cuda):
        self.cuda = cuda

    def state(self, worker):
        state = ctypes.c_int()
        self.cuda("cuCheckpointProcessGetState", worker.pid, ctypes.byref(state))
        return state.value

    def lock(self, worker):
        self.cuda("cuCheckpointProcessLock", worker.pid, ctypes.byref(LockArguments(timeout_ms=10_000)))

    def checkpoint(self, worker):
        self.cuda("cuCheckpointProcessCheckpoint", worker.pid, None)

    def restore(self, worker):
        self.cuda("cuCheckpointProcessRestore", worker.pid, None)

    def unlock(self, worker):
        self.cuda("cuCheckpointProcessUnlock", worker.pid, None)

    def bring_back(self, workers):
        """Whatever has happened: every process runs before it is told to end."""
        for worker in workers:
            try:
                if self.state(worker) == CHECKPOINTED:
                    self.restore(worker)
                if self.state(worker) == LOCKED:
                    self.unlock(worker)
            except Failed as why:
                print(f"process {worker.pid} was not brought back: {why}", file=sys.stderr)


def once(checkpoints, workers, order, stagger_s):
    """One checkpoint and restore: the milliseconds of each step."""
    whom = workers[:1] if order == "alone" else workers
    times = {}
    on_all(whom, checkpoints.lock)
    times["checkpoint each"], times["checkpoint"] = on_all(whom, checkpoints.checkpoint, order, stagger_s)
    times["restore each"], times["restore"] = on_all(whom, checkpoints.restore)
    on_all(whom, checkpoints.unlock)
    return times


def ask_all(workers, command):
    for worker in workers:
        worker.tell(command)
    return [worker.hear() for worker in workers]


def try_way(options, checkpoints, way):
    """The rows of a way of pinning."""
    unpin = WAYS[way][2].get("unpin")
    workers = [Worker(options, way, gpu) for gpu in range(options.gpus)]
    rows = []
    try:
        times = [worker.hear()["times"] for worker in workers]
        for order in options.orders.split(","):
            runs = []
            for _ in range(options.repeat):
                if unpin:
                    ask_all(workers, "unpin")
                run = once(checkpoints, workers, order, options.stagger_ms / 1e3)
                if unpin:
                    times = [heard["times"] for heard in ask_all(workers, "pin")]
                ask_all(workers, "check")
                runs.append(run)
            best = min(runs, key=lambda run: run["checkpoint"])
            rows.append({
                "way": way, "order": order, "checkpoint_ms": [run["checkpoint"] for run in runs],
                "each_ms": best["checkpoint each"], "restore_ms": [run["restore"] for run in runs],
                **{step + "_ms": max(one[step] for one in times) for step in ("populate", "pin", "unpin")}
            })
        if WAYS[way][0] == "map" and not unpin:
            unpinned = max(heard["times"]["unpin"] for heard in ask_all(workers, "unpin"))
            for row in rows:
                row["unpin_ms"] = unpinned
    except Failed as why:
        rows.append({"way": way, "failed": str(why)})
    finally:
        checkpoints.bring_back(workers)
        for worker in workers:
            worker.end()
    return rows


def print_rows(rows):
    for row in rows:
        if "failed" in row:
            print(f"{row['way']:<40} FAILED: {row['failed']}", flush=True)
            continue
        each = " ".join(f"{one:.0f}" for one in row["each_ms"])
        print(f"{row['way']:<40} {row['order']:<10} {statistics.median(row['checkpoint_ms']):>10.0f} {each:>12} "
              f"{statistics.median(row['restore_ms']):>8.0f} {row['populate_ms']:>9.0f} {row['pin_ms']:>7.0f} {row['unpin_ms']:>7.0f}",
              flush=True)


def main():
    options = arguments()
    if options.worker:
        Process(options).serve()
        return 0
    unknown = [way for way in options.ways.split(";") if way not in WAYS] + \
              [order for order in options.orders.split(",") if order not in ORDERS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        cuda = Cuda(options.libcuda)
        cuda("cuInit", 0)
        count = ctypes.c_int()
        cuda("cuDeviceGetCount", ctypes.byref(count))
        version = ctypes.c_int()
        cuda("cuDriverGetVersion", ctypes.byref(version))
        if count.value < options.gpus:
            raise Failed(f"{options.gpus} GPUs are wanted, and {count.value} are here")
    except (Failed, OSError) as why:
        print(f"cannot be run here: {why}", file=sys.stderr)
        return 2
    checkpoints = Checkpoints(cuda)
    print(f"{options.gpus} processes, each {options.device_gb:g} GB on its GPU and {options.host_gb:g} GB of host memory; milliseconds, "
          f"medians of {options.repeat}")
    print(f"{'':<40} {'order':<10} {'checkpoint':>10} {'each':>12} {'restore':>8} {'populate':>9} {'pin':>7} {'unpin':>7}", flush=True)
    rows, left_out = [], []
    for way in options.ways.split(";"):
        if time.monotonic() - began > options.time_limit:
            left_out.append(way)
            continue
        new = try_way(options, checkpoints, way)
        print_rows(new)
        rows += new
    if left_out:
        print("left out for want of time: " + "; ".join(left_out))
    result = {"ok": not any("failed" in row for row in rows), "cuda": version.value, "gpus": options.gpus,
              "host_gb": options.host_gb, "device_gb": options.device_gb, "rows": rows, "left_out": left_out}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
