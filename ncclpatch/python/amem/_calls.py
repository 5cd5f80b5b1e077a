"""The loaded library, its errors, and what its callers share. Standard library only."""

import contextlib
import ctypes
import difflib
import json
import re
import threading
from typing import Any, Iterator, Optional, Tuple

from . import _library, _why


class AmemError(RuntimeError):
    """A call that failed. `code` is an ncclResult_t; the text says what happened and what to do.

    `why` is the first line of `amem-replay why` about a pause or resume that failed: which rank did what, of all ranks whose
    journals can be read here. None where it could not be had in a few seconds, or without amem-replay.
    """

    __module__ = "amem"  # where programs catch it

    def __init__(self, code: int, text: str, why: Optional[str] = None) -> None:
        super().__init__(text)
        self.code = code
        self.why = why

    def __reduce__(self) -> Tuple[Any, ...]:  # multiprocessing and Ray bring it to another process
        return type(self), (self.code, super().__str__(), self.why)

    def __str__(self) -> str:
        text = super().__str__()
        return "%s\n%s" % (text, self.why) if self.why else text


was_loaded = _library.is_loaded()  # before this package: preloaded, for example
lib = _library.load_or_defer()


def last_error() -> str:
    return str(lib.amem_last_error().decode(errors="replace"))


def library_version() -> str:
    return str(lib.amem_version().decode())


def package_version() -> str:
    """Of the package; in the source tree, where none is installed, that of the library."""
    from importlib import metadata
    try:
        return metadata.version("amem-nccl")
    except metadata.PackageNotFoundError:
        return library_version()


def with_guess(text: str) -> str:
    """Of "tag X is not known; known: A, B": with what was probably meant."""
    found = re.search(r"tag (\S+) is not known; known: (.+)$", text)
    near = difflib.get_close_matches(found[1], found[2].split(", "), 1) if found else []
    return "%s; did you mean %s?" % (text, near[0]) if near else text


_thread = threading.local()


@contextlib.contextmanager
def explained_later() -> Iterator[None]:
    """Errors that this thread raises inside have no `why`, which takes seconds, while other ranks wait to hear of them: explain() finds it."""
    before = getattr(_thread, "explains_later", False)
    _thread.explains_later = True
    try:
        yield
    finally:
        _thread.explains_later = before


def explain(error: AmemError) -> None:
    """Finds the `why` of an error that was raised without."""
    error.why = error.why or _why.first_line(str(error.args[0]), _library.find())


def check(code: int) -> None:
    """Raises AmemError unless `code`, an ncclResult_t, is 0."""
    if code != 0:
        error = AmemError(code, with_guess(last_error()))
        if not getattr(_thread, "explains_later", False):
            explain(error)
        raise error


def read_json(what: bytes) -> Any:
    """What the library says of b"stats" or b"memory", parsed."""
    size = 16384
    while True:
        buffer, length = ctypes.create_string_buffer(size), ctypes.c_size_t(size)
        code = lib.amem_json(what, buffer, ctypes.byref(length))
        if code == 0:
            return json.loads(buffer.value)
        if length.value <= size:
            check(code)
        size = length.value + 1024  # it may grow between two calls
