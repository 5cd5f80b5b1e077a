#!/usr/bin/env python3
"""What an agreement of N hosts costs: N processes, each a host of one rank, agree through one store that they all paused.

    PYTHONPATH=ncclpatch/python python3 tests/ncclpatch/python/hosts_bench.py [--hosts 1,2,4,8,16,32,64,128] [--rounds 5]
        [--store plain|tcp] [--peers-bench build/bin/peers_bench] [--json]

Measures the agreement alone (amem._hosts.together with a part that does nothing), between processes that were forked from this one and
wait for one another before each round. For each number of hosts: the median of the rounds by the clock, from the first that may begin to
the last that knows the decision; the median processor time of all hosts and the store; and the requests but for waits that the store was sent for each
host ("plain" only). The store is the tests' own ("plain") or PyTorch's TCPStore ("tcp"). With --peers-bench, beside it, what one vote of as
many ranks of one host takes in the engine. Exit code 1: the largest number of hosts took a second or more of the clock.
"""
import argparse
import datetime
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import store_for_tests  # noqa: E402
from amem import _hosts  # noqa: E402

ANSWER = struct.Struct("d")   # a member's processor seconds so far
TOLD = struct.Struct("qd")    # the store's requests and processor seconds so far
LIMIT_SECONDS = 1.0


class PlainStore:
    """The tests' own store, in a process of its own."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "store")

    def serve(self):
        self.server = store_for_tests.Server(self.path)

    def client(self):
        return store_for_tests.Client(self.path)

    def requests(self):
        return self.server.requests


class TcpStore:
    """PyTorch's TCPStore, whose server is a thread of a process of its own."""

    def __init__(self, _folder):
        import socket

        from torch import distributed
        self.distributed = distributed
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def serve(self):
        self.server = self.distributed.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)

    def client(self):
        return self.distributed.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False,
                                         timeout=datetime.timedelta(seconds=60))

    def requests(self):
        return 0  # it does not count them


def fork(work):
    """A child that does work() and ends without this process's clean-up."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:  # pylint: disable=broad-except  # said here, because nobody else would
        print("hosts_bench: %s: %s" % (type(error).__name__, error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def read_exactly(descriptor, count):
    data = b""
    while len(data) < count:
        more = os.read(descriptor, count - len(data))
        if not more:
            raise EOFError("a process of the measurement ended early")
        data += more
    return data


class Bench:
    """`hosts` processes and a store. They share two pipes: each reads one byte of `go` for a round, and writes an ANSWER to `done`."""

    def __init__(self, hosts, make_store, folder):
        self.hosts, self.store = hosts, make_store(folder)
        self.go, self.done, self.ask, self.told = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        self.children = [fork(self._serve)]
        read_exactly(self.told[0], TOLD.size)
        self.children += [fork(lambda rank=rank: self._member(rank)) for rank in range(hosts)]
        os.close(self.done[1])  # if all members end, a read says so
        self._collect()

    def _serve(self):
        os.close(self.ask[1])
        self.store.serve()
        os.write(self.told[1], TOLD.pack(0, 0))
        while os.read(self.ask[0], 1):
            os.write(self.told[1], TOLD.pack(self.store.requests(), time.process_time()))

    def _member(self, rank):
        os.close(self.go[1])  # or its end would never be seen
        os.close(self.ask[1])
        group = _hosts.StoreGroup(self.store.client(), rank, self.hosts, "host-%d" % rank)
        os.write(self.done[1], ANSWER.pack(time.process_time()))
        while os.read(self.go[0], 1):
            _hosts.together(group, "pause of nccl", lambda: None, lambda: None, 60)
            os.write(self.done[1], ANSWER.pack(time.process_time()))
        if hasattr(group.store, "close"):
            group.store.close()

    def _collect(self):
        """The members' processor seconds so far, once all have written."""
        answers = read_exactly(self.done[0], ANSWER.size * self.hosts)
        return sum(seconds for seconds, in ANSWER.iter_unpack(answers))

    def _ask_store(self):
        os.write(self.ask[1], b"?")
        return TOLD.unpack(read_exactly(self.told[0], TOLD.size))

    def round(self):
        """One agreement. Returns how many seconds it took, and of all so far the store's requests and the processor seconds."""
        began = time.monotonic()
        os.write(self.go[1], b"!" * self.hosts)
        processor = self._collect()
        took = time.monotonic() - began
        requests, served = self._ask_store()
        return took, requests, processor + served

    def close(self):
        for end in (self.go[1], self.ask[1]):
            os.close(end)
        for child in self.children:
            os.waitpid(child, 0)
        for end in (self.go[0], self.done[0], self.ask[0], *self.told):
            os.close(end)


def measure(hosts, rounds=5, make_store=PlainStore):
    """{"hosts", "seconds", "processor_seconds", "requests_per_host"}: medians of `rounds`, after one that is not counted."""
    with tempfile.TemporaryDirectory(prefix="amem-hb-", dir="/tmp") as folder:
        bench = Bench(hosts, make_store, folder)
        try:
            found = [bench.round() for _ in range(rounds + 1)]
        finally:
            bench.close()
    steps = list(zip(found, found[1:]))
    return {"hosts": hosts, "seconds": statistics.median(took for took, _, _ in found[1:]),
            "processor_seconds": statistics.median(after[2] - before[2] for before, after in steps),
            "requests_per_host": statistics.median((after[1] - before[1]) / hosts for before, after in steps)}


def engine_vote(program, ranks):
    """Seconds that a vote of so many ranks of one host takes in the engine, or None for fewer than two."""
    if ranks < 2:
        return None
    said = subprocess.run([program, str(ranks)], capture_output=True, text=True, check=True, timeout=300).stdout
    vote = re.search(r"vote of %d processes ([\d.]+) us" % ranks, said)
    if not vote:
        sys.exit(f"hosts_bench: {program} {ranks} told of no vote of {ranks} processes; build peers_bench of this tree")
    return float(vote.group(1)) / 1e6


def table(rows):
    yield "%5s %12s %14s %14s %14s" % ("hosts", "clock ms", "processor ms", "requests/host", "engine vote ms")
    for row in rows:
        vote = row.get("engine_vote_seconds")
        yield "%5d %12.1f %14.1f %14.1f %14s" % (row["hosts"], 1e3 * row["seconds"], 1e3 * row["processor_seconds"],
                                                row["requests_per_host"], "-" if vote is None else "%.3f" % (1e3 * vote))
    by_hosts = {row["hosts"]: row for row in rows}
    if 8 in by_hosts and 128 in by_hosts:
        few, many = by_hosts[8], by_hosts[128]
        yield "128 hosts against 8: %.1f times the clock, %.1f times the processor%s" % (
            many["seconds"] / few["seconds"], many["processor_seconds"] / few["processor_seconds"],
            "; the engine's vote %.1f times" % (many["engine_vote_seconds"] / few["engine_vote_seconds"])
            if many.get("engine_vote_seconds") else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1,2,4,8,16,32,64,128", help="numbers of hosts, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", choices=("plain", "tcp"), default="plain")
    parser.add_argument("--peers-bench", help="the program, for the engine's own vote")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for hosts in map(int, options.hosts.split(",")):
        row = measure(hosts, options.rounds, PlainStore if options.store == "plain" else TcpStore)
        if options.peers_bench:
            row["engine_vote_seconds"] = engine_vote(options.peers_bench, hosts)
        rows.append(row)
    print(json.dumps(rows, indent=1) if options.json else "\n".join(table(rows)))
    return 0 if rows[-1]["seconds"] < LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
