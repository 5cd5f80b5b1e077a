"""TRL: what training holds is given back while completions are generated on the same GPU. ../../README.md says what in which mode.

NCCL's memory goes only in the first generation of a step, which all ranks make: a pause of it waits for all of them, and how often a rank
generates after that depends on its completions (tools), or on the program (rollout_func).
"""

import contextlib
import functools
import importlib.metadata

import amem.rl

# TRL's own modules and methods in which every rank generates once, and then gathers with all others.
TOGETHER = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
METHODS = ("_generate", "_generate_single_turn")
OLDEST = "0.28"  # since when a trainer has its engine as vllm_generation


def callback(trainer, **options):
    """A transformers.TrainerCallback for trainer.add_callback. `options` are those of amem.rl.RolloutOffload.

    AmemError (5): this trainer, or this release of TRL, does not generate in a way that AMem knows.
    """
    from transformers import TrainerCallback

    _complain_if_unknown(trainer)

    class AmemCallback(TrainerCallback):
        offload = None

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            self.on_train_end(args, state, control)  # of a training that ended by an exception
            self.offload = install(trainer, model, optimizer, **options)

        def on_train_end(self, args, state, control, **kwargs):
            del args, state, control, kwargs
            if self.offload:
                self.offload.close()
            self.offload = None

    return AmemCallback()


def _complain_if_unknown(trainer):
    wanted = METHODS + (("vllm_generation",) if getattr(trainer, "use_vllm", False) else ())
    lacking = [name for name in wanted if not hasattr(trainer, name)]
    if lacking:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lacking.append("TRL is %s, and %s or later has them" % (importlib.metadata.version("trl"), OLDEST))
        raise amem.AmemError(5, "amem.frameworks.trl: %s has no %s" % (type(trainer).__name__, ", ".join(lacking)))


def install(trainer, model, optimizer, **options):
    """As the callback does it when training begins; returns the RolloutOffload, or None in vLLM's server mode. Its close() takes
    everything back."""
    generation = getattr(trainer, "vllm_generation", None) if getattr(trainer, "use_vllm", False) else None
    if generation is None:
        chosen = {"parameters": False, "nccl": False, **options}  # a sharded model gathers its parameters to generate
        offload = amem.rl.RolloutOffload(model, optimizer, **chosen)
        _within(trainer, "_generate_single_turn", offload, _together(trainer, offload))
        return offload
    if generation.mode != "colocate":
        return None
    offload = amem.rl.RolloutOffload(model, optimizer, **{"nccl": generation.tensor_parallel_size == 1, **options})
    together, engine = _together(trainer, offload), generation.llm
    if generation.enable_sleep_mode:
        _between(engine, offload, together)
        _wrap(generation, "generate", _ended_by_an_error(generation, offload), offload)
    else:
        _within(engine, "generate", offload, together)
    return offload


def _wrap(owner, name, wrapped, offload):
    """Puts `wrapped` in the place of the owner's method until the offload is closed."""
    here = vars(owner).get(name)
    setattr(owner, name, functools.wraps(getattr(owner, name))(wrapped))
    offload.before_close(functools.partial(setattr, owner, name, here) if here else functools.partial(delattr, owner, name))


def _together(trainer, offload):
    """A function that says whether the generation that begins now is one that all ranks make: the first one of each step, in TRL's own
    code. Nothing is known of other code."""
    if any(name in vars(trainer) or getattr(getattr(type(trainer), name, None), "__module__", None) not in TOGETHER for name in METHODS):
        return lambda: False
    generate, first = trainer._generate, []

    def step(*arguments, **named):
        first[:] = [True] if getattr(trainer, "rollout_func", None) is None else []
        try:
            return generate(*arguments, **named)
        finally:
            first.clear()

    _wrap(trainer, "_generate", step, offload)
    return lambda: bool(first and first.pop())


def _within(owner, name, offload, together):
    method = getattr(owner, name)

    def generating(*arguments, **named):
        if offload.in_rollout():  # one generation inside of another
            return method(*arguments, **named)
        with offload.rollout(nccl=together()):
            return method(*arguments, **named)

    _wrap(owner, name, generating, offload)


def _between(engine, offload, together):
    """vLLM's KV cache is awake for generation alone: from wake_up(tags=["kv_cache"]) to sleep()."""
    wake_up, sleep = engine.wake_up, engine.sleep

    def waking(tags=None):
        if tags is None or "kv_cache" not in tags or offload.in_rollout():
            return wake_up(tags=tags)
        offload.pause(nccl=together())
        try:
            return wake_up(tags=tags)
        except BaseException:
            offload.resume()
            raise

    def sleeping(*arguments, **named):
        result = sleep(*arguments, **named)
        offload.resume()
        return result

    _wrap(engine, "wake_up", waking, offload)
    _wrap(engine, "sleep", sleeping, offload)


def _ended_by_an_error(generation, offload):
    """A generation that fails, or that Ctrl-C ends, never comes to the engine's sleep: the program that goes on from there, to save its
    model for example, shall find training's memory where it was."""
    generate = generation.generate

    def generating(*arguments, **named):
        try:
            return generate(*arguments, **named)
        except BaseException:
            if offload.in_rollout():
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    generation.llm.sleep(level=2)  # as at the end of a generation; it brings training's memory back
                offload.resume()
            raise

    return generating
