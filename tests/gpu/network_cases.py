#!/usr/bin/env python3
"""Jobs over the stand-in card, case by case: stock NCCLs, hosts, rails, protocols, work that a pause finds half done, many registrations.

    NCCL_NVLS_ENABLE=0 python3 network_cases.py --library LIB/libamem_nccl.so --card BUILD/lib/stand_in_card --package ncclpatch/python \\
        --nccl 2.21.5=PATH,2.32.3=PATH --out results.json

Each case is network_job.py under torchrun with AMEM_NETWORK=keep and renew; group work without keep. The version "torch" is PyTorch's own NCCL through its
process groups, others go through NCCL's calls by ctypes. Ranks share GPUs where there are too few; only those of one host need NCCL 2.30 for it.
Prints a line for each job and writes all of them as JSON, {"jobs": [{"name", "nccl", "ok", ...}]}.
Exit codes: 0 all well, 1 a job failed, 2 NCCL_NVLS_ENABLE is not 0.
"""
import argparse
import concurrent.futures
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True
import span_turns  # noqa: E402  # beside this file

# With which NCCL sends through the stand-in card, and registers GPU memory with it. Left to find out, 2.28.9 takes a card that has no GDAKI for one of
# an unknown kind, and crashes: hence the type.
THROUGH_THE_CARD = {"NCCL_NET": "IB", "NCCL_IB_HCA": "amem_card", "NCCL_NET_GDR_LEVEL": "SYS", "NCCL_NET_GDR_READ": "1", "NCCL_DMABUF_ENABLE": "1",
                    "NCCL_IB_MERGE_NICS": "0", "NCCL_GIN_ENABLE": "0", "NCCL_GIN_TYPE": "0", "NCCL_SOCKET_IFNAME": "lo"}
SMALL = ["--groups", "1", "--elements", "1024,262144"]
ALL_KINDS = ["--kinds", "unmatched,graph,churn", *SMALL]
ABORTED = [*ALL_KINDS, "--abort"]
NO_GRAPH = ["--kinds", "unmatched,churn", *SMALL]
# NCCL merges ports of one PCI device, and no /sys says where the stand-in's are. The file of the topology does: a card of two ports.
MERGED = {"AMEM_SIM_CARDS": "2", "NCCL_IB_MERGE_NICS": "1"}
# A receive that is posted ahead has no request's index; by default NCCL looks up requests by that index, reads beside its table, and hangs.
AHEAD = {"NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS": "1", "NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME": "1"}
PORT = ('<pci busid="0000:fe:00.{port}" class="0x020000" vendor="0x15b3" device="0x1021" subsystem_vendor="0x15b3" subsystem_device="0x0001" '
        'link_speed="32.0 GT/s PCIe" link_width="16"><nic><net name="amem_card{port}"/></nic></pci>')
TOPOLOGY = ('<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143" affinity="ffff,ffffffff">' +
            "".join(PORT.format(port=port) for port in (0, 1)) + "</cpu></system>")

# Name, ranks, arguments of network_job.py, environment.
TABLE = [("2 hosts x 1, 3 communicators", 2, [], {}),
         ("2 hosts x 1, 3 communicators, direct", 2, [], {"AMEM_LAYOUT": "direct"}),
         ("2 hosts x 1, 8 communicators", 2, ["--groups", "7"], {}),
         ("2 hosts x 1, NCCL_CUMEM_ENABLE=0", 2, ["--groups", "1"], {"NCCL_CUMEM_ENABLE": "0"}),
         ("2 hosts x 2, 3 communicators", 4, ["--ranks-per-host", "2"], {}),
         ("2 hosts x 2, rails, PXN, 6 communicators", 4, ["--ranks-per-host", "2", "--groups", "4", "--rails"], {})]
