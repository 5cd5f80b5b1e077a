#!/usr/bin/env python3
"""Freezes a training job off its GPUs and thaws it, again and again, from outside.

    NCCL_NVLS_ENABLE=0 PYTHONPATH=ncclpatch/python freeze_job.py --library build/lib/libamem_nccl.so --tool build/bin/amem-replay

Starts a torchrun job on two GPUs: DDP with AdamW, a CUDA graph that holds an all-reduce, a MemPool that is registered with NCCL, and
tensors of 8 GB under a tag of AMem's. It calls amem.safepoint() once a step and knows nothing else of what happens to it. Meanwhile
`amem-replay freeze` and `thaw` are run on it by pid. While it is frozen at most 20 MiB of each GPU may be in use, and in the first
two cycles another process fills and reads nearly the whole GPU. Then the same training runs without freezes: all losses must be
equal to the last bit. Everything ends by itself; no process is ended by force between its checkpoint and its end.

--cases shows what is refused, each with a second try: a GPU that is full at the thaw, a rank that is stopped and does not come, and
a host without the memory (the tool reads another /proc/meminfo, in a mount namespace of its own; skipped where that is not allowed).
--share KINDS lets the ranks share tensors with each other, and rank 0 with a process of its own, past AMem: by cudaIpc (ipc), a descriptor
of cuMemCreate (handle) and PyTorch's IPC (torch). The freeze must name each and touch nothing; it succeeds once they are shared no more.
--kill-tool-at STEP kills the tool as soon as its journal announces that step, of each freeze and each thaw, and goes on with
--continue and --undo in turn. --swap-gpus lets the GPUs change places at each thaw. --without-amem makes the driver's calls alone,
without AMem's pause, which loses the job: run it last.

A table comes before the last line, which is JSON. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
MOST_FROZEN_MIB = 20
STEPS = {"freeze": ("pause", "lock", "checkpoint"), "thaw": ("restore", "unlock", "resume")}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=10, help="freezes and thaws (default 10)")
    parser.add_argument("--ranks", type=int, default=2, help="one GPU each (default 2)")
    parser.add_argument("--pool-gb", type=float, default=8, help="tensors under a tag, which AMem takes out before the driver (8)")
    parser.add_argument("--plain-gb", type=float, default=0, help="tensors that the driver has to take (0)")
    parser.add_argument("--width", type=int, default=2048, help="of the model")
    parser.add_argument("--steps-between", type=int, default=3, help="of training between a thaw and the next freeze (3)")
    parser.add_argument("--library", default="libamem_nccl.so", help="to preload")
    parser.add_argument("--tool", default="amem-replay")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 in place of PyTorch's own")
    parser.add_argument("--swap-gpus", action="store_true", help="at each thaw the GPUs change places")
    parser.add_argument("--kill-tool-at", default="", help="pause, lock, checkpoint, restore, unlock, resume, or all in turn")
    parser.add_argument("--cases", action="store_true", help="a full GPU at the thaw, a rank that does not come, too little host memory")
    parser.add_argument("--share", default="", help="ipc, handle, torch, comma separated: memory that is shared past AMem")
    parser.add_argument("--without-amem", action="store_true", help="the sequence that loses the job")
    parser.add_argument("--no-hog", action="store_true", help="no other process uses the GPUs while the job is frozen")
    parser.add_argument("--no-reference", action="store_true", help="do not train again to compare")
    parser.add_argument("--time-limit", type=int, default=420, help="seconds; everything ends itself then")
    parser.add_argument("--json", default="", help="the last line goes there too")
    parser.add_argument("--work", default="", help="a folder for journals and losses; default: one that is made")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # this is one rank of the job
    parser.add_argument("--hog", type=int, default=-1, help=argparse.SUPPRESS)  # this is the other process on that GPU
    parser.add_argument("--hold", default="", help=argparse.SUPPRESS)  # the other process stays as long as this file exists
    parser.add_argument("--last-step", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- a rank ----------------------------------------------------------------------------------------------------------------


def end_after(seconds):
    """Ends the process from within, also when the main thread hangs in the driver."""
    timer = threading.Timer(seconds, lambda: os._exit(9))
    timer.daemon = True
    timer.start()


class Tensors:
    """Memory whose contents must stay."""

    def __init__(self, torch, gigabytes, seed):
        self.torch = torch
        count = int(gigabytes * 1e9) // 8
        self.values = torch.arange(count, device="cuda", dtype=torch.int64).mul_(2654435761).add_(seed) if count else None
        self.sum = self.now()

    def now(self):
        return 0 if self.values is None else int(self.values.sum())


class Training:
    """A step of everything: DDP with AdamW, the graph, the registered MemPool."""

    def __init__(self, torch, dist, options, rank, size):
        self.torch, self.dist, self.rank, self.size = torch, dist, rank, size
        torch.manual_seed(7)
        nn = torch.nn
        model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(options.width, options.width), nn.LayerNorm(options.width), nn.ReLU())])
        self.width = options.width
        self.model = nn.parallel.DistributedDataParallel(model.cuda())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.random = torch.Generator("cuda").manual_seed(11 + rank)
        self.stop = torch.zeros(1, device="cuda")
        self.make_registered()
        self.make_graph()

    def make_registered(self):
        torch, dist = self.torch, self.dist
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
        self.pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self.pool):
            self.registered = torch.zeros(1 << 22, device="cuda")
        backend.register_mem_pool(self.pool)

    def make_graph(self):
        torch, dist = self.torch, self.dist
        self.graph_in, self.graph_out = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")

        def body():
            self.graph_out.copy_(self.graph_in * 2)
            dist.all_reduce(self.graph_out)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            body()
        torch.cuda.synchronize()

    def step(self, number):
        """(loss, what is wrong)"""
        torch, dist = self.torch, self.dist
        samples = torch.randn(64, self.width, device="cuda", generator=self.random)
        loss = (self.model(samples) - samples.roll(1, 1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        everyone = sum(range(1, self.size + 1))
        self.graph_in.fill_(self.rank + 1 + number)
        self.graph_out.fill_(-7)
        self.graph.replay()
        self.registered.fill_(self.rank + 1)
        dist.all_reduce(self.registered)
        wrong = []
        if not bool((self.graph_out == 2 * (everyone + self.size * number)).all()):
            wrong.append("the graph's all-reduce")
        if not bool((self.registered == everyone).all()):
            wrong.append("the all-reduce of registered memory")
        return loss.item(), wrong

    def end(self):
        """A communicator is not destroyed while a captured graph that uses it lives, or a pool is registered with it."""
        torch, dist = self.torch, self.dist
        self.graph.reset()
        self.graph = None
        torch.cuda.synchronize()
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).deregister_mem_pool(self.pool)
        self.registered = self.pool = None
        torch.cuda.empty_cache()

    def all_stop(self, want):
        self.stop.fill_(1.0 if want else 0.0)
        self.dist.all_reduce(self.stop)
        return bool(self.stop.item() > 0)


class Shared:
    """Memory that this rank shares past AMem, of each kind; rank 0 has it, and rank 1 or a process of its own opens it."""

    BYTES = 32 * MIB

    def __init__(self, torch, dist, kinds, rank, device, work):
        self.torch, self.dist, self.rank, self.device, self.work = torch, dist, rank, device, work
        self.kinds, self.undo = kinds, []
        self.driver = ctypes.CDLL("libcuda.so.1")
        for kind in kinds:
            {"ipc": self.ipc, "handle": self.handle, "torch": self.torch_ipc}[kind]()
        torch.cuda.synchronize()
        dist.barrier()

    def check(self, result):
        if result != 0:
            raise RuntimeError(f"rank {self.rank}: a call that shares memory answered {result}")

    def ipc(self):
        with open("/proc/self/maps") as maps:
            runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart.so" in line))

        class Handle(ctypes.Structure):
            _fields_ = [("reserved", ctypes.c_char * 64)]

        handle, pointer = Handle(), ctypes.c_void_p()
        if self.rank == 0:
            self.check(runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(self.BYTES)))
            self.check(runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer))
        sent = [bytes(handle)]
        self.dist.broadcast_object_list(sent)
        if self.rank == 1:
            ctypes.memmove(ctypes.byref(handle), sent[0], 64)
            self.check(runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, ctypes.c_uint(1)))
            self.undo.append(lambda: runtime.cudaIpcCloseMemHandle(pointer))
        if self.rank == 0:
            self.undo.append(lambda: runtime.cudaFree(pointer))

    def handle(self):
        import socket

        class Properties(ctypes.Structure):  # CUmemAllocationProp
            _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_type", ctypes.c_int), ("location", ctypes.c_int),
                        ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]

        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self.BYTES)
        path = os.path.join(self.work, "descriptor")
        if self.rank == 0:
            properties, descriptor = Properties(1, 1, 1, self.device, None), ctypes.c_int(-1)
            self.check(self.driver.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_ulonglong(0)))
            self.check(self.driver.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, 1, ctypes.c_ulonglong(0)))
            server = socket.socket(socket.AF_UNIX)
            server.bind(path)
            server.listen()
        self.dist.barrier()
        if self.rank == 0:
            connection, _ = server.accept()
            socket.send_fds(connection, [b"x"], [descriptor.value])
            os.close(descriptor.value)
            connection.close()
            server.close()
        if self.rank == 1:
            client = socket.socket(socket.AF_UNIX)
            client.connect(path)
            descriptor = socket.recv_fds(client, 1, 1)[1][0]
            self.check(self.driver.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(descriptor), 1))
            os.close(descriptor)
        if self.rank < 2:
            self.undo.append(lambda: self.driver.cuMemRelease(handle))

    def torch_ipc(self):
        if self.rank != 0:
            return
        context = self.torch.multiprocessing.get_context("spawn")
        queue, said = context.Queue(), context.Queue()
        child = context.Process(target=hold_tensor, args=(queue, said))
        child.start()
        tensor = self.torch.ones(self.BYTES // 4, device="cuda")
        queue.put(tensor)
        said.get()

        def undo():
            queue.put(None)
            child.join()

        self.undo.append(undo)
        self.tensor = tensor

    def end(self):
        for opened in (True, False):  # what was opened is closed before it is freed
            if (self.rank != 0) == opened:
                for undo in reversed(self.undo):
                    undo()
            self.dist.barrier()
        self.kinds, self.undo, self.tensor = [], [], None
        self.torch.cuda.synchronize()
        self.torch.cuda.ipc_collect()
        self.torch.cuda.empty_cache()


def hold_tensor(queue, said):
    """A process that reads a tensor of its parent's, as a DataLoader's consumer does, until it is told to end."""
    tensor = queue.get()
    said.put(float(tensor.sum()))
    queue.get()


def rank_main(options):
    end_after(options.time_limit)
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    training = Training(torch, dist, options, rank, size)
    with_amem = not options.without_amem
    if with_amem:
        import amem
    if with_amem and options.pool_gb > 0:
        with amem.pool("state"):
            pooled = Tensors(torch, options.pool_gb, rank)
    else:
        pooled = Tensors(torch, options.pool_gb, rank)
    plain = Tensors(torch, options.plain_gb, rank + 17)
    shared = Shared(torch, dist, [kind for kind in options.share.split(",") if kind], rank, int(os.environ["LOCAL_RANK"]), options.work)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stop_file = os.path.join(options.work, "stop")
    with open(os.path.join(options.work, f"losses-{rank}"), "w", buffering=1) as losses:
        step, done = 0, False
        while not done:
            step += 1
            loss, wrong = training.step(step)
            for name, tensors in (("tensors under a tag", pooled), ("tensors", plain)):
                if tensors.now() != tensors.sum:
                    wrong.append(name)
            want = step >= options.last_step if options.last_step else os.path.exists(stop_file)
            done = training.all_stop(want)
            if shared.kinds and training.all_stop(os.path.exists(os.path.join(options.work, "unshare"))):  # at the same step
                shared.end()
            losses.write(json.dumps({"step": step, "loss": loss.hex(), "wrong": wrong, "pid": os.getpid()}) + "\n")
            if with_amem and not done:
                amem.safepoint()
            time.sleep(0.02)
    if shared.kinds:  # nobody has asked to unshare: the run without freezes
        shared.end()
    training.end()
    dist.destroy_process_group()
    return 0


def hog_main(options):
    """Fills nearly the whole GPU, reads it back, and ends. Prints how many MiB it had."""
    end_after(60)
    import torch

    torch.cuda.set_device(options.hog)
    free = torch.cuda.mem_get_info()[0] - 512 * MIB
    parts = [torch.full(((1 << 30) // 4,), i, device="cuda", dtype=torch.int32) for i in range(free >> 30)]
    well = all(bool((part == i).all()) for i, part in enumerate(parts))
    print(json.dumps({"ok": well, "mib": len(parts) << 10}), flush=True)
    while options.hold and os.path.exists(options.hold):
        time.sleep(0.05)
    return 0 if well else 1


# ---- the parent ------------------------------------------------------------------------------------------------------------


def used_mib():
    """By GPU, as nvidia-smi counts it."""
    text = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True,
                          check=True).stdout
    return [int(line) for line in text.split()]


class Failed(Exception):
    pass


class Job:
    """The torchrun job, from outside."""

    def __init__(self, options, name, last_step=0):
        self.options = options
        self.work = os.path.join(options.work, name)
        os.makedirs(self.work)
        self.journals = os.path.join(self.work, "journal")
        # Peers import the MemPool that is registered, and what is shared the driver could not restore: a pause has to take it, too.
        environment = dict(os.environ, AMEM_JOURNAL_DIR=self.journals, AMEM_USER_MEMORY="release", NCCL_NVLS_ENABLE="0",
                           CUBLAS_WORKSPACE_CONFIG=":4096:8", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
        if not options.without_amem:
            environment["LD_PRELOAD"] = os.path.abspath(options.library)
        if options.nccl:
            folder = os.path.dirname(os.path.abspath(options.nccl))
            environment["LD_LIBRARY_PATH"] = folder + ":" + environment.get("LD_LIBRARY_PATH", "")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks),
                   os.path.abspath(__file__), "--rank", "--work", self.work, "--pool-gb", str(options.pool_gb),
                   "--plain-gb", str(options.plain_gb), "--width", str(options.width), "--time-limit", str(options.time_limit),
                   "--last-step", str(last_step), "--share", options.share] + (["--without-amem"] if options.without_amem else [])
        self.log = open(os.path.join(self.work, "log"), "w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)
        self.environment = dict(os.environ, AMEM_JOURNAL_DIR=self.journals)

    def lines(self, rank):
        try:
            with open(os.path.join(self.work, f"losses-{rank}")) as file:
                return [json.loads(line) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []

    def steps(self):
        return min(len(self.lines(rank)) for rank in range(self.options.ranks))

    def train(self, more, seconds=120):
        """Waits until that many more steps are done."""
        target, until = self.steps() + more, time.monotonic() + seconds
        while self.steps() < target:
            if self.process.poll() is not None:
                raise Failed(f"the job ended with {self.process.returncode}: {self.tail()}")
            if time.monotonic() > until:
                raise Failed(f"no {more} steps within {seconds} s; it stands at {self.steps()}: {self.tail()}")
            time.sleep(0.05)

    def tail(self):
        """What the ranks said last, without what torchrun says of it."""
        with open(os.path.join(self.work, "log")) as file:
            return file.read().split("torch.distributed.elastic.multiprocessing.errors")[0].split("Traceback (most recent call last):\n  File \"<frozen")[0][-1500:]

    def finish(self):
        open(os.path.join(self.work, "stop"), "w").close()
        code = self.process.wait(timeout=self.options.time_limit)
        if code != 0:
            raise Failed(f"the job ended with {code}: {self.tail()}")

    def tool(self, command, *more, may_fail=False, under=()):
        """(seconds, the JSON that the command prints)"""
        began = time.monotonic()
        done = subprocess.run([*under, self.options.tool, command, str(self.process.pid), "--json", *more], env=self.environment,
                              capture_output=True, text=True)
        seconds = time.monotonic() - began
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise Failed(f"{command} {' '.join(more)}: exit code {done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}") from None
        if done.returncode != 0 and not may_fail:
            raise Failed(f"{command} {' '.join(more)}: {answer.get('message') or answer.get('errors')}")
        return seconds, answer

    def kill_tool(self, command, step, *more):
        """Starts the command and kills the tool (never the job) when a journal tells of the step. False: it was too quick."""
        since = time.monotonic_ns()
        follow = subprocess.Popen([self.options.tool, "log", "--follow", "--interval", "1", "--json", "--kind", "freeze-step", self.journals],
                                  env=self.environment, stdout=subprocess.PIPE, text=True)
        tool = subprocess.Popen([self.options.tool, command, str(self.process.pid), "--json", *more], env=self.environment,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for event in (json.loads(line) for line in follow.stdout):
            if event["time_ns"] >= since and (event["outcome"] or (event["freeze_step"] == step and not event["done"])):
                break
        follow.kill()
        follow.wait()
        killed = tool.poll() is None
        if killed:
            tool.kill()
        tool.wait()
        return killed


def row_of(before, frozen, freeze, thaw):
    times = {}
    for command, answer in (("freeze", freeze[1]), ("thaw", thaw[1])):
        for one in answer["times"]:
            name = f"{command} {one['step']}" if one["step"] in ("checks", "rest") else one["step"]
            times[name] = round(one["ms"], 1)
    return {"used_before_mib": before, "used_frozen_mib": frozen, "freeze_ms": round(1e3 * freeze[0], 1), "thaw_ms": round(1e3 * thaw[0], 1),
            "taken_mib": [round(sum(gpu["taken"] for gpu in one["gpus"]) / MIB) for one in freeze[1]["processes"]],
            "steps_ms": times, "notes": freeze[1]["notes"] + thaw[1]["notes"]}


def hog_all(options):
    hogs = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--hog", str(gpu)], stdout=subprocess.PIPE, text=True)
            for gpu in range(options.ranks)]
    answers = [hog.communicate()[0] for hog in hogs]
    if any(hog.returncode != 0 for hog in hogs):
        raise Failed(f"the other process could not use the GPU: {answers}")
    return [json.loads(answer)["mib"] for answer in answers]


def thaw_options(options):
    order = list(range(1, options.ranks)) + [0]
    return ["--gpus", ",".join(f"{old}={new}" for old, new in enumerate(order))] if options.swap_gpus else []


def cycle(options, job, number):
    before = used_mib()
    freeze = job.tool("freeze")
    frozen = used_mib()
    if max(frozen[: options.ranks]) > MOST_FROZEN_MIB:
        raise Failed(f"while frozen {frozen} MiB are in use; at most {MOST_FROZEN_MIB} may be")
    hogged = hog_all(options) if number < 2 and not options.no_hog else []
    thaw = job.tool("thaw", *thaw_options(options))
    job.train(options.steps_between)
    return {**row_of(before, frozen, freeze, thaw), "other_process_mib": hogged}


def killed_cycle(options, job, number, step):
    """A freeze and a thaw, of which one loses its tool at `step`."""
    way = "--continue" if number % 2 == 0 else "--undo"
    row = {"step": step, "way": way}
    if step in STEPS["freeze"]:
        row["killed"] = job.kill_tool("freeze", step)
        if row["killed"]:
            row["after"] = job.tool("freeze", way)[1]["outcome"]
        if row.get("after") == "running":
            job.train(options.steps_between)
            job.tool("freeze")
        job.tool("thaw")
    else:
        job.tool("freeze")
        row["killed"] = job.kill_tool("thaw", step)
        if row["killed"]:
            row["after"] = job.tool("thaw", way)[1]["outcome"]
        if row.get("after") == "frozen":
            job.tool("thaw")
    job.train(options.steps_between)
    return row


def full_at_thaw(options, job):
    """Another process keeps GPU 0 until a thaw has been refused."""
    job.tool("freeze")
    hold = os.path.join(options.work, "hold")
    open(hold, "w").close()
    hog = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--hog", "0", "--hold", hold], stdout=subprocess.PIPE, text=True)
    try:
        if not json.loads(hog.stdout.readline())["ok"]:
            raise Failed("the other process could not use the GPU")
        refused = job.tool("thaw", may_fail=True)[1]
    finally:
        os.remove(hold)
        hog.communicate()
    if refused["ok"] or "stays frozen" not in refused["message"]:
        raise Failed(f"a thaw onto a full GPU: {refused['message']}")
    thawed = job.tool("thaw")[1]
    job.train(options.steps_between)
    return {"case": "full at the thaw", "refused": refused["message"], "second_try": thawed["outcome"]}


def second_try(options, job):
    """After a freeze that was refused."""
    job.train(options.steps_between)
    job.tool("freeze")
    thawed = job.tool("thaw")[1]
    job.train(options.steps_between)
    return thawed["outcome"]


def absent_rank(options, job):
    """Rank 1 is stopped, so that it comes to no safe point."""
    pid = job.lines(1)[-1]["pid"]
    os.kill(pid, signal.SIGSTOP)  # nothing is frozen yet
    try:
        seconds, refused = job.tool("freeze", "--deadline", "3", may_fail=True)
    finally:
        os.kill(pid, signal.SIGCONT)
    if refused["ok"] or "rank 1" not in refused["message"]:
        raise Failed(f"a freeze without rank 1: {refused['message']}")
    return {"case": "a rank that does not come", "refused": refused["message"], "after_s": round(seconds, 1),
            "second_try": second_try(options, job)}


SHARED_AS = {"ipc": ("cudaIpc export", "cudaIpc import"), "handle": ("cuMem handle export", "cuMem handle import"), "torch": ("cudaIpc export",)}


def shared_past_amem(options, job):
    """A freeze is refused by name while ranks share memory past AMem, and succeeds afterwards."""
    refused = job.tool("freeze", may_fail=True)[1]
    missing = [text for kind in options.share.split(",") for text in SHARED_AS[kind] if text not in refused["message"]]
    if refused["ok"] or missing or "nothing was touched" not in refused["message"]:
        raise Failed(f"a freeze of a job that shares memory by {options.share}: {missing} of {refused['message']}")
    job.train(options.steps_between)
    open(os.path.join(job.work, "unshare"), "w").close()
    job.train(options.steps_between)
    return {"case": "memory that is shared past AMem by " + options.share, "refused": refused["message"], "second_try": second_try(options, job)}


def little_host_memory(options, job):
    """The tool is shown a host with 256 MiB left."""
    case = "too little host memory"
    shown = os.path.join(options.work, "meminfo")
    with open("/proc/meminfo") as real, open(shown, "w") as file:
        file.writelines("MemAvailable: 262144 kB\n" if line.startswith("MemAvailable:") else line for line in real)
    under = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"', shown)
    if subprocess.run([*under, "true"], capture_output=True).returncode != 0:
        return {"case": case, "refused": "SKIPPED: no mount namespace can be made here", "second_try": "not run"}
    refused = job.tool("freeze", may_fail=True, under=under)[1]
    if refused["ok"] or "MemAvailable" not in refused["message"]:
        raise Failed(f"a freeze without host memory: {refused['message']}")
    return {"case": case, "refused": refused["message"], "second_try": second_try(options, job)}


def cycles(options, job, report):
    try:
        if options.share:
            report["cases"] = [shared_past_amem(options, job)]
            return
        if options.cases:
            report["cases"] = [full_at_thaw(options, job), absent_rank(options, job), little_host_memory(options, job)]
            return
        if options.kill_tool_at:
            steps = STEPS["freeze"] + STEPS["thaw"] if options.kill_tool_at == "all" else (options.kill_tool_at,)
            for step in steps:
                for number in range(2):
                    report["kills"].append(killed_cycle(options, job, number, step))
        else:
            for number in range(options.cycles):
                report["cycles"].append(cycle(options, job, number))
    except Exception:
        # What is left of the job must not stay half frozen: it has to end by itself.
        for command in (("thaw", "--continue"), ("thaw",), ("resume",)):
            try:
                job.tool(*command)
                break
            except Failed as failed:
                print(f"afterwards, {' '.join(command)}: {failed}", file=sys.stderr)
        raise


def compare(options, job, report):
    """The same training without a freeze."""
    steps = job.steps()
    reference = Job(options, "reference", last_step=steps)
    if reference.process.wait(timeout=options.time_limit) != 0:
        raise Failed(f"the run without freezes ended with {reference.process.returncode}: {reference.tail()}")
    for rank in range(options.ranks):
        frozen, plain = job.lines(rank), reference.lines(rank)
        differs = [a["step"] for a, b in zip(frozen, plain) if a["loss"] != b["loss"]]
        if differs or len(frozen) != len(plain):
            raise Failed(f"rank {rank}: losses differ from step {differs[:1]} on ({len(frozen)} and {len(plain)} steps)")
    report["losses_equal"] = True


def lose_without_amem(options, job, report):
    """Lock, checkpoint, restore, unlock by the driver alone, of a job that has not been paused."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    pids = [job.lines(rank)[0]["pid"] for rank in range(options.ranks)]
    before = used_mib()
    rows = report["without_amem"] = {"used_before_mib": before}
    for name in ("Lock", "Checkpoint", "Restore", "Unlock"):
        call = getattr(driver, "cuCheckpointProcess" + name)
        began = time.monotonic()
        rows[name.lower()] = [call(ctypes.c_int(pid), None) for pid in pids]
        rows[name.lower() + "_ms"] = round(1e3 * (time.monotonic() - began), 1)
        if name == "Checkpoint":
            rows["used_frozen_mib"] = used_mib()
    states = []
    for pid in pids:
        state = ctypes.c_int(-1)
        driver.cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(state))
        states.append(state.value)
    rows["states"] = states
    rows["lost"] = any(rows["restore"])
    try:
        job.train(2, seconds=20)
        rows["trains_on"] = True
    except Failed:
        rows["trains_on"] = False
    open(os.path.join(job.work, "stop"), "w").close()
    job.process.wait()  # each rank ends itself when its time is up


