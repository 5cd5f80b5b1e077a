"""The Python package on the stand-ins for the driver and NCCL. Each test is a process of its own: attaching happens once."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

PREAMBLE = """
import ctypes, os, warnings
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
cuda.stand_in_cuda_bytes_in_use.restype = ctypes.c_uint64
in_use = lambda: cuda.stand_in_cuda_bytes_in_use(0)
def load_nccl(path=os.environ["LD_LIBRARY_PATH"] + "/libnccl.so.2"):
    global nccl
    nccl = ctypes.CDLL(path)
    return nccl
def allocate(nccl=None):
    nccl = nccl or globals()["nccl"]
    pointer = ctypes.c_void_p()
    assert nccl.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
    return pointer
"""


def run(script, **more):
    with tempfile.TemporaryDirectory() as scratch:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AMEM_") or k == "AMEM_LIBRARY"}
        # What these scripts allocate is the program's (ncclMemAlloc), and a pause is to be seen by what is in use.
        environment.update(AMEM_JOURNAL_DIR=scratch, AMEM_USER_MEMORY="release")
        environment.update(more)
        return subprocess.run(
            [sys.executable, "-c", PREAMBLE + script], env=environment, capture_output=True, text=True, timeout=60
        )


PYTHON = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../ncclpatch/python")


class Scripts(unittest.TestCase):
    def check(self, script, **more):
        result = run(script, **more)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result


class Activation(Scripts):
    """Each way by which AMem comes into a process is said once, at level info."""

    USE = "import amem, importlib; allocate(); allocate(); amem.pause(); amem.resume(); amem.attach(); load_nccl()\n"

    def said(self, script, **more):
        lines = self.check(script + self.USE, AMEM_LOG="info", **more).stderr.splitlines()
        return [line for line in lines if "attached by" in line], [line for line in lines if " on, by " in line]

    def test_by_import(self):
        attached, on = self.said("load_nccl()\n")
        self.assertEqual(attached, ["AMem: attached by import amem"])
        self.assertEqual([line.partition(" info ")[2].partition(" at ")[0] for line in on], ["on, by attach: NCCL 2.28.9"])

    def test_by_the_entry_point(self):
        attached, on = self.said("load_nccl()\nimport amem_plugins\namem_plugins.attach()\n", AMEM_ENABLE="1")
        self.assertEqual(attached, ["AMem: attached by the entry point torch.backends, because AMEM_ENABLE=1"])
        self.assertEqual(len(on), 1, on)

    def test_two_ways_at_once_are_one(self):
        attached, on = self.said("load_nccl()\nimport amem_plugins\namem_plugins.attach()\n", AMEM_ENABLE="1", LD_PRELOAD=os.environ["AMEM_LIBRARY"])
        self.assertEqual(attached, [])
        self.assertEqual([line.partition(" info ")[2].partition(" at ")[0] for line in on], ["on, by preload: NCCL 2.28.9"])

    def test_the_entry_point_attaches_in_forked_and_in_spawned_workers(self):
        for method in ("fork", "spawn"):
            with tempfile.TemporaryDirectory() as folder:
                with open(folder + "/job.py", "w", encoding="utf-8") as file:
                    file.write(PREAMBLE.replace("import ctypes", "import ctypes, multiprocessing, sys") .split("assert cuda.cuInit")[0] + """
import amem_plugins
libraries = ctypes.CDLL(os.environ["LD_LIBRARY_PATH"] + "/libnccl.so.2")
amem_plugins.attach()
def work():
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
    pointer = ctypes.c_void_p()
    assert libraries.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
    import amem
    cuda.stand_in_cuda_bytes_in_use.restype = ctypes.c_uint64
    with amem.paused():
        assert cuda.stand_in_cuda_bytes_in_use(0) == 0
    assert cuda.stand_in_cuda_bytes_in_use(0) >= 4 << 20
if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    worker.start(); worker.join()
    sys.exit(worker.exitcode)
""")
                environment = {**os.environ, "AMEM_ENABLE": "1", "AMEM_JOURNAL_DIR": folder, "AMEM_USER_MEMORY": "release", "LD_PRELOAD": ""}
                done = subprocess.run([sys.executable, folder + "/job.py", method], env=environment, capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(done.returncode, 0, method + done.stdout + done.stderr)


class Package(Scripts):
    def test_import_attaches_and_the_context_manager_gives_memory_back(self):
        self.check(
            """
load_nccl()
import amem
allocate()
before = in_use()
assert before >= 4 << 20
with amem.paused():
    assert in_use() == 0, in_use()
    amem.pause()  # a want of its own, of which there is one
    amem.pause()
assert in_use() == 0, in_use()
amem.resume()
assert in_use() == before
amem.trim_pinned()
assert amem.stats()["contents"]["pinned_bytes"] == 0
assert amem.stats()["session"] in os.listdir(os.environ["AMEM_JOURNAL_DIR"]), "the name of its journal, as every command has it"
assert amem.stats()["rank"] is None, "no launcher gave it one"
assert amem.version()
"""
        )

    def test_resumes_after_an_exception(self):
        self.check(
            """
load_nccl()
import amem
allocate()
before = in_use()
try:
    with amem.paused():
        raise KeyError
except KeyError:
    pass
assert in_use() == before
"""
        )

    def test_too_late_warns_and_pause_raises(self):
        self.check(
            """
load_nccl()
allocate()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import amem
assert len(seen) == 1 and "too late" in str(seen[0].message), seen
try:
    amem.pause()
    raise SystemExit("pause must raise")
except amem.AmemError as error:
    assert error.code == 5 and "too late" in str(error), error
"""
        )

    def test_without_nccl_import_is_silent_and_attach_says_what_to_load(self):
        self.check(
            """
warnings.simplefilter("error")
import amem
try:
    amem.attach()
    raise SystemExit("attach must raise")
except amem.AmemError as error:
    assert "import torch" in str(error), error
load_nccl()
amem.attach()
allocate()
with amem.paused():
    assert in_use() == 0
"""
        )

    def test_a_library_that_is_not_where_it_was_said_to_be_is_warned_of_and_is_an_error_when_it_is_needed(self):
        result = run("import amem\ntry:\n    amem.pause()\nexcept amem.AmemError as error:\n    print(error.code, error)\n", AMEM_LIBRARY="/no/such/libamem_nccl.so")
        self.assertIn("RuntimeWarning: cannot load /no/such/libamem_nccl.so", result.stderr)
        self.assertRegex(result.stdout, "^5 cannot load /no/such/libamem_nccl.so: .*; correct AMEM_LIBRARY, or unset it")

    def test_a_library_that_lacks_a_function_says_which(self):
        with tempfile.TemporaryDirectory() as folder:
            library = folder + "/libamem_nccl.so"
            subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input="int ncclPause(void) { return 0; }\n", text=True, check=True)
            result = run("import amem", AMEM_LIBRARY=library)
        self.assertIn("it has no ncclResume, so it is older than the Python package", result.stderr)


class SeveralNccls(Scripts):
    """Two builds of NCCL in one process, loaded in each way and order: both are under AMem, and a pause releases both."""

    BOTH_PAUSE = """
