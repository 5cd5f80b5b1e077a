"""One rank of `amem doctor --measure`."""

import ctypes
import time

from . import rank_process

COMMUNICATORS = 4
BYTES = 16 << 20  # of each all-reduce


class Reductions(rank_process.Job):
    def __init__(self, rank, size, pipe, nccl):
        super().__init__(rank, size, pipe, nccl, rank)
        self.floats = (64 << 10 if self.driver.simulated else BYTES) // 4
        self.send, self.receive = self.driver.allocate(4 * self.floats), self.driver.allocate(4 * self.floats)

    def make_communicators(self):
        for _ in range(COMMUNICATORS):
            self.make_communicator()

    def reduce(self):
        """An all-reduce on each communicator, whose sums are compared. Returns the seconds without the comparisons."""
        expected = bytes(ctypes.c_float(sum(range(1, self.size + 1)))) * self.floats
        self.driver.write(self.send.value, bytes(ctypes.c_float(self.rank + 1)) * self.floats)
        seconds = 0.0
        for communicator in self.communicators:
            self.driver.fill(self.receive.value, 0xff, 4 * self.floats)
            self.driver.synchronize()
            began = time.monotonic()
            self.check("ncclAllReduce", self.send.value, self.receive.value, self.floats, rank_process.FLOAT32, rank_process.SUM, communicator, None)
            self.driver.synchronize()
            seconds += time.monotonic() - began
            if self.driver.read(self.receive.value, 4 * self.floats) != expected:
                raise rank_process.Wrong("an all-reduce gave wrong sums")
        return seconds


def measure(pipe, rank, size, nccl, cycles):
    job = Reductions(rank, size, pipe, nccl)
    before = job.driver.used_bytes()
    result = {"simulated": job.driver.simulated, "start_seconds": job.timed(job.make_communicators)}
    job.barrier()
    result["first_seconds"] = job.reduce()
    job.barrier()
    result["device_bytes"] = job.driver.used_bytes() - before
    import amem
    stats = amem.stats()
    if not stats.get("session"):
        raise rank_process.Failed("NCCL is not under AMem: %s" % (stats.get("reason") or stats["nccl_libraries"]))
    result["held_bytes"] = sum(one["bytes"] for one in stats["communicators"])
    result["kept_bytes"] = sum(stats["kept_bytes"].values()) + stats["legacy_kept_bytes"]
    result["nccl"] = [one["version"] for one in stats["nccl_libraries"] if one["under_amem"]]
    result["pause_seconds"], result["resume_seconds"] = [], []
    for _ in range(cycles):
        result["pause_seconds"].append(job.timed(amem.pause))
        job.barrier()
        result["freed_bytes"] = before + result["device_bytes"] - job.driver.used_bytes()
        result["resume_seconds"].append(job.timed(amem.resume))
        job.reduce()
    job.barrier()
    return result


if __name__ == "__main__":
    rank_process.main(measure)
