#!/usr/bin/env python3
"""What .githooks/commit-msg refuses, and in which words."""
import os
import subprocess
import tempfile
import unittest

HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".githooks", "commit-msg")
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


if __name__ == "__main__":
    unittest.main()
