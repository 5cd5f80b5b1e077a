#!/usr/bin/env python3
"""Draws GPU memory over time of runs of grpo.py, one below the other on one scale, as an SVG. Standard library only.

    python3 grpo_plot.py off.json on.json -o memory.svg [--iterations 3:6]

Rollouts are shaded. --iterations FIRST:LAST draws a part (from 0, the last one excluded).
"""
import argparse
import json
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 860, 200, 70, 20, 34, 56
LINE, SHADE, INK, GRID = "#2563a8", "#f3e3c3", "#222222", "#d8d8d8"


def spans(run):
    """[(name, begin, end)] of the run's phases, in seconds."""
    end = run["memory_mib"][-1][0] if run["memory_mib"] else run["phases"][-1][0]
    times = [time for time, _ in run["phases"]] + [end]
    return [(name, begin, times[number + 1]) for number, (begin, name) in enumerate(run["phases"])]


def cut(run, first, last):
    """(phases, samples, begin, end) of some iterations: each begins with the phase "synchronize"."""
    phases = spans(run)
    starts = [begin for name, begin, _ in phases if name == "synchronize"] + [phases[-1][2]]
    begin, end = starts[first], starts[min(last, len(starts) - 1)]
    samples = [(time, mib) for time, mib in run["memory_mib"] if begin <= time <= end]
    return [phase for phase in phases if begin <= phase[1] < end], samples, begin, end


def nice_step(most):
    """A step of 1, 2 or 5 times a power of ten that divides `most` in about four."""
    step = 1.0
    while step * 50 < most:
        step *= 10
    return next((step * times for times in (1, 2, 5, 10, 20) if step * times * 4.5 >= most), step * 20)


def title(run):
    name = "with --rl-amem-offload-during-rollout" if run["flag"] else "without the flag"
    return "%s: %s, %d ranks, %.0f million parameters" % (name, run["strategy"].upper(), run["ranks"], run["parameters"] / 1e6)


def panel(run, top, seconds, most, window):
    """SVG elements of one run."""
    phases, samples, begin, end = window
    x = lambda time: LEFT + (time - begin) / seconds * (WIDTH - LEFT - RIGHT)  # noqa: E731
    y = lambda mib: top + HEIGHT - mib / most * HEIGHT  # noqa: E731
    parts = ['<text x="%d" y="%d" font-weight="bold">%s</text>' % (LEFT, top - 12, escape(title(run)))]
    for name, first, last in phases:
        if name == "rollout":
            parts.append('<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>' % (x(first), top, x(min(last, end)) - x(first), HEIGHT, SHADE))
    step = nice_step(most / 1024)
    for number in range(int(most / 1024 / step) + 1):
        level = y(number * step * 1024)
        parts.append('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="%s"/>' % (LEFT, WIDTH - RIGHT, level, level, GRID))
        parts.append('<text x="%d" y="%.1f" text-anchor="end">%g GiB</text>' % (LEFT - 8, level + 4, number * step))
    points = " ".join("%.1f,%.1f" % (x(time), y(mib)) for time, mib in thinned(samples))
    parts.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="1.6"/>' % (points, LINE))
    step = nice_step(seconds)
    for number in range(int((end - begin) / step) + 1):
        parts.append('<text x="%.1f" y="%d" text-anchor="middle">%g s</text>' % (x(begin + number * step), top + HEIGHT + 16, number * step))
    return parts


def thinned(samples):
    """Without samples in the middle of a run of equal ones."""
    return [row for number, row in enumerate(samples) if number in (0, len(samples) - 1) or row[1] != samples[number - 1][1]
            or row[1] != samples[number + 1][1]]


def draw(runs, first, last):
    windows = [cut(run, first, last) for run in runs]
    if not all(window[1] for window in windows):
        raise SystemExit("grpo_plot.py: a run has no samples of GPU memory in these iterations (was it on the CPU?)")
    most = 1.08 * max(mib for window in windows for _, mib in window[1])
    seconds = max(window[3] - window[2] for window in windows)
    parts, top = [], TOP
    for run, window in zip(runs, windows):
        parts += panel(run, top, seconds, most, window)
        top += HEIGHT + GAP
    head = ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12" fill="%s">'
            % (WIDTH, top, WIDTH, top, INK))
    note = '<text x="%d" y="%d">memory used on rank 0\'s GPU; shaded: rollouts</text>' % (LEFT, top - 14)
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, note, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="files that grpo.py --json wrote")
    parser.add_argument("-o", "--output", default="memory.svg")
    parser.add_argument("--iterations", default="0:1000000", metavar="FIRST:LAST")
    options = parser.parse_args()
    runs = []
    for path in options.runs:
        with open(path, encoding="utf-8") as file:
            runs.append(json.load(file))
    first, _, last = options.iterations.partition(":")
    with open(options.output, "w", encoding="utf-8") as file:
        file.write(draw(runs, int(first), int(last)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
