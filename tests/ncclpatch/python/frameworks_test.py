"""The adapters of amem.frameworks, on a stand-in for the library. With FRAMEWORK_RELEASES=FOLDER (./run frameworks-test) on the code of the
releases that lie there, else on stand-ins whose signatures are those that the releases were found to have (frameworks/contracts.json)."""

import asyncio
import contextlib
import inspect
import os
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(HERE, "../../../ncclpatch/python")
sys.path[:0] = [os.path.join(HERE, "frameworks"), PACKAGE, os.path.join(HERE, "examples")]
sys.dont_write_bytecode = True
import amem  # noqa: E402
import amem_plugins  # noqa: E402
import fake_library  # noqa: E402
import released  # noqa: E402
import released_code  # noqa: E402
import sketches  # noqa: E402
import stand_ins  # noqa: E402
import store_for_tests  # noqa: E402
from amem import _hosts, frameworks  # noqa: E402
from amem.frameworks import groups, trl, verl  # noqa: E402

RELEASES = released_code.releases(os.environ.get("FRAMEWORK_RELEASES", ""))


class OnTheFake(unittest.TestCase):
    def setUp(self):
        self.library, _ = self.enter(fake_library.installed())
        self.library.nccl_libraries = [{"under_amem": True}]
        self.addCleanup(setattr, frameworks, "_paused", False)

    def enter(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def state(self, tag):
        return self.library.states[tag]

    def paused_and_resumed(self):
        return [call[0] if call[0].startswith("nccl") else (call[0], *call[1]) for call in self.library.calls
                if call[0] in ("pause", "resume", "ncclPause", "ncclResume")]


def project(name, *arguments):
    """The modules of a project: released, or stand-ins."""
    if name in RELEASES:
        return getattr(released_code, name)(RELEASES[name], *arguments)
    return getattr(stand_ins, name)(*arguments)


class Vllm(OnTheFake):
    def setUp(self):
        super().setUp()
        self.modules = self.enter(stand_ins.imported(project("vllm"), without=["amem.frameworks.vllm"]))
        self.enter(mock.patch.object(amem, "version", return_value="0", create=True))
        self.factory = self.modules["vllm.device_allocator.sleep_mode_backend"].SleepModeBackendFactory
        self.allocators = self.modules["vllm.device_allocator.cumem"].CuMemAllocator
        amem_plugins.vllm()

    def worker(self, backend="amem", enable_nccl_comm_suspend=False, executor="mp"):
        model = types.SimpleNamespace(sleep_mode_backend=backend, enable_sleep_mode=True, enable_cumem_allocator=True,
                                      enable_nccl_comm_suspend=enable_nccl_comm_suspend)
        config = mock.MagicMock(model_config=model)
        config.parallel_config.distributed_executor_backend = executor
        return self.modules["vllm.v1.worker.gpu_worker"].Worker(config, 0, 0, "tcp://127.0.0.1:1")

    def loaded(self, **options):
        worker = self.worker(**options)
        for tag, name in (("weights", "vllm.weights"), ("runtime", "vllm.runtime")):
            with worker._maybe_get_memory_pool_context(tag=tag):
                self.assertEqual(self.library.stack, [name])
        with worker._maybe_get_memory_pool_context(tag="runtime"), worker._maybe_get_memory_pool_context(tag="kv_cache"):
            self.assertEqual(self.library.stack, ["vllm.runtime", "vllm.kv_cache"])
        return worker

    def test_the_plugin_registers_a_backend_and_loads_nothing_for_others(self):
        with self.assertNoLogs("amem"):
            amem_plugins.vllm()  # again: harmless
        self.assertNotIn("amem.frameworks.vllm", sys.modules)
        self.worker("cumem")
        self.assertNotIn("amem.frameworks.vllm", sys.modules)
        self.assertIsNone(self.allocators.instance)
        self.assertEqual(self.library.calls, [])

    def test_weights_are_saved_and_caches_are_not(self):
        self.loaded()
        self.assertEqual({call[1:] for call in self.library.named("pool")}, {("vllm.weights", 0), ("vllm.runtime", 0), ("vllm.kv_cache", 1)})

    def test_sleep_pauses_tensors_and_nccl_by_one_call_and_a_wake_up_brings_nccl_first(self):
        for level in (1, 2):
            with self.subTest(level=level):
                self.setUp()
                worker = self.loaded()
                worker.sleep(level)
                self.assertEqual(self.paused_and_resumed(), [("pause", "vllm.weights", "vllm.runtime", "vllm.kv_cache", "nccl")])
                self.assertEqual(worker.sleep_mode_backend.state(), "SUSPENDED")
                self.library.calls.clear()
                worker.wake_up(["weights"])
                self.assertEqual(self.paused_and_resumed(), ["ncclResume", ("resume", "vllm.weights", "vllm.runtime")])
                self.assertEqual((self.state("vllm.weights"), self.state("vllm.kv_cache"), self.state("nccl")), ("resident", "paused", "resident"))
                worker.wake_up(["kv_cache"])
                self.assertEqual((self.state("vllm.kv_cache"), worker.sleep_mode_backend.state()), ("resident", "RUNNING"))
                worker.sleep(level)
                worker.wake_up()
                self.assertNotIn("paused", self.library.states.values())

    def test_graphs_go_with_a_sleep_if_vllm_is_told_to_offload_them(self):
        config = self.modules["vllm.config.vllm"].VllmConfig.__new__(self.modules["vllm.config.vllm"].VllmConfig)
        config.compilation_config = types.SimpleNamespace(cudagraph_mode="FULL")  # of the modes all but NONE
        for backend, offloads, wanted in (("amem", True, True), ("amem", False, False), ("cumem", True, True), ("criu", True, False)):
            config.model_config = types.SimpleNamespace(sleep_mode_backend=backend, sleep_mode_offload_cudagraph=offloads, enable_sleep_mode=True)
            self.assertEqual(config.use_cumem_cudagraph_pool, wanted, (backend, offloads))
        worker = self.loaded()
        allocator = self.allocators.get_instance()
        dropped, ids = [], []
        side = types.SimpleNamespace(device_index=lambda device: 0, pool_for_graphs=lambda tag: (0, 7), drop=dropped.append,
                                     empty_cache=lambda: None, allocated_ever=lambda devices: 0, routed=lambda tag, device: contextlib.nullcontext())
        with mock.patch.object(amem._pools, "backend", lambda: side), mock.patch.object(amem._pools, "_backend", side):
            for _ in range(2):
                with allocator.cudagraph_pool() as pool:
                    ids.append((pool, list(self.library.stack)))
            with worker._maybe_get_memory_pool_context(tag="runtime"):
                pass
        self.assertEqual(ids, [((0, 7), ["vllm.cudagraph"])] * 2)
        self.assertIn(("pool", "vllm.cudagraph", 0), self.library.calls, "contents are saved")
        self.assertNotIn("vllm.cudagraph", dropped, "a later capture takes from the same pool")
        worker.sleep(2)
        self.assertEqual(self.state("vllm.cudagraph"), "paused")
        worker.wake_up(["weights"])
        self.assertEqual((self.state("vllm.cudagraph"), self.state("vllm.kv_cache")), ("resident", "paused"))

    def test_a_step_on_memory_that_is_asleep_is_an_error_and_no_fault(self):
        steps = []
        with mock.patch.object(self.modules["vllm.v1.worker.worker_base"].WorkerBase, "execute_model", lambda worker, output: steps.append(output), create=True):
            worker = self.loaded()
            step, nothing = (types.SimpleNamespace(total_num_scheduled_tokens=count) for count in (3, 0))
            worker.execute_model(step)
            worker.sleep(1)
            worker.execute_model(nothing)
            with self.assertRaisesRegex(RuntimeError, "while asleep: its memory under weights, runtime, kv_cache is paused"):
                worker.execute_model(step)
            worker.wake_up(["weights"])
            with self.assertRaisesRegex(RuntimeError, "while asleep: its memory under kv_cache"):
                worker.execute_model(step)
            worker.wake_up(["kv_cache"])
            worker.execute_model(step)
        self.assertEqual(steps, [step, nothing, step])

    def test_a_step_that_rays_compiled_graph_asks_the_runner_for_is_guarded_too(self):
        steps = []
        runner = types.SimpleNamespace(execute_model=lambda scheduler_output, intermediate_tensors=None: steps.append(scheduler_output))
        step, nothing = (types.SimpleNamespace(total_num_scheduled_tokens=count) for count in (3, 0))
        for name in ("init_device", "load_model"):
            steps.clear()
            self.setUp()
            made = types.SimpleNamespace(execute_model=runner.execute_model)
            with mock.patch.object(self.modules["vllm.v1.worker.gpu_worker"].Worker, name, lambda worker, made=made: setattr(worker, "model_runner", made), create=True):
                worker = self.loaded()
                getattr(worker, name)()
            worker.model_runner.execute_model(step, None)  # as RayWorkerWrapper.execute_model_ray
            worker.sleep(1)
            worker.model_runner.execute_model(nothing, None)
            for call in (lambda: worker.model_runner.execute_model(step, None), lambda: worker.model_runner.execute_model(scheduler_output=step)):
                with self.assertRaisesRegex(RuntimeError, "while asleep: its memory under weights, runtime, kv_cache is paused"):
                    call()
            worker.wake_up()
            worker.model_runner.execute_model(step, None)
            self.assertEqual(steps, [step, nothing, step])

    def test_a_discard_of_the_cache_leaves_weights_and_nccl(self):
        worker = self.loaded()
        worker.discard(("kv_cache",))
        self.assertEqual(self.paused_and_resumed(), [("pause", "vllm.kv_cache")])
        worker.wake_up(["kv_cache"])
        self.assertEqual(self.state("vllm.kv_cache"), "resident")

    def test_a_sleep_that_fails_leaves_all_running_and_can_be_tried_again(self):
        worker = self.loaded()
        self.library.fail["amem_pause", "nccl"] = (1, "rank 1 did not come")
        with self.assertRaisesRegex(amem.AmemError, "did not come"):
            worker.sleep(1)
        self.assertNotIn("paused", self.library.states.values())
        self.assertEqual(worker.sleep_mode_backend.state(), "RUNNING")
        self.library.fail.clear()
        worker.sleep(1)
        self.library.fail["amem_resume", "vllm.weights"] = (1, "256 MiB short")
        with self.assertRaisesRegex(amem.AmemError, "256 MiB short"):
            worker.wake_up()
        self.assertEqual(worker.sleep_mode_backend.state(), "SUSPENDED")
        self.library.fail.clear()
        worker.wake_up()
        self.assertNotIn("paused", self.library.states.values())

    def test_a_wake_up_waits_for_memory_that_another_engine_is_still_giving_back(self):
        worker = self.loaded()
        worker.sleep(1)
        self.library.too_little = 2
        with self.assertLogs("amem", "WARNING") as logged:
            worker.wake_up()
        self.assertIn("resume of nccl waits for memory, up to 5 s: device 0 has too little", logged.output[0])
        self.assertEqual([call[1] for call in self.library.named("ask")], [("nccl",)] * 3 + [("vllm.weights", "vllm.runtime", "vllm.kv_cache")])
        self.assertNotIn("paused", self.library.states.values())

    def test_without_nccl_under_amem_tensors_go_alone(self):
        self.library.nccl_libraries = []
        worker = self.loaded()
        worker.sleep(1)
        worker.wake_up()
        self.assertEqual(self.paused_and_resumed(), [("pause", "vllm.weights", "vllm.runtime", "vllm.kv_cache"),
                                                     ("resume", "vllm.weights", "vllm.runtime", "vllm.kv_cache")])

    def test_nccl_is_left_to_vllm_where_vllm_suspends_it(self):
        worker = self.loaded(enable_nccl_comm_suspend=True)
        worker.sleep(1)
        self.assertEqual(self.paused_and_resumed(), [("pause", "vllm.weights", "vllm.runtime", "vllm.kv_cache")])

    def test_nccl_is_left_to_a_trainer_that_launched_vllm_in_its_process(self):
        self.loaded(executor="external_launcher").sleep(2)
        self.assertEqual((self.state("vllm.weights"), self.state("nccl")), ("paused", "resident"))

    def test_nccl_is_left_to_a_program_that_used_it_before_vllm_came(self):
        distributed = types.SimpleNamespace(is_initialized=lambda: True)
        with mock.patch.dict(sys.modules, {"torch.distributed": distributed}):
            self.loaded(executor="uni").sleep(2)
        self.assertEqual((self.state("vllm.weights"), self.state("nccl")), ("paused", "resident"))

    def test_vllms_own_allocator_goes_on_when_it_was_there_first(self):
        own = self.allocators.instance = mock.Mock()
        with self.assertLogs("amem", "WARNING"):
            worker = self.worker()
        worker.sleep(1)
        own.sleep.assert_called_once_with(offload_tags=("weights",))
        worker.wake_up(["weights"])
        own.wake_up.assert_called_once_with(["weights"])
        self.assertEqual(self.paused_and_resumed()[0], "ncclPause")
        self.assertEqual(self.state("nccl"), "resident")

    def test_communicators_and_graphs_are_kept_and_it_says_so(self):
        self.loaded()
        from amem.frameworks import vllm as adapter

        backend = adapter.Backend
        self.assertTrue(backend.is_supported() and backend.preserves_communicators() and backend.preserves_graphs_with_communicators())


class Offload(amem.rl.RolloutOffload):
    """Of a rank that holds no tensors: what is left is when it pauses, and what of NCCL's."""

    def adopt(self):
        return {}

    def _discarded(self):
        return []


class Ranks:
    """Threads as ranks. NCCL's memory goes and comes when all of them ask, as a collective of the framework does; a rank that asks alone
    fails when its deadline is over."""

    DEADLINE_S = 5

    def __init__(self, count):
        self.here, self.failures, self.pauses = threading.local(), [], [0] * count
        self.meeting = threading.Barrier(count)

    def enter(self, test):
        """Threads share the library, which counts who wants what for one rank: here a rank is nobody's inner block."""
        test.enter(mock.patch.object(amem.rl._tags, "Want", lambda: mock.Mock(pause=self.pause, resume=self.resume)))

    def gather(self):
        self._meet("gather")

    def _meet(self, what):
        """The others must be there for the same reason."""
        self.wanted.append(what)
        self.meeting.wait(self.DEADLINE_S)
        if len(set(self.wanted[-self.meeting.parties:])) > 1:
            self.meeting.abort()
            raise RuntimeError("some ranks are in %s" % " and others in ".join(sorted(set(self.wanted[-self.meeting.parties:]))))
        self.meeting.wait(self.DEADLINE_S)

    def pause(self, *tags, **_):
        if "nccl" in tags:
            self._meet("pause")
            self.pauses[self.here.rank] += 1
            self.here.paused = True
        return amem._tags.NOTHING

    def resume(self, *tags, **_):
        if "nccl" in tags:
            self._meet("resume")
            self.here.paused = False

    def nccl_is_paused(self):
        return getattr(self.here, "paused", False)

    def run(self, work):
        """work(rank) in each of them; what they raised."""
        self.wanted = []

        def one(rank):
            self.here.rank = rank
            try:
                work(rank)
            except Exception as error:  # pylint: disable=broad-except
                self.failures.append("rank %d: %r" % (rank, error))
                self.meeting.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.meeting.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.failures


class Trl(OnTheFake):
    """Ranks that generate together once in a step, and after that each as often as its completions have it."""

    STEPS = 3

    def train(self, trainer_class, sleep_mode, with_amem=True, trainings=1, ranks=2):
        """(what the ranks raised, how often each paused NCCL, what each engine saw of NCCL's memory)"""
        world, engines = Ranks(ranks), [None] * ranks
        world.enter(self)
        self.enter(mock.patch.object(amem.rl, "RolloutOffload", Offload))

        def work(rank):
            engines[rank] = stand_ins.VLLMGeneration(sleep_mode, look=world.nccl_is_paused)
            made = trainer_class(rank, world.gather, engines[rank])
            plain = dict(vars(made)), dict(vars(made.vllm_generation.llm))
            for _ in range(trainings):
                offload = trl.install(made, [], None) if with_amem else None
                for step in range(self.STEPS):
                    made._generate([step])
                if offload:
                    offload.close()
            self.assertEqual((set(vars(made)), vars(made.vllm_generation.llm)), (set(plain[0]), plain[1]), "the wrapping stayed")

        return world.run(work), world.pauses, [[paused for what, paused in engine.seen if what == "generate"] for engine in engines]

    def test_tools_make_ranks_generate_unequally_often_and_nccl_goes_once_in_a_step(self):
        uneven = stand_ins.trl(tools=lambda rank, step: (step + rank) % 3)
        for sleep_mode in (False, True):
            with self.subTest(sleep_mode=sleep_mode):
                failures, pauses, seen = self.train(uneven, sleep_mode)
                self.assertEqual((failures, pauses), ([], [self.STEPS] * 2))
                self.assertEqual(seen, [[True, True, False, True, False, False], [True, False, True, False, False, True]])

    def test_a_rollout_function_may_generate_as_often_as_it_likes_and_nccl_stays(self):
        def rollout(prompts, made):
            for _ in range(made.rank + made.steps):
                made.vllm_generation.generate(prompts, None, 1)

        for sleep_mode in (False, True):
            failures, pauses, seen = self.train(stand_ins.trl(rollout_func=rollout), sleep_mode)
            self.assertEqual((failures, pauses), ([], [0, 0]))
            self.assertEqual(seen, [[False] * 3, [False] * 6])

    def test_of_other_trainers_nothing_is_known_and_nccl_stays(self):
        own = type("OwnTrainer", (stand_ins.trl(),), {"_generate_single_turn": lambda self, prompts, *_: self.vllm_generation.generate(prompts, None, 1)})
        for trainer_class in (own, stand_ins.trl(name="trl.experimental.gold.gold_trainer")):
            failures, pauses, seen = self.train(trainer_class, sleep_mode=True)
            self.assertEqual((failures, pauses, seen), ([], [0, 0], [[False] * self.STEPS] * 2))

    def test_a_second_training_is_as_the_first(self):
        for sleep_mode in (False, True):
            failures, pauses, seen = self.train(stand_ins.trl(), sleep_mode, trainings=2)
            self.assertEqual((failures, pauses, seen), ([], [2 * self.STEPS] * 2, [[True] * 2 * self.STEPS] * 2))

    def test_a_generation_that_fails_or_is_interrupted_leaves_all_resident(self):
        for sleep_mode in (False, True):
            for error in (MemoryError, KeyboardInterrupt):
                with self.subTest(sleep_mode=sleep_mode, error=error):
                    world = Ranks(1)
                    world.enter(self)
                    self.enter(mock.patch.object(amem.rl, "RolloutOffload", Offload))

                    def work(rank, world=world, error=error, sleep_mode=sleep_mode):
                        generation = stand_ins.VLLMGeneration(sleep_mode, look=world.nccl_is_paused)
                        generation.llm.generate = mock.Mock(side_effect=[error, None])
                        made = stand_ins.trl()(rank, world.gather, generation)
                        trl.install(made, [], None)
                        with self.assertRaises(error):
                            made._generate([0])
                        self.assertFalse(world.nccl_is_paused())
                        self.assertEqual([what for what, _ in generation.seen], ["wake", "sleep"] if sleep_mode else [])
                        made._generate([0])

                    self.assertEqual((world.run(work), world.pauses), ([], [2]))

    def test_a_trainer_that_generates_in_another_way_is_refused_by_name(self):
        for made, words in ((types.SimpleNamespace(), "SimpleNamespace has no _generate, _generate_single_turn"),
                            (stand_ins.trl()(0, None), None)):
            if words:
                with self.assertRaisesRegex(amem.AmemError, words):
                    trl._complain_if_unknown(made)
            else:
                trl._complain_if_unknown(made)
                made.use_vllm = True
                del made.vllm_generation
                with self.assertRaisesRegex(amem.AmemError, "GRPOTrainer has no vllm_generation"):
                    trl._complain_if_unknown(made)

    def test_an_engine_that_does_not_wake_up_leaves_all_resident(self):
        world = Ranks(1)
        world.enter(self)
        self.enter(mock.patch.object(amem.rl, "RolloutOffload", Offload))

        def work(rank):
            generation = stand_ins.VLLMGeneration(True)
            generation.llm.wake_up = mock.Mock(side_effect=[MemoryError("full"), None])
            made = stand_ins.trl()(rank, world.gather, generation)
            trl.install(made, [], None)
            with self.assertRaises(MemoryError):
                made._generate([0])
            self.assertFalse(world.nccl_is_paused())
            made._generate([0])

        self.assertEqual((world.run(work), world.pauses), ([], [2]))


class WithoutALibrary(unittest.TestCase):
    def test_nccl_stays_which_is_said_once_and_the_job_goes_on(self):
        with mock.patch.object(amem._calls, "lib", amem._library._Later()), mock.patch.object(amem._library, "load", side_effect=OSError("cannot load it")), \
                mock.patch.object(amem._library, "nccl_is_loaded", return_value=True), mock.patch.object(frameworks, "_said", set(), create=True), \
                self.assertLogs("amem", "WARNING") as logged:
            for _ in range(2):
                self.assertFalse(frameworks.pause_nccl())
                frameworks.resume_nccl()
            self.assertFalse(groups._all_paused())
        self.assertEqual(logged.output, ["WARNING:amem:NCCL's memory stays on the GPU: cannot load it"])


class Plugins(unittest.TestCase):
    def test_projects_that_call_them_unasked_load_nothing_of_amem(self):
        code = "import amem_plugins, sys; amem_plugins.vllm(); amem_plugins.sglang(); print('amem' in sys.modules)"
        environment = {key: value for key, value in os.environ.items() if key != "AMEM_ENABLE"}
        environment.update(PYTHONPATH=os.path.dirname(os.path.dirname(amem.__file__)))
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "False\n", ""))

    def test_they_fail_in_no_project(self):
        modules = stand_ins.vllm()
        del modules["vllm.device_allocator.sleep_mode_backend"].SleepModeBackendFactory
        with stand_ins.imported(modules), mock.patch.dict(os.environ, AMEM_ENABLE="1"), self.assertLogs("amem", "INFO") as logged:
            amem_plugins.vllm()
            amem_plugins.sglang()  # there is no sglang
        self.assertEqual(len(logged.output), 2)


