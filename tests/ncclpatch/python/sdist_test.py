"""The source distribution, which pip builds with the system's libraries, in a fresh virtual environment; scikit-build-core is downloaded.

    sdist_test.py [SDIST]      without one, only what needs no build
"""
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

SDIST = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].endswith(".tar.gz") else None
HERE = os.path.dirname(os.path.abspath(__file__))
WHEEL = os.path.join(HERE, "../../../ncclpatch/python/wheel")
GOLDEN = os.path.join(HERE, "../../replay/golden/gpu/golden-out-of-memory-2gpus.amem")

sys.path.insert(0, WHEEL)
import check_wheel  # noqa: E402  pylint: disable=wrong-import-position
import linked_in  # noqa: E402  pylint: disable=wrong-import-position


class Needs(unittest.TestCase):
    def missing(self, call, path="", *options):
        """What `call` of needs.cmake says is to be installed, on a machine where PATH is `path`."""
        with tempfile.NamedTemporaryFile("w", suffix=".cmake") as script:
            script.write("cmake_minimum_required(VERSION 3.23)\ninclude(%s/needs.cmake)\n%s\n" % (WHEEL, call))
            script.flush()
            done = subprocess.run(["/usr/bin/env", "-i", "PATH=" + path, shutil.which("cmake"), *options, "-P", script.name], capture_output=True, text=True, check=False)
        found = re.search("apt-get install (.*)", done.stderr)
        self.assertEqual(found is None, done.returncode == 0, done.stderr)
        return found.group(1).split() if found else []

    def test_all_that_is_missing_is_named_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("c++", "pkg-config"):
                os.symlink("/bin/true", os.path.join(folder, name))
            self.assertEqual(self.missing("amem_need(find_program ${AMEM_PROGRAMS})", folder), ["capnproto"])
            os.symlink("/bin/true", folder + "/capnp")
            self.assertEqual(self.missing("amem_need(find_program ${AMEM_PROGRAMS})", folder), [])
            os.makedirs(folder + "/include")
            with open(folder + "/include/lmdb.h", "w", encoding="utf-8"):
                pass
            headers = self.missing("amem_need(find_path ${AMEM_HEADERS})", folder, "-DCMAKE_PREFIX_PATH=" + folder)
        self.assertEqual(headers, [name for name in self.missing("amem_need(find_path ${AMEM_HEADERS})") if name != "liblmdb-dev"])

    def test_without_a_compiler_the_headers_are_named_as_well(self):
        everything = self.missing("amem_need(find_program ${AMEM_PROGRAMS})")
        self.assertEqual(everything, ["g++", "capnproto", "pkg-config", *self.missing("amem_need(find_path ${AMEM_HEADERS})")])
        self.assertIn("nlohmann-json3-dev", everything)


