"""slime and ROLL destroy their process groups before a rollout and make them anew afterwards. With AMem the groups stay, and NCCL's
memory is paused: milliseconds in place of seconds, and no communicator, address or CUDA graph becomes invalid.
"""

import functools
import importlib
import logging
import sys

from amem import _calls, _hosts, frameworks

_log = logging.getLogger("amem")

SLIME = "slime.utils.reloadable_process_group"
DESTROY, RELOAD = "destroy_process_groups", "reload_process_groups"


def keep(module):
    """Has the module's destroy_process_groups and reload_process_groups pause and resume NCCL's memory, also where other modules
    have imported them by name already. Where NCCL is not under AMem on one rank, or its pause fails, groups are destroyed as before,
    on all ranks of all hosts: they agree on it through the store of the default process group.

    module:   the project's module, or its name.
    Returns:  the names that were replaced, "MODULE.FUNCTION" each; none where that was done before.
    AttributeError: the module does not have these functions.
    """
    if isinstance(module, str):
        module = importlib.import_module(module)
    destroy, reload = getattr(module, DESTROY), getattr(module, RELOAD)
    if hasattr(destroy, "amem_replaces"):
        return []
    kept = []  # not empty: NCCL's memory was paused in place of the last destruction

    @functools.wraps(destroy)
    def pause():
        if kept or _all_paused():
            kept[:] = [True]
            return None
        return destroy()

    @functools.wraps(reload)
    def resume():
        if not kept:
            return reload()
        frameworks.resume_nccl()
        kept.clear()
        return None

    pause.amem_replaces = resume.amem_replaces = True
    return _replace(DESTROY, destroy, pause) + _replace(RELOAD, reload, resume)


def _world():
    """The ranks that destroy their groups together: those of the default process group; None where there is none."""
    initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)()
    return _hosts.group_of(True) if initialized else None


def _all_paused():
    """Pauses NCCL's memory on all ranks or on none, and says which: a rank that destroyed its groups alone would be waited for for ever."""
    world = _world()
    if world is None:
        return frameworks.pause_nccl()

    what = "pause in place of destroying process groups"

    def agree(pause, undo):
        idle = {"hosts_idle": True} if _hosts.are_idle(world, what, None) else {}

        def act():
            if not frameworks.nccl_is_under_amem():
                raise _calls.AmemError(5, "NCCL is not under AMem there")
            pause(**idle)

        _hosts.together(world, what, act, undo, None)

    try:
        frameworks.pause_nccl_together(agree)
    except _calls.AmemError as error:
        _log.warning("process groups are destroyed as without AMem: %s", error)
        return False
    return True


def _replace(name, old, new):
    replaced = []
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
            replaced.append("%s.%s" % (module.__name__, name))
    return replaced


def slime(args=None):
    """What slime calls as its --custom-megatron-init-path, in each training actor, before the first rollout."""
    del args
    keep(SLIME)
