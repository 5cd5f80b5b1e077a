#!/usr/bin/env python3
"""Ray actors that train together on GPUs, and give their memory back together while the driver does something else.

    python3 ray_actors.py --actors 2            # needs Ray, PyTorch, and AMem: the wheel, or PYTHONPATH and AMEM_LIBRARY of a tree
    python3 ray_actors.py --actors 2 --cpu      # without GPUs, under gloo: nothing is given back

Each actor has a model under DistributedDataParallel. Between two steps the driver pauses parameters ("weights") and NCCL over all actors,
prints what each GPU holds meanwhile, and resumes. LD_PRELOAD is not needed: with AMEM_ENABLE=1 in the actors' environment `import torch`
attaches AMem, before init_process_group. Exit code 0: losses are those of a run without pauses, 1: not.
"""
import argparse
import os
import sys
import tempfile

import ray

import amem.frameworks.ray


@ray.remote
class Trainer:
    """One rank."""

    def __init__(self, rank, ranks, meeting, cpu):
        import torch

        import amem

        self.torch = torch
        self.device = torch.device("cpu" if cpu else "cuda:0")  # Ray shows each actor its own GPU
        torch.manual_seed(1)
        torch.distributed.init_process_group("gloo" if cpu else "nccl", init_method=meeting, rank=rank, world_size=ranks)
        if cpu:
            model = torch.nn.Linear(256, 256)
        else:
            with amem.pool("weights"):
                model = torch.nn.Linear(8192, 8192, device=self.device)
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.random = torch.Generator().manual_seed(2 + rank)

    def step(self):
        samples = self.torch.randn(16, self.model.module.in_features, generator=self.random).to(self.device)
        loss = self.model(samples).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def used_mib(self):
        free, total = self.torch.cuda.mem_get_info()
        return (total - free) >> 20

    def close(self):
        self.torch.distributed.destroy_process_group()


def losses(options, pauses):
    runtime = amem.frameworks.ray.environment(**{name: os.environ[name] for name in ("PYTHONPATH", "AMEM_LIBRARY") if name in os.environ})
    trainer = Trainer.options(num_gpus=0 if options.cpu else 1, runtime_env=runtime)
    meeting = "file://%s/ranks" % tempfile.mkdtemp(prefix="ray-actors-")  # for actors of several hosts: tcp://, with an address of rank 0's
    actors = [trainer.remote(rank, options.actors, meeting, options.cpu) for rank in range(options.actors)]
    found = []
    for step in range(options.steps):
        found.append(ray.get([actor.step.remote() for actor in actors]))
        if pauses:
            with amem.frameworks.ray.paused(actors, "weights", "nccl"):
                print("step %d: paused, MiB in use: %s" % (step, ray.get([actor.used_mib.remote() for actor in actors])))
    ray.get([actor.close.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--actors", type=int, default=2, help="one GPU each")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="gloo in place of NCCL, without pauses")
    options = parser.parse_args()
    ray.init(include_dashboard=False, num_cpus=max(options.actors, os.cpu_count() or 1))
    plain = losses(options, pauses=False)
    paused = losses(options, pauses=not options.cpu)
    print("losses: %s" % plain[-1])
    return 0 if plain == paused else 1


if __name__ == "__main__":
    sys.exit(main())
