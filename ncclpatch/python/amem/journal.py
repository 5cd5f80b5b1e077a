"""Reads journals of AMem, of live and dead processes, on any machine: no GPU, no NCCL and no libamem_nccl.so are needed.

    import amem.journal

    job = amem.journal.open("/tmp/amem-1000/journal")     # directories, parents of directories, packs; default: this user's
    verdict = job.verdict()
    if not verdict.healthy:
        print(verdict.headline, verdict.remedy, sep="\\n")
    for session in job.sessions:
        print(session.rank, session.status, session.holdings["own_resident_bytes"])
        for event in session.events(kinds=["step-failed"]):
            print(event.seq, event.seconds, event["message"])

Everything is answered by `amem-replay --json`, which runs as a process of its own, so that a damaged journal cannot harm this
one. It is found through AMEM_REPLAY (its path), beside libamem_nccl.so, beside this package, or in PATH. What it prints is
described by the JSON schemas in share/amem/schemas (replay/tool/schemas in the source); objects here are those, as dicts, with
the keys that matter most as attributes.

Units: sizes are bytes, times nanoseconds (`time_ns` of the host's monotonic clock, `wall_ns` since 1970) unless a name ends in
`seconds`. Session ids are strings of 16 hex digits; addresses and handles are strings like "0x7f00".

Threads: objects may be used from any thread. Errors: JournalError; ReadWarning where only a part could be read.
"""

import json
import os
import subprocess
import tempfile
import warnings

from . import _library, _why

__all__ = ["Event", "Job", "JournalError", "ReadWarning", "Session", "Verdict", "open", "tool"]

_FINE, _USAGE, _CANNOT_READ, _VIOLATION = range(4)
_VERSION = 1  # of the schemas that this module understands


class JournalError(RuntimeError):
    """Nothing could be read, or the question was wrong. `code` is amem-replay's exit code (1: wrong usage, 2: unreadable; None:
    it could not be run), `errors` its messages."""

    def __init__(self, text, code=None, errors=()):
        super().__init__(text)
        self.code = code
        self.errors = list(errors)


class ReadWarning(UserWarning):
    """A part of the journals could not be read; the answer is made from the rest."""


def tool():
    """The path of amem-replay. JournalError: there is none."""
    found = _why.find(_library.find())
    if found:
        return found
    raise JournalError(_why.not_found())


def open(*places):  # pylint: disable=redefined-builtin
    """A Job with the sessions of all `places`: directories of sessions, directories that hold several, parents of those, packs.
    Without any: AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal. Nothing is copied, and journals of live processes are read anew
    at each question. JournalError: no session could be read there."""
    job = Job([os.fspath(place) for place in places])
    if not job.sessions:
        raise JournalError("no session could be read", _CANNOT_READ)
    return job


