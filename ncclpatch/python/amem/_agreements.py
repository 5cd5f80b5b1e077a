"""Agreements between the ranks of a group through its store.

An agreement has a nonce, which is a part of its keys, so what dead processes left in a store that outlives them is never taken for an
outcome of this one. Rank 0 opens an agreement for each call, and the key "newest" names it. Each rank does its part, enters its outcome,
once, and believes the decision of no agreement that it has not entered. The decision is set once: rank 0 sets that all succeeded when it
has all outcomes; a rank that failed, or whose time is up, sets that all undo. Whoever comes late finds it.

What is the newest when a process joins may be of an earlier life of the group: the process enters it if it is undecided, because it may
also be this life's, and goes on to the next one, which rank 0 of this life opens.
"""

import contextlib
import json
import time

from . import _calls, _store

REMOTE = 6  # ncclRemoteError: another rank is the reason
LATE = "the other ranks had given up already when this one came"


class Agreements:
    """Those of a group about one subject, one after the other, as this process takes part in them. A subclass has their verdict."""

    subject, UNSEEN = "", object()
    SUPERSEDED = {"ok": False, "message": "a rank was started anew", "superseded": True}

    def __init__(self, group):
        self.group, self.opened = group, 0
        self.newest, self.found = None, self.UNSEEN  # the one that was opened last; what was the newest when this process came
        self.entered = self.over = None  # the one that this call has entered; the last that is over as far as this rank is concerned
        self.repeats = None  # the one that this call has failed, and fails again in the next
        self.past = []       # those that it has left keys of
        group.store.within(0)
        with contextlib.suppress(Exception):  # the first call says what is wrong
            self._look()

    def verdict(self, entries, timeout):
        """What rank 0 decides with these {rank: entry}, which are all if there are as many, or any rank when the time is up; None: it
        does not decide then."""
        raise NotImplementedError

    def begin(self, what, timeout):
        """Before this rank's part. AmemError: the call is late for an agreement that the others have given up."""
        self.group.store.within(timeout)
        self.entered = self.repeats = None
        while True:
            newest = self._look()
            self._may_join(newest, what)
            if not self.leads or self._open(newest):
                return

    def _may_join(self, newest, what):
        """Raises AmemError if a call that begins now should not take part."""

    def enter(self, entry, timeout):
        """After this rank's part: enters a dict of this rank's own, and returns the decision of all, within `timeout` seconds from now;
        None if nobody decided by then and it is not for this rank to do so."""
        store, end = self.group.store, time.monotonic() + timeout
        store.within(timeout)
        entry = {**self.group.describe(), "token": self.group.token, **entry}
        while True:
            newest = self.newest if self.leads else self._look()
            decision = None
            if self._waits() and self.entered != newest:
                decision = self.decide(self.entered, **self.SUPERSEDED)  # what nobody leads any more
            elif not self._concerns(newest):
                store.are_there([self._key(newest, "next") if newest else self._key("newest")], _slice_until(end))
            elif self._waits() or self._enter(newest, entry):
                decision = self._await(newest, entry, end, timeout)
            elif newest != self.found:
                return self._taken(entry)
            if decision:
                self._end(self.entered, decision)
                if self.leads or not decision.get("superseded"):
                    return decision
            elif time.monotonic() >= end:
                return self._without_rank_0(timeout)

    def _without_rank_0(self, timeout):
        """The decision of a rank that has waited in vain for an agreement of this life."""

    def refuse(self, message, absent=False):
        """Has this rank's agreement fail for all: the one that is under way, or else the next. Returns whether all had succeeded already."""
        decision = {"ok": False, "message": message, "absent": absent}
        held = self.decision(self.entered) if self.entered and not self._waits() else None
        if held and not held.get("superseded"):
            return held["ok"]
        while True:
            newest = self.newest if self.leads else self._look()
            if not self._concerns(newest):
                if self._open(newest, decision):
                    return False
                continue
            holds, entered = self._fail(newest, decision), newest == self.entered
            self._end(newest, holds)
            if self.leads or not holds.get("superseded"):
                return holds["ok"] and entered

    @property
    def leads(self):
        return self.group.rank == 0

    def _waits(self):
        """Whether this rank has entered an agreement and does not know the decision."""
        return self.entered is not None and self.entered != self.over

    def _key(self, *names):
        return "/".join([self.subject, *map(str, names)])

    def _look(self):
        store, key = self.group.store, self._key("newest")
        self.newest = store.text(key) if self.newest else store.peek(key)
        if self.found is self.UNSEEN:
            self.found = self.newest
        return self.newest

    def _concerns(self, nonce):
        """Whether this rank should take part in an agreement."""
        if nonce == self.found != self.entered and nonce != self.over and self.decision(nonce):
            self.over = nonce  # of an earlier life, or over when this rank came
        return nonce is not None and nonce != self.over

    def _open(self, newest, decision=None):
        """Puts a new agreement in the place of the newest, decided already if a decision is given. False: another rank was faster."""
        self.opened += 1
        nonce = "%s.%d" % (self.group.token, self.opened)
        if decision:
            self.decide(nonce, **decision)
        if self.group.store.set_once(self._key("newest"), nonce, newest or "") != nonce:
            return False
        if newest:
            self.group.store.set(self._key(newest, "next"), nonce)
        self.newest = nonce
        if decision:
            self._end(nonce, decision)
        return True

    def _enter(self, nonce, entry):
        text = json.dumps(entry)
        if self.group.store.set_once(self._key(nonce, "entry", self.group.rank), text) == text:
            self.entered = nonce
            return True
        # If it was another process, which this one replaces, whoever waits there goes on to the next.
        self.decide(nonce, **(self.SUPERSEDED if nonce == self.found else self._taken(entry)))
        self.over = nonce
        return False

    @staticmethod
    def _taken(entry):
        return {"ok": False, "message": "%s took part twice: as two processes, or after a call that had lost the store" % name(entry)}

    def _await(self, nonce, entry, end, timeout):
        """The decision, unless it takes longer than a slice of time."""
        store, complete = self.group.store, False
        if entry.get("failure") is not None:
            return self._fail(nonce, {"ok": False, "message": failed(entry)})
        if self.leads:
            complete = store.are_there([self._key(nonce, "entry", rank) for rank in range(self.group.size)], _slice_until(end) / 4)
            decision = self.decision(nonce)
        else:
            there = store.are_there([self._key(nonce, "decision")], _slice_until(end))
            decision = json.loads(store.text(self._key(nonce, "decision"))) if there else None
        if decision is None and (complete or time.monotonic() >= end):
            verdict = self.verdict(self.entries(nonce, complete), timeout)
            decision = verdict and (self.decide(nonce, **verdict) if verdict["ok"] else self._fail(nonce, verdict))
        return decision

    def _fail(self, nonce, decision):
        """Decides that an agreement fails, unless it is decided. Returns what holds."""
        if self.repeats:
            decision = {**decision, "repeats": self.repeats}
        holds = self.decide(nonce, **decision)
        if nonce != self.found or self.leads or holds != decision:
            return holds
        # If that one is of an earlier life, rank 0 does not know it, and must find that this rank has come and gone: in the next one.
        self.over = self.repeats = nonce
        return holds if self._open(nonce, {**decision, "repeats": nonce}) else self.SUPERSEDED

    def entries(self, nonce, complete):
        """{rank: its entry} of the ranks that have entered."""
        store, keys = self.group.store, [self._key(nonce, "entry", rank) for rank in range(self.group.size)]
        values = store.texts(keys) if complete else [store.peek(key) for key in keys]
        return {rank: json.loads(value) for rank, value in enumerate(values) if value is not None}

    def decision(self, nonce):
        """The decision of an agreement, or None."""
        value = self.group.store.peek(self._key(nonce, "decision"))
        return value and json.loads(value)

    def decide(self, nonce, **decision):
        """Sets the decision, unless there is one; returns the one that holds."""
        return json.loads(self.group.store.set_once(self._key(nonce, "decision"), json.dumps(decision)))

    def _end(self, nonce, decision):
        """Nobody reads what is older than an agreement that all have entered."""
        self.over = nonce
        if decision.get("complete"):
            for old in self.past:
                own = ["decision", "next", "result"] if old.startswith(self.group.token) else []
                self.group.store.forget([self._key(old, "entry", self.group.rank), *(self._key(old, key) for key in own)])
            self.past = []
        self.past.append(nonce)


