"""unmodified_job.py on the stand-ins for the driver and NCCL: a kind that is well, and beside it kinds that go wrong, each in its own way.

    unmodified_job_test.py LIBRARY TOOL     # LD_LIBRARY_PATH: the stand-ins
"""
import json
import os
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY, TOOL = sys.argv.pop(1), sys.argv.pop(1)


class UnmodifiedJob(unittest.TestCase):
    def test_what_goes_wrong_is_said_of_its_kind_and_the_others_go_on(self):
        ran = subprocess.run([sys.executable, os.path.join(HERE, "unmodified_job.py"), "--imitate", "stand-ins", "--library", LIBRARY, "--tool", TOOL,
                              "--kinds", "falls,hangs,differs,reduce", "--at-once", "2", "--stops", "6", "--deadline", "3", "--time-limit", "280"],
                             capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(ran.returncode, 1, ran.stdout + ran.stderr)
        answer = json.loads(ran.stdout.splitlines()[-1])
        kinds = {one["kind"]: one for one in answer["kinds"]}
        self.assertFalse(answer["ok"])
        self.assertTrue(answer["command"].startswith("unmodified_job.py --imitate stand-ins --library libamem_nccl.so --tool amem-replay "), answer["command"])
        self.assertIn("driver", answer)
        self.assertIn("was to end here", " ".join(kinds["falls"]["problems"]))
        self.assertIn("rank 1 has made 33 of 34 launches", " ".join(kinds["hangs"]["problems"]))
        self.assertIn("losses differ from step 7 on", " ".join(kinds["differs"]["problems"]))
        self.assertIn("the losses of the first", kinds["differs"]["problems"][-1])
        well = kinds["reduce"]
        self.assertEqual(well["problems"], [])
        self.assertEqual(well["stops"], 6)
        self.assertGreater(well["to_stand_s"]["worst"], 0)
        self.assertGreater(well["freed_mib"]["median"], 0)

    def test_a_kind_for_which_no_time_is_left_is_not_well(self):
        ran = subprocess.run([sys.executable, os.path.join(HERE, "unmodified_job.py"), "--imitate", "stand-ins", "--library", LIBRARY, "--tool", TOOL,
                              "--kinds", "reduce", "--time-limit", "20"], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(ran.returncode, 1, ran.stdout + ran.stderr)
        self.assertIn("no time left", ran.stdout)


class SignalsJob(unittest.TestCase):
    """signals_job.py, whose trials are guard_test.py's."""

    def test_ends_of_the_tool_that_all_came_too_late_show_nothing(self):
        os.environ.setdefault("AMEM_REPLAY", TOOL)
        import signals_job
        trial = {"state": "pause", "ending": "the tool", "seed": 1, "ok": True}
        report = {"trials": [{**trial, "ending": "SIGINT", "waited": True}], "left_out": 0, "left": {"grown_mib": [], "processes": 0}, "xids": {"seen": []}}
        for at_work, wrong in ((0, ["no tool was ended in a pause, but only after it"]), (1, [])):
            trials = [{**trial, "tool_had_ended": number >= at_work} for number in range(signals_job.ENOUGH)]
            self.assertEqual(signals_job.judged({**report, "trials": report["trials"] + trials})["wrong"], wrong)


if __name__ == "__main__":
    unittest.main()
