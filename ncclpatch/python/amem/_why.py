"""The first line of `amem-replay why` for an error. Standard library only; nothing here raises, or waits for long."""

import os
import shlex
import shutil
import subprocess

SECONDS = 5
COMMAND = "amem-replay why "  # the end of the library's message of a pause or resume that failed


def find(library):
    """amem-replay: AMEM_REPLAY, else where it is built or installed (beside the library, or ../bin), else in PATH, else None."""
    chosen = os.environ.get("AMEM_REPLAY")
    if chosen:
        return chosen
    folder = os.path.dirname(os.path.abspath(library))
    for place in (os.path.join(folder, "amem-replay"), os.path.join(os.path.dirname(folder), "bin", "amem-replay")):
        if os.access(place, os.X_OK) and os.path.isfile(place):
            return place
    return shutil.which("amem-replay")


def first_line(text, library):
    """What `text`, an error of the library's, offers to find out; None if it offers nothing or that cannot be had."""
    try:
        before, command, directory = text.rpartition(COMMAND)
        replay = find(library)
        if not before or not command or replay is None:
            return None
        # The journals are read by a program of its own: it must not be under AMem, nor under anything else of the job's.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        process = subprocess.Popen(
            [replay, "why"] + shlex.split(directory),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            output = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: what hangs in the kernel does not end for a signal
            return None
        lines = output.decode(errors="replace").splitlines()
        return lines[0].strip() or None if lines and process.returncode != 0 else None
    except Exception:  # pylint: disable=broad-except  # the error that is being raised must not become another one
        return None
