"""The command `amem`, also as `python -m amem`: starts jobs under AMem, says what a machine means for it, and reads journals.

    amem run [--] COMMAND [ARGUMENT...]   starts any command, a launcher such as torchrun too, with AMem in it and its children
    amem run --scope shared -- COMMAND    so that all that other libraries share between processes is seen, too (AMEM_SCOPE)
    amem run --scope all -- COMMAND       so that all memory of the program can be paused, under the tag "program"
    amem run --guard -- COMMAND           and stays beside it: a signal reaches a frozen or paused job only after it is back on its GPUs
    amem run --park-on TERM -- COMMAND    likewise; a job that runs is stopped between NCCL's launches before it gets that signal, and stays so
    amem run --proved -- COMMAND          with the settings that free more of NCCL's memory and that `amem doctor --prove` proved here
    amem doctor [--json] [--nccl PATH]    looks at this machine, its settings and its NCCL; exit code 3 if AMem cannot work
    amem doctor --measure [--gpus N]      what NCCL_CUMEM_ENABLE=0 and 1 hold and cost here, by a small job with each; some minutes at most
    amem doctor --prove [--gpus N]        what a pause frees here, kind by kind, and with each setting that frees more; all results compared
    amem demo                             four processes share memory, pause, resume and compare, on the simulator
    amem version

All else is amem-replay, which is installed with this package: `amem help` lists its commands and these. Exit codes are the same:
0 fine, 1 wrong usage, 2 something is missing, 3 a problem was found; of `amem run` those of the command.
"""

import argparse
import difflib
import glob
import importlib.util
import json
import os
import re
import signal
import sys

from . import _calls, _doctor, _guard, _library, _why
from ._jobs import host as hosting
from ._jobs import measure as measuring
from ._jobs import proofs
from ._jobs import prove as proving

USAGE, MISSING, FOUND = 1, 2, 3
MOST_RANKS, MOST_MINUTES = 4096, 24 * 60
RUN_OPTIONS = ("--scope", "--guard", "--park-on", "--proved")
HELP = ("help", "--help", "-h")
MEASURE_SECONDS = 360  # after which `doctor --measure` ends whatever happens; it gives itself less


# Shells hand down what they were started with, or were told by trap; so does systemd (IgnoreSIGPIPE=, which is on unless it says otherwise).
HANDS_SIGNALS_DOWN = ("sh", "bash", "dash", "ash", "busybox", "zsh", "ksh", "mksh", "systemd")


def ignored_by_parent(number):
    """Whether this process has probably started with that signal ignored, which Python has overwritten. Of parents that ignore it for themselves, and
    start others without, nothing can be told."""
    parent = "/proc/%d/" % os.getppid()
    try:
        if os.path.basename(os.readlink(parent + "exe")) not in HANDS_SIGNALS_DOWN:
            return False
        with open(parent + "status") as file:
            return any(line.startswith("SigIgn:") and int(line.split()[1], 16) >> (number - 1) & 1 for line in file)
    except (OSError, ValueError, IndexError):
        return False


def restore_signals():
    """Of what Python ignores for itself. A program that takes the place of this process would go on ignoring them: `yes | head` would never end."""
    for name in ("SIGPIPE", "SIGXFSZ", "SIGXFZ"):
        number = getattr(signal, name, None)
        if number is not None and not ignored_by_parent(number):
            signal.signal(number, signal.SIG_DFL)


def fail(text, code=MISSING):
    print("amem: " + text, file=sys.stderr)
    return code


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.print_usage(sys.stderr)
        self.exit(USAGE, "%s: %s\n" % (self.prog, message))


# ---- run


def problem_of(library):
    """What keeps the library from working; None: nothing does. What it warns of is said."""
    findings = _doctor.library(_doctor.Machine(), library)
    for one in findings:
        if one.level == "warning":
            fail("%s; %s" % (one.text, one.remedy))
    return next((one for one in findings if one.level == "problem"), None)


def proved(environment):
    """The variables that proofs of this machine speak for beside these of the command's, which are said."""
    try:
        about = hosting.Host().describe(None)
    except hosting.CannotProve as error:
        fail("run --proved: %s; nothing experimental is set" % error)
        return {}
    path, version = next(((path, ".".join(map(str, version))) for path, version in nccl_libraries() if version), ("unknown", "unknown"))
    here = proofs.Here([gpu["uuid"] for gpu in about["gpus"]], about["driver"], version, _calls.package_version(), proving.nccl_settings(), about["simulated"], path)
    variables, lines = proofs.chosen(here, environment)
    for line in lines:
        fail("run --proved: " + line)
    return variables


class Refused(Exception):
    """Nothing is started: why, what to do, and the exit code."""

    def __init__(self, text, code=MISSING):
        super().__init__(text)
        self.code = code


