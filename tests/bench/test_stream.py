"""Chunks that differ by their text alone are read as if each had been parsed as a whole."""

import json

import pytest

from blockdraft.bench import stream
from blockdraft.bench.records import SPECULATIVE, Answer, Ask, Prompt
from blockdraft.bench.stream import StreamReader, surroundings

TEXTS = ["plain", ' with "quotes" and \\', "äöü 漢字 🙂", "\n\n", '"}]}', "\x00\t", "data: [DONE]", "null"]


def event(text, field="content", **outer):
    choice = {"index": 0, "delta": {field: text}, "logprobs": None, "finish_reason": None}
    chunk = {"id": "x", "model": "m", "created": 1, **outer, "choices": [choice]}
    return f"data: {json.dumps(chunk, ensure_ascii=len(text) % 2 == 0)}"


def read(events, size):
    """Read a stream that comes in pieces of `size` bytes."""
    ask = Ask(Prompt("p", "c", ("hello",)), SPECULATIVE, max_tokens=8)
    answer = Answer(ask, 0, planned_s=0.0, sent_s=0.0)
    times = iter(range(1, 1_000_000))
    reader = StreamReader(answer, lambda: float(next(times)))
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 5}}'
    end = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}'
    data = "".join(f"{one}\n\n" for one in [*events, end, usage, "data: [DONE]"]).encode()
    for begin in range(0, len(data), size):
        reader.feed(data[begin : begin + size])
    reader.check_end()
    reader.finish()
    return answer


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_found_in_the_surroundings_of_another(text):
    around = surroundings(event("first!"), "content")
    assert around.text_in(event(text).encode()) == text


@pytest.mark.parametrize(
    "other",
    [
        event("a", created=2),
        event("a", field="reasoning"),
        event("a")[:-1],
        event("a") + " ",
        event("a").replace('"a"', "7"),
        event("a").replace('"a"', '"a", "role": "b"'),
        "data: [DONE]",
    ],
)
def test_what_differs_by_more_than_its_text_is_not_taken_for_it(other):
    assert surroundings(event("b"), "content").text_in(other.encode()) is None


def test_a_field_of_the_same_name_elsewhere_is_not_taken_for_the_text():
    assert surroundings(event("a", note={"content": "a"}), "content") is None
    assert surroundings('data: {"choices": [], "content": "a"}', "content") is None
    assert surroundings(event("a"), "text") is None


@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
def test_a_stream_reads_the_same_however_it_comes(size):
    events = [event(""), *map(event, TEXTS), event("thought", field="reasoning"), *map(event, TEXTS)]
    answer = read(events, size)
    assert (answer.text, answer.thinking) == ("".join(TEXTS * 2), "thought")
    assert len(answer.gaps_s) == 2 * len(TEXTS)
    assert (answer.completion_tokens, answer.finish_reason) == (5, "stop")


def test_only_the_text_of_most_chunks_is_parsed(monkeypatch):
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda data: parsed.append(data) or loads(data))
    assert read([event(f"w{number} ") for number in range(100)], 100_000).text.endswith("w99 ")
    assert len(parsed) < 8


def test_a_server_whose_chunks_all_differ_is_soon_no_longer_compared(monkeypatch):
    looked_at = []
    monkeypatch.setattr(stream, "surroundings", lambda *words: looked_at.append(words))
    assert len(read([event("a", created=number) for number in range(100)], 100_000).text) == 100
    assert len(looked_at) == stream.MAX_UNLIKE
