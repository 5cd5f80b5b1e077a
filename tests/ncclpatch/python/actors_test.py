"""amem.hosts over actors, on the stand-in driver: processes that take calls in turn, as Ray's actors do, and Ray itself where it is installed."""
import atexit
import concurrent.futures
import ctypes
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

# The library reads its settings when it is loaded, and the processes of the actors inherit them.
FOLDER = os.path.dirname(os.environ.get("AMEM_JOURNAL_DIR", "")) or tempfile.mkdtemp(prefix="amem-actors-", dir="/tmp")
os.environ.update(AMEM_JOURNAL_DIR=FOLDER + "/j", AMEM_SOCKET_DIR=FOLDER + "/s", AMEM_USER_MEMORY="release", AMEM_LOG="off")
import amem  # noqa: E402
import amem.hosts  # noqa: E402

STAND_INS = os.environ["LD_LIBRARY_PATH"].split(":")[0]
TIMEOUT = 10
KILLS = 30 if os.environ.get("AMEM_NIGHTLY") == "1" else 3
try:
    import ray
except ImportError:
    ray = None


class Worker:
    """A rank that knows nothing of AMem."""

    def __init__(self):
        self.cuda, context, self.memory = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        assert self.cuda.cuInit(0) == 0 and self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.cuda.cuCtxSetCurrent(context) == 0
        self.context, self.nccl = context, ctypes.CDLL(STAND_INS + "/libnccl.so.2")
        import amem  # noqa: F401
        assert self.nccl.ncclMemAlloc(ctypes.byref(self.memory), ctypes.c_size_t(4 << 20)) == 0

    def state(self):
        self.cuda.stand_in_cuda_bytes_in_use.restype = ctypes.c_uint64
        return "paused" if self.cuda.stand_in_cuda_bytes_in_use(0) == 0 else "resident"

    def fail(self, call):
        assert self.cuda.stand_in_cuda_fail_next(call.encode(), ctypes.c_uint64(1), 2) == 0

    def refuse_to_undo(self, text):
        """The next undoing of its part of a pause fails."""
        import amem._tags
        real = amem._tags.resume_in_time

        def refused(*_tags):
            amem._tags.resume_in_time = real
            raise amem.AmemError(1, text)

        amem._tags.resume_in_time = refused

    def sleep(self, seconds):
        time.sleep(seconds)

    def die(self):
        os._exit(1)

    def die_in(self, operation):
        """Its next part of this operation ends the process."""
        import amem._tags
        setattr(amem._tags, {"resume": "resume_in_time"}.get(operation, operation), lambda *_tags: os._exit(1))


def serve(pipe):
    worker = Worker()
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        try:
            function = getattr(worker, name, None) or getattr(amem.hosts, name)
            pipe.send(("ok", function(*arguments)))
        except Exception as error:  # pylint: disable=broad-except
            pipe.send(("failed", str(error)))


def has_ended(call):
    """Of a future, or of Ray's reference to a result."""
    if hasattr(call, "done"):
        return call.done()
    import ray

    return bool(ray.wait([call], timeout=0)[0])


