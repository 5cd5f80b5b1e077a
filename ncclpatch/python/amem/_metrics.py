"""What this process holds and what its pauses cost: as a dict, and as Prometheus and OpenMetrics text over HTTP, a Unix socket or a file.

Units are bytes and seconds. Text and HTTP are those of the package prometheus-client, which is imported where one of them is asked for.
Nothing here is on unless serve_metrics() asks for it.
"""

import atexit
import contextlib
import os
import re
import socket
import socketserver
import stat
import threading
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from . import _calls

FILE_SECONDS = 15  # between two versions of a file
LOCALHOST = "127.0.0.1"
FORMS = '9400 or ":9400" (this host only), "HOST:PORT", "unix:/PATH" or "file:/PATH"'

# name: (type, unit or "", help)
FAMILIES = {
    "amem": ("info", "", "Version of AMem and of NCCL, layout and driver."),
    "amem_paused": ("gauge", "", "1 while the memory of a tag is paused."),
    "amem_tag_bytes": ("gauge", "bytes", "Memory of a tag: `nccl`, `user` (ncclMemAlloc) and the pools."),
    "amem_tag_resident_bytes": ("gauge", "bytes", "What of it is on the GPU now."),
    "amem_tag_kept_bytes": ("gauge", "bytes", "What a pause of the tag leaves on the GPU, by reason."),
    "amem_communicator_bytes": ("gauge", "bytes", "NCCL's memory by communicator; `unknown` is what cannot be attributed."),
    "amem_class_bytes": ("gauge", "bytes", "Memory by class."),
    "amem_kept_bytes": ("gauge", "bytes", "What a pause of NCCL's memory leaves on the GPU, by reason."),
    "amem_card_bytes": ("gauge", "bytes", "What a network card or plugin holds of NCCL's memory; `kind`: a pause gives it up (renewable), or not (pinned)."),
    "amem_card_regions": ("gauge", "", "In how many registrations."),
    "amem_pauses": ("counter", "", "Pauses of NCCL's memory that succeeded."),
    "amem_resumes": ("counter", "", "Resumes of NCCL's memory that succeeded."),
    "amem_failures": ("counter", "", "Pauses and resumes that failed, by the phase in which they did."),
    "amem_phase_seconds": ("counter", "seconds", "Time in each phase; `kind`: own work, or waiting for other ranks."),
    "amem_last_phase_seconds": ("gauge", "seconds", "The same of the last pause and the last resume."),
    "amem_last_pause_seconds": ("gauge", "seconds", "How long the last pause of a tag took."),
    "amem_last_resume_seconds": ("gauge", "seconds", "How long the last resume of a tag took."),
    "amem_last_pause_bytes": ("gauge", "bytes", "Contents in the last pause of a tag: changed and thus copied, unchanged, zero."),
    "amem_dropped_events": ("counter", "", "Events that the journal does not have."),
}
CLASSES = {"own_device": "own_device_bytes", "imported": "imported_bytes", "host": "host_bytes", "asynchronous_pools": "pool_bytes",
           "legacy_kept": "legacy_kept_bytes", "slabs_free": "slab_free_bytes"}


def _of_tags(add: Callable[..., None], memory: Dict[str, Any]) -> None:
    for row in memory["tags"]:
        tag = row["tag"]
        add("amem_paused", int(row["state"] in ("paused", "resuming")), tag=tag)
        add("amem_tag_bytes", row["bytes"], tag=tag)
        add("amem_tag_resident_bytes", row["resident_bytes"], tag=tag)
        for reason, count in row["kept"].items():
            add("amem_tag_kept_bytes", count, tag=tag, reason=reason)
        for contents, key in (("changed", "saved_bytes"), ("unchanged", "unchanged_bytes"), ("zero", "zero_bytes")):
            add("amem_last_pause_bytes", row[key], tag=tag, contents=contents)
        for name in ("pause", "resume"):
            last = row["last_%s_ms" % name]
            add("amem_last_%s_seconds" % name, None if last is None else last / 1e3, tag=tag)


