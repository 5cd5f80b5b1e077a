#!/usr/bin/env python3
"""`amem doctor --prove` on this machine's GPUs, in the ways that a host may be asked: ranks that share a GPU, GPUs, hosts, failures, a GPU in use.

    NCCL_NVLS_ENABLE=0 PYTHONPATH=ncclpatch/python AMEM_LIBRARY=... AMEM_REPLAY=... python3 tests/gpu/prove_job.py --nccl 2.32.3=PATH --out FOLDER

`--card`: the folder of the stand-in card's libibverbs.so.1; with it two hosts are also proved over it. "torch" is the library that PyTorch brings.
Writes FOLDER/proof-CASE.json of each proof, and prints a line for each; the last line is JSON. A planted failure must be said as what it is, and
leave no process and no memory. Exit code 0: all well, 1: not, 2: refused (NCCL_NVLS_ENABLE is not 0).
"""
import argparse
import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import network_cases  # noqa: E402

FINDINGS = "card-findings"
CLOSE = 64 << 20  # bytes of a GPU that may differ between two moments without a program
SSH = '#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nshift\nexec sh -c "$*"\n'  # any host is this one
HOLDER = "import sys; from amem._jobs import rank_process; rank_process.Driver(0).allocate(2 << 30); print('up', flush=True); sys.stdin.read()"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nccl", default="", help="NAME=PATH of a stock libnccl.so.2 of 2.30 or later, whose ranks can share a GPU")
    parser.add_argument("--card", default="", help="the folder of the stand-in card")
    parser.add_argument("--cases", default="", help="only those whose names contain one of these, comma separated")
    parser.add_argument("--minutes", default="3", help="for one proof")
    parser.add_argument("--out", required=True)
    parser.add_argument("--planted", default="", help=argparse.SUPPRESS)  # this process proves, and plants a failure
    return parser.parse_args()


def used():
    """Bytes in use of each GPU, by the management library."""
    from amem._jobs import host
    here = host.Host()
    here.describe(None)
    return [use.used for use in here._uses()]


def torchs_nccl():
    import importlib.util
    return os.path.join(list(importlib.util.find_spec("nvidia.nccl").submodule_search_locations)[0], "lib", "libnccl.so.2")


def cases(options, folder):
    """(name, command, variables, settings that must be proved there)."""
    name, _, shared = options.nccl.partition("=")
    prove = [sys.executable, "-m", "amem", "doctor", "--prove", "--json", "--minutes", options.minutes]
    hosts = os.path.join(folder, "hosts")
    with open(hosts, "w", encoding="utf-8") as file:
        file.write("localhost slots=1\nother slots=1 python=%s\n" % sys.executable)
    with open(os.path.join(folder, "ssh"), "w", encoding="utf-8") as file:
        file.write(SSH)
    os.chmod(os.path.join(folder, "ssh"), 0o700)
    path = {"PATH": folder + ":" + os.environ["PATH"]}
    count, own = len(used()), torchs_nccl()
    if shared:
        for ranks in (2, 4, 8):
            yield "%d ranks on one GPU, NCCL %s" % (ranks, name), [*prove, "--gpus", "1", "--ranks", str(ranks), "--nccl", shared], {}, ()
    if count > 1:
        yield "%d GPUs" % count, [*prove, "--nccl", own], {}, ()
    yield "2 hosts by ssh", [*prove, "--hosts", hosts, "--nccl", own], path, ()
    if options.card:
        card = ":".join(filter(None, [os.path.abspath(options.card), os.environ.get("LD_LIBRARY_PATH")]))
        through = {**path, **network_cases.THROUGH_THE_CARD, "LD_LIBRARY_PATH": card, "AMEM_SIM_CARD_FINDINGS": os.path.join(folder, FINDINGS)}
        yield "2 hosts by ssh, stand-in card", [*prove, "--hosts", hosts, "--nccl", own], through, ("AMEM_NETWORK=renew",)
    if count > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", *prove[2:], "--nccl", own]
        yield "torchrun, %d GPUs" % count, torchrun, {}, ()


def settings_of(answer):
    return {row["setting"]: row["outcome"] for row in answer["settings"]}


def findings(folder):
    """What the stand-in card found wrong, the first lines."""
    lines = []
    for path in glob.glob(os.path.join(folder, FINDINGS + "*")):
        with open(path, encoding="utf-8", errors="replace") as file:
            lines += file.read().splitlines()[:10]
    return lines


