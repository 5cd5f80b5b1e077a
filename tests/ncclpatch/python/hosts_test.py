"""Pauses that all hosts agree on through a store: processes with runtime directories of their own are the hosts, on the stand-in driver.

Each rank is a process that does what its lines of input say, so that a test decides who comes, who fails and who dies. The store is a
small one over a Unix socket, so that no PyTorch is needed; where there is one, its TCPStore and FileStore serve the same tests.
"""
import concurrent.futures
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import guards  # noqa: E402
import hosts_bench  # noqa: E402
import store_for_tests  # noqa: E402
import amem  # noqa: E402

try:
    import torch.distributed as distributed
except ImportError:
    distributed = None

RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hosts_rank.py")
STAND_INS = os.environ["LD_LIBRARY_PATH"].split(":")[0]
TIMEOUT = 6
NIGHTLY = os.environ.get("AMEM_NIGHTLY") == "1"


class Rank:
    """One process. `ask` sends a command and returns at once; `answer` waits for what it printed."""

    def __init__(self, rank, size, host, folder, store, per_host, timeout_ms, **more):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AMEM_") or k == "AMEM_LIBRARY"}
        here = os.path.join(folder, host)
        environment.update(AMEM_JOURNAL_DIR=here + "/journal", AMEM_SOCKET_DIR=here + "/s", AMEM_USER_MEMORY="release",
                           AMEM_TIMEOUT_MS=str(timeout_ms), AMEM_LOG="off", RANK=str(rank), AMEM_SIM_WORLD=here + "/world",
                           STAND_IN_RANKS_PER_HOST=str(per_host), **{"RANKS_WITH_GPU": str(size), **more})
        os.makedirs(here + "/s", exist_ok=True)
        environment.update(STAND_IN_NCCL=STAND_INS + "/libnccl.so.2", LD_LIBRARY_PATH=folder)  # PyTorch must find its own NCCL
        if not os.path.exists(folder + "/libcuda.so.1"):
            os.symlink(STAND_INS + "/libcuda.so.1", folder + "/libcuda.so.1")
        self.rank, self.host = rank, host
        lean = ["-S"] if store.startswith("plain:") else []  # without PyTorch no installed package is needed: half the start-up
        self.process = subprocess.Popen([sys.executable, "-B", *lean, RANK, store, str(rank), str(size), host], env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command, *arguments):
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def do(self, command, *arguments):
        self.ask(command, *arguments)
        return self.answer()

    def kill(self):
        self.process.kill()

    def end(self):
        self.process.kill()
        self.process.communicate()


def start(hosts, ranks, folder, store, timeout_ms, more=None, **last):
    """`ranks` processes on each of `hosts` hosts; all of them have made a communicator, whose memory is shared inside a host. more: the
    environment of all, and last: of the last one."""
    size = hosts * ranks
    all_ranks = [Rank(rank, size, "host-" + "abcdefgh"[rank // ranks], folder, store, ranks, timeout_ms,
                      **({"RANKS_WITH_GPU": str(size - 1)} if last else {}), **(more or {}), **(last if rank == size - 1 else {})) for rank in range(size)]
    for rank in all_ranks:
        assert rank.answer() == "ready", rank.rank
    return all_ranks


class Job(unittest.TestCase):
    """`hosts` hosts with `ranks` processes each. The tests of a class share the processes, each test with a store of its own."""

    hosts, ranks = 2, 1
    timeout_ms = 4000  # how long a rank waits for those of its host
    shared = True
    environment = {}  # of all
    all = ()  # of the class, between its tests

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="amem-hosts-", dir="/tmp")
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.store = self.make_store()
        if not self.join():
            self.start_all()

    def join(self):
        """Whether the processes of the tests before are all there and can be had for this one."""
        cls = type(self)
        if not (cls.all and self.shared):
            return False
        try:
            return set(self.all_do("join", self.store, ranks=cls.all)) == {"ok"}
        except (OSError, ValueError):  # one has been killed, or its end is known already
            return False

    def start_all(self):
        cls = type(self)
        cls.end_all()
        cls.place = tempfile.mkdtemp(prefix="amem-hosts-", dir="/tmp")
        cls.all = start(self.hosts, self.ranks, cls.place, self.store, self.timeout_ms, self.environment)

    @classmethod
    def end_all(cls):
        for rank in cls.all:
            rank.end()
        if cls.all:
            shutil.rmtree(cls.place, True)
        cls.all = ()

    @classmethod
    def tearDownClass(cls):
        cls.end_all()

    def make_store(self):
        self.server = store_for_tests.Server(self.folder + "/store")
        self.addCleanup(self.server.close)
        return "plain:" + self.folder + "/store"

    def all_do(self, command, *arguments, ranks=None):
        ranks = self.all if ranks is None else ranks
        for rank in ranks:
            rank.ask(command, *arguments)
        return [rank.answer() for rank in ranks]

    def all_are(self, state, ranks=None):
        self.assertEqual({tuple(answer) for answer in self.all_do("state", ranks=ranks)}, {(state, True)})