WORK = [("2 hosts x 1, all kinds", 2, ABORTED, {}),
        ("3 hosts x 1, all kinds", 3, ABORTED, {}),
        ("2 hosts x 1, a graph with registered buffers", 2, ["--kinds", "graph", *SMALL], {"NCCL_GRAPH_REGISTER": "1"}),
        ("2 hosts x 1, registered buffers", 2, ["--kinds", "registered", *SMALL], {}),
        ("2 hosts x 1, LL", 2, ALL_KINDS, {"NCCL_PROTO": "LL"}),
        ("2 hosts x 1, LL128", 2, ALL_KINDS, {"NCCL_PROTO": "LL128"}),
        ("2 hosts x 1, Simple", 2, ALL_KINDS, {"NCCL_PROTO": "Simple"}),
        ("2 hosts x 1, flush", 2, ALL_KINDS, {"NCCL_GDR_FLUSH_DISABLE": "0", "NCCL_NET_FORCE_FLUSH": "1", "NCCL_IB_PCI_RELAXED_ORDERING": "0"}),
        ("2 hosts x 1, four queue pairs", 2, ALL_KINDS, {"NCCL_IB_QPS_PER_CONNECTION": "4", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"}),
        ("2 hosts x 1, receives posted ahead", 2, NO_GRAPH, AHEAD),
        ("2 hosts x 1, merged cards", 2, ALL_KINDS, MERGED),
        ("2 hosts x 1, NCCL_CUMEM_ENABLE=0, all kinds", 2, ALL_KINDS, {"NCCL_CUMEM_ENABLE": "0"}),
        ("2 hosts x 2, rails, all kinds", 4, ["--ranks-per-host", "2", "--rails", *ABORTED], {}),
        ("3 hosts x 2, rails, all kinds", 6, ["--ranks-per-host", "2", "--rails", *ABORTED], {})]
MANY = [("2 hosts x 1, few registrations", 2, ["--groups", "0"], {"NCCL_MAX_NCHANNELS": "1", "NCCL_MAX_P2P_NCHANNELS": "1"}),
        ("2 hosts x 1, a hundred registrations", 2, ["--groups", "4"], {}),
        ("2 hosts x 1, a thousand registrations", 2, ["--groups", "90", "--elements", "1024,1048576"], {})]
GROUPS = {"table": TABLE, "work": WORK, "many": MANY}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libamem_nccl.so")
    parser.add_argument("--card", required=True, help="the folder of the stand-in's libibverbs.so.1")
    parser.add_argument("--package", required=True, help="the folder of the Python package amem")
    parser.add_argument("--nccl", default="", help="NAME=PATH of further stock libnccl.so.2, comma separated")
    parser.add_argument("--versions", default="", help="only these names, comma separated (torch is PyTorch's)")
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)} and speed: all-reduces of stock NCCL, keep and renew in turns")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--settings", default="keep,renew", help="of AMEM_NETWORK, comma separated; stock: without AMem")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--spans", type=int, default=60, help="of group speed: of ten all-reduces each")
    parser.add_argument("--pairs", type=int, default=4, help="of jobs of group speed")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at a time; times mean nothing beyond 1")
    parser.add_argument("--limit", type=int, default=90, help="seconds for one job")
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything; what does not fit is skipped, visibly")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def findings(folder):
    """What the card found wrong in a job, the first lines."""
    lines = []
    for path in glob.glob(os.path.join(folder, "amem-card-findings-*")):
        with open(path, encoding="utf-8", errors="replace") as file:
            lines += file.read().splitlines()[:20]
    return lines


class Jobs:
    """Runs jobs and collects what they said. Threads share it, list.append apart nothing in it changes."""

    def __init__(self, options):
        self.options, self.began, self.rows = options, time.monotonic(), []
        self.libraries = dict(pair.split("=", 1) for pair in options.nccl.split(",") if pair)
        names = options.versions.split(",") if options.versions else ["torch", *self.libraries]
        self.versions = [name for name in names if name == "torch" or name in self.libraries]

    def run(self, name, version, setting, ranks, more, environment):
        """One job; the row. `setting`: keep, renew or stock."""
        options = self.options
        row = {"name": name, "version": version, "setting": setting, "ok": False}
        left = options.budget - (time.monotonic() - self.began)
        if left < 20:
            return self.note({**row, "error": "skipped: the time is over"})
        limit = int(min(options.limit, left))
        with tempfile.TemporaryDirectory(prefix="amem-network-") as folder:
            file = os.path.join(folder, "result.json")
            if environment is MERGED:
                environment = {**environment, "NCCL_TOPO_FILE": os.path.join(folder, "topology.xml")}
                with open(environment["NCCL_TOPO_FILE"], "w", encoding="utf-8") as topology:
                    topology.write(TOPOLOGY)
            if setting != "stock":
                environment = {"LD_PRELOAD": os.path.abspath(options.library), "AMEM_NETWORK": setting, "AMEM_JOURNAL_DIR": folder + "/journal", **environment}
            environment = {**os.environ, "OMP_NUM_THREADS": "2", "TMPDIR": folder, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_GRAPH_REGISTER": "0",
                           "PYTHONPATH": os.path.abspath(options.package),
                           "LD_LIBRARY_PATH": ":".join(filter(None, [os.path.abspath(options.card), os.environ.get("LD_LIBRARY_PATH")])), **environment}
            library = ["--nccl", os.path.abspath(self.libraries[version])] if version != "torch" else []
            stock = ["--stock"] if setting == "stock" else []
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), os.path.join(HERE, "network_job.py"),
                       "--cycles", str(options.cycles), "--time-limit", str(limit - 5), "--json", file, *library, *stock, *more]
            began = time.monotonic()
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                       start_new_session=True)
            try:
                said, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
            if os.path.exists(file):
                with open(file, encoding="utf-8") as source:
                    row.update(json.load(source))
            if process.returncode != 0 or not row["ok"]:
                lines = [line for line in said.splitlines() if "rank " in line and ":" in line][:3]
                row.update({"ok": False, "said": said[-6000:], "findings": findings(folder), "error": row.get("error") or " | ".join(lines) or f"exit code {process.returncode}"})
        row["seconds"] = round(time.monotonic() - began, 1)
        return self.note(row)

    def note(self, row):
        self.rows.append(row)
        regions = (row.get("card") or [{}])[0].get("gpu_regions", "")
        print(f"{'-' if 'skipped' in row else 'ok' if row['ok'] else 'FAILED':6} {row['version']:7} {row['setting']:5} {row['name']:48} regions {regions!s:5} "
              f"pause {row.get('pause_ms', '')!s:6} resume {row.get('resume_ms', '')!s:6} first {row.get('first_pause_ms', '')!s:6} "
              f"freed {row.get('freed_mib', '')} {row.get('skipped', '')}{'' if row['ok'] else row.get('error', '')[:300]}", flush=True)
        return row


