#!/usr/bin/env python3
"""The walk prints the same without AMem and in each scope.

    walk_test.py WALK LIBRARY [--scopes nccl,shared,all] [--driver FOLDERS] [--ways runtime,dlsym] [--apart] [--out FOLDER] [--measured FILE]

FOLDERS have the libcuda.so.1 to walk through, and perhaps a libcudart; without them the machine's own is taken. --apart: each chapter in a process of
its own. --out: where to write what each walk printed. --measured: what a GPU answered to the walk of one way, apart, which the stand-ins
must answer, too. Exit code 1: an answer differs that DIFFERS or SIMULATED does not name.
"""
import argparse
import difflib
import os
import subprocess
import sys
import tempfile

# What memory of virtual addresses cannot do, which scope `all` makes of cuMemAlloc's from 2 MiB on: how lines begin that may differ.
# Each is in the README of ncclpatch.
DIFFERS = {
    "nccl": (),
    "shared": (),
    "all": ("sizes: set SYNC_MEMOPS ",),
}
LEAST = 800  # answers
# How the stand-ins differ from an H200, line by line.
SIMULATED = {
    ("stock", "sparse arrays: cuMemMapArrayAsync = 1"), ("here", "sparse arrays: cuMemMapArrayAsync = 0"),  # arrays are not simulated
    # Which addresses are taken, and what lies behind an allocation, is the driver's affair.
    ("stock", "IPC: other: open 20971520 = 0, range 0 of 20971520 from 0 before, RANGE_SIZE 20971520, as before"),
    ("here", "IPC: other: open 20971520 = 0, range 0 of 20971520 from 0 before, RANGE_SIZE 20971520, new"),
    ("stock", "of 8388608: copy across its end = 0"), ("here", "of 8388608: copy across its end = 1"),
    # What the walk of that day did not ask yet, and what it asked that no program may: twice for the destruction of a context.
    ("here", "captures: cuMemAlloc = 0"), ("here", "captures: fill = 0"), ("here", "captures: cuMemFree = 0"),
    ("stock", "captures: lost: 2 MiB"), ("here", "captures: lost: 0 MiB"), ("stock", "contexts: cuCtxDestroy twice = 709"),
}


def walk(program, way, scope, library, driver):
    with tempfile.TemporaryDirectory(prefix="amem-walk-") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AMEM_", "LD_PRELOAD"))}
        if driver:
            environment.update({"LD_LIBRARY_PATH": driver, "AMEM_SIM_WORLD": os.path.join(folder, "world"), "AMEM_SIM_DEVICES": "2",
                                "AMEM_SIM_CAPACITY_MIB": "4096"})
        if scope != "stock":
            environment.update({"LD_PRELOAD": library, "AMEM_SCOPE": scope, "AMEM_JOURNAL_DIR": os.path.join(folder, "journal"),
                                "AMEM_SOCKET_DIR": os.path.join(folder, "sockets"), "AMEM_LOG": "off"})
        # Both processes of the walk write no more than lines, so that its pipes never fill.
        run = subprocess.run([program, *way], env=environment, capture_output=True, text=True, timeout=240, check=False)
    if run.returncode:
        print(f"{scope}: the walk ended with {run.returncode} after: {run.stdout.splitlines()[-1:]}\n{run.stderr}")
    return run.stdout.splitlines(), run.returncode == 0


def differences(stock, seen, may):
    """Pairs of what stock says and what was seen, but for lines that may differ."""
    found = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, stock, seen, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        lines = [("stock", line) for line in stock[a:b]] + [("here", line) for line in seen[c:d]]
        found += [(who, line) for who, line in lines if not line.startswith(may)]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walk")
    parser.add_argument("library")
    parser.add_argument("--scopes", default="nccl,shared,all")
    parser.add_argument("--driver")
    parser.add_argument("--ways", default="runtime,dlsym")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--out", default="")
    parser.add_argument("--measured")
    options = parser.parse_args()
    good = True
    for name in options.ways.split(","):
        way = [name, "apart"] if options.apart else [name]

        def seen_by(scope, name=name, way=way):
            lines, ended = walk(options.walk, way, scope, options.library, options.driver)
            if options.out:
                with open(os.path.join(options.out, f"walk-{scope}-{name}.txt"), "w", encoding="utf-8") as file:
                    file.write("\n".join(lines) + "\n")
            return lines, ended

        stock, ended = seen_by("stock")
        good = good and ended and len(stock) >= LEAST
        print(f"stock {' '.join(way)}: {len(stock)} answers")
        if options.measured:
            with open(options.measured, encoding="utf-8") as file:
                found = [pair for pair in differences(file.read().splitlines(), stock, ("\0",)) if pair not in SIMULATED]
            good = good and not found
            print(f"{options.measured}: {len(found)} lines differ")
            for who, line in found:
                print(f"  {'measured' if who == 'stock' else who}: {line}")
        for scope in options.scopes.split(","):
            seen, ended = seen_by(scope)
            found = differences(stock, seen, DIFFERS[scope] or ("\0",))
            good = good and ended and not found
            print(f"{scope} {' '.join(way)}: {len(seen)} answers, {len(found)} lines differ")
            for who, line in found[:60]:
                print(f"  {who}: {line}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
