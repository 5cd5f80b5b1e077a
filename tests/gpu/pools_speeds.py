"""Where the time of a pause and a resume goes that discard: part `speeds` of pools_bench.py, and its part `floor`.

In one process, in turn, so that whatever the host does meets all of them: cycles of a tag with the times of its steps from the
journal, and the driver's calls alone in several forms. Each line tells the CPU, its NUMA node, the GPU's clocks and how often the
kernel took the CPU away. CUDA is called through ctypes, which costs about a microsecond a call.
"""
import ctypes
import json
import os
import resource
import statistics
import subprocess
import threading
import time

MIB, GIB = 1 << 20, 1 << 30


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location), ("metadata", ctypes.c_void_p),
                ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4)]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Floor:
    """Memory in handles of `sizes` bytes, paused and resumed by nothing but the driver's calls.

    apart: each handle has a reserved range of its own. mixed: each is released right after it was unmapped, as AMem does it.
    whole: one call unmaps everything. beside: a second thread releases what the first has unmapped. rdma: the handles can be reached by network cards."""

    def __init__(self, torch, sizes, apart=False, rdma=False, mixed=False, whole=False, beside=False):
        self.torch, self.sizes, self.mixed, self.whole, self.beside = torch, sizes, mixed, whole, beside
        self.cuda = ctypes.CDLL("libcuda.so.1")
        torch.ones(1, device="cuda")  # from here on the thread has a context
        device = Location(1, torch.cuda.current_device())
        self.properties = Properties(1, 1, device, None, 0, int(rdma), 0)
        self.access = Access(device, 3)
        self.handles = [ctypes.c_uint64() for _ in sizes]
        self.addresses = [self.reserve(size) for size in sizes] if apart else self.in_one()

    def call(self, name, *given):
        result = getattr(self.cuda, name)(*given)
        if result:
            raise RuntimeError(f"{name} answered {result}")

    def reserve(self, size):
        base = ctypes.c_uint64()
        self.call("cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        return base

    def in_one(self):
        at, addresses = self.reserve(sum(self.sizes)).value, []
        for size in self.sizes:
            addresses.append(ctypes.c_uint64(at))
            at += size
        return addresses

    def resume(self):
        for address, size, handle in zip(self.addresses, self.sizes, self.handles):
            self.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self.properties), ctypes.c_uint64(0))
            self.call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            self.call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(self.access), ctypes.c_size_t(1))

    def unmap(self):
        if self.whole:
            self.call("cuMemUnmap", self.addresses[0], ctypes.c_size_t(sum(self.sizes)))
            return
        for address, size, handle in zip(self.addresses, self.sizes, self.handles):
            self.call("cuMemUnmap", address, ctypes.c_size_t(size))
            if self.mixed:
                self.call("cuMemRelease", handle)
            if self.beside:
                self.unmapped.release()

    def release(self):
        for handle in self.handles:
            if self.beside:
                self.unmapped.acquire()
            self.call("cuMemRelease", handle)

    def pause(self):
        """What unmapping and releasing took, in milliseconds."""
        began = time.monotonic()
        if self.beside:
            self.unmapped = threading.Semaphore(0)
            other = threading.Thread(target=self.release)
            other.start()
        self.unmap()
        between = time.monotonic()
        if self.beside:
            other.join()
        elif not self.mixed:
            self.release()
        return {"unmap_ms": (between - began) * 1e3, "release_ms": (time.monotonic() - between) * 1e3}

    def used(self):
        for address, size in zip(self.addresses, self.sizes):
            self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(1), ctypes.c_size_t(size))
        self.torch.cuda.synchronize()
        return True


