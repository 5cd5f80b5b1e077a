"""`amem doctor --prove`: NCCL as this machine runs it, paused and resumed, every result and all contents compared, and the same with each
setting that frees more, each in processes of its own.

First NCCL runs without AMem: what fails there is not AMem's. A setting that hangs, errs, gives a wrong byte or kills a process is said
with its journals as a pack, and the others are tried all the same.
"""

import base64
import contextlib
import os
import platform
import re
import shlex
import statistics
import time
from typing import NamedTuple

from .. import _calls, _doctor, _private
from . import processes, proofs
from .host import CannotProve

MINUTES = 10
CYCLES = 3  # the first is not among the later ones
FIRST_SECONDS = 300  # of NCCL without AMem; then a run may take so many times what that took, and RUN_SECONDS in any case
RUN_SECONDS, TIMES_STOCK, GONE_SECONDS = 90, 8, 10
GRACE_SECONDS = 120  # after the minutes, in which what runs ends
CLAIM_SHARE, CLAIM_BYTES = 0.9, 32 << 20  # of what AMem says left, the driver must show so much, or miss no more
OF_A_FOLDER_THAT_GOES = r"; journal \S+; to see why: amem-replay why \S+"  # the pack has it
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
NOT_COMPARED = ("NCCL_DEBUG", "NCCL_CONF_FILE", "NCCL_HOSTID")  # what begins so has no part in what NCCL allocates


