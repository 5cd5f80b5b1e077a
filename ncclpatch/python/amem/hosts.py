"""Pauses of all ranks of a job that a controller drives: Ray actors, on one host or many. (For torch.distributed: amem.pause(process_group=...).)

    import amem.hosts

    with amem.hosts.paused(workers):              # a list of actors, of which each is one rank
        generate_rollouts()
    amem.hosts.pause(workers, "weights", "nccl")

Each actor does it in its own process; one that has no memory under AMem takes part with nothing. When one fails, or does not answer in time, all that had paused resume again, and the error names
it; one that was only late finds that out, and undoes its part. Nothing of an actor's class has to know AMem: Ray can call a function in any
actor (__ray_call__). An actor without that needs a method amem_call(function, *arguments) that calls the function.

The caller needs neither a GPU nor the library. Ray itself is imported only where no `engine` is given.
"""

import contextlib
import functools
import itertools
import os
import socket
import threading
import time

from . import _agreements, _calls, _hosts, _tags

_numbers = itertools.count(1)

# ---- in the actors

_lock = threading.Lock()
_undo = {}      # attempt: what undoes this actor's part of it
_given_up = {}  # attempts that the caller has given up, in the order of their ends
REMEMBERED = 64


def _remember(attempts, attempt, value):
    attempts[attempt] = value
    while len(attempts) > REMEMBERED:
        attempts.pop(next(iter(attempts)))


def _who():
    return {"host": socket.gethostname(), "pid": os.getpid(), "failure": None}


def _await_idle():
    """Waits until this actor's GPUs are idle. Returns {"host", "pid", "failure"}."""
    try:
        with _calls.explained_later():
            _hosts.await_idle()
    except Exception as error:  # pylint: disable=broad-except  # as in _act
        return {**_who(), "failure": _hosts.reason_of(error)}
    return _who()


def _act(attempt, operation, tags, hosts_idle=False):
    """The actor's part of an attempt, unless the caller has given it up. Returns {"host", "pid", "failure"}."""
    who = _who()
    with _lock:
        if attempt in _given_up:
            return {**who, "failure": _agreements.LATE}
    pause = functools.partial(_tags.pause, hosts_idle=True) if hosts_idle else _tags.pause
    act, undo = _hosts.part_of(operation, pause if operation == "pause" else _tags.resume_in_time, tags)
    try:
        with _calls.explained_later():
            act()
    except Exception as error:  # pylint: disable=broad-except  # it crosses to the caller as a text, whatever its class
        return {**who, "failure": _hosts.reason_of(error)}
    with _lock:
        late = attempt in _given_up
        if not late:
            _remember(_undo, attempt, undo)
    if late:  # the caller gave up meanwhile, and asked for the undoing on another thread
        return {**who, "failure": _undone(undo) or _agreements.LATE}
    return who


def _undone(undo):
    try:
        undo()
    except Exception as error:  # pylint: disable=broad-except
        return _hosts.reason_of(error)
    return None


def _give_up(attempt):
    """Undoes the actor's part of an attempt, or keeps it from beginning. Returns None, or why it could not be undone."""
    with _lock:
        _remember(_given_up, attempt, True)
        undo = _undo.pop(attempt, None)
    return _undone(undo) if undo else None


# ---- in the caller