class Host:
    """What may differ from one cycle to the next beside the calls."""

    def __init__(self, torch):
        self.libc = ctypes.CDLL(None)
        self.device = ctypes.c_void_p()
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            bus = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).encode()
            if self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByUUID(b"GPU-" + bus, ctypes.byref(self.device)):
                self.nvml = None
        except (OSError, AttributeError):
            self.nvml = None

    def clocks(self):
        if not self.nvml:
            return {}
        told = {}
        for name, number in (("sm_mhz", 1), ("memory_mhz", 2)):
            mhz = ctypes.c_uint()
            if self.nvml.nvmlDeviceGetClockInfo(self.device, number, ctypes.byref(mhz)) == 0:
                told[name] = mhz.value
        return told

    def place(self):
        cpu, node = ctypes.c_uint(), ctypes.c_uint()
        self.libc.getcpu(ctypes.byref(cpu), ctypes.byref(node), None)
        return {"cpu": cpu.value, "node": node.value}

    def timed(self, torch, call):
        torch.cuda.synchronize()
        before, used = self.place(), resource.getrusage(resource.RUSAGE_THREAD)
        began = time.monotonic()
        parts = call()
        took = (time.monotonic() - began) * 1e3
        after = resource.getrusage(resource.RUSAGE_THREAD)
        told = {"ms": took, **(parts or {}), **before, "cpu_after": self.place()["cpu"], "slept": after.ru_nvcsw - used.ru_nvcsw,
                "taken_away": after.ru_nivcsw - used.ru_nivcsw, "faults": after.ru_minflt - used.ru_minflt,
                "system_ms": (after.ru_stime - used.ru_stime) * 1e3, "user_ms": (after.ru_utime - used.ru_utime) * 1e3}
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in told.items()}


