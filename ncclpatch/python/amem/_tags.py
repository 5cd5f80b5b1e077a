"""Pause, resume and wait by tag. Standard library only; streams may be PyTorch's."""

import contextlib
import ctypes
import functools
import logging
import os
import sys
import time
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

from . import _calls, _library, _requests

_log = logging.getLogger("amem")

POLICIES = {"preserve": 0, "discard": 1}
NO_WAIT, ON_STREAM, IN_TIME, ONLY_ASK, LET_GO, HOSTS_IDLE = 1, 2, 4, 8, 16, 32
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
    left:    bytes on these GPUs afterwards, by owner or reason: "tag NAME" of tags that are not paused, the reason of kept memory, and
             OTHERS: the program's, contexts and modules, other processes'. amem.account() tells those apart.
    used:    what the driver had given out on these GPUs before: `bytes` and all of `left`, unless somebody allocated or freed meanwhile.
    lost:    the tags of this pause whose contents are not saved (policy "discard"): after the resume their contents are undefined.
    """

    bytes: int
    tags: Dict[str, int]
    already: Tuple[str, ...]
    kept: int
    left: Dict[str, int] = {}
    used: int = 0
    lost: Tuple[str, ...] = ()

    def __str__(self) -> str:
        said = ["%s %s" % (mebibytes(count), tag) for tag, count in self.tags.items() if count]
        text = "%s freed (%s)" % (mebibytes(self.bytes), ", ".join(said)) if said else "nothing freed"
        if self.already:
            text += "; %s: paused already" % ", ".join(self.already)
        if self.lost:
            text += "; contents not saved: %s" % ", ".join(self.lost)
        if self.kept:
            text += "; %s kept" % mebibytes(self.kept)
        left = ["%s %s" % (mebibytes(count), whose) for whose, count in self.left.items() if count]
        return text + ("; on the GPU now: %s" % ", ".join(left) if left else "")


OTHERS = "not AMem's"
NOTHING = Freed(0, {}, (), 0)


def together(one: Freed, other: Freed) -> Freed:
    """Of two pauses, one after the other."""
    return Freed(one.bytes + other.bytes, {**one.tags, **other.tags}, one.already + other.already, one.kept + other.kept,
                 other.left or one.left, one.used or other.used, one.lost + other.lost)


def mebibytes(count: int) -> str:
    return "%d MiB" % (count >> 20) if count >> 20 else "%d bytes" % count


def _rows() -> Dict[str, Dict[str, Any]]:
    """What memory() says, by tag; nothing where the library cannot say it: then the pause has the reason."""
    try:
        return {row["tag"]: row for row in memory()["tags"]}
    except Exception:  # pylint: disable=broad-except
        return {}


def allocated_too_early() -> int:
    """Bytes that PyTorch's allocator has from the driver and AMem has not seen, with AMEM_SCOPE=all; 0 where PyTorch is not in use."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if os.environ.get("AMEM_SCOPE") != "all" or cuda is None or not cuda.is_initialized():
        return 0
    said = memory()
    seen = sum(row["part_bytes"] for row in said["tags"] if row["tag"] != NCCL) + sum(one["bytes"] for one in said.get("left", {}).values())
    return int(max(0, sum(cuda.memory_reserved(device) for device in range(cuda.device_count())) - seen))


def too_late(count: int) -> str:
    return ("%s of PyTorch's memory were allocated before AMem was there, and stay on the GPU; start the job with "
            "`amem run --scope all`" % mebibytes(count))


def seen_on(row: Dict[str, Any]) -> Dict[str, int]:
    """What AMem sees on one GPU of the library's account, by tag or reason."""
    return {**{"tag " + tag: count for tag, count in row["running"].items()}, **row["kept"]}


