"""Who uses a GPU, as NVIDIA's management library says it. Standard library only."""

import ctypes
from typing import Any, Collection, List, NamedTuple, Optional

MOST_PROCESSES = 256
NOT_VISIBLE_BYTES = 1 << 30  # more than the driver has for itself on an idle GPU,
NOT_VISIBLE_SHARE = 0.02     # or this much of a large one
BOTH_KINDS = ("GPU-", "MIG-")


class _Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("bytes", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Use(NamedTuple):
    """Of one GPU: processes that compute on it, as far as this process may know them, and bytes in use of all bytes."""

    pids: List[int]
    used: int
    total: int

    def by_others(self) -> Optional[str]:
        """In words; None: nobody uses it."""
        if said := self.by_processes():
            return said
        if self.used > max(NOT_VISIBLE_BYTES, NOT_VISIBLE_SHARE * self.total):
            return "%d MiB, of processes that cannot be seen from here" % (self.used >> 20)
        return None

    def by_processes(self, own: Collection[int] = ()) -> Optional[str]:
        """The same of processes that can be seen, without `own`."""
        pids = [pid for pid in self.pids if pid not in own]
        return "process%s %s" % ("es" if len(pids) > 1 else "", ", ".join(map(str, pids))) if pids else None


class Nvml:
    """OSError: there is no management library, or it does not answer."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        if result := self._library.nvmlInit_v2():
            raise OSError("nvmlInit answered %d" % result)

    def use(self, uuid: str) -> Use:
        """Of the GPU with that uuid, which has no prefix. OSError: it is not known, or does not say."""
        device = self._device(uuid)
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        count, found = ctypes.c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), found)
        return Use(sorted({found[i].pid for i in range(count.value)}), memory.used, memory.total)

    def driver_version(self) -> str:
        """"" where it does not say."""
        text = ctypes.create_string_buffer(96)
        function = getattr(self._library, "nvmlSystemGetDriverVersion", None)
        return text.value.decode() if function is not None and function(text, 96) == 0 else ""

    def _device(self, uuid: str) -> ctypes.c_void_p:
        device, result = ctypes.c_void_p(), 0
        for kind in BOTH_KINDS:
            result = self._library.nvmlDeviceGetHandleByUUID((kind + uuid).encode(), ctypes.byref(device))
            if result == 0:
                return device
        raise OSError("the management library does not know the GPU %s: it answered %d" % (uuid, result))

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise OSError("the management library has no %s" % name)
        if result := function(*arguments):
            raise OSError("%s answered %d" % (name, result))
