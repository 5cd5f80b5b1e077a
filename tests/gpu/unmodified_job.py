#!/usr/bin/env python3
"""Training jobs that never heard of AMem, paused, parked and resumed from a shell at random moments.

    NCCL_NVLS_ENABLE=0 unmodified_job.py --library build/lib/libamem_nccl.so --tool build/bin/amem-replay [--kinds ddp,gan] [--stops 50]
    NCCL_NVLS_ENABLE=0 unmodified_job.py ... --share-gpu --nccl libnccl.so.2   # all ranks on one GPU; an NCCL of 2.30 or later

Of each kind a job runs under LD_PRELOAD and makes no safe point. `amem-replay pause` (every third time `park`) stops it between two launches of
NCCL's, and `resume` lets it go on. Then as many steps run without AMem: the losses of all ranks must be equal to the last bit. Kinds: ddp, no_sync,
fsdp2, tp, fsdp2_tp (of 4 ranks), pipeline (sends and receives), all_to_all, gan (two models, two groups), checkpoint (rank 0 is away for some seconds),
gloo (barriers that are not NCCL's), graph (NCCL in a CUDA graph: each stop must be refused by name), graph_all (the same under
AMEM_SCOPE=all, where it is stopped), alone (a capture without NCCL while it is stopped).

With --at-once N so many kinds run beside each other; one that fails stops no other. A job with a problem ends its kind, and each wait has an end:
--deadline for a request, --time-limit for all. Where losses differ a second run without AMem says whether those of stock are the same each time.

A line for each kind comes before the last line, which is JSON: for each kind stops, problems, and the seconds from the command to all ranks standing,
and to all paused (median, worst) beside the length of a step. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).

--freezes takes the job off its GPUs at each stop, contexts and all, and thaws it. Ranks that share a GPU cannot be: a restored process does not
make room for the others there.

Without a GPU: --imitate stand-ins runs the same stops on the simulator (kinds reduce, and differs, falls, hangs, which must fail); --imitate cpu
--stops 0 the training itself, twice, by PyTorch on the processor.
"""
import argparse
import concurrent.futures
import contextlib
import importlib.metadata
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402  # beside this file
import unmodified_kinds  # noqa: E402

KINDS = ("ddp", "no_sync", "fsdp2", "tp", "fsdp2_tp", "pipeline", "all_to_all", "gan", "checkpoint", "gloo", "graph", "graph_all", "alone")
EVERY = unmodified_kinds.EVERY
MOST_PROBLEMS = 3  # of stops of a kind, before no more are made
TO_START = 90  # seconds until a job trains; for an end and a reference there must be as many left


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma separated (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2); fsdp2_tp takes 4, if they share a GPU")
    parser.add_argument("--stops", type=int, default=10, help="of each kind (default 10)")
    parser.add_argument("--stops-s", type=float, default=0, help="no stop of a kind but checkpoint begins after so many seconds (0: while there are any left)")
    parser.add_argument("--freezes", action="store_true", help="freezes and thaws in place of pauses, parks and resumes")
    parser.add_argument("--at-once", type=int, default=1, help="kinds beside each other (default 1)")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0, by NCCL_MULTI_RANK_GPU_ENABLE")
    parser.add_argument("--library", default="libamem_nccl.so", help="to preload")
    parser.add_argument("--tool", default="amem-replay")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 in place of PyTorch's own")
    parser.add_argument("--width", type=int, default=1024, help="of the models (1024)")
    parser.add_argument("--away", type=float, default=5, help="seconds for which a rank is away in kind checkpoint (5)")
    parser.add_argument("--deadline", type=int, default=40, help="of each request, in seconds (40)")
    parser.add_argument("--time-limit", type=float, default=580, help="of all, in seconds (580)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default: another each time, and said")
    parser.add_argument("--json", default="", help="the last line goes there too")
    parser.add_argument("--logs", default="", help="a folder for the ranks' output and journals, which are else deleted")
    parser.add_argument("--imitate", default="", choices=("", "cpu", "stand-ins"), help="without a GPU")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)  # this is a rank of a job of that kind
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--turns", default="", help=argparse.SUPPRESS)  # its spans are made in turns with another job's: span_turns.Turn
    options = parser.parse_args()
    options.until = time.monotonic() + options.time_limit
    return options


def left(options):
    return options.until - time.monotonic()


