"""The bars that measured numbers are held to. Each function takes what amem-gpu-bench wrote and returns what is wrong, in words;
nothing when the bar is met. Times of the simulated driver mean nothing, so `timed` is false there."""
import statistics

VOTES_MS = 3.0          # all votes of a pause and its resume
FLOOR_TIMES = 1.5       # the direct layout against the raw driver calls for the same allocations, contents apart
STARTUP_PERCENT = 5.0   # to the end of the first collectives, slower than stock
STEADY_PERCENT = 5.0    # the median collective, slower than stock
LEGACY_TIMES = 1.5      # NCCL_CUMEM_ENABLE=0 against 1
SERVED_TIMES = 1.2      # ncclCommSuspend and ncclCommResume of all communicators, served by AMem, against ncclPause and ncclResume
SERVED_FREED = 0.99     # of what ncclPause frees
SERVED_FASTER = 40.0    # than NCCL's own, where that much is held
SERVED_HELD_MIB = 3500.0
REGISTERED_PERCENT = 5.0  # collectives on registered memory that the GPU is busy with, slower than stock
GPU_BOUND_US = 200.0    # shorter ones are launched by PyTorch more slowly than they run, and vary by half between runs of one library
ROLLOUT_SHARE = 0.95    # of parameters, gradients, optimizer states and NCCL's memory that is free in a rollout
ROLLOUT_TIMES = 1.15    # a GiB with all GPUs of a host at once, against one GPU alone
LEFT_MIB = 4.0          # more memory held than with stock, once communicators and registrations are gone


def timed(machine):
    return not machine.get("gpu", "").startswith("Simulated")


def of_cycles(data, timed=True):
    """One run of the benchmark: results and memory after its cycles, and its votes."""
    wrong = []
    if not data.get("cycles"):
        return wrong
    if data["mode"] not in ("floor", "floor-slab") and data.get("identical") is not True:
        wrong.append("results are not bit-identical over the cycles")
    memory = data.get("memory_after_cycles")
    nccls_own = data["mode"] == "native" and data.get("environment", {}).get("AMEM_SUSPEND") == "native"  # what it leaves is no bar of ours
    if memory and not memory["equal"] and not nccls_own:
        wrong.append(f"{memory['first_mib']:.0f} MiB are held after the first cycle and {memory['last_mib']:.0f} after the last")
    if data["mode"] == "amem":
        if not data["median"].get("freed_mib", 0) > 0:
            wrong.append("a pause frees nothing")
        votes = data["median"].get("votes_ms")
        if timed and votes is not None and votes > VOTES_MS:
            wrong.append(f"the votes of a cycle take {votes:.2f} ms (bar: {VOTES_MS:g} ms)")
    return wrong


def contents_apart(data):
    """(pause, resume) of the median cycle in milliseconds, without what copying took beside the driver's calls; None if unknown."""
    found = [((row.get("amem_resumed") or {}).get("contents") or {}) for row in data.get("cycles", [])]
    saves = [c["save_copy_ms"] for c in found if "save_copy_ms" in c]
    restores = [c["restore_ms"] for c in found if "restore_ms" in c]
    if not saves or not restores:
        return None
    return data["median"]["pause_ms"] - statistics.median(saves), data["median"]["resume_ms"] - statistics.median(restores)


def against_floor(data, floor):
    apart = contents_apart(data)
    if apart is None:
        return ["the statistics do not say what copying took"]
    wrong = []
    for what, value in zip(("pause", "resume"), apart):
        bar = FLOOR_TIMES * floor["median"][what + "_ms"]
        if value > bar:
            wrong.append(f"a {what} takes {value:.1f} ms, contents apart (bar: {FLOOR_TIMES:g} times the raw driver calls, {bar:.1f} ms)")
    return wrong


def startup(stock_ms, amem_ms):
    stock, amem = statistics.median(stock_ms), statistics.median(amem_ms)
    slower = 100 * (amem / stock - 1)
    return [f"start-up is {slower:.1f} % slower than stock (bar: {STARTUP_PERCENT:g} %)"] if slower > STARTUP_PERCENT else []


def steady(rows):
    """Of all collectives together: single small ones differ by more from one run of the same library to the next."""
    wrong = []
    for key, when in (("amem_before_us", "before cycles"), ("amem_after_us", "after cycles")):
        slower = 100 * (statistics.median(row[key] / row["stock_before_us"] for row in rows) - 1)
        if slower > STEADY_PERCENT:
            wrong.append(f"the median collective is {slower:.1f} % slower than stock {when} (bar: {STEADY_PERCENT:g} %)")
    return wrong


