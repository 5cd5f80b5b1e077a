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


# One rank, whose steps print what an all-reduce computed; with "differs" the seventh says whether AMem is there.
SCRIPT = """
import ctypes, os, sys, time
from amem._jobs import rank_process
class Job(rank_process.Job):
    def __init__(self):
        self.rank, self.size, self.communicators = 0, 1, []
        self.driver = rank_process.Driver(0)
        self.nccl = ctypes.CDLL("libnccl.so.2")
        self.nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, rank_process.UniqueId, ctypes.c_int]
    def barrier(self, value=None):
        return [value]
job = Job()
communicator = job.make_communicator()
memory = job.driver.allocate(4096).value
for step in range(60):
    job.driver.write(memory, bytes(ctypes.c_float(1 + step)) * 1024)
    job.check("ncclAllReduce", ctypes.c_void_p(memory), ctypes.c_void_p(memory), ctypes.c_size_t(1024), 7, 0, communicator, None)
    job.driver.synchronize()
    loss = ctypes.c_float.from_buffer_copy(job.driver.read(memory, 4)).value
    if sys.argv[1] == "differs" and step == 7 and "LD_PRELOAD" in os.environ:
        loss += 1
    print("iter %d: loss %.4f, time 20.00ms" % (step, loss), flush=True)
    time.sleep(0.02)
"""


class ScriptJob(unittest.TestCase):
    """script_job.py, with a script that knows nothing of it."""

    def run_script(self, what, *options):
        package = os.path.join(HERE, "..", "..", "ncclpatch", "python")
        ran = subprocess.run([sys.executable, os.path.join(HERE, "script_job.py"), "--imitate", "stand-ins", "--library", LIBRARY, "--tool", TOOL, "--lines", "60",
                              *options, "--", sys.executable, "-c", SCRIPT, what], env={**os.environ, "PYTHONPATH": package}, capture_output=True, text=True,
                             timeout=200, check=False)
        return ran.returncode, json.loads(ran.stdout.splitlines()[-1])

    def test_a_script_that_is_stopped_prints_what_it_prints_otherwise(self):
        code, answer = self.run_script("well", "--pauses", "1", "--freezes", "1")
        self.assertEqual((code, answer["problems"], answer["losses"]), (0, [], 60))
        self.assertEqual({name: len(one) for name, one in answer["seconds"].items()}, {"pause": 1, "resume": 1, "freeze": 1, "thaw": 1})

    def test_another_loss_is_said_with_its_place_and_whether_stock_has_it_each_time(self):
        code, answer = self.run_script("differs", "--pauses", "1")
        self.assertEqual(code, 1)
        self.assertEqual(answer["problems"], ["losses differ from number 7 on, of 60 and 60: ['9.0000'], not ['8.0000']",
                                              "a second run without AMem has the losses of the first"])


class Costs(unittest.TestCase):
    def test_both_jobs_make_their_spans_in_turns(self):
        ran = subprocess.run([sys.executable, os.path.join(HERE, "unmodified_costs.py"), "--imitate", "stand-ins", "--library", LIBRARY, "--parts", "reduce", "--steps", "reduce=300",
                              "--pairs", "2", "--bars", "reduce=2", "--time-limit", "150"], capture_output=True, text=True, timeout=200, check=False)
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
        part = json.loads(ran.stdout.splitlines()[-1])["parts"][0]
        self.assertEqual(len(part["pairs"]), 2)
        self.assertGreaterEqual(min(pair["spans"] for pair in part["pairs"]), 23)
        self.assertGreater(part["ratio"], 0.2)

    def test_the_ratio_is_that_of_spans_beside_each_other(self):
        import span_turns
        swings = [9.0] * span_turns.FIRST + [1.0, 1.4, 0.7, 0.9, 1.3, 1.0, 0.8, 1.1, 1.2]
        found = span_turns.compare(swings, [1.01 * (one + after) / 2 for one, after in zip(swings, swings[1:])])
        self.assertEqual((found["ratio"], found["quartiles"], found["spans"]), (1.01, [1.01, 1.01], 8))
        self.assertEqual(span_turns.turned(found)["ratio"], 0.9901)
        self.assertEqual(span_turns.several([{"ratio": 1.0}, {"ratio": 1.02}, {"ratio": 1.01}]), {"ratio": 1.01, "error": 0.00724})
        self.assertRaises(ValueError, span_turns.compare, swings[:7], swings[:7])


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
