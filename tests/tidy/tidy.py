#!/usr/bin/env python3
"""The tree polices itself: rules that a compiler does not check.

    tidy.py [ROOT]              prints one line for each broken rule, "path:line: what; why"; exit code 1 if there are any
    tidy.py --measures [ROOT]   prints how much state there is, by room: members, booleans, public methods, branches, checks

Every rule is a function that takes a Tree and yields findings; tidy_test.py plants a breach of each and expects it to be found.
"""
import argparse
import os
import re
import subprocess
import sys
from collections import Counter

import functions
import measures
import names
import one_definition
import readmes

# What each room may include beside itself: the one table of directions. The path of one fact goes from left to right and down;
# a file is in the longest room that its folder begins with. An entry with a dot is one header and nothing else of its room.
_BASE = "statemachine journal/base "
_LIVE = _BASE + "journal replay/driver replay/peers replay/ledger replay/cycle replay/session "
_REAL = "replay/driver/cuda replay/peers/unix "
ROOMS = {room: set(below.split()) for room, below in {
    "statemachine": "",
    "journal/base": "statemachine",
    "journal": _BASE,
    # live wing
    "replay/driver": _BASE,
    "replay/driver/cuda": _BASE + "replay/driver",
    "replay/driver/simulator": _BASE + "replay/driver",
    "replay/peers": _BASE + "journal/codec.h journal/struct_codec.h",
    "replay/peers/unix": _BASE + "replay/peers",
    "replay/ledger": _BASE + "journal replay/driver",
    "replay/cycle": _BASE + "journal replay/driver replay/peers replay/ledger",
    "replay/session": _BASE + "journal replay/driver replay/peers replay/ledger replay/cycle",
    "replay/control": _BASE + "journal replay/peers replay/peers/unix",
    "ncclpatch": "",
    "ncclpatch/hook": _BASE + "ncclpatch",
    "ncclpatch/nccl": _BASE + "ncclpatch/hook",
    "ncclpatch/runtime": _LIVE + _REAL + "replay/control ncclpatch ncclpatch/hook ncclpatch/nccl",
    "ncclpatch/intercept": _LIVE + _REAL + "ncclpatch ncclpatch/hook ncclpatch/nccl ncclpatch/runtime",
    "ncclpatch/library": _LIVE + _REAL + "ncclpatch ncclpatch/hook ncclpatch/nccl ncclpatch/runtime ncclpatch/intercept",
    "ncclpatch/patch": _BASE,
    # reading wing
    "replay/job": _BASE + "journal",
    "replay/diagnosis": _BASE + "journal replay/job replay/driver/result_names.h",
    "replay/report": _BASE + "journal replay/job replay/diagnosis replay/driver/result_names.h",
    "replay/rerun": _BASE + "journal replay/job replay/driver replay/driver/simulator replay/peers replay/cycle",
    "replay/freeze": _BASE + "replay/control replay/driver",
    "replay/tool": _BASE + "journal replay/control replay/job replay/diagnosis replay/report replay/rerun replay/freeze replay/driver "
                   "replay/driver/cuda/checkpoint.h replay/driver/cuda/nvml.h",
}.items()}
LIBRARY = ("statemachine", "journal", "replay", "ncclpatch")
TOP_LEVEL = {*LIBRARY, "tests", "CMakeLists.txt", "CMakePresets.json", "README.md", "LICENSE", "run", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "SUPPORT.md"}
CODE = (".cpp", ".h", ".S", ".c")
TEXT = CODE + (".py", ".txt", ".md", ".json", ".capnp", ".cmake", ".toml", ".yml", ".yaml", ".sh", ".in", ".map")

STANDARD = set("""algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes climits
clocale cmath codecvt compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef cstdint cstdio cstdlib
cstring ctime cuchar cwchar cwctype deque exception execution filesystem format forward_list fstream functional future
initializer_list iomanip ios iosfwd iostream istream iterator latch limits list locale map memory memory_resource mutex new
numbers numeric optional ostream queue random ranges ratio regex scoped_allocator semaphore set shared_mutex source_location span
sstream stack stdexcept stop_token streambuf string string_view strstream syncstream system_error thread tuple type_traits
typeindex typeinfo unordered_map unordered_set utility valarray variant vector version""".split())
IMPURE = {"chrono", "ctime", "filesystem", "fstream", "iostream", "cstdio", "thread", "mutex", "shared_mutex", "random", "future",
          "condition_variable", "csignal"}  # clocks, files, threads, chance: not in the state machine

