"""SUPPORT.md says of hardware what the records say, and no other page says that never ran what a record proves."""
import os
import re
import unittest

import support

TREE = os.path.join(support.HERE, "..", "..")
NEVER = re.compile(r"never|not tried|no real card|simulat|alone")
PAGES = ("README.md", "SUPPORT.md", "ncclpatch/README.md", "ncclpatch/python/amem/_doctor.py", "tests/site/pages/operate/nvls.md", "tests/site/pages/operate/network.md")
PROOF = {"schema": "amem/proof", "gpus": [{"name": "NVIDIA H100", "uuid": "a"}] * 2, "hosts": [{}], "simulated": False, "stand_in_card": False, "one_machine_as_several_hosts": False,
         "ranks": 2, "driver": "580.1.2", "nccl": {"version": "2.28.9"}, "nccl_settings": {"NCCL_NVLS_ENABLE": "0"},
         "settings": [{"setting": "default", "outcome": "proved"}, {"setting": "AMEM_NVLS=release", "outcome": "skipped"}, {"setting": "AMEM_SCOPE=all", "outcome": "hung"}]}


def text_of(path):
    with open(os.path.join(TREE, path), encoding="utf-8") as file:
        return file.read()


def denied(text, setting):
    """Lines that say of a setting that it never ran on hardware."""
    return [line for line in text.splitlines() if setting in line and re.search("hardware|real card", line) and NEVER.search(line)]


class Table(unittest.TestCase):
    def test_support_has_the_table_that_the_records_make(self):
        document = text_of("SUPPORT.md")
        self.assertEqual(support.replaced(document, support.table(support.read(support.RESULTS))), document, "run tests/gpu/support.py")

    def test_a_record_of_a_run_says_what_it_ran_on(self):
        found = support.facts({"machine": "two H200, driver 580.159.04, PyTorch 2.11, NCCL 2.28.9", "runs": [{"program": "freeze_job", "nccl": 23203, "fsdp2": {}}]})
        self.assertEqual(found, {"GPU": {"H200"}, "driver": {"580.159.04"}, "NCCL": {"2.28.9", "2.32.3"}, "PyTorch": {"2.11"}, "ran": {"freeze and thaw", "FSDP2"}})

    def test_a_proof_says_what_was_tried_with_which_end(self):
        row = support.proof_row("p.json", PROOF)
        self.assertEqual(row[1:], ["2 x H100", "2", "580.1.2", "2.28.9", "off", "proved", "skipped", "not tried", "not tried", "hung"])
        self.assertIn("simulator", support.proof_row("p.json", {**PROOF, "simulated": True})[1])

    def test_a_proof_on_the_simulator_or_over_a_simulated_card_is_none_of_hardware(self):
        settings = [{"setting": name, "outcome": "proved"} for name in support.SETTINGS]
        for change, proved in (({}, set(support.SETTINGS)), ({"simulated": True}, set()), ({"stand_in_card": True}, set(support.SETTINGS) - {"AMEM_NETWORK=renew"})):
            self.assertEqual(support.proved_on_hardware({"p": {**PROOF, "settings": settings, **change}}), proved)


class Pages(unittest.TestCase):
    def test_no_page_denies_what_a_record_proves(self):
        proved = support.proved_on_hardware(support.read(support.RESULTS))
        for path in PAGES:
            for setting in proved:
                self.assertEqual(denied(text_of(path), setting), [], path)

    def test_a_denial_is_recognised(self):
        self.assertEqual(len(denied("* x\n* Multicast stays. `AMEM_NVLS=release` has never run on hardware.", "AMEM_NVLS=release")), 1)

    def test_readme_and_records_name_the_same_gpus(self):
        named = set(support.MODELS.findall(re.search(r"\| GPU \|(.*)", text_of("README.md"))[1]))
        recorded = set()
        for record in support.read(support.RESULTS).values():
            recorded |= {model for gpu in record["gpus"] for model in support.MODELS.findall(gpu["name"])} if support.is_proof(record) else support.facts(record)["GPU"]
        self.assertEqual(named, recorded)


if __name__ == "__main__":
    unittest.main()
