"""amem.frameworks.trl in TRL's own GRPOTrainer and RLOOTrainer, on CPU tensors and a stand-in for the library. Needs TRL; nothing is downloaded: model and
tokenizer are made here, and vLLM, which TRL would generate with, is stood in for."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

import fake_library

try:
    import torch
    import trl
    from amem.frameworks import trl as adapter
except ImportError:
    trl = None


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(10)), "sort", ":"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def trainer(folder, kind="GRPO", steps=3, conversational=False, max_length=4):
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    tokens = tokenizer()
    config = LlamaConfig(vocab_size=len(tokens), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    options = getattr(trl, kind + "Config")(output_dir=folder, use_cpu=True, report_to=[], max_steps=steps, per_device_train_batch_size=4, num_generations=4,
                             max_completion_length=max_length, save_strategy="no", disable_tqdm=True, learning_rate=0.1, beta=0.0, seed=5, logging_steps=1)
    prompts = ["sort : 3 1 2", "sort : 9 8 7"] * 4
    if conversational:
        tokens.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
        prompts = [[{"role": "user", "content": one}] for one in prompts]
    data = Dataset.from_dict({"prompt": prompts})
    reward = lambda completions, **_: [float(len(set(str(one).split()))) for one in completions]
    reward.__name__ = "reward"
    return getattr(trl, kind + "Trainer")(LlamaForCausalLM(config), reward_funcs=reward, args=options, train_dataset=data, processing_class=tokens)


@unittest.skipIf(trl is None, "this python has no TRL")
class Trainers(unittest.TestCase):
    def setUp(self):
        context = fake_library.installed(torch)
        self.library, self.side = context.__enter__()
        self.library.nccl_libraries = [{"under_amem": True}]
        self.addCleanup(context.__exit__, None, None, None)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def train(self, with_amem, prepare=lambda trainer: None, kind="GRPO"):
        made = trainer(self.folder, kind)
        prepare(made)
        if with_amem:
            made.add_callback(adapter.callback(made))
        made.train()
        logged = [(row["loss"], row["grad_norm"]) for row in made.state.log_history if "loss" in row]
        self.assertGreater(max(norm for _, norm in logged), 0)
        return logged + [p.double().sum().item() for p in made.model.parameters()]

    def test_the_model_generates_itself_and_its_optimizer_goes_meanwhile(self):
        for kind in ("GRPO", "RLOO"):
            with self.subTest(kind):
                self.library.calls.clear()
                self.assertEqual(self.train(False, kind=kind), self.train(True, kind=kind))
                paused = {tag for call in self.library.named("pause") for tag in call[1]}
                self.assertIn("amem.rl.optimizer", paused)
                self.assertFalse({"amem.rl.parameters", "nccl"} & paused)

    def vllm(self, sleep_mode):
        """In place of TRL's VLLMGeneration in colocate mode: generates with TRL's own way to wake vLLM up, and looks at what is there."""
        seen = []

        def prepare(made):
            generation = types.SimpleNamespace(mode="colocate", tensor_parallel_size=1, enable_sleep_mode=sleep_mode)

            def look(what):
                seen.append((what, any(p.isnan().any() for p in made.model.parameters()), self.library.states["nccl"]))

            generation.llm = types.SimpleNamespace(wake_up=lambda tags=None: look("wake " + tags[0]), sleep=lambda level: look("sleep"),
                                                   generate=lambda ids: look("generate") or [[5 - number % 2, 4, 4, 1] for number, _ in enumerate(ids)])

            def generate(prompts, images, num_generations, profiler=None):
                if sleep_mode:
                    generation.llm.wake_up(tags=["kv_cache"])
                found = generation.llm.generate(prompts)
                if sleep_mode:
                    generation.llm.sleep(level=2)
                return prompts, found, [[[0.0]] * 4 for _ in found], None

            def sync_weights():
                if sleep_mode:
                    generation.llm.wake_up(tags=["weights"])
                look("sync")

            generation.generate, generation.sync_weights = generate, sync_weights
            made.use_vllm, made.vllm_generation = True, generation
            made._last_loaded_step, made.vllm_importance_sampling_correction = -1, False

        return prepare, seen

    def test_parameters_and_nccl_are_vllms_from_its_cache_to_its_sleep(self):
        prepare, _ = self.vllm(sleep_mode=True)
        plain = self.train(False, prepare)
        prepare, seen = self.vllm(sleep_mode=True)
        self.assertEqual(self.train(True, prepare), plain)
        self.assertEqual(seen[:5], [("wake weights", False, "resident"), ("sync", False, "resident"), ("wake kv_cache", True, "paused"),
                                    ("generate", True, "paused"), ("sleep", True, "paused")])

    def test_without_its_sleep_mode_they_go_while_it_generates(self):
        prepare, seen = self.vllm(sleep_mode=False)
        self.train(True, prepare)
        self.assertEqual(seen[:2], [("sync", False, "resident"), ("generate", True, "paused")])

    def test_a_server_has_gpus_of_its_own(self):
        generation = types.SimpleNamespace(mode="server")
        self.assertIsNone(adapter.install(types.SimpleNamespace(use_vllm=True, vllm_generation=generation), None, None))

    def test_tensor_parallel_vllm_keeps_nccl(self):
        model = torch.nn.Linear(2, 2)
        generation = types.SimpleNamespace(mode="colocate", tensor_parallel_size=2, enable_sleep_mode=False,
                                           llm=types.SimpleNamespace(generate=lambda: self.library.states["nccl"]))
        offload = adapter.install(types.SimpleNamespace(use_vllm=True, vllm_generation=generation), model, None)
        self.assertEqual(generation.llm.generate(), "resident")
        self.assertIn("amem.rl.parameters", self.library.states)
        offload.close()


@unittest.skipIf(trl is None, "this python has no TRL")
class Ranks(unittest.TestCase):
    """Two processes of TRL's GRPOTrainer under gloo. A pause of NCCL's memory waits for both, until a deadline. TRL_LATE_SECONDS: how many seconds
    late a rank comes (6), with a deadline of a third of it."""

    STEPS = 4

    def run_ranks(self, **told):
        told = {"what": "plain", "late_s": 0, "deadline_s": 30, "sleep_mode": True, "steps": self.STEPS, **told}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        here = os.path.dirname(os.path.abspath(__file__))
        ranks = [subprocess.Popen([sys.executable, "-B", os.path.join(here, "trl_ranks.py"), json.dumps(told)], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                       "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}) for rank in range(2)]
        self.addCleanup(lambda: [(rank.kill(), rank.wait(), rank.stdout.close(), rank.stderr.close()) for rank in ranks])
        found = []
        for rank in ranks:
            output, errors = rank.communicate(timeout=600)
            self.assertEqual(rank.returncode, 0, errors[-3000:])
            found.append(json.loads(output.splitlines()[-1]))
        self.assertEqual(len(found[0]["losses"]), told.get("trainings", 1) * self.STEPS)
        return found, errors

    def test_ranks_whose_tools_make_them_generate_unequally_often(self):
        found, _ = self.run_ranks(what="tools")
        self.assertEqual([(one["attempts"], one["successes"]) for one in found], [(self.STEPS, self.STEPS)] * 2)
        self.assertNotEqual(found[0]["generations"], found[1]["generations"])
        self.assertGreater(min(one["generations"] for one in found), self.STEPS)

    def test_a_rollout_func_that_generates_unequally_often(self):
        found, _ = self.run_ranks(what="rollout_func")
        self.assertEqual([(one["attempts"], one["generations"]) for one in found], [(0, self.STEPS), (0, 2 * self.STEPS)])

    def test_a_second_training(self):
        found, _ = self.run_ranks(trainings=2)
        self.assertEqual([one["successes"] for one in found], [2 * self.STEPS] * 2)

    def test_a_rank_that_comes_late_costs_one_pause_and_no_training(self):
        late_s = float(os.environ.get("TRL_LATE_SECONDS", "6"))
        for sleep_mode in (False, True):
            found, errors = self.run_ranks(late_s=late_s, deadline_s=late_s / 3, sleep_mode=sleep_mode)
            self.assertEqual([(one["attempts"], one["successes"]) for one in found], [(self.STEPS, self.STEPS - 1)] * 2)
            self.assertIn("NCCL's memory stays on the GPU during this rollout: a rank did not come within", errors)


if __name__ == "__main__":
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"):
        unittest.main()
