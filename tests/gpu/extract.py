#!/usr/bin/env python3
"""What of run_gpu_tests' results goes into the tree: the numbers behind a README's tables, and nothing that names a machine.

    extract.py [LABEL=]results.json... -o tests/gpu/results/NAME.json
    extract.py unmodified.json... -o tests/gpu/results/NAME.json    of unmodified_job.py, unmodified_costs.py and unmodified_kills.py
    extract.py proof.json -o tests/gpu/results/proof-NAME.json      of `amem doctor --prove --json`

Each step that measured something, with the cycles it measured, in the order of the runs; LABEL tells runs apart ("NCCL 2.28.9"). Steps of
part test and the journals' checks are only counted. Exit code 2: a file cannot be read, or nothing was measured.
"""
import argparse
import json
import os
import sys

MEASURED = ("bench", "startup", "torch", "scale", "steady", "suspend", "first", "rollout")
KEEP = ("program", "mode", "layout", "label", "gpus", "gpu", "driver", "nccl_version", "version", "held_mib", "freed_mib", "startup", "first",
        "median", "identical", "figures", "suspend_ms", "first_suspend_ms", "resume_ms", "first_pause_ms", "pause_ms",
        "strategies")
OF_A_CYCLE = ("cycle", "pause_ms", "resume_ms", "freed_mib", "votes_ms", "identical")


def shortened(data):
    """Numbers and short texts; of cycles, what the tables are made of."""
    row = {key: data[key] for key in KEEP if key in data}
    if isinstance(data.get("cycles"), list):
        row["cycles"] = [{key: cycle[key] for key in OF_A_CYCLE if key in cycle} for cycle in data["cycles"]]
    if "stock_ms" in data:  # start-up against stock has a form of its own
        row = dict(data)
    return row


def rounded(value):
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def of_run(label, results):
    outcomes, steps = {}, []
    for step in results["steps"]:
        outcomes[step["outcome"]] = outcomes.get(step["outcome"], 0) + 1
        data = step.get("data")
        if step["part"] in MEASURED and isinstance(data, dict) and (row := shortened(data)):
            steps.append({"part": step["part"], "name": step["name"], "gpus": step["gpus"], "data": rounded(row)})
    return {"run": label, "outcomes": outcomes, "steps": steps}


def of_proof(proof):
    """A proof without what names machines, GPUs and paths."""
    numbers = {}  # of GPUs, by uuid

    def number(uuid):
        return "GPU %d" % numbers.setdefault(uuid, len(numbers))

    def gpus(listed):
        return [{**gpu, "uuid": number(gpu["uuid"])} for gpu in listed]

    hosts = [{**host, "host": "host %d" % index, "gpus": gpus(host["gpus"])} for index, host in enumerate(proof["hosts"])]
    settings = [{**row, "packs": [], **({"ranks": [{**rank, "gpu": number(rank["gpu"])} for rank in row["ranks"]]} if "ranks" in row else {})} for row in proof["settings"]]
    return {**proof, "hosts": hosts, "gpus": gpus(proof["gpus"]), "settings": settings, "nccl": {**proof["nccl"], "library": os.path.basename(proof["nccl"]["library"])},
            "kernel": "", "nccl_settings": {name: value if value.lstrip("-").isdigit() else "set" for name, value in proof["nccl_settings"].items()}}


def of_unmodified(results):
    """A run of jobs that were stopped between launches. What a problem was is in words, which may name a machine."""
    lists = {name: [{**row, "problems": len(row.get("problems", []))} for row in results[name]] for name in ("kinds", "rows") if name in results}
    return {**results, **lists}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="[LABEL=]FILE")
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_args()
    runs = []
    for named in options.results:
        label, _, path = named.rpartition("=")
        try:
            with open(path, encoding="utf-8") as file:
                results = json.load(file)
            if results.get("schema") == "amem/proof":
                with open(options.output, "w", encoding="utf-8") as file:
                    json.dump(rounded(of_proof(results)), file, indent=1)
                    file.write("\n")
                return 0
            if results.get("program", "").startswith("unmodified_"):
                runs.append(rounded(of_unmodified(results)))
                continue
            runs.append(of_run(label, results))
        except (OSError, ValueError, KeyError) as error:
            print(f"extract: {path}: {error}", file=sys.stderr)
            return 2
    if all("program" in run for run in runs):
        with open(options.output, "w", encoding="utf-8") as file:
            file.write('{"runs": [\n' + ",\n".join(json.dumps(run) for run in runs) + "\n]}\n")
        return 0
    if not any(run.get("steps") for run in runs):
        print("extract: nothing was measured in these runs", file=sys.stderr)
        return 2
    with open(options.output, "w", encoding="utf-8") as file:
        file.write('{"runs": [\n' + ",\n".join(
            f'{{"run": {json.dumps(run["run"])}, "outcomes": {json.dumps(run["outcomes"])}, "steps": [\n'
            + ",\n".join(json.dumps(step) for step in run["steps"]) + "\n]}" for run in runs) + "\n]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
