"""Which mutants there are, and which of them a seed picks. universalmutator makes them, line by line; what it makes without knowing the
language is sorted out here: text of messages, operators that are none (a template's bracket, a reference), brackets without a partner."""
import ast
import contextlib
import importlib.util
import io
import itertools
import os
import random
import re
import subprocess
from typing import NamedTuple

RULES = {".cpp": ["universal.rules", "c_like.rules", "cpp.rules"], ".py": ["universal.rules", "python.rules"]}
FOLDERS = ("statemachine", "journal", "replay", "ncclpatch")  # production code
STRINGS = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'')
COMMENTS = re.compile(r"/\*.*?\*/|//.*")
WORDS = set("begin end min max any_of all_of none_of min_element max_element if not and or None True False pass".split())
OPERATORS = "<>=&*"
DECLARATION = re.compile(r"\s*(?!return\b|delete\b|throw\b|else\b)(?:(?:const|constexpr|static|thread_local) )*[A-Za-z_][\w:]*(?:<.*>)?[&*]* [&*]*"
                         r"(?:[\w:]+|\[[\w, ]+\]|operator\S+)\s*[=;({\[]")
NO_STATEMENT = re.compile(r"\s*(namespace|using|template|class|struct|enum|static_assert|extern|friend|public:|private:|\[\[)")


class Mutant(NamedTuple):
    file: str      # from the top of the tree
    line: int
    before: str    # the last line above it that is not empty: with the two below, what a mutant is known by wherever it moves
    original: str  # a line; of a mutant that somebody thought up, perhaps several
    mutated: str

    @property
    def key(self):
        return tuple(map(_stripped, (self.before, self.original, self.mutated)))

    def applied(self, text):
        lines = text.splitlines(keepends=True)
        lines[self.line - 1:self.line - 1 + self.original.count("\n")] = [self.mutated]
        return "".join(lines)

    def places(self, text):
        """The numbers of the lines where its original is."""
        lines, count = text.splitlines(keepends=True), self.original.count("\n")
        return [at + 1 for at in range(len(lines)) if "".join(lines[at:at + count]) == self.original]


def _stripped(lines):
    return "\n".join(line.strip() for line in lines.strip().split("\n"))


def rooms(root):
    """{room: its files}. A room is a folder of the library, such as replay/session, with all that lies below it."""
    found = {}
    for path in subprocess.run(["git", "-C", root, "ls-files", "-z", *FOLDERS], capture_output=True, check=True, text=True).stdout.split("\0"):
        parts = path.split("/")[:-1]
        if os.path.splitext(path)[1] in RULES and os.path.exists(os.path.join(root, path)):
            found.setdefault("/".join(parts[:2] if parts[0] in ("replay", "ncclpatch") else parts[:1]), []).append(path)
    return found


def is_testable(root, path):
    """Whether the tests of this file can run in this Python."""
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return not path.endswith(".py") or "import torch" not in file.read() or importlib.util.find_spec("torch") is not None


def _has_new_words(original, mutated):
    """Rules for begin and end, min and max do not know where a word ends."""
    words = lambda line: set(re.findall(r"[A-Za-z_]\w*", STRINGS.sub('""', line)))
    return bool(words(mutated) - words(original) - WORDS)


def _code(line):
    return COMMENTS.sub("", STRINGS.sub('""', line))


def _brackets(line):
    code = _code(line)
    return [code.count(bracket) for bracket in "()[]{}"]


def _changes_a_bracket_of_a_template(original, mutated):
    """clang-format sets spaces around an operator of two values, and none at a template's bracket, a reference or a pointer."""
    at = len(os.path.commonprefix([original, mutated]))
    while at > 0 and original[at - 1] in OPERATORS:
        at -= 1
    operator = re.match(f"[{re.escape(OPERATORS)}]*", original[at:])[0]
    spaced = original[at - 1:at] == " " and original[at + len(operator):at + len(operator) + 1] in (" ", "\n")
    return operator != "" and not spaced


def _is_left_out(original, after):
    """Whether a program without this line could still compile: no declaration, and no function's last return."""
    if not original.rstrip().endswith(";") or not _has_whole_brackets(original) or DECLARATION.match(original):
        return False
    return not (original.strip().startswith("return ") and after.startswith("}"))


