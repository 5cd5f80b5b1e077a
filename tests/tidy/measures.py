"""How large the tree is: lines of production code and of tests, and the largest folder, file and function of production code."""
import os
from collections import Counter


def _lines(tree, paths):
    return sum(len(tree.text(p).splitlines()) for p in paths)


# What a file has to have because it is a file of its own is not code: it grows with the number of files, not with what they do.
_NOT_CODE = ("//", "#include", "#pragma once", "namespace ", "}  // namespace", "/*", "*")


def _code_lines(tree, paths):
    stripped = (line.strip() for p in paths for line in tree.text(p).splitlines())
    return sum(1 for line in stripped if line and not line.startswith(_NOT_CODE))


def _is_script(tree, path):
    return "." not in os.path.basename(path) and tree.lines(path)[0].startswith("#!")


def _spread(sizes):
    sizes = sorted(sizes)
    return f"median {sizes[len(sizes) // 2]}, p90 {sizes[len(sizes) * 9 // 10]}, max {sizes[-1]}"


def text(tree, library, sources):
    """Hand-written sources only: what is generated (.ptx), data, build files and text for people are not counted."""
    production = [p for p in tree.paths if p.split("/")[0] in library and p.endswith(sources)]
    tests = [p for p in tree.paths if p.startswith("tests/") and (p.endswith(sources) or _is_script(tree, p))]
    of_production, of_tests = _lines(tree, production), _lines(tree, tests)
    folders = Counter(os.path.dirname(p) for p in tree.paths if p.split("/")[0] in library)
    files = {p: _lines(tree, [p]) for p in production}
    functions = {f"{name} ({p}:{first})": last - first + 1 for p in production for first, last, name in tree.functions(p)}
    result = [f"production lines         {of_production}", f"  of them code           {_code_lines(tree, production)}", f"test lines               {of_tests}",
              f"tests : production       {of_tests / of_production:.2f}"]
    for what, sizes in (("files in a folder", folders), ("lines of a file", files), ("lines of a function", functions)):
        result.append(f"{what:24} {_spread(sizes.values())}: {max(sizes, key=sizes.get)}")
    kinds = Counter()
    for p in production:
        kinds[os.path.splitext(p)[1]] += files[p]
    result.append("production by kind       " + ", ".join(f"{kind} {lines}" for kind, lines in kinds.most_common()))
    return "\n".join(result)
