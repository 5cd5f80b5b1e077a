"""AMem: give back the GPU memory that NCCL holds, and bring it back at the same addresses with the same contents.

    import torch, amem          # amem after torch, before the first collective; or start with LD_PRELOAD

    with amem.paused():         # collective: every rank that shares NCCL memory with this one does the same
        generate_rollouts()

Importing puts every loaded NCCL under AMem; where that is impossible (NCCL has called the driver already) it warns and says what
to do. An NCCL that is loaded later, by ctypes or an import, follows before its first call. stats()["nccl_libraries"] names each
NCCL of the process, whether it is under AMem, and why not.
"""

import contextlib
import ctypes
import json
import sys
import warnings

from . import _library, _why

__all__ = ["AmemError", "attach", "pause", "paused", "resume", "set_group", "stats", "trim_pinned", "version"]


class AmemError(RuntimeError):
    """A call that failed. `code` is an ncclResult_t; the text says what happened and what to do.

    `why` is the first line of `amem-replay why` about a pause or resume that failed: which rank did what, of all ranks whose
    journals can be read here. None where it could not be had in a few seconds, or without amem-replay.
    """

    def __init__(self, code, text, why=None):
        super().__init__(text)
        self.code = code
        self.why = why

    def __str__(self):
        text = super().__str__()
        return "%s\n%s" % (text, self.why) if self.why else text


_lib = _library.load()


def _check(code):
    if code != 0:
        text = _lib.amem_last_error().decode(errors="replace")
        raise AmemError(code, text, _why.first_line(text, _library.find()))


def attach():
    """Puts the NCCL of this process under AMem. Harmless if it is already; AmemError if it is too late, or none is loaded."""
    _check(_lib.amem_attach())


def pause():
    """Gives NCCL's GPU memory back. Collective; already paused: does nothing. If it fails, nothing is paused."""
    _check(_lib.ncclPause(None))


def resume():
    """Brings NCCL's GPU memory back. Collective; not paused: does nothing. If it fails, it can be tried again."""
    _check(_lib.ncclResume(None))


@contextlib.contextmanager
def paused():
    """Pauses, and resumes on the way out, also after an exception."""
    pause()
    try:
        yield
    finally:
        resume()


def stats():
    """Statistics as a dict; {"session": None, ...} before NCCL has used memory."""
    length = ctypes.c_size_t(0)
    _check(_lib.amem_stats_json(None, ctypes.byref(length)))
    while True:
        buffer = ctypes.create_string_buffer(length.value + 1024)  # it may grow between the two calls
        length.value = len(buffer)
        code = _lib.amem_stats_json(buffer, ctypes.byref(length))
        if code == 0:
            return json.loads(buffer.value)
        if length.value <= len(buffer):
            _check(code)


def trim_pinned(keep_bytes=0):
    """Gives back pinned host memory that holds no contents; the next pause pins what it needs."""
    _check(_lib.amem_trim_pinned(keep_bytes))


def set_group(group):
    """Only processes with equal groups pause together; default AMEM_GROUPID, or 0."""
    _check(_lib.ncclSetGroupID(group))


def version():
    return _lib.amem_version().decode()


def _watch(event, arguments):
    """Before the first call of an NCCL that was loaded after this package, its functions are looked up by name."""
    if event == "ctypes.dlsym" and isinstance(arguments[1], str) and arguments[1].startswith("nccl"):
        _lib.amem_attach()  # what cannot be attached to is said by the pause and by stats()


if _library.nccl_is_loaded():
    try:
        attach()
    except AmemError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
sys.addaudithook(_watch)
