"""What a training job holds: the tensors of its models and optimizers, by class.

Models are torch.nn.Modules, among them DDP's wrapper, modules under FSDP2's fully_shard, and Megatron-Core's DistributedDataParallel.
Optimizers are PyTorch's, or wrap some, as Megatron-Core's do. What is not PyTorch's is known by its attributes; nothing of it is imported.
"""

from . import _holders


def as_list(value):
    """A model or an optimizer, or a list of them (Megatron's model chunks), as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def megatron_buffers(models):
    """Megatron-Core's contiguous buffers of parameters and gradients. Its DistributedDataParallel has them in lists, one of which
    hides the method torch.nn.Module.buffers; parameters and main_grad are views of them."""
    found = []
    for model in models:
        for module in model.modules():
            for name in ("buffers", "expert_parallel_buffers"):
                value = module.__dict__.get(name)
                if isinstance(value, list):
                    found += [one for one in value if hasattr(one, "grad_data")]
    return found


def has_buckets(models):
    """Whether DDP holds the memory of gradients in buckets that outlive them, and gradients are views of it."""
    return any(getattr(module, "gradient_as_bucket_view", False) for model in models for module in model.modules())


def parameters_of(models):
    for model in models:
        yield from model.parameters()
    for buffer in megatron_buffers(models):
        yield getattr(buffer, "param_data", None)


def gradients_of(models, optimizers):
    """Present gradients: of the models' parameters, of the optimizers' copies of these, and Megatron's buffers."""
    for model in models:
        for parameter in model.parameters():
            yield parameter.grad
            yield getattr(parameter, "main_grad", None)
    for buffer in megatron_buffers(models):
        yield buffer.grad_data
    for parameter in _optimized(optimizers):
        yield parameter.grad


def states_of(optimizers):
    """Optimizer states, and the parameters that the optimizer has: those of mixed precision are copies of its own. The model's are
    among them otherwise, and the caller leaves those out."""
    for optimizer in torch_optimizers(optimizers):
        yield optimizer.state
    yield from _optimized(optimizers)


def _optimized(optimizers):
    for optimizer in torch_optimizers(optimizers):
        for group in optimizer.param_groups:
            yield from group["params"]


def torch_optimizers(optimizers):
    """The optimizers with states and parameters of their own in a list of optimizers and wrappers of optimizers: Megatron's
    ChainedOptimizer has a list of wrappers, and each of those (like Accelerate's) has the wrapped one as its `optimizer`."""
    found = {}
    for optimizer in optimizers:
        if hasattr(optimizer, "chained_optimizers"):
            inner = torch_optimizers(optimizer.chained_optimizers)
        elif has_hooks(optimizer) or not hasattr(optimizer, "optimizer"):
            inner = [optimizer] if hasattr(optimizer, "param_groups") else []
        else:
            inner = torch_optimizers(as_list(optimizer.optimizer))
        found.update((id(one), one) for one in inner)
    return list(found.values())


def wrappers_of(optimizers):
    """The wrappers of optimizers in that list, which may have shards, masters and buffers of their own (DeepSpeed's ZeRO)."""
    found, rest = {}, list(optimizers)
    while rest:
        optimizer = rest.pop()
        if id(optimizer) not in found and not has_hooks(optimizer):
            found[id(optimizer)] = optimizer
            rest += [*getattr(optimizer, "chained_optimizers", ()), *as_list(getattr(optimizer, "optimizer", None))]
    return list(found.values())


def caches_of(models, optimizers, torch):
    """What else modules and optimizers' wrappers hold: buffers, copies of weights, shards and masters, states of quantization."""
    for model in models:
        for _, tensor in _holders.of_model(model, torch):
            yield tensor
    for wrapper in wrappers_of(optimizers):
        for _, tensor in _holders.held_by(wrapper, torch):
            yield tensor


def has_hooks(optimizer):
    """Whether it is an optimizer of PyTorch's that was initialized as one; wrappers may derive from its class and nothing more."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "register_step_pre_hook")
