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
import json
import os
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import unmodified_job  # noqa: E402  # beside this file
import unmodified_kinds  # noqa: E402

LEAST = 60  # seconds for a job to start, and to train for a while
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
    if unmodified_job.left(options) < LEAST:
        raise RuntimeError("there was no time left for this turn: give it a longer --time-limit, or fewer --turns")
    with unmodified_job.Job(options, part, options.ranks, folder, preload) as job:
        reached = job.until(steps, options.time_limit)
        problems = job.finish(60)
        if problems or not reached:
            raise RuntimeError("; ".join(problems) or f"only {job.at()} of {steps} steps in time")
        return job.fast_step()


def main():
    options = arguments()
    if os.environ.get("NCCL_NVLS_ENABLE") != "0" and not options.imitate:
        print("set NCCL_NVLS_ENABLE=0", file=sys.stderr)
        return 2
    options.library, options.nccl = (os.path.abspath(path) if "/" in path else path for path in (options.library, options.nccl))
    steps, bars, rows, ok = of_parts(options.steps, int), of_parts(options.bars, float), [], True
    with tempfile.TemporaryDirectory(prefix="amem-costs-") as folder:
        for part in options.parts.split(","):
            times = {False: [], True: []}
            try:
                for number in range(options.turns):
                    for preload in (number % 2 == 1, number % 2 == 0):
                        times[preload].append(turn(options, part, steps[part], os.path.join(folder, f"{part}.{number}.{preload}"), preload))
                stock, amem = (1e6 / PER_STEP[part] * statistics.median(times[preload]) for preload in (False, True))
                ratio = statistics.median(b / a for a, b in zip(times[False], times[True]))
                rows.append({"part": part, "stock_us": round(stock, 4), "amem_us": round(amem, 4), "ratio": round(ratio, 5), "bar": bars[part],
                             "ratios": [round(b / a, 5) for a, b in zip(times[False], times[True])], "ok": ratio <= bars[part]})
            except RuntimeError as error:
                rows.append({"part": part, "ok": False, "why": str(error)[-1500:]})
            ok = ok and rows[-1]["ok"]
            print(rows[-1], flush=True)
    line = json.dumps({"program": "unmodified_costs", "ok": ok, **unmodified_job.machine(options), "ranks": options.ranks, "turns": options.turns, "parts": rows})
    if options.json:
        with open(options.json, "w") as file:
            file.write(line + "\n")
    print(line)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