def needs(version, more, environment):
    """What the case needs that is not here; "" if nothing."""
    import torch
    number = tuple(int(part) for part in version.split(".")[:2]) if version[0].isdigit() else torch.cuda.nccl.version()[:2]
    if environment is MERGED and number < (2, 24):
        return "NCCL 2.24, which merges cards by a topology from a file"
    if environment is AHEAD and number < (2, 30):
        return "NCCL 2.30"
    of_a_host = int(more[more.index("--ranks-per-host") + 1]) if "--ranks-per-host" in more else 1
    if torch.cuda.device_count() < of_a_host and number < (2, 30):
        return f"{of_a_host} GPUs, or NCCL 2.30"
    return ""


def speed(jobs, version, rows):
    """All-reduces of stock NCCL over the card, and with keep and renew, in turns with each other: pairs of jobs, which change places."""
    for setting in ("keep", "renew"):
        line = {"name": "all-reduce of 8 MiB", "version": version, "setting": setting, "pairs": []}
        for number in range(jobs.options.pairs):
            names = ("stock", setting) if number % 2 == 0 else (setting, "stock")
            spans = [row.get("all_reduce_ms") if row["ok"] else None for row in two_in_turns(jobs, version, names)]
            if not all(spans) or min(map(len, spans)) < span_turns.FIRST + 3:
                continue
            found = span_turns.compare(*spans)
            line["pairs"].append(found if number % 2 == 0 else span_turns.turned(found))
        line.update(span_turns.several(line["pairs"]) if line["pairs"] else {"ok": False})
        rows.append(line)
        print(json.dumps(line), flush=True)


def two_in_turns(jobs, version, names):
    """The rows of both jobs."""
    more = ["--groups", "0", "--elements", "1024", "--cycles", "1", "--reductions", str(jobs.options.spans)]
    with tempfile.TemporaryDirectory(prefix="amem-turns-") as folder, span_turns.Fifos(folder, "all-reduce") as fifos, concurrent.futures.ThreadPoolExecutor(2) as both:
        pair = [both.submit(jobs.run, f"all-reduce of 8 MiB, {name} of {' and '.join(names)}", version, name, 2, [*more, "--turns", turns], {})
                for name, turns in zip(names, (fifos.first, fifos.second))]
        concurrent.futures.wait(pair, return_when=concurrent.futures.FIRST_COMPLETED)
        fifos.release()  # the other has no spans left, or a partner that failed
        return [one.result() for one in pair]


def main():
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("network_cases: refused: NCCL_NVLS_ENABLE must be 0", file=sys.stderr)
        return 2
    options = arguments()
    jobs, speeds = Jobs(options), []
    wanted = options.groups.split(",")
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        for group in wanted:
            for name, ranks, more, environment in GROUPS.get(group, []):
                for version in jobs.versions if options.only in name else ():
                    if missing := needs(version, more, environment):
                        jobs.note({"name": name, "version": version, "setting": "-", "ok": True, "skipped": missing})
                        continue
                    for setting in (one for one in options.settings.split(",") if (group, one) != ("work", "keep")):
                        pool.submit(jobs.run, name, version, setting, ranks, more, environment)
    if "speed" in wanted:
        for version in jobs.versions:
            speed(jobs, version, speeds)
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump({"command": " ".join(sys.argv), "jobs": jobs.rows, "speed": speeds}, file, indent=1)
    return 0 if all(row["ok"] for row in jobs.rows) and all(len(line["pairs"]) == options.pairs for line in speeds) else 1


if __name__ == "__main__":
    sys.exit(main())
