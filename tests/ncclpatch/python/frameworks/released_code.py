"""The same modules as stand_ins.py makes, but of released code: single definitions are taken out of a release and run, and what they
refer to elsewhere is stood in for, so that nothing else of the project, no GPU and no PyTorch are needed."""

import asyncio
import contextlib
import dataclasses
import functools
import glob
import logging
import os
import time
import types
from unittest import mock

import released
from stand_ins import module, with_packages

LOG = logging.getLogger("released_code")
LOG.addHandler(logging.NullHandler())
LOG.propagate = False


def releases(folder):
    """The releases in `folder`, by the names of contracts.json: FOLDER/NAME has the wheel, or is a checkout of the sources."""
    found = {}
    for name in released.table() if folder else ():
        path = os.path.join(folder, name)
        wheels = glob.glob(os.path.join(path, "*.whl"))
        if wheels or os.path.isdir(path) and os.listdir(path):
            found[name] = released.Release(wheels[0] if wheels else path)
    return found


def run_file(release, path, name, **stand_ins):
    """A whole file as a module of that name, with `stand_ins` as the modules that it imports (dots are two underscores)."""
    made = module(name)
    with mock.patch.dict("sys.modules", {key.replace("__", "."): value for key, value in stand_ins.items()}):
        exec(compile(release.text(path), path, "exec"), made.__dict__)  # pylint: disable=exec-used
    return made


def class_of(release, path, name, methods, base, names):
    """A class with some methods of a released one, which find `names` as their globals."""
    body = {method: release.define(path, "%s.%s" % (name, method), names) for method in methods}
    return type(name, (base,), body)


def torch():
    """As little of PyTorch as the definitions here touch: 8 GiB are free, and each synchronization is counted."""
    made = module("torch", Tensor=object, nn=mock.MagicMock(), version=types.SimpleNamespace(hip=None))
    made.accelerator = mock.MagicMock()
    made.accelerator.get_memory_info.return_value = (8 << 30, 8 << 30)
    made.get_device_module = mock.MagicMock()
    made.distributed = mock.MagicMock()
    return made


# ---- vLLM


def vllm(release):
    fake, worker_path = torch(), "vllm/v1/worker/gpu_worker.py"
    platform = types.SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False, is_cpu=lambda: False, is_rocm=lambda: False)
    common = {"torch": fake, "vllm": module("vllm"), "vllm__envs": mock.MagicMock(), "vllm__platforms": module("vllm.platforms", current_platform=platform),
              "vllm__logger": module("vllm.logger", init_logger=lambda _: LOG), "vllm__utils__mem_constants": module("m", GiB_bytes=1 << 30)}
    backends = run_file(release, "vllm/device_allocator/sleep_mode_backend.py", "vllm.device_allocator.sleep_mode_backend", **common)
    device_allocator = run_file(release, "vllm/device_allocator/__init__.py", "vllm.device_allocator", **common)
    cumem = module("vllm.device_allocator.cumem", cumem_available=True, atexit=mock.MagicMock(), contextmanager=contextlib.contextmanager)
    release.define("vllm/device_allocator/cumem.py", "CuMemAllocator", cumem.__dict__)
    worker_base = module("vllm.v1.worker.worker_base", vllm=mock.MagicMock())
    worker_base.WorkerBase = class_of(release, "vllm/v1/worker/worker_base.py", "WorkerBase", ["__init__"], object, worker_base.__dict__)
    names = {"torch": fake, "current_platform": platform, "has_kv_transfer_group": lambda: False, "time": time, "logger": LOG, "format_gib": str,
             "suspend_device_comms": lambda: None, "resume_device_comms": lambda: None, "nullcontext": contextlib.nullcontext,
             "get_mem_allocator_instance": device_allocator.get_mem_allocator_instance}
    methods = ["sleep_mode_backend", "sleep", "wake_up", "discard", "_maybe_get_memory_pool_context"]
    released_worker = class_of(release, worker_path, "Worker", methods, worker_base.WorkerBase, names)

    class Worker(released_worker):
        """With what the rest of the class would have: a model without buffers that are to be saved."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._sleep_mode_backend, self.model_runner = None, mock.MagicMock()
            self.model_runner.model.named_buffers.return_value = []
            self._sleep_saved_parameters, self._sleep_saved_buffers, self._sleep_saved_draft_buffers = {}, {}, {}
            self.get_draft_model = self._save_sleep_parameters = lambda *_: None
            self.synchronize_device = lambda: None

    modes = {"CUDAGraphMode": types.SimpleNamespace(NONE="NONE")}
    config = module("vllm.config.vllm", VllmConfig=class_of(release, "vllm/config/vllm.py", "VllmConfig", ["use_cumem_cudagraph_pool"], object, modes))
    return with_packages(backends, device_allocator, cumem, worker_base, module("vllm.v1.worker.gpu_worker", Worker=Worker), config,
                         common["vllm__platforms"])


# ---- torch_memory_saver, and SGLang on it


def torch_memory_saver(release):
    names = {"contextmanager": contextlib.contextmanager, "_TAG_DEFAULT": "default", "is_xpu": lambda: False}
    saver_class = release.define("torch_memory_saver/entrypoint.py", "TorchMemorySaver", names)
    return {"torch_memory_saver": module("torch_memory_saver", torch_memory_saver=saver_class(), configure_subprocess=None)}


def sglang(release, saver):
    hooks = run_file(release, "sglang/srt/plugins/hook_registry.py", "sglang.srt.plugins.hook_registry")
    utils = module("sglang.srt.utils.common", is_xpu=lambda: False)
    savers = module("torch_memory_saver", torch_memory_saver=saver)
    adapter = run_file(release, "sglang/srt/utils/torch_memory_saver_adapter.py", "sglang.srt.utils.torch_memory_saver_adapter",
                       sglang__srt__utils__common=utils, torch_memory_saver=savers, sglang=module("s"), sglang__srt=module("s"),
                       sglang__srt__utils=module("s"))
    path = "sglang/srt/managers/scheduler_components/weight_updater.py"
    fake, constants = torch(), "sglang/srt/constants.py"
    names = {"GPU_MEMORY_TYPE_" + kind: release.fact("constants", constants, "GPU_MEMORY_TYPE_" + kind)
             for kind in ("WEIGHTS", "KV_CACHE", "CUDA_GRAPH")}
    names.update(torch=fake, GPU_MEMORY_ALL_TYPES=list(names.values()), ReleaseMemoryOccupationReqOutput=mock.Mock,
                 ResumeMemoryOccupationReqOutput=mock.Mock, InitWeightsUpdateGroupReqOutput=mock.Mock, _export_static_state=mock.Mock(),
                 _import_static_state=mock.Mock(), logger=LOG, dataclass=dataclasses.dataclass)
    methods = ["release_memory_occupation", "resume_memory_occupation", "init_weights_update_group", "destroy_weights_update_group",
               "update_weights_from_distributed"]
    manager = class_of(release, path, "SchedulerWeightUpdaterManager", methods, object, names)
    return with_packages(hooks, adapter, module("sglang.srt.managers.scheduler_components.weight_updater", SchedulerWeightUpdaterManager=manager))


def sglang_manager(manager, adapter):
    """An object of SGLang's manager that is idle."""
    made = manager()
    made.memory_saver_adapter, made.scheduler, made.offload_tags = adapter, None, set()
    made.is_fully_idle, made.flush_cache = (lambda **_: True), (lambda: True)
    made.tp_worker, made.tp_cpu_group, made._assert_weight_cache_inactive = mock.MagicMock(), None, lambda _: None
    return made


