"""The rule for documents: every link leads somewhere, and every path or file that a document names is in the tree."""
import os
import re

CODE_FILE = re.compile(r"^[\w.*+-]+\.(cpp|h|S|py|capnp|cu|js|css|md|cmake|map)$")  # names of files, even without a folder
FOREIGN = {"cuda.h", "nccl.h", "nvml.h"}  # files of others that a README may name
PLACEHOLDER = re.compile(r"[<>$]|\.\.\.|(?<![A-Za-z])(NAME|DIR|FILE|FOLDER|ROOM|TARGET|COMMAND|UID|PID|N|X)(?![A-Za-z])")
BUILT = re.compile(r"^build(-\w+)?(/|$)")  # what a build makes


def slug(heading):
    """The anchor that GitHub gives to a heading."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().strip("#").strip())
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(tree, path):
    fenced, found = False, set()
    for line in tree.lines(path):
        fenced ^= line.startswith("```")
        if not fenced and re.match(r"#{1,6} ", line):
            found.add(slug(line))
        found |= set(re.findall(r'(?:id|name)="([^"]+)"', line))
    return found


class _Names:
    """What is in the tree: paths of files and folders, and bare names of files."""

    def __init__(self, tree):
        self.paths = set(tree.paths) | {"."}
        for path in tree.paths:
            while path := os.path.dirname(path):
                self.paths.add(path)
        self.bare = {os.path.basename(p) for p in tree.paths}  # a README may say token.cpp of a file that lies elsewhere
        self.top = {p.split("/")[0] for p in tree.paths}

    def has(self, path):
        if "*" in path:
            pattern = re.compile(re.escape(path).replace(r"\*", "[^/]*") + "$")
            return any(pattern.match(p) for p in self.paths | self.bare)
        return path in self.paths


def _alternatives(word):
    """a.{h,cpp} is a.h and a.cpp."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", word)
    if not match:
        return [word]
    return [w for choice in match.group(1).split(",") for w in _alternatives(word[:match.start()] + choice + word[match.end():])]


def _is_missing(names, folder, word, fenced):
    """Whether a word of a code span looks like a path of this tree and is not there. A fenced block shows commands and drawings, whose
    other words are the reader's own: there only what begins with an entry of the top level counts."""
    word = word.strip(",;:()'\"").removeprefix("./")
    word = re.sub(r":\d+(-\d+)?$", "", word).rstrip("/.")
    if not word or PLACEHOLDER.search(word) or BUILT.match(word) or re.search(r"^[/~-]|://|[=|]", word):
        return False
    first, last = word.split("/")[0], word.split("/")[-1]
    ours = first in names.top
    if not fenced:
        ours = ours or bool(CODE_FILE.match(last)) and last not in FOREIGN
        ours = ours or "/" in word and os.path.join(folder, first) in names.paths
    return ours and not (names.has(word) or names.has(os.path.normpath(os.path.join(folder, word))) or word in names.bare)


def _links(line):
    yield from re.findall(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)", line)
    yield from re.findall(r'\b(?:src|href)="([^"]+)"', line)
    yield from re.findall(r"^\[[^\]]+\]:\s*(\S+)", line)


def _broken_link(tree, names, path, link):
    if re.match(r"[a-z][a-z+.-]*:", link):
        return None
    target, _, anchor = link.partition("#")
    target = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else path
    if target not in names.paths:
        return f"the link {link} leads to nothing"
    if anchor and target.endswith(".md") and anchor not in _anchors(tree, target):
        return f"{target} has no heading for #{anchor}"
    return None


def every_path_in_a_readme_exists(tree):
    """Links of documents (and their anchors), and what looks like a path or a file of ours in `code` or a fenced block. A word
    with NAME, <...> or $ in it stands for something else, and build/ is made; "*" and "{a,b}" mean what they mean to a shell."""
    names = _Names(tree)
    for path in [p for p in tree.paths if p.endswith(".md")]:
        folder, fenced = os.path.dirname(path), False
        for number, line in enumerate(tree.lines(path), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
                continue
            if not fenced:
                for link in _links(line):
                    if problem := _broken_link(tree, names, path, link):
                        yield path, number, problem
            spans = [line] if fenced else re.findall(r"`([^`]+)`", line)
            for word in [w for span in spans for phrase in span.split() for w in _alternatives(phrase)]:
                if _is_missing(names, folder, word, fenced):
                    yield path, number, f"{word} is not in the tree"
