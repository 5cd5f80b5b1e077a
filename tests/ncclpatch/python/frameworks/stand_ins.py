"""The classes of vLLM, SGLang, torch_memory_saver, verl and slime that AMem's adapters touch, as small as they can be. Their signatures
are those of contracts.json, which a test checks. Each function makes the modules of one project, by name, as `import` finds them."""

import contextlib
import enum
import pkgutil
import sys
import types


def module(name, **names):
    made = types.ModuleType(name)
    made.__path__ = []
    made.__dict__.update(names)
    return made


def with_packages(*modules):
    """The modules by name, and those that they are in."""
    found = {one.__name__: one for one in modules}
    for name in list(found):
        while "." in name:
            name, _, _ = name.rpartition(".")
            found.setdefault(name, module(name))
    for name, one in found.items():
        if "." in name:
            package, _, last = name.rpartition(".")
            setattr(found[package], last, one)
    return found


# ---- TRL


def trl(tools=lambda rank, step: 0, rollout_func=None, name="trl.trainer.grpo_trainer"):
    """GRPOTrainer of one rank, as far as it generates. tools(rank, step): how often this rank's completions call tools in that step, each
    of which is one more generation. `gather` is a collective of all ranks."""

    class GRPOTrainer:
        def __init__(self, rank, gather, vllm_generation=None):
            self.rank, self.gather, self.vllm_generation = rank, gather, vllm_generation
            self.use_vllm, self.rollout_func, self.steps = vllm_generation is not None, rollout_func, 0

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            if self.use_vllm:
                return self.vllm_generation.generate(prompt_ids, images, num_generations)
            return prompt_ids

        def _tool_call_loop(self, prompts):
            for _ in range(tools(self.rank, self.steps)):
                self._generate_single_turn(prompts, None, {}, num_generations=1)

        def _generate(self, prompts):
            if self.rollout_func is not None:
                self.rollout_func(prompts, self)
            else:
                self._generate_single_turn(prompts, None, {}, 1)
                self._tool_call_loop(prompts)
            self.gather()
            self.steps += 1

    for function in (GRPOTrainer._generate, GRPOTrainer._generate_single_turn):
        function.__module__ = name
    return GRPOTrainer


class VLLMGeneration:
    """TRL's, in colocate mode: which of the engine's calls it makes, in which order. `seen` has those, and `look()` at each."""

    mode = "colocate"

    def __init__(self, enable_sleep_mode, tensor_parallel_size=1, look=lambda: None):
        self.enable_sleep_mode, self.tensor_parallel_size, self.seen = enable_sleep_mode, tensor_parallel_size, []
        self.llm = types.SimpleNamespace(generate=lambda prompts: self.seen.append(("generate", look())),
                                         wake_up=lambda tags=None: self.seen.append(("wake", look())),
                                         sleep=lambda level: self.seen.append(("sleep", look())))

    def generate(self, prompts, images, num_generations, profiler=None):
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.generate(prompts)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)


# ---- vLLM


def vllm():
    class SleepModeBackend:
        def __init__(self):
            self._state = "RUNNING"

        def suspend(self, level=1):
            raise NotImplementedError

        def resume(self, tags=None):
            raise NotImplementedError

        def state(self):
            return self._state

        def discard(self, tags):
            raise RuntimeError

        @classmethod
        def is_supported(cls):
            return True

        @classmethod
        def preserves_communicators(cls):
            return False

        preserves_compiled_artifacts = preserves_graphs_with_communicators = preserves_communicators

    class SleepModeBackendFactory:
        _registry = {"cumem": None}

        @classmethod
        def register_backend(cls, name, module_path, class_name):
            if name in cls._registry:
                raise ValueError(name)
            cls._registry[name] = lambda: pkgutil.resolve_name("%s:%s" % (module_path, class_name))

        @classmethod
        def create_backend(cls, model_config):
            return cls._registry[model_config.sleep_mode_backend]()()

    class CuMemAllocator:
        instance = None

        @staticmethod
        def get_instance():
            CuMemAllocator.instance = CuMemAllocator.instance or CuMemAllocator()
            return CuMemAllocator.instance

        def release_pools(self):
            pass

        def cudagraph_pool(self):
            raise AssertionError("AMem takes its place")

    class VllmConfig:
        @property
        def use_cumem_cudagraph_pool(self):
            model = self.model_config
            return model.sleep_mode_offload_cudagraph and model.enable_sleep_mode and model.sleep_mode_backend == "cumem"

    class WorkerBase:
        def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False):
            self.vllm_config, self._backend = vllm_config, None

    class Worker(WorkerBase):
        @property
        def sleep_mode_backend(self):
            self._backend = self._backend or SleepModeBackendFactory.create_backend(self.vllm_config.model_config)
            return self._backend

        def sleep(self, level=1):
            self.sleep_mode_backend.suspend(level)

        def wake_up(self, tags=None):
            self.sleep_mode_backend.resume(tags)

        def discard(self, tags):
            self.sleep_mode_backend.discard(tags)

        def _maybe_get_memory_pool_context(self, tag):
            allocator = CuMemAllocator.get_instance()
            assert tag != "weights" or allocator.get_current_usage() == 0
            return allocator.use_memory_pool(tag=tag)

    return with_packages(
        module("vllm.device_allocator", get_mem_allocator_instance=lambda: CuMemAllocator.get_instance()),
        module("vllm.device_allocator.sleep_mode_backend", SleepModeBackend=SleepModeBackend,
               SleepModeBackendFactory=SleepModeBackendFactory),
        module("vllm.device_allocator.cumem", CuMemAllocator=CuMemAllocator),
        module("vllm.config.vllm", VllmConfig=VllmConfig),
        module("vllm.v1.worker.worker_base", WorkerBase=WorkerBase),
        module("vllm.v1.worker.gpu_worker", Worker=Worker))


