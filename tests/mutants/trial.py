"""Plants a mutant in a copy of the tree, builds the tests that may notice it, and runs them."""
import contextlib
import glob
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

NOTICED, SURVIVED, BROKEN, EQUIVALENT = "noticed", "survived", "did not compile", "equivalent"
LEAST_LIMIT_S = 40  # for a program, on a machine that has something else to do as well
LEAK = "detected memory leaks"
MOST_LEFT_OUT = 5  # tests of a program; one of which more fail without a mutant is not used
GIB = 1 << 30
PROGRAMS = ["amem_nccl", "amem-replay", "stand_in_cuda", "stand_in_nccl"]  # of which scripts are tests
FLAGS = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_CXX_FLAGS=-O0 -w",
         # As AddressSanitizer in ./run test, at no price. A test that has allocation operators of its own keeps them.
         "-DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=lld -fsanitize=leak -Wl,--allow-multiple-definition",
         "-DCMAKE_SHARED_LINKER_FLAGS=-fuse-ld=lld", "-DAMEM_PRECOMPILE=ON",
         "-DCMAKE_GTEST_DISCOVER_TESTS_DISCOVERY_MODE=PRE_TEST"]


def _limits():
    """A mutant may write or allocate without end. Of address space the simulator takes much that it does not use. A shell's job in the
    background ignores an interrupt, which tests send."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * GIB, 8 * GIB))
    resource.setrlimit(resource.RLIMIT_DATA, (16 * GIB, 16 * GIB))


class Process:
    """A command in a process group and a temporary folder of its own; at the time limit all that it started is killed."""

    def __init__(self, command, cwd, environment):
        self.folder = tempfile.mkdtemp(prefix="mutants-")
        self.output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
                                        env={**os.environ, "TMPDIR": self.folder, **environment}, start_new_session=True,
                                        preexec_fn=_limits)

    def wait(self, until):
        """(exit code or None at the time limit, output)"""
        try:
            code = self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return code, text


class Test:
    """One program of tests, or one script."""

    def __init__(self, name, command, cwd, environment, target, parts):
        self.name, self.command, self.cwd, self.environment, self.target = name, command, cwd, environment, target
        self.parts, self.limit, self.without = parts if target else 1, 600.0, []

    def _start(self, arguments=(), environment=()):
        return Process([*self.command, *arguments], self.cwd, {**self.environment, **dict(environment)})

    def run(self):
        """What failed, "" when nothing did. A test that fails must fail twice: one that depends on the machine notices nothing."""
        until = time.monotonic() + self.limit
        quick = ["--gtest_fail_fast", "--gtest_filter=-" + ":".join(self.without)] if self.target else []
        runs = [self._start(quick, {"GTEST_TOTAL_SHARDS": str(self.parts), "GTEST_SHARD_INDEX": str(part)} if self.target else {})
                for part in range(self.parts)]
        ended = [run.wait(until) for run in runs]
        for code, output in ended:
            if code is None:
                return f"{self.name} hangs" + (f" in {self._last(output)}" if self.target else "")
        for code, output in ended:
            if code != 0 and LEAK in output:
                return f"{self.name}: {LEAK}"
            if code != 0 and self._fails_again(output):
                return f"{self.name}: {self._last(output)}" if self.target else f"{self.name}: {self._line(output)}"
        return ""

    @staticmethod
    def _last(output):
        """The test that failed, or that ran when the program ended."""
        failed = re.findall(r"^\[  FAILED  \] ([\w/.]+\.[\w/]+)", output, re.M) or re.findall(r"^\[ RUN      \] (\S+)", output, re.M)
        return failed[0] if "[  FAILED  ]" in output else failed[-1] if failed else "its start"

    @staticmethod
    def _line(output):
        failed = re.findall(r"^(?:FAIL|ERROR): .*", output, re.M)
        return failed[0] if failed else (output.strip().splitlines() or ["no output"])[-1][:200]

    def _fails_again(self, output):
        which = [f"--gtest_filter={self._last(output)}"] if self.target and self._last(output) != "its start" else []
        code, _ = self._start(which).wait(time.monotonic() + self.limit)
        return code != 0


class Scratch:
    """A copy of the tree with a build of its own."""

    def __init__(self, root, directory, jobs, parts):
        self.root, self.tree, self.build = root, os.path.join(directory, "tree"), os.path.join(directory, "build")
        self.jobs, self.parts, self._passes, self._code = jobs, parts, {}, {}
        listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True, text=True)
        paths = {path for path in listed.stdout.split("\0") if path and os.path.exists(os.path.join(root, path))}
        for folder, _, files in os.walk(self.tree):
            for file in files:
                if os.path.relpath(os.path.join(folder, file), self.tree) not in paths:
                    os.remove(os.path.join(folder, file))
        for path in sorted(paths):
            source, target = os.path.join(root, path), os.path.join(self.tree, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not os.path.exists(target) or open(target, "rb").read() != open(source, "rb").read():
                shutil.copy(source, target)  # with a new date: what was built of a mutant that a killed run left is older

    def configure(self, more):
        query = os.path.join(self.build, ".cmake/api/v1/query")
        os.makedirs(query, exist_ok=True)
        open(os.path.join(query, "codemodel-v2"), "w").close()
        code, output = self._run(["cmake", "-S", self.tree, "-B", self.build, "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
                                  *FLAGS, *more], 600)
        if code != 0:
            raise SystemExit(f"mutants.py: configuring {self.tree} failed:\n{output}")
        self.targets = self._read_targets()

    def _run(self, command, limit):
        return Process(command, self.tree, {"CCACHE_BASEDIR": self.tree, "CCACHE_NOHASHDIR": "1"}).wait(time.monotonic() + limit)

    def _read_targets(self):
        """{name: (its sources, the names of all that it is built of)} from what CMake says of the build."""
        replies = os.path.join(self.build, ".cmake/api/v1/reply")
        index = json.load(open(max(glob.glob(os.path.join(replies, "index-*.json")))))
        model = json.load(open(os.path.join(replies, next(o["jsonFile"] for o in index["objects"] if o["kind"] == "codemodel"))))
        direct = {}
        for entry in model["configurations"][0]["targets"]:
            target = json.load(open(os.path.join(replies, entry["jsonFile"])))
            direct[target["name"]] = ({source["path"] for source in target.get("sources", ())},
                                      {d["id"].split("::")[0] for d in target.get("dependencies", ())})

        def closure(name, seen):
            for below in direct[name][1] - seen:
                seen.add(below)
                closure(below, seen)
            return seen
        return {name: (sources, closure(name, set())) for name, (sources, _) in direct.items()}

    def tests_of(self, file, room, others, also=()):
        """The tests that may notice a mutant of the file: the room's own, and up to so many others that are built of it, those that are
        built of the least first, or of these those that `also` names."""
        if file.endswith(".py"):
            own, more = self._scripts_of(file, room)
            return own, more[:others]
        holders = {name for name, (sources, _) in self.targets.items() if file in sources}
        programs = [name for name, (_, below) in self.targets.items() if name.endswith("_test") and below & holders]
        own = [name for name in programs if any(s.startswith(f"tests/{room}/") for s in self.targets[name][0])]
        more = sorted(set(programs) - set(own), key=lambda name: (len(self.targets[name][1]), name))
        more = [name for name in more if not also or name in also]
        tests = lambda names: [Test(name, [os.path.join(self.build, "bin", name)], self.build, {}, name, self.parts) for name in names]
        scripts = [test for part in self._scripts_of(file, room) for test in part if others and (not also or test.name in also)]
        return tests(sorted(own)), tests(more[:others]) + scripts

    def _scripts_of(self, file, room):
        """Scripts of the room's tests: those that name the module, and the others."""
        shown = subprocess.run(["ctest", "--test-dir", self.build, "--show-only=json-v1"], capture_output=True, check=True, text=True).stdout
        folder, module, own, more = os.path.join(self.tree, "tests", room) + "/", os.path.basename(file)[:-3].lstrip("_"), [], []
        for test in json.loads(shown)["tests"]:
            script = next((part for part in test.get("command", ()) if part.startswith(folder) and part.endswith(".py")), None)
            if script:
                properties = {p["name"]: p["value"] for p in test.get("properties", ())}
                environment = dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", ()))
                names_it = re.search(rf"\b_?{module}\b", open(script).read()) is not None
                (own if names_it else more).append(Test(test["name"], test["command"], self.build, environment, "", 1))
        return own, more

    def make(self, targets):
        return self._run(["cmake", "--build", self.build, "-j", str(self.jobs), "--target", *targets], 3600)

    def passing(self, tests):
        """Of these tests, those that pass without a mutant, quickest first; each is built and run once."""
        for test in tests:
            if test.name not in self._passes:
                code, output = self.make([test.target] if test.target else PROGRAMS)
                if code != 0:
                    raise SystemExit(f"mutants.py: the tree without a mutant does not compile:\n{output[-4000:]}")
                failed, seconds = self._run_without_a_mutant(test)
                self._passes[test.name] = (not failed, seconds, test.without, test.environment)
                print(f"    {test.name}: {failed or 'passes'}, {seconds:.1f} s without a mutant", file=sys.stderr, flush=True)
            _, seconds, test.without, test.environment = self._passes[test.name]
            test.limit = max(LEAST_LIMIT_S, 6 * seconds)
        return sorted((test for test in tests if self._passes[test.name][0]), key=lambda test: self._passes[test.name][1])

    @staticmethod
    def _run_without_a_mutant(test):
        """(what fails, seconds). Tests that fail on this machine as it is, some that measure time for example, are left out from then on."""
        for _ in range(MOST_LEFT_OUT):
            began = time.monotonic()
            failed = test.run()
            if not failed or not test.target:
                break
            if failed.endswith(LEAK):
                test.environment["LSAN_OPTIONS"] = "detect_leaks=0"
                continue
            print(f"    left out, because it fails without a mutant: {failed}", file=sys.stderr, flush=True)
            test.without.append(failed.split(": ")[-1])
        return failed, time.monotonic() - began

    def try_mutant(self, mutant, tests):
        """(outcome, what noticed it or why it does not count)"""
        path = os.path.join(self.tree, mutant.file)
        with open(path, encoding="utf-8") as source:
            text = source.read()
        try:
            with open(path, "w", encoding="utf-8") as target:
                target.write(mutant.applied(text))
            for test in tests:
                code, output = self.make([test.target] if test.target else PROGRAMS)
                if code != 0:
                    return BROKEN, next((line for line in output.splitlines() if "error:" in line), "?").replace(self.tree + "/", "")
                failed = test.run()
                if failed:
                    return NOTICED, failed
            if mutant.file.endswith(".cpp") and self._same_code(path, text):
                return EQUIVALENT, "the optimising compiler makes the same code of both"
            return SURVIVED, ""
        finally:
            with open(path, "w", encoding="utf-8") as target:
                target.write(text)

    def _same_code(self, path, text):
        """Whether the optimising compiler makes the same of the mutant, which lies at the path, and of the text before it."""
        mutated = self._compiled(path)
        if (path, text) not in self._code:
            with open(path, "w", encoding="utf-8") as target:
                target.write(text)
            self._code[path, text] = self._compiled(path)
        return mutated == self._code[path, text] and mutated != b""

    def _compiled(self, path):
        entry = next(e for e in json.load(open(os.path.join(self.build, "compile_commands.json"))) if e["file"] == path)
        command = re.sub(r"-Xclang -include-pch -Xclang \S+ | -Winvalid-pch|^\S*ccache ", "", entry["command"]).replace(" -O0", " -O2")
        with tempfile.NamedTemporaryFile(suffix=".o") as output:
            subprocess.run(re.sub(r" -o \S+", " -o " + output.name, command), shell=True, cwd=self.build, capture_output=True, check=False)
            return open(output.name, "rb").read()
