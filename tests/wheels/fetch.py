"""Stock libnccls from PyPI: which there are, and one of them in a folder.

Wheels are large, and only the library in them is wanted: a wheel is deleted as soon as its library is unpacked. What is already
there is not downloaded again, so that an interrupted run goes on where it was.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

OLDEST = (2, 18)  # what is older has no ncclCommInitRankConfig as PyTorch calls it, and is not looked at
LINES = ("cu12", "cu13")
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"


class Unreachable(Exception):
    """PyPI, or the mirror that pip is set to, did not answer."""


def number(version):
    """A version as numbers that can be compared; "2.26.2.post1" comes after "2.26.2"."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"]
        raise Unreachable(next((line for line in said if "rror" in line), said[-1])[:240])
    return done.stdout


def listed(line):
    """The versions that PyPI lists for this machine, oldest first."""
    text = pip("index", "versions", "nvidia-nccl-" + line)
    found = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    versions = found.group(1).split(", ") if found else []
    return sorted((version for version in versions if number(version)[:2] >= OLDEST), key=number)


def known(folder):
    """The wheels whose library is in `folder` already, as (line, version)."""
    libraries = pathlib.Path(folder).glob("cu*-*/libnccl.so.2")
    return sorted((tuple(path.parent.name.split("-", 1)) for path in libraries), key=lambda wheel: (wheel[0], number(wheel[1])))


def fetch(line, version, folder):
    """The path of the library of a wheel, downloaded if it is not in `folder` yet."""
    place = pathlib.Path(folder) / f"{line}-{version}" / "libnccl.so.2"
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as download:
        pip("download", "--quiet", "--no-cache-dir", "--no-deps", "--only-binary=:all:", "-d", download,
            f"nvidia-nccl-{line}=={version}")
        wheel = next(pathlib.Path(download).glob("*.whl"))
        with zipfile.ZipFile(wheel) as packed:
            unpacked = packed.extract(LIBRARY, download)
        pathlib.Path(unpacked).rename(place)
    return place
