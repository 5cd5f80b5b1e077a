"""`amem run --guard`: stays the job's parent, and no signal of its own ends the job while it is frozen or paused from outside.

A frozen process that is killed takes its GPU with it on some drivers. So an ending signal that is sent to this process (as Kubernetes sends it to
process 1 of a container) first brings the job back: thawed, resumed. Then the job gets it, and ends as it would without AMem. The command is
in a session of its own, so that what is sent to a process group reaches this process alone. SIGKILL can be neither caught nor held.

Which ranks there are their open journals say, and how a freeze stands the journals' last step of it: neither needs an answer of a process.
What cannot be known is asked again for a while, and not taken for "runs". A job that is known to be frozen gets no signal at all.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from . import _why

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)  # of the program's own; held while it is frozen, and nothing is resumed for them
TAKEN = {*ENDING, *PASSED_ON, signal.SIGCHLD}
BY_THE_KERNEL = 128  # si_code of what a terminal sends to its process group
READ_SECONDS, THAW_SECONDS = 20, 300  # of one try
UNKNOWN_SECONDS = 60  # then a job of which nobody can say whether it is frozen gets its signal
PAUSED_SECONDS = 20  # then one that does not resume, or cannot be asked, gets it: a paused process may die
AGAIN_SECONDS, SAY_SECONDS = 1, 30
JOURNAL = re.compile(r"(/.*/[0-9a-f]{16})/tail")  # that a rank has open
BACK = ("running", "paused", "lost")  # outcomes of a freeze or thaw after which nothing is frozen any more
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: ranks whose launcher has ended are still found


def say(text):
    print("amem: run --guard: " + text, file=sys.stderr, flush=True)


class Guard:
    """Of one command, which it starts. OSError: it cannot be started."""

    def __init__(self, command, environment, replay):
        self._replay, self._ended, self._pending = replay, {}, []
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
        try:
            self._process = subprocess.Popen(command, env=environment, start_new_session=True, close_fds=False,  # pylint: disable=consider-using-with
                                             preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before))
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        self.pid = self._process.pid

    def run(self):
        """Until the command has ended; its exit code, 128 and more of a signal."""
        while self.pid not in self._ended:
            if not self._pending:
                self._wait(None)
                continue
            info = self._pending[0]
            if self._may_have(info) and self.pid not in self._ended:  # then its number may be another process's
                self._pending.pop(0)
                self._pass_on(info)
        self._process.returncode = self._ended[self.pid]  # it has been waited for
        return self._process.returncode if self._process.returncode >= 0 else 128 - self._process.returncode

    # ---- signals and children, awaited together

    def _wait(self, seconds):
        """Until a signal comes, at most so long. Children that have ended are waited for: process 1 gets everybody's."""
        info = signal.sigwaitinfo(TAKEN) if seconds is None else signal.sigtimedwait(TAKEN, max(0, seconds))
        if info is not None and info.si_signo != signal.SIGCHLD:
            self._pending.append(info)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended[pid] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)

    def _ask(self, seconds, *words):
        """(exit code, output) of a command of the tool; None: it did not end in time, or cannot be started."""
        with tempfile.TemporaryFile() as output:
            try:
                tool = subprocess.Popen([self._replay, *words], env=_why.environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)
            except OSError:
                return None
            end = time.monotonic() + seconds
            while tool.pid not in self._ended and time.monotonic() < end and self.pid not in self._ended:
                self._wait(end - time.monotonic())
            tool.returncode = self._ended.pop(tool.pid, None)
            if tool.returncode is None:
                tool.kill()
                tool.wait()
                return None
            output.seek(0)
            return tool.returncode, output.read().decode(errors="replace")

    def _pass_on(self, info):
        try:
            if info.si_code == BY_THE_KERNEL:
                os.killpg(self.pid, info.si_signo)
            else:
                os.kill(self.pid, info.si_signo)
        except OSError as error:
            say("%s cannot be sent to %d: %s" % (signal.Signals(info.si_signo).name, self.pid, error.strerror))

    # ---- the job

    def _may_have(self, info):
        """Returns when the job may get a signal; false: the command has ended."""
        name, ending = signal.Signals(info.si_signo).name, info.si_signo in ENDING
        began, said = time.monotonic(), -SAY_SECONDS
        while self.pid not in self._ended:
            ranks = self._ranks()
            frozen = [(rank, is_so) for rank in ranks for is_so in [self._frozen(rank)] if is_so is not False]
            paused = [rank for rank in ranks if self._paused(rank) is not False] if ending and not frozen else []
            if not frozen and not paused:
                return True
            known = [rank for rank, is_so in frozen if is_so]
            since = time.monotonic() - began
            if not known and since > (UNKNOWN_SECONDS if frozen else PAUSED_SECONDS):
                say("the job %s in %d s; it gets %s" % ("cannot be asked" if frozen else "does not resume", since, name))
                return True
            if since - said >= SAY_SECONDS:
                say("%s waits until the job is back on its GPUs" % name)
                said = since
            if ending and known:
                self._say_why(self._ask(THAW_SECONDS, "thaw", "--json", known[0]))
            elif paused:
                self._ask(max(1, PAUSED_SECONDS - since), "resume", paused[0])
            self._wait_for(AGAIN_SECONDS)
        return False

    def _wait_for(self, seconds):
        """So long, or until the command has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.pid not in self._ended:
            self._wait(end - time.monotonic())

    @staticmethod
    def _say_why(answer):
        if answer is None:
            return say("the thaw did not end; it is tried again")
        if answer[0] != 0:
            try:
                say("the thaw failed: " + json.loads(answer[1])["message"])
            except (ValueError, KeyError, TypeError):
                say("the thaw ended with %d" % answer[0])
        return None

    def _ranks(self):
        """The journals of all ranks among the processes under this one, whatever their AMEM_JOURNAL_DIR is."""
        parents = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open("/proc/%s/stat" % entry, encoding="utf-8", errors="replace") as file:
                        parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
                except (OSError, IndexError, ValueError):
                    pass  # it has ended
        found, own = set(), os.getpid()
        for pid in parents:
            above = pid
            while above in parents and above != own:
                above = parents[above]
            if above == own and pid != own:
                found |= self._journals(pid)
        return sorted(found)

    @staticmethod
    def _journals(pid):
        found = set()
        try:
            for descriptor in os.listdir("/proc/%d/fd" % pid):
                try:
                    match = JOURNAL.fullmatch(os.readlink("/proc/%d/fd/%s" % (pid, descriptor)))
                except OSError:
                    continue
                if match:
                    found.add(match.group(1))
        except OSError:
            pass  # it has ended, or is another user's, and so no rank of this one's
        return found

    def _frozen(self, rank):
        """By the last step of a freeze or thaw in a rank's journal; None: not known."""
        answer = self._ask(READ_SECONDS, "log", rank, "--json", "--kind", "freeze-step", "--last", "1")
        if answer is None or answer[0] not in (0, 3):
            return None
        try:
            steps = [json.loads(line) for line in answer[1].splitlines() if line.strip()]
            return bool(steps) and steps[-1].get("outcome", "") not in BACK
        except ValueError:
            return None

    def _paused(self, rank):
        """Whether a rank's job is paused from outside; None: not known."""
        answer = self._ask(READ_SECONDS, "ls", "--live", "--json", rank)
        try:
            ranks = json.loads(answer[1])["ranks"] if answer and answer[0] == 0 else None
        except (ValueError, KeyError, TypeError):
            ranks = None
        if not ranks:
            return None
        return any(one["phase"] != "running" for one in ranks)
