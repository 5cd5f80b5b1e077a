"""Pools, pause, resume and wait by tag, and torch_memory_saver's calls, on a stand-in for the library. No PyTorch is needed."""

import contextlib
import os
import pickle
import sys
import threading
import traceback
import types
import unittest
import warnings
from unittest import mock

import amem
import amem.frameworks
import amem.rl
import fake_library

NO_WAIT, ON_STREAM = 1, 2


class OnTheFake(unittest.TestCase):
    def setUp(self):
        context = fake_library.installed()
        self.library, _ = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)


class Tags(OnTheFake):
    def test_a_tag_is_known_from_its_adoption_on_also_where_no_tensor_exists_yet(self):
        with mock.patch.object(amem._pools, "backend", lambda: fake_library.Cpu(None)):
            self.assertEqual(amem._adopt.move_storages({}, "optimizer", "discard", {}).storages, 0)
        with amem.paused("optimizer"):
            self.assertEqual(self.library.states["optimizer"], "paused")
        self.assertEqual(self.library.policies["optimizer"], 1)

    def test_without_tags_it_is_nccls_memory_by_the_call_of_old(self):
        amem.pause()
        amem.resume()
        for tags in ((), ("nccl",)):
            with amem.paused(*tags):
                self.assertEqual(self.library.states["nccl"], "paused")
        self.assertEqual(self.library.calls, [("ncclPause",), ("ncclResume",)] * 3)

    def test_tags_go_to_the_library_in_their_order_with_the_flags(self):
        with amem.pool("a"), amem.pool("b", "discard"):
            pass
        amem.pause("b", "nccl", "a")
        amem.resume("a", wait=False, priority=-3)
        amem.wait("a")
        amem.resume("b", "nccl")
        self.assertEqual(self.library.calls[-4:], [("pause", ("b", "nccl", "a"), 0, None), ("resume", ("a",), NO_WAIT, -3),
                                                   ("wait", "a"), ("resume", ("b", "nccl"), 0, 0)])

    def test_a_stream_is_a_number_or_has_one_and_zero_is_the_default_stream(self):
        with amem.pool("a"):
            pass
        high = 0x7F00_1234_5678  # a pointer, longer than an int
        amem.pause("a", wait=False, stream=types.SimpleNamespace(cuda_stream=high))
        amem.pause("a", stream=0)
        amem.resume("a")
        amem.wait("a", stream=high)
        self.assertEqual(self.library.named("pause"), [("pause", ("a",), NO_WAIT | ON_STREAM, high), ("pause", ("a",), ON_STREAM, None)])
        self.assertEqual(self.library.named("wait on"), [("wait on", "a", high)])
        for wrong in ("s", 1.5, True):
            with self.assertRaises(TypeError):
                amem.wait("a", stream=wrong)

    def test_an_unknown_tag_is_an_error_that_lists_the_known_ones(self):
        for call in (amem.pause, amem.resume, amem.wait):
            with self.assertRaises(amem.AmemError) as caught:
                call("wieghts")
            self.assertEqual(caught.exception.code, 4)
            self.assertIn("nccl, user", str(caught.exception))
        for wrong in (b"a", "", None):
            with self.assertRaises(TypeError):
                amem.pause(wrong)

    def test_a_list_of_tags_is_told_what_to_write(self):
        for call in (amem.pause, amem.resume, lambda tags: amem.paused(tags).__enter__()):
            for tags in (["a", "b"], ("a",), {"a"}):
                with self.assertRaisesRegex(TypeError, r'write several as \("weights", "nccl"\), or as \(\*tags\)'):
                    call(tags)
        self.assertEqual(self.library.calls, [])
        amem.pause("nccl")
        self.assertEqual(self.library.states["nccl"], "paused")

    def test_a_pause_says_what_it_freed_and_what_was_paused_already(self):
        with amem.pool("a"), amem.pool("b"):
            pass
        self.library.sizes = {"nccl": 8 << 20, "a": 3 << 20, "b": 1000}
        self.library.kept = {"nccl": 1 << 20, "a": 512}
        with amem.paused("a") as outer:
            self.assertEqual(outer[:4], (3 << 20, {"a": 3 << 20}, (), 512))
            self.assertEqual(outer.left, {"tag nccl": 8 << 20, "tag b": 1000, "not AMem's": 1 << 20})
            self.assertEqual(outer.used, outer.bytes + sum(outer.left.values()))
            self.assertEqual(str(outer), "3 MiB freed (3 MiB a); 512 bytes kept; on the GPU now: 8 MiB tag nccl, 1000 bytes tag b, 1 MiB not AMem's")
            with amem.paused("b", "a", "nccl") as inner:
                self.assertEqual(inner[:4], (1000 + (8 << 20), {"b": 1000, "a": 0, "nccl": 8 << 20, "user": 0}, ("a",), 1 << 20))
                self.assertEqual((inner.left, inner.used), ({"not AMem's": 1 << 20}, inner.bytes + (1 << 20)))
            self.assertEqual(self.library.states["a"], "paused")
            self.assertTrue(str(amem.pause("a")).startswith("nothing freed; a: paused already; on the GPU now: "))
        self.assertEqual(self.library.states["a"], "paused", "the plain pause wants it")
        amem.resume("a")
        self.assertEqual(amem.pause("a").bytes, 3 << 20)
        self.assertEqual(amem.pause("a").bytes, 0)

    def test_a_pause_of_the_program_says_what_came_too_early_or_is_left_to_the_driver(self):
        with amem.pool("program"):
            pass
        self.library.sizes = {"program": 3 << 20}
        real = amem._tags.memory

        def memory():
            said = real()
            rows = [{**row, "part_bytes": 3 << 20} if row["tag"] == "program" else row for row in said["tags"]]
            return {**said, "tags": rows, "left": {"cuMemCreate": {"allocations": 2, "bytes": 1 << 20}}}

        cuda = types.SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2, memory_reserved=lambda device: (4 + device) << 20)
        with mock.patch.dict(sys.modules, torch=types.SimpleNamespace(cuda=cuda)), mock.patch.object(amem._tags, "memory", memory):
            for scope, kept in (("nccl", 1), ("all", 1 + 4 + 5 - 3 - 1)):
                with mock.patch.dict("os.environ", AMEM_SCOPE=scope), self.subTest(scope):
                    with contextlib.nullcontext() if scope == "nccl" else self.assertLogs("amem", "WARNING") as said:
                        self.assertEqual(amem.pause("program").kept, kept << 20)
                    amem.resume("program")
        self.assertIn("5 MiB of PyTorch's memory were allocated before AMem was there", said.output[0])

    def test_the_account_of_two_pauses_is_their_sum_and_what_the_last_one_left(self):
        freed = amem._tags.Freed
        both = amem._tags.together(freed(3, {"a": 3}, ("b",), 1, {"tag nccl": 8}, 12, ("a",)), freed(8, {"nccl": 8}, (), 2, {"not AMem's": 1}, 9))
        self.assertEqual(both, freed(11, {"a": 3, "nccl": 8}, ("b",), 3, {"not AMem's": 1}, 12, ("a",)))

    def test_an_error_stays_what_it_is_in_another_process(self):
        error = amem.AmemError(4, "no tag", "rank 1 did it")
        self.assertEqual("".join(traceback.format_exception_only(type(error), error)), "amem.AmemError: no tag\nrank 1 did it\n")
        copy = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(copy), copy.code, copy.why, str(copy)), (type(error), 4, "rank 1 did it", "no tag\nrank 1 did it"))

    def test_paused_resumes_after_an_exception_and_not_when_the_pause_failed(self):
        with amem.pool("a"):
            pass
        with self.assertRaises(KeyError), amem.paused("a"):
            self.assertEqual(self.library.states["a"], "paused")
            raise KeyError
        self.assertEqual(self.library.states["a"], "resident")
        self.library.fail["amem_pause", "a"] = (1, "no host memory")
        with self.assertRaisesRegex(amem.AmemError, "no host memory"), amem.paused("a"):
            self.fail("must not run")
        self.assertEqual(len(self.library.named("resume")), 1)

    def test_a_failure_of_a_resume_without_waiting_comes_with_the_wait(self):
        with amem.pool("a"):
            pass
        amem.pause("a")
        self.library.fail["amem_wait", "a"] = (1, "256 MiB short")
        amem.resume("a", wait=False)
        with self.assertRaisesRegex(amem.AmemError, "256 MiB short"):
            amem.wait("a")
        self.assertEqual(self.library.states["a"], "paused")

    def test_memory_is_the_librarys_json(self):
        with amem.pool("a", "discard"):
            pass
        amem.pause("a")
        rows = {row["tag"]: row for row in amem.memory()["tags"]}
        self.assertEqual((rows["a"]["state"], rows["a"]["policy"], rows["nccl"]["state"]), ("paused", "discard", "resident"))


