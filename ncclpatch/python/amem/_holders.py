"""Which memory is behind a tensor, and which tensors a program's objects hold.

A tensor may be a wrapper of others: of PyTorch's protocol (__tensor_flatten__: DTensor, torchao), or of a library's own (Transformer Engine
before 2026), which has them as attributes; or have more beside its own memory (bitsandbytes' quant_state, DeepSpeed's ds_tensor). A module
may hold copies of its weights as attributes, and an optimizer's wrapper shards and masters. All are found by these rules, none by its name.
"""

from typing import Any, Iterator, List, Optional, Set, Tuple

DEEPEST = 5  # containers and objects in one another
_PLAIN = (str, bytes, int, float, bool, type(None))
# Of torch.nn.Module itself, which lists them by methods.
_OF_MODULES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def storage_of(tensor: Any) -> Any:
    """A tensor's storage, or None where it has no memory of its own: a wrapper, of which to ask for its address is an error."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":
            storage.data_ptr()
        return storage
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
        return None


def is_strided(tensor: Any, torch: Any) -> bool:
    try:
        return bool(tensor.layout is torch.strided)
    except (RuntimeError, NotImplementedError, ValueError):  # a lazy parameter
        return True


def _package(value: Any) -> str:
    """By which the objects that are parts of it are told from those that it merely knows. PyTorch's own objects know everything."""
    package = str(type(value).__module__).split(".", 1)[0]
    return "" if package in ("torch", "builtins") else package


def _attributes(value: Any) -> List[Tuple[str, Any]]:
    """Attributes of an object itself, by name, those in slots among them; nothing is computed by a property."""
    found = list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member: Any = kind.__dict__.get(name)
            if hasattr(member, "__get__") and not name.startswith("__"):
                try:
                    found.append((name, member.__get__(value)))
                except AttributeError:  # not set
                    pass
    return found


def _name_of(key: Any, place: int) -> str:
    """A key of a dict in a path. Others than these are not asked for their text: a parameter's is its contents, which may be paused."""
    return repr(key) if type(key) in (str, int) else "key %d" % place


def _within(path: str, value: Any, package: str, torch: Any, seen: Set[int], depth: int) -> Iterator[Tuple[str, Any]]:
    """Tensors in an attribute: itself, or in containers, or in objects of that package, which are parts of what has the attribute. Not in
    modules, which are listed for themselves."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth >= DEEPEST or isinstance(value, (type, torch.nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inner = [("%s[%s]" % (path, _name_of(key, place)), one) for place, (key, one) in enumerate(list(value.items()))]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = [("%s[%d]" % (path, place), one) for place, one in enumerate(list(value))]
    elif package and _package(value) == package and not callable(value):
        inner = [("%s.%s" % (path, name), one) for name, one in _attributes(value)]
    else:
        return
    for further, one in inner:
        if not isinstance(one, _PLAIN):
            yield from _within(further, one, package, torch, seen, depth + 1)


def _flattened(tensor: Any, torch: Any) -> Optional[List[Tuple[str, Any]]]:
    """The parts of a wrapper by PyTorch's protocol; None: it is none, or does not keep to the protocol."""
    try:
        if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
            return None
        return [(name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    except Exception:  # pylint: disable=broad-except  # of somebody's class
        return None


def parts_of(tensor: Any, torch: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    """(path, tensor) of all tensors with memory of their own behind a tensor: itself, and what it wraps or has beside it. A wrapper behind
    which none is found comes as it is; storage_of() tells."""
    yield from _parts_of(tensor, torch, path, set())


def _parts_of(tensor: Any, torch: Any, path: str, seen: Set[int]) -> Iterator[Tuple[str, Any]]:
    if id(tensor) in seen:
        return
    seen.add(id(tensor))
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        yield path, tensor
        return
    own = storage_of(tensor) is not None or not is_strided(tensor, torch)
    named = _flattened(tensor, torch)
    inner: List[Tuple[str, Any]] = []
    for name, value in [*(named or ()), *_attributes(tensor)]:
        # A wrapper that keeps to the protocol names its parts; one that does not may have them anywhere within.
        package = _package(tensor) if named is None else ""
        inner += _within("%s.%s" % (path, name), value, package, torch, set(), 0)
    if own or not inner:
        yield path, tensor
    for further, one in inner:
        yield from _parts_of(one, torch, further, seen)


def within(root: Any, torch: Any, path: str) -> Iterator[Tuple[str, Any]]:
    """Tensors in a value: itself, or in containers."""
    yield from _within(path, root, "", torch, set(), 0)


def attached_to(parameter: Any, torch: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    """Tensors that a library has attached to a parameter, such as a shard or a copy."""
    for name, value in list(getattr(parameter, "__dict__", {}).items()):
        yield from _within("%s.%s" % (path, name), value, "", torch, set(), 0)


def held_by(owner: Any, torch: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    """Tensors that an object has as attributes, by themselves, in containers, or in objects of its package."""
    seen: Set[int] = set()
    for name, value in _attributes(owner):
        nothing = isinstance(value, _PLAIN) or (isinstance(value, (dict, list, tuple)) and not value)  # as most of a module's are
        if not nothing and not (name in _OF_MODULES and isinstance(owner, torch.nn.Module)):
            yield from _within("%s.%s" % (path, name), value, _package(owner), torch, seen, 0)


def of_model(model: Any, torch: Any, path: str = "model") -> Iterator[Tuple[str, Any]]:
    """(path, tensor) of all that the modules of a model hold: parameters and what is attached to them, gradients, buffers, and attributes
    (held_by)."""
    for prefix, module in model.named_modules():
        here = "%s.%s" % (path, prefix) if prefix else path
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield "%s.%s" % (here, name), parameter
                if parameter.is_leaf and parameter.grad is not None:
                    yield "%s.%s.grad" % (here, name), parameter.grad
                yield from attached_to(parameter, torch, "%s.%s" % (here, name))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield "%s.%s" % (here, name), buffer
        yield from held_by(module, torch, here)


def of_optimizer(optimizer: Any, torch: Any, path: str = "optimizer") -> Iterator[Tuple[str, Any]]:
    """The same of an optimizer, PyTorch's or a wrapper of some: states, parameters of its own, and attributes (held_by)."""
    seen: Set[int] = set()
    rest = [(path, optimizer)]
    while rest:
        here, one = rest.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield from held_by(one, torch, here)
        rest += [("%s.chained_optimizers[%d]" % (here, place), inner) for place, inner in enumerate(getattr(one, "chained_optimizers", ()))]
        wrapped = getattr(one, "optimizer", None)
        if hasattr(wrapped, "param_groups") or hasattr(wrapped, "optimizer"):
            rest.append((here + ".optimizer", wrapped))
