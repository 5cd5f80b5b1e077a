#!/usr/bin/env python3
"""Downloads the newest releases of the projects that AMem has adapters for, and compares them with contracts.json.

    check_releases.py --folder FOLDER [NAME[==VERSION]...]     all that PyPI has, or these; hundreds of MB for the first time
    check_releases.py --folder FOLDER --source slime=CHECKOUT  one that PyPI does not have (slime, ROLL), from a checkout of its sources
    check_releases.py --folder FOLDER --record NAME            writes what the release in FOLDER says into the table, to be read and committed

Each wheel is left in FOLDER/NAME, where frameworks_test.py finds it (FRAMEWORK_RELEASES=FOLDER). Prints one line for each project, and one for
each difference. Exit code 0: no contract is broken; 1: some are, so that an adapter must be looked at.
"""
import argparse
import glob
import json
import os
import re
import subprocess
import sys

import released
import released_code

TIME_LIMIT_S = 900


def download(name, requirement, folder):
    """The wheel of a release in folder/name: downloaded, or there already. None, with the reason on stderr, if it cannot be had."""
    place = os.path.join(folder, name)
    os.makedirs(place, exist_ok=True)
    before = set(glob.glob(os.path.join(place, "*.whl")))
    try:
        done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
                               "-d", place, requirement], capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
        reason = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        reason = ["no answer within %d s" % TIME_LIMIT_S]
    after = set(glob.glob(os.path.join(place, "*.whl")))
    if after - before:
        for old in before:
            os.remove(old)
    elif reason:
        print("check_releases: %s: %s" % (requirement, reason[0]), file=sys.stderr)
    return next(iter(after - before or after), None)


def version_of(path):
    """A wheel's version; the name of a checkout's folder says nothing."""
    found = re.match(r"[^-]+-([^-]+)-.*\.whl$", os.path.basename(path))
    return found.group(1) if found else "as it is in " + path


def link(sources, folder):
    for source in sources:
        name, _, path = source.partition("=")
        place = os.path.join(folder, name)
        if os.path.islink(place):
            os.remove(place)
        os.makedirs(folder, exist_ok=True)
        os.symlink(os.path.abspath(path), place)


def record(table, name, release):
    """The release's facts in place of those that the table has, for the same names. What is gone stays, and is an error still."""
    table[name]["version"] = version_of(release.path)
    for path, facts in table[name]["files"].items():
        for sort, names in facts.items():
            for fact in names:
                found = release.fact(sort, path, fact)
                if sort != "calls" and found is not None:
                    names[fact] = found
    with open(released.TABLE, "w", encoding="utf-8") as file:
        file.write(json.dumps(table, indent=1) + "\n")


def check(name, contract, release):
    lines = released.differences(contract, release)
    where = "%s %s" % (name, version_of(release.path))
    print("%-32s %s" % (where, "as %s" % contract["version"] if not lines else "%d differences to %s" % (len(lines), contract["version"])))
    for line in lines:
        print("    " + line)
    return not lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="*", metavar="NAME[==VERSION]")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--source", action="append", default=[], metavar="NAME=CHECKOUT")
    parser.add_argument("--record", metavar="NAME")
    options = parser.parse_args()
    table = released.table()
    link(options.source, options.folder)
    chosen = {re.split("[=<>]", one)[0]: one for one in options.requirements}
    unknown = set(chosen) - set(table)
    if unknown:
        parser.error("no adapter for %s; there are %s" % (", ".join(sorted(unknown)), ", ".join(table)))
    if not options.record:
        for name, contract in table.items():
            if "pip" in contract and (not chosen or name in chosen):
                download(name, chosen.get(name, name).replace(name, contract["pip"], 1), options.folder)
    found = released_code.releases(options.folder)
    if options.record:
        record(table, options.record, found[options.record])
    good = True
    for name, contract in table.items():
        if chosen and name not in chosen:
            continue
        if name in found:
            good = check(name, contract, found[name]) and good
        else:
            why = "could not be downloaded" if "pip" in contract else "is not on PyPI; --source %s=CHECKOUT names its sources" % name
            print("%-32s SKIPPED: %s" % (name, why))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
