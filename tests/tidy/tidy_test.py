#!/usr/bin/env python3
"""Plants a breach of every rule of tidy.py in a small tree and expects it to be found, and nothing else."""
import os
import tempfile
import unittest

import symbols
import tidy

CLEAN = {
    "CMakeLists.txt": "project(x)\n",
    "README.md": "words\n",
    "run": "#!/bin/bash\n",
    ".gitignore": "/build/\n",
    "statemachine/a.h": '// A.\n#pragma once\n#include <map>\n#include "statemachine/b.h"\n',
    "statemachine/b.h": "// B.\n#pragma once\n",
    "journal/store.h": '// Store.\n#pragma once\n#include "statemachine/a.h"\n',
    "journal/store.cpp": '#include "journal/store.h"\n#include <lmdb.h>\n#include <capnp/message.h>\n',
    "journal/base/plural.h": '// Plural.\n#pragma once\n#include "statemachine/a.h"\n',
    "replay/driver/driver.h": "// Driver.\n#pragma once\n",
    "replay/driver/cuda/core.cpp": '#include <cuda.h>\n#include "replay/driver/driver.h"\n',
    "replay/diagnosis/why.cpp": '#include "replay/driver/result_names.h"\n#include "replay/job/clock.h"\n',
    "replay/tool/main.cpp": '#include <cstdio>\nint main() { std::printf("hello"); return std::getenv("X") != nullptr; }\n',
    "ncclpatch/amem.h": "/* C. */\n#ifndef AMEM_H_\n#define AMEM_H_\n#endif\n",
    "ncclpatch/runtime/runtime.cpp": '#include "replay/driver/cuda/core.h"\nconst char* s = std::getenv("AMEM_X");\n',
    "ncclpatch/intercept/map.cpp": '#include <cuda.h>\n#include "replay/driver/driver.h"\n// exit() is not called\nconst char* s = "abort()";\n',
    "tests/x_test.cpp": '#include "ncclpatch/intercept/map.h"\n#include "replay/driver/simulator/simulator.h"\nint main() { exit(0); }\n',
    "build/junk.h": "TODO\n",
}

def long_function(lines, signature="void Long()"):
    """A function of so many lines, from its signature's first line to its closing brace."""
    head = signature.count("\n") + 1
    return f"{signature} {{\n" + "  f();\n" * (lines - head - 1) + "}\n"


def a_class(member, times, name="C"):
    """A class of so many public members of one kind."""
    return f"class {name} {{\n public:\n" + "".join(f"  {member.format(i)}\n" for i in range(times)) + "};\n"


def readme(line):
    return [("journal/README.md", f"# Journal\n{line}\n")]


