"""Types that are defined twice under one name: the linker keeps one of their functions, and the other's objects are damaged."""
import re

NAMESPACE = re.compile(r"\s*(?:inline )?namespace\s*([\w:]*)\s*\{")
TYPE = re.compile(r"\s*(?:struct|class|union|enum class|enum)\s+(?:\w+\([^)]*\)\s+)?(\w+)(?:\s+final)?\s*(?::[^:].*)?\{")


def types(lines, path):
    """(line number, name with its namespaces) of each type that a namespace holds; what is unnamed is of its file alone."""
    inside, depth = [], 0
    for number, line in enumerate(lines, 1):
        namespace, named = NAMESPACE.match(line), TYPE.match(line)
        if namespace:
            inside.append((namespace.group(1) or path, depth))
        elif named and len(inside) == depth:
            yield number, "::".join([name for name, _ in inside] + [named.group(1)])
        depth += line.count("{") - line.count("}")
        while inside and depth <= inside[-1][1]:
            inside.pop()


def a_type_has_one_definition(tree):
    first = {}
    for path in tree.library(".h", ".cpp", ".cu"):
        for number, name in types(tree.code(path), path):
            if "::" in name and first.setdefault(name, path) != path:
                yield path, number, f"{name} is defined in {first[name]} as well; give one of them another name"