class RunOptions:
    """What `amem run` was given: the command, the variables that options set for it, and who stays beside it."""

    def __init__(self, arguments):
        self.variables, self.park_on, self.guard, self.proved = {}, frozenset(), False, False
        words = list(arguments)
        while words and words[0] in RUN_OPTIONS:
            self._take(words.pop(0), words)
        if words[:1] == ["--"]:
            words.pop(0)
        elif words and words[0].startswith("-"):
            near = difflib.get_close_matches(words[0], RUN_OPTIONS, 1)
            raise Refused("run: there is no option %s%s; its options are %s" % (words[0], " (did you mean %s?)" % near[0] if near else "", ", ".join(RUN_OPTIONS)), USAGE)
        if not words:
            raise Refused("run: which command? For example `amem run -- torchrun --nproc-per-node 4 train.py`", USAGE)
        self.command = words

    def _take(self, option, words):
        """One option; its value, if it has one, is taken off the words."""
        if option in ("--guard", "--park-on"):
            self.guard = True
        if option == "--proved":
            self.proved = True
        if option == "--scope":
            scope = words.pop(0) if words else ""
            if scope not in _doctor.SCOPES:
                raise Refused("run: --scope is one of %s" % ", ".join(_doctor.SCOPES), USAGE)
            self.variables = {"AMEM_SCOPE": scope}
        if option == "--park-on":
            try:
                self.park_on |= _guard.signals_named(words.pop(0) if words else "")
            except ValueError as error:
                raise Refused("run: --park-on: %s" % error, USAGE) from error

    def environment(self):
        """Of the command, with AMem in it."""
        if os.environ.get("AMEM_ENABLE") == "0":
            print("amem: AMEM_ENABLE=0, so the command is started without AMem", file=sys.stderr)
            return dict(os.environ)
        library = _library.path()
        if not os.path.exists(library):
            raise Refused("run: %s was not found; set AMEM_LIBRARY to its path, or install the package amem-nccl" % _library.NAME)
        if found := problem_of(library):
            raise Refused("run: %s; nothing was started. %s" % (found.text, found.remedy))
        try:
            proofs_say = proved({**os.environ, **self.variables}) if self.proved else {}
            return {**_library.environment_with(library, os.environ), **proofs_say, **self.variables}
        except OSError as error:
            raise Refused("run: %s cannot be preloaded: %s; nothing was started" % (library, error)) from error


def run(arguments):
    try:
        options = RunOptions(arguments)
        environment = options.environment()
    except Refused as error:
        return fail(str(error), error.code)
    replay_program = _why.find(_library.find()) if options.guard else None
    if options.guard and not replay_program:
        return fail("run --guard: nothing was started, because nothing could bring a frozen job back: %s" % _why.not_found())
    command = options.command
    try:
        if not options.guard:
            restore_signals()
            os.execvpe(command[0], command, environment)
        guard = _guard.Guard(command, environment, replay_program, options.park_on)
    except OSError as error:
        print("amem: cannot start %s: %s" % (command[0], error.strerror), file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    return guard.run()


# ---- doctor


def nccl_version(path):
    """(2, 28, 9) as the library says of itself in its text; None if it does not."""
    try:
        with open(path, "rb") as file:
            found = re.search(rb"NCCL version (\d+)\.(\d+)\.(\d+)", file.read())
    except OSError:
        return None
    return tuple(map(int, found.groups())) if found else None


def nccl_libraries(more=()):
    """(path, version) of each libnccl that this Python would load: of NVIDIA's wheels, and those named."""
    paths = list(more)
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations if spec else None) or []:
        paths += glob.glob(os.path.join(folder, "lib", "libnccl.so.*"))
    return [(path, nccl_version(path)) for path in dict.fromkeys(paths)]


