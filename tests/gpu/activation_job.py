#!/usr/bin/env python3
"""The ways by which an installed wheel gets AMem into a PyTorch job, each with a job of its own, on this machine's GPUs.

    pip install --no-index --no-deps --target TARGET DIST/amem_nccl-*.whl
    python3 -m zipfile -e torch_memory_saver-*.whl TMS                              # for the last three
    python3 tests/gpu/activation_job.py --target TARGET [--tms TMS] [--json FILE]

    run      amem run -- torchrun --nproc-per-node 2 script.py, where script.py has `with amem.paused()` and nothing else of AMem
    fork     the entry point with AMEM_ENABLE=1 and no `amem run`; ranks are forked by torch.multiprocessing
    spawn    the same with ranks that it spawns
    run+tms, fork+tms, spawn+tms   the same with torch_memory_saver's library in LD_PRELOAD before

Each rank sums whole numbers before and after the pause, and compares. The table has the memory of the GPU before, while and after, by
torch.cuda.mem_get_info, and what AMem said of the way; each way must be said once by each rank. Needs no network. `--device stand-in` tries
the script out: on gloo, with NCCL's memory made by the stand-ins of LD_LIBRARY_PATH, which says nothing about a GPU.
Exit code 0: all is well; 1: not; 2: it could not be tried.
"""
import argparse
import ctypes
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

CASES = ("run", "fork", "spawn", "run+tms", "fork+tms", "spawn+tms")
ELEMENTS = 1 << 24
CASE_SECONDS = 150
SLACK_BYTES = 64 << 20  # what others on the GPU, and the driver itself, may come and go with
SCRIPT = """import activation_job
import torch
import amem

rank, size = activation_job.begin()
before = activation_job.look(rank, size)
with amem.paused():
    paused = activation_job.memory()
activation_job.end(rank, size, before, paused)
"""

# ---- what a rank does -------------------------------------------------------------------------------------------------------


class StandIn:
    """NCCL's memory without a GPU: a communicator of the stand-in for NCCL, on the stand-in for the driver."""

    def __init__(self, rank, size):
        self.cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self.cuda.stand_in_cuda_bytes_in_use.restype = ctypes.c_uint64
        assert self.cuda.cuInit(0) == 0 and self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank) == 0
        assert self.cuda.cuCtxSetCurrent(context) == 0
        self.rank, nccl, communicator = rank, ctypes.CDLL(os.environ["ACTIVATION_STAND_IN_NCCL"]), ctypes.c_void_p()

        class UniqueId(ctypes.Structure):
            _fields_ = [("internal", ctypes.c_char * 128)]

        # The stand-in calls this one from its other names through the loader, which would find the NCCL of PyTorch first.
        nccl.ncclCommInitRankConfig.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int, ctypes.c_void_p]
        unique = UniqueId(os.path.basename(os.environ["ACTIVATION_FOLDER"]).encode())
        assert nccl.ncclCommInitRankConfig(ctypes.byref(communicator), size, unique, rank, None) == 0

    def used(self):
        return self.cuda.stand_in_cuda_bytes_in_use(self.rank)


_stand_in = None


def memory():
    """Bytes of this rank's GPU that are in use, by all processes."""
    import torch
    if _stand_in:
        return _stand_in.used()
    free, total = torch.cuda.mem_get_info()
    return total - free


def device():
    return "cpu" if os.environ["ACTIVATION_DEVICE"] == "stand-in" else "cuda"


def begin():
    """The process group of a rank. Notes whether AMem was there before this program asked for it."""
    global _stand_in
    from torch import distributed
    import torch
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device() == "cuda":
        torch.cuda.set_device(rank)
    else:
        _stand_in = StandIn(rank, size)
    distributed.init_process_group("nccl" if device() == "cuda" else "gloo", init_method="file://" + os.environ["ACTIVATION_FOLDER"] + "/store",
                                   rank=rank, world_size=size)
    return rank, size


