#!/usr/bin/env python3
"""How pip builds the package from its source distribution (PEP 517): by CMake, with the system's libraries. Standard library only, so that
nothing has to be downloaded, unless there is no cuda.h: then pip gets NVIDIA's package with it.

    build_backend.py FOLDER       makes the source distribution there, and prints its path

A wheel from here needs this machine's libraries; build_wheel.py makes the one for every machine.
"""
import base64
import contextlib
import glob
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../../.."))
PACKAGE = os.path.dirname(HERE)
SOURCES = ("CMakeLists.txt", "LICENSE", "README.md", "journal", "ncclpatch", "replay", "statemachine")
TARGETS = {"amem_nccl": "lib/libamem_nccl.so", "amem-replay": "bin/amem-replay", "amem-patch": "bin/amem-patch"}
BUILD_SYSTEM = '[build-system]\nrequires = []\nbuild-backend = "build_backend"\nbackend-path = ["ncclpatch/python/wheel"]\n'
CUDA_PACKAGE = "nvidia-cuda-runtime==13.0.*"
# Debian's package: the program, or the header, by which it is known to be there.
PROGRAMS = {"g++": "c++", "cmake": "cmake", "ninja-build": "ninja", "pkg-config": "pkg-config", "capnproto": "capnp"}
HEADERS = {"libcapnp-dev": "capnp/message.h", "liblmdb-dev": "lmdb.h", "libspdlog-dev": "spdlog/spdlog.h", "libfmt-dev": "fmt/format.h",
           "libcli11-dev": "CLI/CLI.hpp", "nlohmann-json3-dev": "nlohmann/json.hpp", "libzstd-dev": "zstd.h", "libelf-dev": "libelf.h"}


# ---- what the machine has ---------------------------------------------------------------------------------------------------


def headers_there(headers):
    """Which of the headers the compiler finds, asked in one run of its preprocessor."""
    source = "".join("#if __has_include(<%s>)\nthere %d\n#endif\n" % (header, number) for number, header in enumerate(headers))
    done = subprocess.run(["c++", "-E", "-P", "-x", "c++", "-"], input=source, capture_output=True, text=True, check=False)
    return {headers[int(number)] for number in re.findall(r"^there (\d+)$", done.stdout, re.MULTILINE)}


def missing_packages(find_program=shutil.which, find_headers=headers_there):
    """Debian's packages that a build needs and that are not there, in the order in which they are known."""
    missing = [package for package, program in PROGRAMS.items() if not find_program(program)]
    if "g++" in missing:
        return missing + list(HEADERS)  # without a compiler nothing can be asked
    found = find_headers(list(HEADERS.values()))
    return missing + [package for package, header in HEADERS.items() if header not in found]


