"""amem.adopt: moves the memory of existing tensors into a pool; everything that refers to them stays valid."""

import bisect
import functools
import itertools
import numbers
from typing import Any, Dict, List, NamedTuple, Optional

from . import _calls, _holders, _library, _pools, _tags

NOT_A_GPUS = "not on a CUDA device"
NOT_STRIDED = "not strided"
EMPTY = "empty"
HERE = "in this pool already"
ELSEWHERE = "in the pool of the tag %r"
ANOTHERS = "in another memory pool of PyTorch, such as a CUDA graph's"
FOREIGN = "memory that PyTorch did not allocate"
WRAPPED = "a wrapper, %s, whose memory is not found"
NO_TENSOR = "no tensor, and nothing that tensors can be taken out of: %s"
BATCH_BYTES = 1 << 30  # moved before the old memory goes back to the driver


class Skipped(NamedTuple):
    """Tensors that stay where they are for one reason; `bytes` of their storages, each counted once."""

    reason: str
    tensors: int
    bytes: int


class Adopted(NamedTuple):
    """What adopt() did: it moved `storages`, which `tensors` of the arguments share; `bytes` before rounding."""

    tag: str
    storages: int
    tensors: int
    bytes: int
    skipped: List[Skipped]


def together(one: Adopted, other: Adopted) -> Adopted:
    """Of two calls for one tag."""
    return Adopted(one.tag, *(a + b for a, b in zip(one[1:], other[1:])))


def _skip(skipped, reason, tensors, size):
    """Counts tensors that stay, in {reason: Skipped}."""
    before = skipped.get(reason, Skipped(reason, 0, 0))
    skipped[reason] = Skipped(reason, before.tensors + tensors, before.bytes + size)


