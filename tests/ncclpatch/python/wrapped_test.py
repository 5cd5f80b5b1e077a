"""Tensors of released packages that wrap others, and optimizers that shard them, on a CPU and the stand-in for the library. Each test is
skipped where its package is missing; `./run frameworks-test` installs them.

Transformer Engine's compiled part needs a GPU's toolkit, so its Python is loaded from a wheel (FRAMEWORK_RELEASES/transformer-engine) with a
stand-in for that part: what is tested is where its classes keep their memory.
"""
import contextlib
import enum
import glob
import importlib.machinery
import importlib.util
import os
import re
import sys
import tempfile
import types
import unittest
import zipfile
from unittest import mock

import amem
import amem.rl
import fake_library

try:
    import torch
except ImportError:
    torch = None


def has(name):
    return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def transformer_engine(root):
    """Transformer Engine's Python, without importing the libraries that its packages load."""
    def missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)

    def package(name, *folders):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *folders)]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__getattr__ = missing
        return name, module

    with open(os.path.join(root, "transformer_engine/pytorch/constants.py"), encoding="utf-8") as file:
        names = dict.fromkeys(re.findall(r"^    (k\w+) = int", file.read(), re.M))
    compiled = mock.MagicMock(name="transformer_engine_torch")
    compiled.DType = enum.IntEnum("DType", [(name, number) for number, name in enumerate(names)])
    modules = dict([package("transformer_engine", "transformer_engine"), package("transformer_engine.common", "transformer_engine", "common"),
                    package("transformer_engine.pytorch", "transformer_engine", "pytorch")], transformer_engine_torch=compiled)
    with mock.patch.dict(sys.modules, modules):
        yield compiled


