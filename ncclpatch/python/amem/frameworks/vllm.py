"""vLLM's sleep mode by AMem. The wheel's entry point registers the backend; without the wheel, call amem_plugins.vllm() in every process
before the engine is made."""

import contextlib
import functools
import gc
import logging

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

import amem
from amem import _pools, _tags, frameworks

_log = logging.getLogger("amem")
PREFIX = "vllm."
DISCARDED = ("kv_cache", "workspace")  # what vLLM's own backend does not save either, and is large
GRAPHS = "cudagraph"  # as vLLM calls it
DEFERRABLE = ("weights", "kv_cache")  # a wake-up brings all other tags back, whichever it names
_nccl = True  # whether NCCL's memory goes with a suspend


class Allocator:
    """Takes the place of vLLM's CuMemAllocator: a pool of AMem's for each of vLLM's tags."""

    def __init__(self):
        self._open = {}  # vLLM's tags that have a pool -> how many use_memory_pool are open
        self._asleep = _tags.Want()
        self.away = []  # the names that are paused

    @contextlib.contextmanager
    def use_memory_pool(self, tag=None):
        """What this thread allocates inside belongs to vLLM's tag."""
        tag = tag or "default"
        self._open.setdefault(tag, 0)
        with amem.pool(PREFIX + tag, "discard" if tag in DISCARDED else "preserve"):
            self._open[tag] += 1
            try:
                yield
            finally:
                self._open[tag] -= 1
        side = _pools.backend()
        if side and not any(self._open.values()):
            for name in self.names(set(self._open) - {GRAPHS}):
                side.drop(name)  # what was freed inside, as in online quantization, goes back to the driver
            _pools.empty_cache()

    @contextlib.contextmanager
    def cudagraph_pool(self):
        """What is captured inside goes with a sleep (--sleep-mode-offload-cudagraph)."""
        self._open.setdefault(GRAPHS, 0)
        with _pools.capturing(PREFIX + GRAPHS) as pool:
            yield pool

    def names(self, tags=None):
        return [PREFIX + tag for tag in self._open if tags is None or tag in tags]

    def sleep(self, offload_tags=None, more=()):
        """Pauses all tags, and `more` with them: all or none. Whether a tag's contents are saved was decided by its first use."""
        del offload_tags
        self._pause([*self.names(), *more])

    def discard(self, tags):
        self._pause(self.names((tags,) if isinstance(tags, str) else tags))

    def _pause(self, names):
        gc.collect()
        _pools.empty_cache()
        if names:
            _log.info("sleep: %s", self._asleep.pause(*names))
            self.away += [name for name in names if name.startswith(PREFIX) and name not in self.away]

    def wake_up(self, tags=None):
        gc.collect()
        _pools.empty_cache()
        chosen = [tag for tag in self._open if tags is None or tag in tags or tag not in DEFERRABLE]
        if chosen:
            self._asleep.resume(*self.names(chosen), wait_for_memory=frameworks.WAIT_FOR_MEMORY)
            self.away = [name for name in self.away if name not in self.names(chosen)]

    def wake_nccl(self):
        self._asleep.resume(_tags.NCCL, wait_for_memory=frameworks.WAIT_FOR_MEMORY)

    def get_current_usage(self):
        mine = set(self.names())
        return sum(row["part_bytes"] for row in amem.memory()["tags"] if row["tag"] in mine) if mine else 0

    def release_pools(self):
        """vLLM calls it when a worker shuts down. AMem's pools end with the process."""

    close = release_pools


def _allocator():
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


class Backend(SleepModeBackend):
    """Sleep level 1 and 2 are alike: weights are saved, although vLLM loads them anew after level 2."""

    def suspend(self, level=1):
        allocator = _allocator()
        if isinstance(allocator, Allocator):
            allocator.sleep(more=[_tags.NCCL] if _nccl and frameworks.nccl_is_under_amem() else [])
        else:  # weights and caches were allocated before AMem was there
            allocator.sleep(offload_tags=("weights",) if level == 1 else ())
            if _nccl:
                frameworks.pause_nccl()
        self._state = "SUSPENDED"

    def resume(self, tags=None):
        self._state = "RESUMING"
        allocator = _allocator()
        try:  # NCCL first: weights that are sent next may come through it
            if not isinstance(allocator, Allocator):
                frameworks.resume_nccl()
            elif _nccl and frameworks.nccl_is_under_amem():
                allocator.wake_nccl()
            allocator.wake_up(tags)
        except Exception:
            self._state = "SUSPENDED"
            raise
        self._state = "RUNNING"

    def discard(self, tags):
        _allocator().discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def is_supported(cls):
        try:
            return bool(amem.version())
        except (OSError, amem.AmemError):
            return False

    preserves_communicators = preserves_compiled_artifacts = preserves_graphs_with_communicators = classmethod(lambda cls: True)


def guard(worker):
    """A step on memory that is asleep is an error that says so: it would fault, and the process could not use its GPU any more. Ray's compiled
    graph asks the worker's runner for a step, and not the worker; the runner is made when the worker gets its device."""
    _guard_steps(worker)
    for name in ("init_device", "load_model"):
        if hasattr(worker, name):
            setattr(worker, name, _and_guard_its_runner(worker, getattr(worker, name)))


def _and_guard_its_runner(worker, method):
    @functools.wraps(method)
    def made(*arguments, **named):
        result = method(*arguments, **named)
        _guard_steps(getattr(worker, "model_runner", None))
        return result

    return made


def _guard_steps(owner):
    """Once, where it has steps."""
    execute = getattr(owner, "execute_model", None)
    if execute is None or getattr(execute, "amem_wraps", None) is not None:
        return

    @functools.wraps(execute)
    def guarded(*arguments, **named):
        allocator = _allocator()
        output = arguments[0] if arguments else named.get("scheduler_output")
        if getattr(allocator, "away", None) and getattr(output, "total_num_scheduled_tokens", 1):
            raise RuntimeError("vLLM was asked for a step while asleep: its memory under %s is paused; wake_up() restores all of it"
                               % ", ".join(name[len(PREFIX):] for name in allocator.away))
        return execute(*arguments, **named)

    guarded.amem_wraps = execute
    owner.execute_model = guarded


def install(nccl=True):
    """Has vLLM allocate weights and caches from AMem's pools, in a worker, before it loads a model. nccl=False leaves NCCL to vLLM,
    whose --enable-nccl-comm-suspend AMem serves as well."""
    global _nccl
    _nccl = nccl
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance is None:
        CuMemAllocator.instance = Allocator()
    elif not isinstance(CuMemAllocator.instance, Allocator):
        _log.warning("vLLM's own allocator has been used in this process; it goes on with weights and caches, and AMem pauses NCCL alone")
