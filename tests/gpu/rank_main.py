"""What the PyTorch jobs of this folder have in common: each rank runs a job under a time limit, and rank 0 reports it in one JSON line; and what a record
says of where it was made."""
import contextlib
import json
import os
import signal
import subprocess
import sys

CLOSE = 32 << 20  # of an account to what the driver says


def device(rank):
    """The number of this rank's GPU; ranks share the GPUs where there are fewer, which NCCL allows from 2.30 on if it is asked to."""
    import torch
    return int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()


def gpus_here():
    """{"gpu", "gpus", "driver"} of this machine, as nvidia-smi says; null where it does not."""
    found = {"gpu": None, "gpus": None, "driver": None}
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError, ValueError):
        ran = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=True)
        lines = ran.stdout.strip().splitlines()
        found["gpu"], found["driver"] = lines[0].split(", ")
        found["gpus"] = len(lines)
    return found


def command():
    """The command line of this program, without the folders of paths."""
    return " ".join(word.rstrip("/").rpartition("/")[2] if word.startswith("/") else word for word in sys.argv)


def used():
    """Bytes of this process's GPU that the driver has given out, to anyone."""
    import torch
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def checked_account(used_before, taken, left):
    """Of a rank alone on its GPU, in a pause: the bytes that it took and those that it left, by kind, are what the driver had given out, to CLOSE. In MiB."""
    off = used_before - taken - sum(left.values()), sum(left.values()) - used()
    if max(map(abs, off)) > CLOSE:
        raise AssertionError(f"the account of a pause is off by {off} bytes: used {used_before}, taken {taken}, left {left}")
    return {"used_mib": used_before >> 20, "taken_mib": taken >> 20, "left_mib": {kind: size >> 20 for kind, size in left.items()}, "off_mib": max(map(abs, off)) / (1 << 20)}


def run(program, job, arguments, echo=()):
    """Runs job(options, rank, size, report) with the options that arguments() parses, among them time_limit and json; the exit code.
    `echo`: options that the report names."""
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print(f"{program}.py: refused: NCCL_NVLS_ENABLE must be 0", file=sys.stderr)
        return 2
    options = arguments()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    signal.alarm(options.time_limit)  # whatever hangs, this ends it
    report = {"program": program, "ranks": size, "ok": False, **{key: getattr(options, key) for key in echo}}
    code = 1
    try:
        job(options, rank, size, report)
        report["ok"] = True
        code = 0
    except Exception as error:  # the line must come whatever went wrong
        report["error"] = f"{type(error).__name__}: {error}"
        print(f"rank {rank}: {report['error']}", file=sys.stderr, flush=True)
    if rank == 0:
        line = json.dumps(report)
        print(line, flush=True)
        if options.json:
            with open(options.json, "w") as file:
                file.write(line + "\n")
    if code != 0:
        os._exit(code)  # taking the groups down in order could hang
    return code
