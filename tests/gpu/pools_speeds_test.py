"""What part `speeds` of pools_bench.py makes of a journal, without a GPU."""
import unittest

import pools_speeds


def event(kind, ms, pool=1, **more):
    return {"kind": kind, "time_ns": int(ms * 1e6), "pool": pool, **more}


def step(kind, mib):
    return {"kind": kind, "bytes": mib << 20}


class Cycles(unittest.TestCase):
    EVENTS = [
        event("allocation-created", 0, allocation=1, bytes=32 << 20),
        event("allocation-created", 0, pool=None, allocation=2, bytes=1 << 20),  # NCCL's
        event("cycle-begun", 10, cycle_kind="pause"),
        event("phase-begun", 10.5),
        event("step-begun", 11, step=step("unmap", 32)),
        event("step-begun", 11.5, pool=None, step=step("unmap", 1)),  # of a pause of NCCL's, beside it
        event("step-done", 13, step=step("unmap", 32)),
        event("step-begun", 13.5, step=step("release", 32)),
        event("step-done", 18.5, step=step("release", 32)),
        event("cycle-done", 19, duration_ns=9_100_000),
    ]

    def test_a_cycle_is_its_steps_and_what_lies_between_them(self):
        (cycle,) = pools_speeds.cycles_of(self.EVENTS)
        self.assertEqual(cycle["kind"], "pause")
        self.assertEqual(cycle["steps"], {"unmap": {"ms": 2.0, "count": 1}, "release": {"ms": 5.0, "count": 1}})
        self.assertAlmostEqual(cycle["journal_ms"], 2.0)
        self.assertEqual((cycle["longest"], cycle["longest_ms"], cycle["ms"]), ("release 32 MiB", 5.0, 9.1))

    def test_a_cycle_that_did_not_end_is_none(self):
        self.assertEqual(pools_speeds.cycles_of(self.EVENTS[:-1]), [])

    def test_only_chunks_of_pools_count(self):
        self.assertEqual(pools_speeds.sizes_of(self.EVENTS), [32 << 20])


if __name__ == "__main__":
    unittest.main()
