"""Whether a build's files may use the precompiled headers that they are given: what was defined for a header is defined for its users.

    precompiled.py build/compile_commands.json

GCC refuses a header otherwise, Clang does not, and only Clang compiles the tests where it is installed.
"""
import json
import re
import shlex
import sys

HEADER = re.compile(r"(\S+/cmake_pch\.hxx)(?:\.gch|\.pch)?$")


def definitions(words):
    return {word for word in words if word.startswith("-D")}


def main(path):
    with open(path, encoding="utf-8") as file:
        commands = [(row["file"], shlex.split(row["command"])) for row in json.load(file)]
    made = {HEADER.search(words[words.index("-o") + 1]).group(1).split("/CMakeFiles/")[-1]: definitions(words)
            for _, words in commands if HEADER.search(words[words.index("-o") + 1])}
    wrong, users = [], 0
    for source, words in commands:
        used = next((match.group(1).split("/CMakeFiles/")[-1] for match in map(HEADER.match, words) if match), None)
        if used not in made or HEADER.search(words[words.index("-o") + 1]):
            continue
        users += 1
        wrong += [f"{source}: {used} was compiled with {one}" for one in sorted(made[used] - definitions(words))]
    print("\n".join(wrong or [f"{len(made)} headers fit their {users} users"]))
    return 1 if wrong or not users else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
