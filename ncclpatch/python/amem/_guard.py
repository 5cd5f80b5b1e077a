"""`amem run --guard`: stays the job's parent, and no signal of its own ends the job while it is frozen or paused from outside.

A frozen process that is killed takes its GPU with it on some drivers. So a signal that is sent to this process (as Kubernetes sends it to
process 1 of a container, and Slurm to the process group of a task) first brings the job back: thawed, resumed. Then the job gets it, and ends as
it would without AMem. The job is in a session of its own, so that what is sent to a process group reaches this process alone. SIGKILL can be
neither caught nor held.
"""

import json
import os
import signal
import subprocess
import sys
import time

from . import _why

HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ASKED_SECONDS = 10  # for what the tool says without the driver
AGAIN_SECONDS = 1
RESUME_TRIES = 10  # a paused process may die, so a job that cannot resume gets the signal then; a frozen one may not
RUNNING = "running"


def say(text):
    print("amem: run --guard: " + text, file=sys.stderr, flush=True)


class Guard:
    """Of one command, which it starts. OSError: it cannot be started."""

    def __init__(self, command, environment, replay):
        self._replay = replay
        signal.pthread_sigmask(signal.SIG_BLOCK, {*HELD, signal.SIGCHLD})
        self._process = subprocess.Popen(  # pylint: disable=consider-using-with,subprocess-popen-preexec-fn  # kept: its end would wait for it
            command, env=environment, start_new_session=True, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {*HELD, signal.SIGCHLD}))
        self.pid = self._process.pid

    def run(self):
        """Until the command has ended; its exit code, 128 and more of a signal."""
        while True:
            code = self._ended()
            if code is not None:
                return code
            number = signal.sigwaitinfo({*HELD, signal.SIGCHLD}).si_signo
            if number != signal.SIGCHLD:
                self._bring_back(signal.Signals(number).name)
                try:
                    os.killpg(self.pid, number)
                except ProcessLookupError:
                    pass  # it has ended, as will be seen

    def _ended(self):
        """The command's exit code, once it has one. All children are waited for: process 1 gets everybody's."""
        code = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1 if code is None else code
            if pid == 0:
                return code
            if pid == self.pid:
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def _bring_back(self, name):
        """Returns when the job is neither frozen nor paused, or gone."""
        thaws = resumes = 0
        while self._is_there():
            frozen, runs = self._stands()
            if runs:
                return
            if thaws + resumes == 0:
                say("%s waits until the job is back on its GPUs" % name)
            if not frozen and resumes == RESUME_TRIES:
                say("the job does not resume, and gets %s while it is paused" % name)
                return
            code, said = self._ask("thaw", "--json", None) if frozen else self._ask("resume", ASKED_SECONDS)
            thaws, resumes = thaws + frozen, resumes + (not frozen)
            if code == 0:
                continue
            if frozen and (thaws == 1 or thaws % 30 == 0):  # another tool may be at it, or the GPU is full
                say("the job is not thawed: %s" % (said.get("message") or "the tool said nothing"))
            time.sleep(AGAIN_SECONDS)

    def _stands(self):
        """Whether the job is frozen, or half of it; and whether each of its ranks runs, which is also said where none can be asked."""
        code, said = self._ask("ls", "--live", "--json", ASKED_SECONDS)
        if code != 0:
            return False, True
        frozen = said["freeze"] is not None
        return frozen, not frozen and all(rank["phase"] == RUNNING for rank in said["ranks"] if rank["alive"])

    def _is_there(self):
        try:
            with open("/proc/%d/stat" % self.pid, encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def _ask(self, *words):
        """(exit code, JSON) of a command of the tool about the job; the last word is how long it may take. (2, {}): it does not answer."""
        command, seconds = [self._replay, words[0], str(self.pid), *words[1:-1]], words[-1]
        try:
            done = subprocess.run(command, env=_why.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=seconds, check=False)
            return done.returncode, (json.loads(done.stdout) if "--json" in words and done.stdout.strip() else {})
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return 2, {}