def tensors_in(values, torch, others=None):
    """Every tensor in a tensor, a torch.nn.Module (parameters and buffers), or nested mappings and iterables of these; skips numbers,
    strings and None. `others`: a list that is given what is none of this."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, torch.nn.Module):
        yield from itertools.chain(values.parameters(), values.buffers())
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value, torch, others)
    elif hasattr(values, "__iter__") and not isinstance(values, (str, bytes)):
        for value in values:
            yield from tensors_in(value, torch, others)
    elif others is not None and values is not None and not isinstance(values, (str, bytes, numbers.Number)):
        others.append(values)


def _size_of(tensor):
    """Bytes that a wrapper stands for, as far as it says so."""
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def storages_of(values: Any, torch: Any, skipped: Optional[Dict[str, Skipped]] = None) -> Dict[Any, List[Any]]:
    """{identity: [storage, number of tensors]} of nested tensors, in their order."""
    found, others = {}, []
    for outer in tensors_in(values, torch, others):
        for _, tensor in _holders.parts_of(outer, torch):
            storage = _holders.storage_of(tensor) if _holders.is_strided(tensor, torch) else None
            if storage is not None:
                found.setdefault(storage._cdata, [storage, 0])[1] += 1
            elif skipped is not None:
                strided = _holders.is_strided(tensor, torch)
                _skip(skipped, WRAPPED % type(tensor).__name__ if strided else NOT_STRIDED, 1, _size_of(tensor) if strided else 0)
    for other in others if skipped is not None else ():
        _skip(skipped, NO_TENSOR % type(other).__name__, 1, 0)
    return found


# Storages that adopt() moved: identity -> (weak reference, address, tag). The weak reference does not keep a storage alive, and tells
# when its identity belongs to another one.
_homes = {}


def _note_home(storage, tag, torch):
    _homes[storage._cdata] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.data_ptr(), tag)


def home_of(storage):
    """The tag of the pool that adopt() moved a storage to; None if it did not."""
    weak, address, tag = _homes.get(storage._cdata, (None, None, None))
    return tag if weak and not weak.expired() and address == storage.data_ptr() else None


def segment_finder(torch_side):
    """A function of an address: (whether a MemPool has it, its tag or None). It reads the list once, at the first question."""
    rows = functools.cache(lambda: sorted(torch_side.segments(), key=lambda row: row[0]))

    def segment_of(address):
        place = bisect.bisect_right([row[0] for row in rows()], address) - 1
        found = place >= 0 and address < rows()[place][1]
        return found, rows()[place][2] if found else None

    return segment_of


def _reason_to_stay(storage, tag, torch_side, segment_of):
    """Why a storage is not moved into the pool of a tag, or None."""
    if not torch_side.holds(storage):
        return NOT_A_GPUS
    if storage.nbytes() == 0:
        return EMPTY
    home = home_of(storage)
    if home is None:
        pooled, home = segment_of(storage.data_ptr())
        if pooled and home is None:
            return ANOTHERS
        if pooled:
            _note_home(storage, home, torch_side.torch)
    if home is not None:
        return HERE if home == tag else ELSEWHERE % home
    return None if storage.resizable() else FOREIGN


def _batches(storages, torch_side):
    """(device, storages of at most BATCH_BYTES together, or a single larger one)."""
    device, batch, size = None, [], 0
    for storage in sorted(storages, key=lambda one: torch_side.device_index(one.device)):
        if batch and (torch_side.device_index(storage.device) != device or size + storage.nbytes() > BATCH_BYTES):
            yield device, batch
            batch, size = [], 0
        device = torch_side.device_index(storage.device)
        batch.append(storage)
        size += storage.nbytes()
    if batch:
        yield device, batch


def _move_batch(device, batch, tag, policy, torch_side):
    """Moves storages, each to memory of the same size. resize_ takes new memory from the allocator in force, copies, and puts the
    new address into the storage itself, so that every view of it follows. When memory is short it has changed nothing."""
    try:
        with _pools.pool(tag, policy, device):
            for storage in batch:
                storage.resize_(storage.nbytes())
                _note_home(storage, tag, torch_side.torch)
    finally:
        torch_side.synchronize([device])  # the old memory may be reused from here on
        _pools.empty_cache()  # PyTorch does not do it by itself while it allocates from a pool


def _move(storages, tag, policy, torch_side):
    torch_side.synchronize({torch_side.device_index(storage.device) for storage in storages})  # who still writes to the old memory?
    short = torch_side.torch.cuda.OutOfMemoryError
    try:
        for device, batch in _batches(storages, torch_side):
            try:
                _move_batch(device, batch, tag, policy, torch_side)
            except short:  # PyTorch's caches are empty now
                _move_batch(device, [one for one in batch if home_of(one) != tag], tag, policy, torch_side)
    except short as error:
        text = "amem.adopt: %d of %d storages are in the pool %r, and memory for the next one was short (%s); all contents are intact" % (
            sum(home_of(one) == tag for one in storages), len(storages), tag, _calls.last_error() or error)
        raise _calls.AmemError(1, text) from error


def _check_landed(storages, tag, torch_side):
    segment_of, row = segment_finder(torch_side), _tags.row_of(tag)
    if all(segment_of(storage.data_ptr()) == (True, tag) for storage in storages) and (row is None or row["bytes"] > 0):
        return  # no row: AMem is switched off
    text = "amem.adopt: " + _pools.ELSEWHERE % tag + "; the tensors are intact, and a pause would not free them"
    raise _calls.AmemError(5, text)


def move_storages(storages: Dict[Any, List[Any]], tag: str, policy: str, skipped: Dict[str, Skipped]) -> Adopted:
    """adopt() of {identity: [storage, number of tensors]}; `skipped` is {reason: Skipped} so far."""
    torch_side = _pools.backend()
    if torch_side is None:
        reason = _library.SWITCHED_OFF if _library.is_off(_calls.lib) else NOT_A_GPUS
        for storage, tensors in storages.values():
            _skip(skipped, reason, tensors, storage.nbytes())
        return Adopted(tag, 0, 0, 0, list(skipped.values()))
    state = _tags.state_of(tag)
    if state is None:
        _tags.open_pool(tag, policy)  # also for tensors that do not exist yet, as an optimizer's states before its first step
    if state in ("pausing", "resuming"):
        _tags.wait(tag)
        state = _tags.state_of(tag)
    if state not in (None, "resident"):
        raise _calls.AmemError(5, "amem.adopt: the tag %r is %s; resume it first" % (tag, state))
    segment_of, chosen, moved = segment_finder(torch_side), [], 0
    for storage, tensors in storages.values():
        reason = _reason_to_stay(storage, tag, torch_side, segment_of)
        if reason:
            _skip(skipped, reason, tensors, storage.nbytes())
        else:
            chosen.append(storage)
            moved += tensors
    for key in [key for key, (weak, _, _) in _homes.items() if weak.expired()]:
        del _homes[key]
    if chosen:
        _move(chosen, tag, policy, torch_side)
        _check_landed(chosen, tag, torch_side)
    return Adopted(tag, len(chosen), moved, sum(storage.nbytes() for storage in chosen), list(skipped.values()))


def adopt(tensors: Any, tag: str, policy: str = "preserve") -> Adopted:
    """Moves existing tensors into the pool `tag`; nothing that refers to them changes.

        amem.adopt(model.parameters(), "weights")
        amem.adopt(optimizer.state, "optimizer")

    tensors:  a tensor, a torch.nn.Module, or nested dicts, lists and iterators of them. Parameters, gradients, optimizer states, views of
              flat buffers and wrappers (DTensor, torchao, Transformer Engine's FP8, bitsandbytes) are all right: what moves is the memory of the storage that they share, once, as a
              whole, so that Parameter objects, keys of optimizer.state, param.grad and views stay what they are.
    policy:   as for amem.pool.

    Returns Adopted(tag, storages, tensors, bytes, skipped); `skipped` has a row (reason, tensors, bytes) for each reason to leave
    tensors where they are: on the CPU, in this pool already, in another pool (amem.pool, or a CUDA graph's), empty, not strided,
    memory that PyTorch did not allocate, a wrapper whose memory is not found (with the bytes that it stands for), no tensor at all (bytes 0). TypeError: `tensors` itself is something else, an optimizer for example.

    Addresses change here, once, and never again. So adopt before a CUDA graph is captured that reads the tensors, before NCCL or
    another process is given their addresses, and while no other thread uses them. It waits for the devices, and empties PyTorch's
    caches; while it works, a gibibyte, or the largest storage if that is more, is there twice. torch.compile needs nothing: it asks for addresses in each call.

    RuntimeWarning: parameters with policy "discard", which a pause does not save.

    AmemError: too little memory (1; what was moved is moved, everything is intact), the tag is paused (5), another policy (4).
    """
    import torch

    skipped: Dict[str, Skipped] = {}
    others: List[Any] = []
    found = list(tensors_in(tensors, torch, others))  # once, because iterators give what they have once
    if policy == "discard" and any(isinstance(one, torch.nn.Parameter) for one in found):
        _library.warn("amem.adopt: policy=\"discard\" does not save the parameters under the tag %r: after a pause and a resume their "
                      "contents are undefined, and must be loaded again" % tag)
    storages = storages_of([*found, *others], torch, skipped)
    if skipped.keys() == {NO_TENSOR % type(tensors).__name__}:
        raise TypeError("amem.adopt takes tensors, a torch.nn.Module, or dicts and iterables of them, not %s; of an optimizer write optimizer.state"
                        % type(tensors).__name__)
    return move_storages(storages, tag, policy, skipped)