def _of_holdings(add: Callable[..., None], stats: Dict[str, Any]) -> None:
    for name, key in CLASSES.items():
        add("amem_class_bytes", stats.get(key), **{"class": name})
    add("amem_class_bytes", stats.get("contents", {}).get("pinned_bytes"), **{"class": "pinned_host"})
    sums: Dict[str, int] = {}
    for one in stats.get("communicators", ()):
        name = one.get("hash") or ("unknown" if one["communicator"] is None else str(one["communicator"]))
        sums[name] = sums.get(name, 0) + one["bytes"]
    for name, count in sums.items():
        add("amem_communicator_bytes", count, communicator=name)
    for reason, count in stats.get("kept_bytes", {}).items():
        add("amem_kept_bytes", count, reason=reason)
    for card in stats.get("registered", {}).get("cards", ()):
        for kind in ("renewable", "pinned"):
            add("amem_card_bytes", card[kind + "_bytes"], card=card["card"] or "unknown", kind=kind)
            add("amem_card_regions", card[kind + "_regions"], card=card["card"] or "unknown", kind=kind)


def _of_cycles(add: Callable[..., None], stats: Dict[str, Any]) -> None:
    for operation in ("pause", "resume"):
        totals = stats.get(operation + "s", {})
        add("amem_%ss" % operation, totals.get("done"))
        last = [("amem_last_phase_seconds", one["phase"], one) for one in stats.get(operation, {}).get("phases", ())]
        for family, phase, one in [("amem_phase_seconds", *pair) for pair in totals.get("phases", {}).items()] + last:
            labels = {"operation": operation, "phase": phase.partition(": ")[2] or phase}  # "all gone" of "pause: all gone"
            add("amem_failures", one.get("failures"), **labels)
            for kind in ("work", "wait"):
                add(family, one[kind + "_ms"] / 1e3, kind=kind, **labels)


def _rank(stats: Dict[str, Any]) -> str:
    rank = stats.get("rank", -1)
    return str(rank) if rank is not None and rank >= 0 else os.environ.get("RANK", "")


def metrics() -> Dict[str, Dict[str, Any]]:
    """{family: {"type", "unit", "help", "samples": [{"labels", "value"}, ...]}} of this process, in bytes and seconds.

    Every sample has the labels rank ("" where it is not known) and host. Counters are this process's, from its start, and are there
    from then on, at 0; families of what is not known yet are left out. AmemError where the library cannot answer.
    """
    stats = _calls.read_json(b"stats")
    samples: Dict[str, List[Dict[str, Any]]] = {}
    everywhere = {"rank": _rank(stats), "host": socket.gethostname()}

    def add(name: str, value: Optional[float], **labels: str) -> None:
        if value is not None:
            samples.setdefault(name, []).append({"labels": {**everywhere, **labels}, "value": value})

    nccl = next((one["version"] for one in stats.get("nccl_libraries", ()) if one["under_amem"]), "")
    add("amem", 1, version=_calls.library_version(), nccl=nccl, layout=stats.get("layout", ""), driver=stats.get("driver", ""))
    _of_tags(add, _calls.read_json(b"memory"))
    _of_cycles(add, stats)
    add("amem_dropped_events", stats.get("dropped_events", 0))
    if stats.get("session"):
        _of_holdings(add, stats)
    return {name: {"type": kind, "unit": unit, "help": text, "samples": samples[name]}
            for name, (kind, unit, text) in FAMILIES.items() if name in samples}


def _prometheus() -> Any:
    try:
        import prometheus_client.openmetrics.exposition
    except ImportError:
        raise _calls.AmemError(5, "metrics as text need the package prometheus-client: pip install prometheus-client; "
                                  "amem.metrics() does without") from None
    return prometheus_client


class _Collector:
    """What prometheus-client calls a registry: it collects metrics() anew each time."""

    def collect(self) -> Iterator[Any]:
        kind = _prometheus().metrics_core.Metric
        for name, family in metrics().items():
            one = kind(name, family["help"], family["type"], family["unit"])
            for sample in family["samples"]:
                one.add_sample(name + {"counter": "_total", "info": "_info"}.get(family["type"], ""), sample["labels"], sample["value"])
            yield one


def openmetrics() -> str:
    """metrics() as OpenMetrics text, version 1.0.0. It needs the package prometheus-client, as serve_metrics and write_metrics do."""
    text: str = _prometheus().openmetrics.exposition.generate_latest(_Collector()).decode()
    return text


def write_metrics(path: str) -> None:
    """metrics() as Prometheus text into a file, which is replaced at once: whoever reads it sees an old or a new version, never half of one."""
    _prometheus().write_to_textfile(path, _Collector())


class MetricsServer(contextlib.AbstractContextManager["MetricsServer"]):
    """What serve_metrics() started; close() ends it. `address` is as serve_metrics takes it, with the port or the path that was given.

    It belongs to the process that started it: a forked child has neither the port nor anything to close.
    """

    def __init__(self, address: str, close: Callable[[], None]) -> None:
        self.address, self._close, self._owner = address, close, os.getpid()

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._close()

    def __exit__(self, *_error: object) -> None:
        self.close()


