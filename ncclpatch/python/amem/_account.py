"""amem.account: what is on the GPUs now, whose it is, and which objects of the program hold it."""

import os
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from . import _adopt, _calls, _holders, _pools, _tags

PART = 10  # a remainder of more than a tenth is worth a line
SHOWN = 5  # objects in one line
TOO_MUCH = "counted more than once"


class Held(NamedTuple):
    """Memory on a GPU that belongs to no tag, and who holds it: a path from one of the objects that account() was given."""

    path: str
    bytes: int
    device: int
    storage: int  # its identity

    def __str__(self) -> str:
        return "%s %s" % (self.path, _tags.mebibytes(self.bytes))


class Gpu(NamedTuple):
    """One GPU, in bytes. `used`: what the driver has given out on it, to all processes; None: it does not say. `taken`: what pauses have
    taken, by tag. `left`: what is on the GPU, by owner or reason; it adds up to `used`. If more was counted, because memory changed
    meanwhile or was counted twice, a negative row balances it."""

    device: int
    used: Any
    taken: Dict[str, int]
    left: Dict[str, int]


class Account(NamedTuple):
    """What account() found: the GPUs that have memory of AMem's, and who holds memory of no tag, the largest first. `pinned` and `spare` are of
    the host: bytes that hold contents, and that were pinned for contents and are kept for the next pause."""

    gpus: Tuple[Gpu, ...]
    held: Tuple[Held, ...]
    pinned: int = 0
    spare: int = 0

    def __str__(self) -> str:
        lines = []
        for gpu in self.gpus:
            lines.append("GPU %d: %s used" % (gpu.device, "?" if gpu.used is None else _tags.mebibytes(gpu.used)))
            lines += ["  %-10s %s" % (_tags.mebibytes(count), whose) for whose, count in sorted(gpu.left.items(), key=lambda row: -row[1])]
            lines += ["  %-10s %s, paused: not there" % (_tags.mebibytes(count), tag) for tag, count in gpu.taken.items()]
        lines += ["  held by " + str(one) for one in self.held[:4 * SHOWN]]
        if self.pinned:
            lines.append("host: %s pinned, with contents" % _tags.mebibytes(self.pinned))
        if self.spare:
            lines.append("host: %s pinned for the next pause; amem.trim_pinned() gives them back" % _tags.mebibytes(self.spare))
        return "\n".join(lines) or "no GPU has memory of AMem's"


def named(name: str, values: List[Any]) -> Dict[str, Any]:
    """The objects of a list by names for paths: `name`, or name[0] and so on."""
    return {name if len(values) == 1 else "%s[%d]" % (name, place): value for place, value in enumerate(values)}


def _tensors(path: str, root: Any, torch: Any) -> Iterator[Tuple[str, Any]]:
    if isinstance(root, torch.nn.Module):
        yield from _holders.of_model(root, torch, path)
    elif hasattr(root, "param_groups") or hasattr(root, "chained_optimizers"):
        yield from _holders.of_optimizer(root, torch, path)
    else:
        yield from _holders.within(root, torch, path)


def held(roots: Dict[str, Any], torch: Any) -> List[Held]:
    """Memory of no tag on a GPU that these objects hold, the largest first; each storage once, by its first path."""
    side = _pools.backend()
    if side is None:
        return []
    segment_of, found = _adopt.segment_finder(side), {}
    for path, root in roots.items():
        for outer, tensor in _tensors(path, root, torch):
            for inner, part in _holders.parts_of(tensor, torch, outer):
                storage = _holders.storage_of(part)
                if storage is None or storage._cdata in found or not side.holds(storage) or not storage.nbytes():
                    continue
                if _adopt.home_of(storage) is None and segment_of(storage.data_ptr())[1] is None:
                    found[storage._cdata] = Held(inner, storage.nbytes(), side.device_index(storage.device), storage._cdata)
    return sorted(found.values(), key=lambda one: -one.bytes)


def largest(rows: List[Held]) -> str:
    """The first of them in one line."""
    more = len(rows) - SHOWN
    return ", ".join(map(str, rows[:SHOWN])) + (" and %d more" % more if more > 0 else "")


def _of_others(processes: List[Dict[str, Any]]) -> Dict[str, int]:
    """By process; nothing where this one is not among them: in a container they may be numbered as the host does, and one of them is this."""
    if all(one["pid"] != os.getpid() for one in processes):
        return {}
    return {"process %d%s" % (one["pid"], " (%s)" % one["name"] if one["name"] else ""): one["bytes"] for one in processes if one["pid"] != os.getpid()}


def _gpu(row: Dict[str, Any], unplaced: Dict[str, int], processes: Dict[int, List[Dict[str, Any]]]) -> Gpu:
    left = _tags.seen_on(row)
    left.update(unplaced)
    found = processes.get(row["device"], [])
    known = any(one["pid"] == os.getpid() for one in found)
    left.update(_of_others(found))
    side = _pools.backend()
    if side is not None and os.environ.get("AMEM_SCOPE") != "all":  # there PyTorch's memory is the tag program's
        left.update(side.usage(row["device"]))
    if row["used_bytes"] is not None and (rest := row["used_bytes"] - sum(left.values())):
        rests = "contexts, modules, libraries" + ("" if known else ", other processes")
        left[rests if rest > 0 else TOO_MUCH] = rest
    return Gpu(row["device"], row["used_bytes"], row["taken"], left)


def account(**roots: Any) -> Account:
    """What is on the GPUs now that have memory of AMem's, whose it is, and why it stays; inside a pause, what that has left.

        print(amem.account(model=model, optimizer=optimizer))

    roots:  objects to look through for who holds memory of no tag: modules, optimizers, tensors, and dicts and lists of these. The names are
            the begins of the paths: "model.layers.3._fp8_workspaces['weight']._data".

    Returns Account(gpus, held, pinned, spare): of each GPU `used`, `taken` by tag and `left`, by "tag NAME", reason, PyTorch's tensors, caches and
    private pools (CUDA graphs), processes, and what remains (contexts, modules, other libraries). Takes milliseconds. With AMEM_ENABLE=0
    and without a GPU it is empty.
    """
    answer = _calls.read_json(b"account")
    rows = answer.get("devices", [])
    processes = {one["device"]: one["processes"] for one in _calls.read_json(b"processes").get("devices", [])} if rows else {}
    unplaced = answer.get("unplaced", {})
    gpus = tuple(_gpu(row, unplaced if len(rows) == 1 else {}, processes) for row in rows)
    torch = sys.modules.get("torch")
    pinned = sum(row.get("pinned_bytes", 0) for row in _tags.memory()["tags"])
    spare = max(0, _calls.read_json(b"stats").get("contents", {}).get("pinned_bytes", 0) - pinned)
    return Account(gpus, tuple(held(roots, torch)) if roots and torch is not None else (), pinned, spare)
