"""An answer as a row of parts: thoughts, text, calls of tools. The newer APIs stream them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from blockdraft.server.api.choices import AnswerPiece
from blockdraft.tool_calls.pieces import Span


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
        """The changes in the order in which the model wrote them."""
        for span in piece.spans or _usual_order(piece):
            if span.call is None:
                yield from self._add(span.kind, span.text)
                continue
            if span.call.id is not None:
                opened = AnswerPart("call", len(self.all), call_id=span.call.id, name=span.call.name or "")
                yield from self._open(opened)
            yield from self._add("call", span.call.arguments)
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


def _usual_order(piece: AnswerPiece) -> Iterator[Span]:
    """Of an answer that nobody searched for calls: thoughts, then text."""
    yield Span("reasoning", piece.reasoning)
    yield Span("text", piece.text)