def _gpus() -> Tuple[int, Dict[str, int]]:
    """What the driver has given out on the GPUs that have memory of AMem's, and to whom; nothing where the library cannot say it."""
    try:
        answer = _calls.read_json(b"account")
    except Exception:  # pylint: disable=broad-except
        return 0, {}
    left: Dict[str, int] = {}
    for gpu in answer.get("devices", []):
        for whose, count in seen_on(gpu).items():
            left[whose] = left.get(whose, 0) + count
    left.update(answer.get("unplaced", {}))
    used = sum(gpu["used_bytes"] or 0 for gpu in answer.get("devices", []))
    if used > sum(left.values()):
        left[OTHERS] = used - sum(left.values())
    return used, left


def _measured(tags: Sequence[str], act: Callable[[], None]) -> Freed:
    before, (used, _) = _rows(), _gpus()
    act()
    try:
        return _freed(tags, before)._replace(left=_gpus()[1], used=used)
    except Exception as error:  # pylint: disable=broad-except  # the pause has succeeded, and who called it is to know
        _log.warning("pause of %s: what it freed could not be measured: %s: %s", ", ".join(tags), type(error).__name__, error)
        return Freed(0, dict.fromkeys(tags, 0), (), 0)


def _freed(tags: Sequence[str], before: Dict[str, Dict[str, Any]]) -> Freed:
    after = {row["tag"]: row for row in memory()["tags"]}
    gone = {tag: max(0, before[tag]["resident_bytes"] - after[tag]["resident_bytes"]) if tag in before and tag in after else 0
            for tag in [*tags, *([USER] if NCCL in tags and USER not in tags else [])]}
    already = tuple(tag for tag in tags if tag in before and before[tag]["state"] == "paused")
    kept = sum(after[tag]["kept_bytes"] for tag in gone if tag in after and tag not in already)
    if PROGRAM in tags:
        late = allocated_too_early()
        kept += late + sum(one["bytes"] for one in memory().get("left", {}).values())
        if late:
            _log.warning("pause of tag program: %s", too_late(late))
    lost = tuple(tag for tag in tags if gone.get(tag) and before[tag]["policy"] == "discard")
    return Freed(sum(gone.values()), gone, already, kept, lost=lost)


def stream_pointer(stream: Any) -> ctypes.c_void_p:
    """CUDA's handle of a stream: a torch.cuda.Stream, or the handle as a number, where 0 is the default stream."""
    pointer = getattr(stream, "cuda_stream", stream)
    if isinstance(pointer, bool) or not isinstance(pointer, int):
        raise TypeError("a stream is a torch.cuda.Stream or its handle as a number, not %r" % (stream,))
    return ctypes.c_void_p(pointer)


def _array(tags: Sequence[str]) -> Tuple[Any, int]:
    names = [encode(tag) for tag in tags]
    return (ctypes.c_char_p * len(names))(*names), len(names)


def await_idle() -> None:
    """Waits until the GPUs that NCCL uses in this process are idle."""
    _calls.check(_calls.lib.amem_pause(None, 0, ONLY_ASK, None))


def open_pool(tag: str, policy: str) -> None:
    """Makes the pool of a tag; it may exist already, with the same policy."""
    if policy not in POLICIES:
        raise ValueError("policy is %s, not %r" % (" or ".join(map(repr, POLICIES)), policy))
    _calls.check(_calls.lib.amem_pool(encode(tag), POLICIES[policy]))