def _handler() -> Any:
    class Answer(_prometheus().MetricsHandler):  # type: ignore[misc]
        timeout = 10

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/metrics", "/"):
                self.send_error(404)
                return
            try:
                super().do_GET()
            except _calls.AmemError as error:  # the job goes on, and the scraper sees why
                self.send_error(500, explain=str(error))

    return Answer.factory(_Collector())


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = daemon_threads = True

    def __init__(self, family: int, address: Any, handler: Any) -> None:
        self.address_family = family
        super().__init__(address, handler)
        _servers.add(self)


_servers: "weakref.WeakSet[_Server]" = weakref.WeakSet()


def _leave_ports_to_the_parent() -> None:
    """In a forked child, where no thread serves: the port would be taken for as long as the child lives."""
    for server in list(_servers):
        server.server_close()


os.register_at_fork(after_in_child=_leave_ports_to_the_parent)


def _serve(server: _Server, address: str, path: Optional[str] = None) -> MetricsServer:
    threading.Thread(target=server.serve_forever, name="amem-metrics", daemon=True).start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return MetricsServer(address, close)


def _write_for_ever(path: str, seconds: float) -> MetricsServer:
    ended = threading.Event()

    def work() -> None:
        said = False
        while True:
            try:
                write_metrics(path)
                said = False
            except Exception as error:  # pylint: disable=broad-except  # the job goes on
                if not said:
                    warnings.warn("AMem's metrics cannot be written to %s: %s" % (path, error), RuntimeWarning, stacklevel=1)
                said = True
            if ended.wait(seconds):
                return

    _prometheus()  # AmemError at once, and not in the thread
    thread = threading.Thread(target=work, name="amem-metrics", daemon=True)
    thread.start()

    def close() -> None:
        ended.set()
        thread.join(timeout=5)
        with contextlib.suppress(OSError):
            os.unlink(path)  # figures of a process that has ended are nobody's
    server = MetricsServer("file:" + path, close)
    atexit.register(server.close)
    return server


def parse_address(where: Union[int, str]) -> Tuple[str, str, int]:
    """("tcp", host, port), ("unix", path, 0) or ("file", path, 0). ValueError, with the forms that there are, for anything else."""
    text = ":%d" % where if isinstance(where, int) and not isinstance(where, bool) else where
    if isinstance(text, str):
        kind, _, path = text.partition(":")
        if kind in ("unix", "file") and path.startswith("/"):
            path = path.replace("{rank}", os.environ.get("RANK", "0")).replace("{pid}", str(os.getpid()))
            return kind, path, 0
        found = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([^\s:/]*)):(\d+)", text)
        if found and int(found.group(3)) < 65536:
            return "tcp", found.group(1) or found.group(2) or LOCALHOST, int(found.group(3))
    raise ValueError("amem.serve_metrics takes %s, not %r" % (FORMS, where))


def serve_metrics(where: Union[int, str], seconds: float = FILE_SECONDS) -> MetricsServer:
    """Gives out the metrics of this process, until close() of what it returns, or the end of the process.

    where:  9400 or ":9400"      HTTP on port 9400 for programs of this host (0: any free port)
            "0.0.0.0:9400"       HTTP on an address of this host, for whoever reaches it; there is no password
            "unix:/PATH"         HTTP on a Unix socket, which is made
            "file:/PATH"         a file, written now and every `seconds`, for node_exporter's textfile collector (name it *.prom)
            "{rank}" and "{pid}" in a path stand for this process's.
    HTTP answers GET /metrics. Reading takes no lock that a pause holds for long, and never fails the job.
    ValueError for another form; OSError where the port or the path cannot be had; AmemError without the package prometheus-client.
    """
    kind, place, port = parse_address(where)
    if kind == "file":
        return _write_for_ever(place, seconds)
    handler = _handler()
    if kind == "tcp":
        server = _Server(socket.AF_INET6 if ":" in place else socket.AF_INET, (place, port), handler)
        return _serve(server, "%s:%d" % ("[%s]" % place if ":" in place else place, server.server_address[1]))
    with contextlib.suppress(FileNotFoundError):
        if not _answers(place):
            os.unlink(place)  # of a process that was killed
    return _serve(_Server(socket.AF_UNIX, place, handler), "unix:" + place, place)


def _answers(path: str) -> bool:
    """Whether a process listens on the socket; true also of what is no socket, and so is nobody's to remove."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
    return True
