"""`amem run --guard` where an answer is late, wrong or missing: how long the guard waits, and what the job then gets. It waits for most of its time, so
it is a program of its own beside guard_test.py, whose job it takes."""
import json
import os
import shutil
import signal
import sys
import time
import unittest

import guard_test
from guard_test import REPLAY, SECONDS

# The guard with less patience, and without a folder for temporary files.
HURRIED = """
import sys, tempfile
from amem import _command, _guard
tempfile.tempdir = "/nowhere"
_guard.READ_SECONDS, _guard.END_SECONDS = 3, 5
_guard.PATIENCE.update({_guard.PAUSED: 3, _guard.UNKNOWN: 3})
sys.exit(_command.main(sys.argv[1:]))
"""


class InDoubt(guard_test.GuardedJob):
    def start_hurried(self, rule=""):
        self.rule(rule)
        self.start("--guard", how=("-c", HURRIED))

    def start_ranks(self, count, then, under=()):
        """A guarded shell that has as many journals open as ranks would, and then does what it is told."""
        names = ["%s/%016x" % (self.folder, number) for number in range(count)]
        for name in names:
            os.mkdir(name)
            with open(name + "/tail", "w", encoding="utf-8"):
                pass
        opened = "".join("exec %d<>%s/tail; " % (number + 3, name) for number, name in enumerate(names))
        self.popen(["-c", HURRIED, "run", "--guard", "--", "sh", "-c", opened + "echo up; " + then], under)
        self.assertEqual(self.process.stdout.readline(), "up\n")

    @staticmethod
    def step(outcome):
        return "case $1 in log) echo '%s'; exit 0;; esac" % json.dumps({"begun_ns": 5, "command": 1, "outcome": outcome})

    def test_a_job_that_was_frozen_gets_no_signal_when_a_read_fails(self):
        self.start_hurried("test $1 != thaw || exit 3")
        self.tool("freeze")
        self.process.send_signal(signal.SIGTERM)
        self.stays(5)
        self.rule("case $1 in thaw|log) exit 9;; esac")
        self.stays(8)
        self.rule("")
        self.assertNotIn("it gets SIGTERM", self.ends_in_order())

    def test_a_job_that_is_paused_after_a_slow_thaw_is_resumed(self):
        self.start_hurried('test $1 != thaw || { sleep 5; "%s" thaw; exec "%s" pause; }' % (REPLAY, REPLAY))  # as where its resume fails
        self.tool("freeze")
        self.assertNotIn("it gets SIGTERM", self.ends_in_order())

    def test_a_job_that_does_not_end_by_its_signal_can_be_paused_again(self):
        self.rule("")
        self.start("--guard", before=("nohup",), how=("-c", HURRIED))
        self.process.send_signal(signal.SIGHUP)
        time.sleep(7)  # longer than the END_SECONDS of HURRIED
        self.tool("pause")
        steps = self.steps()
        self.stays(3)
        self.assertEqual(self.steps(), steps)
        self.tool("resume")
        self.ends_in_order()

    def test_nobody_who_reads_what_it_says_is_no_reason_to_leave(self):
        self.start_hurried()
        self.tool("freeze")
        self.process.stderr.close()
        self.process.send_signal(signal.SIGTERM)
        self.assertEqual((self.process.wait(SECONDS), self.process.stdout.read()), (7, "ended in order after 15\n"))
        self.process.stdout.close()
        self.process = None

    def test_what_cannot_be_seen_is_not_taken_for_a_job_that_runs(self):
        code = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(1, flush=True); time.sleep(60)"  # 4: PR_SET_DUMPABLE
        then = "exec '%s' -c '%s'" % (sys.executable, code)
        self.rule(self.step("running"))
        self.start_ranks(1, then, ["setpriv", "--bounding-set=-sys_ptrace"] if os.geteuid() == 0 else [])  # as in a container
        self.assertEqual(self.process.stdout.readline(), "1\n")
        code, _, err = self.ends(signal.SIGTERM)
        self.assertEqual(code, 143)
        self.assertIn("has a rank cannot be seen: ", err)
        self.assertIn("it gets SIGTERM", err)

    def test_a_rank_whose_journal_was_removed_is_not_taken_for_one_that_runs(self):
        self.rule("")
        self.start_ranks(1, "exec sleep 60")
        shutil.rmtree("%s/%016x" % (self.folder, 0))
        code, _, err = self.ends(signal.SIGTERM)
        self.assertEqual(code, 143)
        self.assertIn("its journal was removed", err)
        self.assertIn("it gets SIGTERM", err)

    def test_a_thaw_that_finds_nothing_frozen_settles_it(self):
        self.rule(self.step("") + """
case $1 in thaw) echo '{"outcome": "untouched", "message": "the job is not frozen"}'; exit 3;; ls) echo '{"ranks": [{"phase": "running"}]}'; exit 0;; esac""")
        self.start_ranks(1, "exec sleep 60")
        self.assertEqual(self.ends(signal.SIGTERM)[0], 143)

    def test_many_silent_ranks_take_no_longer_than_one(self):
        self.rule("exec sleep 60")
        self.start_ranks(6, "exec sleep 60")
        began = time.monotonic()
        self.assertEqual(self.ends(signal.SIGTERM)[0], 143)
        self.assertLess(time.monotonic() - began, 17)  # one after the other: 18 s a round

    def test_it_stays_while_ranks_that_were_left_behind_are_frozen(self):
        self.rule(self.step("frozen"))
        self.start_ranks(1, "sleep 30 >/dev/null 2>&1 & exit 4")
        self.stays(3)
        self.rule(self.step("running"))
        _, err = self.process.communicate(timeout=SECONDS)
        self.assertEqual(self.process.returncode, 4, err)
        self.assertIn("the command has ended, and its job is frozen", err)


if __name__ == "__main__":
    unittest.main()