# ---- verl


def verl(release, barrier):
    path = "verl/workers/engine_workers.py"
    fake = torch()
    fake.distributed = types.SimpleNamespace(barrier=barrier)

    def register(**_):
        return lambda method: method

    names = {"torch": fake, "asyncio": asyncio, "register": register, "Dispatch": mock.MagicMock(), "set_expandable_segments": lambda _: None,
             "get_torch_device": mock.MagicMock(), "log_gpu_memory_usage": lambda *_, **__: None, "logger": LOG, "functools": functools,
             "tu": mock.MagicMock(), "make_nd_compute_dataproto_dispatch_fn": mock.Mock(), "DistProfiler": mock.MagicMock(), "_with_routing_replay_flag": register}
    names["DistProfiler"].annotate = register
    training = class_of(release, path, "TrainingWorker", ["train_mini_batch", "train_batch", "infer_batch", "save_checkpoint", "load_checkpoint"],
                        object, names)
    rollout = class_of(release, path, "ActorRolloutRefWorker", ["update_weights"], object, names)
    return with_packages(module("verl.workers.engine_workers", TrainingWorker=training, ActorRolloutRefWorker=rollout))


# ---- slime


def slime(release):
    """Its actor's sleep and wake_up; the functions that they call note that they were called, in place of destroying groups."""
    calls = []
    functions = {"destroy_process_groups": lambda: calls.append("destroy"), "reload_process_groups": lambda: calls.append("reload")}
    groups = module("slime.utils.reloadable_process_group", calls=calls, **functions)
    actor = module("slime.backends.megatron_utils.actor", **functions)
    saver = types.SimpleNamespace(pause=lambda: calls.append("pause"), resume=lambda: calls.append("resume"))
    parallel = mock.MagicMock()
    parallel.get_pipeline_model_parallel_world_size.return_value = 1
    actor.__dict__.update(timer=lambda method: method, clear_memory=lambda **_: None, print_memory=lambda *_: None, torch_memory_saver=saver,
                          mpu=parallel, logger=LOG)
    actor.MegatronTrainRayActor = class_of(release, "slime/backends/megatron_utils/actor.py", "MegatronTrainRayActor", ["sleep", "wake_up"],
                                           object, actor.__dict__)
    return with_packages(groups, actor)


# ---- AReaL, OpenRLHF, NeMo-RL: what they offload by themselves is noted, in `note`


