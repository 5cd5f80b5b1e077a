"""Many hosts: AMem agrees on a pause inside a host, and the ranks agree here, through the store of a process group, that all hosts did it.

One agreement has a number, which is the same on all ranks: the store's key "epoch" counts them. Each rank does its part, and sets its
outcome; rank 0 reads all outcomes. The decision is one key, which is only ever set by compare_set: rank 0 sets that all succeeded; a rank
that failed, or whose time is up, sets that all undo. So there is one decision, and who comes late finds it. Only the store is used, because
the collectives of NCCL are refused while it is paused. Standard library only; PyTorch is asked for the store of its groups.
"""

import contextlib
import datetime
import functools
import json
import os
import queue
import socket
import threading
import time
import weakref
from concurrent import futures
from typing import Any, Optional

from . import _calls, _tags

REMOTE = 6  # ncclRemoteError: another rank is the reason
SLICE_SECONDS = 0.2  # of a wait
SHORTEST_SECONDS, LONGEST_SECONDS = 0.0005, 0.02  # between two questions to a store
LATE = "the other ranks had given up already when this one came"


class Silence(TimeoutError):
    """A store that does not answer."""


class _Answering:
    """A store whose calls end. PyTorch's TCPStore waits for the answer of a host that is cut off for as long as TCP does, or for ever,
    and no signal gets through to Python meanwhile; so a thread of its own waits there, and is left behind when the time is up.

    Calls end GRACE_SECONDS after what within() was told last at the latest, by Silence. Later ones wait for that answer first, and
    fail when the time is up.
    """

    GRACE_SECONDS = 1  # to say how it ended, when the time is up

    def __init__(self, store):
        self._store, self._end, self._last, self._thread = store, 0, None, None

    def within(self, seconds):
        self._end = time.monotonic() + seconds

    def _comes(self, answer, grace=0):
        with contextlib.suppress(futures.TimeoutError):
            answer.exception(max(self._end - time.monotonic(), 0) + grace)
        return answer.done()

    def __getattr__(self, name):
        return functools.partial(self._call, name, getattr(self._store, name))

    def _call(self, name, function, *arguments):
        if self._last and not self._comes(self._last):
            raise Silence("it has not answered an earlier question")
        if self._thread is None or not self._thread.is_alive():  # the first call, also of a forked child
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(target=_answer, args=(self._calls,), name="amem-store", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.put, None)
        self._last = answer = futures.Future()
        self._calls.put((answer, function, arguments))
        if not self._comes(answer, self.GRACE_SECONDS):
            raise Silence("no answer to %s in time" % name)
        return answer.result()


def _answer(calls):
    for answer, function, arguments in iter(calls.get, None):
        try:
            answer.set_result(function(*arguments))
        except BaseException as error:  # pylint: disable=broad-except  # for whoever waits
            answer.set_exception(error)
        del answer, function, arguments  # the store may be let go while nobody calls


