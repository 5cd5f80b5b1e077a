"""How much state a reader has to hold in her head: members, booleans and public methods of each class, branches of each function, mechanisms that
agree, bare .at(), and checks that stay on. Lines are counted as well, and nothing limits them: they are what comes of the rest.

What is above a limit has a line with its reason in above.txt. A reason whose piece is within the limits again is a finding, too.
"""
import ast
import os
import re
from collections import Counter, defaultdict, namedtuple

import classes
import functions

LIMITS = {"members": 12, "booleans": 2, "public methods": 25, "branches": 15}
REASONS = "tests/tidy/above.txt"
_BRANCH = re.compile(r"\b(if|for|while|case|catch)\b|\?")
_CHECK = re.compile(r"(?<!define )\bAMEM_CHECK\(|\bledger_?\.(?:Check|Entry|Known)\(")  # what must hold, in release builds too
_CPP = (".h", ".cpp")
# Ways in which several processes come to one decision: a file, and what it has if it decides. HOUSE's aim is two: the board, and that of several hosts
# over it. The sessions of one process in tests (local_peers) are a mechanism only if they decide otherwise than on boards.
MECHANISMS = {"rounds on a board": ("replay/peers/board/participant.cpp", r"\bboard\.Decide\("),
              "requests from outside": ("replay/control/job_control.cpp", r"\bJobControl::SetStage\("),
              "freezes": ("replay/freeze/operation.cpp", r"\bFreezeOperation::Towards\("),
              "hosts": ("ncclpatch/python/amem/_agreements.py", r"\bdef "),
              "the double of tests": ("tests/stand_ins/peers/local_peers.cpp", r"\b(?:Decide|CastVote|votes?_|decisions?_)\b|(?s:\A(?!.*\bboard::Board\b))")}

Piece = namedtuple("Piece", "path line kind name sizes")  # kind: class | function; sizes: of each measure


def _python(path, text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assigned = [(t.attr, n.value) for n in ast.walk(node) if isinstance(n, (ast.Assign, ast.AnnAssign))
                        for target in (n.targets if isinstance(n, ast.Assign) else [n.target])
                        for t in (target.elts if isinstance(target, ast.Tuple) else [target])
                        if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == "self"]
            booleans = {name for name, value in assigned if isinstance(value, ast.Constant) and isinstance(value.value, bool)}
            methods = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and not n.name.startswith("_")]
            yield Piece(path, node.lineno, "class", node.name,
                        {"members": len({name for name, _ in assigned}), "booleans": len(booleans), "public methods": len(methods)})
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            branches = sum(isinstance(n, (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension)) for n in ast.walk(node))
            yield Piece(path, node.lineno, "function", node.name, {"branches": branches})


def pieces(tree, paths):
    """Every class and function of these files, with its sizes."""
    for path in paths:
        if path.endswith(".py"):
            yield from _python(path, tree.text(path))
        elif path.endswith(_CPP):
            code = tree.code(path)
            for one in classes.classes(code):
                yield Piece(path, one.line, "class", one.name, {"members": one.members, "booleans": one.booleans, "public methods": one.methods})
            plain = functions.without_preprocessor(code)
            for first, last, name in functions.found(code):
                yield Piece(path, first, "function", name, {"branches": sum(len(_BRANCH.findall(line)) for line in plain[first - 1:last])})


def _above(piece):
    return [f"{size} {what}, of at most {LIMITS[what]}" for what, size in piece.sizes.items() if size > LIMITS[what]]


def reasons(tree):
    """{(path, name): (line, reason)} of above.txt."""
    found = {}
    for number, line in enumerate(tree.lines(REASONS) if REASONS in tree.paths else [], 1):
        match = re.match(r"([^\s#]\S*) (.+?): (.*)$", line)
        if match:
            found[match.group(1), match.group(2)] = number, match.group(3)
    return found


