#!/usr/bin/env python3
"""The library that runs in every rank has neither the simulator nor the peers in memory in it.

    symbols.py LIBRARY     reads the full symbol table with nm; prints each symbol that does not belong there; exit code 1 if any
"""
import re
import subprocess
import sys

STRAYS = re.compile(r"\bamem::(Simulat\w+|Local(Network|Peers|Scheduler)|TaggedMemfd)\b")
PRESENT = "amem::Session::"  # a library that was stripped shows nothing at all


def strays(symbols):
    """The lines of `nm --demangle` that name the simulator or the peers in memory; ValueError where the table is not the full one."""
    if PRESENT not in symbols:
        raise ValueError(f"no symbol of {PRESENT} either: the library was stripped, or is another one")
    return [line for line in symbols.split("\n") if STRAYS.search(line)]


def main():
    symbols = subprocess.run(["nm", "--demangle", sys.argv[1]], capture_output=True, text=True, check=True).stdout
    found = strays(symbols)
    print("\n".join(found))
    print(f"{len(found)} symbols of the simulator or of the peers in memory among {symbols.count(chr(10))} in {sys.argv[1]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
