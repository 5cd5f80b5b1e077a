#!/usr/bin/env python3
"""Whether two builds of amem-replay say the same: compare_outputs.py BEFORE AFTER TARGET...

BEFORE and AFTER are programs, TARGET packs or directories of journals of jobs that have ended. Every command that reads is run by both on each target, as
text and as JSON; output, complaints, exit code and written files must be equal. What differs must be in EXPECTED, with words that CHANGELOG.md has; then it
is counted apart. Exit code 0: nothing else differs; 3: something does.
"""
import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
CHANGELOG = os.path.join(HERE, "..", "..", "..", "CHANGELOG.md")
READS = ["why", "why --json", "why --all", "ls", "ls -v", "ls --json", "log", "log --json", "log --merge", "log --last 5", "log --kind step-failed,cycle-failed",
         "log --wall --grep device", "log --allocation 1", "verify", "verify --json", "state --rank 0", "state --rank 0 --json", "state --rank 0 --at=#9 --to=#30",
         "state --rank 0 --at=#9 --to=#30 --json", "top", "top --json", "top --by peer", "top --by peer --json", "top --by site", "top --by communicator --json",
         "top --by size", "top --by age --json", "top --by card", "top --dot", "watch --once", "watch --once --json", "replay", "replay --json",
         "replay --to 0#40 --json", "replay --memory 0=64MiB", "report -o -", "report --perfetto -o -", "pack -o - --anonymous"]
ALONE = ["--help", "--man", "--completion bash", "--completion zsh", "--completion fish", "--version", "ls --live --json", "nonsense", "why --nonsense", "why --rank=",
         "log --last -1", "top --by nonsense", "state a b c", "run", "collect", "why --slow"]
ALONE += [f"help {name}" for name in ("why", "ls", "log", "report", "watch", "pause", "resume", "freeze", "thaw", "top", "state", "replay", "verify", "pack")]
# What is different on purpose: a command (a pattern), and words of the changelog that tell of it.
EXPECTED = [(r"why --slow", "`amem why --slow`, its schema"), (r"--help|--man|help why|--completion.*", "`amem why --slow`, its schema"),
            (r"replay .*--json|replay --json", "`ranges_elsewhere`"), (r"help replay", "`amem replay` has no `--processes`"),
            (r"run|collect", "Commands that were options of others before any release")]


def outcome(program, words, target, folder):
    """What a command says: exit code, standard output, complaints. A pack is made of what it holds: its bytes have the time when it was made."""
    environment = {**os.environ, "AMEM_JOURNAL_DIR": os.path.join(folder, "none"), "TZ": "UTC", "COLUMNS": "100", "AMEM_SOCKET_DIR": os.path.join(folder, "none"), "TMPDIR": folder}
    done = subprocess.run([program, *words, *([target] if target else [])], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=300)
    output = done.stdout
    if words[0] == "pack" and done.returncode == 0:
        packed = os.path.join(folder, "packed.amem")
        with open(packed, "wb") as file:
            file.write(output)
        output = subprocess.run([program, "log", "--json", "--force", packed], env=environment, capture_output=True, check=False).stdout
    text = (output + b"\n---- complaints\n" + done.stderr).decode(errors="replace")
    text = re.sub(r"amem-replay-[A-Za-z0-9]{6}\b", "amem-replay-XXXXXX", text)  # a scratch folder's name
    text = re.sub(r'"at_ns":\d+', '"at_ns":0', text)  # when it was asked
    text = re.sub(r'("(?:made_)?at":"|^)20\d\d-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)? UTC', r"\1NOW", text, flags=re.M) if words[0] in ("watch", "report") else text
    text = re.sub(r"[\d ]+ B, without", "BYTES, without", text)  # of a pack, which has the time in it
    return f"exit code {done.returncode}\n{text}"


def expected(command, changelog):
    for pattern, words in EXPECTED:
        if re.fullmatch(pattern, command):
            if words not in changelog:
                raise SystemExit(f"compare_outputs: CHANGELOG.md does not have the words \"{words}\"")
            return True
    return False


def main():
    arguments = argparse.ArgumentParser(description="Whether two builds of amem-replay say the same.")
    arguments.add_argument("before")
    arguments.add_argument("after")
    arguments.add_argument("targets", nargs="+", metavar="TARGET")
    options = arguments.parse_args()
    with open(CHANGELOG, encoding="utf-8") as file:
        changelog = file.read()
    equal = told = 0
    differ = []
    with tempfile.TemporaryDirectory() as folder:
        programs = []
        for side in ("before", "after"):  # both called amem-replay, in folders whose names are equally long
            os.mkdir(os.path.join(folder, side[0]))
            programs.append(os.path.join(folder, side[0], "amem-replay"))
            os.symlink(os.path.abspath(getattr(options, side)), programs[-1])
        for command, target in [(c, None) for c in ALONE] + [(c, os.path.abspath(t)) for t in options.targets for c in READS]:
            sides = [outcome(program, command.split(), target, folder) for program in programs]
            if sides[0] == sides[1]:
                equal += 1
            elif expected(command, changelog):
                told += 1
            else:
                differ.append(f"{command} {os.path.basename(target or '')}")
                print(f"==== {differ[-1]}")
                print("\n".join(line[:300] for line in list(difflib.unified_diff(sides[0].split("\n"), sides[1].split("\n"), "before", "after", lineterm="", n=1))[:30]))
    print(f"{len(options.targets)} targets: {equal} outputs equal, {told} different as CHANGELOG.md says, {len(differ)} different")
    return 3 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
