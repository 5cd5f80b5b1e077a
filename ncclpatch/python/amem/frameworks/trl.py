"""TRL: what training holds is given back while completions are generated on the same GPU.

    trainer = GRPOTrainer(...)
    trainer.add_callback(amem.frameworks.trl.callback(trainer))

With use_vllm and vllm_mode="colocate" parameters, gradients and optimizer states go while vLLM generates (with vllm_enable_sleep_mode:
before its KV cache comes back), and NCCL's memory where no tensor parallelism needs it. Without vLLM the model generates itself, so that
its parameters stay. In server mode generation has GPUs of its own, and nothing is done.
"""

import functools

import amem.rl


def callback(trainer, **options):
    """A transformers.TrainerCallback for trainer.add_callback. `options` are those of amem.rl.RolloutOffload."""
    from transformers import TrainerCallback

    class AmemCallback(TrainerCallback):
        offload = None

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            del args, state, control, kwargs
            self.offload = install(trainer, model, optimizer, **options)

        def on_train_end(self, args, state, control, **kwargs):
            del args, state, control, kwargs
            if self.offload:
                self.offload.close()

    return AmemCallback()


def install(trainer, model, optimizer, **options):
    """As the callback does it when training begins; returns the RolloutOffload, or None in vLLM's server mode."""
    generation = getattr(trainer, "vllm_generation", None) if getattr(trainer, "use_vllm", False) else None
    if generation is None:
        chosen = {"parameters": False, "nccl": False, **options}  # a sharded model gathers its parameters to generate
        offload = amem.rl.RolloutOffload(model, optimizer, **chosen)
        _within(trainer, "_generate_single_turn", offload)
        return offload
    if generation.mode != "colocate":
        return None
    offload = amem.rl.RolloutOffload(model, optimizer, **{"nccl": generation.tensor_parallel_size == 1, **options})
    engine = generation.llm
    if generation.enable_sleep_mode:
        _between(engine, offload)
    else:
        _within(engine, "generate", offload)
    return offload


def _within(owner, name, offload):
    method = getattr(owner, name)

    @functools.wraps(method)
    def generating(*arguments, **named):
        with offload.rollout():
            return method(*arguments, **named)

    setattr(owner, name, generating)


def _between(engine, offload):
    """vLLM's KV cache is awake for generation alone: from wake_up(tags=["kv_cache"]) to sleep()."""
    wake_up, sleep = engine.wake_up, engine.sleep

    @functools.wraps(wake_up)
    def waking(tags=None):
        if tags is not None and "kv_cache" in tags:
            offload.pause()
        return wake_up(tags=tags)

    @functools.wraps(sleep)
    def sleeping(*arguments, **named):
        result = sleep(*arguments, **named)
        offload.resume()
        return result

    engine.wake_up, engine.sleep = waking, sleeping
