#!/usr/bin/env python3
"""What the schemas of amem-replay use of JSON Schema, draft 2020-12. Where the package jsonschema is installed, its answer is
checked to be the same, once for each kind and set of fields, because it takes three times as long.

    json_schema.py SCHEMA < JSON      prints what is wrong; exit code 1 if anything is
"""
import json
import os
import re
import sys

try:
    import jsonschema
except ImportError:
    jsonschema = None

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
KNOWN = {"$schema", "$id", "$defs", "$ref", "title", "description", "type", "properties", "required", "items", "enum", "const", "pattern",
         "minimum", "additionalProperties", "allOf", "anyOf", "if", "then"}


def _is(value, name):
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


class Schema:
    """A schema from a file. A keyword that is not known here is an error, so that none is passed over in silence."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            self.root = json.load(file)
        self.name = os.path.basename(path)
        self._check_known(self.root)
        self._compared = set()

    def _check_known(self, schema):
        if schema in (True, False):
            return
        unknown = set(schema) - KNOWN
        assert not unknown, f"{self.name}: {unknown}"
        parts = [schema[key] for key in ("items", "additionalProperties", "if", "then") if key in schema]
        parts += [part for key in ("properties", "$defs") for part in schema.get(key, {}).values()]
        for part in parts + schema.get("allOf", []) + schema.get("anyOf", []):
            self._check_known(part)

    def problems(self, value):
        """What is wrong with the value, each with its place."""
        found = list(self._look(self.root, value, "$"))
        shape = (value.get("kind"), *((key, type(value[key])) for key in sorted(value))) if isinstance(value, dict) else type(value)
        if jsonschema is not None and (found or shape not in self._compared):
            self._compared.add(shape)
            other = [e.message for e in jsonschema.Draft202012Validator(self.root).iter_errors(value)]
            assert bool(found) == bool(other), (self.name, found, other)
        return found

    def _look(self, schema, value, place):
        if schema is True:
            return
        if "$ref" in schema:
            target = self.root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            yield from self._look(target, value, place)
        yield from self._simple(schema, value, place)
        if isinstance(value, dict):
            yield from self._object(schema, value, place)
        if isinstance(value, list) and "items" in schema:
            for i, element in enumerate(value):
                yield from self._look(schema["items"], element, f"{place}[{i}]")
        for part in schema.get("allOf", ()):
            yield from self._look(part, value, place)
        if "anyOf" in schema and all(any(True for _ in self._look(part, value, place)) for part in schema["anyOf"]):
            yield f"{place}: fits none of anyOf"
        if "if" in schema and not any(True for _ in self._look(schema["if"], value, place)):
            yield from self._look(schema.get("then", True), value, place)

    @staticmethod
    def _simple(schema, value, place):
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        if types and not any(_is(value, t) for t in types):
            yield f"{place}: {value!r} is no {' or '.join(types)}"
        if "const" in schema and value != schema["const"]:
            yield f"{place}: {value!r} is not {schema['const']!r}"
        if "enum" in schema and value not in schema["enum"]:
            yield f"{place}: {value!r} is none of {schema['enum']}"
        if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
            yield f"{place}: {value!r} does not match {schema['pattern']}"
        if "minimum" in schema and _is(value, "number") and value < schema["minimum"]:
            yield f"{place}: {value} is less than {schema['minimum']}"

    def _object(self, schema, value, place):
        for key in schema.get("required", ()):
            if key not in value:
                yield f"{place}: {key} is missing"
        properties = schema.get("properties", {})
        for key, part in value.items():
            if key in properties:
                yield from self._look(properties[key], part, f"{place}.{key}")
            elif "additionalProperties" in schema:
                other = schema["additionalProperties"]
                if other is False:
                    yield f"{place}: {key} is not described"
                else:
                    yield from self._look(other, part, f"{place}.{key}")


if __name__ == "__main__":
    FOUND = Schema(sys.argv[1]).problems(json.load(sys.stdin))
    print(*FOUND, sep="\n")
    sys.exit(1 if FOUND else 0)