def machine(options):
    """What a record says of how and where it was made; what cannot be found is null."""
    found = {"command": rank_main.command(), **rank_main.gpus_here(), "nccl_version": None, "torch": None, "ranks_share_gpu": options.share_gpu,
             "imitated": options.imitate or None}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    with contextlib.suppress(OSError):  # by another process, so that none of this one's children inherits a driver
        ask = "import ctypes, sys; v = ctypes.c_int(); ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(v)); print(v.value)"
        if options.nccl:
            found["nccl_version"] = int(subprocess.run([sys.executable, "-c", ask, options.nccl], capture_output=True, text=True, timeout=30, check=False).stdout or 0) or None
    return found


def refused(options):
    """Whether this program must not run here. Otherwise paths are whole."""
    if os.environ.get("NCCL_NVLS_ENABLE") != "0" and not options.imitate:
        print("set NCCL_NVLS_ENABLE=0", file=sys.stderr)
        return True
    options.library, options.nccl = (os.path.abspath(path) if "/" in path else path for path in (options.library, options.nccl))
    return False


def told(options, program, ok, **results):
    """Prints the last line, which is JSON, also into the file that was asked for. Returns the exit code."""
    line = json.dumps({"program": program, "ok": ok, **machine(options), **results})
    if options.json:
        with open(options.json, "w") as file:
            file.write(line + "\n")
    print(line)
    return 0 if ok else 1


class Ports:
    """Each is given once."""

    def __init__(self):
        self.lock, self.given = threading.Lock(), set()

    def one(self):
        while True:
            with self.lock, socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
                if port not in self.given:
                    self.given.add(port)
                    return port


PORTS = Ports()


