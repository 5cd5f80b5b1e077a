"""amem.rl.RolloutOffload on CPU tensors and a stand-in for the library, which loses what is not saved and not waited for. Needs PyTorch."""

import argparse
import contextlib
import inspect
import os
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

import amem
import amem.rl
import fake_library

try:
    import torch
except ImportError:
    torch = None

PARAMETERS, GRADIENTS, OPTIMIZER = "amem.rl.parameters", "amem.rl.gradients", "amem.rl.optimizer"


def model_of(seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(model, optimizer, offload, steps=5, zero=True, between=None):
    """Losses of a loop of rollouts and steps. The data come from the loop's own generator, so they are alike with any offload."""
    generator = torch.Generator().manual_seed(5)
    losses = []
    for step in range(steps):
        with offload.rollout():
            if between:
                between(step)
            samples = torch.randn(4, 8, generator=generator)
        loss = model(samples).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if zero:
            optimizer.zero_grad()
    return losses


class WithTheFake(unittest.TestCase):
    def setUp(self):
        context = fake_library.installed(torch)
        self.library, self.side = context.__enter__()
        self.side.watch(lambda: self.library.states.get(PARAMETERS))
        self.library.nccl_libraries = [{"under_amem": True}]
        self.addCleanup(context.__exit__, None, None, None)


class Flag(unittest.TestCase):
    def test_is_off_by_default(self):
        parser = amem.rl.add_arguments(argparse.ArgumentParser())
        self.assertIs(parser.parse_args([]).rl_amem_offload_during_rollout, False)
        self.assertIs(parser.parse_args(["--rl-amem-offload-during-rollout"]).rl_amem_offload_during_rollout, True)


@unittest.skipIf(torch is None, "this python has no PyTorch")
class Rollout(WithTheFake):
    def test_losses_and_parameters_are_those_without_it_to_the_last_bit(self):
        def run(enabled, **options):
            model = model_of()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            offload = amem.rl.RolloutOffload(model, optimizer, enabled=enabled, **options)
            losses = train(model, optimizer, offload, zero=options.pop("zero", True))
            offload.close()
            return losses + [p.tolist() for p in model.parameters()]

        wanted = run(False)
        for number, options in enumerate(({}, {"wait": True}, {"gradients": "discard"}, {"gradients": False},
                                          {"optimizer_states": False}, {"parameters": False})):
            self.assertEqual(run(True, name="run%d" % number, **options), wanted, options)

    def test_everything_is_gone_during_the_rollout_and_nothing_else(self):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        engine, activations = torch.ones(4), model(torch.ones(2, 8))
        offload = amem.rl.RolloutOffload(model, optimizer)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

        with offload.rollout():
            for parameter in model.parameters():
                state = optimizer.state[parameter]
                for gone in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
                    self.assertTrue(gone.isnan().all())
            self.assertFalse(engine.isnan().any() or activations.isnan().any())
            self.assertEqual(self.library.states["nccl"], "paused")
        self.assertFalse(any(p.isnan().any() or p.grad.isnan().any() for p in model.parameters()))

    def test_parameters_that_wrap_others_go_whole_and_losses_are_those_without(self):
        class Quantized(torch.Tensor):
            """As Transformer Engine's were until 2026: no protocol of PyTorch's, and parts as attributes."""

            @staticmethod
            def __new__(cls, data, scale):
                made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)
                made._data, made._scale_inv = data, scale
                return made

            @classmethod
            def __torch_dispatch__(cls, function, types, arguments=(), named=None):
                if function is torch.ops.aten.detach.default:
                    return Quantized(arguments[0]._data, arguments[0]._scale_inv)
                plain = lambda one: one._data.float() * one._scale_inv if isinstance(one, Quantized) else one
                return function(*torch.utils._pytree.tree_map(plain, arguments), **torch.utils._pytree.tree_map(plain, named or {}))

        def run(enabled):
            torch.manual_seed(4)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
            data, scale = torch.randint(0, 100, (8, 8), dtype=torch.uint8), torch.full((1,), 0.01)
            model[0].weight = torch.nn.Parameter(Quantized(data, scale), requires_grad=False)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
            gone = []
            offload = amem.rl.RolloutOffload(model, optimizer, enabled=enabled, name="fp8")
            losses = train(model, optimizer, offload, between=lambda _: gone.append((data.eq(255).all() and scale.isnan().all()).item()))
            offload.close()
            return losses, gone

        wanted, _ = run(False)
        losses, gone = run(True)
        self.assertEqual(losses, wanted)
        self.assertEqual(gone, [True] * 5)

    def test_what_modules_and_parameters_hold_beside_them_goes_by_a_rule(self):
        class Storage:  # no tensor, as Transformer Engine's storages, and of the same package as its modules
            def __init__(self, data):
                self._rowwise_data = data

        class Linear(torch.nn.Linear):
            pass

        model, stays = model_of(), torch.ones(9)
        model[0] = Linear(8, 16)
        workspace, stored, buffer, shard, table = (torch.full((size,), float(size)) for size in (3, 4, 5, 6, 7))
        model[0]._fp8_workspaces = {"weight": [workspace], "other": Storage(stored)}
        model.register_buffer("inverse_frequencies", buffer)
        model[0].weight.ds_tensor = shard
        model[2].forward_hook_table = {"a": (table,)}
        model[2].engine = types.SimpleNamespace(cache=stays)  # of another package: it is not the module's
        model[0].weight.main_grad = torch.ones(2)
        offload = amem.rl.RolloutOffload(model, name="caches", gradients="discard")
        model[0].weight.main_grad.zero_()
        with offload.rollout():
            for gone in (workspace, stored, buffer, shard, table, model[0].weight, model[0].weight.main_grad):
                self.assertTrue(gone.isnan().all())
            self.assertEqual(stays[0].item(), 1.0)
        self.assertEqual([one[0].item() for one in (workspace, stored, buffer, shard, table)], [3.0, 4.0, 5.0, 6.0, 7.0])
        self.assertEqual(model[0].weight.main_grad.tolist(), [0.0, 0.0], "by the gradients' policy")
        self.assertEqual(offload.left, [])
        for options in ({"caches": False}, {"parameters": False}):
            other = model_of()
            other.register_buffer("buffer", torch.ones(5))
            with amem.rl.RolloutOffload(other, name="without %s" % next(iter(options)), **options).rollout():
                self.assertFalse(other.buffer.isnan().any())

    def test_a_step_in_a_rollout_is_an_error_and_no_fault(self):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        offload = amem.rl.RolloutOffload(model, optimizer, name="step")
        with offload.rollout(), self.assertRaisesRegex(RuntimeError, r"optimizer.step\(\) in a rollout"):
            optimizer.step()
        optimizer.step()

    def test_what_stays_is_listed_with_who_holds_it_and_said_once(self):
        model = model_of()
        amem.adopt(model[2].weight, "elsewhere")
        foreign = torch.frombuffer(bytearray(4000), dtype=torch.float32)
        model[0]._workspaces = {"weight": foreign}
        optimizer = torch.optim.AdamW(model.parameters())
        offload = amem.rl.RolloutOffload(model, optimizer, name="stays")
        with self.assertLogs("amem", "WARNING") as said:
            for _ in range(2):
                with offload.rollout():
                    freed = offload.freed
        self.assertEqual([(one.path, one.bytes) for one in offload.left], [("model.0._workspaces['weight']", 4000)])
        self.assertEqual(len(said.output), 1, said.output)
        self.assertIn("a rollout leaves 4000 bytes of 4580 bytes on the GPU: model.0._workspaces['weight'] 4000 bytes", said.output[0])
        self.assertEqual(freed.used, freed.bytes + sum(freed.left.values()))
        self.assertEqual(freed.bytes, 580)
        account = offload.account()
        self.assertEqual([one.path for one in account.held], ["model.0._workspaces['weight']"])
        self.assertIn("held by model.0._workspaces['weight'] 4000 bytes", str(account))

    def test_the_account_inside_of_a_rollout_touches_no_memory(self):
        """The keys of optimizer.state are parameters, whose text is their contents."""
        class Key:
            def __repr__(self):
                raise AssertionError("the contents of a key were read")

        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.by_key = {Key(): [torch.frombuffer(bytearray(40), dtype=torch.float32)], "name": torch.frombuffer(bytearray(80), dtype=torch.float32)}
        offload = amem.rl.RolloutOffload(model, optimizer, name="keys")
        with mock.patch.object(torch.Tensor, "__repr__", Key.__repr__), offload.rollout():
            paths = [one.path for one in offload.account().held]
        self.assertEqual(paths, ["optimizer.by_key['name']", "optimizer.by_key[key 0][0]"])

    def test_what_a_captured_graph_may_read_is_not_moved_behind_it(self):
        model = model_of()
        offload = amem.rl.RolloutOffload(model, name="captured")
        offload.adopt()
        static = model[0].static_input = torch.ones(900)  # read by a graph that is captured now
        graphs = torch.zeros(32)
        self.side.others.append((graphs.data_ptr(), graphs.data_ptr() + 128))
        address = static.data_ptr()
        with self.assertLogs("amem", "WARNING") as said, offload.rollout():
            self.assertEqual((static.data_ptr(), static[0].item()), (address, 1.0))
            self.assertTrue(model[0].weight.isnan().all(), "parameters were adopted before")
        self.assertEqual([one.path for one in offload.left], ["model.0.static_input"])
        self.assertEqual(len(said.output), 1)
        self.assertIn("a CUDA graph has been captured", said.output[0])

    def test_shards_masters_and_gradients_of_an_optimizers_wrapper_go_too(self):
        """As DeepSpeed's ZeRO-3 has them: parameters are empty, and have shards attached; the wrapper has masters and gradients."""
        class Zero3:
            def __init__(self, model):
                self.fp32_partitioned_groups_flat = [parameter.detach().clone().flatten() for parameter in model.parameters()]
                self.optimizer = torch.optim.AdamW(self.fp32_partitioned_groups_flat, lr=0.05)
                self._Zero3__param_id_to_grad_partition = {place: torch.ones_like(one) for place, one in enumerate(self.fp32_partitioned_groups_flat)}
                for parameter in model.parameters():
                    parameter.ds_tensor = parameter.detach().clone().flatten()
                    parameter.data = torch.empty(0)
                self.parameters = list(model.parameters())

            def step(self):
                for place, master in enumerate(self.fp32_partitioned_groups_flat):
                    master.grad = self._Zero3__param_id_to_grad_partition[place]
                self.optimizer.step()
                for parameter, master in zip(self.parameters, self.fp32_partitioned_groups_flat):
                    parameter.ds_tensor.copy_(master)

        def run(enabled):
            model = model_of()
            optimizer = Zero3(model)
            offload = amem.rl.RolloutOffload(model, optimizer, enabled=enabled, name="zero3")
            for step in range(4):
                with offload.rollout():
                    if enabled:
                        held = [*optimizer.fp32_partitioned_groups_flat, *optimizer._Zero3__param_id_to_grad_partition.values(),
                                *(parameter.ds_tensor for parameter in model.parameters())]
                        self.assertTrue(all(one.isnan().all() for one in held), step)
                optimizer.step()
            self.assertEqual(offload.left, [])
            offload.close()
            return [parameter.ds_tensor.tolist() for parameter in model.parameters()]

        self.assertEqual(run(True), run(False))

    def test_nccl_comes_back_first_then_in_the_order_of_use_and_the_optimizer_is_waited_for_in_the_step(self):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        offload = amem.rl.RolloutOffload(model, optimizer)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with offload.rollout():
            self.assertEqual(self.library.calls[-2:], [("pause", (OPTIMIZER, GRADIENTS, PARAMETERS), 0, None), ("ncclPause",)])
            self.library.calls.clear()
        self.assertEqual(self.library.calls, [
            ("ncclResume",), ("resume", (PARAMETERS,), 1, 3), ("resume", (GRADIENTS,), 1, 2), ("resume", (OPTIMIZER,), 1, 1),
            ("wait on", PARAMETERS, 77), ("wait on", GRADIENTS, 77)])
        self.assertTrue(next(iter(optimizer.state.values()))["exp_avg"].isnan().all())
        optimizer.step()
        self.assertEqual(self.library.calls[-1], ("wait on", OPTIMIZER, 77))
        self.assertFalse(any(p.isnan().any() for p in model.parameters()))
        self.library.calls.clear()
        optimizer.step()
        self.assertEqual(self.library.calls, [])

    def test_a_checkpoint_waits_for_the_optimizer_too(self):
        for touch in (lambda optimizer: optimizer.state_dict(), lambda optimizer: optimizer.load_state_dict(torch.optim.AdamW(
                model_of().parameters()).state_dict())):
            model = model_of()
            optimizer = torch.optim.AdamW(model.parameters())
            offload = amem.rl.RolloutOffload(model, optimizer)
            train(model, optimizer, offload, steps=1)
            with offload.rollout():
                self.library.calls.clear()
            touch(optimizer)
            self.assertEqual(self.library.calls[-1], ("wait on", OPTIMIZER, 77))
            offload.close()

    def test_states_and_gradients_are_adopted_when_they_are_there(self):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        offload = amem.rl.RolloutOffload(model, optimizer)
        seen = []
        train(model, optimizer, offload, steps=3, between=lambda _: seen.append(self.library.named("pause")[-1][1]))
        self.assertEqual(seen, [(PARAMETERS,), (OPTIMIZER, PARAMETERS), (OPTIMIZER, PARAMETERS)])
        self.assertEqual(offload.adopted["optimizer"].storages, 12)
        self.assertEqual(len(self.library.named("enter")), 2)  # and no more

    def test_a_class_that_stays_stays_also_where_another_one_shares_its_memory(self):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        offload = amem.rl.RolloutOffload(model, optimizer, parameters=False, gradients=False, nccl=False)
        train(model, optimizer, offload, steps=1, zero=False)
        with offload.rollout():
            self.assertEqual(self.library.named("pause")[-1][1], (OPTIMIZER,))
            self.assertFalse(any(p.isnan().any() or p.grad.isnan().any() for p in model.parameters()))
            self.assertTrue(next(iter(optimizer.state.values()))["exp_avg"].isnan().all())

    def test_gradients_may_be_discarded_when_they_are_zero(self):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        offload = amem.rl.RolloutOffload(model, optimizer, gradients="discard")
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "zero_grad"), offload.rollout():
            self.fail("must not run")
        self.assertEqual(self.library.states[PARAMETERS], "resident")
        optimizer.zero_grad(set_to_none=False)
        with offload.rollout():
            self.assertEqual(self.library.policies[GRADIENTS], 1)
        self.assertTrue(all(p.grad.eq(0).all() for p in model.parameters()))

    def test_when_off_nothing_changes(self):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        addresses = [p.data_ptr() for p in model.parameters()]
        offload = amem.rl.RolloutOffload(model, optimizer, enabled=False)
        train(model, optimizer, offload)
        self.assertEqual(offload.adopt(), {})
        offload.close()
        self.assertEqual(self.library.calls, [])
        self.assertEqual([p.data_ptr() for p in model.parameters()], addresses)
        self.assertFalse(optimizer._optimizer_step_pre_hooks)

    def test_pytorchs_caches_are_emptied_on_the_way_in_and_out_and_gradients_get_a_new_pool(self):
        model = model_of()
        model(torch.ones(2, 8)).sum().backward()
        with amem.rl.RolloutOffload(model).rollout():
            entered = self.side.caches_emptied
            self.assertEqual(self.side.when_emptied[-1], "resident")
            self.assertEqual(self.side.dropped, [])
        self.assertEqual(self.side.when_emptied[entered:], ["paused"])
        self.assertEqual(self.side.dropped, [GRADIENTS])

    def test_a_rollout_within_a_pool_is_one(self):
        with amem.pool("engine"), amem.rl.RolloutOffload(model_of()).rollout():
            self.assertEqual(self.library.states[PARAMETERS], "paused")
            self.assertEqual(self.side.entered, [("engine", 0)])

    def test_two_objects_with_names_of_their_own_do_not_meet(self):
        actor, critic = model_of(1), model_of(2)
        first = amem.rl.RolloutOffload(actor, name="actor")
        second = amem.rl.RolloutOffload(critic, name="critic")
        with first.rollout():
            self.assertTrue(next(actor.parameters()).isnan().all())
            self.assertFalse(next(critic.parameters()).isnan().any())
        with second.rollout():
            self.assertTrue(next(critic.parameters()).isnan().all())

    def test_close_brings_everything_back_and_removes_the_hooks(self):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        offload = amem.rl.RolloutOffload(model, optimizer)
        train(model, optimizer, offload, steps=1)
        offload.pause()
        offload.close()
        self.assertFalse(optimizer._optimizer_step_pre_hooks)
        self.assertFalse(any(value["exp_avg"].isnan().any() for value in optimizer.state.values()))

    def test_nccl_stays_out_where_it_is_not_under_amem(self):
        for libraries, options in (([], {}), ([{"under_amem": False}], {}), ([{"under_amem": True}], {"nccl": False})):
            self.library.nccl_libraries = libraries
            with amem.rl.RolloutOffload(model_of(), **options).rollout():
                self.assertEqual(self.library.calls[-1][:2], ("pause", (PARAMETERS,)))


