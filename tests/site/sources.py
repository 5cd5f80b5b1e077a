"""What the pages of the site take from the tree, so that each fact stands once. A line of a page stands for text:

    {{ section PATH#anchor [body] [alone] }}   a section of a README; body: without its heading; alone: without its subsections
    {{ intro PATH [body] }}                    what stands before the first section
    {{ whole PATH }}                           all but the title
    {{ usage run | COMMAND }}                  what `amem help` or `amem COMMAND --help` prints
    {{ verdict PACK }}                         what `amem why` says of a pack of the tree, and what to do
    {{ remedies }}  {{ doctor }}               messages, from the lists in the code
    {{ metrics }}  {{ schemas }}               families of metrics; what the JSON schemas say of themselves
    {{ python FILE [NAME...] }}                signatures and docstrings
    {{ header FROM TO }}                       amem.h, from one of its sections to another

Links of a README lead to the page that has that section, else the path is named.
"""
import ast
import functools
import glob
import json
import os
import re
import subprocess
import sys
import textwrap

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.normpath(os.path.join(HERE, "../.."))
sys.path.insert(0, os.path.join(TREE, "tests/tidy"))
import readmes  # noqa: E402

PAGES = "tests/site/pages"
DIRECTIVE = re.compile(r"^\{\{ (\w+) ?(.*?) ?\}\}$", re.M)
ITEM = re.compile(r"^([\w, ]+):  +(?=\S)")
ITEM_OF_A_LIST = re.compile(ITEM.pattern + "|^([a-z_]+): ")  # below the longest name there is no second space
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


@functools.lru_cache(maxsize=None)
def read(path):
    with open(os.path.join(TREE, path), encoding="utf-8") as file:
        return file.read()


def headings(lines):
    """(line, level, anchor) of each heading outside fenced blocks."""
    fenced = False
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        if not fenced and (match := re.match(r"(#{1,6}) ", line)):
            yield number, len(match.group(1)), readmes.slug(line)


def cut(path, anchor):
    """(lines, level) of a section with its subsections."""
    lines = read(path).split("\n")
    found = list(headings(lines))
    begin, level = next(((line, level) for line, level, name in found if name == anchor), (None, 0))
    if begin is None:
        raise KeyError("%s has no section #%s" % (path, anchor))
    end = next((line for line, other, _ in found if line > begin and other <= level), len(lines))
    return lines[begin:end], level


def section(target, *how):
    path, _, anchor = target.partition("#")
    lines, level = cut(path, anchor)
    if "alone" in how:
        lines = lines[:next((line for line, _, _ in headings(lines) if line > 0), len(lines))]
    for line, _, _ in headings(list(lines)):
        lines[line] = "#" * (2 - level) + lines[line] if level < 2 else lines[line][level - 2:]
    return path, "\n".join(lines[1:] if "body" in how else lines).strip()


def intro(path):
    lines = read(path).split("\n")[1:]
    return path, "\n".join(lines[:next((line for line, _, _ in headings(lines)), len(lines))]).strip()


def whole(path):
    return path, read(path).partition("\n")[2].strip()


# ---- messages ---------------------------------------------------------------------------------------------------------------


def entries(text, name):
    """The texts of each entry of a C++ table of string literals; the compiler joins those that follow each other."""
    body = re.search(r"\b%s = \{\{\n(.*?)\n\}\};\n" % name, text, re.S).group(1)
    literal_or_comma = r'"(?:\\.|[^"\\])*"|,'
    found = []
    for entry in re.findall(r"\{((?:%s|\s)+)\}" % literal_or_comma, body):
        texts = [""]
        for token in re.findall(literal_or_comma, entry):
            if token == ",":
                texts.append("")
            else:
                texts[-1] += ast.literal_eval(token)
        found.append(texts)
    return found


def remedies():
    """Of `amem why`: its word for a remedy (`remedy_action`), what is wrong, and what to do."""
    source, header = read("replay/diagnosis/remedy.cpp"), read("replay/diagnosis/remedy.h")
    words, texts = zip(*((word, text) for word, text, *_of_tag in entries(source, "kActions")))
    about = re.findall(r"^    k\w+(?: = 0)?,(?: +// (.*))?$", header[:header.index("enum class Outlook")], re.M)
    if not len(words) == len(texts) == len(about) > 20:
        raise ValueError("remedy.cpp and remedy.h do not have the same remedies: %d, %d, %d" % (len(words), len(texts), len(about)))
    values = {"{call}": "`ncclPause` or `ncclResume`", "{process}": "rank N", "{device}": "N", "{bytes}": "the missing bytes", "{pid}": "PID", "{is}": "is", "{look}": " (`py-spy dump`, `gdb`)", "{gpu}": "", "{gpu_of}": "the GPU of rank N",
              "{again}": "call it again on all ranks", "{on_all}": "call `ncclPause` or `ncclResume` on every rank that shares memory, in any order", "{pause}": "`ncclPause`", "{resume}": "`ncclResume`",
              "{resume_all}": "call `ncclResume` on all ranks", "{resume_again}": "call `ncclResume` again on all ranks", "{timeouts}": "",
              "{holders}": "nvidia-smi lists the processes that hold memory there", "{reason}": "usually a full disk or an AMEM_JOURNAL_DIR that cannot be written"}
    for name, value in values.items():
        texts = [text.replace(name, value) for text in texts]
    rows = ["| `%s` | %s | %s |" % (word, what.replace("`", ""), text) for word, what, text in zip(words, about, texts) if text]
    return "replay/diagnosis", "\n".join(["| remedy | when | to do |", "|---|---|---|", *rows])


