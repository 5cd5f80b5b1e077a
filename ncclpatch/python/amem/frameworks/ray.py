"""Ray: pauses and resumes over actors. The actors need no method for it; the driver needs neither a GPU nor AMem's library.

    actors = [Trainer.options(runtime_env=amem.frameworks.ray.environment()).remote() for _ in range(4)]
    with amem.frameworks.ray.paused(actors, "weights", "nccl"):
        ...

NCCL's memory is voted on by all ranks that share it, so that all of them must be among the actors of a call. Ray runs these calls as it
runs an actor's methods: after those that were submitted before, and for an actor with max_concurrency beside those that run.
"""

import contextlib


def environment(**variables):
    """The runtime_env of actors in which `import torch` attaches AMem (the wheel's entry point): LD_PRELOAD is not needed, and may be
    whatever the framework sets. `variables` are added to it."""
    return {"env_vars": {"AMEM_ENABLE": "1", **variables}}


def call(actors, function, *arguments):
    """function(actor's object, *arguments) in each actor at once; the results in order. The first failure is raised when all ended."""
    results, failures = _call(actors, function, *arguments)
    if failures:
        raise failures[0]
    return results


def _call(actors, function, *arguments):
    import ray

    pending = [actor.__ray_call__.remote(function, *arguments) for actor in actors]
    results, failures = [], []
    for one in pending:
        try:
            results.append(ray.get(one))
        except Exception as error:  # pylint: disable=broad-except
            results.append(error)
            failures.append(error)
    return results, failures


def _pause(_, *tags):
    import amem

    amem.pause(*tags)


def _resume(_, *tags):
    import amem

    amem.resume(*tags)


def pause(actors, *tags):
    """amem.pause(*tags) in all actors. When one fails, those that had paused resume, and the failure is raised (of Ray's class
    RayTaskError and the class of its cause, so that `except amem.AmemError` finds it)."""
    results, failures = _call(actors, _pause, *tags)
    if failures:
        done = [actor for actor, result in zip(actors, results) if not isinstance(result, Exception)]
        _call(done, _resume, *tags)
        raise failures[0]


def resume(actors, *tags):
    """amem.resume(*tags) in all actors. When one fails, the others have resumed; call again, which leaves them as they are."""
    call(actors, _resume, *tags)


@contextlib.contextmanager
def paused(actors, *tags):
    """Pauses over all actors, and resumes on the way out, also after an exception."""
    pause(actors, *tags)
    try:
        yield
    finally:
        resume(actors, *tags)
