"""Ray: pauses and resumes over actors, by amem.hosts.

NCCL's memory is voted on by all ranks that share it, so that all of them must be among the actors of a call. Ray runs these calls as it
runs an actor's methods: after those that were submitted before, and for an actor with max_concurrency beside those that run.
"""

from amem.hosts import pause, paused, resume  # noqa: F401  # pylint: disable=unused-import


def environment(**variables):
    """The runtime_env of actors in which `import torch` attaches AMem (the wheel's entry point): LD_PRELOAD is not needed, and may be
    whatever the framework sets. `variables` are added to it."""
    return {"env_vars": {"AMEM_ENABLE": "1", **variables}}


def call(actors, function, *arguments):
    """function(actor's object, *arguments) in each actor at once; the results in order. The first failure is raised."""
    import ray

    return ray.get([actor.__ray_call__.remote(function, *arguments) for actor in actors])
