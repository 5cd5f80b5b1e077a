"""`amem doctor --measure`: how much memory NCCL holds, and how long it takes, with NCCL_CUMEM_ENABLE=0 and 1, by a small job with each, under AMem.

The job makes communicators over all visible GPUs, reduces, pauses and resumes, and compares the sums. Each setting runs twice, in turns,
because start-ups differ by whatever else the machine does.
"""

import os
import statistics
import time

from . import processes, rank_process

SETTINGS = ("0", "1")
ROUNDS = 2
CYCLES = 4  # the first is not counted
RUN_SECONDS = 90
MOST_RANKS = 8
SAME_BYTES, SAME_SECONDS = 0.03, 0.10  # relative differences that are none


class CannotMeasure(Exception):
    pass


def gpu_count():
    """How many GPUs a job sees here. It leaves no context behind."""
    try:
        count = rank_process.Driver(None).count
    except rank_process.Failed as error:
        raise CannotMeasure("no GPU can be used here: %s" % error) from None
    if count == 0:
        raise CannotMeasure("no GPU is visible here; in a container: start it with the GPUs (--gpus all)")
    return count


def _one(library, nccl, ranks, setting, deadline):
    settings = [{"rank": rank, "size": ranks, "nccl": os.path.abspath(nccl), "cycles": CYCLES} for rank in range(ranks)]
    job = processes.Job("measure_rank", settings, {"NCCL_CUMEM_ENABLE": setting}, library)
    try:
        results = processes.results(job.members, min(deadline, time.monotonic() + RUN_SECONDS))
    finally:
        job.end()
    if failed := processes.first_failure(results):
        return {"failure": failed["failure"]}
    slowest = {key: max(result[key] for result in results) for key in ("start_seconds", "first_seconds", "held_bytes", "device_bytes", "kept_bytes")}
    slowest["freed_bytes"] = min(result["freed_bytes"] for result in results)
    for key in ("pause_seconds", "resume_seconds"):
        of_cycles = [max(cycle) for cycle in zip(*(result[key] for result in results))]
        slowest["first_" + key], slowest[key] = of_cycles[0], statistics.median(of_cycles[1:])
    return {**slowest, "simulated": results[0]["simulated"], "nccl": (results[0]["nccl"] or [""])[0]}


def _together(runs):
    """Of several runs with one setting: the median of each figure, or the failure."""
    failed = next((run for run in runs if "failure" in run), None)
    if failed or not runs:
        return failed or {"failure": "there was no time for it"}
    return {key: statistics.median(run[key] for run in runs) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
            for key, value in runs[0].items()}


def measure(library, nccl, gpus=None, seconds=240):
    """The answer as a dict; see table() and advice(). CannotMeasure where nothing can be measured, in words.

    library, nccl: paths.  gpus: how many; default all that are visible, at most eight.  seconds: for all of it.
    """
    there = gpu_count()
    ranks = min(gpus or MOST_RANKS, there)
    deadline = time.monotonic() + seconds
    runs = {setting: [] for setting in SETTINGS}
    for _ in range(ROUNDS):
        for setting in SETTINGS:
            failed = any("failure" in run for run in runs[setting])
            if not failed and time.monotonic() < deadline:
                runs[setting].append(_one(library, nccl, ranks, setting, deadline))
    settings = {setting: _together(all_runs) for setting, all_runs in runs.items()}
    answer = {"schema": 1, "gpus": ranks, "library": nccl, "simulated": any(one.get("simulated") for one in settings.values()),
              "NCCL_CUMEM_ENABLE": settings, "runs": runs}
    answer["advice"] = advice(answer)
    return answer


def _differences(zero, one):
    """What is better with 0 and with 1: two lists of words, without what is the same."""
    better = {"0": [], "1": []}
    for key, same, least, text in (("held_bytes", SAME_BYTES, 8 << 20, "NCCL holds %s less per GPU"), ("kept_bytes", SAME_BYTES, 8 << 20, "%s less stay in a pause"),
                                   ("start_seconds", SAME_SECONDS, 0.1, "communicators start %s sooner"), ("first_seconds", SAME_SECONDS, 0.1, "the first collectives take %s less"),
                                   ("pause_seconds", SAME_SECONDS, 0.003, "a pause takes %s less"), ("resume_seconds", SAME_SECONDS, 0.003, "a resume takes %s less")):
        difference = zero[key] - one[key]
        if abs(difference) < max(least, same * max(zero[key], one[key])):
            continue
        amount = "%d MiB" % (abs(difference) >> 20 if isinstance(difference, int) else abs(difference) / (1 << 20)) if key.endswith("bytes") else "%.0f ms" % (1e3 * abs(difference))
        better["1" if difference > 0 else "0"].append(text % amount)
    return better


def advice(answer):
    """One sentence."""
    zero, one = (answer["NCCL_CUMEM_ENABLE"][setting] for setting in SETTINGS)
    if "failure" in zero and "failure" in one:
        return "The job ran with neither setting (0: %s; 1: %s)." % (zero["failure"], one["failure"])
    for failed, setting, other in ((zero, "0", "1"), (one, "1", "0")):
        if "failure" in failed:
            return "Set NCCL_CUMEM_ENABLE=%s: with %s the job did not run (%s)." % (other, setting, failed["failure"])
    if answer["simulated"]:
        return "This was the stand-in driver: both settings work under AMem, and its figures say nothing about a GPU."
    better = _differences(zero, one)
    if not better["0"] and not better["1"]:
        return "Leave NCCL_CUMEM_ENABLE as it is: on this machine it makes no difference that could be measured."
    if not better["0"]:
        return "Leave NCCL_CUMEM_ENABLE unset, or 1: %s than with 0." % ", ".join(better["1"])
    if not better["1"]:
        return "Set NCCL_CUMEM_ENABLE=0: %s." % ", ".join(better["0"])
    return "It depends on what counts: with NCCL_CUMEM_ENABLE=0 %s; with 1 %s." % (", ".join(better["0"]), ", ".join(better["1"]))


ROWS = (("NCCL's memory per GPU", "held_bytes"), ("of it kept in a pause", "kept_bytes"), ("of the GPU, by all", "device_bytes"), ("freed by a pause", "freed_bytes"),
        ("communicators", "start_seconds"), ("first collectives", "first_seconds"), ("first pause", "first_pause_seconds"), ("later pauses", "pause_seconds"),
        ("resume", "resume_seconds"))


def table(answer):
    """The answer for people."""
    settings = answer["NCCL_CUMEM_ENABLE"]
    nccl = next((one["nccl"] for one in settings.values() if one.get("nccl")), "of unknown version")
    lines = ["%sNCCL %s on %d GPU%s, %d communicators, slowest rank, medians" % ("SIMULATED: " if answer["simulated"] else "", nccl, answer["gpus"], "s" if answer["gpus"] > 1 else "", 4),
             "%-24s%16s%16s" % ("NCCL_CUMEM_ENABLE", *SETTINGS)]
    for text, key in ROWS:
        cells = ["-" if key not in settings[setting] else ("%d MiB" % (int(settings[setting][key]) >> 20) if key.endswith("bytes") else "%.1f ms" % (1e3 * settings[setting][key]))
                 for setting in SETTINGS]
        lines.append("%-24s%16s%16s" % (text, *cells))
    lines += ["with %s: %s" % (setting, one["failure"]) for setting, one in settings.items() if "failure" in one]
    if answer["gpus"] == 1:
        lines.append("One GPU: NCCL shares nothing here, so the figures are smaller than those of a job with several.")
    return "\n".join(lines + [answer["advice"]])
