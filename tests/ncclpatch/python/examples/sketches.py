"""Sketches: how AMem would come into ROLL, AReaL, OpenRLHF and NeMo-RL. Their names and signatures were compared with the releases (ROLL 0.3.0, AReaL
1.0.4, OpenRLHF 0.11.2, NeMo-RL 0.7.0), and what these sketches wrap ran on a CPU in the code of the last three; no whole job of theirs ever did. Set
AMEM_ENABLE=1 where their workers run."""

import functools

from amem import frameworks
from amem.frameworks import groups


def roll():
    """At the end of the imports of roll.distributed.executor.worker, with offload_nccl: true in the worker's configuration. ROLL's functions destroy
    process groups and make them anew, as slime's do; with this they pause and resume NCCL's memory, and the groups stay."""
    groups.keep("roll.utils.offload_nccl")


def areal(engine_class):
    """For the engine of areal.engine.fsdp_engine or areal.engine.megatron_engine: NCCL's memory goes after what torch_memory_saver pauses in
    offload(), and is back before what it resumes in onload()."""
    offload, onload = engine_class.offload, engine_class.onload

    def offload_and_pause(self, *arguments, **named):
        result = offload(self, *arguments, **named)
        frameworks.pause_nccl()
        return result

    engine_class.offload = offload_and_pause
    engine_class.onload = frameworks.before(frameworks.resume_nccl, onload)


def openrlhf(actor_class):
    """For PolicyModelActor of openrlhf.trainer.ray.ppo_actor, where engines are colocated and get the weights by CUDA IPC: NCCL's memory goes when
    they have them, and is back before the ranks do anything together. What offload_states moves is DeepSpeed's affair; the parameters stay."""
    _paused_between(actor_class, "broadcast_to_vllm", ("fit", "forward", "broadcast_to_vllm", "reload_states", "save_model", "save_checkpoint"))


def nemo_rl(worker_class):
    """For MegatronPolicyWorkerImpl and DTensorPolicyWorkerV2Impl of nemo_rl.models.policy.workers, with colocated generation: NCCL's memory goes when
    the weights are with the engine, and is back before log-probabilities, training and the next refit."""
    _paused_between(worker_class, "offload_after_refit", ("prepare_for_lp_inference", "prepare_for_training", "offload_before_refit"))


def _paused_between(owner, last, firsts):
    """NCCL's memory goes at the end of the method `last`, and is back at the begin of each of `firsts`, which `last` may call."""
    for name in firsts:
        setattr(owner, name, frameworks.before(frameworks.resume_nccl, getattr(owner, name)))
    method = getattr(owner, last)

    @functools.wraps(method)
    def and_pause(self, *arguments, **named):
        result = method(self, *arguments, **named)
        frameworks.pause_nccl()
        return result

    setattr(owner, last, and_pause)
