"""Proofs of `amem doctor --prove`, kept for this user on each host that took part, and what `amem run --proved` takes from them.

A proof is of a machine: of its GPUs, driver, NCCL and AMem. What a program does with its own memory in a pause no proof knows, so only
settings about NCCL's own memory are chosen.
"""

import contextlib
import glob
import hashlib
import json
import os
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from .. import _private

OWN_VARIABLES = {"AMEM_NVLS": "keep", "AMEM_NETWORK": "keep", "AMEM_USER_MEMORY": "keep", "AMEM_SCOPE": "nccl"}  # what is proved, with its default
OF_THE_MACHINE = ("AMEM_NVLS", "AMEM_NETWORK")
PROVED_FOR = "AMEM_PROVED"  # the version of NCCL: beside another one the library takes none of these
UNKNOWN = "unknown"
SCHEMA, VERSION = "amem/proof", 1


class Here(NamedTuple):
    """What a proof must be about to hold here."""

    gpus: List[str]  # uuids that are visible
    driver: str
    nccl: str
    amem: str
    nccl_settings: Dict[str, str]
    simulated: bool = False
    library: str = UNKNOWN  # the path of that NCCL


def folder() -> str:
    """Where proofs are kept, with the packs of what failed."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(home, "amem", "proofs")


def key_of(answer: Dict[str, Any]) -> str:
    text = json.dumps([sorted(gpu["uuid"] for gpu in answer["gpus"]), len(answer["hosts"]), answer["driver"], answer["nccl"]["version"], answer["amem"],
                       answer["nccl_settings"]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep(answer: Dict[str, Any]) -> str:
    """Writes a proof in place of an earlier one of the same; "", or why that is not possible."""
    path = os.path.join(folder(), answer["key"] + ".json")
    try:
        _private.make_directories(os.path.dirname(path))
        with _private.new_file(path + ".new") as file:
            file.write(json.dumps(answer, indent=1).encode())
        os.replace(path + ".new", path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the earlier one no longer says what is so
            os.unlink(path)
        return "%s: %s" % (path, error.strerror)
    return ""


def kept() -> Iterator[Dict[str, Any]]:
    """Those that can be read, the newest first."""
    found = []
    for path in glob.glob(os.path.join(folder(), "*.json")):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            answer = json.load(file)
            if isinstance(answer, dict) and (answer.get("schema"), answer.get("version")) == (SCHEMA, VERSION):
                found.append(answer)
    return iter(sorted(found, key=lambda answer: str(answer.get("when")), reverse=True))


def does_not_hold(answer: Dict[str, Any], here: Here) -> str:
    """Why a proof says nothing about this machine; "": it does."""
    if not here.simulated and (answer["simulated"] or answer["stand_in_card"]):
        return "the simulator" if answer["simulated"] else "a simulated network card"
    if not here.simulated and UNKNOWN in (here.driver, here.nccl, here.amem):
        return "something that cannot be compared: the version of driver, NCCL or AMem is not known here"
    proved = {gpu["uuid"] for gpu in answer["gpus"]}
    if not set(here.gpus) <= proved:
        return "other GPUs"
    for what, then, now in (("driver", answer["driver"], here.driver), ("NCCL", answer["nccl"]["version"], here.nccl), ("AMem", answer["amem"], here.amem)):
        if then != now:
            return "%s %s, and here is %s" % (what, then, now)
    if answer["nccl_settings"] != here.nccl_settings:
        return "other settings of NCCL (%s)" % (", ".join("%s=%s" % one for one in answer["nccl_settings"].items()) or "none")
    return ""


def chosen(here: Here, environment: Dict[str, str]) -> Tuple[Dict[str, str], List[str]]:
    """The variables to set, and lines that say so. What `environment` has already is left as it is."""
    why_not: Optional[str] = None
    for answer in kept():
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # damaged: it proves nothing
            if why := does_not_hold(answer, here):
                why_not = why_not or "the proof of %s is of %s" % (answer["when"], why)
                continue
            return _of(answer, environment, here.library)
    return {}, ["nothing is proved for these GPUs, driver, NCCL and AMem%s; `amem doctor --prove` does it. Nothing experimental is set" % (" (%s)" % why_not if why_not else "")]


def effective(environment: Mapping[str, str]) -> Dict[str, str]:
    """What of OWN_VARIABLES these variables change."""
    return {name: environment[name] for name, default in OWN_VARIABLES.items() if environment.get(name) and environment[name] != default}


def _text(variables: Mapping[str, str], between: str = ", ") -> str:
    return between.join("%s=%s" % one for one in variables.items())


def _of(answer: Dict[str, Any], environment: Dict[str, str], library: str) -> Tuple[Dict[str, str], List[str]]:
    of_nccl = "by the proof of %s for NCCL %s (%s)" % (answer["when"], answer["nccl"]["version"], library)
    if not answer["complete"]:
        return {}, ["nothing is set, %s: a run of that proof failed, and the proof was incomplete. Run `amem doctor --prove` anew" % of_nccl]
    proved = [row for row in answer["settings"] if row["outcome"] == "proved"]
    rows = [row for row in proved if row["variables"]]
    of_the_machine = [row for row in rows if set(row["variables"]) <= set(OF_THE_MACHINE)]
    wanted = {name: value for row in of_the_machine for name, value in row["variables"].items()}
    said = []
    if taken := {name: environment[name] for name in wanted if environment.get(name)}:
        said.append("%s is set already, and left" % _text(taken))
    variables = {name: value for name, value in wanted.items() if name not in taken}
    together = effective({**environment, **variables})  # what the command would run with
    if variables and not any(row["variables"] == together for row in proved):
        said.append("the resulting combination, %s, was not proved: none is set" % _text(together))
        variables = {}
    said.insert(0, "%s, %s" % (_text(variables, " ") or "nothing is set", of_nccl))
    if variables:
        variables[PROVED_FOR] = answer["nccl"]["version"]
        said.append("a process of the command that loads another NCCL runs without them, and says so")
    if others := [row["setting"] for row in rows if row not in of_the_machine]:
        said.append("also proved, but set them yourself, because whether they are safe depends on what the program does while it is paused: %s" % ", ".join(others))
    return variables, said
