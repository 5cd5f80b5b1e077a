#!/usr/bin/env python3
"""As vllm_job.py, of SGLang: release_memory_occupation in place of a sleep, resume_memory_occupation in place of a wake-up. AMem's adapter is for 0.5.13
and later, of which 0.5.13.post1 to 0.5.17 ask for PyTorch 2.11.

    NCCL_NVLS_ENABLE=0 AMEM_ENABLE=1 LD_PRELOAD=libamem_nccl.so python3 sglang_job.py --backend amem --tp 1 --json FILE

Weights and KV cache are released, and the weights have a copy on the host, so that both levels are alike but for the update of weights. A rank has a
GPU of its own: SGLang has no option for several on one. What a release fails by ends SGLang's scheduler, so there are no --failures.
"""
import contextlib
import inspect
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import vllm_job  # noqa: E402

TAGS = ["kv_cache", "weights"]
BYTES_OF_A_TOKEN = 2 * 2 * 8 * 128  # of a layer's KV cache: keys and values of 8 heads
SAVERS_LIBRARY = "torch_memory_saver_hook_mode"
SECONDS_TO_ANSWER = 20


def mapped_files(pid):
    with contextlib.suppress(OSError), open("/proc/%d/maps" % pid, encoding="utf-8") as file:
        return file.read()
    return ""


class Memory:
    """SGLang's calls by vLLM's names."""

    def __init__(self, engine):
        self.engine = engine

    def sleep(self, _level):
        self.engine.release_memory_occupation(TAGS)

    def wake_up(self, tags=None):
        self.engine.resume_memory_occupation(tags or TAGS)


class Engine(vllm_job.Engine):
    def __init__(self, options, folder):  # pylint: disable=super-init-not-called
        import sglang
        from sglang.srt.server_args import ServerArgs

        self.version, self.backend, self.ranks, self.answers = sglang.__version__, options.backend, options.tp, os.path.join(folder, "answers")
        os.mkdir(self.answers)
        known = inspect.signature(ServerArgs).parameters
        renamed = {next((name for name in names if name in known), names[0]): value for names, value in
                   ((("cuda_graph_max_bs_decode", "cuda_graph_max_bs"), 4), (("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph"), True))}
        self.llm = Memory(sglang.Engine(
            model_path=vllm_job.model_folder(folder, options.layers), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", tp_size=options.tp,
            enable_memory_saver=True, enable_weights_cpu_backup=True, context_length=1024, max_running_requests=8, mem_fraction_static=0.5, random_seed=0,
            max_total_tokens=options.cache_mib * vllm_job.MIB // (options.layers * BYTES_OF_A_TOKEN), disable_radix_cache=True, disable_custom_all_reduce=True,
            attention_backend=options.attention, sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=options.eager,
            log_level="warning", **renamed))  # at SGLang's default, error, an adapter that could not be installed says nothing
        self.prompts, self.said, self.seed = vllm_job.PROMPTS, {}, None
        self.sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}

    def rpc(self, name, *values):
        """What each rank answers, which sglang_worker.py writes to a file."""
        if name == "engines_about":
            return self.about()
        self.llm.engine.collective_rpc(name, folder=self.answers, values=values)
        return [self.answer(name, rank) for rank in range(self.ranks)]

    def answer(self, name, rank):
        """The first rank answers SGLang; the others may still be writing."""
        file, end = os.path.join(self.answers, "%s-%d" % (name, rank)), time.monotonic() + SECONDS_TO_ANSWER
        while not os.path.exists(file):
            vllm_job.check(time.monotonic() < end, "rank %d did not answer %s" % (rank, name))
            time.sleep(0.01)
        with open(file, encoding="utf-8") as source:
            found = json.load(source)
        os.unlink(file)
        return found

    def about(self):
        """Fails if SGLang fell back to torch_memory_saver itself: it is only logged that AMem's adapter could not be installed."""
        pids = list(vllm_job.descendants(os.getpid()))
        theirs = [pid for pid in pids if SAVERS_LIBRARY in mapped_files(pid)]
        vllm_job.check(bool(theirs) == (self.backend != "amem"), "%s has processes with torch_memory_saver's library: %s" % (self.backend, theirs))
        return [{"pid": pid} for pid in pids]

    def load(self, seed):
        """Another last layer is enough for other tokens."""
        import torch

        values = torch.randn(32000, 4096, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)
        good, text = self.llm.engine.update_weights_from_tensor([("lm_head.weight", values)])
        vllm_job.check(good, text)
        self.seed = seed

    def tokens(self):
        """And waits for the scheduler to be idle, which it is a step after the last token: a release that comes earlier ends it."""
        found = [list(self.llm.engine.generate(input_ids=one["prompt_token_ids"], sampling_params=self.sampling)["output_ids"]) for one in self.prompts]
        while not self.llm.engine.flush_cache().success:
            time.sleep(0.001)
        return found


if __name__ == "__main__":
    sys.exit(vllm_job.main(Engine))
