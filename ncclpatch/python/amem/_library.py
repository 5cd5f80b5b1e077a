"""Finding libamem_nccl.so and declaring what it exports. Standard library only."""

import ctypes
import os

NAME = "libamem_nccl.so"


def _mapped(match):
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


def nccl_is_loaded():
    return _mapped(lambda name: name.startswith("libnccl.so")) is not None


def find():
    """The library to use: one that is loaded already, else AMEM_LIBRARY, else the one beside this package, else by name."""
    loaded = _mapped(lambda name: name == NAME)
    if loaded:
        return loaded
    chosen = os.environ.get("AMEM_LIBRARY")
    if chosen:
        return chosen
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), NAME)
    return beside if os.path.exists(beside) else NAME


def load():
    path = find()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise OSError(
            "cannot load %s: %s (set AMEM_LIBRARY to the path of libamem_nccl.so)" % (path, error)
        ) from error
    for name in ("ncclPause", "ncclResume"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p]
        function.restype = ctypes.c_int
    library.amem_attach.argtypes = []
    library.amem_attach.restype = ctypes.c_int
    library.amem_last_error.argtypes = []
    library.amem_last_error.restype = ctypes.c_char_p
    library.amem_version.argtypes = []
    library.amem_version.restype = ctypes.c_char_p
    library.amem_stats_json.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]
    library.amem_stats_json.restype = ctypes.c_int
    library.amem_trim_pinned.argtypes = [ctypes.c_size_t]
    library.amem_trim_pinned.restype = ctypes.c_int
    library.ncclSetGroupID.argtypes = [ctypes.c_int]
    library.ncclSetGroupID.restype = ctypes.c_int
    return library
