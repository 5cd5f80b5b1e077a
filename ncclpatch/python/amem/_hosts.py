"""Many hosts: AMem agrees on a pause inside a host, and the ranks agree here, through the store of a process group, that all hosts did it.

Only the store is used, because the collectives of NCCL are refused while it is paused. Standard library only; PyTorch is asked for the
store of its groups.
"""

import contextlib
import functools
import logging
import os
import socket
import uuid
import weakref
from typing import Any, Optional, Sequence

from . import _calls, _library, _store, _tags
from ._agreements import REMOTE, Cycles, Gatherings, Idleness, failed, name

_log = logging.getLogger("amem")


class StoreGroup:
    """Ranks that agree through a store: PyTorch's TCPStore or FileStore, or an object with their set, get, wait and compare_set.

    store: shared by all ranks of the group, and used for one group at a time (see torch.distributed.PrefixStore). It is not owned. What
           an earlier life of the group left there does not matter, wherever it was killed.
    rank, size: of this process in the group, and how many take part.
    host:  a name for messages; default: this host's.
    ranks: of the job, for messages: those of the group's ranks in their order; default: the group's own.
    Calls on one group come from one thread at a time.
    """

    __module__ = "amem"

    def __init__(self, store: Any, rank: int, size: int, host: Optional[str] = None, ranks: Optional[Sequence[int]] = None) -> None:
        if not 0 <= rank < size:
            raise ValueError("rank %r of %r" % (rank, size))
        self.ranks = range(size) if ranks is None else tuple(ranks)
        if len(self.ranks) != size:
            raise ValueError("%d ranks of the job for a group of %d" % (len(self.ranks), size))
        self.store, self.rank, self.size = _store.Store(store), rank, size
        self.host = host or socket.gethostname()
        self.token = uuid.uuid4().hex[:12]  # of this process in this life of the group
        self.cycles, self.gatherings = Cycles(self), Gatherings(self)
        self.idleness = Idleness(self, living_communicators) if renews() else None

    def describe(self):
        return {"rank": self.ranks[self.rank], "host": self.host, "pid": os.getpid()}


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
        _groups[process_group] = StoreGroup(store, distributed.get_rank(process_group), distributed.get_world_size(process_group),
                                            ranks=distributed.get_process_group_ranks(process_group))
    return _groups[process_group]


def default_timeout():
    """Seconds. The library waits AMEM_TIMEOUT_MS for ranks of this host; an eighth more, and its reason reaches the other hosts."""
    text = os.environ.get("AMEM_TIMEOUT_MS", "")
    return (int(text) if text.isdigit() else 60000) / 1000 * 9 / 8


def renews():
    """Whether pauses ask network cards to give up what they hold, for which all hosts have to be idle. Alike on all ranks of a job."""
    return os.environ.get("AMEM_NETWORK") == "renew"


def asks_cards(operation, tags):
    return operation == "pause" and _tags.NCCL in tags


def reason_of(error):
    """The text of an error for another rank: one line if it is AMem's, without what `amem-replay why` says here."""
    return str(error.args[0] if isinstance(error, _calls.AmemError) else error) or type(error).__name__


LOST = "the store of the process group does not answer: %s"


def together(group, what, act, undo, timeout, agreements=None):
    """Calls act() here, as every rank does, and returns the decision. If a rank fails or does not come, those that succeeded call undo(),
    and all raise AmemError.

    timeout: seconds from the end of this rank's part until the decision; None: default_timeout().
    agreements: of the group; default: its cycles.
    """
    agreements = agreements or group.cycles
    timeout, failure, done = default_timeout() if timeout is None else timeout, None, False
    try:
        agreements.begin(what, timeout)
    except _calls.AmemError:
        raise
    except Exception as error:  # the store's errors have no common class
        raise _failed(group, what, LOST % error, None, None) from error
    except BaseException as error:
        _refuse(agreements, error)
        raise
    try:
        try:
            with _calls.explained_later():
                act()
            done = True
        except _calls.AmemError as error:
            failure = error
        try:
            decision = agreements.enter({"what": what, "failure": failure and reason_of(failure)}, timeout)
        except Exception as error:  # pylint: disable=broad-except  # the store's errors have no common class
            decision = {"ok": False, "message": LOST % error}
    except BaseException as error:  # an interrupt, or a wrong tag: the others need not wait for their deadline
        # An interrupt may have come when this rank's part was done. What all had agreed on by then stays.
        if not _refuse(agreements, error) and (done or not isinstance(error, Exception)):
            undo()
        raise
    if failure is None and decision["ok"]:
        return decision
    if decision["ok"]:
        decision["message"] = "%s, when the others had agreed that it succeeded" % failed({**group.describe(), "failure": reason_of(failure)})
    raise _failed(group, what, decision["message"], failure, undo if done else None) from failure


