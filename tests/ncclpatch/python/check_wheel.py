#!/usr/bin/env python3
"""Whether a wheel may leave this machine: it has all products, all that belongs to them, and the notices of all that is linked in; and the
products ask the loader for what every machine has, and where nobody else can put a library.

    check_wheel.py WHEEL     exit code 1, with the reasons
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile

PRODUCTS = {"libamem_nccl.so", "amem-replay", "amem-patch", "amem-demo"}
BESIDE_THEM = (r"amem/py\.typed", r"amem/include/amem\.h", r".*\.dist-info/licenses/LICENSE", r".*\.dist-info/sboms/amem\.cdx\.json",
               *(r".*\.data/data/share/" + one for one in (r"man/man1/amem\.1", r"bash-completion/completions/amem", r"man/man1/amem-replay\.1", r"bash-completion/completions/amem-replay",
                 r"zsh/site-functions/_amem-replay", r"fish/vendor_completions\.d/amem-replay\.fish", r"amem/schemas/why\.schema\.json")))
# What is always linked in; the list of a wheel that lacks one of them was not made from its build.
LINKED_IN = {"capnproto", "lmdb", "spdlog", "fmtlib", "cli11", "nlohmann-json3", "elfutils", "libzstd", "zlib", "gcc-12"}
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


def missing_files(archive):
    """Of those that belong to the products, and notices of what the list of components names."""
    names = archive.namelist()
    found = [pattern.replace("\\", "") for pattern in BESIDE_THEM if not any(re.fullmatch(pattern, name) for name in names)]
    lists = [name for name in names if name.endswith("/sboms/amem.cdx.json")]
    components = {one["name"] for name in lists for one in json.loads(archive.read(name))["components"]}
    found += [f"{one} in the list of components" for one in sorted(LINKED_IN - {one.removesuffix("-cross") for one in components})]
    if not any(name.endswith("/licenses/elfutils.txt") and b"GNU LESSER GENERAL PUBLIC LICENSE" in archive.read(name) for name in names):
        found.append("the text of elfutils' licence")  # of which libelf is linked in
    return found + [f"the notice of {one}" for one in sorted(components) if not any(name.endswith(f"/licenses/{one}.txt") for name in names)]


def problems(wheel):
    """Each a sentence. All that is inside is looked at as it will be installed."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(prefix="amem-wheel-") as folder:
        archive.extractall(folder)
        found = sorted(binaries(folder))
        missing = sorted(PRODUCTS - {os.path.basename(path) for path in found}) + missing_files(archive)
        return [f"{name} is missing" for name in missing] + foreign_libraries(found) + foreign_folders(found)


if __name__ == "__main__":
    if reasons := problems(sys.argv[1]):
        sys.exit("check_wheel: the wheel would not be right on every machine: " + "; ".join(reasons))
