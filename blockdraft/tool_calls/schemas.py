"""JSON schemas of tools with references followed and `allOf` merged.

A client may send a schema that takes very long to follow. Steps are therefore counted, and after a limit
every part counts as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

Part = Mapping[str, object]

STEPS_PER_NODE = 4  # usual schemas need one; a step takes some 10 microseconds
MAX_STEPS = 20_000  # arbitrary
READ_STEPS = 4096  # to read one call; arbitrary
_NOTHING: Part = {"not": {}}  # the schema `false`
# Keywords that decide which values are valid. All others are ignored, also when schemas are compared.
_MEANT = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "not", "if", "then", "else", "format", "pattern"),
        *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("multipleOf", "items", "additionalItems", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "properties", "required", "additionalProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"),
        "$recursiveRef",
    }
)
_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_MEMBERS = ("properties", "patternProperties")
_TYPES_BY_KEYWORD = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


class Flat(NamedTuple):
    """A schema without `$ref` and `allOf`."""

    key: frozenset[int]  # equal for schemas that are made of the same parts
    keywords: Part
    lost: frozenset[str] = frozenset()  # keywords that `keywords` does not express


ANYTHING = Flat(frozenset(), {})
UNKNOWN = Flat(frozenset(), {}, frozenset({"$ref"}))


class Schemas:
    """One schema and the parts in it."""

    def __init__(self, root: Part, max_steps: int = READ_STEPS) -> None:
        self.root = root
        self._known: dict[frozenset[int], Flat] = {}
        self._found: dict[int, Flat] = {}  # by the id() of a schema
        self._kept: list[Part] = []  # keeps parts alive: keys are made of their ids
        self._num_left = max_steps

    def flat(self, schema: object) -> Flat:
        if not isinstance(schema, Mapping):
            return ANYTHING if schema is not False else self._flat({"allOf": [False]})
        if id(schema) not in self._found:
            self._found[id(schema)] = self._flat(schema)
            self._kept.append(schema)
        return self._found[id(schema)]

    def _flat(self, schema: Part) -> Flat:
        parts: dict[int, Part] = {}
        is_known = self._collect(schema, parts)
        if not parts:
            return ANYTHING if is_known else UNKNOWN
        key = frozenset(parts)
        if key not in self._known:
            self._kept += parts.values()
            values = (value for part in parts.values() for value in part.values())
            size = sum(len(value) for value in values if isinstance(value, Mapping | list))
            self._num_left -= size if len(parts) > 1 else 0
            self._known[key] = _merged(key, list(parts.values()))
        found = self._known[key]
        return found if is_known else found._replace(lost=found.lost | UNKNOWN.lost)

    def _collect(self, schema: object, parts: dict[int, Part]) -> bool:
        """Add all schemas that must hold together to `parts`; return False if one is unknown or too many."""
        waiting, followed, is_known = [schema], set[str](), True
        while waiting:
            part = waiting.pop()
            self._num_left -= 1
            if self._num_left < 0:
                return False
            if part is False:
                parts[id(_NOTHING)] = _NOTHING
            if not isinstance(part, Mapping) or id(part) in parts:
                continue
            if not _MEANT.isdisjoint(part):
                parts[id(part)] = part
            waiting.extend(reversed(listed(part, "allOf")))
            ref = part.get("$ref")
            if isinstance(ref, str) and ref not in followed:
                followed.add(ref)
                target = find_reference(self.root, ref)
                is_known = is_known and target is not None
                waiting.append(target)
        return is_known

    def types(self, schema: object) -> frozenset[str]:
        """Return the JSON types that a schema allows; empty if it does not restrict them."""
        found: set[str] = set()
        waiting, seen = [schema], set[frozenset[int]]()
        while waiting:
            flat = self.flat(waiting.pop())
            choices = [*listed(flat.keywords, "anyOf"), *listed(flat.keywords, "oneOf")]
            own = _own_types(flat.keywords)
            if own or not choices:
                if not own:
                    return frozenset()
                found |= own
            elif flat.key not in seen:
                seen.add(flat.key)
                waiting.extend(choices)
        return frozenset(found)

    def member(self, schema: object, name: str) -> object:
        """Return the schema of an object's member; None if it may be anything."""

        def step(keywords: Part) -> object:
            rest = keywords.get("additionalProperties")
            return named(keywords, "properties").get(name, rest if isinstance(rest, Mapping) else None)

        return self._below(schema, step)

    def item(self, schema: object, place: int) -> object:
        """Return the schema of a list's item; None if it may be anything."""

        def step(keywords: Part) -> object:
            found = [*first_items(keywords)[place : place + 1], other_items(keywords)][0]
            return found if isinstance(found, Mapping) else None

        return self._below(schema, step)

    def _below(self, schema: object, step: Callable[[Part], object]) -> object:
        """Return the result of `step` for a schema; if it is None, the results for its alternatives."""
        flat = self.flat(schema)
        found = step(flat.keywords)
        if found is not None:
            return found
        choices = [*listed(flat.keywords, "anyOf"), *listed(flat.keywords, "oneOf")]
        below = [step(self.flat(choice).keywords) for choice in choices]
        known = [one for one in below if one is not None]
        return {"anyOf": known} if len(known) > 1 else known[0] if known else None


