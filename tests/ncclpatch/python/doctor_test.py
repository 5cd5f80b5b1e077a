"""`amem doctor` on machines that are broken in one way each: that is named, with its remedy, and nothing else is called a problem."""
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

os.environ.pop("LD_PRELOAD", None)
PACKAGE = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../ncclpatch/python"))
sys.path.insert(0, PACKAGE)
sys.dont_write_bytecode = True
import amem_plugins as _autoload  # noqa: E402
from amem import _command, _doctor, _library  # noqa: E402

LIBRARY, REPLAY = "/opt/amem/libamem_nccl.so", "/opt/amem/amem-replay"
NCCL = [("/site/nvidia/nccl/lib/libnccl.so.2", (2, 28, 9))]
DEFAULT = "/tmp/amem-%d/journal" % os.getuid()
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue\n"


class FakeMachine:
    """A machine on which everything is well, but for what the test changes."""

    def __init__(self):
        self.environment = {"LD_PRELOAD": LIBRARY, "NCCL_NVLS_ENABLE": "0", "AMEM_JOURNAL_DIR": "/data/journal", "AMEM_SOCKET_DIR": "/data/s"}
        self.files = {"/proc/driver/nvidia/version": VERSION, "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  200000000 kB\n"}
        self.there = {LIBRARY, REPLAY, "/dev/nvidia0", "/dev/nvidia1"}
        self.answers = {"/bin/true": (0, "", ""), REPLAY: (0, "amem-replay 0.1.0\n", "")}
        self.may_open = 65536
        self.free = {"/dev/shm": 1 << 30, "/data/journal": 1 << 40}
        self.not_writable = {}
        self.no_memfd = ""

    def variable(self, name):
        return self.environment.get(name, "")

    def read(self, path):
        return self.files.get(path, "")

    def exists(self, path):
        return path in self.there

    def find(self, pattern):
        stem = pattern.split("[")[0].split("*")[0]
        return sorted(path for path in self.there if path.startswith(stem) and (not stem.endswith("nvidia") or path[-1].isdigit()))

    def run(self, command, environment):
        return self.answers[command[0]]

    def descriptors(self):
        return self.may_open

    def free_bytes(self, directory):
        return self.free.get(directory)

    def why_not_writable(self, directory, sockets=False):
        return self.not_writable.get(directory, "")

    def why_no_memfd(self):
        return self.no_memfd


def examined(change=None, libraries=NCCL, library=LIBRARY, replay=REPLAY):
    machine = FakeMachine()
    if change:
        change(machine)
    return _doctor.examine(machine, library, replay, libraries)


def environment(**variables):
    return lambda machine: machine.environment.update(variables)


def preload_says(text):
    return lambda machine: machine.answers.update({"/bin/true": (0, "", text)})


