"""AMem: give back the GPU memory that NCCL and your tensors hold, and bring it back at the same addresses with the same contents.

    import torch, amem          # amem after torch, before init_process_group; or start with LD_PRELOAD

    with amem.paused():         # NCCL's memory. Collective: every rank that shares NCCL memory with this one does the same
        generate_rollouts()

    with amem.pool("weights"):  # what PyTorch allocates here can be paused by its tag; amem.adopt moves tensors that exist
        model = Model().cuda()
    with amem.paused("weights", "nccl"):
        generate_rollouts()

    amem.safepoint()            # once a step: `amem pause JOB`, from a shell, takes hold here, at the same step in all ranks

`amem.rl.RolloutOffload` does this for a training loop with rollouts: parameters, gradients, optimizer and NCCL.

With AMEM_ENABLE=0, and where there is no GPU, every call does nothing and succeeds, and one line says so once.

Importing puts every loaded NCCL under AMem; where that is impossible (NCCL has called the driver already) it warns and says what
to do, and so does the AmemError of every call that needs NCCL. An NCCL that is loaded later, by ctypes or an import, follows before its first call. stats()["nccl_libraries"] names each
NCCL of the process, whether it is under AMem, and why not.
"""

import importlib
import sys
from typing import Any, Dict, List, Tuple

from . import _calls, _library, _tags
from ._account import Account, Gpu, Held, account
from ._adopt import Adopted, Skipped, adopt
from ._calls import AmemError
from ._gather import gather
from ._hosts import StoreGroup
from ._metrics import MetricsServer, metrics, openmetrics, serve_metrics, write_metrics
from ._pools import pool
from ._requests import frozen, safepoint
from ._saver import wrap
from ._tags import Freed, memory, pause, paused, resume, wait

__all__ = ["Account", "Adopted", "AmemError", "Freed", "Gpu", "Held", "MetricsServer", "Skipped", "StoreGroup", "account", "adopt", "attach", "frozen", "gather", "memory", "metrics", "openmetrics",
           "pause", "paused", "pool", "resume", "safepoint", "serve_metrics", "set_group", "stats", "trim_pinned", "version", "wait", "wrap",
           "write_metrics"]
_MODULES = ("frameworks", "hosts", "journal", "rl")
__version__: str


def __getattr__(name: str) -> Any:
    """amem.rl and the like, which are imported by their first use."""
    if name in _MODULES:
        return importlib.import_module("." + name, __name__)
    if name == "__version__":
        try:
            return _calls.package_version()
        except AmemError as error:  # in a source tree without a build
            raise AttributeError("amem.__version__: %s" % error) from error
    raise AttributeError("module %r has no attribute %r" % (__name__, name))


def __dir__() -> List[str]:
    return sorted([*__all__, *_MODULES, "__version__"])


def attach() -> None:
    """Puts the NCCL of this process under AMem. Harmless if it is already; AmemError (5) if it is too late, or none is loaded."""
    _calls.check(_calls.lib.amem_attach())


def stats() -> Dict[str, Any]:
    """Statistics as a dict; {"session": None, ...} before NCCL has used memory."""
    answer: Dict[str, Any] = _calls.read_json(b"stats")
    return answer


def trim_pinned(keep_bytes: int = 0) -> None:
    """Gives back pinned host memory that holds no contents; the next pause pins what it needs."""
    _calls.check(_calls.lib.amem_trim_pinned(keep_bytes))


def set_group(group: int) -> None:
    """Only processes with equal groups pause together; default AMEM_GROUPID, or 0."""
    _calls.check(_calls.lib.ncclSetGroupID(group))


def version() -> str:
    """The version of the library, which is that of the package unless AMEM_LIBRARY names another one."""
    return _calls.library_version()


def _watch(event: str, arguments: Tuple[Any, ...]) -> None:
    """Before the first call of an NCCL that was loaded after this package, its functions are looked up by name."""
    if event == "ctypes.dlsym" and isinstance(arguments[1], str) and arguments[1].startswith("nccl"):
        _calls.lib.amem_attach()  # what cannot be attached to is said by the pause and by stats()


if _library.nccl_is_loaded() and not isinstance(_calls.lib, _library.Off):
    try:
        attach()
        if not _calls.was_loaded:
            _by_entry_point = getattr(sys.modules.get("amem_plugins"), "attached_amem", False)
            _library.say("attached by " + ("the entry point torch.backends, because AMEM_ENABLE=1" if _by_entry_point else "import amem"))
    except AmemError as error:
        _library.warn(str(error))
if _library.is_there(_calls.lib):
    sys.addaudithook(_watch)
    if _late := _tags.allocated_too_early():
        _library.warn("AMEM_SCOPE=all came too late: " + _tags.too_late(_late))
