"""PyTorch's own NCCL under AMem, in a process that has just imported PyTorch: by `import amem`, and by the wheel's entry point. That is before
init_process_group, where the backends nccl2 (the default of PyTorch 2.15) and nccl-lazy make communicators. Needs PyTorch for CUDA, and no GPU."""
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import unittest

PYTHON = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../ncclpatch/python")
# What PyTorch's backends call, of which AMem must be told.
CALLS = ("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommSplit", "ncclCommDestroy", "ncclCommAbort", "ncclGroupStart", "ncclGroupEnd",
         "ncclAllReduce", "ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
LOOK = """
import ctypes, json, os, sys, torch
if not torch.version.cuda:
    sys.exit(77)
%s
import amem
from torch import distributed
(nccl,) = amem.stats()["nccl_libraries"]
places = []
with open("/proc/self/maps") as maps:
    for line in maps:
        fields = line.split()
        if len(fields) > 5 and "x" in fields[1]:
            places.append((*(int(one, 16) for one in fields[0].split("-")), os.path.basename(fields[5])))
handle = ctypes.CDLL(nccl["path"])
found = {}
for name in %r:
    if hasattr(handle, name):
        address = ctypes.cast(getattr(handle, name), ctypes.c_void_p).value
        found[name] = next((file for first, end, file in places if first <= address < end), "no file")
print(json.dumps({"torch": torch.__version__, "nccl": nccl, "found": found, "backends": [name for name in dir(distributed) if name.startswith("ProcessGroupNCCL")],
                  "lib": os.path.join(os.path.dirname(torch.__file__), "lib/libtorch_cuda.so")}))
"""


def has_torch():
    return importlib.util.find_spec("torch") is not None


@unittest.skipUnless(has_torch(), "this python has no PyTorch")
class Attached(unittest.TestCase):
    def look(self, attach, **environment):
        names = {**os.environ, "PYTHONPATH": PYTHON, **environment}
        done = subprocess.run([sys.executable, "-B", "-c", LOOK % (attach, CALLS)], env=names, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 77:
            self.skipTest("this PyTorch is not for CUDA")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    def check_attached(self, seen):
        self.assertTrue(seen["nccl"]["under_amem"], seen["nccl"])
        self.assertIn("ncclCommInitRankConfig", seen["found"])
        past = {name: file for name, file in seen["found"].items() if "libnccl.so" in file}
        self.assertEqual(past, {}, "calls that AMem does not see")

    def test_by_import(self):
        self.check_attached(self.look(""))

    def test_by_the_entry_point(self):
        self.check_attached(self.look("import amem_plugins\namem_plugins.attach()\n", AMEM_ENABLE="1"))

    @unittest.skipUnless(shutil.which("readelf"), "no readelf")
    def test_pytorch_looks_these_calls_up_when_it_first_makes_them(self):
        """Its slots are bound lazily: what was loaded before AMem came calls AMem all the same, whichever backend it is."""
        seen = self.look("")
        dynamic = subprocess.run(["readelf", "-dW", seen["lib"]], capture_output=True, text=True, check=True).stdout
        self.assertNotIn("BIND_NOW", dynamic)
        self.assertNotIn(" NOW", dynamic)
        relocations = subprocess.run(["readelf", "-rW", seen["lib"]], capture_output=True, text=True, check=True).stdout.splitlines()
        kinds = {fields[4]: fields[2] for fields in map(str.split, relocations) if len(fields) > 4}
        called = [name for name in CALLS if name in kinds]
        self.assertGreater(len(called), 7, called)
        self.assertEqual({name: kinds[name] for name in called}, dict.fromkeys(called, "R_X86_64_JUMP_SLOT"))


if __name__ == "__main__":
    unittest.main()
