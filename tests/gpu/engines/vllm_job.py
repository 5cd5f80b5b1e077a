#!/usr/bin/env python3
"""One vLLM that sleeps and wakes up: how long it takes, what is left on the GPU, and whether it says the same afterwards.

    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so python3 vllm_job.py --backend amem --tp 1 --json FILE

Its model is a Llama of this file's making with random weights, so that nothing is downloaded. Cycles are of sleep levels 1 and 2, woken up at once
and by tag, at level 1 in both orders; at level 2 other weights are loaded by collective_rpc between. Greedy tokens are compared with those of the same weights before.
--one-gpu has all ranks on the first GPU, for which NCCL must be of 2.30 or later. --failures: a wake-up into a full GPU and its second try, a rank that is
stopped while the engine falls asleep, and one that is killed. With --tool the report says whose the memory is that a sleep leaves, and what each
phase of it took; --freezes N freezes the ranks off the GPUs and thaws them from outside, N times asleep and N times awake. Each step has a time limit and each process an alarm; the report is written after every step. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import concurrent.futures
import contextlib
import glob
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
CLOSE = 32 * MIB  # of an account to what the driver says
# At level 2 the weights come first: vLLM 0.25.1 writes the model's buffers back at whichever wake-up is the first.
ORDERS = ((1, ("weights", "kv_cache")), (1, ("kv_cache", "weights")), (2, ("weights", "kv_cache")))
TIMED = 6  # cycles at level 1, woken up at once: the first, and those of which medians are taken
PROMPTS = [{"prompt_token_ids": [(7 * prompt + 13 * place) % 997 + 3 for place in range(16)]} for prompt in range(4)]
ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
               "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

# Takes all memory of a GPU but so many MiB until its standard input ends.
FILLER = """
import ctypes, sys
cuda, free, total, context, here = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p(), ctypes.c_uint64()
device, left = int(sys.argv[1]), int(sys.argv[2]) << 20
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and cuda.cuCtxSetCurrent(context) == 0
size = 1 << 34
while size >= 1 << 21:
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    if free.value < size + left or cuda.cuMemAlloc_v2(ctypes.byref(here), ctypes.c_size_t(size)) != 0:
        size //= 2
print("full", flush=True)
sys.stdin.read()
"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="amem", choices=("amem", "cumem", "torch_memory_saver"), help="cumem is vLLM's own")
    parser.add_argument("--tp", type=int, default=1, help="ranks (default 1)")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--failures", default="", help="of full, stopped, killed")
    parser.add_argument("--tool", default="", help="amem-replay, which is asked while the engine sleeps")
    parser.add_argument("--freezes", type=int, default=0, help="needs --tool, and AMEM_SCOPE=all for what is under no tag")
    parser.add_argument("--freezes-between", type=int, default=0, help="as many while it answers requests, between launches, its CUDA graphs' too: with AMEM_SCOPE=all")
    parser.add_argument("--custom-all-reduce", action="store_true", help="vLLM's own kernels, which share memory by cudaIpc; ranks need GPUs of their own")
    parser.add_argument("--attention", default="triton", help="SGLang's attention backend (default triton)")
    parser.add_argument("--eager", action="store_true", help="SGLang captures no CUDA graphs")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--cache-mib", type=int, default=8192, help="KV cache of all ranks (default 8192)")
    parser.add_argument("--time-limit", type=int, default=240, help="seconds for everything")
    parser.add_argument("--step-limit", type=int, default=60, help="seconds for one step; the start has three times that")
    parser.add_argument("--json", default="", help="the report goes there after every step")
    return parser.parse_args()


class OutOfTime(Exception):
    """A step did not end within its limit; what it left behind is not known."""


