#!/usr/bin/env python3
"""The table of SUPPORT.md that says what ran on hardware, made from the records in tests/gpu/results and from nothing else.

    support.py            writes it again
    support.py --check    exit code 1 where SUPPORT.md has another one
"""
import glob
import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SUPPORT = os.path.join(HERE, "..", "..", "SUPPORT.md")
RESULTS = os.path.join(HERE, "results")
BEGIN, END = "<!-- tests/gpu/support.py makes this from tests/gpu/results -->\n", "<!-- the end of what it makes -->\n"
PROOF = "amem/proof"
MODELS = re.compile(r"\b(?:H|A|B|GB|L)\d{2,3}S?\b")
WORDS = ("vLLM", "SGLang", "TRL", "FSDP2", "DDP", "DeepSpeed", "Ray", "torch_memory_saver")
PROGRAMS = {"amem-gpu-bench": "benchmark", "torch_job": "PyTorch job", "suspend_job": "suspend", "first_pause_job": "first pause", "freeze_job": "freeze and thaw",
            "network_job": "simulated network card", "rollout_job": "rollouts", "tensors_job": "tags", "pools_bench": "tags", "sharing_job": "sharing", "program_job": "AMEM_SCOPE=all",
            "beside_job": "other allocators in the same job", "guards": "memory held by other libraries", "walk": "driver answers compared with and without AMem", "prove_job": "failures planted in proofs",
            "frameworks_job": "adapters on stand-ins for their projects", "signals_job": "signals to paused and frozen jobs", "unmodified_job": "stops between launches",
            "allocation_costs": "AMEM_SCOPE=all", "unmodified_costs": "stops between launches", "unmodified_kills": "stops between launches"}
NCCL_KEYS = ("nccl", "nccl_version", "version")


def leaves(value, key=""):
    """(key, value) of all that is no list and no dict, and (key, key) of keys, which say something as well."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield name, name
            yield from leaves(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, key)
    else:
        yield key, value


def version_of(key, value):
    """An NCCL's version, from its number or its text."""
    if key in NCCL_KEYS and isinstance(value, int) and 21000 < value < 40000:
        return "%d.%d.%d" % (value // 10000, value // 100 % 100, value % 100)
    found = re.fullmatch(r"2\.\d+\.\d+", value) if key in ("nccl", "nccl_version") and isinstance(value, str) else None
    return found.group() if found else ""


def facts(record):
    """What a record says: sets of texts by column."""
    found = {name: set() for name in ("GPU", "driver", "NCCL", "PyTorch", "ran")}
    for key, value in leaves(record):
        if version := version_of(key, value):
            found["NCCL"].add(version)
        if not isinstance(value, str):
            continue
        found["GPU"] |= set(MODELS.findall(value)) if key in ("gpu", "machine", "host", "name") else set()
        found["driver"] |= set(re.findall(r"\b5\d\d\.\d+\.\d+\b", value))
        found["NCCL"] |= set(re.findall(r"NCCL (2\.\d+\.\d+)", value))
        found["PyTorch"] |= set(re.findall(r"PyTorch (2\.\d+)", value)) | ({".".join(value.split(".")[:2])} if key == "torch" and value[:2] == "2." else set())
        found["ran"] |= {word for word in WORDS if word.lower() in re.split(r"[ ,/]|_job\.py", value.lower())}
        found["ran"] |= {PROGRAMS[value]} if value in PROGRAMS else set()
    return found


def cells(found):
    return ["; ".join(sorted(texts, key=lambda text: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)])) or "not written down" for texts in found.values()]


def proof_row(name, proof):
    models = {gpu["name"].replace("NVIDIA ", "") for gpu in proof["gpus"]}
    where = "simulator" if proof["simulated"] else "%d x %s" % (len(proof["gpus"]), ", ".join(sorted(models)))
    network = ", simulated card" if proof["stand_in_card"] else ""
    hosts = "" if len(proof["hosts"]) == 1 else ", %d hosts%s" % (len(proof["hosts"]), " of one machine" if proof["one_machine_as_several_hosts"] else "")
    outcomes = {row["setting"]: row["outcome"] for row in proof["settings"]}
    nvls = proof["nccl_settings"].get("NCCL_NVLS_ENABLE")
    return [f"[{name}](tests/gpu/results/{name})", where + network, "%d%s" % (proof["ranks"], hosts), proof["driver"], proof["nccl"]["version"],
            "off" if nvls == "0" else "as NCCL has it", *(outcomes.get(setting, "not tried") for setting in SETTINGS)]


SETTINGS = ("default", "AMEM_NVLS=release", "AMEM_NETWORK=renew", "AMEM_USER_MEMORY=release", "AMEM_SCOPE=all")
PROOF_HEAD = ("proof", "on", "ranks", "driver", "NCCL", "NVLS", *(f"`{setting}`" if "=" in setting else setting for setting in SETTINGS))


def lines(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def read(folder):
    """{name: record} of all that are there."""
    records = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path, encoding="utf-8") as file:
            records[os.path.basename(path)] = json.load(file)
    return records


def is_proof(record):
    return isinstance(record, dict) and record.get("schema") == PROOF


def table(records):
    """The text between the marks."""
    found = {name: facts(record) for name, record in records.items() if not is_proof(record)}
    measured = [[f"[{name}](tests/gpu/results/{name})", *cells(one)] for name, one in found.items() if one["ran"]]
    proofs = [proof_row(name, record) for name, record in records.items() if is_proof(record)]
    text = "\n".join(lines(("record", *facts({})), measured)) + "\n"
    if proofs:
        text += "\nProofs, by `amem doctor --prove` ([how](tests/site/pages/operate/prove.md)):\n\n" + "\n".join(lines(PROOF_HEAD, proofs)) + "\n"
    return text


def proved_on_hardware(records):
    """The settings that some real GPU has proved; over a simulated card AMEM_NETWORK has not."""
    return {row["setting"] for record in records.values() if is_proof(record) and not record["simulated"] for row in record["settings"]
            if row["outcome"] == "proved" and not (record["stand_in_card"] and row["setting"].startswith("AMEM_NETWORK"))}


def replaced(document, text):
    """ValueError: the document has not both marks, in their order."""
    before, mark, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError("SUPPORT.md has no place for the table")
    return before + BEGIN + "\n" + text + "\n" + END + after


def main():
    with open(SUPPORT, encoding="utf-8") as file:
        document = file.read()
    made = replaced(document, table(read(RESULTS)))
    if made == document:
        return 0
    if "--check" in sys.argv[1:]:
        print("SUPPORT.md has another table than the records make: run tests/gpu/support.py", file=sys.stderr)
        return 1
    with open(SUPPORT, "w", encoding="utf-8") as file:
        file.write(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
