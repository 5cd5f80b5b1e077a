"""The hosts of `amem doctor --prove`: this one, and others by a server there, which is reached by ssh or started by torchrun.

A server does what it is asked for over a connection, relays what its ranks say, and ends with the connection, and its ranks with it. All
that goes over one is JSON.
"""

import base64
import contextlib
import glob
import json
import os
import platform
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError, connection
from typing import NamedTuple, Optional

from .. import _library, _why
from . import nvml, processes, proofs, rank_process

PACK_SECONDS, GONE_SECONDS = 30, 15
LEFT_BYTES = 64 << 20  # more than that, used by nobody after a run, is left behind
HELLO = b"amem-prove-host 1\n"  # before it a login shell may write what it likes
MOST_WORDS_OF_A_SHELL = 1 << 16
SLOTS = re.compile(r"[1-9][0-9]{0,3}")
ANSWER_SECONDS, CONNECT_SECONDS = 120, 60
METHODS = ("describe", "in_use", "note_use", "start", "pack", "end", "left_behind", "others", "keep", "live")


class CannotProve(Exception):
    pass


class Host:
    """This machine, or another one (Remote): its GPUs, who else uses them, and the ranks of one run at a time."""

    def __init__(self):
        self._driver = self._nvml = self._job = None
        self._before, self._own = [], set()  # of the last run: what was in use before it, and its processes

    def describe(self, most_gpus):
        """{"host", "gpus": [{"name", "uuid"}], "driver", "simulated"}. CannotProve where no job can run, or who uses the GPUs cannot be seen."""
        try:
            self._driver = driver = rank_process.Driver(None)
            count = min(driver.count, most_gpus or driver.count)
            self.gpus = [{"name": driver.name(device), "uuid": driver.uuid(device)} for device in range(count)]
        except rank_process.Failed as error:
            raise CannotProve("no GPU can be used here: %s" % error) from None
        if not self.gpus:
            raise CannotProve("no GPU is visible here; in a container: start it with the GPUs (--gpus all)")
        try:
            self._nvml = nvml.Nvml()
        except OSError as error:
            if not driver.simulated:
                raise CannotProve("whether others use the GPUs cannot be seen: %s" % error) from None
        version = self._nvml.driver_version() if self._nvml else ""
        return {"host": platform.node(), "gpus": self.gpus, "driver": version or "unknown", "simulated": driver.simulated}

    def in_use(self, patience):
        """Who uses which GPU, in words; "": nobody, or nobody any more after `patience` seconds. CannotProve where that cannot be known."""
        return self._said(nvml.Use.by_others, patience)

    def others(self):
        """The programs on the GPUs that are none of the last run's, in words; "": none that can be seen. Memory that nobody is seen to hold may
        be the run's own, see left_behind()."""
        return self._said(lambda use: use.by_processes(self._own), GONE_SECONDS)

    def _said(self, of_use, patience):
        end = time.monotonic() + patience
        while True:
            uses = self._uses()
            said = "; ".join("GPU %d (%s) is in use: %s" % (number, gpu["name"], others) for number, (gpu, use) in enumerate(zip(self.gpus, uses))
                             for others in [of_use(use)] if others)
            if not said or time.monotonic() >= end:
                return said
            time.sleep(0.2)

    def note_use(self):
        """Remembers what is in use, with which left_behind() compares."""
        self._before = self._uses()

    def start(self, module, settings, variables, own, first, stock):
        """Starts the ranks from number `first` on; see processes.Job. `stock`: without AMem. CannotProve: they cannot be started."""
        library = _library.path()
        if not os.path.exists(library):
            raise CannotProve("%s was not found" % _library.NAME)
        if not os.path.exists(settings[0]["nccl"]):
            raise CannotProve("%s is not there" % settings[0]["nccl"])
        try:
            self._job = processes.Job(module, settings, variables, None if stock else library, own, first)
        except OSError as error:
            raise CannotProve("the ranks cannot be started: %s" % error) from None
        self._own = {process.pid for process in self._job.processes}

    @property
    def members(self):
        return self._job.members

    def pack(self):
        """The journals of the run, as a pack in base 64, made while its processes live; None where they cannot be had."""
        replay = _why.find(_library.path())
        if replay is None or not glob.glob(self._job.journals + "/*"):
            return None
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            path = self._job.folder + "/job.amem"
            subprocess.run([replay, "pack", "-o", path, self._job.journals], env=_why.environment(), stdin=subprocess.DEVNULL, capture_output=True,
                           timeout=PACK_SECONDS, check=False)
            with open(path, "rb") as file:
                return base64.b64encode(file.read()).decode()
        return None

    def end(self):
        """Ends the run's processes. Those that cannot be ended, in words; "": none."""
        job, self._job = self._job, None
        left = job.end() if job else []
        return "processes that cannot be ended: %s" % ", ".join(map(str, left)) if left else ""

    def left_behind(self):
        """What GPUs have more in use than before the run, in words; "": nothing that counts."""
        end = time.monotonic() + GONE_SECONDS
        while True:
            more = [now.used - then.used for now, then in zip(self._uses(), self._before)]
            if max(more, default=0) < LEFT_BYTES:
                return ""
            if time.monotonic() > end:
                return "GPU %d has %d MiB more in use than before" % (more.index(max(more)), max(more) >> 20)
            time.sleep(0.2)

    def keep(self, answer):
        """Keeps a proof for this host; "", or why that is not possible."""
        return proofs.keep(answer)

    def live(self, seconds):
        """Of a server: ends after so long, whatever happens."""

    def close(self):
        if self._job:
            self.end()

    def _uses(self):
        """Of each GPU; on the simulator nothing, where nobody says it."""
        try:
            return [self._nvml.use(gpu["uuid"]) if self._nvml else nvml.Use([], 0, 0) for gpu in self.gpus]
        except OSError as error:
            raise CannotProve("whether others use the GPUs cannot be seen: %s" % error) from None