def prove_once(options, name, command, variables, needed, folder):
    """A proof by the command, in which all of `needed` must be proved; its row."""
    began = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60 * float(options.minutes) + 180, check=False)
    row = {"case": name, "seconds": round(time.monotonic() - began, 1), "code": done.returncode, "ok": False}
    with contextlib.suppress(ValueError):
        answer = json.loads(done.stdout[done.stdout.index("{"):])
        with open(os.path.join(options.out, "proof-%s.json" % name.replace(" ", "-").replace(",", "")), "w", encoding="utf-8") as file:
            json.dump(answer, file, indent=1)
        row.update(settings=settings_of(answer), why={one["setting"]: one["why"] for one in answer["settings"] if one["why"]},
                   ok=done.returncode == 0 and answer["complete"])
        for setting in needed:
            row["ok"] = row["ok"] and row["settings"][setting] == "proved" and answer["stand_in_card"]
    if found := findings(folder):
        row.update(ok=False, findings=found)
    if not row["ok"]:
        row["said"] = (done.stdout[-1500:] if "settings" not in row else "") + done.stderr[-1500:]
    return row


# ---- failures that are planted --------------------------------------------------------------------------------------------------

PLANTED = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}


def plant(outcome, nccl):
    """In a process of its own: one rank of a setting's run gets the signal, a moment after its start. Prints the proof."""
    from amem._jobs import host, prove
    start = host.Host.start

    def starts(this, module, settings, variables, *rest):
        start(this, module, settings, variables, *rest)
        if variables["AMEM_USER_MEMORY"]:
            threading.Timer(3, os.kill, (this._job.processes[0].pid, PLANTED[outcome])).start()

    host.Host.start = starts
    prove.RUN_SECONDS = 20
    prove.SETTINGS = [setting for setting in prove.SETTINGS if setting.name in ("AMEM_USER_MEMORY=release", "AMEM_SCOPE=all")]
    print(json.dumps(prove.prove([(host.Host(), 2)], nccl, None if len(used()) > 1 else 1, 4)))


def planted(options, outcome):
    nccl = options.nccl.partition("=")[2] or torchs_nccl()
    before, began = used(), time.monotonic()
    done = subprocess.run([sys.executable, os.path.abspath(__file__), "--planted", outcome, "--nccl", "x=" + nccl, "--out", options.out], capture_output=True,
                          text=True, timeout=300, check=False)
    row = {"case": "planted: " + outcome, "seconds": round(time.monotonic() - began, 1), "ok": False}
    with contextlib.suppress(ValueError):
        answer = json.loads(done.stdout[done.stdout.index("{"):])
        row["settings"], row["why"] = settings_of(answer), {one["setting"]: one["why"] for one in answer["settings"] if one["why"]}
        row["ok"] = row["settings"].get("AMEM_USER_MEMORY=release") == outcome and row["settings"].get("AMEM_SCOPE=all") == "proved"
    return left_behind({**row, **({} if row["ok"] else {"said": done.stdout[-800:] + done.stderr[-1500:]})}, before)


def left_behind(row, before):
    """The row, failed if GPU memory or a rank is left."""
    time.sleep(2)
    grown = [after - was for after, was in zip(used(), before)]
    ranks = subprocess.run(["pgrep", "-f", "amem._jobs.prove_rank"], capture_output=True, text=True, check=False).stdout.split()
    return {**row, "ok": row["ok"] and max(grown) < CLOSE and not ranks, "grown_mib": [size >> 20 for size in grown], "ranks_left": len(ranks)}


def in_use(options):
    before = used()
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        done = subprocess.run([sys.executable, "-m", "amem", "doctor", "--prove", "--json", "--nccl", torchs_nccl()], capture_output=True, text=True, timeout=60, check=False)
        holder.communicate("")
    row = {"case": "a GPU in use", "code": done.returncode, "said": (done.stdout + done.stderr)[-400:], "ok": done.returncode not in (0, 1) and "would disturb" in done.stderr + done.stdout}
    return left_behind(row, before)


def main():
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("prove_job: refused: NCCL_NVLS_ENABLE must be 0", file=sys.stderr)
        return 2
    options = arguments()
    if options.planted:
        plant(options.planted, options.nccl.partition("=")[2])
        return 0
    os.makedirs(options.out, exist_ok=True)
    rows, wanted = [], options.cases.split(",")

    def note(name, call):
        if any(text in name for text in wanted):
            try:
                rows.append(call())
            except subprocess.TimeoutExpired as error:
                rows.append({"case": name, "ok": False, "said": str(error)})
            print(json.dumps(rows[-1]), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for case in cases(options, folder):
            note(case[0], lambda case=case: prove_once(options, *case, folder))
    for outcome in PLANTED:
        note("planted: " + outcome, lambda outcome=outcome: planted(options, outcome))
    note("a GPU in use", lambda: in_use(options))
    print(json.dumps({"program": "prove_job", "ok": bool(rows) and all(row["ok"] for row in rows), "cases": rows}))
    return 0 if rows and all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
