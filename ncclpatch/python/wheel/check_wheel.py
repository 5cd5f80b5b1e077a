#!/usr/bin/env python3
"""Whether a wheel may leave this machine: it has all products, and they ask the loader for what every machine has, and where nobody else
can put a library.

    check_wheel.py WHEEL     exit code 1, with the reasons
"""
import os
import re
import subprocess
import sys
import tempfile
import zipfile

PRODUCTS = {"libamem_nccl.so", "amem-replay", "amem-patch", "amem-demo"}
EVERYWHERE = ("libc.so.", "libm.so.", "libgcc_s.so.", "libdl.so.", "libpthread.so.", "librt.so.", "ld-linux")


def dynamic(path, tag):
    """The bracketed values of a program's or library's dynamic entries with that tag, as readelf prints them."""
    lines = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout.splitlines()
    return [line[line.index("[") + 1:line.rindex("]")] for line in lines if "(%s)" % tag in line]


def foreign_folders(paths):
    """What the loader would search for libraries, named by the programs and libraries themselves, and is not a place inside the
    package: a folder of the build, or the current directory, which an empty element means. Others may have put libraries there."""
    return ["%s has the %s element \"%s\"" % (os.path.basename(path), tag, element)
            for path in paths for tag in ("RPATH", "RUNPATH") for value in dynamic(path, tag) for element in value.split(":")
            if re.match(r"\$(ORIGIN|\{ORIGIN\})(/|$)", element) is None or ".." in element.split("/")]


def foreign_libraries(paths):
    return [f"{os.path.basename(path)} needs {name}" for path in paths for name in dynamic(path, "NEEDED") if not name.startswith(EVERYWHERE)]


def binaries(folder):
    for place, _, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            with open(path, "rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def problems(wheel):
    """Each a sentence. All that is inside is looked at as it will be installed."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(prefix="amem-wheel-") as folder:
        archive.extractall(folder)
        found = sorted(binaries(folder))
        missing = sorted(PRODUCTS - {os.path.basename(path) for path in found})
        return [f"{name} is missing" for name in missing] + foreign_libraries(found) + foreign_folders(found)


if __name__ == "__main__":
    if reasons := problems(sys.argv[1]):
        sys.exit("check_wheel: the wheel would not be right on every machine: " + "; ".join(reasons))
