"""How much of a JSON schema a format's own grammar can bind, where llguidance's JSON grammar does not apply.

Keywords that a grammar cannot bind are refused for strict tools. For other tools the call is checked when it
is complete (tool_calls/checking.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from blockdraft.errors import RequestError
from blockdraft.grammar.limits import MAX_GRAMMAR_CHARS
from blockdraft.tool_calls.checking import FORMATS, problem_of
from blockdraft.tool_calls.lark import text_pattern
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.schemas import Flat, Part, Schemas, listed, named, values_of

# Keywords that no grammar of ours binds.
_NEVER = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains", "propertyNames"),
    *("patternProperties", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)


class Lines:
    """The rules of a grammar, bounded in size."""

    def __init__(self, tool: FunctionTool) -> None:
        self.all: list[str] = []
        self._tool = tool
        self._num_chars = 0

    def add(self, line: str) -> None:
        self._num_chars += len(line)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"the schema of the function '{self._tool.name}' makes a grammar of more than "
                f"{MAX_GRAMMAR_CHARS} characters: make the schema smaller.",
                "tools",
            )
        self.all.append(line)


def refuse_unbound(tool: FunctionTool, names: Iterable[str], format_name: str) -> None:
    """RequestError for a strict tool if there are such keywords."""
    found = ", ".join(f"'{name[:64]}'" for name in sorted(set(names)))
    if found and tool.is_strict:
        raise RequestError(
            f"the function '{tool.name}' is strict, and a call in this model's format ({format_name}) cannot "
            f"be bound to {found} of its schema: leave that out, or set 'strict' to false.",
            "tools",
        )


def no_value(tool: FunctionTool, why: str) -> RequestError:
    """The error for a schema that nothing can have."""
    return RequestError(f"no arguments can match the schema of the function '{tool.name}': {why}.", "tools")


def unbound(flat: Flat) -> set[str]:
    """Keywords of a schema that no grammar of ours can bind."""
    keywords = flat.keywords
    if values_of(keywords) is not None:
        return set(flat.lost | ({"pattern"} & keywords.keys()))  # the values are checked one by one
    found = {name for name in _NEVER if name in keywords} | flat.lost
    if keywords.get("uniqueItems") is True and keywords.get("maxItems") not in (0, 1):
        found.add("uniqueItems")
    least, most = keywords.get("minProperties", 0), keywords.get("maxProperties")
    if isinstance(least, int | float) and least > len(set(map(str, listed(keywords, "required")))):
        found.add("minProperties")
    properties = named(keywords, "properties")
    if isinstance(most, int | float) and (most < len(properties) or not properties):
        found.add("maxProperties")
    if "format" in keywords and keywords.get("type", "string") in ("string", ["string", "null"]):
        found |= {"format"} - ({"format"} if keywords["format"] in FORMATS else set())
    return found


def bound_values(flat: Flat, schemas: Schemas) -> list[object] | None:
    """The values that a schema lists, without those that its other keywords forbid; None: it lists none."""
    values = values_of(flat.keywords)
    if values is None:
        return None
    listing = "enum" if "const" not in flat.keywords else "const"
    others = {name: value for name, value in flat.keywords.items() if name != listing}
    return [value for value in values if problem_of(value, others, schemas) is None] if others else values


def text_patterns(keywords: Part) -> list[str]:
    """Regexes, without slashes around them, which a string must all match."""
    patterns = [text_pattern({"pattern": keywords["pattern"]})] if "pattern" in keywords else []
    if "minLength" in keywords or "maxLength" in keywords:
        patterns.append(text_pattern({name: keywords.get(name) for name in ("minLength", "maxLength")}))
    pattern = FORMATS.get(str(keywords.get("format")))
    if pattern is not None:
        patterns.append(text_pattern({"pattern": f"^{pattern}$"}))
    return patterns or [text_pattern(None)]


def terminal(patterns: Iterable[str]) -> str:
    """The right side of a terminal that matches them all."""
    return " & ".join(f"/{pattern}/" for pattern in patterns)


def overlap(choices: list[object], schemas: Schemas) -> bool:
    """Whether a value may have two of the schemas, as far as can be seen."""
    taken: set[str] = set()
    for choice in choices:
        marks = _marks(choice, schemas)
        if not marks or marks & taken:
            return True
        taken |= marks
    return False


def _marks(choice: object, schemas: Schemas) -> set[str]:
    """Values of two schemas that have no mark in common are different."""
    keywords = schemas.flat(choice).keywords
    values = values_of(keywords)
    if values is not None:
        return {f"value {value!r}" for value in values}
    for name in sorted(str(one) for one in listed(keywords, "required")):
        constants = values_of(schemas.flat(named(keywords, "properties").get(name)).keywords)
        if constants is not None:
            return {f"{name} {value!r}" for value in constants}
    types = schemas.types(choice)
    return {"number" if kind == "integer" else kind for kind in types}
