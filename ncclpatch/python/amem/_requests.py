"""Requests from outside: safe points, at which `amem pause JOB` and `amem freeze JOB` take hold. Standard library only."""

import ctypes
import warnings
from typing import Any, Callable, NoReturn

from . import _calls, _library

_IN_PROGRESS = 7  # the library returns now and then while a request holds the rank, so that Python runs its signal handlers


def _nobody_can_ask() -> int:
    global _begin
    _begin = int  # 0, and said once
    warnings.warn("amem.safepoint: AMem's library is not in this process, so nobody can pause it from outside; amem.stats() says why", RuntimeWarning,
                  stacklevel=3)
    return 0


def _function(name: str, quick: bool = False) -> Any:
    """A quick one is called without letting other threads run, which takes longer than the function itself."""
    library = _calls.lib
    if not _library.is_there(library):
        return _nobody_can_ask if quick else int
    if quick:
        library = ctypes.PyDLL(library._name, handle=library._handle)
    return getattr(library, name)


_begin = _function("amem_safepoint_begin", quick=True)
_go_on = _function("amem_safepoint_go_on")
_may_resume = _function("amem_resume_may_begin")


def _wait(result: int, again: Callable[[], int]) -> None:
    while result == _IN_PROGRESS:
        result = again()
    _calls.check(result)


def safepoint() -> None:
    """A place at which this rank can be paused from outside; to be called once a step, by one thread, in all ranks alike.

    for batch in loader:
        train(batch)
        amem.safepoint()

    `amem pause JOB` and `amem freeze JOB`, from a shell, are carried out at the step that has the same number in all ranks. While
    nothing is asked this costs well under a microsecond. Else it returns when the memory is back, and raises nothing when a pause
    from outside fails or is withdrawn: the job runs on as before. Signal handlers run meanwhile. One that raises (Ctrl-C) leaves the
    safe point; memory that is paused by then stays so, and the next safe point waits on.
    """
    result = _begin()
    if result:
        _wait(result, _go_on)


def await_resume() -> None:
    """Before a resume of NCCL's memory: waits while a request from outside stands, as the resume itself would, but for signals."""
    _wait(_may_resume(), _may_resume)


def frozen(*_: object, **__: object) -> NoReturn:
    """Always raises: a process cannot freeze itself, because the driver stops it meanwhile and somebody else must thaw it."""
    raise _calls.AmemError(5, "a process cannot freeze itself: while it is frozen none of its GPU calls returns, and another process "
                              "must bring it back. Call amem.safepoint() once a step, and use `amem freeze JOB` and `amem thaw JOB` "
                              "from outside; amem.paused() gives memory back from inside")
