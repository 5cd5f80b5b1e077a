"""`amem doctor --prove`: NCCL as this machine runs it, paused and resumed, every result and all contents compared, and the same with each
setting that frees more, each in processes of its own.

First NCCL runs without AMem: what fails there is not AMem's. A setting that hangs, errs, gives a wrong byte or kills a process is said
with its journals as a pack, and the others are tried all the same.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import time
from typing import NamedTuple

from . import _doctor, _nvml, _rank, _ranks, _why

MINUTES = 10
CYCLES = 3  # the first is not among the later ones
RUN_SECONDS, PACK_SECONDS, GONE_SECONDS = 150, 30, 15
MOST_RANKS = 64
CLAIM_SHARE, CLAIM_BYTES = 0.9, 32 << 20  # of what AMem says left, the driver must show so much, or miss no more
OF_A_FOLDER_THAT_GOES = r"; journal \S+; to see why: amem-replay why \S+"  # the pack has it
LEFT_BYTES = 64 << 20  # more than that, used by nobody after a run, is left behind
PROVED, WRONG, FAILED, KILLED, HUNG, SKIPPED, STOCK_FAILED = "proved", "wrong", "failed", "killed", "hung", "skipped", "fails without AMem"
MULTICAST, NETWORK, USER = "multicast (NVLS)", "network buffers", "user buffers"


class Setting(NamedTuple):
    """`name` is what one would set; `needs`: the kind of memory that it frees, without which there is nothing to prove; `forbidden`: why it is
    not to be tried under these settings of NCCL's, given a function that reads one."""

    name: str
    variables: dict
    needs: str = ""
    forbidden: object = None


def no_multicast(value):
    return "NCCL_NVLS_ENABLE=0: this job makes no multicast object" if value("NCCL_NVLS_ENABLE") == "0" else ""


STOCK = Setting("without AMem", {})
DEFAULT = Setting("default", {})
SETTINGS = (Setting("AMEM_NVLS=release", {"AMEM_NVLS": "release"}, MULTICAST, no_multicast),
            Setting("AMEM_NETWORK=renew", {"AMEM_NETWORK": "renew"}, NETWORK),
            Setting("AMEM_USER_MEMORY=release", {"AMEM_USER_MEMORY": "release"}, USER),
            Setting("AMEM_SCOPE=all", {"AMEM_SCOPE": "all"}))
OWN_VARIABLES = tuple(name for setting in SETTINGS for name in setting.variables)


class CannotProve(Exception):
    pass


class Machine:
    """The GPUs that a job sees here, and who else uses them."""

    def __init__(self, most_gpus):
        try:
            driver = _rank.Driver(None)
            self.simulated = driver.simulated
            self.gpus = [{"name": driver.name(device), "uuid": driver.uuid(device)} for device in range(min(driver.count, most_gpus or driver.count))]
        except _rank.Failed as error:
            raise CannotProve("no GPU can be used here: %s" % error) from None
        if not self.gpus:
            raise CannotProve("no GPU is visible here; in a container: start it with the GPUs (--gpus all)")
        try:
            self._nvml = _nvml.Nvml()
        except OSError as error:
            if not self.simulated:
                raise CannotProve("whether others use the GPUs cannot be seen: %s" % error) from None
            self._nvml = None

    def driver_version(self):
        return (self._nvml.driver_version() if self._nvml else "") or "unknown"

    def used(self):
        """Bytes of each GPU; zeros where nothing says so."""
        return [self._nvml.use(gpu["uuid"]).used if self._nvml else 0 for gpu in self.gpus]

    def in_use(self):
        """Who uses which GPU, in words; "": nobody. CannotProve where that cannot be known."""
        if self._nvml is None:
            return ""
        try:
            uses = [self._nvml.use(gpu["uuid"]).by_others() for gpu in self.gpus]
        except OSError as error:
            raise CannotProve("whether others use the GPUs cannot be seen: %s" % error) from None
        return "; ".join("GPU %d (%s) is in use: %s" % (number, gpu["name"], use) for number, (gpu, use) in enumerate(zip(self.gpus, uses)) if use)