class Sglang(OnTheFake):
    def setUp(self):
        super().setUp()
        savers = self.enter(stand_ins.imported(project("torch_memory_saver")))
        self.saver = savers["torch_memory_saver"].torch_memory_saver
        self.modules = self.enter(stand_ins.imported(project("sglang", self.saver), without=["amem.frameworks.sglang"]))
        self.enter(mock.patch.dict(os.environ, AMEM_ENABLE="1"))

    def started(self):
        amem_plugins.sglang()
        self.modules["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()
        adapter = self.modules["sglang.srt.utils.torch_memory_saver_adapter"]._TorchMemorySaverAdapterReal()
        with adapter.region("weights", enable_cpu_backup=True), adapter.region("kv_cache"):
            self.assertEqual(self.library.stack, ["weights", "kv_cache"])
        manager = self.modules["sglang.srt.managers.scheduler_components.weight_updater"].SchedulerWeightUpdaterManager
        return manager(adapter) if "sglang" not in RELEASES else released_code.sglang_manager(manager, adapter)

    @staticmethod
    def request(*tags):
        return types.SimpleNamespace(tags=list(tags) or None)

    def test_without_amem_enable_nothing_is_touched(self):
        with mock.patch.dict(os.environ, AMEM_ENABLE=""):
            amem_plugins.sglang()
        self.assertNotIn("amem.frameworks.sglang", sys.modules)
        self.assertIsNone(self.saver._impl)
        self.assertNotIsInstance(self.saver, amem._saver.TorchMemorySaver)

    def test_where_amem_cannot_be_used_sglang_runs_on_with_its_own_saver(self):
        for broken in (mock.patch.object(amem._calls, "lib", amem._library._Later()), mock.patch.object(amem._pools, "check_version", side_effect=amem.AmemError(5, "too old"))):
            with broken, mock.patch.object(amem._library, "load", side_effect=OSError("cannot load it")), self.assertLogs("amem", "WARNING") as logged:
                amem_plugins.sglang()
            self.assertRegex(logged.output[0], "AMem could not be installed in SGLang, which runs without it: (cannot load it|too old)")
            self.assertNotIsInstance(self.saver, amem._saver.TorchMemorySaver)
        hooks = self.modules["sglang.srt.plugins.hook_registry"].HookRegistry
        hooks.apply_hooks()
        self.assertEqual(self.library.calls, [])

    def test_nccl_goes_last_and_comes_back_first(self):
        manager = self.started()
        manager.release_memory_occupation(self.request())
        self.assertEqual(self.paused_and_resumed(), [("pause", "kv_cache"), ("pause", "weights"), "ncclPause"])
        self.library.calls.clear()
        manager.resume_memory_occupation(self.request("weights"))
        manager.resume_memory_occupation(self.request("kv_cache", "cuda_graph"))
        self.assertEqual(self.paused_and_resumed(), ["ncclResume", ("resume", "weights"), ("resume", "kv_cache")])

    def test_a_return_waits_for_memory_that_another_engine_is_still_giving_back(self):
        manager = self.started()
        manager.release_memory_occupation(self.request())
        manager.resume_memory_occupation(self.request("weights"))
        manager.resume_memory_occupation(self.request("kv_cache"))
        self.assertEqual([call[1] for call in self.library.named("ask")], [("nccl",), ("weights",), ("kv_cache",)])

    def test_a_release_of_the_cache_alone_leaves_nccl_for_weight_updates(self):
        manager = self.started()
        manager.release_memory_occupation(self.request("kv_cache"))
        self.assertEqual(self.paused_and_resumed(), [("pause", "kv_cache")])

    def test_a_group_for_weight_updates_finds_nccl_awake(self):
        manager = self.started()
        manager.release_memory_occupation(self.request())
        manager.tp_worker = mock.Mock()
        manager.tp_worker.init_weights_update_group.side_effect = lambda request: (self.state("nccl") == "resident", "")
        manager.init_weights_update_group(self.request())
        self.assertEqual(self.state("nccl"), "resident")

    def test_a_pause_of_nccl_that_fails_is_said_and_the_server_goes_on(self):
        manager = self.started()
        self.library.fail["ncclPause", "nccl"] = (1, "rank 1 did not come")
        with self.assertLogs("amem", "WARNING") as logged:
            manager.release_memory_occupation(self.request())
        self.assertIn("rank 1 did not come", logged.output[0])
        manager.resume_memory_occupation(self.request())
        self.assertNotIn("ncclResume", self.paused_and_resumed())
        self.assertEqual(self.state("weights"), "resident")

    def test_graphs_are_captured_as_without_a_saver(self):
        self.started()
        captured = []

        @contextlib.contextmanager
        def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
            captured.append((cuda_graph, pool, stream, capture_error_mode))
            yield

        fake = types.SimpleNamespace(cuda=types.SimpleNamespace(graph=graph))
        with mock.patch.dict(sys.modules, torch=fake):
            with self.saver.cuda_graph(cuda_graph="g", pool="p", stream="s", tag="cuda_graph", enable_cpu_backup=True):
                pass
        self.assertEqual(captured, [("g", "p", "s", "global")])

    def test_graphs_are_captured_into_a_pool_that_a_release_of_their_tag_saves(self):
        manager = self.started()
        captured = []

        @contextlib.contextmanager
        def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
            captured.append((cuda_graph, pool, list(self.library.stack)))
            yield

        fake = types.SimpleNamespace(cuda=types.SimpleNamespace(graph=graph))
        side = types.SimpleNamespace(device_index=lambda device: 0, pool_for_graphs=lambda tag: (0, 7))
        with mock.patch.dict(sys.modules, torch=fake), mock.patch.object(amem._pools, "backend", lambda: side):
            with self.saver.cuda_graph(cuda_graph="g", pool="p", stream="s", tag="cuda_graph"):
                pass
        self.assertEqual(captured, [("g", (0, 7), ["cuda_graph"])])
        self.assertIn(("pool", "cuda_graph", 0), self.library.calls)
        manager.release_memory_occupation(self.request("cuda_graph"))
        self.assertEqual(self.state("cuda_graph"), "paused")
        manager.resume_memory_occupation(self.request("cuda_graph"))
        self.assertEqual(self.state("cuda_graph"), "resident")


class TorchMemorySaver(OnTheFake):
    def test_the_package_itself_is_wrapped_before_its_first_use(self):
        try:
            import torch_memory_saver
        except ImportError as error:
            self.skipTest("no torch_memory_saver: %s" % error)
        held = torch_memory_saver.torch_memory_saver
        held.hook_mode = "torch"
        self.assertIs(amem.wrap(torch_memory_saver), held)
        with torch_memory_saver.configure_subprocess(), held.region("a", enable_cpu_backup=True):
            self.assertEqual(self.library.stack, ["a"])
        held.pause("a")
        held.resume()
        self.assertEqual(self.paused_and_resumed(), [("pause", "a"), ("resume", "a")])


class Hosts(unittest.TestCase):
    """Ranks of several hosts, as threads, whose groups are destroyed or kept together. Each has a project's module of its own."""

    def run_on(self, count, paused):
        """(what each called of its project's, how often each resumed); paused(rank): what becomes of its own pause."""
        modules = [stand_ins.slime("host%d" % rank, "user%d" % rank)["host%d" % rank] for rank in range(count)]
        here, resumed = threading.local(), [0] * count

        def resume(*_, **__):
            resumed[here.rank] += 1

        def one(rank):
            here.rank = rank
            here.group = amem.StoreGroup(store_for_tests.Client(self.folder + "/store"), rank, count, "host-%d" % rank)
            groups.keep(modules[rank])
            modules[rank].destroy_process_groups()
            modules[rank].reload_process_groups()
            here.group.store.close()

        with mock.patch.object(frameworks, "_want", mock.Mock(pause=lambda *_, **how: paused(here.rank, **how), resume_in_time=resume)), \
                mock.patch.object(groups, "_world", lambda: here.group), mock.patch.object(frameworks, "resume_nccl", resume), \
                mock.patch.object(frameworks, "nccl_is_under_amem", lambda: paused(here.rank) != "not under AMem"), \
                mock.patch.object(groups, "_replace", lambda name, old, new: self.replace(name, old, new, modules)):
            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        frameworks._paused = False
        return [module.calls for module in modules], resumed

    @staticmethod
    def replace(name, old, new, modules):
        return [setattr(module, name, new) or module.__name__ for module in modules if getattr(module, name) is old]

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.addCleanup(store_for_tests.Server(self.folder + "/store").close)

    def test_all_keep_their_groups(self):
        self.assertEqual(self.run_on(3, lambda rank: None), ([[]] * 3, [1] * 3))

    def test_cards_are_asked_once_the_gpus_of_all_hosts_are_idle(self):
        idle, said = [], []

        def await_idle():
            time.sleep(0.1)
            idle.append(True)

        def paused(_rank, hosts_idle=None):  # None: it is asked whether NCCL is under AMem
            if hosts_idle is not None:
                said.append((hosts_idle, len(idle)))

        with mock.patch.dict(os.environ, {"AMEM_NETWORK": "renew"}), mock.patch.object(_hosts, "await_idle", await_idle), \
                mock.patch.object(_hosts, "living_communicators", lambda: [["a", 3]]):
            self.assertEqual(self.run_on(3, paused), ([[]] * 3, [1] * 3))
        self.assertEqual(said, [(True, 3)] * 3)

    def test_when_one_hosts_pause_fails_all_destroy_them(self):
        def paused(rank):
            if rank == 1:
                time.sleep(0.5)  # the others have paused meanwhile
                raise amem.AmemError(1, "no host memory")

        with self.assertLogs("amem", "WARNING") as logged:
            calls, resumed = self.run_on(3, paused)
        self.assertEqual((calls, resumed), ([["destroy", "reload"]] * 3, [1, 0, 1]), "those that had paused run on as before")
        self.assertEqual(len(logged.output), 3)
        for line in logged.output:
            self.assertIn("rank 1 on host-1 failed: no host memory", line)

    def test_when_one_ranks_nccl_is_not_under_amem_all_destroy_them(self):
        def paused(rank):
            if rank == 0:
                time.sleep(0.5)  # the other has come meanwhile: it takes a first agreement that failed before for one of an earlier life, and waits
                return "not under AMem"
            return None

        with self.assertLogs("amem", "WARNING"):
            calls, _ = self.run_on(2, paused)
        self.assertEqual(calls, [["destroy", "reload"]] * 2)


class Slime(OnTheFake):
    NAME, PROJECT, TURN_ON = groups.SLIME, "slime", staticmethod(groups.slime)

    def setUp(self):
        super().setUp()
        self.modules = self.enter(stand_ins.imported(project("slime") if self.PROJECT == "slime" else stand_ins.slime(self.NAME, "roll.user")))
        self.calls = self.modules[self.NAME].calls
        user = next(one for name, one in self.modules.items() if hasattr(one, "MegatronTrainRayActor"))
        self.actor = user.MegatronTrainRayActor()
        self.actor.args, self.actor.role = mock.Mock(use_critic=False), "actor"
        self.actor._switch_model = lambda role: None

    def test_groups_stay_and_nccls_memory_is_paused(self):
        self.TURN_ON()
        for _ in range(2):
            self.actor.sleep()
            self.assertEqual(self.state("nccl"), "paused")
            self.actor.wake_up()
            self.assertEqual(self.state("nccl"), "resident")
        self.assertEqual(self.calls, ["pause", "resume"] * 2)
        self.assertEqual(groups.keep(self.NAME), [])  # again: harmless

    def test_where_nccl_is_not_under_amem_or_the_pause_fails_groups_are_destroyed_as_before(self):
        self.TURN_ON()
        self.library.nccl_libraries = []
        self.actor.sleep()
        self.actor.wake_up()
        self.library.nccl_libraries = [{"under_amem": True}]
        self.library.fail["ncclPause", "nccl"] = (1, "no journal")
        with self.assertLogs("amem", "WARNING"):
            self.actor.sleep()
        self.actor.wake_up()
        self.assertEqual(self.calls, ["destroy", "pause", "resume", "reload"] * 2)

    def test_a_resume_that_fails_can_be_tried_again(self):
        self.TURN_ON()
        self.actor.sleep()
        self.library.fail["ncclResume", "nccl"] = (1, "256 MiB short")
        with self.assertRaisesRegex(amem.AmemError, "256 MiB short"):
            self.actor.wake_up()
        self.library.fail.clear()
        self.actor.wake_up()
        self.assertEqual(self.state("nccl"), "resident")
        self.assertNotIn("reload", self.calls)

    def test_an_unknown_release_is_refused(self):
        with self.assertRaises(AttributeError):
            groups.keep(types.ModuleType("other"))


class Roll(Slime):
    NAME, PROJECT, TURN_ON = "roll.utils.offload_nccl", "ROLL", staticmethod(sketches.roll)


class BetweenPhases(unittest.TestCase):
    """NCCL's memory is away while an engine generates, and there whenever the ranks do something together."""

    METHODS = {"openrlhf": (("openrlhf/trainer/ray/ppo_actor.py", "PolicyModelActor"), "broadcast_to_vllm", ("fit", "forward", "reload_states", "save_checkpoint")),
               "NeMo-RL": (("nemo_rl/models/policy/workers/megatron_policy_worker.py", "MegatronPolicyWorkerImpl"), "offload_after_refit",
                           ("prepare_for_lp_inference", "prepare_for_training", "offload_before_refit"))}

    def test_it_is_paused_after_the_weights_are_handed_over_and_back_before_all_else(self):
        for name, sketch in (("openrlhf", sketches.openrlhf), ("NeMo-RL", sketches.nemo_rl)):
            (path, cls), last, firsts = self.METHODS[name]
            done = []
            names = {*firsts, last, "save_model"}
            owner = type("Owner", (), {one: lambda self, one=one: done.append(one) or one for one in names})
            with mock.patch.object(frameworks, "pause_nccl", lambda: done.append("pause")), mock.patch.object(frameworks, "resume_nccl", lambda: done.append("resume")):
                sketch(owner)
                for first in firsts:
                    done.clear()
                    self.assertEqual(getattr(owner(), first)(), first)
                    self.assertEqual(done, ["resume", first], name)
                done.clear()
                self.assertEqual(getattr(owner(), last)(), last)
                self.assertEqual(done[-2:], [last, "pause"], name)
            if name in RELEASES:  # its methods are there, under these names
                for one in {*firsts, last}:
                    self.assertIsNotNone(RELEASES[name].fact("signatures", path, "%s.%s" % (cls, one)), one)


class SketchesOnReleases(OnTheFake):
    """The sketches in the projects' own released code, of which no GPU and no model is needed: what goes by itself, and what AMem adds to it."""

    def setUp(self):
        super().setUp()
        self.notes = []

    def after(self, method, *arguments):
        """What one of the project's methods does, and what is with NCCL's memory afterwards."""
        self.notes.clear()
        method(*arguments)
        return [*self.notes, "NCCL is " + self.state("nccl")]

    @unittest.skipUnless("areal" in RELEASES, "its release is not here")
    def test_areal_pauses_nccl_behind_the_savers_memory(self):
        for engine in ("fsdp", "megatron"):
            with self.subTest(engine):
                owner = released_code.areal(RELEASES["areal"], engine, self.note)
                sketches.areal(owner)
                made = owner()
                self.assertEqual(self.after(made.offload), ["saver pauses, NCCL resident", "NCCL is paused"])
                self.assertEqual(self.after(made.onload), ["saver resumes, NCCL resident", "NCCL is resident"])

    def note(self, what):
        self.notes.append("%s, NCCL %s" % (what, self.state("nccl")))

    @unittest.skipUnless("openrlhf" in RELEASES, "its release is not here")
    def test_openrlhf_has_nccl_wherever_its_ranks_work_together(self):
        actor, modules = released_code.openrlhf(RELEASES["openrlhf"], self.note)
        self.enter(stand_ins.imported(modules))
        sketches.openrlhf(type(actor))
        self.assertEqual(self.after(actor.offload_states), ["offloads optim_states contiguous_grad_buffer hp_params lp_grads, NCCL resident", "NCCL is resident"])
        for _ in range(2):
            self.assertEqual(self.after(actor.broadcast_to_vllm), ["weights to vLLM, NCCL resident", "NCCL is paused"])
        for method, arguments, note in ((actor.reload_states, (), "reloads"), (actor.fit, (0,), "trains"), (actor.forward, [mock.MagicMock()] * 3, "forward"),
                                        (actor.save_model, (), "saves"), (actor.save_checkpoint, ("tag",), "saves")):
            actor.broadcast_to_vllm()
            self.assertEqual(self.after(method, *arguments), [note + ", NCCL resident", "NCCL is resident"])

    @unittest.skipUnless("NeMo-RL" in RELEASES, "its sources are not here")
    def test_nemo_rl_has_nccl_but_for_the_generation(self):
        worker = released_code.nemo_rl(RELEASES["NeMo-RL"], self.note)
        sketches.nemo_rl(type(worker))
        self.assertEqual(self.after(worker.offload_before_refit), ["to the host: gradients, NCCL resident", "states to cpu, NCCL resident", "NCCL is resident"])
        for _ in range(2):
            self.assertEqual(self.after(worker.offload_after_refit),
                             ["to the host: parameters gradients, NCCL resident", "to the host: gradients, NCCL resident", "NCCL is paused"])
            self.assertEqual(self.after(worker.prepare_for_lp_inference), ["to the GPU: parameters, NCCL resident", "to the host: gradients, NCCL resident", "NCCL is resident"])
            self.assertEqual(self.after(worker.offload_after_refit)[-1], "NCCL is paused")
            self.assertEqual(self.after(worker.prepare_for_training), ["to the GPU: parameters gradients, NCCL resident", "states to cuda, NCCL resident", "NCCL is resident"])
            worker.offload_before_refit()


class Verl(OnTheFake):
    class Rollout:
        sleep_level = 2

        def __init__(self, note):
            self.note = note

        async def resume(self, tags):
            self.note("resume %s" % " ".join(tags))

        async def update_weights(self, weights, **_):
            self.note("update")

    def setUp(self):
        super().setUp()
        self.seen = []
        modules = self.enter(stand_ins.imported(project("verl", lambda: self.note("barrier"))))
        workers = modules["verl.workers.engine_workers"]
        self.workers = workers.ActorRolloutRefWorker, workers.TrainingWorker
        self.worker = self.workers[0]()
        self.worker.rollout, self.worker.config = self.Rollout(self.note), mock.MagicMock()
        self.worker.config.rollout.checkpoint_engine.backend = "naive"
        self.worker.layered_summon, self.worker.peft_merge, self.worker.actor = False, False, mock.MagicMock()
        self.worker.actor.engine.get_per_tensor_param.return_value = ("weights", None)

    def note(self, what):
        self.seen.append((what, self.state("nccl")))

    def update(self):
        self.seen.clear()
        asyncio.run(self.worker.update_weights(global_steps=1))

    def test_nccl_goes_when_the_cache_comes_back_and_returns_for_the_next_step(self):
        verl.install(*self.workers)
        verl.install(*self.workers)  # again: harmless
        for _ in range(2):
            self.update()
            self.assertEqual([row for row in self.seen if row[0] in ("update", "barrier", "resume kv_cache")],
                             [("update", "resident"), ("barrier", "resident"), ("resume kv_cache", "paused")])
        training = mock.Mock(spec=[])
        self.assertEqual(self.state("nccl"), "paused")
        with contextlib.suppress(AttributeError):  # the released method wants more of its object than there is
            self.workers[1].train_batch(training, "data")
        self.assertEqual(self.state("nccl"), "resident")

    def test_verls_attributes_and_coroutines_stay(self):
        self.workers[1].train_batch.attrs_3141562937 = "dispatch"
        verl.install(*self.workers)
        self.assertEqual(self.workers[1].train_batch.attrs_3141562937, "dispatch")
        self.assertTrue(inspect.iscoroutinefunction(self.workers[0].update_weights))

    def test_an_unknown_release_is_refused_and_left_as_it_is(self):
        class Other:
            def train_batch(self, data):
                return data

        before = Other.train_batch
        with self.assertRaises(AttributeError):
            verl.install(self.workers[0], Other)
        self.assertIs(Other.train_batch, before)


class Contracts(unittest.TestCase):
    """What changes in a release is seen, and the rest is not."""

    CODE = """
LIMIT: int = 3
class Worker(Base):
    @property
    def backend(self): pass
    def sleep(self, level=1, *, tags=None, **more):
        barrier()
        self.backend.suspend(level)
        return Output(self.rollout.resume(tags=["kv_cache"]))
    async def wake(self, *tags): pass
try:
    def late(a, b=2): pass
except ImportError:
    pass
"""
    FACTS = {
        "constants": {"LIMIT": 3},
        "signatures": {"Worker": "class(Base)", "Worker.backend": "property", "Worker.sleep": "(self, level=, *, tags=, **more)",
                       "Worker.wake": "async (self, *tags)", "late": "(a, b=)"},
        "calls": {"Worker.sleep": ["barrier", "self.backend.suspend(level)", "self.rollout.resume(kv_cache)", "Output"]},
    }

    def differences(self, code):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "worker.py"), "w", encoding="utf-8") as file:
                file.write(code)
            return released.differences({"files": {"worker.py": self.FACTS}}, released.Release(folder))

    def test_nothing_is_said_of_a_release_that_keeps_them(self):
        self.assertEqual(self.differences(self.CODE), [])
        self.assertEqual(self.differences("import os\n" + self.CODE.replace("barrier()", "other(); barrier(); other()")), [])

    def test_each_change_is_named(self):
        for old, new, said in (("level=1", "level", "Worker.sleep is (self, level"), ("async def wake", "def wake", "Worker.wake is"),
                               ("@property", "", "Worker.backend is (self)"), ("(Base)", "(Other)", "Worker is class(Other)"),
                               ("def late", "def later", "late is missing"), ("= 3", "= 4", "LIMIT is 4, and was 3"),
                               ("barrier()", "pass", "no longer calls, in this order: barrier"), ("kv_cache", "cache", "no longer calls")):
            with self.subTest(new or old):
                found = self.differences(self.CODE.replace(old, new))
                self.assertEqual(len(found), 1, found)
                self.assertIn(said, found[0])
        moved = self.CODE.replace("        barrier()\n", "").replace("(level)\n", "(level)\n        barrier()\n")
        self.assertIn("no longer calls", self.differences(moved)[0])

    def test_the_table_has_all_projects_with_an_adapter(self):
        self.assertEqual(set(released.table()), {"vllm", "sglang", "torch_memory_saver", "verl", "areal", "megatron-core", "ray", "trl",
                                                 "slime", "ROLL", "openrlhf", "NeMo-RL"})