def legacy(data, of_cumem):
    """Runs with NCCL_CUMEM_ENABLE=0 and with 1."""
    wrong = []
    for what in ("pause_ms", "resume_ms"):
        times = data["median"][what] / of_cumem["median"][what]
        if times > LEGACY_TIMES:
            wrong.append(f"a {what[:-3]} takes {times:.2f} times that with NCCL_CUMEM_ENABLE=1 (bar: {LEGACY_TIMES:g})")
    return wrong


def served(data, amem, native):
    """The same program with its suspends served by AMem (`data`) and by NCCL itself (`native`; None where NCCL has none), and
    ncclPause on the same communicators (`amem`)."""
    wrong = []
    for what, key in (("suspending", "pause_ms"), ("resuming", "resume_ms")):
        times = data["median"][key] / amem["median"][key]
        if times > SERVED_TIMES:
            wrong.append(f"{what} all communicators takes {times:.2f} times what AMem's own call takes (bar: {SERVED_TIMES:g})")
        if native and native["held_mib"] >= SERVED_HELD_MIB:
            faster = native["median"][key] / data["median"][key]
            if faster < SERVED_FASTER:
                wrong.append(f"{what} all communicators is {faster:.1f} times faster than NCCL's own (bar: {SERVED_FASTER:g})")
    freed, bar = data["median"]["freed_mib"], SERVED_FREED * amem["median"]["freed_mib"]
    if freed < bar:
        wrong.append(f"suspending frees {freed:.0f} MiB, and ncclPause {amem['median']['freed_mib']:.0f}")
    return wrong


def registration(data, stock):
    """What registration_job.py wrote under AMem and without it."""
    wrong = []
    for kind, own in data["kinds"].items():
        other = stock["kinds"][kind]
        if own["kernels"] != other["kernels"]:
            wrong.append(f"{kind}: NCCL launched {', '.join(own['kernels'])}, and without AMem {', '.join(other['kernels'])}")
        for key, when in (("us", "before cycles"), ("us_after", "after cycles")):
            slower = [100 * (own[key][name] / time - 1) for name, time in other["us"].items()
                      if name in own.get(key, {}) and (name == "graph" or time >= GPU_BOUND_US)]
            if slower and statistics.median(slower) > REGISTERED_PERCENT:
                wrong.append(f"{kind}: collectives are {statistics.median(slower):.1f} % slower than stock {when} "
                             f"(bar: {REGISTERED_PERCENT:g} %)")
    own, other = (sum(kind["left_mib"] for kind in job["kinds"].values()) for job in (data, stock))
    if own > other + LEFT_MIB:
        wrong.append(f"{own:.0f} MiB are left at the end, and without AMem {other:.0f}")
    return wrong


def rollout(data, timed=True):
    """What rollout_job.py wrote: training with rollouts is the training without, and its memory is free meanwhile."""
    wrong = []
    for name, row in data["strategies"].items():
        for key, what in (("losses_differ", "losses"), ("parameters_differ", "parameters"), ("graph_differs", "replays of a CUDA graph")):
            if row[key]:
                wrong.append(f"{name}: {row[key]} {what} are not those without the offload")
        if data["device"] == "cuda" and row["graph_replays"] != row["cycles"]:
            wrong.append(f"{name}: a CUDA graph was replayed {row['graph_replays']} times in {row['cycles']} rollouts")
        if timed and data["device"] == "cuda" and row["share"] < ROLLOUT_SHARE:
            wrong.append(f"{name}: {100 * row['share']:.1f} % of the memory of training is free in a rollout (bar: {100 * ROLLOUT_SHARE:g} %)")
    return wrong


def rollout_alone(data, alone):
    """All GPUs of a host at once against one of them with as many bytes on it; `alone`: rows by strategy."""
    wrong = []
    for name, row in data["strategies"].items():
        other = alone.get(name, {})
        if other and abs(row["gib"] / other["gib"] - 1) > 0.1:
            wrong.append(f"{name}: {row['gib']:.1f} GiB a GPU cannot be compared with {other['gib']:.1f} GiB on one alone")
            continue
        for key in ("pause_ms", "complete_ms"):
            if key in row and key in other and row[key] > ROLLOUT_TIMES * other[key]:
                wrong.append(f"{name}: {key} is {row[key] / other[key]:.2f} times that of one GPU alone (bar: {ROLLOUT_TIMES:g})")
    return wrong


def of_run(counts, wanted_tests):
    """A run that tried nothing shows nothing."""
    if counts["pass"] + counts["FAIL"] == 0:
        what = f"no test has a name with {wanted_tests} in it, or " if wanted_tests else ""
        return [f"nothing was run: {what}everything was skipped (see --only, --tests, --gpus and --budget)"]
    return []
