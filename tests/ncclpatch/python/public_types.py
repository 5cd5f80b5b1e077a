"""What `mypy --strict` has to accept of a program that uses the public interface; wheel_install_test.py asks it. Never run."""
from typing import Any, Dict, Tuple

import amem
import amem.journal


def tags(group: Any, stream: int, tensors: Any) -> None:
    freed: amem.Freed = amem.pause("weights", "nccl", wait=False, stream=stream, process_group=group, timeout=3)
    size: int = freed.bytes
    by_tag: Dict[str, int] = freed.tags
    already: Tuple[str, ...] = freed.already
    amem.resume("weights", priority=size + len(by_tag) + len(already) + freed.kept)
    with amem.paused("weights") as inside:
        print(inside.bytes)
    with amem.pool("weights", policy="discard", device=0):
        amem.wait("weights", stream)
    adopted: amem.Adopted = amem.adopt(tensors, "optimizer")
    skipped: amem.Skipped = adopted.skipped[0]
    print(skipped.reason.upper(), amem.memory()["tags"])
    left: Dict[str, int] = freed.left
    account: amem.Account = amem.account(tensors=tensors)
    gpu: amem.Gpu = account.gpus[0]
    holder: amem.Held = account.held[0]
    print(freed.used - sum(left.values()), gpu.left, gpu.taken, holder.path.upper())


def process(group: amem.StoreGroup) -> str:
    amem.attach()
    amem.safepoint()
    amem.set_group(1)
    amem.trim_pinned(keep_bytes=0)
    packs: Dict[str, Any] = amem.gather("/packs", group, timeout=1.5)
    try:
        amem.frozen()
    except amem.AmemError as error:
        print(error.code + 1, error.why or "", packs, amem.stats())
    return amem.version() + amem.__version__


def metrics() -> None:
    server: amem.MetricsServer = amem.serve_metrics(":9400", seconds=15)
    with amem.serve_metrics(9400) as other:
        print(other.address + server.address, amem.metrics(), amem.openmetrics().upper())
    amem.write_metrics("/x.prom")
    server.close()


def others(model: Any, saver: Any) -> None:
    offload = amem.rl.RolloutOffload(model)
    with offload.rollout():
        amem.wrap(saver).pause()
    amem.frameworks.pause_nccl()
    amem.hosts.pause([], "nccl")
