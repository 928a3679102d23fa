"""Binds calls to JSON schemas in formats that are not JSON, where llguidance's JSON grammar does not apply.

Keywords that a grammar cannot bind are refused for strict tools. For other tools the call is checked when it
is complete (tool_calls/checking.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blockdraft.errors import RequestError
from blockdraft.grammar.limits import MAX_GRAMMAR_CHARS
from blockdraft.tool_calls.checking import FORMATS, problem_of
from blockdraft.tool_calls.lark import text_pattern
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.schemas import Flat, Part, Schemas, listed, named, values_of

# Keywords that our grammars never bind.
_NEVER = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains", "propertyNames"),
    *("patternProperties", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)


class ToolRules:
    """The grammar rules of one tool, limited in size, and the keywords that they leave unbound."""

    def __init__(self, tool: FunctionTool, schemas: Schemas) -> None:
        self.lines: list[str] = []
        self._tool, self._schemas = tool, schemas
        self._unbound: set[str] = set()
        self._num_chars = 0

    def _add(self, *lines: str) -> None:
        self.lines += lines
        self._num_chars += sum(map(len, lines))
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"the schema of the function '{self._tool.name}' makes a grammar of more than "
                f"{MAX_GRAMMAR_CHARS} characters: make the schema smaller.",
                "tools",
            )

    def _choices(self, keywords: Part) -> list[object]:
        """Return the alternatives of a schema, each with its other keywords; empty if it has none."""
        name = next((one for one in ("anyOf", "oneOf") if listed(keywords, one)), "anyOf")
        choices = listed(keywords, name)
        if name == "oneOf" and overlap(choices, self._schemas):
            self._unbound.add(name)
        beside = {key: value for key, value in keywords.items() if key != name}
        return [{"allOf": [beside, choice]} for choice in choices]

    def _values(self, flat: Flat, can_write: Callable[[object], bool]) -> list[object] | None:
        """Return the values that a schema lists and the format can write; None if it lists none."""
        values = bound_values(flat, self._schemas)
        if values is None:
            return None
        written = list(filter(can_write, values))
        self._unbound |= {"enum"} if len(written) < len(values) else set()
        if not written:
            raise self._no_value("'enum' leaves no value")
        return written

    def _no_value(self, why: str) -> RequestError:
        name = self._tool.name
        return RequestError(f"no arguments can match the schema of the function '{name}': {why}.", "tools")

    def _refuse_unbound(self, format_name: str) -> None:
        """Raise RequestError if the tool is strict and the grammar leaves keywords unbound."""
        found = ", ".join(f"'{name[:64]}'" for name in sorted(self._unbound))
        if found and self._tool.is_strict:
            raise RequestError(
                f"the function '{self._tool.name}' is strict, and a call in this model's format "
                f"({format_name}) cannot be bound to {found} of its schema: leave that out, or set 'strict' "
                "to false.",
                "tools",
            )


def unbound(flat: Flat) -> set[str]:
    """Return the keywords of a schema that our grammars cannot bind."""
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
    """Return the listed values that the other keywords allow; None if the schema lists no values."""
    values = values_of(flat.keywords)
    if values is None:
        return None
    listing = "enum" if "const" not in flat.keywords else "const"
    others = {name: value for name, value in flat.keywords.items() if name != listing}
    return [value for value in values if problem_of(value, others, schemas) is None] if others else values


def text_patterns(keywords: Part) -> list[str]:
    """Return regexes, without slashes around them; a string must match all of them."""
    patterns = [text_pattern({"pattern": keywords["pattern"]})] if "pattern" in keywords else []
    if "minLength" in keywords or "maxLength" in keywords:
        patterns.append(text_pattern({name: keywords.get(name) for name in ("minLength", "maxLength")}))
    pattern = FORMATS.get(str(keywords.get("format")))
    if pattern is not None:
        patterns.append(text_pattern({"pattern": f"^{pattern}$"}))
    return patterns or [text_pattern(None)]


def terminal(patterns: Iterable[str]) -> str:
    """Return the right side of a terminal rule that matches all patterns."""
    return " & ".join(f"/{pattern}/" for pattern in patterns)


def overlap(choices: list[object], schemas: Schemas) -> bool:
    """Return False only if it is certain that no value matches two of the schemas."""
    taken: set[str] = set()
    for choice in choices:
        marks = _marks(choice, schemas)
        if not marks or marks & taken:
            return True
        taken |= marks
    return False


def _marks(choice: object, schemas: Schemas) -> set[str]:
    """Return marks of a schema, or none if unknown. Two schemas without a common mark share no value."""
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
