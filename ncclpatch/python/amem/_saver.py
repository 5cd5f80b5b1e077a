"""The calls of the package torch_memory_saver, carried out by AMem."""

import contextlib
import types
from typing import Any

from . import _calls, _library, _pools, _tags

DEFAULT = "default"


class TorchMemorySaver:
    """region, pause and resume as torch_memory_saver has them. Its settings are accepted and change nothing."""

    wait_for_memory = 0  # seconds, as of amem.resume

    def __init__(self):
        self._regions = {}  # tag -> {enable_cpu_backup: AMem's tag}

    def _amem_tag(self, tag, backup):
        """torch_memory_saver decides on contents for each region, AMem for each tag: a second policy gets a tag of its own."""
        policies = self._regions.setdefault(tag, {})
        if backup not in policies:
            policies[backup] = "%s.%s" % (tag, "preserve" if backup else "discard") if policies else tag
        return policies[backup]

    @contextlib.contextmanager
    def region(self, tag=DEFAULT, enable_cpu_backup=False, enable_disk_backup=False, cpu_backup_backend=None):
        """What is allocated inside belongs to `tag`; its contents survive a pause, in pinned host memory, if either backup is enabled."""
        del cpu_backup_backend
        backup = bool(enable_cpu_backup or enable_disk_backup)
        with _pools.pool(self._amem_tag(tag, backup), "preserve" if backup else "discard"):
            yield

    def _chosen(self, tag):
        if tag is None:
            return [name for policies in self._regions.values() for name in policies.values()]
        return list(self._regions[tag].values()) if tag in self._regions else [tag]

    def pause(self, tag=None):
        """Gives the memory of a tag back; None: of all tags that regions were opened for."""
        chosen = self._chosen(tag)
        if chosen:
            _tags.pause(*chosen)

    def resume(self, tag=None):
        """Brings the memory of a tag back; None: of all tags that regions were opened for."""
        chosen = self._chosen(tag)
        if chosen:
            _tags.resume(*chosen, wait_for_memory=self.wait_for_memory)

    def disable(self, dispose_mem_pool_after_use=True):
        """What is allocated inside belongs to no tag."""
        del dispose_mem_pool_after_use
        return _pools.outside()

    def cuda_graph(self, *_, **__):
        raise NotImplementedError("AMem does not pause the memory of a CUDA graph; capture with torch.cuda.graph, and pause the rest")

    def set_disk_backup_dir(self, path):
        """Accepted; contents are saved in host memory."""

    def get_cpu_backup(self, *_, **__):
        raise NotImplementedError("AMem's copies of paused memory cannot be read; resume the tag")

    enabled = True
    hook_mode = property(lambda self: "amem", lambda self, value: None)
    memory_margin_bytes = property(lambda self: 0, lambda self, value: None)
    retain_cpu_backup = property(lambda self: False, lambda self, value: None)


def wrap(target: Any = None) -> Any:
    """Has AMem carry out the calls of torch_memory_saver, in programs that are written for it; returns the object to call.

        import torch_memory_saver                   # the module, or its object of the same name
        amem.wrap(torch_memory_saver)               # before its first use
        saver = amem.wrap()                         # without that package

    Those who imported the object earlier have the same one. region(tag, enable_cpu_backup) is amem.pool(tag, "preserve" or "discard");
    pause(tag) and resume(tag) are amem.pause and amem.resume, where None means every tag of a region. enable_disk_backup saves to host
    memory, too. configure_subprocess, hook_mode, memory_margin_bytes, retain_cpu_backup, set_disk_backup_dir and cpu_backup_backend do
    nothing. cuda_graph and get_cpu_backup raise NotImplementedError.

    With AMEM_ENABLE=0 that package goes on as it is. RuntimeError: the package was used already. TypeError: `target` is something else.
    """
    if target is None:
        return TorchMemorySaver()
    if _library.is_off(_calls.lib):
        return getattr(target, "torch_memory_saver", target)
    if isinstance(target, types.ModuleType):
        saver = wrap(getattr(target, "torch_memory_saver", target))
        target.configure_subprocess = contextlib.nullcontext  # torch_memory_saver needs it to preload its library; AMem needs nothing here
        return saver
    if isinstance(target, TorchMemorySaver):
        return target
    if not all(callable(getattr(target, name, None)) for name in ("region", "pause", "resume")):
        raise TypeError("amem.wrap takes the module torch_memory_saver or its object, not %r" % (target,))
    if getattr(target, "_impl", None) is not None:
        raise RuntimeError("amem.wrap: torch_memory_saver was used already; wrap it before its first region, pause or resume")
    target.__dict__.clear()
    target.__class__ = TorchMemorySaver
    target.__init__()
    return target
