#!/usr/bin/env python3
"""The tree polices itself: rules that a compiler does not check.

    tidy.py [ROOT]     prints one line for each broken rule, "path:line: what; why"; exit code 1 if there are any

Every rule is a function that takes a Tree and yields findings; tidy_test.py plants a breach of each and expects it to be found.
"""
import os
import re
import subprocess
import sys

FOLDERS = {  # what each folder may include; the path of one fact, from left to right
    "statemachine": {"statemachine"},
    "journal": {"statemachine", "journal"},
    "replay": {"statemachine", "journal", "replay"},
    "ncclpatch": {"statemachine", "journal", "replay", "ncclpatch"},
    "tests": {"statemachine", "journal", "replay", "ncclpatch", "tests"},
}
LIBRARY = ("statemachine", "journal", "replay", "ncclpatch")
TOP_LEVEL = set(FOLDERS) | {"CMakeLists.txt", "CMakePresets.json", "README.md", "LICENSE", "run"}
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

# Programs of our own may do what a guest in somebody else's process may not.
PROGRAM = re.compile(r"(^|/)(amem_replay_|amem_patch_)|_main\.cpp$")
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
# Settings are read once, into Options; each of the others reads what is not a setting.
GETENV = {"ncclpatch/options.cpp", "ncclpatch/runtime.cpp", "ncclpatch/runtime_start.cpp", "ncclpatch/preload.cpp",
          "ncclpatch/hook.cpp"}
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

    def lines(self, path):
        if path not in self._lines:
            with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as file:
                self._lines[path] = file.read().split("\n")
        return self._lines[path]

    def code(self, path):
        """The lines of a C++ file with comments and string contents blanked, so that words in them are not taken for calls."""
        text = "\n".join(self.lines(path))
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


def include_directions(tree):
    for path in tree.paths:
        folder = path.split("/")[0]
        if folder not in FOLDERS or not path.endswith(CODE):
            continue
        for number, _, name in includes(tree, path):
            target = name.split("/")[0]
            if "/" in name and target in FOLDERS and target not in FOLDERS[folder]:
                yield path, number, f'{folder}/ includes "{name}"; arrows point from {" and ".join(sorted(FOLDERS[folder]))} only'


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
        allowed = path.startswith("ncclpatch/") or re.match(r"replay/cuda_driver[^/]*$", path)
        for number, _, name in includes(tree, path):
            if re.match(r"(cuda|cuda_runtime\w*|cudaTypedefs|nccl)\.h$", name) and not allowed:
                yield path, number, f"<{name}> only in replay/cuda_driver* and ncclpatch/; elsewhere use replay/driver.h"


def headers_stay_light(tree):
    for path in tree.library(".h"):
        for number, _, name in includes(tree, path):
            if HEAVY.search(name):
                yield path, number, f"<{name}> in a header; include it in the .cpp that needs it"


def headers_begin_with_their_contract(tree):
    for path in [p for p in tree.paths if p.split("/")[0] in FOLDERS and p.endswith(".h")]:
        lines = tree.lines(path)
        if not lines[0].startswith(("//", "/*")):
            yield path, 1, "a header begins with a comment: what it is for, who owns what, what errors mean"
        c_guard = any(re.match(r"#ifndef \w+_H_$", line) for line in lines)  # of headers that C includes too
        if not c_guard and not any(line.strip() == "#pragma once" for line in lines):
            yield path, 1, "a header has #pragma once"


def guests_behave(tree):
    for path in tree.library(".cpp", ".h"):
        if PROGRAM.search(path):
            continue
        for number, line in enumerate(tree.code(path), 1):
            for pattern, why in BANNED.items():
                match = re.search(pattern, line)
                if match:
                    yield path, number, f"{match.group(0).strip()}: {why}"
            if re.search(r"\b(secure_)?getenv\s*\(", line) and path not in GETENV:
                yield path, number, "getenv: settings are read once, into Options (ncclpatch/options.h)"


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


def top_level_is_closed(tree):
    for name in sorted({path.split("/")[0] for path in tree.paths}):
        if name not in TOP_LEVEL and not name.startswith("."):
            yield name, 1, "not one of the top level's entries: " + ", ".join(sorted(TOP_LEVEL))


RULES = [include_directions, statemachine_is_pure, cuda_stays_at_the_edge, headers_stay_light, headers_begin_with_their_contract,
         guests_behave, nothing_is_left_over, top_level_is_closed]


def findings(root):
    tree = Tree(root)
    return [(rule.__name__, *finding) for rule in RULES for finding in rule(tree)]


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    found = findings(os.path.realpath(root))
    for rule, path, number, text in found:
        print(f"{path}:{number}: {text} [{rule}]")
    print(f"{len(found)} findings of {len(RULES)} rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
