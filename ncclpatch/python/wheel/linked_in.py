#!/usr/bin/env python3
"""What other projects' code is in a build: a CycloneDX list, and the notices that their licences ask for.

    linked_in.py BUILD_FOLDER STATIC_FOLDER OUTPUT VERSION COMPILER [SYSROOT]
                                writes OUTPUT/sboms/amem.cdx.json and OUTPUT/licenses/PACKAGE.txt

It asks the build itself: ninja knows each header that was compiled in and each archive that was linked, dpkg knows whose they are, and
Debian keeps each package's copyright file. So a library that somebody begins to use is listed without being named here.
"""
import json
import os
import re
import subprocess
import sys
import urllib.parse

# Of these only declarations are used; what they declare is asked for at run time, or is not there at all.
NOT_IN_IT = {"glibc", "linux", "cuda"}

# What a licence asks for beside its text. elfutils' libraries may be used under the LGPL, version 3 or later: whoever has a program with one in
# it must be able to link it with another one, for which its section 4 (d) 0 takes the sources of both.
BESIDE_THE_TEXT = {"elfutils": """libelf of elfutils {version} is linked into the programs amem-replay and amem-patch of this package, unchanged, under the GNU Lesser
General Public License, version 3 or later. You may change it and link these programs with what you made: the source distribution of
this package, of the same version, is all of their source under the Apache License 2.0, and builds them with the libelf that it finds
(pip install amem_nccl-*.tar.gz). The source of libelf is Debian's source package elfutils {version}; whoever gave you this package
without one of the two has to give it to you when you ask.
"""}
DPKG = "/var/lib/dpkg"
COMMON = "/usr/share/common-licenses/"  # texts that a copyright file only names


def lines_of(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout.splitlines()


def inputs(build, static, compiler, sysroot):
    """Paths of headers and archives of others, and of the C++ library where that is linked in."""
    headers = {os.path.normpath(line.strip()) for line in lines_of("ninja", "-C", build, "-t", "deps") if line.startswith("    /")}
    commands = " ".join(lines_of("ninja", "-C", build, "-t", "commands", "in_wheel"))
    archives = {os.path.normpath(path) for path in re.findall(r"\S+\.a\b", commands)
                if os.path.isabs(path) and not path.startswith(os.path.join(build, ""))}
    if "-static-libstdc++" in commands:
        archives.add(os.path.realpath(lines_of(compiler, "-print-file-name=libstdc++.a")[0]))
    return {path for path in headers if path.startswith(("/usr/include/", sysroot + "/usr/include/"))} | {path for path in archives if not path.startswith(static)}


def owners(paths, root):
    """The Debian packages that have these files, which are named as they are under `root`. Their names in dpkg's list may be those of before
    /usr and / became one."""
    asked = sorted(paths | {path[len("/usr"):] for path in paths if path.startswith("/usr/lib/")})
    said = subprocess.run(["dpkg-query", "--admindir=" + root + DPKG, "-S", *asked], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout
    found = dict(reversed(line.rsplit(": ", 1)) for line in said.splitlines() if not line.startswith("diversion"))
    ownerless = sorted(path for path in paths if path not in found and path[len("/usr"):] not in found)
    if ownerless:
        sys.exit("linked_in: no package owns %s, so its licence is not known" % ", ".join(root + path for path in ownerless[:5]))
    return {name.split(",")[0].split(":")[0] for name in found.values()}


def of_package(package, root):
    """(source package, its version) of an installed package."""
    source, version = lines_of("dpkg-query", "--admindir=" + root + DPKG, "-W", "-f", "${source:Package} ${source:Version}\n", package)[0].split()
    return source, version


def built_here(static):
    """(source package, version, a package with its copyright file) of what ./run wheel compiled from Debian's sources."""
    copyright_of = {"capnproto": "libcapnp-dev", "lmdb": "liblmdb-dev"}
    for name in sorted(copyright_of):
        described = [file for file in os.listdir(os.path.join(static, "..", name)) if file.endswith(".dsc")]
        yield name, described[0][len(name) + 1:-len(".dsc")], copyright_of[name]


def licences(text):
    """The names of the licences in a copyright file in Debian's format, or in its words."""
    named = re.findall(r"^License:[ \t]*(\S[^\n]*)$", text, re.M)
    return list(dict.fromkeys(name.strip() for name in named)) or ["see the notice in .dist-info/licenses"]


def notice(source, version, text):
    """All that has to come with the code of a source package. Where its source has to be offered that includes the texts of licences, which a
    copyright file only names; the exception of GCC's runtime library frees that of it."""
    parts = [BESIDE_THE_TEXT[source].format(version=version)] if source in BESIDE_THE_TEXT else []
    parts.append(text)
    for name in sorted(set(re.findall(COMMON + r"(L?GPL-[\d.]*\d)", text))) if parts[1:] else ():
        with open(COMMON + name, encoding="utf-8") as file:
            parts.append(file.read())
    return ("\n" + "-" * 100 + "\n\n").join(parts)


def component(source, version, package, root, folder):
    with open("%s/usr/share/doc/%s/copyright" % (root, package), encoding="utf-8") as file:
        text = file.read()
    with open(os.path.join(folder, source + ".txt"), "w", encoding="utf-8") as file:
        file.write(notice(source, version, text))
    return {"type": "library", "bom-ref": source, "name": source, "version": version, "purl": "pkg:deb/debian/%s@%s?arch=source" % (source, urllib.parse.quote(version)),
            "licenses": [{"license": {"name": name}} for name in licences(text)]}


def main(build, static, output, version, compiler, sysroot=""):
    build, static = os.path.realpath(build), os.path.realpath(static)
    sysroot = os.path.realpath(sysroot) if sysroot else ""  # what lies there is of its packages, and all else of this system's
    for folder in ("sboms", "licenses"):
        os.makedirs(os.path.join(output, folder), exist_ok=True)
    rows = {name: (name, its_version, package, sysroot) for name, its_version, package in built_here(static)}
    used = inputs(build, static, compiler, sysroot)
    there = {path for path in used if sysroot and path.startswith(sysroot + "/")}
    for root, paths in (("", used - there), (sysroot, {path[len(sysroot):] for path in there})):
        for package in sorted(owners(paths, root)) if paths else ():
            source, its_version = of_package(package, root)
            if source not in NOT_IN_IT and source not in rows:
                rows[source] = (source, its_version, package, root)
    found = [component(*rows[source], os.path.join(output, "licenses")) for source in sorted(rows)]
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
           "metadata": {"component": {"type": "library", "bom-ref": "amem-nccl", "name": "amem-nccl", "version": version, "licenses": [{"license": {"id": "Apache-2.0"}}]}},
           "components": found, "dependencies": [{"ref": "amem-nccl", "dependsOn": sorted(rows)}]}
    with open(os.path.join(output, "sboms", "amem.cdx.json"), "w", encoding="utf-8") as file:
        json.dump(bom, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