class Prover:
    """The runs of one proof, one after the other."""

    def __init__(self, library, nccl, machine, ranks, packs, deadline):
        self.library, self.nccl, self.machine, self.packs, self.deadline = library, os.path.abspath(nccl), machine, packs, deadline
        self.ranks = ranks
        self.devices = [rank * len(machine.gpus) // ranks for rank in range(ranks)]

    def run(self, setting):
        """What became of it, as a dict; see `schema` in the documentation of --json."""
        row = {"setting": setting.name, "variables": dict(setting.variables), "outcome": SKIPPED, "why": "", "pack": None}
        if use := self.machine.in_use():
            return {**row, "why": use}
        if time.monotonic() > self.deadline:
            return {**row, "why": "there was no time for it; give more: --minutes"}
        stock, shared = setting is STOCK, self.ranks > len(self.machine.gpus)
        settings = [{"rank": rank, "size": self.ranks, "nccl": self.nccl, "device": self.devices[rank], "cycles": 0 if stock else CYCLES,
                     "shared": shared, "windows": self.ranks > 1} for rank in range(self.ranks)]
        variables = {**dict.fromkeys(OWN_VARIABLES), **setting.variables}
        if shared:
            variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        before, began = self.machine.used(), time.monotonic()
        job = _ranks.Job("_prove_rank", settings, variables, None if stock else self.library)
        left = []
        try:
            results = _ranks.results(job.members, min(self.deadline, began + RUN_SECONDS))
            if failed := _ranks.first_failure(results):
                row.update(self._failure(failed), pack=None if stock else self._pack(job, setting))
            else:
                row.update(self._figures(results), outcome=PROVED)
        finally:
            left = job.end()
        row["seconds"] = time.monotonic() - began
        if remains := self._left_behind(left, before):
            row.update(outcome=FAILED, why="; ".join(filter(None, (row["why"], remains))))
        if row["outcome"] == PROVED and not stock and (claim := self._claims_too_much(row)):
            row.update(outcome=WRONG, why=claim)
        return row

    @staticmethod
    def _failure(failed):
        outcome = HUNG if "unfinished" in failed else KILLED if failed.get("signal") else WRONG if failed.get("wrong") else FAILED
        return {"outcome": outcome, "why": re.sub(OF_A_FOLDER_THAT_GOES, "", failed["failure"]).replace("\n", " ")}

    def _pack(self, job, setting):
        """The path of a pack of the job's journals, made while its processes live; None where it cannot be had."""
        replay = _why.find(self.library)
        if replay is None or not os.path.isdir(job.journals):
            return None
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            os.makedirs(self.packs, mode=0o700, exist_ok=True)
            path = os.path.join(self.packs, "%s-%d.amem" % (setting.name.replace("=", "-"), time.time()))
            subprocess.run([replay, "pack", "-o", path, job.journals], env=_why.environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=PACK_SECONDS, check=False)
            return path if os.path.exists(path) else None
        return None

    def _left_behind(self, processes, before):
        """What is there of a run that has ended, in words; "": nothing."""
        if processes:
            return "processes that cannot be ended: %s" % ", ".join(map(str, processes))
        end = time.monotonic() + GONE_SECONDS
        while True:
            left = [now - then for now, then in zip(self.machine.used(), before)]
            if max(left) < LEFT_BYTES:
                return ""
            if time.monotonic() > end:
                return "GPU %d has %d MiB more in use than before" % (left.index(max(left)), max(left) >> 20)
            time.sleep(0.2)

    @staticmethod
    def _figures(results):
        """Of the slowest rank, and of the rank that holds most."""
        row = {"simulated": results[0]["simulated"], "stand_in_card": results[0]["stand_in_card"], "nccl": version_text(results[0]["version"]),
               "amem": results[0].get("amem"), "window": results[0]["window"], "graph": results[0]["graph"], "notes": sorted({note for result in results for note in result["notes"]}),
               "compared_bytes": sum(result["compared_bytes"] for result in results), "start_seconds": max(result["start_seconds"] for result in results),
               "collectives_seconds": statistics.median(max(each) for each in zip(*(result["collectives_seconds"] for result in results)))}
        for key in ("pause_seconds", "resume_seconds"):
            each = [max(cycle) for cycle in zip(*(result[key] for result in results))]
            if each:
                row["first_" + key], row[key] = each[0], statistics.median(each[1:] or each)
        if "kinds" in results[0]:
            row["ranks"] = [{key: result[key] for key in ("rank", "device", "kinds", "cards", "used_bytes", "paused_bytes")} for result in results]
            row["kinds"] = max((result["kinds"] for result in results), key=lambda kinds: sum(kind["bytes"] for kind in kinds))
        return row

    @staticmethod
    def _claims_too_much(row):
        """Of each GPU: what AMem says left it in the first pause, against what the driver shows."""
        for device in {rank["device"] for rank in row["ranks"]}:
            here = [rank for rank in row["ranks"] if rank["device"] == device]
            said = sum(leaves(kind) for rank in here for kind in rank["kinds"])
            shown = max(rank["used_bytes"] - rank["paused_bytes"] for rank in here)
            if shown < CLAIM_SHARE * said - CLAIM_BYTES:
                return "AMem says that %d MiB left GPU %d, and the driver shows %d MiB" % (said >> 20, device, shown >> 20)
        return ""


def version_text(number):
    return "%d.%d.%d" % (number // 10000, number // 100 % 100, number % 100)


def leaves(kind):
    return kind["bytes"] - sum(kind["stays"].values())


def of_kind(row, name):
    return next((kind["bytes"] for kind in row.get("kinds", ()) if kind["kind"] == name), 0)


def state_folder():
    """Where proofs and their packs are kept, for this user."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(home, "amem", "proofs")


def prove(library, nccl, gpus=None, ranks=None, minutes=MINUTES, said=lambda text: None):
    """The proof as a dict; see table(). CannotProve where nothing can be proved, in words.

    library, nccl: paths.  gpus: how many; default all that are visible.  ranks: default one for each GPU.  said: hears what begins.
    """
    machine = Machine(gpus)
    if use := machine.in_use():
        raise CannotProve("%s. It would disturb them, and they it. End them, or choose other GPUs: CUDA_VISIBLE_DEVICES, --gpus" % use)
    ranks = ranks or len(machine.gpus)
    value = _doctor.nccl_setting_reader(_doctor.Machine())
    prover = Prover(library, nccl, machine, ranks, state_folder(), time.monotonic() + 60 * minutes)
    rows = []
    for setting in (STOCK, DEFAULT, *SETTINGS):
        why = setting.forbidden(value) if setting.forbidden else ""
        default = rows[1] if len(rows) > 1 else None
        if not why and default is not None and default["outcome"] != PROVED:
            why = "the default was not proved"
        if not why and setting.needs and not of_kind(default, setting.needs):
            why = "this job has no %s here" % setting.needs
        if why:
            rows.append({"setting": setting.name, "variables": dict(setting.variables), "outcome": SKIPPED, "why": why, "pack": None})
            continue
        said("%s ..." % setting.name)
        rows.append(prover.run(setting))
        if setting is STOCK and rows[0]["outcome"] != PROVED:
            raise CannotProve("NCCL without AMem does not run here: %s" % rows[0]["why"])
    return answer_of(machine, rows, prover, library, nccl, value)


def keep(answer):
    """Writes the proof where run_with() finds it, in place of an earlier one. The path; None where it cannot be written."""
    path = os.path.join(state_folder(), answer["key"] + ".json")
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(answer, file, indent=1)
        os.replace(path + ".new", path)
    except OSError:
        return None
    return path


def answer_of(machine, rows, prover, library, nccl, value):
    answer = {"schema": 1, "host": platform.node(), "kernel": platform.release(), "driver": machine.driver_version(), "gpus": machine.gpus,
              "ranks": prover.ranks, "hosts": 1, "simulated": machine.simulated, "stand_in_card": bool(rows[0].get("stand_in_card")),
              "nccl": {"version": rows[0].get("nccl", "unknown"), "library": os.path.abspath(nccl)}, "amem": next((row["amem"] for row in rows if row.get("amem")), "unknown"),
              "nccl_settings": {name: value(name) for name in ("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE") if value(name)},
              "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "settings": rows}
    answer["key"] = key_of(answer)
    answer["line"] = line(answer)
    return answer


def key_of(answer):
    """Of what a proof holds for: these GPUs, this driver, this NCCL and this AMem."""
    text = json.dumps([sorted(gpu["uuid"] for gpu in answer["gpus"]), answer["driver"], answer["nccl"]["version"], answer["amem"], answer["nccl_settings"]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def failures(answer):
    return [row for row in answer["settings"] if row["outcome"] not in (PROVED, SKIPPED)]


# ---- for people


def megabytes(count):
    return "%d MiB" % (count >> 20)


def _sum(row, what):
    return sum(what(kind) for kind in row["kinds"])


def line(answer):
    """What one pastes into a report."""
    names = {}
    for gpu in answer["gpus"]:
        names[gpu["name"]] = names.get(gpu["name"], 0) + 1
    parts = []
    for row in answer["settings"][1:]:
        text = "%s %s" % (row["setting"], row["outcome"])
        if row["outcome"] == PROVED:
            text += " %d of %s, %.0f/%.0f ms" % (_sum(row, leaves) >> 20, megabytes(_sum(row, lambda kind: kind["bytes"])), 1e3 * row["pause_seconds"], 1e3 * row["resume_seconds"])
        parts.append(text)
    return "amem-proof 1%s: %s, driver %s, NCCL %s, AMem %s, %d ranks: %s; %s" % (
        " SIMULATED" if answer["simulated"] else " simulated card" if answer["stand_in_card"] else "",
        ", ".join("%d x %s" % (count, name) for name, count in names.items()), answer["driver"], answer["nccl"]["version"], answer["amem"],
        answer["ranks"], "; ".join(parts), answer["key"])


def _of_setting(row):
    """The lines of one setting."""
    yield "%s: %s%s" % (row["setting"], row["outcome"], " (%s)" % row["why"] if row["why"] else "")
    if row["pack"]:
        yield "  journals: %s (`amem why` reads it)" % row["pack"]
    if "kinds" not in row or row["outcome"] != PROVED:
        return
    yield "  %-32s%10s%10s%10s  %s" % ("GPU memory of a rank, MiB", "held", "leaves", "stays", "why it stays")
    for kind in row["kinds"]:
        yield "  %-32s%10d%10d%10d  %s" % (kind["kind"], kind["bytes"] >> 20, leaves(kind) >> 20, (kind["bytes"] - leaves(kind)) >> 20, ", ".join(sorted(kind["stays"])))
    used, left = max((rank["used_bytes"], rank["paused_bytes"]) for rank in row["ranks"])
    yield "  of its GPU the driver shows %d MiB in use, and %d MiB in a pause: contexts and other programs are among them" % (used >> 20, left >> 20)
    yield "  first pause %.1f ms, later %.1f; resume %.1f (first %.1f); communicators %.2f s; %s compared" % (
        1e3 * row["first_pause_seconds"], 1e3 * row["pause_seconds"], 1e3 * row["resume_seconds"], 1e3 * row["first_resume_seconds"], row["start_seconds"], megabytes(row["compared_bytes"]))


def table(answer):
    """The answer for people."""
    kind = "SIMULATED: " if answer["simulated"] else "over a SIMULATED network card: " if answer["stand_in_card"] else ""
    lines = ["%sNCCL %s, %d rank%s on %d GPU%s (%s), driver %s, AMem %s" % (
        kind, answer["nccl"]["version"], answer["ranks"], "s" * (answer["ranks"] > 1), len(answer["gpus"]), "s" * (len(answer["gpus"]) > 1),
        answer["gpus"][0]["name"], answer["driver"], answer["amem"])]
    for row in answer["settings"]:
        lines += _of_setting(row)
    if answer["ranks"] == 1:
        lines.append("One rank: NCCL shares nothing here. With NCCL 2.30 or later several ranks can share a GPU: --ranks 2")
    return "\n".join([*lines, verdict(answer), "", answer["line"]])


def verdict(answer):
    """One sentence."""
    failed = failures(answer)
    default = answer["settings"][1]
    what = "on the simulator, which says nothing about a GPU" if answer["simulated"] else "here"
    if default["outcome"] != PROVED:
        return "AMem is not proved %s: with its defaults %s." % (what, default["why"] or "nothing ran")
    more = [row["setting"] for row in answer["settings"][2:] if row["outcome"] == PROVED]
    text = "AMem's defaults are proved %s" % what
    text += ", and so %s %s" % ("is" if len(more) == 1 else "are", ", ".join(more)) if more else ""
    return text + (". Not proved: %s." % ", ".join(row["setting"] for row in failed) if failed else ".")