class _Record(dict):
    """A JSON object; a key that is no method's name is an attribute, too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError("no %s in this %s; there are %s" % (name, type(self).__name__, ", ".join(self))) from None


class Event(_Record):
    """What happened: `seq`, `time_ns`, `thread`, `kind` ("step-failed"), `wall_ns`, `journal` (the session that wrote it), and the fields of its kind."""

    @property
    def seconds(self):
        """Wall-clock time in seconds since 1970."""
        return self["wall_ns"] / 1e9


class Verdict(_Record):
    """What went wrong with the last pause or resume: `healthy` (None where a part could not be read), `kind` ("out-of-memory"),
    `rank` (or None), `headline`, `summary`, `remedy` and `evidence`, as `amem-replay why` has them. str() is headline, summary and
    remedy."""

    def __str__(self):
        return "\n\n".join(text for text in (self["headline"] + ".", self["summary"], self.get("remedy")) if text)


class Session(_Record):
    """One process under AMem: `session` (its id), `status` ("live", "closed", "crashed"), `opened` (who wrote it), `lifecycle`,
    `holdings` (bytes), `events_by_kind`, `directory`. As of the moment when its Job was opened."""

    def __init__(self, record, job):
        super().__init__(record)
        self._job = job

    @property
    def rank(self):
        """The rank that the launcher gave, or None."""
        rank = self["opened"]["rank"]
        return rank if rank >= 0 else None

    @property
    def host(self):
        return self["opened"]["host"]

    @property
    def pid(self):
        return self["opened"]["pid"]

    def events(self, **filters):
        """An iterator over its events, oldest first; the filters are those of Job.events."""
        return _log(_log_options(filters), self._places(), self["session"])

    def state(self, at=None):
        """What AMem knew after the event with that sequence number, by default the last one, as a dict."""
        options = ["--rank", self["session"]] + (["--at=#%d" % at] if at is not None else [])
        return _ask("state", options, self._places())

    def _places(self):
        """Where it lies; of a pack, which was unpacked for a moment, the places of the job."""
        return [self["directory"]] if os.path.isdir(self["directory"]) else self._job._places


class Job:
    """The sessions of some places. `sessions` is a list of Session, by rank."""

    def __init__(self, places):
        self._places = places
        sessions = _ask("ls", [], places)
        self.sessions = sorted((Session(s, self) for s in sessions), key=lambda s: (s.rank is None, s.rank or 0, s["session"]))

    def session(self, rank):
        """The session of that rank; the one that was opened last where several have it. JournalError: there is none."""
        found = [s for s in self.sessions if s.rank == rank]
        if not found:
            raise JournalError("there is no session of rank %s; there are %s" % (rank, [s.rank for s in self.sessions]))
        return max(found, key=lambda s: s["opened"]["realtime_ns"])

    def events(self, **filters):
        """An iterator over the events of all sessions in one order of time. Filters, as of `amem log`:
        kinds (list of str), ranks (list of int), grep (regular expression), allocation, first and last_seq (sequence numbers),
        since and until (seconds since the first opening, or "10 min ago", or "2026-11-21 20:20:58" in local time), last (only so many)."""
        return _log(["--merge"] + _log_options(filters), self._places, None)

    def verdict(self, all_sessions=False):
        """What went wrong with the latest job among the sessions; with `all_sessions` with all of them as one job."""
        return Verdict(_ask("why", ["--all"] if all_sessions else [], self._places))

    def verify(self):
        """Whether the journals are possible and agree with each other: a dict with "ok", "violations" and "notes"."""
        return _ask("verify", [], self._places)

    def references(self):
        """Who references whose memory: a dict with "sessions" and "references"."""
        return _ask("top", ["--by", "peer"], self._places)

    def top(self, by="site"):
        """What holds the most memory, by "site", "communicator", "tag", "peer", "card", "size" or "age": a list of dicts."""
        answer = _ask("top", ["--by", by], self._places)
        return answer["peers"] if by == "peer" else answer


_OPTIONS = {"kinds": "--kind=%s", "ranks": "--rank=%s", "grep": "--grep=%s", "allocation": "--allocation=%s", "first": "--from=#%s",
            "last_seq": "--to=#%s", "since": "--from=%s", "until": "--to=%s", "last": "--last=%s"}


def _log_options(filters):
    if unknown := sorted(filters.keys() - _OPTIONS):
        raise TypeError("there is no filter %s" % ", ".join(unknown))
    lists = {name: (value or ()) if name in ("kinds", "ranks") else [value] for name, value in filters.items()}
    return [_OPTIONS[name] % value for name, values in lists.items() for value in values if value is not None]


def _run(command, errors=subprocess.PIPE):
    try:
        return _why.start(command, errors)
    except OSError as error:
        raise JournalError("cannot run %s: %s; set AMEM_REPLAY to the path of amem-replay" % (command[0], error)) from error


def _ended(command, code, fine, err, level):
    """JournalError, unless the code is one of these; complaints about a part are warnings of the caller `level` above."""
    messages = [line.removeprefix("amem-replay: ") for line in err.decode(errors="replace").splitlines()]
    if code not in fine:
        raise JournalError("; ".join(messages) or "amem-replay %s ended with %d" % (command, code), code, messages)
    for message in messages:
        warnings.warn(message, ReadWarning, stacklevel=level)


def _check(record):
    if record.get("version", _VERSION) > _VERSION:
        raise JournalError("%s prints version %d of %s, and this module knows %d: use the two of one release"
                           % (tool(), record["version"], record.get("schema"), _VERSION))
    return record


def _ask(command, options, places):
    """The JSON that a command prints."""
    process = _run([tool(), command, "--json", *options, "--", *places])
    out, err = process.communicate()
    try:
        answer = json.loads(out)
    except ValueError:
        answer = None
    failed = answer is None or isinstance(answer, dict) and answer.get("schema") == "amem-replay/error"
    _ended(command, process.returncode, () if failed else (_FINE, _CANNOT_READ, _VIOLATION), err, 4)
    for record in answer if isinstance(answer, list) else [answer]:
        _check(record)
    return answer


def _log(options, places, session):
    """The events that `amem-replay log` prints, as it prints them; of one session, or of all."""
    command = [tool(), "log", "--json", "--wall", *options, "--", *places]
    with tempfile.TemporaryFile() as errors:
        process, cut = _run(command, errors), False
        try:
            for line in process.stdout:
                cut = not line.endswith(b"\n")
                if cut:  # the tool ended within its last line; how it ended says why
                    break
                record = json.loads(line) if line.startswith(b'{"schema":"amem-replay/event"') else None
                if record is not None and session in (None, record["journal"]):
                    yield Event(_check(record))
        except GeneratorExit:
            process.kill()
            raise
        finally:
            process.stdout.close()
            code = process.wait()
        errors.seek(0)
        _ended("log", code, (_FINE, _CANNOT_READ), errors.read(), 3)
    if cut and code == _FINE:
        raise JournalError("amem-replay log ended within a line", code)
