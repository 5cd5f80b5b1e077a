#!/usr/bin/env python3
"""SIGKILL of all ranks of a job, parked and not: what the driver says of it.

    NCCL_NVLS_ENABLE=0 unmodified_kills.py --library LIB --tool TOOL --nccl libnccl.so.2 [--share-gpu] --kills 20

Each job all-reduces 64 MiB without a rest, by ctypes. `amem-replay park` stops it between two launches, and all its ranks are killed at once; as many jobs
are killed while they transfer. Afterwards no memory may be left on the GPUs, which is only known where no other process uses them, and the
next job must run. Xids are read from the management library's
events and the kernel's log; what cannot see them is reported as that.

The last line is JSON. Exit code 0: no parked job left an Xid or memory, 1: one did, or did not park, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import unmodified_job  # noqa: E402  # beside this file

CLOSE_MIB = 64  # that a GPU's use may differ between two moments without a program


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--library", default="libamem_nccl.so")
    parser.add_argument("--tool", default="amem-replay")
    parser.add_argument("--nccl", default="libnccl.so.2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=400)
    parser.add_argument("--json", default="")
    parser.add_argument("--imitate", default="", choices=("", "stand-ins"))
    options = parser.parse_args()
    options.until, options.away, options.width, options.deadline = time.monotonic() + options.time_limit, 0, 0, 20
    return options


def used_mib():
    """Of each GPU; null: it cannot be seen."""
    try:
        ran = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30, check=True)
        return [int(line) for line in ran.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def others():
    """How many processes use a GPU, while no job of this program runs; null: it cannot be seen."""
    try:
        ran = subprocess.run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=True)
        return len(ran.stdout.split())
    except (OSError, subprocess.SubprocessError):
        return None


def watch(options):
    os.environ.setdefault("AMEM_REPLAY", options.tool)
    import signals_job
    return signals_job.Xids()


def kill_one(options, folder, parks, chance, row):
    with unmodified_job.Job(options, "large", options.ranks, folder, True) as job:
        if not job.until(unmodified_job.EVERY, 60):
            raise RuntimeError("it does not run: " + "; ".join(job.finish(5)))
        time.sleep(chance.uniform(0, 0.3))
        if parks:
            code, _, err, _ = job.tool("park", str(job.ranks[0].pid), "--deadline", str(options.deadline))
            if code != 0:
                raise RuntimeError(f"park: exit code {code}: {err}")
        for rank in job.ranks:
            rank.send_signal(signal.SIGKILL)
        began = time.monotonic()
        for rank in job.ranks:
            rank.wait(60)
        row["seconds_to_end"].append(round(time.monotonic() - began, 3))


def kill_all(options, folder, parks):
    before, beside = used_mib(), others()
    row = {"parked": parks, "kills": 0, "seconds_to_end": [], "problems": []}
    xids, chance = watch(options), random.Random(options.seed)
    for number in range(options.kills):
        if unmodified_job.left(options) < 60:
            row["problems"].append(f"time for {number} only")
            break
        try:
            kill_one(options, os.path.join(folder, f"{parks}.{number}"), parks, chance, row)
            row["kills"] += 1
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row["problems"].append(str(error)[-1000:])
    time.sleep(2)  # the log may be late
    row["xids"] = xids.end()
    after = used_mib()
    row["others_beside"] = None if beside is None else max(beside, others() or 0)
    row["left_mib"] = None if before is None or after is None or row["others_beside"] else [now - then for now, then in zip(after, before)]
    if row["left_mib"] and max(row["left_mib"]) > CLOSE_MIB:
        row["problems"].append(f"{row['left_mib']} MiB are left")
    if row["xids"]["seen"]:
        row["problems"].append(f"Xids: {row['xids']['seen']}")
    row["seconds_to_end"] = unmodified_job.of(row["seconds_to_end"])
    print(row, flush=True)
    return row


def main():
    options = arguments()
    if unmodified_job.refused(options):
        return 2
    if options.imitate:
        options.nccl = ""
    with tempfile.TemporaryDirectory(prefix="amem-kills-") as folder:
        rows = [kill_all(options, folder, parks) for parks in (True, False)]
    ok = not rows[0]["problems"] and rows[0]["kills"] == options.kills
    return unmodified_job.told(options, "unmodified_kills", ok, ranks=options.ranks, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