class Report:
    """What was tried and how it ended, on disk after every step."""

    def __init__(self, options):
        self.path, self.limit = options.json, options.step_limit
        self.data = {"program": "vllm_job", "ok": False, "backend": options.backend, "ranks": options.tp, "one_gpu": options.one_gpu, "steps": []}

    def save(self):
        if self.path:
            with open(self.path + ".part", "w", encoding="utf-8") as file:
                json.dump(self.data, file)
            os.replace(self.path + ".part", self.path)

    def step(self, name, function, times=1):
        """Runs function() within `times` times the limit of a step. Its result; None if it failed, which the report says."""
        began, row = time.monotonic(), {"name": name, "ok": False}
        self.data["steps"].append(row)
        self.save()
        signal.setitimer(signal.ITIMER_REAL, times * self.limit)
        try:
            found = function()
            row["ok"] = True
            return found
        except Exception as error:  # the next steps are tried all the same
            row["error"] = "%s: %s" % (type(error).__name__, error)
            if isinstance(error, OutOfTime):
                raise
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            row["seconds"] = round(time.monotonic() - began, 2)
            self.save()
            print("%s: %s %.1f s %s" % (name, "ok" if row["ok"] else "FAILED", row["seconds"], row.get("error", "")), flush=True)


def out_of_time(*_):
    raise OutOfTime("this step did not end within its limit")


def used_mib():
    """Of the fullest GPU, whoever uses it."""
    import pynvml

    pynvml.nvmlInit()
    rows = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(one)) for one in range(pynvml.nvmlDeviceGetCount())]
    return max(row.used for row in rows) // MIB


def holders():
    """{pid: MiB} of the processes that hold memory of a GPU."""
    import pynvml

    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(one) for one in range(pynvml.nvmlDeviceGetCount())]
    return {one.pid: (one.usedGpuMemory or 0) // MIB for gpu in gpus for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}


def settled_mib(limit=20):
    """used_mib() once it is the same for a second: a process that ended a moment ago may still give memory back."""
    end, last, since = time.monotonic() + limit, used_mib(), time.monotonic()
    while time.monotonic() < min(end, since + 1):
        time.sleep(0.1)
        now = used_mib()
        if now != last:
            last, since = now, time.monotonic()
    return last


def check(good, text):
    if not good:
        raise AssertionError(text)


def model_folder(parent, layers, width=4096):
    """A Llama's configuration; vLLM makes its weights up (load_format dummy)."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
              "num_attention_heads": width // 128, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    folder = os.path.join(parent, "model")
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    return folder


def choose_backend(name):
    """Of vLLM's sleep mode: 0.25.1 has the choice but no option for it."""
    from vllm.engine.arg_utils import EngineArgs

    make = EngineArgs.create_model_config

    def with_backend(engine_arguments):
        config = make(engine_arguments)
        config.sleep_mode_backend = name
        return config

    EngineArgs.create_model_config = with_backend


class Engine:
    """vLLM, and what it said with each of two sets of weights."""

    def __init__(self, options, folder):
        import vllm

        self.version = vllm.__version__
        choose_backend(options.backend)
        more = {"distributed_executor_backend": "mp"} if options.tp > 1 else {}
        if options.one_gpu and options.tp > 1:
            more["worker_cls"] = "vllm_worker.SharedGpuWorker"
        self.llm = vllm.LLM(
            model=model_folder(folder, options.layers), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", tensor_parallel_size=options.tp,
            enable_sleep_mode=True, max_model_len=1024, max_num_seqs=8, gpu_memory_utilization=0.1, enable_prefix_caching=False, seed=0,
            kv_cache_memory_bytes=options.cache_mib * MIB // options.tp, disable_custom_all_reduce=not options.custom_all_reduce, worker_extension_cls="vllm_worker.Calls",
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}, **more)
        # Ranks that share a GPU take turns on it, a few milliseconds for each all-reduce: few tokens are enough there.
        few = options.one_gpu and options.tp > 1
        self.prompts = PROMPTS[:2] if few else PROMPTS
        self.sampling = vllm.SamplingParams(temperature=0, max_tokens=4 if few else 24, ignore_eos=True, detokenize=False)
        self.said, self.seed = {}, None

    def rpc(self, name, *values):
        return self.llm.collective_rpc(name, args=values)

    def load(self, seed):
        self.rpc("engines_load", seed)
        self.seed = seed

    def tokens(self):
        """Of one prompt after the other: which of several requests share a batch depends on when they come, and what is rounded how on that."""
        return [list(self.llm.generate([one], self.sampling, use_tqdm=False)[0].outputs[0].token_ids) for one in self.prompts]

    def learn(self):
        for seed in (1, 2):
            self.load(seed)
            self.tokens()  # kernels that are compiled or chosen at their first use
            self.said[seed] = self.tokens()
            self.compare("twice in a row")
        check(self.said[1] != self.said[2], "two sets of weights give the same tokens, so that comparing tokens shows nothing")
        self.load(1)
        self.compare("once they were loaded again")

    def compare(self, when="after a sleep"):
        now = self.tokens()
        pairs = [pair for one, other in zip(now, self.said[self.seed]) for pair in zip(one, other)]
        differing = sum(a != b for a, b in pairs)
        check(now == self.said[self.seed], "%d of %d tokens differ from those of the same weights, %s" % (differing, len(pairs), when))


