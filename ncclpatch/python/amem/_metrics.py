"""What this process holds and what its pauses cost, as a dict and as OpenMetrics text, over HTTP, a Unix socket or a file.

Units are bytes and seconds. The names follow OpenMetrics: counters end in _total, and the text ends with "# EOF". Standard library only.
Nothing here is on unless serve_metrics() asks for it.
"""

import atexit
import contextlib
import http.server
import os
import socket
import socketserver
import stat
import tempfile
import threading
import warnings

from . import _calls

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
FILE_SECONDS = 15  # between two versions of a file

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
    "amem_pauses": ("counter", "", "Pauses of NCCL's memory that succeeded."),
    "amem_resumes": ("counter", "", "Resumes of NCCL's memory that succeeded."),
    "amem_failures": ("counter", "", "Pauses and resumes that failed, by the phase in which they did."),
    "amem_phase_seconds": ("counter", "seconds", "Time in each phase; `kind`: own work, or waiting for other ranks."),
    "amem_last_phase_seconds": ("gauge", "seconds", "The same of the last pause and the last resume."),
    "amem_last_pause_seconds": ("gauge", "seconds", "How long the last pause of a tag took."),
    "amem_last_resume_seconds": ("gauge", "seconds", "How long the last resume of a tag took."),
    "amem_dropped_events": ("counter", "", "Events that the journal does not have."),
}
CLASSES = {"own_device": "own_device_bytes", "imported": "imported_bytes", "host": "host_bytes", "asynchronous_pools": "pool_bytes",
           "legacy_kept": "legacy_kept_bytes", "slabs_free": "slab_free_bytes"}


class _Collected:
    def __init__(self, labels):
        self.labels, self.families = labels, {}

    def add(self, name, value, **labels):
        if value is not None:
            self.families.setdefault(name, []).append(({**self.labels, **labels}, value))


def _of_tags(out, memory):
    for row in memory["tags"]:
        tag = row["tag"]
        out.add("amem_paused", int(row["state"] in ("paused", "resuming")), tag=tag)
        out.add("amem_tag_bytes", row["bytes"], tag=tag)
        out.add("amem_tag_resident_bytes", row["resident_bytes"], tag=tag)
        for reason, count in row["kept"].items():
            out.add("amem_tag_kept_bytes", count, tag=tag, reason=reason)
        for name in ("pause", "resume"):
            last = row["last_%s_ms" % name]
            out.add("amem_last_%s_seconds" % name, None if last is None else last / 1e3, tag=tag)


def _of_holdings(out, stats):
    for name, key in CLASSES.items():
        out.add("amem_class_bytes", stats.get(key), **{"class": name})
    out.add("amem_class_bytes", stats.get("contents", {}).get("pinned_bytes"), **{"class": "pinned_host"})
    sums = {}
    for one in stats.get("communicators", ()):
        name = one.get("hash") or ("unknown" if one["communicator"] is None else str(one["communicator"]))
        sums[name] = sums.get(name, 0) + one["bytes"]
    for name, count in sums.items():
        out.add("amem_communicator_bytes", count, communicator=name)
    for reason, count in stats.get("kept_bytes", {}).items():
        out.add("amem_kept_bytes", count, reason=reason)


def _of_cycles(out, stats):
    for operation in ("pause", "resume"):
        totals = stats.get(operation + "s", {})
        out.add("amem_%ss" % operation, totals.get("done"))
        last = [("amem_last_phase_seconds", one["phase"], one) for one in stats.get(operation, {}).get("phases", ())]
        for family, phase, one in [("amem_phase_seconds", *pair) for pair in totals.get("phases", {}).items()] + last:
            labels = {"operation": operation, "phase": phase.partition(": ")[2] or phase}  # "all gone" of "pause: all gone"
            out.add("amem_failures", one.get("failures"), **labels)
            for kind in ("work", "wait"):
                out.add(family, one[kind + "_ms"] / 1e3, kind=kind, **labels)


def _rank(stats):
    rank = stats.get("rank", -1)
    return str(rank) if rank is not None and rank >= 0 else os.environ.get("RANK", "")


