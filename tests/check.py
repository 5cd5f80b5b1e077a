#!/usr/bin/env python3
"""Builds the tests of one room, and runs them: check.py BUILD ROOM [TEST]

ROOM is a folder of the library, or its last part: replay/cycle, cycle. A room's tests are the programs that have a source in tests/ROOM or a folder
below, and the scripts there. Of these only what the tests need is built. TEST: a part of a test's name; only these tests run.
"""
import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import time


def read(build):
    """[(room, target, how)] that CMake wrote: of a program how its tests run, of what scripts need an empty string."""
    with open(os.path.join(build, "tests_of_rooms"), encoding="utf-8") as file:
        return [(*words, "")[:3] for words in (line.split() for line in file) if words]


def in_room(folder, room):
    return folder == room or folder.startswith(room + "/")


def room_of(name, rooms):
    """The room of this name: as it is, or the only one that ends with it."""
    name = name.strip("/").removeprefix("tests/")
    if any(in_room(room, name) for room in rooms):
        return name
    parents = {"/".join(room.split("/")[:depth]) for room in rooms for depth in range(1, room.count("/") + 2)}
    found = sorted(parent for parent in parents if parent.endswith("/" + name))
    if len(found) != 1:
        raise SystemExit(f"check: \"{name}\" is {'none' if not found else 'more than one'} of the rooms with tests: {', '.join(found or sorted(set(rooms)))}")
    return found[0]


def commands_of(program, how, part):
    """The processes that a program's tests run in: [(name, command, environment)]."""
    listed = subprocess.run([program, "--gtest_list_tests", f"--gtest_filter=*{part}*"], capture_output=True, text=True, check=True).stdout
    tests, suite = [], ""
    for line in listed.splitlines():
        if line.startswith("  "):
            tests.append(suite + line.split("#")[0].strip())
        elif re.match(r"\S+\.$", line.split("#")[0].strip()):
            suite = line.split("#")[0].strip()
    tests = [test for test in tests if "DISABLED_" not in test]
    if how == "EACH":
        return [(test, [program, f"--gtest_filter={test}"], {}) for test in tests]
    shards = min(len(tests), 4)
    return [(f"{os.path.basename(program)}.{shard}", [program, f"--gtest_filter=*{part}*"], {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)})
            for shard in range(shards)]


def scripts_of(build, room, part):
    """As commands_of, of the scripts that ctest knows."""
    shown = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True, check=True).stdout
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), room) + "/"
    for test in json.loads(shown)["tests"]:
        if part in test["name"] and any(word.startswith(folder) and word.endswith(".py") for word in test.get("command", ())):
            properties = {p["name"]: p["value"] for p in test.get("properties", ())}
            yield test["name"], test["command"], dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", ()))


def run(name, command, environment, build):
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        done = subprocess.run(command, cwd=build, env={**os.environ, "TMPDIR": folder, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    return name, done.returncode, done.stdout, time.monotonic() - began


def main():
    arguments = argparse.ArgumentParser(description="Builds the tests of one room, and runs them.")
    arguments.add_argument("build", metavar="BUILD")
    arguments.add_argument("room", metavar="ROOM")
    arguments.add_argument("test", nargs="?", default="", metavar="TEST")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count())
    options = arguments.parse_args()
    build = os.path.abspath(options.build)
    known = read(build)
    room = room_of(options.room, {folder for folder, _, _ in known})
    targets = {target: how for folder, target, how in known if in_room(folder, room)}
    began = time.monotonic()
    if subprocess.run(["ninja", "-C", build, "-j", str(options.jobs), *targets], check=False).returncode != 0:
        return 1
    built = time.monotonic() - began
    runs = [one for target, how in targets.items() if how for one in commands_of(os.path.join(build, "bin", target), how, options.test)]
    runs += scripts_of(build, room, options.test)
    if not runs:
        raise SystemExit(f"check: no test of {room} has \"{options.test}\" in its name")
    failed = []
    with concurrent.futures.ThreadPoolExecutor(2 * options.jobs) as pool:
        for name, code, output, seconds in pool.map(lambda one: run(*one, build), runs):
            if code not in (0, 77):
                failed.append(name)
                print(f"{output[-8000:]}\n--- {name} failed ({code}), {seconds:.1f} s")
    print(f"{room}: built in {built:.0f} s, {len(runs)} tests or parts in {time.monotonic() - began - built:.0f} s, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
