#!/usr/bin/env python3
"""Plants faults of the agreement (planted.py), and asks worlds of processes whether they find each.

    faults.py check                                 each line that a fault changes is in the tree, once
    faults.py build FOLDER [--scratch DIR]          one amem-world for each fault, and one without, with the libraries that they need
    faults.py run FOLDER [--at-once N] [--seconds S]         the worlds of each fault, several at once where N is large; exit code 1 if
                                                             they find nothing of one
    faults.py unchanged FOLDER [--at-once N] [--total S]     worlds without a fault, N seeds at once; exit code 1 if one finds something

`build` plants in a copy of the tree, one fault after the other; only the file of the fault is compiled anew. The folder can be carried to
another machine, which needs Python and a C library that is not older. `run` and `unchanged` need nothing of the tree.
"""
import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../../.."))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True
try:
    from planted import FAULTS, TARGETS
except ImportError:  # a folder that was carried elsewhere
    FAULTS, TARGETS = [], {}
SEEDS = 100_000  # between the first seeds of two runs, so that they come to no world twice
UNCHANGED, LIST = "unchanged", "faults.txt"
CARDS = "ungated cards"  # what a card sends in the moment of a pause is not the agreement's
WITHOUT = f"{CARDS},shortages,starves"  # of worlds that are to find faults: shortages take seconds, and concern no rule of the agreement
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|pthread|dl|rt)\.so|ld-linux")


def say(text):
    print(text, flush=True)


# ---- the tree

def planted(fault, root):
    """{file: its text with the fault in it}"""
    texts = {}
    for path, before, after in fault.changes:
        if path not in texts:
            with open(os.path.join(root, path), encoding="utf-8") as file:
                texts[path] = file.read()
        if texts[path].count(before) != 1:
            raise ValueError(f'fault "{fault.name}": {path} has these lines {texts[path].count(before)} times, and not once:\n{before}')
        texts[path] = texts[path].replace(before, after)
    return texts


def check(root=ROOT):
    for fault in FAULTS:
        for path in planted(fault, root):
            if path not in TARGETS:
                raise ValueError(f'fault "{fault.name}": {path} has no target')
        if any(before == after for _, before, after in fault.changes):
            raise ValueError(f'fault "{fault.name}" changes nothing')
    names = [fault.name for fault in FAULTS]
    if len(set(names)) != len(names) or len(names) < 12:
        raise ValueError("at least twelve faults, each with a name of its own")
    return 0


class Scratch:
    """A copy of the tree in which each file that has a fault is compiled alone."""

    def __init__(self, folder, jobs, cmake):
        self.folder, self.jobs = os.path.abspath(folder), jobs
        self.copy()
        self.configure(cmake)

    def copy(self):
        """What is the same stays as it is, so that it is not compiled again."""
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for path in filter(None, listed.split("\0")):
            source, target = os.path.join(ROOT, path), os.path.join(self.folder, path)
            if not os.path.isfile(source):
                continue
            with open(source, "rb") as file:
                content = file.read()
            if not os.path.exists(target) or self.read(target) != content:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy(source, target)

    @staticmethod
    def read(path):
        with open(path, "rb") as file:
            return file.read()

    def configure(self, cmake):
        alone = os.path.join(self.folder, "build", "alone.cmake")
        os.makedirs(os.path.dirname(alone), exist_ok=True)
        with open(alone, "w", encoding="utf-8") as file:
            for path, target in TARGETS.items():
                file.write(f"cmake_language(DEFER DIRECTORY ${{CMAKE_SOURCE_DIR}} CALL set_property SOURCE ${{CMAKE_SOURCE_DIR}}/{path} "
                           f"TARGET_DIRECTORY {target} PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)\n")
        subprocess.run(["cmake", "-S", self.folder, "-B", os.path.join(self.folder, "build"), "-G", "Ninja",
                        "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DAMEM_LINES=OFF", "-DAMEM_UNIT_TESTS=OFF", "-DAMEM_PRECOMPILE=ON",
                        "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=64", f"-DCMAKE_PROJECT_INCLUDE={alone}", *cmake],
                       check=True, stdout=subprocess.DEVNULL)

    def build(self, to):
        built = subprocess.run(["ninja", "-C", "build", f"-j{self.jobs}", "amem-world"], cwd=self.folder, capture_output=True, text=True)
        if built.returncode != 0:
            raise ValueError(f"{to} was not built:\n{built.stdout[-4000:]}{built.stderr[-4000:]}")
        subprocess.run(["strip", "-o", to, os.path.join(self.folder, "build", "bin", "amem-world")], check=True)

    def build_with(self, fault, to):
        texts = planted(fault, self.folder)
        originals = {path: self.read(os.path.join(self.folder, path)) for path in texts}
        try:
            for path, text in texts.items():
                self.write(path, text.encode())
            self.build(to)
        finally:
            for path, original in originals.items():
                self.write(path, original)

    def write(self, path, content):
        with open(os.path.join(self.folder, path), "wb") as file:
            file.write(content)


def add_libraries(folder, program):
    """Those of the program that are no part of the C library, beside the programs, which look there."""
    for line in subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout.splitlines():
        found = re.search(r"=> (/\S+)", line)
        if found and not SYSTEM_LIBRARIES.search(line):
            shutil.copy(found[1], folder)