def pause(*tags: str, wait: bool = True, stream: Any = None, process_group: Any = None, timeout: Optional[float] = None,
          hosts_idle: bool = False) -> Freed:
    """Gives GPU memory back to the driver; addresses stay, and contents are saved in pinned host memory (policy "preserve").

    pause()                               NCCL's memory, as pause("nccl")
    pause("weights", "nccl")              the pool "weights" first, NCCL's memory then
    pause("weights", wait=False, stream=s)   returns at once: contents are saved after what stream `s` holds now, beside what other
                                          streams compute, and the memory goes when they are saved; amem.wait("weights") waits

    Returns Freed(bytes, tags, already, kept, left, used, lost), the account of the pause. With wait=False it says what had gone by then.

    tags:    names of pools (see amem.pool), and "nccl"; none means "nccl". A tag that is paused already is left as it is. With
             AMEM_SCOPE=all "program" is all that this process has from cudaMalloc.
    wait:    whether to return only when the memory is given back. "nccl" is always waited for, and is collective: every rank that
             shares NCCL memory with this one pauses it too. Pools are not collective.
    stream:  a torch.cuda.Stream or its handle. Only its work is waited for. None: the pool's devices are waited for to be idle.
    process_group:  of torch.distributed, or an amem.StoreGroup; True: the default one. Then the pause is that of all its ranks on
             all hosts, each of which calls it with the same tags: when one fails or does not come, all that had paused resume again,
             and the error names it. The ranks agree through the group's store, without a collective. If it fails, contents under
             policy "discard" may be lost already.
             A rank that has no memory under AMem (no GPU, or AMEM_ENABLE=0) takes part with nothing.
    timeout: seconds that such a pause waits for the other ranks when its own part is done; default: nine eighths of AMEM_TIMEOUT_MS.
    hosts_idle: the GPUs of all ranks on all hosts have finished their work, and the caller has made sure of it: synchronize, then a
             barrier. Only then AMEM_NETWORK=renew takes what network cards hold (amem.h: AMEM_HOSTS_IDLE). With process_group the
             ranks do that themselves, unless a communicator of theirs has ranks outside of the group: each waits until its GPUs are
             idle, they meet in the store, and pause then.

    Nothing may touch the memory of a paused tag until it is resumed: a kernel that does faults, and takes its CUDA context with it.
    However often it is called, it lasts until one resume(); blocks of amem.paused, rollouts and adapters pause for themselves.
    AmemError: of an unknown tag (code 4; the known ones are listed), a host without memory for the contents (1 or 2), a rank that did
    not come (6), an NCCL that was used before AMem was there (5; the text says what to do). Then no tag of this call is paused: those that were are resumed.
    """
    return _PLAIN.pause(*tags, wait=wait, stream=stream, process_group=process_group, timeout=timeout, hosts_idle=hosts_idle)


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

    AmemError (5): a block of amem.paused, a rollout or an adapter still wants a tag paused; it comes back when the last of them ends.
    AmemError: of an unknown tag (4), or too little free GPU memory (1; the text says how much is missing). The tags of this call are
    paused then, contents kept, and resume can be called again. Without waiting, the failure comes with the first amem.wait.
    """
    _PLAIN.resume(*tags, wait=wait, priority=priority, wait_for_memory=wait_for_memory, process_group=process_group, timeout=timeout)


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
    _PLAIN.resume_in_time(*tags)


def wait(tag: str, stream: Any = None) -> None:
    """Waits for what is under way for a tag: a pause or a resume that was called with wait=False.

    stream None: the host waits for its end. A torch.cuda.Stream or a handle: that stream waits for the contents; the host waits only
    until memory is mapped and copies are queued, and what is queued on the stream afterwards may use the memory.

    AmemError: the failure of what was under way (the tag is as before it, contents kept), or an unknown tag (4).
    """
    flags, handle = (0, None) if stream is None else (ON_STREAM, stream_pointer(stream))
    _calls.check(_calls.lib.amem_wait(encode(tag), flags, handle))


class Want:
    """One part of the program that keeps tags paused, in the library's ledger (amem.h). A tag is paused while any want includes it; the
    module's own functions, which have the same names, act as want 0. One thread at a time uses a want."""

    def __init__(self, number: Optional[int] = None) -> None:
        self._given = number

    @property
    def _number(self) -> int:
        if self._given is None:
            self._given = int(_calls.lib.amem_want())
        return self._given

    def pause(self, *tags: str, wait: bool = True, stream: Any = None, process_group: Any = None, timeout: Optional[float] = None,
              hosts_idle: bool = False) -> Freed:
        tags = tags or (NCCL,)
        names, count = _array(tags)
        flags = (0 if wait else NO_WAIT) | (0 if stream is None else ON_STREAM) | (HOSTS_IDLE if hosts_idle else 0)
        pointer = None if stream is None else stream_pointer(stream)

        def act() -> None:
            if process_group is not None:
                by = _PLAIN_CALLS if self._number == 0 else self
                said = {"hosts_idle": True} if hosts_idle else {}
                _across_hosts(wait, "pause", functools.partial(by.pause, stream=stream, **said), process_group, tags, timeout, by)
            elif self._number == 0 and set(tags) == {NCCL} and stream is None and not hosts_idle:
                _calls.check(_calls.lib.ncclPause(None))
            else:
                _calls.check(_calls.lib.amem_want_pause(self._number, names, count, flags, pointer))

        if process_group is None and NCCL in tags:
            _requests.await_pause()
        return _measured(tags, act)

    def resume(self, *tags: str, wait: bool = True, priority: int = 0, wait_for_memory: float = 0, process_group: Any = None,
               timeout: Optional[float] = None) -> None:
        tags = tags or (NCCL,)
        names, count = _array(tags)
        try:
            if wait_for_memory and process_group is None:
                await_memory(tags, wait_for_memory)
            if process_group is None and NCCL in tags:
                _requests.await_resume()
        except BaseException as error:
            if not isinstance(error, _calls.AmemError):
                self._stay_paused(tags)
            raise
        if process_group is not None:
            act = functools.partial(_resume_part, _PLAIN_CALLS if self._number == 0 else self, wait_for_memory)
            # What is paused again because others failed is wanted by the plain calls, whose resume can be called again.
            _across_hosts(wait, "resume", act, process_group, tags, timeout, _PLAIN_CALLS)
        elif self._number == 0 and set(tags) == {NCCL}:
            _calls.check(_calls.lib.ncclResume(None))
        else:
            _calls.check(_calls.lib.amem_want_resume(self._number, names, count, 0 if wait else NO_WAIT, priority))

    def resume_in_time(self, *tags: str) -> None:
        if NCCL in tags:
            _requests.await_resume()
        _calls.check(_calls.lib.amem_want_resume(self._number, *_array(tags), IN_TIME, 0))

    def _stay_paused(self, tags: Sequence[str]) -> None:
        """A resume was interrupted while it waited, by whatever a signal handler has raised."""
        _log.warning("resume of %s: interrupted while it waited; what was paused of it is still paused", ", ".join(tags))


