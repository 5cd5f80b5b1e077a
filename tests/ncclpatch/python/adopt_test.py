"""amem.adopt: memory moves, and whatever refers to it follows. On CPU tensors and a stand-in for the library; needs PyTorch."""

import gc
import unittest
import warnings

import amem
import fake_library

try:
    import torch
except ImportError:
    torch = None


@unittest.skipIf(torch is None, "this python has no PyTorch")
class Adopt(unittest.TestCase):
    """Wrapper classes of released packages are in wrapped_test.py."""

    def setUp(self):
        context = fake_library.installed(torch)
        self.library, self.side = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def reasons(self, adopted):
        return {row.reason: (row.tensors, row.bytes) for row in adopted.skipped}

    def test_a_model_and_its_optimizer_keep_their_objects_and_values_at_new_addresses(self):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        parameters = list(model.parameters())
        before = [(p.data_ptr(), p.grad.data_ptr(), p.clone(), p.grad.clone(), optimizer.state[p]["exp_avg"].clone()) for p in parameters]
        done = [amem.adopt(model.parameters(), "weights"), amem.adopt([p.grad for p in parameters], "gradients"),
                amem.adopt(optimizer.state, "optimizer")]
        size = sum(p.nbytes for p in parameters)
        self.assertEqual(done[0], ("weights", 4, 4, size, []))
        self.assertEqual(done[1][:4], ("gradients", 4, 4, size))
        self.assertEqual(done[2][:4], ("optimizer", 12, 12, 2 * size + 4 * 4))  # with AdamW's step counts
        for now, parameter, (address, of_grad, value, grad, average) in zip(model.parameters(), parameters, before):
            self.assertIs(now, parameter)
            self.assertIn(parameter, optimizer.state)
            self.assertNotEqual(parameter.data_ptr(), address)
            self.assertNotEqual(parameter.grad.data_ptr(), of_grad)
            for found, wanted in ((parameter, value), (parameter.grad, grad), (optimizer.state[parameter]["exp_avg"], average)):
                self.assertTrue(torch.equal(found, wanted))

    def test_a_module_is_its_parameters_and_buffers_and_what_has_no_tensors_says_so(self):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
        self.assertEqual(amem.adopt(model, "weights")[:3], ("weights", 7, 7))
        optimizer = torch.optim.AdamW(model.parameters())
        with self.assertRaisesRegex(TypeError, "not AdamW; of an optimizer write optimizer.state"):
            amem.adopt(optimizer, "optimizer")
        done = amem.adopt([torch.ones(3), optimizer, optimizer, None, "text", 3, 1.5, True], "mixed")
        self.assertEqual((done.tensors, self.reasons(done)), (1, {"no tensor, and nothing that tensors can be taken out of: AdamW": (2, 0)}))
        self.assertEqual(amem.adopt(optimizer.state, "optimizer"), ("optimizer", 0, 0, 0, []))

    def test_it_learns_on_as_if_nothing_had_been(self):
        def train(adopt):
            torch.manual_seed(2)
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            losses = []
            for step in range(6):
                loss = model(torch.randn(4, 8)).square().sum()
                loss.backward()
                if adopt and step == 2:
                    amem.adopt([[p, p.grad] for p in model.parameters()], "training")
                    amem.adopt(optimizer.state, "training")
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                losses.append(loss.item())
            return losses

        self.assertEqual(train(True), train(False))

    def test_views_of_one_storage_move_once_and_together(self):
        flat = torch.arange(100.0)
        views = [flat[:40], flat[40:].view(6, 10), flat.view(torch.int32)[3:5]]
        offsets = [view.data_ptr() - flat.data_ptr() for view in views]
        done = amem.adopt(views[:2], "a")
        self.assertEqual(done, ("a", 1, 2, 400, []))
        self.assertEqual([view.data_ptr() - flat.data_ptr() for view in views], offsets)
        flat[41] = -1.0
        self.assertEqual(views[1][0, 1].item(), -1.0)
        self.assertTrue(torch.equal(views[0], torch.arange(40.0)))

    def test_a_tensor_that_needs_a_gradient_and_its_graph_survive(self):
        weight = torch.nn.Parameter(torch.arange(1.0, 5.0))
        loss = (weight * weight).sum()  # the graph has saved the weight
        amem.adopt(weight, "a")
        loss.backward()
        self.assertEqual(weight.grad.tolist(), [2.0, 4.0, 6.0, 8.0])

    def test_what_stays_is_told_with_the_reason(self):
        here, other = torch.zeros(8), torch.zeros(16)
        graphs, foreign = torch.zeros(32), torch.frombuffer(bytearray(64), dtype=torch.uint8)
        amem.adopt(here, "a")
        amem.adopt(other, "b")
        address = graphs.data_ptr()
        self.side.others.append((address, address + 128))
        sparse, empty, meta = torch.eye(3).to_sparse(), torch.empty(0), torch.empty(5, device="meta")
        done = amem.adopt({"x": [here, here[2:], other, graphs, foreign], "y": (sparse, empty, meta, None, 3, "text")}, "a")
        self.assertEqual(done[:4], ("a", 0, 0, 0))
        self.assertEqual(self.reasons(done), {
            "in this pool already": (2, 32), "in the pool of the tag 'b'": (1, 64),
            "in another memory pool of PyTorch, such as a CUDA graph's": (1, 128), "memory that PyTorch did not allocate": (1, 64),
            "not strided": (1, 0), "empty": (1, 0), "not on a CUDA device": (1, 20)})
        self.assertEqual(graphs.data_ptr(), address)

    def test_a_wrapped_tensor_is_the_tensors_in_it(self):
        from torch.testing._internal.two_tensor import TwoTensor

        first, second = torch.ones(4), torch.ones(4)
        wrapped = TwoTensor(first, second)
        addresses = first.data_ptr(), second.data_ptr()
        self.assertEqual(amem.adopt([wrapped, first], "a")[:4], ("a", 2, 3, 32))
        self.assertNotIn(first.data_ptr(), addresses)
        self.assertTrue(torch.equal(wrapped + 1, TwoTensor(first + 1, second + 1)))

    def test_what_is_no_tensor_in_a_wrapped_tensor_is_passed_over(self):
        class Sharded(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                made = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
                made.inner, made.mesh = inner, object()
                return made

            def __tensor_flatten__(self):
                return ["inner", "mesh"], None

            @staticmethod
            def __tensor_unflatten__(parts, context, size, stride):
                return Sharded(parts["inner"])

            @classmethod
            def __torch_dispatch__(cls, function, types, arguments=(), named=None):
                return NotImplemented

        inner = torch.arange(8.0)
        address = inner.data_ptr()
        self.assertEqual(amem.adopt(Sharded(inner), "a")[:3], ("a", 1, 1))
        self.assertNotEqual(inner.data_ptr(), address)
        self.assertTrue(torch.equal(inner, torch.arange(8.0)))

    def quantized(self, slots=False, **parts):
        """A wrapper without PyTorch's protocol, with its parts as attributes, as Transformer Engine's were until 2026."""
        class Quantizer:
            def __init__(self, amax):
                self.amax = amax

        class Wrapped(torch.Tensor):
            __slots__ = tuple(parts) if slots else ()

            @staticmethod
            def __new__(cls):
                return torch.Tensor._make_wrapper_subclass(cls, (4, 4), dtype=torch.bfloat16)

            @classmethod
            def __torch_dispatch__(cls, function, types, arguments=(), named=None):
                return arguments[0] if function is torch.ops.aten.detach.default else NotImplemented

        made = Wrapped()
        for name, value in parts.items():
            setattr(made, name, Quantizer(value) if name == "_quantizer" else value)
        return made

    def test_a_wrapper_that_keeps_to_no_protocol_is_adopted_whole(self):
        for slots in (False, True):
            data, scale, amax, nested = (torch.full((16,), value) for value in (1.0, 2.0, 3.0, 4.0))
            wrapped = self.quantized(slots, _rowwise_data=data, _columnwise_data=None, _scale_inv=[scale], _quantizer=amax,
                                     _inner=self.quantized(_data=nested))
            before = [one.data_ptr() for one in (data, scale, amax, nested)]
            parameter = torch.nn.Parameter(wrapped, requires_grad=False)
            self.assertEqual(amem.adopt([parameter], "fp8%d" % slots), ("fp8%d" % slots, 4, 4, 4 * 64, []))
            for one, address, value in zip((data, scale, amax, nested), before, (1.0, 2.0, 3.0, 4.0)):
                self.assertNotEqual(one.data_ptr(), address)
                self.assertTrue(one.eq(value).all())

    def test_a_wrapper_whose_memory_is_not_found_is_named_and_is_no_error(self):
        done = amem.adopt([self.quantized(), self.quantized(_data=None), torch.ones(2)], "a")
        self.assertEqual((done.storages, self.reasons(done)), (1, {"a wrapper, Wrapped, whose memory is not found": (2, 2 * 32)}))
        broken = torch.testing._internal.two_tensor.TwoTensor(torch.ones(4), torch.ones(4))
        type(broken).__tensor_flatten__, real = None, type(broken).__tensor_flatten__  # whoever calls it fails
        self.addCleanup(setattr, type(broken), "__tensor_flatten__", real)
        self.assertEqual(amem.adopt([broken], "a").storages, 2)

    def test_what_has_no_memory_yet_is_named_and_is_no_error(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fake = torch.ones(4)
        lazy = torch.nn.LazyLinear(3).weight
        reasons = self.reasons(amem.adopt([fake, lazy, torch.ones(2)], "a"))
        self.assertEqual(set(reasons), {"not on a CUDA device", "a wrapper, UninitializedParameter, whose memory is not found"})

    def test_what_a_library_has_beside_a_tensors_memory_goes_with_it(self):
        class State:
            def __init__(self, absmax, second):
                self.absmax, self.state2, self.shape, self.itself = absmax, second, (4, 4), self

        class Params4bit(torch.nn.Parameter):
            pass

        weight = torch.Tensor._make_subclass(Params4bit, torch.zeros(8, dtype=torch.uint8))
        absmax, second = torch.ones(2), torch.ones(1)
        weight.quant_state = State(absmax, State(second, None))
        self.assertEqual(amem.adopt([weight], "a"), ("a", 3, 3, 8 + 8 + 4, []))

    def test_memory_that_is_used_again_is_not_taken_for_what_was_there(self):
        first = torch.zeros(1000)
        amem.adopt(first, "a")
        del first
        gc.collect()
        tensors = [torch.zeros(1000) for _ in range(20)]  # one of them is likely at the old address
        self.assertEqual(amem.adopt(tensors, "a").storages, 20)
        storage = tensors[0].untyped_storage()
        storage.resize_(0)
        storage.resize_(4000)  # as FSDP does: it is elsewhere now
        self.assertEqual(amem.adopt(tensors, "a").storages, 1)

    def test_old_memory_goes_back_as_it_is_left_not_at_the_end(self):
        before = amem._adopt.BATCH_BYTES
        amem._adopt.BATCH_BYTES = 100
        self.addCleanup(setattr, amem._adopt, "BATCH_BYTES", before)
        tensors = [torch.zeros(count) for count in (10, 15, 100, 5, 5)]  # 40 + 60, 400, and 20 + 20 bytes
        self.assertEqual(amem.adopt(tensors, "a").storages, 5)
        self.assertEqual(self.side.caches_emptied, 3)
        self.assertEqual(amem.adopt(tensors, "a").storages, 0)

    def test_memory_that_pytorch_had_cached_is_found(self):
        tensors, real = [torch.full((10,), float(i)) for i in range(3)], torch.UntypedStorage.resize_

        def short(storage, size):
            if storage.data_ptr() == tensors[1].data_ptr() and not self.side.caches_emptied:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return real(storage, size)

        torch.UntypedStorage.resize_ = short
        try:
            self.assertEqual(amem.adopt(tensors, "a").storages, 3)
        finally:
            torch.UntypedStorage.resize_ = real
        self.assertEqual([tensor[0].item() for tensor in tensors], [0.0, 1.0, 2.0])

    def test_too_little_memory_half_way_leaves_everything_intact(self):
        tensors = [torch.full((10,), float(i)) for i in range(4)]
        real = torch.UntypedStorage.resize_

        def short(storage, size):
            if storage.data_ptr() == tensors[2].data_ptr():
                self.library.error = b"amem_alloc: 1 MiB short"
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return real(storage, size)

        torch.UntypedStorage.resize_ = short
        try:
            with self.assertRaises(amem.AmemError) as caught:
                amem.adopt(tensors, "a")
        finally:
            torch.UntypedStorage.resize_ = real
        self.assertEqual(caught.exception.code, 1)
        self.assertIn("2 of 4 storages", str(caught.exception))
        self.assertIn("1 MiB short", str(caught.exception))
        self.assertEqual([tensor[0].item() for tensor in tensors], [0.0, 1.0, 2.0, 3.0])
        self.assertEqual((self.library.stack, self.side.entered), ([], []))
        done = amem.adopt(tensors, "a")
        self.assertEqual((done.storages, self.reasons(done)), (2, {"in this pool already": (2, 80)}))

    def test_a_paused_tag_and_another_policy_are_refused(self):
        tensor = torch.zeros(4)
        amem.adopt(tensor, "a")
        amem.pause("a")
        with self.assertRaisesRegex(amem.AmemError, "'a' is paused; resume it first"):
            amem.adopt(torch.zeros(4), "a")
        amem.resume("a")
        with self.assertRaisesRegex(amem.AmemError, "another policy"):
            amem.adopt(torch.zeros(4), "a", policy="discard")

    def test_a_tag_that_is_still_on_its_way_back_is_waited_for(self):
        tensor = torch.ones(4)
        amem.adopt(tensor, "a")
        amem.pause("a")
        amem.resume("a", wait=False)
        amem.wait("a", stream=0)
        self.assertEqual(self.library.states["a"], "resuming")
        self.assertEqual(amem.adopt([tensor, torch.zeros(4)], "a").storages, 1)
        self.assertEqual(self.library.states["a"], "resident")

    def test_memory_that_lands_elsewhere_is_said(self):
        self.side.lose = True
        with self.assertRaisesRegex(amem.AmemError, "allocated outside the pool 'a'"):
            amem.adopt(torch.zeros(4), "a")
        self.side.lose, self.library.bypassed = False, True
        with self.assertRaisesRegex(amem.AmemError, "expandable_segments"):
            amem.adopt(torch.zeros(4), "a")

    def test_contents_are_lost_in_a_pause_unless_saved(self):
        """Of the stand-in: that the other tests would notice."""
        kept, lost = torch.ones(4), torch.ones(4)
        amem.adopt(kept, "kept")
        amem.adopt(lost, "lost", policy="discard")
        amem.pause("kept", "lost")
        self.assertTrue(kept.isnan().all() and lost.isnan().all())
        amem.resume("kept", "lost")
        self.assertTrue(kept.eq(1).all() and lost.isnan().all())

    def test_parameters_that_a_pause_will_not_save_are_said_at_once(self):
        with self.assertWarnsRegex(RuntimeWarning, "does not save the parameters under the tag 'weights'"):
            amem.adopt(torch.nn.Linear(2, 2), "weights", policy="discard")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            amem.adopt([torch.zeros(4)], "cache", policy="discard")
            self.assertEqual(amem.adopt([iter([torch.zeros(4)]), (one for one in [torch.zeros(2)])], "cache", policy="discard").storages, 2)
            amem.adopt(torch.nn.Linear(2, 2), "kept")

    def test_without_a_gpu_nothing_happens(self):
        amem._pools.backend = lambda: None
        tensor = torch.zeros(4)
        self.assertEqual(self.reasons(amem.adopt([tensor], "a")), {"not on a CUDA device": (1, 16)})
        self.assertEqual(self.library.calls, [])


if __name__ == "__main__":
    unittest.main()
