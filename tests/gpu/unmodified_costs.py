#!/usr/bin/env python3
"""What counting launches costs a job that never heard of AMem: stock and AMem in turns.

    NCCL_NVLS_ENABLE=0 unmodified_costs.py --library build/lib/libamem_nccl.so [--ranks 2 --share-gpu --nccl libnccl.so.2]

Part `tiny`: all-reduces of 8 bytes through ctypes, whose own time both have; 100 spans of 20 000 are two million a turn. Part `ddp`: a training step of
unmodified_job.py. A figure is a job's tenth percentile of its spans, of the slowest rank, since a machine of 16 shared processors runs the same job in 0.7
to 1.4 of its median time; the ratio is the median of the turns' ratios. With one rank (default)
nothing else uses the GPU; ranks that share one measure each other's turns at it as well.

The last line is JSON. Exit code 0: every ratio is within its --bar, 1: not, or a job failed; 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import os
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import unmodified_job  # noqa: E402  # beside this file
import unmodified_kinds  # noqa: E402

LEAST = 60  # seconds for two jobs to start, and to train for a while
PER_STEP = {"tiny": unmodified_kinds.TINY, "ddp": 1, "reduce": 1}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="tiny,ddp", help="comma separated (default: both)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", default="tiny=1000,ddp=1500", help="of a job")
    parser.add_argument("--bars", default="tiny=1.02,ddp=1.002", help="the most that a ratio may be")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--library", default="libamem_nccl.so")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 in place of PyTorch's own")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--time-limit", type=float, default=580)
    parser.add_argument("--json", default="")
    parser.add_argument("--imitate", default="", choices=("", "cpu", "stand-ins"))
    options = parser.parse_args()
    options.until, options.away, options.deadline, options.tool = time.monotonic() + options.time_limit, 0, 40, "amem-replay"
    return options


def of_parts(text, kind):
    return {name: kind(value) for name, value in (one.split("=") for one in text.split(","))}


def turn(options, part, steps, folder, preload):
    """Seconds of a step, of one job."""
    with unmodified_job.Job(options, part, options.ranks, folder, preload) as job:
        reached = job.until(steps, options.time_limit)
        problems = job.finish(60)
        if problems or not reached:
            raise RuntimeError("; ".join(problems) or f"only {job.at()} of {steps} steps in time")
        return job.fast_step()


def turns_of(options, part, steps, folder):
    """[{preload: seconds of a step}], as many as there is time for."""
    times = []
    for number in range(options.turns):
        if unmodified_job.left(options) < LEAST and times:
            break
        pair = {preload: turn(options, part, steps, os.path.join(folder, f"{part}.{number}.{preload}"), preload) for preload in (number % 2 == 1, number % 2 == 0)}
        times.append(pair)
        print(f"{part}, turn {number + 1}: {1e6 / PER_STEP[part] * pair[False]:.3f} us, with AMem {1e6 / PER_STEP[part] * pair[True]:.3f} us", flush=True)
    return times


def main():
    options = arguments()
    if unmodified_job.refused(options):
        return 2
    steps, bars, rows, ok = of_parts(options.steps, int), of_parts(options.bars, float), [], True
    with tempfile.TemporaryDirectory(prefix="amem-costs-") as folder:
        for part in options.parts.split(","):
            try:
                times = turns_of(options, part, steps[part], folder)
            except RuntimeError as error:
                rows.append({"part": part, "ok": False, "why": str(error)[-1500:]})
            else:
                stock, amem = (1e6 / PER_STEP[part] * statistics.median(pair[preload] for pair in times) for preload in (False, True))
                ratios = [pair[True] / pair[False] for pair in times]
                ratio = statistics.median(ratios)
                rows.append({"part": part, "turns": len(times), "stock_us": round(stock, 4), "amem_us": round(amem, 4), "ratio": round(ratio, 5), "bar": bars[part],
                             "ratios": [round(one, 5) for one in ratios], "ok": ratio <= bars[part]})
            ok = ok and rows[-1]["ok"]
            print(rows[-1], flush=True)
    return unmodified_job.told(options, "unmodified_costs", ok, ranks=options.ranks, parts=rows)


if __name__ == "__main__":
    sys.exit(main())