# name: (what is changed, level, words of the text, words of the remedy)
BROKEN = {
    "the library is not there": (lambda m: (m.there.discard(LIBRARY), m.environment.pop("LD_PRELOAD")), "problem", "not found", "AMEM_LIBRARY"),
    "the C library is too old": (preload_says("ERROR: ld.so: %s: version `GLIBC_2.34' not found\n" % LIBRARY), "problem", "GLIBC_2.34", "newer image"),
    "the library is for another kind of CPU": (preload_says("ERROR: ld.so: object '%s' from LD_PRELOAD cannot be preloaded (wrong ELF class): ignored.\n" % LIBRARY),
                                               "problem", "wrong ELF class", "kind of CPU"),
    "a process under AMem crashes": (lambda m: m.answers.update({"/bin/true": (-11, "", "")}), "problem", "-11", "report"),
    "a setting is not understood": (preload_says("AMem: AMEM_LAYOUT=slap is not understood; known: slab, direct\n"), "problem", "AMEM_LAYOUT=slap", "correct"),
    "a variable is none of AMem's": (preload_says("[amem 7] info AMEM_LAYUOT is set, but AMem has no such variable; did you mean AMEM_LAYOUT?\n"),
                                     "warning", "did you mean AMEM_LAYOUT?", "goes on without it"),
    "amem-replay does not run": (lambda m: m.answers.update({REPLAY: (127, "", "libzstd.so.1: cannot open")}), "warning", "libzstd", "amem-nccl"),
    "AMem is switched off": (environment(AMEM_ENABLE="0"), "problem", "switched off", "unset AMEM_ENABLE"),
    "an NCCL is preloaded": (environment(LD_PRELOAD="/opt/libnccl.so.2:" + LIBRARY), "problem", "libnccl.so.2", "take it out"),
    "the preload names what is gone": (environment(LD_PRELOAD="/old/libamem_nccl.so"), "problem", "/old/libamem_nccl.so", "amem run"),
    "a framework overwrote the preload": (environment(LD_PRELOAD="", AMEM_ENABLE="1"), "note", "attach by themselves", "amem run"),
    "without the preload others are not seen": (environment(LD_PRELOAD="", AMEM_ENABLE="1"), "note", "a freeze only warns", "AMEM_SCOPE=shared"),
    "another preload is not there": (environment(LD_PRELOAD=LIBRARY + ":/gone/other.so"), "warning", "/gone/other.so", "correct LD_PRELOAD"),
    "no GPU": (lambda m: (m.files.pop("/proc/driver/nvidia/version"), m.there.difference_update({"/dev/nvidia0", "/dev/nvidia1"})), "note", "no NVIDIA GPU", "--gpus"),
    "the container has no GPU": (lambda m: m.there.difference_update({"/dev/nvidia0", "/dev/nvidia1"}), "problem", "no GPU is visible", "--gpus"),
    "the driver is old": (lambda m: m.files.update({"/proc/driver/nvidia/version": VERSION.replace("580.159.04", "470.82")}), "problem", "470.82", "update"),
    "NVLS is on": (environment(NCCL_NVLS_ENABLE="1"), "warning", "multicast", "NCCL_NVLS_ENABLE=0"),
    "NVLS is on by default": (lambda m: (m.environment.pop("NCCL_NVLS_ENABLE"), m.there.add("/dev/nvidia-nvswitchctl")), "warning", "multicast", "NCCL_NVLS_ENABLE=0"),
    "NVLS is on in NCCL's file": (lambda m: (m.environment.pop("NCCL_NVLS_ENABLE"), m.files.update({"/etc/nccl.conf": "# site\nNCCL_NVLS_ENABLE=2\n"})),
                                  "warning", "multicast", "NCCL_NVLS_ENABLE=0"),
    "graphs register with cards": (lambda m: (m.environment.update(NCCL_GRAPH_REGISTER="1"), m.there.add("/sys/class/infiniband/mlx5_0")),
                                   "warning", "network cards", "NCCL_GRAPH_REGISTER=0"),
    "a network card, renewed": (lambda m: (m.environment.update(AMEM_NETWORK="renew"), m.there.add("/sys/class/infiniband/mlx5_0")),
                                "note", "on which all hosts agree", "process_group="),
    "a network card": (lambda m: m.there.add("/sys/class/infiniband/mlx5_0"), "note", "NCCL's buffers, which stay in a pause", "amem.memory()"),
    "a network plugin": (environment(NCCL_NET_PLUGIN="ofi"), "note", "NCCL_NET_PLUGIN=ofi", "amem.stats()"),
    "cuMem is off": (environment(NCCL_CUMEM_ENABLE="0"), "note", "cuMemAlloc", "unset"),
    "GDRCopy": (lambda m: (m.environment.update(NCCL_GDRCOPY_ENABLE="1"), m.there.add("/dev/gdrdrv")), "note", "GDRCopy", "NCCL_GDRCOPY_ENABLE=0"),
    "few descriptors": (lambda m: setattr(m, "may_open", 64), "problem", "64", "ulimit -n"),
    "no memory files": (lambda m: setattr(m, "no_memfd", "Operation not permitted"), "problem", "not permitted", "seccomp"),
    "little shared memory": (lambda m: m.free.update({"/dev/shm": 1 << 20}), "warning", "1 MiB", "--shm-size"),
    "little host memory": (lambda m: m.files.update({"/proc/meminfo": "MemAvailable: 1048576 kB\n"}), "warning", "1024 MiB", "more memory"),
    "SELinux": (lambda m: m.files.update({"/sys/fs/selinux/enforce": "1"}), "note", "execmod", "setsebool"),
    "journals cannot be written": (lambda m: m.not_writable.update({"/data/journal": "Read-only file system"}), "problem", "Read-only", "AMEM_JOURNAL_DIR"),
    "/tmp cannot be written": (lambda m: (m.environment.pop("AMEM_JOURNAL_DIR"), m.not_writable.update({DEFAULT: "Permission denied"})),
                               "problem", DEFAULT, "AMEM_JOURNAL_DIR"),
    "the disk is full": (lambda m: m.free.update({"/data/journal": 1 << 20}), "warning", "1 MiB are free", "another file system"),
    "a relative directory": (environment(AMEM_JOURNAL_DIR="journals"), "problem", "not an absolute path", "from /"),
    "a path too long for a socket": (environment(AMEM_SOCKET_DIR="/data/" + "s" * 90), "problem", "too long", "shorter"),
    "a container": (lambda m: (m.there.add("/.dockerenv"), m.environment.pop("AMEM_SOCKET_DIR")), "note", "several containers", "AMEM_SOCKET_DIR"),
}


