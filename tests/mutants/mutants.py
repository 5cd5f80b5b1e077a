#!/usr/bin/env python3
"""Makes mutants of the production code by a seed, one at a time, and asks the tests whether they notice.

    mutants.py [--room ROOM]... [--seed N] [--count N] [--jobs N]

A room is a folder of the library, such as replay/session. Of each room (of all, where none is named) the seed picks lines, and of each
line one of the mutants that universalmutator makes of it: another operator or number, a condition turned round, a statement left out. A
mutant is planted in a copy of the tree, the tests that are built of it are built and run there up to the first that fails, the room's
own first, and the table says by room how many were noticed. What does not compile is not counted, and neither is what nothing can
notice: where the optimising compiler makes the same code of both, or where equivalent.txt says why. The same seed and tree give the same
mutants. Exit code 0: at least the bar of all was noticed; 1: fewer; 2: wrong usage.
"""
import argparse
import datetime
import json
import os
import signal
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True
import sample  # noqa: E402
from trial import BROKEN, EQUIVALENT, NOTICED, SURVIVED, Scratch  # noqa: E402


def table(rows):
    """The lines of the table by room."""
    lines = ["| room | mutants | noticed | rate | equivalent | did not compile |", "|---|---|---|---|---|---|"]
    for room in [*dict.fromkeys(row["room"] for row in rows), "all"]:
        count = {outcome: sum(row["outcome"] == outcome and room in (row["room"], "all") for row in rows)
                 for outcome in (NOTICED, SURVIVED, EQUIVALENT, BROKEN)}
        name = room if room == "all" else f"`{room}/`"
        lines.append(f"| {name} | {count[NOTICED] + count[SURVIVED]} | {count[NOTICED]} | {rate(rows, room):.0f} % | {count[EQUIVALENT]} | "
                     f"{count[BROKEN]} |")
    return lines


def rate(rows, room="all"):
    """How many of 100 that count were noticed; of none, all."""
    counted = [row["outcome"] for row in rows if room in (row["room"], "all") and row["outcome"] in (NOTICED, SURVIVED)]
    return 100 * counted.count(NOTICED) / len(counted) if counted else 100.0


class Run:
    def __init__(self, options, equivalents):
        self.options, self.equivalents, self.rows = options, equivalents, []
        self.scratch = Scratch(ROOT, os.path.abspath(options.scratch), options.jobs, options.parts)
        self.scratch.configure(options.cmake)

    def try_one(self, room, mutant):
        began = time.monotonic()
        if mutant.key in self.equivalents:
            outcome, why = EQUIVALENT, self.equivalents[mutant.key]
        else:
            for tests in self.scratch.tests_of(mutant.file, room, self.options.others, self.options.also):
                outcome, why = self.scratch.try_mutant(mutant, self.scratch.passing(tests))
                if outcome != SURVIVED:
                    break
        self.rows.append({"room": room, "outcome": outcome, "why": why, "seconds": round(time.monotonic() - began, 1), **mutant._asdict()})
        print(f"{outcome:15} {self.rows[-1]['seconds']:6.1f} s  {mutant.file}:{mutant.line}  {why}")
        if outcome == SURVIVED:
            signed = [sign + " " + line for sign, lines in zip(" -+", mutant[2:]) for line in lines.splitlines()]
            print("\n".join(line.rstrip() for line in signed))
        sys.stdout.flush()
        if self.options.json:  # after each mutant, so that a run that is cut short was not in vain
            with open(self.options.json, "w", encoding="utf-8") as file:
                json.dump({"seed": self.options.seed, "mutants": self.rows}, file, indent=1)
        return outcome

    def sample_of(self, room, files):
        if left_out := [path for path in files if not sample.is_testable(ROOT, path)]:
            print(f"without PyTorch in this Python most tests of these skip themselves, so they have no mutants: {', '.join(left_out)}")
        files, tried = [path for path in files if path not in left_out], 0
        for mutant in sample.pick(ROOT, files, f"{self.options.seed} {room}"):
            if tried == self.options.count:
                return
            tried += self.try_one(room, mutant) in (NOTICED, SURVIVED)

    def again(self, file):
        """The mutants that survived in a run before, where their lines are still there; or those that somebody thought up, in that form."""
        with open(file, encoding="utf-8") as results:
            rows = [row for row in json.load(results)["mutants"] if row["outcome"] == SURVIVED]
        for row in rows:
            mutant = sample.Mutant(row["file"], row["line"], row["before"], row["original"], row["mutated"])
            with open(os.path.join(ROOT, row["file"]), encoding="utf-8") as source:
                places = mutant.places(source.read())
            if not places:
                print(f"gone: {row['file']}: {row['original'].strip()}")
                continue
            self.try_one(row["room"], mutant._replace(line=min(places, key=lambda number: abs(number - row["line"]))))


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--room", action="append", default=[], help="a folder, such as replay/session (default: all)")
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")), help="default: the date")
    parser.add_argument("--count", type=int, default=10, help="mutants of each room that compile and are not equivalent")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at once")
    parser.add_argument("--parts", type=int, default=2 * os.cpu_count(), help="parts of a test program at once; they wait a lot")
    parser.add_argument("--others", type=int, default=100, help="test programs beside the room's own, at most; for what these did not notice")
    parser.add_argument("--also", action="append", default=[], help="only this one of those, such as end_to_end_test; again for more")
    parser.add_argument("--bar", type=float, default=80, help="the least percentage that must be noticed of all")
    parser.add_argument("--again", metavar="FILE", help="try those that survived in these results, and no others")
    parser.add_argument("--list", action="store_true", help="only print what the seed picks")
    parser.add_argument("--scratch", default=os.path.join(ROOT, "build", "mutants"), help="where the copy is made (default: build/mutants)")
    parser.add_argument("--cmake", action="append", default=[], help="an argument for cmake, such as -DCUDA_ROOT=DIR")
    parser.add_argument("--json", default="", help="results go there")
    return parser.parse_args(arguments)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it has started ends with it, and the copy is as it was
    options, known = parse(sys.argv[1:]), sample.rooms(ROOT)
    unknown = [room for room in options.room if room not in known]
    if unknown:
        print(f"mutants.py: {unknown[0]} is no room; the rooms are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = {room: known[room] for room in options.room or known}
    if options.list:
        for room, files in chosen.items():
            for mutant, _ in zip(sample.pick(ROOT, files, f"{options.seed} {room}"), range(options.count)):
                print(f"{mutant.file}:{mutant.line}\n- {mutant.original.strip()}\n+ {mutant.mutated.strip()}")
        return 0
    with open(os.path.join(HERE, "equivalent.txt"), encoding="utf-8") as file:
        run = Run(options, sample.read_equivalents(file.read()))
    print(f"seed {options.seed}")
    if options.again:
        run.again(options.again)
    else:
        for room, files in chosen.items():
            run.sample_of(room, files)
    print("\n".join(table(run.rows)))
    return 0 if run.rows and rate(run.rows) >= options.bar else 1


if __name__ == "__main__":
    sys.exit(main())