_PLAIN = Want(0)
_PLAIN_CALLS = sys.modules[__name__]


class _Block(Want):
    """The want of a block of code, which ends with it, wherever an interrupt comes: in the pause, between any two steps of the way out,
    and so often that only the end of the object is left."""

    _tags: Sequence[str] = ()

    def __init__(self, tags: Sequence[str]) -> None:
        super().__init__()
        self._tags = tags  # that end() brings back
        self._entered = False

    def enter(self, **how: Any) -> Freed:
        if NCCL in self._tags and how.get("process_group") is None:
            tags, self._tags = self._tags, ()  # an interrupt while it waits leaves nothing to bring back
            _requests.await_pause()
            self._tags = tags
        try:
            freed = self.pause(*self._tags, **how)
        except _calls.AmemError:
            self._let_go()  # what was paused before is not undone where another rank has failed
            raise
        self._entered = True
        return freed

    def end(self, **how: Any) -> None:
        """Resumes what no other wants away. What cannot be resumed stays paused, and anybody may resume it."""
        tags = self._tags
        if not tags:
            return
        try:
            self.resume(*tags, **how)
        except _calls.AmemError as error:
            self._let_go()  # the ranks may not have agreed to begin, so that the library does not know of the end
            if self._entered:
                raise
            _log.warning("resume of %s after an interrupt: %s", ", ".join(tags), error)
        self._tags = ()

    def _stay_paused(self, tags: Sequence[str]) -> None:
        if _requests.holds_resumes():  # else end() is called once more
            super()._stay_paused(tags)
            self._let_go()

    def _let_go(self) -> None:
        """The want includes none of the tags any more, and what is paused of them stays so. That fails only where nothing can be resumed
        either, as in a forked child, and the caller has an error of its own."""
        if self._given is not None:
            _calls.lib.amem_want_resume(self._given, *_array(self._tags), LET_GO, 0)
        self._tags = ()

    def __del__(self) -> None:
        if self._tags and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.end()


