"""Each bar of bars.py is met by a good run and missed by one that is bad in that respect alone."""
import copy
import unittest
from unittest import mock

import bars
import rank_main

GOOD = {"mode": "amem", "identical": True, "memory_after_cycles": {"first_mib": 9.0, "last_mib": 9.0, "equal": True},
        "median": {"pause_ms": 160.0, "resume_ms": 300.0, "freed_mib": 5.0, "votes_ms": 0.5},
        "cycles": [{"amem_resumed": {"contents": {"save_copy_ms": 20.0, "restore_ms": 22.0}}}] * 3}
FLOOR = {"mode": "floor", "cycles": [{}], "median": {"pause_ms": 100.0, "resume_ms": 200.0}}


def changed(**values):
    data = copy.deepcopy(GOOD)
    for path, value in values.items():
        *folders, name = path.split("__")
        place = data
        for folder in folders:
            place = place[folder]
        place[name] = value
    return data


class Bars(unittest.TestCase):
    def test_a_run_is_held_to_results_memory_and_votes(self):
        self.assertEqual(bars.of_cycles(GOOD), [])
        for bad, word in ((changed(identical=False), "bit-identical"), (changed(identical=None), "bit-identical"),
                          (changed(memory_after_cycles__equal=False, memory_after_cycles__last_mib=10.0), "10 after the last"),
                          (changed(median__freed_mib=0), "frees nothing"), (changed(median__votes_ms=3.1), "3.10 ms")):
            found = bars.of_cycles(bad)
            self.assertEqual(len(found), 1, found)
            self.assertIn(word, found[0])
        self.assertEqual(bars.of_cycles(changed(median__votes_ms=50.0), timed=False), [])
        self.assertEqual(bars.of_cycles(FLOOR), [])
        grown = changed(mode="native", memory_after_cycles__equal=False, environment={"AMEM_SUSPEND": "native"})
        self.assertEqual(bars.of_cycles(grown), [])  # NCCL's own suspend
        grown["environment"] = {}                    # the same program, served by AMem
        self.assertEqual(len(bars.of_cycles(grown)), 1)

    def test_served_suspends_are_held_to_AMems_own_call_and_to_NCCLs(self):
        native = changed(held_mib=3600.0, median__pause_ms=8000.0, median__resume_ms=15000.0)
        self.assertEqual(bars.served(changed(held_mib=3600.0), GOOD, native), [])
        self.assertEqual(bars.served(changed(held_mib=3600.0), GOOD, None), [])
        for bad, word in ((changed(median__pause_ms=195.0), "1.22 times"), (changed(median__resume_ms=361.0), "1.20 times"),
                          (changed(median__freed_mib=4.5), "frees 4 MiB")):
            found = bars.served(bad, GOOD, None)
            self.assertEqual(len(found), 1, found)
            self.assertIn(word, found[0])
        slow = changed(held_mib=3600.0, median__pause_ms=6000.0, median__resume_ms=15000.0)
        self.assertIn("37.5 times faster", bars.served(changed(), GOOD, slow)[0])
        self.assertEqual(bars.served(changed(), GOOD, {**slow, "held_mib": 100.0}), [])

    def test_the_direct_layout_is_held_to_the_raw_calls_without_contents(self):
        self.assertEqual(bars.against_floor(GOOD, FLOOR), [])
        self.assertEqual(len(bars.against_floor(changed(median__pause_ms=171.0), FLOOR)), 1)
        self.assertEqual(len(bars.against_floor(changed(median__resume_ms=323.0), FLOOR)), 1)
        self.assertIn("do not say", bars.against_floor(changed(cycles=[]), FLOOR)[0])

    def test_start_up_and_single_collectives_are_held_to_stock(self):
        self.assertEqual(bars.startup([100, 100, 200], [104, 90, 300]), [])
        self.assertIn("6.0 %", bars.startup([100], [106])[0])
        row = {"stock_before_us": 10.0, "amem_before_us": 10.4, "amem_after_us": 9.0}
        self.assertEqual(bars.steady([row]), [])
        self.assertEqual(len(bars.steady([dict(row, amem_after_us=10.6)])), 1)

    def test_legacy_memory_is_held_to_the_other(self):
        self.assertEqual(bars.legacy(changed(median__pause_ms=239.0), GOOD), [])
        self.assertIn("1.51 times", bars.legacy(changed(median__resume_ms=453.0), GOOD)[0])

    def test_registered_memory_is_held_to_stock(self):
        row = {"us": {"a": 250.0, "graph": 20.0, "short": 9.0}, "us_after": {"a": 260.0, "graph": 20.0, "short": 90.0}, "kernels": ["K"], "left_mib": 1.0}
        stock = {"kinds": {"window": dict(row, us_after={})}}
        self.assertEqual(bars.registration({"kinds": {"window": row}}, stock), [])
        for bad, word in ((dict(row, kernels=["L"]), "launched L"), (dict(row, us_after={"a": 275.0, "graph": 22.0}), "10.0 % slower"),
                          (dict(row, us={"a": 265.0, "graph": 21.2}), "before cycles"), (dict(row, left_mib=6.0), "6 MiB are left")):
            found = bars.registration({"kinds": {"window": bad}}, stock)
            self.assertEqual(len(found), 1, found)
            self.assertIn(word, found[0])

    def test_rollouts_are_held_to_the_training_without_and_to_what_is_free(self):
        row = {"cycles": 20, "losses_differ": 0, "parameters_differ": 0, "graph_differs": 0, "graph_replays": 20, "share": 0.97, "gib": 16.0,
               "pause_ms": 330.0, "complete_ms": 340.0}
        job = lambda **values: {"device": "cuda", "strategies": {"ddp": dict(row, **values)}}  # noqa: E731
        self.assertEqual(bars.rollout(job()), [])
        for bad, word in ((job(losses_differ=1), "1 losses"), (job(parameters_differ=3), "3 parameters"), (job(graph_differs=2), "2 replays"),
                          (job(graph_replays=19), "19 times in 20"), (job(share=0.94), "94.0 % of the memory")):
            found = bars.rollout(bad)
            self.assertEqual(len(found), 1, found)
            self.assertIn(word, found[0])
        self.assertEqual(bars.rollout(job(share=0.1), timed=False), [])
        alone = job()["strategies"]
        self.assertEqual(bars.rollout_alone(job(pause_ms=370.0, complete_ms=380.0), alone), [])
        self.assertIn("pause_ms is 1.21 times", bars.rollout_alone(job(pause_ms=400.0), alone)[0])
        self.assertIn("complete_ms", bars.rollout_alone(job(complete_ms=400.0), alone)[0])
        self.assertIn("cannot be compared", bars.rollout_alone(job(gib=8.0), alone)[0])

    def test_a_run_without_a_result_is_none(self):
        self.assertEqual(bars.of_run({"pass": 1, "FAIL": 0, "SKIPPED": 3}, ""), [])
        self.assertEqual(bars.of_run({"pass": 0, "FAIL": 1, "SKIPPED": 3}, ""), [])
        self.assertIn("x", bars.of_run({"pass": 0, "FAIL": 0, "SKIPPED": 3}, "x")[0])

    def test_the_simulated_driver_is_not_timed(self):
        self.assertFalse(bars.timed({"gpu": "Simulated GPU"}))
        self.assertTrue(bars.timed({"gpu": "NVIDIA H200"}))


class AccountsOfJobs(unittest.TestCase):
    def test_what_was_taken_and_what_is_left_are_what_the_driver_had_given_out(self):
        with mock.patch.object(rank_main, "used", return_value=3 << 30):
            row = rank_main.checked_account(5 << 30, 2 << 30, {"modules": 1 << 30, "tensors": (2 << 30) + (32 << 20)})
            self.assertEqual((row["taken_mib"], row["left_mib"], row["off_mib"]), (2048, {"modules": 1024, "tensors": 2080}, 32))
            for taken, left in ((1 << 30, 3 << 30), (2 << 30, (3 << 30) + (33 << 20)), (3 << 30, 2 << 30)):
                with self.assertRaisesRegex(AssertionError, "is off by"):
                    rank_main.checked_account(5 << 30, taken, {"modules": left})


if __name__ == "__main__":
    unittest.main()
