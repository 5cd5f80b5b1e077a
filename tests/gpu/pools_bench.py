#!/usr/bin/env python3
"""Pauses and resumes of tags on one GPU, measured by the C interface, with PyTorch's tensors in the pools.

    python3 pools_bench.py --library build/lib/libamem_nccl.so [--parts preserve,discard,...] [--out FILE]

Each part is a process of its own and prints one JSON line, with "ok" where a bar is set:
  preserve   --gib of tensors that are not zero and all change before each pause: pause and resume, medians of --cycles after the first,
             each at most --preserve-ms; the first pause, after --life seconds of life, at most 1.2 times a later one; every byte is compared
  discard    --discard-gib in tensors of 20 MiB, which are segments of PyTorch's: at most --discard-pause-ms and
             --discard-resume-ms
  floor      the driver's calls alone for part discard, in handles of 1 GiB: what no library that gives the memory back can be below
             on this host, where the driver may clear memory when it is released or created
  speeds     only if asked for: where the time of part discard goes, step by step, beside the driver's calls in several forms, on a
             CPU of each NUMA node; needs amem-replay in ../bin of the library's directory, or AMEM_REPLAY
  sparse     --gib of which one byte in a mebibyte is not zero
  unchanged  --gib of tensors that are not zero: pauses before which nothing has changed, one piece of 128 KiB in a hundred, and all;
             medians of seven each, at most --unchanged-ms, --hundredth-ms and --changed-ratio times the first pause; every byte is compared
  prefetch   resume without waiting of --prefetch-gib beside a matrix product: the product slows by at most 10 %, the copy is
             hidden to at least 90 %; a stream that waits sees every byte
  behind     pause without waiting behind a stream, beside a matrix product of another stream
  rival      the same preserve and discard with torch_memory_saver, where it can be imported (it is not in the tree)
Needs PyTorch with a GPU and the library with those that lie beside it; no build tools. Exit code: 0 all bars met or skipped, 1 not,
2 wrong usage. A part that hangs is ended after --limit seconds and reported.
"""
import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import pools_speeds

BEGAN = time.monotonic()
MIB, GIB = 1 << 20, 1 << 30
PIECE = 128 << 10  # what AMem hashes at once
NO_WAIT, ON_STREAM = 1, 2
PARTS = ("preserve", "discard", "floor", "sparse", "unchanged", "prefetch", "behind", "rival")  # without being asked for
ON_REQUEST = ("speeds",)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--library", default=os.environ.get("AMEM_LIBRARY", os.path.join(here, "..", "..", "build", "lib", "libamem_nccl.so")))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # in a child
    parser.add_argument("--out", default="", help="the lines go there, too")
    parser.add_argument("--cycles", type=int, default=6, help="the first is reported apart")
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--discard-gib", type=float, default=24)
    parser.add_argument("--prefetch-gib", type=float, default=8)
    parser.add_argument("--tensor-mib", type=int, default=64, help="size of a tensor in parts that preserve")
    parser.add_argument("--life", type=float, default=10, help="seconds before the first pause of part preserve")
    parser.add_argument("--preserve-ms", type=float, default=360)
    parser.add_argument("--unchanged-ms", type=float, default=30)
    parser.add_argument("--hundredth-ms", type=float, default=35)
    parser.add_argument("--changed-ratio", type=float, default=1.04)
    parser.add_argument("--discard-pause-ms", type=float, default=10)
    parser.add_argument("--discard-resume-ms", type=float, default=6)
    parser.add_argument("--limit", type=int, default=150, help="seconds for each part")
    return parser.parse_args()


class Library:
    """The C interface; a call that fails raises with what it says."""

    def __init__(self, path):
        self.path = os.path.abspath(path)
        self.c = ctypes.CDLL(self.path, mode=ctypes.RTLD_GLOBAL)
        self.c.amem_last_error.restype = ctypes.c_char_p
        self.c.amem_pause.argtypes = [ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p]
        self.c.amem_resume.argtypes = [ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_uint, ctypes.c_int]
        self.c.amem_wait.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p]

    def check(self, result):
        if result != 0:
            raise RuntimeError(f"{result}: {self.c.amem_last_error().decode()}")

    def pool(self, tag, discard=False):
        self.check(self.c.amem_pool(tag.encode(), int(discard)))

    def pause(self, tag, flags=0, stream=None):
        self.check(self.c.amem_pause((ctypes.c_char_p * 1)(tag.encode()), 1, flags, stream))

    def resume(self, tag, flags=0, priority=0):
        self.check(self.c.amem_resume((ctypes.c_char_p * 1)(tag.encode()), 1, flags, priority))

    def wait(self, tag):
        self.check(self.c.amem_wait(tag.encode(), 0, None))

    def wait_stream(self, tag, stream):
        self.check(self.c.amem_wait(tag.encode(), 2, stream))

    def told(self, what):
        length = ctypes.c_size_t(0)
        self.check(self.c.amem_json(what, None, ctypes.byref(length)))
        text = ctypes.create_string_buffer(length.value + 65536)
        length.value += 65536
        self.check(self.c.amem_json(what, text, ctypes.byref(length)))
        return json.loads(text.value)

    def stats(self):
        return self.told(b"stats")

    def memory(self, tag):
        return next(one for one in self.told(b"memory")["tags"] if one["tag"] == tag)


