"""Events of a stream: what is written once per choice and filled with text is the chunk it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from blockdraft.checkpoints.dummy import byte_tokenizer
from blockdraft.engine.request import Delta, Metrics, SamplingParams, TokenLogprobs
from blockdraft.server.api.chat import answers
from blockdraft.server.api.chat.answers import AnswerWriter, ChatAnswer, TextAnswer
from blockdraft.server.api.chat.fields import ChatRequest, CompletionRequest
from blockdraft.server.api.chat.prepare import Dialect, PreparedChat
from blockdraft.server.http.replies import event
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.formats import find_format
from blockdraft.tool_calls.thoughts import Tags

TOKENIZER = Tokenizer(byte_tokenizer(300))
HEAD = {"id": 'a "name"', "created": 7, "model": "m\\é", "system_fingerprint": "bd-1"}
TEXTS = [
    "",
    "plain",
    ' "quoted" \\ ',
    "two\nlines\r\n\t",
    "é€😀\u2028\x00\x7f",
    answers.TEXT_GOES_HERE,
    "</think>x",
    "end",
]
METRICS = Metrics(8, 2, 0, 8, 0, (), 0, 0.1, 0.2, 1.0)


def deltas(num_choices: int, *, has_logprobs: bool) -> Iterator[Delta]:
    for number, text in enumerate(TEXTS):
        is_last = number == len(TEXTS) - 1
        for index in range(num_choices):
            logprobs = (TokenLogprobs(65, -0.5, ((65, -0.5),)),) if has_logprobs else ()
            reason, metrics = ("length", METRICS) if is_last else (None, None)
            yield Delta("r", index, text, (65,), logprobs, None, reason, None, metrics)


def chat(options: dict[str, object]) -> AnswerWriter:
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}], **options})
    tags = Tags("<think>", "</think>", (70,), (71,)) if options.get("chat_template_kwargs") else None
    dialect = Dialect(TOKENIZER, find_format(TOKENIZER), tags)
    return ChatAnswer(PreparedChat(asked, dialect, [65, 66], SamplingParams(), False), head=HEAD)


def text(options: dict[str, object]) -> AnswerWriter:
    asked = CompletionRequest.model_validate({"prompt": "AB", **options})
    return TextAnswer(asked, head=HEAD, tokenizer=TOKENIZER, prompts=[[65, 66]], texts=["AB"])


def chunks_of(written: str | None) -> list[object]:
    """The objects of events, each one line of data and an empty one."""
    events = (written or "").split("\n\n")
    assert events.pop() == ""
    assert all(one.startswith("data: ") and "\n" not in one for one in events)
    return [json.loads(one[6:]) for one in events]


BOTH = [
    {},
    {"n": 2},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"speculative": {"detail": True}},
]
CHAT = [*BOTH, {"logprobs": True, "top_logprobs": 1}, {"chat_template_kwargs": {"thinks": True}}]
TEXT = [*BOTH, {"logprobs": 1}, {"echo": True}]


@pytest.mark.parametrize(("make", "options"), [(chat, one) for one in CHAT] + [(text, one) for one in TEXT])
def test_an_event_is_the_chunk_of_its_delta(make, options: dict[str, object]):
    one, other = make({**options, "stream": True}), make({**options, "stream": True})
    one._is_text_only = lambda piece: False  # every chunk is made whole
    for delta in deltas(int(str(options.get("n", 1))), has_logprobs="logprobs" in options):
        assert chunks_of(other.event(0, delta)) == chunks_of(one.event(0, delta))
    assert one.last_chunk() == other.last_chunk()
    assert one.whole() == other.whole()


def test_a_choice_writes_what_surrounds_its_text_once(monkeypatch: pytest.MonkeyPatch):
    answer, seen = chat({"stream": True}), []
    monkeypatch.setattr(answers, "event", lambda data: seen.append(data) or event(data))
    for number in range(10):
        answer.event(0, Delta("r", 0, f"word{number} ", (65,)))
    assert len(seen) == 3, "its role, its first piece, and what surrounds the others"
