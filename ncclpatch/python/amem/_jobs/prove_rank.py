"""One rank of `amem doctor --prove`: the collectives of a real job, pauses and resumes, and every result and all contents compared.

All values are whole numbers, so that each sum is exact. Rank r of s in round n has at element i the value i % PERIOD + 7r + n.
"""

import array
import contextlib
import ctypes
import functools
import os
import time

from . import rank_process

PERIOD = 1021
SIZES, SIMULATED_SIZES = (1 << 10, 256 << 10, 16 << 20), (1 << 10, 64 << 10)  # bytes of a message: LL, LL128, Simple
BUFFER = 32 << 20  # of the program, and of ncclMemAlloc; several driver pages, so that a pause moves them
SYMMETRIC_WINDOW = 1
WITH_WINDOWS = 22700
NONBLOCKING_STREAM, RELAXED_CAPTURE = 1, 2
POISON = 0xff
PROGRAM, NCCL = "program", "nccl"


@functools.lru_cache(maxsize=64)  # each collective of a round wants those of all ranks
def period(times, base, shift):
    return array.array("f", [times * ((shift + i) % PERIOD) + base for i in range(PERIOD)]).tobytes()


def values(times, base, count, first=0):
    """`count` float32 from element `first` on: times * (i % PERIOD) + base."""
    return (period(times, base, first % PERIOD) * (count // PERIOD + 1))[:4 * count]


class Communicator:
    """`ranks`: of the job, by their rank in it."""

    def __init__(self, handle, ranks, own):
        self.handle, self.ranks, self.own, self.size = handle, ranks, ranks.index(own), len(ranks)


class Contents:
    """What is in the driver's memory, compared with what should be; `compared` counts the bytes. A buffer that was written here is compared after
    each resume."""

    def __init__(self, driver, rank):
        self.driver, self.rank, self.compared, self._written = driver, rank, 0, []

    def write(self, address, contents):
        self.driver.write(address, contents)
        self._written.append((address, contents))

    def expect_all(self):
        for address, contents in self._written:
            self.expect("contents of a buffer", address, contents)

    def expect(self, what, address, expected):
        got = self.driver.read(address, len(expected))
        self.compared += len(expected)
        if got == expected:
            return
        low, high = 0, len(expected)  # the first byte that differs
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if got[low:middle] != expected[low:middle] else (middle, high)
        raise rank_process.Wrong("rank %d: %s: byte %d of %d is %d and not %d" % (self.rank, what, low, len(expected), got[low], expected[low]))


class Proof(rank_process.Job):
    def __init__(self, rank, size, pipe, nccl, device):
        super().__init__(rank, size, pipe, nccl, device)
        for name in ("ncclAllGather", "ncclSend", "ncclRecv", "ncclReduceScatter", "ncclBroadcast"):
            getattr(self.nccl, name).restype = ctypes.c_int
        self.sizes = SIMULATED_SIZES if self.driver.simulated else SIZES
        self.buffer_bytes = (2 << 20) if self.driver.simulated else BUFFER
        self.send, self.receive, own = (self.driver.allocate(self.buffer_bytes).value for _ in range(3))
        self.program_bytes = 3 * self.buffer_bytes
        self.groups, self.contents = [], Contents(self.driver, rank)
        self.window = self.user = self.graph = None
        self.notes = []
        self.fill(own, 5)

    # ---- NCCL's arguments

    @staticmethod
    def _at(address):
        return ctypes.c_void_p(address)

    def data(self, operation, send, receive, count, *rest):
        """Of a call (send, receive, count, float32, ...)."""
        self.check(operation, self._at(send), self._at(receive), ctypes.c_size_t(count), rank_process.FLOAT32, *rest)

    def message(self, operation, address, count, peer, communicator):
        self.check(operation, self._at(address), ctypes.c_size_t(count), rank_process.FLOAT32, peer, communicator, None)

    # ---- what a job has

    def make_groups(self):
        """Two communicators of all ranks, and from four ranks on one of each half of them."""
        everyone = list(range(self.size))
        for _ in range(2):
            self.groups.append(Communicator(self.make_communicator(), everyone, self.rank))
        if self.size >= 4 and hasattr(self.nccl, "ncclCommSplit"):
            half = ctypes.c_void_p()
            color = 2 * self.rank // self.size
            self.check("ncclCommSplit", self.communicators[0], color, self.rank, ctypes.byref(half), None)
            self.groups.append(Communicator(half, [rank for rank in everyone if 2 * rank // self.size == color], self.rank))

    def make_user_buffers(self):
        """Memory of ncclMemAlloc: a message's source, and one that only holds contents; the first as a symmetric window, too, where NCCL has them."""
        found = []
        for _ in range(2):
            pointer = ctypes.c_void_p()
            if not self.all_have("ncclMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(self.buffer_bytes)):
                return
            found.append(pointer.value)
        self.user = found[0]
        self.fill(found[1], 3)

    def register_window(self):
        if self.user is None or self.version() < WITH_WINDOWS:
            return
        window = ctypes.c_void_p()
        if self.all_have("ncclCommWindowRegister", self.communicators[1], self._at(self.user), ctypes.c_size_t(self.buffer_bytes), ctypes.byref(window), SYMMETRIC_WINDOW):
            self.window = window.value

    def all_have(self, name, *arguments):
        """Whether a call that not every NCCL and machine has worked on all ranks; where it did not on one, a note says so."""
        said = self.barrier(getattr(self.nccl, name)(*arguments) if hasattr(self.nccl, name) else "nothing")
        if wrong := [answer for answer in said if answer != 0]:
            self.notes.append("without %s, which answered %s" % (name, wrong[0]))
        return not wrong

    def fill(self, address, salt):
        """Writes contents that are compared after each resume."""
        self.contents.write(address, values(1, 7 * self.rank + salt, self.buffer_bytes // 4))

    def capture(self):
        """A CUDA graph with an all-reduce from send to receive, which is replayed after each resume."""
        if self.driver.simulated:
            return
        stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.driver.call("cuStreamCreate", ctypes.byref(stream), NONBLOCKING_STREAM)
        self.driver.call("cuStreamBeginCapture_v2", stream, RELAXED_CAPTURE)
        self.data("ncclAllReduce", self.send, self.receive, self.sizes[-1] // 4, rank_process.SUM, self.communicators[0], stream)
        self.driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self.graph = (executable, stream)

    # ---- comparing

    def run(self, what, source, wanted, act):
        """Writes `source` to send, poisons receive, acts, and compares."""
        self.driver.write(self.send, source)
        self.driver.fill(self.receive, POISON, len(wanted))
        self.driver.synchronize()
        began = time.monotonic()
        act()
        self.driver.synchronize()
        self.seconds += time.monotonic() - began
        self.contents.expect(what, self.receive, wanted)

    def collectives(self, group, size, salt):
        """Each kind once; they are stock calls on the default stream."""
        part = max(1, size // 4 // group.size)
        count = part * group.size
        base = [7 * rank + salt for rank in group.ranks]
        own, comm = base[group.own], group.handle
        source = values(1, own, count)
        added = values(group.size, sum(base), count)
        mine = slice(4 * part * group.own, 4 * part * (group.own + 1))
        label = "of %d bytes on a communicator of %d ranks" % (4 * count, group.size)

        self.run("all-reduce " + label, source, added, lambda: self.data("ncclAllReduce", self.send, self.receive, count, rank_process.SUM, comm, None))
        self.run("all-gather " + label, source, b"".join(values(1, one, part) for one in base),
                 lambda: self.data("ncclAllGather", self.send, self.receive, part, comm, None))
        self.run("reduce-scatter " + label, source, added[mine],
                 lambda: self.data("ncclReduceScatter", self.send, self.receive, part, rank_process.SUM, comm, None))
        root = salt % group.size
        self.run("broadcast " + label, source, values(1, base[root], count),
                 lambda: self.data("ncclBroadcast", self.send, self.receive, count, root, comm, None))
        first = part * group.own
        self.run("all-to-all " + label, source, b"".join(values(1, one, part, first) for one in base), lambda: self.exchange(group, part))

    def exchange(self, group, part):
        self.check("ncclGroupStart")
        for peer in range(group.size):
            self.message("ncclSend", self.send + 4 * part * peer, part, peer, group.handle)
            self.message("ncclRecv", self.receive + 4 * part * peer, part, peer, group.handle)
        self.check("ncclGroupEnd")

    def everything(self, salt):
        """All collectives, all contents, the graph. Returns the seconds without writing and comparing."""
        self.seconds = 0.0
        for group in self.groups:
            for size in self.sizes:
                self.collectives(group, size, salt)
        count, base = self.sizes[-1] // 4, [7 * rank + salt for rank in range(self.size)]
        source, added = values(1, base[self.rank], count), values(self.size, sum(base), count)
        if self.user is not None:
            self.driver.write(self.user, source)
            self.run("all-reduce from memory of ncclMemAlloc", source, added,
                     lambda: self.data("ncclAllReduce", self.user, self.receive, count, rank_process.SUM, self.communicators[1], None))
        if self.graph is not None:
            executable, stream = self.graph
            self.run("a CUDA graph with an all-reduce", source, added, lambda: self.driver.call("cuGraphLaunch", executable, stream))
        self.contents.expect_all()
        return self.seconds


# ---- pauses


def stand_in_card():
    """Whether this process's network card is the tests'."""
    with contextlib.suppress(OSError):
        return hasattr(ctypes.CDLL("libibverbs.so.1", os.RTLD_NOLOAD | os.RTLD_NOW), "amem_card_counts")
    return False


def under_amem(amem):
    stats = amem.stats()
    if not stats.get("session"):
        raise rank_process.Failed("NCCL is not under AMem: %s" % (stats.get("reason") or stats["nccl_libraries"]))
    return stats


def kinds_of(amem, program_bytes):
    """NCCL's memory by kind, and the program's: [{"kind", "bytes", "stays": {reason: bytes}}]. `program_bytes`: that this rank allocated."""
    kinds = amem.stats()["kinds"]
    row = next((row for row in amem.memory()["tags"] if row["tag"] == PROGRAM), None)
    if row is None:
        return kinds + [{"kind": "the program's own", "bytes": program_bytes, "stays": {"AMEM_SCOPE=all takes it": program_bytes}}]
    return kinds + [{"kind": "the program's own", "bytes": row["bytes"], "stays": row["kept"]}]


def cycle(proof, amem, result, number, options):
    tags = (PROGRAM, NCCL) if os.environ.get("AMEM_SCOPE") == "all" else (NCCL,)
    proof.driver.synchronize()
    proof.barrier()
    before = proof.driver.used_bytes()
    result["pause_seconds"].append(proof.timed(lambda: amem.pause(*tags, **options)))  # its barrier: all GPUs are idle
    proof.barrier()
    after = proof.driver.used_bytes()
    if number == 0:
        result["kinds"] = kinds_of(amem, proof.program_bytes)
        result["cards"] = next((row.get("cards", []) for row in amem.memory()["tags"] if row["tag"] == NCCL), [])
        result["used_bytes"], result["paused_bytes"] = before, after
    result["resume_seconds"].append(proof.timed(lambda: amem.resume(*tags)))
    proof.barrier()
    result["collectives_seconds"].append(proof.everything(number + 2))


def prove(pipe, rank, size, nccl, device, cycles, shared, windows):
    """cycles: pauses; 0: NCCL without AMem.  shared: ranks of one communicator are on one GPU.  windows: whether to register a symmetric one."""
    proof = Proof(rank, size, pipe, nccl, device)
    if shared and proof.version() < rank_process.WITH_SHARED_GPUS:
        raise rank_process.Failed("several ranks on a GPU need NCCL 2.30 or later")
    result = {"rank": rank, "gpu": proof.driver.uuid(device), "simulated": proof.driver.simulated, "version": proof.version(),
              "start_seconds": proof.timed(proof.make_groups), "pause_seconds": [], "resume_seconds": [], "collectives_seconds": []}
    proof.make_user_buffers()
    proof.barrier()
    if windows:
        proof.register_window()
    result["collectives_seconds"].append(proof.everything(0))
    proof.capture()
    proof.barrier()
    result["collectives_seconds"].append(proof.everything(1))
    proof.barrier()
    result["stand_in_card"] = stand_in_card()
    if cycles:
        import amem
        result["amem"] = under_amem(amem)["version"]
        renews = os.environ.get("AMEM_NETWORK") == "renew"
        for number in range(cycles):
            cycle(proof, amem, result, number, {"hosts_idle": True} if renews else {})
        if renews:  # a job's pauses may know nothing of other hosts
            cycle(proof, amem, {name: [] for name in ("pause_seconds", "resume_seconds", "collectives_seconds")}, cycles, {})
    proof.barrier()
    return {**result, "compared_bytes": proof.contents.compared, "window": proof.window is not None, "graph": proof.graph is not None, "notes": proof.notes}


if __name__ == "__main__":
    rank_process.main(prove)
