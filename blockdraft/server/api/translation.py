"""What the Responses and the Messages API share: both are translations of chat completions.

Way in: `Conversation` collects what a client says as the messages of a chat request; `ApiHost` answers it.
Way out: `AnswerParts` turns the pieces of the answer into parts, which these APIs stream one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from blockdraft.engine.request import Delta
from blockdraft.errors import RequestError
from blockdraft.server.api.chat.answers import ChatAnswer
from blockdraft.server.api.choices import AnswerPiece
from blockdraft.server.api.schemas import AnswerObject
from blockdraft.server.http.body import Nested

Message = dict[str, object]


# ---- the way in


class Conversation:
    """Collects messages: thoughts, text and calls of one turn of the model become one message."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.messages = list(messages)
        self._called = {call_id for message in self.messages for call_id in _call_ids(message)}

    def has_called(self, call_id: str) -> bool:
        """Whether a result for this call can follow."""
        return call_id in self._called

    def say(self, role: str, text: str) -> None:
        """A message of any role but the model's."""
        self.messages.append({"role": role, "content": text})

    def add_user(self, text: str) -> None:
        """A user's message; two in a row become one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "user":
            self.messages[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
        else:
            self.say("user", text)

    def think(self, text: str) -> None:
        self._turn({"content", "tool_calls", "reasoning_content"})["reasoning_content"] = text

    def answer(self, text: str) -> None:
        """Text of the model."""
        self._turn({"content", "tool_calls"})["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool call of the model; `arguments` are JSON."""
        self._called.add(call_id)
        turn = self._turn(set())
        before = turn.get("tool_calls", ())
        assert isinstance(before, list | tuple)
        function = {"name": name, "arguments": arguments}
        turn["tool_calls"] = [*before, {"id": call_id, "type": "function", "function": function}]

    def result(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _turn(self, ended_by: set[str]) -> Message:
        """The model's last message, or a new one if that already has one of the fields `ended_by`."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not ended_by & last.keys():
            self.messages[-1] = {**last}  # the old one may be kept elsewhere: nobody changes a message
        else:
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def rendered(self, instructions: str | None = None) -> list[Message]:
        """The messages for a chat template: at most one system message in front, and no content missing.

        Many templates accept a system message in the first place only, so leading ones are joined.
        Raises RequestError if there is no message.
        """
        messages = [{**message, "content": message.get("content", "")} for message in self.messages]
        ahead = [] if not instructions else [instructions]
        while messages and messages[0]["role"] in ("system", "developer"):
            ahead.append(str(messages.pop(0)["content"]))
        first: list[Message] = [{"role": "system", "content": "\n\n".join(ahead)}] if ahead else []
        if not first and not messages:
            raise RequestError("'messages' hold no text for the model: send some.", "messages")
        return first + messages


def _call_ids(message: Message) -> Iterator[str]:
    calls = message.get("tool_calls", ())
    assert isinstance(calls, list | tuple)
    yield from (call["id"] for call in calls)


def function_tool(tool: Nested, name: str, parameters: object) -> dict[str, object]:
    """A function in the shape of chat completions."""
    function: dict[str, object] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    if "description" in tool:
        function["description"] = tool.text("description")
    if "strict" in tool:
        function["strict"] = tool.flag("strict", default=False)
    return {"type": "function", "function": function}


# ---- the way out


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer: thoughts, text or a tool call, whose text is its arguments."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    is_whole: bool = False  # it is over, and was not cut off
    added: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.added)


class PartChange(NamedTuple):
    """A change of a part: it opens, gets more text, or closes."""

    what: Literal["open", "add", "close"]
    part: AnswerPart
    text: str = ""


class AnswerParts:
    """The parts of one answer, made of its pieces. Only the last part can be open."""

    def __init__(self) -> None:
        self.all: list[AnswerPart] = []
        self._is_open = False

    def push(self, piece: AnswerPiece) -> Iterator[PartChange]:
        """The changes in the order in which the model wrote them."""
        for span in piece.spans:
            if span.call is None:
                yield from self._add(span.kind, span.text)
                continue
            if span.call.id is not None:
                opened = AnswerPart("call", len(self.all), call_id=span.call.id, name=span.call.name or "")
                yield from self._open(opened)
            yield from self._add("call", span.call.arguments)
        if piece.finish_reason is not None:
            yield from self._close(is_whole=piece.finish_reason != "length")

    def add_empty_text(self) -> Iterator[PartChange]:
        """For an answer that must have a part."""
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


class PartsWriter(ABC):
    """Writes an answer part by part: the base of the writers of both APIs."""

    def __init__(self, head: AnswerObject, chat: ChatAnswer) -> None:
        self._head = head
        self._chat = chat
        self._parts = AnswerParts()
        self._has_begun = False

    def take(self, prompt: int, delta: Delta) -> None:
        self._changes(delta)

    def event(self, prompt: int, delta: Delta) -> str | None:
        begin = "" if self._has_begun else self._begin()
        self._has_begun = True
        return (begin + "".join(map(self._written, self._changes(delta)))) or None

    @property
    def _last(self) -> AnswerPiece:
        return self._chat.first_choice.pieces[-1]

    def _changes(self, delta: Delta) -> list[PartChange]:
        self._chat.take(0, delta)
        return list(self._parts.push(self._last))

    @abstractmethod
    def _begin(self) -> str:
        """The events in front of the first part."""

    @abstractmethod
    def _written(self, change: PartChange) -> str:
        """The events of a change."""
