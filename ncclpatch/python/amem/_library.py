"""Finding libamem_nccl.so and declaring what it exports. Standard library only."""

import ctypes
import os
import re
import sys
import warnings
from typing import Any, Callable, Dict, Mapping, Optional

NAME = "libamem_nccl.so"
_TREE = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.."))  # where this package is one of the source's folders


def _mapped(match: Callable[[str], bool]) -> Optional[str]:
    """Path of the first file mapped into this process whose name satisfies `match`, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and match(os.path.basename(fields[5].rstrip("\n"))):
                    return fields[5].rstrip("\n")
    except OSError:
        pass
    return None


def is_loaded() -> bool:
    """Whether the library is in this process, by a preload or another package."""
    return _mapped(lambda name: name == NAME) is not None


def say(text: str) -> None:
    """A line as the library logs at level info, on standard error."""
    if os.environ.get("AMEM_LOG") in ("info", "debug", "trace"):
        print("AMem: " + text, file=sys.stderr, flush=True)


def nccl_is_loaded() -> bool:
    return _mapped(lambda name: name.startswith("libnccl.so")) is not None


def beside(name: str, *folders: str, mode: int = os.R_OK) -> Optional[str]:
    """The first file of that name in these folders, as seen from this package; None: there is none that can be read (or executed, by `mode`)."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = (os.path.normpath(os.path.join(here, folder, name)) for folder in folders)
    return next((place for place in places if os.path.isfile(place) and os.access(place, mode)), None)


def find() -> str:
    """The library to use: one that is loaded already, else AMEM_LIBRARY, else the one beside this package, else by name."""
    return (_mapped(lambda name: name == NAME) or os.environ.get("AMEM_LIBRARY")
            or beside(NAME, "", "../../../../lib", "../../../build/lib") or NAME)  # of the wheel, as installed, of the tree


def path() -> str:
    """The absolute path of find(); "" where only the loader knows it. A file of that name in the current directory is not meant."""
    found = find()
    return os.path.abspath(found) if os.path.dirname(found) else ""


def environment_with(library: str, environment: Mapping[str, str]) -> Dict[str, str]:
    """A copy of `environment` in which `library` is preloaded, once and first, beside what is preloaded already."""
    others = [name for name in re.split(r"[ :]+", environment.get("LD_PRELOAD", "")) if name and os.path.basename(name) != NAME]
    return {**environment, "LD_PRELOAD": ":".join([library, *others]), "AMEM_ENABLE": "1", "AMEM_LIBRARY": library}


class _Later:
    """In place of a library that is not there, and in the process of the command `amem`, which must work where it cannot be loaded, or
    crashes. Each use loads it, or is the error that says why not."""

    def __getattr__(self, name: str) -> Any:
        from ._calls import AmemError  # which begins with this module

        try:
            return getattr(load(), name)
        except OSError as error:
            raise AmemError(5, str(error)) from error


def is_command() -> bool:
    """Whether this process is `amem` or `python -m amem`. While Python imports the package for the latter, sys.argv[0] is only "-m"."""
    if os.path.basename(sys.argv[0] if sys.argv else "") == "amem":
        return True
    try:
        with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
            words = file.read().split("\0")
    except OSError:
        return False
    return sys.argv[:1] == ["-m"] and words[1:].count("-m") > 0 and words[words.index("-m") + 1] == "amem"


def load_or_defer() -> Any:
    """As load(). Importing the package never fails: where the library cannot be loaded, the first call does. It is said at once where the
    library is wanted, because NCCL is loaded or somebody chose it; else only amem.journal may be of use, which needs no library."""
    if is_command() and not is_loaded():
        return _Later()
    try:
        return load()
    except OSError as error:
        if os.environ.get("AMEM_LIBRARY") or nccl_is_loaded():
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return _Later()


def is_there(library: Any) -> bool:
    return not isinstance(library, _Later)


def _remedy(found: str) -> str:
    if os.environ.get("AMEM_LIBRARY"):
        return "correct AMEM_LIBRARY, or unset it"
    if os.path.dirname(found):
        return "set AMEM_LIBRARY to the path of one that was built for this machine"
    if os.path.isfile(os.path.join(_TREE, "run")):
        return "build it with ./run build in %s, or set AMEM_LIBRARY to its path" % _TREE
    return "install the wheel of amem-nccl again, or set AMEM_LIBRARY to the path of libamem_nccl.so"


_TAGS = [ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_uint]
_FUNCTIONS = {
    "ncclPause": [ctypes.c_void_p],
    "ncclResume": [ctypes.c_void_p],
    "ncclSetGroupID": [ctypes.c_int],
    "amem_attach": [],
    "amem_last_error": [],
    "amem_version": [],
    "amem_json": [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)],
    "amem_trim_pinned": [ctypes.c_size_t],
    "amem_pool": [ctypes.c_char_p, ctypes.c_int],
    "amem_pool_enter": [ctypes.c_char_p],
    "amem_pool_leave": [],
    "amem_pause": _TAGS + [ctypes.c_void_p],
    "amem_resume": _TAGS + [ctypes.c_int],
    "amem_wait": [ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p],
    "amem_safepoint": [ctypes.c_uint],
}


def load() -> Any:
    """The library with the types of what this package calls; amem.h has their contracts. OSError, with what to do: there is no library,
    or one that does not belong to this package."""
    found = find()
    try:
        library = ctypes.CDLL(found)
        for name, arguments in _FUNCTIONS.items():
            if not hasattr(library, name):
                raise OSError("it has no %s, so it is older than the Python package; build both from one tree" % name)
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_char_p if name in ("amem_last_error", "amem_version") else ctypes.c_int
        return library
    except OSError as error:
        raise OSError("cannot load %s: %s; %s" % (found, error, _remedy(found))) from None
