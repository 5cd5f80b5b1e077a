"""The rollout phase of reinforcement learning: the memory of training is the rollout's while the rollout runs.

    offload = amem.rl.RolloutOffload(model, optimizer, enabled=arguments.rl_amem_offload_during_rollout)
    while training:
        with offload.rollout():             # parameters, gradients, optimizer states and NCCL's memory are given back
            samples = engine.generate()
        loss(model, samples).backward()     # they are back, at the same addresses with the same bytes
        optimizer.step()
"""

import contextlib
import functools
import logging

from . import _account, _adopt, _calls, _library, _pools, _requests, _tags, _training, frameworks

_log = logging.getLogger("amem")
FLAG = "--rl-amem-offload-during-rollout"
PRIORITIES = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the order in which training asks for them
# What an optimizer that is not PyTorch's may do with its states, by the names that Megatron-Core gives it.
TOUCHING = ("step", "prepare_grads", "step_with_ready_grads", "state_dict", "sharded_state_dict", "load_state_dict",
            "reload_model_params", "save_parameter_state", "load_parameter_state", "offload_to_cpu", "restore_from_cpu")


def add_arguments(parser):
    """Adds the flag --rl-amem-offload-during-rollout, off by default, to an argparse parser, and returns the parser."""
    group = parser.add_argument_group("AMem")
    group.add_argument(FLAG, action="store_true",
                       help="give the GPU memory of parameters, gradients, optimizer states and NCCL back to the driver during rollouts")
    return parser


class _Tensors:
    """The tensors of training, by class."""

    def __init__(self, models, optimizers, with_caches):
        self.models, self.optimizers, self.with_caches = models, optimizers, with_caches
        self._has_buckets = _training.has_buckets(models)
        self._gradients_seen = {}  # identity -> weak reference to a storage that gradients had in a step

    def by_class(self, torch):
        yield "parameters", _adopt.storages_of(_training.parameters_of(self.models), torch)
        gradients = self.gradients(torch)
        for key, storage in self._gradients_still_there(torch):
            gradients.setdefault(key, [storage, 0])
        yield "gradients", gradients
        yield "optimizer", _adopt.storages_of(_training.states_of(self.optimizers), torch)
        if self.with_caches:  # last, because a gradient may be attached to its parameter, and go by another policy
            yield "caches", self.caches(torch)

    def gradients(self, torch):
        return _adopt.storages_of(_training.gradients_of(self.models, self.optimizers), torch)

    def caches(self, torch):
        return _adopt.storages_of(_training.caches_of(self.models, self.optimizers, torch), torch)

    def by_path(self):
        return {**_account.named("model", self.models), **_account.named("optimizer", self.optimizers)}

    def note_buckets(self):
        """DDP's buckets outlive param.grad, which zero_grad() sets to None; their storages can be seen while gradients are there."""
        if not self._has_buckets:
            return
        import torch

        weak = torch.multiprocessing.reductions.StorageWeakRef
        self._gradients_seen = {key: one for key, one in self._gradients_seen.items() if not one.expired()}
        for key, (storage, _) in self.gradients(torch).items():
            if key not in self._gradients_seen:
                self._gradients_seen[key] = weak(storage)

    def _gradients_still_there(self, torch):
        for key, weak in self._gradients_seen.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None:
                yield key, storage