class Blocks(OnTheFake):
    """paused() inside of paused(), and interrupts in it."""

    def setUp(self):
        super().setUp()
        for tag in ("a", "b"):
            with amem.pool(tag):
                pass

    def states(self):
        return [self.library.states[tag] for tag in ("a", "b", "nccl")]

    def test_what_an_outer_block_has_paused_stays_paused_until_that_one_ends(self):
        with amem.paused(), amem.paused("a"):
            with amem.paused():
                pass
            with amem.paused("a", "b", "nccl"):
                self.assertEqual(self.states(), ["paused"] * 3)
            self.assertEqual(self.states(), ["paused", "resident", "paused"])
            with self.assertRaises(KeyError), amem.paused("nccl", "a", "a"):
                raise KeyError
            self.assertEqual(self.states(), ["paused", "resident", "paused"])
        self.assertEqual(self.states(), ["resident"] * 3)
        with amem.paused("a"):
            pass
        self.assertEqual(self.states(), ["resident"] * 3)

    def test_an_inner_block_that_fails_leaves_the_outer_one_as_it_is(self):
        with amem.paused("a"):
            self.library.fail["amem_pause", "b"] = (1, "no host memory")
            with self.assertRaisesRegex(amem.AmemError, "no host memory"), amem.paused("a", "b"):
                self.fail("entered")
            self.assertEqual(self.states(), ["paused", "resident", "resident"])
        self.assertEqual(self.states(), ["resident"] * 3)

    def test_a_rollout_in_a_block_and_a_block_in_a_rollout(self):
        self.library.nccl_libraries = [{"under_amem": True}]
        offload = amem.rl.RolloutOffload([], None)
        with mock.patch.object(offload, "adopt", dict), mock.patch.object(offload, "_discarded", list):
            with amem.paused():
                with offload.rollout():
                    self.assertEqual(self.library.states["nccl"], "paused")
                self.assertEqual(self.library.states["nccl"], "paused")
            self.assertEqual(self.library.states["nccl"], "resident")
            with offload.rollout():
                with amem.paused():
                    pass
                self.assertEqual(self.library.states["nccl"], "paused")
            self.assertEqual(self.library.states["nccl"], "resident")

    def interrupted(self, block):
        """An interrupt that surfaces when the library's pause has succeeded, and before anything else is done."""
        check = amem._calls.check

        def surfaces(code):
            check(code)
            amem._calls.check = check
            self.assertIn("paused", self.library.states.values())
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            amem._calls.check = surfaces
            try:
                with block():
                    self.fail("entered")
            finally:
                amem._calls.check = check
        self.assertNotIn("paused", self.library.states.values())

    def test_an_interrupt_during_the_pause_leaves_nothing_paused(self):
        for tags in ((), ("nccl",), ("a", "nccl"), ("b",)):
            with self.subTest(tags):
                self.interrupted(lambda chosen=tags: amem.paused(*chosen))
        with amem.paused("a"):
            with self.assertRaises(AssertionError):  # "a" is the outer block's
                self.interrupted(lambda: amem.paused("a", "b"))
            self.assertEqual(self.states(), ["paused", "resident", "resident"])

    def test_an_interrupt_during_the_pause_of_a_rollout_leaves_nothing_paused(self):
        self.library.nccl_libraries = [{"under_amem": True}]
        for way in ("rollout", "pause"):
            offload = amem.rl.RolloutOffload([], None)
            with mock.patch.object(offload, "adopt", dict), mock.patch.object(offload, "_discarded", list), mock.patch("amem.frameworks.nccl_is_under_amem", lambda: True):
                self.interrupted(offload.rollout if way == "rollout" else lambda one=offload: contextlib.nullcontext(one.pause()))
                self.assertFalse(offload.in_rollout())
                with offload.rollout():
                    self.assertEqual(self.library.states["nccl"], "paused")

    def test_a_rollout_that_cannot_ask_about_nccl_leaves_nothing_paused(self):
        offload, asks = amem.rl.RolloutOffload([], None), mock.Mock(side_effect=amem.AmemError(3, "no memory left"))
        offload._tags.names["parameters"], offload._tags.in_use = "a", {"parameters"}
        with mock.patch.object(offload, "adopt", dict), mock.patch.object(offload, "_discarded", list), mock.patch("amem.frameworks.nccl_is_under_amem", asks):
            with self.assertRaisesRegex(amem.AmemError, "no memory left"), offload.rollout():
                self.fail("entered")
        self.assertEqual(self.states(), ["resident"] * 3)
        self.assertFalse(offload.in_rollout())

    def test_a_rollout_with_amem_enable_0_wraps_nothing(self):
        class Optimizer:
            def step(self):
                pass

        for off in (True, False):
            optimizer = Optimizer()
            with mock.patch.object(amem._calls, "lib", amem._library.Off() if off else self.library), self.subTest(off=off):
                amem.rl.RolloutOffload([], optimizer)
                self.assertEqual("step" in vars(optimizer), not off)

    def test_an_adapter_resumes_what_an_interrupt_left_paused(self):
        self.library.nccl_libraries = [{"under_amem": True}]
        with self.assertRaises(AssertionError):  # it is for the framework's next phase to resume it
            self.interrupted(lambda: contextlib.nullcontext(amem.frameworks.pause_nccl()))
        amem.frameworks.resume_nccl()
        self.assertEqual(self.states(), ["resident"] * 3)


