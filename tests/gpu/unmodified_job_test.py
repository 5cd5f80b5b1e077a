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


if __name__ == "__main__":
    unittest.main()
