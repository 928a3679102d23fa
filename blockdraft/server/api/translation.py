"""The shared parts of the Responses and the Messages API, which are translated to chat completions.

Requests: `Conversation` collects a client's items as messages of a chat request; `ApiHost` answers it.
Answers: `PartsWriter` turns the pieces of the answer into parts, which these APIs stream one by one.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.engine.request import Delta
from blockdraft.errors import RequestError
from blockdraft.server.api.chat.answers import ChatAnswer
from blockdraft.server.api.chat.messages import calls_of
from blockdraft.server.api.choices import AnswerPiece
from blockdraft.server.api.schemas import AnswerObject
from blockdraft.server.api.streaming import Writer
from blockdraft.server.http.body import Nested

Message = dict[str, object]


# ---- requests


class Conversation:
    """Collects messages. Thoughts, text and calls of one turn of the model become one message."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.messages = list(messages)
        self._called = {call["id"] for message in self.messages for call in calls_of(message)}

    def has_called(self, call_id: str) -> bool:
        """Return whether the conversation has this call, so that a result may follow."""
        return call_id in self._called

    def say(self, role: str, text: str) -> None:
        """Add a message of any role except the model's."""
        self.messages.append({"role": role, "content": text})

    def add_user(self, text: str) -> None:
        """Add a user's message; join it to the last message if that is a user's, too."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "user":
            self.messages[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
        else:
            self.say("user", text)

    def think(self, text: str) -> None:
        self._turn({"content", "tool_calls", "reasoning_content"})["reasoning_content"] = text

    def answer(self, text: str) -> None:
        """Add text of the model."""
        self._turn({"content", "tool_calls"})["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call of the model; `arguments` are JSON."""
        self._called.add(call_id)
        turn = self._turn(set())
        function = {"name": name, "arguments": arguments}
        turn["tool_calls"] = [*calls_of(turn), {"id": call_id, "type": "function", "function": function}]

    def result(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _turn(self, ended_by: set[str]) -> Message:
        """Return the model's last message, or a new one if it already has one of the fields `ended_by`."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not ended_by & last.keys():
            self.messages[-1] = {**last}  # copied: stored responses may hold the old one
        else:
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def rendered(self, instructions: str | None = None) -> list[Message]:
        """Return the messages for a chat template. Each has a content.

        Leading system messages are joined, as many templates accept only one, in the first place.
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


def function_tool(tool: Nested, name: str, parameters: object) -> dict[str, object]:
    """Return a function in the shape of chat completions."""
    function: dict[str, object] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    if "description" in tool:
        function["description"] = tool.text("description")
    if "strict" in tool:
        function["strict"] = tool.flag("strict", default=False)
    return {"type": "function", "function": function}


# ---- answers


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer: thoughts, text or a tool call. A call's text is its arguments."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    is_whole: bool = False  # the part has ended and was not cut off
    added: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def text(self) -> str:
        return "".join(self.added)


class PartsWriter(Writer):
    """Writes an answer part by part; the base class of both APIs' writers."""

    def __init__(self, head: AnswerObject, chat: ChatAnswer) -> None:
        self._head = head
        self._chat = chat
        self._parts: list[AnswerPart] = []
        self._is_open = False  # whether the last part is open; all others are closed
        self._events: list[str] | None = None  # of the current delta; None if not streamed

    def take(self, prompt: int, delta: Delta) -> None:
        self._push(delta)

    def event(self, prompt: int, delta: Delta) -> str | None:
        self._events = [self._begin()] if self._events is None else []
        self._push(delta)
        return "".join(self._events) or None

    @property
    def _last(self) -> AnswerPiece:
        return self._chat.first_choice.pieces[-1]

    def _push(self, delta: Delta) -> None:
        """Add a delta's spans to the parts, in the order in which the model wrote them."""
        self._chat.take(0, delta)
        for span in self._last.spans:
            if span.call is None:
                self._add(span.kind, span.text)
                continue
            if span.call.id is not None:
                self._open("call", span.call.id, span.call.name or "")
            self._add("call", span.call.arguments)
        if self._last.finish_reason is not None:
            self._close(is_whole=self._last.finish_reason != "length")

    def _add(self, kind: Literal["reasoning", "text", "call"], text: str) -> None:
        if not text:
            return
        if not (self._is_open and self._parts[-1].kind == kind):
            self._open(kind)
        self._parts[-1].added.append(text)
        if self._events is not None:
            self._events.append(self._added(self._parts[-1], text))

    def _open(self, kind: Literal["reasoning", "text", "call"], call_id: str = "", name: str = "") -> None:
        self._close(is_whole=True)
        self._parts.append(AnswerPart(kind, len(self._parts), call_id, name))
        self._is_open = True
        if self._events is not None:
            self._events.append(self._opened(self._parts[-1]))

    def _close(self, *, is_whole: bool) -> None:
        if self._is_open:
            self._is_open, self._parts[-1].is_whole = False, is_whole
            if self._events is not None:
                self._events.append(self._closed(self._parts[-1]))

    @abstractmethod
    def _begin(self) -> str:
        """Return the events before the first part."""

    @abstractmethod
    def _opened(self, part: AnswerPart) -> str:
        """Return the events of a part that begins."""

    @abstractmethod
    def _added(self, part: AnswerPart, text: str) -> str:
        """Return the event for more text of a part."""

    @abstractmethod
    def _closed(self, part: AnswerPart) -> str:
        """Return the events of a part that has ended."""
