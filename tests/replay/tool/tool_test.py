#!/usr/bin/env python3
"""amem-replay for programs and for shells: JSON against its schemas, the Python module, collecting from hosts, options, the manual
page, completions, and what is installed. It reads the golden journals.

    tool_test.py AMEM_REPLAY BUILD_DIRECTORY [unittest arguments]
"""
import glob
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "../../.."))
GOLDEN = os.path.join(ROOT, "tests/replay/golden")
TOOL = ""
BUILD = ""

sys.path.insert(0, HERE)
sys.dont_write_bytecode = True
import json_schema  # noqa: E402


def golden(name):
    return os.path.join(GOLDEN, name + ".amem")


FAST_CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec* now) {
  const int result = (int)syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_MONOTONIC) now->tv_sec = now->tv_sec * 100 + now->tv_nsec / 10000000;
  return result;
}
"""

OOM, HEALTHY = golden("sim_out_of_memory"), golden("sim_healthy")


def run(*arguments, stdin=subprocess.DEVNULL, **more):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AMEM_")}
    environment.update(TZ="UTC", **more)
    return subprocess.run([TOOL, *arguments], capture_output=True, text=True, env=environment, stdin=stdin, timeout=120, check=False)


def without_commands(text):
    """Of `why`: without the command to paste, which names the place of the journals."""
    return re.sub(r"^  amem-replay .*\n", "", text, flags=re.M).replace("), and what is around it:", ")")


class Scratch(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.mkdtemp(prefix="amem-tool-")
        self.addCleanup(shutil.rmtree, self.scratch)

    def path(self, *names):
        return os.path.join(self.scratch, *names)

    def unpack(self, pack, *names):
        self.assertEqual(run("pack", "-x", pack, "-o", self.path(*names)).returncode, 0)
        return self.path(*names)


class Schemas(Scratch):
    """Every command that has --json, on every golden journal."""

    COMMANDS = {"why": "why", "ls": "session", "ls -v": "session", "ls --live": "control", "log": "event",
                "log -f": "event", "state": "state", "state --to=#9": "diff", "verify": "verify", "replay": "run", "top": "top",
                "top --by peer": "refs", "watch": "watch", "pause": "control", "park": "control", "resume": "control", "freeze": "freeze", "thaw": "freeze"}

    @classmethod
    def setUpClass(cls):
        cls.schemas = {os.path.basename(p).removesuffix(".schema.json"): json_schema.Schema(p) for p in glob.glob(BUILD + "/share/amem/schemas/*.json")}

    def check(self, record, name):
        self.assertEqual(record["schema"], "amem-replay/" + name)
        self.assertEqual(self.schemas[name].problems(record), [], json.dumps(record)[:2000])

    def test_every_command_with_json_has_a_schema_and_none_is_left_over(self):
        commands = re.findall(r"^  ([a-z-]+) ", run("--help").stdout, re.M)
        self.assertEqual({c for c in commands if "--json" in run(c, "--help").stdout}, {c.split()[0] for c in self.COMMANDS})
        self.assertEqual({*self.COMMANDS.values(), "error", "proof"}, set(self.schemas))  # proof: of `amem doctor --prove`, and tested there

    def test_what_commands_print_about_golden_journals(self):
        for pack in sorted(glob.glob(GOLDEN + "/*.amem") + glob.glob(GOLDEN + "/gpu/*.amem")):
            for command in ("why", "ls", "ls -v", "verify", "replay", "top --by peer"):
                answer = json.loads(run(*command.split(), "--json", pack).stdout)
                for record in answer if isinstance(answer, list) else [answer]:
                    self.check(record, self.COMMANDS[command])
            for by in ("site", "communicator", "tag", "card", "size", "age"):
                for record in json.loads(run("top", "--json", "--by", by, pack).stdout):
                    self.check(record, "top")

    def test_events_of_every_kind(self):
        with open(os.path.join(ROOT, "tests/replay/job/event_json_samples.h"), encoding="utf-8") as samples:
            events = [json.loads(text) for text in re.findall(r'R"json\((.*?)\)json"', samples.read(), re.S)]
        self.assertGreater(len(events), 50)
        described = {part["if"]["properties"]["kind"]["const"] for part in self.schemas["event"].root["allOf"]}
        known = re.search(r"the kinds are (.*)", run("log", "--kind", "nonsense", OOM).stderr).group(1).split(", ")
        self.assertEqual(described, {k.split(";")[0] for k in known})
        for event in events:
            self.check({"schema": "amem-replay/event", "version": 1, "journal": "00000000000000aa", "session": "00000000000000aa", **event},
                       "event")
        for options in ([], ["--merge", "--wall"]):
            lines = run("log", "--json", *options, OOM, golden("standin_killed_in_import")).stdout.splitlines()
            self.assertGreater(len(lines), 300)
            for line in lines:
                self.check(json.loads(line), "event")

    def test_states_and_differences(self):
        journals = self.unpack(golden("sim_healthy_in_slabs"), "journals")
        sessions = [s["session"] for s in json.loads(run("ls", "--json", journals).stdout)]
        for at in ("20", "60", "100", "140"):
            self.check(json.loads(run("state", "--json", "--at=#" + at, "--rank", sessions[0], journals).stdout), "state")
        directory = os.path.join(journals, sessions[0])
        self.check(json.loads(run("state", "--json", directory, "--at=#20", "--to=#100").stdout), "diff")
        watched = run("watch", "--once", "--json", journals)
        self.assertEqual(len(json.loads(watched.stdout)["sessions"]), 4, watched.stderr)
        self.check(json.loads(watched.stdout), "watch")
        tailed = run("log", "-f", "--json", "--last", "5", "--interval", "1", directory)
        self.assertEqual(len(tailed.stdout.splitlines()), 5, tailed.stderr)
        self.check(json.loads(tailed.stdout.splitlines()[0]), "event")

    def test_errors_are_json_too(self):
        nowhere = [[*command.split(), "--json", "/nowhere"] for command in self.COMMANDS]
        wrong = [["why", "--json", "--al"], ["nonsense", "--json"], *([c, "--json"] for c in ("pack", "report"))]
        for arguments, code in [(a, 2) for a in nowhere] + [(a, 1) for a in wrong]:
            ran = run(*arguments)
            self.assertEqual(ran.returncode, code, arguments)
            error = json.loads(ran.stdout)
            self.check(error, "error")
            self.assertEqual((error["command"], error["exit"]), (arguments[0], code))
            self.assertIn(error["errors"][0], ran.stderr)

    def test_a_wrong_record_is_found(self):
        verdict = json.loads(run("why", "--json", OOM).stdout)
        for change in ({"healthy": "no"}, {"version": 2}, {"schema": "amem-replay/info"}, {"evidence": [{}]}):
            self.assertNotEqual(self.schemas["why"].problems({**verdict, **change}), [], change)
        del verdict["kind"]
        self.assertNotEqual(self.schemas["why"].problems(verdict), [])
        words = {"control": ("phase", {"silent", "running", "held", "arrived", "pausing", "paused", "resuming", "failed"}),
                 "freeze": ("step", {"checks", "rest", "pause", "lock", "checkpoint", "restore", "unlock", "resume"})}
        for name, (key, known) in words.items():
            items = self.schemas[name].root["properties"]["ranks" if name == "control" else "times"]["items"]
            self.assertEqual(set(items["properties"][key]["enum"]), known)
        freeze = {"schema": "amem-replay/freeze", "version": 1, "ok": True, "outcome": "frozen", "message": "", "processes": [], "times": [], "gpus": [], "lost": [], "notes": []}
        self.check(freeze, "freeze")
        for change in ({"outcome": "thawed"}, {"another": 1}, {"times": [{"step": "begin", "ms": 1}]}, {"times": [{"step": "rest", "ms": -1}]}):
            self.assertNotEqual(self.schemas["freeze"].problems({**freeze, **change}), [], change)


class Quotes(unittest.TestCase):
    """What a README says that a command prints about journals of the tree is what it prints; " ..." cuts a line short, "..." the rest."""

    def test_readmes_quote_what_is_printed(self):
        quotes = []
        for readme in ("README.md", "replay/README.md"):
            with open(os.path.join(ROOT, readme), encoding="utf-8") as file:
                blocks = re.findall(r"^```\n\$ amem(?:-replay)? (.*)\n((?s:.*?))^```$", file.read(), re.M)
            quotes += [(readme, command.split(), text) for command, text in blocks if "tests/replay/golden/" in command]
        self.assertEqual([(readme, command[0]) for readme, command, _ in quotes], [("README.md", "why"), ("replay/README.md", "why")])
        for readme, command, text in quotes:
            ran = run(command[0], *(os.path.join(ROOT, word) for word in command[1:]))
            quote, output = text.splitlines(), ran.stdout.splitlines()
            if quote[-1] == "...":
                quote, output = quote[:-1], output[:len(quote) - 1]
            for quoted, printed in zip(quote, output, strict=True):
                if quoted.endswith(" ..."):
                    self.assertTrue(printed.startswith(quoted.removesuffix("...")), f"{readme}: {quoted}")
                else:
                    self.assertEqual(quoted, printed, readme)


class Module(Scratch):
    """amem.journal, in this process, without libamem_nccl.so."""

    @classmethod
    def setUpClass(cls):
        os.environ["AMEM_REPLAY"] = TOOL
        os.environ.pop("AMEM_LIBRARY", None)
        sys.path.insert(0, os.path.join(ROOT, "ncclpatch/python"))
        import amem.journal  # pylint: disable=import-outside-toplevel
        cls.journal = amem.journal

    def test_a_job_has_sessions_events_states_and_a_verdict(self):
        job = self.journal.open(OOM)
        self.assertEqual([s.rank for s in job.sessions], [0, 1, 2, 3])
        self.assertEqual({s.host for s in job.sessions}, {"host-1"})
        verdict = job.verdict()
        self.assertEqual((verdict.healthy, verdict.kind, verdict.rank), (False, "out-of-memory", 2))
        self.assertIn(verdict.headline, str(verdict))
        failed = list(job.session(2).events(kinds=["step-failed"]))
        self.assertEqual(len(failed), 1)
        self.assertEqual(failed[0].kind, "step-failed")
        self.assertGreater(failed[0].seconds, 1.5e9)
        state = job.session(2).state(at=failed[0].seq)
        self.assertEqual(state["lifecycle"], "resuming")
        self.assertTrue(job.verify()["ok"])
        self.assertEqual(len(job.references()["references"]), 4)
        self.assertGreater(job.top("size")[0]["bytes"], 0)

    def test_events_of_all_come_in_order_and_filtered(self):
        job = self.journal.open(HEALTHY)
        events = list(job.events())
        self.assertEqual([e.wall_ns for e in events], sorted(e.wall_ns for e in events))
        self.assertEqual(len(events), sum(s.events_by_kind[k] for s in job.sessions for k in s.events_by_kind))
        self.assertEqual({e.journal_rank for e in job.events(ranks=[1, 3])}, {1, 3})
        done = list(job.events(grep="^pause [0-9]+ done"))
        self.assertTrue(done and all(e.kind == "cycle-done" for e in done))
        self.assertEqual(len(list(job.events(last=7))), 7)
        own = list(job.session(1).events())
        self.assertEqual([e.seq for e in own], list(range(1, len(own) + 1)))

    def test_an_iterator_that_is_dropped_leaves_no_process(self):
        events = self.journal.open(HEALTHY).events()
        next(events)
        events.close()
        self.assertRaises(StopIteration, next, events)

    def test_a_reader_may_take_its_time(self):
        """The limits of a pack count processor time. Here a second of the clock is a hundredth of one."""
        clock, faster = self.path("clock.so"), None
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", clock], input=FAST_CLOCK, text=True, check=True)
        for faster in ({}, {"LD_PRELOAD": clock}):
            with subprocess.Popen([TOOL, "log", "--json", "--merge", HEALTHY], env={**os.environ, **faster}, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tool:
                first = tool.stdout.readline()
                time.sleep(0.5 if faster else 0)
                lines, errors = [first, *tool.stdout], tool.stderr.read()
            self.assertEqual((tool.returncode, errors), (0, b""))
            self.assertEqual(len(lines), len(list(self.journal.open(HEALTHY).events())))

    def test_a_line_that_is_cut_is_an_error_or_a_warning_and_the_events_before_it_are_there(self):
        job, program = self.journal.open(HEALTHY), self.path("amem-replay")
        for end, raised, said in (("echo 'amem-replay: stopped after 10 s of processor time' >&2; exit 2", self.journal.ReadWarning, "stopped after"),
                                  ("kill -9 $$", self.journal.JournalError, "ended with -9"), ("exit 0", self.journal.JournalError, "within a line")):
            with open(program + ".new", "w", encoding="utf-8") as file:
                file.write("#!/bin/bash\n'%s' \"$@\" | head -c 4000\n%s\n" % (TOOL, end))
            os.chmod(program + ".new", 0o755)
            os.replace(program + ".new", program)
            events = []
            with self.subTest(end), mock.patch.dict(os.environ, AMEM_REPLAY=program), warnings.catch_warnings():
                warnings.simplefilter("error")
                with self.assertRaisesRegex(raised, said):
                    for event in job.events():
                        events.append(event)
                self.assertEqual([event.kind for event in events[:2]], ["session-opened"] * 2)

    def test_errors_say_what_is_wrong(self):
        with self.assertRaisesRegex(self.journal.JournalError, "nowhere") as raised:
            self.journal.open("/nowhere")
        self.assertEqual(raised.exception.code, 2)
        job = self.journal.open(HEALTHY)
        with self.assertRaisesRegex(self.journal.JournalError, "no session of rank 9"):
            job.session(9)
        with self.assertRaisesRegex(self.journal.JournalError, "--from"):
            list(job.events(since="the day before yesterday"))
        with self.assertRaises(TypeError):
            job.events(colour="blue")

    def test_what_cannot_be_read_is_a_warning_and_the_rest_is_used(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job = self.journal.open(HEALTHY, "/nowhere")
        self.assertEqual(len(job.sessions), 4)
        self.assertTrue(any(issubclass(w.category, self.journal.ReadWarning) and "nowhere" in str(w.message) for w in caught))

    def test_the_package_without_its_library_says_so_when_it_is_used(self):
        script = "import amem, amem.journal; amem.journal.open(%r)\ntry: amem.pause()\nexcept amem.AmemError as e: print(e)" % HEALTHY
        with tempfile.TemporaryDirectory() as elsewhere:  # beside a build it would find that build's library
            shutil.copytree(os.path.join(ROOT, "ncclpatch/python/amem"), os.path.join(elsewhere, "amem"))
            environment = {**os.environ, "PYTHONPATH": elsewhere, "PYTHONDONTWRITEBYTECODE": "1"}
            ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertIn("AMEM_LIBRARY", ran.stdout)


class Places(Scratch):
    def test_without_a_directory_every_command_takes_the_default(self):
        journals = self.unpack(OOM, "journals")
        for command in ("why", "ls", "ls -v", "log", "verify", "top --by peer", "top"):
            words = command.split()
            self.assertEqual(without_commands(run(*words, AMEM_JOURNAL_DIR=journals).stdout), without_commands(run(*words, journals).stdout), command)
        self.assertEqual(run("report", "--perfetto", "-o", self.path("t"), AMEM_JOURNAL_DIR=journals).returncode, 0)
        self.assertEqual(run("pack", "-o", self.path("p"), AMEM_JOURNAL_DIR=journals).returncode, 0)
        self.assertEqual(run("report", "-o", self.path("r"), AMEM_JOURNAL_DIR=journals).returncode, 0)

    def test_parents_of_directories_and_of_packs_are_searched(self):
        journals = self.unpack(OOM, "all")
        for i, session in enumerate(sorted(os.listdir(journals))):
            os.makedirs(self.path("hosts", f"host{i}", "journal"))
            os.rename(os.path.join(journals, session), self.path("hosts", f"host{i}", "journal", session))
        verdict = json.loads(run("why", "--json", self.path("hosts")).stdout)
        self.assertEqual((verdict["kind"], verdict["rank"], verdict["totals"]["journals"]), ("out-of-memory", 2, 4))
        os.makedirs(self.path("packs"))
        for i in range(4):
            run("pack", self.path("hosts", f"host{i}"), "-o", self.path("packs", f"{i}.amem"))
        self.assertEqual(json.loads(run("why", "--json", self.path("packs")).stdout)["rank"], 2)
        self.assertIn("no session under", run("why", self.path()[:-1] and ROOT + "/journal/base").stderr)

    def test_a_file_of_a_session_stands_for_it(self):
        journals = self.unpack(HEALTHY, "all")
        session = os.path.join(journals, sorted(os.listdir(journals))[0])
        self.assertEqual(run("ls", "-v", session + "/data.mdb").stdout, run("ls", "-v", session).stdout)

    def test_a_pack_on_standard_input(self):
        with open(OOM, "rb") as pack:
            self.assertEqual(run("why", "-", stdin=pack).stdout, without_commands(run("why", OOM).stdout))
        with open(__file__, "rb") as other:
            ran = run("why", "-", stdin=other)
        self.assertEqual(ran.returncode, 2)
        self.assertIn("is not what `amem-replay pack` writes", ran.stderr)


class Options(Scratch):
    def wrong(self, *arguments):
        ran = run(*arguments)
        self.assertEqual((ran.returncode, ran.stdout), (1, ""), arguments)
        return ran.stderr

    def test_typos_are_answered_with_what_was_meant(self):
        for arguments, meant in ((["wyh"], "why"), (["reprot"], "report"), (["verfy"], "verify"), (["--verison"], "--version"),
                                 (["why", "--jsno"], "--json"), (["log", "--since", "5 s ago"], "--from"), (["log", "--allocaton", "3"], "--allocation"),
                                 (["top", "--by", "sizes"], "size")):
            self.assertIn(f"did you mean {meant}?", self.wrong(*arguments))
        self.assertNotIn("did you mean", self.wrong("frobnicate"))

    def test_nonsense_is_refused(self):
        for arguments, says in (
                (["log", "--last", "-5", OOM], "give a whole number"), (["log", "--from=#100", "--to=#50", OOM], "behind --to #50"),
                (["log", "--from", "13", "--to", "12", OOM], "behind --to 12"), (["log", "--from", "-3", OOM], "is not a position"),
                (["log", "--from", "5 parsecs ago", OOM], "10 min ago"), (["log", "--rank", "x", OOM], "is not a rank"),
                (["log", "--grep", "(", OOM], "regular expression"), (["replay", "--memory", "2=34", OOM], "with a unit"),
                (["replay", "--memory", "2=-3GiB", OOM], "with a unit"), (["top", "--limit", "0", OOM], "from 1 on"),
                (["log", "--interval", "99999999999", OOM], "from 1 to 4294967295"), (["log", "--last"], "needs a value (N)"),
                (["log", "--last", "3", "--last", "4", OOM], "given twice"), (["why", "--json=yes", OOM], "takes no value"),
                (["pack", "-x"], "give one pack"), (["--completion", "tcsh"], "give bash, zsh or fish"), (["help", "tail"], "log -f"),
                (["why", "--color", "blue", OOM], "none of auto, always, never"), (["log", "--rank=", OOM], "--rank needs a value (RANK)"),
                (["log", "--last", "--wall", OOM], "--last needs a value (N)"), (["log", OOM, "--last="], "needs a value"),
                (["pause", "--at-safepoint", "--between-launches"], "not both"), (["freeze", "--between-launches", "--at-safepoint"], "not both"),
                (["why", ""], "TARGET: an empty name"), (["log", "--", OOM, ""], "TARGET: an empty name"), (["thaw", ""], "JOB: an empty name"),
                (["why", "-x", OOM], "has no option -x"), (["report", "--from", "1", OOM], "are for --perfetto")):
            self.assertIn(says, self.wrong(*arguments))

    def test_why_a_journal_could_not_be_written_is_in_headline_and_remedy(self):
        said = run("why", os.path.join(GOLDEN, "sim_broken.amem")).stdout
        self.assertIn("No space left on device", said.splitlines()[0])
        remedy = " ".join(said[said.index("To do: "):].split("\n\n")[0].split())
        self.assertIn("remove the cause (append event: write to the disk: No space left on device)", remedy)
        self.assertNotIn("usually", remedy)

    def test_numbers_and_their_units_stay_on_one_line(self):
        text = run("why", os.path.join(GOLDEN, "gpu/golden-out-of-memory-2gpus.amem")).stdout
        self.assertIn("146 591 680 KiB", text)
        self.assertNotRegex(text, r"\d\n\d{3}\b|\d\n[KMG]iB")

    def test_help_and_files_with_odd_names(self):
        self.assertIn("Usage: amem-replay state [OPTIONS] [TARGET...]", run("state", "-h").stdout)
        odd = self.path("--json")
        shutil.copy(HEALTHY, odd)
        self.assertEqual(subprocess.run([TOOL, "why", "--", "--json"], cwd=self.scratch, capture_output=True, check=False).returncode, 0)

    def test_a_rank_may_be_named_by_how_its_sessions_id_begins(self):
        pack = os.path.join(GOLDEN, "gpu/golden-out-of-memory-2gpus.amem")
        whole = run("log", "--rank", "9dfe438cfcac81e8", pack)
        self.assertNotIn(whole.stdout, ("", run("log", pack).stdout))
        self.assertEqual(run("log", "--rank", "9dfe4", pack).stdout, whole.stdout)
        self.assertIn("is not a rank", self.wrong("log", "--rank", "9df", pack))

    def test_options_in_every_way_of_writing_them(self):
        last = run("log", "--last", "2", OOM).stdout
        self.assertNotEqual(last, "")
        for arguments in (["--last=2", OOM], [OOM, "--last", "2"], ["--last=2", "--wall", OOM, "--rank=2,3", "--rank", "0"]):
            self.assertEqual(run("log", *arguments).returncode, 0, arguments)
        self.assertEqual(run("log", OOM, "--last=2").stdout, last)
        for arguments in (["-o", self.path("a")], ["-o" + self.path("b")], ["--output=" + self.path("c")]):
            self.assertEqual(run("pack", OOM, *arguments).returncode, 0, arguments)
        self.assertEqual(sorted(os.listdir(self.scratch)), ["a", "b", "c"])
        bracket = self.path("[one,two]")
        shutil.copy(OOM, bracket)
        self.assertEqual(subprocess.run([TOOL, "why", "[one,two]"], cwd=self.scratch, capture_output=True, check=False).returncode,
                         run("why", OOM).returncode, "a name in brackets is no list")
        self.assertIn("Usage:", run("log", "--last", "3", "--nonsense", "-h").stdout)

    def test_colours_only_where_they_are_wanted(self):
        self.assertNotIn("\x1b", run("why", OOM).stdout)
        self.assertIn("\x1b[", run("ls", "--color", "always", OOM).stdout)

    def on_terminal(self, *arguments, columns=60, **more):
        """What a terminal of so many columns gets to see."""
        ours, theirs = pty.openpty()
        import fcntl  # pylint: disable=import-outside-toplevel
        import struct  # pylint: disable=import-outside-toplevel
        import termios  # pylint: disable=import-outside-toplevel
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AMEM_") and k not in ("NO_COLOR", "PAGER")}
        process = subprocess.Popen([TOOL, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm", **more})
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            seen += part
        process.wait()
        os.close(ours)
        return seen.decode().replace("\r\n", "\n")

    def test_a_terminal_has_its_width_colours_and_a_pager(self):
        plain = self.on_terminal("why", OOM, PAGER="")
        summary = plain.split("\n\n")[1]
        self.assertLessEqual(max(len(line) for line in summary.splitlines()), 60)
        self.assertIn("\x1b[", self.on_terminal("ls", OOM, PAGER=""))
        self.assertNotIn("\x1b[", self.on_terminal("ls", OOM, PAGER="", NO_COLOR="1"))
        self.assertIn("paged:", self.on_terminal("ls", HEALTHY, PAGER="sed s/^/paged:/"))
        self.assertNotIn("paged:", self.on_terminal("log", "-f", self.unpack(HEALTHY, "all"), "--rank", "0", PAGER="sed s/^/paged:/"))
        self.assertNotIn("paged:", self.on_terminal("ls", "--no-pager", HEALTHY, PAGER="sed s/^/paged:/"))
        self.assertNotIn("paged:", run("ls", HEALTHY, PAGER="sed s/^/paged:/").stdout)


class Log(Scratch):
    def test_merged_it_is_in_order_of_time_with_ranks(self):
        lines = run("log", "--merge", "--wall", HEALTHY).stdout.splitlines()
        self.assertEqual({line.split("  ")[0].strip() for line in lines}, {"rank 0", "rank 1", "rank 2", "rank 3"})
        times = [re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}", line).group() for line in lines]
        self.assertEqual(times, sorted(times))
        self.assertEqual(len(lines), sum(not line.startswith("#") for line in run("log", HEALTHY).stdout.splitlines()))
        self.assertEqual(lines[-9:], run("log", "--merge", "--wall", "--last", "9", HEALTHY).stdout.splitlines())

    def test_ranks_patterns_and_times(self):
        self.assertEqual(run("log", "--rank", "2", "--grep", "^resume .* failed", OOM).stdout.count("\n"), 1)
        self.assertIn("no session here has such a rank", run("log", "--rank", "9", OOM).stderr)
        self.assertEqual(run("log", "--from", "10 min ago", OOM).stdout.count("event"), 0)
        whole = run("log", "--rank", "1", "--wall", OOM).stdout.splitlines()
        middle = re.search(r"\d{4}\S* \S+", whole[len(whole) // 2]).group()
        later = run("log", "--rank", "1", "--wall", "--from", middle, OOM).stdout.splitlines()
        self.assertTrue(0 < len(later) < len(whole))
        self.assertEqual(later, whole[-len(later):])

    def test_top_and_ls_agree_on_what_is_held(self):
        pack = os.path.join(GOLDEN, "gpu/golden-killed-2gpus.amem")
        held = sum(s["holdings"]["own_device_resident_bytes"] for s in json.loads(run("ls", "--json", pack).stdout))
        used = sum(group["backed_bytes"] for group in json.loads(run("top", "--json", pack).stdout))
        self.assertLess(used, held)
        self.assertIn(f"{held >> 20} MiB held on devices in all, as `amem-replay ls` says: {(held - used) >> 20} MiB of that", run("top", pack).stdout)


class Described(Scratch):
    """What is made from the descriptions of the options has all of them."""

    @classmethod
    def setUpClass(cls):
        cls.commands = {}
        for name in re.findall(r"^  ([a-z-]+) ", run("--help").stdout, re.M):
            text = run(name, "--help").stdout.split("Examples:")[0]
            cls.commands[name] = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", text, re.M)) - {"--help"}
        assert len(cls.commands) == 15 and all(cls.commands.values())

    def sections(self, text, pattern):
        found = list(re.finditer(pattern, text, re.M))
        ends = [m.start() for m in found[1:]] + [len(text)]
        return {m.group(1): text[m.start():end] for m, end in zip(found, ends)}

    def test_the_manual_page(self):
        page = run("--man").stdout
        common = page.split(".SH OPTIONS OF EVERY COMMAND")[1].replace("\\-", "-")
        sections = self.sections(page.replace("\\-", "-"), r"^\.SH ([a-z]+)$")
        self.assertEqual(set(sections), set(self.commands))
        for command, options in self.commands.items():
            for option in options:
                self.assertTrue(f" {option} " in sections[command] or f" {option} " in common, (command, option))
        broken = [len(line.rstrip()) for line in page.replace("\\-", "-").splitlines() if line.startswith(26 * " ")]
        self.assertIn(max(broken, default=0), range(60, 77), "lines of help are as wide as a terminal that shows them indented")
        if shutil.which("groff"):
            checked = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=page, capture_output=True, text=True, check=False)
            self.assertEqual((checked.returncode, checked.stderr), (0, ""))

    def test_the_completions(self):
        self.assertEqual({line.split("\t")[0] for line in run("--complete", "").stdout.splitlines()}, {*self.commands, "help"})
        for command, options in self.commands.items():
            self.assertLessEqual(options, {line.split("\t")[0] for line in run("--complete", command, "-").stdout.splitlines()}, command)
        self.assertEqual(run("--complete", "why", "").stdout, "", "the names of files are the shell's")

    def test_shells_take_the_completions(self):
        for shell in ("bash", "zsh", "fish"):
            if shutil.which(shell):
                with open(self.path(shell), "w", encoding="utf-8") as file:
                    file.write(run("--completion", shell).stdout)
                checked = subprocess.run([shell, "-n", self.path(shell)], capture_output=True, text=True, check=False)
                self.assertEqual((checked.returncode, checked.stderr), (0, ""), shell)


class Install(Scratch):
    def test_cmake_installs_the_program_its_manual_completions_and_schemas(self):
        for component in ("tool", "pages"):
            ran = subprocess.run(["cmake", "--install", BUILD, "--prefix", self.path("usr"), "--component", component],
                                 capture_output=True, text=True, check=False)
            self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
        for path, word in (("share/man/man1/amem.1", ".TH amem 1"), ("share/bash-completion/completions/amem", "-F _amem amem"),
                           ("share/zsh/site-functions/_amem", "#compdef amem\n"), ("share/fish/vendor_completions.d/amem.fish", "complete -c amem "),
                           ("share/man/man1/amem-replay.1", ".TH amem-replay"), ("share/bash-completion/completions/amem-replay", "complete -o"),
                           ("share/zsh/site-functions/_amem-replay", "#compdef amem-replay"), ("share/amem/schemas/why.schema.json", "$schema"),
                           ("share/fish/vendor_completions.d/amem-replay.fish", "complete -c amem-replay")):
            with open(self.path("usr", path), encoding="utf-8") as file:
                self.assertIn(word, file.read())
        version = subprocess.run([self.path("usr/bin/amem-replay"), "--version"], capture_output=True, text=True, check=False)
        self.assertRegex(version.stdout, r"^amem-replay \d")


if __name__ == "__main__":
    TOOL, BUILD = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
