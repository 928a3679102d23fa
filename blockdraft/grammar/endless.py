"""JSON schemas whose values would never end: llguidance takes them, and a model would write without end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from blockdraft.errors import RequestError

NOTHING = "nothing can have it."
MAX_REFERENCES = 64  # different ones in a schema; arbitrary: with more of them nobody looks


def check_end(schema: Mapping[str, object], field: str = "structured_outputs") -> None:
    """RequestError if every value would hold another one, and so on; `field` has the schema."""
    unsure = {ref: _target(schema, ref) for ref in _references(schema)}
    if not unsure or len(unsure) > MAX_REFERENCES:
        return
    ending: set[str] = set()
    while found := {ref for ref, part in unsure.items() if _can_end(part, ending)} - ending:
        ending |= found
    if not _can_end(schema, ending):
        why = f"{NOTHING} The JSON schema refers to itself without an end."
        raise RequestError(f"the form cannot be kept to: {why}", field)


def _references(schema: object) -> set[str]:
    """Those of the schema and of everything in it."""
    if isinstance(schema, list):
        return set().union(*map(_references, schema))
    if not isinstance(schema, Mapping):
        return set()
    ref = schema.get("$ref")
    return set().union([ref] if isinstance(ref, str) else [], *map(_references, schema.values()))


def _target(schema: Mapping[str, object], ref: str) -> object:
    """What a reference stands for; None: it leads out of the schema, or nowhere."""
    part: object = schema
    for step in ref.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, Mapping) else None
    return part if ref == "#" or ref.startswith("#/") else None


def _can_end(schema: object, ending: Collection[str]) -> bool:
    """Whether a value can, if references to `ending` can and others cannot."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return True
    if isinstance(ref := schema.get("$ref"), str) and ref not in ending:
        return False
    if not all(_can_end(part, ending) for part in [*_listed(schema, "allOf"), *_held(schema)]):
        return False
    choices = (_listed(schema, name) for name in ("anyOf", "oneOf"))
    return all(not parts or any(_can_end(part, ending) for part in parts) for parts in choices)


def _held(schema: Mapping[str, object]) -> Iterator[object]:
    """The schemas of what a value must hold."""
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, Mapping):
        names = (name for name in _listed(schema, "required") if isinstance(name, str))
        yield from (properties[name] for name in names if name in properties)
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int | float):
        first = _listed(schema, "prefixItems")
        yield from first[: int(least)]
        if least > len(first):
            yield schema.get("items")


def _listed(schema: Mapping[str, object], name: str) -> list[object]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
