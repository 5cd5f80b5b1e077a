"""Metrics on the stand-in driver: what they say, that prometheus-client's parsers read them, and the ways by which they are given out."""
import importlib.util
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import python_test  # noqa: E402

HAVE_PROMETHEUS = importlib.util.find_spec("prometheus_client") is not None


def parsed(text, plain=False):
    """{(sample name, labels as text): value} of OpenMetrics text, or of the older Prometheus text, as prometheus-client's parser reads it."""
    if plain:
        from prometheus_client.parser import text_string_to_metric_families as parse
    else:
        from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
    samples = {}
    for family in parse(text):
        for sample in family.samples:
            assert {"rank", "host"} <= set(sample.labels) and "pid" not in sample.labels, sample
            key = sample.name, ",".join('%s="%s"' % pair for pair in sorted(sample.labels.items()))
            assert key not in samples, key
            samples[key] = sample.value
    return samples


SETUP = """
load_nccl()
import amem, os, sys, time, warnings, urllib.request, socket
sys.path.insert(0, %r)
from metrics_test import parsed
allocate()
def one(samples, name, **labels):
    found = [value for (sample, text), value in samples.items() if sample == name and all('%%s="%%s"' %% pair in text for pair in labels.items())]
    assert len(found) == 1, (name, labels, found, sorted(samples))
    return found[0]
""" % os.path.dirname(os.path.abspath(__file__))


