"""Pause, resume and wait by tag. Standard library only; streams may be PyTorch's."""

import collections
import contextlib
import ctypes
import functools
import logging
import os
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from . import _calls, _requests

_log = logging.getLogger("amem")

POLICIES = {"preserve": 0, "discard": 1}
NO_WAIT, ON_STREAM, IN_TIME, ONLY_ASK = 1, 2, 4, 8
NCCL, USER, PROGRAM = "nccl", "user", "program"


def encode(tag: str) -> bytes:
    if not isinstance(tag, str) or not tag:
        several = isinstance(tag, (list, tuple, set, frozenset))
        raise TypeError("a tag is a string that is not empty, not %r%s" % (tag, '; write several as ("weights", "nccl"), or as (*tags)' if several else ""))
    return tag.encode()


class Freed(NamedTuple):
    """What a pause gave back to the driver, in bytes: in all, and of each of its tags. Memory of ncclMemAlloc is "user".

    already: the tags that were paused before, and that this pause left as they were.
    kept:    bytes of the other tags that had to stay on the GPU; amem.memory() has the reasons.
    """

    bytes: int
    tags: Dict[str, int]
    already: Tuple[str, ...]
    kept: int

    def __str__(self) -> str:
        said = ["%s %s" % (_mebibytes(count), tag) for tag, count in self.tags.items() if count]
        text = "%s freed (%s)" % (_mebibytes(self.bytes), ", ".join(said)) if said else "nothing freed"
        if self.already:
            text += "; %s: paused already" % ", ".join(self.already)
        return text + ("; %s kept" % _mebibytes(self.kept) if self.kept else "")


def _mebibytes(count: int) -> str:
    return "%d MiB" % (count >> 20) if count >> 20 else "%d bytes" % count


def _rows() -> Dict[str, Dict[str, Any]]:
    """What memory() says, by tag; nothing where the library cannot say it: then the pause has the reason."""
    try:
        return {row["tag"]: row for row in memory()["tags"]}
    except _calls.AmemError:
        return {}


def allocated_too_early() -> int:
    """Bytes that PyTorch's allocator has from the driver and AMem has not seen, with AMEM_SCOPE=all; 0 where PyTorch is not in use."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if os.environ.get("AMEM_SCOPE") != "all" or cuda is None or not cuda.is_initialized():
        return 0
    said = memory()
    seen = sum(row.get("part_bytes", 0) for row in said["tags"]) + sum(one["bytes"] for one in said.get("left", {}).values())
    return max(0, sum(cuda.memory_reserved(device) for device in range(cuda.device_count())) - seen)


def too_late(count: int) -> str:
    return ("%s of PyTorch's memory were allocated before AMem was there, and stay on the GPU; start the job with "
            "`amem run --scope all`" % _mebibytes(count))


def _measured(tags: Sequence[str], act: Callable[[], None]) -> Freed:
    before = _rows()
    act()
    after = _rows()
    gone = {tag: max(0, before[tag]["resident_bytes"] - after[tag]["resident_bytes"]) if tag in before and tag in after else 0
            for tag in [*tags, *([USER] if NCCL in tags and USER not in tags else [])]}
    already = tuple(tag for tag in tags if tag in before and before[tag]["state"] == "paused")
    kept = sum(after[tag]["kept_bytes"] for tag in gone if tag in after and tag not in already)
    if PROGRAM in tags:
        late = allocated_too_early()
        kept += late + sum(one["bytes"] for one in memory().get("left", {}).values())
        if late:
            _log.warning("pause of tag program: %s", too_late(late))
    return Freed(sum(gone.values()), gone, already, kept)


def stream_pointer(stream: Any) -> ctypes.c_void_p:
    """CUDA's handle of a stream: a torch.cuda.Stream, or the handle as a number, where 0 is the default stream."""
    pointer = getattr(stream, "cuda_stream", stream)
    if isinstance(pointer, bool) or not isinstance(pointer, int):
        raise TypeError("a stream is a torch.cuda.Stream or its handle as a number, not %r" % (stream,))
    return ctypes.c_void_p(pointer)


def _array(tags: Sequence[str]) -> Tuple[Any, int]:
    names = [encode(tag) for tag in tags]
    return (ctypes.c_char_p * len(names))(*names), len(names)


def open_pool(tag: str, policy: str) -> None:
    """Makes the pool of a tag; it may exist already, with the same policy."""
    if policy not in POLICIES:
        raise ValueError("policy is %s, not %r" % (" or ".join(map(repr, POLICIES)), policy))
    _calls.check(_calls.lib.amem_pool(encode(tag), POLICIES[policy]))