# ---- hosts that are reached by a connection


class Halves:
    """A connection whose ends are two descriptors: of ssh, or of a process's standard input and output."""

    def __init__(self, reading, writing):
        self._reading, self._writing = connection.Connection(reading, writable=False), connection.Connection(writing, readable=False)
        self.fileno, self.recv_bytes, self.poll, self.send_bytes = self._reading.fileno, self._reading.recv_bytes, self._reading.poll, self._writing.send_bytes

    def close(self):
        self._reading.close()
        self._writing.close()


class Remote:
    """A Host on the other side of a connection: the same methods, which raise CannotProve also where it is lost; and, during a run, the member
    of processes.results() that has all of its ranks."""

    def __init__(self, name, link):
        self.name, self._link, self.ranks = name, link, ()
        self.fileno = link.fileno

    def __getattr__(self, name):
        if name not in METHODS:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name, *arguments):
        try:
            self._send({"call": name, "arguments": arguments})
            end = time.monotonic() + ANSWER_SECONDS
            while self._link.poll(max(0, end - time.monotonic())):
                said = json.loads(self._link.recv_bytes())
                if "error" in said:
                    raise CannotProve("%s: %s" % (self.name, said["error"]))
                if "reply" in said:
                    return said["reply"]  # what ranks say of a run that is to end is nobody's
        except (EOFError, OSError) as error:
            raise CannotProve("%s: the connection was lost: %s" % (self.name, error)) from None
        raise CannotProve("%s does not answer" % self.name)

    def start(self, module, settings, variables, own, first, stock):
        self.ranks = tuple(range(first, first + len(settings)))
        self._call("start", module, settings, variables, own, first, stock)

    @property
    def members(self):
        return [self]

    def received(self):
        try:
            said = json.loads(self._link.recv_bytes())
        except (EOFError, OSError):
            return {self.ranks[0]: {"failure": "the connection to %s was lost" % self.name}}
        return {int(rank): one for rank, one in said.get("ranks", {}).items()}

    def answer(self, values):
        with contextlib.suppress(OSError):  # what is lost is received next
            self._send({"values": values.decode()})

    def _send(self, message):
        self._link.send_bytes(json.dumps(message).encode())

    def close(self):
        with contextlib.suppress(OSError):
            self._link.close()


class Server(Host):
    """A Host in a process of its own, whose controller may go without a sign."""

    def live(self, seconds):
        signal.alarm(seconds)


def serve(link):
    """Of a server: does what it is asked for until the connection ends."""
    host, ranks = Server(), []
    try:
        while True:
            for ready in connection.wait([link, *ranks]):
                if ready is not link:
                    said = ready.received()
                    ranks = [rank for rank in ranks if rank is not ready or "said" in said[rank.ranks[0]]]
                    link.send_bytes(json.dumps({"ranks": said}).encode())
                    continue
                asked = json.loads(link.recv_bytes())
                if "values" in asked:
                    for rank in ranks:
                        rank.answer(asked["values"].encode())
                    continue
                link.send_bytes(json.dumps(_done(host, asked)).encode())
                if asked["call"] in ("start", "end"):
                    ranks = host.members if asked["call"] == "start" else []
    except (EOFError, OSError):
        pass  # the controller has ended
    finally:
        host.close()


def _done(host, asked):
    try:
        if asked["call"] not in METHODS:
            raise CannotProve("there is no %s; use one version of AMem on all hosts" % asked["call"])
        return {"reply": getattr(host, asked["call"])(*asked["arguments"])}
    except Exception as error:  # pylint: disable=broad-except  # the controller is to hear of it
        return {"error": str(error) or type(error).__name__}


class Line(NamedTuple):
    """Of a file of hosts."""

    name: str
    ranks: Optional[int]
    python: str