# Every breach is a path with its text, or a list of them, of which the last is at fault.
BREACHES = {
    "include_directions": [("statemachine/c.cpp", '#include "journal/store.h"\n'),
                           ("journal/base/c.cpp", '#include "journal/store.h"\n'),
                           ("journal/c.cpp", '#include "replay/driver/driver.h"\n'),
                           ("replay/driver/c.cpp", '#include "replay/driver/cuda/core.h"\n'),
                           ("replay/driver/simulator/c.cpp", '#include "replay/driver/cuda/core.h"\n'),
                           ("replay/peers/c.cpp", '#include "replay/driver/driver.h"\n'),
                           ("replay/peers/unix/c.cpp", '#include "replay/ledger/ledger.h"\n'),
                           ("replay/session/c.cpp", '#include "ncclpatch/runtime/options.h"\n'),
                           ("replay/session/c.cpp", '#include "replay/driver/simulator/simulator.h"\n'),
                           ("replay/session/deeper/c.cpp", '#include <replay/job/clock.h>\n'),
                           ("replay/job/c.cpp", '#include "replay/driver/result_names.h"\n'),
                           ("replay/job/c.cpp", '#include "replay/diagnosis/why.h"\n'),
                           ("replay/diagnosis/c.cpp", '#include "replay/driver/driver.h"\n'),
                           ("replay/tool/c.cpp", '#include "replay/peers/peers.h"\n'),
                           ("replay/rerun/c.cpp", '#include "replay/peers/unix/socket.h"\n'),
                           ("ncclpatch/runtime/c.cpp", '#include "ncclpatch/intercept/map.h"\n'),
                           ("ncclpatch/patch/c.cpp", '#include "ncclpatch/hook/hook.h"\n'),
                           ("ncclpatch/library/c.cpp", '#include "tests/sim/world.h"\n'),
                           ("journal/c.cpp", '#include "store.h"\n'),
                           ("replay/c.cpp", "int x;\n"), ("replay/new_room/c.cpp", "int x;\n")],
    "the_simulator_stays_out_of_the_library": [("ncclpatch/CMakeLists.txt", "target_link_libraries(a PRIVATE amem_simulator)\n"),
                                               ("ncclpatch/runtime/c.cpp", "class SimulatorOptions;\n"),
                                               ("replay/session/c.cpp", "Simulator* s;\n"),
                                               ("replay/session/c.cpp", "struct LocalNetwork;\n")],
    "statemachine_is_pure": [("statemachine/c.cpp", "#include <sys/mman.h>\n"), ("statemachine/c.cpp", "#include <chrono>\n"),
                             ("statemachine/c.cpp", "#include <unistd.h>\n")],
    "cuda_stays_at_the_edge": [("replay/cycle/backup.cpp", "#include <cuda.h>\n"), ("journal/c.cpp", "#include <cuda_runtime.h>\n"),
                               ("replay/driver/c.h", "// C.\n#pragma once\n#include <nccl.h>\n")],
    "headers_stay_light": [("journal/c.h", "// C.\n#pragma once\n#include <lmdb.h>\n"),
                           ("replay/job/c.h", "// C.\n#pragma once\n#include <spdlog/spdlog.h>\n"),
                           ("replay/job/c.h", "// C.\n#pragma once\n#include <nlohmann/json.hpp>\n"),
                           ("journal/c.h", '// C.\n#pragma once\n#include "journal/journal.capnp.h"\n')],
    "headers_begin_with_their_contract": [("replay/job/c.h", "#pragma once\n// Late.\n"), ("replay/job/c.h", "// No guard.\n")],
    "guests_behave": [("replay/cycle/c.cpp", call + ";\n")
                      for call in ('std::cout << 1', 'printf("x")', 'std::printf("x")', 'puts("x")', 'std::abort()', '::abort()',
                                   'exit(1)', 'std::exit(1)', 'system("ls")', 'rand()', 'signal(2, h)', '::sigaction(2, a, b)',
                                   'gets(b)', 'fputs("x", stdout)', 'std::getenv("AMEM_X")', '/* c */ abort()',
                                   'f("quote \\" in"); abort()', "f('\"'); abort()")],
    "readers_follow_no_links": [("replay/job/c.cpp", "std::ifstream in(path);\n"), ("journal/c.cpp", 'f = fopen("x", "r");\n'),
                                ("replay/tool/c.cpp", 'std::getline(std::ifstream("/proc/self/comm"), name);\n')],
    "rooms_stay_small": [[(f"replay/cycle/c{i:02}.js", "") for i in range(31)],
                         *[("replay/cycle/c.cpp", text) for text in (
                             long_function(61), long_function(61, "static int\nLong(int a,\n     std::vector<int> b = {}) const noexcept"),
                             long_function(61, "Long::Long(int a) : Base(a), b_{1},\n c_(2)"), long_function(61, "template <typename T = int>\nT Long()"),
                             long_function(61, "bool operator==(const A& a, const A& b)"), long_function(61, 'extern "C" int long_one(void)'),
                             long_function(61, "auto Long() -> std::vector<int>"), long_function(61, "const auto kLong = [](int a)"),
                             long_function(61, "struct stat Long()"),
                             "void Long() {\n  auto f = [] {\n" + "    g();\n" * 58 + "  };\n}\n",
                             "namespace a {\nclass B {\n public:\n" + long_function(61) + "};\n}\n",
                             long_function(60) + long_function(61), "void Open() {\n")]],
    "state_is_small": [("replay/cycle/c.cpp", text) for text in (
        a_class("int m{}_ = 1;", 13), a_class("std::map<int, std::pair<int, int>> m{}_ GUARDED_BY(lock_);", 13), "class C {\n  int a, b, c, d, e, f, g, h, i, j, k, l, m;\n};\n",
        a_class("bool b{}_ = false;", 3), a_class("const std::atomic<bool> b{}_{{false}};", 3), a_class("void F{}(int x = {{}}) const;", 26),
        a_class("static int F{}() {{ return 1; }}", 26), a_class("explicit C(int a{}) : a_(a), b_{{1}} {{ f(a); }}", 26), "struct Outer {\n" + a_class("int m{};", 13) + "};\n",
        "class Outer {\n enum class Kind { kA, kB };\n public:\n  void F();\n private:\n" + a_class("int m{};", 13) + "};\n",
        "void F() {\n" + "  if (a) g();\n" * 16 + "}\n", "int F() {\n" + "  x = a ? 1 : 2;\n" * 16 + "}\n", "void F() {\n  switch (a) {\n" + "    case 1:\n" * 16 + "  }\n}\n")]
        + [("ncclpatch/python/c.py", "class C:\n    def __init__(self):\n" + "".join(f"        self.m{i} = {i}\n" for i in range(13))),
           ("ncclpatch/python/c.py", "class C:\n    def __init__(self):\n" + "".join(f"        self.m{i} = False\n" for i in range(3))),
           ("ncclpatch/python/c.py", "class C:\n" + "".join(f"    def m{i}(self): pass\n" for i in range(26))),
           ("ncclpatch/python/c.py", "def f(a):\n" + "    if a: f()\n" * 16),
           (tidy.measures.REASONS, "replay/cycle/gone.cpp C: it is gone\n"),
           [("replay/cycle/c.cpp", "class C {};\n"), (tidy.measures.REASONS, "# Values\nreplay/cycle/c.cpp C: it is small again\n")]],
    "names_are_of_the_field": [("replay/ledger/c.h", "// C.\n#pragma once\n" + text) for text in (
        "class Look {};\n", "struct C {\n  void KeepAll(int a);\n};\n", "bool IsTold() { return true; }\n", "Status Settle(int a,\n              int b) {\n}\n",
        "void StandsIn();\n", "int LeaderOf(int a);\n", "void LetIn();\n")],
    "nothing_is_left_over": [("replay/cycle/c.cpp", "// TODO: later\n"), ("README.md", "FIXME\n"), ("run", "# XXX\n"),
                             ("run", "cd /" "work/x\n"), ("README.md", "see /home/me/x\n"), ("tests/x.py", "open('/" "root/x')\n")],
    "a_type_has_one_definition": [[("journal/c.h", "// C.\n#pragma once\nnamespace amem {\nstruct Extent {\n  int a;\n};\n}\n"),
                                   (path, text + "namespace amem {\nclass Extent final : public X {};\n}\n")]
                                  for path, text in (("replay/driver/c.h", "// C.\n#pragma once\n"), ("replay/cycle/c.cpp", ""))],
    "assertions_have_braces": [("tests/y_test.cpp", "void F() {\n  if (a) EXPECT_EQ(b, c);\n}\n"),
                               ("tests/y_test.cpp", "void F() {\n  for (;;)\n    if (a)\n      ASSERT_TRUE(b);\n}\n")],
    "top_level_is_closed": [("notes.txt", "x\n"), ("docs/x.md", "x\n")],
    "every_path_in_a_readme_exists": [readme(line) for line in (
        "[a](gone.h)", "[a](../statemachine/gone.md#x)", "![a](shot.png)", '<img src="shot.png">', "[a]: gone/b.h", "[a](#no-heading)",
        "[a](../README.md#no-heading)", "`journal/gone.cpp`", "`statemachine/gone/`", "see `store.h` and `gone.cpp`", "as DESIGN.md says: `DESIGN.md`",
        "`base/gone.h`", "`statemachine/a.{h,cpp}`", "`journal/*.capnp`", "`python3 tests/gone.py --x`", "`journal/gone.cpp:12`",
        "```\ntests/gone --all\n```", "`./journal/gone`")] + [("SECURITY.md", "see `journal/gone.cpp`\n")],
}

