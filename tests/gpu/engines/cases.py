"""Part `engines` of run_gpu_tests: real inference engines that sleep and wake up, with AMem and with what else they can do it with.

Each case is one run of vllm_job.py, sglang_job.py or rl_loop.py. AMem's is held against vLLM's own allocator, and against torch_memory_saver where that is installed, in
the same run: at least as fast in every cell, the first sleep at least FIRST_TIMES as fast, less memory left wherever NCCL holds any. Loops of
reinforcement learning compute the same to the last bit."""
import concurrent.futures
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.abspath(os.path.join(HERE, "..", "..", "..", "ncclpatch", "python"))
FIRST_TIMES = 10.0  # AMem's first sleep against the rival's
NOISE = 1.03        # of the medians of five
COLUMNS = (("first_sleep_ms", "first sleep"), ("sleep_ms", "sleep"), ("first_wake_ms", "first wake-up"), ("wake_ms", "wake-up"), ("left_mib", "MiB left"),
           ("awake_mib", "MiB awake"))
SECONDS = {1: 180, 2: 330, 4: 420}  # that a case may take, by its ranks
STARTS = 3       # times that vLLM starts PAIRS times with AMem and as often without, all at once
PAIRS = 2        # four starts take 65 GiB of the GPU
MORE_START = 1.02


def has(python, module):
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(%r) is None)" % module
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def all_cases(gpus, second):
    """(name, ranks, on one GPU), the most telling ones first."""
    found = [("vLLM, TP=1", 1, True)]
    found += [("vLLM, TP=2 on one GPU", 2, True)] if second else []
    found += [("vLLM, TP=2 on two GPUs", 2, False)] if gpus >= 2 else []
    found += [("vLLM, TP=4 on one GPU", 4, True)] if second else []
    return found


def entry_points(folder):
    """What an installed wheel has beside the package: in a tree the entry points are only in pyproject.toml."""
    try:
        importlib.metadata.distribution("amem-nccl")
        points = ""
    except importlib.metadata.PackageNotFoundError:
        points = ("[vllm.general_plugins]\namem = amem_plugins:vllm\n[torch.backends]\namem = amem_plugins:attach\n"
                  "[sglang.srt.plugins]\namem = amem_plugins:sglang\n")
    ours = "[vllm.general_plugins]\nengines_test = vllm_worker:plugin\n[sglang.srt.plugins]\nengines_test = sglang_worker:plugin\n"
    for name, text in (("amem_nccl", points), ("amem_engines_test", ours)):
        if text:
            place = os.path.join(folder, name + "-0.dist-info")
            os.makedirs(place, exist_ok=True)
            for file, content in (("METADATA", "Metadata-Version: 2.1\nName: %s\nVersion: 0\n" % name.replace("_", "-")), ("entry_points.txt", text)):
                with open(os.path.join(place, file), "w", encoding="utf-8") as out:
                    out.write(content)