class Pools(OnTheFake):
    def test_a_pool_is_opened_entered_and_left_also_after_an_exception(self):
        with self.assertRaises(KeyError), amem.pool("a", policy="discard"):
            self.assertEqual(self.library.stack, ["a"])
            raise KeyError
        self.assertEqual(self.library.calls, [("pool", "a", 1), ("enter", "a"), ("leave", "a")])

    def test_pools_nest(self):
        with amem.pool("a"):
            with amem.pool("b"):
                self.assertEqual(self.library.stack, ["a", "b"])
            self.assertEqual(self.library.stack, ["a"])
        self.assertEqual(self.library.stack, [])

    def test_another_policy_or_a_reserved_name_is_refused(self):
        with amem.pool("a"):
            pass
        for tag, policy in (("a", "discard"), ("nccl", "preserve")):
            with self.assertRaises(amem.AmemError) as caught, amem.pool(tag, policy):
                self.fail("must not run")
            self.assertEqual(caught.exception.code, 4)
        with self.assertRaisesRegex(ValueError, "'preserve' or 'discard'"), amem.pool("a", "save"):
            self.fail("must not run")
        self.assertEqual(self.library.stack, [])


class FakeTorchSide(OnTheFake):
    """What amem.pool does with PyTorch's MemPools: never two of one thread in use at once, whatever is nested."""

    def setUp(self):
        super().setUp()
        self.side = amem._pools._backend = fake_library.Cpu(torch=None)
        amem._pools.backend = lambda: self.side  # put back by the fake library's context

    def test_the_innermost_pool_alone_is_in_use(self):
        with amem.pool("a", device=[0, 1, 1]):
            self.assertEqual(self.side.entered, [("a", 0), ("a", 1)])
            with amem.pool("b", device=1):
                self.assertEqual(self.side.entered, [("b", 1)])
                with amem._pools.outside():
                    self.assertEqual(self.side.entered, [])
                self.assertEqual(self.side.entered, [("b", 1)])
            self.assertEqual(self.side.entered, [("a", 0), ("a", 1)])
        self.assertEqual(self.side.entered, [])

    def test_an_exception_inside_leaves_the_outer_pool_in_use(self):
        with amem.pool("a", device=0):
            with self.assertRaises(KeyError), amem.pool("b", device=0):
                raise KeyError
            self.assertEqual(self.side.entered, [("a", 0)])
        self.assertEqual((self.side.entered, self.library.stack), ([], []))

    def test_another_thread_is_outside(self):
        seen = []
        with amem.pool("a", device=0):
            thread = threading.Thread(target=lambda: seen.append(list(amem._pools._routing.entries)))
            thread.start()
            thread.join()
        self.assertEqual(seen, [[]])


