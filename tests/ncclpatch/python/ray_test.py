"""amem.frameworks.ray over Ray's own actors: the real library on the stand-in driver and a stand-in NCCL. Needs Ray."""

import os
import subprocess
import sys
import tempfile
import unittest

import amem
import amem.frameworks.ray as adapter

try:
    import ray
except ImportError:
    ray = None

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "examples/ray_actors.py")


class Rank:
    """An actor with NCCL's memory and a pool, as far as there is none of PyTorch's. Ray imports nothing of this file in its workers."""

    def __init__(self):
        import ctypes

        cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
        cuda.stand_in_cuda_bytes_in_use.restype = ctypes.c_uint64
        self.cuda, self.context = cuda, context
        self.nccl = ctypes.CDLL(os.environ["TEST_NCCL"] + "/libnccl.so.2")
        import amem

        pointer = ctypes.c_void_p()
        assert self.nccl.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
        with amem.pool("weights"):
            amem._calls.lib.amem_alloc.restype = ctypes.c_void_p
            assert amem._calls.lib.amem_alloc(ctypes.c_ssize_t(8 << 20), 0, None)

    def in_use(self):
        assert self.cuda.cuCtxSetCurrent(self.context) == 0
        return self.cuda.stand_in_cuda_bytes_in_use(0)

    def forget(self):
        """From now on this actor does not know the tag, and cannot pause it."""
        import amem

        amem._tags.pause = lambda *tags: amem._calls.check(amem._calls.lib.amem_pause(*amem._tags._array(("unknown",)), 0, None))


@unittest.skipIf(ray is None, "this python has no Ray")
class Actors(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False, _temp_dir=cls.scratch.name)
        variables = {name: os.environ[name] for name in ("AMEM_LIBRARY", "PYTHONPATH", "LD_LIBRARY_PATH")}
        variables.update(TEST_NCCL=os.environ["LD_LIBRARY_PATH"], AMEM_JOURNAL_DIR=cls.scratch.name + "/journal", AMEM_USER_MEMORY="release")
        made = ray.remote(Rank).options(runtime_env=adapter.environment(**variables))
        cls.actors = [made.remote() for _ in range(4)]
        cls.before = cls.in_use()

    @classmethod
    def tearDownClass(cls):
        ray.shutdown()
        cls.scratch.cleanup()

    @classmethod
    def in_use(cls):
        return ray.get([actor.in_use.remote() for actor in cls.actors])

    def test_1_all_pause_and_resume_without_a_method_of_their_own(self):
        self.assertGreaterEqual(min(self.before), 12 << 20)
        with adapter.paused(self.actors, "weights", "nccl"):
            self.assertEqual(self.in_use(), [0, 0, 0, 0])
        self.assertEqual(self.in_use(), self.before)
        adapter.pause(self.actors)
        self.assertEqual(self.in_use(), [one - (4 << 20) for one in self.before])
        adapter.resume(self.actors)

    def test_2_an_exception_in_between_resumes(self):
        with self.assertRaises(KeyError), adapter.paused(self.actors, "weights"):
            raise KeyError
        self.assertEqual(self.in_use(), self.before)

    def test_3_results_come_in_order(self):
        self.assertEqual(adapter.call(self.actors, lambda rank, a, b: a + b, 1, 2), [3, 3, 3, 3])

    def test_4_when_one_fails_the_others_run_on_and_the_reason_is_raised(self):
        ray.get(self.actors[1].forget.remote())
        with self.assertRaises(amem.AmemError) as caught:
            adapter.pause(self.actors, "weights")
        self.assertRegex(str(caught.exception), r"rank 1 on .* failed: .*known: weights, nccl")
        self.assertEqual(self.in_use(), self.before)


@unittest.skipIf(ray is None, "this python has no Ray")
class Example(unittest.TestCase):
    def test_it_runs_without_gpus(self):
        try:
            import torch  # noqa: F401
        except ImportError:
            self.skipTest("this python has no PyTorch")
        environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", AMEM_ENABLE="0")
        done = subprocess.run([sys.executable, EXAMPLE, "--actors", "2", "--steps", "2", "--cpu"], env=environment, capture_output=True,
                              text=True, timeout=240, check=False)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])


if __name__ == "__main__":
    unittest.main()
