"""PyTorch's memory from AMem's pools: one torch.cuda.MemPool for each tag and device. PyTorch is imported by the program, not here."""

import atexit
import contextlib
import ctypes
import re
import sys
import threading
from typing import Any, Iterator

from . import _calls, _library, _tags

OLDEST = (2, 8)  # of PyTorch: until then torch.cuda.use_mem_pool is one for all threads of the process
ALLOCATE, FREE = "amem_alloc", "amem_free"


class Cuda:
    """PyTorch on CUDA as pools and adopt() use it. Tests replace it."""

    def __init__(self, torch):
        self.torch = torch
        self._allocator = None
        self._pools = {}  # (tag, device) -> MemPool
        self._captures = False  # whether a graph was captured into a tag
        self._tags_of_ids = {}  # of all MemPools ever made, because their memory may outlive them

    def is_here(self):
        return self.torch.cuda.is_available()

    def holds(self, storage):
        """Whether a storage is memory of a kind that pools have."""
        return storage.device.type == "cuda"

    def device_index(self, device):
        return self.torch.cuda._utils._get_device_index(device, optional=True)

    def current_stream(self, device):
        return self.torch.cuda.current_stream(device)

    def synchronize(self, devices):
        for device in devices:
            self.torch.cuda.synchronize(device)

    def empty_cache(self):
        self.torch.cuda.empty_cache()

    def routed(self, tag, device):
        """A context in which this thread's allocations on the device come from the tag's MemPool."""
        return self.torch.cuda.use_mem_pool(self.mem_pool(tag, device), device)

    def check_version(self):
        version = tuple(map(int, re.findall(r"\d+", self.torch.__version__)[:2]))  # (2, 8) of "2.8.0a0+git1234"
        if not hasattr(self.torch.cuda, "MemPool") or version < OLDEST:
            raise _calls.AmemError(5, "amem.pool needs PyTorch %d.%d or later, and this is %s: earlier versions have no torch.cuda.MemPool, or "
                                      "one that captures the allocations of all threads" % (*OLDEST, self.torch.__version__))

    def pool_for_graphs(self, tag):
        self._captures = True
        return tuple(self.mem_pool(tag, self.device_index(None)).id)

    def mem_pool(self, tag, device):
        found = self._pools.get((tag, device))
        if found is None:
            self.check_version()
            if self._allocator is None:
                self._allocator = self.torch.cuda.memory.CUDAPluggableAllocator(_library.find(), ALLOCATE, FREE)
                atexit.register(self._outlive_the_interpreter)
            with self.torch.cuda.device(device):  # a MemPool belongs to the device that is current when it is made
                found = self.torch.cuda.MemPool(self._allocator.allocator())
            self._pools[(tag, device)] = found
            self._tags_of_ids[tuple(found.id)] = tag
        return found

    def _outlive_the_interpreter(self):
        """A MemPool that is destroyed while the process ends would call a driver that may be gone."""
        for one in [*self._pools.values(), self._allocator]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        self._pools.clear()

    def drop(self, tag):
        """Drops the tag's MemPools; the next use makes new ones. Memory in use stays; what is freed of it returns to AMem when PyTorch
        empties its caches, which it does not do for a MemPool that can still be used."""
        for key in [key for key in self._pools if key[0] == tag]:
            del self._pools[key]

    def segments(self):
        """(first address, end, tag) of memory that a MemPool has; the tag is None for a MemPool that is not AMem's, such as a CUDA
        graph's."""
        found = []
        for segment in self.torch.cuda.memory_snapshot():
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            if pool != (0, 0):
                found.append((segment["address"], segment["address"] + segment["total_size"], self._tags_of_ids.get(pool)))
        return found


    def has_graphs(self):
        """Whether a CUDA graph may have been captured: memory lies in a private pool, or in a tag's for graphs. Any other MemPool counts, too."""
        return self._captures or any(tag is None for _, _, tag in self.segments())

    def usage(self, device):
        """Bytes of PyTorch's memory on a device that are of no pool of AMem's, by what they are for."""
        tensors = caches = private = 0
        for segment in self.torch.cuda.memory_snapshot():
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            if segment["device"] != device or pool in self._tags_of_ids:
                continue
            if pool != (0, 0):
                private += segment["total_size"]
            else:
                tensors += segment["allocated_size"]
                caches += segment["total_size"] - segment["allocated_size"]
        found = {"PyTorch's tensors": tensors, "PyTorch's caches": caches, "PyTorch's private pools (CUDA graphs)": private}
        return {whose: count for whose, count in found.items() if count}

    def allocated_ever(self, devices):
        """Bytes that PyTorch's allocator has handed out so far; 0 where another allocator is in force, which does not count."""
        try:
            return sum(self.torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0) for device in devices)
        except RuntimeError:
            return 0


_backend = None


def backend():
    """PyTorch's CUDA, or None where the program has not imported PyTorch or there is no GPU."""
    global _backend
    torch = sys.modules.get("torch")
    if isinstance(_calls.lib, _library.Off):
        return None
    if _backend is None and hasattr(torch, "cuda"):
        _backend = Cuda(torch)
    return _backend if _backend is not None and _backend.is_here() else None


def check_version():
    """AmemError (5) where PyTorch is too old for pools: said before a training begins, and not by its first rollout."""
    side = backend()
    if side:
        side.check_version()


