#!/usr/bin/env python3
"""All memory of an unmodified job under AMEM_SCOPE=all: pauses of the tag "program", freezes, and what an allocation costs.

    NCCL_NVLS_ENABLE=0 python3 tests/gpu/program_job.py --library build/lib/libamem_nccl.so --nccl LIB --tool build/bin/amem-replay --bench

Starts a torchrun job: DDP with AdamW, a CUDA graph with an all-reduce, and tensors of 8 GB, none of it under a tag. Its ranks share one
GPU, which needs an NCCL of 2.30 or later (--nccl), unless --gpus says otherwise. After each of the first steps the tag "program" and
NCCL's memory are paused and resumed; what the GPU still holds then is `left_mib`, and `contexts_mib` what it held before the job
allocated anything. With --tool the job is also frozen and thawed from outside. Then the same training runs without AMem: all losses
must be equal to the last bit. --bench: 10 000 cudaMalloc and cudaFree of mixed sizes, a training step and copies in such memory, in
turns with stock ones, and what the driver says of it beside what it says of its own.

The last line is JSON. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0). Everything ends by itself.
"""
import argparse
import ctypes
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True
import freeze_job  # noqa: E402

MIB = 1 << 20


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="libamem_nccl.so", help="to preload")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 in place of PyTorch's own, to preload")
    parser.add_argument("--tool", default="", help="amem-replay; with it the job is frozen, too")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=1, help="that the ranks use (default 1)")
    parser.add_argument("--gb", type=float, default=8, help="of tensors, of all ranks of a GPU together (default 8)")
    parser.add_argument("--cycles", type=int, default=7, help="pauses after the first one (default 7)")
    parser.add_argument("--freezes", type=int, default=3)
    parser.add_argument("--width", type=int, default=2048, help="of the model")
    parser.add_argument("--expandable", action="store_true", help="PyTorch's expandable segments")
    parser.add_argument("--bench", action="store_true", help="what an allocation costs")
    parser.add_argument("--calls", type=int, default=10000, help="of cudaMalloc and of cudaFree in a turn (default 10000)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-job", action="store_true", help="only --bench")
    parser.add_argument("--time-limit", type=int, default=400, help="seconds; everything ends itself then")
    parser.add_argument("--json", default="", help="the last line goes there too")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", default="", choices=["", "amem", "stock"], help=argparse.SUPPRESS)
    parser.add_argument("--allocate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--last-step", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- a rank ----------------------------------------------------------------------------------------------------------------


def check(library, result, call):
    if result != 0:
        raise RuntimeError(f"{call} returned {result}: {library.amem_last_error().decode()}")


class Pauses:
    """What an operator does to the job between two steps, on all ranks at once; times in milliseconds, memory of the whole GPU."""

    def __init__(self, torch, meeting):
        self.torch, self.meeting = torch, meeting
        self.library = ctypes.CDLL(None)
        self.library.amem_last_error.restype = ctypes.c_char_p

    def used_mib(self):
        free, total = self.torch.cuda.mem_get_info()
        return (total - free) // MIB

    def of(self, tag, resume):
        names = (ctypes.c_char_p * 1)(tag)
        began = time.monotonic()
        call = self.library.amem_resume if resume else self.library.amem_pause
        check(self.library, call(names, ctypes.c_size_t(1), 0, 0 if resume else None), f"{call.__name__} {tag.decode()}")
        return round(1e3 * (time.monotonic() - began), 1)

    def cycle(self):
        torch, row = self.torch, {}
        torch.cuda.synchronize()
        self.meeting.gather("idle")
        row["used_mib"] = self.used_mib()
        self.meeting.gather("measured")
        for tag in (b"program", b"nccl"):
            row[f"pause_{tag.decode()}_ms"] = self.of(tag, False)
        self.meeting.gather("paused")
        row["left_mib"] = self.used_mib()
        self.meeting.gather("measured")
        for tag in (b"nccl", b"program"):
            row[f"resume_{tag.decode()}_ms"] = self.of(tag, True)
        self.meeting.gather("resumed")
        return row

    def memory(self):
        size = ctypes.c_size_t(0)
        check(self.library, self.library.amem_json(b"memory", None, ctypes.byref(size)), "amem_json")
        size.value += 4096
        text = ctypes.create_string_buffer(size.value)
        check(self.library, self.library.amem_json(b"memory", text, ctypes.byref(size)), "amem_json")
        return json.loads(text.value)


class Training(freeze_job.Training):
    """As an ordinary job: no memory is registered with NCCL by hand."""

    def make_registered(self):
        self.registered = self.torch.zeros(1 << 22, device="cuda")

    def end(self):
        self.graph.reset()
        self.graph = None
        self.torch.cuda.synchronize()


def rank_main(options):
    freeze_job.end_after(options.time_limit)
    import torch
    import torch.distributed as dist
    from torch_job import Meeting

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % options.gpus)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size)
    with_amem = options.rank == "amem"
    torch.cuda.current_stream().synchronize()  # a context, and no memory
    meeting.gather("contexts")
    pauses = Pauses(torch, meeting) if with_amem else None
    contexts = pauses.used_mib() if with_amem else 0
    meeting.gather("measured")
    training = Training(torch, dist, options, rank, size)
    tensors = freeze_job.Tensors(torch, options.gb * options.gpus / size, rank)
    rows = []
    with open(os.path.join(options.work, f"losses-{rank}"), "w", buffering=1) as losses:
        step, done = 0, False
        while not done:
            step += 1
            loss, wrong = training.step(step)
            if tensors.now() != tensors.sum:
                wrong.append("tensors")
            want = step >= options.last_step if options.last_step else os.path.exists(os.path.join(options.work, "stop"))
            done = training.all_stop(want)
            losses.write(json.dumps({"step": step, "loss": loss.hex(), "wrong": wrong}) + "\n")
            if with_amem and not done and len(rows) <= options.cycles:
                rows.append(pauses.cycle())
                if len(rows) > options.cycles:
                    with open(os.path.join(options.work, f"told-{rank}"), "w") as told:
                        json.dump({"contexts_mib": contexts, "rows": rows, "memory": pauses.memory()}, told)
            elif with_amem and not done:
                pauses.library.amem_safepoint(0)
            time.sleep(0.02)
    training.end()
    dist.destroy_process_group()
    return 0


