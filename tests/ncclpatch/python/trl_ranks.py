"""One rank of a training by TRL's own GRPOTrainer on CPUs, for trl_test.py: RANK, WORLD_SIZE and the rest as torchrun sets them. Collectives
are gloo's; NCCL's memory is the stand-in's, and its pause and resume are collective here: a pause waits for all ranks until a deadline, a resume
without one. What varies is told as JSON: "what" is plain, tools or rollout_func, "late_s" is how late the last rank comes to its second step,
"deadline_s" of a pause, "trainings", "sleep_mode". Prints a JSON line: losses, attempts to pause NCCL and how many succeeded, generations."""

import datetime
import json
import os
import sys
import tempfile
import time
import types
from unittest import mock

import fake_library
import torch
import trl_test
from amem.frameworks import trl as adapter
from torch import distributed


class Nccl:
    """Its pauses and resumes over the ranks, agreed in a store."""

    def __init__(self, store, rank, size, deadline_s):
        self.store, self.rank, self.size, self.deadline_s = store, rank, size, deadline_s
        self.attempts = self.successes = 0

    def pause(self):
        """None, or why not. All ranks make the same attempts."""
        self.attempts += 1
        key = "pause/%d/" % self.attempts
        if self.store.add(key + "came", 1) == self.size:
            self.store.compare_set(key + "decided", "", "yes")
        try:
            self.store.wait([key + "decided"], datetime.timedelta(seconds=self.deadline_s))
        except Exception:  # pylint: disable=broad-except  # the time is up
            self.store.compare_set(key + "decided", "", "no")
        if self.store.get(key + "decided") == b"yes":
            self.successes += 1
            return None
        return "a rank did not come within %g s" % self.deadline_s


def generation_of(sleep_mode, counted):
    """In the place of TRL's VLLMGeneration in colocate mode, with tokens that depend on how often it was called."""

    def generate(prompts, images, num_generations, profiler=None):
        del images, num_generations, profiler
        if sleep_mode:
            made.llm.wake_up(tags=["kv_cache"])
        found = made.llm.generate(prompts)
        if sleep_mode:
            made.llm.sleep(level=2)
        return prompts, found, [[[0.0]] * len(one) for one in found], None

    def tokens(prompts):
        counted.append(len(prompts))
        return [[5 + number % 2, 4 + len(counted) % 3, 1] for number, _ in enumerate(prompts)]

    made = types.SimpleNamespace(mode="colocate", tensor_parallel_size=1, enable_sleep_mode=sleep_mode, generate=generate, sync_weights=lambda: None)
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=512))
    made.llm = types.SimpleNamespace(wake_up=lambda tags=None: None, sleep=lambda level: None, generate=tokens, llm_engine=config)
    return made


def look():
    """Looks."""
    return "3"


def with_tools(made, rank):
    """Completions of this rank call a tool once in its first step and twice in the next: one more generation for each call."""
    import trl.trainer.grpo_trainer as module

    calls = iter(range(1000))

    def parse(tokenizer, ids, prefix=None, tools=None):
        del tokenizer, prefix, tools
        wanted = next(calls) % 7 < 1 + 2 * rank
        call = {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}
        return {"role": "assistant", "content": "".join(map(str, ids)), **(call if wanted else {})}

    module.parse_response = parse
    made.tools = [look]
    made._sync_tool_dicts = [{"look": made.tools[0]}] * 64
    made._async_tool_dicts = [{}] * 64
    made.max_tool_calling_iterations = 5
    made._get_tool_suffix_ids = lambda messages: [5] * len(messages)
    made._tokenizer.response_template = "a template"


def main(told):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    context = fake_library.installed(torch)
    library, _ = context.__enter__()
    library.nccl_libraries = [{"under_amem": True}]
    counted, losses = [], []
    with tempfile.TemporaryDirectory() as folder:
        made = trl_test.trainer(folder, conversational=told["what"] == "tools", steps=told.get("steps", 4), max_length=32)
        store = distributed.PrefixStore("nccl", distributed.distributed_c10d._get_default_store())
        nccl = Nccl(store, rank, size, told["deadline_s"])

        alone = library._cycle_of_nccl

        def together(name, want):
            why = nccl.pause() if name == "ncclPause" else None
            library.fail["ncclPause", "nccl"] = (6, why) if why else (0, "")
            return alone(name, want)

        library._cycle_of_nccl = together
        made.use_vllm, made.vllm_generation = True, generation_of(told["sleep_mode"], counted)
        made.vllm_mode, made._last_loaded_step, made.vllm_importance_sampling_correction = "colocate", -1, False
        if told["what"] == "tools":
            with_tools(made, rank)
        if told["what"] == "rollout_func":
            def rollout(prompts, trainer):
                for _ in range(1 + rank):
                    _, ids, logprobs, _ = trainer.vllm_generation.generate([[3, 4]] * len(prompts), None, 1)
                return {"prompt_ids": [[3, 4]] * len(prompts), "completion_ids": ids, "logprobs": [[0.0] * len(one) for one in ids]}

            made.rollout_func = rollout
        score, step = made._generate_and_score_completions, iter(range(1000))

        def late(*arguments):
            if next(step) == 1 and rank == size - 1:
                time.sleep(told["late_s"])
            return score(*arguments)

        made._generate_and_score_completions = late
        made.add_callback(adapter.callback(made))
        for _ in range(told.get("trainings", 1)):
            made.train()
            losses += [row["loss"] for row in made.state.log_history if "loss" in row]
        assert not any(parameter.isnan().any() for parameter in made.model.parameters())
        assert set(library.states.values()) <= {"resident", "resuming"}, library.states
    print(json.dumps({"losses": losses, "attempts": nccl.attempts, "successes": nccl.successes, "generations": len(counted)}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"):
        main(json.loads(sys.argv[1]))