def is_sensible_cpp(original, mutated, after):
    """Whether the mutant of a line changes what is executed, and is likely to compile; `after` is the line below."""
    if NO_STATEMENT.match(original) or DECLARATION.match(original) and original.endswith(("{\n", ",\n")) or _has_new_words(original, mutated):
        return False
    if "\n" in mutated[:-1] or "\\" in mutated[-2:] or mutated.lstrip().startswith(("(0==1)", "(1==1)")):
        return False
    if mutated.lstrip().startswith("/*"):
        return _is_left_out(original, after)
    if _code(original).split() == _code(mutated).split() or _brackets(mutated) != _brackets(original):
        return False
    if re.search(r"[-+][*/%]|\+-|-\+|[<>]=? \w+(\.|->)(end|begin)\(|[<>]=? nullptr", mutated):
        return False  # half of ++, an order of iterators or pointers
    return not _changes_a_bracket_of_a_template(original, mutated) and not re.search(r'" [-*/%] |[^=!<>] [-*/%] "', mutated)


def _has_whole_brackets(line):
    counts = _brackets(line)
    return counts[0] == counts[1] and counts[2] == counts[3] and counts[4] == counts[5]


class _WithoutText(ast.NodeTransformer):  # and without types, which only mypy reads
    def visit_Constant(self, node):  # noqa: N802, the name that ast asks for
        return ast.copy_location(ast.Constant(""), node) if isinstance(node.value, str) else node

    def visit_Expr(self, node):  # noqa: N802
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.copy_location(ast.Pass(), node) if is_text else self.generic_visit(node)

    def generic_visit(self, node):
        for types in {"annotation", "returns"} & set(node._fields):
            setattr(node, types, None)
        return super().generic_visit(node)


def _tree_without_text(text):
    return ast.dump(_WithoutText().visit(ast.parse(text)))


def is_sensible_python(text, mutant):
    """Whether the mutant of a file with this text is a program, and another one but for its texts."""
    try:
        return _tree_without_text(mutant.applied(text)) != _tree_without_text(text)
    except (SyntaxError, ValueError):
        return False


def candidates(root, path):
    """All mutants of a file, as {line: [Mutant, ...]}; of a C++ file, those that are sensible."""
    from universalmutator import mutator  # only whoever makes mutants needs it
    with open(os.path.join(root, path), encoding="utf-8") as file:
        lines = file.read().splitlines(keepends=True)
    ending, found = os.path.splitext(path)[1], {}
    with contextlib.redirect_stdout(io.StringIO()):
        made = mutator.mutants_regexp(lines, RULES[ending], ignorePatterns=[])
    for number, mutated, *_ in made:
        original, after = lines[number - 1], lines[number] if number < len(lines) else ""
        if ending == ".py" and not _has_new_words(original, mutated) or ending == ".cpp" and is_sensible_cpp(original, mutated, after):
            before = next((line for line in reversed(lines[:number - 1]) if line.strip()), "")
            found.setdefault(number, []).append(Mutant(path, number, before, original, mutated))
    return found


def pick(root, files, seed):
    """Yields mutants of these files in an order that the seed decides: a line by chance, then one of its mutants, and no line twice."""
    chance = random.Random(seed)
    lines = [mutants for path in sorted(files) for _, mutants in sorted(candidates(root, path).items())]
    chance.shuffle(lines)
    for mutants in lines:
        with open(os.path.join(root, mutants[0].file), encoding="utf-8") as file:
            text = file.read()
        sensible = (m for m in chance.sample(mutants, len(mutants)) if m.file.endswith(".cpp") or is_sensible_python(text, m))
        yield from itertools.islice(sensible, 1)


def read_equivalents(text):
    """{key: reason} of a file like

    path/of/file.cpp: why nothing can notice it, in a sentence or two
      the line above it
    - the line
    + the mutant

    with an empty line between any two. There may be several lines with -, and several or none with +. The path is for readers: what counts
    is the lines below it."""
    known = {}
    for number, block in enumerate(filter(str.strip, re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n", "", text))), 1):
        reason, *lines = block.strip("\n").split("\n")
        if ": " not in reason or not re.fullmatch(r" -+\+*", "".join(line[:1] for line in lines)) or any(line[1:2] != " " for line in lines):
            raise ValueError(f"entry {number} is not a reason, the line above, - the line, + the mutant:\n{block}")
        kinds = [_stripped("\n".join(line[2:] for line in lines if line[0] == kind)) for kind in " -+"]
        known[tuple(kinds)] = reason.split(": ", 1)[1]
    return known