class Cycles(Agreements):
    """Agreements that all ranks paused or resumed, or none. An entry has "what", and "failure": None or a text."""

    subject = "cycle"

    def __init__(self, group):
        self.was_late = self.introduced = False
        super().__init__(group)

    def _may_join(self, newest, what):
        if not self.introduced:  # so that the others can name this rank if it does not enter
            self.group.store.set(self._key("rank", self.group.rank), json.dumps({"host": self.group.host, "found": self.found}))
            self.introduced = True
        decision = self.decision(newest) if newest and newest not in (self.over, self.found) else None
        late = decision is not None and not decision["ok"] and not decision.get("superseded")
        if late:
            late, self.over = "repeats" not in decision or decision["repeats"] != self.over, newest
        # Once: who comes a moment after the others have given up waiting for it meets them when it calls again. Where they gave up
        # because a rank failed, they will call again as this one does.
        before, self.was_late = self.was_late, late and decision.get("absent", False)
        if late and not (before and self.was_late):
            raise _calls.AmemError(REMOTE, "%s: %s (%s); nothing was done here, and it can be called again on all ranks"
                                   % (what, LATE, decision["message"]))
        self.was_late = False

    def verdict(self, entries, timeout):
        missing = [rank for rank in range(self.group.size) if rank not in entries]
        if missing:
            hosts = sorted({entry["host"] for entry in entries.values()})
            return {"ok": False, "absent": True, "message": "%s did not come within %g s; those that came are on %s" % (
                ", ".join(map(self._absent, missing)), timeout, ", ".join(hosts))}
        wrong = next(filter(None, (self._wrong(entry, entries[0]) for entry in entries.values())), None)
        if wrong or not self.leads:
            return {"ok": False, "absent": False, "message": wrong or "%s, which collects the outcomes, fell silent" % name(entries[0])}
        return {"ok": True, "complete": True}

    def _wrong(self, entry, first):
        if entry["failure"] is not None:
            return failed(entry)
        if entry["what"] != first["what"]:
            return "%s called %s, where %s called %s" % (name(entry), entry["what"], name(first), first["what"])
        return None

    def _without_rank_0(self, timeout):
        message = "%s did not come within %g s" % (self._absent(0), timeout)
        self.refuse(message, absent=True)
        return {"ok": False, "message": message, "absent": True}

    def _absent(self, rank):
        """The name of a rank that has not entered; with its host, if it said so in this life."""
        said = json.loads(self.group.store.peek(self._key("rank", rank)) or "{}")
        leader = (self.newest or "").partition(".")[0]
        of_this_life = said.get("found") == self.found or (said.get("found") or "").partition(".")[0] == leader
        return name({"rank": self.group.ranks[rank], "host": said.get("host") if of_this_life else None})