def state_is_small(tree, library):
    given, used = reasons(tree), set()
    for piece in pieces(tree, [p for p in tree.paths if p.split("/")[0] in library]):
        if above := _above(piece):
            used.add((piece.path, piece.name))
            if not given.get((piece.path, piece.name), (0, ""))[1]:
                yield piece.path, piece.line, f"{piece.name} has {'; '.join(above)}; divide it, or give the reason in {REASONS}"
    for (path, name), (number, _) in given.items():
        if (path, name) not in used:
            yield REASONS, number, f"{name} of {path} is within the limits, or gone; take its reason out"


def _lines(tree, paths):
    return sum(len(tree.text(p).splitlines()) for p in paths)


# What a file has to have because it is a file of its own is not code: it grows with the number of files, not with what they do.
_NOT_CODE = ("//", "#include", "#pragma once", "namespace ", "}  // namespace", "/*", "*")


def _code_lines(tree, paths):
    stripped = (line.strip() for p in paths for line in tree.text(p).splitlines())
    return sum(1 for line in stripped if line and not line.startswith(_NOT_CODE))


def _is_script(tree, path):
    return "." not in os.path.basename(path) and tree.lines(path)[0].startswith("#!")


def _spread(found, what):
    sizes = sorted((piece.sizes[what], f"{piece.name} ({piece.path}:{piece.line})") for piece in found if what in piece.sizes)
    if not sizes:
        return "none"
    over = sum(size > LIMITS[what] for size, _ in sizes)
    largest = ", ".join(f"{size} {name}" for size, name in sizes[:-4:-1])
    return f"{over} above {LIMITS[what]}; median {sizes[len(sizes) // 2][0]}, p90 {sizes[len(sizes) * 9 // 10][0]}; most: {largest}"


def _rooms(tree, production, found, room_of):
    """A table: of each room its lines, and the measures that a change of it should not raise."""
    rows = defaultdict(Counter)
    for path in production:
        row = rows[room_of(path) or path.split("/")[0]]
        row["lines"] += _lines(tree, [path])
        if path.endswith(_CPP):
            code = "\n".join(tree.code(path))
            row[".at()"] += len(re.findall(r"[.>]at\(", code))
            row["checks"] += len(_CHECK.findall(code))
    for piece in found:
        row = rows[room_of(piece.path) or piece.path.split("/")[0]]
        row[piece.kind] += 1
        for what, size in piece.sizes.items():
            if what in ("members", "booleans"):
                row[what] += size
        row["above"] += bool(_above(piece))
    names = ("lines", "class", "members", "booleans", "function", "above", ".at()", "checks")
    total = Counter()
    yield f"{'room':26}" + "".join(f"{name:>10}" for name in names)
    for room, row in sorted(rows.items()):
        total += row
        yield f"{room:26}" + "".join(f"{row[name]:>10}" for name in names)
    yield f"{'all':26}" + "".join(f"{total[name]:>10}" for name in names)
    yield f"checks per 1 000 lines    {1000 * total['checks'] / max(total['lines'], 1):.1f}"


def text(tree, library, sources, room_of):
    """Hand-written sources only: what is generated (.ptx), data, build files and text for people are not counted."""
    production = [p for p in tree.paths if p.split("/")[0] in library and p.endswith(sources)]
    tests = [p for p in tree.paths if p.startswith("tests/") and (p.endswith(sources) or _is_script(tree, p))]
    of_production, of_tests = _lines(tree, production), _lines(tree, tests)
    found = list(pieces(tree, production))
    result = [f"{what:24} {_spread(found, what)}" for what in LIMITS]
    agree = [name for name, (path, decides) in MECHANISMS.items() if path in tree.paths and re.search(decides, "\n".join(tree.code(path) if path.endswith(_CPP) else tree.lines(path)))]
    result.append(f"mechanisms that agree    {len(agree)}: {', '.join(agree)}")
    result += _rooms(tree, production, found, room_of)
    result += [f"production lines         {of_production}", f"  of them code           {_code_lines(tree, production)}", f"test lines               {of_tests}",
               f"tests : production       {of_tests / max(of_production, 1):.2f}"]
    return "\n".join(result)