def build(options):
    check()
    folder = os.path.abspath(options.folder)
    os.makedirs(folder, exist_ok=True)
    scratch = Scratch(options.scratch, options.jobs, options.cmake)
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    listed, programs = [], [UNCHANGED]
    say(f"{UNCHANGED}: built")
    scratch.build(os.path.join(folder, UNCHANGED))
    for fault in chosen:
        began = time.monotonic()
        programs.append("fault-" + re.sub(r"\W+", "-", fault.name))
        scratch.build_with(fault, os.path.join(folder, programs[-1]))
        listed.append(f"{programs[-1]}\t{fault.name}\t{fault.worlds}\n")
        say(f"{fault.name}: built in {time.monotonic() - began:.0f} s")
    add_libraries(folder, os.path.join(folder, UNCHANGED))
    for program in programs:
        subprocess.run(["patchelf", "--set-rpath", "$ORIGIN", os.path.join(folder, program)], check=True)
    with open(os.path.join(folder, LIST), "w", encoding="utf-8") as file:
        file.writelines(listed)
    shutil.copy(os.path.abspath(__file__), folder)
    return 0


# ---- the worlds

class World:
    """A run of amem-world in a process group of its own, which ends with it."""

    def __init__(self, folder, program, seed, options, with_, without, is_over=lambda: False):
        self.is_over = is_over  # another one has found the same fault
        self.command = [os.path.join(folder, program), "--processes", "--seed", str(seed), "--seconds", str(options.seconds),
                        "--with", with_, "--without", without, *(["--late", str(options.late)] if options.late else [])]
        self.limit = options.seconds + 120  # the last world begins before the end of the time, and takes some seconds

    def run(self):
        """(seconds, what was found or "", whether it ended well)"""
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            code, over = None, False
            try:
                while code is None and not over and time.monotonic() < began + self.limit:
                    over = self.is_over()
                    code = self.wait_a_moment(process)
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        return time.monotonic() - began, "" if over else self.finding(code, text), code == 0, text

    @staticmethod
    def wait_a_moment(process):
        try:
            return process.wait(0.3)
        except subprocess.TimeoutExpired:
            return None

    @staticmethod
    def finding(code, text):
        """What the first process that found something says; the others say only that another one has."""
        lines = [line for line in text.splitlines() if line.startswith("FOUND")]
        own = [line for line in lines if "another process has found something" not in line]
        if own or lines:
            found = (own or lines)[0]
            after = text[text.index(found) + len(found):].splitlines()[1:] if found.endswith(":") else []
            return " ".join([found, *(line.strip() for line in after if "rank " in line and not line.endswith(": OK"))][:3])
        if code is None:
            return "the worlds did not end"
        if code == 0:
            return ""
        return f"ended with {code}: {' '.join(text.splitlines()[-1:])}"


def all_worlds(worlds, at_once, tell):
    """Runs them, so many at once, and tells of each when it has ended."""
    with ThreadPoolExecutor(at_once) as threads:
        names = {threads.submit(world.run): name for name, world in worlds}
        for future in as_completed(names):
            tell(names[future], *future.result())


def run(options):
    with open(os.path.join(options.folder, LIST), encoding="utf-8") as file:
        programs = [line.rstrip("\n").split("\t") for line in file]
    programs = [(program, name, with_) for program, name, with_ in programs if options.only in name]
    copies = max(1, options.at_once // max(1, len(programs)))  # with different seeds; one that finds it is enough
    began, found = time.monotonic(), set()
    say("| fault | found after | by |\n|---|---|---|")

    def tell(name, seconds, finding, _ended_well, _text):
        if finding and name not in found:
            found.add(name)
            say(f"| {name} | {seconds:.0f} s | {finding} |")

    worlds = [(name, World(options.folder, program, options.seed + SEEDS * copy, options, with_, WITHOUT, lambda name=name: name in found))
              for copy in range(copies) for program, name, with_ in programs]
    all_worlds(worlds, options.at_once, tell)
    not_found = [name for _, name, _ in programs if name not in found]
    for name in not_found:
        say(f"| {name} | not found | |")
    say(f"{len(found)} of {len(programs)} faults found by {copies} at once for each, in {time.monotonic() - began:.0f} s")
    return 1 if not_found or not programs else 0


def unchanged(options):
    options.seconds = options.total / options.at_once
    total, wrong = [0.0], []

    def tell(name, seconds, finding, ended_well, text):
        total[0] += seconds
        if not ended_well:
            wrong.append(name)
            say(text)
        say(f"from seed {name}: {seconds:.0f} s, {finding or text.strip()[-200:]}")

    seeds = [options.seed + SEEDS * at for at in range(options.at_once)]
    kinds = [("", CARDS), ("faults", WITHOUT), ("", CARDS), ("absences,stops", WITHOUT)]  # half are of those that are to find faults
    worlds = [(seed, World(options.folder, UNCHANGED, seed, options, *kinds[at % len(kinds)])) for at, seed in enumerate(seeds)]
    all_worlds(worlds, options.at_once, tell)
    say(f"{total[0]:.0f} s of worlds, {len(wrong)} findings")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    builds = commands.add_parser("build")
    builds.add_argument("--scratch", default=os.path.join(ROOT, "build", "faults"))
    builds.add_argument("--jobs", type=int, default=os.cpu_count())
    builds.add_argument("--cmake", action="append", default=[], help="an argument for cmake, such as -DCUDA_ROOT=DIR")
    runs, without = commands.add_parser("run"), commands.add_parser("unchanged")
    for command in (builds, runs):
        command.add_argument("--only", default="", help="faults with that in their names")
    for command in (runs, without):
        command.add_argument("--at-once", type=int, default=os.cpu_count())
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--late", type=int, default=0, help="ms that the machine may take besides a deadline (amem-world --late)")
    runs.add_argument("--seconds", type=float, default=600)
    without.add_argument("--total", type=float, default=7200, help="seconds of all worlds together")
    for command in (builds, runs, without):
        command.add_argument("folder")
    options = parser.parse_args()
    try:
        return {"check": lambda _options: check(), "build": build, "run": run, "unchanged": unchanged}[options.command](options)
    except ValueError as wrong:
        print(f"faults.py: {wrong}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
