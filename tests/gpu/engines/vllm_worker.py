"""What vllm_job.py has vLLM load in its own processes: an alarm, more calls of a worker, workers that share a GPU, and a rival's backend."""

import contextlib
import gc
import importlib
import os
import signal
import time


def plugin():
    """The entry point, which vLLM calls in each of its processes."""
    end_in_time()
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.v1.worker.worker_base import WorkerBase

    if "torch_memory_saver" not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend("torch_memory_saver", "vllm_worker", "SaverBackend")
        begin = WorkerBase.__init__

        def init(self, *arguments, **named):
            self.engines_began = time.time()
            begin(self, *arguments, **named)
            if self.vllm_config.model_config.sleep_mode_backend == "torch_memory_saver":
                importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.instance = Saver()

        WorkerBase.__init__ = init


def end_in_time():
    """Ends this process when the time of the whole run is up, whatever hangs."""
    signal.alarm(max(1, int(float(os.environ["ENGINES_END"]) - time.time())))


class Calls:
    """vLLM's worker_extension_cls: more calls for collective_rpc."""

    def engines_load(self, seed):
        """A weight update: other values, the same for each run with this seed and number of ranks."""
        import torch

        values = torch.Generator(device=self.device).manual_seed(1000 * seed + self.rank)
        with torch.inference_mode():
            for parameter in self.model_runner.get_model().parameters():
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0, 0.02, generator=values)
        torch.cuda.synchronize()
        return seed

    def engines_about(self):
        """Of this worker: its process, its graphs, when it was made (time.time(), before it uses its GPU), and whether NCCL is under AMem."""
        about = {"rank": self.rank, "pid": os.getpid(), "graphs": str(self.vllm_config.compilation_config.cudagraph_mode),
                 "backend": self.vllm_config.model_config.sleep_mode_backend, "began": self.engines_began}
        with contextlib.suppress(ImportError):
            if "libamem_nccl" in os.environ.get("LD_PRELOAD", ""):
                frameworks = importlib.import_module("amem.frameworks")
                about["nccl_under_amem"] = frameworks.nccl_is_under_amem()
        return about

    def engines_stop_in_sleep(self, rank):
        """That rank stops as its next sleep begins."""
        fall_asleep = self.sleep

        def stop_first(*arguments, **named):
            self.sleep = fall_asleep
            os.kill(os.getpid(), signal.SIGSTOP)
            return fall_asleep(*arguments, **named)

        if self.rank == rank:
            self.sleep = stop_first

    def engines_safepoints(self, enough, seconds):
        """Safe points, one after the other, until the file `enough` is there."""
        safepoint, end = importlib.import_module("amem").safepoint, time.monotonic() + seconds
        while not os.path.exists(enough) and time.monotonic() < end:
            safepoint()
            time.sleep(0.005)

    def engines_take(self, named):
        """A weight update by a trainer in the same process: (name, tensor) as Hugging Face names them."""
        self.model_runner.get_model().load_weights(named)

    def engines_memory(self):
        """What AMem has under tags in this worker, in MiB, and what the last pause of each took, in ms; and what a sleep does before it."""
        import torch

        def timed(function):
            began = time.monotonic()
            function()
            return round(1e3 * (time.monotonic() - began), 2)

        amem, sizes = importlib.import_module("amem"), ("bytes", "resident_bytes", "saved_bytes", "unchanged_bytes", "zero_bytes", "pinned_bytes")
        rows = {row["tag"]: {"state": row["state"], "last_pause_ms": row["last_pause_ms"], **{key.replace("bytes", "mib"): row.get(key, 0) >> 20 for key in sizes}}
                for row in amem.memory()["tags"] if row["bytes"]}
        return {**rows, "before": {"collect_ms": timed(gc.collect), "empty_cache_ms": timed(torch.cuda.empty_cache)}}

    def engines_used(self):
        """Bytes of this worker's GPU that the driver has given out, to anyone."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def engines_account(self):
        """The account of this worker's GPU, bytes: {"taken", "left": {kind: bytes}, "used"}, and what the driver has given out."""
        (gpu,) = importlib.import_module("amem").account().gpus
        return {"taken": sum(gpu.taken.values()), "left": gpu.left, "used": gpu.used, "driver": self.engines_used()}


def __getattr__(name):
    """Classes that derive from vLLM's: made when they are asked for, because this module is imported where vLLM is not set up yet."""
    if name == "SharedGpuWorker":
        from vllm.v1.worker.gpu_worker import Worker

        class SharedGpuWorker(Worker):
            """A rank on the first GPU, with all others."""

            def init_device(self):
                self.parallel_config.assigned_physical_gpu_ids = None
                self.local_rank = 0
                super().init_device()

        made = SharedGpuWorker
    elif name == "SaverBackend":
        from vllm.device_allocator.sleep_mode_backend import CuMemBackend

        class SaverBackend(CuMemBackend):
            """vLLM's own backend, on another allocator."""

        made = SaverBackend
    else:
        raise AttributeError(name)
    return globals().setdefault(name, made)


class Saver:
    """torch_memory_saver in the place of vLLM's allocator: weights with a copy on the host, anything else without."""

    def __init__(self):
        from torch_memory_saver import torch_memory_saver

        self._saver, self._tags = torch_memory_saver, []
        self._saver.hook_mode = "torch"

    @contextlib.contextmanager
    def use_memory_pool(self, tag=None):
        tag = tag or "default"
        self._tags += [] if tag in self._tags else [tag]
        with self._saver.region(tag, enable_cpu_backup=tag == "weights"):
            yield

    def sleep(self, offload_tags=None):
        import torch

        for tag in self._tags:
            self._saver.pause(tag)
        torch.cuda.empty_cache()

    def wake_up(self, tags=None):
        for tag in self._tags:
            if tags is None or tag in tags:
                self._saver.resume(tag)

    def get_current_usage(self):
        return 0

    def release_pools(self):
        pass