def metrics():
    """{family: {"type", "unit", "help", "samples": [{"labels", "value"}, ...]}} of this process, in bytes and seconds.

    Every sample has the labels rank ("" where it is not known), host and pid. Families without a sample are left out: before NCCL has
    used memory most are. Counters are this process's, from its start. AmemError where the library cannot answer.
    """
    stats = _calls.read_json("amem_stats_json")
    out = _Collected({"rank": _rank(stats), "host": socket.gethostname(), "pid": str(os.getpid())})
    nccl = next((one["version"] for one in stats.get("nccl_libraries", ()) if one["under_amem"]), "")
    out.add("amem", 1, version=_calls.lib.amem_version().decode(), nccl=nccl, layout=stats.get("layout", ""), driver=stats.get("driver", ""))
    _of_tags(out, _calls.read_json("amem_memory_json"))
    if stats.get("session"):
        _of_holdings(out, stats)
        _of_cycles(out, stats)
        out.add("amem_dropped_events", stats.get("dropped_events"))
    return {name: {"type": FAMILIES[name][0], "unit": FAMILIES[name][1], "help": FAMILIES[name][2],
                   "samples": [{"labels": labels, "value": value} for labels, value in out.families[name]]}
            for name in FAMILIES if name in out.families}


def _escaped(text):
    return str(text).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def openmetrics():
    """metrics() as OpenMetrics text, version 1.0.0."""
    lines = []
    for name, family in metrics().items():
        lines.append("# TYPE %s %s" % (name, family["type"]))
        if family["unit"]:
            lines.append("# UNIT %s %s" % (name, family["unit"]))
        lines.append("# HELP %s %s" % (name, _escaped(family["help"])))
        suffix = {"counter": "_total", "info": "_info"}.get(family["type"], "")
        for sample in family["samples"]:
            labels = ",".join('%s="%s"' % (key, _escaped(value)) for key, value in sample["labels"].items())
            lines.append("%s%s{%s} %s" % (name, suffix, labels, repr(sample["value"])))
    return "\n".join(lines + ["# EOF", ""])


class _Answer(http.server.BaseHTTPRequestHandler):
    timeout = 10

    def do_GET(self):  # noqa: N802  (http.server's name)
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            return self.send_error(404)
        try:
            body, code = openmetrics().encode(), 200
        except Exception as error:  # pylint: disable=broad-except  # the job goes on, and the scraper sees why
            body, code = ("# %s\n" % error).encode(), 500
        self.send_response(code)
        self.send_header("Content-Type", CONTENT_TYPE if code == 200 else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return self.wfile.write(body)

    def log_message(self, *_arguments):
        pass


class _Unix(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class MetricsServer(contextlib.AbstractContextManager):
    """What serve_metrics() started; close() ends it. `address`: (host, port), the path of a socket, or of a file."""

    def __init__(self, address, close):
        self.address, self._close = address, close

    def close(self):
        self._close()

    def __exit__(self, *_error):
        self.close()


def _serve_http(server, address, path=None):
    threading.Thread(target=server.serve_forever, name="amem-metrics", daemon=True).start()

    def close():
        server.shutdown()
        server.server_close()
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return MetricsServer(address, close)


def write_metrics(path):
    """openmetrics() into a file, which is replaced at once: whoever reads it sees an old or a new version, never half of one."""
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".amem-metrics-")  # no name that a collector of *.prom reads
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(openmetrics())
        os.chmod(temporary, 0o644)  # the collector is another user's
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write_for_ever(path, seconds):
    ended, owner = threading.Event(), os.getpid()

    def work():
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

    thread = threading.Thread(target=work, name="amem-metrics", daemon=True)
    thread.start()

    def close():
        if os.getpid() != owner:
            return  # a child that was forked
        ended.set()
        thread.join(timeout=5)
        with contextlib.suppress(OSError):
            os.unlink(path)  # figures of a process that has ended are nobody's
    atexit.register(close)
    return MetricsServer(path, close)


def serve_metrics(where, seconds=FILE_SECONDS):
    """Gives out the metrics of this process, until close() of what it returns, or the end of the process.

    where:  a port as a number, on all addresses of this host (0: any free one); (host, port); the path of a Unix socket, which is made;
            or "file:PATH", written now and every `seconds`, for node_exporter's textfile collector (name it *.prom). "{rank}" and "{pid}"
            in a path stand for this process's.
    HTTP answers GET /metrics. Reading takes no lock that a pause holds for long, and never fails the job.
    OSError where the port or the path cannot be had.
    """
    if isinstance(where, str):
        where = where.replace("{rank}", os.environ.get("RANK", "0")).replace("{pid}", str(os.getpid()))
        if where.startswith("file:"):
            return _write_for_ever(where[len("file:"):], seconds)
        with contextlib.suppress(FileNotFoundError):
            if not _answers(where):
                os.unlink(where)  # of a process that was killed
        return _serve_http(_Unix(where, _Answer), where, where)
    host, port = where if isinstance(where, tuple) else ("", where)
    server = http.server.ThreadingHTTPServer((host, port), _Answer)
    server.daemon_threads = True
    return _serve_http(server, server.server_address[:2])


def _answers(path):
    """Whether a process listens on the socket; true also of what is no socket, and so is nobody's to remove."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
    return True
