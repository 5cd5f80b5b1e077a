#!/usr/bin/env python3
"""A job of several hosts over the stand-in card: what NCCL registers, what a pause frees, and whether collectives are right afterwards.

    NCCL_NVLS_ENABLE=0 LD_PRELOAD=libamem_nccl.so LD_LIBRARY_PATH=BUILD/lib/stand_in_card \\
        torchrun --standalone --nproc-per-node 2 network_job.py --ranks-per-host 1 --groups 2

Each --ranks-per-host ranks say that they are a host of their own (NCCL_HOSTID), so NCCL sends between them through libibverbs.so.1, which must be
that of the stand-in card. Each cycle pauses and resumes NCCL's memory on all ranks and repeats all collectives with other values.
Rank 0 prints one JSON line, last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import ctypes
import datetime
import os
import statistics
import sys
import tempfile
import time

RANK = int(os.environ.get("RANK", 0))
KINDS = ("unmatched", "registered", "graph", "churn")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks that NCCL takes for those of one host (default 1)")
    parser.add_argument("--groups", type=int, default=2, help="communicators beside the first (default 2)")
    parser.add_argument("--rails", action="store_true", help="the further communicators join the ranks of one number on each host, in turns with all")
    parser.add_argument("--cycles", type=int, default=6, help="pauses and resumes, the first reported apart (default 6)")
    parser.add_argument("--stock", action="store_true", help="without AMem: collectives alone, and the kinds as often as there are cycles")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 whose calls are made through ctypes, in place of PyTorch's groups")
    parser.add_argument("--kinds", default="", help=f"what else each cycle does, comma separated: {', '.join(KINDS)}")
    parser.add_argument("--abort", action="store_true", help="at the end, a communicator is aborted while its thread waits for the resume")
    parser.add_argument("--reductions", type=int, default=0, help="so many spans of ten all-reduces of 8 MiB are timed before the first pause")
    parser.add_argument("--turns", default="", help="in turns with another job's, by these FIFOs (span_turns.py)")
    parser.add_argument("--elements", default="1024,1048576,8388608", help="message sizes in float32")
    parser.add_argument("--time-limit", type=int, default=120, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


# Before PyTorch loads NCCL, which reads its settings once.
OPTIONS = arguments()
FINDINGS = os.path.join(tempfile.gettempdir(), f"amem-card-findings-{os.environ.get('TORCHELASTIC_RUN_ID', 'x')}")
os.environ.update({"NCCL_HOSTID": f"host{RANK // OPTIONS.ranks_per_host}", "AMEM_SIM_CARD_FINDINGS": FINDINGS})
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import network_cases  # noqa: E402

for name, value in network_cases.THROUGH_THE_CARD.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import network_work as work  # noqa: E402
import rank_main  # noqa: E402
import span_turns  # noqa: E402
from torch_job import MIB, Meeting, Nccl  # noqa: E402

COUNTS = ("gpu_bytes", "gpu_regions", "registrations", "deregistrations", "requests", "findings")


def card():
    """What the stand-in card of this process has: bytes and regions of GPU memory that are registered, calls, findings."""
    counts = (ctypes.c_uint64 * len(COUNTS))()
    ctypes.CDLL("libibverbs.so.1").amem_card_counts(counts)
    return dict(zip(COUNTS, counts))


def collectives(groups, rank, elements, salt):
    """Each kind on each group, compared; an empty string, or which was wrong."""
    for number, group in enumerate(groups):
        for count in elements if rank in group.members else ():
            if wrong := work.collectives(group, group.members.index(rank), count, salt):
                return f"{wrong} of {count} elements on communicator {number}"
    torch.cuda.synchronize()
    return ""


def communicators(rank, size, store, engine):
    """The groups; every rank takes part in making each of them."""
    everyone, hosts = list(range(size)), size // OPTIONS.ranks_per_host

    def new(members):
        if engine is None:
            return work.TorchGroup(dist.new_group(members), members)
        name = f"group{len(groups)}"
        return work.Communicator(engine, rank, members, store, name) if rank in members else work.TorchGroup(None, members)

    groups = []
    groups.append(work.TorchGroup(dist.group.WORLD, everyone) if engine is None else new(everyone))
    for number in range(OPTIONS.groups):
        if OPTIONS.rails and number % 2 == 0:
            for local in range(OPTIONS.ranks_per_host):
                groups.append(new([host * OPTIONS.ranks_per_host + local for host in range(hosts)]))
        else:
            groups.append(new(everyone))
    return groups


def of_nccl():
    """What AMem knows of NCCL's memory in this process, in MiB: held, kept and why."""
    import amem
    row = next((row for row in amem.memory()["tags"] if row["tag"] == "nccl"), {})
    return {"held_mib": row.get("bytes", 0) / MIB, "kept_mib": row.get("kept_bytes", 0) / MIB,
            "kept": {reason: (bytes_ / MIB if isinstance(bytes_, int) else bytes_) for reason, bytes_ in row.get("kept", {}).items()}}