import amem
for one in loaded: allocate(one)
assert in_use() >= 2 * (4 << 20)
with amem.paused():
    assert in_use() == 0, in_use()
named = {one["version"]: one for one in amem.stats()["nccl_libraries"]}
assert sorted(named) == ["2.28.9", "2.29.7"], named
assert all(one["under_amem"] and not one["why_not"] for one in named.values()), named
"""
    OTHER = os.environ.get("STAND_IN_NCCL_OTHER", "")

    def check_both(self, script, **more):
        self.check(script + self.BOTH_PAUSE, OTHER=self.OTHER, **more)

    def test_preload_of_the_library(self):
        self.check_both(
            "loaded = [load_nccl(), load_nccl(os.environ['OTHER'])]", LD_PRELOAD=os.environ["AMEM_LIBRARY"]
        )

    def test_preload_of_the_library_the_other_first_and_global(self):
        self.check_both(
            "loaded = [ctypes.CDLL(os.environ['OTHER'], mode=ctypes.RTLD_GLOBAL), load_nccl()]",
            LD_PRELOAD=os.environ["AMEM_LIBRARY"],
        )

    def test_attach_after_both(self):
        self.check_both("loaded = [load_nccl(), load_nccl(os.environ['OTHER'])]")

    def test_the_other_is_loaded_after_the_package_and_used_at_once(self):
        self.check_both("loaded = [load_nccl()]\nimport amem\nloaded.append(load_nccl(os.environ['OTHER']))\nallocate(loaded[1])")

    def test_the_other_is_loaded_after_the_first_pause(self):
        self.check_both(
            "loaded = [load_nccl()]\nimport amem\nallocate()\namem.pause(); amem.resume()\n"
            "loaded.append(load_nccl(os.environ['OTHER']))"
        )

    def test_once_an_nccl_has_come_that_was_not_proved_nothing_leaves(self):
        result = self.check(
            """
load_nccl()
import amem
allocate()
with amem.paused():
    assert in_use() == 0, in_use()
other = load_nccl(os.environ["OTHER"])
allocate(other)
before = in_use()
with amem.paused():
    assert in_use() == before, (in_use(), before)
""",
            OTHER=self.OTHER,
            LD_PRELOAD=os.environ["AMEM_LIBRARY"],
            AMEM_NVLS="release",
            AMEM_PROVED="2.28.9",
        )
        self.assertRegex(result.stderr, "leave all memory in place: AMEM_NVLS and AMEM_NETWORK were proved for NCCL 2.28.9, and .* is NCCL 2.29.7")

    def test_a_failure_of_one_does_not_undo_what_the_open_group_of_the_other_has_suspended(self):
        self.check(
            """
both = [load_nccl(), load_nccl(os.environ["OTHER"])]
class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]
def communicator(nccl):
    unique, made = UniqueId(), ctypes.c_void_p()
    assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    assert nccl.ncclCommInitRank(ctypes.byref(made), 1, unique, 0) == 0
    return made
amem_calls = ctypes.CDLL(os.environ["AMEM_LIBRARY"])
def suspended(one):
    value = ctypes.c_uint64()
    assert amem_calls.ncclCommMemStats(one, 1, ctypes.byref(value)) == 0
    return value.value
first, second = map(communicator, both)
assert both[0].ncclGroupStart() == 0
assert amem_calls.ncclCommSuspend(first, 1) == 0
assert cuda.stand_in_cuda_fail_next(b"Unmap", ctypes.c_uint64(1), 2) == 0
assert amem_calls.ncclCommSuspend(second, 1) != 0
assert (suspended(first), suspended(second)) == (1, 0), (suspended(first), suspended(second))
assert both[0].ncclGroupEnd() == 0
assert amem_calls.ncclCommSuspend(second, 1) == 0
assert in_use() == 0, in_use()
assert amem_calls.ncclCommResume(first) == 0 and amem_calls.ncclCommResume(second) == 0
""",
            OTHER=self.OTHER,
            LD_PRELOAD=os.environ["AMEM_LIBRARY"],
        )

    def test_one_that_was_used_before_is_named_by_statistics_and_by_the_pause(self):
        result = self.check(
            """
other = load_nccl(os.environ["OTHER"])
allocate(other)
kept = in_use()
load_nccl()
warnings.simplefilter("ignore")
import amem
allocate()
with amem.paused():
    assert in_use() == kept, in_use()
named = {one["version"]: one for one in amem.stats()["nccl_libraries"]}
assert named["2.28.9"]["under_amem"] and not named["2.29.7"]["under_amem"], named
assert "looked up the driver's functions before" in named["2.29.7"]["why_not"], named
amem.pause(); amem.resume()
""",
            OTHER=self.OTHER,
        )
        self.assertEqual(result.stderr.count("is not under AMem, and a pause leaves its memory"), 1, result.stderr)
        self.assertIn("NCCL 2.29.7", result.stderr)


def library_has(name):
    try:
        with open(os.environ.get("AMEM_LIBRARY", ""), "rb") as file:
            return name in file.read()
    except OSError:
        return False


@unittest.skipUnless(library_has(b"amem_pool_enter"), "this libamem_nccl.so has no pools")
class TagsAndPools(Scripts):
    """amem.pool and its pauses on the library and the stand-in driver; memory by amem_alloc, as PyTorch would ask for it."""

    BEGIN = """
import amem
lib = amem._calls.lib
lib.amem_alloc.restype = ctypes.c_void_p
lib.amem_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
lib.amem_free.restype = None
lib.amem_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
SIZE = 4 << 20
def take(tag, policy="preserve", fill=None):
    with amem.pool(tag, policy):
        pointer = lib.amem_alloc(SIZE, 0, None)
    assert pointer, amem._calls.last_error()
    if fill is not None:
        assert cuda.cuMemsetD8_v2(ctypes.c_uint64(pointer), ctypes.c_ubyte(fill), ctypes.c_size_t(SIZE)) == 0
    return pointer
def contents(pointer):
    buffer = ctypes.create_string_buffer(SIZE)
    assert cuda.cuMemcpyDtoH_v2(buffer, ctypes.c_uint64(pointer), ctypes.c_size_t(SIZE)) == 0
    return buffer.raw
def row(tag):
    return next(one for one in amem.memory()["tags"] if one["tag"] == tag)
"""

    def check_pools(self, script, **more):
        return self.check(self.BEGIN + script, **more)

    def test_a_tag_gives_its_memory_back_and_brings_addresses_and_contents_back(self):
        self.check_pools(
            """
first, second = take("weights", fill=7), take("cache", "discard", fill=9)
before = in_use()
assert before >= 2 * SIZE
with amem.paused("weights"):
    assert in_use() < before
    assert row("weights")["state"] == "paused" and row("weights")["resident_bytes"] == 0, row("weights")
    assert row("cache")["state"] == "resident" and contents(second) == b"\\x09" * SIZE
assert in_use() == before and contents(first) == b"\\x07" * SIZE
with amem.paused("weights", "cache"):
    assert in_use() == 0, in_use()