def read_hosts(path):
    """The lines "NAME [slots=N] [python=PATH]" of a file; # begins a comment. CannotProve: it cannot be read."""
    lines = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                words = text.partition("#")[0].split()
                if not words:
                    continue
                options = dict(word.partition("=")[::2] for word in words[1:])
                if options.keys() - {"slots", "python"} or not SLOTS.fullmatch(options.get("slots", "1")) or words[0].startswith("-"):
                    raise CannotProve("%s:%d: a line is NAME [slots=N] [python=PATH], not %s" % (path, number, text.strip()))
                lines.append(Line(words[0], int(options["slots"]) if "slots" in options else None, options.get("python", sys.executable)))
    except (OSError, UnicodeDecodeError) as error:
        raise CannotProve("%s cannot be read: %s" % (path, error)) from None
    if not lines:
        raise CannotProve("%s names no host" % path)
    return lines


def is_here(name):
    return name in ("localhost", "127.0.0.1", socket.gethostname())


def by_ssh(line):
    """The host of a line. Its Python has this package, or finds it at the same path."""
    passed = {name: value for name, value in os.environ.items() if name.startswith("NCCL_") or name in ("AMEM_LIBRARY", "AMEM_REPLAY")}
    variables = ["%s=%s" % item for item in {**processes.environment_of_package(), **passed}.items()]
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", line.name, shlex.join(["env", *variables, line.python, "-m", "amem._jobs.host"])]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise CannotProve("ssh cannot be started: %s" % error) from None
    reading, writing = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
    process.stdin.close()
    process.stdout.close()
    said, end = b"", time.monotonic() + CONNECT_SECONDS
    while not said.endswith(HELLO) and len(said) < MOST_WORDS_OF_A_SHELL and connection.wait([reading], max(0, end - time.monotonic())):
        one = os.read(reading, 1)
        if not one:
            break
        said += one
    if not said.endswith(HELLO):
        process.kill()
        raise CannotProve("%s: no server could be started there by `%s`" % (line.name, shlex.join(command[:-1])))
    return Remote(line.name, Halves(reading, writing))


# ---- hosts that torchrun started


class Torchrun:
    """What torchrun says to one of its processes."""

    STORE_KEY = "amem-prove"

    def __init__(self):
        value = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")}
        self.there = all(value.values()) and bool(os.environ.get("MASTER_ADDR"))
        if self.there:
            self.rank, self.local_rank, self.ranks_here, self.group, self.groups = (
                int(value[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"))

    def _store(self):
        import datetime
        from torch.distributed import TCPStore
        return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and self.rank == 0,
                        timeout=datetime.timedelta(seconds=CONNECT_SECONDS))

    @property
    def _key(self):  # of this start of the job
        return "%s-%s-%s" % (self.STORE_KEY, os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def hosts(self):
        """Of rank 0: (host, ranks) of each group, this one first. CannotProve: one does not come."""
        found = {0: (Host(), self.ranks_here)}
        if self.groups > 1:
            secret, came = os.urandom(32), queue.SimpleQueue()
            with socket.create_server(("", 0)) as listener:
                threading.Thread(target=_admit, args=(listener, secret, came), daemon=True).start()
                self._store().set(self._key, json.dumps([socket.gethostname(), listener.getsockname()[1], secret.hex()]))
                end = time.monotonic() + CONNECT_SECONDS
                while len(found) < self.groups:
                    try:
                        said, link = came.get(timeout=max(0, end - time.monotonic()))
                    except queue.Empty:
                        raise CannotProve("of %d hosts %d came within %d s" % (self.groups, len(found), CONNECT_SECONDS)) from None
                    found[said["group"]] = (Remote(said["host"], link), said["ranks"])
        return [found[group] for group in sorted(found)]

    def serve(self):
        """Of the first process of any other group."""
        signal.alarm(2 * CONNECT_SECONDS)  # until the controller says how long all may take
        try:
            name, port, key = json.loads(self._store().get(self._key))
            with connection.Client((self._address(name), port), authkey=bytes.fromhex(key)) as link:
                link.send_bytes(json.dumps({"group": self.group, "host": platform.node(), "ranks": self.ranks_here}).encode())
                serve(link)
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            raise CannotProve("the process of rank 0 cannot be reached: %s" % error) from None

    @staticmethod
    def _address(name):
        """Of rank 0's host: by its name, or, where that is not known here, the address at which torchrun meets, which usually is that host's."""
        try:
            return socket.gethostbyname(name)
        except OSError:
            return os.environ["MASTER_ADDR"]


def _admit(listener, secret, came):
    """Those who know the secret, each with a thread of its own: a stranger who says nothing holds nobody up."""
    def meet(link):
        with contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError):
            connection.deliver_challenge(link, secret)
            connection.answer_challenge(link, secret)
            came.put((json.loads(link.recv_bytes()), link))

    with contextlib.suppress(OSError):  # it was closed
        while True:
            threading.Thread(target=meet, args=(connection.Connection(listener.accept()[0].detach()),), daemon=True).start()


def main():
    """The server by ssh: standard output is the connection, and whatever else writes there goes to standard error."""
    reading, writing = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, lambda found, _frame: sys.exit(128 + found))
    os.write(writing, HELLO)
    serve(Halves(reading, writing))


if __name__ == "__main__":
    main()