class StandIns(unittest.TestCase):
    """The stand-ins have what the releases have, as far as the contracts say."""

    def check(self, modules, contract, renamed=None):
        table, checked = released.table()[contract], 0
        for path, facts in table["files"].items():
            name = path[:-len(".py")].replace("/__init__", "").replace("/", ".")
            found = modules.get((renamed or {}).get(name, name))
            for qualified, wanted in facts.get("signatures", {}).items():
                owner, _, function = qualified.partition(".")
                target = getattr(found, owner, None)
                if function and target is not None and function in vars(target):
                    self.assertEqual(self.signature(vars(target)[function]), wanted, qualified)
                    checked += 1
        return checked

    @staticmethod
    def signature(function):
        if isinstance(function, property):
            return "property"
        function = getattr(function, "__func__", function)
        parameters = inspect.signature(function).parameters.values()
        parts, keywords = [], False
        for one in parameters:
            if one.kind is one.KEYWORD_ONLY and not keywords:
                keywords = True
                parts.append("*")
            star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
            parts.append(star + one.name + ("=" if one.default is not one.empty else ""))
        return ("async " if inspect.iscoroutinefunction(function) else "") + "(%s)" % ", ".join(parts)

    def test_signatures_are_those_of_the_contracts(self):
        saver = stand_ins.torch_memory_saver()
        self.assertGreater(self.check(stand_ins.vllm(), "vllm"), 14)
        self.assertGreater(self.check(saver, "torch_memory_saver", {"torch_memory_saver.entrypoint": "torch_memory_saver"}), 6)
        self.assertGreater(self.check(stand_ins.sglang(None), "sglang"), 9)
        self.assertGreater(self.check(stand_ins.verl(None), "verl"), 5)
        self.assertGreater(self.check(stand_ins.slime(), "slime"), 1)

    def test_amems_own_classes_take_what_the_projects_pass(self):
        with stand_ins.imported(stand_ins.vllm(), without=["amem.frameworks.vllm"]):
            from amem.frameworks import vllm as adapter

            files = released.table()["vllm"]["files"]
            for name, wanted in files["vllm/device_allocator/__init__.py"]["signatures"].items():
                if name.startswith("MemAllocator."):
                    self.takes(getattr(adapter.Allocator, name.partition(".")[2]), wanted)
            for name, wanted in files["vllm/device_allocator/sleep_mode_backend.py"]["signatures"].items():
                if name.startswith("SleepModeBackend.") and not name.endswith("__"):
                    self.takes(inspect.getattr_static(adapter.Backend, name.partition(".")[2]), wanted)
        for name, wanted in released.table()["torch_memory_saver"]["files"]["torch_memory_saver/entrypoint.py"]["signatures"].items():
            function = name.partition(".")[2]
            if function and function not in ("__init__", "cuda_graph", "get_cpu_backup"):  # those two raise NotImplementedError
                self.takes(inspect.getattr_static(amem._saver.TorchMemorySaver, function), wanted)

    def takes(self, function, wanted):
        """Ours may have more arguments than the project passes, if those have defaults, and in the same order."""
        mine = self.signature(function) if callable(getattr(function, "__func__", function)) else "property"
        if wanted == "property":
            return  # an attribute will do
        theirs, ours = wanted.strip("()").split(", "), mine.strip("()").split(", ")
        self.assertEqual(ours[:len(theirs)], theirs, function)
        self.assertTrue(all(one.endswith("=") or one.startswith("*") for one in ours[len(theirs):]), function)


if __name__ == "__main__":
    unittest.main()