def timed(function, *values):
    began = time.monotonic()
    function(*values)
    return 1e3 * (time.monotonic() - began)


def cycle(engine, number, before):
    """One sleep and wake-up; {level, tags, sleep_ms, wake_ms, left_mib}."""
    level, order = (1, None) if number < TIMED else ORDERS[(number - TIMED) % len(ORDERS)]
    row = {"level": level, "tags": order, "sleep_ms": timed(engine.llm.sleep, level), "left_mib": used_mib() - before}
    if order is None:
        row["wake_ms"] = timed(engine.llm.wake_up)
    else:
        row["wake_ms"] = 0.0
        for tag in order:
            row["wake_ms"] += timed(engine.llm.wake_up, [tag])
            if level == 2 and tag == "weights":
                engine.load(3 - engine.seed)
    engine.compare()
    return row


def cycles(engine, options, report, before):
    report.data["cycles"] = rows = []
    for number in range(options.cycles):
        row = report.step("cycle %d" % number, lambda number=number: cycle(engine, number, before))
        if row is None:
            return
        rows.append({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()})
        later = rows[1:TIMED]
        if later:
            report.data["summary"] = {"first_sleep_ms": rows[0]["sleep_ms"], "sleep_ms": statistics.median(one["sleep_ms"] for one in later),
                                      "first_wake_ms": rows[0]["wake_ms"], "wake_ms": statistics.median(one["wake_ms"] for one in later),
                                      "left_mib": max(one["left_mib"] for one in later), "awake_mib": report.data["awake_mib"]}


def last_pauses(text):
    """What each phase of the last pause took, a line for each tag of each process, from `amem log --json`."""
    tags, pauses, under_way = {}, {}, {}
    for row in map(json.loads, text.splitlines()):
        session, pool = row["session"], row.get("pool", 0)
        if row["kind"] == "pool-opened":
            tags[session, pool] = row["pool_tag"]
            continue
        phase, began = under_way.pop((session, pool), (None, 0))
        if phase:
            pauses[session, pool][phase] = pauses[session, pool].get(phase, 0) + (row["time_ns"] - began) / 1e6
        if row["kind"] == "phase-begun" and row["phase"].startswith("pause: "):
            if row["phase"] == "pause: arrive" and phase != "arrive":
                pauses[session, pool] = {}
            under_way[session, pool] = row["phase"][7:], row["time_ns"]
    return ["%s %s: %s ms" % (key[0][:4], tags.get(key, "nccl"), ", ".join("%s %.1f" % one for one in found.items())) for key, found in pauses.items()]


def checked_account(before, account):
    """Of a rank alone on its GPU, with the kinds in MiB: what a sleep took and left is what the driver had given out, to CLOSE bytes."""
    left = sum(account["left"].values())
    off = {"taken and left": before - account["taken"] - left, "left": left - account["driver"]}
    check(max(map(abs, off.values())) <= CLOSE, "the account of a sleep is off by %s bytes: %s, used before %d" % (off, account, before))
    return {"used_mib": before >> 20, "taken_mib": account["taken"] >> 20, "left_mib": {kind: size >> 20 for kind, size in account["left"].items()},
            "off_bytes": off}


def asleep(engine, tool, alone):
    """While it sleeps: what AMem's tags hold and took, whose the memory is that is left, its account, and what each phase took."""
    before = engine.rpc("engines_used")
    engine.llm.sleep(1)
    found = {"tags": engine.rpc("engines_memory")}
    if alone:
        found["account"] = [checked_account(*row) for row in zip(before, engine.rpc("engines_account"))]
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    for name, command in (("left", ["top", "--gpu"]), ("phases", ["log", "--json", *("--kind=" + kind for kind in ("phase-begun", "cycle-done", "pool-opened"))])):
        if tool:
            ran = subprocess.run([tool, *command], env=environment, capture_output=True, text=True, timeout=30, check=False)
            found[name] = (last_pauses(ran.stdout) if name == "phases" else ran.stdout.splitlines()) if ran.returncode == 0 else [ran.stderr[-300:]]
    engine.llm.wake_up()
    engine.compare()
    return found