def table(report):
    for row in report["cycles"]:
        steps = ", ".join(f"{name} {ms:.0f}" for name, ms in row["steps_ms"].items())
        print(f"{max(row['used_before_mib']):7} MiB -> {max(row['used_frozen_mib']):3} MiB   freeze {row['freeze_ms']:7.0f} ms  thaw "
              f"{row['thaw_ms']:7.0f} ms   ({steps})")
    for row in report["kills"]:
        print(f"tool killed at {row['step']:10} {row['way']:10} {'-> ' + row['after'] if row.get('after') else 'it was too quick'}")
    for row in report.get("cases", ()):
        print(f"{row['case']}: {row['refused']}\n    second try: {row['second_try']}")
    if report["cycles"]:
        later = report["cycles"][1:] or report["cycles"]
        report["median"] = {key: statistics.median(row[key] for row in later) for key in ("freeze_ms", "thaw_ms")}
        names = later[0]["steps_ms"]
        report["median"]["steps_ms"] = {name: statistics.median(row["steps_ms"].get(name, 0) for row in later) for name in names}
        print(f"medians after the first: {report['median']}")


def main(options, report):
    if not options.work:
        options.work = tempfile.mkdtemp(prefix="amem-freeze-")
    report["used_idle_mib"] = used_mib()
    job = Job(options, "job")
    if options.without_amem:
        options.time_limit = min(options.time_limit, 120)
    job.train(3, seconds=180)
    if options.without_amem:
        return lose_without_amem(options, job, report)
    cycles(options, job, report)
    job.train(options.steps_between)
    job.finish()
    wrong = [line for rank in range(options.ranks) for line in job.lines(rank) if line["wrong"]]
    if wrong:
        raise Failed(f"wrong results: {wrong[:3]}")
    report["steps"] = job.steps()
    if not options.no_reference:
        compare(options, job, report)
    return None


def parent_main(options):
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("freeze_job.py: refused: NCCL_NVLS_ENABLE must be 0", file=sys.stderr)
        return 2
    report = {"program": "freeze_job", "ok": False, "ranks": options.ranks, "pool_gb": options.pool_gb, "plain_gb": options.plain_gb,
              "swap_gpus": options.swap_gpus, "cycles": [], "kills": []}
    signal.alarm(options.time_limit + 60)  # the ranks have ended themselves by then
    try:
        main(options, report)
        report["ok"] = True
    except Exception as error:  # the line must come whatever went wrong
        report["error"] = f"{type(error).__name__}: {error}"
    table(report)
    line = json.dumps(report)
    if options.json:
        with open(options.json, "w") as file:
            file.write(line + "\n")
    print(line, flush=True)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    given = arguments()
    sys.exit(rank_main(given) if given.rank else hog_main(given) if given.hog >= 0 else parent_main(given))