class Job:
    """The ranks of one job; its end, however it comes, is theirs. `preload`: whether AMem is, or the path of another library than the options'."""

    def __init__(self, options, kind, ranks, folder, preload, turns=""):
        os.makedirs(folder)
        self.folder, self.options, self.size = folder, options, ranks
        environment = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORTS.one()),
                       "AMEM_JOURNAL_DIR": os.path.join(folder, "journal"), "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            environment.setdefault(name, "lo")
        environment.pop("LD_PRELOAD", None)
        if kind == "graph_all":
            environment["AMEM_SCOPE"] = "all"
        if libraries := ":".join(filter(None, [preload if isinstance(preload, str) else options.library if preload else "", options.nccl])):
            environment["LD_PRELOAD"] = libraries
        if options.share_gpu:
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        command = [sys.executable, os.path.abspath(__file__), "--rank", kind, "--work", folder, "--width", str(options.width), "--time-limit",
                   str(int(left(options)) + 1), "--away", str(options.away if preload else 0), "--turns", turns, *(["--imitate", options.imitate] if options.imitate else [])]
        self.environment = environment
        self.ranks = []
        for rank in range(ranks):
            with open(os.path.join(folder, f"log.{rank}"), "w") as log:
                self.ranks.append(subprocess.Popen(command + ["--share-gpu"] * options.share_gpu, stdout=log, stderr=log,
                                                   env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.thaw()
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()

    def thaw(self):
        """Before ranks are killed: a process that dies between the driver's checkpoint and its end may harm the GPU for others."""
        if getattr(self.options, "freezes", 0) and any(rank.poll() is None for rank in self.ranks):
            self.tool("thaw")

    def said(self):
        """How many steps were made, and how long one takes."""
        try:
            all_ranks = [open(os.path.join(self.folder, f"at.{rank}")).read().split() for rank in range(self.size)]
        except OSError:
            return 0, 0.0
        return min(int(step) for step, _ in all_ranks), max(float(seconds) for _, seconds in all_ranks)

    def at(self):
        return self.said()[0]

    def runs(self):
        return all(rank.poll() is None for rank in self.ranks)

    def until(self, step, seconds):
        end = time.monotonic() + max(0, min(seconds, left(self.options)))
        while self.at() < step and time.monotonic() < end and self.runs():
            time.sleep(0.02)
        return self.at() >= step

    def tool(self, *words):
        """Exit code, output, errors, and after how many seconds the tool said that all ranks stand (None: it did not)."""
        environment = {name: value for name, value in self.environment.items() if name != "LD_PRELOAD"}
        began, stood, said = time.monotonic(), None, []
        with tempfile.TemporaryFile("w+") as out, subprocess.Popen([self.options.tool, *words], env=environment, stdout=out, stderr=subprocess.PIPE, text=True) as tool:
            limit = threading.Timer(max(1, min(self.options.deadline + 30, left(self.options))), tool.kill)
            limit.start()
            for line in tool.stderr:
                if line.startswith(("all ranks have stopped", "all ranks stand", "all ranks have come")):
                    stood = time.monotonic() - began
                said.append(line)
            code = tool.wait()
            limit.cancel()
            out.seek(0)
            return code, out.read(), "".join(said)[-1500:], stood

    def finish(self, seconds):
        """Tells the ranks to end; what is wrong with their ends."""
        open(os.path.join(self.folder, "stop"), "w").close()
        problems, end = [], time.monotonic() + max(1, min(seconds if self.runs() else 5, left(self.options)))
        for number, rank in enumerate(self.ranks):
            try:
                code = rank.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
                code = "SIGKILL, because it did not end in time"
            if code != 0:
                with open(os.path.join(self.folder, f"log.{number}"), errors="replace") as log:
                    problems.append(f"rank {number} ended with {code}: {log.read()[-1500:]}")
        return problems

    def losses(self):
        all_ranks = [json.load(open(os.path.join(self.folder, f"losses.{rank}.json"))) for rank in range(self.size)]
        return [one["losses"] for one in all_ranks], statistics.median(one["step_s"] for one in all_ranks)

    def spans(self):
        """Of rank 0, which takes turns with another job: seconds of a step in each span of EVERY steps."""
        with open(os.path.join(self.folder, "losses.0.json")) as file:
            return json.load(file)["spans_s"]


def time_is_up(job, options, kind, end):
    """A reference makes as many steps, and starts like this."""
    steps, step_s = job.said()
    return (time.monotonic() > end and kind != "checkpoint") or left(options) < TO_START / 2 + options.deadline + 1.2 * steps * step_s


def stop_often(job, options, kind, chance, report, problems):
    pid, end = str(job.ranks[0].pid), time.monotonic() + (options.stops_s or math.inf)
    deadline = ["--deadline", str(options.deadline)]
    for stop in range(options.stops):
        if time_is_up(job, options, kind, end) or len(problems) >= MOST_PROBLEMS:
            return
        time.sleep(chance.uniform(0, 0.5))
        parks = stop % 3 == 2 and not options.freezes
        began = time.monotonic()
        code, out, err, stood = job.tool(*(["park"] if parks else ["freeze" if options.freezes else "pause", "--between-launches"]), pid, *deadline, "--json")
        took = time.monotonic() - began
        if kind == "graph":
            report["refused"] += code != 0 and "CUDA graph" in err
            if code == 0 or "CUDA graph" not in err:
                problems.append(f"stop {stop} of a job with NCCL in a graph: exit code {code}: {err or out}")
                return
            continue
        if code != 0:
            problems.append(f"stop {stop}: exit code {code} after {took:.1f} s: {err}")
            if not job.runs():
                return
            continue
        report["to_stand_s"].append(took if stood is None else stood)
        report["parks" if parks else "pauses"].append(took)
        if not parks and not options.freezes:
            report["freed_mib"].append(min(rank["freed_bytes"] for rank in json.loads(out)["ranks"]) >> 20)
        before = job.at()
        time.sleep(chance.uniform(0, 0.3))
        if options.freezes and job.at() != before:
            problems.append(f"it trains while it is frozen, stop {stop}")
        began = time.monotonic()
        code, _, err, _ = job.tool("thaw" if options.freezes else "resume", pid, *deadline)
        if code != 0:
            problems.append(f"resume {stop}: exit code {code}: {err}")
            return
        report["back"].append(time.monotonic() - began)
        report["stops"] += 1
        if stop % 10 == 0 and not job.until(before + EVERY + 1, 60):
            problems.append(f"it makes no step after resume {stop}")
            return


def without_amem(options, kind, ranks, folder, steps):
    """Losses of at least so many steps, and the length of one."""
    with Job(options, kind, ranks, folder, False) as job:
        job.until(steps, left(options))
        problems = job.finish(60)
        return (problems or None, *(job.losses() if not problems else (None, None)))


def first_difference(some, others):
    """Of two lists of losses, of which one may be longer; None: there is none."""
    pairs = list(zip(some, others))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), None)