def frozen(engine, workers, options, before, sleeping):
    """From outside, while all ranks make safe points: {freeze_ms, thaw_ms, frozen_mib, holders, steps_ms, notes}. The same tokens afterwards."""
    if sleeping:
        engine.llm.sleep(1)
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(1) as beside:
        enough = os.path.join(folder, "enough")
        outside = beside.submit(freeze_and_thaw, options.tool, [str(one["pid"]) for one in workers], before, enough)
        engine.rpc("engines_safepoints", enough, options.step_limit)
        row = outside.result()
    if sleeping:
        engine.llm.wake_up()
    engine.compare("after a freeze")
    return {"asleep": sleeping, **row}


def frozen_between(engine, workers, options, before):
    """From outside, while it answers requests and makes no safe point. All answers are the same, and there is at least one before and one after. With
    custom all-reduce, whose memory the ranks share and only vLLM knows when it uses, the freeze must be refused by name."""
    answers = {False: 0, True: 0}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(1) as beside:
        enough = os.path.join(folder, "enough")
        engine.compare("before a freeze between launches")
        outside = beside.submit(freeze_and_thaw, options.tool, [str(one["pid"]) for one in workers], before, enough, "--between-launches")
        while not (answers[True] and outside.done()):
            thawed = os.path.exists(enough)
            engine.compare("while it was frozen and thawed")
            answers[thawed] += 1
        if options.custom_all_reduce and options.tp > 1:
            said = str(outside.exception() or "nothing")
            check("still shares" in said, "a freeze with custom all-reduce was not refused for what the ranks share, but said: " + said)
            return {"asleep": False, "between_launches": True, "answers": [answers[False], answers[True]], "refused": said[said.index("still shares"):][:300]}
        row = outside.result()
    return {"asleep": False, "between_launches": True, "answers": [answers[False], answers[True]], **row}


def freeze_and_thaw(tool, pids, before, enough, *how):
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    row = {"steps_ms": {}, "notes": []}
    try:
        for command in ("freeze", "thaw"):
            began = time.monotonic()
            ran = subprocess.run([tool, command, "--json", *(how if command == "freeze" else ()), *pids], env=environment, capture_output=True, text=True, check=False)
            row[command + "_ms"] = round(1e3 * (time.monotonic() - began), 1)
            check(ran.returncode == 0, "%s ended with %d: %s %s" % (command, ran.returncode, ran.stdout[-1500:], ran.stderr[-500:]))
            answer = json.loads(ran.stdout)
            row["steps_ms"].update({"%s: %s" % (command, one["step"]): round(one["ms"], 1) for one in answer["times"]})
            row["notes"] += answer["notes"]
            if command == "freeze":
                row["frozen_mib"], row["holders"] = settled_mib() - before, holders()
    finally:
        with open(enough, "w", encoding="utf-8"):
            pass
    return row


# ---- failures -------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_gpu(left_mib=64):
    """Another program holds nearly all that is free on the first GPU."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    filler = subprocess.Popen([sys.executable, "-c", FILLER, "0", str(left_mib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        check(filler.stdout.readline().strip() == b"full", "the GPU could not be filled")
        yield
    finally:
        filler.stdin.close()
        filler.wait()


def said_by(function):
    """The text of the error that function() must raise."""
    try:
        function()
    except OutOfTime:
        raise
    except Exception as error:  # vLLM hands on the text of its workers
        return "%s: %s" % (type(error).__name__, error)
    raise AssertionError("it succeeded")


def wake_up_into_a_full_gpu(engine, _workers):
    engine.llm.sleep(1)
    with full_gpu():
        text = said_by(engine.llm.wake_up)
    take_stale_answers(engine)
    engine.llm.wake_up()
    engine.compare()
    return text


def take_stale_answers(engine):
    """After a call that failed on one rank vLLM does not read the answers of those behind it, and takes each for that of a later call: as many
    calls later as such calls had failed before. Of each failure that is taken so, the ranks behind it fall back by one more."""
    for _ in range(STALE):
        try:
            engine.rpc("engines_about")
        except OutOfTime:
            raise
        except Exception:  # of the engine's process: vLLM raises no narrower type
            pass


def rank_that_is_stopped(engine, workers):
    """It stops as its sleep begins: for one that was stopped before, vLLM waits without end when it empties its caches, before anything of AMem's."""
    engine.rpc("engines_stop_in_sleep", len(workers) - 1)
    try:
        text = said_by(lambda: engine.llm.sleep(1))
    finally:
        os.kill(workers[-1], signal.SIGCONT)
    take_stale_answers(engine)
    engine.llm.wake_up(["scheduling"])  # a sleep stops vLLM's scheduler first
    engine.compare()
    engine.llm.sleep(1)
    engine.llm.wake_up()
    engine.compare()
    return text