def for_grammar(root: Part) -> Schemas:
    """Return a schema with a step limit that grows with the number of its parts."""
    num_nodes, waiting = 0, list[object]([root])
    while waiting:
        part = waiting.pop()
        num_nodes += 1
        if isinstance(part, Mapping | list):
            waiting.extend(part.values() if isinstance(part, Mapping) else part)
    return Schemas(root, min(MAX_STEPS, STEPS_PER_NODE * num_nodes))


def listed(schema: Part, name: str) -> list[object]:
    """Return the value of a keyword if it is a list, else an empty list."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


def named(schema: Part, name: str) -> Part:
    """Return the value of a keyword if it is an object, else an empty one."""
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def first_items(schema: Part) -> list[object]:
    """Return the schemas of a list's first items; draft 4 lists them in `items`."""
    return listed(schema, "prefixItems") or listed(schema, "items")


def other_items(schema: Part) -> object:
    """Return the schema of a list's items after the first ones."""
    name = "additionalItems" if isinstance(schema.get("items"), list) else "items"
    return schema.get(name, True)


def values_of(schema: Part) -> list[object] | None:
    """Return the values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def find_reference(root: Part, ref: str) -> object:
    """Return the part of a schema that a reference names; None if it is not in the schema."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    part: object = root
    for step in ref.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and len(name) < 6 and int(name) < len(part):
            part = part[int(name)]
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _own_types(keywords: Part) -> set[str]:
    given = keywords.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {name for name in given if isinstance(name, str)}
    values = values_of(keywords)
    if values is not None:
        return set(map(type_of, values))
    if "anyOf" in keywords or "oneOf" in keywords:
        return set()
    # Such a schema also allows values of other types, but no author means that.
    return {kind for kind, names in _TYPES_BY_KEYWORD.items() if any(name in keywords for name in names)}


# ---- merging


def _merged(key: frozenset[int], parts: list[Part]) -> Flat:
    keywords: dict[str, object] = {}
    lost: set[str] = set()
    for part in parts:
        for name, value in part.items():
            if name not in _MEANT:
                continue
            if name not in keywords:
                keywords[name] = value
            elif keywords[name] != value:
                lost.update(_merge_one(keywords, name, value))
    if len(parts) > 1:
        lost.update(_closed_to_others(parts))
    return Flat(key, keywords, frozenset(lost))


def _merge_one(keywords: dict[str, object], name: str, value: object) -> Iterator[str]:
    """Merge `value` into the keyword `name`; yield the name if that is impossible."""
    old = keywords[name]
    if name in (*_LARGEST, *_SMALLEST) and isinstance(old, int | float) and isinstance(value, int | float):
        keywords[name] = max(old, value) if name in _LARGEST else min(old, value)
    elif name == "type":
        keywords[name] = _common_types(old, value)
    elif name == "enum" and isinstance(old, list) and isinstance(value, list):
        known = {json.dumps(one, sort_keys=True) for one in value}  # true is not 1, as it is in Python
        keywords[name] = [one for one in old if json.dumps(one, sort_keys=True) in known]
    elif name == "required" and isinstance(old, list) and isinstance(value, list):
        keywords[name] = list(dict.fromkeys(one for one in (*old, *value) if isinstance(one, str)))
    elif name in _MEMBERS and isinstance(old, Mapping) and isinstance(value, Mapping):
        both = {key: {"allOf": [old[key], value[key]]} for key in old.keys() & value.keys()}
        keywords[name] = {**old, **value, **both}
    elif name in ("items", "additionalProperties") and list not in (type(old), type(value)):
        keywords[name] = False if old is False or value is False else {"allOf": [old, value]}
    else:
        yield name


def _common_types(one: object, other: object) -> list[str]:
    first, second = (
        {*({given} if isinstance(given, str) else given if isinstance(given, list) else ())}
        for given in (one, other)
    )
    common = first & second
    if "integer" in first | second and "number" in first | second:
        common.add("integer")
    return sorted(common)


def _closed_to_others(parts: list[Part]) -> Iterator[str]:
    """Yield additionalProperties if a part forbids another's properties: no merged keyword expresses it."""
    names = {name for part in parts for name in named(part, "properties")}
    for part in parts:
        is_closed = part.get("additionalProperties", True) not in (True, {})
        if is_closed and len(names) > len(named(part, "properties")):
            yield "additionalProperties"