@unittest.skipIf(torch is None, "this python has no PyTorch")
class Failures(WithTheFake):
    def setUp(self):
        super().setUp()
        self.model = model_of()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.offload = amem.rl.RolloutOffload(self.model, self.optimizer)
        train(self.model, self.optimizer, self.offload, steps=1)

    def intact(self):
        return not any(p.isnan().any() for p in self.model.parameters()) and not any(
            state["exp_avg"].isnan().any() for state in self.optimizer.state.values())

    def test_when_the_pause_fails_nothing_is_paused_and_the_next_rollout_works(self):
        self.library.fail["amem_pause", PARAMETERS] = (1, "no host memory")
        with self.assertRaisesRegex(amem.AmemError, "no host memory"), self.offload.rollout():
            self.fail("must not run")
        self.assertTrue(self.intact())
        self.library.fail.clear()
        train(self.model, self.optimizer, self.offload, steps=2)
        self.assertTrue(self.intact())

    def test_a_rank_that_comes_too_late_for_the_pause_of_nccl_costs_nccls_memory_and_nothing_else(self):
        self.library.calls.clear()
        self.library.fail["ncclPause", "nccl"] = (6, "rank 1 did not come")
        with self.assertLogs("amem", "WARNING") as logged, self.offload.rollout():
            self.assertEqual((self.library.states["nccl"], self.library.states[PARAMETERS]), ("resident", "paused"))
        self.assertIn("NCCL's memory stays on the GPU during this rollout: rank 1 did not come", logged.output[0])
        self.assertFalse(self.library.named("ncclResume"))
        self.library.fail.clear()
        with self.offload.rollout():
            self.assertEqual(self.library.states["nccl"], "paused")
        self.optimizer.step()
        self.assertTrue(self.intact())

    def test_an_end_that_is_interrupted_says_what_is_still_paused(self):
        resume, self.interrupt = amem._tags.Want.resume, True

        def interrupted(want, *tags, **how):
            if tags == (PARAMETERS,) and self.interrupt:
                raise KeyboardInterrupt
            resume(want, *tags, **how)

        with mock.patch.object(amem._tags.Want, "resume", interrupted):
            with self.assertLogs("amem", "WARNING") as logged, self.assertRaises(KeyboardInterrupt), self.offload.rollout():
                pass
            self.assertIn("still paused, contents saved: %s, %s. Call resume() again" % (PARAMETERS, OPTIMIZER), logged.output[0])
            self.interrupt = False
            self.offload.resume()
        self.optimizer.step()
        self.assertTrue(self.intact())

    def test_whatever_a_signal_handler_raises_after_the_pause_brings_all_back(self):
        pause = amem._tags.Want.pause
        for raised in (TimeoutError, KeyboardInterrupt):
            def interrupted(want, *tags, raised=raised, **how):
                pause(want, *tags, **how)
                raise raised

            with mock.patch.object(amem._tags.Want, "pause", interrupted), self.assertRaises(raised), self.offload.rollout():
                self.fail("must not run")
            self.assertFalse(self.offload.in_rollout())
            self.assertNotIn("paused", self.library.states.values())
            self.optimizer.step()
            self.assertTrue(self.intact())

    def test_the_end_of_a_rollout_waits_for_memory_as_long_as_it_was_told(self):
        offload = amem.rl.RolloutOffload(model_of(), wait_for_memory=30, name="other")
        self.library.too_little = 3
        with self.assertLogs("amem", "WARNING") as logged, offload.rollout():
            pass
        self.assertEqual(self.library.named("ask"), [("ask", ("other.parameters", "nccl"))] * 4)
        self.assertIn("waits for memory, up to 30 s: device 0 has too little, pid 7 has the rest", logged.output[0])
        self.assertEqual(len(logged.output), 1)

    def test_a_pytorch_that_is_too_old_is_said_before_the_first_rollout(self):
        with mock.patch.object(self.side, "check_version", side_effect=amem.AmemError(5, "needs PyTorch 2.8")):
            with self.assertRaisesRegex(amem.AmemError, "needs PyTorch 2.8"):
                amem.rl.RolloutOffload(self.model)
            amem.rl.RolloutOffload(self.model, enabled=False)

    def test_the_memory_comes_back_after_an_exception_in_the_rollout(self):
        with self.assertRaises(KeyError), self.offload.rollout():
            raise KeyError
        self.offload.wait()
        self.assertTrue(self.intact())

    def test_a_resume_that_fails_is_raised_and_can_be_tried_again(self):
        for call, tag in (("ncclResume", "nccl"), ("amem_resume", PARAMETERS), ("amem_wait on a stream", PARAMETERS)):
            self.library.fail[call, tag] = (1, "256 MiB short")
            with self.assertRaisesRegex(amem.AmemError, "256 MiB short"), self.offload.rollout():
                pass
            with self.assertRaisesRegex(RuntimeError, r"call resume\(\) first"):
                self.offload.pause()
            self.library.fail.clear()
            self.offload.resume()
            self.optimizer.step()
            self.assertTrue(self.intact(), (call, tag))

    def test_a_failure_of_the_optimizers_states_comes_with_the_step_and_nothing_is_lost(self):
        with self.offload.rollout():
            pass
        before = [p.clone() for p in self.model.parameters()]
        self.model(torch.ones(2, 8)).sum().backward()
        self.library.fail["amem_wait on a stream", OPTIMIZER] = (1, "256 MiB short")
        for _ in range(2):
            with self.assertRaisesRegex(amem.AmemError, "256 MiB short"):
                self.optimizer.step()
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(before, self.model.parameters())))
        self.library.fail.clear()
        self.optimizer.step()
        self.assertTrue(self.intact())

    def test_rollouts_do_not_nest(self):
        with self.offload.rollout():
            with self.assertRaisesRegex(RuntimeError, "in a rollout already"), self.offload.rollout():
                self.fail("must not run")
        self.optimizer.step()
        self.assertTrue(self.intact())