def doctor(arguments):
    parser = Parser(prog="amem doctor", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--nccl", metavar="PATH", action="append", default=[], help="a libnccl.so.2 to look at, too")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--measure", action="store_true", help="how much memory NCCL holds here, and how long it takes, with NCCL_CUMEM_ENABLE=0 and 1")
    one.add_argument("--prove", action="store_true", help="what a pause frees here, and with each setting that frees more, in jobs whose results are compared")
    parser.add_argument("--gpus", metavar="N", type=int, help="of --measure and --prove: how many GPUs, by default all")
    parser.add_argument("--ranks", metavar="N", type=int, help="of --prove: how many ranks, by default one for each GPU; more share GPUs, with NCCL 2.30 or later")
    parser.add_argument("--hosts", metavar="FILE", help="of --prove: hosts that take part, by ssh: lines NAME [slots=N] [python=PATH]")
    parser.add_argument("--minutes", metavar="M", type=float, default=proving.MINUTES, help="of --prove: the most that it takes (%(default)s)")
    options = parser.parse_args(arguments)
    for name, most in (("gpus", MOST_RANKS), ("ranks", MOST_RANKS), ("minutes", MOST_MINUTES)):
        if getattr(options, name) is not None and not 0 < getattr(options, name) <= most:  # nan is neither
            parser.error("--%s is a number above 0, at most %d" % (name, most))
    if missing := [path for path in options.nccl if not os.path.exists(path)]:
        return fail("doctor: %s is not there" % missing[0])
    library = _library.path()
    if options.measure:
        return measure(library, nccl_libraries(options.nccl), options.gpus, options.json)
    if options.prove:
        return prove(library, nccl_libraries(options.nccl), options)
    findings = _doctor.examine(_doctor.Machine(), library, _why.find(library), nccl_libraries(options.nccl))
    problems = sum(finding.level == "problem" for finding in findings)
    if options.json:
        print(json.dumps({"schema": 1, "works": problems == 0, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        for finding in findings:
            print("%-8s %s: %s" % (finding.level, finding.subject, finding.text))
            if finding.remedy:
                print("%-8s   -> %s" % ("", finding.remedy))
        print(_doctor.conclusion(findings))
    return FOUND if problems else 0


def measure(library, libraries, gpus, as_json):
    """`doctor --measure`. Exit code 0 where both settings ran, 3 where one did not, 2 where nothing could be measured."""
    if missing := cannot_start("doctor --measure", library, libraries, MEASURE_SECONDS):
        return missing
    try:
        answer = measuring.measure(library, libraries[0][0], gpus)
    except measuring.CannotMeasure as error:
        return fail("doctor --measure: %s" % error)
    print(json.dumps(answer, indent=1) if as_json else measuring.table(answer))
    return FOUND if any("failure" in one for one in answer["NCCL_CUMEM_ENABLE"].values()) else 0


def cannot_start(command, library, libraries, seconds):
    """0 where a job can be started, which signals and the end of `seconds` then end, too; else the exit code, and the reason is said."""
    if found := problem_of(library):
        return fail("%s: %s. %s" % (command, found.text, found.remedy))
    if not libraries:
        without = next((one.text for one in _doctor.driver(_doctor.Machine()) if one.subject == "GPU"), None)
        return fail("%s: no libnccl was found from this Python; run it with the Python that has PyTorch, or name one: --nccl PATH%s" % (
            command, "; and %s. `amem demo` shows a pause on the simulator" % without if without else ""))
    def end(number, _frame):
        if number == signal.SIGALRM:
            fail("%s: its time is over" % command)
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, end)
    signal.alarm(seconds)
    return 0


def hosts_of(options):
    """Those of --hosts, of torchrun if it started this, or this one: (host, how many ranks)."""
    torchrun = hosting.Torchrun()
    if options.hosts:
        return [(hosting.Host() if hosting.is_here(line.name) else hosting.by_ssh(line), line.ranks or options.ranks)
                for line in hosting.read_hosts(options.hosts)]
    return torchrun.hosts() if torchrun.there else [(hosting.Host(), options.ranks)]


def prove(library, libraries, options):
    """`doctor --prove`. Exit code 0 where all that was tried is proved, 3 where something is not, 2 where nothing could be tried. Of torchrun's
    processes one proves, one on each other host serves it, and the others have nothing to do."""
    torchrun = hosting.Torchrun()
    if torchrun.there and torchrun.rank != 0:
        try:
            if torchrun.local_rank == 0:
                torchrun.serve()
        except hosting.CannotProve as error:
            return fail("doctor --prove: %s" % error)
        return 0
    if missing := cannot_start("doctor --prove", library, libraries, int(60 * options.minutes) + proving.GRACE_SECONDS):
        return missing
    try:
        answer = proving.prove(hosts_of(options), libraries[0][0], options.gpus, options.minutes, lambda text: print("amem: " + text, file=sys.stderr))
    except proving.CannotProve as error:
        return fail("doctor --prove: %s" % error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(json.dumps(answer, indent=1) if options.json else proving.table(answer))
    if proving.failures(answer):
        return FOUND
    return 0 if answer["settings"][1]["outcome"] == proving.PROVED else MISSING


# ---- the rest


def become(program, arguments):
    """Replaces this process by a program that must not be under AMem, and that calls itself amem. Returns only where that fails."""
    if sys.stdout is not None:  # closed, as in `amem ls >&-`
        sys.stdout.flush()
    restore_signals()
    try:
        os.execve(program, ["amem", *arguments], _why.environment())
    except OSError as error:
        return fail("%s cannot be started: %s; install the package amem-nccl for this machine" % (program, error.strerror))


def replay(arguments):
    program = _why.find(_library.find())
    if not program:
        return fail("%s: %s" % ((arguments or ["help"])[0], _why.not_found()))
    return become(program, arguments)


def demo(arguments):
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "amem-demo")
    if not os.path.exists(program):
        return fail("demo: it is a part of the wheel; in the source tree: ./run demo")
    return become(program, arguments)


def version(_arguments):
    try:
        print(_calls.package_version())
    except _calls.AmemError as error:
        return fail("version: %s" % error)
    return 0


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    own = {"run": run, "doctor": doctor, "demo": demo, "version": version, "--version": version, "-V": version}
    name, rest = (arguments or [""])[0], arguments[1:]
    if name in HELP and rest and rest[0] in own:  # amem help doctor
        name, rest = rest[0], ["--help"]
    if name != "run":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `amem doctor | head` ends quietly
    if name not in own:
        return replay(arguments)
    if name != "doctor" and rest[:1] in (["--help"], ["-h"]):
        print(__doc__.strip())
        return 0
    return own[name](rest)
