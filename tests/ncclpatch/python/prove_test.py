"""`amem doctor --prove` on the stand-in driver, NCCL and network card: what is proved, failures that are planted, and where it refuses."""
import atexit
import contextlib
import glob
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../ncclpatch/python"))
sys.path.insert(0, PACKAGE)
sys.path.insert(0, os.path.join(PACKAGE, "../../tests/replay/tool"))
import json_schema  # noqa: E402
from amem import _calls, _command  # noqa: E402
from amem._jobs import host as _host, nvml as _nvml, processes as _processes, proofs as _proofs, prove as _prove  # noqa: E402

PLACE = tempfile.mkdtemp(prefix="amem-pt-", dir="/tmp")
atexit.register(shutil.rmtree, PLACE, True)
os.environ.update({"TMPDIR": PLACE, "XDG_STATE_HOME": PLACE + "/state"})
STAND_INS = os.environ["LD_LIBRARY_PATH"].split(":")[0]
NCCL = STAND_INS + "/libnccl.so.2"
SCHEMA = json_schema.Schema(os.path.join(PACKAGE, "../../replay/tool/schemas/proof.schema.json"))
CARD = os.environ.get("STAND_IN_CARD", "")
NVML = os.environ.get("STAND_IN_NVML", "")
NIGHTLY = os.environ.get("AMEM_NIGHTLY") == "1"
EACH = 2 if NIGHTLY else 1  # ranks of each of two hosts under torchrun
by_night = unittest.skipUnless(NIGHTLY, "by night only: each of these starts half a dozen jobs")


