"""A conversation in the shape of chat completions, made of what other APIs say one thing at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blockdraft.errors import RequestError

Message = dict[str, object]


class Conversation:
    """Messages as they grow: thoughts, text and calls of one turn of the model become one message."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.messages = list(messages)
        self._called = {call_id for message in self.messages for call_id in _call_ids(message)}

    def has_called(self, call_id: str) -> bool:
        """Whether a result for this call can follow."""
        return call_id in self._called

    def say(self, role: str, text: str) -> None:
        """What anybody but the model says."""
        self.messages.append({"role": role, "content": text})

    def add_user(self, text: str) -> None:
        """What a user says; two turns of a user in a row are one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "user":
            self.messages[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
        else:
            self.say("user", text)

    def think(self, text: str) -> None:
        self._turn({"content", "tool_calls", "reasoning_content"})["reasoning_content"] = text

    def answer(self, text: str) -> None:
        """What the model said."""
        self._turn({"content", "tool_calls"})["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool that the model called; `arguments` are JSON."""
        self._called.add(call_id)
        turn = self._turn(set())
        before = turn.get("tool_calls", ())
        assert isinstance(before, list | tuple)
        function = {"name": name, "arguments": arguments}
        turn["tool_calls"] = [*before, {"id": call_id, "type": "function", "function": function}]

    def result(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _turn(self, ended_by: set[str]) -> Message:
        """The model's message that goes on; a new one where the last has one of these already."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not ended_by & last.keys():
            self.messages[-1] = {**last}  # the old one may be kept elsewhere: nobody changes a message
        else:
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def rendered(self, instructions: str | None = None) -> list[Message]:
        """The messages for a chat template: at most one system message in front, and no content missing.

        Many templates take a system message in the first place only, so the first ones become one.
        Raises RequestError if nobody has said anything.
        """
        messages = [{**message, "content": message.get("content", "")} for message in self.messages]
        ahead = [] if not instructions else [instructions]
        while messages and messages[0]["role"] in ("system", "developer"):
            ahead.append(str(messages.pop(0)["content"]))
        first: list[Message] = [{"role": "system", "content": "\n\n".join(ahead)}] if ahead else []
        if not first and not messages:
            raise RequestError("'messages' hold nothing that the model can read: send a text.", "messages")
        return first + messages


def _call_ids(message: Message) -> Iterator[str]:
    calls = message.get("tool_calls", ())
    assert isinstance(calls, list | tuple)
    yield from (call["id"] for call in calls)