class Site:
    """A host of the proof with its ranks, from number `first` on."""

    def __init__(self, host, count, gpus):
        self.host = host
        self.about = host.describe(min(filter(None, (gpus, count)), default=None))
        self.gpus, self.first, self.identity = self.about["gpus"], 0, None
        self.count = count or len(self.gpus)

    @property
    def shared(self):
        return self.count > len(self.gpus)

    def device(self, index):
        return index * len(self.gpus) // self.count if self.shared else index

    def start(self, size, nccl, cycles, hosts, variables):
        settings = [{"rank": self.first + index, "size": size, "nccl": nccl, "device": self.device(index), "cycles": cycles, "shared": self.shared,
                     "windows": size > 1 and hosts == 1} for index in range(self.count)]
        variables = {**variables, **({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if self.shared else {}), **({"NCCL_HOSTID": self.identity} if self.identity else {})}
        self.host.start("prove_rank", settings, variables, None, self.first, cycles == 0)


def sites_of(hosts, gpus):
    """Of [(Host or Remote, ranks or None)]. A machine that is there several times counts as several hosts, by NCCL's own name for them."""
    sites = [Site(host, count, gpus) for host, count in hosts]
    uuids = [gpu["uuid"] for site in sites for gpu in site.gpus]
    for number, site in enumerate(sites):
        site.first = sum(one.count for one in sites[:number])
        if len(set(uuids)) < len(uuids):
            site.identity = "amem-prove-%d" % number
    return sites


class Prover:
    """The runs of one proof, one after the other. `complete`: none was cut short by time, a lost host or another program."""

    def __init__(self, sites, nccl, packs, deadline):
        self.sites, self.nccl, self.packs, self.deadline = sites, os.path.abspath(nccl), packs, deadline
        self.ranks = sum(site.count for site in sites)
        self.complete, self._limit = True, FIRST_SECONDS

    def in_use(self, patience):
        return "; ".join(filter(None, (("%s: " % site.about["host"] if len(self.sites) > 1 else "") + use if use else "" for site in self.sites
                                       for use in [site.host.in_use(patience)])))

    def run(self, setting):
        """What became of it, as a dict; proof.schema.json says what is in it."""
        row = {"setting": setting.name, "variables": dict(setting.variables), "outcome": SKIPPED, "why": "", "packs": []}
        began = time.monotonic()
        try:
            if began > self.deadline:
                self._cut(row, "there was no time for it; give more: --minutes")
            elif use := self.in_use(GONE_SECONDS):
                self._cut(row, use)
            else:
                self._try(setting, row, began)
        except CannotProve as error:  # a host is lost, or cannot say who uses its GPUs
            self._cut(row, str(error))
        return row

    def _cut(self, row, why):
        self.complete = False
        row.update(outcome=SKIPPED, why="; ".join(filter(None, (why, row["why"]))))

    def _try(self, setting, row, began):
        stock = setting is STOCK
        variables, cycles = {**dict.fromkeys((*proofs.OWN_VARIABLES, proofs.PROVED_FOR)), **setting.variables}, 0 if stock else CYCLES
        for site in self.sites:
            site.host.note_use()
        try:
            for site in self.sites:
                site.start(self.ranks, self.nccl, cycles, len(self.sites), variables)
            results = processes.results([member for site in self.sites for member in site.host.members], min(self.deadline, began + self._limit))
            in_time = time.monotonic() < self.deadline
            if failed := processes.first_failure(results):
                row.update(self._failure(failed))
            else:
                row.update(self._figures(results, [number for number, site in enumerate(self.sites) for _ in range(site.count)]), outcome=PROVED)
                if not stock and (claim := self._claims_too_much(row)):
                    row.update(outcome=WRONG, why=claim)
            if row["outcome"] != PROVED and not stock:
                row["packs"] = self._packs(setting)
        finally:
            remains = self._ask("end")
        row["seconds"] = time.monotonic() - began
        if stock:
            self._limit = max(RUN_SECONDS, TIMES_STOCK * row["seconds"])
        self._afterwards(row, remains, in_time)

    def _afterwards(self, row, remains, in_time):
        """What the run itself leaves is its failure, before anything else is asked. Then another program may be why it ended as it did, where it
        can be seen, or may be what holds more memory. `in_time`: the results were there before the end of the minutes."""
        if not any(remains):
            left, others = self._ask("left_behind"), self._ask("others")
            if any(others) and (any(left) or row["outcome"] != PROVED):
                return self._cut(row, "; ".join(("during the run: " + "; ".join(filter(None, others)), *filter(None, left))))
            remains = left
        if any(remains):
            row.update(outcome=FAILED if row["outcome"] == PROVED else row["outcome"], why="; ".join(filter(None, (row["why"], *remains))))
        elif row["outcome"] == HUNG and not in_time:
            self._cut(row, "there was no time to end it; give more: --minutes")
        return None

    def _ask(self, name):
        """The answer of each host. CannotProve, once all were asked, where one did not answer and no other says that something is wrong."""
        said, lost = [], []
        for site in self.sites:
            try:
                said.append(getattr(site.host, name)())
            except CannotProve as error:
                lost.append(str(error))
        if lost and not any(said):
            raise CannotProve("; ".join(lost))
        return said

    @staticmethod
    def _failure(failed):
        outcome = HUNG if "unfinished" in failed else KILLED if failed.get("signal") else WRONG if failed.get("wrong") else FAILED
        return {"outcome": outcome, "why": re.sub(OF_A_FOLDER_THAT_GOES, "", failed["failure"]).replace("\n", " ")}

    def _packs(self, setting):
        """The paths of the packs of the hosts' journals."""
        paths = []
        for number, site in enumerate(self.sites):
            packed = None
            with contextlib.suppress(CannotProve):  # a host that is lost has none, and what failed has failed
                packed = site.host.pack()
            if packed is None:
                continue
            path = os.path.join(self.packs, "%s-%d%s.amem" % (re.sub(r"[^\w.]+", "-", setting.name), time.time(), "-%d" % number if len(self.sites) > 1 else ""))
            with contextlib.suppress(OSError):
                _private.make_directories(self.packs)
                with _private.new_file(path) as file:
                    file.write(base64.b64decode(packed))
                paths.append(path)
        return paths

    @staticmethod
    def _figures(results, hosts):
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
            row["ranks"] = [{"host": number, **{key: result[key] for key in ("rank", "gpu", "kinds", "cards", "used_bytes", "paused_bytes")}} for number, result in zip(hosts, results)]
            row["kinds"] = max((result["kinds"] for result in results), key=lambda kinds: sum(kind["bytes"] for kind in kinds))
        return row

    @staticmethod
    def _claims_too_much(row):
        """Of each GPU: what AMem says left it in the first pause, against what the driver shows."""
        def place(rank):  # hosts that are one machine have the same GPUs, but on the simulator
            return rank["gpu"], rank["host"] if row["simulated"] else None

        for gpu in {place(rank) for rank in row["ranks"]}:
            here = [rank for rank in row["ranks"] if place(rank) == gpu]
            said = sum(leaves(kind) for rank in here for kind in rank["kinds"])
            shown = max(rank["used_bytes"] - rank["paused_bytes"] for rank in here)
            if shown < CLAIM_SHARE * said - CLAIM_BYTES:
                return "AMem says that %d MiB left the GPU %s, and the driver shows %d MiB" % (said >> 20, gpu[0], shown >> 20)
        return ""


def version_text(number):
    return "%d.%d.%d" % (number // 10000, number // 100 % 100, number % 100)


def leaves(kind):
    return kind["bytes"] - sum(kind["stays"].values())


def of_kind(row, name):
    """Bytes of that kind that some rank holds."""
    return max((kind["bytes"] for rank in row.get("ranks", ()) for kind in rank["kinds"] if kind["kind"] == name), default=0)


def prove(hosts, nccl, gpus=None, minutes=MINUTES, said=lambda text: None):
    """The proof as a dict; see table(). CannotProve where nothing can be proved, in words.

    hosts: [(Host or Remote, ranks or None for one on each GPU)].  nccl: a path, the same on all.  gpus: of each host, how many; default all
    that are visible.  said: hears what begins.
    """
    sites = sites_of(hosts, gpus)
    prover = Prover(sites, nccl, proofs.folder(), time.monotonic() + 60 * minutes)
    for site in sites:
        site.host.live(int(60 * minutes) + GRACE_SECONDS)
    if use := prover.in_use(0):
        raise CannotProve("%s. It would disturb them, and they it. End them, or choose other GPUs: CUDA_VISIBLE_DEVICES, --gpus" % use)
    rows = rows_of(prover, said)
    answer = answer_of(sites, rows, nccl, prover.complete)
    if not prover.complete:
        said("this proof is not complete" + ("; what failed is kept, so that no older proof speaks for it" if failures(answer) else ", and not kept"))
    if failures(answer) or (prover.complete and rows[1]["outcome"] != SKIPPED):
        keep_on_all(sites, answer, said)
    return answer


def rows_of(prover, said):
    """What became of NCCL without AMem, of the defaults, of each setting, and of those together that `amem run --proved` would set."""
    value = _doctor.nccl_setting_reader(_doctor.Machine())
    rows = []

    def try_one(setting):
        if why := untried_because(setting, rows[1] if len(rows) > 1 else None, value):
            rows.append({"setting": setting.name, "variables": dict(setting.variables), "outcome": SKIPPED, "why": why, "packs": []})
            return
        said("%s ..." % setting.name)
        rows.append(prover.run(setting))

    try_one(STOCK)
    if rows[0]["outcome"] != PROVED:
        raise CannotProve("NCCL without AMem does not run here: %s" % rows[0]["why"])
    for setting in (DEFAULT, *SETTINGS):
        try_one(setting)
    alone = [row for row in rows if row["outcome"] == PROVED and row["variables"] and set(row["variables"]) <= set(proofs.OF_THE_MACHINE)]
    if len(alone) > 1:
        try_one(Setting(" ".join(row["setting"] for row in alone), {name: value for row in alone for name, value in row["variables"].items()}))
    return rows


def keep_on_all(sites, answer, said):
    """Where it cannot be kept, `said` hears why."""
    for site in sites:
        if why := _kept_on(site.host, answer):
            said("the proof cannot be kept on %s, so that `amem run --proved` will not find it: %s" % (site.about["host"], why))


def _kept_on(host, answer):
    """"", or why not."""
    try:
        return host.keep(answer)
    except CannotProve as error:
        return str(error)


def nccl_settings():
    """All that are set here, but for what decides nothing about memory."""
    found = {**_doctor.nccl_settings_of_files(_doctor.Machine()), **os.environ}
    return {name: value for name, value in sorted(found.items()) if name.startswith("NCCL_") and value and not name.startswith(NOT_COMPARED)}


def untried_because(setting, default, value):
    """"": it is to be tried. default: the row of the defaults, once they were tried."""
    if why := setting.forbidden(value) if setting.forbidden else "":
        return why
    if default is not None and default["outcome"] != PROVED:
        return "the default was not proved"
    return "this job has no %s here" % setting.needs if setting.needs and not of_kind(default, setting.needs) else ""


def answer_of(sites, rows, nccl, complete):
    answer = {"schema": proofs.SCHEMA, "version": proofs.VERSION, "hosts": [{**site.about, "ranks": site.count} for site in sites], "kernel": platform.release(), "driver": sites[0].about["driver"],
              "gpus": list({gpu["uuid"]: gpu for site in sites for gpu in site.gpus}.values()), "ranks": sum(site.count for site in sites), "simulated": any(site.about["simulated"] for site in sites),
              "stand_in_card": bool(rows[0].get("stand_in_card")), "one_machine_as_several_hosts": any(site.identity for site in sites),
              "nccl": {"version": rows[0].get("nccl", "unknown"), "library": os.path.abspath(nccl)},
              "amem": next((row["amem"] for row in rows if row.get("amem")), None) or _calls.package_version(),
              "nccl_settings": nccl_settings(),
              "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "complete": complete, "settings": rows}
    answer["key"] = proofs.key_of(answer)
    answer["line"] = line(answer)
    return answer


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
    return "amem-proof 1%s: %s, driver %s, NCCL %s, AMem %s, ranks %d, hosts %d: %s; %s" % (
        " SIMULATED" if answer["simulated"] else " simulated card" if answer["stand_in_card"] else "",
        ", ".join("%d x %s" % (count, name) for name, count in names.items()), answer["driver"], answer["nccl"]["version"], answer["amem"],
        answer["ranks"], len(answer["hosts"]), "; ".join(parts), answer["key"])


def _of_setting(row):
    """The lines of one setting."""
    yield "%s: %s%s" % (row["setting"], row["outcome"], " (%s)" % row["why"] if row["why"] else "")
    if row["packs"]:
        yield "  to see why: amem why %s" % shlex.join(row["packs"])
    if "kinds" not in row or row["outcome"] != PROVED:
        return
    yield "  %-32s%10s%10s%10s  %s" % ("GPU memory of a rank, MiB", "held", "leaves", "stays", "why it stays")
    for kind in row["kinds"]:
        yield "  %-32s%10d%10d%10d  %s" % (kind["kind"], kind["bytes"] >> 20, leaves(kind) >> 20, (kind["bytes"] - leaves(kind)) >> 20, ", ".join(sorted(kind["stays"])))
    used, left = max((rank["used_bytes"], rank["paused_bytes"]) for rank in row["ranks"])
    yield "  of its GPU the driver shows %d MiB in use, and %d MiB in a pause: contexts and other programs are among them" % (used >> 20, left >> 20)
    for note in row["notes"]:
        yield "  " + note
    yield "  first pause %.1f ms, later %.1f; resume %.1f (first %.1f); communicators %.2f s; %s compared" % (
        1e3 * row["first_pause_seconds"], 1e3 * row["pause_seconds"], 1e3 * row["resume_seconds"], 1e3 * row["first_resume_seconds"], row["start_seconds"], megabytes(row["compared_bytes"]))


def table(answer):
    """The answer for people."""
    kind = "SIMULATED: " if answer["simulated"] else "over a SIMULATED network card: " if answer["stand_in_card"] else ""
    hosts = " of %d hosts%s" % (len(answer["hosts"]), ", which are one machine" * answer["one_machine_as_several_hosts"]) if len(answer["hosts"]) > 1 else ""
    lines = ["%sNCCL %s, %d rank%s on %d GPU%s (%s)%s, driver %s, AMem %s" % (
        kind, answer["nccl"]["version"], answer["ranks"], "s" * (answer["ranks"] > 1), len(answer["gpus"]), "s" * (len(answer["gpus"]) > 1),
        answer["gpus"][0]["name"], hosts, answer["driver"], answer["amem"])]
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
    if not answer["complete"]:
        text += "; not all could be tried"
    return text + (". Not proved: %s." % ", ".join(row["setting"] for row in failed) if failed else ".")