def in_place():
    """Files of processes that were started with the temporary folder of this test."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            found += [path] if b"TMPDIR=" + PLACE.encode() in file.read() and path != "/proc/%d/environ" % os.getpid() else []
    return found


def in_shared_memory():
    """What journals of this test have there, which name their place in their first page."""
    found = []
    for path in glob.glob("/dev/shm/amem-%d/*" % os.geteuid()):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            found += [path] if PLACE.encode() in file.read(8192) else []
    return found


def proof(settings=None, ranks=None, gpus=2, hosts=None, minutes=10):
    """What prove() answers with these settings in place of all."""
    with mock.patch.object(_prove, "CYCLES", 2), mock.patch.object(_prove, "SETTINGS", _prove.SETTINGS if settings is None else settings):
        return _prove.prove(hosts or [(_host.Host(), ranks)], NCCL, gpus, minutes)


def planted(**variables):
    """A setting that fails by these variables of the stand-ins."""
    return _prove.Setting("AMEM_USER_MEMORY=release", {"AMEM_USER_MEMORY": "release", **variables})


def row_of(answer, name):
    return next(row for row in answer["settings"] if row["setting"] == name)


def kinds(row):
    return {kind["kind"]: kind for kind in row["kinds"]}


class Case(unittest.TestCase):
    def tearDown(self):
        self.assertEqual(glob.glob(PLACE + "/amem-m-*"), [])
        end = time.monotonic() + 5  # a rank that was starting when a signal came ends by itself, because nobody is at its pipe
        while in_place() and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(in_place(), [])
        self.assertEqual(in_shared_memory(), [])


class Proved(Case):
    def test_each_setting_frees_its_kind_and_all_results_are_compared(self):
        with mock.patch.dict(os.environ, {"STAND_IN_NVLS": "1"}):
            answer = proof()
        self.assertEqual(_prove.failures(answer), [], _prove.table(answer))
        self.assertTrue(answer["simulated"])
        self.assertIn("SIMULATED", answer["line"])
        default = kinds(row_of(answer, "default"))
        self.assertEqual(default["peer buffers and windows"]["stays"], {})
        self.assertEqual(list(default["multicast (NVLS)"]["stays"]), ["multicast"])
        self.assertIn("ncclMemAlloc", list(default["user buffers"]["stays"])[0])
        for setting, kind in (("AMEM_NVLS=release", "multicast (NVLS)"), ("AMEM_USER_MEMORY=release", "user buffers"), ("AMEM_SCOPE=all", "the program's own")):
            row = row_of(answer, setting)
            self.assertEqual(row["outcome"], "proved", row["why"])
            self.assertEqual(kinds(row)[kind]["stays"], {}, setting)
            self.assertGreater(kinds(row)[kind]["bytes"], 1 << 20, setting)
            self.assertGreater(row["compared_bytes"], 1 << 20)
        network = row_of(answer, "AMEM_NETWORK=renew")
        self.assertEqual((network["outcome"], network["why"]), ("skipped", "this job has no network buffers here"))
        for key in ("first_pause_seconds", "pause_seconds", "resume_seconds", "start_seconds"):
            self.assertGreater(row_of(answer, "default")[key], 0, key)

    @by_night
    def test_settings_of_a_proof_do_nothing_beside_another_nccl(self):
        settings = [_prove.Setting("AMEM_NVLS=release " + version, {"AMEM_NVLS": "release", "AMEM_PROVED": version}, _prove.MULTICAST) for version in ("2.28.9", "2.28.3")]
        with mock.patch.dict(os.environ, {"STAND_IN_NVLS": "1"}):
            answer = proof(settings)
        self.assertEqual(_prove.failures(answer), [], _prove.table(answer))
        stays = [kinds(row_of(answer, setting.name))["multicast (NVLS)"]["stays"] for setting in settings]
        self.assertEqual([list(each) for each in stays], [[], ["multicast"]])

    @unittest.skipUnless(os.path.exists(CARD + "/libibverbs.so.1"), "the stand-in card is not built")
    @by_night
    def test_a_card_is_not_renewed_beside_another_nccl(self):
        setting = _prove.Setting("AMEM_NETWORK=renew", {"AMEM_NETWORK": "renew", "AMEM_PROVED": "2.28.3"}, _prove.NETWORK)
        with mock.patch.dict(os.environ, {"STAND_IN_NET": "ib", "STAND_IN_RANKS_PER_HOST": "1", "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"] + ":" + CARD}):
            answer = proof([setting])
        self.assertEqual(_prove.failures(answer), [], _prove.table(answer))
        self.assertNotEqual(kinds(row_of(answer, setting.name))["network buffers"]["stays"], {})

    def test_nvls_that_nccl_may_not_use_is_not_tried(self):
        with mock.patch.dict(os.environ, {"NCCL_NVLS_ENABLE": "0", "STAND_IN_NVLS": "1"}):
            answer = proof(_prove.SETTINGS[:1])
        self.assertEqual(row_of(answer, "AMEM_NVLS=release")["outcome"], "skipped")
        self.assertIn("NCCL_NVLS_ENABLE=0", row_of(answer, "AMEM_NVLS=release")["why"])

    @unittest.skipUnless(os.path.exists(CARD + "/libibverbs.so.1"), "the stand-in card is not built")
    @by_night
    def test_buffers_of_a_card_stay_and_leave_with_renew(self):
        with mock.patch.dict(os.environ, {"STAND_IN_NET": "ib", "STAND_IN_RANKS_PER_HOST": "1", "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"] + ":" + CARD}):
            answer = proof(_prove.SETTINGS[1:2])
        self.assertEqual(_prove.failures(answer), [], _prove.table(answer))
        self.assertTrue(answer["stand_in_card"])
        self.assertIn("network", list(kinds(row_of(answer, "default"))["network buffers"]["stays"])[0])
        self.assertEqual(kinds(row_of(answer, "AMEM_NETWORK=renew"))["network buffers"]["stays"], {})

    @by_night
    def test_ranks_share_gpus_only_where_nccl_can(self):
        with self.assertRaisesRegex(_prove.CannotProve, "several ranks on a GPU need NCCL 2.30 or later"):
            proof([], ranks=4)
        with mock.patch.dict(os.environ, {"STAND_IN_NCCL_VERSION": "23203"}):
            answer = proof(_prove.SETTINGS[-1:], ranks=4)
        self.assertEqual(_prove.failures(answer), [], _prove.table(answer))
        self.assertEqual((answer["ranks"], len(answer["gpus"]), answer["nccl"]["version"]), (4, 2, "2.32.3"))
        self.assertEqual(len({rank["gpu"] for rank in row_of(answer, "default")["ranks"]}), 2)

    def test_what_this_nccl_does_not_have_is_noted_and_left_out(self):
        with mock.patch.dict(os.environ, {"NCCL_CUMEM_ENABLE": "0"}):  # with which there are no windows
            answer = proof([])
        default = row_of(answer, "default")
        self.assertEqual((default["outcome"], default["window"]), ("proved", False))
        self.assertEqual(default["notes"], ["without ncclCommWindowRegister, which answered 5"])


SSH = """#!/bin/sh
for command; do :; done
echo "Welcome to this host"
exec sh -c "exec $command"
"""


@unittest.skipUnless(os.path.exists(CARD + "/libibverbs.so.1"), "the stand-in card is not built")
class Hosts(Case):
    """Several hosts that are this machine: a server by ssh, which is a script here, and by torchrun, whose store is a folder here."""

    def setUp(self):
        patch = mock.patch.dict(os.environ, {"STAND_IN_NET": "ib", "STAND_IN_RANKS_PER_HOST": "1", "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"] + ":" + CARD})
        patch.start()
        self.addCleanup(patch.stop)
        self.folder = tempfile.mkdtemp(dir=PLACE)
        with open(self.folder + "/ssh", "w", encoding="utf-8") as file:
            file.write(SSH)
        os.chmod(self.folder + "/ssh", 0o700)
        with open(self.folder + "/hosts", "w", encoding="utf-8") as file:
            file.write("# two\nlocalhost slots=1\nother slots=1 python=%s\n" % sys.executable)

    def run_command(self, *more, **variables):
        environment = {**os.environ, "PYTHONPATH": PACKAGE, "PATH": self.folder + ":" + os.environ["PATH"], **variables}
        done = subprocess.run([sys.executable, "-m", "amem", "doctor", "--prove", "--json", "--nccl", NCCL, *more], env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def test_by_ssh(self):
        code, out, err = self.run_command("--hosts", self.folder + "/hosts")
        self.assertEqual(code, 0, out + err)
        answer = json.loads(out)
        self.assertEqual(SCHEMA.problems(answer), [])
        self.assertEqual((answer["ranks"], len(answer["hosts"]), answer["one_machine_as_several_hosts"]), (2, 2, True))
        self.assertEqual([rank["host"] for rank in row_of(answer, "default")["ranks"]], [0, 1])
        self.assertEqual(row_of(answer, "AMEM_SCOPE=all")["outcome"], "proved")

    @by_night
    def test_a_failure_on_another_host_has_its_pack(self):
        hosts = [(_host.Host(), 1), (self.server(), 1)]
        answer = proof((planted(STAND_IN_AT="Unmap,1,KILL"),), hosts=hosts)
        row = row_of(answer, "AMEM_USER_MEMORY=release")
        self.assertEqual(row["outcome"], "killed", row["why"])
        self.assertEqual(len(row["packs"]), 2)
        hosts[1][0].close()
        self.agent_ended()

    def test_an_agent_that_dies_is_a_failure_and_leaves_nothing(self):
        server = self.server()
        with mock.patch.object(server, "answer", lambda _values: self.process.terminate()), self.assertRaisesRegex(_prove.CannotProve, "other.*connection|connection.*other"):
            proof(hosts=[(_host.Host(), 1), (server, 1)])
        server.close()
        self.assertEqual(self.process.wait(timeout=10), 128 + signal.SIGTERM)

    def server(self):
        with mock.patch.dict(os.environ, {"PATH": self.folder + ":" + os.environ["PATH"]}):
            started = subprocess.Popen
            with mock.patch.object(subprocess, "Popen", side_effect=lambda *a, **k: setattr(self, "process", started(*a, **k)) or self.process):
                return _host.by_ssh(_host.Line("other", 1, sys.executable))

    def agent_ended(self):
        self.assertEqual(self.process.wait(timeout=10), 0)

    def test_files_of_hosts(self):
        self.assertEqual([line[:2] for line in _host.read_hosts(self.folder + "/hosts")], [("localhost", 1), ("other", 1)])
        for text in ("a slots=0", "a slots=x", "a slots=\u00b2", "a slots=00", "a cpus=1", "-oProxyCommand=x", ""):
            with open(self.folder + "/wrong", "w", encoding="utf-8") as file:
                file.write(text)
            with self.assertRaises(_prove.CannotProve, msg=text):
                _host.read_hosts(self.folder + "/wrong")

    def test_a_host_that_is_not_there_is_said(self):
        with open(self.folder + "/ssh", "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\necho no route >&2\nexit 255\n")
        code, out, err = self.run_command("--hosts", self.folder + "/hosts")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("other: no server could be started there", err)

    @by_night
    def test_by_torchrun(self):
        os.makedirs(self.folder + "/torch/distributed")
        with open(self.folder + "/torch/__init__.py", "w", encoding="utf-8"), open(self.folder + "/torch/distributed/__init__.py", "w", encoding="utf-8") as file:
            file.write(STORE)
        started = []
        for rank in range(2 * EACH):
            variables = {"RANK": rank, "LOCAL_RANK": rank % EACH, "LOCAL_WORLD_SIZE": EACH, "WORLD_SIZE": 2 * EACH, "GROUP_RANK": rank // EACH, "GROUP_WORLD_SIZE": 2,
                         "STAND_IN_RANKS_PER_HOST": EACH,
                         "MASTER_ADDR": "localhost", "MASTER_PORT": 1, "STORE": self.folder}
            environment = {**os.environ, "PYTHONPATH": PACKAGE + ":" + self.folder, **{name: str(value) for name, value in variables.items()}}
            started.append(subprocess.Popen([sys.executable, "-m", "amem", "doctor", "--prove", "--json", "--nccl", NCCL], env=environment, stdout=subprocess.PIPE,
                                            stderr=subprocess.PIPE, text=True))
        try:
            said = [process.communicate(timeout=100) for process in started]
        finally:
            for process in started:
                process.kill()
        self.assertEqual([process.returncode for process in started], [0] * (2 * EACH), said)
        answer = json.loads(said[0][0])
        self.assertEqual([host["ranks"] for host in answer["hosts"]], [EACH, EACH])
        self.assertEqual([out for out, _ in said[1:]], [""] * (2 * EACH - 1))


STORE = """
import os, time
class TCPStore:
    def __init__(self, *_, **__):
        self.folder = os.environ["STORE"]
    def set(self, key, value):
        with open(self.folder + "/new", "w") as file:
            file.write(value)
        os.rename(self.folder + "/new", self.folder + "/" + key)
    def get(self, key):
        while not os.path.exists(self.folder + "/" + key):
            time.sleep(0.05)
        with open(self.folder + "/" + key, "rb") as file:
            return file.read()