def _refuse(agreements, error):
    """Tells the others of an error that is not AMem's. Returns whether all had succeeded already."""
    with contextlib.suppress(Exception):
        return agreements.refuse(failed({**agreements.group.describe(), "failure": "%s: %s" % (type(error).__name__, error)}))
    return False


def _failed(group, what, message, failure, undo):
    """The error of a rank that has undone its part, if it was done."""
    text = "%s by %d ranks: %s" % (what, group.size, message)
    if undo:
        try:
            undo()
            text += "; this rank had succeeded, and is as before"
        except _calls.AmemError as error:
            text += "; this rank had succeeded, and it could not be undone here: %s" % error
    else:
        text += "; nothing was changed on this rank"
    if failure:
        _calls.explain(failure)
    return _calls.AmemError(failure.code if failure else REMOTE, text, failure.why if failure else None)


def has_nothing():
    """Why there is nothing of this process that a pause or resume of any tag could change, as on a rank without a GPU; None: there may
    be something, or it cannot be told, and then the call says what is wrong."""
    if os.environ.get("AMEM_ENABLE") == "0":
        return "AMem is switched off (AMEM_ENABLE=0)"
    if not _library.is_there(_calls.lib):
        return None if _library.nccl_is_loaded() else "AMem's library is not in this process, and neither is NCCL"
    try:
        said = _tags.memory()
        if said["tags"]:
            return None
        if _library.nccl_is_loaded() and not all(one["under_amem"] for one in _calls.read_json(b"stats")["nccl_libraries"]):
            return None
        return said["reason"]
    except _calls.AmemError:
        return None


def living_communicators():
    """[hash, ranks] of each communicator of this process that lives. The hash is the same in all its ranks; None: it is not known."""
    if has_nothing():
        return []
    return [[one["hash"], one["ranks"]] for one in _calls.read_json(b"stats").get("communicators", ())
            if one["communicator"] is not None and not one["ended"]]


def await_idle():
    """Waits until the GPUs that NCCL uses in this process are idle."""
    if not has_nothing():
        _tags.await_idle()


def part_of(operation, act, tags, by=_tags):
    """(act, undo): functions for this process's part of a pause or resume of these tags. What undoes it changes nothing that was so before.
    `by` has the pause and resume_in_time that undo it."""
    nothing = has_nothing()
    if nothing:
        _log.info("%s of %s: this process takes part without memory of its own: %s", operation, ", ".join(tags), nothing)
        return lambda: None, lambda: None
    try:
        states = {row["tag"]: row["state"] for row in _tags.memory()["tags"]}
    except _calls.AmemError:  # act() has the reason
        states = {}
    changed = [tag for tag in tags if (states.get(tag) == "paused") != (operation == "pause")]
    opposite = by.resume_in_time if operation == "pause" else by.pause
    return lambda: act(*tags), lambda: opposite(*changed) if changed else None


def are_idle(group, what, timeout):
    """With AMEM_NETWORK=renew waits until the GPUs of all ranks are idle, together; whether a pause may say so. Otherwise asks nobody."""
    return bool(group.idleness and together(group, what, await_idle, lambda: None, timeout, group.idleness).get("asked"))


def cycle(operation, act, process_group, tags, timeout, by=_tags):
    """act(*tags), the pause or resume of these tags, on all hosts of a process group or on none: if one cannot resume, the others pause
    again, contents kept. A rank that has no memory under AMem takes part in the agreement alone."""
    group, what = group_of(process_group), "%s of %s" % (operation, ", ".join(tags))
    if asks_cards(operation, tags) and are_idle(group, what, timeout):
        act = functools.partial(act, hosts_idle=True)
    together(group, what, *part_of(operation, act, tags, by), timeout)