# ---- torch_memory_saver, and SGLang on it


def torch_memory_saver():
    class TorchMemorySaver:
        def __init__(self):
            self._impl_ctor_kwargs, self._impl = {}, None

        def region(self, tag="default", enable_cpu_backup=False, enable_disk_backup=False, cpu_backup_backend=None):
            raise AssertionError("AMem takes its place")

        def cuda_graph(self, cuda_graph, pool=None, stream=None, capture_error_mode="global", tag="default", enable_cpu_backup=False,
                       cpu_backup_backend=None):
            raise AssertionError("AMem takes its place")

        def disable(self):
            raise AssertionError("AMem takes its place")

        def pause(self, tag=None):
            raise AssertionError("AMem takes its place")

        resume = pause

        def get_cpu_backup(self, x, zero_copy=False):
            raise AssertionError("AMem takes its place")

        def set_disk_backup_dir(self, path):
            raise AssertionError("AMem takes its place")

    return {"torch_memory_saver": module("torch_memory_saver", torch_memory_saver=TorchMemorySaver(), configure_subprocess=None,
                                         TorchMemorySaver=TorchMemorySaver)}


def sglang(saver):
    """`saver`: the object torch_memory_saver.torch_memory_saver."""
    weights, caches, graphs = "weights", "kv_cache", "cuda_graph"

    class HookType(enum.Enum):
        BEFORE, AFTER = "before", "after"

    class HookRegistry:
        hooks = []

        @classmethod
        def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
            cls.hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls):
            while cls.hooks:
                target, hook, hook_type = cls.hooks.pop()
                owner, _, name = target.rpartition(".")
                setattr(pkgutil.resolve_name(owner), name, cls.hooked(getattr(pkgutil.resolve_name(owner), name), hook, hook_type))

        @staticmethod
        def hooked(method, hook, hook_type):
            def call(*arguments):
                if hook_type is HookType.BEFORE:
                    hook(*arguments)
                    return method(*arguments)
                result = method(*arguments)
                hook(result, *arguments)
                return result

            return call

    class SchedulerWeightUpdaterManager:
        def __init__(self, memory_saver_adapter):
            self.memory_saver_adapter = memory_saver_adapter

        def release_memory_occupation(self, recv_req):
            for tag in (caches, weights, graphs):
                if not recv_req.tags or tag in recv_req.tags:
                    self.memory_saver_adapter.pause(tag)

        def resume_memory_occupation(self, recv_req):
            for tag in (graphs, weights, caches):
                if not recv_req.tags or tag in recv_req.tags:
                    self.memory_saver_adapter.resume(tag)

        def init_weights_update_group(self, recv_req):
            return "made"

        destroy_weights_update_group = update_weights_from_distributed = init_weights_update_group

    class Adapter:
        def region(self, tag, enable_cpu_backup=False):
            return saver.region(tag=tag, enable_cpu_backup=enable_cpu_backup)

        def cuda_graph(self, **kwargs):
            return saver.cuda_graph(**kwargs)

        def pause(self, tag):
            return saver.pause(tag=tag)

        def resume(self, tag):
            return saver.resume(tag=tag)

    return with_packages(
        module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType),
        module("sglang.srt.utils.torch_memory_saver_adapter", _TorchMemorySaverAdapterReal=Adapter),
        module("sglang.srt.managers.scheduler_components.weight_updater", SchedulerWeightUpdaterManager=SchedulerWeightUpdaterManager))


# ---- verl


def verl(barrier):
    """`barrier` is called where verl's ranks wait for each other before the cache comes back."""

    class TrainingWorker:
        def train_mini_batch(self, data):
            return data

        train_batch = infer_batch = train_mini_batch

        def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
            return local_path

        def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
            return local_path

    class ActorRolloutRefWorker:
        async def update_weights(self, global_steps=None, mode="auto"):
            await self.rollout.resume(tags=["weights"])
            await self.rollout.update_weights("weights", global_steps=global_steps)
            barrier()
            await self.rollout.resume(tags=["kv_cache"])

    return with_packages(module("verl.workers.engine_workers", TrainingWorker=TrainingWorker, ActorRolloutRefWorker=ActorRolloutRefWorker))


# ---- slime and ROLL


def slime(name="slime.utils.reloadable_process_group", user="slime.backends.megatron_utils.actor"):
    """Two modules: the one with the functions, and one that has imported them by name."""
    calls = []

    def destroy_process_groups():
        calls.append("destroy")

    def reload_process_groups():
        calls.append("reload")

    functions = {"destroy_process_groups": destroy_process_groups, "reload_process_groups": reload_process_groups}
    actor = module(user, **functions)

    class MegatronTrainRayActor:
        def sleep(self):
            actor.destroy_process_groups()
            actor.torch_memory_saver.pause()

        def wake_up(self):
            actor.torch_memory_saver.resume()
            actor.reload_process_groups()

    actor.MegatronTrainRayActor = MegatronTrainRayActor
    actor.torch_memory_saver = types.SimpleNamespace(pause=lambda: calls.append("pause"), resume=lambda: calls.append("resume"))
    return with_packages(module(name, calls=calls, **functions), actor)


@contextlib.contextmanager
def imported(modules, without=()):
    """`modules` are what `import` finds; these, and those named in `without`, are forgotten afterwards."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield modules
    finally:
        for name, one in before.items():
            if one is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = one
        for name in without:
            package, _, last = name.rpartition(".")
            vars(sys.modules[package]).pop(last, None)
            sys.modules.pop(name, None)