def sums_are_right(rank, size):
    """All-reduces of whole numbers, whose sums are known exactly."""
    import torch
    from torch import distributed
    numbers = torch.arange(ELEMENTS // (64 if _stand_in else 1), device=device(), dtype=torch.int64)
    for factor in (1, 3):
        mine = numbers * (rank + 1) * factor
        distributed.all_reduce(mine)
        if not torch.equal(mine, numbers * (size * (size + 1) // 2 * factor)):
            return False
    return True


def look(rank, size):
    import torch
    right = sums_are_right(rank, size)
    if device() == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return {"right_before": right, "before": memory()}


def end(rank, size, before, paused):
    """Looks again, and writes what this rank saw."""
    import amem
    from torch import distributed
    row = {**before, "while": paused, "after": memory(), "right_after": sums_are_right(rank, size), "rank": rank,
           "nccl": [[one["version"], one["under_amem"], one["way"], one["why_not"]] for one in amem.stats()["nccl_libraries"]]}
    with open("/proc/self/maps", encoding="utf-8") as file:
        row["mapped"] = sorted(set(re.findall(r"(libamem_nccl|torch_memory_saver_hook_mode_preload)[\w.]*\.so", file.read())))
    with open(os.environ["ACTIVATION_FOLDER"] + "/row.%d" % rank, "w", encoding="utf-8") as file:
        json.dump(row, file)
    distributed.destroy_process_group()


def worker(rank, size):
    """A rank that torch.multiprocessing has started."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})  # pylint: disable=exec-used


def launch(method, size):
    """The program of the cases fork and spawn. AMem must have come with torch, and not with this."""
    import torch.multiprocessing
    if "amem" not in sys.modules:
        raise SystemExit("importing torch did not bring AMem: is the entry point installed, and TORCH_DEVICE_BACKEND_AUTOLOAD not 0?")
    torch.multiprocessing.start_processes(worker, (size,), nprocs=size, start_method=method)


# ---- the cases --------------------------------------------------------------------------------------------------------------


def preload_of(folder):
    """torch_memory_saver's library for hook mode `preload`, for the CUDA of this PyTorch, and where its own libraries are."""
    import torch
    found = sorted(glob.glob(os.path.join(folder, "**", "*hook_mode_preload*.so"), recursive=True))
    of_13 = [path for path in found if "_cu13" in path]
    mine = of_13 if of_13 and (torch.version.cuda or "").startswith("13") else [path for path in found if "_cu13" not in path]
    site = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
    folders = [one for name in ("cu13", "cuda_runtime") if os.path.isdir(one := os.path.join(site, "nvidia", name, "lib"))]
    return (mine[0] if mine else None), folders


def environment_of(case, options, folder):
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "AMEM_ENABLE", "AMEM_LIBRARY")}
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [options.target, here] + ([options.tms] if "tms" in case else []) + [environment.get("PYTHONPATH", "")]
    environment.update(PYTHONPATH=":".join(path for path in paths if path), AMEM_LOG="info", AMEM_JOURNAL_DIR=folder + "/journal",
                       AMEM_SOCKET_DIR=folder, PYTHONDONTWRITEBYTECODE="1", ACTIVATION_FOLDER=folder, ACTIVATION_DEVICE=options.device,
                       ACTIVATION_STAND_IN_NCCL=options.stand_in_nccl, AMEM_SIM_WORLD=folder + "/world", OMP_NUM_THREADS="1")
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    if not case.startswith("run"):
        environment["AMEM_ENABLE"] = "1"
    if "tms" in case:
        preload, folders = preload_of(options.tms)
        if preload is None:
            raise FileNotFoundError("no library for hook mode preload under %s" % options.tms)
        environment.update(LD_PRELOAD=preload, TMS_INIT_ENABLE="0")  # it is there, and has nothing to manage
        environment["LD_LIBRARY_PATH"] = ":".join(folders + [environment.get("LD_LIBRARY_PATH", "")]).strip(":")
    return environment


def command_of(case, options, folder):
    if case.startswith("run"):
        with open(folder + "/script.py", "w", encoding="utf-8") as file:
            file.write(SCRIPT)
        return [sys.executable, "-m", "amem", "run", "--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1",
                "--nproc-per-node", str(options.gpus), folder + "/script.py"]
    return [sys.executable, os.path.abspath(__file__), "--launch", case.partition("+")[0], "--gpus", str(options.gpus)]


def run_case(case, options):
    """The outcome of one case: {"case", "ok", "failures": [words], "ranks": [rows], "said": [lines]}."""
    folder = tempfile.mkdtemp(prefix="amem-act-", dir="/tmp")
    outcome = {"case": case, "ok": False, "failures": [], "ranks": [], "said": []}
    try:
        with open(folder + "/log", "wb") as log:
            process = subprocess.Popen(command_of(case, options, folder), env=environment_of(case, options, folder), stdin=subprocess.DEVNULL,
                                       stdout=log, stderr=log, start_new_session=True, cwd=folder)
            try:
                code = process.wait(timeout=CASE_SECONDS)
            except subprocess.TimeoutExpired:
                code = "no end in %d s" % CASE_SECONDS
            finally:
                end_group(process)
        with open(folder + "/log", encoding="utf-8", errors="replace") as file:
            text = file.read()
        outcome["said"] = [line.strip() for line in text.splitlines() if "on, by" in line or "attached by" in line]
        outcome["ranks"] = [json.load(open(path, encoding="utf-8")) for path in sorted(glob.glob(folder + "/row.*"))]
        outcome["failures"] = judge(case, options, outcome, code)
        if outcome["failures"]:
            outcome["output"] = text[max(0, text.find("Traceback")):][:3000]
        outcome["ok"] = not outcome["failures"]
    except OSError as error:
        outcome["failures"].append(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def end_group(process):
    """Ends the launcher and all that it started, in this session of processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def judge(case, options, outcome, code):
    failures = [] if code == 0 else ["exit code %s" % code]
    rows = outcome["ranks"]
    if len(rows) != options.gpus:
        return failures + ["%d of %d ranks wrote their row" % (len(rows), options.gpus)]
    way = "preload" if case.startswith("run") else "attach"
    for row in rows:
        name = "rank %d: " % row["rank"]
        failures += [name + "sums are wrong"] * (not (row["right_before"] and row["right_after"]))
        failures += [name + "the pause freed nothing"] * (row["while"] >= row["before"])
        failures += [name + "%d bytes less are in use after the resume" % (row["before"] - row["after"])] * (row["after"] < row["before"] - SLACK_BYTES)
        failures += [name + "NCCL %s is %s" % (version, found or "not under AMem: " + why) for version, under, found, why in row["nccl"] if not under or found != way]
        failures += [name + "no NCCL"] * (not row["nccl"])
        wanted = ["libamem_nccl"] + ["torch_memory_saver_hook_mode_preload"] * ("tms" in case)
        failures += [name + "%s is not in the process" % one for one in wanted if one not in row["mapped"]]
    failures += wrongly_said(case, options, outcome["said"], rows)
    return failures


def wrongly_said(case, options, said, rows):
    """Each rank says once which NCCL is under AMem, and by which way; by the entry point also who attached, and nobody else."""
    way = "preload" if case.startswith("run") else "attach"
    on = [line for line in said if "on, by %s" % way in line]
    most = sum(len(row["nccl"]) for row in rows)
    failures = [] if options.gpus <= len(on) <= most else ["%d times said to be on by %s, by %d ranks" % (len(on), way, options.gpus)]
    attached = [line for line in said if "attached by the entry point" in line]
    if case.startswith("run") and attached:
        failures.append("preloaded, and attached by the entry point as well")
    # A forked rank has what its parent attached; a spawned one, and the parent itself, attach.
    wanted = {"run": 0, "fork": 1, "spawn": 1 + options.gpus}[case.partition("+")[0]]
    if not case.startswith("run") and len(attached) < min(1, wanted):
        failures.append("nobody said that the entry point attached")
    if len(attached) > wanted + 1:  # multiprocessing's resource tracker may import nothing, or this
        failures.append("the entry point said %d times that it attached" % len(attached))
    return failures


def mib(count):
    return "%d" % (count >> 20)


def show(outcomes):
    print("%-10s %4s %12s %12s %12s %7s  %s" % ("case", "rank", "before MiB", "while MiB", "after MiB", "sums", "NCCL"))
    for outcome in outcomes:
        for row in outcome["ranks"]:
            sums = "right" if row["right_before"] and row["right_after"] else "WRONG"
            nccl = ", ".join("%s by %s" % (version, way or "none") for version, _under, way, _why in row["nccl"])
            print("%-10s %4d %12s %12s %12s %7s  %s" % (outcome["case"], row["rank"], mib(row["before"]), mib(row["while"]), mib(row["after"]), sums, nccl))
        for failure in outcome["failures"]:
            print("%-10s FAILED: %s" % (outcome["case"], failure))
        if outcome.get("output"):
            print("\n".join("           | " + line for line in outcome["output"].splitlines()[:15]))
    print("%d of %d ways are right" % (sum(outcome["ok"] for outcome in outcomes), len(outcomes)))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", help="folder that the wheel was installed into (pip install --target)")
    parser.add_argument("--tms", default="", help="folder with torch_memory_saver's wheel, unpacked; without it, its cases are left out")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "stand-in"])
    parser.add_argument("--stand-in-nccl", default="", help="for --device stand-in: its libnccl.so.2")
    parser.add_argument("--json", default="", help="file for the results")
    parser.add_argument("--time-limit", type=int, default=900, help="seconds; the process ends itself then")
    parser.add_argument("--launch", choices=["fork", "spawn"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    signal.alarm(options.time_limit)
    if options.launch:
        return launch(options.launch, options.gpus)
    if not options.target or not os.path.exists(os.path.join(options.target, "amem", "libamem_nccl.so")):
        print("activation_job.py: --target has no amem/libamem_nccl.so; install the wheel there: pip install --no-index --no-deps --target DIR WHEEL", file=sys.stderr)
        return 2
    try:
        import torch
    except ImportError as error:
        print("activation_job.py: this Python has no PyTorch: %s" % error, file=sys.stderr)
        return 2
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        print("activation_job.py: %d GPUs are visible, %d are asked for" % (torch.cuda.device_count(), options.gpus), file=sys.stderr)
        return 2
    options.target, options.tms = os.path.abspath(options.target), options.tms and os.path.abspath(options.tms)
    cases = [case for case in options.cases.split(",") if options.tms or "tms" not in case]
    outcomes = [run_case(case, options) for case in cases]
    show(outcomes)
    result = {"program": "activation_job", "torch": torch.__version__, "gpus": options.gpus, "device": options.device, "cases": outcomes,
              "left_out": [case for case in CASES if case not in cases], "ok": all(outcome["ok"] for outcome in outcomes)}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
