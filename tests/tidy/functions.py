"""Finds the functions of a C++ file, so that their length can be checked without a compiler."""
import re

_SCOPE = re.compile(r"\b(namespace|class|struct|union|enum)\b|^extern \"\"$")
_LAMBDA = re.compile(r"(?<![\w\])])\s*\[[^\[\]]*\]\s*(\(\)|mutable|->|$)")


def without_preprocessor(lines):
    """Blanks directives and the lines that continue them; of an #if ... #else ... #endif only the first branch stays."""
    kept, skipped_until, continued, depth = [], None, False, 0
    for line in lines:
        directive = re.match(r"\s*#\s*(\w+)", line)
        is_directive = continued or directive is not None
        if directive and not continued:
            word = directive.group(1)
            if word.startswith("if"):
                depth += 1
            elif word in ("else", "elif") and skipped_until is None:
                skipped_until = depth
            elif word == "endif":
                if skipped_until == depth:
                    skipped_until = None
                depth -= 1
        continued = is_directive and line.rstrip().endswith("\\")
        kept.append("" if is_directive or skipped_until is not None else line)
    return kept


def _without_parentheses(head):
    """The text with the contents of its parentheses removed, attributes and template parameters too."""
    while True:
        shorter = re.sub(r"\([^()]+\)", "()", head)
        if shorter == head:
            break
        head = shorter
    head = re.sub(r"\b(alignas|__attribute__|CAPABILITY|decltype|requires|noexcept)\s*\(\)|\[\[[^\]]*\]\]", " ", head)
    head = re.sub(r"\boperator\s*(\(\)|\[\]|[^\s\w(]+)", "operator", head)
    head = re.sub(r"\b(public|private|protected)\s*:(?!:)", " ", head)
    while True:  # template<...>, whose defaults may hold an "="
        shorter = re.sub(r"\btemplate\s*<[^<>]*>|(?<=[<,\s])\w[\w:]*<[^<>]*>(?=[^{]*>)", " ", head)
        if shorter == head:
            return head.strip()
        head = shorter


def _kind(head):
    """What a brace opens after this text, where no function is open: "scope", "function" or "value"."""
    text = _without_parentheses(head)
    if "()" not in text:
        if _LAMBDA.search(text):
            return "function"
        return "scope" if _SCOPE.search(text) and "=" not in text else "value"
    if re.match(r"(class|struct|union|enum|namespace)\b[^()]*$", text):
        return "scope"
    if "=" in text and not _LAMBDA.search(text):
        return "value"
    initialisers = re.search(r"\)[^:]*(?<!:):(?!:)(.*)$", text, re.S)
    if initialisers and re.search(r"[\w>]\s*$", text):
        return "value"  # a member's own braces, the body is still to come
    return "function"


def functions(code):
    """Yields (first line, last line, name) of each function in these lines, whose comments and strings are blank.
    Lambdas and local classes belong to their function. Raises ValueError if the braces do not match."""
    text = "\n".join(without_preprocessor(code))
    stack, head_begin, line = [], 0, 1
    opened = None  # of the function that is open: (depth, first line, name)
    for position, char in enumerate(text):
        if char == "\n":
            line += 1
        if char == "{":
            if opened is None:
                head = text[head_begin:position]
                kind = _kind(head)
                blank = len(head) - len(re.sub(r"^(\s|(public|private|protected)\s*:(?!:))+", "", head))
                first = line - head[blank:].count("\n")
                stack.append(kind)
                if kind == "function":
                    name = re.search(r"([\w:~]+|operator\s*\S+)\s*\(", head)
                    opened = (len(stack), first, name.group(1) if name else "lambda")
                if kind != "value":
                    head_begin = position + 1
            else:
                stack.append("inside")
        elif char == "}":
            if not stack:
                raise ValueError(f"line {line} closes a brace that was not opened")
            kind = stack.pop()
            if opened and len(stack) + 1 == opened[0]:
                yield opened[1], line, opened[2]
                opened = None
            if kind != "value" and opened is None:
                head_begin = position + 1
        elif char == ";" and opened is None and "value" not in stack:
            head_begin = position + 1
    if stack:
        raise ValueError(f"{len(stack)} braces are not closed")


def found(code):
    """The same as a list; empty where the braces do not match, of which one rule is enough to speak."""
    try:
        return list(functions(code))
    except ValueError:
        return []
