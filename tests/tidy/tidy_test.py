#!/usr/bin/env python3
"""Plants a breach of every rule of tidy.py in a small tree and expects it to be found, and nothing else."""
import os
import tempfile
import unittest

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
    "replay/cuda_driver.cpp": '#include <cuda.h>\n#include "journal/store.h"\n',
    "replay/amem_replay_main.cpp": '#include <cstdio>\nint main() { std::printf("hello"); }\n',
    "ncclpatch/amem.h": "/* C. */\n#ifndef AMEM_H_\n#define AMEM_H_\n#endif\n",
    "ncclpatch/edge.cpp": '#include <cuda.h>\n#include "replay/driver.h"\n// exit() is not called\nconst char* s = "abort()";\n',
    "tests/x_test.cpp": '#include "ncclpatch/edge.h"\nint main() { exit(0); }\n',
    "build/junk.h": "TODO\n",
}

BREACHES = {
    "include_directions": [("statemachine/c.cpp", '#include "journal/store.h"\n'),
                           ("journal/c.cpp", '#include "replay/driver.h"\n'),
                           ("replay/c.cpp", '#include "ncclpatch/session.h"\n'),
                           ("ncclpatch/c.cpp", '#include "tests/sim/world.h"\n')],
    "statemachine_is_pure": [("statemachine/c.cpp", "#include <sys/mman.h>\n"), ("statemachine/c.cpp", "#include <chrono>\n"),
                             ("statemachine/c.cpp", "#include <unistd.h>\n")],
    "cuda_stays_at_the_edge": [("replay/backup.cpp", "#include <cuda.h>\n"), ("journal/c.cpp", "#include <cuda_runtime.h>\n")],
    "headers_stay_light": [("journal/c.h", "// C.\n#pragma once\n#include <lmdb.h>\n"),
                           ("replay/c.h", "// C.\n#pragma once\n#include <spdlog/spdlog.h>\n"),
                           ("replay/c.h", "// C.\n#pragma once\n#include <nlohmann/json.hpp>\n"),
                           ("journal/c.h", '// C.\n#pragma once\n#include "journal/journal.capnp.h"\n')],
    "headers_begin_with_their_contract": [("replay/c.h", "#pragma once\n// Late.\n"), ("replay/c.h", "// No guard.\n")],
    "guests_behave": [("replay/c.cpp", call + ";\n")
                      for call in ('std::cout << 1', 'printf("x")', 'std::printf("x")', 'puts("x")', 'std::abort()', '::abort()',
                                   'exit(1)', 'std::exit(1)', 'system("ls")', 'rand()', 'signal(2, h)', '::sigaction(2, a, b)',
                                   'gets(b)', 'fputs("x", stdout)', 'std::getenv("AMEM_X")', '/* c */ abort()',
                                   'f("quote \\" in"); abort()', "f('\"'); abort()")],
    "nothing_is_left_over": [("replay/c.cpp", "// TODO: later\n"), ("README.md", "FIXME\n"), ("run", "# XXX\n"),
                             ("run", "cd /" "work/x\n"), ("README.md", "see /home/me/x\n"), ("tests/x.py", "open('/" "root/x')\n")],
    "top_level_is_closed": [("notes.txt", "x\n"), ("docs/x.md", "x\n")],
}

HARMLESS = [("replay/c.cpp", text) for text in
            ('std::fprintf(stderr, "x");', 'log.exit(1);', 'driver->abort();', 'int printf_count = 0;', 'on_exit(1);', '_exit(1);',
             'snprintf(a, 1, "x");', 'Resystem(1);', '// printf("x")', 'auto s = "std::cout";', 'auto r = R"(exit(1))";')]


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
            for path, text in breaches:
                with self.subTest(rule=rule, path=path, text=text):
                    where = {(f[0], f[1]) for f in self.found((path, text))}
                    self.assertEqual(where, {(rule, path if "top" not in rule else path.split("/")[0])})

    def test_harmless_lines_are_left_alone(self):
        for path, text in HARMLESS:
            with self.subTest(text=text):
                self.assertEqual(self.found((path, text + "\n")), [])

    def test_line_numbers_survive_comments_and_strings(self):
        text = '/* a\n b */\nauto s = R"(\n\n)";\nabort();\n'
        self.assertEqual([f[2] for f in self.found(("replay/c.cpp", text))], [6])


if __name__ == "__main__":
    unittest.main()