HARMLESS = [("replay/cycle/c.cpp", text) for text in
            ('std::fprintf(stderr, "x");', 'log.exit(1);', 'driver->abort();', 'int printf_count = 0;', 'on_exit(1);', '_exit(1);',
             'snprintf(a, 1, "x");', 'Resystem(1);', '// printf("x")', 'auto s = "std::cout";', 'auto r = R"(exit(1))";',
             "int x;\n" * 5000, long_function(60), long_function(60) * 3, long_function(60, "Long::Long() : a_{1}, b_(2)"),
             "// a {\nvoid F() { f('{', \"{\"); }\n" + long_function(60),
             a_class("int m{} = 1;", 12) + a_class("bool b{};", 2) + a_class("void F{}();", 25), a_class("static constexpr int kA{} = 1;", 50), a_class("using A{} = int;", 50),
             "class C {\n public:\n  void F();\n private:\n" + "  void G(int a = {});\n" * 50 + "};\n", "void F() {\n" + "  if (a) g();\n" * 15 + "}\n",
             "struct Event {\n  int a;\n  AMEM_EVENT(Event, \"event\", IfAny{a}, b, c, d, e, f, g, h, i, j, k, l, m, n);\n};\n", "const std::map<int, int> kTable = {\n" + "  {1, f(2)},\n" * 100 + "};\n",
             "enum class Many : std::uint8_t {\n" + "  kA,\n" * 100 + "};\n", "namespace a {\n" + "void F() { f(); }\n" * 100 + "}\n",
             "#ifdef A\nvoid F() {\n#else\nvoid F(int) {\n#endif\n}\n#define X(a) {\\\n  {\n")]