class _Routing(threading.local):
    """The pools that this thread is in. Only the innermost one has its MemPools in use: which of two nested ones PyTorch takes memory
    from is not documented."""

    def __init__(self):
        super().__init__()
        self.entries = []  # tag and devices, the innermost last
        self.in_use = contextlib.ExitStack()

    def use_innermost(self):
        tag, devices = self.entries[-1] if self.entries else (None, ())
        try:
            self.in_use.close()
        finally:
            with contextlib.ExitStack() as opening:
                for device in devices:
                    opening.enter_context(_backend.routed(tag, device))
                self.in_use = opening.pop_all()


_routing = _Routing()


@contextlib.contextmanager
def _innermost(tag, devices):
    """Makes this thread allocate from a pool; without devices, as outside of pools."""
    _routing.entries.append((tag, devices))
    try:
        _routing.use_innermost()
        yield
    finally:
        _routing.entries.pop()
        _routing.use_innermost()


def outside():
    """A context in which this thread allocates as outside of pools."""
    return _innermost(None, ())


def empty_cache():
    """Gives PyTorch's caches back to the driver, outside of pools: inside, PyTorch would refuse or skip the cache outside."""
    torch_side = backend()
    if torch_side:
        with outside():
            torch_side.empty_cache()


@contextlib.contextmanager
def pool(tag: str, policy: str = "preserve", device: Any = None) -> Iterator[None]:
    """What this thread allocates inside comes from the pool `tag`, which amem.pause(tag) and amem.resume(tag) take away and bring back.

        with amem.pool("weights"):
            model = Model().cuda()          # tensors of any shape; they stay in the pool wherever they are passed to

    tag:     any name but "nccl" and "user". The pool is made by the first use, and all later ones are the same pool.
    policy:  "preserve": contents are saved to pinned host memory in a pause. "discard": they are not, and after a resume the memory
             holds anything, unless `amem pause` or `amem freeze` asked for it; for caches. One policy for each tag.
    device:  a CUDA device, or a list of them, whose allocations go to the pool; None: the current one.

    Nests: the innermost pool is allocated from. Threads that are started inside, autograd's among them, are outside of it; two threads
    cannot be in the pool of one tag and device at once (PyTorch raises RuntimeError).
    PyTorch takes memory in multiples of 2 MiB, keeps what is freed for the same pool, and gives it back when the process ends. It does
    not empty its other caches when memory for a pool is short: call torch.cuda.empty_cache() before a large allocation.
    Its tensors have no CUDA IPC handle: torch.multiprocessing fails with "CUDA error: invalid argument". Send a clone() that was made
    outside the pool to another process.
    Without PyTorch (or imported later), the pool is for C code of this thread that calls amem_alloc. Do not open one during the
    capture of a CUDA graph, whose allocations are the graph's.

    RuntimeWarning, on the way out: what was allocated inside did not come from the pool, so that a pause will not free it, for
    example because of expandable_segments in PYTORCH_CUDA_ALLOC_CONF; once for each tag.

    AmemError: another policy than before, or a reserved name (4); AMem cannot work here, PyTorch is older than 2.8, or the tag is paused
    (5). While a thread is inside, amem.pause(tag) fails (5). When memory is short the allocation fails with PyTorch's own out of memory
    error; amem.memory() tells which.
    """
    torch_side = backend()
    chosen = device if isinstance(device, (list, tuple)) else [device]
    devices = list(dict.fromkeys(map(torch_side.device_index, chosen))) if torch_side else []
    _tags.open_pool(tag, policy)
    before = None if torch_side is None or tag in _landed else torch_side.allocated_ever(devices)
    enter, leave = _calls.lib.amem_pool_enter, _calls.lib.amem_pool_leave
    _calls.check(enter(_tags.encode(tag)))
    try:
        with _innermost(tag, devices):
            yield
    finally:
        _calls.check(leave())
        if before is not None and torch_side.allocated_ever(devices) > before:
            _check_landed(tag)


@contextlib.contextmanager
def capturing(tag: str) -> Iterator[Any]:
    """What the capture of a CUDA graph on this thread allocates inside belongs to the tag, and is saved by its pauses: replays read there
    what the capture has written. Gives PyTorch's number of the pool, for the capture; None where there is none."""
    torch_side = backend()
    if torch_side is None:
        yield None
        return
    _tags.open_pool(tag, "preserve")
    _calls.check(_calls.lib.amem_pool_enter(_tags.encode(tag)))
    try:
        yield torch_side.pool_for_graphs(tag)
    finally:
        _calls.check(_calls.lib.amem_pool_leave())


ELSEWHERE = ("PyTorch allocated outside the pool %r (is expandable_segments in PYTORCH_CUDA_ALLOC_CONF or "
             "PYTORCH_NO_CUDA_MEMORY_CACHING set, or another allocator active?)")
_landed = set()  # tags of which that was looked at


def _check_landed(tag):
    """Whether anything that PyTorch allocated in a pool came from AMem. Where its memory cannot be read it is not said that it did not."""
    row = _tags.row_of(tag)
    if row is None:
        return
    _landed.add(tag)
    if not row["part_bytes"]:
        _library.warn("amem.pool: " + ELSEWHERE % tag + "; a pause will not free it", stacklevel=4)