class Journal:
    """The times of the steps of a tag, from the journal of this process, which amem-replay reads."""

    def __init__(self, library, directory):
        beside = os.path.join(os.path.dirname(os.path.abspath(library)), "..", "bin", "amem-replay")
        self.program = os.environ.get("AMEM_REPLAY", beside)
        self.directory = directory

    def events(self):
        done = subprocess.run([self.program, "log", "--json", self.directory], stdout=subprocess.PIPE, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def cycles(self):
        return cycles_of(self.events())


def cycles_of(events):
    """One record for each finished pause or resume of a pool: milliseconds and counts for each kind of step, `journal_ms` for what
    lies between steps (the journal, the ledger, planning), and the longest step."""
    cycles, now, at, begun = [], None, 0, 0
    for event in events:
        kind, time_ns = event["kind"], event["time_ns"]
        if kind == "cycle-begun" and event.get("pool"):
            now, at = {"kind": event["cycle_kind"], "steps": {}, "journal_ms": 0.0, "longest_ms": 0.0, "longest": ""}, time_ns
        elif now is None or not event.get("pool"):
            continue
        elif kind == "step-begun":
            begun = time_ns
            now["journal_ms"] += (time_ns - at) / 1e6
        elif kind == "step-done":
            step, took = event["step"], (time_ns - begun) / 1e6
            total = now["steps"].setdefault(step["kind"], {"ms": 0.0, "count": 0})
            total["ms"], total["count"], at = total["ms"] + took, total["count"] + 1, time_ns
            if took > now["longest_ms"]:
                now["longest_ms"], now["longest"] = took, f"{step['kind']} {step['bytes'] >> 20} MiB"
        elif kind == "cycle-done":
            now["journal_ms"] += (time_ns - at) / 1e6
            now["ms"] = event["duration_ns"] / 1e6
            cycles.append(now)
            now = None
    return cycles


def sizes_of(events):
    """Of the chunks of pools that are there at the end, in bytes."""
    sizes = {}
    for event in events:
        if event["kind"] == "allocation-created" and event.get("pool"):
            sizes[event["allocation"]] = event["bytes"]
    return list(sizes.values())


def forms(torch, sizes, gib):
    equal = lambda mib: [mib * MIB] * (int(gib * GIB) // (mib * MIB))  # noqa: E731
    return {
        "1 GiB": Floor(torch, equal(1024)),
        "1 GiB, reachable for network cards": Floor(torch, equal(1024), rdma=True),
        "1 GiB, each released when unmapped": Floor(torch, equal(1024), mixed=True),
        "1 GiB, one call unmaps all": Floor(torch, equal(1024), whole=True),
        "1 GiB, released by a second thread": Floor(torch, equal(1024), beside=True),
        "AMem's sizes": Floor(torch, sizes),
        "AMem's sizes, ranges apart": Floor(torch, sizes, apart=True),
        "AMem's sizes, ranges apart, for network cards, each released when unmapped": Floor(torch, sizes, apart=True, rdma=True, mixed=True),
        "20 MiB": Floor(torch, equal(20)),
        "128 MiB": Floor(torch, equal(128)),
        "256 MiB": Floor(torch, equal(256)),
        "4 GiB": Floor(torch, equal(4096)),
        "all in one": Floor(torch, [int(gib * GIB)]),
    }


def spin(milliseconds):
    until = time.monotonic() + milliseconds / 1e3
    while time.monotonic() < until:
        pass


def one_of_each_node(host):
    """A CPU of each NUMA node that this process may use: {node: cpu}."""
    allowed, found = os.sched_getaffinity(0), {}
    for cpu in sorted(allowed):
        os.sched_setaffinity(0, {cpu})
        found.setdefault(host.place()["node"], cpu)
    os.sched_setaffinity(0, allowed)
    return found


def under_amem(torch, library, host, usable, rounds, before=lambda: None):
    told = []
    for _ in range(rounds):
        before()
        paused = host.timed(torch, lambda: library.pause("cache"))
        clocks = host.clocks()
        resumed = host.timed(torch, lambda: library.resume("cache"))
        usable()
        told.append({"pause": paused, "resume": resumed, **clocks})
    return told


def alone(torch, host, floor, rounds):
    floor.resume()
    told = []
    for number in range(rounds):
        floor.used()
        paused = host.timed(torch, floor.pause)
        resumed = {}
        if number + 1 < rounds:
            resumed = host.timed(torch, floor.resume)
        told.append({"pause": paused, "resume": resumed, **host.clocks()})
    return told


def summary(told):
    return {"pause_ms": round(statistics.median(one["pause"]["ms"] for one in told), 2),
            "resume_ms": round(statistics.median(one["resume"]["ms"] for one in told if one["resume"]), 2) if len(told) > 1 else None}


def speeds(torch, options, library, usable, directory):
    """`library` has a tag "cache" that discards and is full; `usable` writes to all of it."""
    host, journal = Host(torch), Journal(options.library, directory)
    usable()
    events = journal.events()
    told, rounds = {"gib": options.discard_gib, "chunks_mib": [size >> 20 for size in sizes_of(events)]}, options.cycles
    runs = [("under AMem", under_amem(torch, library, host, usable, rounds))]
    for name, floor in forms(torch, sizes_of(events), options.discard_gib).items():
        runs.append((name, alone(torch, host, floor, max(3, rounds // 2))))
        runs.append((f"under AMem, after {name}", under_amem(torch, library, host, usable, 2)))
    allowed = os.sched_getaffinity(0)
    for node, cpu in one_of_each_node(host).items():
        os.sched_setaffinity(0, {cpu})
        runs.append((f"under AMem, on CPU {cpu} of node {node}", under_amem(torch, library, host, usable, rounds)))
        runs.append((f"1 GiB, on CPU {cpu} of node {node}", alone(torch, host, Floor(torch, [GIB] * int(options.discard_gib)), 3)))
    os.sched_setaffinity(0, allowed)
    runs.append(("under AMem, after 20 ms of spinning", under_amem(torch, library, host, usable, rounds, lambda: spin(20))))
    runs.append(("under AMem, after 500 ms of rest", under_amem(torch, library, host, usable, rounds, lambda: time.sleep(0.5))))
    runs.append(("under AMem, at the end", under_amem(torch, library, host, usable, rounds)))
    told["summary"] = {name: summary(one) for name, one in runs}
    cycles = iter(journal.cycles())
    for name, one in runs:
        for cycle in one if name.startswith("under AMem") else []:
            cycle["pause"]["journal"], cycle["resume"]["journal"] = next(cycles, None), next(cycles, None)
    told["runs"] = dict(runs)
    return told