PROGRAMS = {"replay/tool", "ncclpatch/patch"}  # programs of our own may do what a guest in somebody else's process may not
BANNED = {
    r"\bstd::cout\b": "standard output belongs to the host program",
    r"(?<![\w:.>])(std::)?(printf|puts|putchar)\s*\(": "standard output belongs to the host program",
    r"\bstdout\b": "standard output belongs to the host program",
    r"(?<![\w.>])(std::)?abort\s*\(": "a guest does not end its host; return a Status",
    r"(?<![\w.>])(std::)?(exit|quick_exit|terminate)\s*\(": "a guest does not end its host; return a Status",
    r"(?<![\w.>])(std::)?system\s*\(": "no shells",
    r"(?<![\w.>])(std::)?(rand|srand)\s*\(": "neither random nor repeatable; use getrandom or a seeded generator",
    r"(?<![\w.>])(std::)?(signal|sigaction)\s*\(": "signal handlers belong to the host program",
    r"(?<![\w.>])(std::)?gets\s*\(": "it cannot be used safely",
    r"(?<![\w.>])(strcpy|strcat|sprintf|vsprintf)\s*\(": "no bound; use snprintf or std::string",
}
# Settings are read once, into Options. The hook asks for the loader's variables before that, and the tool for where journals are.
GETENV = PROGRAMS | {"ncclpatch/runtime/runtime.cpp", "ncclpatch/hook/hook.cpp", "replay/job/sessions.cpp"}
CUDA_HEADER = re.compile(r"(cuda|cuda_runtime\w*|cudaTypedefs|nccl)\.h$")
MOST_FILES, MOST_FUNCTION_LINES = 30, 60  # of a folder and a function of production code; a file is as long as one idea needs
SOURCES = CODE + (".cu", ".py", ".capnp", ".js", ".css", ".html")  # what is written by hand
HEAVY = re.compile(r"^(capnp/|kj/|lmdb\.h$|spdlog/|fmt/|CLI/|nlohmann/json\.hpp$)|\.capnp\.h$")


