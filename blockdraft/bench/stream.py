"""Reads the stream of an answer into an Answer. Bytes are timed before they are parsed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from blockdraft.bench import wire
from blockdraft.bench.records import Answer
from blockdraft.bench.speculation import read_chunk
from blockdraft.bench.wire import inside, whole_number

Clock = Callable[[], float]

MAX_UNLIKE = 8  # consecutive failures to reuse a chunk's surroundings; arbitrary
_TEXTS = ("content", "text")
_THOUGHTS = ("reasoning_content", "reasoning")  # some servers send the same text under both names
_DONE = b"[DONE]"
_MARK = "\x00 here \x00"  # a text that no server writes
_value_at = json.JSONDecoder().raw_decode
_FIELDS = (b"event:", b"id:", b"retry:", b":")  # fields of server-sent events besides data


class BadAnswer(Exception):
    """A reply is not an answer. The exception's text becomes the Answer's error."""


class StreamReader:
    """Reads the bytes of a stream and fills an Answer."""

    def __init__(self, answer: Answer, clock: Clock) -> None:
        self.is_done = False
        self._answer = answer
        self._clock = clock
        self._rest = b""
        self._last_s = answer.sent_s  # time of the last bytes
        self._text_s = 0.0  # time of the last delta with text
        self._has_usage = False
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        # The list and the field of the last chunk's text, if the chunk brought only text.
        self._only_text: tuple[list[str], str] | None = None
        self._around: tuple[list[str], Surroundings] | None = None  # its list, and what is around it
        self._num_unlike = 0  # consecutive surroundings that matched no later chunk

    def feed(self, data: bytes) -> None:
        self._last_s = self._clock()
        self._rest += data
        if b"\r" in self._rest:
            self._rest = self._rest.replace(b"\r\n", b"\n")
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if self._around is not None and self._take_alike(event, *self._around):
                continue
            if data := _event_data(event):
                self._take(data)
                self._learn(event)

    def _take_alike(self, event: bytes, kept: list[str], around: Surroundings) -> bool:
        """Take a chunk that differs from an earlier one only in its text; return whether it does."""
        text = around.text_in(event)
        if not text:
            return False
        kept.append(text)
        self._stamp()
        self._num_unlike = 0
        return True

    def _learn(self, event: bytes) -> None:
        """Keep the bytes around the text of the last parsed chunk, if it brought only text."""
        if self._only_text is not None and self._num_unlike < MAX_UNLIKE:
            self._num_unlike += 1
            kept, name = self._only_text
            around = surroundings(event.decode(), name)
            self._around = None if around is None else (kept, around)

    def _take(self, data: bytes) -> None:
        self._only_text = None
        if data == _DONE:
            self.is_done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise BadAnswer(f"malformed stream: an event is no JSON: {_shown(data)}") from None
        if not isinstance(chunk, dict):
            raise BadAnswer(f"malformed stream: an event is no object: {_shown(data)}")
        if chunk.get("error") or chunk.get("object") == "error":
            raise BadAnswer(f"the server says in the stream: {wire.server_message(data)}")
        choices = chunk.get("choices")
        if choices:
            self._choice(choices[0] if isinstance(choices, list) else choices, data)
        if chunk.get("usage"):
            self._usage(chunk["usage"])
            self._only_text = None
        # Only the last chunks describe the whole answer.
        if not choices or self._answer.finish_reason is not None:
            self._answer.speculation = read_chunk(chunk) or self._answer.speculation
            self._only_text = self._around = None

    def _choice(self, choice: object, data: bytes) -> None:
        delta = choice.get("delta", choice) if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(delta, dict):
            raise BadAnswer(f"malformed stream: a choice without a delta: {_shown(data)}")
        has_calls = bool(delta.get("tool_calls"))
        found = []
        for kept, names in ((self._texts, _TEXTS), (self._thoughts, _THOUGHTS)):
            for name in names:
                if (text := delta.get(name)) and isinstance(text, str):
                    kept.append(text)
                    found.append((kept, name))
                    break
        if found or has_calls:
            self._stamp()
        if len(found) == 1 and not has_calls:
            self._only_text = found[0]
        if choice.get("finish_reason"):
            self._answer.finish_reason = str(choice["finish_reason"])

    def _stamp(self) -> None:
        answer, now_s = self._answer, self._last_s
        if answer.first_s is None:
            answer.first_s = now_s
        else:
            answer.gaps_s.append(now_s - self._text_s)
        self._text_s = now_s

    def _usage(self, usage: object) -> None:
        answer, completion_tokens = self._answer, whole_number(inside(usage, "completion_tokens"))
        if completion_tokens is None:
            return
        self._has_usage, answer.completion_tokens = True, completion_tokens
        answer.prompt_tokens = whole_number(inside(usage, "prompt_tokens"))
        answer.cached_tokens = whole_number(inside(usage, "prompt_tokens_details", "cached_tokens"))

    def check_end(self) -> None:
        """Raise BadAnswer if the stream ended before it was complete."""
        if self._rest.strip() and not self.is_done:
            if _event_data(self._rest.strip()) != _DONE:
                raise BadAnswer(f"the stream broke off inside an event: {_shown(self._rest)}")
            self.is_done = True
        if self._answer.finish_reason is None:
            raise BadAnswer("the stream ended without a finish_reason.")
        if not self.is_done:
            raise BadAnswer("the stream ended without [DONE].")
        if not self._has_usage:
            raise BadAnswer("the server sent no usage: how many tokens the answer has is unknown.")

    def finish(self) -> None:
        """Set the text and the end time: that of the last byte, or now if the answer failed."""
        answer = self._answer
        answer.end_s = self._last_s if answer.is_ok else self._clock()
        answer.text, answer.thinking = "".join(self._texts), "".join(self._thoughts)


def _event_data(event: bytes) -> bytes:
    """Return the data of one server-sent event; empty if it has no data."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    parts = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            parts.append(line[5:].strip())
        elif line.strip() and not line.startswith(_FIELDS):
            raise BadAnswer(f"malformed stream: no server-sent event: {_shown(line)}")
    return b"\n".join(parts)


def _shown(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))


# ---- chunks that differ only in their text
# Most chunks of an answer are like this. Only their text is parsed: a whole chunk takes three times as long.


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The characters of an event before and after its text."""

    head: str
    tail: str

    def text_in(self, data: bytes) -> str | None:
        """Return the text of an event that has these surroundings; else None."""
        try:
            event = data.decode()
            if not event.startswith(self.head):
                return None
            text, end = _value_at(event, len(self.head))
        except ValueError:
            return None
        is_alike = isinstance(text, str) and end + len(self.tail) == len(event) and event.endswith(self.tail)
        return text if is_alike else None


def surroundings(event: str, name: str) -> Surroundings | None:
    """Return the surroundings of field `name` in `choices[0]` or its delta; None if not found for certain."""
    found = event.find(f'"{name}"')
    start = event.find('"', found + len(name) + 2)
    if found < 0 or start < 0 or event[found + len(name) + 2 : start].strip() != ":":
        return None
    try:
        _, end = _value_at(event, start)
        head, tail = event[:start], event[end:]
        chunk = json.loads(head.removeprefix("data:") + json.dumps(_MARK) + tail)
        choice = chunk["choices"][0]
        is_there = choice.get("delta", choice).get(name) == _MARK
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return Surroundings(head, tail) if is_there else None