def compare(options, kind, ranks, folder, stopped, report, problems):
    steps = len(stopped[0])
    wrong, expected, report["reference_step_s"] = without_amem(options, kind, ranks, folder + ".reference", steps)
    if wrong:
        problems += ["without AMem: " + problem for problem in wrong]
        return
    if any(len(one) < steps for one in expected):
        problems.append(f"without AMem only {min(map(len, expected))} of {steps} steps were made in time")
    if len(set(stopped[0])) < 3 or any(not math.isfinite(float.fromhex(loss)) for one in stopped for loss in one):
        problems.append("these losses say nothing")
    differ = [(rank, at) for rank in range(ranks) if (at := first_difference(stopped[rank], expected[rank])) is not None]
    if not differ:
        return
    problems += [f"rank {rank}: losses differ from step {at} on: {float.fromhex(stopped[rank][at])!r}, not {float.fromhex(expected[rank][at])!r}" for rank, at in differ]
    if left(options) > TO_START:
        wrong, again, _ = without_amem(options, kind, ranks, folder + ".again", steps)
        same = not wrong and all(first_difference(a, b) is None for a, b in zip(again, expected))
        problems.append("a second run without AMem has " + ("the losses of the first" if same else "other losses than the first, too" if not wrong else "failed"))


def run_kind(options, kind, folder, seed):
    report = {"kind": kind, "stops": 0, "refused": 0, "to_stand_s": [], "pauses": [], "parks": [], "back": [], "freed_mib": []}
    problems = report["problems"] = []
    ranks = report["ranks"] = 4 if kind == "fsdp2_tp" and (options.share_gpu or options.imitate) else options.ranks
    if kind == "fsdp2_tp" and ranks % 4 != 0:
        return {**report, "skipped": "needs 4 ranks"}
    if left(options) < TO_START:
        problems.append("there was no time left for it")
        return report
    folder = os.path.join(folder, kind)
    with Job(options, kind, ranks, folder, options.stops > 0) as job:
        if job.until(2 * EVERY, TO_START):
            stop_often(job, options, kind, random.Random(f"{seed} {kind}"), report, problems)
            if not problems:
                job.until(job.at() + EVERY, 30)
        else:
            problems.append(f"it made {job.at()} steps in time")
        problems += job.finish(5 if problems else 60)
        if not problems:
            stopped, report["step_s"] = job.losses()
            report["steps"] = len(stopped[0])
    if not problems:
        compare(options, kind, ranks, folder, stopped, report, problems)
    made = report["refused" if kind == "graph" else "stops"]
    if not problems and made < min(options.stops, 5):
        problems.append(f"only {made} of {options.stops} stops were made in time")
    return report


def of(seconds):
    return {"median": round(statistics.median(seconds), 3), "worst": round(max(seconds), 3)} if seconds else None


def run_and_tell(options, kind, folder, seed):
    began = time.monotonic()
    try:
        report = run_kind(options, kind, folder, seed)
    except Exception as error:  # pylint: disable=broad-except  # the other kinds go on
        report = {"kind": kind, "stops": 0, "problems": [f"{type(error).__name__}: {error}"]}
    for name in ("to_stand_s", "pauses", "parks", "back", "freed_mib"):
        report[name] = of(report.get(name))
    report["seconds"] = round(time.monotonic() - began, 1)
    said = "; ".join(" ".join(problem.split())[:400] for problem in report["problems"])
    said = "skipped: " + report["skipped"] if "skipped" in report else said or f"equal for {report['steps']} steps"
    print(f"{kind}: {report['stops']} of {options.stops} stops in {report['seconds']:.0f} s, to stand {report['to_stand_s']}, to pause {report['pauses']}, "
          f"step {report.get('step_s', 0):.4f} s (without AMem {report.get('reference_step_s') or 0:.4f}): {said}", flush=True)
    return report


def main():
    options = arguments()
    if options.rank:
        return unmodified_kinds.run_rank(options)
    if refused(options):
        return 2
    seed = options.seed or int.from_bytes(os.urandom(3), "little")
    with contextlib.ExitStack() as stack:
        folder = os.path.abspath(options.logs) if options.logs else stack.enter_context(tempfile.TemporaryDirectory(prefix="amem-unmodified-"))
        with concurrent.futures.ThreadPoolExecutor(max(options.at_once, 1)) as pool:
            reports = list(pool.map(lambda kind: run_and_tell(options, kind, folder, seed), options.kinds.split(",")))
    ok = all(not one["problems"] for one in reports)
    return told(options, "unmodified_job", ok, seed=seed, at_once=options.at_once, freezes=options.freezes, kinds=reports)


if __name__ == "__main__":
    sys.exit(main())