HARMLESS += [("replay/ledger/c.h", "// C.\n#pragma once\nclass Outlook {};\nvoid LookUp();\nvoid Lookup(int keep);\nvoid Standard();\nint Header();\n")]
HARMLESS += [(path, "namespace amem {\nnamespace {\nstruct Own {};\n}\nnamespace " + path.split("/")[1] + " {\nstruct Part {};\n}\nstruct Known;\n}\n")
             for path in ("replay/job/c.cpp", "replay/cycle/d.cpp")]
HARMLESS += [("ncclpatch/hook/c.cpp", '#include <dlfcn.h>\n#include "ncclpatch/amem.h"\n#include "statemachine/a.h"\n// the Simulator\n'),
             ("ncclpatch/patch/c.cpp", 'int main() { std::printf("%s", std::getenv("X")); }\n'),
             ("replay/rerun/c.cpp", '#include "replay/driver/simulator/simulator.h"\n#include "replay/peers/peers.h"\n'),
             ("replay/session/unix/c.cpp", '#include "replay/cycle/executor.h"\n'),
             ("replay/driver/cuda/c.ptx", "ret;\n" * 2000), ("tests/long_test.cpp", long_function(1000)),
             *[readme(line)[0] for line in (
                 "[a](store.h), [b](../README.md), [c](#journal), [d](https://x.y/z#q), [e](base), [f](../tests/)",
                 "`store.h`, `journal/store.{h,cpp}`, `base/`, `journal/base/plural.h:3`, `statemachine/*.h`, `x_test.cpp`, `cuda.h`",
                 "`build/lib/gone.so`, `build-asan/gone`, `tests/NAME_test.cpp`, `DIR/gone.cpp`, `journal/<name>.h`, `/tmp/gone.cpp`",
                 "`nvidia/nccl/lib`, `LD_PRELOAD=build/lib/gone.so`, `a/b`, `journal's`, `read/write`, `./run test`, `amem.pause()`",
                 "```\n./run demo && python3 train.py  # |journal/|\n```")]]


