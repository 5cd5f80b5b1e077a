"""A stand-in for libamem_nccl.so's tags and pools, called through ctypes as the real one, and for PyTorch on CUDA, on CPU tensors.

What a pause takes away is overwritten with ones in every bit (not a number, in floats), and a resume without waiting brings it back only
in the wait. So whoever reads too early, or forgets to save, computes with what is wrong.
"""
import contextlib
import ctypes
import json

from amem import _adopt, _calls, _library, _pools

PAUSED, RESIDENT, RESUMING = "paused", "resident", "resuming"


class Library:
    """amem.h on a dict of tags. `calls` has every call with its arguments; `fail` maps (function, tag) to (code, text)."""

    NAMES = {
        "amem_pool": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
        "amem_pool_enter": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p),
        "amem_pool_leave": ctypes.CFUNCTYPE(ctypes.c_int),
        "amem_want": ctypes.CFUNCTYPE(ctypes.c_ulonglong),
        "amem_want_pause": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ulonglong, ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p),
        "amem_want_resume": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ulonglong, ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_uint, ctypes.c_int),
        "amem_resume": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_uint, ctypes.c_int),
        "amem_wait": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p),
        "amem_json": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)),
        "ncclPause": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p),
        "ncclResume": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p),
    }

    OTHERS = 1 << 20  # bytes on device 0 that are not AMem's

    def __init__(self, contents=None):
        self.calls, self.fail, self.stack, self.error = [], {}, [], b""
        self.contents = contents
        self.states = {"nccl": RESIDENT, "user": RESIDENT}
        self.wants = {}  # who wants each tag paused; 0: the plain calls
        self.last_want = 0
        self.policies = {"nccl": 0, "user": 0}
        self.nccl_libraries = []
        self.sizes, self.kept = {}, {}  # bytes by tag, beside those of `contents`
        self.too_little = 0  # how often the question whether there is enough memory is answered with no
        self.bypassed = False  # whether PyTorch takes memory without asking
        self._functions = {name: kind(getattr(self, "_" + name)) for name, kind in self.NAMES.items()}

    def __getattr__(self, name):
        functions = self.__dict__.get("_functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(name)

    def amem_last_error(self):
        return self.error

    def amem_version(self):
        return b"0"

    def _result(self, name, tag, code=0, text=""):
        if code == 0:
            code, text = self.fail.get((name, tag), (0, ""))
        if code:
            self.error = text.encode()
        return code

    def _unknown(self, tag):
        if tag in self.states:
            return None
        return 4, "no tag %s; known are %s" % (tag, ", ".join(sorted(self.states)))

    def _amem_pool(self, tag, policy):
        tag = tag.decode()
        self.calls.append(("pool", tag, policy))
        if self.policies.setdefault(tag, policy) != policy or tag in ("nccl", "user"):
            return self._result("amem_pool", tag, 4, "the pool %s has another policy" % tag)
        self.states.setdefault(tag, RESIDENT)
        return self._result("amem_pool", tag)

    def _amem_pool_enter(self, tag):
        self.calls.append(("enter", tag.decode()))
        self.stack.append(tag.decode())
        return self._result("amem_pool_enter", tag.decode())

    def _amem_pool_leave(self):
        self.calls.append(("leave", self.stack.pop()))
        return 0

    def _amem_want(self):
        self.last_want += 1
        return self.last_want

    def _wanted_by(self, tag):
        if self.states[tag] == RESIDENT:
            self.wants[tag] = set()
        return self.wants.setdefault(tag, set())

    def _amem_want_pause(self, want, tags, count, flags, stream):
        names = [tags[i].decode() for i in range(count)]
        if names == ["nccl"] and stream is None:
            return self._cycle_of_nccl("ncclPause", want)
        self.calls.append(("pause", tuple(names), flags, stream))
        done = []
        for tag in names:
            code = self._result("amem_pause", tag, *(self._unknown(tag) or ()))
            if code:
                for other in names[:names.index(tag)]:
                    self._wanted_by(other).discard(want)
                for other in done:
                    self._bring_back(other)
                return code
            if self.states[tag] == RESUMING:
                self._bring_back(tag)  # what is under way is waited for
            self._wanted_by(tag).add(want)
            if self.states[tag] == RESIDENT:
                self.states[tag] = PAUSED
                done.append(tag)
                if self.contents:
                    self.contents.take(tag, keep=self.policies[tag] == 0)
        return 0

    def _amem_resume(self, tags, count, flags, priority):
        names = [tags[i].decode() for i in range(count)]
        if flags == 8:
            self.calls.append(("ask", tuple(names)))
            self.too_little -= 1
            return self._result("ask", None, *((1, "device 0 has too little, pid 7 has the rest") if self.too_little >= 0 else ()))
        return self._amem_want_resume(0, tags, count, flags, priority)

    def _amem_want_resume(self, want, tags, count, flags, priority):
        names = [tags[i].decode() for i in range(count)]
        if flags == 16:
            self.calls.append(("let go", tuple(names)))
            self._let_go(names, want)
            return 0
        if names == ["nccl"] and not flags:
            return self._cycle_of_nccl("ncclResume", want)
        self.calls.append(("resume", tuple(names), flags, priority))
        self._let_go(names, want)  # also of those that a failure does not reach
        for tag in names:
            code = self._result("amem_resume", tag, *(self._unknown(tag) or ()))
            if not code and self._wanted_by(tag):
                code = self._result("", tag, *((5, "tag %s stays paused" % tag) if want == 0 else ()))
                if not code:
                    continue
            if code:
                return code
            if self.states[tag] == PAUSED:
                if flags & 1:
                    self.states[tag] = RESUMING
                else:
                    self._bring_back(tag)
        return 0

    def _let_go(self, names, want):
        for tag in self.states.keys() & set(names):
            self._wanted_by(tag).discard(want)

    def _bring_back(self, tag):
        self.states[tag] = RESIDENT
        if self.contents:
            self.contents.give(tag)

    def _waited(self, name, tag):
        unknown = self._unknown(tag)
        code = self._result(name, tag, *(unknown or ()))
        if self.states.get(tag) == RESUMING:
            if code:
                self.states[tag] = PAUSED
            else:
                self._bring_back(tag)
                if name == "amem_wait on a stream":
                    self.states[tag] = RESUMING  # the stream waits, the copies are under way
        return code

    def _amem_wait(self, tag, flags, stream):
        self.calls.append(("wait on", tag.decode(), stream) if flags else ("wait", tag.decode()))
        return self._waited("amem_wait on a stream" if flags else "amem_wait", tag.decode())

    def _write(self, value, buffer, length):
        text = json.dumps(value).encode() + b"\0"
        room, length[0] = length[0], len(text)
        if buffer is None:
            return 0
        if room < len(text):
            return self._result("amem_json", "", 4, "too small")
        ctypes.memmove(buffer, text, len(text))
        return 0

    def _amem_json(self, what, buffer, length):
        if what == b"stats":
            return self._write({"session": None, "nccl_libraries": self.nccl_libraries}, buffer, length)
        if what != b"memory":
            away = {tag: self._bytes(tag) for tag, state in self.states.items() if state == PAUSED and self._bytes(tag)}
            here = {tag: self._bytes(tag) for tag, state in self.states.items() if state != PAUSED and self._bytes(tag)}
            row = {"device": 0, "used_bytes": sum(here.values()) + self.OTHERS, "taken": away, "running": here, "kept": {}, "processes": []}
            return self._write({"schema": 1, "devices": [row], "unplaced": {}}, buffer, length)
        rows = [{"tag": tag, "state": state, "policy": ("preserve", "discard")[self.policies[tag]], "bytes": self._bytes(tag), "part_bytes": self._bytes(tag),
                 "resident_bytes": 0 if state == PAUSED else self._bytes(tag), "kept_bytes": self.kept.get(tag, 0)}
                for tag, state in self.states.items()]
        return self._write({"schema": 1, "tags": rows}, buffer, length)

    def _bytes(self, tag):
        held = sum(storage.nbytes() for storage in self.contents.storages(tag)) if self.contents and not self.bypassed else 0
        return held + self.sizes.get(tag, 0)

    def _ncclPause(self, _):
        return self._cycle_of_nccl("ncclPause", 0)

    def _ncclResume(self, _):
        return self._cycle_of_nccl("ncclResume", 0)

    def _cycle_of_nccl(self, name, want):
        """Of the plain calls, and of a want that names nothing else."""
        self.calls.append((name,))
        code = self._result(name, "nccl")
        if name == "ncclPause" and code == 0:
            self._wanted_by("nccl").add(want)
            self.states["nccl"] = PAUSED
        if name == "ncclResume":
            self._wanted_by("nccl").discard(want)
            if code == 0 and self._wanted_by("nccl"):
                return self._result("", "nccl", 5, "NCCL's memory stays paused") if want == 0 else 0
            if code == 0:
                self.states["nccl"] = RESIDENT
        return code

    def named(self, name):
        return [call for call in self.calls if call[0] == name]


class Contents:
    """The memory of each tag: the storages that adopt() moved there."""

    def __init__(self, torch):
        self._torch, self._saved = torch, {}

    def storages(self, tag):
        for weak, _, home in list(_adopt._homes.values()):
            storage = self._torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None and home == tag:
                yield storage

    def _bytes(self, storage):
        return self._torch.empty(0, dtype=self._torch.uint8).set_(storage)

    def take(self, tag, keep):
        self._saved[tag] = []
        for storage in self.storages(tag):
            view = self._bytes(storage)
            self._saved[tag].append((storage, view.clone() if keep else None))
            view.fill_(255)

    def give(self, tag):
        for storage, saved in self._saved.pop(tag, []):
            if saved is not None:
                self._bytes(storage).copy_(saved)


class Cpu:
    """In place of amem._pools.Cuda: pools of CPU memory on one device, number 0. `entered` are the tags whose MemPools are in use;
    more than one at a time is an error."""

    def __init__(self, torch):
        self.torch = torch
        self.entered, self.dropped, self.when_emptied = [], [], []
        self._state = lambda: None
        self.others = []  # (first address, end) of memory in MemPools of others
        self.lose = False  # whether allocations land elsewhere
        self.allocated = 0  # bytes

    def is_here(self):
        return True

    def check_version(self):
        pass

    def holds(self, storage):
        return storage.device.type == "cpu"

    def device_index(self, device):
        return 0 if device is None or not isinstance(device, int) else device

    def current_stream(self, device):
        return 77

    def synchronize(self, devices):
        pass

    @property
    def caches_emptied(self):
        return len(self.when_emptied)

    def watch(self, state):
        """`when_emptied` notes what state() is each time."""
        self._state = state

    def empty_cache(self):
        assert not self.entered, "PyTorch cannot empty its caches within a pool"
        self.when_emptied.append(self._state())

    def drop(self, tag):
        self.dropped.append(tag)

    def has_graphs(self):
        return bool(self.others)

    def usage(self, device):
        return {"PyTorch's tensors": 512}

    def allocated_ever(self, devices):
        return self.allocated

    @contextlib.contextmanager
    def routed(self, tag, device):
        assert not self.entered or self.entered[-1][0] == tag, "two pools are in use at once"
        self.entered.append((tag, device))
        try:
            yield
        finally:
            self.entered.remove((tag, device))

    def segments(self):
        rows = [(first, end, None) for first, end in self.others]
        for weak, address, tag in _adopt._homes.values():
            storage = self.torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None and not self.lose:
                rows.append((address, address + storage.nbytes(), tag))
        return rows


@contextlib.contextmanager
def installed(torch=None):
    """The package on these stand-ins, as (library, PyTorch's side)."""
    library, side = Library(contents=torch and Contents(torch)), torch and Cpu(torch)
    before = _calls.lib, _pools._backend, _pools.backend, _adopt._homes, _library.nccl_is_loaded
    _calls.lib, _pools._backend, _adopt._homes = library, side, {}
    _pools.backend = lambda: side
    _library.nccl_is_loaded = lambda: bool(library.nccl_libraries)
    try:
        yield library, side
    finally:
        _calls.lib, _pools._backend, _pools.backend, _adopt._homes, _library.nccl_is_loaded = before