class Doctor(unittest.TestCase):
    def test_a_machine_on_which_everything_is_well(self):
        self.assertEqual({finding.level for finding in examined()}, {"ok"}, examined())

    def test_the_open_kernel_module_names_its_version_behind_the_processor(self):
        text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\n"
        found = examined(lambda m: m.files.update({"/proc/driver/nvidia/version": text}))
        self.assertEqual({finding.level for finding in found}, {"ok"}, found)
        self.assertIn("driver 580.159.04", " ".join(finding.text for finding in found))

    def test_the_last_line_says_what_follows(self):
        self.assertEqual(_doctor.conclusion(examined()), "No problem was found: AMem can work here.")
        without_gpu = _doctor.conclusion(examined(BROKEN["no GPU"][0]))
        for words in ("no GPU", "frees nothing", "amem why", "amem demo"):
            self.assertIn(words, without_gpu)
        self.assertIn("1 problem.", _doctor.conclusion(examined(BROKEN["the driver is old"][0])))

    def test_each_broken_machine_is_named_with_its_remedy(self):
        for name, (change, level, text, remedy) in BROKEN.items():
            with self.subTest(name):
                bad = [finding for finding in examined(change) if finding.level != "ok"]
                self.assertTrue(any(f.level == level and text in f.text and remedy in f.remedy for f in bad), bad)
                self.assertLessEqual(len([f for f in bad if f.level in ("problem", "warning")]), 1, bad)

    def test_cards_that_nccl_does_not_use_are_not_named(self):
        card = BROKEN["a network card"][0]
        for variables in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}):
            found = examined(lambda m, variables=variables: (card(m), m.environment.update(variables)))
            self.assertEqual({finding.level for finding in found}, {"ok"}, found)

    def test_nccls(self):
        for libraries, level, text in (([], "note", "no libnccl"), ([("/n", (2, 17, 1))], "problem", "2.17.1"), ([("/n", (2, 40, 0))], "warning", "2.40.0"),
                                       ([("/n", None)], "warning", "cannot be read"), ([("/a", (2, 20, 5)), ("/b", (2, 28, 9))], "note", "several versions")):
            bad = [finding for finding in examined(libraries=libraries) if finding.level != "ok"]
            self.assertEqual([(f.level, text in f.text, bool(f.remedy) or level == "note") for f in bad], [(level, True, True)], bad)

    def test_the_scope_says_what_a_freeze_will_know(self):
        for variables, level, word in (({}, "ok", "find the driver's functions by dlsym"), ({"AMEM_SCOPE": "shared"}, "ok", "shares by cudaIpc or descriptors"),
                                       ({"AMEM_SCOPE": "shared", "LD_PRELOAD": "", "AMEM_ENABLE": "1"}, "ok", "shares by cudaIpc or descriptors"),
                                       ({"AMEM_SCOPE": "all"}, "ok", "under the tag program"),
                                       ({"AMEM_SCOPE": "all", "LD_PRELOAD": "", "AMEM_ENABLE": "1"}, "note", "before AMem is attached")):
            found = [finding for finding in examined(environment(**variables)) if finding.subject == "scope"]
            self.assertEqual([(f.level, word in f.text) for f in found], [(level, True)], found)

    def test_without_amem_replay_journals_cannot_be_read_here(self):
        bad = [finding for finding in examined(replay=None) if finding.level != "ok"]
        self.assertEqual([(f.level, f.subject) for f in bad], [("warning", "amem-replay")])
        said = next(f.text for f in examined(environment(AMEM_REPLAY="/gone"), replay=None) if f.subject == "amem-replay")
        self.assertIn("AMEM_REPLAY is /gone, which is no program", said)


