"""Fields about tools: which the model may call, and whether it must."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Literal

from pydantic import Field

from blockdraft.errors import RequestError
from blockdraft.grammar.limits import MAX_GRAMMAR_CHARS
from blockdraft.server.api.fields import StrictFields, empty
from blockdraft.server.api.json_schemas import Schema
from blockdraft.tool_calls.pieces import FunctionTool

MAX_TOOLS = 1024  # arbitrary, as the next
MAX_SCHEMA_DEPTH = 48  # nested lists and objects in one schema

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionFields(StrictFields):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ToolField(StrictFields):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: FunctionFields

    @property
    def tool(self) -> FunctionTool:
        given = self.function
        return FunctionTool(given.name, given.description, given.parameters or {}, bool(given.strict))

    @property
    def shown(self) -> dict[str, object]:
        """Return the tool for a template, without `strict`, which is for the server."""
        given = self.function
        function: dict[str, object] = {"name": given.name}
        if given.description is not None:
            function["description"] = given.description
        if given.parameters is not None:
            function["parameters"] = given.parameters
        return {"type": "function", "function": function}


class FunctionName(StrictFields):
    """The name of a function."""

    name: str


class NamedChoice(StrictFields):
    """A function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictFields):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(StrictFields):
    """OpenAI's choice of some tools that may be called; the prompt still shows all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[list[ToolField], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class ToolFields(StrictFields):
    """All fields about tools."""

    tools: Tools = empty(list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode == "required"
        return isinstance(choice, NamedChoice) or choice == "required"

    @property
    def _chosen(self) -> list[str] | None:
        """Return the names of the tools that may be called; None if all may be."""
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            return [choice.function.name]
        if isinstance(choice, AllowedChoice):
            return [one.function.name for one in choice.allowed_tools.tools]
        return [] if choice == "none" else None

    @property
    def callable_tools(self) -> tuple[FunctionTool, ...]:
        """Return the tools that the model may call."""
        if not self.tools:
            return ()
        chosen = self._chosen
        return tuple(one.tool for one in self.tools if chosen is None or one.function.name in chosen)

    def check_tools(self) -> None:
        """Raise RequestError for schemas that are too large, and for missing or repeated names."""
        if not self.tools and self.tool_choice in ("none", "auto"):
            return
        self._check_sizes()
        counts = Counter(one.function.name for one in self.tools)
        for name, count in counts.items():
            if count > 1:
                raise RequestError(
                    f"'tools' holds '{name}' {count} times: give each a name of its own.", "tools"
                )
        for name in self._chosen or ():
            if name not in counts:
                raise RequestError(
                    f"'tool_choice' is '{name[:64]}', which is not one of 'tools'.", "tool_choice"
                )
        if self.must_call and not self.tools:
            raise RequestError(
                "'tool_choice' demands a call, but there are no 'tools': send some.", "tool_choice"
            )

    def _check_sizes(self) -> None:
        num_chars = 0
        for one in self.tools:
            schema = one.function.parameters or {}
            if _depth(schema) > MAX_SCHEMA_DEPTH:
                raise RequestError(
                    f"'tools': the schema of '{one.function.name}' nests deeper than {MAX_SCHEMA_DEPTH} "
                    "levels: flatten it, or use '$defs'.",
                    "tools",
                )
            num_chars += len(json.dumps(schema))
        if num_chars > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"'tools': the schemas have {num_chars} characters together, more than "
                f"{MAX_GRAMMAR_CHARS} characters: send fewer or smaller tools.",
                "tools",
            )


def _depth(schema: object) -> int:
    """Return the depth of nested lists and objects. The body's size limits the time that this takes."""
    depth, level = 0, [schema]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
    return depth
