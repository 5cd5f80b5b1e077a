"""The example: its algorithm on known numbers, a short run on the CPU twice, and its plot. They need PyTorch, the plot matplotlib."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from xml.etree import ElementTree

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../gpu")
HAVE_TORCH = importlib.util.find_spec("torch") is not None


def load(name):
    spec = importlib.util.spec_from_file_location(name, os.path.join(EXAMPLES, name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@unittest.skipUnless(HAVE_TORCH, "this python has no PyTorch")
class Grpo(unittest.TestCase):
    def setUp(self):
        global torch
        import torch

        self.grpo = load("grpo_job")

    def test_rewards_advantages_and_loss_are_those_of_the_definition(self):
        prompts = torch.tensor([[3, 1, 2, 10], [3, 1, 2, 10]])
        self.assertEqual(self.grpo.rewards_of(prompts, torch.tensor([[1, 2, 3], [1, 3, 3]])).tolist(), [2.0, torch.tensor(2 / 3).item()])
        advantages = self.grpo.relative(torch.tensor([1.0, 3.0, 5.0, 5.0]), group=2)
        self.assertAlmostEqual(advantages[0].item(), -(0.5**0.5), places=3)
        self.assertEqual(advantages[2:].tolist(), [0.0, 0.0])
        old = torch.zeros(2, 1)
        new = torch.tensor([[2.0], [2.0]]).log().requires_grad_()  # ratios of 2, beyond the bound
        loss = self.grpo.policy_loss(new, old, torch.tensor([1.0, -1.0]), clip=0.2)
        self.assertAlmostEqual(loss.item(), -(1.2 - 2.0) / 2, places=6)
        loss.backward()
        self.assertEqual(new.grad[0].item(), 0.0)  # clipped: nothing more to gain
        self.assertGreater(new.grad[1].item(), 0.0)

    def test_generating_with_the_cache_is_generating_without(self):
        options = type("Options", (), {"digits": 4, "width": 32, "heads": 4, "layers": 2})
        torch.manual_seed(1)
        trained = self.grpo.Transformer(options)
        engine = self.grpo.Engine(options, torch.device("cpu"))
        engine.dtype = torch.float32
        engine.model = engine.model.float()
        engine.synchronize(trained)
        prompts = torch.randint(10, (3, 5))
        answers = engine.generate(prompts, torch.Generator().manual_seed(2))
        generator, tokens = torch.Generator().manual_seed(2), prompts
        with torch.no_grad():
            for _ in range(4):
                logits = trained(tokens)[:, -1]
                tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
        self.assertTrue(torch.equal(answers, tokens[:, 5:]))

    def test_losses_that_are_all_zero_prove_nothing(self):
        zeros, others = ({"iterations": [{"loss": loss.hex()} for loss in losses]} for losses in ((-0.0, -0.0), (0.5, -0.0)))
        grpo = load("grpo_job")
        self.assertGreater(grpo.compare(zeros, zeros), 0)
        self.assertEqual(grpo.compare(others, others), 0)

    def test_two_runs_have_equal_losses_and_another_seed_has_others(self):
        small = ["--device", "cpu", "--iterations", "2", "--layers", "1", "--width", "32", "--heads", "2", "--prompts", "2", "--group", "4"]
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "one.json")

            def run(*more):
                return subprocess.run([sys.executable, "-B", os.path.join(EXAMPLES, "grpo_job.py"), *small, *more], capture_output=True,
                                      text=True, timeout=300, env=dict(os.environ, OMP_NUM_THREADS="1"))

            first = run("--json", file)
            self.assertEqual(first.returncode, 0, first.stderr)
            with open(file, encoding="utf-8") as source:
                self.assertEqual(len(json.load(source)["iterations"]), 2)
            second = run("--same-as", file)
            self.assertEqual(second.returncode, 0, second.stdout + second.stderr)
            self.assertIn("2 of 2 are equal", second.stdout)
            self.assertEqual(run("--same-as", file, "--seed", "2").returncode, 1)


@unittest.skipUnless(importlib.util.find_spec("matplotlib"), "this python has no matplotlib")
class Plot(unittest.TestCase):
    RUN = {"flag": True, "strategy": "fsdp2", "ranks": 2, "parameters": 350000000, "iterations": [],
           "phases": [[0.0, "synchronize"], [0.1, "rollout"], [0.6, "training"], [1.0, "synchronize"], [1.1, "rollout"], [1.6, "training"]],
           "memory_mib": [[i / 100, 20480.0 if i % 100 > 60 else 4096.0] for i in range(200)]}

    def test_draws_each_run_with_its_rollouts_shaded(self):
        plot = load("grpo_plot")
        panels = plot.draw([dict(self.RUN, flag=False), self.RUN], 0, 9).axes
        self.assertEqual([len(panel.patches) for panel in panels], [2, 2])
        self.assertEqual([panel.get_title().split(":")[0] for panel in panels], ["without the flag", "with --rl-amem-offload-during-rollout"])
        self.assertEqual(max(panels[1].lines[0].get_ydata()), 20)
        self.assertEqual(len(panels[0].lines[0].get_xdata()), 200)
        panel, = plot.draw([self.RUN], 1, 2).axes
        self.assertEqual(len(panel.patches), 1)
        self.assertEqual(panel.lines[0].get_xdata()[0], 0)

    def test_the_file_is_what_its_name_says(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/run.json", "w", encoding="utf-8") as file:
                json.dump(self.RUN, file)
            subprocess.run([sys.executable, "-B", os.path.join(EXAMPLES, "grpo_plot.py"), file.name, "-o", folder + "/memory.svg", "--iterations", "0:1"], check=True)
            self.assertTrue(ElementTree.parse(folder + "/memory.svg").getroot().tag.endswith("svg"))

    def test_a_run_on_the_cpu_is_refused_in_words(self):
        with self.assertRaisesRegex(SystemExit, "no samples"):
            load("grpo_plot").draw([dict(self.RUN, memory_mib=[])], 0, 9)


if __name__ == "__main__":
    unittest.main()