def pause(*tags: str, wait: bool = True, stream: Any = None, process_group: Any = None, timeout: Optional[float] = None) -> Freed:
    """Gives GPU memory back to the driver; addresses stay, and contents are saved in pinned host memory (policy "preserve").

    pause()                               NCCL's memory, as pause("nccl")
    pause("weights", "nccl")              the pool "weights" first, NCCL's memory then
    pause("weights", wait=False, stream=s)   returns at once: contents are saved after what stream `s` holds now, beside what other
                                          streams compute, and the memory goes when they are saved; amem.wait("weights") waits

    Returns Freed(bytes, tags, already, kept). With wait=False it says what had gone by then.

    tags:    names of pools (see amem.pool), and "nccl"; none means "nccl". A tag that is paused already is left as it is. With
             AMEM_SCOPE=all "program" is all that this process has from cudaMalloc.
    wait:    whether to return only when the memory is given back. "nccl" is always waited for, and is collective: every rank that
             shares NCCL memory with this one pauses it too. Pools are not collective.
    stream:  a torch.cuda.Stream or its handle. Only its work is waited for. None: the pool's devices are waited for to be idle.
    process_group:  of torch.distributed, or an amem.StoreGroup; True: the default one. Then the pause is that of all its ranks on
             all hosts, each of which calls it with the same tags: when one fails or does not come, all that had paused resume again,
             and the error names it. Agreed through the group's store, without a collective. What policy "discard" gave up is lost.
    timeout: seconds that such a pause waits for the other ranks; default: nine eighths of AMEM_TIMEOUT_MS.

    Nothing may touch the memory of a paused tag until it is resumed: a kernel that does faults, and takes its CUDA context with it.
    AmemError: of an unknown tag (code 4; the known ones are listed), a host without memory for the contents (1 or 2), a rank that did
    not come (6). Then no tag of this call is paused: those that were are resumed.
    """
    tags = tags or (NCCL,)
    names, count = _array(tags)
    if process_group is not None:
        return _measured(tags, lambda: _across_hosts(wait, "pause", functools.partial(pause, stream=stream), process_group, tags, timeout))
    if set(tags) == {NCCL} and stream is None:
        return _measured(tags, lambda: _calls.check(_calls.lib.ncclPause(None)))
    flags = (0 if wait else NO_WAIT) | (0 if stream is None else ON_STREAM)
    pointer = None if stream is None else stream_pointer(stream)
    return _measured(tags, lambda: _calls.check(_calls.lib.amem_pause(names, count, flags, pointer)))


def resume(*tags: str, wait: bool = True, priority: int = 0, wait_for_memory: float = 0, process_group: Any = None,
           timeout: Optional[float] = None) -> None:
    """Brings GPU memory back at the same addresses, with the same contents (policy "preserve") or as it comes (policy "discard").

    resume()                              NCCL's memory, as resume("nccl")
    resume("weights", wait=False)         returns at once; amem.wait("weights", stream) before the first use

    tags, wait:  as for pause. A tag that is not paused is left as it is.
    priority:    of those that are resumed without waiting the highest is brought back first; equal ones in the order of the calls.
    wait_for_memory:  seconds to wait until there is enough free GPU memory for all these tags: other processes' memory may go a moment
                 after their release has returned. Meanwhile warnings in the log say how much is missing and who holds it.
    process_group, timeout:  as for pause. When one rank cannot resume or does not come, those that had resumed pause again: all ranks
                 are paused then, contents kept, and all can call it again.

    AmemError: of an unknown tag (4), or too little free GPU memory (1; the text says how much is missing). The tags of this call are
    paused then, contents kept, and resume can be called again. Without waiting, the failure comes with the first amem.wait.
    """
    tags = tags or (NCCL,)
    names, count = _array(tags)
    try:
        if wait_for_memory:
            await_memory(tags, wait_for_memory)
        if process_group is None and NCCL in tags:
            _requests.await_resume()
    except KeyboardInterrupt:
        _log.warning("resume of %s: interrupted while it waited; what was paused of it is still paused", ", ".join(tags))
        raise
    if process_group is not None:
        _across_hosts(wait, "resume", resume_in_time, process_group, tags, timeout)
        return
    if set(tags) == {NCCL}:
        _calls.check(_calls.lib.ncclResume(None))
    else:
        _calls.check(_calls.lib.amem_resume(names, count, 0 if wait else NO_WAIT, priority))


SAY_EVERY_SECONDS = 5
TOO_LITTLE = 1  # ncclUnhandledCudaError


