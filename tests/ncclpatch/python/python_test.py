"""The Python package on the stand-ins for the driver and NCCL. Each test is a process of its own: attaching happens once."""

import os
import subprocess
import sys
import tempfile
import unittest

PREAMBLE = """
import ctypes, os, warnings
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
cuda.stand_in_cuda_bytes_in_use.restype = ctypes.c_uint64
in_use = lambda: cuda.stand_in_cuda_bytes_in_use(0)
def load_nccl():
    global nccl
    nccl = ctypes.CDLL("libnccl.so.2")
def allocate():
    pointer = ctypes.c_void_p()
    assert nccl.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
    return pointer
"""


def run(script, **more):
    with tempfile.TemporaryDirectory() as scratch:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AMEM_") or k == "AMEM_LIBRARY"}
        environment.update(AMEM_JOURNAL_DIR=scratch, **more)
        return subprocess.run(
            [sys.executable, "-c", PREAMBLE + script], env=environment, capture_output=True, text=True, timeout=60
        )


class Package(unittest.TestCase):
    def check(self, script, **more):
        result = run(script, **more)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def test_import_attaches_and_the_context_manager_gives_memory_back(self):
        self.check(
            """
load_nccl()
import amem
allocate()
before = in_use()
assert before >= 4 << 20
with amem.paused():
    assert in_use() == 0, in_use()
    amem.pause()  # idempotent
assert in_use() == before
amem.trim_pinned()
assert amem.stats()["contents"]["pinned_bytes"] == 0
assert amem.version()
"""
        )

    def test_resumes_after_an_exception(self):
        self.check(
            """
load_nccl()
import amem
allocate()
before = in_use()
try:
    with amem.paused():
        raise KeyError
except KeyError:
    pass
assert in_use() == before
"""
        )

    def test_too_late_warns_and_pause_raises(self):
        self.check(
            """
load_nccl()
allocate()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import amem
assert len(seen) == 1 and "too late" in str(seen[0].message), seen
try:
    amem.pause()
    raise SystemExit("pause must raise")
except amem.AmemError as error:
    assert error.code == 5 and "too late" in str(error), error
"""
        )

    def test_without_nccl_import_is_silent_and_attach_says_what_to_load(self):
        self.check(
            """
warnings.simplefilter("error")
import amem
try:
    amem.attach()
    raise SystemExit("attach must raise")
except amem.AmemError as error:
    assert "import torch" in str(error), error
load_nccl()
amem.attach()
allocate()
with amem.paused():
    assert in_use() == 0
"""
        )

    def test_a_missing_library_says_how_to_name_it(self):
        result = run("import amem", AMEM_LIBRARY="/no/such/libamem_nccl.so")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("AMEM_LIBRARY", result.stderr)


if __name__ == "__main__":
    unittest.main()
