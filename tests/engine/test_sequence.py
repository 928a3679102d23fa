"""The end of an answer: blocks of tokens against the rules spelled out for one token at a time."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.cache.rows import RowSampling
from blockdraft.checkpoints.dummy import byte_tokenizer
from blockdraft.engine.request import Delta, Request, SamplingParams
from blockdraft.engine.sequence import Sequence
from blockdraft.text.detokenizer import TextStream
from blockdraft.text.tokenizer import Tokenizer

PROMPT = (70, 71)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(256))


def text_stream(params: SamplingParams) -> TextStream:
    include = params.include_stop_str_in_output
    return TextStream(tokenizer(), PROMPT, params.stops, include_stop_str_in_output=include)


def sequence_of(params: SamplingParams, end_ids: frozenset[int]) -> Sequence:
    sequence = Sequence(
        request=Request("r", PROMPT, params, arrival_s=0.0),
        index=0,
        width=8,
        sampling=RowSampling(min_end=len(PROMPT) + params.min_tokens),
        end_ids=end_ids,
        max_length=len(PROMPT) + (params.max_tokens or 100),
        stream=text_stream(params),
        leader=None,
    )
    sequence.row = 0
    return sequence


def one_by_one(params: SamplingParams, end_ids: frozenset[int], token_ids: list[int]) -> tuple[object, ...]:
    """(tokens, text, finish reason, stop reason) by the rules for a single token."""
    stream, kept, reasons = text_stream(params), [], (None, None)
    for token in token_ids:
        kept.append(token)
        is_protected = len(kept) < params.min_tokens
        if token in end_ids and not is_protected:
            reasons = ("stop", token if token in params.stop_token_ids else None)
            if params.include_stop_str_in_output:
                stream.push((token,), num_protected=1)
        else:
            stream.push((token,), num_protected=is_protected)
            if stream.stop_reason is not None:
                reasons = ("stop", stream.stop_reason)
            elif len(kept) == params.max_tokens:
                reasons = ("length", None)
        if reasons[0] is not None:
            stream.finish()
            break
    return (kept, stream.take(), *reasons)


LETTERS = tokenizer().encode("abc\u20ac")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_an_answer_ends_inside_a_block_where_its_tokens_one_by_one_would(data: st.DataObject):
    token_ids = data.draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=24))
    end_ids = data.draw(st.frozensets(st.sampled_from(LETTERS), max_size=1))
    max_tokens = data.draw(st.integers(1, 30))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=data.draw(st.integers(0, max_tokens)),
        stop=data.draw(st.sampled_from([None, "ab", ["ca", "b"], "\u20ac"])),
        stop_token_ids=data.draw(st.sampled_from([(), tuple(end_ids)])),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    sequence, twin, deltas, at = sequence_of(params, end_ids), sequence_of(params, end_ids), [], 0
    while at < len(token_ids) and sequence.finish_reason is None:
        size = data.draw(st.integers(1, 8))
        block = tuple(token_ids[at : at + size])
        piece = twin.go_on(block, size)
        deltas.append(sequence.accept(block, (), 1.0, size))
        assert deltas[-1] == (Delta(*piece) if piece else twin.accept(block, (), 1.0, size))
        assert (twin.token_ids, twin.length) == (sequence.token_ids, sequence.length)
        assert (twin.tally, twin.finish_reason) == (sequence.tally, sequence.finish_reason)
        may_end = sequence.finish_reason is not None or not end_ids.isdisjoint(block)
        assert (piece is None) == (at == 0 or bool(params.stops) or may_end)
        at += size
    tokens = [token for delta in deltas for token in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    found = (tokens, text, sequence.finish_reason, sequence.stop_reason)
    assert found == one_by_one(params, end_ids, token_ids)
    assert sequence.token_ids == [*PROMPT, *tokens]
    assert sequence.length == len(sequence.token_ids) - 1
