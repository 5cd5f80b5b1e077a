#!/usr/bin/env python3
"""AMEM_SCOPE=all beside others that manage a process's GPU memory: the tag "program" is paused and resumed, and theirs keeps its contents.

    NCCL_NVLS_ENABLE=0 PYTHONPATH=ncclpatch/python python3 tests/gpu/beside_job.py --library build/lib/libamem_nccl.so

Each case is a process of its own, with one GPU, and a tensor of PyTorch's beside:
  pool        memory of a tag of AMem, which is paused and resumed between the pauses of "program", and while "program" is paused
  mempool     a torch.cuda.MemPool, dropped at the end
  expandable  PyTorch's expandable segments
  async       PyTorch's backend cudaMallocAsync, whose memory the driver keeps: a pause leaves it usable
  tms         torch_memory_saver's library preloaded after AMem's, and its pauses in turns with ours (--tms: its unpacked wheel, where it is
              not installed)
  sanitizer   a program of the CUDA runtime alone under compute-sanitizer: no error, as without AMem
Prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import contextlib
import ctypes
import glob
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True
import activation_job  # noqa: E402

MIB = 1 << 20
SLACK_MIB = 16  # what a context grows by meanwhile
CASES = ("pool", "mempool", "expandable", "async", "tms", "sanitizer")
CONFIGURED = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}  # PYTORCH_CUDA_ALLOC_CONF


def installed(package):
    """The folder that holds a package; empty: it is not there."""
    found = importlib.util.find_spec(package)
    return os.path.dirname(os.path.dirname(found.origin)) if found and found.origin else ""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="libamem_nccl.so", help="to preload")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tms", default=installed("torch_memory_saver"), help="folder with torch_memory_saver (default: where it is installed)")
    parser.add_argument("--mib", type=int, default=1024, help="of each piece of memory (default 1024)")
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--time-limit", type=int, default=240, help="seconds; everything ends itself then")
    parser.add_argument("--json", default="", help="the last line goes there too")
    parser.add_argument("--case", default="", choices=["", *CASES], help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the process of a case -------------------------------------------------------------------------------------------------


class Pieces:
    """Tensors that hold a pattern each; `inside` says under whose management they are made."""

    def __init__(self, torch, mib):
        self.torch, self.count, self.made = torch, mib * MIB // 4, {}

    def pattern(self, number):
        return self.torch.arange(self.count, dtype=self.torch.int32, device="cuda") * 7 + number

    def add(self, name, inside=contextlib.nullcontext()):
        with inside:
            tensor = self.torch.empty(self.count, dtype=self.torch.int32, device="cuda")
        tensor.copy_(self.pattern(len(self.made)))
        self.torch.cuda.synchronize()
        self.made[name] = tensor

    def check(self, when):
        wrong = [name for number, (name, tensor) in enumerate(self.made.items()) if not self.torch.equal(tensor, self.pattern(number))]
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        if wrong:
            raise RuntimeError("%s the contents of these are wrong: %s" % (when, ", ".join(wrong)))


def case_main(options):
    signal.alarm(options.time_limit)
    if options.case == "sanitizer":
        return runtime_alone(options)
    import torch
    torch.cuda.set_device(0)
    pieces, after, report = Pieces(torch, options.mib), None, {"case": options.case, "rows": []}
    pieces.add("PyTorch's own")
    import amem
    if options.case == "pool":
        pieces.add("the tag's", amem.pool("weights"))
        after = (lambda: amem.pause("weights"), lambda: amem.resume("weights"))
    elif options.case == "mempool":
        pool = torch.cuda.MemPool()
        pieces.add("the MemPool's", torch.cuda.use_mem_pool(pool))
    elif options.case == "tms":
        from torch_memory_saver import torch_memory_saver as saver
        saver.hook_mode = "preload"
        pieces.add("torch_memory_saver's", saver.region(tag="theirs", enable_cpu_backup=True))
        after = (lambda: saver.pause("theirs"), lambda: saver.resume("theirs"))
    pieces.check("before any pause")

    def used():
        free, total = torch.cuda.mem_get_info()
        return (total - free) // MIB

    for _ in range(options.cycles):
        row = {"used_mib": used()}
        began = time.monotonic()
        amem.pause("program")
        row["pause_ms"], row["left_mib"] = 1e3 * (time.monotonic() - began), used()
        if options.case == "pool":  # two tags of one process, in any order
            after[0]()
            row["both_left_mib"] = used()
            after[1]()
        if options.case == "async":
            report["usable"] = bool((pieces.made["PyTorch's own"][:1024] == pieces.pattern(0)[:1024]).all())
        began = time.monotonic()
        amem.resume("program")
        row["resume_ms"] = 1e3 * (time.monotonic() - began)
        pieces.check("after a resume")
        if after:
            after[0]()
            row["theirs_left_mib"] = used()
            after[1]()
            pieces.check("after theirs has come back")
        report["rows"].append(row)
    report["memory"] = amem.memory()
    if options.case == "mempool":
        del pieces.made["the MemPool's"], pool
        torch.cuda.empty_cache()
        amem.pause("program")
        amem.resume("program")
        pieces.check("after the MemPool has gone")
    print(json.dumps(report), flush=True)
    return 0


def runtime_alone(options):
    """cudaMalloc, a fill, a pause and a resume, and a copy back; without AMem where it was not preloaded."""
    import torch  # for where its libcudart is
    runtime = ctypes.CDLL(glob.glob(os.path.join(os.path.dirname(torch.__file__), "..", "nvidia", "*", "lib", "libcudart.so.1?"))[0])
    library = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p(), ctypes.c_size_t(options.mib * MIB)
    back = ctypes.create_string_buffer(4096)

    def check(result, what):
        if result != 0:
            raise RuntimeError("%s returned %d" % (what, result))

    check(runtime.cudaMalloc(ctypes.byref(pointer), size), "cudaMalloc")
    check(runtime.cudaMemset(pointer, 0x5a, size), "cudaMemset")
    check(runtime.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
    names, paused = (ctypes.c_char_p * 1)(b"program"), hasattr(library, "amem_pause")
    for _ in range(options.cycles if paused else 0):
        check(library.amem_pause(names, ctypes.c_size_t(1), 0, None), "amem_pause")
        check(library.amem_resume(names, ctypes.c_size_t(1), 0, 0), "amem_resume")
    check(runtime.cudaMemcpy(back, pointer, ctypes.c_size_t(4096), 2), "cudaMemcpy")
    check(runtime.cudaFree(pointer), "cudaFree")
    print(json.dumps({"case": "sanitizer", "rows": [], "paused": paused, "same": set(back.raw) == {0x5a}}), flush=True)
    return 0


# ---- all cases -------------------------------------------------------------------------------------------------------------


def environment_of(case, options, folder):
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF")}
    environment.update(LD_PRELOAD=os.path.abspath(options.library), AMEM_SCOPE="all", AMEM_JOURNAL_DIR=folder + "/journal")
    if case in CONFIGURED:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = CONFIGURED[case]
    if case == "tms":
        theirs, folders = activation_job.preload_of(options.tms)
        environment["LD_PRELOAD"] += ":" + theirs
        environment["PYTHONPATH"] = ":".join([options.tms, environment.get("PYTHONPATH", "")])
        environment["LD_LIBRARY_PATH"] = ":".join(folders + [environment.get("LD_LIBRARY_PATH", "")]).strip(":")
    return environment


def ran(command, environment, seconds):
    """(exit code or words, what it wrote, the report of its last line of JSON)."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, code = process.communicate()[0], "no end in %d s" % seconds
    lines = [line for line in said.splitlines() if line.startswith('{"case"')]
    return code, said, json.loads(lines[-1]) if lines else {"rows": []}


