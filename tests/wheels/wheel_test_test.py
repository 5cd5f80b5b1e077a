#!/usr/bin/env python3
"""Proves that each check of the stock NCCLs can fail, on made-up observations and on the stand-in for NCCL; no wheel is needed.

    wheel_test_test.py BUILD
"""

import dataclasses
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import checks
import fetch
import known_names
import library
import wheel_test

BUILD = None
AMEM, NCCL = "/x/libamem_nccl.so", "/y/libnccl.so.2"


def good():
    """What a libnccl leaves with which nothing is wrong."""
    look_ups = [(name, 12000, AMEM) for name in checks.MEMORY_CALLS] + [("cuDeviceGet", 2000, AMEM)] * checks.FEWEST_LOOK_UPS
    return checks.Observed({"cuMemAlloc", "cuMemAlloc_v2", "ibv_reg_mr", "cuDeviceGetUuid"}, set(), look_ups,
                           [("cuGetProcAddress_v2", AMEM), ("cuInit", "/z/libcuda.so.1")],
                           [(name, 12000, True) for name in checks.MEMORY_CALLS])


class Checks(unittest.TestCase):
    def expect(self, words, **changes):
        found = checks.complaints(dataclasses.replace(good(), **changes))
        self.assertEqual(len(found), 1, found)
        self.assertRegex(found[0], words)

    def test_nothing_is_found_where_nothing_is_wrong(self):
        self.assertEqual(checks.complaints(good()), [])
        self.assertEqual(checks.counted(good()), (checks.FEWEST_LOOK_UPS + 6, checks.FEWEST_LOOK_UPS + 6))

    def test_a_look_up_past_amem_is_found(self):
        seen = good()
        seen.look_ups.append(("cuDeviceGetName", 2000, NCCL))
        self.assertEqual(checks.counted(seen), (checks.FEWEST_LOOK_UPS + 6, checks.FEWEST_LOOK_UPS + 7))
        self.expect("cuDeviceGetName of CUDA 2000 was looked up past AMem", look_ups=seen.look_ups)
        self.expect("dlsym was asked for cuMemMap past AMem", direct=[("cuMemMap", NCCL)])

    def test_an_import_is_found(self):
        self.expect("cuMemMap is imported", imported={"cuMemMap"})

    def test_what_the_journal_lacks_or_has_too_much_is_found(self):
        seen = good()
        self.expect("asked for cuIpcGetMemHandle of CUDA 12000 1 times more", bound=seen.bound[:-1])
        self.expect("the journal has cuMemMap of CUDA 12000 1 times more", bound=seen.bound + [("cuMemMap", 12000, True)])

    def test_a_name_that_nobody_decided_about_is_found_with_its_name(self):
        self.expect("^cuMemTeleport is about memory", names={"cuMemTeleport_v3_ptsz"})
        self.expect("^ibv_reg_everything is about memory", names={"ibv_reg_everything"})
        self.expect("^gdr_pin_twice is about memory", direct=[("gdr_pin_twice", AMEM)])
        seen = good()
        self.expect("^cuMulticastFold is about memory", look_ups=seen.look_ups + [("cuMulticastFold", 13040, AMEM)],
                    bound=seen.bound + [("cuMulticastFold", 13040, False)])

    def test_a_name_that_is_not_replaced_as_the_table_says_is_found(self):
        seen = good()
        self.expect("for cuMemAlloc of CUDA 12000 NCCL got the driver's function, where known_names.py says AMem's",
                    bound=[("cuMemAlloc", 12000, False)] + seen.bound[1:])
        more = ("cuMemAdvise", 12000)
        self.expect("for cuMemAdvise of CUDA 12000 NCCL got AMem's", look_ups=seen.look_ups + [(*more, AMEM)],
                    bound=seen.bound + [(*more, True)])

    def test_an_nccl_that_gave_up_proves_nothing(self):
        seen = good()
        self.expect("only 5 driver functions were looked up", look_ups=seen.look_ups[:5])
        self.expect("cuMemFree was never looked up", look_ups=[one for one in seen.look_ups if one[0] != "cuMemFree"],
                    bound=[one for one in seen.bound if one[0] != "cuMemFree"])


class Table(unittest.TestCase):
    def test_it_says_what_the_library_does(self):
        with tempfile.TemporaryDirectory() as scratch:
            real = wheel_test.Bench(BUILD, scratch).replacements()
        check = checks.the_table_says_what_the_library_does
        self.assertEqual(check(real), [])
        self.assertIn("cuMemTeleport is replaced by AMem", check(real + [("cuMemTeleport", 2000, checks.NO_BOUND)])[0])
        others = [one for one in real if one[0] != "cuMemCreate"]
        self.assertIn("cuMemCreate is not replaced", check(others)[0])
        self.assertIn("cuMemCreate is replaced before CUDA 13040 only", check(others + [("cuMemCreate", 2000, 13040)])[0])

    def test_what_amem_journals_and_what_the_table_lists_follow_one_rule(self):
        source = pathlib.Path(__file__).parents[2] / "ncclpatch/intercept/intercept.cpp"
        fragments = re.search(r"kFragments\[\] = \{(.*?)\};", source.read_text(), re.DOTALL).group(1)
        self.assertEqual(tuple(re.findall(r'"(\w+)"', fragments)), known_names.FRAGMENTS)

    def test_names_lose_their_suffixes(self):
        for name in ("cuMemcpy3D_v2_ptds", "cuMemcpy3D_ptds", "cuMemcpy3D_v2", "cuMemcpy3D"):
            self.assertEqual(known_names.base(name), "cuMemcpy3D")
        self.assertEqual(known_names.base("cuStreamWriteValue32_v2"), "cuStreamWriteValue32")
        self.assertFalse(known_names.about_memory("cuDeviceGetUuid"))
        self.assertFalse(known_names.about_memory("cudaMemcpy"), "of the runtime, not of the driver")


