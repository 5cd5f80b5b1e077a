"""The rule for names: a verb of daily life (look, keep, stand, tell, hear, settle, lead) names no type and no function, because it has a meaning in
each room. What rooms have of them is counted, and the count may only fall."""
import re

import classes
import functions

_DAILY = re.compile(r"(?:Look(?:s|ed|ing)?(?!Ups?(?![a-z]))|Keep(?:s|ing)?|Kept|Rests?|Stands?|Standing|Tell(?:s|ing)?|Told|Hear(?:s|d|ing)?|Settle[sd]?|Leads?|Leader|LetIn)(?![a-z])")
# Of each room, from when the rule came. A room that is not here has none. Of statemachine: Kept, a term, and MemberHeard, a kind of event that
# journals name.
CEILINGS = {"journal": 2, "ncclpatch/hook": 5, "ncclpatch/intercept": 3, "ncclpatch/nccl": 6, "ncclpatch/runtime": 9,
            "replay/control": 12, "replay/cycle": 19, "replay/driver": 5, "replay/driver/cuda": 5,
            "replay/driver/simulator": 4, "replay/freeze": 2, "replay/job": 2, "replay/peers": 8, "replay/peers/unix": 20,
            "replay/report": 6, "replay/rerun": 1, "replay/session": 5, "statemachine": 12}


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
            if _DAILY.search(name):
                found.setdefault(name, (path, line))
    return found


def by_room(tree, library, room_of):
    rooms = {}
    for path in [p for p in tree.paths if p.split("/")[0] in library and p.endswith((".h", ".cpp"))]:
        rooms.setdefault(room_of(path), []).append(path)
    return {room: daily(tree, paths) for room, paths in rooms.items()}


def names_are_of_the_field(tree, library, room_of):
    for room, found in by_room(tree, library, room_of).items():
        most = CEILINGS.get(room, 0)
        if len(found) > most:
            for name, (path, line) in sorted(found.items()):
                yield path, line, f"{name}: {room} has {len(found)} names with a verb of daily life, of at most {most}; say what it does in words of the field"
