#!/usr/bin/env python3
"""Training jobs that never heard of AMem, paused, parked and resumed from a shell at random moments.

    NCCL_NVLS_ENABLE=0 unmodified_job.py --library build/lib/libamem_nccl.so --tool build/bin/amem-replay [--kinds ddp,gan] [--stops 50]
    NCCL_NVLS_ENABLE=0 unmodified_job.py ... --share-gpu --nccl libnccl.so.2   # all ranks on one GPU; an NCCL of 2.30 or later

Of each kind a job runs under LD_PRELOAD and makes no safe point. `amem-replay pause` (every third time `park`) stops it between two launches of
NCCL's, and `resume` lets it go on. Then the same steps run without AMem: the losses of all ranks must be equal to the last bit. Kinds: ddp, no_sync,
fsdp2, tp, fsdp2_tp (4 ranks), pipeline (sends and receives), all_to_all, gan (two models, two groups), checkpoint (rank 0 is away for some seconds),
gloo (barriers that are not NCCL's), graph (NCCL in a CUDA graph: each stop must be refused by name), alone (a capture without NCCL while it is stopped).

A table comes before the last line, which is JSON: for each kind stops, failures, and the seconds from the command to all ranks paused (median, worst)
beside the length of a step. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

KINDS = ("ddp", "no_sync", "fsdp2", "tp", "fsdp2_tp", "pipeline", "all_to_all", "gan", "checkpoint", "gloo", "graph", "alone")
EVERY = 10  # steps between looks at the losses: launches run ahead of the device


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma separated (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2); fsdp2_tp is skipped with fewer than 4")
    parser.add_argument("--stops", type=int, default=10, help="of each kind (default 10)")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0, by NCCL_MULTI_RANK_GPU_ENABLE")
    parser.add_argument("--library", default="libamem_nccl.so", help="to preload")
    parser.add_argument("--tool", default="amem-replay")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 in place of PyTorch's own")
    parser.add_argument("--width", type=int, default=1024, help="of the models (1024)")
    parser.add_argument("--away", type=float, default=5, help="seconds for which a rank is away in kind checkpoint (5)")
    parser.add_argument("--deadline", type=int, default=40, help="of each request, in seconds (40)")
    parser.add_argument("--time-limit", type=int, default=150, help="of one job, in seconds; its ranks end themselves then (150)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default: another each time, and said")
    parser.add_argument("--json", default="", help="the last line goes there too")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)  # this is a rank of a job of that kind
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)  # 0: until the file `stop` is there
    return parser.parse_args()


# ---- a rank: what a program does that knows nothing of AMem --------------------------------------------------------------------


def model_of(width, layers=4):
    import torch
    parts = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
    return torch.nn.Sequential(*parts).cuda()


class Kind:
    """One step of training; its loss is a tensor on the GPU."""

    def __init__(self, options, rank, size):
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.options, self.rank, self.size = torch, dist, options, rank, size
        self.width, self.extra = options.width, {}
        getattr(self, "make_" + options.rank, self.make_ddp)()

    def batch(self, step, salt=0):
        generator = self.torch.Generator(device="cuda").manual_seed(1000 * step + 10 * self.rank + salt)
        return self.torch.randn(16, self.width, device="cuda", generator=generator)

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
        self.model = DDP(model_of(self.width), gradient_as_bucket_view=True)
        self.optimizer = self.adam(self.model)

    def step_ddp(self, step):
        return self.train(self.model, self.optimizer, step)

    def step_no_sync(self, step):
        with self.model.no_sync():
            for part in range(3):
                (self.model(self.batch(step, part + 1)) - 1).square().mean().backward()
        return self.train(self.model, self.optimizer, step)

    def step_checkpoint(self, step):
        if self.rank == 0 and step % 60 == 30:
            self.torch.save(self.model.state_dict(), os.path.join(self.options.work, "checkpoint"))
            time.sleep(self.options.away)
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
        from torch.distributed.fsdp import fully_shard
        self.model = model or model_of(self.width)
        for layer in self.model:
            if isinstance(layer, self.torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = self.adam(self.model)

    def make_tp(self, mesh=None):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        mesh = mesh or init_device_mesh("cuda", (self.size,))
        self.torch.manual_seed(5)
        plan = {str(i): ColwiseParallel() if i % 3 == 0 else RowwiseParallel() for i in range(12) if i % 3 != 1}
        self.model = parallelize_module(model_of(self.width), mesh, plan)
        self.optimizer = self.adam(self.model)
        self.tensor_rank = mesh.get_local_rank()

    def step_tp(self, step):
        rank, self.rank = self.rank, self.rank - self.tensor_rank  # ranks of one model get one batch
        loss = self.train(self.model, self.optimizer, step)
        self.rank = rank
        return loss

    def make_fsdp2_tp(self):
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cuda", (self.size // 2, 2), mesh_dim_names=("data", "tensor"))
        self.make_tp(mesh["tensor"])
        self.make_fsdp2(mesh["data"], self.model)

    step_fsdp2_tp = step_tp

    # pipeline: activations forward, gradients back, microbatch after microbatch
    def make_pipeline(self):
        self.model = model_of(self.width, 2)
        self.optimizer = self.adam(self.model)

    def step_pipeline(self, step):
        torch, dist = self.torch, self.dist
        shape, losses, kept = (16, self.width), [], []
        for micro in range(4):
            if self.rank == 0:
                taken = self.batch(step, micro)
            else:
                taken = torch.empty(shape, device="cuda")
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
                gradient = torch.empty(shape, device="cuda")
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
        self.expert = model_of(self.width, 1)
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
        came = torch.empty(sum(take), self.width, device="cuda")
        dist.all_to_all_single(came, tokens[:sum(give)].contiguous(), take, give)
        out = self.expert(came)
        back = torch.empty(sum(give), self.width, device="cuda")
        dist.all_to_all_single(back, out.detach(), give, take)
        out.square().mean().backward()
        self.expert_optimizer.step()
        self.expert_optimizer.zero_grad()
        return self.step_ddp(step) + back.square().mean()

    # two models that take turns, each with a group of its own
    def make_gan(self):
        from torch.nn.parallel import DistributedDataParallel as DDP
        self.models = [DDP(model_of(self.width, 2), process_group=self.dist.new_group()) for _ in range(2)]
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
        self.static = torch.zeros(16, self.width, device="cuda")

        def work():
            self.static.copy_(self.input * 1.0001)
            if with_nccl:
                self.dist.all_reduce(self.static)
        side = torch.cuda.Stream()
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

    def step_alone(self, step):
        if step % 5 == 0:
            self.replay = self.captured(False)  # a capture may be under way at any moment of a stop
        self.replay.replay()
        return self.step_ddp(step) + self.static.mean()


def run_rank(options):
    import datetime
    import faulthandler
    import threading
    timer = threading.Timer(options.time_limit, lambda: (faulthandler.dump_traceback(), os._exit(9)))
    timer.daemon = True
    timer.start()
    import torch
    import torch.distributed as dist
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0 if options.share_gpu else rank)
    torch.manual_seed(1)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    kind = Kind(options, rank, size)
    losses, recent, step, spans = [], [], 0, []
    flag = torch.zeros(1, device="cuda")
    began = time.monotonic()
    while True:
        recent.append(kind.step(step))
        step += 1
        if step % EVERY != 0:
            continue
        flag.fill_(1.0 if not options.steps and os.path.exists(os.path.join(options.work, "stop")) else 0.0)
        dist.all_reduce(flag)
        losses += [float(loss).hex() for loss in recent]
        recent = []
        spans.append((time.monotonic() - began) / EVERY)
        began = time.monotonic()
        with open(os.path.join(options.work, f"at.{rank}"), "w") as file:
            file.write(str(step))
        if float(flag) > 0 or step == options.steps:
            break
    with open(os.path.join(options.work, f"losses.{rank}.json"), "w") as file:
        json.dump({"losses": losses, "step_s": statistics.median(spans)}, file)
    dist.destroy_process_group()
    timer.cancel()


# ---- the shell -------------------------------------------------------------------------------------------------------------------


class Job:
    def __init__(self, options, kind, folder, steps, preload):
        os.makedirs(folder)
        self.folder, self.options = folder, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "AMEM_JOURNAL_DIR": os.path.join(folder, "journal"), "OMP_NUM_THREADS": "2"}
        environment.pop("LD_PRELOAD", None)
        if libraries := ":".join(filter(None, [options.library if preload else "", options.nccl])):
            environment["LD_PRELOAD"] = libraries
        if options.share_gpu:
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        command = [sys.executable, os.path.abspath(__file__), "--rank", kind, "--work", folder, "--steps", str(steps), "--width", str(options.width),
                   "--away", str(options.away), "--time-limit", str(options.time_limit)] + ["--share-gpu"] * options.share_gpu
        self.environment = environment
        self.ranks = []
        for rank in range(options.ranks):
            with open(os.path.join(folder, f"log.{rank}"), "w") as log:
                self.ranks.append(subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=log))

    def at(self):
        try:
            return min(int(open(os.path.join(self.folder, f"at.{rank}")).read() or 0) for rank in range(self.options.ranks))
        except (OSError, ValueError):
            return 0

    def until(self, step, seconds):
        end = time.monotonic() + seconds
        while self.at() < step and time.monotonic() < end and all(rank.poll() is None for rank in self.ranks):
            time.sleep(0.02)
        return self.at() >= step

    def tool(self, *words):
        environment = {name: value for name, value in self.environment.items() if name not in ("LD_PRELOAD",)}
        ran = subprocess.run([self.options.tool, *words], env=environment, capture_output=True, text=True, timeout=self.options.time_limit, check=False)
        return ran.returncode, ran.stdout, ran.stderr

    def finish(self):
        problems = []
        for number, rank in enumerate(self.ranks):
            try:
                code = rank.wait(self.options.time_limit)
            except subprocess.TimeoutExpired:
                rank.send_signal(signal.SIGKILL)
                code = rank.wait()
            if code != 0:
                tail = open(os.path.join(self.folder, f"log.{number}")).read()[-1500:]
                problems.append(f"rank {number} ended with {code}: {tail}")
        return problems

    def losses(self):
        all_ranks = [json.load(open(os.path.join(self.folder, f"losses.{rank}.json"))) for rank in range(self.options.ranks)]
        return [one["losses"] for one in all_ranks], statistics.median(one["step_s"] for one in all_ranks)


def stop_often(job, options, kind, chance, report, problems):
    pid = str(job.ranks[0].pid)
    for stop in range(options.stops):
        time.sleep(chance.uniform(0, 0.7))
        parks = stop % 3 == 2
        began = time.monotonic()
        code, out, err = job.tool(*(["park"] if parks else ["pause", "--between-launches"]), pid, "--deadline", str(options.deadline), "--json")
        took = time.monotonic() - began
        if kind == "graph":
            if code == 0 or "CUDA graph" not in err:
                problems.append(f"stop {stop} of a job with NCCL in a graph: exit code {code}: {err or out}")
            report["refused"] = report.get("refused", 0) + 1
            continue
        if code != 0:
            problems.append(f"stop {stop}: exit code {code} after {took:.1f} s: {err[-1500:]}")
            if not all(rank.poll() is None for rank in job.ranks):
                return
            continue
        ranks = json.loads(out)["ranks"]
        report["took_s"].append(json.loads(out)["seconds"])
        if not parks:
            report["freed_mib"] = max(report.get("freed_mib", 0), min(rank["freed_bytes"] for rank in ranks) >> 20)
        time.sleep(chance.uniform(0, 0.4))
        code, out, err = job.tool("resume", pid, "--deadline", str(options.deadline))
        if code != 0:
            problems.append(f"resume {stop}: exit code {code}: {err[-1500:]}")
            return
        report["stops"] += 1


def run_kind(options, kind, folder, chance):
    report, problems = {"kind": kind, "stops": 0, "took_s": []}, []
    job = Job(options, kind, os.path.join(folder, kind), 0, True)
    if job.until(2 * EVERY, options.time_limit):
        code, out, _ = job.tool("ls", "--live", str(job.ranks[0].pid), "--json")
        if code == 0:
            report["why_not"] = next((rank["why_not_between_launches"] for rank in json.loads(out)["ranks"]), None)
        stop_often(job, options, kind, chance, report, problems)
        job.until(job.at() + EVERY, 30)
    open(os.path.join(job.folder, "stop"), "w").close()
    problems += job.finish()
    if not problems:
        stopped, report["step_s"] = job.losses()
        report["steps"] = len(stopped[0])
        reference = Job(options, kind, os.path.join(folder, kind + ".reference"), len(stopped[0]), False)
        problems += ["reference: " + problem for problem in reference.finish()]
        if not problems:
            expected, report["reference_step_s"] = reference.losses()
            for rank, (a, b) in enumerate(zip(stopped, expected)):
                if a != b:
                    first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                    problems.append(f"rank {rank}: losses differ from step {first} on")
    report["problems"] = problems
    took = report.pop("took_s")
    report["to_stand_s"] = {"median": round(statistics.median(took), 3), "worst": round(max(took), 3)} if took else None
    return report


def main():
    options = arguments()
    if options.rank:
        return run_rank(options)
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("set NCCL_NVLS_ENABLE=0", file=sys.stderr)
        return 2
    seed = options.seed or int.from_bytes(os.urandom(3), "little")
    chance = random.Random(seed)
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds.split(","):
            if kind == "fsdp2_tp" and (options.ranks < 4 or options.ranks % 2 != 0):
                reports.append({"kind": kind, "skipped": "needs 4 ranks", "problems": []})
                continue
            reports.append(run_kind(options, kind, folder, chance))
            one = reports[-1]
            print(f"{kind}: {one['stops']} stops, to stand {one['to_stand_s']}, step {one.get('step_s', 0):.4f} s, "
                  f"{'equal' if not one['problems'] else one['problems']}", flush=True)
    ok = all(not one["problems"] for one in reports)
    line = json.dumps({"program": "unmodified_job", "ok": ok, "seed": seed, "ranks": options.ranks, "share_gpu": options.share_gpu, "kinds": reports})
    if options.json:
        with open(options.json, "w") as file:
            file.write(line + "\n")
    print(line)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
