#!/usr/bin/env python3
"""SIGTERM, SIGINT and the end of the tool, at random moments of a pause and of a freeze of a job under `amem run --guard`.

    NCCL_NVLS_ENABLE=0 PYTHONPATH=ncclpatch/python AMEM_LIBRARY=LIB AMEM_REPLAY=TOOL signals_job.py --nccl libnccl.so.2 --moments 20 --json FILE

Each trial is a process with a communicator of its own and a GiB that it fills, which trains. The tool pauses or freezes it from outside, and after a random
time the guard gets the signal, or the tool SIGKILL. After a signal the job must end in order, with a right result and its own exit code; after the end of
the tool another one brings it back, and it must train on. At the end no process may be left, no memory of the GPU, and no Xid may have been seen, by
the management library's events or in the kernel's log. What cannot see them is reported as that.

Prints a line for each trial, and one of JSON last. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../ncclpatch/python"), os.path.join(HERE, "../../ncclpatch/python")]
sys.dont_write_bytecode = True
import guard_test  # noqa: E402

CLOSE = 64 << 20  # bytes of a GPU that may differ between two moments without a program
LONGEST = {"freeze": 4.0, "pause": 0.2}  # seconds after the tool's start: on an H200 a third of the moments find it at work
STAND_INS_LONGEST = 0.2  # likewise on the stand-ins, which are faster at a freeze
ENOUGH = 5  # ends of the tool, of which one must find it at work
ENDINGS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "the tool": signal.SIGKILL}
SECONDS = 40  # for a job to end or to train on
BACK = (["thaw", "--undo"], ["thaw"], ["resume"])  # whatever the tool that ended had done
XID, TIMEOUT = 8, 10  # nvmlEventTypeXidCriticalError, NVML_ERROR_TIMEOUT
JOB = guard_test.JOB.replace("def step():", "held = job.driver.allocate(int(sys.argv[3]) << 20).value\ndef step():\n    job.driver.fill(held, 7, int(sys.argv[3]) << 20)", 1)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nccl", default="libnccl.so.2", help="a stock libnccl.so.2 (default: the stand-in on LD_LIBRARY_PATH)")
    parser.add_argument("--moments", type=int, default=20, help="of each ending, in a pause and in a freeze (default 20)")
    parser.add_argument("--at-once", type=int, default=1, help="jobs that share the GPU")
    parser.add_argument("--mib", type=int, default=1024, help="that a job fills in each step (default 1024)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=500, help="seconds for all trials; what does not fit is left out, visibly")
    parser.add_argument("--json", default="", help="the last line goes there too")
    return parser.parse_args()


# ---- what the driver reports of faults


class Event(ctypes.Structure):
    _fields_ = [("device", ctypes.c_void_p), ("kind", ctypes.c_ulonglong), ("data", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


class Xids:
    """All Xids from now on, as far as they can be seen: `seen`, and how each source is read, in words."""

    def __init__(self):
        self.seen, self.sources = [], {"events": "watched", "kernel log": "watched"}
        self._stop, self._log, self._thread = threading.Event(), -1, None
        try:
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)
            self._read_log()
        except OSError as error:
            self.sources["kernel log"] = "cannot be seen: %s" % error.strerror
        try:
            library, events = self._watched_events()
            self._thread = threading.Thread(target=self._await_events, args=(library, events), daemon=True)
            self._thread.start()
        except (OSError, AttributeError) as error:
            self.sources["events"] = "cannot be seen: %s" % error

    @staticmethod
    def _watched_events():
        library, count, events = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(), ctypes.c_void_p()

        def call(name, *rest):
            if result := getattr(library, name)(*rest):
                raise OSError("%s answered %d" % (name, result))

        call("nvmlInit_v2")
        call("nvmlEventSetCreate", ctypes.byref(events))
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for number in range(count.value):
            device = ctypes.c_void_p()
            call("nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(device))
            call("nvmlDeviceRegisterEvents", device, ctypes.c_ulonglong(XID), events)
        return library, events

    def _await_events(self, library, events):
        while not self._stop.is_set():
            event = Event()
            result = library.nvmlEventSetWait_v2(events, ctypes.byref(event), 500)
            if result == 0:
                self.seen.append({"source": "events", "xid": event.data})
            elif result != TIMEOUT:
                self.sources["events"] = "cannot be seen: nvmlEventSetWait answered %d" % result
                return

    def _read_log(self):
        lines = []
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    lines.append(os.read(self._log, 8192).decode(errors="replace"))
                except BrokenPipeError:  # the kernel has written over what was next
                    continue
        return lines

    def end(self):
        """What was seen, and by what."""
        self._stop.set()
        if self._thread:
            self._thread.join()
        if self._log >= 0:
            found = (re.search(r"NVRM: Xid[^:]*: (\d+)", line) for line in self._read_log())
            self.seen += [{"source": "kernel log", "xid": int(one.group(1))} for one in found if one]
            os.close(self._log)
        return {"seen": self.seen, **self.sources}


# ---- one trial


class Failed(Exception):
    pass


class Trial:
    def __init__(self, options, state, ending, seed):
        self.options, self.state, self.ending, self.random = options, state, ending, random.Random("%d %s %s" % (seed, state, ending))
        self.row = {"state": state, "ending": ending, "seed": seed, "ok": False}

    def run(self):
        """The row of it."""
        with tempfile.TemporaryDirectory(prefix="amem-signals-", dir="/tmp") as folder:
            self.steps_file = folder + "/steps"
            self.environment = {**os.environ, "AMEM_JOURNAL_DIR": folder + "/j", "AMEM_SOCKET_DIR": folder + "/s"}
            if self.options.nccl == "libnccl.so.2":
                self.environment["AMEM_SIM_WORLD"] = folder + "/world"
            command = [sys.executable, "-m", "amem", "run", "--guard", "--", sys.executable, "-c", JOB, self.steps_file, self.options.nccl, str(self.options.mib)]
            self.job = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                self.trial()
                self.row["ok"] = True
            except (Failed, subprocess.TimeoutExpired) as error:
                self.row["why"] = str(error)[-1500:]
            finally:
                self.end_all()
        return self.row

    def trial(self):
        self.trains_on(3)
        moment = self.random.uniform(0, LONGEST[self.state] if self.options.nccl != "libnccl.so.2" else min(LONGEST[self.state], STAND_INS_LONGEST))
        tool = subprocess.Popen([os.environ["AMEM_REPLAY"], self.state], env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment)
        self.row.update(after_s=round(moment, 3), tool_had_ended=tool.poll() is not None)
        if self.ending == "the tool":
            tool.kill()
            tool.wait()
            self.bring_back()
            self.trains_on(self.steps() + 3)
        self.ends_in_order(ENDINGS[self.ending] if self.ending != "the tool" else signal.SIGTERM)
        tool.wait(SECONDS)

    def steps(self):
        with contextlib.suppress(OSError, ValueError), open(self.steps_file, encoding="utf-8") as file:
            return int(file.read())
        return 0

    def trains_on(self, steps):
        end = time.monotonic() + SECONDS
        while self.steps() < steps:
            if self.job.poll() is not None:
                raise Failed("the job ended with %d: %s" % (self.job.returncode, self.job.stderr.read()))
            if time.monotonic() > end:
                raise Failed("the job does not train: step %d in place of %d" % (self.steps(), steps))
            time.sleep(0.01)

    def bring_back(self):
        """By other tools, one after the other. What had not begun is no failure: whether it trains is asked afterwards."""
        said = []
        for command in BACK:
            done = subprocess.run([os.environ["AMEM_REPLAY"], *command, "--json"], env=self.environment, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
            said.append("%s: %d" % (" ".join(command), done.returncode))
        self.row["back_by"] = said

    def ends_in_order(self, number):
        self.job.send_signal(number)
        out, err = self.job.communicate(timeout=SECONDS)
        self.row["waited"] = "waits until the job is back" in err
        if self.job.returncode != 7 or out != "ended in order after %d\n" % number:
            raise Failed("the job ended with %d: %s %s" % (self.job.returncode, out, err))

    def end_all(self):
        """Where the trial failed: thawed first, since a frozen process that is killed may cost a reset."""
        if self.job.poll() is None:
            self.bring_back()
            with contextlib.suppress(OSError, ValueError), open(self.steps_file + ".pid", encoding="utf-8") as file:
                os.kill(int(file.read()), signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job.communicate(timeout=5)
            self.job.kill()
            self.job.communicate()


# ---- all of them


def used():
    """Bytes in use of each GPU, by the management library; no numbers where nobody says it."""
    from amem._jobs import host
    here = host.Host()
    with contextlib.suppress(host.CannotProve):
        here.describe(None)
        return [use.used for use in here._uses()]
    return []


def machine(nccl):
    """(the GPUs and their driver in words, NCCL's version)"""
    from amem._jobs import host, prove
    about, version = host.Host().describe(None), ctypes.c_int()
    ctypes.CDLL(nccl).ncclGetVersion(ctypes.byref(version))
    names = collections.Counter(gpu["name"] for gpu in about["gpus"])
    return ", ".join("%d x %s" % (count, name) for name, count in names.items()) + ", driver " + about["driver"], prove.version_text(version.value)


def left_behind(before):
    """{"grown_mib", "processes"}, once nothing changes any more."""
    end = time.monotonic() + 15
    while True:
        grown = [now - then for now, then in zip(used(), before)]
        jobs = subprocess.run(["pgrep", "-f", "amem-signals-"], capture_output=True, text=True, check=False).stdout.split()
        if (max(grown, default=0) < CLOSE and not jobs) or time.monotonic() > end:
            return {"grown_mib": [size >> 20 for size in grown], "processes": len(jobs)}
        time.sleep(0.5)


def judged(report):
    """The report with "ok" and what is wrong in words."""
    wrong = ["%s of a %s, seed %d: %s" % (row["ending"], row["state"], row["seed"], row.get("why")) for row in report["trials"] if not row["ok"]]
    wrong += ["Xid %d, by the %s" % (one["xid"], one["source"]) for one in report["xids"]["seen"]]
    if max(report["left"]["grown_mib"], default=0) >= CLOSE >> 20:
        wrong.append("%s MiB more are in use than before" % report["left"]["grown_mib"])
    if report["left"]["processes"]:
        wrong.append("%d processes are left" % report["left"]["processes"])
    if not report["trials"] or report["left_out"]:
        wrong.append("%d trials did not fit into the time" % report["left_out"])
    if report["trials"] and not any(row.get("waited") for row in report["trials"]):
        wrong.append("no signal came while a job was paused or frozen")
    for state in LONGEST:
        ended = [row["tool_had_ended"] for row in report["trials"] if (row["state"], row["ending"]) == (state, "the tool") and "tool_had_ended" in row]
        if len(ended) >= ENOUGH and all(ended):
            wrong.append("no tool was ended in a %s, but only after it" % state)
    return {**report, "ok": not wrong, "wrong": wrong[:20]}


def counted(trials):
    """How many went well of how many, and how many of the signals had to wait, by state and ending."""
    found = collections.defaultdict(lambda: {"ok": 0, "of": 0, "waited": 0, "tool_had_ended": 0})
    for row in trials:
        one = found["%s, %s" % (row["state"], row["ending"])]
        one["of"] += 1
        for key in ("ok", "waited", "tool_had_ended"):
            one[key] += bool(row.get(key))
    return found


def main():
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("signals_job: refused: NCCL_NVLS_ENABLE must be 0", file=sys.stderr)
        return 2
    options = arguments()
    began, before, xids, rows = time.monotonic(), used(), Xids(), []

    def one(number, state, ending):
        if time.monotonic() - began > options.budget:
            return None
        row = Trial(options, state, ending, options.seed + number).run()
        print(json.dumps(row), flush=True)
        return row

    kinds = [(number, state, ending) for number in range(options.moments) for state, ending in itertools.product(LONGEST, ENDINGS)]
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        rows = list(pool.map(lambda kind: one(*kind), kinds))
    trials = [row for row in rows if row]
    left, (where, version) = left_behind(before), machine(options.nccl)
    report = judged({"program": "signals_job", "machine": where, "nccl": version, "moments": options.moments, "at_once": options.at_once,
                     "seconds": round(time.monotonic() - began, 1), "counts": counted(trials), "left_out": len(rows) - len(trials), "left": left, "xids": xids.end(), "trials": trials})
    line = json.dumps(report)
    print(line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
