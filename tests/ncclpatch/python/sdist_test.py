"""The source distribution, which pip builds with the system's libraries, in a fresh virtual environment and without a network.

    sdist_test.py [SDIST]      without one, only what needs no build
"""
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

SDIST = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].endswith(".tar.gz") else None
HERE = os.path.dirname(os.path.abspath(__file__))
BACKEND = os.path.join(HERE, "../../../ncclpatch/python/wheel/build_backend.py")
GOLDEN = os.path.join(HERE, "../../replay/golden/gpu/golden-out-of-memory-2gpus.amem")

sys.path.insert(0, os.path.dirname(BACKEND))
import build_backend as backend  # noqa: E402  pylint: disable=wrong-import-position
import build_wheel  # noqa: E402  pylint: disable=wrong-import-position


class Backend(unittest.TestCase):
    def test_missing_packages_are_all_named(self):
        everything = set(backend.HEADERS.values())
        self.assertEqual(backend.missing_packages(lambda name: "/usr/bin/" + name, lambda names: everything), [])
        without = backend.missing_packages(lambda name: None if name == "capnp" else "/x", lambda names: everything - {"lmdb.h"})
        self.assertEqual(without, ["capnproto", "liblmdb-dev"])
        self.assertEqual(len(backend.missing_packages(lambda name: None, lambda names: everything)), len(backend.PROGRAMS) + len(backend.HEADERS))

    def test_a_compiler_is_asked_for_headers(self):
        self.assertEqual(backend.headers_there(["vector", "no/such/header.h", "stdio.h"]), {"vector", "stdio.h"})

    def test_it_has_what_a_build_needs_and_no_tests(self):
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(os.path.join(folder, backend.build_sdist(folder))) as archive:
                names = {name.partition("/")[2] for name in archive.getnames()}
                root = archive.getnames()[0].partition("/")[0]
                own = archive.extractfile(root + "/pyproject.toml").read().decode()
        self.assertLessEqual({"CMakeLists.txt", "LICENSE", "PKG-INFO", "pyproject.toml", "ncclpatch/amem.h", "ncclpatch/python/amem/__init__.py"}, names)
        self.assertEqual([name for name in names if name.startswith("tests/")], [])
        self.assertIn('build-backend = "build_backend"', own)
        self.assertNotIn("setuptools.build_meta", own)
        self.assertIn('amem = "amem._command:main"', own)

    def test_the_entry_points_are_those_of_the_wheel(self):
        text = backend.entry_points(backend.project())
        self.assertIn("[console_scripts]\namem = amem._command:main\n", text)
        self.assertIn("[torch.backends]\namem = amem_plugins:attach\n", text)


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
        return backend.foreign_folders([self.program("program", *options)])

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
            self.assertEqual(build_wheel.problems(wheel), ["libamem_nccl.so is missing"] + problems)


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
        return subprocess.run([self.folder.name + "/venv/bin/python", "-m", "pip", "install", "--disable-pip-version-check", "--no-index", SDIST],
                              env={**os.environ, **variables}, capture_output=True, text=True, check=False)

    def test_a_machine_without_the_packages_is_told_which(self):
        done = self.pip(PATH=self.folder.name)  # nothing at all
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("apt-get install g++ cmake ninja-build", done.stdout + done.stderr)

    def test_pip_builds_and_installs_it(self):
        done = self.pip()
        self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-3000:])
        environment = {"PATH": self.folder.name + "/venv/bin:/usr/bin:/bin", "AMEM_JOURNAL_DIR": self.folder.name + "/journal"}
        command = self.folder.name + "/venv/bin/amem"
        said = subprocess.run([command, "why", os.path.abspath(GOLDEN)], env=environment, capture_output=True, text=True, check=False)
        self.assertIn("Resume 1 failed on rank 1", said.stdout, said.stderr)
        place = subprocess.run([os.path.dirname(command) + "/python", "-c", "import amem; print(amem.__path__[0])"], capture_output=True, text=True, check=True)
        self.assertEqual(backend.foreign_folders([os.path.join(place.stdout.strip(), os.path.basename(one)) for one in backend.TARGETS.values()]), [])
        said = subprocess.run([command, "run", "--", "grep", "-c", "libamem_nccl.so", "/proc/self/maps"], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(said.returncode, 0, said.stderr)


if __name__ == "__main__":
    unittest.main()
