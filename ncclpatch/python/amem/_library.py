"""Finding libamem_nccl.so and declaring what it exports. Standard library only."""

import ctypes
import hashlib
import json
import logging
import os
import re
import stat
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


def warn(text: str, stacklevel: int = 2) -> None:
    """A RuntimeWarning. Where the program makes errors of warnings it is a line of the log: AMem that is of no use ends no program."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning:
        logging.getLogger("amem").warning("%s", text)


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


def preloadable(library: str) -> str:
    """`library`, or a link to it: LD_PRELOAD has no paths with blanks or colons in them, where a virtual environment may be. OSError:
    there is no place for the link."""
    if not re.search(r"[\s:]", library):
        return library
    folder = "/tmp/amem-%d" % os.getuid()  # the user's own, as for journals
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError("%s is not a directory that only this user can write to" % folder)
    folder = os.path.join(folder, "preload-" + hashlib.sha256(os.fsencode(library)).hexdigest()[:16])
    link = os.path.join(folder, NAME)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not os.path.islink(link) or os.readlink(link) != library:
        temporary = "%s.%d" % (link, os.getpid())
        os.symlink(library, temporary)
        os.replace(temporary, link)  # two commands may do this at once
    return link


def environment_with(library: str, environment: Mapping[str, str]) -> Dict[str, str]:
    """A copy of `environment` in which `library` is preloaded, once and first, beside what is preloaded already. OSError as preloadable."""
    others = [name for name in re.split(r"[ :]+", environment.get("LD_PRELOAD", "")) if name and os.path.basename(name) != NAME]
    return {**environment, "LD_PRELOAD": ":".join([preloadable(library), *others]), "AMEM_ENABLE": "1", "AMEM_LIBRARY": library}


def environment_without(environment: Mapping[str, str]) -> Dict[str, str]:
    """A copy of `environment` in which nothing of AMem is preloaded or attached."""
    others = [name for name in re.split(r"[ :]+", environment.get("LD_PRELOAD", "")) if name and os.path.basename(name) != NAME]
    return {**environment, "LD_PRELOAD": ":".join(others), "AMEM_ENABLE": "0"}


class _Later:
    """In place of a library that is not there, and in the process of the command `amem`, which must work where it cannot be loaded, or
    crashes. Each use loads it, or is the error that says why not."""

    def __getattr__(self, name: str) -> Any:
        from ._calls import AmemError  # which begins with this module

        try:
            return getattr(load(), name)
        except OSError as error:
            raise AmemError(5, str(error)) from error


SWITCHED_OFF = "AMem is switched off (AMEM_ENABLE=0)"


class Off:
    """In place of the library with AMEM_ENABLE=0, which works also where the library cannot be loaded, or crashes. Each function does
    nothing and succeeds; the first call says so."""

    _said = False

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(name)
        return self._nothing

    def _nothing(self, *_: Any) -> int:
        if not Off._said:
            Off._said = True
            logging.getLogger("amem").warning("%s: its calls do nothing", SWITCHED_OFF)
        return 0

    def amem_last_error(self) -> bytes:
        return b""

    def amem_version(self) -> bytes:
        from importlib import metadata
        try:
            return metadata.version("amem-nccl").encode()
        except metadata.PackageNotFoundError:  # in the source tree
            return bytes(load().amem_version())

    def amem_json(self, what: bytes, buffer: Any, _length: Any) -> int:
        rows = "tags" if what == b"memory" else "devices"
        answer: Dict[str, Any] = {"session": None, "nccl_libraries": []} if what == b"stats" else {"schema": 1, rows: []}
        buffer.value = json.dumps({**answer, "reason": SWITCHED_OFF}).encode()
        return self._nothing()


def is_off(library: Any) -> bool:
    """Whether this process's calls do nothing. Where that is asked instead of a call, it is said as well."""
    return isinstance(library, Off) and library._nothing() == 0


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
    if os.environ.get("AMEM_ENABLE") == "0":
        return Off()
    if is_command() and not is_loaded():
        return _Later()
    try:
        return load()
    except OSError as error:
        if os.environ.get("AMEM_LIBRARY") or nccl_is_loaded():
            warn(str(error))
        return _Later()


def is_there(library: Any) -> bool:
    return not isinstance(library, (_Later, Off))


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
    "amem_want": [],
    "amem_want_pause": [ctypes.c_ulonglong] + _TAGS + [ctypes.c_void_p],
    "amem_want_resume": [ctypes.c_ulonglong] + _TAGS + [ctypes.c_int],
    "amem_wait": [ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p],
    "amem_safepoint": [ctypes.c_uint],
}
_ANSWERS: Dict[str, Any] = {"amem_last_error": ctypes.c_char_p, "amem_version": ctypes.c_char_p, "amem_want": ctypes.c_ulonglong}


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
            function.restype = _ANSWERS.get(name, ctypes.c_int)
        return library
    except OSError as error:
        raise OSError("cannot load %s: %s; %s" % (found, error, _remedy(found))) from None