class Idleness(Cycles):
    """Agreements that the GPUs of all ranks are idle, before a pause that asks network cards to give up what they hold. The decision has
    "asked": whether no communicator of these ranks has a rank elsewhere, which nobody has asked and which may wait for one of them.

    communicators: a function; [hash, ranks] of each of this process that lives.
    """

    subject = "idle"

    def __init__(self, group, communicators):
        super().__init__(group)
        self.communicators, self.calls = communicators, 0

    def begin(self, what, timeout):
        self.calls += 1
        super().begin(what, timeout)

    def _may_join(self, newest, what):
        super()._may_join(newest, what)
        if newest and newest != self.over and (self.decision(newest) or {}).get("ok"):
            self.over = newest  # an earlier call of this rank's entered it, and lost the store: all were idle then, and not now

    def enter(self, entry, timeout):  # with the number of the call: an undecided one of such a call fails
        return super().enter({**entry, "call": self.calls, "communicators": self.communicators()}, timeout)

    def verdict(self, entries, timeout):
        decision = super().verdict(entries, timeout)
        if decision["ok"]:
            found = [tuple(one) for entry in entries.values() for one in entry["communicators"]]
            decision["asked"] = all(known and found.count((known, ranks)) == ranks for known, ranks in set(found))
        return decision

    def _absent(self, rank):
        return super()._absent(rank) + " (AMEM_NETWORK has to be renew on all ranks or on none)"


class Gatherings(Agreements):
    """Agreements who sends journals (_gather.py). An entry has "directory"; the decision has the ranks of the group that send, "senders",
    and those that did not come, "absent"."""

    subject = "gather"

    def _may_join(self, newest, what):
        if newest and newest != self.over and self.decision(newest):
            self.over = newest  # this rank was not there, and rank 0 has gone on

    def verdict(self, entries, timeout):
        if not self.leads:
            return None
        first = {}
        for rank, entry in sorted(entries.items()):
            first.setdefault((entry["host"], entry["directory"]), rank)
        absent = [rank for rank in range(self.group.size) if rank not in entries]
        return {"ok": True, "complete": not absent, "senders": sorted(first.values()), "absent": absent}


def _slice_until(end):
    return min(_store.SLICE_SECONDS, max(0, end - time.monotonic()))


def name(who):
    """Of an entry or StoreGroup.describe(), for messages."""
    return "rank %d%s" % (who["rank"], " on %s" % who["host"] if who.get("host") else "")


def failed(entry):
    """What others are told about a rank whose entry has a failure."""
    return "%s failed: %s" % (name(entry), entry["failure"])
