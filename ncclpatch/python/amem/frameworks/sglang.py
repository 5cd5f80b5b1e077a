"""SGLang's release_memory_occupation and resume_memory_occupation by AMem: it carries out the calls of torch_memory_saver, and NCCL's memory
goes after the last step of a release that names the weights, and is back before anything that uses NCCL."""

import contextlib

import amem
from amem import _pools, _saver, frameworks

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
WEIGHTS = "weights"
# What SGLang may be asked for between a release and a resume, and uses NCCL for.
USING_NCCL = ("resume_memory_occupation", "init_weights_update_group", "destroy_weights_update_group", "update_weights_from_distributed")


class Saver(_saver.TorchMemorySaver):
    """As torch_memory_saver, a tag without a region has nothing to pause, and CUDA graphs are captured whatever becomes of them. Their memory
    is saved, whatever is asked for: kernels leave there in the capture what each replay reads (sglang#32718)."""

    wait_for_memory = frameworks.WAIT_FOR_MEMORY

    def _chosen(self, tag):
        return super()._chosen(tag) if tag is None or tag in self._regions else []

    @contextlib.contextmanager
    def cuda_graph(self, cuda_graph, pool=None, stream=None, capture_error_mode="global", tag=_saver.DEFAULT, **_):
        import torch

        with _pools.capturing(self._amem_tag(tag, True)) as amems:
            with torch.cuda.graph(cuda_graph, pool=pool if amems is None else amems, stream=stream, capture_error_mode=capture_error_mode):
                yield


def after_release(result, manager, request, *_, **__):
    """Runs after release_memory_occupation, which ends with a synchronization of the device."""
    del result, manager
    if not request.tags or WEIGHTS in request.tags:
        frameworks.pause_nccl()


def before_use(*_, **__):
    frameworks.resume_nccl()


def install():
    """Once in every process of SGLang, before its first use of torch_memory_saver; the entry point does it. AmemError: AMem is of no use here,
    and nothing was changed."""
    frameworks.check()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        import torch_memory_saver
    except ImportError:
        pass  # SGLang runs without it, too, and then releases nothing but what NCCL holds
    else:
        amem.wrap(torch_memory_saver).__class__ = Saver
    HookRegistry.register(UPDATER + "release_memory_occupation", after_release, HookType.AFTER)
    for name in USING_NCCL:
        HookRegistry.register(UPDATER + name, before_use, HookType.BEFORE)
