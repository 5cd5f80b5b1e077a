#!/usr/bin/env python3
"""Somebody else's training script, as it was released: paused, frozen and brought back from a shell, and its printed losses compared with a run of its own.

    NCCL_NVLS_ENABLE=0 script_job.py --library build/lib/libamem_nccl.so --tool build/bin/amem-replay --folder nanoGPT --pauses 5 --freezes 3 -- \\
        torchrun --standalone --nproc-per-node 2 train.py config/train_shakespeare_char.py --log_interval=1 --max_iters=400

The command runs twice to its end in --folder: under LD_PRELOAD, where it is stopped at random moments after its first lines, and without AMem. A loss is
the first group of --losses in a line of its output; the losses of both runs must be equal, as they were printed. Where they differ a third run,
without AMem, says whether those of stock are the same each time. Stops are spread over the run by the number of its lines: --lines says how many there
are. The last line is JSON. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import unmodified_job  # noqa: E402  # beside this file


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pauses", type=int, default=5, help="pauses and resumes (default 5)")
    parser.add_argument("--freezes", type=int, default=0, help="freezes and thaws after them, where each rank has a GPU (default 0)")
    parser.add_argument("--losses", default=r"\bloss (\d[\d.e+-]*)", help="what a line of output says of a step")
    parser.add_argument("--lines", type=int, default=400, help="such lines that the command prints (400)")
    parser.add_argument("--folder", default=".", help="where the command runs")
    parser.add_argument("--library", default="libamem_nccl.so", help="to preload")
    parser.add_argument("--tool", default="amem-replay")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 in place of PyTorch's own")
    parser.add_argument("--deadline", type=int, default=40, help="of each request, in seconds (40)")
    parser.add_argument("--time-limit", type=float, default=280, help="of all, in seconds (280)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--json", default="", help="the last line goes there too")
    parser.add_argument("--logs", default="", help="a folder for output and journals, which are else deleted")
    parser.add_argument("--imitate", default="", choices=("", "stand-ins"), help="without a GPU")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    options.until, options.share_gpu = time.monotonic() + options.time_limit, False
    return options


class Script(unmodified_job.Job):
    """One run of the command. Its process group ends with it."""

    def __init__(self, options, folder, preload):  # pylint: disable=super-init-not-called  # it starts ranks of its own
        os.makedirs(folder)
        self.folder, self.options, self.log = folder, options, os.path.join(folder, "log")
        self.environment = {**os.environ, "AMEM_JOURNAL_DIR": os.path.join(folder, "journal"), "PYTHONUNBUFFERED": "1"}
        self.environment.pop("LD_PRELOAD", None)
        if libraries := ":".join(filter(None, [options.library if preload else "", options.nccl])):
            self.environment["LD_PRELOAD"] = libraries
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(options.command, cwd=options.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.ranks = [self.process]

    def __exit__(self, *_):
        self.thaw()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def losses(self):
        with open(self.log, errors="replace") as log:
            return re.findall(self.options.losses, log.read())

    def said(self):
        return len(self.losses()), 0.0

    def end(self):
        """What is wrong with how it ended, and its losses."""
        try:
            code = self.process.wait(max(1, unmodified_job.left(self.options)))
        except subprocess.TimeoutExpired:
            code = "no end in time"
        with open(self.log, errors="replace") as log:
            return [] if code == 0 else [f"it ended with {code}: {log.read()[-1500:]}"], self.losses()


def stops(job, options, report, problems):
    chance = random.Random(options.seed)
    kinds = [("pause", "resume")] * options.pauses + [("freeze", "thaw")] * options.freezes
    first = job.at()
    for number, (away, back) in enumerate(kinds):
        job.until(first + (number + 1) * (options.lines - first) // (len(kinds) + 2), unmodified_job.left(options))
        time.sleep(chance.uniform(0, 0.2))
        began = time.monotonic()
        code, out, said, _ = job.tool(away, "--between-launches", "--json", "--deadline", str(options.deadline))
        if code != 0:
            problems.append(f"{away} {number} after {job.at()} lines: exit code {code}: {said or out}")
            return
        report[away].append(time.monotonic() - began)
        if away == "freeze":
            report["freeze_steps_ms"].append({one["step"]: round(one["ms"], 1) for one in json.loads(out)["times"]})
        time.sleep(0.5)  # what was printed before comes out
        before = job.at()
        time.sleep(0.5)
        if job.at() != before:
            problems.append(f"it trains after {away} {number}")
        began = time.monotonic()
        code, out, said, _ = job.tool(back, "--deadline", str(options.deadline))
        if code != 0:
            problems.append(f"{back} {number}: exit code {code}: {said or out}")
            return
        report[back].append(time.monotonic() - began)


def run(options, folder, report, problems):
    with Script(options, os.path.join(folder, "amem"), True) as job:
        if job.until(3, unmodified_job.TO_START):
            stops(job, options, report, problems)
        else:
            problems.append(f"it printed {job.at()} losses in time")
        ended, losses = job.end()
    problems += ended
    report["losses"] = len(losses)
    if problems:
        return
    runs = []
    for name in ("stock", "again"):
        with Script(options, os.path.join(folder, name), False) as job:
            ended, stock = job.end()
        problems += [f"without AMem: {one}" for one in ended]
        runs.append(stock)
        if ended or stock == losses:
            return
        at = unmodified_job.first_difference(losses, stock)
        if name == "stock":
            problems.append(f"losses differ from number {at} on, of {len(losses)} and {len(stock)}: {losses[at or 0:][:1]}, not {stock[at or 0:][:1]}")
    problems.append("a second run without AMem has " + ("the losses of the first" if runs[0] == runs[1] else "other losses than the first, too"))


def main():
    options = arguments()
    if unmodified_job.refused(options):
        return 2
    report, problems = {"pause": [], "resume": [], "freeze": [], "thaw": [], "freeze_steps_ms": []}, []
    with tempfile.TemporaryDirectory(prefix="amem-script-") as folder:
        run(options, os.path.abspath(options.logs) if options.logs else folder, report, problems)
    seconds = {name: [round(one, 3) for one in report.pop(name)] for name in ("pause", "resume", "freeze", "thaw")}
    return unmodified_job.told(options, "script_job", not problems, script=options.command, seconds=seconds, **report, problems=problems)


if __name__ == "__main__":
    sys.exit(main())