class Ray:
    """How Ray calls an actor and waits. An engine of another kind has the same two methods."""

    def __init__(self):
        import ray
        self._ray = ray

    def call(self, actor, function, *arguments):
        """Begins function(*arguments) in the actor's process, after what it was asked before; returns what `wait` takes."""
        method = getattr(actor, "amem_call", None)
        if method is not None:
            return method.remote(function, *arguments)
        return actor.__ray_call__.remote(_in_actor, function.__name__, *arguments)

    def wait(self, calls, seconds):
        """For each call ("ok", its value), ("failed", a text), or ("silent", "") if the time is up. Returns early if one failed."""
        end = time.monotonic() + seconds
        found = {}
        waiting = list(calls)
        while waiting:
            ready, waiting = self._ray.wait(waiting, num_returns=1, timeout=max(0, end - time.monotonic()))
            if not ready:
                break
            for call in ready:
                found[call] = self._value(call)
            if any(kind == "failed" or (isinstance(value, dict) and value.get("failure")) for kind, value in found.values()):
                break
        return [found.get(call, ("silent", "")) for call in calls]

    def _value(self, call):
        try:
            return "ok", self._ray.get(call)
        except Exception as error:  # pylint: disable=broad-except  # an actor that died, or an error of its method
            return "failed", (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _in_actor(_actor, name, *arguments):
    """Ray sends functions by value; this one looks AMem's up where it runs, so that state is the process's own."""
    import amem.hosts
    return getattr(amem.hosts, name)(*arguments)


def _run(operation, actors, tags, timeout, engine):
    actors, tags = list(actors), tags or (_tags.NCCL,)
    engine = engine or Ray()
    timeout = _hosts.default_timeout() if timeout is None else timeout
    attempt = "%s-%d-%d-%d" % (socket.gethostname(), os.getpid(), time.monotonic_ns(), next(_numbers))
    idle = _hosts.renews() and _hosts.asks_cards(operation, tags)
    parts = [(_await_idle,)] if idle else []
    parts.append((_act, attempt, operation, tags, idle))
    for part in parts:
        _all_do(part, operation, actors, tags, timeout, engine, attempt)


def _all_do(part, operation, actors, tags, timeout, engine, attempt):
    """One part of an attempt, function and arguments, by all actors."""
    try:
        calls = [engine.call(actor, *part) for actor in actors]
        answers = engine.wait(calls, timeout)
    except BaseException:  # Ctrl-C, for example: without this some actors would stay paused, and nobody would know which
        with contextlib.suppress(Exception):  # the first error is the one to tell
            _undo_all(engine, actors, attempt, timeout)
        raise
    failures, silent = [], []
    for number, (kind, value) in enumerate(answers):
        if kind == "silent":
            silent.append(number)
        elif kind == "failed":
            failures.append("rank %d does not answer: %s" % (number, value))
        elif value["failure"]:
            failures.append(_agreements.failed({**value, "rank": number, "host": "%s (pid %d)" % (value["host"], value["pid"])}))
    if not failures and not silent:
        return
    reasons = failures or ["rank %s did not come within %g s" % (", ".join(map(str, silent)), timeout)]
    raise _calls.AmemError(_agreements.REMOTE, "%s of %s by %d actors: %s; %s" % (operation, ", ".join(tags), len(actors), "; ".join(reasons),
                                                                      _undo_all(engine, actors, attempt, timeout)))


def _undo_all(engine, actors, attempt, timeout):
    """Asks every actor, also late ones, which hear of it after their part."""
    calls = [engine.call(actor, _give_up, attempt) for actor in actors]
    broken = []
    end = time.monotonic() + timeout
    for number, call in enumerate(calls):
        kind, value = engine.wait([call], max(0, end - time.monotonic()))[0]
        if kind == "silent":
            broken.append("rank %d will undo its part when it answers again" % number)
        elif kind == "ok" and value:
            broken.append("rank %d could not undo its part: %s" % (number, value))
    return "; ".join(broken) or "all that live are as before"


def pause(actors, *tags, timeout=None, engine=None):
    """amem.pause(*tags) in every actor, or in none.

    actors:   of one job, all of them: those that share NCCL memory have to come together. Each must be free to run a method.
    timeout:  seconds for the actors to do it, and again for undoing; default: nine eighths of AMEM_TIMEOUT_MS.
    engine:   what calls the actors; default Ray.
    With AMEM_NETWORK=renew, in the caller's environment as in the actors', their GPUs are waited for to be idle first, so that what
    network cards hold leaves, too.
    AmemError (code 6): names the rank, which is the number in `actors`, its host and its reason. Then those that live are as before,
    and it can be called again. An exception that comes while it waits, Ctrl-C for example, makes all undo as well.
    """
    _run("pause", actors, tags, timeout, engine)


def resume(actors, *tags, timeout=None, engine=None):
    """amem.resume(*tags) in every actor or in none: after a failure all living ones are paused, contents kept. See pause."""
    _run("resume", actors, tags, timeout, engine)


@contextlib.contextmanager
def paused(actors, *tags, timeout=None, engine=None):
    """Pauses, and resumes on the way out, also after an exception."""
    actors = list(actors)
    pause(actors, *tags, timeout=timeout, engine=engine)
    try:
        yield
    finally:
        resume(actors, *tags, timeout=timeout, engine=engine)