@unittest.skipIf(torch is None, "this python has no PyTorch")
class Wrapped(unittest.TestCase):
    def setUp(self):
        context = fake_library.installed(torch)
        self.library, self.side = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def check_whole(self, model, parts, run=None):
        """All of `parts` is gone in a rollout of that model and back after it, nothing is left, and run() gives what it gave."""
        values, before = [part.clone() for part in parts], run() if run else None
        offload = amem.rl.RolloutOffload(model, name=self.id())
        with offload.rollout():
            for part in parts:
                self.assertTrue(part.view(-1).view(torch.uint8).eq(255).all(), "it is on the GPU still")
        for part, value in zip(parts, values):
            self.assertTrue(torch.equal(part, value))
        self.assertEqual(offload.left, [])
        if run:
            self.assertTrue(torch.equal(run(), before))
        offload.close()
        return offload

    @unittest.skipUnless(torch and has("torchao"), "no torchao")
    def test_torchao(self):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        for config in (Int8WeightOnlyConfig(), Float8WeightOnlyConfig()):
            torch.manual_seed(1)
            model, data = torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.randn(2, 64)
            quantize_(model, config)
            weight = model[0].weight
            with self.subTest(type(weight).__name__):
                self.assertNotIn(type(weight), (torch.Tensor, torch.nn.Parameter))
                self.check_whole(model, [weight.qdata, weight.scale, model[0].bias], lambda: model(data))

    @unittest.skipUnless(torch and has("bitsandbytes"), "no bitsandbytes")
    def test_bitsandbytes_quant_state(self):
        import bitsandbytes

        torch.manual_seed(1)
        model = torch.nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=True))
        model[0].weight = bitsandbytes.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4", compress_statistics=True)
        model.to("cpu")
        state, data = model[0].weight.quant_state, torch.randn(2, 64)
        parts = [model[0].weight.data, state.absmax, state.code, state.offset.view(1), state.state2.absmax, state.state2.code]
        self.check_whole(model, parts, lambda: model(data))

    @unittest.skipUnless(torch and torch.distributed.is_available(), "no torch.distributed")
    def test_shards_of_fsdp2_that_are_themselves_wrapped(self):
        from torch.distributed.fsdp import fully_shard

        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group("gloo", init_method="file://%s/store" % folder, rank=0, world_size=1)
            self.addCleanup(torch.distributed.destroy_process_group)
            torch.manual_seed(1)
            model, data = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), torch.randn(2, 8)
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            for module in (model[0], model[1], model):
                fully_shard(module, mesh=mesh)
            optimizer, offload = torch.optim.AdamW(model.parameters()), None
            losses = {}
            for enabled in (False, True):
                state = {name: value.clone() for name, value in model.state_dict().items()}
                offload = amem.rl.RolloutOffload(model, optimizer, enabled=enabled, name="fsdp2")
                losses[enabled] = []
                for _ in range(3):
                    with offload.rollout():
                        if enabled:
                            self.assertTrue(all(parameter.to_local().isnan().all() for parameter in model.parameters()))
                    loss = model(data).square().sum()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses[enabled].append(loss.item())
                self.assertEqual(offload.left, [])
                offload.close()
                model.load_state_dict(state)
                optimizer = torch.optim.AdamW(model.parameters())
            self.assertEqual(losses[True], losses[False])

    def released(self, name):
        wheels = glob.glob(os.path.join(os.environ.get("FRAMEWORK_RELEASES", ""), name, "*.whl"))
        if not wheels:
            self.skipTest("no wheel of %s in FRAMEWORK_RELEASES" % name)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        zipfile.ZipFile(wheels[0]).extractall(folder.name)
        return folder.name

    def test_transformer_engines_classes(self):
        with transformer_engine(self.released("transformer-engine")) as compiled:
            from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
            from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
            from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

            bytes_ = lambda *shape: torch.randint(0, 100, shape, dtype=torch.uint8)
            kind = compiled.DType.kFloat8E4M3
            data, transpose, scale, row, column, row_scale, column_scale, stored = (
                bytes_(4, 4), bytes_(4, 4), torch.ones(1), bytes_(4, 4), bytes_(4, 4), bytes_(4, 1), bytes_(1, 4), bytes_(8))
            common = {"shape": (4, 4), "dtype": torch.bfloat16, "fp8_dtype": kind, "quantizer": None, "device": "cpu"}
            first = Float8Tensor(data=data, fp8_scale_inv=scale, data_transpose=transpose, **common)
            second = MXFP8Tensor(rowwise_data=row, rowwise_scale_inv=row_scale, columnwise_data=column, columnwise_scale_inv=column_scale,
                                 with_gemm_swizzled_scales=False, **common)

            class Linear(torch.nn.Module):
                pass

            Linear.__module__ = "transformer_engine.pytorch.module.linear"
            model = Linear()
            model.weight, model.other = (torch.nn.Parameter(one, requires_grad=False) for one in (first, second))
            model._fp8_workspaces = {"weight": Float8TensorStorage(data=stored, fp8_scale_inv=torch.ones(1), fp8_dtype=kind)}
            self.assertIs(type(model.weight), Float8Tensor)
            self.check_whole(model, [data, transpose, scale, row, column, row_scale, column_scale, stored])

    @unittest.skipUnless(torch and has("deepspeed"), "no deepspeed")
    def test_deepspeeds_zero3(self):
        import deepspeed

        self.addCleanup(setattr, torch.nn.functional, "linear", torch.nn.functional.linear)  # which it replaces

        def run(enabled):
            torch.manual_seed(1)
            model, data = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)), torch.randn(2, 64)
            engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), config={
                "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}})
            offload = amem.rl.RolloutOffload(engine, engine.optimizer, enabled=enabled, name="zero3")
            losses = []
            for step in range(4):
                with offload.rollout():
                    if enabled and step:
                        shards = [parameter.ds_tensor for parameter in model.parameters()]
                        masters = engine.optimizer.fp32_partitioned_groups_flat
                        self.assertTrue(all(one.view(-1).view(torch.uint8).eq(255).all() for one in [*shards, *masters]), step)
                loss = engine(data).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            self.assertEqual(offload.left, [])
            offload.close()
            return losses

        def reference(engine_of):
            """A model that only generates: no optimizer, and its parameters are empty, too."""
            torch.manual_seed(2)
            model, data = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)), torch.randn(2, 64)
            engine, *_ = engine_of(model)
            before = engine(data)
            shards = [parameter.ds_tensor for parameter in model.parameters()]
            self.assertEqual(sum(parameter.numel() for parameter in model.parameters()), 0)
            offload = amem.rl.RolloutOffload(engine, name="reference")
            with offload.rollout():
                self.assertTrue(all(one.view(-1).view(torch.uint8).eq(255).all() for one in shards))
            self.assertEqual(offload.left, [])
            self.assertTrue(torch.equal(engine(data), before))

        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                                                                            MASTER_PORT="29581"):
            torch.distributed.init_process_group("gloo", init_method="file://%s/store" % folder, rank=0, world_size=1)
            deepspeed.init_distributed("gloo")
            self.addCleanup(torch.distributed.destroy_process_group)
            self.assertEqual(run(True), run(False))
            reference(lambda model: deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {
                "stage": 3, "stage3_param_persistence_threshold": 0}}))


if __name__ == "__main__":
    unittest.main()
