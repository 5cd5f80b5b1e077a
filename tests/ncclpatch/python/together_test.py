"""libamem_nccl.so in one process with the libraries that have what it has inside: pycapnp (Cap'n Proto), lmdb, protobuf and PyTorch, in every
order, preloaded and loaded. Each is used a little beside a session on the stand-in driver. What this Python lacks is left out, and said.

    together_test.py [WHEEL]

With a wheel, what is tested is its package and the library inside, where Cap'n Proto and LMDB are linked in; otherwise AMEM_LIBRARY's.
"""

import atexit
import importlib.util
import itertools
import os
import subprocess
import shutil
import sys
import tempfile
import unittest
import zipfile

NAMES = ("capnp", "lmdb", "google.protobuf", "torch")

# What one process does with each: loads it in the given order, uses it, pauses and resumes, uses it again.
SCRIPT = r"""
import ctypes, os, sys, tempfile

def load_amem():
    global amem
    import amem
    amem.version()
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0

def use_amem():
    global nccl  # after PyTorch, which would otherwise find the stand-in under the name of its own
    nccl = ctypes.CDLL(os.environ["TEST_NCCL"] + "/libnccl.so.2")
    pointer = ctypes.c_void_p()
    assert nccl.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
    with amem.paused():
        pass
    rows = [row for row in amem.stats()["nccl_libraries"] if row["path"].startswith(os.environ["TEST_NCCL"])]
    assert len(rows) == 1 and rows[0]["under_amem"], amem.stats()

def load_capnp():
    global capnp
    import capnp

def use_capnp():
    global schema
    if "schema" not in globals():  # a second schema of one number ends the process, with AMem and without
        with tempfile.NamedTemporaryFile("w", suffix=".capnp") as file:
            file.write('@0xbf5147cbbecf40c1;\nstruct Point { x @0 :Int64; names @1 :List(Text); }\n')
            file.flush()
            schema = capnp.load(file.name)
    point = schema.Point.new_message(x=42, names=["a", "b"])
    with schema.Point.from_bytes(point.to_bytes()) as read:
        assert (read.x, list(read.names)) == (42, ["a", "b"])

def load_lmdb():
    global lmdb
    import lmdb

def use_lmdb():
    with tempfile.TemporaryDirectory() as folder, lmdb.open(folder, map_size=1 << 20) as environment:
        with environment.begin(write=True) as transaction:
            for number in range(100):
                transaction.put(b"%d" % number, b"value %d" % number)
        with environment.begin() as transaction:
            assert transaction.get(b"42") == b"value 42" and transaction.stat()["entries"] == 100

def load_protobuf():
    global struct_pb2
    from google.protobuf import struct_pb2

def use_protobuf():
    message = struct_pb2.Struct()
    message.update({"x": 42, "names": ["a", "b"]})
    assert struct_pb2.Struct.FromString(message.SerializeToString())["names"][1] == "b"

def load_torch():
    global torch
    import torch

def use_torch():
    assert torch.arange(10).sum().item() == 45
    torch.save({"x": torch.ones(3)}, os.path.join(os.environ["AMEM_JOURNAL_DIR"], "saved"))

order = sys.argv[1].split(",")
for name in order:
    globals()["load_" + name]()
for _ in range(2):
    for name in order:
        globals()["use_" + name]()
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libamem_nccl.so" in line}
assert mapped == {os.path.realpath(os.environ["TEST_LIBRARY"])}, mapped
print("well")
"""


def present():
    found = [name for name in NAMES if importlib.util.find_spec(name.partition(".")[0]) and importlib.util.find_spec(name)]
    return [name.rpartition(".")[2] for name in found]


def unpack(wheel):
    """A folder with the wheel's files, as pip would install them."""
    folder = tempfile.mkdtemp(prefix="amem-together-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, True)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


WHEEL = unpack(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].endswith(".whl") else None
LIBRARY = WHEEL + "/amem/libamem_nccl.so" if WHEEL else os.environ["AMEM_LIBRARY"]


class Together(unittest.TestCase):
    def check(self, order, **more):
        with tempfile.TemporaryDirectory() as scratch:
            environment = {key: value for key, value in os.environ.items() if not key.startswith("AMEM_") or key == "AMEM_LIBRARY"}
            environment.update(AMEM_JOURNAL_DIR=scratch, AMEM_USER_MEMORY="release", TEST_NCCL=os.environ["LD_LIBRARY_PATH"],
                               OMP_NUM_THREADS="1", TEST_LIBRARY=LIBRARY, **more)
            if WHEEL:  # it finds the library inside by itself
                environment["PYTHONPATH"] = WHEEL
                environment.pop("AMEM_LIBRARY", None)
            done = subprocess.run([sys.executable, "-c", SCRIPT, ",".join(order)], env=environment, capture_output=True, text=True, timeout=120,
                                  check=False)
        self.assertEqual((done.returncode, done.stdout), (0, "well\n"), "%s\n%s" % (order, done.stderr[-2000:]))

    def test_in_every_order_preloaded_and_loaded(self):
        names = present()
        for missing in sorted({name.rpartition(".")[2] for name in NAMES} - set(names)):
            with self.subTest(missing):
                self.skipTest("this python has no %s" % missing)
        light = [name for name in names if name != "torch"]
        orders = list(itertools.permutations(["amem", *light]))
        if "torch" in names:  # it takes seconds to import: first and last of all
            orders += [("torch", "amem", *light), ("amem", *light, "torch"), (*reversed(light), "torch", "amem")]
        for order in orders:
            for preload in ("", LIBRARY):
                with self.subTest(order=order, preload=bool(preload)):
                    self.check(order, **({"LD_PRELOAD": preload} if preload else {}))


if __name__ == "__main__":
    unittest.main()