class Buffer:
    """Megatron-Core's buffer of parameters and gradients, by the attributes that matter."""

    def __init__(self, parameters):
        count = sum(p.numel() for p in parameters)
        self.param_data, self.grad_data = torch.zeros(count), torch.zeros(count)
        offset = 0
        for parameter in parameters:
            end = offset + parameter.numel()
            view = self.param_data[offset:end].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.main_grad = self.grad_data[offset:end].view(parameter.shape)
            offset = end


class MegatronOptimizer:
    """A wrapper with fp32 copies of its own, as Megatron-Core's Float16OptimizerWithFloat16Params."""

    def __init__(self, parameters):
        self.model_parameters = parameters
        self.main = [torch.nn.Parameter(p.detach().clone().float()) for p in parameters]
        self.optimizer = torch.optim.AdamW(self.main, lr=0.05)

    def step(self):
        for main, parameter in zip(self.main, self.model_parameters):
            main.grad = parameter.main_grad.float()
        assert not any(main.isnan().any() for main in self.main), "the copies were not waited for"
        self.optimizer.step()
        for main, parameter in zip(self.main, self.model_parameters):
            main.grad = None
            parameter.data.copy_(main.data)


class Chained:
    """As Megatron-Core's ChainedOptimizer: no attributes of an optimizer, but a list."""

    def __init__(self, *optimizers):
        self.chained_optimizers = list(optimizers)

    def step(self):
        for optimizer in self.chained_optimizers:
            optimizer.step()


