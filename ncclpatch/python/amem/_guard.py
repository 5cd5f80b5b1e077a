"""`amem run --guard`: stays the job's parent, and no signal of its own ends the job while it is frozen or paused from outside.

A frozen process that is killed takes its GPU with it on some drivers. So an ending signal that is sent to this process (as Kubernetes sends it to
process 1 of a container) first brings the job back: thawed, resumed. Then the job gets it, and ends as it would without AMem. The command is
in a session of its own, so that what is sent to a process group reaches this process alone. SIGKILL can be neither caught nor held.

With `--park-on TERM` a job that runs is stopped between two launches of NCCL's before it gets SIGTERM, and stays so, with all its memory: its handlers run,
and a SIGKILL at the end of a grace period meets no transfer. Where it cannot be parked it gets the signal all the same.

Open journals show which ranks exist, and their last freeze step shows the state of a freeze: no process needs to answer.
What cannot be known is asked again for a while, and not taken for "runs". A job that is known to be frozen gets no signal at all, and while one is
left behind by its command, the guard stays: as process 1 of a container it would take the ranks with it.
"""

import collections
import ctypes
import errno
import json
import math
import os
import re
import signal
import subprocess
import time

from . import _why

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)  # of the program's own; held while it is frozen, and nothing is resumed for them
TAKEN = {*ENDING, *PASSED_ON, signal.SIGTSTP, signal.SIGCHLD}
BY_THE_KERNEL = 128  # si_code of what a terminal sends to its process group
READ_SECONDS, THAW_SECONDS, PARK_SECONDS, CHECK_SECONDS = 20, 300, 10, 3  # of one try, however many ranks are asked
AGAIN_SECONDS, LATER_SECONDS, SAY_SECONDS = 1, 10, 30
END_SECONDS = 600  # that an end may take; what has not ended by then trains on, and whoever pauses or freezes it means it
RUNS, PAUSED, UNKNOWN, FROZEN = "runs", "does not resume", "cannot be asked whether it is frozen", "is frozen"
# In seconds since it was first found so after the job last ran or was frozen; then it gets its signal: a paused process may die.
PATIENCE = {RUNS: 0, PAUSED: 20, UNKNOWN: 60, FROZEN: math.inf}
JOURNAL = re.compile(r"(/.*/[0-9a-f]{16})/tail( \(deleted\))?")  # that a rank has open
STOPPING = ("held", "arrived", "pausing")  # phases of a rank that is being parked or paused
ANOTHER = "another request is under way"  # the tool's answer where a rank does not take its request yet
HELD = (*STOPPING, "paused", "failed")  # phases of a rank that a request stops
BACK = ("running", "paused", "lost")  # outcomes of a freeze or thaw after which nothing is frozen any more
NOT_FROZEN = "the job is not frozen"  # a thaw's answer where journals and driver agree
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: ranks whose launcher has ended are still found
CLOSED_ON_EXEC = 1  # MFD_CLOEXEC
_LIBC = ctypes.CDLL(None)
GONE = (errno.ENOENT, errno.ESRCH)


