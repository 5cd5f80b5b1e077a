"""What sglang_job.py has SGLang load in its own processes: an alarm, and calls of a scheduler, whose answers it writes to files."""

import functools
import json
import os

import vllm_worker

CALL = "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request"


def plugin():
    """The entry point, which SGLang calls in each of its processes."""
    vllm_worker.end_in_time()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CALL, offer, HookType.BEFORE)


def offer(scheduler, request):
    """Runs before SGLang calls the scheduler's method of that name: a call that vllm_worker.py has for vLLM's workers is a method here, too."""
    if request.method.startswith("engines_"):
        setattr(scheduler, request.method, functools.partial(answer, request.method))


def answer(name, folder, values):
    """SGLang hands back no more than whether a call succeeded."""
    import torch

    found = getattr(vllm_worker.Calls(), name)(*values)
    place = os.path.join(folder, "%s-%d" % (name, torch.distributed.get_rank()))
    with open(place + ".part", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(place + ".part", place)