def write(root, path, text):
    full = os.path.join(root, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    with open(full, "w", encoding="utf-8") as file:
        file.write(text)


class Planted(unittest.TestCase):
    def found(self, *extra):
        with tempfile.TemporaryDirectory() as root:
            for path, text in [*CLEAN.items(), *extra]:
                write(root, path, text)
            return tidy.findings(root)

    def test_clean_tree_has_no_findings(self):
        self.assertEqual(self.found(), [])

    def test_every_rule_has_a_planted_breach(self):
        self.assertEqual({rule.__name__ for rule in tidy.RULES}, set(BREACHES))

    def test_every_breach_is_found_where_it_is(self):
        for rule, breaches in BREACHES.items():
            for breach in breaches:
                files = breach if isinstance(breach, list) else [breach]
                path, text = files[-1]
                where = path
                if rule == "top_level_is_closed":
                    where = path.split("/")[0]
                elif len(files) > 2:
                    where = os.path.dirname(path)
                with self.subTest(rule=rule, path=path, text=text[:200]):
                    self.assertEqual({(f[0], f[1]) for f in self.found(*files)}, {(rule, where)})

    def test_harmless_lines_are_left_alone(self):
        for path, text in HARMLESS:
            with self.subTest(text=text):
                self.assertEqual(self.found((path, text + "\n")), [])

    def test_line_numbers_survive_comments_and_strings(self):
        text = '/* a\n b */\nauto s = R"(\n\n)";\nabort();\n'
        self.assertEqual([f[2] for f in self.found(("replay/cycle/c.cpp", text))], [6])

    def test_a_long_function_is_named_with_its_first_line_and_its_length(self):
        text = "int x;\n\n" + long_function(60) + "\n// Why.\ntemplate <typename T>\n" + long_function(75, "void A::Longer(T t)")
        found = self.found(("replay/cycle/c.cpp", text))
        self.assertEqual([f[2:] for f in found], [(65, "A::Longer has 76 lines; a function has at most 60")])

    def test_what_has_a_reason_may_be_above_a_limit(self):
        self.assertEqual(self.found(("replay/cycle/c.cpp", a_class("int m{};", 13)), (tidy.measures.REASONS, "replay/cycle/c.cpp C: counters\n")), [])

    def test_what_is_above_a_limit_is_said_with_its_size(self):
        found = self.found(("replay/cycle/c.cpp", "\n" + a_class("bool m{} = false;", 13)))
        self.assertEqual([f[2:] for f in found], [(2, "C has 13 members, of at most 12; 13 booleans, of at most 2; divide it, or give the reason in tests/tidy/above.txt")])

    def test_measures_are_of_sources_written_by_hand(self):
        with tempfile.TemporaryDirectory() as root:
            for path, text in [("journal/a.cpp", "// Why.\n\n#include <new>\n" + "int x = y.at(1);\n" * 4 + long_function(3)), ("journal/a.ptx", "x\n" * 50), ("journal/README.md", "x\n"),
                               ("journal/b.h", a_class("bool m{};", 3) + "void F() {\n  AMEM_CHECK(a);\n  if (b) g();\n}\n"),
                               ("replay/peers/board/participant.cpp", "round.board.Decide(1);\n"), ("replay/freeze/operation.cpp", "// FreezeOperation::Towards(\n"),
                               ("tests/stand_ins/peers/local_peers.cpp", "board::Board board;\n"),
                               ("tests/a_test.cpp", "int x;\n" * 4), ("tests/go", "#!/bin/bash\n"), ("tests/data", "x\n"), ("run", "#!x\n")]:
                write(root, path, text)
            text = tidy.measures.text(tidy.Tree(root), tidy.LIBRARY, tidy.SOURCES, tidy.room_of)
        self.assertRegex(text, r"members +0 above 12; median 3, p90 3; most: 3 C \(journal/b.h:1\)")
        self.assertRegex(text, r"booleans +1 above 2; ")
        self.assertRegex(text, r"branches +0 above 15; .*most: 1 F \(journal/b.h:7\)")
        self.assertRegex(text, r"mechanisms that agree +1: rounds on a board\n")
        self.assertRegex(text, r"\njournal +20 +1 +3 +3 +2 +1 +4 +1\n")
        self.assertRegex(text, r"checks per 1 000 lines +45\.5\n")
        self.assertRegex(text, r"production lines +22\n +of them code +18\ntest lines +6\ntests : production +0\.27$")

    def test_sessions_of_one_process_are_a_mechanism_where_they_decide_without_a_board(self):
        for text, agree in (("Decide(vote);\n", 1), ("board::Board board;\nint votes_;\n", 1), ("board::Board board;\n", 0)):
            with self.subTest(text), tempfile.TemporaryDirectory() as root:
                write(root, "tests/stand_ins/peers/local_peers.cpp", text)
                self.assertIn(f"mechanisms that agree    {agree}:", tidy.measures.text(tidy.Tree(root), tidy.LIBRARY, tidy.SOURCES, tidy.room_of))

    def test_symbols_of_the_simulator_are_strays(self):
        clean = "0 T amem::Session::Pause()\n0 t amem::Peers::Close()\n0 t (anonymous namespace)::Simulate()\n"
        self.assertEqual(symbols.strays(clean), [])
        for stray in ("amem::Simulator::Reserve(unsigned long)", "vtable for amem::Simulator", "amem::LocalNetwork::LocalNetwork()",
                      "amem::Connect(std::shared_ptr<amem::SimulatorWorld>)"):
            self.assertEqual(symbols.strays(clean + f"0 t {stray}\n"), [f"0 t {stray}"])
        with self.assertRaises(ValueError):
            symbols.strays("0 T amem_pause\n")


if __name__ == "__main__":
    unittest.main()
