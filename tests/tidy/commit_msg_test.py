#!/usr/bin/env python3
"""What .githooks/commit-msg refuses, and in which words; where ./run puts it."""
import os
import shutil
import subprocess
import tempfile
import unittest

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
HOOK = os.path.join(ROOT, ".githooks", "commit-msg")
BODY = "\n\nBecause it was not.\n"


class CommitMessage(unittest.TestCase):
    def said(self, message):
        """What the hook says of it; nothing: it is taken."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(message)
            file.flush()
            done = subprocess.run([HOOK, file.name], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode != 0, done.stderr != "", done)
        return done.stderr.removeprefix("commit-msg: ").strip()

    def test_what_is_taken(self):
        for message in ("x" * 72 + BODY, "A title" + BODY + "\nReviewed-by: A <a@b>\n", "A title" + BODY + "# a comment of git's\n" + "# -------- >8 --------\n+code\n",
                        "Merge branch 'x'\n", "fixup! A title\n", "# first a comment\nA title" + BODY):
            self.assertEqual(self.said(message), "", message)

    def test_what_is_refused(self):
        for message, why in (("x" * 73 + BODY, "its title has 73 characters, of at most 72"), ("A title\n", "it has no body; say why, below a blank line"),
                             ("A title\n\nSigned-off-by: A <a@b>\n", "it has no body; say why, below a blank line"),
                             ("A title\nand more\n\nWhy.\n", "the line below the title is not blank"), ("A title." + BODY, "its title ends with a full stop")):
            self.assertEqual(self.said(message), why, message)


class Planted(unittest.TestCase):
    """Where ./run puts the hook: into the repository of this tree, and into no other."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.outer, self.tree = folder.name + "/outer", folder.name + "/outer/third_party/amem"
        os.makedirs(self.tree + "/.githooks")
        shutil.copy(os.path.join(ROOT, "run"), self.tree)
        shutil.copy(HOOK, self.tree + "/.githooks")
        self.environment = {**{name: value for name, value in os.environ.items() if not name.startswith("GIT_")}, "HOME": folder.name, "GIT_CONFIG_NOSYSTEM": "1"}

    def git(self, *words):
        subprocess.run(["git", *words], env=self.environment, check=True, capture_output=True)

    def planted(self, **variables):
        subprocess.run([self.tree + "/run", "help"], env={**self.environment, **variables}, check=True, capture_output=True, cwd=self.outer)
        return sorted(os.path.relpath(os.path.join(folder, name), self.outer) for folder, _, names in os.walk(self.outer) for name in names if name == "commit-msg")

    def test_in_its_own_repository(self):
        self.git("init", "-q", self.tree)
        self.assertEqual(self.planted(), ["third_party/amem/.git/hooks/commit-msg", "third_party/amem/.githooks/commit-msg"])

    def test_not_in_one_that_has_this_tree_among_its_files(self):
        self.git("init", "-q", self.outer)
        self.assertEqual(self.planted(), ["third_party/amem/.githooks/commit-msg"])
        self.assertEqual(self.planted(GIT_DIR=self.outer + "/.git"), ["third_party/amem/.githooks/commit-msg"])  # as in one of its hooks

    def test_not_where_one_folder_has_the_hooks_of_all_repositories(self):
        self.git("init", "-q", self.tree)
        os.mkdir(self.outer + "/hooks")
        self.git("config", "--global", "core.hooksPath", self.outer + "/hooks")
        self.assertEqual(self.planted(), ["third_party/amem/.githooks/commit-msg"])


if __name__ == "__main__":
    unittest.main()
