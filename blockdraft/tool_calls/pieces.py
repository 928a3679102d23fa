"""Tools, and the pieces that readers of tool calls return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    is_strict: bool = False  # its arguments must match the schema


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """The part of a tool call that one step adds. Only the first piece has an id and a name."""

    index: int  # the call's number in the answer
    id: str | None
    name: str | None
    arguments: str  # the next characters of a JSON object


class Span(NamedTuple):
    """Some thoughts, some text, or a piece of a call."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCallPiece | None = None
