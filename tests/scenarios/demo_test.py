"""What a stranger sees in the first minute: the demo and what it says to do next, and the trial of the Python interface.

AMEM_DEMO, AMEM_REPLAY: the programs; PYTHONPATH, AMEM_LIBRARY and LD_LIBRARY_PATH (of the stand-ins): as ./run trial sets them.
"""
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


class FirstMinute(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        os.mkdir(self.folder + "/tmp")
        self.environment = {**os.environ, "AMEM_JOURNAL_DIR": self.folder + "/journal", "TMPDIR": self.folder + "/tmp"}

    def run_in(self, *command):
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def demo(self, *arguments):
        return self.run_in(os.environ["AMEM_DEMO"], "--tool", os.environ["AMEM_REPLAY"], *arguments)

    def next_steps(self, out):
        commands = [shlex.split(line) for line in out.partition("\nNext, ")[2].splitlines()[1:]]
        self.assertEqual([command[:2] for command in commands], [[os.environ["AMEM_REPLAY"], name] for name in ("ls", "log", "report")])
        return [self.run_in(*command) for command in commands]

    def test_the_demos_next_steps_find_its_journals(self):
        out = self.demo()
        self.assertRegex(out, r"\nok ranks=4 held_mib=512 freed_mib=512 identical=yes driver=sim\n")
        self.assertEqual(os.listdir(self.folder + "/tmp"), [])
        listed, log, _ = self.next_steps(out)
        self.assertEqual(len(re.findall(r"^[0-9a-f]{16}  closed", listed, re.M)), 4, listed)
        self.assertIn("pause", log)
        self.assertGreater(os.path.getsize(self.folder + "/demo.html"), 10_000)
        self.assertIn("\njournals: 2 verified", self.demo("--ranks", "2"))  # and not those of before

    def test_a_directory_of_its_own_is_named_in_the_next_steps(self):
        out = self.demo("--ranks", "2", "--directory", self.folder + "/own")
        self.assertFalse(os.path.exists(self.folder + "/journal"))
        self.assertIn("closed", self.next_steps(out)[0])

    def test_help_is_no_error(self):
        self.assertIn("usage: amem-demo", self.run_in(os.environ["AMEM_DEMO"], "--help"))

    def test_the_trial_shows_each_call_and_what_it_answers(self):
        out = self.run_in(sys.executable, "-B", HERE + "/trial.py")
        for answer in ("128 MiB freed (128 MiB nccl)", "320 MiB freed (64 MiB weights, 128 MiB kv_cache, 128 MiB nccl); contents not saved: kv_cache", "('kv_cache',)",
                       "tag wieghts is not known; known: weights, kv_cache, nccl; did you mean weights?"):
            self.assertIn(answer + "\n", out)
        self.assertIn("closed", self.run_in(os.environ["AMEM_REPLAY"], "ls"))

    def test_the_trial_runs_a_script(self):
        with open(self.folder + "/mine.py", "w", encoding="utf-8") as file:
            file.write("import amem, sys\nwith amem.pool('x'):\n    gpu_alloc(2 << 20)\nprint(amem.pause('x').bytes >= 2 << 20, gpu_bytes(), sys.argv)\n")
        self.assertEqual(self.run_in(sys.executable, "-B", HERE + "/trial.py", "mine.py", "word"), "True 0 ['mine.py', 'word']\n")


if __name__ == "__main__":
    unittest.main()