class _Tags:
    """The tags that rollouts pause: of each class that goes its name, its policy and whether it has memory; and their way back."""

    def __init__(self, names, policies):
        self.names, self._policies = names, policies
        self.in_use = set()  # classes with memory in their pools
        self._devices = set()
        self._want = _tags.Want()
        self._awaited = []  # classes whose resume is under way
        self._nccl_paused = False

    def adopt(self, kind, storages):
        result = _adopt.move_storages(storages, self.names[kind], self._policies[kind], {})
        if result.storages or any(row.reason == _adopt.HERE for row in result.skipped):
            self.in_use.add(kind)
        side = _pools.backend()
        if side:
            self._devices.update(side.device_index(storage.device) for storage, _ in storages.values() if side.holds(storage))
        return result

    def discards(self, kind):
        return kind in self.names and self._policies[kind] == "discard"

    def in_order(self):
        """Their names in the order in which training asks for them."""
        return [self.names[kind] for kind in self._order()]

    def pause(self):
        tags = self.in_order()[::-1]
        return self._want.pause(*tags) if tags else _tags.NOTHING

    def pause_nccl(self):
        """A rank that comes minutes after the others would fail the pause of all; a job without AMem would wait for it."""
        _requests.await_pause()  # an interrupt while it waits leaves nothing of NCCL's to bring back
        self._nccl_paused = True
        try:
            return self._want.pause(_tags.NCCL)
        except _calls.AmemError as error:
            self._nccl_paused = False
            _log.warning("NCCL's memory stays on the GPU during this rollout: %s", error)
            return _tags.NOTHING

    def to_resume(self):
        return self.in_order() + ([_tags.NCCL] if self._nccl_paused else [])

    def resume(self, wait):
        """Returns once all are on their way, and, but for the optimizer's, once the current stream waits for them, or with `wait` this thread."""
        if self._nccl_paused:
            self._want.resume(_tags.NCCL)
            self._nccl_paused = False
        order = self._order()
        for kind in order:
            self._resume(kind)
        self._awaited = list(order)
        for kind in order:
            if wait:
                _tags.wait(self.names[kind])
            elif kind != "optimizer":
                self._await_on_streams(kind)
            else:
                continue
            self._awaited.remove(kind)

    def wait(self):
        for kind in list(self._awaited):
            try:
                self._await_on_streams(kind)
            except _calls.AmemError:
                if _tags.state_of(self.names[kind]) == "paused":
                    self._resume(kind)  # for the next wait
                raise
            self._awaited.remove(kind)

    def _order(self):
        return sorted(self.in_use, key=PRIORITIES.get, reverse=True)

    def _resume(self, kind):
        self._want.resume(self.names[kind], wait=False, priority=PRIORITIES[kind])

    def _await_on_streams(self, kind):
        side = _pools.backend()
        for device in self._devices:
            _tags.wait(self.names[kind], side.current_stream(device))


class _Remainder:
    """What stays on the GPU although it is of a class that goes, and the warnings about it."""

    def __init__(self, tensors, tags):
        self._tensors, self._tags = tensors, tags
        self.left = []  # amem.Held, the largest first
        self._looked = self._graphs_captured = False

    @property
    def graphs_captured(self):
        return self._graphs_captured

    def movable(self, caches):
        """Of what modules hold beside parameters: what a captured CUDA graph cannot have the address of. A module's attribute may be the
        static input of one, which would read freed memory without an error."""
        side = _pools.backend()
        homes = [self._tags.names.get("parameters")]
        new = [key for key, (storage, _) in caches.items() if side and side.holds(storage) and storage.nbytes() and _adopt.home_of(storage) not in homes]
        if not new or not side.has_graphs():
            return caches
        if not self._graphs_captured:
            self._graphs_captured = True
            size = sum(caches[key][0].nbytes() for key in new)
            _log.warning("%s that modules hold beside their parameters stay on the GPU, because a CUDA graph has been captured, which may read "
                         "them; call adopt() before a capture (RolloutOffload.left has their paths)", _tags.mebibytes(size))
        return {key: row for key, row in caches.items() if key not in new}

    def update(self, found, captured_before, adopted, torch):
        """After an adoption that `found` this, at the first that moved something and once a graph was captured: sets `left`."""
        if self._looked and captured_before == self._graphs_captured:
            return
        if not self._graphs_captured and not any(result.storages for result in found.values()):
            return
        self._looked = True
        spared = set()
        for kind, storages in self._tensors.by_class(torch):
            if kind not in self._tags.names and kind != "caches":
                spared.update(storages)
        if not ("parameters" in self._tags.names and self._tensors.with_caches):
            spared.update(self._tensors.caches(torch))
        self.left = [one for one in _account.held(self._tensors.by_path(), torch) if one.storage not in spared]
        left, gone = sum(one.bytes for one in self.left), sum(result.bytes for result in adopted.values())
        if left * _account.PART > left + gone and not self._graphs_captured:
            _log.warning("a rollout leaves %s of %s on the GPU: %s", _tags.mebibytes(left), _tags.mebibytes(left + gone), _account.largest(self.left))