def registered():
    """What AMem knows of registrations with cards, and why they stay."""
    import amem
    return amem.stats()["registered"]


def job(options, rank, size, report):
    torch.cuda.set_device(rank_main.device(rank))
    alone = torch.cuda.device_count() >= size  # then what the driver says of a GPU is this rank's
    dist.init_process_group("gloo" if options.nccl else "nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    store = dist.distributed_c10d._get_default_store()
    meeting = Meeting(store, rank, size)
    elements = [int(one) for one in options.elements.split(",")]
    engine = work.Engine(options.nccl or "libnccl.so.2")
    groups = communicators(rank, size, store, engine if options.nccl else None)
    began = time.monotonic()
    if wrong := collectives(groups, rank, elements, 0):
        raise RuntimeError("before the first pause: " + wrong)
    report["first_collectives_s"] = round(time.monotonic() - began, 2)
    kinds = [work.KINDS[kind](engine, rank, size, store) for kind in options.kinds.split(",") if kind]
    report.update({"gpu": torch.cuda.get_device_name(), "nccl": engine.version, "communicators": len(groups), "card": meeting.gather(card())})
    if any(one["requests"] == 0 for one in report["card"]):
        raise RuntimeError("NCCL sent nothing through the stand-in card")
    if options.reductions:
        report["all_reduce_ms"] = reductions(groups[0], rank, meeting, options)
    if options.stock:
        for cycle in range(1, options.cycles + 1 if kinds else 1):
            for kind in kinds:
                kind.before_pause()
            check(meeting, cycle, collectives(groups, rank, elements, cycle) or after_resume(kinds))
    else:
        report["before"] = meeting.gather(of_nccl())
        cycles(options, rank, meeting, groups, kinds, elements, report, alone)
        if options.abort:
            report["abort_ms"] = abort_at_the_gate(engine, rank, size, store, meeting)
            if wrong := collectives(groups, rank, elements, 0):
                raise RuntimeError("after an abort: " + wrong)
        report["card_after"] = meeting.gather(card())
    found = ""
    if os.path.exists(FINDINGS):
        with open(FINDINGS) as file:
            found = file.read()
    if any(meeting.gather(found)):
        raise RuntimeError("the card found: " + (found or "see another rank"))
    dist.destroy_process_group()


def after_resume(kinds):
    return ", ".join(filter(None, [kind.after_resume() for kind in kinds]))


def check(meeting, cycle, wrong):
    if any(meeting.gather(wrong)):
        raise RuntimeError(f"after cycle {cycle}: {wrong or 'wrong on another rank'}")


def reductions(group, rank, meeting, options):
    """How long an all-reduce of 8 MiB takes in each span, in milliseconds, at the slowest rank."""
    turn, tensor, spans = span_turns.Turn(options.turns if rank == 0 else ""), torch.ones(1 << 21, device="cuda"), []

    def ten():
        for _ in range(10):
            group.all_reduce(tensor)
            torch.cuda.synchronize()

    for span in range(options.reductions):
        turn.take()
        meeting.gather("begins")  # no rank's kernel waits for another rank outside the turn
        spans.append(timed(ten) / 10)
        meeting.gather("ended")
        turn.give(span + 1 == options.reductions)
    return [max(of_ranks) for of_ranks in zip(*meeting.gather(spans))]


def abort_at_the_gate(engine, rank, size, store, meeting):
    """The second host resumes without the others, and its first rank receives what rank 0, which is paused, had sent: NCCL's thread of rank 0 then waits
    at the gate, and the communicator is aborted. How long that takes at rank 0, in milliseconds."""
    import amem
    comm = work.Communicator(engine, rank, list(range(size)), store, "aborted")
    work.collectives(comm, rank, 1024 * size, 0)
    receiver, tensor, took = OPTIONS.ranks_per_host, torch.ones(4096, device="cuda"), 0.0
    resumes_first = rank // OPTIONS.ranks_per_host == 1
    if rank == 0:
        comm.send(tensor, receiver)
    torch.cuda.synchronize()
    meeting.gather("sent")
    amem.pause(hosts_idle=True)
    meeting.gather("paused")
    if resumes_first:
        amem.resume()
    if rank == receiver:
        comm.receive(tensor, 0)
        time.sleep(1)  # until the request of the receive has come
    meeting.gather("received")
    if rank == 0:
        took = timed(comm.abort)
    meeting.gather("aborted")
    if rank != 0:
        comm.abort()
    if not resumes_first:
        amem.resume()
    return max(meeting.gather(took))


def timed(call):
    """How long it takes, in milliseconds."""
    began = time.monotonic()
    call()
    return (time.monotonic() - began) * 1000


def cycles(options, rank, meeting, groups, kinds, elements, report, alone):
    nccl, pauses, resumes, freed = Nccl(), [], [], []
    renews = os.environ.get("AMEM_NETWORK") == "renew"
    if renews:
        import amem
    for cycle in range(1, options.cycles + 1):
        for kind in kinds:
            kind.before_pause()
        torch.cuda.synchronize()
        meeting.gather("idle")
        before = torch.cuda.mem_get_info()[0]
        meeting.gather("measured")  # all GPUs of all hosts are idle here
        paused = timed(lambda: amem.pause(hosts_idle=True)) if renews else nccl.pause()
        meeting.gather("paused")
        gone = (torch.cuda.mem_get_info()[0] - before) / MIB
        if cycle == 1:
            report["paused"] = meeting.gather(of_nccl())
            report["card_paused"] = meeting.gather(card())
            report["registered"] = meeting.gather(registered())
            # What the program has registered stays, by hand or with a graph; NCCL's own is what AMem says can be renewed.
            own = [sum(card["renewable_regions"] for card in one["cards"]) for one in report["registered"]]
            leaves = renews and "NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS" not in os.environ  # with which all stays
            if leaves and any(now["gpu_regions"] > then["gpu_regions"] - of_nccls
                              for now, then, of_nccls in zip(report["card_paused"], report["card"], own)):
                raise RuntimeError(f"the cards still hold GPU memory in a pause: {report['registered']}")
        meeting.gather("measured")
        for kind in kinds:
            kind.while_paused()
        resumed = nccl.resume()
        meeting.gather("resumed")
        check(meeting, cycle, collectives(groups, rank, elements, cycle) or after_resume(kinds))
        pauses.append(paused)
        resumes.append(resumed)
        freed.append(gone)
    later = slice(1, None) if options.cycles > 1 else slice(None)
    own = [statistics.median(pauses[later]), statistics.median(resumes[later]), statistics.median(freed[later]), pauses[0]]
    rows = meeting.gather(own)
    report.update({"first_pause_ms": round(max(row[3] for row in rows), 1), "pause_ms": round(max(row[0] for row in rows), 1),
                   "resume_ms": round(max(row[1] for row in rows), 1), "freed_mib": [round(row[2]) for row in rows], "a_gpu_each": alone})


if __name__ == "__main__":
    sys.exit(rank_main.run("network_job", job, lambda: OPTIONS, ("cycles", "groups", "rails", "ranks_per_host", "kinds")))