class NoGrad(contextlib.ContextDecorator):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def areal(release, engine, note):
    """The class of an engine, "fsdp" or "megatron"."""
    saver = types.SimpleNamespace(pause=lambda: note("saver pauses"), resume=lambda: note("saver resumes"))
    names = {"is_tms_enabled": lambda: True, "current_platform": mock.MagicMock(), "torch_memory_saver": saver, "dist": mock.MagicMock()}
    base = type("Base", (), {"get_device_stats": mock.MagicMock(), "cpu_group": None})
    return class_of(release, "areal/engine/%s_engine.py" % engine, {"fsdp": "FSDPEngine", "megatron": "MegatronEngine"}[engine], ["offload", "onload"], base, names)


def openrlhf(release, note):
    """The policy's actor, whose DeepSpeed engine notes what it is to move."""
    kinds = types.SimpleNamespace(**{kind: kind for kind in ("optim_states", "contiguous_grad_buffer", "hp_params", "lp_grads", "lp_params")})
    config = module("deepspeed.runtime.zero.offload_config", OffloadDeviceEnum=types.SimpleNamespace(cpu="cpu"), OffloadStateTypeEnum=kinds)
    fake = torch()
    fake.cuda, fake.no_grad = mock.MagicMock(), NoGrad
    version = types.SimpleNamespace(parse=lambda text: [int(part) for part in text.split(".")])
    names = {"torch": fake, "deepspeed": types.SimpleNamespace(__version__="0.19.8"), "version": version, "torch_dist_barrier_and_cuda_sync": lambda: None, "os": os}
    for name in ("offload_deepspeed_states", "reload_deepspeed_states"):
        names[name] = release.define("openrlhf/utils/deepspeed/deepspeed_utils.py", name, dict(names))
    actor = class_of(release, "openrlhf/trainer/ray/ppo_actor.py", "PolicyModelActor",
                     ["fit", "save_model", "forward", "broadcast_to_vllm", "reload_states", "offload_states", "save_checkpoint"], object, names)()
    actor.trainer, actor.strategy, actor.actor, actor.tokenizer = (mock.MagicMock() for _ in range(4))
    actor.disable_ds_ckpt, actor.save_hf_ckpt, actor.ema_model = False, False, None
    actor.trainer.broadcast_to_vllm.side_effect = lambda: note("weights to vLLM")
    actor.trainer.ppo_train.side_effect = lambda _: note("trains")
    actor.actor.side_effect = lambda *_, **__: note("forward") or mock.MagicMock()
    actor.strategy.save_model.side_effect = actor.strategy.save_ckpt.side_effect = lambda *_, **__: note("saves")
    engine = actor.actor.model
    engine.zero_optimization_stage.return_value, engine.config = 3, {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    engine.optimizer.offload_states.side_effect = lambda include, **_: note("offloads " + " ".join(include))
    engine.reload_states.side_effect = lambda **_: note("reloads")
    return actor, with_packages(config, fake)


def nemo_rl(release, note):
    """Megatron's worker, with a model and an optimizer that note what is moved."""
    class Buffer:
        def offload_to_cpu(self, move_params, move_grads):
            note("to the host: " + " ".join(["parameters"] * move_params + ["gradients"] * move_grads))

        def reload_from_cpu(self, move_params, move_grads):
            note("to the GPU: " + " ".join(["parameters"] * move_params + ["gradients"] * move_grads))

    class Model(mock.MagicMock):
        buffers, expert_parallel_buffers = [Buffer()], []

    class State:
        is_cuda = True

        def to(self, device):
            note("states to " + device)
            self.is_cuda = device == "cuda"
            return self

    fake = torch()
    fake.cuda, fake.no_grad, fake.randn = mock.MagicMock(), NoGrad, mock.MagicMock()
    fake.cuda.memory_allocated.return_value = fake.cuda.memory_reserved.return_value = 0
    fake.is_tensor = lambda value: isinstance(value, State)
    names = {"torch": fake, "wrap_with_nvtx_name": lambda _: lambda method: method, "gc": mock.MagicMock(), "print": lambda *_: None, "log": LOG,
             "DistributedDataParallel": Model, "FullyShardedDataParallelV1": State, "FullyShardedDataParallelV2": State, "ChainedOptimizer": State}
    methods = ["prepare_for_lp_inference", "prepare_for_training", "offload_before_refit", "offload_after_refit", "move_model", "move_optimizer"]
    base = type("Base", (), {"finalize_async_save": lambda self: None, "_log_gpu_mem": lambda self, _: None})  # of later releases
    worker = class_of(release, "nemo_rl/models/policy/workers/megatron_policy_worker.py", "MegatronPolicyWorkerImpl", methods, base, names)()
    worker.model, worker.optimizer, worker.rank = Model(), mock.MagicMock(), 0
    worker.optimizer._get_state.return_value = {"weight": {"exp_avg": State()}}
    worker.optimizer_cpu_offload, worker.offload_optimizer_for_logprob, worker.offload_optimizer_for_refit, worker.fp8_cfg = False, True, True, None
    worker.cfg = {"megatron_cfg": {"empty_unused_memory_level": 1}}
    return worker