class Tensors:
    """Tensors in a pool. What is in each follows from its number, so that it can be compared without a copy."""

    def __init__(self, torch, library, tag, gib, mib, discard=False):
        self.torch = torch
        library.pool(tag, discard)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(library.path, "amem_alloc", "amem_free")
        self.pool = torch.cuda.MemPool(allocator.allocator())
        self.keep = allocator
        library.check(library.c.amem_pool_enter(tag.encode()))
        with torch.cuda.use_mem_pool(self.pool):
            count = int(gib * GIB / (mib * MIB))
            self.all = [torch.empty(mib * MIB // 8, dtype=torch.int64, device="cuda") for _ in range(count)]
        library.check(library.c.amem_pool_leave())

    def values(self, number, like):
        torch = self.torch
        return torch.arange(1, like.numel() + 1, dtype=torch.int64, device=like.device).mul_(2654435761 + 2 * number).bitwise_xor_(number)

    def fill(self, seed=0):
        self.seed = seed
        for number, tensor in enumerate(self.all):
            tensor.copy_(self.values(number + seed, tensor))
        self.torch.cuda.synchronize()

    def identical(self):
        return all(bool(self.torch.equal(self.values(number + self.seed, tensor), tensor)) for number, tensor in enumerate(self.all))

    def usable(self):
        for tensor in self.all:
            tensor.fill_(1)
        self.torch.cuda.synchronize()
        return True


def timed(torch, call):
    torch.cuda.synchronize()
    began = time.monotonic()
    call()
    return (time.monotonic() - began) * 1e3


def free_mib(torch):
    return torch.cuda.mem_get_info()[0] >> 20


def cycles(torch, options, pause, resume, check, change=None):
    pauses, resumes, identical = [], [], True
    freed = 0
    for number in range(options.cycles):
        if change is not None:
            change(number)
        before = free_mib(torch)
        pauses.append(timed(torch, pause))
        freed = free_mib(torch) - before
        resumes.append(timed(torch, resume))
        identical = identical and check()
    later = {"pause_ms": statistics.median(pauses[1:]), "resume_ms": statistics.median(resumes[1:])} if len(pauses) > 1 else {}
    return {"first_pause_ms": pauses[0], "first_resume_ms": resumes[0], **later, "freed_mib": freed, "identical": identical,
            "pauses_ms": [round(ms, 2) for ms in pauses], "resumes_ms": [round(ms, 2) for ms in resumes]}


def preserve(torch, options, sparse=False):
    library = Library(options.library)
    tensors = Tensors(torch, library, "weights", options.gib, options.tensor_mib)
    if sparse:
        for number, tensor in enumerate(tensors.all):
            tensor.zero_()
            tensor.view(torch.int8)[number % 4096::MIB] = number % 100 + 1
        sums = [int(tensor.sum()) for tensor in tensors.all]
        check = lambda: [int(tensor.sum()) for tensor in tensors.all] == sums  # noqa: E731
        change = None
    else:
        tensors.fill()
        check = tensors.identical
        change = lambda number: tensors.fill(1000 * number)  # noqa: E731
    while not sparse and time.monotonic() - BEGAN < options.life:
        time.sleep(0.05)
    pinned = library.stats()["contents"]["pinned_bytes"] >> 20
    told = cycles(torch, options, lambda: library.pause("weights"), lambda: library.resume("weights"), check, change)
    told.update(gib=options.gib, pinned_before_mib=pinned, memory=library.memory("weights"), age_s=round(time.monotonic() - BEGAN, 1))
    if not sparse:
        told["ok"] = (told["identical"] and told["pause_ms"] <= options.preserve_ms and told["resume_ms"] <= options.preserve_ms
                      and told["first_pause_ms"] <= 1.2 * told["pause_ms"])
    else:
        told["ok"] = told["identical"]
    return told


def unchanged(torch, options):
    library = Library(options.library)
    tensors = Tensors(torch, library, "weights", options.gib, options.tensor_mib)
    saved = [torch.empty_like(tensor) for tensor in tensors.all]  # what must be back
    pieces = options.tensor_mib * MIB // PIECE
    rounds = 0

    def a_hundredth():
        for number, tensor in enumerate(tensors.all):
            tensor.view(pieces, -1)[(number + rounds) % 100::100, rounds] += 1

    def measured(change):
        nonlocal rounds
        rounds += 1
        change()
        for tensor, copy in zip(tensors.all, saved):
            copy.copy_(tensor)
        pause = timed(torch, lambda: library.pause("weights"))
        memory = library.memory("weights")
        resume = timed(torch, lambda: library.resume("weights"))
        identical = all(bool(torch.equal(tensor, copy)) for tensor, copy in zip(tensors.all, saved))
        return {"pause_ms": pause, "resume_ms": resume, "identical": identical, "saved_mib": memory["saved_bytes"] / MIB,
                "unchanged_mib": memory["unchanged_bytes"] / MIB}

    tensors.fill()
    while time.monotonic() - BEGAN < options.life:
        time.sleep(0.05)
    first = measured(lambda: None)
    told = {"gib": options.gib, "first_pause_ms": first["pause_ms"], "identical": first["identical"]}
    for name, change in (("unchanged", lambda: None), ("hundredth", a_hundredth), ("changed", lambda: tensors.fill(1000 * (rounds + 1)))):
        each = [measured(change) for _ in range(7)]
        told["identical"] = told["identical"] and all(one["identical"] for one in each)
        told[name] = {key: round(statistics.median(one[key] for one in each), 3) for key in ("pause_ms", "resume_ms", "saved_mib", "unchanged_mib")}
        told[name]["pauses_ms"] = [round(one["pause_ms"], 2) for one in each]
    told["pinned_mib"] = library.stats()["contents"]["pinned_bytes"] >> 20
    told["ok"] = (told["identical"] and told["unchanged"]["pause_ms"] <= options.unchanged_ms
                  and told["hundredth"]["pause_ms"] <= options.hundredth_ms
                  and told["changed"]["pause_ms"] <= options.changed_ratio * told["first_pause_ms"])
    return told


def discard(torch, options):
    library = Library(options.library)
    tensors = Tensors(torch, library, "cache", options.discard_gib, 20, discard=True)

    tensors.usable()
    told = cycles(torch, options, lambda: library.pause("cache"), lambda: library.resume("cache"), tensors.usable)
    told.update(gib=options.discard_gib, memory=library.memory("cache"))
    told["ok"] = told["pause_ms"] <= options.discard_pause_ms and told["resume_ms"] <= options.discard_resume_ms
    return told


def floor(torch, options):
    alone = pools_speeds.Floor(torch, [GIB] * int(options.discard_gib))
    alone.resume()
    alone.used()
    return {**cycles(torch, options, alone.pause, alone.resume, alone.used), "gib": int(options.discard_gib)}


def speeds(torch, options):
    with tempfile.TemporaryDirectory() as directory:
        os.environ["AMEM_JOURNAL_DIR"] = directory
        library = Library(options.library)
        tensors = Tensors(torch, library, "cache", options.discard_gib, 20, discard=True)
        return pools_speeds.speeds(torch, options, library, tensors.usable, directory)


class Product:
    """A matrix product over and over; `times` of them take some hundred milliseconds."""

    def __init__(self, torch, times=0):
        self.torch = torch
        self.a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.a)
        self.stream = torch.cuda.Stream()
        self.times = times
        if not times:
            self.times = 100
            self.run()
            self.times = max(1, int(100 * 600 / self.run()))

    def submit(self):
        begin, end = self.torch.cuda.Event(enable_timing=True), self.torch.cuda.Event(enable_timing=True)
        with self.torch.cuda.stream(self.stream):
            begin.record()
            for _ in range(self.times):
                self.torch.mm(self.a, self.a, out=self.out)
            end.record()
        return begin, end

    def warm(self):
        """Runs for as long as a timed run, twice: a GPU that has rested is faster for a while, and neither of two runs that are compared may be."""
        self.run()
        self.run()
        return self

    def run(self, beside=None):
        self.torch.cuda.synchronize()
        begin, end = self.submit()
        if beside is not None:
            beside()
        self.torch.cuda.synchronize()
        return begin.elapsed_time(end)


def prefetch(torch, options):
    library = Library(options.library)
    tensors = Tensors(torch, library, "weights", options.prefetch_gib, options.tensor_mib)
    tensors.fill()
    product = Product(torch)
    library.pause("weights")
    library.resume("weights")
    alone, beside, copies, asked, identical = [], [], [], [], True
    for _ in range(options.cycles):
        library.pause("weights")
        copies.append(timed(torch, lambda: library.resume("weights")))
        library.pause("weights")
        alone.append(product.warm().run())

        def ask():
            began = time.monotonic()
            library.resume("weights", NO_WAIT)
            asked.append((time.monotonic() - began) * 1e3)

        beside.append(product.run(ask))
        stream = torch.cuda.current_stream()
        library.wait_stream("weights", stream.cuda_stream)
        identical = identical and tensors.identical()
        library.wait("weights")
    alone_ms, beside_ms, copy_ms = (statistics.median(one[1:]) for one in (alone, beside, copies))
    slowed = beside_ms / alone_ms - 1
    hidden = 1 - max(0.0, beside_ms - alone_ms) / copy_ms
    return {"gib": options.prefetch_gib, "product_ms": alone_ms, "product_beside_ms": beside_ms, "resume_ms": copy_ms, "asked_ms": max(asked),
            "slowed": slowed, "hidden": hidden, "identical": identical, "alone_ms": alone, "beside_ms": beside,
            "ok": identical and slowed <= 0.10 and hidden >= 0.90}


def behind(torch, options):
    library = Library(options.library)
    tensors = Tensors(torch, library, "weights", options.prefetch_gib, options.tensor_mib)
    tensors.fill()
    product = Product(torch)
    writer = torch.cuda.Stream()
    alone, beside, identical, freed = [], [], True, 0
    for number in range(options.cycles):
        alone.append(product.warm().run())
        before = free_mib(torch)

        def save():
            with torch.cuda.stream(writer):  # what the stream holds is saved, too
                tensors.all[0].add_(1)
            library.pause("weights", NO_WAIT | ON_STREAM, writer.cuda_stream)
            library.wait("weights")

        beside.append(product.run(save))
        freed = free_mib(torch) - before
        library.resume("weights")
        tensors.all[0].sub_(1)
        identical = identical and tensors.identical()
    alone_ms, beside_ms = statistics.median(alone[1:]), statistics.median(beside[1:])
    return {"gib": options.prefetch_gib, "product_ms": alone_ms, "product_beside_ms": beside_ms, "slowed": beside_ms / alone_ms - 1, "freed_mib": freed,
            "identical": identical, "alone_ms": alone, "beside_ms": beside, "last_pause_ms": library.memory("weights")["last_pause_ms"], "ok": identical}


def rival(torch, options):
    try:
        import torch_memory_saver as package  # not in the tree
    except ImportError as error:
        return {"skipped": f"torch_memory_saver: {error}"}
    saver = package.torch_memory_saver
    try:
        saver.hook_mode = "torch"
    except Exception as error:  # noqa: BLE001
        print(f"torch_memory_saver: hook mode: {error}", file=sys.stderr)
    told = {"version": getattr(package, "__version__", "unknown")}
    for tag, gib, mib, backup in (("weights", options.gib, options.tensor_mib, True), ("cache", options.discard_gib, 20, False)):
        with saver.region(tag=tag, enable_cpu_backup=backup):
            tensors = [torch.full((mib * MIB // 8,), number + 1, dtype=torch.int64, device="cuda") for number in range(int(gib * GIB / (mib * MIB)))]
        torch.cuda.synchronize()
        sums = [number + 1 for number in range(len(tensors))]
        check = (lambda held=tensors, want=sums: all(bool((t == s).all()) for t, s in zip(held, want))) if backup else (lambda: True)
        told["preserve" if backup else "discard"] = cycles(torch, options, lambda one=tag: saver.pause(one), lambda one=tag: saver.resume(one), check)
        saver.pause(tag)
        del tensors
    return told


def child(options):
    signal.alarm(options.limit)  # whatever hangs, this process ends
    try:
        import torch
    except ImportError as error:
        return {"skipped": f"PyTorch: {error}"}
    if not torch.cuda.is_available():
        return {"skipped": "PyTorch sees no GPU"}
    torch.cuda.init()
    call = {"preserve": preserve, "discard": discard, "sparse": lambda t, o: preserve(t, o, True), "unchanged": unchanged, "prefetch": prefetch, "behind": behind,
            "floor": floor, "speeds": speeds, "rival": rival}[options.part]
    told = call(torch, options)
    return {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, **told}


def run_part(part, options):
    command = [sys.executable, os.path.abspath(__file__), "--part", part] + sys.argv[1:]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit + 15, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0 and lines:
            return {"part": part, **json.loads(lines[-1])}
        return {"part": part, "ok": False, "error": f"exit code {done.returncode}", "stderr": done.stderr[-2000:]}
    except subprocess.TimeoutExpired:
        return {"part": part, "ok": False, "error": f"did not end within {options.limit} s"}


def main():
    options = arguments()
    if options.part:
        print(json.dumps(child(options)))
        sys.stdout.flush()
        os._exit(0)  # tensors in pools need not be freed one by one
    parts = [part for part in options.parts.split(",") if part]
    if any(part not in PARTS + ON_REQUEST for part in parts):
        print(f"unknown part; known: {', '.join(PARTS + ON_REQUEST)}", file=sys.stderr)
        return 2
    bad = False
    for part in parts:
        line = json.dumps(run_part(part, options))
        print(line, flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        bad = bad or json.loads(line).get("ok") is False
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
