#!/usr/bin/env python3
"""Stock NCCLs from PyPI, each patched, preloaded and attached to, on a machine without a GPU (`./run wheel-test`).

Of each libnccl it checks that every look-up of a driver function comes to AMem, that AMem's journal has those about memory, that no
name about memory is unknown to known_names.py, and that what is said to be replaced is. Exit code: 0 if all holds for all that could
be had, 1 if not, 2 for wrong usage.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import checks
import fetch
import library

PINNED = ("cu13", "2.28.9")  # by the PyTorch that the tables of README were measured with
WAYS = ("patched", "preload", "attach")
PATIENCE_S = 180


def choose(wanted, everything, there):
    """(wheels to test, why others are left out). `there`: what is on disk already; `everything`: what PyPI lists, if it answers."""
    listed = everything or there
    if wanted == ["all"]:
        return listed, []
    if not wanted:
        wheels = [PINNED]
        for name, number in (("oldest", 0), ("newest", -1)):
            versions = sorted(listed, key=lambda wheel: (fetch.number(wheel[1]), wheel[0]))
            if versions and versions[number] not in wheels:
                wheels.insert(0 if name == "oldest" else len(wheels), versions[number])
        return [w for w in wheels if w in listed], [f"{'-'.join(w)} could not be had" for w in wheels if w not in listed]
    wheels, missing = [], []
    for version in wanted:
        found = [w for w in listed if version in (w[1], "-".join(w))]
        wheels += found
        missing += [] if found else [f"PyPI lists no {version} for this machine"]
    return wheels, missing


class Bench:
    """The programs and libraries of a build, and a folder in which runs leave their traces."""

    def __init__(self, build, folder):
        build = pathlib.Path(build).resolve()
        self.amem, self.patch, self.replay = build / "lib/libamem_nccl.so", build / "bin/amem-patch", build / "bin/amem-replay"
        self.second = build / "lib/stand_ins/libnccl.so.2"
        self.witness = build / "lib/stand_ins_witness/look_up_witness.so"
        self.replaced_names = build / "bin/replaced_names"
        self.folder = pathlib.Path(folder)
        # The stand-in driver alone, under both names that NCCLs open, without the stand-in for NCCL beside it.
        self.driver = self.folder / "driver"
        self.driver.mkdir()
        for name in ("libcuda.so", "libcuda.so.1"):
            (self.driver / name).symlink_to(build / "lib/stand_ins/libcuda.so.1")
        for needed in (self.amem, self.patch, self.replay, self.second, self.witness, self.replaced_names):
            if not needed.exists():
                sys.exit(f"wheel_test.py: {needed} is missing; `./run wheel-test` builds it")

    def replacements(self):
        lines = [line.split() for line in self.output([self.replaced_names]).splitlines()]
        return [(name, int(since), int(before)) for name, _, since, before in lines]

    @staticmethod
    def output(command, **options):
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=PATIENCE_S,
                              **options)
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
            raise RuntimeError(f"{os.path.basename(command[0])} ended with {done.returncode}: " + " | ".join(said))
        return done.stdout

    def events(self, journal, kind):
        text = self.output([self.replay, "log", journal, "--kind", kind, "--json"])
        return [json.loads(line) for line in text.splitlines() if line]

    def run(self, nccl, way):
        """One process; (what was seen, what it printed)."""
        run = self.folder / f"{nccl.parent.name}-{way}"
        run.mkdir()
        nccl = nccl.resolve()
        amem = self.amem
        if way == "patched":
            self.output([self.patch, nccl, "-o", run / "patched"])
            nccl, amem = run / "patched/libnccl.so.2", run / "patched/libamem_nccl.so"
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("AMEM_", "NCCL_", "CUDA", "LD_", "STAND_IN_"))}
        environment.update(LD_LIBRARY_PATH=str(self.driver), LD_AUDIT=str(self.witness), AMEM_SIM_DEVICES="1",
                           AMEM_JOURNAL_DIR=str(run / "journal"), AMEM_SOCKET_DIR=str(run), AMEM_LOG="error",
                           STAND_IN_LOOK_UPS=str(run / "look_ups"), STAND_IN_WITNESS=str(run / "direct"))
        if way == "preload":
            environment["LD_PRELOAD"] = str(amem)
        probe = pathlib.Path(__file__).with_name("probe.py")
        command = [sys.executable, "-B", probe, "--nccl", nccl, "--amem", amem, "--second", self.second]
        answers = json.loads(self.output(command + (["--attach"] if way == "attach" else []), env=environment).splitlines()[-1])
        seen = self.observed(nccl, run, answers)
        attached = [(event["path"], event["way"]) for event in self.events(run / "journal", "library-attached")]
        if (str(nccl), way) not in attached:
            answers["problem"] = f"the journal does not say that {nccl} is under AMem by way of \"{way}\", but {attached}"
        shutil.rmtree(run)
        return seen, answers

    @staticmethod
    def seen_by_the_driver(nccl, run, look_ups, direct):
        """The first so many look-ups that the stand-in driver and the witness wrote down in the folder `run`."""
        asked = [line.split(" ", 2) for line in (run / "look_ups").read_text().splitlines()[:look_ups]]
        loader = [line.split(" ", 1) for line in (run / "direct").read_text().splitlines()[:direct]]
        return checks.Observed(library.names_in(nccl), library.imported(nccl), [(n, int(v), lib) for n, v, lib in asked],
                               [(n, lib) for n, lib in loader])

    def observed(self, nccl, run, answers):
        seen = self.seen_by_the_driver(nccl, run, answers["look_ups"], answers["direct_look_ups"])
        # What the stand-in for NCCL looked up comes after it in the journal, in the same order as the driver was asked.
        about_memory = sum(checks.belongs_in_the_journal(name) for name, _, _ in seen.look_ups)
        bound = self.events(run / "journal", "driver-symbol-bound")[:about_memory]
        seen.bound = [(event["name"], event["cuda_version"], event["replaced"]) for event in bound]
        return seen


def problems(version, seen, answers):
    found = checks.complaints(seen)
    if answers.get("amem_attach", 0) != 0:
        found.append("amem_attach: " + answers["amem_last_error"])
    if "problem" in answers:
        found.append(answers["problem"])
    code = answers["version"]
    said = (code // 10000, code % 10000 // 100, code % 100)
    if said != fetch.number(version)[:3]:
        found.append(f"ncclGetVersion says {said}")
    if answers["ncclGetUniqueId"] != 0:
        found.append(f"ncclGetUniqueId answered {answers['ncclGetUniqueId']}")
    return found


def test_one(bench, line, version, path):
    """Prints a line for each way; returns a result for the report."""
    result = {"line": line, "version": version, "mib": path.stat().st_size >> 20, "ways": {}, "problems": []}
    for way in WAYS:
        began = time.monotonic()
        try:
            seen, answers = bench.run(path, way)
            found = problems(version, seen, answers)
            came, every = checks.counted(seen)
            names = len({name for name in seen.names if checks.belongs_in_the_journal(name)})
            text = f"looked up {came} of {every}, {len(seen.bound)} about memory in the journal; {names} names about memory in the file"
            result["ways"][way] = {"came": came, "of": every, "journaled": len(seen.bound), "names": names, "answers": answers}
        except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
            found, text = [str(error)], "did not run"
        print(f"{'FAILED' if found else 'ok    '} {line} {version:13} {way:8} {text}; {time.monotonic() - began:.1f} s", flush=True)
        for one in found[:20]:
            print("         " + one, flush=True)
        result["problems"] += [f"{way}: {one}" for one in found]
    return result


def the_table_is_right(bench):
    found = checks.the_table_says_what_the_library_does(bench.replacements())
    for one in found:
        print("FAILED " + one)
    return not found


def get(wheel, folder):
    """The library of a wheel, or None, with a line that says so."""
    began = time.monotonic()
    try:
        there = (pathlib.Path(folder) / "-".join(wheel) / "libnccl.so.2").exists()
        path = fetch.fetch(*wheel, folder)
        if not there:
            print(f"fetched {wheel[0]} {wheel[1]} in {time.monotonic() - began:.0f} s, {path.stat().st_size >> 20} MiB", flush=True)
        return path
    except (fetch.Unreachable, OSError) as error:
        print(f"SKIPPED {wheel[0]} {wheel[1]}: the wheel could not be downloaded: {error}", flush=True)
        return None


def listed_or_known(folder):
    try:
        return [(line, version) for line in fetch.LINES for version in fetch.listed(line)]
    except fetch.Unreachable as error:
        print(f"PyPI does not answer ({error}); only what is in {folder} already can be tested", flush=True)
        return []


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="*", help="2.28.9 (of both lines) or cu13-2.28.9; none: the oldest, PyTorch's, the newest")
    parser.add_argument("--all", action="store_true", help="every version from 2.18 on that PyPI lists")
    parser.add_argument("--delete", action="store_true", help="delete each library after its test, unless it was there before")
    parser.add_argument("--build", default="build", help="the build to test (default: build)")
    parser.add_argument("--folder", default="build/deps/wheels", help="where libraries are kept")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    options = parser.parse_args()
    if options.all and options.version:
        parser.error("--all and versions exclude each other")
    for version in options.version:
        if not re.fullmatch(r"(cu1[23]-)?\d+\.\d+\.\d+(\.post\d+)?", version):
            parser.error(f'"{version}" is no version like 2.28.9 or cu13-2.28.9')
    return options


def main():
    options = arguments()
    began = time.monotonic()
    there = fetch.known(options.folder)
    wheels, left_out = choose(["all"] if options.all else options.version, listed_or_known(options.folder), there)
    results = []
    with tempfile.TemporaryDirectory(prefix="amem-wheels-") as scratch:
        bench = Bench(options.build, scratch)
        good = the_table_is_right(bench)
        for wheel in wheels:
            path = get(wheel, options.folder)
            if path is None:
                left_out.append("-".join(wheel))
                continue
            results.append(test_one(bench, *wheel, path))
            if options.delete and wheel not in there:
                shutil.rmtree(path.parent)
    failed = [f"{r['line']}-{r['version']}" for r in results if r["problems"]]
    used = sum(file.stat().st_size for file in pathlib.Path(options.folder).glob("*/libnccl.so.2"))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    for one in left_out:
        print("SKIPPED " + one)
    if not results:
        print("SKIPPED: there was no stock NCCL to test")
    print(f"{len(results)} stock NCCLs in three ways each, {time.monotonic() - began:.0f} s; {used / 2**30:.1f} GiB in {options.folder}; "
          f"left out: {len(left_out)}; failed: {' '.join(failed) or 'none'}")
    return 0 if good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