class StoreGroup:
    """Ranks that agree through a store: PyTorch's TCPStore or FileStore, or an object with their set, get, wait and compare_set.

    store: shared by all ranks of the group, and used for one group only (see torch.distributed.PrefixStore). It is not owned.
    rank, size: of this process in the group, and how many take part.
    host: a name for messages; default: this host's.
    Calls on one group come from one thread at a time.
    """

    __module__ = "amem"

    def __init__(self, store: Any, rank: int, size: int, host: Optional[str] = None) -> None:
        if not 0 <= rank < size:
            raise ValueError("rank %r of %r" % (rank, size))
        self.store, self.rank, self.size = _Answering(store), rank, size
        self.host = host or socket.gethostname()
        self.last = {}  # by kind of agreement: the number of the last one that this process knows the decision of
        self.was_late = False  # for the last one

    def peek(self, key):
        """The value, or None if nobody has set it."""
        return self.store.get(key) if self.are_there([key], 0) else None

    def are_there(self, keys, seconds):
        """Waits for all keys, at most so long."""
        if hasattr(self.store, "check"):
            return self._asked_until_there(keys, seconds)
        limit = max(seconds, 0.001)
        began = time.monotonic()
        try:
            self.store.wait(keys, datetime.timedelta(seconds=limit))
            return True
        except Silence:
            raise
        except Exception:  # pylint: disable=broad-except  # stores raise different errors when the time is up
            if time.monotonic() - began < 0.9 * limit:
                raise  # not the time: the connection, for example
            return False

    def _asked_until_there(self, keys, seconds):
        """PyTorch's stores write a warning for each wait that ends by its time, and cannot be used meanwhile: so they are asked."""
        end, pause = time.monotonic() + seconds, SHORTEST_SECONDS
        while not self.store.check(keys):
            if time.monotonic() >= end:
                return False
            time.sleep(min(pause, max(0, end - time.monotonic())))
            pause = min(2 * pause, LONGEST_SECONDS)
        return True

    def value_by(self, key, end):
        """The value; None if nobody sets it until `end` of the monotonic clock."""
        while not self.are_there([key], min(SLICE_SECONDS, max(0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return None
        return self.store.get(key)

    def forget(self, key):
        with contextlib.suppress(Exception):  # some stores cannot; a few bytes stay
            self.store.delete_key(key)

    def describe(self):
        return {"rank": self.rank, "host": self.host, "pid": os.getpid()}


_groups = weakref.WeakKeyDictionary()


def group_of(process_group):
    """A StoreGroup of the caller's argument: one already, or a process group of torch.distributed (True: the default one)."""
    if isinstance(process_group, StoreGroup):
        return process_group
    from torch import distributed
    from torch.distributed import distributed_c10d
    if process_group is True or process_group is None:
        process_group = distributed.group.WORLD
    if process_group is None:
        raise _calls.AmemError(5, "torch.distributed has no process group yet: call init_process_group first")
    if process_group not in _groups:
        store = distributed.PrefixStore("amem", distributed_c10d._get_process_group_store(process_group))
        _groups[process_group] = StoreGroup(store, distributed.get_rank(process_group), distributed.get_world_size(process_group))
    return _groups[process_group]


def default_timeout():
    """Seconds. The library waits AMEM_TIMEOUT_MS for ranks of this host; an eighth more, and its reason reaches the other hosts."""
    text = os.environ.get("AMEM_TIMEOUT_MS", "")
    return (int(text) if text.isdigit() else 60000) / 1000 * 9 / 8


def _name(who):
    return "rank %d%s" % (who["rank"], " on %s" % who["host"] if who.get("host") else "")


class Agreement:
    """One agreement of all ranks of a group, from its number to its decision."""

    def __init__(self, group, what, timeout):
        self.group, self.what, self.timeout = group, what, timeout
        self.deadline = time.monotonic() + timeout
        group.store.within(timeout)
        if "cycle" not in group.last:  # so that the others can name this rank if it does not come
            group.store.set("names/%d" % group.rank, json.dumps(group.describe()))
            group.last["cycle"] = 0
        group.last["cycle"] = self.number = self._join()
        group.was_late = False
        self._clean(self.number - 2)

    def key(self, name, number=None):
        return "cycle/%d/%s" % (self.number if number is None else number, name)

    def outcome_key(self, rank, number=None):
        return self.key("outcome/%d" % rank, number)

    def left(self):
        return self.deadline - time.monotonic()

    def _join(self):
        """The number of the agreement that is under way, or of a new one. AmemError if this rank is late for one that was given up."""
        group = self.group
        text = (group.peek("cycle/epoch") or b"").decode()
        newest = int(text or 0)
        if newest > group.last["cycle"]:
            decision = group.peek(self.key("decision", newest))
            if decision is None:
                return newest
            decision = json.loads(decision)
            if not decision["ok"] and not (group.was_late and decision.get("absent")):
                group.last["cycle"] = newest
                # Once: who comes a moment after the others have given up waiting for it meets them when it calls again. Where
                # they gave up because a rank failed, they will call again as this one does.
                group.was_late = decision.get("absent", False)
                raise _calls.AmemError(REMOTE, "%s: %s (%s); nothing was done here, and it can be called again on all ranks"
                                       % (self.what, LATE, decision["message"]))
        return int(group.store.compare_set("cycle/epoch", text, str(newest + 1)))

    def _clean(self, number):
        """Keys of an agreement that nobody reads any more, because all ranks have come to a later one, or it was given up."""
        if number > 0:
            self.group.forget(self.outcome_key(self.group.rank, number))
            if self.group.rank == 0:
                self.group.forget(self.key("decision", number))

    def decide(self, ok, message="", absent=False):
        """Sets the decision, unless there is one; returns the one that holds. absent: because ranks did not come."""
        text = json.dumps({"ok": ok, "message": message, "absent": absent, "by": self.group.describe()})
        return json.loads(self.group.store.compare_set(self.key("decision"), "", text))

    def vote(self, failure=None):
        """Reports this rank's outcome: `failure` is None or a text. Returns the decision of all."""
        group = self.group
        outcome = {**group.describe(), "what": self.what, "failure": failure}
        group.store.set(self.outcome_key(group.rank), json.dumps(outcome))
        if failure is not None:
            return self.decide(False, "%s failed: %s" % (_name(outcome), failure))
        return self._collect() if group.rank == 0 else self._follow()

    def interrupted(self, error):
        """Ends the agreement for all, unless it is decided. Returns whether all succeeded."""
        with contextlib.suppress(Exception):
            return self.decide(False, "%s failed: %s: %s" % (_name(self.group.describe()), type(error).__name__, error))["ok"]
        return False

    def _follow(self):
        decision = self.group.value_by(self.key("decision"), self.deadline)
        return self._give_up() if decision is None else json.loads(decision)

    def _collect(self):
        keys = [self.outcome_key(rank) for rank in range(self.group.size)]
        while self.left() > 0:
            complete = self.group.are_there(keys, min(SLICE_SECONDS / 4, self.left()))
            decision = self.group.peek(self.key("decision"))
            if decision is not None:
                return json.loads(decision)
            if complete:
                return self._weigh([json.loads(value) for value in self._values(keys)])
        return self._give_up()

    def _values(self, keys):
        if hasattr(self.group.store, "multi_get"):
            with contextlib.suppress(Exception):  # FileStore has the name only
                return self.group.store.multi_get(keys)
        return [self.group.store.get(key) for key in keys]

    def _weigh(self, outcomes):
        failed = next((outcome for outcome in outcomes if outcome["failure"] is not None), None)
        other = next((outcome for outcome in outcomes if outcome["what"] != self.what), None)
        if failed:
            return self.decide(False, "%s failed: %s" % (_name(failed), failed["failure"]))
        if other:
            return self.decide(False, "%s called %s, where %s called %s"
                               % (_name(other), other["what"], _name(self.group.describe()), self.what))
        return self.decide(True)

    def _give_up(self):
        outcomes = {rank: self.group.peek(self.outcome_key(rank)) for rank in range(self.group.size)}
        missing = [rank for rank, value in outcomes.items() if value is None]
        hosts = {rank: json.loads(value)["host"] for rank, value in outcomes.items() if value is not None}
        if missing:
            message = "%s did not come within %g s; those that came are on %s" % (
                ", ".join(self._absent(rank) for rank in missing), self.timeout, ", ".join(sorted(set(hosts.values()))))
        else:
            message = "%s, which collects the outcomes, fell silent" % _name({"rank": 0, "host": hosts[0]})
        return self.decide(False, message, absent=bool(missing))

    def _absent(self, rank):
        value = self.group.peek("names/%d" % rank)
        return _name({"rank": rank, "host": json.loads(value)["host"] if value else None})


def together(group, what, act, undo, timeout):
    """Calls act() here, as every rank does. If a rank fails or does not come, those that succeeded call undo(), and all raise AmemError."""
    timeout = default_timeout() if timeout is None else timeout
    failure = done = None
    try:
        agreement = Agreement(group, what, timeout)
        try:
            act()
            done = True
            decision = agreement.vote()
        except _calls.AmemError as error:
            failure = error
            decision = agreement.vote(reason_of(error))
        except BaseException as error:  # an interrupt, or a wrong tag: the others need not wait for their deadline
            done = done or not isinstance(error, Exception)  # an interrupt may have come when this rank's part was done
            if agreement.interrupted(error):
                done = False  # all had decided already that it holds, so this rank leaves it so
            raise
    except (_calls.AmemError, TypeError, ValueError, KeyError, KeyboardInterrupt, SystemExit):
        if done:
            undo()
        raise
    except Exception as error:  # the store's own errors have no common class
        decision = {"ok": False, "message": "the store of the process group does not answer: %s" % error}
    if decision["ok"]:
        return
    text = "%s by %d ranks: %s" % (what, group.size, decision["message"])
    if done:
        try:
            undo()
            text += "; this rank had succeeded, and is as before"
        except _calls.AmemError as error:
            text += "; this rank had succeeded, and it could not be undone here: %s" % error
    else:
        text += "; nothing was changed on this rank"
    raise _calls.AmemError(failure.code if failure else REMOTE, text, failure.why if failure else None) from failure


def reason_of(error):
    """The text of an error for another rank: one line if it is AMem's, without what `amem-replay why` says here."""
    return str(error.args[0] if isinstance(error, _calls.AmemError) else error) or type(error).__name__


def what_undoes(operation, tags, by=_tags):
    """A function that undoes the pause or resume of these tags that begins now, and nothing that was so before. `by` is what pauses and
    resumes: a Want, or the module, whose calls are the plain ones."""
    states = {row["tag"]: row["state"] for row in _tags.memory()["tags"]}
    changed = [tag for tag in tags if (states.get(tag) == "paused") != (operation == "pause")]
    opposite = by.resume_in_time if operation == "pause" else by.pause
    return lambda: opposite(*changed) if changed else None


def cycle(operation, act, process_group, tags, timeout, by=_tags):
    """act(*tags), the pause or resume of these tags, on all hosts of a process group or on none: if one cannot resume, the others pause
    again, contents kept."""
    undo = what_undoes(operation, tags, by)
    together(group_of(process_group), "%s of %s" % (operation, ", ".join(tags)), lambda: act(*tags), undo, timeout)
