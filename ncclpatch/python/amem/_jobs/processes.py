"""Jobs that `amem doctor` starts: processes with one Python module, whose ranks say values to each other and end with a result.

Each job has a folder of its own for journals, sockets and output. Ranks that do not end are killed, and the folder is removed.
"""

import contextlib
import glob
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection
from typing import NamedTuple

from .. import _library, _why

LONGEST_PLACE = 40  # characters; the path of a Unix socket has 107
HOME = "/"  # of processes that are started: Python imports modules of the current directory first, whoever put them there
END_SECONDS = 10


def environment_of_package():
    """Variables with which a Python elsewhere imports this package, and writes nothing beside it."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [package] + [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


class Job:
    """The ranks of one job, each at one end of a pipe. end() must be called.

    module:     of this folder; its __main__ is rank_process.main
    settings:   of each rank, for the function that the module gives to rank_process.main
    variables:  of the environment of all ranks; None takes one out
    own:        further ones of each rank, or None
    library:    that is preloaded; None: the ranks run without AMem
    first:      the rank of the first process in its job, which may have ranks on other hosts
    """

    def __init__(self, module, settings, variables, library, own=None, first=0):
        self.first = first
        place = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="amem-m-", dir=place if len(place) < LONGEST_PLACE else "/tmp")
        self.processes, self.pipes = [], []
        places = {"AMEM_TIMEOUT_MS": "20000", "AMEM_JOURNAL_DIR": self.folder + "/j", "AMEM_SOCKET_DIR": self.folder, "AMEM_SIM_WORLD": self.folder + "/world"}
        base = _library.environment_with(library, os.environ) if library else _library.environment_without(os.environ)
        try:
            for rank, one in enumerate(settings):
                self._start(module, one, {**base, **environment_of_package(), **places, **variables, "RANK": str(first + rank), **(own[rank] if own else {})})
        except BaseException:
            self.end()
            raise

    def _start(self, module, settings, environment):
        ours, theirs = multiprocessing.Pipe()
        with theirs, open(self.folder + "/log.%d" % len(self.pipes), "wb") as log:
            self.processes.append(subprocess.Popen(
                [sys.executable, "-m", "amem._jobs." + module, str(theirs.fileno()), json.dumps(settings)],
                env={name: value for name, value in environment.items() if value is not None},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=HOME, pass_fds=[theirs.fileno()]))
        self.pipes.append(ours)

    @property
    def journals(self):
        return self.folder + "/j"

    @property
    def members(self):
        """For results(): each rank's end of its pipe."""
        return [Member(self, rank) for rank in range(len(self.pipes))]

    def received(self, rank):
        """What the rank sent, or {"failure": why} of one that has ended."""
        with contextlib.suppress(EOFError, OSError):
            return json.loads(self.pipes[rank].recv_bytes())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(timeout=END_SECONDS)
        code, number = self.processes[rank].returncode, self.first + rank
        last = self.last_line(rank)
        return {"failure": "rank %d ended with %s%s" % (number, ending(code), ": " + last if last else ""), "signal": -code if code and code < 0 else None}

    def last_line(self, rank):
        """What the rank wrote last; "" if nothing."""
        with open(self.folder + "/log.%d" % rank, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file.read()[-4000:].splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def end(self):
        """Ends what has not ended, and removes the folder. Returns the processes that cannot be ended, because they are in the kernel."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        left = []
        for process in self.processes:
            try:
                process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                left.append(process.pid)
        try:
            self._move_to_disk()
        finally:  # a signal may end that
            shutil.rmtree(self.folder, ignore_errors=True)
        return left


    def _move_to_disk(self):
        """The last events of a rank that did not close its journal are in shared memory until that is read; then they go with the folder."""
        replay = _why.find(_library.path())
        if replay and glob.glob(self.journals + "/*"):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run([replay, "ls", self.journals], env=_why.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, timeout=END_SECONDS, check=False)


class Member(NamedTuple):
    """A rank of a job on this host, for results()."""

    job: Job
    index: int

    @property
    def ranks(self):
        return (self.job.first + self.index,)

    def fileno(self):
        return self.job.pipes[self.index].fileno()

    def received(self):
        return {self.ranks[0]: self.job.received(self.index)}

    def answer(self, values):
        with contextlib.suppress(OSError):  # of one that has ended, which is received next
            self.job.pipes[self.index].send_bytes(values)


def results(members, deadline):
    """The result of each rank; {"failure": why}, or {"unfinished": why} of one that did not end in time. What all ranks say goes to each of
    them; when one fails, the others are not waited for. A member carries one rank or several: fileno(), ranks, received(), answer()."""
    ranks = sorted(rank for member in members for rank in member.ranks)
    said = {}
    while time.monotonic() < deadline:
        waiting = [member for member in members if not said.keys() >= set(member.ranks)]
        for member in connection.wait(waiting, max(0, deadline - time.monotonic())):
            said.update(member.received())
        if any("failure" in one for one in said.values()):
            break
        if len(said) == len(ranks):
            if "said" not in said[ranks[0]]:
                break  # these are the results
            values = json.dumps([said[rank]["said"] for rank in ranks]).encode()
            for member in members:
                member.answer(values)
            said.clear()
    return [said.get(rank, {"unfinished": "rank %d did not end in its time" % rank}) for rank in ranks]


def ending(code):
    """Of a process, in words."""
    if code is None or code >= 0:
        return str(code)
    with contextlib.suppress(ValueError):
        return "signal %d (%s)" % (-code, signal.Signals(-code).name)
    return "signal %d" % -code


def first_failure(results):
    """Of those of a job's ranks: that of one that failed, else of one that did not end, because who did not end waits for who failed."""
    for kind in ("failure", "unfinished"):
        for result in results:
            if kind in result:
                return {**result, "failure": result[kind]}
    return None
