"""Requests from outside: safe points, at which `amem pause JOB` and `amem freeze JOB` take hold. Standard library only."""

import ctypes

from . import _calls, _library

_IN_PROGRESS = 7  # the library returns now and then while a request holds the rank, so that Python runs its signal handlers


def _function(name, quick=False):
    """Of a library that is not there nobody can ask for anything: int() is 0. A quick one is called without letting other threads run, which takes
    longer than the function itself."""
    library = _calls.lib
    if not _library.is_there(library):
        return int
    if quick:
        library = ctypes.PyDLL(library._name, handle=library._handle)
    return getattr(library, name)


_begin = _function("amem_safepoint_begin", quick=True)
_go_on = _function("amem_safepoint_go_on")
_may_resume = _function("amem_resume_may_begin")


def _wait(result, again):
    while result == _IN_PROGRESS:
        result = again()
    _calls.check(result)


def safepoint():
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


def await_resume():
    """Before a resume of NCCL's memory: waits while a request from outside stands, as the resume itself would, but for signals."""
    _wait(_may_resume(), _may_resume)


def frozen(*_, **__):
    """Always raises: a process cannot freeze itself, because the driver stops it meanwhile and somebody else must thaw it."""
    raise _calls.AmemError(5, "a process cannot freeze itself: while it is frozen none of its GPU calls returns, and another process "
                              "must bring it back. Call amem.safepoint() once a step, and use `amem freeze JOB` and `amem thaw JOB` "
                              "from outside; amem.paused() gives memory back from inside")
