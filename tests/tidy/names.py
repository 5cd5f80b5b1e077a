"""The rule for names: a verb of daily life (look, keep, stand, tell, hear, settle, lead) names no type and no function, because it has a meaning in
each room. Kept is a term of the glossary: of memory that stays with the driver in a pause."""
import re

import classes
import functions

_DAILY = re.compile(r"(?:Look(?:s|ed|ing)?(?!Ups?(?![a-z]))|Keep(?:s|ing)?|Rests?|Stands?|Standing|Tell(?:s|ing)?|Told|Hear(?:s|d|ing)?|Settle[sd]?|Leads?|Leader|LetIn)(?![a-z])")
_OF_JOURNALS = {"MemberHeard"}  # a kind of event, which journals name


def daily(tree, paths):
    """{name: (path, line)} of the types and functions with such a name, where each comes first."""
    found = {}
    for path in paths:
        code = tree.code(path)
        names = [(one.name, one.line) for one in classes.classes(code)] + [(name, first) for first, _, name in functions.found(code)]
        if path.endswith(".h"):
            names += [(match.group(1), number) for number, line in enumerate(code, 1)
                      for match in re.finditer(r"\b([A-Z]\w+)\s*\([^;{}]*\)[^;{}]*;", line)]
        for name, line in names:
            name = name.split("::")[-1].lstrip("~")
            if _DAILY.search(name) and name not in _OF_JOURNALS:
                found.setdefault(name, (path, line))
    return found


def names_are_of_the_field(tree, library):
    paths = [path for path in tree.paths if path.split("/")[0] in library and path.endswith((".h", ".cpp"))]
    for name, (path, line) in sorted(daily(tree, paths).items()):
        yield path, line, f"{name}: a verb of daily life names no type and no function; say what it does in words of the field"