class _Hooks:
    """What is called before an optimizer uses its states, and how that is taken back."""

    def __init__(self, before_step, before_use):
        self._before_step, self._before_use, self._undo = before_step, before_use, []

    def install(self, optimizers):
        for optimizer in _training.torch_optimizers(optimizers):
            if _training.has_hooks(optimizer):
                self.before_close(optimizer.register_step_pre_hook(lambda *_: self._before_step()).remove)
                for register in ("register_state_dict_pre_hook", "register_load_state_dict_pre_hook"):
                    if hasattr(optimizer, register):
                        self.before_close(getattr(optimizer, register)(lambda *_: self._before_use()).remove)
        for optimizer in optimizers:
            if not _training.has_hooks(optimizer):
                for outer in [optimizer, *getattr(optimizer, "chained_optimizers", [])]:
                    self._wrap_methods(outer)

    def _wrap_methods(self, optimizer):
        for name in TOUCHING:
            method = getattr(optimizer, name, None)
            if callable(method) and name not in vars(optimizer):
                setattr(optimizer, name, frameworks.before(self._before_step if name == "step" else self._before_use, method))
                self.before_close(functools.partial(delattr, optimizer, name))

    def before_close(self, function):
        self._undo.append(function)

    def close(self):
        while self._undo:
            self._undo.pop()()