def judge(case, options, report):
    """What is wrong in the report of a process that ended well."""
    rows, wrong = report["rows"], []
    if case != "sanitizer" and not rows:
        return ["nothing was paused"]
    if case == "sanitizer":
        return [] if report.get("paused") and report.get("same") else ["it was not paused, or its memory was not the same"]
    if case == "async":
        return [] if report.get("usable") else ["a pause took what the driver's own pool holds"]
    pieces = 2 if case in ("pool", "mempool", "tms") else 1
    taken = 1 if case == "pool" else pieces  # a tag's own memory is not the program's
    for row in rows:
        if row["used_mib"] - row["left_mib"] < taken * options.mib - SLACK_MIB:
            wrong.append("a pause left %d of %d MiB" % (row["left_mib"], row["used_mib"]))
        if case == "pool" and row["used_mib"] - row["both_left_mib"] < pieces * options.mib - SLACK_MIB:
            wrong.append("pauses of both left %d of %d MiB" % (row["both_left_mib"], row["used_mib"]))
    return wrong


def one_case(case, options, folder):
    work = os.path.join(folder, case)
    os.makedirs(work)
    environment = environment_of(case, options, work)
    command = [sys.executable, os.path.abspath(__file__), "--case", case, "--cycles", str(options.cycles), "--time-limit", "100",
               "--mib", str(options.mib if case != "sanitizer" else 64)]
    checker = shutil.which("compute-sanitizer") if case == "sanitizer" else None
    if case == "sanitizer" and checker is None:
        return {"skipped": "there is no compute-sanitizer"}
    code, said, report = ran(([checker, "--tool", "memcheck", "--error-exitcode", "9"] if checker else []) + command, environment, 110)
    wrong = judge(case, options, report) if code == 0 else ["exit code %s: %s" % (code, said[-600:])]
    medians = {key: round(statistics.median(row[key] for row in report["rows"]), 1) for key in (report["rows"] or [{}])[0]}
    tags = {row["tag"]: row["bytes"] // MIB for row in report.get("memory", {}).get("tags", [])}
    return {"ok": not wrong, **medians, "tags_mib": tags, **({"wrong": wrong[:3]} if wrong else {})}


def main():
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("beside_job.py: refused: NCCL_NVLS_ENABLE must be 0", file=sys.stderr)
        return 2
    options = arguments()
    if options.case:
        return case_main(options)
    signal.alarm(options.time_limit)
    report = {"program": "beside_job", "ok": True, "mib": options.mib, "cycles": options.cycles, "cases": {}}
    with tempfile.TemporaryDirectory(prefix="amem-beside-", dir="/tmp") as folder:
        for case in options.cases.split(","):
            row = {"skipped": "there is no torch_memory_saver"} if case == "tms" and not options.tms else one_case(case, options, folder)
            report["cases"][case] = row
            report["ok"] = report["ok"] and row.get("ok", True)
            print("%-10s %s" % (case, json.dumps(row)), flush=True)
    report["error"] = "; ".join("%s: %s" % (case, row["wrong"][0]) for case, row in report["cases"].items() if row.get("wrong"))
    line = json.dumps(report)
    print(line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