def cuda_root():
    """A folder with include/cuda.h: of an installed toolkit, or of NVIDIA's package from PyPI, which pip installs for the build."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", "/usr"]
    roots += [os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))] if nvcc else []
    roots += [found for path in sys.path for found in glob.glob(os.path.join(path, "nvidia", "cu13"))]
    return next((root for root in roots if root and os.path.exists(os.path.join(root, "include", "cuda.h"))), None)


def check_machine():
    missing = missing_packages()
    if missing:
        raise SystemExit("amem-nccl cannot be built from source here: missing are %s. On Debian and Ubuntu:\n    apt-get install %s\n"
                         "or install the wheel, which needs none of them." % (", ".join(missing), " ".join(missing)))


# ---- what may go into a wheel ------------------------------------------------------------------------------------------------


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


# ---- the wheel --------------------------------------------------------------------------------------------------------------


def project(path=os.path.join(PACKAGE, "pyproject.toml")):
    """{section: {key: text}} of the pyproject file; Python before 3.11 has no parser of its own. Strings only."""
    found, section = {}, {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            if header := re.match(r"\[(.+)\]\s*$", line):
                section = found.setdefault(header.group(1).replace('"', ""), {})
            elif pair := re.match(r'([\w-]+) = "(.*)"\s*$', line):
                section[pair.group(1)] = pair.group(2)
    return found


def compile_products(build):
    root = cuda_root()
    if root is None:
        raise SystemExit("amem-nccl: no cuda.h was found; set CUDA_HOME to a toolkit, or let pip isolate the build")
    jobs = os.environ.get("AMEM_JOBS") or str(len(os.sched_getaffinity(0)))
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCUDA_ROOT=" + root, "-DAMEM_UNIT_TESTS=OFF",
                 "-DAMEM_PRECOMPILE=ON", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=12", "-DCMAKE_SKIP_RPATH=ON"]
    # With ccache, what was compiled in one folder is found again from another one, and pip takes a new one each time.
    environment = {**os.environ, "CCACHE_BASEDIR": ROOT, "CCACHE_NOHASHDIR": "1"}
    for command in (configure, ["cmake", "--build", build, "-j", jobs, "--target", *TARGETS]):
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment)


@contextlib.contextmanager
def build_folder():
    """Inside an unpacked source distribution, which is pip's to remove; never in somebody's tree."""
    if os.path.exists(os.path.join(ROOT, "PKG-INFO")):
        yield os.path.join(ROOT, "build")
        return
    with tempfile.TemporaryDirectory(prefix="amem-build-") as folder:
        yield folder


def metadata(about):
    one = about["project"]
    return ("Metadata-Version: 2.1\nName: %s\nVersion: %s\nSummary: %s\nRequires-Python: %s\nLicense: Apache-2.0\n"
            % (one["name"], one["version"], one["description"], one["requires-python"]))


def entry_points(about):
    groups = {"console_scripts": about.get("project.scripts", {})}
    groups.update({name[len("project.entry-points."):]: pairs for name, pairs in about.items() if name.startswith("project.entry-points.")})
    return "\n".join("[%s]\n%s" % (group, "".join("%s = %s\n" % pair for pair in pairs.items())) for group, pairs in groups.items())


class Archive:
    """A wheel that is being written, with its record of what is inside."""

    def __init__(self, path, information):
        self.zip, self.information, self.record = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED), information, []

    def add(self, name, data, executable=False):
        entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = (0o100755 if executable else 0o100644) << 16
        self.zip.writestr(entry, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.record.append("%s,sha256=%s,%d\n" % (name, digest, len(data)))

    def close(self):
        name = self.information + "/RECORD"
        self.zip.writestr(name, "".join(self.record) + name + ",,\n")
        self.zip.close()


def read(path):
    with open(path, "rb") as file:
        return file.read()


def python_files():
    """(path in the wheel, path here) of the package, and of the modules beside it that entry points name."""
    beside = glob.glob(os.path.join(PACKAGE, "*.py"))
    for path in sorted(beside + glob.glob(os.path.join(PACKAGE, "amem", "**", "*.py"), recursive=True)):
        yield os.path.relpath(path, PACKAGE), path


def pack_wheel(wheel_directory, build, products):
    """A wheel of the package and of what a build has made, for every Python on a platform like this one. Returns its name."""
    about = project()
    stem = "%s-%s" % (about["project"]["name"].replace("-", "_"), about["project"]["version"])
    tag = "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())
    name, information = "%s-%s.whl" % (stem, tag), stem + ".dist-info"
    archive = Archive(os.path.join(wheel_directory, name), information)
    for inside, path in python_files():
        archive.add(inside, read(path))
    with tempfile.TemporaryDirectory(prefix="amem-strip-") as folder:
        for product in products:
            stripped = os.path.join(folder, os.path.basename(product))
            subprocess.run(["strip", "-o", stripped, os.path.join(build, product)], check=True)
            archive.add("amem/" + os.path.basename(product), read(stripped), executable=True)
    archive.add(information + "/METADATA", metadata(about).encode())
    archive.add(information + "/WHEEL", ("Wheel-Version: 1.0\nGenerator: amem\nRoot-Is-Purelib: false\nTag: %s\n" % tag).encode())
    archive.add(information + "/entry_points.txt", entry_points(about).encode())
    archive.add(information + "/licenses/LICENSE", read(os.path.join(ROOT, "LICENSE")))
    archive.close()
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 517."""
    del config_settings, metadata_directory
    check_machine()
    with build_folder() as build:
        compile_products(build)
        products = [os.path.join(build, product) for product in TARGETS.values()]
        if foreign := foreign_folders(products):
            raise SystemExit("amem-nccl: what was built searches for libraries outside of the package: %s" % "; ".join(foreign))
        return pack_wheel(wheel_directory, build, TARGETS.values())


def get_requires_for_build_wheel(config_settings=None):
    """PEP 517."""
    del config_settings
    return [] if cuda_root() else [CUDA_PACKAGE]


# ---- the source distribution ------------------------------------------------------------------------------------------------


def source_files():
    """Files of SOURCES from the root: those that git knows; in an unpacked source distribution, all."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z", "--", *SOURCES], capture_output=True, check=True).stdout.decode()
        paths = [path for path in listed.split("\0") if path and os.path.exists(os.path.join(ROOT, path))]
        if paths:
            return sorted(paths)
    found = []
    for top in SOURCES:
        path = os.path.join(ROOT, top)
        found += [top] if os.path.isfile(path) else [os.path.relpath(os.path.join(folder, name), ROOT)
                                                      for folder, _, names in os.walk(path) for name in names if "__pycache__" not in folder]
    return sorted(found)


def build_sdist(sdist_directory, config_settings=None):
    """PEP 517."""
    del config_settings
    about = project()
    stem = "%s-%s" % (about["project"]["name"].replace("-", "_"), about["project"]["version"])
    own = re.sub(r"\[build-system\]\n(?:.+\n)*", BUILD_SYSTEM, read(os.path.join(PACKAGE, "pyproject.toml")).decode())

    def plain(entry):
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(os.path.join(sdist_directory, stem + ".tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path in source_files():
            archive.add(os.path.join(ROOT, path), stem + "/" + path, recursive=False, filter=plain)
        for name, text in (("pyproject.toml", own), ("PKG-INFO", metadata(about))):
            entry = tarfile.TarInfo(stem + "/" + name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return stem + ".tar.gz"


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    print(os.path.join(sys.argv[1], build_sdist(sys.argv[1])))