@unittest.skipUnless(HAVE_PROMETHEUS, "this Python has no prometheus-client")
class Metrics(python_test.Scripts):
    def test_bytes_pauses_and_phases(self):
        self.check(SETUP + """
amem.pause()
samples = parsed(amem.openmetrics())
assert one(samples, "amem_tag_bytes", tag="user") == 4 << 20
assert one(samples, "amem_tag_resident_bytes", tag="user") == 0
assert one(samples, "amem_paused", tag="user") == 1
assert one(samples, "amem_pauses_total") == 1 and one(samples, "amem_resumes_total") == 0
first = one(samples, "amem_phase_seconds_total", operation="pause", phase="save", kind="work")
assert not [labels for name, labels in samples if name == "amem_last_resume_seconds"], samples
amem.resume(); amem.pause()
samples = parsed(amem.openmetrics())
for row in amem.memory()["tags"]:
    for cycle in ("pause", "resume"):
        assert abs(one(samples, "amem_last_%s_seconds" % cycle, tag=row["tag"]) - row["last_%s_ms" % cycle] / 1e3) < 1e-6, (cycle, row)
assert one(samples, "amem_pauses_total") == 2 and one(samples, "amem_resumes_total") == 1
last = one(samples, "amem_last_phase_seconds", operation="pause", phase="save", kind="work")
total = one(samples, "amem_phase_seconds_total", operation="pause", phase="save", kind="work")
assert abs(total - first - last) < 1e-6, (first, last, total)
assert 'rank="3"' in amem.openmetrics()
""", RANK="3")

    def test_failures_by_phase(self):
        self.check(SETUP + """
amem.pause()
assert cuda.stand_in_cuda_fail_next(b"Create", ctypes.c_uint64(1), 2) == 0
try:
    amem.resume()
    raise SystemExit("no failure")
except amem.AmemError:
    pass
samples = parsed(amem.openmetrics())
failed = {text: value for (name, text), value in samples.items() if name == "amem_failures_total" and value}
assert len(failed) == 1 and list(failed.values()) == [1], failed
assert 'operation="resume"' in list(failed)[0] and 'phase="create own"' in list(failed)[0], failed
assert one(samples, "amem_resumes_total") == 0
amem.resume()
samples = parsed(amem.openmetrics())
assert one(samples, "amem_resumes_total") == 1
""")

    def test_series_are_there_from_the_start_at_zero(self):
        self.check(SETUP.replace("allocate()", "") + """
first = parsed(amem.openmetrics())
assert [name for name, _ in first if name == "amem_info"], first
assert one(first, "amem_pauses_total") == 0 and one(first, "amem_resumes_total") == 0
failures = {labels: value for (name, labels), value in first.items() if name == "amem_failures_total"}
assert len(failures) == 10 and not any(failures.values()), failures
allocate()
used = parsed(amem.openmetrics())
amem.pause(); amem.resume()
later = parsed(amem.openmetrics())
counters = lambda samples: {(name, labels) for name, labels in samples if name.endswith("_total")}
assert counters(later) == counters(first), counters(later) ^ counters(first)
gauges = lambda samples: {name for name, _ in samples if not name.endswith(("_total", "_info"))}
assert not gauges(first), gauges(first)
memory, times = {"amem_tag_bytes", "amem_class_bytes", "amem_paused"}, {"amem_last_pause_seconds", "amem_last_resume_seconds", "amem_last_phase_seconds"}
assert memory <= gauges(used) and not times & gauges(used) and times <= gauges(later), gauges(later)
""")

    def test_kept_bytes_by_reason(self):
        self.check(SETUP + """
samples = parsed(amem.openmetrics())
reasons = {text: value for (name, text), value in samples.items() if name.endswith("kept_bytes") and "reason=" in text}
assert any(value == 4 << 20 for value in reasons.values()), (reasons, amem.stats()["kept_bytes"])
""", AMEM_USER_MEMORY="keep")

    def test_what_network_cards_hold(self):
        self.check(SETUP + """
from amem import _calls, _metrics
card = {"card": "mlx5_0", "renewable_regions": 2, "renewable_bytes": 8192, "pinned_regions": 1, "pinned_bytes": 4096}
unknown = {**card, "card": None, "renewable_bytes": 0}
real = _calls.read_json
_calls.read_json = lambda what: {**real(what), **({"registered": {"cards": [card, unknown]}} if what == b"stats" else {})}
samples = parsed(amem.openmetrics())
assert one(samples, "amem_card_bytes", card="mlx5_0", kind="renewable") == 8192
assert one(samples, "amem_card_bytes", card="unknown", kind="pinned") == 4096
assert one(samples, "amem_card_regions", card="mlx5_0", kind="renewable") == 2
""")

    def test_over_http_of_this_host_alone(self):
        self.check(SETUP + """
for where in (0, ":0", "127.0.0.1:0", "localhost:0"):
    with amem.serve_metrics(where) as server:
        host, _, port = server.address.rpartition(":")
        assert host == ("localhost" if where == "localhost:0" else "127.0.0.1"), server.address
        url = "http://127.0.0.1:" + port
        answer = urllib.request.urlopen(urllib.request.Request(url + "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}))
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0"), answer.headers
        parsed(answer.read().decode())
        parsed(urllib.request.urlopen(url + "/").read().decode(), plain=True)
        try:
            urllib.request.urlopen(url + "/other")
            raise SystemExit("no 404")
        except urllib.error.HTTPError as error:
            assert error.code == 404
        try:
            urllib.request.urlopen("http://127.0.0.2:" + port, timeout=5)
            raise SystemExit("other addresses answer")
        except urllib.error.URLError:
            pass
    try:
        urllib.request.urlopen(url + "/metrics")
        raise SystemExit("it goes on after close")
    except urllib.error.URLError:
        pass
with amem.serve_metrics("0.0.0.0:0") as server:
    parsed(urllib.request.urlopen("http://127.0.0.2:" + server.address.rpartition(":")[2]).read().decode(), plain=True)
""")

    def test_a_forked_child_has_no_port_and_its_close_returns(self):
        self.check(SETUP + """
import select
path = os.environ["AMEM_JOURNAL_DIR"] + "/metrics.sock"
servers = [amem.serve_metrics(0), amem.serve_metrics("unix:" + path)]
port = int(servers[0].address.rpartition(":")[2])
ready, over = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    for server in servers: server.close()
    os.write(ready[1], b"!")
    os.read(over[0], 1)
    os._exit(0)
assert select.select([ready[0]], [], [], 20)[0], "close() of the child hangs"
assert os.path.exists(path), "the child has removed the parent's socket"
parsed(urllib.request.urlopen("http://" + servers[0].address).read().decode(), plain=True)
for server in servers: server.close()
with amem.serve_metrics(port) as again:  # while the child lives
    parsed(urllib.request.urlopen("http://" + again.address).read().decode(), plain=True)
os.write(over[1], b"!")
assert os.waitpid(child, 0)[1] == 0
""")

    def test_a_library_that_cannot_answer_is_said_to_the_scraper(self):
        self.check(SETUP + """
def fails(): raise amem.AmemError(3, "the library is ill")
amem._metrics.metrics = fails
with amem.serve_metrics(0) as server:
    try:
        urllib.request.urlopen("http://" + server.address)
        raise SystemExit("no 500")
    except urllib.error.HTTPError as error:
        assert error.code == 500 and b"the library is ill" in error.read(), error
""")

    def test_another_form_of_address_is_refused_and_leaves_nothing_behind(self):
        self.check(SETUP + """
os.chdir(os.environ["AMEM_JOURNAL_DIR"])
before = os.listdir(".")
for where in ("9400", "foo", "", ":", ":x", ":70000", -1, 70000, True, None, 1.5, ("127.0.0.1", 0), "/x.sock", "unix:x.sock", "unix:", "file:x.prom", "http://h:1", "a b:1"):
    try:
        amem.serve_metrics(where)
        raise SystemExit("took %r" % (where,))
    except ValueError as error:
        assert ':9400' in str(error) and '"unix:/PATH"' in str(error) and repr(where) in str(error), error
assert os.listdir(".") == before
""")

    def test_without_prometheus_client_the_dict_is_there_and_text_says_what_to_install(self):
        self.check(SETUP + """
sys.modules["prometheus_client"] = None
assert amem.metrics()["amem"]["samples"]
for call in (amem.openmetrics, lambda: amem.serve_metrics(0), lambda: amem.write_metrics("/x"), lambda: amem.serve_metrics("file:/x.prom")):
    try:
        call()
        raise SystemExit("no error")
    except amem.AmemError as error:
        assert error.code == 5 and "pip install prometheus-client" in str(error), error
""")

    def test_over_a_unix_socket_that_a_killed_process_left(self):
        self.check(SETUP + """
path = os.environ["AMEM_JOURNAL_DIR"] + "/metrics.sock"
left = socket.socket(socket.AF_UNIX); left.bind(path); left.close()
with amem.serve_metrics("unix:" + path) as server:
    assert server.address == "unix:" + path
    client = socket.socket(socket.AF_UNIX); client.connect(path)
    client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
    text = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    parsed(text.partition("\\r\\n\\r\\n")[2], plain=True)
assert not os.path.exists(path)
open(path, "w").write("mine")
try:
    amem.serve_metrics("unix:" + path)
    raise SystemExit("it took a file for a socket")
except OSError:
    assert open(path).read() == "mine"
""")

    def test_a_file_is_replaced_whole_and_goes_with_the_process(self):
        self.check(SETUP + """
folder = os.environ["AMEM_JOURNAL_DIR"]
server = amem.serve_metrics("file:" + folder + "/amem-{rank}.prom", seconds=0.01)
path = folder + "/amem-2.prom"
end = time.monotonic() + 1
seen = set()
while time.monotonic() < end:
    if os.path.exists(path):
        parsed(open(path).read(), plain=True)
        seen.add(os.stat(path).st_mtime_ns)
assert len(seen) > 2, seen
assert [name for name in os.listdir(folder) if name.endswith(".prom")] == ["amem-2.prom"]
if os.fork() == 0:
    raise SystemExit(0)  # and its exit handlers run
os.wait()
assert os.path.exists(path)
server.close()
assert not os.path.exists(path) and not [name for name in os.listdir(folder) if name.startswith("amem-2.prom")]
""", RANK="2")


if __name__ == "__main__":
    unittest.main()
