"""Sketches: how AMem would come into ROLL and AReaL. Their names and signatures were compared with the releases (ROLL 0.3.0, AReaL 1.0.4); nothing of
this has ever run in either. Set AMEM_ENABLE=1 where their workers run."""

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
