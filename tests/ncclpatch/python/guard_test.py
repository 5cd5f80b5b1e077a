"""`amem run --guard`: what a signal does to a job that runs, is paused from outside, or is frozen. On the stand-ins for NCCL, driver and NVML; on
a GPU with GUARD_NCCL=PATH of a stock libnccl.so.2, GUARD_MOMENTS=20."""
import atexit
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../ncclpatch/python"))
PLACE = tempfile.mkdtemp(prefix="amem-gt-", dir="/tmp")
atexit.register(shutil.rmtree, PLACE, True)
NCCL = os.environ.get("GUARD_NCCL", "libnccl.so.2")
ON_A_GPU = NCCL != "libnccl.so.2"
MOMENTS = int(os.environ.get("GUARD_MOMENTS", 20 if os.environ.get("AMEM_NIGHTLY") == "1" else 6))
REPLAY = os.environ.get("TOOL_FOR_GPUS") or os.environ["AMEM_REPLAY"]
SECONDS = 40

# Trains until it is told to end, and ends in order: with one more all-reduce, whose result it compares.
JOB = """
import ctypes, os, signal, sys, time
from amem._jobs import rank_process
import amem
class Job(rank_process.Job):
    def __init__(self):
        self.rank, self.size, self.communicators = 0, 1, []
        self.driver = rank_process.Driver(0)
        self.nccl = ctypes.CDLL(sys.argv[2])
        self.nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, rank_process.UniqueId, ctypes.c_int]
    def barrier(self, value=None):
        return [value]
job, told = Job(), []
communicator = job.make_communicator()
send, receive = job.driver.allocate(4096).value, job.driver.allocate(4096).value
data = bytes(ctypes.c_float(3)) * 1024
def step():
    job.driver.write(send, data)
    job.driver.fill(receive, 255, 4096)
    job.check("ncclAllReduce", ctypes.c_void_p(send), ctypes.c_void_p(receive), ctypes.c_size_t(1024), 7, 0, communicator, None)
    job.driver.synchronize()
    assert job.driver.read(receive, 4096) == data
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda found, _frame: told.append(found))
signal.signal(signal.SIGUSR1, lambda _found, _frame: print("usr1", flush=True))
with open(sys.argv[1] + ".pid", "w") as file:
    file.write(str(os.getpid()))
steps = 0
while not told:
    step()
    amem.safepoint()
    steps += 1
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(steps))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.01)
step()
print("ended in order after %d" % told[0], flush=True)
sys.exit(7)
"""


