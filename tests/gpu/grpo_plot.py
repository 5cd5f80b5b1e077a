#!/usr/bin/env python3
"""Draws GPU memory over time of runs of grpo_job.py, one below the other on one scale. Needs matplotlib.

    python3 grpo_plot.py off.json on.json -o memory.svg [--iterations 3:6]

Rollouts are shaded. --iterations FIRST:LAST draws a part (from 0, the last one excluded).
"""
import argparse
import json
import sys

from matplotlib import figure


def cut(run, first, last):
    """(samples, rollouts) of some iterations, in seconds from the begin of the first: each begins with the phase "synchronize"."""
    phases = run["phases"] + [[run["memory_mib"][-1][0], "synchronize"]]
    starts = [time for time, name in phases if name == "synchronize"]
    begin, end = starts[first], starts[min(last, len(starts) - 1)]
    samples = [(time - begin, mib / 1024) for time, mib in run["memory_mib"] if begin <= time <= end]
    rollouts = [(time - begin, after - begin) for (time, name), (after, _) in zip(phases, phases[1:]) if name == "rollout" and begin <= time < end]
    return samples, rollouts


def title(run):
    name = "with --rl-amem-offload-during-rollout" if run["flag"] else "without the flag"
    return "%s: %s, %d ranks, %.0f million parameters" % (name, run["strategy"].upper(), run["ranks"], run["parameters"] / 1e6)


def draw(runs, first, last):
    """A matplotlib figure with a panel for each run."""
    if not all(run["memory_mib"] for run in runs):
        raise SystemExit("grpo_plot.py: a run has no samples of GPU memory (was it on the CPU?)")
    drawing = figure.Figure(figsize=(9, 2.7 * len(runs)), layout="constrained")
    for run, panel in zip(runs, drawing.subplots(len(runs), sharex=True, sharey=True, squeeze=False)[:, 0]):
        samples, rollouts = cut(run, first, last)
        for rollout in rollouts:
            panel.axvspan(*rollout, color="#f3e3c3")
        panel.plot(*zip(*samples), color="#2563a8")
        panel.set(title=title(run), ylabel="GiB", ylim=(0, None))
        panel.grid(axis="y")
    drawing.supxlabel("seconds; memory used on rank 0's GPU; shaded: rollouts", fontsize="medium")
    return drawing


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="files that grpo_job.py --json wrote")
    parser.add_argument("-o", "--output", default="memory.svg")
    parser.add_argument("--iterations", default="0:1000000", metavar="FIRST:LAST")
    options = parser.parse_args()
    runs = []
    for path in options.runs:
        with open(path, encoding="utf-8") as file:
            runs.append(json.load(file))
    first, _, last = options.iterations.partition(":")
    draw(runs, int(first), int(last)).savefig(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
