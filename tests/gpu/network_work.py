"""What network_job.py does over the card: communicators of PyTorch's and by NCCL's own calls, and work that a pause may find half done.

Every kind of work has the same three moments: `before_pause`, `while_paused` and `after_resume`, which returns what was wrong, or "".
All calls are collective. Data are whole numbers, so that every result is known exactly. Results are awaited before the next kernel is launched: the
driver may load that kernel's code only once the GPU is idle, and holds up the stand-in card's copies meanwhile, for which NCCL's kernel waits.
"""
import ctypes
import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
from suspend_job import Engine  # noqa: E402
from two_nccls_job import FLOAT32, SUM, UniqueId  # noqa: E402

POISON = -7.0  # no input and no sum of inputs has this value


def values(of, count, salt):
    """What rank `of` gives."""
    return (torch.arange(count, device="cuda", dtype=torch.int64) % 1021 + 7 * of + salt).float()


class TorchGroup:
    """A process group and the ranks in it."""

    def __init__(self, group, members):
        self.group, self.members = group, members

    def all_reduce(self, tensor):
        dist.all_reduce(tensor, group=self.group)

    def all_gather(self, out, tensor):
        dist.all_gather_into_tensor(out, tensor, group=self.group)

    def reduce_scatter(self, out, tensor):
        dist.reduce_scatter_tensor(out, tensor, group=self.group)

    def all_to_all(self, out, tensor):
        dist.all_to_all_single(out, tensor, group=self.group)


