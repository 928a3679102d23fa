"""Refuses JSON schemas whose values never end: llguidance accepts them, and a model would write forever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blockdraft.errors import RequestError

NOTHING = "nothing can match it."


@dataclass(slots=True)
class _Need:
    """A condition for a schema to end: at least one of several other schemas ends."""

    schema: int  # the id of the schema that needs it
    is_met: bool = False


def check_end(schema: Mapping[str, object], field: str = "structured_outputs") -> None:
    """Raise RequestError if every value of the schema nests without end. `field`: the schema's field."""
    if not _can_end(schema):
        why = f"{NOTHING} The JSON schema always refers to itself."
        raise RequestError(f"this structured output is not possible: {why}", field)


def _can_end(root: Mapping[str, object]) -> bool:
    """Say if some value of the schema is finite. Visit each schema and each need once."""
    missing: dict[int, int] = {}  # needs that are not met, by the id of the schema
    asked_by: defaultdict[int, list[_Need]] = defaultdict(list)
    ending: list[int] = []
    waiting: list[object] = [root]
    while waiting:
        schema = waiting.pop()
        if id(schema) in missing:
            continue
        needs = list(_needs(schema, root))
        missing[id(schema)] = len(needs)
        if not needs:
            ending.append(id(schema))
        for parts in needs:
            need = _Need(id(schema))
            waiting += parts
            for part in parts:
                asked_by[id(part)].append(need)
    while ending:
        for need in asked_by[ending.pop()]:
            if not need.is_met:
                need.is_met = True
                missing[need.schema] -= 1
                if missing[need.schema] == 0:
                    ending.append(need.schema)
    return missing[id(root)] == 0


def _needs(schema: object, root: Mapping[str, object]) -> Iterator[list[object]]:
    """Yield lists of schemas: a value of `schema` can end if, in each list, at least one schema can end."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return
    if isinstance(ref := schema.get("$ref"), str):
        yield [_target(root, ref)]
    for part in [*_listed(schema, "allOf"), *_held(schema)]:
        yield [part]
    for name in ("anyOf", "oneOf"):
        if parts := _listed(schema, name):
            yield parts


def _target(schema: Mapping[str, object], ref: str) -> object:
    """Return the schema that a reference names, or None if it leads out of the schema or nowhere."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    part: object = schema
    for step in ref.split("/")[1:]:
        if not isinstance(part, Mapping):
            return None
        part = part.get(step.replace("~1", "/").replace("~0", "~"))
    return part


def _held(schema: Mapping[str, object]) -> Iterator[object]:
    """Yield the schemas of all properties and items that a value must have."""
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, Mapping):
        names = (name for name in _listed(schema, "required") if isinstance(name, str))
        yield from (properties[name] for name in names if name in properties)
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int | float):
        first = _listed(schema, "prefixItems")
        yield from (part for place, part in enumerate(first) if place < least)
        if least > len(first):
            yield schema.get("items")


def _listed(schema: Mapping[str, object], name: str) -> list[object]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