def rank_that_is_killed(engine, workers):
    """The engine says so in time, and the others end."""
    os.kill(workers[-1], signal.SIGKILL)
    text = said_by(lambda: (engine.llm.sleep(1), engine.llm.wake_up(), engine.tokens()))
    end = time.monotonic() + 30
    while any(lives(pid) for pid in workers):
        check(time.monotonic() < end, "ranks live 30 s after one of them was killed: %s" % [pid for pid in workers if lives(pid)])
        time.sleep(0.2)
    return text


def descendants(pid):
    for path in glob.glob("/proc/%d/task/*/children" % pid):
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            for child in map(int, file.read().split()):
                yield child
                yield from descendants(child)


def lives(pid):
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


STALE = 8  # calls that take all answers of two ranks after three failures, and of four after one
FAILURES = {"full": wake_up_into_a_full_gpu, "stopped": rank_that_is_stopped, "killed": rank_that_is_killed}


def job(options, report, make):
    with tempfile.TemporaryDirectory() as folder:
        before = settled_mib()
        engine = report.step("start", lambda: make(options, folder), times=3)
        if engine is None:
            return
        ready = time.time()
        report.data["version"] = engine.version
        workers = report.step("workers", lambda: engine.rpc("engines_about")) or []
        report.data["workers"] = workers
        if workers and all("began" in one for one in workers):
            report.data["start_of_workers_s"] = round(ready - min(one["began"] for one in workers), 2)
        if report.step("two sets of weights", lambda: engine.learn() or True) is None:
            return
        report.data["awake_mib"] = used_mib() - before
        cycles(engine, options, report, before)
        if options.backend == "amem":
            report.data["asleep"] = report.step("asleep", lambda: asleep(engine, options.tool, options.tp == 1 or not options.one_gpu))
        report.data["frozen"] = [report.step("frozen %s" % ("asleep" if sleeping else "awake"), lambda sleeping=sleeping: frozen(engine, workers, options, before, sleeping))
                                 for sleeping in options.freezes * [True] + options.freezes * [False]]
        report.data["frozen"] += [report.step("frozen between launches", lambda: frozen_between(engine, workers, options, before)) for _ in range(options.freezes_between)]
        report.data["messages"] = {}
        for name in filter(None, options.failures.split(",")):
            text = report.step(name, lambda name=name: FAILURES[name](engine, [one["pid"] for one in workers]))
            report.data["messages"][name] = text
        report.data["ok"] = all(row["ok"] for row in report.data["steps"])


def main(make=Engine):
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("%s: refused: NCCL_NVLS_ENABLE must be 0" % os.path.basename(sys.argv[0]), file=sys.stderr)
        return 2
    options = arguments()
    os.environ["ENGINES_END"] = str(time.time() + options.time_limit)
    os.environ["PYTHONPATH"] = ":".join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, HERE)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGALRM, out_of_time)
    report = Report(options)
    try:
        job(options, report, make)
    except OutOfTime:
        report.data["error"] = "%s did not end in time" % report.data["steps"][-1]["name"]
    failed = [row["name"] + ": " + row.get("error", "") for row in report.data["steps"] if not row["ok"]]
    report.data.setdefault("error", "; ".join(failed))
    report.save()
    print(json.dumps(report.data), flush=True)
    for pid in list(descendants(os.getpid())):  # taking a broken engine down in order could hang
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0 if report.data["ok"] else 1)


if __name__ == "__main__":
    sys.exit(main())