class Agreement(Job):
    def test_all_pause_and_all_resume(self):
        for _ in range(3):
            self.assertEqual(self.all_do("pause", TIMEOUT), ["ok", "ok"])
            self.all_are("paused")
            self.assertEqual(self.all_do("resume", TIMEOUT), ["ok", "ok"])
            self.all_are("resident")

    def test_a_host_that_fails_makes_all_undo_and_is_named(self):
        self.all[1].do("fail_next_pause")
        answers = self.all_do("pause", TIMEOUT)
        for answer in answers:
            self.assertIn("rank 1 on host-b failed", answer)
            self.assertIn("planted", answer)
        self.all_are("resident")
        self.assertEqual(self.all_do("pause", TIMEOUT), ["ok", "ok"])
        self.all_are("paused")

    def test_a_failed_resume_leaves_all_paused(self):
        self.all_do("pause", TIMEOUT)
        self.all[0].do("fail_next_resume")
        for answer in self.all_do("resume", TIMEOUT):
            self.assertIn("rank 0 on host-a failed", answer)
        self.all_are("paused")
        self.assertEqual(self.all_do("resume", TIMEOUT), ["ok", "ok"])
        self.all_are("resident")

    def test_a_host_that_does_not_come_is_named_within_the_deadline(self):
        began = time.monotonic()
        answer = self.all[0].do("pause", 1)
        self.assertLess(time.monotonic() - began, TIMEOUT)
        self.assertIn("rank 1 did not come within 1 s", answer)
        self.all_are("resident")

    def test_a_store_that_falls_silent_ends_the_pause_in_time_and_nothing_stays_paused(self):
        """Its host is cut off: connections stay open, and no answer comes."""
        if not hasattr(self, "server"):
            self.skipTest("PyTorch's stores cannot be told to fall silent")
        self.addCleanup(self.server.answers.set)
        for silent_after in (0, 0.5):
            with self.subTest(silent_after=silent_after):
                began = time.monotonic()
                self.all[0].ask("pause", 1.5)
                time.sleep(silent_after)
                self.server.answers.clear()
                watchdog = threading.Timer(20, self.server.answers.set)  # so that this test ends without what it tests
                watchdog.start()
                self.assertRegex(self.all[0].answer(), "the store of the process group does not answer: .*no answer to|earlier question")
                self.assertLess(time.monotonic() - began, 5)
                watchdog.cancel()
                self.assertEqual(self.all[0].do("state"), ["resident", True])
                self.server.answers.set()
                self.assertIn(["ok", "ok"], [self.all_do("pause", TIMEOUT) for _ in range(3)], "it answers again")
                self.all_do("resume", TIMEOUT)

    def test_a_host_that_came_before_is_named_with_its_host(self):
        self.all_do("pause", TIMEOUT)
        self.all_do("resume", TIMEOUT)
        self.assertIn("rank 1 on host-b did not come", self.all[0].do("pause", 1))

    def test_who_comes_late_finds_that_all_gave_up_and_a_second_try_works(self):
        self.all[0].do("pause", 1)
        began = time.monotonic()
        answer = self.all[1].do("pause", TIMEOUT)
        self.assertLess(time.monotonic() - began, TIMEOUT / 2)
        self.assertIn("had given up already", answer)
        self.all_are("resident")
        self.assertEqual(self.all_do("pause", TIMEOUT), ["ok", "ok"])
        self.all_are("paused")

    def test_who_leaves_its_block_when_the_others_have_given_up_resumes_with_them_in_a_second_try(self):
        self.all[1].ask("with_paused", TIMEOUT, 2)
        self.assertIn("rank 1 on host-b did not come", self.all[0].do("with_paused", 0.5))
        self.assertIn("had given up already", self.all[1].answer())
        self.all_are("paused")
        self.assertEqual(self.all_do("resume", TIMEOUT), ["ok", "ok"])
        self.all_are("resident")

    def test_who_is_late_twice_in_a_row_meets_the_others_all_the_same(self):
        self.all[0].do("pause", 1)
        self.assertIn("had given up already", self.all[1].do("pause", TIMEOUT))
        self.all[0].do("pause", 1)
        self.all[1].ask("pause", TIMEOUT)
        time.sleep(0.2)
        self.assertEqual([self.all[0].do("pause", TIMEOUT), self.all[1].answer()], ["ok", "ok"])
        self.all_are("paused")

    def test_who_is_late_for_failures_twice_waits_for_nobody(self):
        for _ in range(3):
            self.all[0].do("fail_next_pause")
            self.assertIn("rank 0 on host-a failed: planted failure", self.all[0].do("pause", TIMEOUT))
            began = time.monotonic()
            self.assertIn("had given up already", self.all[1].do("pause", TIMEOUT))
            self.assertLess(time.monotonic() - began, TIMEOUT / 2)
        self.assertEqual(self.all_do("pause", TIMEOUT), ["ok", "ok"])

    def test_whose_pause_takes_too_long_undoes_it(self):
        self.all[1].do("slow_next_pause", 2)
        self.all[1].ask("pause", TIMEOUT)
        self.assertIn("did not come within 1 s", self.all[0].do("pause", 1))
        self.assertIn("rank 1 on host-b did not come", self.all[1].answer())
        self.all_are("resident")

    def test_ranks_that_call_different_things_are_told(self):
        self.all[0].ask("pause", TIMEOUT)
        self.all[1].ask("resume", TIMEOUT)
        for answer in (self.all[0].answer(), self.all[1].answer()):
            self.assertIn("rank 1 on host-b called resume of nccl, where rank 0 on host-a called pause of nccl", answer)
        self.all_are("resident")

    def test_a_missing_rank_0_is_named_by_the_others(self):
        self.assertIn("rank 0 did not come", self.all[1].do("pause", 1))
        self.all_are("resident")

    def test_a_wrong_tag_is_told_to_the_others(self):
        self.all[0].ask("pause", TIMEOUT)
        began = time.monotonic()
        self.assertIn("not known", self.all[1].do("pause", TIMEOUT, "no such tag"))
        self.assertIn("rank 1 on host-b failed", self.all[0].answer())
        self.assertLess(time.monotonic() - began, TIMEOUT)
        self.all_are("resident")

    def test_what_was_paused_before_stays_paused_when_the_others_fail(self):
        self.all_do("pause", TIMEOUT)
        self.all[0].do("pause", 1)
        self.all_are("paused")

    def test_a_dead_rank_makes_the_others_undo(self):
        self.all[1].kill()
        self.assertIn("did not come", self.all[0].do("pause", 1))
        self.all_are("resident", self.all[:1])

    def test_keys_do_not_pile_up(self):
        counts, in_vain = [], []
        for _ in range(6):
            self.all_do("pause", TIMEOUT)
            self.all_do("resume", TIMEOUT)
            counts.append(self.all[0].do("keys"))
            in_vain.append(self.server.in_vain if hasattr(self, "server") else 0)
        self.assertEqual(counts[1], counts[-1])
        self.assertEqual(in_vain[-1] - in_vain[-2], in_vain[2] - in_vain[1], "what is gone is not deleted again")

    def test_the_context_manager(self):
        self.assertEqual(self.all_do("with_paused", TIMEOUT), ["paused", "paused"])
        self.all_are("resident")


