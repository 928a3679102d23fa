"""Answers by script for the writers of APIs: pieces as a chat answer makes them, and what they cost."""

import json
from dataclasses import dataclass, field

from blockdraft.server.api.choices import AnswerPiece, ToolCallPiece
from blockdraft.tool_calls.pieces import Span


def piece(text="", reasoning="", calls=(), end=None, stop=None, going_on=0):
    """One step: it goes on with so many pieces of calls, thinks, speaks, and calls."""
    said = [Span("reasoning", reasoning)] * bool(reasoning) + [Span("text", text)] * bool(text)
    called = [Span("call", call=one) for one in calls]
    return AnswerPiece(
        text=text,
        reasoning=reasoning,
        tool_calls=tuple(calls),
        token_ids=(1,),
        logprobs=(),
        draft=None,
        is_first=False,
        finish_reason=end,
        stop_reason=stop,
        spans=(*called[:going_on], *said, *called[going_on:]),
    )


def call(index, arguments="", id=None, name=None):
    return ToolCallPiece(index, id, name, arguments)


@dataclass
class ScriptedChat:
    """A chat answer whose deltas are pieces already; it is its only choice, too."""

    num_cached: int = 4
    pieces: list = field(default_factory=list)

    @property
    def first_choice(self):
        return self

    def take(self, prompt, delta):
        self.pieces.append(delta)

    def usage(self):
        is_over = bool(self.pieces) and self.pieces[-1].finish_reason is not None
        num_thoughts = sum(bool(piece.reasoning) for piece in self.pieces)
        return {
            "prompt_tokens": 10,
            "completion_tokens": len(self.pieces),
            "total_tokens": 10 + len(self.pieces),
            "prompt_tokens_details": {"cached_tokens": self.num_cached} if is_over else None,
            "completion_tokens_details": {"reasoning_tokens": num_thoughts},
        }


# Thoughts, text and two calls, with joints inside and at the ends of pieces.
AGENT = [
    piece(reasoning="I need "),
    piece(reasoning="both.", text="Let me "),
    piece("look."),
    piece(calls=[call(0, id="call_a", name="weather")]),
    piece(calls=[call(0, '{"city": '), call(0, '"Paris"}'), call(1, "", id="call_b", name="now")]),
    piece(calls=[call(1, "{}")]),
    piece(end="stop"),
]
# A block of tokens ends one thing and begins another.
MIXED = [
    piece("First ", calls=[call(0, "{", id="call_a", name="now")]),
    piece("then ", reasoning="hm", calls=[call(0, "}"), call(1, "{", id="call_b", name="now")], going_on=1),
    piece("last", calls=[call(1, "}")], end="tool_calls", going_on=1),
]
CUT = [piece("One "), piece("two", end="length")]
CUT_CALL = [piece(calls=[call(0, '{"city": "Pa', id="call_a", name="weather")], end="length")]
EMPTY = [piece(end="stop")]
SCRIPTS = {"agent": AGENT, "mixed": MIXED, "cut": CUT, "cut call": CUT_CALL, "empty": EMPTY}


def events_of(text):
    """Name and data of every event."""
    found = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found]


def streamed(writer, script):
    return events_of("".join([writer.event(0, item) or "" for item in script]) + writer.end())


def taken(writer, script):
    for item in script:
        writer.take(0, item)
    return writer.whole()
