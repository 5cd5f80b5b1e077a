#!/usr/bin/env python3
"""check.py on a build of stand-ins: which programs of a room are built and run, and that a failure is one."""
import os
import subprocess
import sys
import tempfile
import unittest

CHECK = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "check.py")
PROGRAM = """#!/bin/sh
case "$1$2" in
  --gtest_list_tests*) printf 'Running main() from gtest_main.cc\\nCycle.\\n  begins\\n  ends  # a parameter\\n  DISABLED_never\\n' ;;
  *) echo "$(basename $0) $1 ${GTEST_SHARD_INDEX:-whole}/$GTEST_TOTAL_SHARDS" >>"$RAN"; case "$1" in *"$FAILS"*) echo it broke; exit 1 ;; esac ;;
esac
"""


class Check(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.write("tests_of_rooms", "replay/cycle cycle_test SHARDS\nreplay/cycle backup_test EACH\nreplay/peers/unix peers_test EACH\njournal journal_test EACH\n"
                                     "journal amem_nccl\n\n")
        for name in ("cycle_test", "backup_test", "peers_test", "journal_test"):
            self.write("bin/" + name, PROGRAM)
        self.write("tools/ninja", '#!/bin/sh\necho "built $*" >>"$RAN"\n')
        self.write("tools/ctest", '#!/bin/sh\necho \'{"tests": []}\'\n')

    def write(self, path, text):
        full = os.path.join(self.folder.name, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(full, 0o755)

    def check(self, *arguments, fails="nothing"):
        """(exit code, output, what was built and run)"""
        ran = os.path.join(self.folder.name, "ran")
        open(ran, "w", encoding="utf-8").close()
        done = subprocess.run([sys.executable, "-B", CHECK, self.folder.name, *arguments], capture_output=True, text=True, check=False,
                              env={**os.environ, "PATH": os.path.join(self.folder.name, "tools") + ":" + os.environ["PATH"], "RAN": ran, "FAILS": fails})
        with open(ran, encoding="utf-8") as file:
            return done.returncode, done.stdout + done.stderr, sorted(file.read().splitlines())

    def test_a_rooms_programs_are_built_and_run_in_parts_or_test_by_test(self):
        code, output, ran = self.check("replay/cycle", "--jobs", "3")
        self.assertEqual((code, ran[2:]), (0, [f"built -C {self.folder.name} -j 3 cycle_test backup_test", "cycle_test --gtest_filter=** 0/2", "cycle_test --gtest_filter=** 1/2"]))
        self.assertEqual(ran[:2], ["backup_test --gtest_filter=Cycle.begins whole/", "backup_test --gtest_filter=Cycle.ends whole/"])
        self.assertRegex(output, r"replay/cycle: built in \d+ s, 4 tests or parts in \d+ s, failed: none")

    def test_a_room_has_the_rooms_below_it_and_may_be_called_by_its_last_part(self):
        for name in ("peers", "replay/peers", "unix", "tests/replay/peers/"):
            self.assertEqual(self.check(name)[2][0].split()[-1], "peers_test", name)

    def test_what_scripts_need_is_built_and_not_run(self):
        self.assertIn(f"built -C {self.folder.name} -j 1 journal_test amem_nccl", self.check("journal", "--jobs", "1")[2])

    def test_a_failure_is_the_exit_code_and_is_shown(self):
        code, output, _ = self.check("replay/cycle", fails="ends")
        self.assertEqual(code, 1)
        self.assertIn("it broke\n", output)
        self.assertRegex(output, r"failed: Cycle\.ends\n")

    def test_a_room_without_tests_is_said_with_those_that_there_are(self):
        code, output, ran = self.check("cycles")
        self.assertEqual((code, ran), (1, []))
        self.assertIn('"cycles" is none of the rooms with tests: journal, replay/cycle, replay/peers/unix', output)


if __name__ == "__main__":
    unittest.main()