"""


class Planted(Case):
    def failed(self, outcome, words, **variables):
        """A setting fails so, is said with its pack, and the next one is tried all the same."""
        # Beside a build a run took more than eight seconds; only one that hangs takes all of this.
        with mock.patch.object(_prove, "RUN_SECONDS", 20 if outcome == "hung" else 60), mock.patch.object(_prove, "TIMES_STOCK", 4):
            answer = proof((planted(**variables), _prove.SETTINGS[-1]))
        row = row_of(answer, "AMEM_USER_MEMORY=release")
        self.assertEqual(row["outcome"], outcome, row["why"])
        self.assertIn(words, row["why"])
        self.assertEqual(row_of(answer, "AMEM_SCOPE=all")["outcome"], "proved")
        self.assertEqual(_prove.failures(answer), [row])
        self.assertIn("Not proved: AMEM_USER_MEMORY=release", _prove.table(answer))
        said = subprocess.run([os.environ["AMEM_REPLAY"], "ls", *row["packs"]], capture_output=True, text=True, check=False)
        self.assertIn("rank", said.stdout.lower(), said.stderr)
        os.unlink(row["packs"][0])

    def test_one_that_hangs(self):
        self.failed("hung", "did not end in its time", STAND_IN_FAULT="hang-unmap")

    def test_one_that_gives_a_wrong_byte(self):
        self.failed("wrong", "reduce-scatter of", STAND_IN_WRONG="9")

    @by_night
    def test_one_that_kills_a_process(self):
        self.failed("killed", "SIGSEGV", STAND_IN_AT="Unmap,1,SEGV")

    @by_night
    def test_one_that_errs(self):
        self.failed("failed", "out of memory", STAND_IN_AT="Create,8,fail-all=2")

    def test_a_run_that_the_given_time_ends_is_no_failure_and_the_proof_is_not_kept(self):
        with mock.patch.object(_prove, "DEFAULT", _prove.Setting("default", {"STAND_IN_FAULT": "hang-unmap"})), mock.patch.object(_proofs, "keep") as keep:
            answer = proof(_prove.SETTINGS[-1:], minutes=0.4)
        self.assertEqual([row["outcome"] for row in answer["settings"]], ["proved", "skipped", "skipped"], answer["settings"])
        self.assertIn("--minutes", answer["settings"][1]["why"])
        self.assertFalse(answer["complete"])
        keep.assert_not_called()

    @by_night
    def test_memory_that_a_run_leaves_behind_is_its_failure(self):
        used = iter([0] * 7)  # asked once before all, four times with each run; the default leaves it
        uses = lambda _self: [_nvml.Use([], next(used, 500 << 20), 80 << 30), _nvml.Use([], 0, 80 << 30)]
        with mock.patch.object(_host.Host, "_uses", uses), mock.patch.object(_host, "GONE_SECONDS", 1):
            answer = proof([])
        default = row_of(answer, "default")
        self.assertEqual(default["outcome"], "failed", answer["settings"])
        self.assertIn("GPU 0 has 500 MiB more in use than before", default["why"])

    @contextlib.contextmanager
    def gpus_in_use(self):
        """What the management library says of both GPUs, which `during` changes, of the pids of the ranks, once a run has AMEM_USER_MEMORY."""
        said = types.SimpleNamespace(pids=[], used=0, during=lambda ranks: None)
        start = _host.Host.start

        def starts(host, module, settings, variables, *rest):
            start(host, module, settings, variables, *rest)
            if variables["AMEM_USER_MEMORY"]:
                said.during([process.pid for process in host._job.processes])

        with mock.patch.object(_host.Host, "_uses", lambda _self: [_nvml.Use(list(said.pids), said.used, 80 << 30)] * 2), \
                mock.patch.object(_host.Host, "start", starts), mock.patch.object(_host, "GONE_SECONDS", 1):
            yield said

    @by_night
    def test_ranks_that_cannot_be_ended_are_the_failure_of_their_setting(self):
        end, wedged = _processes.Job.end, []

        def ends(job):
            end(job)
            return [process.pid for process in job.processes if process.pid in wedged]

        with self.gpus_in_use() as in_use, mock.patch.object(_processes.Job, "end", ends), mock.patch.object(_prove, "RUN_SECONDS", 8), \
                mock.patch.object(_prove, "TIMES_STOCK", 4), mock.patch.object(_prove, "GONE_SECONDS", 0):
            in_use.during = lambda ranks: (wedged.extend(ranks), in_use.pids.extend(ranks))
            answer = proof((planted(STAND_IN_FAULT="hang-unmap"), _prove.SETTINGS[-1]))
        row = row_of(answer, "AMEM_USER_MEMORY=release")
        self.assertEqual(row["outcome"], "hung", row["why"])
        self.assertIn("processes that cannot be ended: %d" % wedged[0], row["why"])
        self.assertEqual(row_of(answer, "AMEM_SCOPE=all")["outcome"], "skipped", "they are still on the GPUs")
        self.assertEqual(_prove.failures(answer), [row])
        self.kept_as_failed(answer)

    def kept_as_failed(self, answer):
        """Although it is not complete, so that no older one speaks for what failed."""
        self.assertFalse(answer["complete"])
        with open(os.path.join(_proofs.folder(), answer["key"] + ".json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file), answer)
        for row in answer["settings"]:
            for pack in row["packs"]:
                os.unlink(pack)

    @by_night
    def test_memory_that_is_left_is_a_failure_however_much_it_is(self):
        with self.gpus_in_use() as in_use:
            in_use.during = lambda ranks: setattr(in_use, "used", 3 << 30)
            answer = proof((planted(),))
        row = row_of(answer, "AMEM_USER_MEMORY=release")
        self.assertEqual(row["outcome"], "failed", row["why"])
        self.assertIn("GPU 0 has 3072 MiB more in use than before", row["why"])

    @by_night
    def test_a_hang_stays_one_if_what_follows_takes_longer_than_the_minutes(self):
        def packs(prover, _setting):
            prover.deadline = time.monotonic()
            return []

        with mock.patch.object(_prove, "RUN_SECONDS", 8), mock.patch.object(_prove, "TIMES_STOCK", 4), mock.patch.object(_prove.Prover, "_packs", packs):
            answer = proof((planted(STAND_IN_FAULT="hang-unmap"), _prove.SETTINGS[-1]))
        self.assertEqual([row["outcome"] for row in answer["settings"]], ["proved", "proved", "hung", "skipped"], answer["settings"])
        self.kept_as_failed(answer)

    @by_night
    def test_a_program_that_comes_during_a_run_is_no_failure_of_the_setting(self):
        with self.gpus_in_use() as in_use, mock.patch.object(_prove, "GONE_SECONDS", 0):
            in_use.during = lambda ranks: in_use.pids.append(7)
            answer = proof((planted(STAND_IN_AT="Unmap,1,SEGV"), _prove.SETTINGS[-1]))
        self.assertEqual([row["outcome"] for row in answer["settings"]], ["proved", "proved", "skipped", "skipped"], answer["settings"])
        self.assertRegex(answer["settings"][2]["why"], "during the run: GPU 0 .* is in use: process 7.*SIGSEGV")
        self.assertFalse(answer["complete"])
        for row in answer["settings"]:
            for pack in row["packs"]:
                os.unlink(pack)

    def test_a_default_that_fails_leaves_the_rest_untried(self):
        with mock.patch.object(_prove, "DEFAULT", _prove.Setting("default", {"STAND_IN_AT": "Unmap,1,SEGV"})):
            answer = proof(_prove.SETTINGS[-1:])
        self.assertEqual([row["outcome"] for row in answer["settings"]], ["proved", "killed", "skipped"])
        self.assertEqual(answer["amem"], _calls.package_version(), "else an older proof of the same would stay")
        self.assertIn("not proved", _prove.verdict(answer))

    def test_an_nccl_that_fails_without_amem(self):
        with mock.patch.dict(os.environ, {"STAND_IN_WRONG": "3"}), self.assertRaisesRegex(_prove.CannotProve, "NCCL without AMem does not run here: rank"):
            proof()

    def test_a_signal_ends_what_was_started(self):
        folder, package = os.path.split(PACKAGE)
        process = subprocess.Popen([sys.executable, "-B", "-m", "amem", "doctor", "--prove", "--nccl", NCCL, "--gpus", "2"], cwd=folder,
                                   env={**os.environ, "PYTHONPATH": package}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        end = time.monotonic() + 30
        while not glob.glob(PLACE + "/amem-m-*/world*") and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)


class Refused(Case):
    @unittest.skipUnless(os.path.exists(NVML + "/libnvidia-ml.so.1"), "the stand-in for NVML is not built")
    def test_a_gpu_in_use_by_another_process(self):
        world = {"AMEM_SIM_WORLD": PLACE + "/world", "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"] + ":" + NVML}
        code = "from amem._jobs import rank_process; driver = rank_process.Driver(1); driver.allocate(64 << 20); print('up', flush=True); input()"
        holder = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **world, "PYTHONPATH": PACKAGE, "TMPDIR": "/tmp"}, stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        try:
            self.assertEqual(holder.stdout.readline(), "up\n")
            command = [sys.executable, "-m", "amem", "doctor", "--prove", "--nccl", NCCL, "--gpus", "2"]
            done = subprocess.run(command, env={**os.environ, **world, "PYTHONPATH": PACKAGE}, capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn("GPU 1 (", done.stderr)
            self.assertIn("is in use: process %d" % holder.pid, done.stderr)
        finally:
            holder.communicate("\n")

    def test_ranks_that_cannot_be_started(self):
        with mock.patch.object(tempfile, "mkdtemp", side_effect=OSError("no room")), self.assertRaisesRegex(_prove.CannotProve, "cannot be started: no room"):
            proof()
        server = _host.Server()
        self.assertEqual(_host._done(server, {"call": "pack", "arguments": []}), {"error": "'NoneType' object has no attribute 'journals'"})

    def test_no_gpu_and_no_management_library(self):
        with mock.patch.dict(os.environ, {"AMEM_SIM_DEVICES": "0"}):
            command = [sys.executable, "-m", "amem", "doctor", "--prove", "--nccl", NCCL]
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": PACKAGE}, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("no GPU", done.stderr)

    def test_what_is_used_by_nobody_that_can_be_seen(self):
        self.assertIsNone(_nvml.Use([], 600 << 20, 80 << 30).by_others())
        self.assertIsNone(_nvml.Use([], 2 << 30, 140 << 30).by_others())
        self.assertIn("cannot be seen", _nvml.Use([], 3 << 30, 140 << 30).by_others())
        self.assertEqual(_nvml.Use([7, 9], 0, 1).by_others(), "processes 7, 9")


class Together(Case):
    @unittest.skipUnless(os.path.exists(CARD + "/libibverbs.so.1"), "the stand-in card is not built")
    @by_night
    def test_settings_of_the_machine_are_proved_together_as_well(self):
        with mock.patch.dict(os.environ, {"STAND_IN_NET": "ib", "STAND_IN_RANKS_PER_HOST": "1", "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"] + ":" + CARD,
                                          "STAND_IN_NVLS": "1"}):
            answer = proof(_prove.SETTINGS[:2])
        row = row_of(answer, "AMEM_NVLS=release AMEM_NETWORK=renew")
        self.assertEqual((row["outcome"], row["variables"]), ("proved", {"AMEM_NVLS": "release", "AMEM_NETWORK": "renew"}), row["why"])
        for kind in ("multicast (NVLS)", "network buffers"):
            self.assertEqual(kinds(row)[kind]["stays"], {})


class Command(Case):
    def test_json_is_kept_and_the_exit_code_says_whether_all_is_proved(self):
        for settings, code in ((_prove.SETTINGS[-1:], 0), ((planted(STAND_IN_WRONG="9"),), 3)):
            out = io.StringIO()
            with mock.patch.object(_prove, "CYCLES", 1), mock.patch.object(_prove, "SETTINGS", settings), contextlib.redirect_stdout(out), \
                    contextlib.redirect_stderr(io.StringIO()):
                self.assertEqual(_command.doctor(["--prove", "--json", "--nccl", NCCL, "--gpus", "1"]), code, out.getvalue())
            signal.alarm(0)
            answer = json.loads(out.getvalue())
            self.assertEqual(SCHEMA.problems(answer), [])
            self.assertTrue(answer["complete"])
            with open(os.path.join(_proofs.folder(), answer["key"] + ".json"), encoding="utf-8") as file:
                self.assertEqual(json.load(file), answer)


def kept_answer(*rows, gpus=("a", "b"), **other):
    settings = [{"setting": " ".join("%s=%s" % one for one in variables.items()) or "default", "variables": variables, "outcome": outcome} for variables, outcome in rows]
    answer = {"schema": "amem/proof", "version": 1, "gpus": [{"uuid": uuid} for uuid in gpus], "hosts": [{}], "driver": "580", "nccl": {"version": "2.28.9"}, "amem": "1",
              "nccl_settings": {}, "when": "2026-01-01T00:00:00Z", "simulated": False, "stand_in_card": False, "complete": True, "settings": settings, **other}
    return {**answer, "key": _proofs.key_of(answer)}


class Packs(unittest.TestCase):
    def test_are_for_this_user_alone_and_the_remedy_can_be_pasted(self):
        setting = _prove.Setting("AMEM_NVLS=release AMEM_NETWORK=renew", {})
        site = types.SimpleNamespace(host=types.SimpleNamespace(pack=lambda: "AAAA"))
        with tempfile.TemporaryDirectory(prefix="a b ") as folder:
            prover = _prove.Prover.__new__(_prove.Prover)
            prover.sites, prover.packs = [site, site], folder + "/amem/proofs"
            packs = prover._packs(setting)
            self.assertEqual(sorted(os.listdir(prover.packs)), sorted(map(os.path.basename, packs)))
            for path, mode in ((folder + "/amem", 0o700), (prover.packs, 0o700), *((pack, 0o600) for pack in packs)):
                self.assertEqual(os.stat(path).st_mode & 0o777, mode, path)
            for pack in packs:
                self.assertRegex(os.path.basename(pack), r"^AMEM_NVLS-release-AMEM_NETWORK-renew-[0-9]+-[01]\.amem$")
            line = next(line for line in _prove._of_setting({"setting": setting.name, "outcome": "failed", "why": "x", "packs": packs}) if "to see why" in line)
            self.assertEqual(shlex.split(line.partition(": ")[2]), ["amem", "why", *packs])


class Chosen(unittest.TestCase):
    HERE = _proofs.Here(["a"], "580", "2.28.9", "1", {})
    NVLS, NETWORK, USER = {"AMEM_NVLS": "release"}, {"AMEM_NETWORK": "renew"}, {"AMEM_USER_MEMORY": "release"}

    def setUp(self):
        patch = mock.patch.dict(os.environ, {"XDG_STATE_HOME": tempfile.mkdtemp(dir=PLACE)})
        patch.start()
        self.addCleanup(patch.stop)

    def chosen(self, here=None, environment=None):
        here = here or self.HERE
        variables, lines = _proofs.chosen(here, environment or {})
        self.assertEqual(variables.pop("AMEM_PROVED", None), here.nccl if variables else None)
        return variables, " / ".join(lines)

    def test_what_was_proved_of_nccls_own_memory_is_set(self):
        _proofs.keep(kept_answer(({}, "proved"), (self.NVLS, "proved"), (self.NETWORK, "hung"), (self.USER, "proved")))
        variables, said = self.chosen()
        self.assertEqual(variables, self.NVLS)
        self.assertIn("AMEM_NVLS=release, by the proof of 2026-01-01", said)
        self.assertIn("also proved, but set them yourself, because whether they are safe depends on what the program does while it is paused: AMEM_USER_MEMORY=release", said)
        self.assertNotIn("NETWORK", said)

    def test_what_was_proved_each_alone_is_set_only_if_it_was_proved_together(self):
        both = {**self.NVLS, **self.NETWORK}
        for outcome, variables in (("proved", both), ("hung", {}), (None, {})):
            _proofs.keep(kept_answer((self.NVLS, "proved"), (self.NETWORK, "proved"), *([(both, outcome)] if outcome else [])))
            self.assertEqual(self.chosen()[0], variables, outcome)
        self.assertIn("AMEM_NVLS=release, AMEM_NETWORK=renew, was not proved: none is set", self.chosen()[1])

    def test_what_is_set_already_counts_in_the_combination(self):
        both = {**self.NVLS, **self.NETWORK}
        _proofs.keep(kept_answer(({}, "proved"), (self.NVLS, "proved"), (self.NETWORK, "proved"), ({"AMEM_SCOPE": "all"}, "proved"), (both, "wrong")))
        for environment in (self.NETWORK, {**self.NETWORK, "AMEM_NVLS": ""}, {"AMEM_NVLS": "keep", "AMEM_SCOPE": "all"}, {"AMEM_NVLS": "keep", **self.USER}):
            variables, said = self.chosen(environment=environment)
            self.assertEqual(variables, {}, environment)
            self.assertIn("was not proved: none is set", said)
        self.assertEqual(self.chosen(environment={"AMEM_NVLS": "keep", "AMEM_SCOPE": "nccl"})[0], self.NETWORK)
        _proofs.keep(kept_answer((self.NVLS, "proved"), (self.NETWORK, "proved"), (both, "proved")))
        self.assertEqual(self.chosen(environment=self.NETWORK)[0], self.NVLS)

    def test_a_proof_that_was_cut_short_and_has_failures_sets_nothing(self):
        _proofs.keep(kept_answer((self.NVLS, "proved")))
        _proofs.keep(kept_answer((self.NVLS, "proved"), (self.NETWORK, "hung"), complete=False, when="2026-02-01T00:00:00Z"))
        variables, said = self.chosen()
        self.assertEqual(variables, {})
        self.assertIn("a run of that proof failed, and the proof was incomplete", said)

    def test_the_nccl_that_a_proof_is_of_is_said(self):
        _proofs.keep(kept_answer((self.NVLS, "proved")))
        said = self.chosen(self.HERE._replace(library="/wheels/libnccl.so.2"))[1]
        self.assertIn("for NCCL 2.28.9 (/wheels/libnccl.so.2)", said)
        self.assertIn("a process of the command that loads another NCCL runs without them", said)

    def test_a_simulated_proof_is_none_of_a_machine(self):
        for change, words in (({"simulated": True}, "the simulator"), ({"stand_in_card": True}, "a simulated network card")):
            _proofs.keep(kept_answer((self.NVLS, "proved"), **change))
            variables, said = self.chosen()
            self.assertEqual(variables, {})
            self.assertIn(words, said)

    def test_versions_that_nobody_knows_are_not_equal(self):
        _proofs.keep(kept_answer((self.NVLS, "proved"), driver="unknown"))
        self.assertEqual(self.chosen(self.HERE._replace(driver="unknown"))[0], {})

    def test_what_the_user_set_is_left(self):
        _proofs.keep(kept_answer((self.NVLS, "proved"), (self.NETWORK, "proved")))
        variables, said = self.chosen(environment={"AMEM_NVLS": "keep"})
        self.assertEqual(variables, self.NETWORK)
        self.assertIn("AMEM_NVLS=keep is set already", said)

    def test_a_proof_of_anything_else_sets_nothing_and_says_why(self):
        _proofs.keep(kept_answer((self.NVLS, "proved")))
        for change, words in (({"gpus": ["a", "c"]}, "other GPUs"), ({"driver": "581"}, "driver 580, and here is 581"), ({"nccl": "2.29.7"}, "NCCL 2.28.9, and here is 2.29.7"),
                              ({"amem": "2"}, "AMem 1, and here is 2"), ({"nccl_settings": {"NCCL_NVLS_ENABLE": "1"}}, "other settings of NCCL")):
            variables, said = self.chosen(self.HERE._replace(**change))
            self.assertEqual(variables, {}, change)
            self.assertIn(words, said)
            self.assertIn("Nothing experimental is set", said)

    def test_without_a_proof_and_with_damaged_ones_nothing_is_set(self):
        os.makedirs(_proofs.folder())
        for name, text in (("a", ""), ("b", "[1]"), ("c", '{"schema": "amem/proof", "version": 2}'), ("d", '{"schema": "amem/proof", "version": 1}'),
                           ("e", '{"schema": "amem/proof", "version": 1, "when": 1, "simulated": false, "stand_in_card": false, "gpus": 7}')):
            with open("%s/%s.json" % (_proofs.folder(), name), "w", encoding="utf-8") as file:
                file.write(text)
        self.assertEqual(self.chosen()[0], {})

    def test_the_newest_proof_decides(self):
        _proofs.keep(kept_answer((self.NVLS, "proved")))
        _proofs.keep(kept_answer((self.NVLS, "killed"), when="2026-02-01T00:00:00Z", gpus=("a", "b", "c")))
        self.assertEqual(self.chosen()[0], {})

    def test_run_takes_what_was_proved_on_this_machine_and_says_so(self):
        site = tempfile.mkdtemp(dir=PLACE)
        os.makedirs(site + "/nvidia/nccl/lib")
        with open(site + "/nvidia/nccl/lib/libnccl.so.2", "w", encoding="utf-8") as file:
            file.write("NCCL version 2.28.9+cuda13.0")
        environment = {**os.environ, "PYTHONPATH": PACKAGE + ":" + site}

        def run(*options):
            return subprocess.run([sys.executable, "-m", "amem", "run", "--proved", *options, "--", "env"], env=environment, capture_output=True, text=True, check=True)

        self.assertIn("nothing is proved", run().stderr)
        with mock.patch.dict(os.environ, {"STAND_IN_NVLS": "1"}):
            proof(_prove.SETTINGS[:1], gpus=4)
        done = run()
        self.assertIn("amem: run --proved: AMEM_NVLS=release, by the proof of 20", done.stderr)
        self.assertIn("for NCCL 2.28.9 (%s/nvidia/nccl/lib/libnccl.so.2)" % site, done.stderr)
        self.assertLessEqual({"AMEM_NVLS=release", "AMEM_PROVED=2.28.9"}, set(done.stdout.splitlines()))
        done = run("--scope", "all")
        self.assertNotIn("AMEM_NVLS=release", done.stdout.splitlines(), "it was not proved with that scope")
        self.assertIn("AMEM_NVLS=release, AMEM_SCOPE=all, was not proved", done.stderr)


if __name__ == "__main__":
    unittest.main()
