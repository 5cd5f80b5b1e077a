"""Builds and runs stub_program.c for a processor: stub_test.py native | aarch64. Exit code 77: it cannot be built or run here."""
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
STUBS = os.path.join(HERE, "../../../ncclpatch/hook/route_stub.S")
# With branch protection, as distributions compile for aarch64 since 2022: a stub without its landing pad would trap.
TOOLS = {"native": (["cc"], []), "aarch64": (["aarch64-linux-gnu-gcc", "-static", "-mbranch-protection=standard"], ["qemu-aarch64-static", "-cpu", "max"])}


def main(processor):
    compiler, emulator = TOOLS[processor]
    for tool in (compiler[:1] + emulator[:1]):
        if not shutil.which(tool):
            print("skipped: there is no %s" % tool)
            return 77
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "stub_program")
        subprocess.run([*compiler, "-O1", "-Wall", "-Wextra", "-Werror", os.path.join(HERE, "stub_program.c"), STUBS, "-o", program], check=True)
        return subprocess.run([*emulator, program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
