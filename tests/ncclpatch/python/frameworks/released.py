"""A project's released sources, as AMem's adapters rely on them: read with ast, nothing of the project is imported.

A contract is a fact of one of three sorts, by the file and the name that it is about:
    signatures   of a function: "(self, level=)", where "=" marks a default; "async (...)" of a coroutine; "property"; of a class: its bases
    constants    the value of a name at the top of a file
    calls        calls that a function makes, in this order, among others: "torch.distributed.barrier", or with a constant first
                 argument "self.rollout.resume(kv_cache)"
"""
import ast
import json
import os
import re
import zipfile

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "contracts.json")


def table():
    with open(TABLE, encoding="utf-8") as file:
        return json.load(file)


class Release:
    """The Python files of one release: a wheel, or a folder that has what a wheel would have."""

    def __init__(self, path):
        self.path, self._trees = path, {}
        self._wheel = zipfile.ZipFile(path) if os.path.isfile(path) else None

    def text(self, path):
        if self._wheel:
            inside = {re.sub(r"^[^/]+\.data/purelib/", "", name): name for name in self._wheel.namelist()}  # where a wheel may put its packages
            return self._wheel.read(inside.get(path, path)).decode()
        with open(os.path.join(self.path, path), encoding="utf-8") as file:
            return file.read()

    def tree(self, path):
        if path not in self._trees:
            self._trees[path] = ast.parse(self.text(path))
        return self._trees[path]

    def node(self, path, name):
        """The definition of "function", "Class" or "Class.method", also one under an `if` or `try` at the top."""
        body = self.tree(path).body
        for part in name.split("."):
            found = next((node for node in _definitions(body) if node.name == part), None)
            if found is None:
                raise LookupError("%s has no %s" % (path, name))
            body = found.body
        return found

    def define(self, path, name, names):
        """Runs one definition out of its file, with `names` for all that it refers to, and returns it. Annotations are not evaluated."""
        module = ast.Module([ast.parse("from __future__ import annotations").body[0], self.node(path, name)], [])
        exec(compile(module, path, "exec"), names)  # pylint: disable=exec-used
        return names[name.split(".")[-1]]

    def fact(self, sort, path, name):
        """What a contract of this sort says of the release; None where the file or the name is missing."""
        try:
            return {"signatures": self._signature, "constants": self._constant, "calls": self._calls}[sort](path, name)
        except (LookupError, OSError):
            return None

    def _signature(self, path, name):
        node = self.node(path, name)
        if isinstance(node, ast.ClassDef):
            return "class(%s)" % ", ".join(ast.unparse(base) for base in node.bases)
        decorators = {ast.unparse(one) for one in node.decorator_list}
        if "property" in decorators:
            return "property"
        return ("async " if isinstance(node, ast.AsyncFunctionDef) else "") + "(%s)" % ", ".join(_arguments(node.args))

    def _constant(self, path, name):
        for node in self.tree(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return json.loads(json.dumps(ast.literal_eval(node.value)))  # tuples are lists, as in the table
        raise LookupError(name)

    def _calls(self, path, name):
        found = [node for node in ast.walk(self.node(path, name)) if isinstance(node, ast.Call)]
        found.sort(key=lambda node: (node.end_lineno, node.end_col_offset))  # in the order in which they are made
        return [text for node in found for text in _call_texts(node)]


def _definitions(body):
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _definitions(node.body)


def _arguments(arguments):
    positional = arguments.posonlyargs + arguments.args
    without = len(positional) - len(arguments.defaults)
    found = [one.arg + ("=" if number >= without else "") for number, one in enumerate(positional)]
    if arguments.vararg:
        found.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        found.append("*")
    found += [one.arg + ("=" if default else "") for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return found + (["**" + arguments.kwarg.arg] if arguments.kwarg else [])


def _call_texts(node):
    """How a contract may name a call: by the function, and by the function with a constant that it is called with."""
    name = ast.unparse(node.func)
    yield name
    for value in [*node.args, *(one.value for one in node.keywords)]:
        values = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
        for one in values:
            if isinstance(one, ast.Constant):
                yield "%s(%s)" % (name, one.value)
            elif isinstance(one, ast.Name):
                yield "%s(%s)" % (name, one.id)


def in_order(wanted, found):
    """Whether `wanted` is a subsequence of `found`."""
    rest = iter(found)
    return all(any(one == other for other in rest) for one in wanted)


def differences(contract, release):
    """What of one project's contract does not hold for a release, as lines for people."""
    lines = []
    for path, facts in contract["files"].items():
        for sort, names in facts.items():
            for name, wanted in names.items():
                found = release.fact(sort, path, name)
                if found is None:
                    lines.append("%s: %s is missing" % (path, name))
                elif sort == "calls" and not in_order(wanted, found):
                    lines.append("%s: %s no longer calls, in this order: %s" % (path, name, ", ".join(wanted)))
                elif sort != "calls" and found != wanted:
                    lines.append("%s: %s is %s, and was %s" % (path, name, found, wanted))
    return lines