class PyTorch:
    """The functions of torch.cuda that pools use, with what they were given."""

    __version__ = "2.11.0"

    class MemPool:
        made = []

        def __init__(self, allocator):
            self.id = (0, 1 + len(self.made))
            self.made.append((allocator, PyTorch.current[-1]))

    class CUDAPluggableAllocator:
        def __init__(self, path, allocate, free):
            self.functions = path, allocate, free

        def allocator(self):
            return self.functions

    current = [0]
    log = []

    def __init__(self):
        self.MemPool.made, self.log = [], []
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True, MemPool=self.MemPool, memory=self, use_mem_pool=self.use_mem_pool, device=self.device,
            _utils=types.SimpleNamespace(_get_device_index=lambda device, optional: 0 if device is None else device),
            memory_snapshot=lambda: self.snapshot, memory_stats=lambda device: {"allocated_bytes.all.allocated": self.allocated} if self.allocated else {})
        self.snapshot, self.allocated = [], 0

    @contextlib.contextmanager
    def device(self, index):
        self.current.append(index)
        yield
        self.current.pop()

    @contextlib.contextmanager
    def use_mem_pool(self, pool, device):
        self.log.append(("use", pool.id, device))
        yield
        self.log.append(("leave", pool.id, device))


class MemPools(OnTheFake):
    """What amem._pools.Cuda asks of PyTorch."""

    def test_what_lands_elsewhere_than_in_its_pool_is_said_once_at_the_end_of_the_block(self):
        self.library.bypassed = True
        self.addCleanup(amem._pools._landed.clear)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with amem.pool("empty"):
                pass
            for _ in range(2):
                with amem.pool("weights"):
                    self.torch.allocated += 1000
            self.library.sizes = {"cache": 1 << 20}
            with amem.pool("cache"):
                self.torch.allocated += 1000
        self.assertEqual([str(one.message)[:55] for one in said], ["amem.pool: PyTorch allocated outside the pool 'weights'"])
        self.assertTrue(str(said[0].message).endswith("; a pause will not free it"))
        self.assertEqual(said[0].filename, __file__)

    def test_what_is_left_on_a_gpu_sums_up_to_what_is_used_whatever_pids_are_known(self):
        row = {"device": 0, "used_bytes": 100, "taken": {}, "running": {"a": 60}, "kept": {}}
        me, other = {"pid": os.getpid(), "name": "me", "bytes": 70}, {"pid": 77, "name": "other", "bytes": 30}
        for processes, left in (([me, other], {"tag a": 60, "process 77 (other)": 30, "contexts, modules, libraries": 10}),
                                ([other], {"tag a": 60, "contexts, modules, libraries, other processes": 40}),  # which one is this, in a container?
                                ([me, {**other, "bytes": 50}], {"tag a": 60, "process 77 (other)": 50, "counted more than once": -10})):
            with self.subTest(processes):
                self.assertEqual(amem._account._gpu(row, {}, {0: processes}).left, left)
                self.assertEqual(sum(left.values()), 100)

    def test_pytorchs_memory_on_a_device_is_told_apart_from_amems(self):
        with amem.pool("weights"):
            pass
        (mine,) = (tuple(pool.id) for pool in self.side._pools.values())
        self.torch.snapshot = [{"device": device, "address": 0, "total_size": size, "allocated_size": used, "segment_pool_id": pool}
                               for device, size, used, pool in ((0, 100, 60, (0, 0)), (0, 50, 50, mine), (0, 30, 10, (0, 9)), (1, 7, 7, (0, 0)))]
        self.assertEqual(amem._pools.backend().usage(0), {"PyTorch's tensors": 60, "PyTorch's caches": 40, "PyTorch's private pools (CUDA graphs)": 30})
        self.assertEqual(amem._pools.backend().usage(1), {"PyTorch's tensors": 7})

    def setUp(self):
        super().setUp()
        self.torch = PyTorch()
        self.side = amem._pools._backend = amem._pools.Cuda(self.torch)
        amem._pools.backend = lambda: self.side

    def test_there_is_one_for_each_tag_and_device_on_amems_allocator(self):
        for tag, device in (("a", 0), ("a", 1), ("b", None), ("a", 1)):
            with amem.pool(tag, device=device):
                pass
        functions = (amem._library.find(), "amem_alloc", "amem_free")
        self.assertEqual(self.torch.MemPool.made, [(functions, 0), (functions, 1), (functions, 0)])
        self.assertEqual([entry for entry in self.torch.log if entry[0] == "use"],
                         [("use", (0, 1), 0), ("use", (0, 2), 1), ("use", (0, 3), 0), ("use", (0, 2), 1)])

    def test_memory_is_known_by_its_mempool_also_after_that_is_dropped(self):
        with amem.pool("a"), amem.pool("b"):
            pass
        self.side.drop("a")
        with amem.pool("a"):
            pass
        self.assertEqual(len(self.torch.MemPool.made), 3)
        self.torch.snapshot = [{"address": 100 * number, "total_size": 50, "segment_pool_id": pool}
                               for number, pool in enumerate(((0, 0), (0, 1), (0, 2), (0, 3), (7, 0)))]
        self.assertEqual(self.side.segments(), [(100, 150, "a"), (200, 250, "b"), (300, 350, "a"), (400, 450, None)])

    def test_pools_outlive_the_interpreter(self):
        with amem.pool("a"):
            pass
        (pool,) = self.side._pools.values()
        before = sys.getrefcount(pool)
        self.side._outlive_the_interpreter()
        self.assertEqual(sys.getrefcount(pool), before)  # the dict's is gone, and one that nobody gives back is there
        self.assertEqual(self.side._pools, {})

    def test_an_older_pytorch_is_an_error_in_words(self):
        """Until 2.8 a MemPool is there, and takes what other threads allocate as well."""
        for version, works in (("2.7.1", False), ("2.8.0a0+gitabc", True), ("2.10.0+cu130", True), ("3.0", True), ("1.13.1", False), ("2.4.0", False)):
            self.torch.__version__ = version
            if version == "2.4.0":
                del self.torch.cuda.MemPool
            with self.subTest(version):
                if works:
                    with amem.pool("of " + version):
                        pass
                    continue
                with self.assertRaisesRegex(amem.AmemError, "PyTorch 2.8 or later, and this is " + version) as caught, amem.pool("a"):
                    self.fail("must not run")
                self.assertEqual(caught.exception.code, 5)
                self.assertEqual(self.library.stack, [])


