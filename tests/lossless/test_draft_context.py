"""The drafter's context survives everything the scheduler does: its block logits do not change.

Acceptance that falls after a prefix hit is the bug that others ship; nothing in the output shows it.
"""

import functools

import pytest
import torch

from blockdraft.engine.request import SamplingParams
from tests import tiny
from tests.matrix import slow_but

PROMPT = [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37]
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def advance(engine, num_tokens):
    """Step until the one running sequence has emitted at least `num_tokens`."""
    while True:
        engine.step()
        running = engine.scheduler.running
        if running and running[0].num_output >= num_tokens:
            return running[0]


@torch.inference_mode()
def block_logits(engine, sequence):
    engine.rows.activate([sequence.row])
    assert engine.rows.length[sequence.row] == len(sequence.token_ids) - 1
    drafter, rows = engine.models.drafter, engine.rows
    return drafter.block_logits(rows.anchor[rows.active][:, None], engine.cache.view(rows, drafter.block))


def after(num_tokens, prepare=lambda engine: None, disturb=lambda engine, sequence: None, **plan):
    """Tokens and block logits after about `num_tokens` of plain decoding on a prepared engine."""
    engine = tiny.engine("trained", width=1, **plan)
    prepare(engine)
    engine.add(PROMPT, PARAMS)
    disturb(engine, advance(engine, num_tokens // 2))
    sequence = advance(engine, num_tokens)
    return sequence, block_logits(engine, sequence)


def serve_before(engine):
    """Serve the prompt by speculation first, so that pages come from verify steps too."""
    engine.add(PROMPT, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, width=tiny.BLOCK))
    tiny.drain(engine)


def preempt(engine, sequence):
    engine.scheduler._preempt(sequence)


SCENES = {
    "chunked": {"max_prefill_tokens": 5},
    "small pages": {"page_size": 3},
    "prefix hit": {"prepare": serve_before, "page_size": 4},
    "preempted, recomputed": {"disturb": preempt, "prefix_cache": False},
    "preempted, found again": {"disturb": preempt, "page_size": 4},
}


@pytest.mark.parametrize("scene", SCENES)
def test_block_logits_are_the_same_after(scene):
    expected_sequence, expected = after(20, prefix_cache=False)
    sequence, got = after(20, **SCENES[scene])
    assert sequence.token_ids == expected_sequence.token_ids
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    if scene == "prefix hit":
        assert sequence.tally.num_cached_tokens == 16
    if "preempted" in scene:
        assert sequence.tally.preemptions == 1


ANSWER = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@functools.cache
def plain_answer(*prompt):
    """Return the answer of plain decoding without a cache."""
    return tiny.run(tiny.engine("none", width=1, prefix_cache=False), [(list(prompt), ANSWER)])


@pytest.mark.parametrize(
    ("page_size", "lengths"),
    slow_but([(2, range(1, 3)), (1, range(1, 10)), (2, range(3, 10)), (4, range(1, 10))], (2, range(1, 3))),
    ids=str,
)
def test_the_next_turn_of_a_conversation_continues_as_if_nothing_were_cached(page_size, lengths):
    """Only what is really in the cache is found: not the last token, whose page may be full without it."""
    for num_tokens in lengths:
        first = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        engine = tiny.engine("trained", width=tiny.BLOCK, page_size=page_size)
        turn = PROMPT[:7] + tiny.run(engine, [(PROMPT[:7], first)])[0][0][0]
        for added in ([], [40, 41], list(range(30, 30 + page_size))):
            expected = plain_answer(*turn, *added)
            assert tiny.run(engine, [(turn + added, ANSWER)]) == expected
            assert tiny.run(engine, [(turn + added, ANSWER)]) == expected  # all of it cached now


def test_a_row_without_speculation_still_leaves_drafter_context_behind():
    """Pages written by a width 1 request serve a speculative one with the same acceptance."""

    def accepted(first_width):
        engine = tiny.engine("trained", width=tiny.BLOCK, page_size=4)
        if first_width is not None:
            engine.add(PROMPT, SamplingParams(temperature=0.0, max_tokens=8, width=first_width))
            tiny.drain(engine)
        engine.add(PROMPT, PARAMS)
        last = tiny.drain(engine)[-1]
        assert last.metrics.num_cached_tokens == (0 if first_width is None else 16)
        return last.metrics.accepted, last.metrics.steps

    assert accepted(1) == accepted(tiny.BLOCK) == accepted(None)