def literal(node):
    """A text of a Python expression, with ... for what is filled in."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        node = node.left
    return re.sub(r"%[-\d.]*[a-z]", "...", node.value) if isinstance(node, ast.Constant) else "..."


def doctor():
    rows = []
    for node in ast.walk(ast.parse(read("ncclpatch/python/amem/_doctor.py"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("note", "warning", "problem"):
            texts = [literal(one).replace("|", "\\|") for one in node.args]
            rows.append((node.lineno, "| %s | %s: %s | %s |" % (node.func.id, texts[0], texts[1], texts[2] if len(texts) > 2 else "")))
    return "ncclpatch/python", "\n".join(["| | message | to do |", "|---|---|---|", *(row for _, row in sorted(rows))])


# ---- reference --------------------------------------------------------------------------------------------------------------


def tool():
    found = os.environ.get("AMEM_REPLAY") or os.path.join(TREE, "build/bin/amem-replay")
    if not os.path.exists(found):
        raise FileNotFoundError("the pages show what amem-replay prints: ./run build, or AMEM_REPLAY")
    return found


@functools.lru_cache(maxsize=None)
def usage(command):
    if command == "run":
        text = ast.get_docstring(ast.parse(read("ncclpatch/python/amem/_command.py")))
    else:
        shown = subprocess.run(["amem", *([command] if command != "help" else []), "--help"], executable=tool(), stdout=subprocess.PIPE, text=True, check=True,
                               env={**os.environ, "COLUMNS": "88", "NO_COLOR": "1"}).stdout
        text = shown.strip() if command == "help" else shown[:shown.rfind("\n\nExit codes:")].strip()
    return "replay/tool", "```text\n%s\n```" % text


def verdict(pack):
    said = subprocess.run(["amem", "why", os.path.join(TREE, pack)], executable=tool(), stdout=subprocess.PIPE, text=True, check=False,
                          env={**os.environ, "NO_COLOR": "1", "TZ": "UTC"}).stdout
    return "replay/tool", "```text\n$ amem why %s\n%s\n```" % (os.path.basename(pack), said[:said.index("\n\nEvidence")])


def metrics():
    tree = ast.parse(read("ncclpatch/python/amem/_metrics.py"))
    families = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "FAMILIES")
    suffix = {"counter": "_total", "info": "_info"}
    rows = ["| `%s%s` | %s | %s |" % (name, suffix.get(kind, ""), kind, text) for name, (kind, _, text) in families.items()]
    return "ncclpatch/python", "\n".join(["| family | type | |", "|---|---|---|", *rows])


def schemas():
    rows = []
    for path in sorted(glob.glob(os.path.join(os.path.dirname(tool()), "../share/amem/schemas/*.schema.json"))):
        with open(path, encoding="utf-8") as file:
            one = json.load(file)
        keys = ", ".join("`%s`" % key for key in one["required"] if key not in ("schema", "version"))
        rows.append("| `%s` | %s. %s | %s |" % (one["properties"]["schema"]["const"], one["title"], one.get("description", ""), keys))
    return "replay/tool", "\n".join(["| schema | printed by | always has |", "|---|---|---|", *rows])


def signature(node, owner=""):
    if isinstance(node, ast.ClassDef):
        init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        return "%s%s%s" % (owner, node.name, "(%s)" % arguments(init) if init else "")
    return "%s%s(%s)" % (owner, node.name, arguments(node))


def arguments(node):
    text = ast.unparse(node.args)
    return re.sub(r"^self(, )?", "", re.sub(r": (?:[\w.]+(?:\[[^=]*?\])?)(?=,|$| =|=)", "", text))


def paragraph(lines):
    """A paragraph of a docstring as Markdown: examples are code, and lines "name:  text" with what is indented below them are items."""
    table = any(re.search(r"\S {3,}\S", line) and not ITEM.match(line) for line in lines)
    if table or all(line.startswith("    ") for line in lines) or lines[0].endswith(":") and lines[1:] and lines[1].startswith("    "):
        return "```%s\n%s\n```" % ("text" if table else "python", textwrap.dedent("\n".join(lines)))
    made, inside = [], False
    item_of = ITEM_OF_A_LIST if any(map(ITEM.match, lines)) else ITEM
    for line in lines:
        item = item_of.match(line)
        if made and (bool(item) and not inside or inside and not item and not line.startswith(" ")):
            made.append("")
        inside = bool(item) or inside and line.startswith(" ")
        made.append("* `%s`: %s" % (item.group(item.lastindex), line[item.end():]) if item else "  " + line.strip() if inside else line)
    return "\n".join(made)


def docstring(node):
    """As Markdown."""
    text = "\n\n".join(paragraph(block.split("\n")) for block in re.split(r"\n\n+", ast.get_docstring(node) or ""))
    return re.sub(r"(?<![`\w])(\w*__\w+__\w*)", r"`\1`", text)


def public(tree, names):
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (node.name in names if names else not node.name.startswith("_")) and ast.get_docstring(node):
            yield node


def python(path, *names):
    module = "amem" if os.path.basename(path).startswith("_") else "amem." + os.path.splitext(path.split("amem/", 1)[1])[0].replace("/", ".").replace(".__init__", "")
    parts = []
    for node in public(ast.parse(read(path)), names):
        parts += ["### `%s`" % signature(node, module + "."), docstring(node)]
        if isinstance(node, ast.ClassDef):
            parts += ["**`%s`**\n\n%s" % (signature(one), docstring(one)) for one in public(node, ())]
    if len(parts) < 2 * len(names):
        raise KeyError("%s lacks one of %s, or its docstring" % (path, ", ".join(names)))
    return os.path.dirname(path), "\n\n".join(parts)


def header(first, last):
    text = read("ncclpatch/amem.h")
    begin = text.index(first.replace("_", " "))
    begin = text.rindex("/*", 0, begin)
    end = text.index(last.replace("_", " "), begin + 2) if last != "END" else text.index("#ifdef __cplusplus\n}")
    return "ncclpatch", "```c\n%s\n```" % text[begin:text.rindex("\n\n", 0, end)].strip()


# ---- pages ------------------------------------------------------------------------------------------------------------------

SOURCES = {one.__name__: one for one in (section, intro, whole, remedies, doctor, usage, verdict, metrics, schemas, python, header)}


def all_pages():
    found = glob.glob(os.path.join(HERE, "pages/**/*.md"), recursive=True)
    return sorted(os.path.relpath(path, TREE) for path in found)


@functools.lru_cache(maxsize=None)
def places():
    """{"PATH#anchor" or PATH: page#anchor}: where a link to the tree leads in the site. A whole file is where most of it is."""
    found, most = {}, {}
    for page in all_pages():
        for kind, words in DIRECTIVE.findall(read(page)):
            if kind not in ("section", "intro", "whole"):
                continue
            path, text = SOURCES[kind](*words.split())
            if len(text) > most.get(path, 0):
                most[path], found[path] = len(text), page
            for _, _, anchor in headings(text.split("\n")):
                found.setdefault("%s#%s" % (path, anchor), "%s#%s" % (page, anchor))
            if "body" in words:
                found.setdefault(words.split()[0], page)
    return found


def leads_to(folder, page, match):
    """A link of a text whose file lies in `folder`, as it has to be in `page`."""
    picture, text, target = match.groups()
    if re.match(r"[a-z]+:", target) or target.startswith("#") and folder == os.path.dirname(page):
        return match.group(0)
    path, mark, anchor = target.partition("#")
    path = os.path.normpath(os.path.join(folder, path))
    relative = lambda to: os.path.relpath(to, os.path.dirname(page))
    if picture:
        return "![%s](%s)" % (text, relative(path))
    if path.startswith(os.path.dirname(PAGES)):
        return "[%s](%s%s)" % (text, relative(path), mark + anchor)
    if os.path.isdir(os.path.join(TREE, path)):
        path += "/README.md"
    known = places().get(path + mark + anchor) or places().get(path)
    if known:
        return "[%s](%s)" % (text, relative(known))
    return text if text.strip("`") in path else "%s (`%s`)" % (text, path)


def rewritten(path, text, page):
    """Text of the file or folder `path`, with its links as `page` needs them."""
    folder = path if os.path.isdir(os.path.join(TREE, path)) else os.path.dirname(path)
    if path.endswith(".md") and path not in all_pages():  # a section may link to another of its file
        text = re.sub(r"\]\(#", "](%s#" % os.path.basename(path), text)
    out, fenced = [], False
    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        out.append(line if fenced else LINK.sub(lambda match: leads_to(folder, page, match), line))
    return "\n".join(out)


def expand(page):
    """The Markdown of a page, complete."""
    made = lambda match: rewritten(*SOURCES[match.group(1)](*match.group(2).split()), page)
    own = rewritten(page, read(page), page)
    return DIRECTIVE.sub(made, own)


def words(text):
    """What a reader has to read: without marks of Markdown and without addresses."""
    text = LINK.sub(r"\2", text)
    return len(re.findall(r"[^\W_][\w'.-]*", text))