def environment_of(run, job, backend, ranks, one_gpu, scope=""):
    folder = os.path.join(run.scratch, "engines")
    entry_points(folder)
    preload = [os.path.join(os.path.dirname(run.patched), "libamem_nccl.so")] if backend == "amem" or scope else []
    more = {"AMEM_ENABLE": "1"} if backend == "amem" and job[0] == "sglang_job.py" else {}
    more.update({"AMEM_SCOPE": scope} if scope else {})
    if scope and "--freezes-between" not in job:  # between launches a program may use what ncclMemAlloc gave it
        more["AMEM_USER_MEMORY"] = "release"
    if one_gpu and ranks > 1:
        preload.append(os.path.abspath(run.options.second))
        more["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if preload:
        more["LD_PRELOAD"] = ":".join(preload)
    return {"PYTHONPATH": ":".join(filter(None, [HERE, folder, PACKAGE, os.environ.get("PYTHONPATH", "")])), "AMEM_TIMEOUT_MS": "8000",
            "AMEM_LIBRARY": os.path.join(os.path.dirname(run.patched), "libamem_nccl.so"), **more}


def engine_command(run, script, backend, ranks):
    cycles = run.options.cycles if backend == "amem" else min(8, run.options.cycles)
    failures = {1: "full", 2: "full,stopped,killed"}.get(ranks, "") if backend == "amem" and script == "vllm_job.py" else ""
    return [script, "--tp", str(ranks), "--step-limit", str(30 * max(2, ranks)), "--cycles", str(cycles), "--failures", failures, "--tool", os.path.join(run.build, "bin", "amem-replay")]


def one_case(run, gpus, name, backend, ranks, one_gpu, job, scope=""):
    """The report of one run of `job`, a script and its options, or None where it is not wanted, there was no time for it, or it wrote nothing."""
    return at_once(run, gpus, [(name, backend, ranks, one_gpu, job, scope)])[0]


def at_once(run, gpus, rows):
    """The reports of cases, each with one_case's arguments, that run at the same time; None for each unless all of them are wanted."""
    wanted = all(not run.options.tests or any(text in row[0].replace(",", "") for text in run.options.tests.split(",")) for row in rows)
    if not wanted or run.skip_for_time("engines", rows[0][0], gpus, max(SECONDS[row[2]] for row in rows) / 2):
        return [None] * len(rows)
    limit = min(max(SECONDS[row[2]] for row in rows), run.left() - 12)
    files = [os.path.join(run.scratch, "engines-%d-%d.json" % (len(run.steps), place)) for place in range(len(rows))]
    run.new_journal()

    def call(row, file):
        _, backend, ranks, one_gpu, job, scope = row
        command = [run.options.python, os.path.join(HERE, job[0]), *job[1:], "--backend", backend, "--time-limit", "%.0f" % (limit - 5), "--json", file,
                   *(["--one-gpu"] if one_gpu else [])]
        began = time.monotonic()
        return run.call(command, limit, environment_of(run, job, backend, ranks, one_gpu, scope), echo=False)[0], time.monotonic() - began

    if len(rows) == 1:  # in this thread, which Ctrl-C interrupts
        ended = [call(rows[0], files[0])]
    else:
        with concurrent.futures.ThreadPoolExecutor(len(rows)) as pool:
            ended = list(pool.map(call, rows, files))
    reports = [judged(run, gpus, row[0], file, *how) for row, file, how in zip(rows, files, ended)]
    print("\n".join(["", *table(run.steps)]), flush=True)
    return reports


def judged(run, gpus, name, file, code, seconds):
    data = None
    if os.path.exists(file):
        with open(file, encoding="utf-8") as source:
            data = json.load(source)
    good = code == 0 and data is not None and data["ok"]
    under_way = ", ".join(row["name"] for row in (data or {}).get("steps", [])[-1:] if "name" in row)
    reason = "" if good else (data or {}).get("error") or "ended with exit code %s in: %s" % (code, under_way or "nothing that it reported")
    run.step("engines", name, gpus, "pass" if good else "FAIL", reason, seconds, {**data, "file": file} if data else None)
    return data and {**data, "file": file}


def loops(run, gpus):
    """A trainer and a vLLM that take turns in the same processes: with vLLM's own allocator, then with AMem."""
    ranks, one_gpu = 2 if run.options.second or gpus >= 2 else 1, gpus < 2
    for name, trainer in (("RL loop, FSDP2 and vLLM", "bare"), ("TRL's GRPOTrainer, vLLM colocated", "trl")):
        if trainer == "trl" and not has(run.options.python, "trl"):
            run.step("engines", name, gpus, "SKIPPED", "%s has no trl" % run.options.python)
            continue
        job = ["rl_loop.py", "--trainer", trainer, "--ranks", str(ranks)]
        plain = one_case(run, gpus, name + ", cumem", "cumem", ranks, one_gpu, job)
        if plain and plain["ok"]:
            one_case(run, gpus, name + ", amem", "amem", ranks, one_gpu, [*job, "--same-as", plain["file"]])


def whole_process(run, gpus):
    """All memory of vLLM's ranks is AMem's, and custom all-reduce shares some of it where they have GPUs of their own: sleeps, freezes, and its start."""
    ranks = min(gpus, 2)
    job = ["vllm_job.py", "--tp", str(ranks), "--tool", os.path.join(run.build, "bin", "amem-replay"), *["--custom-all-reduce"] * (ranks > 1)]
    one_case(run, gpus, "vLLM, TP=%d, frozen, amem" % ranks, "amem", ranks, False, job + ["--cycles", "6", "--freezes", "2"], "all")
    between = [one for one in job if one != "--custom-all-reduce"] + ["--cycles", "1", "--freezes-between"]
    one_case(run, gpus, "vLLM, TP=%d, frozen between launches, amem" % ranks, "amem", ranks, False, between + ["3"], "all")
    if ranks > 1:
        refused = between + ["1", "--custom-all-reduce"]
        one_case(run, gpus, "vLLM, TP=%d, custom all-reduce, a freeze between launches refused, amem" % ranks, "amem", ranks, False, refused, "all")
    starts(run, gpus)


def starts(run, gpus):
    """vLLM's start in scope all against stock, PAIRS of both at the same time: the speed of a processor changes by a tenth from one minute to the next."""
    job, found = ["vllm_job.py", "--cycles", "0"], {"": [], "all": []}
    for turn in range(STARTS + 1):
        rows = [("vLLM, start %d.%d%s" % (turn, pair, scope and ", scope " + scope), "cumem", 1, True, job, scope) for pair in range(PAIRS) for scope in found]
        reports = at_once(run, gpus, rows if turn else rows[:1])
        if turn and all(report and report["ok"] for report in reports):  # before the first turn one start fills the caches of files
            for report, row in zip(reports, rows):
                found[row[-1]].append(report)
    if len(found["all"]) == STARTS * PAIRS:
        whole, workers = ({scope: [read(report) for report in reports] for scope, reports in found.items()}
                          for read in (lambda report: report["steps"][0]["seconds"], lambda report: report["start_of_workers_s"]))
        ratio = statistics.median(mine / other for mine, other in zip(whole["all"], whole[""]))
        run.step("engines", "vLLM, start, scope all against stock", gpus, "pass" if ratio <= MORE_START else "FAIL",
                 "%.3f times, medians %.1f and %.1f s, fastest %.1f and %.1f; from where the worker begins, behind all imports, medians %.2f and %.2f s"
                 % (ratio, *(pick(whole[scope]) for pick in (statistics.median, min) for scope in ("all", "")),
                    *(statistics.median(workers[scope]) for scope in ("all", ""))))


def part(run, gpus):
    if not has(run.options.python, "vllm"):
        run.step("engines", "vLLM", gpus, "SKIPPED", "%s has no vllm" % run.options.python)
    else:
        if not run.options.second:
            run.step("engines", "vLLM, several ranks on one GPU", gpus, "SKIPPED", "needs --second, a stock libnccl.so.2 of 2.30 or later")
        savers = ("torch_memory_saver",) if has(run.options.python, "torch_memory_saver") else ()
        race(run, gpus, "vllm_job.py", (("cumem", "amem"), savers), all_cases(gpus, run.options.second))
        loops(run, gpus)
        whole_process(run, gpus)
    if not has(run.options.python, "sglang"):
        run.step("engines", "SGLang", gpus, "SKIPPED", "%s has no sglang" % run.options.python)
    else:
        race(run, gpus, "sglang_job.py", (("torch_memory_saver", "amem"),), [("SGLang, TP=1", 1, True), ("SGLang, TP=2 on two GPUs", 2, False)][:gpus])


def race(run, gpus, script, turns, cases):
    """Each case (name, ranks, on one GPU) with the backends of one turn after the other; AMem's run is held against each rival's."""
    found = {}
    for backends in turns:
        for case in cases:
            for backend in backends:
                found[case, backend] = one_case(run, gpus, "%s, %s" % (case[0], backend), backend, *case[1:], engine_command(run, script, backend, case[1]))
            for rival in set(backends) - {"amem"}:
                hold_against(run, gpus, case[0], found[case, "amem"], rival, found[case, rival])


def hold_against(run, gpus, name, mine, rival, theirs):
    if (mine or {}).get("summary") and (theirs or {}).get("summary"):
        wrong = slower(mine, theirs)
        run.step("engines", "%s, AMem against %s" % (name, rival), gpus, "FAIL" if wrong else "pass", "; ".join(wrong))


def slower(mine, theirs):
    """Where AMem's summary is not as good as the rival's, in words."""
    ours, other, wrong = mine["summary"], theirs["summary"], []
    for key, what in (("sleep_ms", "a sleep"), ("wake_ms", "a wake-up"), ("first_wake_ms", "the first wake-up")):
        if ours[key] > NOISE * other[key]:
            wrong.append("%s takes %.0f ms, and %.0f" % (what, ours[key], other[key]))
    if FIRST_TIMES * ours["first_sleep_ms"] > other["first_sleep_ms"]:
        wrong.append("the first sleep takes %.0f ms, and %.0f (bar: a tenth)" % (ours["first_sleep_ms"], other["first_sleep_ms"]))
    if mine["ranks"] > 1 and ours["left_mib"] >= other["left_mib"]:
        wrong.append("%d MiB are left, and %d" % (ours["left_mib"], other["left_mib"]))
    return wrong


def table(steps):
    """What each engine took, a line each; nothing where no case has come so far."""
    reports = [step for step in steps if step["part"] == "engines" and step["data"]]
    rows = [step for step in reports if step["data"].get("summary")]
    lines = ["%s: the same to the last bit as without AMem; %s" % (step["name"], step["data"]["steps"][-1] if step["data"].get("steps") else "")
             for step in reports if step["data"].get("program") == "rl_loop" and step["data"]["backend"] == "amem" and step["outcome"] == "pass"]
    if not rows:
        return lines
    width = max(len(step["name"]) for step in rows)
    lines += ["%-*s %s" % (width, "engines (ms; medians of five)", " ".join("%13s" % what for _, what in COLUMNS))]
    for step in rows:
        lines.append("%-*s %s" % (width, step["name"], " ".join("%13.0f" % step["data"]["summary"][key] for key, _ in COLUMNS)))
    for step in rows:
        for row in filter(None, step["data"].get("frozen") or []):
            if "refused" in row:
                lines.append("%s: refused, %s" % (step["name"], row["refused"]))
                continue
            how = "between launches" if row.get("between_launches") else "asleep" if row["asleep"] else "awake"
            lines.append("%s, %s: freeze %.0f ms, thaw %.0f ms, %d MiB while frozen; %s" % (step["name"], how, row["freeze_ms"], row["thaw_ms"], row["frozen_mib"], row["steps_ms"]))
        for failure, text in (step["data"].get("messages") or {}).items():
            lines.append("%s, %s: %s" % (step["name"], failure, (text or "no message")[:600]))
        for what in ("left", "phases"):
            lines += ["%s, asleep: %s" % (step["name"], line) for line in ((step["data"].get("asleep") or {}).get(what) or [])[:14]]
    return lines
