"""Brings the journals of all ranks to one place, through the store by which the hosts agree: for `amem why` about a job of many hosts.

One rank of each host packs what is in its journal directory (amem-replay pack), and rank 0 asks one after the other for its pack, which
comes in chunks. At most WINDOW chunks of one pack are in the store at any time. Standard library only.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
import time
from typing import Any, Dict, Optional

from . import _agreements, _calls, _hosts, _library, _private, _why

CHUNK_BYTES = 1 << 20
WINDOW = 4
PACK_SECONDS = 120


def journal_directory():
    return os.environ.get("AMEM_JOURNAL_DIR") or "/tmp/amem-%d/journal" % os.getuid()


def pack(directory, path):
    """Packs the sessions under `directory` into the file `path`, which appears when it is complete. Returns None, or why not."""
    replay, part = _why.find(_library.find()), path + ".part"
    if not replay:
        return _why.not_found()
    try:
        done = subprocess.run([replay, "pack", directory, "--force", "-o", part], env=_why.environment(), stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=PACK_SECONDS, check=False)
        # Exit code 2: something could not be read; what could be is in the pack.
        if done.returncode and not (done.returncode == 2 and os.path.exists(part) and os.path.getsize(part)):
            said = done.stderr.decode(errors="replace").strip().splitlines()
            return "amem-replay pack: %s" % (said[0] if said else "exit code %d" % done.returncode)
        os.replace(part, path)
    except subprocess.TimeoutExpired:
        return "amem-replay pack did not end in %d s" % PACK_SECONDS
    except OSError as error:
        return str(error)
    return None


class _Transfer:
    """Keys of one gathering, beside those of its agreement; after `deadline` this rank waits for no other."""

    def __init__(self, group, timeout):
        self.group, self.timeout, self.prefix = group, timeout, "%s/%s/" % (group.gatherings.subject, group.gatherings.entered)
        self.touch()

    def touch(self):
        self.deadline = time.monotonic() + self.timeout

    def set(self, name, value):
        self.group.store.within(self.timeout)
        self.group.store.set(self.prefix + name, value)

    def wait(self, name):
        """The value, as bytes; None if it does not come."""
        self.group.store.within(max(0, self.deadline - time.monotonic()))
        return self.group.store.value_by(self.prefix + name, self.deadline)

    def take(self, name):
        """As wait; nobody else gets it."""
        value = self.wait(name)
        self.group.store.forget([self.prefix + name])
        return value


def _checksum(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _send(transfer, rank, path):
    """Sends chunks of the file when rank 0 wants them."""
    with open(path, "rb") as file:
        for number, chunk in enumerate(iter(lambda: file.read(CHUNK_BYTES), b"")):
            if transfer.take("wanted/%d/%d" % (rank, number)) is None:
                raise OSError("rank 0 stopped taking the pack")
            transfer.set("chunk/%d/%d" % (rank, number), chunk)
            transfer.touch()


def _receive(transfer, rank, path):
    """Writes a rank's pack to the file `path`, which appears when it is complete. Returns None, or why not."""
    about = transfer.take("about/%d" % rank)
    if about is None:
        return "it said nothing for %g s" % transfer.timeout
    said = json.loads(about)
    if said["failure"]:
        return said["failure"]
    chunks, written = -(-said["bytes"] // CHUNK_BYTES), 0
    with _private.new_file(path + ".part") as file:
        for number in range(-WINDOW, chunks):
            if number + WINDOW < chunks:
                transfer.set("wanted/%d/%d" % (rank, number + WINDOW), "now")
            if number >= 0:
                transfer.touch()
                chunk = transfer.take("chunk/%d/%d" % (rank, number))
                if chunk is None:
                    return "it stopped after %d of %d bytes" % (written, said["bytes"])
                written += file.write(chunk)
    if (written, _checksum(path + ".part")) != (said["bytes"], said["sha256"]):
        return "what came is not what was sent (%d bytes)" % written
    os.replace(path + ".part", path)
    return None


def _collect(group, transfer, decision, path):
    """On rank 0: the packs of all hosts into the directory `path`."""
    _private.make_directories(path)
    here = group.gatherings.entries(group.gatherings.entered, False)
    missing = {"rank %d" % group.ranks[rank]: "it did not come within %g s" % transfer.timeout for rank in decision["absent"]}
    packs = []
    for rank in decision["senders"]:
        one = here[rank]
        host = "".join(c if c.isalnum() or c in "-_." else "_" for c in one["host"])
        target = os.path.join(path, "%s-%d.amem" % (host, one["rank"]))
        transfer.touch()
        failure = pack(one["directory"], target) if rank == 0 else _receive(transfer, rank, target)
        with contextlib.suppress(OSError):
            os.unlink(target + ".part")
        if failure:
            missing[_agreements.name(one)] = failure
        else:
            packs.append(target)
    return {"path": path, "packs": packs, "missing": missing}


def _contribute(group, transfer, senders):
    """On other ranks: packs and sends, if this rank does it for its host. Returns rank 0's result."""
    if group.rank in senders:
        with tempfile.TemporaryDirectory(prefix="amem-gather-") as folder:
            path = folder + "/pack"
            failure = pack(journal_directory(), path)
            about = {} if failure else {"bytes": os.path.getsize(path), "sha256": _checksum(path)}
            transfer.set("about/%d" % group.rank, json.dumps({"failure": failure, **about}))
            transfer.deadline += group.size * transfer.timeout  # others have their turn before
            if not failure:
                _send(transfer, group.rank, path)
    transfer.deadline = time.monotonic() + group.size * transfer.timeout
    result = transfer.wait("result")
    if result is None:
        raise OSError("rank 0 fell silent")
    return json.loads(result)


def gather(path: str, process_group: Any = True, timeout: Optional[float] = None) -> Dict[str, Any]:
    """The journals of all hosts as packs in the directory `path` of rank 0's host: `amem why PATH` explains the whole job.

    Every rank that lives calls it, paused or not; only the group's store is used. One rank of each host and journal directory sends its
    pack, with those of dead ranks in it. A host that cannot is named in the result, and the others go on.

    path:           a directory; it is made, for this user alone, as packs are. Packs that are there under the same names are replaced, each when the new one is complete.
    process_group:  as for amem.pause.
    timeout:        seconds that rank 0 waits for a rank, and for each chunk; default: nine eighths of AMEM_TIMEOUT_MS.
    Returns {"path", "packs": [files on rank 0's host], "missing": {rank and host: why}} on every rank.
    AmemError: rank 0 did not come, or cannot write `path` (code 2).
    """
    group = _hosts.group_of(process_group)
    timeout = _hosts.default_timeout() if timeout is None else timeout
    try:
        group.gatherings.begin("gather", timeout)
        # Rank 0 waits for every rank, and for it wait the others.
        decision = group.gatherings.enter({"directory": os.path.realpath(journal_directory())}, timeout if group.rank == 0 else 2 * timeout)
        if not decision or not decision["ok"]:
            raise OSError(decision["message"] if decision else "rank 0 did not come")
        transfer = _Transfer(group, timeout)
        if group.rank != 0:
            return _contribute(group, transfer, decision["senders"])
        try:
            result = _collect(group, transfer, decision, os.path.abspath(path))
        except OSError as error:
            transfer.set("result", json.dumps({"path": path, "packs": [], "missing": {_agreements.name(group.describe()): str(error)}}))
            raise
        transfer.set("result", json.dumps(result))
        return result
    except _calls.AmemError:
        raise
    except Exception as error:  # the store's errors have no common class
        raise _calls.AmemError(2, "gathering journals: %s" % error) from error
