"""An answer as a row of parts: thoughts, text, calls of tools. The newer APIs stream them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, NamedTuple

from blockdraft.server.choices import AnswerPiece


@dataclass(slots=True)
class AnswerPart:
    """One part. A call has an id and a name; its text is its arguments."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    is_whole: bool = False  # nothing comes any more, and nothing was cut off
    added: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.added)


class PartChange(NamedTuple):
    """What one step does to a part: a new one, more text for it, or its end."""

    what: Literal["open", "add", "close"]
    part: AnswerPart
    text: str = ""


class AnswerParts:
    """The parts of one answer as its pieces come in. Only the last one can be open."""

    def __init__(self) -> None:
        self.all: list[AnswerPart] = []
        self._is_open = False

    def push(self, piece: AnswerPiece) -> Iterator[PartChange]:
        """What goes on with the open part comes first; else thoughts, text, and then calls."""
        going_on = list(takewhile(lambda call: call.id is None, piece.tool_calls))
        for call in going_on:
            yield from self._add("call", call.arguments)
        if self._is_open_as("text") and piece.text:
            yield from self._add("text", piece.text)
            yield from self._add("reasoning", piece.reasoning)
        else:
            yield from self._add("reasoning", piece.reasoning)
            yield from self._add("text", piece.text)
        for call in piece.tool_calls[len(going_on) :]:
            if call.id is not None:
                yield from self._open(
                    AnswerPart("call", len(self.all), call_id=call.id, name=call.name or "")
                )
            yield from self._add("call", call.arguments)
        if piece.finish_reason is not None:
            yield from self._close(is_whole=piece.finish_reason != "length")

    def empty_text(self) -> Iterator[PartChange]:
        """A text without words, where an answer must have something."""
        yield from self._open(AnswerPart("text", len(self.all)))
        yield from self._close(is_whole=True)

    def _is_open_as(self, kind: str) -> bool:
        return self._is_open and self.all[-1].kind == kind

    def _add(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[PartChange]:
        if not text:
            return
        if not self._is_open_as(kind):
            yield from self._open(AnswerPart(kind, len(self.all)))
        self.all[-1].added.append(text)
        yield PartChange("add", self.all[-1], text)

    def _open(self, part: AnswerPart) -> Iterator[PartChange]:
        yield from self._close(is_whole=True)
        self.all.append(part)
        self._is_open = True
        yield PartChange("open", part)

    def _close(self, *, is_whole: bool) -> Iterator[PartChange]:
        if self._is_open:
            self.all[-1].is_whole = is_whole
            self._is_open = False
            yield PartChange("close", self.all[-1])