class Files(unittest.TestCase):
    def test_names_and_imports_are_read_from_a_library(self):
        with tempfile.TemporaryDirectory() as scratch:
            bench = wheel_test.Bench(BUILD, scratch)
            names = library.names_in(bench.second)
            self.assertIn("cuMemCreate", names)
            self.assertEqual(library.imported(bench.second), set())
            built = pathlib.Path(scratch) / "imports.so"
            code = b'extern int cuMemMap(void); const char* name = "cuMemTeleport"; int call(void) { return cuMemMap(); }'
            subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", built], input=code, check=True)
            self.assertEqual(library.imported(built), {"cuMemMap"})
            self.assertIn("cuMemTeleport", library.names_in(built))
            text = pathlib.Path(scratch) / "text"
            text.write_text("no library, but long enough for a header: " + "x" * 64)
            self.assertRaises(ValueError, library.names_in, text)


class Choice(unittest.TestCase):
    listed = [("cu12", "2.18.1"), ("cu12", "2.28.9"), ("cu12", "2.32.3"), ("cu13", "2.28.9"), ("cu13", "2.32.3")]

    def test_without_versions_it_is_the_oldest_pytorchs_and_the_newest(self):
        self.assertEqual(wheel_test.choose([], self.listed, []),
                         ([("cu12", "2.18.1"), ("cu13", "2.28.9"), ("cu13", "2.32.3")], []))

    def test_versions_are_of_both_lines_unless_one_is_named(self):
        self.assertEqual(wheel_test.choose(["2.28.9"], self.listed, [])[0], [("cu12", "2.28.9"), ("cu13", "2.28.9")])
        self.assertEqual(wheel_test.choose(["cu12-2.28.9"], self.listed, [])[0], [("cu12", "2.28.9")])
        self.assertEqual(wheel_test.choose(["2.17.1"], self.listed, []), ([], ["PyPI lists no 2.17.1 for this machine"]))
        self.assertEqual(wheel_test.choose(["all"], self.listed, [])[0], self.listed)

    def test_without_pypi_it_is_what_is_there(self):
        self.assertEqual(wheel_test.choose([], [], [("cu12", "2.18.1")]),
                         ([("cu12", "2.18.1")], ["cu13-2.28.9 could not be had"]))
        self.assertEqual(wheel_test.choose([], [], []), ([], ["cu13-2.28.9 could not be had"]))

    def test_versions_are_ordered_as_numbers(self):
        self.assertLess(fetch.number("2.9.9"), fetch.number("2.18.1"))
        self.assertLess(fetch.number("2.26.2"), fetch.number("2.26.2.post1"))


class StandIn(unittest.TestCase):
    """The whole way with the stand-in for NCCL in place of a stock one."""

    def run_as(self, way):
        with tempfile.TemporaryDirectory() as scratch:
            bench = wheel_test.Bench(BUILD, scratch)
            # Under a path of its own: the probe loads the stand-in once more, as its second NCCL.
            stock = pathlib.Path(scratch) / "cu12-2.28.9" / "libnccl.so.2"
            stock.parent.mkdir()
            stock.write_bytes(bench.second.read_bytes())
            return bench.run(stock, way)

    def test_each_way_sees_every_look_up_and_the_journal_has_them(self):
        for way in wheel_test.WAYS:
            with self.subTest(way=way):
                seen, answers = self.run_as(way)
                self.assertNotIn("problem", answers)
                came, every = checks.counted(seen)
                self.assertEqual(came, every)
                self.assertGreater(every, 20)
                # It asks for few functions, and that is all that there is to complain about.
                self.assertEqual([one for one in checks.complaints(seen) if "proves nothing" not in one], [])

    def test_without_amem_every_look_up_goes_past_it(self):
        with tempfile.TemporaryDirectory() as scratch:
            bench = wheel_test.Bench(BUILD, scratch)
            bench.amem = bench.witness  # a library that does nothing, in place of AMem's
            # The probe cannot be used without AMem's functions; what NCCL does by itself is enough.
            environment = {"LD_LIBRARY_PATH": str(bench.driver), "LD_AUDIT": str(bench.witness),
                           "STAND_IN_LOOK_UPS": scratch + "/look_ups", "STAND_IN_WITNESS": scratch + "/direct"}
            code = ("import ctypes as c, sys; n = c.CDLL(sys.argv[1]); p = c.c_void_p(); cuda = c.CDLL('libcuda.so.1'); "
                    "cuda.cuInit(0); n.ncclMemAlloc(c.byref(p), c.c_size_t(1 << 20))")
            subprocess.run([sys.executable, "-c", code, bench.second], env=environment, check=True)
            count = len(pathlib.Path(scratch, "look_ups").read_text().splitlines())
            direct = len(pathlib.Path(scratch, "direct").read_text().splitlines())
            seen = bench.seen_by_the_driver(bench.second, pathlib.Path(scratch), count, direct)
            found = checks.every_look_up_came_to_amem(seen)
            self.assertEqual(checks.counted(seen)[0], 0)
            self.assertTrue(any("cuMemCreate" in one and "past AMem" in one for one in found), found)
            self.assertTrue(any("dlsym was asked for cuGetProcAddress_v2 past AMem" in one for one in found), found)


if __name__ == "__main__":
    BUILD = sys.argv.pop(1)
    unittest.main()