assert in_use() == before and contents(first) == b"\\x07" * SIZE
assert row("weights")["policy"] == "preserve" and row("cache")["policy"] == "discard"
assert row("weights")["parts"] == 1 and row("weights")["devices"] == [0], row("weights")
lib.amem_free(first, SIZE, 0, None)
lib.amem_free(second, SIZE, 0, None)
assert in_use() == 0, in_use()
"""
        )

    def test_without_waiting_the_wait_brings_it_back(self):
        self.check_pools(
            """
pointer = take("weights", fill=5)
for stream in (None, 0):
    amem.pause("weights", wait=False, stream=0)
    amem.wait("weights")
    assert in_use() == 0, in_use()
    amem.resume("weights", wait=False, priority=3)
    amem.wait("weights", stream)
    amem.wait("weights")
    assert contents(pointer) == b"\\x05" * SIZE and row("weights")["state"] == "resident"
"""
        )

    @unittest.skipUnless(os.environ.get("STAND_IN_NVML"), "no stand-in for libnvidia-ml")
    def test_the_tool_says_whose_the_memory_of_a_gpu_is(self):
        with tempfile.TemporaryDirectory() as folder:
            self.check_pools(
                """
import re, subprocess, sys
take("weights", fill=5), take("cache", "discard")
amem.pause("weights")
other = subprocess.Popen([sys.executable, "-c", os.environ["OTHER"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert other.stdout.readline() == b"there\\n"
environment = {**os.environ, "LD_LIBRARY_PATH": os.environ["STAND_IN_NVML"] + ":" + os.environ["LD_LIBRARY_PATH"]}
done = subprocess.run([os.environ["TOOL_FOR_GPUS"], "top", "--gpu"], env=environment, capture_output=True, text=True)
other.communicate()
assert done.returncode == 0 and done.stderr == "", done
cache, weights = (row(tag)["bytes"] >> 20 for tag in ("cache", "weights"))
gpu = done.stdout.split("GPU-")[1]
for line in ("%d MiB .* tag cache" % cache, "6 MiB .* process %d .python" % other.pid, "%d MiB more are paused" % weights):
    assert re.search(line, gpu), (line, gpu)
assert "unknown" not in gpu and "tag weights" not in gpu, gpu
""",
                AMEM_SIM_WORLD=folder + "/world",
                AMEM_SIM_DEVICES="2",
                OTHER=PREAMBLE
                + """
import sys
memory = ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(6 << 20)) == 0
print("there", flush=True)
sys.stdin.read()
""",
            )

    FULL = """
import logging, threading, time
logging.basicConfig(format="%(message)s")
pointer = take("weights", fill=5)
amem.pause("weights")
others = []  # memory of somebody else, who takes all there is
while True:
    other = ctypes.c_uint64()
    if cuda.cuMemAlloc_v2(ctypes.byref(other), ctypes.c_size_t(2 << 20)) != 0:
        break
    others.append(other)
def give_back():
    cuda.cuCtxSetCurrent(context)
    for other in others:
        assert cuda.cuMemFree_v2(other) == 0
"""

    def test_a_resume_waits_for_memory_that_others_are_still_giving_back(self):
        result = self.check_pools(
            self.FULL
            + """
threading.Timer(1, give_back).start()
amem.resume("weights", wait_for_memory=30)
assert contents(pointer) == b"\\x05" * SIZE and row("weights")["state"] == "resident"
""",
            AMEM_SIM_CAPACITY_MIB="64",
        )
        self.assertIn("resume of weights waits for memory, up to 30 s: device 0 has", result.stderr)
        self.assertEqual(result.stderr.count("waits for memory"), 1)
        self.assertNotIn("amem_resume", result.stderr)  # a question is no failure

    def test_a_resume_for_which_no_memory_comes_fails_when_its_time_is_up_and_can_be_repeated(self):
        self.check_pools(
            self.FULL
            + """
began = time.monotonic()
try:
    amem.resume("weights", wait_for_memory=0.5)
    raise SystemExit("resumed into a full GPU")
except amem.AmemError as error:
    assert error.code == 1 and "must come back" in str(error), error
assert time.monotonic() >= began + 0.5 and row("weights")["state"] == "paused"
give_back()
amem.resume("weights")
assert contents(pointer) == b"\\x05" * SIZE
""",
            AMEM_SIM_CAPACITY_MIB="64",
        )

    def test_a_question_for_memory_counts_all_tags_of_a_call(self):
        self.check_pools(
            """
ask = lambda *tags: lib.amem_resume(*amem._tags._array(tags), amem._tags.ONLY_ASK, 0)
take("weights"), take("cache")
assert ask("weights", "cache") == 0  # neither is paused
amem.pause("weights", "cache")
assert ask("weights", "cache", "nccl") == 0 and row("weights")["state"] == "paused"
other = ctypes.c_uint64()
taken = 64 - (row("weights")["bytes"] + row("cache")["bytes"] >> 20) + 2  # leaves 2 MiB too little for the two
assert cuda.cuMemAlloc_v2(ctypes.byref(other), ctypes.c_size_t(taken << 20)) == 0
assert (ask("weights"), ask("cache"), ask("weights", "cache"), ask("unknown")) == (0, 0, 1, 4)
assert amem._calls.lib.amem_resume(*amem._tags._array(["weights"]), amem._tags.ONLY_ASK | amem._tags.NO_WAIT, 0) == 4
""",
            AMEM_SIM_CAPACITY_MIB="64",
        )

    def test_a_question_for_memory_starts_no_session(self):
        """One that could not start would make the resume fail after a pause that had nothing to do."""
        self.check("load_nccl()\nimport amem\namem.pause('nccl')\namem.resume('nccl', wait_for_memory=1)\namem.pause('nccl')\n", AMEM_JOURNAL_DIR="/proc/none")

    def test_wrong_uses_are_errors_with_their_codes(self):
        self.check_pools(
            """
take("weights")
def code_of(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except amem.AmemError as error:
        return error.code, str(error)
    raise SystemExit("%s%s must raise" % (call.__name__, arguments))
def enter(tag, policy):
    with amem.pool(tag, policy):
        pass
for call in (amem.pause, amem.resume, amem.wait):
    code, text = code_of(call, "wieghts")
    assert code == 4 and "weights" in text and "nccl" in text, text
assert code_of(amem.wait, "wieghts", stream=0)[0] == 4
assert code_of(enter, "weights", "discard")[0] == 4
assert code_of(enter, "nccl", "preserve")[0] == 4
with amem.pool("weights"):
    code, text = code_of(amem.pause, "weights")
    assert code == 5 and "inside" in text, text
amem.pause("weights")
code, text = code_of(enter, "weights", "preserve")
assert code == 5 and "paused" in text, text
amem.resume("weights")
"""
        )

    def test_a_resume_that_fails_comes_with_the_wait_and_loses_nothing(self):
        self.check_pools(
            """
pointer = take("weights", fill=6)
for wait in (False, True):
    amem.pause("weights")
    assert cuda.stand_in_cuda_fail_next(b"Create", ctypes.c_uint64(1), 2) == 0
    try:
        amem.resume("weights", wait=wait)
        amem.wait("weights")
        raise SystemExit("it must fail")
    except amem.AmemError as error:
        assert error.code == 1 and "weights" in str(error), (error.code, str(error))
    assert row("weights")["state"] == "paused" and in_use() == 0, row("weights")
    amem.resume("weights")
    assert contents(pointer) == b"\\x06" * SIZE
"""
        )

    def test_pools_nest_and_are_a_threads_own(self):
        self.check_pools(
            """
import threading
with amem.pool("outer"):
    with amem.pool("inner"):
        lib.amem_alloc(SIZE, 0, None)
    lib.amem_alloc(SIZE, 0, None)
    thread = threading.Thread(target=lambda: lib.amem_alloc(SIZE, 0, None))
    thread.start(); thread.join()
assert [row(tag)["parts"] for tag in ("outer", "inner", "default")] == [1, 1, 1], amem.memory()
"""
        )

    def test_nccl_and_a_tag_are_paused_together(self):
        self.check_pools(
            """
load_nccl()
amem.attach()
allocate()
pointer = take("weights", fill=3)
with amem.paused("weights", "nccl"):
    assert in_use() == 0, in_use()
    assert row("nccl")["state"] == "paused", row("nccl")
assert contents(pointer) == b"\\x03" * SIZE
"""
        )


class ExitCode(unittest.TestCase):
    REPLAY = os.path.join(os.path.dirname(os.environ.get("AMEM_LIBRARY", "")), "..", "bin", "amem-replay")

    @unittest.skipUnless(os.access(REPLAY, os.X_OK), "amem-replay is not built here")
    def test_is_the_journals_last_word_however_the_interpreter_ends(self):
        for end, code in (("raise SystemExit(4)", 4), ("import sys; sys.exit(5)", 5), ("raise KeyError", 1), ("pass", 0)):
            with tempfile.TemporaryDirectory() as journals:
                result = run("load_nccl()\nimport amem\nallocate()\n" + end, AMEM_JOURNAL_DIR=journals)
                self.assertEqual(result.returncode, code, result.stderr)
                log = [self.REPLAY, "log", journals, "--kind", "session-closed", "--json"]
                line = subprocess.run(log, capture_output=True, text=True, check=True, timeout=60).stdout
                self.assertEqual(json.loads(line)["exit_code"], code, line)


class Requests(Scripts):
    """Safe points, asked by the real tool from a process of its own."""

    TOOL = """
load_nccl()
import amem, subprocess, signal, sys, threading, time
allocate()
def tool(*words):
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return subprocess.Popen([os.environ["TOOL"], *words, str(os.getpid())], env=environment, stdout=subprocess.PIPE, text=True)
"""

    # The process is paused from outside, and in 0.3 s a handler raises Interrupted in the main thread.
    INTERRUPTED_IN_A_PAUSE = """
class Interrupted(Exception):
    pass
def interrupt(*_):
    raise Interrupted
def serve():
    while not ended:
        amem.safepoint()
        time.sleep(0.001)
ended = []
worker = threading.Thread(target=serve)
worker.start()
before = in_use()
assert tool("pause").wait() == 0
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.3)
began = time.monotonic()
"""

    def ask(self, script, **more):
        return self.check(self.TOOL + script, TOOL=ExitCode.REPLAY, **more)

    def test_costs_at_most_a_microsecond_when_nobody_asks(self):
        for enable in ("1", "0"):
            result = self.check(
                """
load_nccl()
import amem, time
allocate()
def nanoseconds(count=200_000):
    begun = time.thread_time_ns()  # of the processor, which others may want as well
    for _ in range(count):
        amem.safepoint()
    return (time.thread_time_ns() - begun) / count
print(min(nanoseconds() for _ in range(5)))
""",
                AMEM_ENABLE=enable,
            )
            self.assertLess(float(result.stdout), 1000, "nanoseconds")

    def test_without_the_library_it_does_nothing(self):
        script = "import amem\nassert amem.safepoint() is None\n"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("AMEM_", "LD_"))}
        with tempfile.TemporaryDirectory() as elsewhere:
            ran = subprocess.run([sys.executable, "-c", script], env=environment, cwd=elsewhere, capture_output=True, text=True, check=False)
        self.assertEqual(ran.returncode, 0, ran.stderr)

    def test_a_process_cannot_freeze_itself_and_is_told_why(self):
        self.check(
            """
load_nccl()
import amem
for call in (amem.frozen, lambda: amem.frozen("job")):
    try:
        with call():
            raise SystemExit("must raise")
    except amem.AmemError as error:
        assert "amem freeze JOB" in str(error) and "amem.safepoint()" in str(error), error
"""
        )

    @unittest.skipUnless(os.access(ExitCode.REPLAY, os.X_OK), "amem-replay is not built here")
    def test_is_paused_in_a_safe_point_and_resumed(self):
        self.ask(
            """
before = in_use()
asked = tool("pause")
seen, steps = [], 0
def watch():
    asked.wait()
    seen.append((asked.returncode, in_use()))
    assert tool("resume").wait() == 0
watcher = threading.Thread(target=watch)
watcher.start()
while watcher.is_alive():
    amem.safepoint()
    steps += 1
    time.sleep(0.001)
assert seen == [(0, 0)], seen
assert in_use() == before and steps > 0
"""
        )

    @unittest.skipUnless(os.access(ExitCode.REPLAY, os.X_OK), "amem-replay is not built here")
    def test_a_resume_from_outside_leaves_paused_what_a_block_wants_paused(self):
        self.ask(
            """
before, seen = in_use(), []
def work():
    with amem.paused():
        assert tool("pause").wait() == 0
        assert tool("resume").wait() == 0
        seen.append(in_use())
    seen.append(in_use())
worker = threading.Thread(target=work)
worker.start()
while worker.is_alive():
    amem.safepoint()
    time.sleep(0.001)
assert seen == [0, before], (seen, before)
"""
        )

    @unittest.skipUnless(os.access(ExitCode.REPLAY, os.X_OK), "amem-replay is not built here")
    def test_a_block_that_waits_for_a_resume_from_outside_can_be_interrupted(self):
        self.ask(
            self.INTERRUPTED_IN_A_PAUSE
            + """
try:
    with amem.paused():
        raise AssertionError("it began")
except Interrupted:
    assert time.monotonic() - began < 3
assert tool("resume").wait() == 0
assert in_use() == before
ended.append(True)
worker.join()
"""
        )

    @unittest.skipUnless(os.access(ExitCode.REPLAY, os.X_OK), "amem-replay is not built here")
    def test_a_block_that_begins_while_the_process_is_paused_from_outside_waits_for_the_resume(self):
        self.ask(
            """
before, seen = in_use(), []
def work():
    assert tool("pause").wait() == 0
    resumed = []
    later = threading.Timer(0.2, lambda: resumed.append(tool("resume").wait()))
    later.start()
    began = time.monotonic()
    with amem.paused():
        assert time.monotonic() - began > 0.1
        later.join()
        seen.extend((resumed, in_use()))
    seen.append(in_use())
worker = threading.Thread(target=work)
worker.start()
while worker.is_alive():
    amem.safepoint()
    time.sleep(0.001)
assert seen == [[0], 0, before], (seen, before)
"""
        )

    @unittest.skipUnless(os.access(ExitCode.REPLAY, os.X_OK), "amem-replay is not built here")
    def test_an_adapter_that_is_interrupted_while_it_waits_for_the_resume_has_nothing_to_bring_back(self):
        self.ask(
            self.INTERRUPTED_IN_A_PAUSE
            + """
try:
    amem.frameworks.pause_nccl()
    raise AssertionError("it paused")
except Interrupted:
    pass
amem.frameworks.resume_nccl()  # as on the way out, and waits for nobody
assert time.monotonic() - began < 3
assert tool("resume").wait() == 0
assert in_use() == before
assert amem.frameworks.pause_nccl() and in_use() == 0
amem.frameworks.resume_nccl()
assert in_use() == before
ended.append(True)
worker.join()
"""
        )

    @unittest.skipUnless(os.access(ExitCode.REPLAY, os.X_OK), "amem-replay is not built here")
    def test_signal_handlers_run_while_it_waits_and_ctrl_c_leaves(self):
        self.ask(
            """
before, beats = in_use(), []
signal.signal(signal.SIGUSR1, lambda *_: beats.append(in_use()))
asked = tool("pause")
def interrupt():
    asked.wait()
    os.kill(os.getpid(), signal.SIGUSR1)
    while not beats:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    while True:
        amem.safepoint()
        time.sleep(0.001)
except KeyboardInterrupt:
    pass
assert beats == [0], beats
assert in_use() == 0  # it is still paused, and the next safe point waits
resumed = tool("resume")
amem.safepoint()
assert resumed.wait() == 0 and in_use() == before
"""
        )

    @unittest.skipUnless(os.access(ExitCode.REPLAY, os.X_OK), "amem-replay is not built here")
    def test_a_resume_of_its_own_waits_for_the_outside_and_lets_signals_in(self):
        self.ask(
            """
amem.pause()
assert tool("pause").wait() == 0
beats = []
signal.signal(signal.SIGALRM, lambda *_: beats.append(tool("resume")))
signal.setitimer(signal.ITIMER_REAL, 0.5)
begun = time.monotonic()
amem.resume()
assert len(beats) == 1 and time.monotonic() - begun > 0.4
assert beats[0].wait() == 0 and in_use() > 0
"""
        )


class Idle(Scripts):
    """With AMEM_ENABLE=0, and where there is no GPU: every call does nothing and returns its neutral value, and one line says so once."""

    EVERY = """
with amem.paused() as freed:
    assert freed.bytes == 0 and freed.already == (), freed
with amem.paused("weights", "nccl"), amem.pool("weights"), amem.pool("cache", "discard"):
    amem.pause("weights", wait=False, stream=0)
    amem.wait("weights")
    amem.wait("weights", stream=0)
    amem.resume("weights", wait=False, priority=1)
    amem.resume("unheard of", wait_for_memory=5)
for _ in range(3):
    amem.pause(); amem.resume(); amem.safepoint(); amem.trim_pinned(); amem.set_group(3); amem.attach()
assert amem.memory()["tags"] == [] and REASON in amem.memory()["reason"], amem.memory()
assert amem.stats()["session"] is None and REASON in amem.stats()["reason"], amem.stats()
assert amem.metrics()["amem_dropped_events"] and amem.version().count(".") == 2
saver = amem.wrap()
with saver.region("r", enable_cpu_backup=True), saver.disable():
    saver.pause()
saver.resume()
from amem import frameworks
assert frameworks.pause_nccl() is False
frameworks.resume_nccl()
"""

    def said_once(self, result, reason):
        self.assertEqual([line for line in result.stderr.splitlines() if "do nothing" in line and reason in line][1:], [], result.stderr)
        self.assertIn(reason, result.stderr)

    def test_switched_off_every_call_does_nothing(self):
        """Also where NCCL was used already, warnings are errors, and the library cannot be loaded."""
        script = "load_nccl(); allocate(); before = in_use()\nimport amem\nREASON = 'AMEM_ENABLE=0'\n" + self.EVERY + "assert in_use() == before\n"
        more = {"AMEM_ENABLE": "0", "PYTHONWARNINGS": "error"}
        self.said_once(self.check(script, **more), "AMEM_ENABLE=0")
        self.said_once(self.check(script, LD_PRELOAD=os.environ["AMEM_LIBRARY"], **more), "AMEM_ENABLE=0")
        self.said_once(self.check(script.replace("and amem.version().count('.') == 2", ""), **more), "AMEM_ENABLE=0")
        broken = self.check("import amem\nwith amem.paused('weights', 'nccl'): amem.safepoint()\n", AMEM_LIBRARY="/dev/null", **more)
        self.said_once(broken, "AMEM_ENABLE=0")

    def test_switched_off_a_rank_takes_part_with_nothing_and_fails_nothing(self):
        """Neither where there is no process group, nor where the others do not come."""
        self.check("""
import amem, sys, threading
sys.path.insert(0, os.environ["HERE"])
import store_for_tests
with amem.paused(process_group=True): pass
amem.resume(process_group=True)
where = os.environ["AMEM_JOURNAL_DIR"] + "/store"
server = store_for_tests.Server(where)
done = []
def rank(number):
    group = amem.StoreGroup(store_for_tests.Client(where), number, 2)
    with amem.paused("weights", process_group=group, timeout=20):
        done.append(number)
    if number == 0:
        amem.pause(process_group=group, timeout=0.2)
        done.append("alone")
threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
for one in threads: one.start()
for one in threads: one.join()
assert sorted(map(str, done)) == ["0", "1", "alone"], done
os._exit(0)
""", AMEM_ENABLE="0", HERE=os.path.dirname(os.path.abspath(__file__)))

    def test_switched_off_what_was_to_be_wrapped_goes_on_as_it_is(self):
        self.check("""
import amem, types
module = types.ModuleType("torch_memory_saver")
module.torch_memory_saver = object()
assert amem.wrap(module) is module.torch_memory_saver and amem.wrap(module.torch_memory_saver) is module.torch_memory_saver
""", AMEM_ENABLE="0")

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "this machine has a GPU")
    def test_without_a_gpu_every_call_does_nothing(self):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AMEM_") or k == "AMEM_LIBRARY"}
        environment.update(PYTHONWARNINGS="error", LD_LIBRARY_PATH="")
        done = subprocess.run([sys.executable, "-c", "import amem\nREASON = 'no GPU'\n" + self.EVERY], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.said_once(done, "no GPU")


@unittest.skipUnless(library_has(b"ncclGetLastError"), "this libamem_nccl.so does not serve ncclGetLastError")
class Refused(Scripts):
    def test_a_refused_call_of_nccls_leaves_its_reason_where_programs_ask_for_one(self):
        self.check("""
load_nccl()
import amem
class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]
def init(name):
    unique, made = UniqueId(name), ctypes.c_void_p()
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    return nccl.ncclCommInitRank(ctypes.byref(made), 1, unique, 0), made
def all_reduce():
    return nccl.ncclAllReduce(memory, memory, ctypes.c_size_t(16), 7, 0, made, None)
nccl.ncclGetLastError.restype = ctypes.c_char_p
said = lambda: nccl.ncclGetLastError(None).decode()
failed, made = init(b"one of " + os.environ["AMEM_JOURNAL_DIR"].encode()[-40:])
assert failed == 0
memory = allocate()
assert all_reduce() == 0 and said() == ""
with amem.paused():
    assert all_reduce() != 0
    for reason in (said(), said(), amem._calls.last_error()):
        assert "is refused" in reason and "paused" in reason and "ncclResume" in reason, reason
    nccl.stand_in_nccl_failed(b"Cuda failure 401")
    assert all_reduce() != 0 and said().endswith("\\nNCCL: Cuda failure 401") and said().startswith("AMem: "), said()
    nccl.stand_in_nccl_failed(b"of another call")  # before AMem refuses the next
    failed, _ = init(b"two")
    for reason in (said(), amem._calls.last_error()):
        assert failed == 5 and "while NCCL's memory is paused" in reason and "amem.resume" in reason, (failed, reason)
assert all_reduce() == 0
nccl.stand_in_nccl_failed(b"socketProgress: Connection closed")
assert said() == "socketProgress: Connection closed", "NCCL's own failure since"
""")


class Late(Scripts):
    """NCCL has called the driver before AMem was there."""

    @unittest.skipUnless(library_has(b"amem_pool_enter"), "this libamem_nccl.so has no pools")
    def test_every_call_that_needs_nccl_says_it_also_beside_a_tag_and_nothing_is_paused(self):
        self.check(TagsAndPools.BEGIN.replace("import amem", "load_nccl()\nallocate()\nwarnings.simplefilter('ignore')\nimport amem") + """
pointer = take("weights", fill=7)
before = in_use()
for call in (amem.pause, amem.resume, amem.attach, lambda: amem.pause("weights", "nccl"), lambda: amem.resume("weights", "nccl"),
             amem.paused("weights", "nccl").__enter__, amem.paused().__enter__):
    try:
        call()
        raise SystemExit("must raise")
    except amem.AmemError as error:
        assert error.code == 5 and "too late" in str(error) and "LD_PRELOAD" in str(error), error
    assert in_use() == before and row("weights")["state"] == "resident"
assert row("nccl")["state"] == "not under AMem" and "LD_PRELOAD" in row("nccl")["failure"], row("nccl")
assert not amem.stats()["nccl_libraries"][0]["under_amem"]
from amem import frameworks
assert frameworks.pause_nccl() is False
with amem.paused("weights"):
    assert row("weights")["state"] == "paused"
""")

    def test_warnings_that_are_errors_end_no_program(self):
        for begin in ("import amem\n", "import amem_plugins\namem_plugins.attach()\n"):
            done = self.check("load_nccl()\nallocate()\n" + begin, PYTHONWARNINGS="error", AMEM_ENABLE="1")
            self.assertIn("too late", done.stderr)
        done = self.check("""
import sys, types
cuda = types.SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 1, memory_reserved=lambda device: 5 << 20)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
import amem
""", PYTHONWARNINGS="error", AMEM_SCOPE="all")
        self.assertIn("AMEM_SCOPE=all came too late: 5 MiB", done.stderr)


@unittest.skipUnless(library_has(b"amem_want_pause"), "this libamem_nccl.so has no ledger of wants")
class Account(Scripts):
    """Against the stand-in driver's own count of what it has given out."""

    def test_what_a_pause_took_and_what_it_left_are_what_the_driver_had_given(self):
        self.check(TagsAndPools.BEGIN + """
load_nccl()
amem.attach()
allocate()
take("weights", fill=7), take("cache", "discard")
mine = ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(mine), ctypes.c_size_t(3 << 20)) == 0
before = in_use()
with amem.paused("weights", "nccl") as freed:
    assert freed.used == before and freed.bytes + sum(freed.left.values()) == before, (freed, before)
    assert sum(freed.left.values()) == in_use() and freed.bytes > 0, (freed, in_use())
    assert set(freed.left) == {"tag cache", "not AMem's"} and freed.left["not AMem's"] >= 3 << 20, freed
    again = amem.pause("cache")
    assert again.bytes + sum(again.left.values()) == again.used == before - freed.bytes
    (gpu,) = amem.account().gpus
    assert gpu.used == in_use() == sum(gpu.left.values()) and gpu.device == 0, gpu
    assert sum(gpu.taken.values()) == before - in_use() and set(gpu.taken) == {"weights", "cache", "user"}, gpu
    text = str(amem.account())
    assert again.lost == ("cache",) and "contents not saved: cache" in str(again) and not freed.lost, (freed, again)
    assert amem.account().pinned >= SIZE and "pinned, with contents" in text, text
    assert text.startswith("GPU 0: ") and "weights, paused: not there" in text and "contexts, modules, libraries, other processes" in text, text
    amem.resume("cache")
assert amem.account().gpus[0].taken == {} and in_use() == before
assert amem.account().pinned == 0 < amem.account().spare and "amem.trim_pinned() gives them back" in str(amem.account())
amem.trim_pinned()
assert amem.account().spare == 0 and "trim" not in str(amem.account())
""")

    def test_nothing_asked_for_or_switched_off_is_an_empty_account(self):
        for more in ({}, {"AMEM_ENABLE": "0"}):
            self.check("import amem\nassert amem.account() == ((), (), 0, 0) and str(amem.account()) == \"no GPU has memory of AMem's\"\n", **more)


