"""`amem doctor --measure` on the stand-in driver and NCCL, and where there is nothing to measure."""
import atexit
import contextlib
import glob
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../ncclpatch/python"))
sys.path.insert(0, PACKAGE)
from amem import _command, _library  # noqa: E402
from amem._jobs import measure as _measure, rank_process  # noqa: E402

PLACE = tempfile.mkdtemp(prefix="amem-mt-", dir="/tmp")
atexit.register(shutil.rmtree, PLACE, True)
os.environ["TMPDIR"] = PLACE
STAND_INS = os.environ["LD_LIBRARY_PATH"].split(":")[0]
NCCL = STAND_INS + "/libnccl.so.2"


def start(*arguments, **variables):
    folder, package = os.path.split(PACKAGE)  # a relative path is one of the folder in which the command is given
    environment = {**os.environ, "PYTHONPATH": package, **variables}
    return subprocess.Popen([sys.executable, "-B", "-m", "amem", "doctor", "--measure", *arguments], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, cwd=folder)


def run(*arguments, **variables):
    process = start(*arguments, **variables)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def in_place():
    """Files of processes that were started with the temporary folder of this test."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            found += [path] if b"TMPDIR=" + PLACE.encode() in file.read() else []
    return found


class OnTheStandIn(unittest.TestCase):
    def both_settings(self):
        """The command's answer: by night as it is; by day one run of each setting with two cycles, which start half as many ranks."""
        arguments = ("--nccl", NCCL, "--gpus", "2", "--json")
        if os.environ.get("AMEM_NIGHTLY") == "1":
            code, out, err = run(*arguments)
            self.assertEqual(code, 0, out + err)
            return out
        out = io.StringIO()
        with mock.patch.object(_measure, "ROUNDS", 1), mock.patch.object(_measure, "CYCLES", 2), contextlib.redirect_stdout(out):
            self.assertEqual(_command.doctor(["--measure", *arguments]), 0, out.getvalue())
        return out.getvalue()

    def test_both_settings_are_measured_and_no_verdict_is_given(self):
        out = self.both_settings()
        answer = json.loads(out)
        self.assertTrue(answer["simulated"])
        self.assertIn("say nothing about a GPU", answer["advice"])
        for setting in ("0", "1"):
            one = answer["NCCL_CUMEM_ENABLE"][setting]
            self.assertGreater(one["held_bytes"], 1 << 20)
            self.assertGreater(one["freed_bytes"], 1 << 20)
            for key in ("start_seconds", "first_seconds", "first_pause_seconds", "pause_seconds", "resume_seconds"):
                self.assertGreater(one[key], 0, key)
        self.assertEqual(glob.glob(PLACE + "/*"), [])

    def test_what_it_starts_ends_with_it(self):
        process = start("--nccl", NCCL, "--gpus", "2")
        end = time.monotonic() + 30
        while not glob.glob(PLACE + "/amem-m-*/world*") and time.monotonic() < end:
            time.sleep(0.05)
        self.assertGreaterEqual(len(in_place()), 2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)
        self.assertEqual(glob.glob(PLACE + "/*"), [])
        self.assertEqual(in_place(), [])

    def test_a_job_that_hangs_is_ended_and_said(self):
        with mock.patch.object(_measure, "RUN_SECONDS", 2), mock.patch.object(_measure, "ROUNDS", 1), mock.patch.dict(os.environ, {"STAND_IN_FAULT": "hang-unmap"}):
            began = time.monotonic()
            answer = _measure.measure(_library.find(), NCCL, 1, seconds=20)
        self.assertLess(time.monotonic() - began, 20)
        self.assertIn("did not end in its time", json.dumps(answer["NCCL_CUMEM_ENABLE"]))

    def test_an_nccl_that_cannot_be_loaded_is_said(self):
        code, out, err = run("--nccl", __file__, "--gpus", "1")
        self.assertEqual(code, 3, err)
        self.assertIn("ran with neither setting", out)
        self.assertIn("invalid ELF header", out)


class WithoutAnything(unittest.TestCase):
    def test_no_gpu(self):
        code, out, err = run("--nccl", NCCL, AMEM_SIM_DEVICES="0")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("no GPU", err)
        code, out, err = run("--nccl", NCCL, LD_LIBRARY_PATH="")
        self.assertEqual((code, out), (2, ""))
        self.assertRegex(err, "^amem: doctor --measure: no GPU can be used here: the CUDA driver cannot be loaded")

    def test_no_nccl(self):
        with mock.patch.object(_command, "nccl_libraries", lambda _named: []):
            self.assertEqual(_command.doctor(["--measure"]), 2)

    def test_no_library(self):
        code, out, err = run("--nccl", NCCL, AMEM_LIBRARY="/nowhere/libamem_nccl.so")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("not found", err)


def answer(zero, one, simulated=False):
    base = {"held_bytes": 1 << 30, "kept_bytes": 0, "start_seconds": 1.0, "first_seconds": 0.5, "pause_seconds": 0.02, "resume_seconds": 0.02}
    settings = {"0": zero if "failure" in zero else {**base, **zero}, "1": one if "failure" in one else {**base, **one}}
    return {"simulated": simulated, "NCCL_CUMEM_ENABLE": settings}


class Ranks(unittest.TestCase):
    def test_what_is_timed_begins_on_all_ranks_at_once(self):
        calls = mock.Mock()
        job = mock.Mock(barrier=calls.barrier)
        seconds = rank_process.Job.timed(job, calls.work)
        self.assertEqual(calls.mock_calls, [mock.call.barrier(), mock.call.work()])
        self.assertLess(seconds, 60)


class Advice(unittest.TestCase):
    def test_one_sentence_for_each_case(self):
        for zero, one, words in (
                ({}, {}, "no difference that could be measured"),
                ({"held_bytes": 2 << 30}, {}, "Leave NCCL_CUMEM_ENABLE unset, or 1: NCCL holds 1024 MiB less per GPU than with 0."),
                ({}, {"start_seconds": 3.0}, "Set NCCL_CUMEM_ENABLE=0: communicators start 2000 ms sooner."),
                ({"held_bytes": 2 << 30}, {"pause_seconds": 0.2}, "It depends on what counts: with NCCL_CUMEM_ENABLE=0 a pause takes 180 ms less; with 1 NCCL holds 1024 MiB less"),
                ({"pause_seconds": 0.0215}, {}, "no difference"),
                ({"failure": "no"}, {}, "Set NCCL_CUMEM_ENABLE=1: with 0 the job did not run (no)."),
                ({}, {"failure": "no"}, "Set NCCL_CUMEM_ENABLE=0: with 1"),
                ({"failure": "a"}, {"failure": "b"}, "ran with neither setting (0: a; 1: b)")):
            self.assertIn(words, _measure.advice(answer(zero, one)))


if __name__ == "__main__":
    unittest.main()
