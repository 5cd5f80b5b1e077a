#!/usr/bin/env python3
"""What an allocation of the program costs under AMEM_SCOPE=all, by size, in time and in memory, in turns with stock.

    python3 tests/gpu/allocation_costs.py --library build/lib/libamem_nccl.so --json OUT

Each turn is a process of its own without AMem and one with it. `sizes`: the median microseconds of a cudaMalloc and of a cudaFree of
each size, some of them alive at once. `small`: 100 000 allocations of 1 byte to 64 KiB. `pytorch`: some steps of a transformer with
PyTorch's allocator. `lost_mib` is how much more of the GPU is in use under AMem than stock, once all is allocated and, as `after_mib`,
once it is freed again.

The last line is JSON. Exit codes: 0 measured, 1 a process failed.
"""
import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True
import freeze_job  # noqa: E402
import rank_main  # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = ((4 * KIB, 400), (1 * MIB, 400), (2 * MIB, 200), (20 * MIB, 100), (1 * GIB, 12))  # and how many are alive at once
ROUNDS = 5   # that a size is allocated and freed, the first not counted
SMALL = 100_000


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libamem_nccl.so, to preload")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limit", type=int, default=120, help="seconds for one process")
    parser.add_argument("--json", default="", help="the last line goes there too")
    parser.add_argument("--measure", default="", choices=["", "sizes", "small", "pytorch"], help=argparse.SUPPRESS)
    return parser.parse_args()


class Gpu:
    def __init__(self):
        import torch

        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        self.torch = torch
        with open("/proc/self/maps", encoding="utf-8") as maps:
            self.runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart.so" in line))
        self.before = self.free()

    def free(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def used_mib(self):
        """MiB of this GPU in use now, beyond those at the beginning."""
        return (self.before - self.free()) / MIB

    @staticmethod
    def check(result):
        if result != 0:
            raise RuntimeError(f"the CUDA runtime answered {result}")

    def timed(self, call, *arguments_):
        """Microseconds of a call."""
        began = time.perf_counter_ns()
        result = call(*arguments_)
        took = time.perf_counter_ns() - began
        self.check(result)
        return took / 1000

    def malloc(self, pointer, size):
        return self.timed(self.runtime.cudaMalloc, ctypes.byref(pointer), ctypes.c_size_t(size))

    def give_back(self, pointer):
        return self.timed(self.runtime.cudaFree, pointer)


def sizes(gpu):
    found = {}
    for size, count in SIZES:
        pointers, times = [ctypes.c_void_p() for _ in range(count)], {"malloc_us": [], "free_us": []}
        used = 0.0
        for turn in range(ROUNDS):
            malloc = [gpu.malloc(pointer, size) for pointer in pointers]
            used = max(used, gpu.used_mib())
            free = [gpu.give_back(pointer) for pointer in pointers]
            if turn > 0:
                times["malloc_us"] += malloc
                times["free_us"] += free
        found[str(size)] = {**{what: statistics.median(took) for what, took in times.items()}, "asked_mib": size * count / MIB, "used_mib": used}
    return found


def small(gpu):
    numbers = random.Random(5)
    asked = [numbers.randint(1, 64 * KIB) for _ in range(SMALL)]
    pointers = [ctypes.c_void_p() for _ in asked]
    malloc = [gpu.malloc(pointer, size) for pointer, size in zip(pointers, asked)]
    used = gpu.used_mib()
    numbers.shuffle(pointers)
    free = [gpu.give_back(pointer) for pointer in pointers]
    return {"malloc_us": statistics.median(malloc), "free_us": statistics.median(free), "all_s": (sum(malloc) + sum(free)) / 1e6,
            "asked_mib": sum(asked) / MIB, "used_mib": used, "after_mib": gpu.used_mib()}


def pytorch(gpu):
    torch = gpu.torch
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True), 24, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    times = []
    for step in range(40):
        batch = torch.randn(4, 256 + 64 * (step % 5), 1024, device="cuda")  # lengths vary, as they do for the allocator of a real job
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            model(batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        times += [1000 * (time.perf_counter() - began)] if step >= 10 else []
    return {"step_ms": statistics.median(times), "asked_mib": torch.cuda.memory_reserved() / MIB, "used_mib": gpu.used_mib()}


def measured(options, what, with_amem):
    with tempfile.TemporaryDirectory(prefix="amem-costs-") as folder:
        environment = dict(os.environ, AMEM_JOURNAL_DIR=folder, AMEM_SCOPE="all")
        if with_amem:
            environment["LD_PRELOAD"] = os.path.abspath(options.library)
        done = subprocess.run([sys.executable, os.path.abspath(__file__), "--library", options.library, "--measure", what, "--limit", str(options.limit)],
                              env=environment, capture_output=True, text=True, timeout=options.limit + 20, check=False)
    if done.returncode != 0:
        sys.exit(f"{what} {'with AMem' if with_amem else 'stock'} ended with {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(stock, amem):
    """The medians of equal figures of two lists, side by side; what is lost is a difference of medians."""
    if isinstance(stock[0], dict):
        found = {key: compared([one[key] for one in stock], [one[key] for one in amem]) for key in stock[0]}
        if "used_mib" in found:
            found["lost_mib"] = round(found["used_mib"][1] - found["used_mib"][0], 1)
        return found
    return [round(statistics.median(stock), 3), round(statistics.median(amem), 3)]


def main():
    options = arguments()
    if options.measure:
        freeze_job.end_after(options.limit)
        print(json.dumps({"sizes": sizes, "small": small, "pytorch": pytorch}[options.measure](Gpu())), flush=True)
        os._exit(0)
    told = {}
    for what in ("sizes", "small", "pytorch"):
        turns = {False: [], True: []}
        for turn in range(options.turns):
            for with_amem in ((False, True) if turn % 2 == 0 else (True, False)):
                turns[with_amem].append(measured(options, what, with_amem))
        told[what] = compared(turns[False], turns[True])
        print(f"{what}, stock and AMem: {json.dumps(told[what])}", flush=True)
    line = json.dumps({"program": "allocation_costs", "command": rank_main.command(), **rank_main.gpus_here(), "turns": options.turns, **told})
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
