#!/usr/bin/env python3
"""What counting launches costs a job that never heard of AMem: a stock job and one under AMem, in turns.

    NCCL_NVLS_ENABLE=0 unmodified_costs.py --library build/lib/libamem_nccl.so
    NCCL_NVLS_ENABLE=0 unmodified_costs.py --library build/lib/libamem_nccl.so --against OLD/lib/libamem_nccl.so   # in place of the stock job: another AMem

Part `tiny`: all-reduces of 8 bytes through ctypes, whose own time both have; a span is 20 000 of them. Part `ddp`: training steps of unmodified_job.py,
ten a span. Both jobs have one rank, run at once on the same GPU and, with --processors, on the same few processors, and make their spans in turns, while the
other waits (span_turns.py). The same program in another process may take a few per cent more or less: hence several pairs, which change places.

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
import span_turns  # noqa: E402  # beside this file
import unmodified_job  # noqa: E402
import unmodified_kinds  # noqa: E402

LEAST = 40  # seconds for two jobs to start, and to work for a while
PER_STEP = {"tiny": unmodified_kinds.TINY, "ddp": 1, "reduce": 1}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="tiny,ddp", help="comma separated (default: both)")
    parser.add_argument("--pairs", type=int, default=6, help="of jobs, one pair after the other (default 6)")
    parser.add_argument("--steps", default="tiny=800,ddp=1500", help="of a job")
    parser.add_argument("--processors", default="", help="for both jobs, comma separated (default: all)")
    parser.add_argument("--bars", default="tiny=1.02,ddp=1.002", help="the most that a ratio may be")
    parser.add_argument("--library", default="libamem_nccl.so")
    parser.add_argument("--against", default="", help="another libamem_nccl.so, for the job that is else stock")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 in place of PyTorch's own")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--time-limit", type=float, default=580)
    parser.add_argument("--json", default="")
    parser.add_argument("--imitate", default="", choices=("", "cpu", "stand-ins"))
    options = parser.parse_args()
    options.share_gpu, options.until, options.away, options.deadline, options.tool = False, time.monotonic() + options.time_limit, 0, 40, "amem-replay"
    return options


def of_parts(text, kind):
    return {name: kind(value) for name, value in (one.split("=") for one in text.split(","))}


def one_pair(options, part, steps, folder, amem_first):
    """What span_turns.compare says of the job under AMem beside the other, and the microseconds of both, the other's first. RuntimeError: what went wrong."""
    os.makedirs(folder)
    ways = (True, options.against) if amem_first else (options.against, True)
    with span_turns.Fifos(folder, part) as fifos, \
            unmodified_job.Job(options, part, 1, os.path.join(folder, "first"), ways[0], fifos.first) as first, \
            unmodified_job.Job(options, part, 1, os.path.join(folder, "second"), ways[1], fifos.second) as second:
        while second.at() < steps and first.runs() and second.runs() and unmodified_job.left(options) > 0:
            time.sleep(0.05)
        reached = second.at() >= steps
        if not (first.runs() and second.runs()):
            fifos.release()
        problems = first.finish(60) + second.finish(60)
        if problems or not reached:
            raise RuntimeError("; ".join(problems)[-1500:] or f"only {second.at()} of {steps} steps in time")
        spans = first.spans(), second.spans()
    found, micros = span_turns.compare(*spans), [1e6 / PER_STEP[part] * statistics.median(one[span_turns.FIRST:]) for one in spans]
    return (span_turns.turned(found), micros[::-1]) if amem_first else (found, micros)


def compare(options, part, steps, folder, bar):
    """The row of a part."""
    found, micros = [], []
    for number in range(options.pairs):
        if found and unmodified_job.left(options) < LEAST:
            break
        try:
            one, both = one_pair(options, part, steps, os.path.join(folder, f"{part}.{number}"), number % 2 == 1)
        except (RuntimeError, ValueError) as error:
            return {"part": part, "ok": False, "why": str(error), "pairs": found}
        print(f"{part}, pair {number + 1}: {both[0]:.3f} us, {both[1]:.3f} us, {one}", flush=True)
        found.append(one)
        micros.append(both)
    other_us, amem_us = (round(statistics.median(one), 4) for one in zip(*micros))
    all_pairs = span_turns.several(found)
    return {"part": part, "against" if options.against else "stock": other_us, "amem": amem_us, "unit": "us", **all_pairs, "bar": bar, "ok": all_pairs["ratio"] <= bar,
            "pairs": found}


def main():
    options = arguments()
    if unmodified_job.refused(options):
        return 2
    if options.against:
        options.against = os.path.abspath(options.against)
    if options.processors:
        os.sched_setaffinity(0, {int(one) for one in options.processors.split(",")})
    steps, bars, rows, ok = of_parts(options.steps, int), of_parts(options.bars, float), [], True
    with tempfile.TemporaryDirectory(prefix="amem-costs-") as folder:
        for part in options.parts.split(","):
            rows.append(compare(options, part, steps[part], folder, bars[part]))
            ok = ok and rows[-1]["ok"]
            print(rows[-1], flush=True)
    return unmodified_job.told(options, "unmodified_costs", ok, ranks=1, parts=rows)


if __name__ == "__main__":
    sys.exit(main())