class Actor:
    """A process that takes calls one after the other."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.turn = threading.Lock()
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        assert self.pipe.recv() == "ready"

    def begin(self, name, *arguments):
        return self.pool.submit(self._do, name, arguments)

    def _do(self, name, arguments):
        self.pipe.send((name, arguments))
        return self.pipe.recv()

    def do(self, name, *arguments):
        kind, value = self.begin(name, *arguments).result()
        assert kind == "ok", value
        return value

    def end(self):
        self.process.kill()
        self.process.join()
        self.pool.shutdown(wait=True)
        self.pipe.close()


class Engine:
    """As amem.hosts.Ray, on these actors."""

    def call(self, actor, function, *arguments):
        return actor.begin(function.__name__, *arguments)

    def wait(self, calls, seconds):
        concurrent.futures.wait(calls, seconds)
        return [self.value(call) if call.done() else ("silent", "") for call in calls]

    def value(self, call):
        try:
            return call.result()
        except (EOFError, OSError) as error:
            return "failed", "the actor died (%s)" % type(error).__name__


class Actors(unittest.TestCase):
    def setUp(self):
        self.engine = Engine()
        self.actors = self.make(3)

    def make(self, count):
        actors = [Actor() for _ in range(count)]
        for actor in actors:
            self.addCleanup(actor.end)
        return actors

    def do(self, actor, name, *arguments):
        return actor.do(name, *arguments)

    def begin(self, actor, name, *arguments):
        return actor.begin(name, *arguments)

    def kill(self, actor):
        actor.process.kill()

    def all_are(self, state, actors=None):
        self.assertEqual({self.do(actor, "state") for actor in self.actors if actors is None or actor in actors}, {state})

    def test_all_pause_and_all_resume(self):
        for _ in range(2):
            with amem.hosts.paused(self.actors, timeout=TIMEOUT, engine=self.engine):
                self.all_are("paused")
            self.all_are("resident")

    def test_where_cards_are_asked_all_actors_are_idle_first(self):
        real, calls, waited_for = self.engine.call, [], []

        def call(actor, function, *arguments):
            calls.append((function.__name__, *arguments[3:]))
            self.assertTrue(function.__name__ == "_await_idle" or all(map(has_ended, waited_for)), "an actor may be busy")
            begun = real(actor, function, *arguments)
            if function.__name__ == "_await_idle":
                waited_for.append(begun)
            return begun

        with mock.patch.dict(os.environ, AMEM_NETWORK="renew"), mock.patch.object(self.engine, "call", call):
            amem.hosts.pause(self.actors, timeout=TIMEOUT, engine=self.engine)
        self.assertEqual(calls, [("_await_idle",)] * 3 + [("_act", True)] * 3)
        self.all_are("paused")
        amem.hosts.resume(self.actors, timeout=TIMEOUT, engine=self.engine)

    def test_one_that_fails_is_named_and_the_others_undo(self):
        amem.hosts.pause(self.actors, timeout=TIMEOUT, engine=self.engine)
        self.do(self.actors[1], "fail", "Create")
        with self.assertRaisesRegex(amem.AmemError, r"rank 1 on .* failed: .*out of memory.*as before"):
            amem.hosts.resume(self.actors, timeout=TIMEOUT, engine=self.engine)
        self.all_are("paused")
        amem.hosts.resume(self.actors, timeout=TIMEOUT, engine=self.engine)
        self.all_are("resident")

    def test_a_part_that_cannot_be_undone_is_told(self):
        self.do(self.actors[0], "refuse_to_undo", "256 MiB short")
        self.begin(self.actors[1], "die")
        with self.assertRaisesRegex(amem.AmemError, "rank 1 does not answer.*; rank 0 could not undo its part: 256 MiB short$"):
            amem.hosts.pause(self.actors, timeout=TIMEOUT, engine=self.engine)
        self.all_are("paused", self.actors[:1])
        self.all_are("resident", self.actors[2:])

    def test_one_that_is_busy_finds_that_it_was_given_up(self):
        busy = self.begin(self.actors[2], "sleep", 6)
        with self.assertRaisesRegex(amem.AmemError, "rank 2 did not come within 2 s.*rank 2 will undo its part"):
            amem.hosts.pause(self.actors, timeout=2, engine=self.engine)
        self.assertIsNotNone(busy)
        self.all_are("resident")
        amem.hosts.pause(self.actors, timeout=TIMEOUT, engine=self.engine)
        self.all_are("paused")

    def test_one_that_dies_is_named(self):
        self.begin(self.actors[0], "die")
        with self.assertRaisesRegex(amem.AmemError, "rank 0 does not answer"):
            amem.hosts.pause(self.actors, timeout=TIMEOUT, engine=self.engine)
        self.all_are("resident", self.actors[1:])

    def test_an_interrupted_caller_makes_all_undo(self):
        real, waits = self.engine.wait, []

        def wait(calls, seconds):
            answers = real(calls, seconds)
            waits.append(seconds)
            if len(waits) == 1:
                raise KeyboardInterrupt
            return answers

        with mock.patch.object(self.engine, "wait", wait), self.assertRaises(KeyboardInterrupt):
            amem.hosts.pause(self.actors, timeout=TIMEOUT, engine=self.engine)
        self.assertGreater(len(waits), 1)
        self.all_are("resident")

    def test_kills_at_random(self):
        chance = random.Random(int(os.environ.get("AMEM_SEED", "7")))
        self.actors += self.make(1)
        named = 0
        for number in range(KILLS):
            with self.subTest(number):
                named += self.one_kill(chance, ("in its part", "at any time")[number % 2])
        self.assertGreater(named, 0)

    def one_kill(self, chance, when):
        """One of four dies: the others are as before and its number is told in time, or all had done it already. Returns whether it was told."""
        victim, operation = chance.randrange(4), chance.choice(("pause", "resume"))
        others = [actor for actor in self.actors if actor is not self.actors[victim]]
        if operation == "resume":
            amem.hosts.pause(self.actors, timeout=TIMEOUT, engine=self.engine)
        if when == "in its part":
            self.do(self.actors[victim], "die_in", operation)
            killer = threading.Timer(0, lambda: None)
        else:
            killer = threading.Timer(chance.uniform(0, 0.02), self.kill, [self.actors[victim]])
        began, failure = time.monotonic(), None
        killer.start()
        try:
            getattr(amem.hosts, operation)(self.actors, timeout=TIMEOUT, engine=self.engine)
        except amem.AmemError as error:
            failure = str(error)
        self.assertLess(time.monotonic() - began, TIMEOUT)
        killer.join()
        if failure is None:
            self.assertEqual(when, "at any time")
        else:
            self.assertIn("rank %d does not answer" % victim, failure)
            self.assertIn("all that live are as before", failure)
        self.all_are("paused" if (operation == "pause") == (failure is None) else "resident", others)
        amem.hosts.resume(others, timeout=TIMEOUT, engine=self.engine)
        self.actors[victim] = self.make(1)[0]
        self.all_are("resident")
        return failure is not None

    def test_what_was_paused_before_stays_paused(self):
        amem.hosts.pause(self.actors[:1], timeout=TIMEOUT, engine=self.engine)
        busy = self.begin(self.actors[2], "sleep", 3)
        with self.assertRaises(amem.AmemError):
            amem.hosts.pause(self.actors, timeout=1, engine=self.engine)
        self.assertIsNotNone(busy)
        self.all_are("paused", self.actors[:1])
        self.all_are("resident", self.actors[1:])


class OwnPart(unittest.TestCase):
    """What an actor does, in a process of its own or in this one."""

    def test_of_an_actor_without_a_gpu_is_nothing(self):
        code = ("import amem.hosts as hosts\n"
                "print([hosts._act(name, name, ('nccl', 'weights'))['failure'] for name in ('pause', 'resume')], hosts._give_up('pause'))")
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        self.assertEqual(said.stdout, "[None, None] None\n", said.stderr)

    def test_is_told_without_looking_for_the_reason(self):
        def act(*_tags):
            amem._calls.check(1)
        with mock.patch("amem._why.first_line", side_effect=AssertionError("it takes seconds")), mock.patch(
                "amem._calls.last_error", lambda: "planted"), mock.patch("amem._tags.pause", act), mock.patch("amem._hosts.has_nothing", lambda: None):
            self.assertEqual(amem.hosts._act("1", "pause", ("nccl",))["failure"], "planted")


@unittest.skipUnless(ray, "this Python has no Ray")
class WithRay(Actors):
    @classmethod
    def setUpClass(cls):
        variables = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "AMEM_LIBRARY", "PYTHONPATH", "AMEM_JOURNAL_DIR", "AMEM_SOCKET_DIR", "AMEM_USER_MEMORY", "AMEM_LOG")}
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables}, object_store_memory=100 << 20)

    @classmethod
    def tearDownClass(cls):
        ray.shutdown()

    def make(self, count):
        self.engine = amem.hosts.Ray()
        remote = ray.remote(num_cpus=1)(Worker)
        actors = [remote.remote() for _ in range(count)]
        for actor in actors:
            self.addCleanup(ray.kill, actor)
        ray.get([actor.state.remote() for actor in actors])
        return actors

    def do(self, actor, name, *arguments):
        return ray.get(getattr(actor, name).remote(*arguments))

    def begin(self, actor, name, *arguments):
        return getattr(actor, name).remote(*arguments)

    def kill(self, actor):
        ray.kill(actor)


if __name__ == "__main__":
    signal.alarm(1150)
    atexit.register(shutil.rmtree, FOLDER, True)
    unittest.main()