@contextlib.contextmanager
def paused(*tags: str, process_group: Any = None, timeout: Optional[float] = None) -> Iterator[Freed]:
    """Pauses, and resumes on the way out, also after an exception. No tags: NCCL's memory. process_group, timeout: as for pause.

        with amem.paused("weights", "nccl") as freed:
            print(freed.bytes, freed)

    Nests, also between threads: what another block, a plain amem.pause(), an adapter or a rollout wants paused stays paused until that
    ends. Inside, a plain amem.resume() of these tags is refused (5)."""
    tags = tags or (NCCL,)
    _array(tags)  # TypeError
    block: _Block = _Block(tags)
    across: Dict[str, Any] = {}
    try:
        freed = block.enter(process_group=process_group, timeout=timeout)
        across = {"process_group": process_group, "timeout": timeout}
        yield freed
    finally:
        try:
            block.end(**across)  # after an interrupt of the pause other hosts are not waited for
        except BaseException:
            block.end()  # an interrupt may have come before that did anything
            raise


def _resume_part(by: Any, wait_for_memory: float, *tags: str) -> None:
    """A rank's part of a resume of all hosts, for which the others wait."""
    if wait_for_memory:
        await_memory(tags, wait_for_memory)
    by.resume_in_time(*tags)


def _across_hosts(wait: bool, *cycle: Any) -> None:
    if not wait:
        raise ValueError("wait=False is not possible with process_group: all ranks have to agree that it succeeded")
    from . import _hosts
    if not _library.is_off(_calls.lib):
        _hosts.cycle(*cycle)
        return
    try:  # with nothing, so that ranks where AMem is not switched off need not wait for this one
        _hosts.cycle(*cycle)
    except Exception as error:  # pylint: disable=broad-except
        _log.info("%s: %s", _library.SWITCHED_OFF, error)


def memory() -> Dict[str, Any]:
    """What each tag of this process holds: {"schema": 1, "tags": [{...}, ...]}, sizes in bytes, times in milliseconds.

    Of each tag: "tag", "policy" ("preserve" or "discard"), "state" ("resident", "pausing", "paused" or "resuming"; of "nccl" also "not
    under AMem": a pause leaves NCCL's memory where it is, and "failure" says why), "bytes" (as the driver gave them, in chunks or slabs, of
    which a small part may be in use), "part_bytes" (as they were asked for), "resident_bytes" (of "bytes", on the GPU now), "kept_bytes"
    and "kept" (what a pause has to leave, by reason), "held_by" (of that, what other libraries hold, by their names), "parts"
    (allocations), "devices", "pinned_bytes" (of the host, for its contents now), "last_pause_ms", "last_resume_ms" (None if there was none), "failure". Of "nccl" also "cards": what each network card holds, with
    "renewable_bytes" (a pause gives it up; "renewable_now_bytes" of it are with the card now) and "pinned", what stays, by the reason. The tags "nccl" and "user" (memory of ncclMemAlloc) are
    among them. No tags before memory was asked for, with AMEM_ENABLE=0, or where there is no GPU; "reason" says which.
    """
    answer: Dict[str, Any] = _calls.read_json(b"memory")
    return answer


def row_of(tag: str) -> Optional[Dict[str, Any]]:
    """What memory() says of a tag, or None if there is no such tag."""
    return next((row for row in memory()["tags"] if row["tag"] == tag), None)


def state_of(tag: str) -> Optional[str]:
    """The "state" of a tag, or None if there is no such tag."""
    return (row_of(tag) or {}).get("state")
