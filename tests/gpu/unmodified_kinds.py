"""The jobs of unmodified_job.py, as one of their ranks runs them: programs that know nothing of AMem. A kind is one step of training, whose loss is a
tensor on the GPU; kinds of the simulator do with ctypes what is left of that without PyTorch."""
import ctypes
import datetime
import faulthandler
import json
import os
import statistics
import sys
import threading
import time

import span_turns  # beside this file

TINY = 2000
BARE = ("reduce", "large", "tiny", "differs", "falls", "hangs")
EVERY = 10  # steps between looks at the losses: launches run ahead of the device


def model_of(width, layers=4):
    import torch
    parts = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
    return torch.nn.Sequential(*parts)


class Kind:
    """One step of training; its loss is a tensor on the GPU."""

    def __init__(self, options, rank, size):
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.options, self.rank, self.size = torch, dist, options, rank, size
        self.width, self.device = options.width, "cpu" if options.imitate == "cpu" else "cuda"
        if self.device == "cuda":
            torch.cuda.set_device(0 if options.share_gpu else rank)
            torch.cuda.init()  # else a DeviceMesh chooses a GPU by LOCAL_RANK
        else:
            torch.set_num_threads(1)
        torch.manual_seed(1)
        dist.init_process_group("nccl" if self.device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=options.time_limit))
        self.away_at = time.monotonic() + 0.4 * options.away
        getattr(self, "make_" + options.rank, self.make_ddp)()
        self.flag = torch.zeros(1, device=self.device)

    def any(self, mine):
        """Whether one rank says so."""
        self.flag.fill_(float(mine))
        self.dist.all_reduce(self.flag)
        return float(self.flag) > 0

    def end(self):
        if hasattr(self, "replay"):  # NCCL frees no communicator of which a graph has a launch
            self.torch.cuda.synchronize()
            self.replay.reset()
        self.dist.destroy_process_group()

    def new_model(self, layers=4):
        return model_of(self.width, layers).to(self.device)

    def batch(self, step, salt=0):
        generator = self.torch.Generator(device=self.device).manual_seed(1000 * step + 10 * self.rank + salt)
        return self.torch.randn(16, self.width, device=self.device, generator=generator)

    def adam(self, model):
        return self.torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(self, model, optimizer, step, salt=0):
        loss = (model(self.batch(step, salt)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def step(self, number):
        return getattr(self, "step_" + self.options.rank, self.step_ddp)(number)

    # data parallel
    def make_ddp(self):
        from torch.nn.parallel import DistributedDataParallel as DDP
        self.model = DDP(self.new_model(), gradient_as_bucket_view=True)
        self.optimizer = self.adam(self.model)

    def step_ddp(self, step):
        return self.train(self.model, self.optimizer, step)

    def step_no_sync(self, step):
        with self.model.no_sync():
            for part in range(3):
                (self.model(self.batch(step, part + 1)) - 1).square().mean().backward()
        return self.train(self.model, self.optimizer, step)

    def step_checkpoint(self, step):
        if self.rank == 0 and self.options.away > 0 and time.monotonic() > self.away_at:
            self.torch.save(self.model.state_dict(), os.path.join(self.options.work, "checkpoint"))
            time.sleep(self.options.away)
            self.away_at = time.monotonic() + 0.4 * self.options.away
        return self.step_ddp(step)

    def make_gloo(self):
        self.make_ddp()
        self.gloo = self.dist.new_group(backend="gloo")

    def step_gloo(self, step):
        self.dist.barrier(group=self.gloo)
        if self.rank == 0:
            time.sleep(0.005)
        return self.step_ddp(step)

    # sharded, tensor parallel
    def make_fsdp2(self, mesh=None, model=None):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = mesh or init_device_mesh(self.device, (self.size,))
        self.model = model or self.new_model()
        for layer in self.model:
            if isinstance(layer, self.torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = self.adam(self.model)

    def make_tp(self, mesh=None):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        mesh = mesh or init_device_mesh(self.device, (self.size,))
        self.torch.manual_seed(5)
        plan = {str(i): ColwiseParallel() if i % 3 == 0 else RowwiseParallel() for i in range(12) if i % 3 != 1}
        self.model = parallelize_module(self.new_model(), mesh, plan)
        self.optimizer = self.adam(self.model)
        self.tensor_rank = mesh.get_local_rank()

    def step_tp(self, step):
        rank, self.rank = self.rank, self.rank - self.tensor_rank  # ranks of one model get one batch
        loss = self.train(self.model, self.optimizer, step)
        self.rank = rank
        return loss

    def make_fsdp2_tp(self):
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh(self.device, (self.size // 2, 2), mesh_dim_names=("data", "tensor"))
        self.make_tp(mesh["tensor"])
        self.make_fsdp2(mesh["data"], self.model)

    step_fsdp2_tp = step_tp

    # pipeline: activations forward, gradients back, microbatch after microbatch
    def make_pipeline(self):
        self.model = self.new_model(2)
        self.optimizer = self.adam(self.model)

    def step_pipeline(self, step):
        torch, dist = self.torch, self.dist
        shape, losses, kept = (16, self.width), [], []
        for micro in range(4):
            if self.rank == 0:
                taken = self.batch(step, micro)
            else:
                taken = torch.empty(shape, device=self.device)
                dist.recv(taken, self.rank - 1)
                taken.requires_grad_()
            given = self.model(taken)
            kept.append((taken, given))
            if self.rank + 1 < self.size:
                dist.send(given.detach(), self.rank + 1)
            else:
                losses.append((given - 1).square().mean())
        for micro, (taken, given) in enumerate(kept):
            if self.rank + 1 < self.size:
                gradient = torch.empty(shape, device=self.device)
                dist.recv(gradient, self.rank + 1)
                given.backward(gradient)
            else:
                losses[micro].backward()
            if self.rank > 0:
                dist.send(taken.grad, self.rank - 1)
        self.optimizer.step()
        loss = sum(p.grad.square().sum() for p in self.model.parameters()).detach()
        self.optimizer.zero_grad()
        return loss

    # experts: uneven all-to-all, which is a group of sends and receives
    def make_all_to_all(self):
        self.make_ddp()
        self.expert = self.new_model(1)
        self.expert_optimizer = self.adam(self.expert)

    def step_all_to_all(self, step):
        torch, dist = self.torch, self.dist
        tokens = self.batch(step)
        give = [2 + (step + self.rank + to) % 2 for to in range(self.size)]
        give[0] += 16 - sum(give) if sum(give) < 16 else 0
        take = [2 + (step + of + self.rank) % 2 for of in range(self.size)]
        if self.rank == 0:
            for of in range(self.size):
                sent = sum(2 + (step + of + to) % 2 for to in range(self.size))
                take[of] += 16 - sent if sent < 16 else 0
        came = torch.empty(sum(take), self.width, device=self.device)
        dist.all_to_all_single(came, tokens[:sum(give)].contiguous(), take, give)
        out = self.expert(came)
        back = torch.empty(sum(give), self.width, device=self.device)
        dist.all_to_all_single(back, out.detach(), give, take)
        out.square().mean().backward()
        self.expert_optimizer.step()
        self.expert_optimizer.zero_grad()
        return self.step_ddp(step) + back.square().mean()

    # two models that take turns, each with a group of its own
    def make_gan(self):
        from torch.nn.parallel import DistributedDataParallel as DDP
        self.models = [DDP(self.new_model(2), process_group=self.dist.new_group()) for _ in range(2)]
        self.optimizers = [self.adam(model) for model in self.models]

    def step_gan(self, step):
        made, judged = self.models
        judgement = judged(made(self.batch(step)).detach()).square().mean() + (judged(self.batch(step, 1)) - 1).square().mean()
        judgement.backward()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()
        loss = (judged(made(self.batch(step, 2))) - 1).square().mean()
        loss.backward()
        self.optimizers[0].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.detach() + judgement.detach()

    # CUDA graphs: with NCCL in them, and without
    def captured(self, with_nccl):
        torch = self.torch
        self.input = self.batch(0)
        self.static = torch.zeros(16, self.width, device=self.device)

        def work():
            self.static.copy_(self.input * 1.0001)
            if with_nccl:
                self.dist.all_reduce(self.static)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def make_graph(self):
        self.make_ddp()
        self.replay = self.captured(True)

    def step_graph(self, step):
        self.replay.replay()
        return self.step_ddp(step) + self.static.mean()

    make_graph_all, step_graph_all = make_graph, step_graph

    def step_alone(self, step):
        if step % 5 == 0:
            self.replay = self.captured(False)  # a capture may be under way at any moment of a stop
        self.replay.replay()
        return self.step_ddp(step) + self.static.mean()


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class Bare:
    """NCCL and the driver by ctypes alone, on a GPU or on the stand-ins: `reduce`, `large` (64 MiB, of which some is always under way) and `tiny` (a step is
    TINY all-reduces of 8 bytes). Three go wrong, and the others must go on: `differs` reads another number, `falls` ends, `hangs` comes to nothing more."""

    def __init__(self, options, rank, size):
        self.kind, self.rank, self.size, self.work, self.amem = options.rank, rank, size, options.work, "amem" in os.environ.get("LD_PRELOAD", "")
        self.cuda, self.nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")
        context, unique, self.communicator = ctypes.c_void_p(), UniqueId(), ctypes.c_void_p()
        self.call(self.cuda.cuInit, 0)
        self.call(self.cuda.cuDevicePrimaryCtxRetain, ctypes.byref(context), 0 if options.share_gpu else rank)
        self.call(self.cuda.cuCtxSetCurrent, context)
        name = os.path.join(options.work, "unique")
        if rank == 0:
            self.call(self.nccl.ncclGetUniqueId, ctypes.byref(unique))
            with open(name + ".new", "wb") as file:
                file.write(bytes(unique))
            os.rename(name + ".new", name)
        while not os.path.exists(name):
            time.sleep(0.01)
        with open(name, "rb") as file:
            unique = UniqueId.from_buffer_copy(file.read())
        self.nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self.call(self.nccl.ncclCommInitRank, ctypes.byref(self.communicator), size, unique, rank)
        self.memory, self.size_of = ctypes.c_uint64(), {"large": 1 << 20 if options.imitate else 64 << 20, "tiny": 16}.get(self.kind, 4)
        self.call(self.cuda.cuMemAlloc_v2, ctypes.byref(self.memory), ctypes.c_size_t(self.size_of))

    @staticmethod
    def call(function, *arguments):
        if result := function(*arguments):
            raise RuntimeError(f"{function.__name__} answered {result}")

    def sum(self, number):
        value = ctypes.c_float(number)
        self.call(self.cuda.cuMemcpyHtoD_v2, self.memory, ctypes.byref(value), ctypes.c_size_t(4))
        self.reduce(1)
        self.call(self.cuda.cuCtxSynchronize)
        self.call(self.cuda.cuMemcpyDtoH_v2, ctypes.byref(value), self.memory, ctypes.c_size_t(4))
        return value.value

    def reduce(self, count):
        at = ctypes.c_void_p(self.memory.value)
        self.call(self.nccl.ncclAllReduce, at, at, ctypes.c_size_t(count), 7, 0, self.communicator, None)

    def reduce_often(self):
        """Of 8 bytes into others, so that NCCL launches even for one rank."""
        call, status = self.nccl.ncclAllReduce, 0
        call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        here, there, communicator = self.memory.value, self.memory.value + 8, self.communicator
        for _ in range(TINY):
            status |= call(here, there, 2, 7, 0, communicator, None)
        self.call(self.cuda.cuCtxSynchronize)
        if status:
            raise RuntimeError(f"ncclAllReduce answered {status}")

    def any(self, mine):
        return self.sum(float(mine)) > 0

    def step(self, number):
        if self.kind == "tiny":
            self.reduce_often()
            return number
        if self.kind == "large":
            for _ in range(8):
                self.reduce(self.size_of // 4)
            return self.sum(number + self.rank)
        time.sleep(0.002)
        if self.amem and number == 3 * EVERY and self.rank == 1:
            if self.kind == "falls":
                raise RuntimeError("this rank was to end here")
            while self.kind == "hangs":
                time.sleep(1)
        return self.sum(number + self.rank) + (self.kind == "differs" and self.amem and number == 7)

    def end(self):
        self.call(self.cuda.cuCtxSynchronize)


def end_with_parent(seconds):
    """A rank lives no longer than its time, nor than who started it."""
    parent, until = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < until and os.getppid() == parent:
        time.sleep(0.5)
    faulthandler.dump_traceback()
    os._exit(9)


def run_rank(options):
    threading.Thread(target=end_with_parent, args=(options.time_limit,), daemon=True).start()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = (Bare if options.rank in BARE else Kind)(options, rank, size)
    losses, recent, step, spans, turn = [], [], 0, [], span_turns.Turn(options.turns if rank == 0 else "")
    while True:
        if step % EVERY == 0:
            turn.take()
            began = time.monotonic()
        recent.append(kind.step(step))
        step += 1
        if step % EVERY != 0:
            continue
        ends = kind.any(os.path.exists(os.path.join(options.work, "stop")))
        losses += [float(loss).hex() for loss in recent]
        recent = []
        spans.append((time.monotonic() - began) / EVERY)
        turn.give(ends)
        name = os.path.join(options.work, f"at.{rank}")
        with open(name + ".new", "w") as file:
            file.write(f"{step} {statistics.median(spans)}")
        os.rename(name + ".new", name)
        if ends:
            break
    with open(os.path.join(options.work, f"losses.{rank}.json"), "w") as file:
        json.dump({"losses": losses, "step_s": statistics.median(spans), "spans_s": spans}, file)
    kind.end()
    sys.stdout.flush()
    os._exit(0)  # whatever is left of communicators waits for nobody
