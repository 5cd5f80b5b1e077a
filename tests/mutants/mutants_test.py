#!/usr/bin/env python3
"""What mutants.py does without making a mutant: which are sensible, how an equivalent one is known again, and the table."""
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import mutants  # noqa: E402
import sample  # noqa: E402
from trial import BROKEN, EQUIVALENT, NOTICED, SURVIVED, Test  # noqa: E402

ENTRY = """replay/ledger/ledger.cpp: both are the same number
  int F(int a) {
-   return a + 0;
+   return a - 0;
"""


class Sensible(unittest.TestCase):
    def cpp(self, original, mutated, after="  }\n"):
        return sample.is_sensible_cpp(original + "\n", mutated + "\n", after)

    def test_an_operator_a_number_or_a_statement_is_changed(self):
        for original, mutated in (("  if (a < b) return;", "  if (a <= b) return;"), ("  x = 1;", "  x = 2;"),
                                  ("  if (a) f(b, c);", "  if (!a) f(b, c);"), ("  f(b, c);", "  f( c,b);"), ("  f(b);", "  /*f(b);*/"),
                                  ("  return a.begin();", "  return a.end();"), ("  return x & y;", "  return x | y;")):
            self.assertTrue(self.cpp(original, mutated), mutated)

    def test_what_cannot_compile_is_left_out(self):
        for original, mutated in (("  std::map<A, B> x;", "  std::map<=A, B> x;"), ("  A& x = y;", "  A| x = y;"), ("  const A x = f();", "  /*const A x = f();*/"),
                                  ("  f(g(x));", "  f(g(x);"), ("void A::F(int a, int b) {", "void A::F( int b,int a) {"), ("  x = suspendable;", "  x = suspbeginable;"),
                                  ("namespace amem {", "/*namespace amem {*/")):
            self.assertFalse(self.cpp(original, mutated), mutated)
        self.assertFalse(self.cpp("  return {};", "  /*return {};*/", "}\n"))

    def test_what_changes_only_text_is_left_out(self):
        self.assertFalse(self.cpp('  f("a+b");', '  f("a-b");'))
        self.assertFalse(self.cpp("  f();  // 1", "  f();  // 2"))
        text = 'def f(a: List[int], b=1) -> int:\n    """Of 1."""\n    return 1\n'
        row = lambda line, mutated: sample.Mutant("f.py", line, "", text.splitlines(True)[line - 1], mutated)
        self.assertFalse(sample.is_sensible_python(text, row(2, '    """Of 2."""\n')))
        self.assertFalse(sample.is_sensible_python(text, row(2, "    pass\n")))
        self.assertFalse(sample.is_sensible_python(text, row(1, "def f(a: List[None], b=1) -> None:\n")))
        self.assertTrue(sample.is_sensible_python(text, row(1, "def f(a: List[int], b=2) -> int:\n")))
        self.assertFalse(sample.is_sensible_python(text, row(3, "    return )\n")))
        self.assertTrue(sample.is_sensible_python(text, row(3, "    return 2\n")))


class Equivalents(unittest.TestCase):
    def test_one_is_known_wherever_its_lines_move(self):
        known = sample.read_equivalents("# a comment\n" + ENTRY)
        moved = sample.Mutant("elsewhere.cpp", 77, "    int F(int a) {\n", "return a + 0;\n", "return a - 0;\n")
        self.assertEqual(known[moved.key], "both are the same number")
        self.assertNotIn(moved._replace(before="int G(int a) {\n").key, known)

    def test_one_of_several_lines_is_known_as_well(self):
        text = "  f();\n\n  g();\n  if (a)\n    h();\n  return;\n"
        mutant = sample.Mutant("f.cpp", 4, "  g();\n", "  if (a)\n    h();\n", "")
        self.assertEqual((mutant.places(text), mutant.applied(text)), ([4], "  f();\n\n  g();\n  return;\n"))
        self.assertIn(mutant.key, sample.read_equivalents("f.cpp: h does nothing here\n    g();\n-   if (a)\n-     h();\n"))
        self.assertEqual(mutant._replace(original="  f();\n").places(text + "  f();\n"), [1, 7])

    def test_an_entry_without_a_reason_or_a_line_is_refused(self):
        for wrong in (ENTRY.replace(": both are the same number", ""), ENTRY.replace("-   return a + 0;\n", ""), ENTRY.replace("+   ", "+")):
            with self.assertRaises(ValueError):
                sample.read_equivalents(wrong)

    def test_the_file_of_the_tree_can_be_read(self):
        with open(os.path.join(mutants.HERE, "equivalent.txt"), encoding="utf-8") as file:
            for reason in sample.read_equivalents(file.read()).values():
                self.assertRegex(reason, r"\w+ \w+")


class Results(unittest.TestCase):
    ROWS = [{"room": room, "outcome": outcome} for room, outcome in
            (("a", NOTICED), ("a", NOTICED), ("a", SURVIVED), ("a", BROKEN), ("b", EQUIVALENT), ("b", NOTICED))]

    def test_the_rate_counts_neither_equivalent_mutants_nor_broken_ones(self):
        self.assertEqual([mutants.rate(self.ROWS, room) for room in ("b", "all")], [100, 75])
        self.assertEqual(mutants.table(self.ROWS)[2:], ["| `a/` | 3 | 2 | 67 % | 0 | 1 |", "| `b/` | 1 | 1 | 100 % | 1 | 0 |",
                                                        "| all | 4 | 3 | 75 % | 1 | 1 |"])

    def test_a_test_that_fails_once_notices_nothing_and_one_that_hangs_does(self):
        def run(script, limit=60.0):
            test = Test("t", [sys.executable, "-c", script], "/", {}, "", 1)
            test.limit = limit
            return test.run()
        self.assertEqual(run("pass"), "")
        self.assertEqual(run("print('ERROR: it'); raise SystemExit(1)"), "t: ERROR: it")
        self.assertEqual(run("import time; time.sleep(60)", 0.5), "t hangs")
        once = f"/tmp/once-{os.getpid()}"
        self.assertEqual(run(f"import os\ntry: os.mkdir({once!r})\nexcept FileExistsError: os.rmdir({once!r})\nelse: raise SystemExit(1)"), "")


if __name__ == "__main__":
    unittest.main()
