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
FROZEN = ("frozen", "stuck")  # outcomes of a thaw that did not bring the job back
RUNNING = "running"


def say(text):
    print("amem: run --guard: " + text, file=sys.stderr, flush=True)


class Guard:
    """Of one command, which it starts. OSError: it cannot be started."""

    def __init__(self, command, environment, replay):
        self._replay = replay
        signal.pthread_sigmask(signal.SIG_BLOCK, {*HELD, signal.SIGCHLD})
        self.pid = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=lambda: signal.pthread_sigmask(  # pylint: disable=subprocess-popen-preexec-fn
            signal.SIG_UNBLOCK, {*HELD, signal.SIGCHLD})).pid

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
        if self._all_run():
            return
        say("%s waits until the job is back on its GPUs" % name)
        tries = 0
        while self._is_there():
            code, said = self._ask("thaw", "--json", None)
            frozen = said.get("outcome") in FROZEN
            if not frozen and (code == 0 or self._ask("resume", ASKED_SECONDS)[0] in (0, 2)) and self._all_run():
                return
            tries += 1
            if not frozen and tries >= RESUME_TRIES:
                return say("the job does not resume, and gets %s while it is paused: %s" % (name, said.get("message", "")))
            if tries == 1 or tries % 30 == 0:
                say("the job is not back: %s" % (said.get("message") or "the tool said nothing"))
            time.sleep(AGAIN_SECONDS)

    def _all_run(self):
        """Whether each rank of the job runs; also where there is none that could be asked."""
        code, said = self._ask("ls", "--live", "--json", ASKED_SECONDS)
        return code != 0 or all(rank["phase"] == RUNNING for rank in said.get("ranks", ()) if rank["alive"])

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
