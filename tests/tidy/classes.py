"""Finds the classes of a C++ file and what a reader has to hold in her head for each: members, booleans and public methods."""
import re
from collections import namedtuple

import functions

Class = namedtuple("Class", "name line members booleans methods")

_HEAD = re.compile(r"\b(class|struct|union)\s+(?:[A-Z_]+\s*\([^()]*\)\s*|\[\[[^\]]*\]\]\s*|alignas\s*\(\)\s*)*([\w:]+(?:<[^<>]*>)?)\s*(?:final\b\s*)?(?::(?!:)[^{;]*)?$")
_ACCESS = re.compile(r"^\s*(public|private|protected)\s*:(?!:)")
_NO_MEMBER = re.compile(r"^(using|typedef|friend|static_assert|enum|class|struct|union|template|static|constexpr|AMEM_\w+|FIELDS?\w*)\b")


def _without(text, opening, closing):
    """The text without what stands between these brackets, however deep."""
    pattern = re.compile(rf"\{opening}[^\{opening}\{closing}]*\{closing}")
    while True:
        shorter = pattern.sub(" ", text)
        if shorter == text:
            return text
        text = shorter


def _plain(statement):
    """The statement without templates' arguments, attributes and annotations of locks, which have parentheses of their own."""
    statement = re.sub(r"\[\[[^\]]*\]\]", " ", statement)
    statement = re.sub(r"\boperator\s*(\(\)|<=>|[^\s\w(]+)", "operator", statement)
    statement = re.sub(r"\b(GUARDED_BY|PT_GUARDED_BY|REQUIRES|EXCLUDES|ACQUIRE|RELEASE|TRY_ACQUIRE|CAPABILITY|RETURN_CAPABILITY|alignas|decltype)\s*\(([^()]|\([^()]*\))*\)",
                       " ", statement)
    return _without(statement, "<", ">").strip()


def _declares(statement, public):
    """What a statement of a class adds: (members, booleans, public methods)."""
    plain = _plain(re.sub(r"^\s*template\s*<", "<", statement))
    if not plain or _NO_MEMBER.match(plain):
        return (0, 0, 1) if public and re.match(r"(static|constexpr|friend)\b", plain) and "(" in plain.split("=")[0] and not plain.startswith("friend") else (0, 0, 0)
    before_value = re.split(r"=|\{", plain, maxsplit=1)[0]
    if "(" in before_value:
        own = re.search(r"([~\w]+)\s*\(", before_value)
        counted = public and "= delete" not in plain and "= default" not in plain and own is not None and not own.group(1).startswith("~")
        return 0, 0, int(counted)
    names = len(_without(_without(plain, "{", "}"), "(", ")").split(","))
    boolean = re.search(r"^((mutable|const|volatile)\s+)*(bool\b|std::atomic_bool\b|std::atomic<\s*bool\s*>)", statement.strip()) is not None
    return names, names if boolean else 0, 0


def classes(code):
    """Yields a Class for each class, struct and union in these lines, whose comments and strings are blank; nested ones are classes of their own.
    A union or struct without a name belongs to the one around it."""
    text = "\n".join(functions.without_preprocessor(code))
    stack, begin, line = [], 0, 1  # of each open brace: None, or [name, line, public, members, booleans, methods] of a class
    for position, char in enumerate(text):
        line += char == "\n"
        inside = stack[-1] if stack else "namespace"
        if char == "{":
            head = text[begin:position]
            if isinstance(inside, list):
                head = _after_labels(inside, head)
                begin = position - len(head)
            match = None if inside is None or re.search(r"\benum\b", head) else _HEAD.search(re.sub(r"\s+", " ", head))
            if match:
                stack.append([match.group(2), line, match.group(1) != "class", 0, 0, 0])
                begin = position + 1
            elif inside == "namespace" and re.search(r"\bnamespace\b[^()=]*$|extern \"\"\s*$", head):
                stack.append("namespace")
                begin = position + 1
            else:
                stack.append(None)
        elif char == "}":
            if not stack:
                return
            closed = stack.pop()
            if isinstance(closed, list):
                yield Class(closed[0], closed[1], *closed[3:])
            if closed is not None:
                begin = position + 1
            elif isinstance(inside := stack[-1] if stack else "namespace", list):
                head = text[begin:position + 1]
                ends = head.count("(") == head.count(")") and not re.match(r"\s*[;,{]", text[position + 1:position + 200])
                if ends and "(" in _plain(_without(head, "{", "}")).split("=")[0]:  # a function's body ends its declaration
                    _count(inside, head)
                    begin = position + 1
            elif inside == "namespace" and not re.match(r"\s*[;,)]", text[position + 1:position + 40]):
                begin = position + 1
        elif char == ";" and inside is not None:
            if isinstance(inside, list):
                _count(inside, text[begin:position])
            begin = position + 1


def _after_labels(opened, statement):
    while match := _ACCESS.match(statement):
        opened[2] = match.group(1) == "public"
        statement = statement[match.end():]
    return statement


def _count(opened, statement):
    for place, more in enumerate(_declares(_after_labels(opened, statement), opened[2]), 3):
        opened[place] += more
