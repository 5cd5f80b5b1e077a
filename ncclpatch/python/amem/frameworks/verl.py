"""verl's colocated training and rollout: NCCL's memory of the training ranks is the engine's while it generates.

It goes before the rollout's KV cache comes back, which is after the last use of NCCL of a weight update, and returns before what uses it next.
"""

import functools
import inspect

from amem import frameworks

CACHE = "kv_cache"
WEIGHTS = "update_weights"
USING_NCCL = ("train_mini_batch", "train_batch", "infer_batch", "save_checkpoint", "load_checkpoint")  # of verl's TrainingWorker


def install(rollout_worker, training_worker):
    """rollout_worker: verl's ActorRolloutRefWorker. training_worker: its TrainingWorker. Once in each process; again is harmless.

    AttributeError: a class lacks a method that is to be wrapped, so that this release of verl is not known. Nothing is changed then.
    """
    methods = [(training_worker, name) for name in USING_NCCL] + [(rollout_worker, WEIGHTS)]
    found = [(owner, name, getattr(owner, name)) for owner, name in methods]
    for owner, name, method in found:
        if not hasattr(method, "amem_wraps"):
            wrapped = _updating(method) if name == WEIGHTS else frameworks.before(frameworks.resume_nccl, method)
            wrapped.amem_wraps = method
            setattr(owner, name, wrapped)


def _updating(method):
    @functools.wraps(method)
    async def updating(self, *arguments, **named):
        frameworks.resume_nccl()
        _pause_before_the_cache(self.rollout)
        result = method(self, *arguments, **named)
        return await result if inspect.isawaitable(result) else result

    return updating


def _pause_before_the_cache(rollout):
    """verl brings the rollout's KV cache back last, when all ranks have passed a barrier."""
    if rollout is None or "resume" in vars(rollout):
        return
    resume = rollout.resume

    @functools.wraps(resume)
    async def resume_with_room(tags, *arguments, **named):
        if CACHE in tags:
            frameworks.pause_nccl()
        return await resume(tags, *arguments, **named)

    rollout.resume = resume_with_room
