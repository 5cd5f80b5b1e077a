"""The wheel in a fresh virtual environment, with nothing else of AMem's in sight: the command, the tool, the demo, the journals.

    wheel_install_test.py WHEEL      by a Python that has mypy and cyclonedx-python-lib, else two tests are skipped
"""
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
WHEEL = os.path.abspath(sys.argv.pop(1))
# Read with --force: an emulator takes more memory for a process than a pack should need.
GOLDEN = os.path.abspath(os.path.join(HERE, "../../replay/golden/gpu/golden-out-of-memory-2gpus.amem"))
C_INTERFACE = re.compile(r"^(nccl(Pause|Resume|MemStats|SetGroupID|GetGroupID|Comm(Suspend|Resume|MemStats|Init\w+|Grow)|GetUniqueId)|amem_\w+|dlsym|dlvsym)$")


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        subprocess.run([sys.executable, "-m", "venv", cls.folder.name + "/venv"], check=True)
        cls.python = cls.folder.name + "/venv/bin/python"
        subprocess.run([cls.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", WHEEL], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def amem(self, *arguments, here=None, **variables):
        """Runs the command with no compiler, no package manager and nothing of this tree in PATH."""
        environment = {"PATH": self.folder.name + "/venv/bin", "HOME": self.folder.name, "AMEM_JOURNAL_DIR": self.folder.name + "/journal", **variables}
        done = subprocess.run([self.folder.name + "/venv/bin/amem", *arguments], env=environment, capture_output=True, text=True, check=False, timeout=120,
                              cwd=here)
        return done.returncode, done.stdout, done.stderr

    def test_the_demo_on_the_simulator(self):
        code, out, err = self.amem("demo")
        self.assertEqual(code, 0, out + err)

    def test_why_explains_a_golden_journal(self):
        code, out, err = self.amem("why", "--force", GOLDEN)
        self.assertIn("Resume 1 failed on rank 1", out, err)
        self.assertNotEqual(code, 0)

    def test_doctor_finds_what_it_needs(self):
        code, out, err = self.amem("doctor", "--json")
        answer = json.loads(out)
        levels = {finding["subject"]: finding["level"] for finding in answer["findings"]}
        self.assertEqual((levels["library"], levels["amem-replay"]), ("ok", "ok"), out + err)

    def test_run_has_the_library_in_the_command(self):
        code, out, err = self.amem("run", "--", self.python, "-c", "print('libamem_nccl.so' in open('/proc/self/maps').read())")
        self.assertEqual((code, out.strip()), (0, "True"), err)

    def test_a_proof_says_what_is_missing(self):
        code, out, err = self.amem("doctor", "--prove")
        self.assertEqual((code, out), (2, ""), err)
        self.assertIn("no libnccl was found", err)
        code, out, err = self.amem("doctor", "--prove", "--nccl", self.python)
        self.assertEqual((code, out), (2, ""), err)
        self.assertRegex(err, "no GPU|whether others use the GPUs")

    def test_a_guarded_command_ends_as_it_would_alone(self):
        code, out, err = self.amem("run", "--guard", "--", self.python, "-c", "import sys; print('here'); sys.exit(4)")
        self.assertEqual((code, out), (4, "here\n"), err)

    def test_it_can_be_imported_and_says_its_version(self):
        done = subprocess.run([self.python, "-c", "import amem; print(amem.version(), amem.__version__)"], capture_output=True, text=True, check=False)
        self.assertRegex(done.stdout, r"^(\d+\.\d+\.\d+) \1\n$", done.stderr)

    def test_the_programs_are_on_path_and_the_demos_journals_are_where_they_look(self):
        folder = {"AMEM_JOURNAL_DIR": self.folder.name + "/demo-journal"}
        code, out, err = self.amem("demo", "--ranks", "2", **folder)
        self.assertEqual(code, 0, out + err)
        self.assertIn("\n  amem ls\n", out)
        for program, arguments, wanted in (("amem", ["ls"], "closed"), ("amem-replay", ["ls"], "closed"), ("amem-patch", ["--help"], "patch")):
            done = subprocess.run([os.path.join(self.folder.name, "venv/bin", program), *arguments], env={"PATH": "/nowhere", **folder}, capture_output=True,
                                  text=True, check=False)
            self.assertEqual((done.returncode, wanted in done.stdout), (0, True), done.stdout + done.stderr)

    def test_header_schemas_manual_and_completions_are_installed(self):
        share = self.folder.name + "/venv/share/"
        for path, wanted in (("man/man1/amem.1", ".TH amem 1"), ("bash-completion/completions/amem", " amem"), ("man/man1/amem-replay.1", ".TH"), ("bash-completion/completions/amem-replay", "complete "), ("zsh/site-functions/_amem-replay", "#compdef"),
                             ("fish/vendor_completions.d/amem-replay.fish", "complete "), ("amem/schemas/why.schema.json", '"$schema"'), ("amem/schemas/proof.schema.json", '"urn:amem:proof:1"')):
            with open(share + path, encoding="utf-8") as file:
                self.assertIn(wanted, file.read(), path)
        where = subprocess.run([self.python, "-c", "import amem; print(amem.__path__[0])"], capture_output=True, text=True, check=True).stdout.strip()
        program = "#include <amem.h>\nint main(void) { return amem_version() == 0; }\n"
        built = subprocess.run(["cc", "-x", "c", "-", "-I" + where + "/include", "-o", self.folder.name + "/program", "-x", "none", where + "/libamem_nccl.so"],
                               input=program, capture_output=True, text=True, check=False)
        self.assertEqual(built.returncode, 0, built.stderr)

    def test_what_is_linked_in_is_listed_with_its_notices(self):
        with zipfile.ZipFile(WHEEL) as wheel:
            names = wheel.namelist()
            text = wheel.read(next(name for name in names if name.endswith("/sboms/amem.cdx.json"))).decode()
            notices = {os.path.basename(name)[:-len(".txt")]: wheel.read(name).decode() for name in names if "/licenses/" in name and name.endswith(".txt")}
        listed = {one["name"]: one for one in json.loads(text)["components"]}
        self.assertEqual(set(listed), set(notices))
        gcc = "gcc-12-cross" if "gcc-12-cross" in listed else "gcc-12"  # the same sources, as Debian compiles them for cross compilers
        for name, words in (("capnproto", "Sandstorm"), ("lmdb", "OpenLDAP"), ("spdlog", "MIT"), ("zlib", "Jean-loup Gailly"), ("elfutils", "link these programs with what you made"), (gcc, "Runtime Library Exception")):
            self.assertIn(re.sub(r"\s", "", words).lower(), re.sub(r"\s", "", notices[name]).lower())
            self.assertRegex(listed[name]["version"], r"^\d")
        if importlib.util.find_spec("cyclonedx") is None:
            self.skipTest("this Python has no cyclonedx-python-lib to check the list's form")
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator
        self.assertIsNone(JsonStrictValidator(SchemaVersion.V1_5).validate_str(text))

    @unittest.skipUnless(importlib.util.find_spec("mypy"), "this Python has no mypy")
    def test_mypy_accepts_a_program_that_uses_all_of_the_interface(self):
        program = os.path.join(HERE, "public_types.py")
        with open(program, encoding="utf-8") as file:
            text = file.read()
        names = subprocess.run([self.python, "-c", "import amem; print(*dir(amem))"], capture_output=True, text=True, check=True).stdout.split()
        self.assertEqual([name for name in names if "amem." + name not in text], [])
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", self.python, "--cache-dir", self.folder.name + "/mypy"]
        done = subprocess.run([*command, program], capture_output=True, text=True, check=False, cwd=self.folder.name)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        wrong = "import amem\namem.pause(['weights'])\namem.paused().nothing\nx: str = amem.pause().bytes\n"
        done = subprocess.run([*command, "-c", wrong], capture_output=True, text=True, check=False, cwd=self.folder.name)
        self.assertIn("Found 3 errors", done.stdout, "it sees no types at all")

    def test_torch_would_find_the_entry_point(self):
        code = "from importlib.metadata import entry_points as e; print([p.value for p in (e(group='torch.backends') if hasattr(e(), 'select') else e()['torch.backends'])])"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        self.assertIn("amem_plugins:attach", done.stdout, done.stderr)

    def test_the_entry_point_does_nothing_without_the_variable(self):
        code = "import amem_plugins, sys; amem_plugins.attach(); print('amem' in sys.modules)"
        for value, imported in (("", "False"), ("0", "False"), ("1", "True")):
            done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, "AMEM_ENABLE": value})
            self.assertEqual(done.stdout.strip(), imported, done.stderr)

    def test_frameworks_find_their_plugins_and_load_nothing_of_amem_unasked(self):
        code = ("import sys; from importlib.metadata import distribution as d\n"
                "for p in d('amem-nccl').entry_points:\n"
                "    if p.group in ('vllm.general_plugins', 'sglang.srt.plugins'): p.load()(); print(p.group, 'amem' in sys.modules)")
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        self.assertEqual(sorted(done.stdout.split("\n")), ["", "sglang.srt.plugins False", "vllm.general_plugins False"], done.stderr)
        done = subprocess.run([self.python, "-c", "import amem.frameworks.groups, amem.frameworks.ray, amem.frameworks.verl"],
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_only_the_C_interface_shows(self):
        with zipfile.ZipFile(WHEEL) as wheel, tempfile.TemporaryDirectory() as folder:
            path = wheel.extract("amem/libamem_nccl.so", folder)
            shown = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        names = [line.split()[-1] for line in shown.splitlines()]
        self.assertTrue(names)
        self.assertEqual([name for name in names if not C_INTERFACE.match(name)], [])

    def test_the_loader_searches_nowhere_outside_of_the_package(self):
        """Not in the folder of the build, nor in the current directory, where whoever sends a bug report may have put a library."""
        with zipfile.ZipFile(WHEEL) as wheel, tempfile.TemporaryDirectory() as folder:
            wheel.extractall(folder)
            binaries = [folder + "/amem/" + name for name in ("libamem_nccl.so", "amem-replay", "amem-patch", "amem-demo")]
            shown = {path: subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout for path in binaries}
        for path, text in shown.items():
            self.assertIn("(NEEDED)", text, path)
            self.assertNotRegex(text, r"\((RPATH|RUNPATH)\)", path)

    def test_a_library_in_the_current_directory_is_not_loaded(self):
        with tempfile.TemporaryDirectory() as here:
            for name in ("libm.so.6", "libgcc_s.so.1"):
                with open(os.path.join(here, name), "wb") as file:
                    file.write(b"not a library")  # the loader says so of one that it would have loaded
            for arguments in (["why", "--force", GOLDEN], ["demo"]):
                code, out, err = self.amem(*arguments, here=here)
                self.assertNotIn("file too short", err)
                self.assertNotIn("invalid ELF header", err)
                self.assertNotEqual(out, "", (code, err))

    def test_the_tag_names_an_old_enough_C_library(self):
        found = re.search(r"manylinux_(\d+)_(\d+)_", os.path.basename(WHEEL))
        self.assertTrue(found, WHEEL)
        self.assertLessEqual((int(found.group(1)), int(found.group(2))), (2, 34), WHEEL)


if __name__ == "__main__":
    unittest.main()