class Directories(unittest.TestCase):
    """By the rules of journal/base/directory.h and replay/peers/unix/socket.cpp, by which each rank refuses others."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tmp = os.path.join(folder.name, "tmp")  # as /tmp is
        os.mkdir(self.tmp)
        os.chmod(self.tmp, 0o1777)

    def why(self, name, *sockets):
        return _doctor.Machine().why_not_writable(os.path.join(self.tmp, name), *sockets)

    def test_what_is_missing_is_made_for_this_user_alone(self):
        self.assertEqual((self.why("amem/journal"), self.why("amem/sockets/", True)), ("", ""))
        for name in ("amem", "amem/journal", "amem/sockets"):
            self.assertEqual(os.stat(os.path.join(self.tmp, name)).st_mode & 0o777, 0o700, name)
            self.assertEqual([file for file in os.listdir(os.path.join(self.tmp, name)) if file.startswith(".doctor")], [])

    def test_what_another_user_may_have_planted_is_refused_and_nothing_is_made_in_it(self):
        strange = os.path.join(self.tmp, "strange")
        os.mkdir(strange)
        os.symlink(strange, os.path.join(self.tmp, "link"))
        self.assertIn("tmp/link is a symbolic link, in a directory where any user may put things", self.why("link/journal"))
        self.assertIn("is a symbolic link", self.why("link"))
        if os.geteuid() == 0:
            os.chown(strange, 12345, -1)
        with mock.patch.object(os, "geteuid", lambda user=os.geteuid(): user and user + 1):
            self.assertRegex(self.why("strange/journal"), "tmp/strange belongs to user [0-9]+, and this process runs as user")
            self.assertRegex(self.why("strange"), "^belongs to user")
        self.assertEqual(os.listdir(strange), [])

    def test_the_directory_of_sockets_is_of_this_user_alone(self):
        os.mkdir(os.path.join(self.tmp, "open"), 0o755)
        self.assertEqual(self.why("open"), "")
        self.assertIn("open to other users; chmod 700", self.why("open", True))
        os.chmod(os.path.join(self.tmp, "open"), 0o700)
        os.mkdir(os.path.join(self.tmp, "open/own"), 0o700)
        os.symlink("own", os.path.join(self.tmp, "open/link"))  # only the user can have put it there
        self.assertEqual((self.why("open/link"), self.why("open/own", True)), ("", ""))
        self.assertIn("symbolic link", self.why("open/link", True))

    def test_they_are_asked_for_what_they_are_for(self):
        asked = []
        machine = FakeMachine()
        machine.why_not_writable = lambda directory, sockets=False: asked.append((directory, sockets)) or ""
        _doctor.places(machine)
        self.assertEqual(asked, [("/data/journal", False), ("/data/s", True)])


class Command(unittest.TestCase):
    def test_run_preloads_once_and_keeps_other_preloads(self):
        made = _library.environment_with("/new/libamem_nccl.so", {"LD_PRELOAD": "/x/tms.so /old/libamem_nccl.so:/y/jemalloc.so", "HOME": "/h"})
        self.assertEqual(made["LD_PRELOAD"], "/new/libamem_nccl.so:/x/tms.so:/y/jemalloc.so")
        self.assertEqual((made["AMEM_ENABLE"], made["HOME"]), ("1", "/h"))
        self.assertEqual(_library.environment_with("/a/libamem_nccl.so", made)["LD_PRELOAD"], "/a/libamem_nccl.so:/x/tms.so:/y/jemalloc.so")

    def amem(self, *arguments, **variables):
        environment_ = {**os.environ, "PYTHONPATH": PACKAGE, **variables}
        done = subprocess.run([sys.executable, "-B", "-m", "amem", *arguments], env=environment_, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout, done.stderr

    def test_run_starts_the_command_under_the_library_and_passes_its_exit_code(self):
        with tempfile.TemporaryDirectory() as folder:
            library = os.path.join(folder, "libamem_nccl.so")
            source = "".join("int %s(void) { return 0; }\n" % name for name in _library._FUNCTIONS)
            subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
            code, out, err = self.amem("run", "--", "sh", "-c", 'echo "$LD_PRELOAD|$AMEM_ENABLE|$0|$1"; exit 7', "a b", "c", AMEM_LIBRARY=library)
            self.assertEqual((code, out), (7, "%s|1|a b|c\n" % library), err)
            code, out, err = self.amem("run", "--scope", "shared", "--", "sh", "-c", 'echo "$AMEM_SCOPE"', AMEM_LIBRARY=library)
            self.assertEqual((code, out), (0, "shared\n"), err)
            code, out, err = self.amem("run", "sh", "-c", 'echo "$LD_PRELOAD"', AMEM_LIBRARY=library, AMEM_ENABLE="0")
            self.assertEqual((code, out), (0, "\n"), err)
            self.assertIn("without AMem", err)
            code, out, err = self.amem("run", "no-such-program", AMEM_LIBRARY=library)
            self.assertEqual((code, out), (127, ""), err)
            self.assertIn("no-such-program", err)

    def test_a_program_that_is_started_ignores_no_signal_that_only_python_ignores(self):
        """SIGPIPE ends `yes | head`, and SIGXFSZ a program that writes more than it may."""
        wanted = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(folder + "/amem")
            tool = folder + "/amem/amem-replay"
            with open(tool, "w", encoding="utf-8") as file:
                file.write("#!/bin/sh\nexec grep SigIgn /proc/self/status\n")
            os.chmod(tool, 0o755)
            shutil.copy(_autoload.__file__, folder)
            for arguments in (["run", "--", tool], ["run", "--guard", "--", tool], ["ls"], ["why", "/nowhere"]):
                self.assertEqual(self.amem(*arguments, AMEM_ENABLE="0", AMEM_REPLAY=tool), (0, wanted, self.without_amem(arguments)), arguments)
            done = subprocess.run([sys.executable, "-B", "-c", "import amem_plugins; amem_plugins.replay()"], cwd=folder, capture_output=True, text=True, check=False,
                                  env={**os.environ, "PYTHONPATH": folder})
            self.assertEqual((done.returncode, done.stdout), (0, wanted), done.stderr)

    def test_a_program_goes_on_ignoring_what_its_service_manager_or_shell_ignores(self):
        show = "grep SigIgn /proc/self/status"
        command = "%s; %s -B -m amem run -- sh -c '%s'; true"
        environment = {**os.environ, "PYTHONPATH": PACKAGE, "AMEM_ENABLE": "0"}
        for before in ("trap '' PIPE", "true"):
            seen = [subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, check=True).stdout
                    for line in ("%s; %s" % (before, show), command % (before, sys.executable, show))]
            self.assertEqual(seen[0], seen[1], before)

    @staticmethod
    def without_amem(arguments):
        return "amem: AMEM_ENABLE=0, so the command is started without AMem\n" * (arguments[0] == "run")

    def test_a_guard_that_could_not_thaw_starts_nothing(self):
        with tempfile.NamedTemporaryFile() as text:
            for wrong in ("/nowhere/amem-replay", os.path.dirname(text.name), text.name, "no-such-program"):
                option = ["--park-on", "TERM"] if wrong == text.name else ["--guard"]
                code, out, err = self.amem("run", *option, "--", "echo", "started", AMEM_ENABLE="0", AMEM_REPLAY=wrong)
                self.assertEqual((code, out), (2, ""), err)
                self.assertIn("nothing was started, because nothing could bring a frozen job back: AMEM_REPLAY is %s, which is no program" % wrong, err)

    @unittest.skipUnless(os.access(os.environ.get("AMEM_LIBRARY", ""), os.R_OK), "needs the library")
    def test_run_starts_beside_unknown_variables_and_says_once_what_was_meant(self):
        """Kubernetes gives AMEM_PORT and more to each pod beside a Service named amem; those are not even warned of."""
        of_kubernetes = {"AMEM_SERVICE_HOST": "10.0.0.1", "AMEM_SERVICE_PORT": "80", "AMEM_PORT": "tcp://10.0.0.1:80", "AMEM_PORT_80_TCP": "tcp://10.0.0.1:80",
                         "AMEM_PORT_80_TCP_PROTO": "tcp", "AMEM_PORT_80_TCP_PORT": "80", "AMEM_PORT_80_TCP_ADDR": "10.0.0.1"}
        for level in ("", "off"):
            code, out, err = self.amem("run", "--", "sh", "-c", "sh -c 'echo started'", AMEM_LAYUOT="slab", AMEM_LOG=level, **of_kubernetes)
            self.assertEqual((code, out, err.count("AMEM_")), (0, "started\n", 2), err)
            self.assertIn("AMEM_LAYUOT is set, but AMem has no such variable; did you mean AMEM_LAYOUT?", err)
        code, out, err = self.amem("run", "echo", "started", AMEM_LAYOUT="slap")
        self.assertEqual((code, out), (2, ""), err)

    @unittest.skipUnless(os.access(os.environ.get("AMEM_LIBRARY", ""), os.R_OK), "needs the library")
    def test_a_virtual_environment_whose_path_has_blanks_works(self):
        with tempfile.TemporaryDirectory(prefix="a b:c ") as folder:
            for name in os.listdir(os.path.dirname(os.environ["AMEM_LIBRARY"])):
                os.symlink(os.path.join(os.path.dirname(os.environ["AMEM_LIBRARY"]), name), os.path.join(folder, name))
            library = os.path.join(folder, "libamem_nccl.so")
            code, out, err = self.amem("run", "--", "cat", "/proc/self/maps", AMEM_LIBRARY=library)
            self.assertEqual((code, err), (0, ""))
            self.assertIn("libamem_nccl.so", out)
            code, out, err = self.amem("run", "--", "sh", "-c", 'echo "$AMEM_LIBRARY|$LD_PRELOAD"', AMEM_LIBRARY=library)
            given, preloaded = out.strip().split("|")
            self.assertEqual(given, library)
            self.assertNotRegex(preloaded, r"[\s:]")
            self.assertEqual(os.readlink(preloaded), library)
            os.unlink(preloaded)
            os.rmdir(os.path.dirname(preloaded))

    def test_a_library_that_cannot_be_loaded_is_a_finding_and_never_a_traceback(self):
        with tempfile.NamedTemporaryFile("w", suffix=".so", dir="/tmp") as broken:
            broken.write("this is no library")
            broken.flush()
            for variables in ({"AMEM_LIBRARY": broken.name}, {"AMEM_LIBRARY": "/nowhere/libamem_nccl.so"}):
                code, out, err = self.amem("doctor", "--json", **variables)
                found = [one for one in json.loads(out)["findings"] if one["subject"] == "library"]
                self.assertEqual((code, [one["level"] for one in found], err), (3, ["problem"], ""))
                self.assertTrue(found[0]["remedy"])
                for arguments in (["run", "true"], ["version"], ["why", "/nowhere"], ["demo"], ["help"]):
                    code, out, err = self.amem(*arguments, AMEM_REPLAY="/nowhere/amem-replay", **variables)
                    self.assertNotIn("Traceback", err, arguments)
                    self.assertTrue(err.startswith("amem: "), (arguments, err))
                    self.assertEqual(code, 2, (arguments, err))

    def test_a_library_that_crashes_is_a_finding(self):
        with tempfile.TemporaryDirectory() as folder:
            library = os.path.join(folder, "libamem_nccl.so")
            source = "__attribute__((constructor)) static void die(void) { __builtin_trap(); }\n"
            subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
            code, out, err = self.amem("doctor", AMEM_LIBRARY=library)
            self.assertEqual(code, 3, err)
            self.assertIn("problem", out)
            code, out, err = self.amem("run", "echo", "started", AMEM_LIBRARY=library)
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn("nothing was started", err)

    def test_wrong_use_says_what_to_do(self):
        for arguments, word, wanted in ((["run"], "which command", 1), (["doctor", "--jsno"], "--jsno", 1), (["doctor", "--gpus", "0"], "--gpus", 1),
                                        (["doctor", "--nccl", "/no/such"], "/no/such", 2), (["run", "--scope", "everything", "true"], "nccl, shared, all", 1),
                                        (["run", "--scpoe", "all", "--", "true"], "did you mean --scope?", 1),
                                        (["doctor", "--prove", "--minutes", "nan"], "--minutes", 1), (["doctor", "--prove", "--minutes", "1e9"], "--minutes", 1),
                                        (["doctor", "--prove", "--measure"], "not allowed with", 1)):
            code, out, err = self.amem(*arguments)
            self.assertEqual((code, out), (wanted, ""), err)
            self.assertIn(word, err)

    def test_signals_of_each_park_on_are_added_up(self):
        with mock.patch.dict(os.environ, AMEM_ENABLE="0"), mock.patch.object(_command._why, "find", lambda _: "amem-replay"), \
                mock.patch.object(_command._guard, "Guard") as guard, contextlib.redirect_stderr(io.StringIO()):
            _command.run(["--park-on", "TERM", "--park-on", "USR1", "--", "true"])
        self.assertEqual(guard.call_args.args[3], {signal.SIGTERM, signal.SIGUSR1})

    def test_each_of_its_commands_has_help(self):
        for arguments in (["run", "--help"], ["help", "run"], ["demo", "-h"], ["--help", "version"]):
            code, out, err = self.amem(*arguments)
            self.assertEqual((code, err), (0, ""), arguments)
            self.assertIn("amem run [--] COMMAND", out)
        for arguments in (["help", "doctor"], ["doctor", "--help"]):
            code, out, err = self.amem(*arguments)
            self.assertEqual((code, err), (0, ""), arguments)
            self.assertIn("--measure", out)

    def test_all_else_is_the_other_programs_and_it_calls_itself_amem(self):
        with tempfile.TemporaryDirectory() as folder:
            tool = os.path.join(folder, "amem-replay")
            subprocess.run(["gcc", "-x", "c", "-", "-o", tool], text=True, check=True,
                           input='#include <stdio.h>\nint main(int n, char** v) { for (int i = 0; i < n; ++i) printf("%s|", v[i]); return 3; }\n')
            for arguments in ([], ["help"], ["help", "why"], ["why", "4711", "--json"], ["--completion", "bash"], ["freeze"]):
                code, out, err = self.amem(*arguments, AMEM_REPLAY=tool)
                self.assertEqual((code, out, err), (3, "|".join(["amem", *arguments, ""]), ""))

    def test_doctor_as_json_has_a_schema_and_an_exit_code(self):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            code = _command.doctor(["--json"])
        answer = json.loads(shown.getvalue())
        self.assertEqual((answer["schema"], answer["works"]), (1, code == 0))
        for finding in answer["findings"]:
            self.assertEqual(set(finding), {"level", "subject", "text", "remedy"})
            self.assertIn(finding["level"], ("ok", "note", "warning", "problem"))
            self.assertTrue(finding["level"] in ("ok", "note") or finding["remedy"], finding)

    def test_the_version_of_an_nccl_is_read_from_its_file(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"\0" * 5000 + b"NCCL version 2.28.9+cuda13.0\0" + b"\0" * 100)
            file.flush()
            self.assertEqual(_command.nccl_version(file.name), (2, 28, 9))
        self.assertIsNone(_command.nccl_version("/dev/null"))

    def test_a_proof_without_nccl_says_what_else_is_missing(self):
        for devices, missing in ((["/dev/nvidia0"], False), ([], True)):
            machine = FakeMachine()
            machine.find = lambda pattern, devices=devices: devices
            err = io.StringIO()
            with contextlib.redirect_stderr(err), mock.patch.object(_command, "problem_of", lambda _: None), mock.patch.object(_doctor, "Machine", lambda: machine), \
                    mock.patch.object(machine, "read", lambda _: "", create=True):
                self.assertEqual(_command.cannot_start("doctor --prove", "library", [], 1), 2)
            self.assertIn("no libnccl was found", err.getvalue())
            self.assertEqual("this machine has no NVIDIA GPU" in err.getvalue() and "amem demo" in err.getvalue(), missing, err.getvalue())


class Autoload(unittest.TestCase):
    def test_it_attaches_only_where_it_was_asked_to_and_never_fails(self):
        code = ("import sys; sys.path.insert(0, %r); sys.modules['amem'] = None if len(sys.argv) > 1 else None\n"
                "import importlib.util as u; s = u.spec_from_file_location('a', %r); m = u.module_from_spec(s); s.loader.exec_module(m)\n"
                "import warnings; warnings.simplefilter('always'); m.attach(); print('ran')" % (PACKAGE, _autoload.__file__))
        for value, warned in (("", False), ("0", False), ("1", True)):  # an `amem` that cannot be imported
            done = subprocess.run([sys.executable, "-B", "-c", code], env={**os.environ, "AMEM_ENABLE": value}, capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, "ran"), done.stderr)
            self.assertEqual("runs without it" in done.stderr, warned, done.stderr)


if __name__ == "__main__":
    unittest.main()
