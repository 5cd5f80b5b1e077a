"""Adapters for projects that give GPU memory back between phases: one module for each, imported by those who use that project.

README.md beside the package says for each project how to turn it on, what is given back, and which releases were checked.
`pause_nccl` and `resume_nccl` are for those without a module: two calls in place of destroying and making process groups anew.
"""

import functools
import importlib
import logging
import pkgutil

from .. import _calls, _library, _pools, _requests, _tags

_log = logging.getLogger("amem")
_want = _tags.Want()
_paused = False  # whether resume_nccl() has something to bring back
_said = set()  # why NCCL is not under AMem; each once, for it is asked before every rollout
WAIT_FOR_MEMORY = 5  # seconds of a resume (amem.resume): the engine that had the GPU before may still be giving memory back


def __getattr__(name):
    """amem.frameworks.trl and the like, which are imported by their first use."""
    if name in {module.name for module in pkgutil.iter_modules(__path__)}:
        return importlib.import_module("." + name, __name__)
    raise AttributeError("module %r has no attribute %r" % (__name__, name))


def check():
    """AmemError (5): AMem's library cannot be loaded here, or PyTorch is too old. For an adapter that is installed unasked, before it changes
    anything: found out later, that would be the end of a job that runs without AMem."""
    _calls.library_version()
    _pools.check_version()


def nccl_is_under_amem():
    """Whether a pause of NCCL's memory gives anything back in this process. Where AMem cannot say, it gives nothing; the reason is logged."""
    if not _library.nccl_is_loaded():
        return False
    try:
        libraries = _calls.read_json(b"stats").get("nccl_libraries", [])
    except _calls.AmemError as error:
        if str(error) not in _said:
            _said.add(str(error))
            _log.warning("NCCL's memory stays on the GPU: %s", error)
        return False
    return any(one["under_amem"] for one in libraries)


def pause_nccl():
    """Gives NCCL's memory back, where that can be done; whether it is given back now.

    Collective over the ranks that share NCCL memory, as amem.pause(). A pause that fails is undone on all ranks and logged as a
    warning, and the job goes on with NCCL's memory where it is: a project that survives a full GPU should not die of a full journal.
    """
    global _paused
    if _paused or not nccl_is_under_amem():
        return _paused
    _requests.await_pause()  # an interrupt while it waits leaves nothing to bring back
    _paused = True  # before, so that an interrupt that comes when it is paused leaves it to resume_nccl()
    try:
        _want.pause(_tags.NCCL)
    except _calls.AmemError as error:
        _log.warning("NCCL's memory stays on the GPU: %s", error)
        _paused = False
    return _paused


def pause_nccl_together(agree):
    """pause_nccl() for ranks that agree on it elsewhere: agree(pause, undo) calls pause(), and undo() if another rank has failed. What
    it raises, if not all have paused, is raised here."""
    global _paused
    _paused = True
    try:
        agree(functools.partial(_want.pause, _tags.NCCL), functools.partial(_want.resume_in_time, _tags.NCCL))
    except Exception:
        _paused = False
        raise


def resume_nccl():
    """Brings NCCL's memory back if pause_nccl() gave it away, and nobody else wants it away; else does nothing.

    AmemError: it could not be brought back, for example because the GPU is full. It is paused then, contents kept; call again.
    """
    global _paused
    if _paused:
        _want.resume(_tags.NCCL, wait_for_memory=WAIT_FOR_MEMORY)
        _paused = False


def before(first, method):
    """The method, with first() before each call."""
    @functools.wraps(method)  # with the attributes by which a project dispatches
    def wrapped(*arguments, **named):
        first()
        return method(*arguments, **named)

    return wrapped
