"""Metrics on the stand-in driver: what they say, that the text is OpenMetrics, and the three ways by which it is given out."""
import os
import re
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import python_test  # noqa: E402

SAMPLE = re.compile(r'^([a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (-?\d+(?:\.\d+)?(?:e-?\d+)?)$')
SUFFIX = {"counter": "_total", "gauge": "", "info": "_info"}


def check_openmetrics(text):
    """What the standard asks for of what we use. Returns {(sample name, labels): value}."""
    assert text.endswith("# EOF\n") and text.count("# EOF") == 1, text[-80:]
    samples, family, kind = {}, None, None
    families = set()
    for line in text.splitlines()[:-1]:
        if line.startswith("# TYPE "):
            family, kind = line[len("# TYPE "):].split(" ")
            assert kind in SUFFIX and family not in families, line
            assert not family.endswith(("_total", "_info")), line
            families.add(family)
        elif line.startswith("# UNIT "):
            name, unit = line[len("# UNIT "):].split(" ")
            assert name == family and name.endswith("_" + unit), line
        elif line.startswith("# HELP "):
            assert line[len("# HELP "):].split(" ")[0] == family, line
        else:
            found = SAMPLE.match(line)
            assert found and found.group(1) == family + SUFFIX[kind], line
            assert (found.group(1), found.group(2)) not in samples, line
            assert kind != "counter" or float(found.group(3)) >= 0, line
            samples[found.group(1), found.group(2)] = float(found.group(3))
    return samples


SETUP = """
load_nccl()
import amem, os, sys, time, warnings, urllib.request, socket
sys.path.insert(0, %r)
from metrics_test import check_openmetrics
allocate()
def one(samples, name, **labels):
    found = [value for (sample, text), value in samples.items() if sample == name and all('%%s="%%s"' %% pair in text for pair in labels.items())]
    assert len(found) == 1, (name, labels, found, sorted(samples))
    return found[0]
""" % os.path.dirname(os.path.abspath(__file__))


class Metrics(python_test.Scripts):
    def test_bytes_pauses_and_phases(self):
        self.check(SETUP + """
amem.pause()
samples = check_openmetrics(amem.openmetrics())
assert one(samples, "amem_tag_bytes", tag="user") == 4 << 20
assert one(samples, "amem_tag_resident_bytes", tag="user") == 0
assert one(samples, "amem_paused", tag="user") == 1
assert one(samples, "amem_pauses_total") == 1 and one(samples, "amem_resumes_total") == 0
first = one(samples, "amem_phase_seconds_total", operation="pause", phase="save", kind="work")
amem.resume(); amem.pause()
samples = check_openmetrics(amem.openmetrics())
assert one(samples, "amem_pauses_total") == 2 and one(samples, "amem_resumes_total") == 1
last = one(samples, "amem_last_phase_seconds", operation="pause", phase="save", kind="work")
total = one(samples, "amem_phase_seconds_total", operation="pause", phase="save", kind="work")
assert abs(total - first - last) < 1e-6, (first, last, total)
assert 'rank="3"' in amem.openmetrics()
try:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
    assert len(list(parse(amem.openmetrics()))) > 10
except ImportError:
    pass
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
samples = check_openmetrics(amem.openmetrics())
failed = {text: value for (name, text), value in samples.items() if name == "amem_failures_total" and value}
assert len(failed) == 1 and list(failed.values()) == [1], failed
assert 'operation="resume"' in list(failed)[0] and 'phase="create own"' in list(failed)[0], failed
assert one(samples, "amem_resumes_total") == 0
amem.resume()
samples = check_openmetrics(amem.openmetrics())
assert one(samples, "amem_resumes_total") == 1
""")

    def test_before_any_memory_it_is_short_and_valid(self):
        self.check(SETUP.replace("allocate()", "") + """
samples = check_openmetrics(amem.openmetrics())
assert [name for name, _ in samples if name == "amem_info"], samples
""")

    def test_kept_bytes_by_reason(self):
        self.check(SETUP + """
samples = check_openmetrics(amem.openmetrics())
reasons = {text: value for (name, text), value in samples.items() if name.endswith("kept_bytes") and "reason=" in text}
assert any(value == 4 << 20 for value in reasons.values()), (reasons, amem.stats()["kept_bytes"])
""", AMEM_USER_MEMORY="keep")

    def test_over_http(self):
        self.check(SETUP + """
with amem.serve_metrics(("127.0.0.1", 0)) as server:
    url = "http://127.0.0.1:%d" % server.address[1]
    answer = urllib.request.urlopen(url + "/metrics")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0"), answer.headers
    check_openmetrics(answer.read().decode())
    try:
        urllib.request.urlopen(url + "/other")
        raise SystemExit("no 404")
    except urllib.error.HTTPError as error:
        assert error.code == 404
try:
    urllib.request.urlopen(url + "/metrics")
    raise SystemExit("it goes on after close")
except urllib.error.URLError:
    pass
""")

    def test_over_a_unix_socket_that_a_killed_process_left(self):
        self.check(SETUP + """
path = os.environ["AMEM_JOURNAL_DIR"] + "/metrics.sock"
left = socket.socket(socket.AF_UNIX); left.bind(path); left.close()
with amem.serve_metrics(path):
    client = socket.socket(socket.AF_UNIX); client.connect(path)
    client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
    text = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    check_openmetrics(text.partition("\\r\\n\\r\\n")[2])
assert not os.path.exists(path)
open(path, "w").write("mine")
try:
    amem.serve_metrics(path)
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
        check_openmetrics(open(path).read())
        seen.add(os.stat(path).st_mtime_ns)
assert len(seen) > 2, seen
assert [name for name in os.listdir(folder) if name.endswith(".prom")] == ["amem-2.prom"]
if os.fork() == 0:
    raise SystemExit(0)  # and its exit handlers run
os.wait()
assert os.path.exists(path)
server.close()
assert not os.path.exists(path) and not [name for name in os.listdir(folder) if "metrics-" in name]
""", RANK="2")


if __name__ == "__main__":
    unittest.main()