class Tree:
    """The files of a source tree, by path from its root: those that git knows or would add; without git, all but outputs."""

    def __init__(self, root):
        self.root = root
        self.paths = sorted(self._from_git() or self._from_disk())
        self._lines = {}

    def _from_git(self):
        listed = subprocess.run(["git", "-C", self.root, "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True,
                                check=False)
        inside = subprocess.run(["git", "-C", self.root, "rev-parse", "--show-prefix"], capture_output=True, check=False)
        if listed.returncode != 0 or inside.stdout.strip():
            return []
        paths = listed.stdout.decode().split("\0")
        return [p for p in paths if p and os.path.exists(os.path.join(self.root, p))]

    def _from_disk(self):
        found = []
        for folder, folders, files in os.walk(self.root):
            at_top = folder == self.root
            folders[:] = [f for f in folders if f not in (".git", "__pycache__") and not (at_top and f.startswith(("build", ".")))]
            found += [os.path.relpath(os.path.join(folder, f), self.root) for f in files]
        return found

    def text(self, path):
        return "\n".join(self.lines(path))

    def functions(self, path):
        return functions.functions(self.code(path)) if path.endswith((".cpp", ".h", ".c", ".cu")) else ()

    def lines(self, path):
        if path not in self._lines:
            with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as file:
                self._lines[path] = file.read().split("\n")
        return self._lines[path]

    def code(self, path):
        """The lines of a C++ file with comments and string contents blanked, so that words in them are not taken for calls."""
        text = self.text(path)
        pattern = r'R"(\w*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*(?:.|\n)*?\*/'
        blank = lambda m: '""' + "\n" * m.group(0).count("\n") if m.group(0)[0] in 'R"' else "\n" * m.group(0).count("\n")
        return re.sub(pattern, blank, text).split("\n")

    def library(self, *endings):
        return [p for p in self.paths if p.split("/")[0] in LIBRARY and p.endswith(endings)]


def includes(tree, path):
    for number, line in enumerate(tree.lines(path), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1) == "<", match.group(2)


def room_of(path):
    """The longest room that the file's folder begins with, or None."""
    folder = os.path.dirname(path)
    while folder and folder not in ROOMS:
        folder = os.path.dirname(folder)
    return folder or None


def in_rooms(path, rooms_or_files):
    return path in rooms_or_files or room_of(path) in rooms_or_files


def include_directions(tree):
    for path in tree.library(*CODE):
        room = room_of(path)
        if room is None:
            yield path, 1, "its folder is no room of tests/tidy/tidy.py's table ROOMS"
            continue
        for number, angle, name in includes(tree, path):
            target = room_of(name)
            if target is None and not angle:
                yield path, number, f'"{name}" is in no room; write the path from the root of the tree'
            elif name.split("/")[0] == "tests" or target not in (None, room) and not in_rooms(name, ROOMS[room]):
                yield path, number, f'{room}/ includes "{name}"; it may include {", ".join(sorted(ROOMS[room])) or "nothing else"}'


def the_simulator_stays_out_of_the_library(tree):
    guests = ("ncclpatch/", "replay/session/")
    for path in [p for p in tree.paths if p.startswith(guests) and p.endswith((*CODE, "CMakeLists.txt"))]:
        lines = tree.lines(path) if path.endswith(".txt") else tree.code(path)
        for number, line in enumerate(lines, 1):
            match = re.search(r"\bamem_(simulator|local_peers)\b|\bSimulator\w*|\bLocal(Network|Peers)\b", line)
            if match:
                yield path, number, f"{match.group(0)}: the simulator and the peers in memory are for tests and for amem replay"


def statemachine_is_pure(tree):
    for path in tree.paths:
        if not path.startswith("statemachine/") or not path.endswith(CODE):
            continue
        for number, angle, name in includes(tree, path):
            if angle and name not in STANDARD:
                yield path, number, f"<{name}> is not of the standard library; statemachine/ depends on nothing else"
            elif angle and name in IMPURE:
                yield path, number, f"<{name}>: no clocks, files, threads or chance in statemachine/"


def cuda_stays_at_the_edge(tree):
    for path in tree.library(*CODE):
        for number, _, name in includes(tree, path):
            if CUDA_HEADER.match(name) and not path.startswith(("ncclpatch/", "replay/driver/cuda/")):
                yield path, number, f"<{name}> only in replay/driver/cuda/ and ncclpatch/; elsewhere use replay/driver/driver.h"


def headers_stay_light(tree):
    for path in [p for p in tree.library(".h") if p != "journal/struct_codec.h"]:  # which two .cpp share
        for number, _, name in includes(tree, path):
            if HEAVY.search(name):
                yield path, number, f"<{name}> in a header; include it in the .cpp that needs it"


def headers_begin_with_their_contract(tree):
    for path in [p for p in tree.paths if p.split("/")[0] in (*LIBRARY, "tests") and p.endswith(".h")]:
        lines = tree.lines(path)
        if not lines[0].startswith(("//", "/*")):
            yield path, 1, "a header begins with a comment: what it is for, who owns what, what errors mean"
        c_guard = any(re.match(r"#ifndef \w+_H_$", line) for line in lines)  # of headers that C includes too
        if not c_guard and not any(line.strip() == "#pragma once" for line in lines):
            yield path, 1, "a header has #pragma once"


def guests_behave(tree):
    for path in tree.library(".cpp", ".h"):
        if room_of(path) in PROGRAMS:
            continue
        for number, line in enumerate(tree.code(path), 1):
            for pattern, why in BANNED.items():
                match = re.search(pattern, line)
                if match:
                    yield path, number, f"{match.group(0).strip()}: {why}"
            if re.search(r"\b(secure_)?getenv\s*\(", line) and not in_rooms(path, GETENV):
                yield path, number, "getenv: settings are read once, into Options (ncclpatch/runtime/options.h)"


def readers_follow_no_links(tree):
    """A stream follows links, waits for whoever fills a pipe, and reads to the end; what lies beside a journal may be a stranger's."""
    for path in tree.library(".cpp", ".h"):
        for number, line in enumerate(tree.code(path), 1):
            match = re.search(r"\b(std::)?(ifstream|fopen|freopen)\b", line)
            if match and path != "replay/tool/schemas/make_schemas.cpp":  # which runs when the tree is built
                yield path, number, f"{match.group(0)}: read with ReadSmallFile or File::OpenToRead (journal/base/file.h)"


def rooms_stay_small(tree):
    """Files in a folder, lines in a function; what is generated is no source file and is not counted."""
    for folder, files in Counter(os.path.dirname(p) for p in tree.library("")).items():
        if files > MOST_FILES:
            yield folder, 1, f"{files} files in a folder; at most {MOST_FILES}"
    for path in tree.library(*SOURCES):
        try:
            for first, last, name in tree.functions(path):
                if last - first >= MOST_FUNCTION_LINES:
                    yield path, first, f"{name} has {last - first + 1} lines; a function has at most {MOST_FUNCTION_LINES}"
        except ValueError as error:
            yield path, 1, f"its functions cannot be told apart: {error}"


def state_is_small(tree):
    yield from measures.state_is_small(tree, LIBRARY)


def names_are_of_the_field(tree):
    yield from names.names_are_of_the_field(tree, LIBRARY)


def nothing_is_left_over(tree):
    own = "tests/tidy/"
    for path in tree.paths:
        if path.startswith(own) or not (path.endswith(TEXT) or path in ("run", ".ci/run")):
            continue
        for number, line in enumerate(tree.lines(path), 1):
            match = re.search(r"\b(TODO|FIXME|XXX)\b", line)
            if match:
                yield path, number, f"{match.group(0)}: do it, or open an issue"
            match = re.search(r"(?<![\w.*}])/(work|root|home)/", line)
            if match:
                yield path, number, f"{match.group(0)}: a path of one machine"


def assertions_have_braces(tree):
    """GoogleTest's assertions are an `if` with an `else`. GCC refuses them as the whole body of another `if`, and `./run test` compiles tests by Clang."""
    for path in tree.paths:
        if not path.startswith("tests/") or not path.endswith((".cpp", ".h")):
            continue
        before = ""
        for number, line in enumerate(tree.lines(path), 1):
            one = r"(EXPECT|ASSERT)_\w*\("
            if re.search(r"\bif (constexpr )?\(.*\) " + one, line) or (re.search(r"^\s*" + one, line) and re.search(r"\bif (constexpr )?\([^;{]*\)\s*$", before)):
                yield path, number, "an assertion as the body of an `if` without braces; GCC refuses it (-Wdangling-else)"
            before = line if line.strip() else before


def top_level_is_closed(tree):
    for name in sorted({path.split("/")[0] for path in tree.paths}):
        if name not in TOP_LEVEL and not name.startswith("."):
            yield name, 1, "not one of the top level's entries: " + ", ".join(sorted(TOP_LEVEL))


RULES = [include_directions, the_simulator_stays_out_of_the_library, statemachine_is_pure, cuda_stays_at_the_edge, headers_stay_light,
         headers_begin_with_their_contract, guests_behave, readers_follow_no_links, rooms_stay_small, state_is_small, names_are_of_the_field, nothing_is_left_over,
         assertions_have_braces, top_level_is_closed,
         readmes.every_path_in_a_readme_exists, one_definition.a_type_has_one_definition]


def findings(root):
    tree = Tree(root)
    return [(rule.__name__, *finding) for rule in RULES for finding in rule(tree)]


def main():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    arguments = argparse.ArgumentParser(description="Checks the rules of the tree that a compiler does not check.")
    arguments.add_argument("root", nargs="?", default=root, metavar="ROOT")
    arguments.add_argument("--measures", action="store_true", help="prints how much state the tree has, and checks nothing")
    options = arguments.parse_args()
    root = os.path.realpath(options.root)
    if options.measures:
        print(measures.text(Tree(root), LIBRARY, SOURCES, room_of))
        return 0
    found = findings(root)
    for rule, path, number, text in found:
        print(f"{path}:{number}: {text} [{rule}]")
    print(f"{len(found)} findings of {len(RULES)} rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