# ---- what an allocation costs ----------------------------------------------------------------------------------------------


def answers(runtime, driver, pointer):
    """What the driver says of memory from cudaMalloc."""
    said = {}
    for name, number, kind in (("memory_type", 2, ctypes.c_uint), ("device", 9, ctypes.c_int), ("range_size", 12, ctypes.c_size_t), ("legacy_ipc", 10, ctypes.c_int),
                               ("handle_types", 14, ctypes.c_uint64), ("managed", 8, ctypes.c_int), ("context", 1, ctypes.c_void_p)):
        value = kind()
        result = driver.cuPointerGetAttribute(ctypes.byref(value), number, ctypes.c_uint64(pointer + 4096))
        said[name] = (result, value.value)
    current, base, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    said["context"] = said["context"][1] == current.value
    said["range"] = (driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer + 4096)), base.value == pointer, size.value)
    handle = (ctypes.c_char * 64)()
    said["ipc"] = runtime.cudaIpcGetMemHandle(handle, ctypes.c_void_p(pointer))
    return said


def kernels(torch):
    """The GPU's median milliseconds of a step of training and of copies, in memory that is allocated now."""
    torch.manual_seed(0)
    width, layers = 4096, []
    for _ in range(8):
        layers += [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    optimizer, batch = torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(8192, width, device="cuda", dtype=torch.bfloat16)
    device, other = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    found = {}
    for name, times, work in (("step", 40, step), ("copy", 40, lambda: other.copy_(device)), ("to_device", 20, lambda: device[: len(host)].copy_(host, non_blocking=True))):
        took = []
        for turn in range(times + 10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            took += [begin.elapsed_time(end)] if turn >= 10 else []
        found[name + "_ms"] = statistics.median(took)
    return found


def allocate_main(options):
    """The mean microseconds of a cudaMalloc and a cudaFree, of mixed sizes, some tens of them alive."""
    freeze_job.end_after(min(options.time_limit, 120))
    import torch

    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    with open("/proc/self/maps") as maps:
        runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart.so" in line))
    driver = ctypes.CDLL("libcuda.so.1")
    numbers, alive, spent = random.Random(7), [], [0.0, 0.0]

    def timed(which, call, *arguments_):
        began = time.perf_counter()
        result = call(*arguments_)
        spent[which] += time.perf_counter() - began
        if result != 0:
            raise RuntimeError(f"cudaMalloc or cudaFree answered {result}")

    def malloc(size):
        pointer = ctypes.c_void_p()
        timed(0, runtime.cudaMalloc, ctypes.byref(pointer), ctypes.c_size_t(size))
        alive.append(pointer)

    for turn in range(options.calls + 200):
        if turn == 200:
            spent[:] = [0.0, 0.0]
        largest = numbers.choices((64 << 10, 4 << 20, 64 << 20), (70, 25, 5))[0]
        malloc(numbers.randint(1, largest))
        if len(alive) > 32:
            timed(1, runtime.cudaFree, alive.pop(numbers.randrange(len(alive))))
    told = {"malloc_us": 1e6 * spent[0] / options.calls, "free_us": 1e6 * spent[1] / options.calls}
    before = torch.cuda.mem_get_info()[0]
    malloc(64 << 20)
    told["says"] = {**answers(runtime, driver, alive[-1].value), "free_memory_changed_by": before - torch.cuda.mem_get_info()[0]}
    told.update(kernels(torch))
    print(json.dumps(told), flush=True)
    os._exit(0)


def bench(options):
    turns = {"stock": [], "amem": []}
    for _ in range(options.turns):
        for kind, told in turns.items():
            environment = dict(os.environ, AMEM_JOURNAL_DIR=os.path.join(options.work, "bench-journal"), AMEM_SCOPE="all")
            if kind == "amem":
                environment["LD_PRELOAD"] = os.path.abspath(options.library)
            done = subprocess.run([sys.executable, os.path.abspath(__file__), "--allocate", "--calls", str(options.calls)], env=environment,
                                  capture_output=True, text=True, timeout=150)
            if done.returncode != 0:
                raise freeze_job.Failed(f"the allocations ended with {done.returncode}: {done.stderr[-1000:]}")
            told.append(json.loads(done.stdout.splitlines()[-1]))
    found = {kind: {what: round(statistics.median(one[what] for one in told), 2) for what in ("malloc_us", "free_us")} for kind, told in turns.items()}
    found["more_us"] = {what: round(found["amem"][what] - found["stock"][what], 2) for what in ("malloc_us", "free_us")}
    found["kernels"] = {what: {"stock": round(statistics.median(one[what] for one in turns["stock"]), 4),
                               "ratio": round(statistics.median(mine[what] / other[what] for mine, other in zip(turns["amem"], turns["stock"])), 5)}
                        for what in ("step_ms", "copy_ms", "to_device_ms")}
    says = {kind: told[0]["says"] for kind, told in turns.items()}
    found["answers_that_differ"] = {name: [said, says["amem"][name]] for name, said in says["stock"].items() if said != says["amem"][name]}
    return found


# ---- the parent ------------------------------------------------------------------------------------------------------------


class Job(freeze_job.Job):
    def __init__(self, options, kind, last_step=0):  # pylint: disable=super-init-not-called
        self.options, self.work = options, os.path.join(options.work, kind)
        os.makedirs(self.work)
        self.environment = dict(os.environ, AMEM_JOURNAL_DIR=os.path.join(self.work, "journal"))
        preloads = ([os.path.abspath(options.library)] if kind == "amem" else []) + ([os.path.abspath(options.nccl)] if options.nccl else [])
        environment = dict(self.environment, AMEM_SCOPE="all", AMEM_USER_MEMORY="release", NCCL_NVLS_ENABLE="0", NCCL_MULTI_RANK_GPU_ENABLE="1",
                           CUBLAS_WORKSPACE_CONFIG=":4096:8", TORCH_NCCL_ASYNC_ERROR_HANDLING="0", LD_PRELOAD=":".join(preloads))
        if options.expandable:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), os.path.abspath(__file__),
                   "--rank", kind, "--work", self.work, "--gb", str(options.gb), "--gpus", str(options.gpus), "--width", str(options.width),
                   "--cycles", str(options.cycles), "--time-limit", str(options.time_limit), "--last-step", str(last_step)]
        self.log = open(os.path.join(self.work, "log"), "w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    def told(self):
        found = []
        for rank in range(self.options.ranks):
            with open(os.path.join(self.work, f"told-{rank}")) as file:
                found.append(json.load(file))
        return found


def job(options, report):
    with_amem = Job(options, "amem")
    with_amem.train(options.cycles + 3)
    told = with_amem.told()
    slowest = [{key: max(one["rows"][cycle][key] for one in told) for key in told[0]["rows"][0]} for cycle in range(options.cycles + 1)]
    report["contexts_mib"] = told[0]["contexts_mib"]
    report["first"], later = slowest[0], slowest[1:]
    report["median"] = {key: round(statistics.median(row[key] for row in later), 1) for key in later[0]} if later else {}
    report["left_to_the_driver"] = told[0]["memory"].get("left", {})
    report["tags_mib"] = {row["tag"]: row["bytes"] // MIB for row in told[0]["memory"]["tags"]}
    freezes = []
    for _ in range(options.freezes if options.tool else 0):
        frozen = with_amem.tool("freeze")
        used = freeze_job.used_mib()[:options.gpus]
        thawed = with_amem.tool("thaw")
        freezes.append({"freeze_ms": round(1e3 * frozen[0], 1), "thaw_ms": round(1e3 * thawed[0], 1), "frozen_mib": max(used),
                        "steps_ms": {one["step"]: round(one["ms"], 1) for one in frozen[1]["times"] + thawed[1]["times"]}, "notes": frozen[1]["notes"]})
        with_amem.train(3)
    report["freezes"] = freezes
    with_amem.finish()
    steps = with_amem.steps()
    stock = Job(options, "stock", last_step=steps)
    stock.finish()
    lines = [[one.lines(rank) for rank in range(options.ranks)] for one in (with_amem, stock)]
    wrong = [line for of_job in lines for rank in of_job for line in rank if line["wrong"]]
    losses = [[[line["loss"] for line in rank] for rank in of_job] for of_job in lines]
    report["steps"], report["wrong"], report["losses_equal"] = steps, wrong[:3], losses[0] == losses[1]
    if wrong or not report["losses_equal"]:
        raise freeze_job.Failed("the job does not compute what it computes without AMem")


def main():
    options = arguments()
    if options.allocate:
        return allocate_main(options)
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("program_job.py: refused: NCCL_NVLS_ENABLE must be 0", file=sys.stderr)
        return 2
    if options.rank:
        return rank_main(options)
    import tempfile
    freeze_job.end_after(options.time_limit)
    with tempfile.TemporaryDirectory(prefix="amem-program-") as folder:
        options.work = folder
        report = {"program": "program_job", "ok": False, "ranks": options.ranks, "gpus": options.gpus, "gb": options.gb}
        try:
            if options.bench:
                report["bench"] = bench(options)
            if not options.no_job:
                job(options, report)
            report["ok"] = True
        except (freeze_job.Failed, subprocess.TimeoutExpired, OSError) as error:
            report["error"] = f"{type(error).__name__}: {error}"
        line = json.dumps(report)
        print(line, flush=True)
        if options.json:
            with open(options.json, "w") as file:
                file.write(line + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