class IdleFirst(Job):
    """With AMEM_NETWORK=renew nobody's own part of a pause begins before the GPUs of all ranks are idle."""

    ranks = 2
    environment = {"AMEM_NETWORK": "renew"}

    def test_all_wait_for_the_last_one(self):
        for _ in range(2):
            for rank in self.all[:-1]:
                rank.ask("pause_and_say_how", TIMEOUT)
            time.sleep(0.3)
            asked = time.monotonic()
            last = self.all[-1].do("pause_and_say_how", TIMEOUT)
            for began, hosts_idle in [last, *(rank.answer() for rank in self.all[:-1])]:
                self.assertTrue(hosts_idle)
                self.assertGreater(began, asked)
            self.all_are("paused")
            self.assertEqual(self.all_do("resume", TIMEOUT), ["ok"] * 4)
            self.all_are("resident")

    def test_a_rank_whose_gpus_do_not_become_idle_is_named_and_nobody_pauses(self):
        self.all[2].do("is_busy")
        for answer in self.all_do("pause_and_say_how", TIMEOUT):
            self.assertRegex(answer, "^pause of nccl.*rank 2 on host-b failed: planted failure")  # or it came when the others knew
        self.all_are("resident")
        self.assertEqual([how[1] for how in self.all_do("pause_and_say_how", TIMEOUT)], [True] * 4)
        self.all_are("paused")

    def test_a_rank_that_does_not_come_is_named_in_the_time_of_one_pause(self):
        began = time.monotonic()
        for answer in self.all_do("pause_and_say_how", 1, ranks=self.all[:3]):
            self.assertRegex(answer, "rank 3 .*did not come within 1 s")
        self.assertLess(time.monotonic() - began, 1.9)
        self.all_are("resident")


class NobodySaysIdle(Job):
    def test_by_default_cards_are_not_asked(self):
        self.assertEqual([how[1] for how in self.all_do("pause_and_say_how", TIMEOUT)], [False] * 2)
        self.all_are("paused")


class WithoutGpu(Job):
    """The last rank has no memory under AMem."""

    hosts, shared = 3, False

    def start_all(self):
        """Each test has its own."""

    def start_with(self, **last):
        self.all = start(self.hosts, self.ranks, self.folder, self.store, self.timeout_ms, **last)
        for rank in self.all:
            self.addCleanup(rank.end)

    def test_it_takes_part_with_nothing(self):
        for last in ({"HOSTS_RANK_WITHOUT": "gpu"}, {"HOSTS_RANK_WITHOUT": "gpu", "AMEM_LIBRARY": "/nowhere/libamem_nccl.so"},
                     {"HOSTS_RANK_WITHOUT": "memory"}, {"HOSTS_RANK_WITHOUT": "memory", "AMEM_ENABLE": "0"}):
            with self.subTest(last=last):
                self.folder = tempfile.mkdtemp(dir=self.folder)
                self.store = self.make_store()
                self.start_with(PYTHONWARNINGS="ignore", **last)
                with_gpu = self.all[:2]
                self.assertEqual(self.all_do("pause", TIMEOUT), ["ok"] * 3)
                self.all_are("paused", with_gpu)
                self.assertEqual(self.all_do("resume", TIMEOUT), ["ok"] * 3)
                self.all_are("resident", with_gpu)
                self.all[1].do("fail_next_pause")
                answers = self.all_do("pause", TIMEOUT)
                for answer in answers[:2]:
                    self.assertIn("rank 1 on host-b failed: planted", answer)
                self.assertNotIn("could not be undone", answers[2])
                self.all_are("resident", with_gpu)


class LostStore(Job):
    shared = False  # its store goes away under its processes

    def make_store(self):
        self.server = store_for_tests.Server(self.folder + "/store")
        self.addCleanup(self.server.close)
        return "plain:" + self.folder + "/store"

    def test_a_pause_is_undone(self):
        self.all[0].ask("pause", TIMEOUT)
        time.sleep(0.5)
        self.server.close()
        self.assertIn("does not answer", self.all[0].answer())
        self.all_are("resident", self.all[:1])


class Answering(unittest.TestCase):
    """The thread that waits for a store's answers."""

    def test_a_forked_child_asks_by_a_thread_of_its_own(self):
        store = amem._hosts._store.Store(store_for_tests.Local(store_for_tests.Values()))
        store.within(TIMEOUT)
        store.set("key", "value")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(Exception):
                store.within(TIMEOUT)
                os._exit(0 if store.get("key") == b"value" else 1)
            os._exit(2)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual(store.get("key"), b"value")