class Saver(OnTheFake):
    """torch_memory_saver's calls on AMem."""

    class Original:
        """As the package's object before its first use."""

        def __init__(self):
            self._impl_ctor_kwargs, self._impl = {}, None

        def region(self, tag="default", enable_cpu_backup=False):
            raise AssertionError("the original must not be called")

        pause = resume = region

    def test_regions_pauses_and_resumes_are_pools_and_tags(self):
        saver = amem.wrap()
        with saver.region(tag="weights", enable_cpu_backup=True):
            self.assertEqual(self.library.stack, ["weights"])
        with saver.region("kv"):
            pass
        with saver.region():
            pass
        saver.pause("weights")
        saver.resume("weights")
        saver.pause()
        saver.resume()
        everything = ("weights", "kv", "default")
        self.assertEqual(self.library.named("pool"), [("pool", "weights", 0), ("pool", "kv", 1), ("pool", "default", 1)])
        self.assertEqual([call[1] for call in self.library.named("pause")], [("weights",), everything])
        self.assertEqual([call[1] for call in self.library.named("resume")], [("weights",), everything])
        with self.assertRaises(amem.AmemError):
            saver.pause("nothing")

    def test_newer_settings_are_accepted_and_a_backup_of_either_kind_is_one(self):
        saver = amem.wrap()
        with saver.region("a", enable_disk_backup=True), saver.region("a", True, cpu_backup_backend="mmap"):
            saver.set_disk_backup_dir("/somewhere")
            saver.retain_cpu_backup = True
        self.assertEqual(self.library.named("pool"), [("pool", "a", 0)] * 2)

    def test_one_tag_with_two_policies_is_paused_as_one(self):
        saver = amem.wrap()
        with saver.region("a", enable_cpu_backup=True):
            pass
        with saver.region("a", enable_cpu_backup=False):
            self.assertEqual(self.library.stack, ["a.discard"])
        saver.pause("a")
        self.assertEqual(self.library.named("pause")[-1][1], ("a", "a.discard"))

    def test_the_object_that_others_hold_is_the_one_that_changes(self):
        module = types.ModuleType("torch_memory_saver")
        held_by_others = module.torch_memory_saver = self.Original()
        self.assertIs(amem.wrap(module), held_by_others)
        self.assertIs(amem.wrap(module), held_by_others)  # again: harmless
        with held_by_others.region("a"):
            pass
        held_by_others.hook_mode = "torch"
        held_by_others.memory_margin_bytes = 1 << 30
        with module.configure_subprocess():
            held_by_others.pause("a")
        self.assertTrue(held_by_others.enabled)
        self.assertEqual(self.library.states["a"], "paused")
        for call in (held_by_others.cuda_graph, held_by_others.get_cpu_backup):
            with self.assertRaises(NotImplementedError):
                call(None)

    def test_it_is_refused_after_the_first_use_and_for_something_else(self):
        used = self.Original()
        used._impl = object()
        with self.assertRaisesRegex(RuntimeError, "before its first"):
            amem.wrap(used)
        with self.assertRaises(TypeError):
            amem.wrap(3)


if __name__ == "__main__":
    unittest.main()