class Wants(Scripts):
    """Who wants memory away: blocks, plain calls and adapters, in threads and with interrupts anywhere."""

    def check_wants(self, script, **more):
        return self.check(TagsAndPools.BEGIN + "pointer = take('weights', fill=7)\nbefore = in_use()\nstate = lambda: row('weights')['state']\n" + script, **more)

    def test_a_block_does_not_resume_what_a_plain_call_had_paused(self):
        self.check_wants("""
load_nccl()
amem.attach()
allocate()
from amem import frameworks
for pause, resume in ((amem.pause, amem.resume), (frameworks.pause_nccl, frameworks.resume_nccl)):
    pause()
    with amem.paused():
        pass
    assert row("nccl")["state"] == "paused"
    resume()
    assert row("nccl")["state"] == "resident"
    with amem.paused("weights", "nccl"):
        pause()
        amem.pause("weights")
    assert row("nccl")["state"] == state() == "paused"
    amem.resume("weights")
    resume()
    assert row("nccl")["state"] == state() == "resident"
with amem.paused("weights"):
    try:
        amem.resume("weights")
        raise SystemExit("must raise")
    except amem.AmemError as error:
        assert error.code == 5 and "stays paused" in str(error), error
    assert state() == "paused"
assert state() == "resident" and contents(pointer) == b"\x07" * SIZE
""")

    def test_nccls_own_suspend_is_one_of_the_plain_calls(self):
        self.check_wants("""
load_nccl()
amem.attach()
class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]
made = ctypes.c_void_p()
nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
assert nccl.ncclCommInitRank(ctypes.byref(made), 1, UniqueId(os.environ["AMEM_JOURNAL_DIR"].encode()[-40:]), 0) == 0
library = ctypes.CDLL(os.environ["AMEM_LIBRARY"])
suspend, resume = lambda: library.ncclCommSuspend(made, 1), lambda: library.ncclCommResume(made)
with amem.paused():
    assert suspend() == 0
assert row("nccl")["state"] == "paused", "the communicator is suspended"
with amem.paused():
    assert resume() == 5 and "NCCL's memory stays paused" in amem._calls.last_error(), amem._calls.last_error()
    assert row("nccl")["state"] == "paused"
assert row("nccl")["state"] == "resident"
""")

    def test_memory_does_not_come_back_inside_the_block_of_another_thread(self):
        self.check_wants("""
import sys, threading
seen, inside, go_on = [], threading.Event(), threading.Event()
def other():
    with amem.paused("weights"):
        inside.set()
        go_on.wait()
        seen.append(in_use())
thread = threading.Thread(target=other)
def between_the_exit_and_its_resume(frame, event, argument):
    if frame.f_code.co_name == "resume" and frame.f_code.co_filename.endswith("_tags.py") and not inside.is_set():
        thread.start()
        inside.wait()
with amem.paused("weights"):
    sys.settrace(between_the_exit_and_its_resume)
sys.settrace(None)
go_on.set()
thread.join()
assert seen == [0] and state() == "resident", (seen, state())
def work():
    for i in range(30):
        with amem.paused("weights"):
            seen.append(in_use())
threads = [threading.Thread(target=work) for _ in range(3)]
for one in threads: one.start()
for one in threads: one.join()
assert set(seen) == {0} and state() == "resident", (seen, state())
""")

    def test_an_interrupt_anywhere_in_a_block_leaves_nothing_paused_and_nothing_behind(self):
        self.check_wants("""
import sys
BLOCK = ("_tags.py", "contextlib.py")
class At:
    \"\"\"Raises KeyboardInterrupt at the nth step of the interpreter in the code of blocks.\"\"\"
    def __init__(self, nth):
        self.left = nth
    def __call__(self, frame, event, argument):
        frame.f_trace_opcodes = frame.f_code.co_filename.endswith(BLOCK) and frame.f_code.co_name != "__del__"
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self
def run(nth):
    at = At(nth)
    try:
        sys.settrace(at)
        with amem.paused("weights"):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return at.left > 0
nth, step = 0, int(os.environ["STEP"])
while True:
    nth += step
    if run(nth):
        break
    assert state() == "resident" and in_use() == before, (nth, state())
with amem.paused("weights"):
    assert state() == "paused"
assert state() == "resident" and nth > 100, nth
print(nth)
""", STEP="1")

    GROUP = """
import sys
sys.path.insert(0, os.environ["HERE"])
import store_for_tests
class Mortal(store_for_tests.Local):
    gone = False
    def _call(self, *arguments):
        if self.gone:
            raise ConnectionError("the store is gone")
        return super()._call(*arguments)
store = Mortal(store_for_tests.Values())
def fails(block, *parts):
    try:
        with block:
            store.gone = parts[0].startswith("the store")
        raise SystemExit("must raise")
    except amem.AmemError as error:
        assert all(part in str(error) for part in parts), error
    store.gone = False
"""

    def check_group(self, script):
        self.check_wants(self.GROUP + script, HERE=os.path.dirname(os.path.abspath(__file__)))

    def test_a_block_whose_store_dies_leaves_its_tags_to_anybodys_resume(self):
        self.check_group("""
for how in ({}, {"process_group": True}):
    group = amem.StoreGroup(store, 0, 1)
    fails(amem.paused("weights", process_group=group), "the store of the process group does not answer", "nothing was changed on this rank")
    assert state() == "paused"
    amem.resume("weights", **{key: group for key in how})
    assert state() == "resident" and contents(pointer) == b"\x07" * SIZE
""")

    def test_a_block_whose_pause_another_rank_fails_wants_nothing_of_what_was_paused_before(self):
        self.check_group("""
group = amem.StoreGroup(store, 0, 2)
with amem.paused("weights"):
    fails(amem.paused("weights", process_group=group, timeout=0.1), "rank 1 did not come")
    assert state() == "paused"
assert state() == "resident"
""")

    def test_a_block_whose_resume_fails_at_one_tag_leaves_all_to_anybodys_resume(self):
        self.check_wants("""
take("b"), take("c")
cuda.stand_in_cuda_fail_next.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]
for resumes in (("weights", "b", "c"), ), (("c", ), ("b", ), ("weights", )):
    try:
        with amem.paused("weights", "b", "c"):
            assert cuda.stand_in_cuda_fail_next(b"Create", 2, 2) == 0
        raise SystemExit("must raise")
    except amem.AmemError as error:
        assert error.code == 1 and "tag weights was paused again" in str(error), error
    assert {row(tag)["state"] for tag in ("weights", "b", "c")} == {"paused"}
    for tags in resumes:
        amem.resume(*tags)
    assert {row(tag)["state"] for tag in ("weights", "b", "c")} == {"resident"}
""")

    def test_measuring_what_was_freed_fails_no_pause(self):
        self.check_wants("""
real, asked = amem._tags.memory, []
def broken_at_the_end():
    asked.append(0)
    if len(asked) == 2:
        raise MemoryError("none left")
    return real()
amem._tags.memory = broken_at_the_end
with amem.paused("weights") as freed:
    assert in_use() == 0
    assert freed == amem.Freed(0, {"weights": 0}, (), 0), freed
assert in_use() == before
""")