@unittest.skipUnless(ON_A_GPU or os.path.exists(os.environ.get("STAND_IN_NVML", "") + "/libnvidia-ml.so.1"), "the stand-in for NVML is not built")
class GuardedJob(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=PLACE)
        self.environment = {**os.environ, "PYTHONPATH": PACKAGE, "AMEM_JOURNAL_DIR": self.folder + "/j", "AMEM_SOCKET_DIR": self.folder + "/s",
                            "AMEM_REPLAY": REPLAY}
        if not ON_A_GPU:
            self.environment.update({"AMEM_SIM_WORLD": self.folder + "/world", "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"] + ":" + os.environ["STAND_IN_NVML"]})
        self.process = None

    def tearDown(self):
        with contextlib.suppress(OSError, ValueError), open(self.folder + "/steps.pid", encoding="utf-8") as file:
            pid = int(file.read())
            with open("/proc/%d/cmdline" % pid, "rb") as command:
                if self.folder.encode() in command.read():  # it has not ended
                    subprocess.run([REPLAY, "thaw"], env=self.environment, capture_output=True, check=False)
                    os.kill(pid, signal.SIGKILL)
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def start(self, *options, before=(), how=("-m", "amem")):
        self.popen([*how, "run", *options, "--", *before, sys.executable, "-c", JOB, self.folder + "/steps", NCCL])
        self.await_steps(3)

    def popen(self, words, under=(), **how):
        self.process = subprocess.Popen([*under, sys.executable, *words], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, **how)

    def rule(self, text):
        """What amem-replay does first for the guard, in the language of sh: its words are $1 and so on."""
        program = self.folder + "/replay"
        for path, lines in (self.folder + "/rules", text), (program, '#!/bin/sh\n. "%s/rules"\nexec "%s" "$@"\n' % (self.folder, REPLAY)):
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(lines + "\n")
            os.chmod(path + ".new", 0o755)
            os.rename(path + ".new", path)
        self.environment["AMEM_REPLAY"] = program

    def stays(self, seconds):
        with self.assertRaises(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def steps(self):
        with contextlib.suppress(OSError), open(self.folder + "/steps", encoding="utf-8") as file:
            return int(file.read())
        return 0

    def await_steps(self, count):
        end = time.monotonic() + SECONDS
        while self.steps() < count and time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.01)
        self.assertGreaterEqual(self.steps(), count, self.process.communicate()[1] if self.process.poll() is not None else "it does not train")

    def tool(self, *words):
        done = subprocess.run([REPLAY, *words], env=self.environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def ends(self, number):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err

    def ends_in_order(self, number=signal.SIGTERM, before=""):
        code, out, err = self.ends(number)
        self.assertEqual((code, out), (7, before + "ended in order after %d\n" % number), err)
        return err


class Guarded(GuardedJob):
    def test_a_running_job_gets_it_at_once(self):
        self.start("--guard")
        self.assertEqual(self.ends_in_order(signal.SIGINT), "")

    def test_a_frozen_job_is_thawed_first(self):
        self.start("--guard")
        self.tool("freeze")
        self.assertIn("SIGTERM waits until the job is back on its GPUs", self.ends_in_order())

    def test_a_paused_job_is_resumed_first(self):
        self.start("--guard")
        self.tool("pause")
        self.ends_in_order()

    @unittest.skipIf(ON_A_GPU, "it takes a whole GPU of the simulator")
    def test_a_frozen_job_whose_gpu_is_taken_waits_for_room_and_gets_no_signal(self):
        self.start("--guard")
        self.tool("freeze")
        code = "from amem._jobs import rank_process; rank_process.Driver(0).allocate(16384 << 20); print('up', flush=True); input()"
        other = subprocess.Popen([sys.executable, "-c", code], env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.assertEqual(other.stdout.readline(), "up\n")
            self.process.send_signal(signal.SIGTERM)
            with self.assertRaises(subprocess.TimeoutExpired):
                self.process.communicate(timeout=6)  # in which the thaw is tried more than once
        finally:
            other.communicate("\n")
        out, err = self.process.communicate(timeout=SECONDS)
        self.assertEqual((self.process.returncode, out), (7, "ended in order after 15\n"), err)
        self.assertIn("the thaw failed: ", err)

    def test_a_job_is_parked_before_it_gets_the_signal_and_stays_so(self):
        self.start("--park-on", "TERM,USR1")
        self.process.send_signal(signal.SIGTERM)
        self.until_parked()
        steps = self.steps()
        self.process.send_signal(signal.SIGTERM)  # what is parked is not resumed for another one
        self.stays(3)
        self.assertEqual(self.steps(), steps)
        self.assertIn('"parked":true', self.looks())
        self.tool("resume")
        out, err = self.process.communicate(timeout=SECONDS)
        self.assertEqual((self.process.returncode, out), (7, "ended in order after 15\n"), err)
        self.assertIn("the job is parked, and gets SIGTERM", err)

    def test_a_signal_of_the_programs_own_may_find_it_parked_and_others_do_not(self):
        self.start("--park-on", "USR1")
        self.process.send_signal(signal.SIGUSR1)
        self.until_parked()
        self.tool("resume")
        self.await_steps(self.steps() + 3)
        self.assertNotIn("cannot be parked", self.ends_in_order(before="usr1\n"))

    def test_a_job_that_cannot_be_parked_gets_the_signal_as_it_is(self):
        self.rule("case $1 in park) exit 3;; esac")
        self.start("--park-on", "TERM")
        self.assertIn("cannot be parked (amem park ended with 3), and gets SIGTERM as it is", self.ends_in_order())

    def test_a_park_that_meets_another_request_is_asked_for_again(self):
        """As where each task of a job has a guard of its own, and all get the signal."""
        self.rule('case $1 in park) [ -e "%s/met" ] || { touch "%s/met"; echo "amem-replay: another request is under way, by pid 1" >&2; exit 2; };; esac' % (self.folder, self.folder))
        self.start("--park-on", "TERM")
        self.process.send_signal(signal.SIGTERM)
        self.until_parked()
        self.tool("resume")
        self.assertIn("the job is parked, and gets SIGTERM", self.process.communicate(timeout=SECONDS)[1])

    def test_an_ending_signal_that_is_not_named_lets_a_parked_job_go_on_first(self):
        self.start("--park-on", "USR1")
        self.process.send_signal(signal.SIGUSR1)
        self.until_parked()
        self.assertNotIn("cannot be parked", self.ends_in_order(before="usr1\n"))

    def test_a_command_without_ranks_is_not_said_to_be_parked(self):
        self.popen(["-m", "amem", "run", "--park-on", "TERM", "--", "sleep", "60"])
        time.sleep(1)
        self.process.send_signal(signal.SIGTERM)
        err = self.process.communicate(timeout=SECONDS)[1]
        self.assertIn("no rank was found that could be parked; the command gets SIGTERM", err)
        self.assertNotIn("is parked", err)

    def test_what_a_job_cannot_be_parked_on_is_said(self):
        ran = subprocess.run([sys.executable, "-m", "amem", "run", "--park-on", "KILL", "--", "true"], env=self.environment, capture_output=True, text=True, check=False)
        self.assertEqual((ran.returncode, ran.stderr), (1, "amem: run: --park-on: KILL is none of TERM, INT, HUP, QUIT, USR1, USR2\n"))

    def looks(self):
        return "".join(subprocess.run([REPLAY, "ls", "--live", "--json"], env=self.environment, capture_output=True, text=True, check=False).stdout.split())

    def until_parked(self):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and '"parked":true' not in self.looks():
            time.sleep(0.05)
        self.assertIn('"parked":true', self.looks())

    def test_a_job_with_journals_of_its_own_is_found(self):
        folder = self.folder + "/own"
        self.start("--guard", before=["env", "AMEM_JOURNAL_DIR=" + folder])
        self.environment["AMEM_JOURNAL_DIR"] = folder  # of the tool
        self.tool("freeze")
        self.assertIn("waits until the job is back", self.ends_in_order())

    def test_a_signal_of_the_programs_own_resumes_nothing(self):
        self.start("--guard")
        self.tool("pause")
        self.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 5
        while time.monotonic() < end and '"paused"' in self.phases():
            time.sleep(0.5)
        self.assertIn('"paused"', self.phases())
        self.ends_in_order(before="usr1\n")

    def phases(self):
        done = subprocess.run([REPLAY, "ls", "--live", "--json"], env=self.environment, capture_output=True, text=True, check=False)
        return "".join(line for line in done.stdout.splitlines() if '"phase"' in line)

    def test_descriptors_of_the_caller_are_the_commands(self):
        reading, writing = os.pipe()
        subprocess.run([sys.executable, "-m", "amem", "run", "--guard", "--", "sh", "-c", "echo through >&%d" % writing], env=self.environment, pass_fds=[writing], check=True)
        os.close(writing)
        with open(reading, encoding="utf-8") as file:
            self.assertEqual(file.read(), "through\n")

    def test_at_any_moment_of_a_freeze_and_of_a_pause(self):
        waited = 0
        for number in range(MOMENTS):
            seed = number + 1
            with self.subTest(seed=seed):
                self.setUp()
                self.start("--guard")
                tool = subprocess.Popen([REPLAY, ("freeze", "pause")[number % 2]], env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                time.sleep(random.Random(seed).uniform(0, 4 if ON_A_GPU else 0.6))
                if number % 4 >= 2:
                    tool.kill()  # the tool dies, too
                waited += "waits until the job is back" in self.ends_in_order()
                tool.wait(timeout=SECONDS)
        self.assertGreater(waited, 0, "no signal came while a job was frozen or paused")

    def test_without_the_guard_a_frozen_job_does_not_end(self):
        self.start()
        self.tool("freeze")
        self.process.send_signal(signal.SIGTERM)
        with self.assertRaises(subprocess.TimeoutExpired):
            self.process.communicate(timeout=3)  # and the driver's calls of its handler wait
        self.tool("thaw")
        out, _ = self.process.communicate(timeout=SECONDS)
        self.assertEqual(out, "ended in order after 15\n")

    def test_a_job_that_is_paused_or_frozen_just_as_it_gets_the_signal_is_brought_back(self):
        for command in "pause", "freeze":
            with self.subTest(command=command):
                self.setUp()
                self.rule('case $1 in ls) "%s" "$@"; code=$?; mkdir "%s/once" && "%s" %s >/dev/null; exit $code;; esac' % (REPLAY, self.folder, REPLAY, command))
                self.start("--guard")
                self.assertIn("it has got SIGTERM", self.ends_in_order())

    def test_a_signal_of_the_programs_own_does_not_hold_an_ending_one(self):
        for number in signal.SIGCONT, signal.SIGUSR1:
            with self.subTest(number=number):
                self.setUp()
                self.start("--guard")
                self.tool("freeze")
                self.process.send_signal(number)
                self.stays(2)
                self.process.send_signal(signal.SIGTERM)
                out, err = self.process.communicate(timeout=SECONDS)
                self.assertEqual((self.process.returncode, out.replace("usr1\n", "")), (7, "ended in order after 15\n"), err)

    def test_ctrl_z_stops_the_job_with_it(self):
        self.start("--guard")
        with open(self.folder + "/steps.pid", encoding="utf-8") as file:
            pid = int(file.read())
        self.process.send_signal(signal.SIGTSTP)
        for one in self.process.pid, pid:
            self.assertTrue(self.comes_to(one, "T"))
        self.process.send_signal(signal.SIGCONT)
        self.await_steps(self.steps() + 3)
        self.ends_in_order()

    @staticmethod
    def comes_to(pid, state):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with open("/proc/%d/stat" % pid, encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == state:
                    return True
            time.sleep(0.05)
        return False

    def test_a_caller_that_ignores_its_children_takes_no_exit_code(self):
        self.popen(["-m", "amem", "run", "--guard", "--", "sh", "-c", "exit 5"], preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assertEqual(self.process.wait(SECONDS), 5)

    def test_exit_codes_are_the_commands(self):
        for command, code in (["sh", "-c", "exit 5"], 5), (["sh", "-c", "kill -9 $$"], 137), (["/nowhere/command"], 127):
            done = subprocess.run([sys.executable, "-m", "amem", "run", "--guard", "--", *command], env=self.environment, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, code, done.stderr)


class Answers(unittest.TestCase):
    def test_only_what_a_request_stops_is_brought_back_from_an_ending_job(self):
        sys.path.insert(0, PACKAGE)
        guard = __import__("amem._guard", fromlist=["is_paused_from_outside"])
        for phase, by_program, held in (("running", False, False), ("paused", False, True), ("paused", True, False), ("held", False, True), ("arrived", False, True),
                                        ("resuming", False, False), ("silent", False, False)):
            ranks = [{"phase": "running", "paused_by_program": False}, {"phase": phase, "paused_by_program": by_program}]
            self.assertEqual(guard.is_paused_from_outside((0, json.dumps({"ranks": ranks})), False), held, (phase, by_program))
        parked = 0, json.dumps({"ranks": [{"phase": "held", "paused_by_program": False, "parked": True}]})
        for parks in (False, True):  # a park of the guard's own is not undone
            self.assertEqual(guard.is_paused_from_outside(parked, parks), not parks)
            self.assertEqual(guard.all_run(parked, parks), parks)
        for nothing in (None, (3, "{}"), (0, "no JSON"), (0, "[]")):
            self.assertFalse(guard.is_paused_from_outside(nothing, False))
            self.assertFalse(guard.all_run(nothing, True))


class Decisions(unittest.TestCase):
    """What the guard makes of answers, on a clock of its own."""

    def setUp(self):
        sys.path.insert(0, PACKAGE)
        self.guard, self.now, self.said = __import__("amem._guard", fromlist=["Guard"]), 0, []
        self.made = made = self.guard.Guard.__new__(self.guard.Guard)
        made.pid, made._code, made._park_on, made._ends_by, made._said, made._put_off, made._waited_for, made._ranks = 1, None, frozenset(), {}, {}, None, {}, {}
        made._pending = [types.SimpleNamespace(si_signo=signal.SIGTERM, si_code=0)]
        made._to_command = lambda _send, number: (self.said.append("sent %d at %d" % (number, self.now)), setattr(made, "_code", 0))
        made._wait_for = lambda seconds: setattr(self, "now", self.now + seconds)
        made._bring_back = lambda state, _paused: self.said.append("brings back") if state == self.guard.PAUSED else None
        for name, value in ("time", types.SimpleNamespace(monotonic=self.passes)), ("say", self.said.append):
            patched = mock.patch.object(self.guard, name, value)
            patched.start()
            self.addCleanup(patched.stop)

    def passes(self):
        """No two readings are the same."""
        self.now += 1e-6
        return self.now

    def states(self, *states):
        """The job is found in, one after the other, and the last two again and again."""
        found = itertools.chain(states, itertools.cycle(states[-2:]))
        self.made._state = lambda _ending: (next(found), "/rank") if self.made._code is None else (self.guard.RUNS, None)

    def sent(self):
        """When the command has got its signal."""
        self.assertEqual(self.made.run(), 0)
        return int(next(line for line in self.said if line.startswith("sent ")).split()[-1])

    def test_patience_does_not_begin_anew_where_one_doubt_follows_another(self):
        guard = self.guard
        self.states(guard.PAUSED, guard.UNKNOWN)
        self.assertEqual(self.sent(), 20)
        self.assertIn("brings back", self.said)

    def test_a_job_that_was_not_known_to_be_paused_is_resumed_before_it_gets_its_signal(self):
        guard = self.guard
        self.states(*[guard.UNKNOWN] * 30, guard.PAUSED, guard.RUNS, guard.RUNS)
        self.assertEqual(self.sent(), 31)
        self.assertIn("brings back", self.said)

    def test_a_job_that_cannot_be_asked_after_a_park_is_not_taken_for_one_that_runs(self):
        guard = self.guard
        self.made._park_on = {signal.SIGTERM}
        self.made._park = lambda _names: (False, "not parked")
        self.states(guard.RUNS, guard.UNKNOWN, guard.UNKNOWN)
        self.assertEqual(self.sent(), 60)
        self.assertEqual(self.said[-2:], ["not parked", "sent 15 at 60"])

    def test_a_job_that_cannot_be_asked_after_each_park_gets_its_signal_in_the_end(self):
        guard = self.guard
        self.made._park_on = {signal.SIGTERM}
        self.made._park = lambda _names: (setattr(self, "now", self.now + 7), (False, "not parked"))[1]
        self.states(guard.RUNS, guard.UNKNOWN)
        self.assertEqual(self.sent(), 70)

    def test_a_tool_that_cannot_be_started_leaves_no_descriptor_each_time_it_is_tried(self):
        self.made._replay = PLACE + "/there is none"
        open_before = os.listdir("/proc/self/fd")
        for _ in range(3):
            self.assertEqual(self.made._ask(1, ["ls"], ["ls"]), [None, None])
        self.assertEqual(os.listdir("/proc/self/fd"), open_before)

    def test_a_freeze_begins_the_patience_with_such_a_job_anew(self):
        guard = self.guard
        self.made._park_on = {signal.SIGTERM}
        self.made._park = lambda _names: (setattr(self, "now", self.now + 7), (False, "not parked"))[1]
        self.states(guard.RUNS, guard.UNKNOWN, *[guard.FROZEN] * 100, guard.RUNS, guard.UNKNOWN)
        self.assertGreaterEqual(self.sent(), 160)

    def park(self, answer, parked=False):
        """What is said with the signal where the tool answers so to a park. `parked`: what it then says of the rank; None: nothing."""
        def ask(_seconds, *commands):
            if commands[0][0] == "park":
                return [answer]
            return [parked if parked is None else (0, json.dumps({"ranks": [{"phase": "paused", "parked": parked}]}), "")]
        self.made._ask, self.made._ranks, self.made._find_ranks = ask, {"/rank": 1}, lambda: True
        return self.made._park("SIGTERM")

    def test_a_park_that_was_cut_short_is_asked_about(self):
        self.assertEqual(self.park(None, True), (True, "the job is parked, and gets SIGTERM"))
        for parked in (False, None):
            self.assertEqual(self.park(None, parked), (False, "it is not known whether the job is parked (amem park did not answer); it gets SIGTERM"))

    def test_a_refusal_that_lasts_is_said_at_once_and_why(self):
        self.assertEqual(self.park((2, "", "amem-replay: no\namem-replay: too old\n"))[1],
                         "the job cannot be parked (amem park ended with 2: amem-replay: too old), and gets SIGTERM as it is")
        self.assertLess(self.now, 1)
        text = "amem-replay: rank 0: another request is under way, by pid 7"
        self.assertIn(text, self.park((2, "", text))[1])
        self.assertGreaterEqual(self.now, self.guard.PARK_SECONDS)


class Processes(unittest.TestCase):
    """Which processes have ranks."""

    def setUp(self):
        sys.path.insert(0, PACKAGE)
        self.guard = __import__("amem._guard", fromlist=["journals_of"])
        self.journal = tempfile.mkdtemp(dir=PLACE) + "/%016x" % 7
        os.mkdir(self.journal)
        with open(self.journal + "/tail", "w", encoding="utf-8"):
            self.assertEqual(self.guard.journals_of(os.getpid()), ("", {self.journal}))

    def test_who_reads_a_journal_is_no_rank(self):
        with open(self.journal + "/tail", encoding="utf-8"):
            self.assertEqual(self.guard.journals_of(os.getpid()), ("", set()))

    def test_a_rank_whose_first_thread_has_ended_is_one(self):
        code = "import ctypes, sys, threading, time; file = open(sys.argv[1], 'r+'); threading.Thread(target=time.sleep, args=(60,)).start(); ctypes.CDLL(None).syscall(60, 0)"
        process = subprocess.Popen([sys.executable, "-c", code, self.journal + "/tail"])  # pylint: disable=consider-using-with
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertTrue(Guarded.comes_to(process.pid, "Z"))
        self.assertEqual(self.guard.journals_of(process.pid), ("", {self.journal}))
        process.kill()
        process.wait()
        self.assertEqual(self.guard.journals_of(process.pid), ("", set()))

    def family(self, lives, groups=None):
        lives = {str(pid): self.guard.Life(*life) for pid, life in lives.items()}
        with mock.patch.object(self.guard, "life_of", lives.get), mock.patch.object(self.guard.os, "listdir", lambda _path: list(lives)), \
             mock.patch.object(self.guard, "control_groups", (groups or {}).get):
            return self.guard.below(10)

    def test_what_a_hidden_process_may_have_started_is_doubted(self):
        lives = {1: ("S", 0, 0), 10: ("S", 1, 5), 11: ("S", 10, 6), 14: ("S", 1, 6)}
        self.assertEqual(self.family(lives), ({11}, set(), True))
        # 12 is hidden: /proc does not list it, or lets nobody read it. It has started 13, which has started 15; 16 was there before.
        hidden = {**lives, 13: ("S", 12, 7), 15: ("S", 13, 8), 16: ("S", 12, 4)}
        self.assertEqual(self.family(hidden), ({11}, {13, 15}, True))
        self.assertEqual(self.family({**hidden, 12: (self.guard.HIDDEN, 0, 0)}), ({11}, {13, 15}, True))
        # Another task of the same user, whose parent is hidden as well, is none of this command's.
        for own, its, doubted in (("0::/step_0/task_0", "0::/step_0/task_1", False), ("0::/step_0/task_0", "0::/step_0/task_0/more", True), ("0::/", "0::/user", True),
                                  ("0::/step_0/task_1", "0::/step_0/task_10", False)):
            self.assertEqual(self.family(hidden, {"self": [own], 13: [its]}), ({11}, {13, 15} if doubted else set(), True), its)

    def test_a_rank_that_is_doubted_makes_the_job_unknown(self):
        made = self.guard.Guard.__new__(self.guard.Guard)
        made._waited_for, made._ranks, made._said = {}, {}, {}
        said = []
        with mock.patch.object(self.guard, "say", said.append), open(self.journal + "/tail", "r+", encoding="utf-8"):
            for doubted, known in ({os.getpid()}, False), (set(), True):
                with mock.patch.object(self.guard, "below", lambda _pid, doubted=doubted: (set(), doubted, True)):
                    self.assertEqual((made._find_ranks(), made._ranks), (known, {}))
        self.assertIn("a parent of it is hidden", said[0])

    def test_a_tool_of_the_guards_own_is_no_rank(self):
        made = self.guard.Guard.__new__(self.guard.Guard)
        made._waited_for, made._ranks, made._said = {os.getpid(): None}, {}, {}
        with mock.patch.object(self.guard, "below", lambda _pid: ({os.getpid()}, set(), True)), open(self.journal + "/tail", "r+", encoding="utf-8"):
            self.assertEqual((made._find_ranks(), made._ranks), (True, {}))


class TheJobForGpus(unittest.TestCase):
    """tests/gpu/signals_job.py, which does on a GPU what the tests above do here."""

    def setUp(self):
        sys.path.insert(0, os.path.join(PACKAGE, "../../tests/gpu"))
        self.job = __import__("signals_job")

    def test_what_is_left_or_was_not_shown_is_a_failure(self):
        trial = {"state": "freeze", "ending": "SIGINT", "seed": 1, "ok": True, "waited": True}
        good = {"trials": [trial], "left_out": 0, "left": {"grown_mib": [63], "processes": 0}, "xids": {"seen": [], "events": "cannot be seen: it answered 3"}}
        self.assertEqual(self.job.judged(good)["wrong"], [])
        for key, value in (("trials", [{**trial, "ok": False}, trial]), ("trials", [{**trial, "waited": False}]), ("trials", []), ("left_out", 2),
                           ("left", {"grown_mib": [64], "processes": 0}), ("left", {"grown_mib": [], "processes": 1}), ("xids", {"seen": [{"source": "kernel log", "xid": 109}]})):
            report = self.job.judged({**good, key: value})
            self.assertFalse(report["ok"], (key, value))
            self.assertEqual(len(report["wrong"]), 1, report["wrong"])

    def test_an_xid_is_seen_and_a_source_that_sees_none_says_so(self):
        answers = [(0, 109), (10, 0), (15, 0)]

        def wait(_events, event, _milliseconds):
            result, event._obj.data = answers.pop(0)
            return result

        xids = self.job.Xids()
        xids.sources["events"] = "watched"
        xids._await_events(types.SimpleNamespace(nvmlEventSetWait_v2=wait), None)
        found = xids.end()
        self.assertEqual((found["seen"], found["events"]), ([{"source": "events", "xid": 109}], "cannot be seen: nvmlEventSetWait answered 15"))

    @unittest.skipUnless(os.environ.get("AMEM_NIGHTLY") == "1", "it takes 12 s")
    def test_it_runs_on_the_stand_ins(self):
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": PACKAGE, "AMEM_REPLAY": REPLAY,
                       "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"] + ":" + os.environ["STAND_IN_NVML"]}
        done = subprocess.run([sys.executable, self.job.__file__, "--moments", "1", "--at-once", "2", "--mib", "8"], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual({kind: one["ok"] for kind, one in json.loads(done.stdout.splitlines()[-1])["counts"].items()},
                         {"%s, %s" % kind: 1 for kind in itertools.product(self.job.LONGEST, self.job.ENDINGS)})


if __name__ == "__main__":
    unittest.main()