class Guard:
    """Of one command, which it starts. OSError: it cannot be started."""

    def __init__(self, command, environment, replay, park_on=frozenset()):
        self._replay, self._park_on = replay, park_on
        self._pending = []  # signals that have come, as siginfo
        self._waited_for = {}  # pid of a tool: its exit code, None before it ended
        self._code = None  # of the command, once it has ended
        self._ranks = {}  # journal of a rank: a process that has it open
        self._steps = {}  # journal of a rank: the last step of a freeze in it, {} for none, as last read
        self._back = {}  # journal of a rank: begun_ns of the freeze from which a thaw found it back, whatever its journal says
        self._said = {}  # about what: when
        self._put_off = None  # since when signals are, because of a park after which it was not known how the job stands
        self._ends_by = {}  # ending signals that the command has got: when, last
        _LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
        children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some callers leave it, it would lose exit codes
        before = signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)

        def as_it_was():
            if children is not None:
                signal.signal(signal.SIGCHLD, children)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        try:
            process = subprocess.Popen(command, env=environment, start_new_session=True, close_fds=False,  # pylint: disable=consider-using-with
                                       preexec_fn=as_it_was)
        except OSError:
            as_it_was()
            raise
        self.pid, process.returncode = process.pid, 0  # it is waited for here

    def run(self):
        """Until the command has ended, and no frozen rank of it is left; its exit code, 128 and more of a signal."""
        since = {}  # state: when it was first found after the job last ran or was frozen
        while True:
            if not self._pending and self._code is None:
                since = {}
                if self._ends_by:
                    self._end_goes_on()
                else:
                    self._wait(None)
                continue
            signals, left = list(self._pending), self._code is not None  # what comes from now on was not asked for
            ending, names = any(info.si_signo in ENDING for info in signals), names_of(signals)
            state, paused = self._state(ending and not left)
            if state in (RUNS, FROZEN):
                since = {}
            if state == FROZEN:
                self._put_off = None
            now = time.monotonic()
            waited = now - since.setdefault(state, now)
            if waited >= PATIENCE[state]:
                if left:
                    return self._code if self._code >= 0 else 128 - self._code
                if state != RUNS:
                    say("for %d s the job %s; it gets %s" % (waited, state, names))
                self._deliver(signals, state)
                continue
            if left:
                self._say("left", "the command has ended, and its job %s; the guard stays until no rank is frozen" % state)
            else:
                self._say("waits", "%s waits until the job is back on its GPUs" % names)
            if ending:
                self._bring_back(state, paused)
            self._wait_for(AGAIN_SECONDS)

    def _end_goes_on(self):
        """Of a command that has got its ending signal: a pause or freeze that began before, and came after it was asked about, holds it up."""
        since = time.monotonic() - max(self._ends_by.values())
        if since > END_SECONDS:
            self._ends_by.clear()
            return
        self._wait_for(AGAIN_SECONDS if since < SAY_SECONDS else LATER_SECONDS)
        if self._pending or self._code is not None:
            return
        state, paused = self._state(False)[0], None
        if state != FROZEN:
            lives = self._lives(READ_SECONDS)
            paused = next((rank for rank, answer in lives if is_paused_from_outside(answer, bool(self._park_on))), None)
            state = PAUSED if paused else RUNS
            parked = next((rank for rank, answer in lives if any(one[2] for one in phases(answer))), None)
            if parked and not paused:
                self._say("parked", "the job is parked, and has got %s; `amem resume %s` lets it go on" % (" and ".join(self._ends_by), parked))
        if state != RUNS:
            self._say("ends", "the job is %s, and it has got %s; it is brought back" % ("paused" if paused else "frozen", " and ".join(self._ends_by)))
            self._bring_back(state, paused)

    def _bring_back(self, state, paused):
        if state == FROZEN:
            self._thaw()
        elif state == PAUSED and paused:
            self._ask(PATIENCE[PAUSED], ["resume", paused])

    # ---- signals and children, awaited together

    def _wait(self, seconds):
        """Until a signal comes, at most so long. Children that have ended are waited for: process 1 gets everybody's."""
        info = signal.sigwaitinfo(TAKEN) if seconds is None else signal.sigtimedwait(TAKEN, max(0, seconds))
        if info is not None and info.si_signo == signal.SIGTSTP:
            self._stop()
        elif info is not None and info.si_signo != signal.SIGCHLD:
            self._pending.append(info)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid and self._code is None:  # later its number may be another's
                self._code = os.waitstatus_to_exitcode(status)
            elif pid in self._waited_for:
                self._waited_for[pid] = os.waitstatus_to_exitcode(status)

    def _wait_for(self, seconds):
        """So long, or until another signal has come or the command has ended."""
        end, before = time.monotonic() + seconds, (len(self._pending), self._code)
        while time.monotonic() < end and before == (len(self._pending), self._code):
            self._wait(end - time.monotonic())

    def _stop(self):
        """With the job, until SIGCONT. It gets SIGSTOP: of SIGTSTP the kernel spares a group whose session the shell's is not."""
        self._to_command(os.killpg, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal.sigtimedwait({signal.SIGCONT}, 0)  # which woke this process, and is passed on to all that were stopped
        self._to_command(os.killpg, signal.SIGCONT)

    def _deliver(self, signals, state):
        """The ending ones first. Where one of them is to find the job parked, all do. `state`: of the job, as it was found before."""
        if any(info.si_signo in self._park_on for info in signals):
            parked, text = self._park(names_of(signals))
            now = RUNS if parked else self._state(False)[0]
            if now == FROZEN or (now == UNKNOWN and state == RUNS and self._may_put_off()):
                return  # a freeze is under way, or may be; it is thawed first
            if self._code is None:
                say(text)
        self._put_off = None
        for info in sorted(signals, key=lambda info: info.si_signo not in ENDING):
            self._to_command(os.killpg if info.si_code == BY_THE_KERNEL else os.kill, info.si_signo)
        self._ends_by.update({signal.Signals(info.si_signo).name: time.monotonic() for info in signals if info.si_signo in ENDING})
        del self._pending[:len(signals)]

    def _may_put_off(self):
        """Of the signals of a job that ran before a park and of which it is not known how it stands since: as long as where that was not known before."""
        now = time.monotonic()
        self._put_off = now if self._put_off is None else self._put_off
        return now - self._put_off < PATIENCE[UNKNOWN]

    def _to_command(self, send, number):
        if self._code is not None:
            return
        try:
            send(self.pid, number)
        except OSError as error:
            say("%s cannot be sent to %d: %s" % (signal.Signals(number).name, self.pid, error.strerror))

    def _say(self, what, text):
        """Not again about the same for a while."""
        if time.monotonic() - self._said.get(what, -math.inf) >= SAY_SECONDS:
            self._said[what] = time.monotonic()
            say(text)

    # ---- the tool

    def _ask(self, seconds, *commands):
        """(exit code, output, errors) of each command of the tool, asked side by side; None: it did not end in time, or cannot be started."""
        tools, end = [self._start(command) for command in commands], time.monotonic() + seconds
        pids = [tool[0] for tool in tools if tool]
        while any(self._waited_for[pid] is None for pid in pids) and time.monotonic() < end:
            self._wait(end - time.monotonic())
        return [self._answer(*tool) if tool else None for tool in tools]

    def _start(self, words):
        """(pid, descriptors of its output and of its errors)"""
        files = [_LIBC.memfd_create(b"amem-guard", CLOSED_ON_EXEC) for _ in range(2)]  # os.memfd_create is not in every Python
        try:
            if min(files) < 0:
                raise OSError
            tool = subprocess.Popen([self._replay, *words], env=_why.environment(), stdin=subprocess.DEVNULL,  # pylint: disable=consider-using-with
                                    stdout=files[0], stderr=files[1])
        except OSError:
            for file in files:
                if file >= 0:
                    os.close(file)
            return None
        tool.returncode = 0  # it is waited for here
        self._waited_for[tool.pid] = None
        return tool.pid, files

    def _answer(self, pid, files):
        code, texts = self._waited_for.pop(pid), []
        if code is None:
            os.kill(pid, signal.SIGKILL)  # it is not waited for: what hangs in the kernel does not end
        for file in files:
            with open(file, "rb") as opened:
                opened.seek(0)
                texts.append(opened.read().decode(errors="replace"))
        return None if code is None else (code, *texts)

    # ---- the job

    def _state(self, ending):
        """(state, a rank to resume). Whether it is paused is only asked for an ending signal. Where that is to find the job parked, a parked one runs, and one that
        is being stopped, perhaps by the guard of another of its ranks, is waited for."""
        known, end = self._find_ranks(), time.monotonic() + READ_SECONDS
        ranks = sorted(self._ranks)
        logs = [["log", rank, "--json", "--kind", "freeze-step", "--last", "1"] for rank in ranks]
        before, self._steps = self._steps, {}
        for rank, answer in zip(ranks, self._ask(READ_SECONDS, *logs)):
            step = step_of(answer)
            known &= step is not None
            self._steps[rank] = before.get(rank, {}) if step is None else step  # what is known to be frozen stays so
        if any(self._frozen(rank) for rank in ranks):
            return FROZEN, None
        if not known:
            return UNKNOWN, None
        if not ending:
            return RUNS, None
        parks = any(info.si_signo in self._park_on for info in self._pending)
        lives = self._lives(max(1, end - time.monotonic()))
        if parks and any(phase in STOPPING for _, answer in lives for phase, _, _ in phases(answer)):
            return PAUSED, None
        paused = next((rank for rank, answer in lives if not all_run(answer, parks)), None)
        return (PAUSED, paused) if paused else (RUNS, None)

    def _lives(self, seconds):
        """[(rank, what `amem ls --live` has answered of it)]"""
        ranks = sorted(self._ranks)
        return list(zip(ranks, self._ask(seconds, *(["ls", "--live", "--json", rank] for rank in ranks))))

    def _last_step(self, rank):
        """That the rank's journal and those of the ranks that were frozen with it have: one may have missed the end. None: it never was frozen."""
        steps = [step for owner, step in self._steps.items() if step and (owner == rank or os.path.basename(rank) in sessions_of(step))]
        return max(steps, key=lambda step: (step["begun_ns"], step["command"], not step.get("outcome")), default=None)

    def _frozen(self, rank):
        last = self._last_step(rank)
        return last is not None and last.get("outcome", "") not in BACK and last["begun_ns"] > self._back.get(rank, -1)

    def _thaw(self):
        rank = next(rank for rank in sorted(self._ranks) if self._frozen(rank))
        answer = self._ask(THAW_SECONDS, ["thaw", "--json", rank])[0]
        if answer is None:
            return self._say("thaw", "the thaw did not end; it is tried again")
        try:
            report = json.loads(answer[1])
            message, outcome = str(report["message"]), report["outcome"]
        except (ValueError, KeyError, TypeError):
            return self._say("thaw", "the thaw ended with %d; it is tried again" % answer[0])
        if outcome in BACK or message == NOT_FROZEN:
            self._back[rank] = self._last_step(rank)["begun_ns"]
        elif answer[0] != 0:
            self._say("thaw", "the thaw failed: " + message)
        return None

    def _park(self, names):
        """All jobs under this process; those that stand already stay so. (whether all are parked, what there is to say of it with the signal)"""
        all_seen = self._find_ranks()
        ranks = sorted(self._ranks)
        if not ranks:
            return False, "no rank was found that could be parked; the command gets %s" % names
        left, refusal = self._park_each(ranks, time.monotonic() + PARK_SECONDS)
        if refusal is None:
            return False, "it is not known whether the job is parked (amem park did not answer); it gets %s" % names
        if refusal:
            return False, "%s be parked (amem park %s), and gets %s as it is" % ("the job cannot" if left == ranks else "not all of the job can", refusal, names)
        if left:
            return False, "not all of the job was parked in time; it gets %s" % names
        return all_seen, ("the job is parked, and gets %s" if all_seen else "all ranks found are parked, but some may be missing; the job gets %s") % names

    def _park_each(self, ranks, end):
        """(those of the ranks that are not known to be parked by then, what the tool has said of the first of them; None: nothing)"""
        left, refusal = ranks, ""
        while left and self._code is None and time.monotonic() < end:
            seconds = end - time.monotonic()
            answer = self._ask(seconds, ["park", left[0], "--deadline", str(max(1, int(seconds - 1))), "--json"])[0]
            parked = parked_by(answer)
            if parked:
                parked.add(left[0])
            elif answer is None:  # it may have parked them all the same
                parked = {rank for rank, found in self._lives(CHECK_SECONDS) if any(one[2] for one in phases(found))}
            left = [rank for rank in left if rank not in parked]
            refusal = "" if parked else answer and ended_with(answer)
            if answer and is_for_another(answer):
                self._wait_for(AGAIN_SECONDS)
            elif not parked:
                break
        return left, refusal

    def _find_ranks(self):
        """The journals of all ranks among the processes under this one, whatever their AMEM_JOURNAL_DIR is. False: some may be missing; those of
        before whose process is there are kept."""
        # A parent that ends meanwhile hides its children from one of them.
        (first, doubted, seen), (second, doubted_again, seen_again) = below(os.getpid()), below(os.getpid())
        found, known, tools = {}, seen and seen_again, set(self._waited_for)
        for pid in (first | second) - tools:
            why, journals = journals_of(pid)
            if why:
                known = False
                self._say("unseen", "whether process %d has a rank cannot be seen: %s" % (pid, why))
            found.update(dict.fromkeys(journals, pid))
        for pid in (doubted & doubted_again) - first - second:
            if journals_of(pid)[1]:
                known = False
                self._say("doubted", "whether process %d, which has a rank, is of this job cannot be seen: a parent of it is hidden" % pid)
        kept = {} if known else {rank: pid for rank, pid in self._ranks.items() if os.path.exists("/proc/%d" % pid)}
        self._ranks = {**kept, **found}
        return known


def say(text):
    try:
        os.write(2, ("amem: run --guard: %s\n" % text).encode(errors="replace"))
    except OSError:
        pass  # who reads it has ended, as `tee` after Ctrl-C; the job is still guarded


def signals_named(text):
    """{SIGTERM, SIGUSR1} of "TERM,USR1"; ValueError: one of them is none that reaches the job through the guard."""
    known = {signal.Signals(number).name[3:]: number for number in (*ENDING, signal.SIGUSR1, signal.SIGUSR2)}
    names = [name.strip().upper().removeprefix("SIG") for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError("%s is none of %s" % (name or "nothing", ", ".join(known)))
    return frozenset(known[name] for name in names)


def names_of(signals):
    return " and ".join(dict.fromkeys(signal.Signals(info.si_signo).name for info in signals))


def step_of(answer):
    """Of `amem log`: the last step of a freeze, {} if there is none; None: not known."""
    if answer is None or answer[0] not in (0, 3):
        return None
    try:
        steps = [json.loads(line) for line in answer[1].splitlines() if line.strip()]
        return {**steps[-1], "begun_ns": int(steps[-1]["begun_ns"]), "command": int(steps[-1]["command"])} if steps else {}
    except (ValueError, KeyError, TypeError):
        return None


def sessions_of(step):
    return [one.get("session") for one in step.get("frozen_processes", [])]


def parked_by(answer):
    """The journals of the ranks that `amem park` has parked; none: it failed."""
    try:
        return {one["directory"] for one in json.loads(answer[1])["ranks"] if one["parked"]} if answer and answer[0] == 0 else set()
    except (ValueError, KeyError, TypeError):
        return set()


def ended_with(answer):
    """The tool's exit code, and its last word."""
    return ": ".join(["ended with %d" % answer[0], *[line.strip() for line in answer[2].split("\n") if line.strip()][-1:]])


def is_for_another(answer):
    """Whether the tool was refused because the ranks serve another request, and may be asked again."""
    return answer[0] != 0 and ANOTHER in answer[2]


def phases(answer):
    """By `amem ls --live`, [(phase, whether the program itself has paused, whether the rank is parked)]; nothing where that cannot be asked."""
    try:
        ranks = json.loads(answer[1])["ranks"] if answer and answer[0] == 0 else []
        return [(one["phase"], one.get("paused_by_program", False), one.get("parked", False)) for one in ranks]
    except (ValueError, KeyError, TypeError):
        return []


def all_run(answer, or_are_parked):
    """What cannot be asked does not."""
    found = phases(answer)
    return bool(found) and all(phase == "running" or (or_are_parked and parked) for phase, _, parked in found)


def is_paused_from_outside(answer, parks):
    """What cannot be asked, as a rank that is ending, is not; where the guard parks jobs itself, a parked one is not either."""
    return any(phase in HELD and not by_program and not (parks and parked) for phase, by_program, parked in phases(answer))


def below(pid):
    """(all processes that came from one, those of which it cannot be seen whether they did, whether none else is missing)"""
    lives, known = {}, True
    try:
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                lives[int(entry)] = life = life_of(entry)
                known &= life.state != "?"
    except OSError:
        known = False
    began = lives.get(pid, NO_LIFE).began
    ours = control_groups("self")
    orphans = {one for one, life in lives.items() if one != pid and life.parent != 0 and life.began >= began and lives.get(life.parent, NO_LIFE).state == HIDDEN
               and may_be_within(control_groups(one), ours)}
    return family({pid}, lives) - {pid}, family(orphans, lives), known


def control_groups(entry):
    """Those of a process of /proc, a line each; None: they cannot be seen."""
    try:
        with open("/proc/%s/cgroup" % entry, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return None


def may_be_within(theirs, ours):
    """Another task of Slurm's, another login and another container have control groups of their own, and hidden parents as well."""
    return theirs is None or ours is None or all(any(line == one or line.startswith(one.rstrip("/") + "/") for line in theirs) for one in ours)


def family(parents, lives):
    """With all their children."""
    found, more = set(), parents
    while more:
        found |= more
        more = {child for child, life in lives.items() if life.parent in more} - found
    return found


Life = collections.namedtuple("Life", "state parent began")  # as /proc has them; "X": it has ended, "?": not known
HIDDEN = "hidden"  # state of what a user may not see: with hidepid another's process, which is no rank of theirs, and may have started one
NO_LIFE = Life(HIDDEN, 0, 0)  # of a process that /proc does not list


def life_of(entry):
    """Of a process of /proc, or of one of its threads."""
    try:
        with open("/proc/%s/stat" % entry, encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
        return Life(words[0], int(words[1]), int(words[19]))
    except (IndexError, ValueError):
        return Life("X", 0, 0)
    except OSError as error:
        state = "X" if error.errno in GONE else "?"
        try:
            if isinstance(error, PermissionError) and os.stat("/proc/%s" % entry).st_uid != os.geteuid() != 0:
                state = HIDDEN
        except OSError as second:
            state = "X" if second.errno in GONE else state
        return Life(state, 0, 0)


def journals_of(pid):
    """(why they are not known, the journals that a process has open to write them: others only read)"""
    found, why = set(), ""
    for place in threads_of(pid):
        folder = "/proc/" + place
        try:
            for descriptor in os.listdir(folder + "/fd"):
                try:
                    match = JOURNAL.fullmatch(os.readlink("%s/fd/%s" % (folder, descriptor)))
                    if not match or not is_written("%s/fdinfo/%s" % (folder, descriptor)):
                        continue
                except OSError as error:
                    why = why if error.errno in GONE else error.strerror
                    continue
                found.add(match.group(1))
                why = "its journal was removed" if match.group(2) else why
        except OSError as error:
            if error.errno not in GONE and life_of(place).state not in ("Z", "X", HIDDEN):
                why = error.strerror
    return why, found


def threads_of(pid):
    """The first, whose descriptors are the process's; once it has ended, and shows none any more, the others too."""
    yield str(pid)
    if life_of(pid).state == "Z":
        try:
            yield from ("%d/task/%s" % (pid, thread) for thread in os.listdir("/proc/%d/task" % pid) if thread != str(pid))
        except OSError:
            pass  # it is waited for by now


def is_written(path):
    """Whether a descriptor was opened for writing, by its file in fdinfo."""
    with open(path, encoding="utf-8") as file:
        flags = next((line.split()[1] for line in file if line.startswith("flags:")), "0")
    return int(flags, 8) & (os.O_WRONLY | os.O_RDWR) != 0