class FourHosts(Job):
    """As issued: two processes on each of four hosts; any of them dies at any time, and the others are all as before or all paused."""

    hosts, ranks = 4, 2
    timeout_ms = 4000  # the other rank of a host whose rank fails waits so long; on a busy machine 1500 ms were over before that one failed
    KILL_TIMEOUT_MS = 1500
    KILLS = int(os.environ.get("AMEM_HOSTS_KILLS", "100" if NIGHTLY else "2"))
    VICTIMS = ((0, 3, 7), (0, 3, 7)) if NIGHTLY else ((0, 7), (3,))

    def test_a_rank_of_one_host_fails_in_each_phase(self):
        for command, victims in zip(("fail_next_pause", "fail_next_resume"), self.VICTIMS):
            for victim in victims:
                paused = command == "fail_next_resume"
                if paused:
                    self.assertEqual(set(self.all_do("pause", TIMEOUT)), {"ok"})
                self.all[victim].do(command)
                for answer in self.all_do("resume" if paused else "pause", TIMEOUT):
                    self.assertRegex(answer, r"rank %d on host-%s failed" % (victim, "abcd"[victim // 2]))
                self.all_are("paused" if paused else "resident")
                if paused:
                    self.assertEqual(set(self.all_do("resume", TIMEOUT)), {"ok"})

    def test_kills_at_random(self):
        chance = random.Random(int(os.environ.get("AMEM_SEED", "7")))
        with guards.Kills(self.KILLS) as kill:
            for _ in range(self.KILLS):
                self.kill_one(chance, kill)

    def kill_one(self, chance, kill):
        size = self.hosts * self.ranks
        folder = tempfile.mkdtemp(dir=self.folder)
        server = store_for_tests.Server(folder + "/store")
        ranks = start(self.hosts, self.ranks, folder, "plain:" + folder + "/store", self.KILL_TIMEOUT_MS)
        victim = ranks[chance.randrange(size)]
        phase = chance.choice(["pause", "resume"])
        if phase == "resume":
            self.all_do("pause", 3, ranks=ranks)
        for rank in ranks:
            rank.ask(phase, 3)
        time.sleep(chance.uniform(0, 0.05))
        kill(victim.process)
        others = [rank for rank in ranks if rank is not victim]
        answers = [rank.answer() for rank in others]
        undone = [rank for rank, answer in zip(others, answers) if "could not be undone here" not in answer]  # a busy machine, and it is told
        states = {tuple(state) for state in guards.each(self.all_do("state", ranks=undone or others[:1]))}
        self.assertEqual(len(states), 1, (phase, victim.rank, states, answers))
        self.assertTrue(len(set(answer == "ok" for answer in answers)) == 1, answers)
        for rank in ranks:
            rank.end()
        server.close()


class Gather(Job):
    hosts, ranks = 2, 2
    shared = False  # they compare journals

    def test_why_names_the_culprit_of_another_host(self):
        self.all_do("pause", TIMEOUT)
        self.all[3].do("fail_in_the_driver")
        for answer in self.all_do("resume", TIMEOUT):
            self.assertIn("failed", answer)
        self.all_are("paused")
        results = self.all_do("gather", self.folder + "/packs", 10)
        self.assertEqual(results[0]["missing"], {})
        self.assertEqual(results, [results[0]] * 4)
        self.assertEqual(sorted(os.listdir(self.folder + "/packs")), ["host-a-0.amem", "host-b-2.amem"])
        replay = os.environ["AMEM_REPLAY"]
        said = subprocess.run([replay, "why", self.folder + "/packs"], capture_output=True, text=True, check=False, timeout=60).stdout
        self.assertRegex(said.splitlines()[0], r"Resume 1 failed on rank 3 .*out of memory")
        sessions = subprocess.run([replay, "ls", self.folder + "/packs"], capture_output=True, text=True, check=False, timeout=60).stdout
        self.assertEqual(len(sessions.splitlines()), 1 + 4, sessions)

    def test_a_host_that_does_not_come_is_named_and_the_others_go_on(self):
        self.all[2].end()
        self.all[3].end()
        self.all[1].ask("gather", self.folder + "/packs", 1)
        result = self.all[0].do("gather", self.folder + "/packs", 1)
        self.assertEqual(set(result["missing"]), {"rank 2", "rank 3"})
        self.assertEqual(len(result["packs"]), 1)
        self.assertEqual(self.all[1].answer(), result)

    def test_a_host_that_cannot_pack_says_why(self):
        self.all[2].do("no_replay")
        result = self.all_do("gather", self.folder + "/packs", 5)[0]
        self.assertEqual(list(result["missing"]), ["rank 2 on host-b"])
        self.assertIn("which is no program", result["missing"]["rank 2 on host-b"])


class GatherInChunks(unittest.TestCase):
    """A pack of many chunks, through a store that counts how much it holds at most."""

    def test_a_link_that_lies_where_a_pack_is_written_leads_nowhere(self):
        from amem import _private
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(folder + "/other", folder + "/pack.part")
            with _private.new_file(folder + "/pack.part") as file:
                file.write(b"pack")
            self.assertEqual((os.listdir(folder), os.lstat(folder + "/pack.part").st_mode & 0o170777), (["pack.part"], 0o100600))

    def test_memory_is_bounded_and_what_arrives_is_what_was_sent(self):
        from amem import _gather, _hosts
        chunk, chunks = 1000, 50
        contents = os.urandom(chunk * chunks - 17)
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(_gather, "CHUNK_BYTES", chunk):
            server = store_for_tests.Server(folder + "/store")
            groups = [_hosts.StoreGroup(store_for_tests.Client(folder + "/store"), rank, 2, "host-%d" % rank) for rank in range(2)]

            def pack(_directory, path):
                with open(path, "wb") as file:
                    file.write(contents)

            out = folder + "/of a job/out"
            with mock.patch.object(_gather, "pack", pack), mock.patch.object(_gather, "journal_directory", lambda: folder):
                results = []
                other = threading.Thread(target=lambda: results.append(_gather.gather(out, groups[1], 5)))
                other.start()
                results.append(_gather.gather(out, groups[0], 5))
                other.join()
            self.assertEqual(results[0], results[1])
            self.assertEqual(results[0]["missing"], {})
            with open(out + "/host-1-1.amem", "rb") as file:
                self.assertEqual(file.read(), contents)
            for path, mode in ((os.path.dirname(out), 0o700), (out, 0o700), (out + "/host-1-1.amem", 0o600)):  # they are of other hosts' users, too
                self.assertEqual(os.stat(path).st_mode & 0o777, mode, path)
            self.assertLess(server.most, 8 * chunk)
            for group in groups:
                group.store.close()
            server.close()


@unittest.skipUnless(distributed, "this Python has no PyTorch")
class Tcp(Agreement):
    def make_store(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.tcp = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        return "tcp:%d" % port


@unittest.skipUnless(distributed, "this Python has no PyTorch")
class File(Agreement):
    test_keys_do_not_pile_up = None  # a FileStore has every value that it ever had

    def make_store(self):
        return "file:" + self.folder + "/file-store"


@unittest.skipUnless(distributed, "this Python has no PyTorch")
class ProcessGroup(Job):
    """torch.distributed's default group, with process_group=True."""

    shared = False
    hosts = 3

    def make_store(self):
        return "group:" + self.folder + "/group-store"

    def test_it_agrees_through_the_group_s_own_store(self):
        self.all[1].do("fail_next_pause")  # of the first agreement, of which nobody knows whether it is an earlier life's
        for answer in self.all_do("pause", TIMEOUT):
            self.assertRegex(answer, "rank 1 on .* failed: planted")
        self.all_are("resident")
        self.assertEqual(self.all_do("pause", TIMEOUT), ["ok"] * 3)
        self.all_are("paused")
        self.assertEqual(self.all_do("resume", TIMEOUT), ["ok"] * 3)
        result = self.all_do("gather", self.folder + "/packs", 10)[1]
        self.assertEqual((len(result["packs"]), result["missing"]), (3, {}))
        some = self.all[1:]
        self.assertEqual(self.all_do("new_group", [1, 2]), ["ok"] * 3)
        some[1].do("fail_next_pause")
        for answer in self.all_do("pause", TIMEOUT, ranks=some):
            self.assertRegex(answer, "pause of nccl by 2 ranks: rank 2 on .* failed: planted")  # of the job


def agree(groups, act=lambda rank: None, undo=lambda rank: None, timeout=5, what="pause of nccl", late=lambda rank: None):
    """Has members in threads agree; late (before it), act and undo take the rank. Returns what each raised, or None."""
    from amem import _hosts
    outcomes = [None] * len(groups)

    def member(rank):
        try:
            late(rank)
            _hosts.together(groups[rank], what, lambda: act(rank), lambda: undo(rank), timeout)
        except BaseException as error:  # pylint: disable=broad-except
            outcomes[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def groups_of(size, store=None, **more):
    """Members of this process, each with a store of its own that `store` makes of its rank; default: one in memory."""
    values = store_for_tests.Values()
    return [amem.StoreGroup(store(rank) if store else store_for_tests.Asked(values), rank, size, "h%d" % rank, **more) for rank in range(size)]


class FromEntryOn:
    """A member's store that does something before each request from the one on that follows its outcome."""

    def __init__(self, store, first):
        self._store, self._first, self._entered = store, first, False

    def __getattr__(self, name):
        function = getattr(self._store, name)

        def call(*arguments):
            if self._entered:
                self._first()
            self._entered = self._entered or any(part in str(arguments[0]) for part in ("/entry/", "/outcome/")) and name in ("set", "compare_set")
            return function(*arguments)
        return call


class Interrupts(unittest.TestCase):
    """Two members in threads, one of which is interrupted: in its own part, or while it waits for the other one."""

    def outcomes(self, act, follow=None, collect=None):
        from amem import _agreements, _hosts
        undone, wait = [], _agreements.Agreements._await

        def waits(agreements, *arguments):
            then = collect if agreements.leads else follow
            if then:
                then()
            return wait(agreements, *arguments)

        with mock.patch.object(_agreements.Agreements, "_await", waits):
            return agree(groups_of(2), lambda rank: act() if rank == 1 else None, undone.append), sorted(undone)

    @staticmethod
    def stop_after(seconds):
        def interrupt():
            time.sleep(seconds)
            raise KeyboardInterrupt("stop")
        return interrupt

    def test_in_its_own_part(self):
        outcomes, undone = self.outcomes(self.stop_after(0.5))  # rank 0 has come meanwhile; it would do nothing otherwise
        self.assertIsInstance(outcomes[1], KeyboardInterrupt)
        self.assertRegex(str(outcomes[0]), "rank 1 on h1 failed: KeyboardInterrupt: stop")
        self.assertEqual(undone, [0, 1], "the interrupt may have come when the part was done")

    def test_in_its_own_part_before_rank_0_came(self):
        groups = groups_of(2)

        def stop(_rank):
            raise KeyboardInterrupt("stop")

        from amem import _hosts
        with self.assertRaises(KeyboardInterrupt):
            _hosts.together(groups[1], "pause of nccl", lambda: stop(1), lambda: None, 5)
        began = time.monotonic()
        with self.assertRaisesRegex(amem.AmemError, "had given up already.*rank 1 on h1 failed: KeyboardInterrupt: stop"):
            _hosts.together(groups[0], "pause of nccl", lambda: None, lambda: None, 5)
        self.assertLess(time.monotonic() - began, 4)
        self.assertEqual(agree(groups), [None, None])

    def test_before_its_own_part_the_others_are_told_at_once(self):
        from amem import _hosts
        begin = _hosts.Cycles.begin

        def interrupted(cycles, *arguments):
            begin(cycles, *arguments)
            if cycles.leads:
                raise KeyboardInterrupt("stop")

        began, undone = time.monotonic(), []
        with mock.patch.object(_hosts.Cycles, "begin", interrupted):
            outcomes = agree(groups_of(2), undo=undone.append, timeout=10)
        self.assertLess(time.monotonic() - began, 8)
        self.assertIsInstance(outcomes[0], KeyboardInterrupt)
        self.assertRegex(str(outcomes[1]), "rank 0 on h0 failed: KeyboardInterrupt: stop")
        self.assertNotIn(0, undone)

    def test_before_the_decision_all_undo(self):
        outcomes, undone = self.outcomes(lambda: None, self.stop_after(0.5), lambda: time.sleep(1.5))  # rank 0 is slow
        self.assertIsInstance(outcomes[1], KeyboardInterrupt)
        self.assertRegex(str(outcomes[0]), "rank 1 on h1 failed: KeyboardInterrupt: stop")
        self.assertEqual(undone, [0, 1])

    def test_after_the_decision_nobody_undoes(self):
        outcomes, undone = self.outcomes(lambda: None, self.stop_after(1))  # rank 0 decides meanwhile
        self.assertIsInstance(outcomes[1], KeyboardInterrupt)
        self.assertIsNone(outcomes[0])
        self.assertEqual(undone, [])

    def test_when_the_decision_is_known_nobody_undoes(self):
        from amem import _hosts
        enter = _hosts.Cycles.enter

        def interrupted(cycles, *arguments):
            decision = enter(cycles, *arguments)
            if not cycles.leads:
                raise KeyboardInterrupt("stop")
            return decision

        undone, groups = [], groups_of(2)
        with mock.patch.object(_hosts.Cycles, "enter", interrupted):
            outcomes = agree(groups, undo=undone.append)
        self.assertEqual((outcomes[0], type(outcomes[1]), undone), (None, KeyboardInterrupt, []))
        self.assertEqual(agree(groups), [None, None])

    def test_an_error_of_the_program_in_its_own_part_is_raised_as_it_is_and_told_to_the_others(self):
        def act():
            raise OSError("no such file")
        outcomes, undone = self.outcomes(act)
        self.assertEqual((type(outcomes[1]), str(outcomes[1])), (OSError, "no such file"))
        self.assertRegex(str(outcomes[0]), "rank 1 on h1 failed: OSError: no such file")
        self.assertEqual(undone, [0] if "nothing was" not in str(outcomes[0]) else [])


class CutOff(unittest.TestCase):
    """Two members in threads, and a store that falls silent for both after so many answers."""

    TIMEOUT_S, LATE_S = 0.5, 4  # an agreement's, and how much later a busy machine may answer

    class Silent:
        """In the place of the server's event: answers so many requests, and then none before it is set."""

        def __init__(self, answers):
            self.lock, self.left, self.event = threading.Lock(), answers, threading.Event()

        def wait(self):
            with self.lock:
                self.left -= 1
                answered = self.left >= 0
            if not answered:
                self.event.wait()

    def outcome(self, answers):
        """(of each rank its error or None, the ranks that are paused, whether a decision to pause is in the store, seconds)"""
        from amem import _hosts
        errors, paused = [None, None], set()
        with tempfile.TemporaryDirectory() as folder:
            server = store_for_tests.Server(folder + "/store")
            server.answers = self.Silent(answers)
            clients = [store_for_tests.Client(folder + "/store") for _ in range(2)]
            groups = [_hosts.StoreGroup(clients[rank], rank, 2, "h%d" % rank) for rank in range(2)]

            def member(rank):
                try:
                    _hosts.together(groups[rank], "pause of nccl", lambda: paused.add(rank), lambda: paused.discard(rank), self.TIMEOUT_S)
                except amem.AmemError as error:
                    errors[rank] = error

            began = time.monotonic()
            threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.monotonic() - began
            decided = any(key.endswith("/decision") and '"ok": true' in value for key, value in server.values.items())
            server.answers.event.set()
            server.close()
            for client in clients:
                client.close()
        return errors, paused, decided, seconds

    def test_at_each_point_all_are_back_in_time_and_who_did_not_hear_of_a_success_is_not_paused(self):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(self.outcome, range(40)))
        for answers, (errors, paused, decided, seconds) in enumerate(outcomes):
            with self.subTest(answers=answers):
                self.assertLess(seconds, self.TIMEOUT_S + self.LATE_S)
                self.assertEqual(paused, {rank for rank in range(2) if errors[rank] is None})
                self.assertTrue(decided or not paused)
        self.assertEqual([bool(paused) for _, paused, _, _ in outcomes[:6]], [False] * 6, "it fell silent before anything could be agreed")
        self.assertEqual(outcomes[-1][0], [None, None], "so many answers suffice")


class Lives(unittest.TestCase):
    """A store that outlives the processes of a group."""

    SIZE = 3

    def setUp(self):
        self.values = store_for_tests.Values()

    def store(self):
        """One more client of the store that all lives have."""
        return store_for_tests.Asked(self.values)

    def live(self, life=None, dies=()):
        """A group that ends with a life, or of which these ranks die when they have entered."""
        def store(rank):
            return FromEntryOn(self.store(), store_for_tests.Life(0).request) if rank in dies else self.store()
        return groups_of(self.SIZE, lambda rank: life.store(store(rank)) if life else store(rank))

    @staticmethod
    def planted(rank):
        if rank == 1:
            raise amem.AmemError(1, "planted failure")

    def one_life(self, groups, first):
        """Pauses and resumes. Returns what went wrong."""
        paused, wrong = set(), []
        for fails in (first, not first):
            def act(rank):
                if fails:
                    self.planted(rank)
                paused.add(rank)
            outcomes = agree(groups, act, paused.discard)
            expected = "rank 1 on h1 failed: planted failure" if fails else "None"
            wrong += [(fails, rank, error) for rank, error in enumerate(outcomes) if expected not in str(error)]
            if paused != (set() if fails else set(range(self.SIZE))):
                wrong.append((fails, "paused", paused))
            if not fails:
                wrong += [error for error in agree(groups, paused.discard, paused.add, what="resume of nccl") if error]
                wrong += [("resumed", paused)] if paused else []
        return wrong

    def two_lives(self, last, first):
        """Returns whether the first life was killed at its last request, and what went wrong in the second one."""
        test = type(self)()
        test.setUp()
        life = store_for_tests.Life(last)
        with contextlib.suppress(store_for_tests.Life.Killed):
            test.one_life(test.live(life), first)
        wrong = test.one_life(test.live(), not first)
        test.doCleanups()
        return life.left <= 0, wrong

    def test_the_first_is_killed_at_each_point_and_the_second_one_pauses_and_resumes(self):
        points = 0
        for first in (False, True):  # the first agreement of the first life succeeds or not; that of the second one is the other
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda last, first=first: self.two_lives(last, first), range(1, 60)))
            points += sum(killed for killed, _ in found)
            for last, (_, wrong) in enumerate(found, 1):
                with self.subTest(last=last, first=first):
                    self.assertEqual(wrong, [])
        self.assertGreater(points, 32)

    def test_after_a_failure_a_new_life_is_not_refused(self):
        self.assertIn("rank 1 on h1 failed", str(agree(self.live(), self.planted)[0]))
        self.assertEqual(agree(self.live()), [None] * self.SIZE)

    def test_outcomes_of_dead_ranks_are_not_counted(self):
        """All die before they decide, and in the next life the pause of rank 1 fails after the other parts."""
        for error in agree(self.live(dies=range(self.SIZE))):
            self.assertIsInstance(error, store_for_tests.Life.Killed)

        def act(rank):
            time.sleep(0.3 if rank == 1 else 0)
            self.planted(rank)

        for error in agree(self.live(), act):
            self.assertRegex(str(error), "rank 1 on h1 failed: planted failure")

    def test_a_rank_that_is_started_anew_alone_meets_the_others(self):
        groups = self.live()
        self.assertEqual(agree(groups), [None] * self.SIZE)
        for rank in range(self.SIZE):
            with self.subTest(rank=rank):
                groups[rank] = self.live()[rank]
                self.assertEqual(agree(groups), [None] * self.SIZE)

    def test_a_rank_that_dies_when_it_has_entered_and_is_started_anew_meets_the_others(self):
        groups = self.live()
        groups[2] = self.live(dies=[2])[2]
        outcomes = agree(groups)
        self.assertEqual((outcomes[:2], type(outcomes[2])), ([None, None], store_for_tests.Life.Killed))
        groups[2] = self.live()[2]
        self.assertEqual(agree(groups), [None] * self.SIZE)

    def test_ranks_that_are_late_fail_and_die_at_random_agree_all_the_same(self):
        seed = int(os.environ.get("AMEM_SEED", "7"))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for number, wrong in enumerate(pool.map(RandomLives, range(seed, seed + (64 if NIGHTLY else 2)))):
                with self.subTest(AMEM_SEED=seed + number):
                    self.assertEqual(wrong.found, [])

    def test_a_new_life_waits_for_its_rank_0_and_not_for_what_an_earlier_one_decided(self):
        self.assertRegex(str(agree(self.live()[:1], timeout=0.1)[0]), "rank 1, rank 2 did not come")
        self.assertEqual(agree(self.live(), late=lambda rank: time.sleep(0.5 if rank == 0 else 0)), [None] * self.SIZE)

    def test_a_failure_of_a_rank_that_joined_when_the_agreement_was_open_is_told_once(self):
        groups = self.live()
        opened, all_do_their_part = threading.Event(), threading.Barrier(self.SIZE)

        def act(rank):
            if rank == 0:
                opened.set()
            all_do_their_part.wait(10)
            self.planted(rank)

        def late(rank):
            if rank != 0:
                opened.wait(5)
                groups[rank] = self.live()[rank]

        for error in agree(groups, act, late=late):
            self.assertRegex(str(error), "by 3 ranks: rank 1 on h1 failed: planted")
        self.assertEqual(agree(groups), [None] * self.SIZE)

    def test_a_rank_that_was_stopped_while_the_others_went_on_still_finds_that_all_had_succeeded(self):
        goes_on = threading.Event()

        groups = groups_of(self.SIZE, lambda rank: FromEntryOn(self.store(), lambda: rank == 2 and goes_on.wait(10)))
        outcomes, undone = [], []
        first = threading.Thread(target=lambda: outcomes.extend(agree(groups[2:], undo=undone.append, timeout=8)))
        first.start()
        self.assertEqual(agree(groups[:2]), [None, None])
        for _ in range(3):
            self.assertRegex(str(agree(groups[:2], timeout=0.2)[0]), "rank 2 on h2 did not come")
        goes_on.set()
        first.join()
        self.assertEqual((outcomes, undone), ([None], []))

    def test_two_processes_as_one_rank_are_told(self):
        groups = self.live() + [self.live()[2]]
        outcomes = agree(groups, lambda rank: time.sleep(0.1 * rank))
        self.assertEqual(outcomes[:3], [None] * 3)
        self.assertRegex(str(outcomes[3]), "rank 2 on h2 took part twice: .*; this rank had succeeded, and is as before")

    def test_a_gathering_of_a_new_life_or_that_a_rank_missed_is_not_the_old_one(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch("amem._gather.pack", lambda _directory, path: open(path, "w").close()):
            def gather(groups, where, late=0):
                results = {}

                def member(group):
                    time.sleep(late if group.rank == 0 else 0)
                    try:
                        results[group.rank] = amem.gather(folder + where, group, 1)
                    except amem.AmemError as error:
                        results[group.rank] = str(error)
                threads = [threading.Thread(target=member, args=(group,)) for group in groups]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                return results
            first = self.live()
            for group, result in gather(first, "/one").items():
                self.assertEqual((result["path"], result["missing"]), (folder + "/one", {}), group)
            second = self.live()
            for group, result in gather(second, "/two", late=0.3).items():  # the others come before rank 0
                self.assertEqual((result["path"], result["missing"]), (folder + "/two", {}), group)
            self.assertEqual(set(gather(second[:2], "/without")[0]["missing"]), {"rank 2"})
            for group, result in gather(second, "/three", late=0.3).items():
                self.assertEqual((result["path"], result["missing"]), (folder + "/three", {}), group)


class RandomLives:
    """Rounds of one group, in each of which all ranks call once. found: those after which ranks that live differ, or are not what they say."""

    TIMEOUT_S = 0.3
    DELAYS_S = (0, 0, 0, 0, 0.02, 0.2, 0.5)

    def __init__(self, seed):
        self.chance, self.values, self.found = random.Random(seed), store_for_tests.Values(), []
        self.size = self.chance.choice((2, 3, 4))
        self.lives, self.groups = [None] * self.size, [None] * self.size
        self.start(range(self.size))
        for number in range(40 if NIGHTLY else 8):
            self.start([rank for rank in range(self.size) if self.chance.random() < 0.1] if self.chance.random() < 0.7 else range(self.size))
            plans = [{"late": self.chance.choice(self.DELAYS_S), "part": self.chance.choice(self.DELAYS_S), "fails": self.chance.random() < 0.1,
                      "last": self.chance.randrange(1, 12) if self.chance.random() < 0.1 else float("inf")} for _ in range(self.size)]
            self.round(number, plans)
            calm = [{"late": 0, "part": 0, "fails": False, "last": float("inf")}] * self.size
            if number % 3 == 2 and not any(self.round(number, calm) for _ in range(4)):
                self.found.append((number, "they never meet again"))

    def start(self, ranks):
        for rank in ranks:
            self.lives[rank] = store_for_tests.Life()
            self.groups[rank] = amem.StoreGroup(self.lives[rank].store(store_for_tests.Asked(self.values)), rank, self.size, "h%d" % rank)

    def round(self, number, plans):
        """Returns whether all have paused."""
        paused = set()
        for life, plan in zip(self.lives, plans):
            life.left = plan["last"]

        def act(rank):
            time.sleep(plans[rank]["part"])
            if plans[rank]["fails"]:
                raise amem.AmemError(1, "planted")
            paused.add(rank)

        outcomes = agree(self.groups, act, paused.discard, self.TIMEOUT_S, late=lambda rank: time.sleep(plans[rank]["late"]))
        dead = [rank for rank, error in enumerate(outcomes) if isinstance(error, store_for_tests.Life.Killed)]
        living = [rank for rank in range(self.size) if rank not in dead]
        succeeded = {rank for rank in living if outcomes[rank] is None}
        if succeeded not in (set(), set(living)) or succeeded != paused - set(dead) or any(plans[rank]["fails"] for rank in succeeded):
            self.found.append((number, plans, [str(error) for error in outcomes], paused))
        self.start(dead)
        return len(succeeded) == self.size


@unittest.skipUnless(distributed, "this Python has no PyTorch")
class LivesOfAFile(Lives):
    test_ranks_that_are_late_fail_and_die_at_random_agree_all_the_same = None  # of no one kind of store

    """PyTorch's FileStore, whose file stays when a life is killed."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="amem-lives-")
        self.addCleanup(self.folder.cleanup)

    def store(self):
        return distributed.FileStore(self.folder.name + "/store", -1)


class Times(unittest.TestCase):
    """How long who waits for whom."""

    def test_who_waits_for_rank_0_is_woken_when_it_comes(self):
        from amem import _store
        groups = groups_of(2)
        self.assertEqual(agree(groups), [None, None])
        with mock.patch.object(_store, "SLICE_SECONDS", 60):
            self.assertEqual(agree(groups, late=lambda rank: time.sleep(0.3 if rank == 0 else 0)), [None, None])

    def test_the_own_part_does_not_count(self):
        self.assertEqual(agree(groups_of(3), lambda _rank: time.sleep(1), timeout=0.7), [None] * 3)

    def test_the_reason_is_found_after_the_others_have_been_told(self):
        from amem import _calls, _why
        told = {}

        def first_line(_text, _library):
            time.sleep(2)
            told["why"] = time.monotonic()
            return "the reason"

        def act(rank):
            if rank == 1:
                _calls.check(3)

        def undo(_rank):
            told["undo"] = time.monotonic()

        with mock.patch.object(_why, "first_line", first_line), mock.patch.object(_calls, "last_error", lambda: "planted"):
            outcomes = agree(groups_of(2), act, undo)
        self.assertEqual((outcomes[1].code, outcomes[1].why), (3, "the reason"))
        self.assertRegex(str(outcomes[0]), "rank 1 on h1 failed: planted;")
        self.assertLess(told["undo"], told["why"] - 1)


class Words(unittest.TestCase):
    def test_ranks_are_the_job_s(self):
        def act(rank):
            if rank == 1:
                raise amem.AmemError(1, "planted")
        groups = groups_of(2, ranks=[4, 6])
        for error in agree(groups, act):
            self.assertRegex(str(error), "rank 6 on h1 failed")
        self.assertRegex(str(agree(groups[:1], timeout=0.2)[0]), "rank 6 on h1 did not come within 0.2 s")
        with self.assertRaisesRegex(ValueError, "2 ranks of the job for a group of 3"):
            groups_of(3, ranks=[4, 6])

    def test_a_host_of_an_earlier_life_is_not_told(self):
        values = store_for_tests.Values()
        agree(groups_of(2, lambda _rank: store_for_tests.Asked(values)))
        group = amem.StoreGroup(store_for_tests.Asked(values), 0, 2, "other")
        self.assertRegex(str(agree([group], timeout=0.2)[0]), "rank 1 did not come within 0.2 s")

    def test_that_all_were_idle_once_is_no_answer_to_a_later_call(self):
        """Of a rank that had lost the store behind its entry, which the others have counted."""
        from amem import _hosts

        class Lost(FromEntryOn):
            gone = False

            def first(self, *_):
                if not self.gone:
                    self.gone = True
                    raise ConnectionError("planted")

        values = store_for_tests.Values()
        lost = Lost(store_for_tests.Asked(values), lambda *_: lost.first())
        with mock.patch.dict(os.environ, {"AMEM_NETWORK": "renew"}), mock.patch.object(_hosts, "living_communicators", lambda: []):
            groups = [amem.StoreGroup(store, rank, 2, "h%d" % rank) for rank, store in enumerate((store_for_tests.Asked(values), lost))]

        def idle(rank, timeout, said):
            try:
                said[rank] = _hosts.are_idle(groups[rank], "pause of nccl", timeout)
            except amem.AmemError as error:
                said[rank] = str(error)

        with mock.patch.object(_hosts, "await_idle", lambda: None):
            said = {}
            first = threading.Thread(target=idle, args=(0, 10, said))
            first.start()
            idle(1, 10, said)
            first.join()
            self.assertIs(said[0], True)
            self.assertIn("does not answer", said[1])
            said = {}
            idle(1, 0.3, said)
            self.assertIn("did not come", str(said[1]), "nobody else has called")
            said = {}
            for _ in range(2):  # rank 0 may hear first that the other one had given up
                first = threading.Thread(target=idle, args=(0, 10, said))
                first.start()
                idle(1, 10, said)
                first.join()
            self.assertEqual(said, {0: True, 1: True})

    def test_an_own_failure_is_an_error_whatever_was_decided(self):
        from amem import _hosts
        undone = []
        with mock.patch.object(_hosts.Cycles, "enter", lambda *_: {"ok": True}), self.assertRaisesRegex(
                amem.AmemError, "rank 0 on h0 failed: planted, when the others had agreed that it succeeded; nothing was changed") as raised:
            _hosts.together(groups_of(1)[0], "pause of nccl", mock.Mock(side_effect=amem.AmemError(1, "planted")), undone.append, 1)
        self.assertEqual((raised.exception.code, undone), (1, []))


class Cost(unittest.TestCase):
    """Processes as hosts; hosts_bench.py measures the same in more steps and by the clock."""

    def test_of_a_hundred_and_twenty_eight_hosts_none_asks_more_or_works_much_more_than_of_four(self):
        few, many = hosts_bench.measure(4, rounds=3), hosts_bench.measure(128, rounds=1)
        self.assertLess(many["processor_seconds"], 4, "of all hosts and of this test's store; 0.3 on an idle core, 1.1 on a busy one")
        self.assertLess(many["requests_per_host"], few["requests_per_host"] + 2)


if __name__ == "__main__":
    signal.alarm(1150)
    unittest.main()
