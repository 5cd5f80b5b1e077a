#!/usr/bin/env python3
"""Two builds of libamem_nccl.so in turns on one GPU that several ranks share: does a pause or a resume take longer with the second?

    NCCL_NVLS_ENABLE=0 python3 tests/gpu/in_turns.py --first OLD/libamem_nccl.so --second NEW/libamem_nccl.so --nccl LIB --ranks 2,4,8

Each turn runs shared_gpu_job.py with the first library and with the second, every other one the other way round. A figure is the
median of the turns' medians, each of the slowest rank; `ratio` is the median of the turns' ratios. NCCL must be of 2.30 or later. One
JSON line for each number of ranks.
Exit codes: 0 every ratio is within --bar, 1 one is not, 2 a job failed or NCCL_NVLS_ENABLE is not 0.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", required=True, help="the libamem_nccl.so to compare with")
    parser.add_argument("--second", required=True, help="the libamem_nccl.so that is compared")
    parser.add_argument("--nccl", required=True, help="a stock libnccl.so.2 of 2.30 or later")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=24)
    parser.add_argument("--environment", default="", help="more for the jobs: NAME=VALUE, comma separated")
    parser.add_argument("--bar", type=float, default=1.05)
    parser.add_argument("--limit", type=int, default=90, help="seconds for one job")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything: no turn begins for which the last one says that there is no time")
    parser.add_argument("--out", default="", help="the lines go there, too")
    return parser.parse_args()


def job(options, library, ranks):
    """The times of one job, {"pause_ms", "resume_ms", "freed_mib"}."""
    with tempfile.TemporaryDirectory(prefix="amem-turns-") as folder:
        file = os.path.join(folder, "result.json")
        more = dict(pair.split("=", 1) for pair in options.environment.split(",") if pair)
        environment = {**os.environ, "LD_PRELOAD": f"{os.path.abspath(library)}:{os.path.abspath(options.nccl)}", "OMP_NUM_THREADS": "2",
                       "NCCL_MULTI_RANK_GPU_ENABLE": "1", "AMEM_JOURNAL_DIR": folder + "/journal", **more}
        process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                                    os.path.join(HERE, "shared_gpu_job.py"), "--parts", "nccl", "--cycles", str(options.cycles),
                                    "--time-limit", str(options.limit - 10), "--json", file],
                                   env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            said, _ = process.communicate(timeout=options.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        if not os.path.exists(file):
            sys.stderr.write(said)
            sys.exit(2)
        with open(file, encoding="utf-8") as source:
            data = json.load(source)
    if not data["ok"]:
        sys.stderr.write(said)
        sys.exit(2)
    return data["of_nccl"], data["gpu"], data["nccl"]


def main():
    options = arguments()
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        sys.exit("in_turns: refused: NCCL_NVLS_ENABLE must be 0. Multicast objects can put a shared GPU host out of service.")
    slower, end = False, time.monotonic() + options.budget
    for ranks in map(int, options.ranks.split(",")):
        turns = []
        for turn in range(options.turns):
            began = time.monotonic()
            libraries = (options.first, options.second)
            found = {library: job(options, library, ranks) for library in (libraries if turn % 2 == 0 else libraries[::-1])}
            turns.append([found[library][0] for library in libraries])
            gpu, nccl = found[options.first][1:]
            if 2 * time.monotonic() - began > end:
                break
        row = {"ranks": ranks, "gpu": gpu, "nccl": nccl, "turns": len(turns), "environment": options.environment}
        for what in ("pause_ms", "resume_ms", "freed_mib"):
            row[what] = [round(statistics.median(turn[i][what] for turn in turns), 1) for i in (0, 1)]
            row[what.replace("_ms", "") + "_ratio"] = round(statistics.median(turn[1][what] / turn[0][what] for turn in turns), 3)
        row["all"] = [[[t[w] for w in ("pause_ms", "resume_ms")] for t in turn] for turn in turns]
        slower = slower or max(row["pause_ratio"], row["resume_ratio"]) > options.bar
        line = json.dumps(row)
        print(line, flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