class RolloutOffload:
    """Gives training's GPU memory back during rollouts.

    model:             a torch.nn.Module, or a list of them: plain, under DDP, FSDP2 (fully_shard) or torch.compile, or Megatron-Core's.
    optimizer:         a torch.optim.Optimizer, Megatron-Core's optimizer, a list of them, or None.
    parameters:        whether the model's parameters go. False where something uses them during the rollout: an engine in this process
                       that generates from the same tensors.
    optimizer_states:  whether the optimizer's states go, and its own copies of parameters in mixed precision.
    caches:            whether what else the modules hold goes with their parameters: buffers, FP8 copies of weights, states of
                       quantization, shards and masters of an optimizer's wrapper (DeepSpeed's ZeRO). Once a CUDA graph has been captured,
                       none is moved any more, and a warning says so. False: it stays.
    gradients:         True or "preserve": gradients that are there go, and come back as they were. "discard": their contents are not
                       saved; they must be None or all zero at the begin of a rollout, and are zero after it. Buffers that exist all
                       the time, as Megatron-Core's, hold the last step's until zero_grad_buffer(), so call that before. False: they stay.
    nccl:              whether NCCL's memory goes, where NCCL is under AMem. The pause is collective then: all ranks that share NCCL
                       memory begin and end their rollouts together.
    wait:              whether the end of a rollout waits for everything. False: it waits until the copies of parameters and gradients
                       are queued before what the current stream does next, and the optimizer's states follow behind the forward and
                       backward pass; they are waited for before optimizer.step, state_dict and load_state_dict.
    wait_for_memory:   seconds that the end of a rollout waits for enough free GPU memory, as amem.resume does: the engine's release may
                       have returned before its memory was gone.
    enabled:           False: nothing happens, no hook is installed, and neither the library nor a GPU is needed. So with AMEM_ENABLE=0.
    name:              begins the tags NAME.parameters, NAME.gradients and NAME.optimizer; two objects in one process need two names.

    What of the model's and the optimizer's tensors stays is listed in `left`, with the path of who holds it, and a warning says once if
    that is more than a tenth. account() is that of the GPUs.

    Activations, CUDA graphs' memory, an engine's caches and all other tensors are never touched. Tensors move into AMem's pools at
    the begin of the first rollout that they exist in; call adopt() before a CUDA graph is captured that reads them, because that is
    when addresses change, once. A compiled optimizer.step must not be fullgraph, as the wait is a break in it. DDP keeps the memory
    of its buckets for itself unless it has gradient_as_bucket_view=True. Work on other streams than the current one must wait for
    that one after a rollout, as after any other operation.
    """

    def __init__(self, model, optimizer=None, parameters=True, optimizer_states=True, gradients=True, nccl=True, wait=False,
                 wait_for_memory=0, enabled=True, name="amem.rl", caches=True):
        if gradients not in (True, False, "preserve", "discard"):
            raise ValueError('gradients is True, False, "preserve" or "discard", not %r' % (gradients,))
        self.enabled = enabled and not _library.is_off(_calls.lib)
        self.adopted = {}  # class -> the last Adopted that moved something
        self.freed = None  # amem.Freed of the last rollout's begin
        self._nccl, self._wait, self._wait_for_memory = nccl, wait, wait_for_memory
        self._tensors = _Tensors(_training.as_list(model), _training.as_list(optimizer), caches)
        wanted = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer_states and bool(self._tensors.optimizers)}
        self._tags = _Tags({kind: "%s.%s" % (name, kind) for kind in PRIORITIES if wanted[kind]},
                           {"parameters": "preserve", "gradients": "discard" if gradients == "discard" else "preserve", "optimizer": "preserve"})
        self._remainder = _Remainder(self._tensors, self._tags)
        self._hooks = _Hooks(self._before_step, self.wait)
        self._paused = False
        if self.enabled:
            _pools.check_version()
            self._hooks.install(self._tensors.optimizers)

    @property
    def left(self):
        """amem.Held, the largest first: what stays although it is of a class that goes: as of the first rollout, or of the first after a CUDA graph was
        captured, if tensors stay because of it."""
        return self._remainder.left

    # ---- what is adopted

    def adopt(self):
        """Moves what is not in its pool yet; {class: Adopted} of the classes that are given back. Each rollout does it by itself."""
        if not self.enabled:
            return {}
        import torch

        self._complain_if_paused("adopt")
        taken, found, captured_before = set(), {}, self._remainder.graphs_captured
        for kind, storages in self._tensors.by_class(torch):
            mine = {key: row for key, row in storages.items() if key not in taken}
            taken.update(mine)  # what two classes share belongs to the first, also where the first one stays
            if kind == "caches":
                kind, mine = "parameters", self._remainder.movable(mine)
            if kind in self._tags.names:
                result = self._adopt(kind, mine)
                found[kind] = result if kind not in found else _adopt.together(found[kind], result)
        self._remainder.update(found, captured_before, self.adopted, torch)
        return found

    def account(self):
        """amem.account() with the paths of this model's and this optimizer's tensors that are on the GPU."""
        return _account.account(**self._tensors.by_path())

    def _adopt(self, kind, storages):
        result = self._tags.adopt(kind, storages)
        if result.storages:
            self.adopted[kind] = result
        return result

    # ---- the rollout

    @contextlib.contextmanager
    def rollout(self, nccl=True):
        """The memory is given back on the way in, and brought back on the way out, also after an exception.

        nccl:  False: NCCL's memory stays this time. For a rollout that not all ranks begin and end together: the rest of the memory
               is this rank's own, and other ranks are not waited for.

        AmemError on the way in: nothing is paused. NCCL's memory that cannot be paused, because another rank comes too late for
        example, stays with a warning in the log. On the way out: what could not be brought back is paused, contents kept; resume()
        tries again, for example when the engine has freed memory. RuntimeError: inside of another rollout.
        """
        if self.enabled:
            self._complain_if_paused("rollout")
        try:
            self.pause(nccl)
            yield self
        finally:
            self.resume()

    def pause(self, nccl=True):
        """The way into a rollout, where `with` does not fit. Waits until the devices are idle. `nccl`: see rollout. Returns amem.Freed."""
        if not self.enabled:
            return _tags.NOTHING
        self._complain_if_paused("pause")
        self.adopt()
        self._check_discarded()
        _pools.empty_cache()
        with_nccl = nccl and self._nccl and frameworks.nccl_is_under_amem()  # before, because asking may fail
        if with_nccl:
            _requests.await_pause()  # before anything is paused that an interrupt would have to bring back
        self._paused = True
        try:
            freed = self._tags.pause()
            if with_nccl:
                freed = _tags.together(freed, self._tags.pause_nccl())
            self.freed = freed
            return freed
        except _calls.AmemError:  # nothing of it is paused
            self._paused = False
            raise
        except BaseException:  # whatever a signal handler has raised, which may have come when all was paused
            self.resume()
            raise

    def in_rollout(self):
        """Whether memory is given back now."""
        return self._paused

    def resume(self):
        """The way out of a rollout, where `with` does not fit; again after it failed. Not paused: does nothing."""
        if not self.enabled or not self._paused:
            return
        try:
            self._bring_back()
        except BaseException:
            still = [row["tag"] for row in _tags.memory()["tags"] if row["tag"] in self._tags.to_resume() and row["state"] == "paused"]
            _log.warning("the resume after a rollout failed; these are still paused, contents saved: %s. Call resume() again", ", ".join(still) or "nothing")
            raise

    def _bring_back(self):
        _pools.empty_cache()  # what the rollout's tensors left there is needed now
        if self._wait_for_memory and self._tags.to_resume():
            _tags.await_memory(self._tags.to_resume(), self._wait_for_memory)
        self._tags.resume(self._wait)
        self._paused = False
        self._after_gradients()

    def wait(self):
        """Makes the current stream wait for all that is still on its way back. Only code that touches optimizer states by another
        way than optimizer.step, state_dict and load_state_dict needs it.

        AmemError: why the resume failed. The states are paused then, contents kept; it can be called again and tries the resume anew.
        """
        self._tags.wait()

    def _complain_if_paused(self, call):
        if self._paused:
            raise RuntimeError("RolloutOffload.%s: in a rollout already, or its resume failed; call resume() first" % call)
        self.wait()

    # ---- gradients that are not saved

    def _discarded(self):
        """The contents, as bytes, of gradients that are there and were not saved. What shares memory with a parameter was saved."""
        import torch

        if self._tags.discards("gradients"):
            for storage, _ in self._tensors.gradients(torch).values():
                if _adopt.home_of(storage) == self._tags.names["gradients"]:
                    yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _check_discarded(self):
        for contents in self._discarded():
            if contents.any():
                raise RuntimeError('RolloutOffload: gradients="discard", and some are not zero; call optimizer.zero_grad() before the '
                                   'rollout, where buffers hold gradients all the time (Megatron-Core) zero_grad_buffer() of each model chunk, '
                                   'or use gradients="preserve"')

    def _after_gradients(self):
        for contents in self._discarded():
            contents.zero_()
        side = _pools.backend()
        if side and "gradients" in self._tags.in_use:
            side.drop(self._tags.names["gradients"])  # a backward pass that makes new ones shall not find the old ones' memory held

    # ---- hooks

    def _before_step(self):
        if self._paused:
            raise RuntimeError("RolloutOffload: optimizer.step() in a rollout: memory that it uses is released until the rollout ends, and the step would fault")
        if "gradients" in self._tags.names:
            self._tensors.note_buckets()
        self.wait()

    def before_close(self, function):
        """Has close() call function(), the last that was given first."""
        self._hooks.before_close(function)

    def close(self):
        """Removes the hooks. The tensors stay in their pools, which work on."""
        try:
            self.resume()
            self.wait()
        finally:
            self._hooks.close()
