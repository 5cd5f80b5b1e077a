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


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks that NCCL takes for those of one host (default 1)")
    parser.add_argument("--groups", type=int, default=2, help="communicators beside the first (default 2)")
    parser.add_argument("--rails", action="store_true", help="the further communicators join the ranks of one number on each host, in turns with all")
    parser.add_argument("--cycles", type=int, default=6, help="pauses and resumes, the first reported apart (default 6)")
    parser.add_argument("--stock", action="store_true", help="without AMem: collectives alone")
    parser.add_argument("--elements", default="1024,1048576,8388608", help="message sizes in float32")
    parser.add_argument("--time-limit", type=int, default=120, help="seconds; the process ends itself then")
    parser.add_argument("--json", default="", help="rank 0 writes its line there too")
    return parser.parse_args()


# Before PyTorch loads NCCL, which reads its settings once.
OPTIONS = arguments()
FINDINGS = os.path.join(tempfile.gettempdir(), f"amem-card-findings-{os.environ.get('TORCHELASTIC_RUN_ID', 'x')}")
os.environ.update({"NCCL_HOSTID": f"host{RANK // OPTIONS.ranks_per_host}", "AMEM_CARD_FINDINGS": FINDINGS})
for name, value in {"NCCL_NET": "IB", "NCCL_IB_HCA": "amem_card", "NCCL_NET_GDR_LEVEL": "SYS", "NCCL_NET_GDR_READ": "1", "NCCL_DMABUF_ENABLE": "1",
                    "NCCL_IB_MERGE_NICS": "0", "NCCL_GIN_ENABLE": "0", "NCCL_GIN_TYPE": "0", "NCCL_SOCKET_IFNAME": "lo"}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import rank_main  # noqa: E402
from torch_job import MIB, Meeting, Nccl  # noqa: E402

COUNTS = ("gpu_bytes", "gpu_regions", "registrations", "deregistrations", "requests", "findings")


def card():
    """What the stand-in card of this process has: bytes and regions of GPU memory that are registered, calls, findings."""
    counts = (ctypes.c_uint64 * len(COUNTS))()
    ctypes.CDLL("libibverbs.so.1").amem_card_counts(counts)
    return dict(zip(COUNTS, counts))


def collectives(groups, rank, elements, salt):
    """Each kind on each group, compared; an empty string, or which was wrong."""
    for number, (group, members) in enumerate(groups):
        if rank not in members:
            continue
        own, size = members.index(rank), len(members)
        for count in elements:
            wrong = of_one(group, own, size, count, salt)
            if wrong:
                return f"{wrong} of {count} elements on communicator {number}"
    torch.cuda.synchronize()
    return ""


def of_one(group, own, size, count, salt):
    def values(of, length=count):
        return (torch.arange(length, device="cuda", dtype=torch.int64) % 1021 + 7 * of + salt).float()

    total = sum(values(of) for of in range(size))
    summed = values(own)
    dist.all_reduce(summed, group=group)
    gathered = [torch.empty(count, device="cuda") for _ in range(size)]
    dist.all_gather(gathered, values(own), group=group)
    part = torch.empty(count // size, device="cuda")
    dist.reduce_scatter(part, [values(own)[i * (count // size):(i + 1) * (count // size)].contiguous() for i in range(size)], group=group)
    exchanged = torch.empty(count // size * size, device="cuda")
    dist.all_to_all_single(exchanged, values(own)[:count // size * size].contiguous(), group=group)
    wanted = torch.cat([values(of)[own * (count // size):(own + 1) * (count // size)] for of in range(size)])
    checks = {"all-reduce": torch.equal(summed, total), "all-gather": all(torch.equal(gathered[of], values(of)) for of in range(size)),
              "reduce-scatter": torch.equal(part, total[own * (count // size):(own + 1) * (count // size)]),
              "all-to-all": torch.equal(exchanged, wanted)}
    return ", ".join(name for name, right in checks.items() if not right)


def communicators(size, rank_count, rails):
    """The groups with their members; every rank makes each of them."""
    everyone, hosts = list(range(size)), size // OPTIONS.ranks_per_host
    groups = [(dist.group.WORLD, everyone)]
    for number in range(rank_count):
        if rails and number % 2 == 0:
            for local in range(OPTIONS.ranks_per_host):
                members = [host * OPTIONS.ranks_per_host + local for host in range(hosts)]
                groups.append((dist.new_group(members), members))
        else:
            groups.append((dist.new_group(everyone), everyone))
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
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.time_limit))
    meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size)
    elements = [int(one) for one in options.elements.split(",")]
    groups = communicators(size, options.groups, options.rails)
    began = time.monotonic()
    if wrong := collectives(groups, rank, elements, 0):
        raise RuntimeError("before the first pause: " + wrong)
    report["first_collectives_s"] = round(time.monotonic() - began, 2)
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    report.update({"gpu": torch.cuda.get_device_name(), "nccl": version.value, "communicators": len(groups), "card": meeting.gather(card())})
    if any(one["requests"] == 0 for one in report["card"]):
        raise RuntimeError("NCCL sent nothing through the stand-in card")
    if not options.stock:
        report["before"] = meeting.gather(of_nccl())
        cycles(options, rank, meeting, groups, elements, report, alone)
        report["card_after"] = meeting.gather(card())
    found = ""
    if os.path.exists(FINDINGS):
        with open(FINDINGS) as file:
            found = file.read()
    if any(meeting.gather(found)):
        raise RuntimeError("the card found: " + (found or "see another rank"))
    dist.destroy_process_group()


def timed(call):
    """How long it takes, in milliseconds."""
    began = time.monotonic()
    call()
    return (time.monotonic() - began) * 1000


def cycles(options, rank, meeting, groups, elements, report, alone):
    nccl, pauses, resumes, freed = Nccl(), [], [], []
    renews = os.environ.get("AMEM_NETWORK") == "renew"
    if renews:
        import amem
    for cycle in range(1, options.cycles + 1):
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
            if renews and any(one["gpu_regions"] for one in report["card_paused"]):
                raise RuntimeError(f"the cards still hold GPU memory in a pause: {report['registered']}")
        meeting.gather("measured")
        resumed = nccl.resume()
        meeting.gather("resumed")
        wrong = collectives(groups, rank, elements, cycle)
        if any(meeting.gather(wrong)):
            raise RuntimeError(f"after cycle {cycle}: {wrong or 'wrong on another rank'}")
        pauses.append(paused)
        resumes.append(resumed)
        freed.append(gone)
    later = slice(1, None) if options.cycles > 1 else slice(None)
    own = [statistics.median(pauses[later]), statistics.median(resumes[later]), statistics.median(freed[later]), pauses[0]]
    rows = meeting.gather(own)
    report.update({"first_pause_ms": round(max(row[3] for row in rows), 1), "pause_ms": round(max(row[0] for row in rows), 1),
                   "resume_ms": round(max(row[1] for row in rows), 1), "freed_mib": [round(row[2]) for row in rows], "a_gpu_each": alone})


if __name__ == "__main__":
    sys.exit(rank_main.run("network_job", job, lambda: OPTIONS, ("cycles", "groups", "rails", "ranks_per_host")))