class Communicator:
    """A communicator of all `members`, made and used through ctypes on the current stream. Not for ranks outside."""

    def __init__(self, engine, rank, members, store, name):
        self.engine, self.members, self.own = engine, members, members.index(rank)
        self.comm = engine.init(self.own, len(members), store, name)

    def call(self, name, *arguments_):
        tensors = [ctypes.c_void_p(one.data_ptr()) if isinstance(one, torch.Tensor) else one for one in arguments_]
        self.engine.check(name, *tensors, self.comm, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    def all_reduce(self, tensor):
        self.call("ncclAllReduce", tensor, tensor, ctypes.c_size_t(tensor.numel()), FLOAT32, SUM)

    def all_gather(self, out, tensor):
        self.call("ncclAllGather", tensor, out, ctypes.c_size_t(tensor.numel()), FLOAT32)

    def reduce_scatter(self, out, tensor):
        self.call("ncclReduceScatter", tensor, out, ctypes.c_size_t(out.numel()), FLOAT32, SUM)

    def all_to_all(self, out, tensor):
        part = tensor.numel() // len(self.members)
        self.engine.check("ncclGroupStart")
        for peer in range(len(self.members)):
            self.send(tensor[peer * part:(peer + 1) * part], peer)
            self.receive(out[peer * part:(peer + 1) * part], peer)
        self.engine.check("ncclGroupEnd")

    def send(self, tensor, peer):
        self.call("ncclSend", tensor, ctypes.c_size_t(tensor.numel()), FLOAT32, peer)

    def receive(self, tensor, peer):
        self.call("ncclRecv", tensor, ctypes.c_size_t(tensor.numel()), FLOAT32, peer)

    def destroy(self):
        self.engine.check("ncclCommDestroy", self.comm)

    def abort(self):
        self.engine.check("ncclCommAbort", self.comm)


def difference(seen, wanted):
    """Empty if they are equal, or how many elements differ and which is the first."""
    wrong = (seen != wanted).nonzero().flatten()
    return "" if len(wrong) == 0 else (f"{len(wrong)} of {len(seen)} elements, from {int(wrong[0])} to {int(wrong[-1])}, the first is {float(seen[wrong[0]])} "
                                       f"and not {float(wanted[wrong[0]])}")


def collectives(group, own, count, salt):
    """Each collective of `count` elements once, compared; an empty string, or which were wrong. Waits for the GPU."""
    size = len(group.members)
    part = count // size
    whole = [values(of, count, salt) for of in range(size)]
    summed, gathered = whole[own].clone(), torch.full((count * size,), POISON, device="cuda")
    scattered, exchanged = torch.full((part,), POISON, device="cuda"), torch.full((part * size,), POISON, device="cuda")
    group.all_reduce(summed)
    group.all_gather(gathered, whole[own])
    group.reduce_scatter(scattered, whole[own][:part * size].contiguous())
    group.all_to_all(exchanged, whole[own][:part * size].contiguous())
    torch.cuda.synchronize()
    total, mine = sum(whole), slice(own * part, (own + 1) * part)
    checks = {"all-reduce": torch.equal(summed, total), "all-gather": torch.equal(gathered, torch.cat(whole)),
              "reduce-scatter": torch.equal(scattered, total[mine]), "all-to-all": torch.equal(exchanged, torch.cat([one[mine] for one in whole]))}
    return ", ".join(name for name, right in checks.items() if not right)


class Unmatched:
    """Each rank sends to the next one before the pause, and nobody receives until after the resume: the send waits in NCCL."""
    COUNT = 4096

    def __init__(self, engine, rank, size, store):
        self.comm, self.size, self.cycle = Communicator(engine, rank, list(range(size)), store, "unmatched"), size, 0
        collectives(self.comm, rank, self.COUNT * size, 0)  # makes the connections, for which both ends must call

    def before_pause(self):
        self.cycle += 1
        own = self.comm.own
        self.comm.send(values(own, self.COUNT, self.cycle), (own + 1) % self.size)

    def while_paused(self):
        pass

    def after_resume(self):
        sender = (self.comm.own - 1) % self.size
        came = torch.full((self.COUNT,), POISON, device="cuda")
        self.comm.receive(came, sender)
        torch.cuda.synchronize()
        return "" if torch.equal(came, values(sender, self.COUNT, self.cycle)) else "a send that waited across the pause"


class Registered:
    """Collectives on a buffer that the program has registered with its communicator."""
    COUNT = 1 << 22

    def __init__(self, engine, rank, size, store):
        self.comm, self.cycle = Communicator(engine, rank, list(range(size)), store, "registered"), 0
        self.buffers = torch.full((2, self.COUNT), POISON, device="cuda")
        self.handle = ctypes.c_void_p()
        engine.check("ncclCommRegister", self.comm.comm, ctypes.c_void_p(self.buffers.data_ptr()),
                     ctypes.c_size_t(self.buffers.numel() * self.buffers.element_size()), ctypes.byref(self.handle))
        self.after_resume()

    def before_pause(self):
        pass

    def while_paused(self):
        pass

    def after_resume(self):
        size, own, (source, result) = len(self.comm.members), self.comm.own, self.buffers
        part = self.COUNT // size
        self.cycle += 1
        source.copy_(values(own, self.COUNT, self.cycle))
        result.fill_(POISON)
        self.comm.all_to_all(result[:part * size], source[:part * size])
        torch.cuda.synchronize()
        wanted = torch.cat([values(of, self.COUNT, self.cycle)[own * part:(own + 1) * part] for of in range(size)])
        exchanged = difference(result[:part * size], wanted)
        self.comm.all_reduce(source)
        torch.cuda.synchronize()
        reduced = difference(source, sum(values(of, self.COUNT, self.cycle) for of in range(size)))
        return ", ".join(f"{what} of registered buffers: {wrong}" for what, wrong in (("all-to-all", exchanged), ("all-reduce", reduced)) if wrong)


class Graph:
    """A CUDA graph of collectives, captured once and replayed after each resume."""
    COUNT = 1 << 20

    def __init__(self, engine, rank, size, store):
        self.comm, self.cycle = Communicator(engine, rank, list(range(size)), store, "graph"), 0
        self.tensor = torch.zeros(self.COUNT, device="cuda")
        self.gathered = torch.zeros(self.COUNT * size, device="cuda")
        self.collectives()  # makes the connections
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="relaxed"):
            self.collectives()

    def collectives(self):
        self.comm.all_reduce(self.tensor)
        self.comm.all_gather(self.gathered, self.tensor)

    def before_pause(self):
        pass

    def while_paused(self):
        pass

    def after_resume(self):
        self.cycle += 1
        size = len(self.comm.members)
        self.tensor.copy_(values(self.comm.own, self.COUNT, self.cycle))
        self.gathered.fill_(POISON)
        self.graph.replay()
        torch.cuda.synchronize()
        total = sum(values(of, self.COUNT, self.cycle) for of in range(size))
        return "" if torch.equal(self.gathered, total.repeat(size)) else "a replayed graph"


class Churn:
    """While memory is paused, a communicator that was used is destroyed, and none can be made; after the resume a new one is."""
    COUNT = 1 << 18
    INVALID_USAGE = 5

    def __init__(self, engine, rank, size, store):
        self.engine, self.made, self.new = engine, 0, lambda number: Communicator(engine, rank, list(range(size)), store, f"churn{number}")
        self.comm = self.new(0)
        self.after_resume()

    def before_pause(self):
        pass

    def while_paused(self):
        self.comm.destroy()
        self.comm, unique, comm = None, UniqueId(), ctypes.c_void_p()
        self.engine.check("ncclGetUniqueId", ctypes.byref(unique))
        if (result := self.engine.code("ncclCommInitRank", ctypes.byref(comm), 1, unique, 0)) != self.INVALID_USAGE:
            raise RuntimeError(f"ncclCommInitRank in a pause returned {result}")

    def after_resume(self):
        if self.comm is None:
            self.made += 1
            self.comm = self.new(self.made)
        wrong = collectives(self.comm, self.comm.own, self.COUNT, self.made)
        return wrong and "on a communicator that was made in a pause: " + wrong


KINDS = {"unmatched": Unmatched, "registered": Registered, "graph": Graph, "churn": Churn}
