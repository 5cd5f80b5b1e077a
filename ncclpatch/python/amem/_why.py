"""The first line of `amem-replay why` for an error. Standard library only; nothing here raises, or waits for long."""

import os
import shlex
import shutil
import subprocess

from . import _library

SECONDS = 5
try:
    _BEGAN_IN = os.getcwd()  # a relative AMEM_REPLAY is one of there, wherever the job goes
except OSError:
    _BEGAN_IN = "/"
COMMAND = "amem-replay why "  # the end of the library's message of a pause or resume that failed


def find(library):
    """amem-replay: AMEM_REPLAY, else where it is built or installed (beside the library, or ../bin; of the package, or of its tree),
    else in PATH, else None. Never what merely lies in the current directory. What AMEM_REPLAY names must be there; nothing else is taken for it."""
    chosen = os.environ.get("AMEM_REPLAY")
    if chosen:
        place = os.path.join(_BEGAN_IN, chosen) if os.sep in chosen else shutil.which(chosen, path=environment().get("PATH", ""))
        return place if place and os.path.isfile(place) and os.access(place, os.X_OK) else None
    folder = os.path.dirname(library) and os.path.dirname(os.path.abspath(library))  # without one only the loader knows where it is
    found = _library.beside("amem-replay", *([folder, folder + "/../bin"] if folder else []), "../../../../bin", "../../../build/bin", mode=os.X_OK)
    return found or shutil.which("amem-replay", path=environment().get("PATH", ""))


def not_found():
    """What find() means by None, and what to do."""
    chosen = os.environ.get("AMEM_REPLAY")
    return "AMEM_REPLAY is %s, which is no program; correct or unset it" % chosen if chosen else "amem-replay was not found; set AMEM_REPLAY to its path"


def environment():
    """That of a program of AMem's own: not under AMem, nor under anything else of the job's, and without folders of PATH and
    LD_LIBRARY_PATH that depend on the current directory."""
    found = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    for name in ("PATH", "LD_LIBRARY_PATH"):
        folders = [folder for folder in found.pop(name, "").replace(";", ":").split(":") if os.path.isabs(folder)]
        if folders:  # an empty list would mean the current directory
            found[name] = ":".join(folders)
    return found


def start(command, errors=subprocess.PIPE):
    """Starts a program of AMem's own; its standard output is the caller's to read."""
    return subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)


def first_line(text, library):
    """What `text`, an error of the library's, offers to find out; None if it offers nothing or that cannot be had."""
    try:
        before, command, directory = text.rpartition(COMMAND)
        replay = find(library)
        if not before or not command or replay is None:
            return None
        process = start([replay, "why", *shlex.split(directory)], subprocess.DEVNULL)
        try:
            output = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: what hangs in the kernel does not end for a signal
            return None
        lines = output.decode(errors="replace").splitlines()
        return lines[0].strip() or None if lines and process.returncode != 0 else None
    except Exception:  # pylint: disable=broad-except  # the error that is being raised must not become another one
        return None