class SearchPaths(unittest.TestCase):
    """Where the loader searches for the libraries of what is put into a wheel."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def program(self, name, *options):
        path = os.path.join(self.folder.name, name)
        subprocess.run(["cc", "-x", "c", "-", "-o", path, *options], input="int main(void) { return 0; }", text=True, check=True)
        return path

    def found(self, *options):
        return check_wheel.foreign_folders([self.program("program", *options)])

    def test_none_and_those_inside_the_package_are_fine(self):
        for options in ([], ["-Wl,-rpath,$ORIGIN"], ["-Wl,-rpath,${ORIGIN}/libs:$ORIGIN", "-Wl,--disable-new-dtags"]):
            self.assertEqual(self.found(*options), [])

    def test_every_other_element_is_refused_and_named(self):
        for tag, option in (("RUNPATH", "-Wl,--enable-new-dtags"), ("RPATH", "-Wl,--disable-new-dtags")):
            for path, elements in (("/a/build/lib:", ["/a/build/lib", ""]), ("$ORIGIN:", [""]), (":", ["", ""]), (".", ["."]), ("lib", ["lib"]),
                                   ("/usr/lib", ["/usr/lib"]), ("$ORIGINAL", ["$ORIGINAL"]), ("$ORIGIN/../lib", ["$ORIGIN/../lib"]), ("$LIB", ["$LIB"])):
                with self.subTest(tag=tag, path=path):
                    self.assertEqual(self.found(option, "-Wl,-rpath," + path), ['program has the %s element "%s"' % (tag, one) for one in elements])

    def test_a_wheel_with_such_a_program_is_refused(self):
        for options, problems in (([], []), (["-Wl,-rpath,/b:"], ['amem-replay has the RUNPATH element "/b"', 'amem-replay has the RUNPATH element ""'])):
            wheel = os.path.join(self.folder.name, "one.whl")
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.write(self.program("product"), "amem/amem-patch")
                archive.write(self.program("replay", "-Wl,--enable-new-dtags", *options), "amem/amem-replay")
                archive.write(self.program("demo"), "amem/amem-demo")
            found = check_wheel.problems(wheel)
            self.assertIn("libamem_nccl.so is missing", found)
            self.assertEqual([problem for problem in found if " element " in problem], problems)


class Notices(unittest.TestCase):
    @unittest.skipUnless(os.path.exists(linked_in.COMMON + "LGPL-3"), "this system keeps no texts of licences where Debian does")
    def test_libelf_comes_with_its_licence_and_with_what_one_needs_to_link_another(self):
        named = "The text is in /usr/share/common-licenses/LGPL-3 and `/usr/share/common-licenses/GPL-2'."
        text = linked_in.notice("elfutils", "0.188-2.1", named)
        for words in ("amem-replay and amem-patch", "elfutils 0.188-2.1", "source distribution", named, "GNU LESSER GENERAL PUBLIC LICENSE", "Version 2, June 1991"):
            self.assertIn(words, text)
        self.assertEqual(linked_in.notice("zlib", "1", named), named)

    def test_a_wheel_without_the_text_of_libelfs_licence_is_refused(self):
        for text, refused in (("see Debian", True), ("GNU LESSER GENERAL PUBLIC LICENSE", False)):
            with tempfile.TemporaryDirectory() as folder:
                with zipfile.ZipFile(folder + "/amem.whl", "w") as archive:
                    archive.writestr("amem.dist-info/licenses/elfutils.txt", text)
                with zipfile.ZipFile(folder + "/amem.whl") as archive:
                    self.assertEqual("the text of elfutils' licence" in check_wheel.missing_files(archive), refused)

    @unittest.skipUnless(shutil.which("dpkg-query"), "this system has no dpkg")
    def test_what_is_in_a_cross_compilers_file_system_is_of_its_packages(self):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(root + "/var/lib/dpkg/info")
            with open(root + "/var/lib/dpkg/status", "w", encoding="utf-8") as file:
                file.write("Package: libnowhere-dev\nSource: nowhere (1:2.0-1)\nVersion: 1:2.0-1+b3\nArchitecture: arm64\nMulti-Arch: same\nMaintainer: x\n"
                           "Description: x\nStatus: install ok unpacked\n\n")
            with open(root + "/var/lib/dpkg/info/libnowhere-dev.list", "w", encoding="utf-8") as file:
                file.write("/.\n/usr\n/usr/include\n/usr/include/nowhere.h\n/lib/libnowhere.a\n")
            self.assertEqual(linked_in.owners({"/usr/include/nowhere.h", "/usr/lib/libnowhere.a"}, root), {"libnowhere-dev"})
            self.assertEqual(linked_in.of_package("libnowhere-dev", root), ("nowhere", "1:2.0-1"))
            with self.assertRaisesRegex(SystemExit, root + "/usr/include/elsewhere.h"):
                linked_in.owners({"/usr/include/elsewhere.h"}, root)


@unittest.skipUnless(SDIST, "no source distribution was named")
class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        subprocess.run([sys.executable, "-m", "venv", cls.folder.name + "/venv"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def pip(self, **variables):
        return subprocess.run([self.folder.name + "/venv/bin/python", "-m", "pip", "install", "--disable-pip-version-check", SDIST],
                              env={**os.environ, **variables}, capture_output=True, text=True, check=False)

    def test_it_has_what_a_build_needs_and_no_tests(self):
        with tarfile.open(SDIST) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        self.assertLessEqual({"CMakeLists.txt", "LICENSE", "PKG-INFO", "pyproject.toml", "ncclpatch/amem.h", "ncclpatch/python/amem/__init__.py"}, names)
        self.assertEqual([name for name in names if name.startswith("tests/") or "__pycache__" in name], [])

    def test_a_machine_without_the_packages_is_told_which(self):
        done = self.pip(PATH=self.folder.name)  # nothing at all
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("apt-get install g++ capnproto", done.stdout + done.stderr)

    def test_pip_builds_and_installs_it(self):
        done = self.pip()
        self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-3000:])
        environment = {"PATH": self.folder.name + "/venv/bin:/usr/bin:/bin", "AMEM_JOURNAL_DIR": self.folder.name + "/journal"}
        command = self.folder.name + "/venv/bin/amem"
        said = subprocess.run([command, "why", os.path.abspath(GOLDEN)], env=environment, capture_output=True, text=True, check=False)
        self.assertIn("Resume 1 failed on rank 1", said.stdout, said.stderr)
        place = subprocess.run([os.path.dirname(command) + "/python", "-c", "import amem; print(amem.__path__[0])"], capture_output=True, text=True, check=True)
        found = sorted(check_wheel.binaries(place.stdout.strip()))
        self.assertEqual({os.path.basename(path) for path in found}, check_wheel.PRODUCTS - {"amem-demo"})
        self.assertEqual(check_wheel.foreign_folders(found), [])
        said = subprocess.run([command, "run", "--", "grep", "-c", "libamem_nccl.so", "/proc/self/maps"], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(said.returncode, 0, said.stderr)


if __name__ == "__main__":
    unittest.main()
