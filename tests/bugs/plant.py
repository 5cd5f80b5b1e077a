#!/usr/bin/env python3
"""Plants one plausible bug at a time and asks the tests whether they notice.

    plant.py [--only WORD,...] [--scratch DIR] [--json FILE]   plants, builds, tests; prints what nobody noticed
    plant.py --check                                           only that each bug can still be planted (quick; part of the tests)

Every bug of bugs.py names a file, a text that stands in it exactly once, what replaces it, and the test programs that should notice.
Where the text is gone, or stands there twice, the bug fails loudly: it must be written anew for the code of today. A bug that does
not compile proves nothing, and fails as well. The tree itself is never changed; the bugs are planted in a copy. There every program
must pass without a bug first, because a test that fails anyway notices nothing. A bug's programs are built and run one after the
other up to the first that fails, and one that takes ten times as long as without a bug hangs.

Exit code 0: all were noticed but those that bugs.py says nobody notices, with a reason each; 1: not so; 2: wrong usage.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True
from bugs import BUGS  # noqa: E402

NOTICED, UNNOTICED, BROKEN = "noticed", "UNNOTICED", "BROKEN"
# The shortest limit for a program, for a machine that has something else to do as well.
LEAST_LIMIT_S = 60


def planted(bug, root):
    """The file's text with the bug in it; ValueError when the bug does not apply."""
    with open(os.path.join(root, bug.file), encoding="utf-8") as source:
        text = source.read()
    times = text.count(bug.text)
    if times != 1:
        raise ValueError(f"{bug.file} has the text {times} times: {bug.text!r}")
    if bug.text == bug.replacement:
        raise ValueError("it changes nothing")
    return text.replace(bug.text, bug.replacement)


def check(bugs, root):
    problems = []
    names = [bug.name for bug in bugs]
    for bug in bugs:
        try:
            planted(bug, root)
        except (OSError, ValueError) as error:
            problems.append(f"{bug.name}: {error}")
        if names.count(bug.name) > 1:
            problems.append(f"{bug.name}: two bugs have this name")
    return problems


class Scratch:
    """A copy of the tree with a build of its own."""

    def __init__(self, directory, jobs):
        self.directory, self.build, self.jobs, self.limits = directory, os.path.join(directory, "build"), jobs, {}
        files = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True, text=True).stdout
        for path in filter(None, files.split("\0")):
            target = os.path.join(directory, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            source = os.path.join(ROOT, path)
            if not os.path.exists(target) or open(target, "rb").read() != open(source, "rb").read():
                shutil.copy(source, target)  # with a new date: what was built of a bug that a killed run left is older

    def run(self, command, limit):
        """(exit code or None at the time limit, output)"""
        try:
            done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, errors="replace", timeout=limit,
                                  check=False, env={**os.environ, "CCACHE_BASEDIR": self.directory, "CCACHE_NOHASHDIR": "1"})
        except subprocess.TimeoutExpired as error:
            return None, str(error)
        return done.returncode, done.stdout + done.stderr

    def configure(self, more):
        if shutil.which("ld.lld"):  # links faster, and every bug is linked at least once
            more = ["-DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=lld", *more]
        # Neither optimised nor with what a debugger needs: each is compiled once for a run of seconds.
        code, output = self.run(["cmake", "--preset", "debug", "-B", self.build, "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0", *more], 300)
        if code != 0:
            raise SystemExit(f"plant.py: configuring {self.directory} failed:\n{output}")

    def make(self, programs):
        targets = [program for program in programs if not program.endswith(".py")]
        return (0, "") if not targets else self.run(["cmake", "--build", self.build, "-j", str(self.jobs), "--target", *targets], 3600)

    def test(self, program, tests, limit):
        """(exit code or None at the time limit, the line that says what failed)"""
        command = [os.path.join(self.build, "bin", program), "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={tests}"]
        if program.endswith(".py"):
            command = [sys.executable, "-B", program]
        code, output = self.run(command, limit)
        failed = [line for line in output.splitlines() if line.startswith("[  FAILED  ]")]
        return code, (failed or [f"{program} hangs" if code is None else f"{program} ended with {code}"])[0]

    def prepare(self, bugs):
        """Builds all programs and sees that each passes without a bug; how long each took is its measure later."""
        code, output = self.make(sorted({program for bug in bugs for program in bug.programs}))
        if code != 0:
            raise SystemExit(f"plant.py: the tree without a bug does not compile:\n{output[-4000:]}")
        for program, tests in sorted({(program, bug.tests) for bug in bugs for program in bug.programs}):
            began = time.monotonic()
            code, why = self.test(program, tests, 600)
            if code != 0:
                raise SystemExit(f"plant.py: {program} fails without a bug: {why}")
            self.limits[program, tests] = max(LEAST_LIMIT_S, 10 * (time.monotonic() - began))

    def try_bug(self, bug):
        path = os.path.join(self.directory, bug.file)
        with open(path, encoding="utf-8") as source:
            original = source.read()
        changed = planted(bug, self.directory)
        try:
            with open(path, "w", encoding="utf-8") as target:
                target.write(changed)
            for program in bug.programs:
                code, output = self.make([program])
                if code != 0:
                    return BROKEN, "it does not compile: " + next((line for line in output.splitlines() if "error:" in line), "?")
                code, why = self.test(program, bug.tests, self.limits[program, bug.tests])
                if code != 0:
                    return NOTICED, why
            return UNNOTICED, ""
        finally:
            with open(path, "w", encoding="utf-8") as target:
                target.write(original)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="plant nothing; only see that each bug applies")
    parser.add_argument("--only", default="", help="bugs whose name or file has one of these in it, comma separated")
    parser.add_argument("--scratch", default=os.path.join(ROOT, "build", "bugs"), help="where the copy is made (default: build/bugs)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--cmake", action="append", default=[], help="an argument for cmake, such as -DCUDA_ROOT=DIR")
    parser.add_argument("--json", default="", help="results go there")
    options = parser.parse_args()
    words = [word for word in options.only.split(",") if word]
    bugs = [bug for bug in BUGS if not words or any(word in bug.name or word in bug.file for word in words)]
    if not bugs:
        print(f"plant.py: no bug has {options.only} in its name or file", file=sys.stderr)
        return 2
    problems = check(bugs, ROOT)
    for problem in problems:
        print(f"{BROKEN}: {problem}")
    if options.check or problems:
        print(f"{len(bugs)} bugs, {len(problems)} of them cannot be planted")
        return 1 if problems else 0
    scratch = Scratch(os.path.abspath(options.scratch), options.jobs)
    scratch.configure(options.cmake)
    scratch.prepare(bugs)
    rows, count = [], {NOTICED: 0, UNNOTICED: 0, BROKEN: 0}
    for bug in bugs:
        began = time.monotonic()
        outcome, why = scratch.try_bug(bug)
        count[outcome] += 1
        rows.append({"bug": bug.name, "file": bug.file, "outcome": outcome, "why": why or bug.unnoticed,
                     "seconds": round(time.monotonic() - began, 1)})
        print(f"{outcome:9} {rows[-1]['seconds']:6.1f} s  {bug.name} ({bug.file}) {rows[-1]['why']}", flush=True)
        if options.json:  # after each bug, so that a run that is cut short was not in vain
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)
    print(f"{len(bugs)} bugs: {count[NOTICED]} noticed, {count[UNNOTICED]} not, {count[BROKEN]} broken")
    excused = {bug.name for bug in bugs if bug.unnoticed}
    return 1 if any(row["outcome"] == BROKEN or (row["outcome"] == UNNOTICED and row["bug"] not in excused) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