@unittest.skipIf(torch is None, "this python has no PyTorch")
class Megatron(WithTheFake):
    def run_with(self, enabled, make=Buffer):
        model = model_of()
        parameters = list(model.parameters())
        model.buffers = [make(parameters[:2])]  # hides Module.buffers, as Megatron's wrapper does
        model.expert_parallel_buffers = [make(parameters[2:])]
        chained = Chained(MegatronOptimizer(parameters[:2]), MegatronOptimizer(parameters[2:]))
        offload = amem.rl.RolloutOffload([model], chained, enabled=enabled, name="megatron")
        buffers = model.buffers + model.expert_parallel_buffers
        losses, generator = [], torch.Generator().manual_seed(5)
        for step in range(4):
            with offload.rollout():
                if enabled:
                    for buffer in buffers:
                        self.assertTrue(buffer.param_data.isnan().all() and buffer.grad_data.isnan().all())
                    for one in chained.chained_optimizers:
                        self.assertTrue(all(main.isnan().all() for main in one.main))
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
                parameter.main_grad.copy_(gradient)
            losses.append(loss.item())
            chained.step()
            for buffer in buffers:
                buffer.grad_data.zero_()
        if enabled:
            self.assertEqual([offload.adopted[kind].storages for kind in ("parameters", "gradients")], [2, 2])
            offload.close()
            self.assertNotIn("step", vars(chained))
        return losses + [p.tolist() for p in parameters]

    def test_contiguous_buffers_and_copies_go_and_come_back(self):
        self.assertEqual(self.run_with(True), self.run_with(False))

    def test_parameters_and_gradients_that_share_a_buffer_are_one(self):
        model = model_of()
        buffer = Buffer(list(model.parameters()))
        buffer.grad_data = buffer.param_data
        model.buffers = [buffer]
        wanted = buffer.param_data.clone()
        for options in ({"gradients": "discard"}, {"parameters": False}):
            offload = amem.rl.RolloutOffload(model, **options)
            for parameter in model.parameters():
                parameter.main_grad = None
            with offload.rollout():
                self.assertEqual(buffer.grad_data.isnan().all().item(), "parameters" not in options)
            self.assertTrue(torch.equal(buffer.param_data, wanted))

    def test_buffers_that_hold_gradients_all_the_time_are_discarded_once_they_are_zero(self):
        model = model_of()
        buffer = Buffer(list(model.parameters()))
        model.buffers = [buffer]
        offload = amem.rl.RolloutOffload(model, gradients="discard")
        buffer.grad_data[3] = 7  # the last step's: zero_grad() of an optimizer does not touch it
        for parameter in model.parameters():
            parameter.grad = None
        with self.assertRaisesRegex(RuntimeError, r"zero_grad_buffer\(\) of each model chunk"), offload.rollout():
            self.fail("must not run")
        self.assertEqual(buffer.grad_data[3], 7)
        buffer.grad_data.zero_()
        with offload.rollout():
            self.assertTrue(buffer.grad_data.isnan().all())
        self.assertTrue(buffer.grad_data.eq(0).all())

    def test_buffers_are_found_without_views_and_views_without_buffers(self):
        for buffers, views in ((True, False), (False, True)):
            model = model_of()
            buffer = Buffer(list(model.parameters()))
            if buffers:
                model.buffers = [buffer]
            if not views:
                for parameter in model.parameters():
                    del parameter.main_grad
            offload = amem.rl.RolloutOffload(model)
            with offload.rollout():
                self.assertTrue(buffer.param_data.isnan().all() and buffer.grad_data.isnan().all())
            self.assertFalse(buffer.param_data.isnan().any() or buffer.grad_data.isnan().any())

    def test_megatron_cores_own_buffers_go_and_come_back(self):
        try:
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
            from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
            from megatron.core.optimizer import optimizer
        except Exception as error:  # it imports much, and fails in many ways
            self.skipTest("no megatron-core: %s" % error)
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        config, groups = DistributedDataParallelConfig(use_distributed_optimizer=True), argparse.Namespace(tp=dist.group.WORLD, dp_cp=dist.group.WORLD)

        def make(parameters):
            names = {parameter: str(number) for number, parameter in enumerate(parameters)}
            with mock.patch("torch.cuda.current_device", lambda: "cpu"):
                return _ParamAndGradBuffer(config, torch.float32, torch.float32, parameters, dist.group.WORLD, None, names, 1.0,
                                           list(range(len(parameters))), False, groups)

        self.assertEqual(self.run_with(True, make), self.run_with(False, make))
        for name in ("self.buffers", "self.expert_parallel_buffers"):
            self.assertIn(name, inspect.getsource(DistributedDataParallel.__init__))
        self.assertIn("self.chained_optimizers", inspect.getsource(optimizer.ChainedOptimizer.__init__))
        self.assertIn("self.optimizer = optimizer", inspect.getsource(optimizer.MegatronOptimizer.__init__))
        for name in ("step", "prepare_grads", "step_with_ready_grads", "sharded_state_dict", "reload_model_params", "offload_to_cpu"):
            self.assertIn(name, amem.rl.TOUCHING)
            self.assertTrue(callable(getattr(optimizer.MegatronOptimizer, name)))