class Import(Scripts):
    def test_all_that_the_readme_names_is_there_after_one_import(self):
        for name in ("frameworks", "hosts", "journal", "rl"):
            self.check("import amem, sys\nassert 'amem.%s' not in sys.modules\nassert amem.%s is sys.modules['amem.%s']\n" % (name, name, name))
        self.check("import amem\nassert not hasattr(amem, 'nothing') and amem.rl.RolloutOffload\n")
        self.check("import amem\nassert not hasattr(amem.frameworks, 'nothing') and amem.frameworks.ray.environment\n")

    def test_a_tag_that_nobody_knows_is_answered_with_the_one_that_was_meant(self):
        self.check("""
from amem._calls import with_guess
text = "amem_pause: tag weigths is not known; known: weights, nccl"
assert with_guess(text) == text + "; did you mean weights?"
assert with_guess(text.replace("weigths", "states")) == text.replace("weigths", "states")
assert with_guess("no room") == "no room"
""")

    def test_without_a_library_there_is_no_version_and_no_error_of_ours(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(os.path.join(PYTHON, "amem"), folder + "/amem", ignore=shutil.ignore_patterns("__pycache__"))
            done = run("import os\nos.environ.pop('AMEM_LIBRARY')\nimport amem\nassert not hasattr(amem, '__version__')\n", PYTHONPATH=folder)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_dir_shows_what_a_user_may_use_and_nothing_else(self):
        self.check("""
import amem
names = [name for name in dir(amem) if name != "__version__"]
assert not [name for name in names if name.startswith("_") or name in ("sys", "warnings", "importlib", "Any")], names
assert {"rl", "frameworks", "hosts", "journal", *amem.__all__} == set(names) and all(hasattr(amem, name) for name in names), names
assert amem.__version__.count(".") == 2, amem.__version__
""")

    def test_without_the_library_a_call_is_an_amem_error_that_says_what_to_do(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(os.path.join(PYTHON, "amem"), folder + "/amem", ignore=shutil.ignore_patterns("__pycache__"))
            done = run("""
import os
os.environ.pop("AMEM_LIBRARY")
import amem
for call in (amem.pause, amem.resume, amem.stats, amem.version, lambda: amem.pause("weights")):
    try:
        call()
        raise SystemExit("must raise")
    except amem.AmemError as error:
        assert error.code == 5 and "install the wheel of amem-nccl again, or set AMEM_LIBRARY" in str(error), error
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3): amem.safepoint()
assert len(said) == 1 and "nobody can pause it" in str(said[0].message), said
""", PYTHONPATH=folder)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_in_the_tree_the_library_of_its_build_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(os.path.join(PYTHON, "amem"), folder + "/ncclpatch/python/amem", ignore=shutil.ignore_patterns("__pycache__"))
            open(folder + "/run", "w", encoding="utf-8").close()
            done = run("import os\nos.environ.pop('AMEM_LIBRARY')\nimport amem\namem.pause()", PYTHONPATH=folder + "/ncclpatch/python")
            self.assertIn("build it with ./run build in " + os.path.realpath(folder), done.stderr)
            os.makedirs(folder + "/build/lib")
            os.symlink(os.environ["AMEM_LIBRARY"], folder + "/build/lib/libamem_nccl.so")
            done = run("import os\nos.environ.pop('AMEM_LIBRARY')\nimport amem\nprint(amem.version())\n", PYTHONPATH=folder + "/ncclpatch/python")
            self.assertRegex(done.stdout, r"^\d+\.\d+", done.stderr)


class Syntax(unittest.TestCase):
    def test_every_file_of_the_package_is_that_of_the_oldest_python_it_claims(self):
        with open(os.path.join(PYTHON, "pyproject.toml"), encoding="utf-8") as file:
            oldest = tuple(map(int, re.search(r'requires-python = ">=(\d+)\.(\d+)"', file.read()).groups()))
        files = [os.path.join(folder, name) for folder, _, names in os.walk(PYTHON) for name in names if name.endswith(".py")]
        self.assertGreater(len(files), 20)
        for path in files:
            with self.subTest(path), open(path, encoding="utf-8") as file:
                ast.parse(file.read(), path, feature_version=oldest)


class Why(Scripts):
    """AmemError.why: the first line of amem-replay why, of a tool that each test puts in its place."""

    # Another process of the same user shares memory and does not come: the pause fails.
    FAIL = """
load_nccl()
import amem, time
allocate()
error = amem.AmemError(6, "ncclPause: nobody came; journal /j/1; to see why: amem-replay why '/j of mine'",
                       amem._why.first_line("nobody came; to see why: amem-replay why '/j of mine'", amem._library.find()))
"""

    def check_with(self, tool, script, **more):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "amem-replay")
            with open(path, "w", encoding="utf-8") as file:
                file.write("#!/bin/sh\n" + tool)
            os.chmod(path, 0o700)
            return self.check(script, AMEM_REPLAY=path, **more)

    def test_is_the_first_line_and_part_of_the_text(self):
        self.check_with(
            'echo "$1 of $2 [$LD_PRELOAD]"; echo more; exit 3\n',
            self.FAIL
            + """
assert error.why == "why of /j of mine []", error.why
assert str(error).endswith("\\n" + error.why), str(error)
assert error.code == 6
""",
            LD_PRELOAD=os.environ["AMEM_LIBRARY"],
        )

    def test_is_none_where_the_tool_says_nothing_finds_nothing_or_is_missing(self):
        for tool in ("exit 3\n", "echo 'Nothing is wrong'; exit 0\n", "kill -9 $$\n"):
            self.check_with(tool, self.FAIL + "assert error.why is None, error.why\nassert 'None' not in str(error)\n")
        self.check(self.FAIL + "assert error.why is None, error.why\n", AMEM_REPLAY="/no/such/tool")

    def test_a_tool_that_hangs_costs_a_moment(self):
        self.check_with(
            "exec sleep 100\n",
            "import time; begun = time.monotonic()\n"
            + self.FAIL.replace("import amem, time", "import amem, time; amem._why.SECONDS = 0.5")
            + "assert error.why is None\nassert time.monotonic() - begun < 10\n",
        )

    def test_the_tool_is_never_what_lies_in_the_current_directory(self):
        with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as honest:
            for folder in (here, honest):
                for name in ("amem-replay", "libamem_nccl.so", "libm.so.6"):
                    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                        file.write("#!/bin/sh\necho \"$0 [$PATH] [$LD_LIBRARY_PATH] [$LD_PRELOAD]\"; exit 3\n")
                    os.chmod(file.name, 0o700)
            self.check(
                """
import amem, amem.journal, subprocess, sys
here, honest = os.environ["HERE"], os.environ["HONEST"]
os.chdir(here)
def found(path, tool=""):
    os.environ.update(PATH=path, LD_LIBRARY_PATH=":/opt/lib:lib:", AMEM_REPLAY=tool, LD_PRELOAD="libm.so.6")
    return amem._why.find("libamem_nccl.so")
built = os.path.normpath(os.path.join(os.path.dirname(amem.__file__), "../../../build/bin/amem-replay"))
for path in ("", ":", ".", "bin::", "::./"):
    assert found(path) == (built if os.access(built, os.X_OK) else None), found(path)
    assert found(path, "amem-replay") is None, found(path, "amem-replay")
told = honest + "/amem-replay [" + honest + "] [/opt/lib] []"
assert found(":" + honest + ":.", "amem-replay") == honest + "/amem-replay"
assert amem.journal.tool() == honest + "/amem-replay"
assert amem._why.first_line("nobody; amem-replay why /j", "libamem_nccl.so") == told
assert amem.journal._run([amem.journal.tool()]).communicate()[0].decode().strip() == told
assert found("", "./amem-replay") is None, "it is one of where the job began"
amem._why._BEGAN_IN = here
assert found("", "./amem-replay") == here + "/./amem-replay"
for none in ("./.", "./amem-replay.gone", honest):
    assert found(honest, none) is None and "AMEM_REPLAY is " + none in amem._why.not_found(), none
amem._library._mapped = lambda match: None
os.environ.pop("AMEM_LIBRARY")
real = os.path.isfile
os.path.isfile = lambda path: not os.path.isabs(path) and real(path)
assert amem._library.find() == "libamem_nccl.so" and amem._library.path() == "", amem._library.path()
import amem._command
assert amem._command.run(["true"]) == 2
""",
                HERE=here, HONEST=honest)

    def test_errors_of_other_calls_have_none(self):
        self.check_with(
            "touch \"$0.ran\"; echo line; exit 3\n",
            """
load_nccl()
allocate()
warnings.simplefilter("ignore")
import amem
try:
    amem.pause()
    raise SystemExit("pause must raise")
except amem.AmemError as error:
    assert error.why is None and "too late" in str(error), error
assert not os.path.exists(os.environ["AMEM_REPLAY"] + ".ran")
""",
        )


if __name__ == "__main__":
    unittest.main()