def await_memory(tags: Sequence[str], seconds: float) -> None:
    """Waits until a resume of these tags would find enough free GPU memory, so many seconds at most."""
    names, count = _array(tags)
    begun = said = time.monotonic()
    while _calls.lib.amem_resume(names, count, ONLY_ASK, 0) == TOO_LITTLE:
        now = time.monotonic()
        if now >= begun + seconds:
            return  # the resume says what is wrong
        if said == begun or now >= said + SAY_EVERY_SECONDS:
            said = now
            _log.warning("resume of %s waits for memory, up to %g s: %s", ", ".join(tags), seconds, _calls.last_error())
        time.sleep(0.05)


def resume_in_time(*tags: str) -> None:
    """As resume, for ranks that agree on it elsewhere: it waits no longer than AMEM_TIMEOUT_MS for others that are still paused."""
    if NCCL in tags:
        _requests.await_resume()
    return _calls.check(_calls.lib.amem_resume(*_array(tags), IN_TIME, 0))


def wait(tag: str, stream: Any = None) -> None:
    """Waits for what is under way for a tag: a pause or a resume that was called with wait=False.

    stream None: the host waits for its end. A torch.cuda.Stream or a handle: that stream waits for the contents; the host waits only
    until memory is mapped and copies are queued, and what is queued on the stream afterwards may use the memory.

    AmemError: the failure of what was under way (the tag is as before it, contents kept), or an unknown tag (4).
    """
    flags, handle = (0, None) if stream is None else (ON_STREAM, stream_pointer(stream))
    _calls.check(_calls.lib.amem_wait(encode(tag), flags, handle))


_blocks: "collections.Counter[str]" = collections.Counter()  # how many open blocks want a tag paused


def hold(tags: Sequence[str]) -> None:
    """Counts one more block that wants these tags paused."""
    _blocks.update(set(tags))


def let_go(tags: Sequence[str]) -> List[str]:
    """Ends what hold() began. Returns the tags that no other block wants paused, in their order."""
    _blocks.subtract(set(tags))
    return [tag for tag in tags if _blocks[tag] <= 0]


@contextlib.contextmanager
def paused(*tags: str, process_group: Any = None, timeout: Optional[float] = None) -> Iterator[Freed]:
    """Pauses, and resumes on the way out, also after an exception. No tags: NCCL's memory. process_group, timeout: as for pause.

        with amem.paused("weights", "nccl") as freed:
            print(freed.bytes, freed)

    Nests: what an outer block, or a rollout of RolloutOffload, has paused stays paused until that one ends."""
    tags = tags or (NCCL,)
    _array(tags)  # TypeError
    hold(tags)
    try:
        freed = pause(*tags, process_group=process_group, timeout=timeout)
    except Exception:  # nothing of it is paused
        let_go(tags)
        raise
    except BaseException:  # an interrupt, which may have come when all was paused; those of other hosts are not waited for
        resume_held(tags)
        raise
    try:
        yield freed
    finally:
        resume_held(tags, process_group=process_group, timeout=timeout)


def resume_held(tags: Sequence[str], **how: Any) -> None:
    """Resumes those of the held tags that nobody else holds. What could not be resumed may be resumed by anybody."""
    left = let_go(tags)
    if left:
        resume(*left, **how)


def _across_hosts(wait: bool, *cycle: Any) -> None:
    if not wait:
        raise ValueError("with a process_group a pause or resume is waited for: all ranks have to agree that it succeeded")
    from . import _hosts
    _hosts.cycle(*cycle)


def memory() -> Dict[str, Any]:
    """What each tag of this process holds: {"schema": 1, "tags": [{...}, ...]}, sizes in bytes, times in milliseconds.

    Of each tag: "tag", "policy" ("preserve" or "discard"), "state" ("resident", "pausing", "paused" or "resuming"), "bytes" (as the
    driver gave them, in chunks), "part_bytes" (as they were asked for), "resident_bytes" (on the GPU now), "kept_bytes" and "kept"
    (what a pause has to leave, by reason), "held_by" (of that, what other libraries hold, by their names), "parts" (allocations), "devices", "pinned_bytes" (of the host, for its contents now), "last_pause_ms",
    "last_resume_ms" (None if there was none), "failure". The tags "nccl" and "user" (memory of ncclMemAlloc) are among them. No tags
    before memory was asked for, or where AMem is switched off (AMEM_ENABLE=0); "reason" says which.
    """
    answer: Dict[str, Any] = _calls.read_json(b"memory")
    return answer


def row_of(tag: str) -> Optional[Dict[str, Any]]:
    """What memory() says of a tag, or None if there is no such tag."""
    return next((row for row in memory()["tags"] if row["tag"] == tag), None)


def state_of(tag: str) -> Optional[str]:
    """The "state" of a tag, or None if there is no such tag."""
    return (row_of(tag) or {}).get("state")
