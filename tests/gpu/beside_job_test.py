"""What beside_job.py takes for a failure, without a GPU."""
import types
import unittest

import beside_job

OPTIONS = types.SimpleNamespace(mib=1024)


def report(used, left, **more):
    return {"rows": [{"used_mib": used, "left_mib": left, **more}]}


class Judge(unittest.TestCase):
    def test_a_pause_takes_the_memory_of_all_but_what_belongs_to_a_tag(self):
        for case, taken in (("expandable", 1), ("mempool", 2), ("tms", 2)):
            self.assertEqual(beside_job.judge(case, OPTIONS, report(600 + taken * 1024, 602)), [])
            self.assertEqual(len(beside_job.judge(case, OPTIONS, report(600 + taken * 1024, 600 + 1024 * taken // 2))), 1, case)
        self.assertEqual(beside_job.judge("pool", OPTIONS, report(2648, 1626, both_left_mib=602)), [])
        self.assertEqual(len(beside_job.judge("pool", OPTIONS, report(2648, 1626, both_left_mib=1626))), 1)
        self.assertEqual(len(beside_job.judge("pool", OPTIONS, report(2648, 2648, both_left_mib=602))), 1)

    def test_memory_of_the_drivers_own_pool_stays(self):
        self.assertEqual(beside_job.judge("async", OPTIONS, {**report(1700, 1700), "usable": True}), [])
        self.assertEqual(len(beside_job.judge("async", OPTIONS, report(1700, 1700))), 1)

    def test_a_process_that_paused_nothing_shows_nothing(self):
        for case in set(beside_job.CASES) - {"sanitizer"}:
            self.assertEqual(beside_job.judge(case, OPTIONS, {"rows": [], "usable": True}), ["nothing was paused"])

    def test_a_program_under_the_checker_was_paused_and_has_its_contents(self):
        for paused in (True, False):
            for same in (True, False):
                wrong = beside_job.judge("sanitizer", OPTIONS, {"rows": [], "paused": paused, "same": same})
                self.assertEqual(wrong == [], paused and same)


if __name__ == "__main__":
    unittest.main()
