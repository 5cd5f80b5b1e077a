"""vllm_job.py and sglang_job.py on engines of a few lines, which can be told to be wrong, slow or stuck; and what cases.py makes of reports."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
import unittest
from unittest import mock

import cases
import rl_loop
import vllm_job

HERE = os.path.dirname(os.path.abspath(__file__))
# One process for two ranks; the one that can be stopped or killed is a child that sleeps. FAKE says what goes wrong.
FAKE = {"vllm/__init__.py": """
    import os, signal, subprocess, time, types
    from .engine import arg_utils
    FAKE = os.environ.get("FAKE", "")
    __version__ = "0.fake"
    SamplingParams = types.SimpleNamespace

    class LLM:
        def __init__(self, **named):
            assert arg_utils.EngineArgs().create_model_config().sleep_mode_backend == "amem" and os.path.exists(named["model"] + "/config.json")
            self.worker, self.seed, self.asleep, self.scheduled, self.cycles = subprocess.Popen(["sleep", "1000"]), 0, False, True, 0
            self.answers, self.moods = [[], []], 0

        def _all(self, *answers):
            # As vLLM's executor: each rank's answers are a queue, and an error that is read leaves those of later ranks where they are.
            for queue, answer in zip(self.answers, answers):
                queue.append(answer)
            found = []
            for queue in self.answers:
                found.append(queue.pop(0))
                if isinstance(found[-1], Exception):
                    raise found[-1]
            return found

        def collective_rpc(self, name, args=()):
            if name == "engines_stop_in_sleep":
                self.worker.send_signal(signal.SIGSTOP)
            while name == "engines_safepoints" and not os.path.exists(args[0]):
                time.sleep(0.01)
            if name == "engines_load":
                self.seed = args[0]
            answers = {"engines_about": {"pid": self.worker.pid}, "engines_used": 3 << 30,
                       "engines_account": {"taken": (2 << 30) - (("account" in os.environ["FAKE"]) << 26), "left": {"modules": 1 << 30}, "used": 1 << 30, "driver": 1 << 30}}
            answer = answers.get(name, {"nccl": {"state": "resident"}})
            return self._all(*[{"rank": rank, **answer} if name == "engines_about" else answer for rank in range(2)])

        def _fail(self, text):
            self._all(RuntimeError(text), RuntimeError("stale: " + text))

        def _state(self):
            time.sleep(0.05)  # signals arrive a moment later
            with open("/proc/%d/stat" % self.worker.pid) as file:
                return file.read().split()[2]

        def sleep(self, level):
            self.cycles += 1
            self.scheduled = False
            if FAKE == "stuck" and self.cycles == 3:
                time.sleep(1000)
            if self._state() in "TZ":
                self._fail("rank 1 did not come")
            self._all(None, None)
            self.asleep, self.tags = True, {"weights", "kv_cache"}
            if level == 2 or FAKE == "loses":
                self.seed = -1

        def wake_up(self, tags=None):
            if self.asleep:
                if os.path.exists(os.environ["FULL"]) and FAKE != "roomy":
                    self._fail("too little free GPU memory")
                self._all(None, None)
                self.tags -= set(tags or self.tags)
                self.asleep = bool(self.tags)
            self.scheduled = not self.asleep

        def generate(self, prompts, sampling, use_tqdm):
            if self._state() == "Z":
                raise RuntimeError("EngineCore died")
            assert self.scheduled
            self.moods += FAKE == "moody"
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[(one["prompt_token_ids"][0] - 3) * self.seed + self.moods])]) for one in prompts]
    """, "vllm/engine/__init__.py": "", "vllm/engine/arg_utils.py": """
    import types
    class EngineArgs:
        def create_model_config(self):
            return types.SimpleNamespace(sleep_mode_backend="cumem")
    """, "sglang/__init__.py": """
    import os, subprocess, sys, types
    FAKE, __version__ = os.environ.get("FAKE", ""), "0.fake"
    # What a process of SGLang looks like that has torch_memory_saver's library.
    SAVER = "import mmap, tempfile, time; file = tempfile.NamedTemporaryFile(prefix='torch_memory_saver_hook_mode'); file.truncate(1)"
    SAVER += "; mapped = mmap.mmap(file.fileno(), 1); file.close(); print(1, flush=True); time.sleep(1000)"

    class Engine:
        def __init__(self, **named):
            if FAKE == "saver":
                self.worker = subprocess.Popen([sys.executable, "-c", SAVER], stdout=subprocess.PIPE)
                self.worker.stdout.readline()
            assert named["cuda_graph_max_bs"] == 4 and os.path.exists(named["model_path"] + "/config.json")
            self.seed, self.released, self.graphs, self.busy = 0, set(), named["disable_prefill_cuda_graph"], 0

        def flush_cache(self):
            self.busy = max(0, self.busy - 1)
            return types.SimpleNamespace(success=not self.busy)

        def release_memory_occupation(self, tags=None):
            assert not self.released and not self.busy
            self.released = set(tags)

        def resume_memory_occupation(self, tags=None):
            assert set(tags) <= self.released
            self.released -= set(tags)
            self.seed = 0 if FAKE == "loses" else self.seed

        def update_weights_from_tensor(self, named):
            assert "weights" not in self.released and named[0][0] == "lm_head.weight" and not self.busy
            self.seed = named[0][1]
            return FAKE != "refuses", "no such tensor"

        def collective_rpc(self, method, **parameters):
            import amem, sglang_worker
            amem.released, scheduler = self.released, types.SimpleNamespace()
            sglang_worker.offer(scheduler, types.SimpleNamespace(method=method))
            getattr(scheduler, method)(**parameters)

        def generate(self, input_ids, sampling_params):
            assert not self.released
            self.busy = 3
            return {"output_ids": [(input_ids[0] - 3) * self.seed] * sampling_params["max_new_tokens"]}
    """, "sglang/srt/server_args.py": """
    def ServerArgs(cuda_graph_max_bs=None, disable_prefill_cuda_graph=False, disable_piecewise_cuda_graph=False):
        pass
    """, "sglang_needs/torch.py": """
    bfloat16 = None
    class Generator:
        def manual_seed(self, seed):
            return seed
    def randn(*shape, generator, dtype):
        return generator
    class cuda:
        def synchronize(): pass
        def empty_cache(): pass
        def mem_get_info():
            import amem
            return (4 << 30) + (len(amem.released) << 30), 7 << 30
    class distributed:
        def get_rank(): return 0
    """, "sglang_needs/amem.py": """
    import os, types
    def memory():
        return {"tags": [{"tag": tag, "state": "paused", "last_pause_ms": 1.0, "bytes": 1 << 30} for tag in released]}
    def account():
        taken = {tag: (1 << 30) - (("account" in os.environ["FAKE"]) << 25) for tag in released}
        return types.SimpleNamespace(gpus=[types.SimpleNamespace(taken=taken, left={"modules": 1 << 30}, used=1 << 30)])
    """, "pynvml.py": """
    import types
    def nvmlInit(): pass
    def nvmlDeviceGetCount(): return 1
    def nvmlDeviceGetHandleByIndex(number): return number
    def nvmlDeviceGetComputeRunningProcesses(number): return []
    def nvmlDeviceGetMemoryInfo(handle): return types.SimpleNamespace(used=5 << 30)
    """}


class Job(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        for name, text in FAKE.items():
            path = os.path.join(self.folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(textwrap.dedent(text))

    def run_job(self, fake="", cycles=11, failures="", more=(), engine="vllm_job"):
        """The report and the exit code. The filler, for which there is no GPU here, is a program that makes a file while it lives."""
        file, full = os.path.join(self.folder, "report"), os.path.join(self.folder, "full")
        filler = 'import os, sys; open(%r, "w").close(); print("full", flush=True); sys.stdin.read(); os.unlink(%r)' % (full, full)
        code = "import sys, vllm_job, %s as job; vllm_job.FILLER = %r; sys.exit(vllm_job.main(job.Engine))" % (engine, filler)
        environment = {**os.environ, "PYTHONPATH": ":".join([self.folder, self.folder + "/sglang_needs", HERE]), "FAKE": fake, "FULL": full, "NCCL_NVLS_ENABLE": "0"}
        ran = subprocess.run([sys.executable, "-B", "-c", code, "--cycles", str(cycles), "--failures", failures, "--json", file, *more],
                             env=environment, capture_output=True, text=True, timeout=600, check=False)
        with open(file, encoding="utf-8") as source:
            return json.load(source), ran.returncode

    def test_a_good_engine_passes_every_step_and_every_failure(self):
        report, code = self.run_job(failures="full,stopped,killed")
        self.assertEqual((code, report["ok"], report["error"]), (0, True, ""))
        self.assertEqual([row["level"] for row in report["cycles"]], [1] * 8 + [2, 1, 1])
        self.assertEqual(report["messages"]["full"], "RuntimeError: too little free GPU memory")
        self.assertEqual(report["messages"]["stopped"], "RuntimeError: rank 1 did not come")
        self.assertIn("rank 1 did not come", report["messages"]["killed"])
        self.assertIn("sleep_ms", report["summary"])

    def test_a_job_is_frozen_asleep_and_awake_and_a_freeze_that_is_refused_is_told(self):
        for refuses in (False, True):
            called, tool = os.path.join(self.folder, "called"), os.path.join(self.folder, "tool")
            with open(tool, "w", encoding="utf-8") as file:
                file.write("#!/bin/sh\nhow=$1; [ \"$3\" != --between-launches ] || { how=between; set -- $1 $2 $4; }; echo $how $3 >>%s\n[ $1 != freeze ] || [ -z '%s' ] || { echo not so >&2; exit 3; }\n" % (called, refuses or "") +
                           "case $1 in freeze|thaw) echo '{\"times\": [{\"step\": \"rest\", \"ms\": 1}], \"notes\": []}';; esac\n")
            os.chmod(tool, 0o700)
            report, code = self.run_job(cycles=1, more=["--tool", tool, "--freezes", "1", "--freezes-between", "1"])
            with open(called, encoding="utf-8") as file:
                told = [line.split() for line in file.read().splitlines() if line.split()[0] in ("freeze", "between", "thaw")]
            os.unlink(called)
            pid = str(report["workers"][0]["pid"])
            freezes = ["freeze", "freeze", "between"]
            # An engine whose freeze was refused stays asleep, and answers nothing.
            self.assertEqual(told, [[how, pid] for how in freezes[:2]] if refuses else [[how, pid] for one in freezes for how in (one, "thaw")])
            self.assertEqual((code, [row and (row["asleep"], "between_launches" in row) for row in report["frozen"]]),
                             (1, [None] * 3) if refuses else (0, [(True, False), (False, False), (False, True)]))
            self.assertTrue(refuses or all(report["frozen"][2]["answers"]), report["frozen"])
            self.assertEqual("freeze ended with 3:  not so" in report["error"], refuses)

    def test_with_custom_all_reduce_a_freeze_between_launches_must_be_refused_for_what_the_ranks_share(self):
        tool = os.path.join(self.folder, "tool")
        for says, ok in (("rank 1 still shares 40 MiB", True), ("no room", False), ("", False)):
            with open(tool, "w", encoding="utf-8") as file:
                file.write("#!/bin/sh\ncase $1 in freeze) echo '%s' >&2; [ -z '%s' ] || exit 3;; thaw) ;; *) exit 0;; esac\necho '{\"times\": [], \"notes\": []}'\n" % (says, says))
            os.chmod(tool, 0o700)
            report, code = self.run_job(cycles=1, more=["--tool", tool, "--freezes-between", "1", "--custom-all-reduce", "--tp", "2"])
            self.assertEqual((code == 0, report["ok"]), (ok, ok), report)
            if ok:
                self.assertEqual(report["frozen"][0]["refused"], "still shares 40 MiB\n")

    def test_an_account_that_is_not_the_drivers_fails_the_run(self):
        report, code = self.run_job("account", cycles=1)
        self.assertEqual(code, 1)
        self.assertIn("the account of a sleep is off by {'taken and left': %d, 'left': 0} bytes" % (1 << 26), report["error"])

    def test_the_account_of_an_sglang_that_has_released_its_memory_is_held_to_the_driver(self):
        report, code = self.run_job(engine="sglang_job", cycles=1)
        self.assertEqual((code, report["ok"], report["error"]), (0, True, ""))
        self.assertEqual(report["asleep"]["account"], [{"used_mib": 3072, "taken_mib": 2048, "left_mib": {"modules": 1024}, "off_bytes": {"taken and left": 0, "left": 0}}])
        self.assertEqual(sorted(set(report["asleep"]["tags"][0]) - {"before"}), ["kv_cache", "weights"])
        report, code = self.run_job("account", engine="sglang_job", cycles=1)
        self.assertEqual((code, report["ok"]), (1, False))
        self.assertIn("the account of a sleep is off by {'taken and left': %d, 'left': 0} bytes" % (1 << 26), report["error"])

    def test_a_good_sglang_passes_every_step_and_one_that_loses_its_weights_or_refuses_others_does_not(self):
        report, code = self.run_job(engine="sglang_job")
        self.assertEqual((code, report["ok"], report["error"], report["version"]), (0, True, "", "0.fake"))
        self.assertEqual([row["level"] for row in report["cycles"]], [1] * 8 + [2, 1, 1])
        self.assertIn("sleep_ms", report["summary"])
        for fake, text in (("loses", "cycle 0: AssertionError: 72 of 96 tokens differ"), ("refuses", "two sets of weights: AssertionError: no such tensor")):
            report, code = self.run_job(fake, engine="sglang_job")
            self.assertEqual(code, 1)
            self.assertIn(text, report["error"])

    def test_an_sglang_whose_memory_is_not_with_the_backend_that_was_asked_for_is_noticed(self):
        for fake, backend, good in (("saver", "amem", False), ("", "torch_memory_saver", False), ("saver", "torch_memory_saver", True)):
            report, code = self.run_job(fake, cycles=1, engine="sglang_job", more=["--backend", backend])
            self.assertEqual((code, report["ok"]), (0, True) if good else (1, False))
            self.assertEqual("has processes with torch_memory_saver's library" in report["error"], not good)

    def test_tokens_of_weights_that_were_lost_are_noticed(self):
        report, code = self.run_job("loses")
        self.assertEqual(code, 1)
        self.assertIn("cycle 0: AssertionError: 3 of 4 tokens differ from those of the same weights, after a sleep", report["error"])

    def test_an_engine_that_never_says_the_same_is_told_from_one_that_loses_its_weights(self):
        report, code = self.run_job("moody")
        self.assertEqual(code, 1)
        self.assertIn("two sets of weights: AssertionError: 4 of 4 tokens differ from those of the same weights, twice in a row", report["error"])

    def test_a_failure_that_does_not_come_is_one(self):
        report, code = self.run_job("roomy", cycles=1, failures="full")
        self.assertEqual(code, 1)
        self.assertIn("full: AssertionError: it succeeded", report["error"])

    def test_a_step_that_hangs_ends_by_its_limit_and_leaves_a_report_and_no_process(self):
        report, code = self.run_job("stuck", more=["--step-limit", "6"])
        self.assertEqual((code, report["ok"], report["error"]), (1, False, "cycle 2 did not end in time"))
        self.assertEqual(len(report["cycles"]), 2)
        end = time.monotonic() + 60
        while vllm_job.lives(report["workers"][0]["pid"]):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)


class Reports(unittest.TestCase):
    def test_what_the_phases_of_the_last_pause_took_is_told_by_tag(self):
        rows, time_ns = [{"kind": "pool-opened", "pool": 1, "pool_tag": "vllm.weights", "time_ns": 0}], 0
        for scale in (1, 2):  # the second pause is the last one
            for pool, phases in (({"pool": 1}, ("arrive", "save", "release")), ({}, ("arrive", "arrive", "all gone"))):
                for number, phase in enumerate(phases):
                    rows.append({"kind": "phase-begun", "phase": "pause: " + phase, "time_ns": time_ns, **pool})
                    time_ns += scale * (number + 1) * 1_000_000
                rows.append({"kind": "cycle-done", "cycle_kind": "pause", "time_ns": time_ns, **pool})
            rows.append({"kind": "phase-begun", "phase": "resume: arrive", "time_ns": time_ns})
            rows.append({"kind": "cycle-done", "cycle_kind": "resume", "time_ns": time_ns + 50_000_000})
        text = "\n".join(json.dumps({"session": "08d6f962ac97bca0", **row}) for row in rows)
        self.assertEqual(vllm_job.last_pauses(text), ["08d6 vllm.weights: arrive 2.0, save 4.0, release 6.0 ms", "08d6 nccl: arrive 6.0, all gone 6.0 ms"])

    def report(self, ranks=2, **summary):
        return {"ranks": ranks, "summary": {"first_sleep_ms": 200.0, "sleep_ms": 190.0, "first_wake_ms": 200.0, "wake_ms": 190.0, "left_mib": 900,
                                            "awake_mib": 9000, **summary}}

    def test_each_bar_is_missed_by_one_figure_alone(self):
        rival = self.report(first_sleep_ms=6000.0, sleep_ms=200.0, wake_ms=240.0, left_mib=2000)
        self.assertEqual(cases.slower(self.report(), rival), [])
        for key, value, word in (("sleep_ms", 210.0, "a sleep takes 210"), ("wake_ms", 250.0, "a wake-up takes 250"), ("first_wake_ms", 210.0, "first wake-up"),
                                 ("first_sleep_ms", 601.0, "a tenth"), ("left_mib", 2000, "2000 MiB are left")):
            found = cases.slower(self.report(**{key: value}), rival)
            self.assertEqual(len(found), 1, found)
            self.assertIn(word, found[0])
        self.assertEqual(cases.slower(self.report(ranks=1, left_mib=2000), rival), [])  # without NCCL there is nothing more to give back

    def test_the_table_has_a_line_for_each_engine_and_its_messages(self):
        steps = [{"part": "engines", "name": "vLLM, TP=1, amem", "data": {**self.report(), "messages": {"full": "too little"}}},
                 {"part": "engines", "name": "vLLM", "data": None}, {"part": "bench", "name": "other", "data": {"summary": {}}}]
        lines = cases.table(steps)
        self.assertEqual(len(lines), 3)
        self.assertIn("190", lines[1])
        self.assertEqual(lines[2], "vLLM, TP=1, amem, full: too little")
        self.assertEqual(cases.table(steps[1:]), [])

    def test_loops_that_computed_something_else_are_told_by_what(self):
        plain = {"losses": ["0x1p+0", "0x1p+1"], "norms": ["0x1p+0"], "tokens": ["aa"], "parameters": "bb"}
        self.assertEqual(rl_loop.compared(plain, plain), [])
        self.assertEqual(rl_loop.compared({**plain, "losses": ["0x1p+0", "0x1.8p+1"]}, plain), ["losses differ from those without AMem (1 of 2)"])
        self.assertEqual(rl_loop.compared({**plain, "parameters": "cc"}, plain), ["parameters differ from those without AMem (1 of 1)"])
        self.assertEqual(rl_loop.compared({**plain, "tokens": []}, plain), ["tokens differ from those without AMem (0 of 0)"])

    def test_each_engine_has_its_cases_and_what_they_need(self):
        run = types.SimpleNamespace(scratch=tempfile.mkdtemp(), patched="/lib/libnccl.so.2", build="/build", options=types.SimpleNamespace(second="/second", cycles=20))
        self.addCleanup(shutil.rmtree, run.scratch)
        self.assertEqual([(ranks, one) for _, ranks, one in cases.all_cases(2, "/second")], [(1, True), (2, True), (2, False), (4, True)])
        for script, backend, ranks, one_gpu, failures, more in (
                ("vllm_job.py", "amem", 4, True, "", {"LD_PRELOAD": "/lib/libamem_nccl.so:/second", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
                ("vllm_job.py", "amem", 2, False, "full,stopped,killed", {"LD_PRELOAD": "/lib/libamem_nccl.so"}),
                ("sglang_job.py", "amem", 2, False, "", {"LD_PRELOAD": "/lib/libamem_nccl.so", "AMEM_ENABLE": "1"}),
                ("sglang_job.py", "torch_memory_saver", 1, True, "", {})):
            environment, command = cases.environment_of(run, [script], backend, ranks, one_gpu), cases.engine_command(run, script, backend, ranks)
            self.assertEqual({name: environment.get(name) for name in ("LD_PRELOAD", "NCCL_MULTI_RANK_GPU_ENABLE", "AMEM_ENABLE") if name in environment}, more)
            self.assertEqual(command[:1] + command[command.index("--failures") + 1:][:1], [script, failures])

    def test_starts_at_the_same_time_are_held_against_each_other_once_all_turns_have_ended_well(self):
        for slower, tests, breaks, word in ((1.01, "", "", "pass"), (1.03, "", "", "FAIL"), (1.03, "vLLM start 1", "", ""), (1.01, "", "2.1, scope all", "")):
            scratch, steps, under_way, most = tempfile.mkdtemp(), [], [], []
            self.addCleanup(shutil.rmtree, scratch)

            def call(command, _limit, environment, echo):
                self.assertFalse(echo)
                under_way.append(command)
                time.sleep(0.02)
                most.append(len(under_way))
                seconds = 40.0 + (slower - 1) * 40.0 * (environment.get("AMEM_SCOPE") == "all")
                with open(command[command.index("--json") + 1], "w", encoding="utf-8") as file:
                    json.dump({"ok": True, "backend": "cumem", "ranks": 1, "steps": [{"name": "start", "seconds": seconds}], "start_of_workers_s": 5}, file)
                under_way.remove(command)
                return 0, ""

            def step(part, name, gpus, outcome, reason="", seconds=0.0, data=None):
                steps.append({"part": part, "name": name, "outcome": outcome, "reason": reason, "gpus": gpus, "seconds": seconds, "data": data})

            def broken(run, gpus, name, *more):
                return {"ok": False} if breaks and breaks in name else judged(run, gpus, name, *more)

            judged = cases.judged
            run = types.SimpleNamespace(scratch=scratch, patched="/lib/x", steps=steps, call=call, step=step, left=lambda: 500, new_journal=lambda: None,
                                        skip_for_time=lambda *_: False, options=types.SimpleNamespace(python="python3", tests=tests, second="", cycles=1))
            with mock.patch.object(cases, "judged", broken):
                cases.starts(run, 1)
            self.assertEqual([row["outcome"] for row in steps if "against" in row["name"]], [word] if word else [])
            self.assertGreater(max(most), 1)

    def test_ranks_that_end_without_a_report_are_one_failure_and_those_that_hang_are_ended(self):
        for code, word in (("import sys; sys.exit(3)", "3"), ("import time; time.sleep(1000)", "-9")):
            with mock.patch.object(sys, "argv", ["-c", code]), tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                options = types.SimpleNamespace(time_limit=2, ranks=2, one_gpu=True, json=os.path.join(folder, "report"))
                report = rl_loop.launch(options)
            self.assertLess(time.monotonic() - began, 900)
            self.assertFalse(report["ok"])
            self.assertIn(word, report["error"])

    def test_entry_points_are_those_of_the_package(self):
        import configparser

        with tempfile.TemporaryDirectory() as folder:
            cases.entry_points(folder)
            with open(os.path.join(folder, "amem_nccl-0.dist-info", "entry_points.txt"), encoding="utf-8") as file:
                made = configparser.ConfigParser()
                made.read_file(file)
        with open(os.path.join(cases.PACKAGE, "pyproject.toml"), encoding="utf-8") as file:
            text = file.read()
        self.assertEqual(len(made.sections()), 3)
        for group in made.sections():
            for name, value in made[group].items():
                self.assertIn('[project.entry-points."%s"]\n%s = "%s"\n' % (group, name, value), text)


if __name__ == "__main__":
    signal.alarm(1150)
    unittest.main()
