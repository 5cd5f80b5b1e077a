#!/usr/bin/env python3
"""From the benchmark's JSON to a table and a picture.

    plot.py RESULTS.json [MORE.json ...] [--out DIR] [--keep FILE]

Takes results.json of run_gpu_tests or files of amem-gpu-bench --json. Writes summary.md (a Markdown table, also printed) and, where
matplotlib is installed, plot.svg (the benchmark's times) and, from part `scale`, held.svg (times against bytes held). --keep writes
what it took to FILE, which it reads as well: numbers without paths and logs, small enough to be kept beside the pictures.
"""
import argparse
import json
import os
import sys


def load(paths, part="bench"):
    """The runs of a part of run_gpu_tests that have cycles, in their order."""
    runs = []
    for path in paths:
        with open(path) as file:
            data = json.load(file)
        found = [step["data"] for step in data["steps"] if step["part"] == part and step["data"]] if "steps" in data else [data]
        runs += [run for run in found if run.get("program") == "amem-gpu-bench" and run.get("cycles")]
    return runs


def title(run):
    if run["mode"] == "amem":
        text = f"AMem, {run['layout']}"
    elif run["mode"] == "floor":
        text = f"raw driver calls, {run['slab_mib']} MiB slabs" if run["slab_mib"] else "raw driver calls, one handle each"
    else:
        text = {"recreate": "destroy and recreate", "native": "ncclCommSuspend/Resume"}[run["mode"]]
    return text + (", one process" if run["single_process"] else "")


def number(value):
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.1f}"


def table(runs):
    lines = ["| GPUs | | start-up, ms | first pause, ms | later pauses, ms | first resume, ms | later resumes, ms | + first collectives, ms "
             "| freed per GPU, MiB | held, MiB | bit-identical |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    for run in runs:
        first, later = run["first"], run["median"] or run["first"]
        checked = "-" if run["mode"] == "floor" else "yes" if run["identical"] else "NO"
        cells = [str(run["gpus"]), title(run), number(run["startup"]["total_ms"]), number(first["pause_ms"]), number(later["pause_ms"]),
                 number(first["resume_ms"]), number(later["resume_ms"]), number(later["first_collectives_ms"]), number(later["freed_mib"]),
                 number(run["held_mib"]), checked]
        lines.append("| " + " | ".join(cells) + " |")
    if runs:
        versions = sorted({run["nccl_version"] for run in runs if run.get("nccl_version")})
        lines += ["", f"{runs[0]['gpu']}, driver {runs[0]['driver']}, NCCL {', '.join(versions) or '-'}; times are the slowest rank's; "
                      f"'later' is the median of {len(runs[0]['cycles']) - 1} cycles after the first."]
    return "\n".join(lines) + "\n"


def pyplot():
    """None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("plot.py: no matplotlib here, so no picture", file=sys.stderr)
        return None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "amem"})  # small, and the same for the same numbers
    import matplotlib.pyplot
    return matplotlib.pyplot


def time_of(run, what):
    median = run["median"] or run["first"]
    return median["pause_ms"] if what == "pause" else median.get("resume_total_ms", median["resume_ms"])


def draw_held(runs, path):
    """Pause and resume against bytes held, a line for each way; both axes logarithmic, so that a straight line of slope 1 is linear.
    A resume that leaves something to the first collectives (destroy and recreate) is drawn with it."""
    plt = pyplot()
    if plt is None:
        return
    figure, both = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for axes, what in zip(both, ("pause", "resume")):
        for name in dict.fromkeys(title(run) for run in runs):
            points = sorted((run["held_mib"] / 1024, time_of(run, what)) for run in runs if title(run) == name)
            axes.plot(*zip(*points), marker="o", label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("GiB held per GPU")
        axes.set_title(what)
        axes.grid(True, which="both", alpha=0.3)
    both[0].set_ylabel("ms, slowest rank, median without the first cycle")
    both[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw(runs, path):
    plt = pyplot()
    if plt is None:
        return
    labels = [f"{title(run)} ({run['gpus']} GPUs)" for run in runs]
    parts = [("pause", "#4c72b0", lambda m: m["pause_ms"]), ("resume", "#dd8452", lambda m: m["resume_ms"]),
             ("first collectives after it", "#c9a27e", lambda m: m["first_collectives_ms"])]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.5 * len(runs)))
    left = [0.0] * len(runs)
    for name, color, pick in parts:
        values = [pick(run["median"] or run["first"]) for run in runs]
        axes.barh(labels, values, left=left, label=name, color=color)
        left = [a + b for a, b in zip(left, values)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {number(total)} ms", va="center", fontsize=8)
    axes.set_xlim(0, max(left) * 1.15 or 1)
    axes.invert_yaxis()
    axes.set_xlabel("ms, slowest rank, median without the first cycle")
    axes.set_title("Giving NCCL's GPU memory back and taking it again")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


KEPT = ("program", "mode", "layout", "label", "gpus", "single_process", "slab_mib", "worlds", "gpu", "driver", "nccl_version", "held_mib",
        "startup", "first", "median", "identical", "torch", "nccl", "rows", "stock_ms", "amem_ms", "killed_at", "failed_after_ms", "grown_mib",
        "seconds_of_an_early_round", "seconds_of_the_last_round", "ms_per_cycle")
COUNTS = ("own_allocations", "imported_allocations", "slabs", "own_device_bytes")


def kept(data):
    """The numbers that README quotes, without paths, messages and logs."""
    numbers = {key: data[key] for key in KEPT if key in data}
    counts = data.get("amem_after_start") or {}
    numbers.update({key: counts[key] for key in COUNTS if key in counts})
    if isinstance(data.get("cycles"), list):
        numbers["cycles"] = [{key: cycle[key] for key in ("cycle", "pause_ms", "resume_ms") if key in cycle} for cycle in data["cycles"]]
    return numbers


def keep(paths, path):
    """A line for each step that measured something, and how many steps there were of each outcome."""
    steps, outcomes = [], {}
    for name in paths:
        with open(name) as file:
            for step in json.load(file).get("steps", []):
                outcomes[step["outcome"]] = outcomes.get(step["outcome"], 0) + 1
                numbers = kept(step["data"] or {})
                if numbers:
                    steps.append({"part": step["part"], "name": step["name"], "data": numbers})
    with open(path, "w") as file:
        file.write(f"{{\"outcomes\": {json.dumps(outcomes)}, \"steps\": [\n" + ",\n".join(json.dumps(step) for step in steps) + "\n]}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="JSON files of run_gpu_tests or amem-gpu-bench")
    parser.add_argument("--out", default=".", help="directory for summary.md and plot.svg (default: here)")
    parser.add_argument("--keep", default="", help="write the numbers that were taken to this file")
    options = parser.parse_args()
    if options.keep:
        keep(options.results, options.keep)
    runs, scaled = load(options.results), load(options.results, "scale")
    if scaled:
        draw_held(scaled, os.path.join(options.out, "held.svg"))
    if not runs:
        print("plot.py: no benchmark with cycles in these files" + ("" if scaled else "; nothing to draw"), file=sys.stderr)
        return 0
    text = table(runs)
    print(text)
    with open(os.path.join(options.out, "summary.md"), "w") as file:
        file.write(text)
    draw(runs, os.path.join(options.out, "plot.svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