@unittest.skipIf(torch is None, "this python has no PyTorch")
class Compile(WithTheFake):
    def test_a_compiled_model_goes_on_without_compiling_again(self):
        compiled = []

        def backend(graph, _):
            compiled.append(graph)
            return graph.forward

        def run(enabled):
            torch._dynamo.reset()
            compiled.clear()
            model = torch.compile(model_of(), backend=backend, fullgraph=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            offload = amem.rl.RolloutOffload(model, optimizer, enabled=enabled)
            losses = train(model, optimizer, offload)
            offload.close()
            return losses, len(compiled)

        self.assertEqual(run(True), run(False))
        self.assertEqual(len(compiled), 1)


class OneOfTwoRanks:
    """What one of two ranks under gloo does. run() returns losses and parameters, in full."""

    def __init__(self, kind):
        import torch.distributed as dist

        self.kind, self.rank, self.dist = kind, int(os.environ["RANK"]), dist
        dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 2), rank=self.rank, world_size=2)

    def model(self):
        model = model_of()
        if self.kind == "ddp":
            return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        from torch.distributed.fsdp import fully_shard

        mesh = self.dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model

    def run(self, enabled, set_to_none):
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        offload = amem.rl.RolloutOffload(model, optimizer, enabled=enabled)
        buckets, lines = [], []
        generator = torch.Generator().manual_seed(5 + self.rank)
        for step in range(5):
            with offload.rollout():
                if enabled:
                    self.check_gone(model, optimizer, buckets, step)
                samples = torch.randn(4, 8, generator=generator)
            loss = model(samples).square().mean()
            loss.backward()
            if self.kind == "ddp" and step == 2:  # DDP has laid its buckets out anew by then
                buckets.append(torch.empty(0).set_(next(model.parameters()).grad.untyped_storage()))
            lines.append(loss.item().hex())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        offload.close()
        for parameter in model.parameters():
            value = parameter.full_tensor() if self.kind == "fsdp2" else parameter
            lines.append(value.double().sum().item().hex())
        return lines

    @staticmethod
    def check_gone(model, optimizer, buckets, step):
        states = [tensor for state in optimizer.state.values() for tensor in (state["exp_avg"], state["exp_avg_sq"])]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for tensor in [*model.parameters(), *gradients, *states, *buckets]:
            local = getattr(tensor, "_local_tensor", tensor)
            assert local.isnan().all(), (step, tensor.shape)
        assert step == 0 or len(states) == 8, len(states)

    def main(self):
        with fake_library.installed(torch) as (library, _):
            for set_to_none in (True, False):
                assert self.run(True, set_to_none) == self.run(False, set_to_none)
                with_gradients = self.kind == "ddp" or not set_to_none
                assert (GRADIENTS in library.named("pause")[-1][1]) == with_gradients, library.named("pause")
                library.calls.clear()
        self.dist.destroy_process_group()
        print("the same")


@unittest.skipIf(torch is None or not torch.distributed.is_available(), "this python has no PyTorch with torch.distributed")
class TwoRanks(unittest.TestCase):
    def check(self, kind):
        code = "import rollout_test; rollout_test.OneOfTwoRanks(%r).main()" % kind
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            processes = []
            for rank in range(2):
                environment = dict(os.environ, RANK=str(rank), STORE=os.path.join(folder, "store"), GLOO_SOCKET_IFNAME="lo",
                                   OMP_NUM_THREADS="1")
                process = subprocess.Popen([sys.executable, "-B", "-c", code], env=environment, stdout=subprocess.PIPE,
                                           stderr=subprocess.PIPE, text=True, cwd=os.path.dirname(os.path.abspath(__file__)))
                stack.callback(process.kill)
                processes.append(process)
            for process in processes:
                output, errors = process.communicate(timeout=240)
                self.assertEqual((process.returncode, output), (0, "the same\n"), errors)

    def test_fsdp2_its_shards_gradients_and_states(self):
        self.check("fsdp2")

    def test_ddp_and_its_buckets(self):
        self.check("ddp")


if __name__ == "__main__":
    unittest.main()
