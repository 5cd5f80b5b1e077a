"""extract.py keeps what was measured, and nothing that names a machine."""
import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

import extract

STEP = {"part": "bench", "name": "amem slab", "gpus": 2, "outcome": "pass", "reason": "", "seconds": 3.0,
        "data": {"gpu": "NVIDIA H200", "driver": "580", "nccl_path": "/somewhere/libnccl.so.2", "command": ["/somewhere/bench"],
                 "environment": {"HOSTNAME": "machine"}, "median": {"pause_ms": 24.00049}, "cycles": [{"cycle": 1, "pause_ms": 25.0, "raw": [1]}]}}
CHECK = {"part": "bench", "name": "journals of amem slab", "gpus": 2, "outcome": "pass", "data": {"last_line": "ok"}}
FAILED = {"part": "test", "name": "one", "gpus": 2, "outcome": "FAIL", "data": {"median": {}}}


def extracted(*named):
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["extract.py", "-o", os.path.join(folder, "out.json")]
        for number, (label, steps) in enumerate(named):
            path = os.path.join(folder, f"{number}.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"steps": steps}, file)
            arguments.append(label + path)
        with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = extract.main()
        if code:
            return code, errors.getvalue()
        with open(arguments[2], encoding="utf-8") as file:
            return code, file.read()


class Extract(unittest.TestCase):
    def test_measurements_stay_and_machines_do_not(self):
        code, text = extracted(("NCCL 2.28.9=", [STEP, CHECK, FAILED]), ("", [STEP]))
        self.assertEqual(code, 0)
        self.assertNotIn("/somewhere", text)
        self.assertNotIn("machine", text)
        first, second = json.loads(text)["runs"]
        self.assertEqual((first["run"], second["run"]), ("NCCL 2.28.9", ""))
        self.assertEqual(first["outcomes"], {"pass": 2, "FAIL": 1})
        self.assertEqual([step["name"] for step in first["steps"]], ["amem slab"])
        self.assertEqual(first["steps"][0]["data"]["median"], {"pause_ms": 24.0})
        self.assertEqual(first["steps"][0]["data"]["cycles"], [{"cycle": 1, "pause_ms": 25.0}])

    def test_a_run_that_measured_nothing_is_refused(self):
        code, text = extracted(("", [CHECK, FAILED]))
        self.assertEqual(code, 2)
        self.assertIn("nothing was measured", text)


class Unmodified(unittest.TestCase):
    def test_a_problem_is_counted_and_its_words_stay_away(self):
        results = {"program": "unmodified_job", "ok": False, "kinds": [{"kind": "ddp", "stops": 3, "problems": ["rank 0: /somewhere/a"]}, {"kind": "tp", "problems": []}]}
        kept = extract.of_unmodified(results)
        self.assertNotIn("somewhere", json.dumps(kept))
        self.assertEqual([row["problems"] for row in kept["kinds"]], [1, 0])


class Proofs(unittest.TestCase):
    def test_a_proof_keeps_its_outcomes_and_names_no_machine(self):
        gpu = {"name": "NVIDIA H200", "uuid": "1234-5678"}
        proof = {"schema": "amem/proof", "version": 1, "hosts": [{"host": "machine", "gpus": [gpu]}], "gpus": [gpu], "kernel": "6.1-machine",
                 "nccl": {"version": "2.28.9", "library": "/somewhere/libnccl.so.2"}, "nccl_settings": {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "machine0"},
                 "settings": [{"setting": "default", "outcome": "hung", "packs": ["/somewhere/a.amem"], "ranks": [{"gpu": "1234-5678"}]}]}
        kept = extract.of_proof(proof)
        for name in ("machine", "somewhere", "1234"):
            self.assertNotIn(name, json.dumps(kept))
        self.assertEqual(kept["settings"][0]["outcome"], "hung")
        self.assertEqual(kept["nccl_settings"], {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "set"})
        self.assertEqual(kept["settings"][0]["ranks"][0]["gpu"], kept["gpus"][0]["uuid"])


if __name__ == "__main__":
    unittest.main()
