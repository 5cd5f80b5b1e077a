"""Requests from outside: safe points, at which `amem pause JOB` and `amem freeze JOB` take hold. Standard library only."""

import ctypes
from typing import Any, NoReturn

from . import _calls, _library

_IN_PROGRESS = 7  # the library returns now and then while a request holds the rank, so that Python runs its signal handlers


def _nobody_can_ask(_how: int) -> int:
    global _quick_safepoint
    _quick_safepoint = _safepoint  # said once
    if not _library.is_off(_calls.lib):
        _library.warn("amem.safepoint: AMem's library is not in this process, so nobody can pause it from outside; amem.stats() says why", stacklevel=3)
    return 0


_BEGIN, _GO_ON, _BEFORE_RESUME, _BEFORE_PAUSE = 1, 2, 3, 4  # amem.h
_there = _library.is_there(_calls.lib)
_safepoint: Any = _calls.lib.amem_safepoint if _there else lambda _how: 0
# The quick one is called without letting other threads run, which takes longer than the function itself.
_quick_safepoint: Any = ctypes.PyDLL(_calls.lib._name, handle=_calls.lib._handle).amem_safepoint if _there else _nobody_can_ask


def _wait(result: int, how: int) -> None:
    while result == _IN_PROGRESS:
        result = _safepoint(how)
    _calls.check(result)


def safepoint() -> None:
    """A place at which this rank can be paused from outside; to be called once a step, by one thread, in all ranks alike.

    for batch in loader:
        train(batch)
        amem.safepoint()

    `amem pause JOB` and `amem freeze JOB`, from a shell, take effect at the safe point with the same number in all ranks. While
    nothing is asked this costs well under a microsecond. Else it returns when the memory is back, and raises nothing when a pause
    from outside fails or is withdrawn: the job runs on as before. Signal handlers run meanwhile. One that raises (Ctrl-C) leaves the
    safe point; memory that is paused by then stays so, and the next safe point waits on.
    """
    result = _quick_safepoint(_BEGIN)
    if result:
        _wait(result, _GO_ON)


def await_resume() -> None:
    """Before a resume of NCCL's memory: waits while a request from outside is active, as the resume itself would, but lets signal handlers run."""
    _wait(_safepoint(_BEFORE_RESUME), _BEFORE_RESUME)


def await_pause() -> None:
    """Before a pause of NCCL's memory: waits while the process has stopped for a request from outside, as the pause itself would, but lets signal handlers run."""
    while _safepoint(_BEFORE_PAUSE) == _IN_PROGRESS:
        pass


def holds_resumes() -> bool:
    """Whether a request from outside stands, for which a resume of NCCL's memory waits."""
    return bool(_safepoint(_BEFORE_RESUME) == _IN_PROGRESS)


def frozen(*_: object, **__: object) -> NoReturn:
    """Always raises: a process cannot freeze itself, because the driver stops it meanwhile and somebody else must thaw it."""
    raise _calls.AmemError(5, "a process cannot freeze itself: while it is frozen none of its GPU calls returns, and another process "
                              "must bring it back. Call amem.safepoint() once a step, and use `amem freeze JOB` and `amem thaw JOB` "
                              "from outside; amem.paused() gives memory back from inside")
