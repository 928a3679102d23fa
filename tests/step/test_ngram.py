"""Drafts from what a row says again: never other tokens, and the steps that plain Python foretells."""

import functools
from dataclasses import replace

import pytest
import torch

from blockdraft.engine.request import SamplingParams
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from blockdraft.step.ngram import NgramDrafter
from tests import tiny
from tests.kernels.test_ngram_lookup import found
from tests.lossless.test_lossless import plain
from tests.matrix import slow_but

LEAST = 2
SHARED = [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 3, 5, 7, 9, 11]
PROMPTS = [[*SHARED, 13], [*SHARED, 13, 15], [4, 6, 8], SHARED[:1], [30, 31] * 9, [*SHARED, 3, 5]]
SCHEDULES = {
    "alone": {"max_num_seqs": 1},
    "together": {},
    "in small chunks, prefixes found again": {"max_prefill_tokens": 3, "page_size": 2, "max_num_seqs": 2},
    "chunks by chance": {"chunks": 4, "page_size": 3},
    "preempted": {"page_size": 4, "num_pages": 40, "prefix_cache": False},
    "preempted, prefixes found again": {"page_size": 4, "num_pages": 40, "max_num_seqs": 4},
    "a step in flight": {"overlap": True},
    "captured": {"is_captured": True},
    "captured, a step in flight, preempted": {
        "is_captured": True,
        "overlap": True,
        "page_size": 4,
        "num_pages": 40,
    },
}


def requests(temperature):
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    return [(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(PROMPTS)]


@functools.cache
def answers(temperature):
    return plain(requests(temperature))


def num_steps(prompt, answer, width, least):
    """By plain Python, with a block of `width` in each."""
    known, steps, end = list(prompt), 0, len(prompt) + len(answer)
    whole = [*prompt, *answer]
    while len(known) < end:
        drafts = found(known, least, width) or [known[-1]] * (width - 1)
        count = 1
        for draft in drafts:
            if len(known) + count > end or draft != whole[len(known) + count - 1]:
                break
            count += 1
        known, steps = whole[: len(known) + count], steps + 1
    return steps


@pytest.mark.parametrize("temperature", slow_but([0.0, 1.0], 0.0))
@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_are_plain_decodings_and_steps_as_many_as_foretold(name, temperature):
    asked = requests(temperature)
    expected = answers(temperature)
    engine = tiny.engine("ngram", width=tiny.BLOCK, draft_ngram=LEAST, **SCHEDULES[name])
    ids = [engine.add(prompt, params) for prompt, params in asked]
    deltas = tiny.drain(engine)
    for request_id, (prompt, _), [(answer, _, _)] in zip(ids, asked, expected, strict=True):
        mine = [delta for delta in deltas if delta.request_id == request_id]
        assert [token for delta in mine for token in delta.token_ids] == answer
        assert mine[-1].metrics.steps == num_steps(prompt, answer, tiny.BLOCK, LEAST)
    if "preempted" in name:
        assert engine.scheduler.num_preemptions > 0
    if "found again" in name:
        assert sum(delta.metrics.num_cached_tokens for delta in deltas if delta.metrics is not None) > 0
    if temperature == 0:
        assert engine.stats.num_emitted > 1.5 * engine.stats.num_blocks, "too little was said again"


BESIDE = [{}, {"is_captured": True}, {"overlap": True, "max_prefill_tokens": 3}]


class Watched(NgramDrafter):
    """Looks at every row's history whenever it drafts, at replays too."""

    def __init__(self):
        super().__init__(tiny.BLOCK, LEAST)
        self.seen = []

    def draft(self, rows, cache, view, width):
        drafted = super().draft(rows, cache, view, width)

        def look(_, lengths, seeds):
            for row, length, seed in zip(rows.active.tolist(), lengths, seeds, strict=True):
                if row != rows.max_rows:
                    self.seen.append((seed, rows.history[row, : length + 1].tolist()))

        tiny.asked_again(look, rows, width)
        return drafted


@pytest.mark.parametrize("name", slow_but(SCHEDULES, *list(SCHEDULES)[2::4]))
def test_a_row_s_history_is_its_prompt_and_its_answer(name):
    asked = requests(0.0)
    texts = [[*prompt, *answer] for (prompt, _), [(answer, _, _)] in zip(asked, answers(0.0), strict=True)]
    drafter = Watched()
    tiny.run(tiny.engine(drafter, width=tiny.BLOCK, draft_ngram=LEAST, **SCHEDULES[name]), asked)
    assert {seed for seed, _ in drafter.seen} == set(range(len(PROMPTS)))
    for seed, history in drafter.seen:
        size = min(len(history), len(texts[seed]))  # a step in flight may be past the end
        assert history[:size] == texts[seed][:size]


@pytest.mark.parametrize(
    ("plan", "temperature"),
    slow_but([(plan, t) for plan in BESIDE for t in (0.0, 1.0)], (BESIDE[1], 0.0), (BESIDE[2], 0.0)),
    ids=str,
)
def test_beside_a_drafter_it_changes_steps_and_no_token(plan, temperature):
    asked = requests(temperature)
    engines = [tiny.engine("trained", width=tiny.BLOCK, draft_ngram=least, **plan) for least in (0, 1, 4)]
    for engine in engines:
        assert tiny.run(engine, asked) == answers(temperature)
    assert len({engine.stats.num_blocks for engine in engines}) > 1, "it never had a say"
    assert engines[0].rows.history is None, "others pay nothing"


@pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)
@pytest.mark.parametrize("drafter", ["ngram", "trained"])
def test_a_captured_step_drafts_what_its_kernels_do(drafter):
    plan = {"dtype": "float32", "draft_ngram": LEAST, "width": tiny.BLOCK, "max_num_seqs": 3}
    engines = [tiny.engine(drafter, is_captured=is_captured, **plan) for is_captured in (True, False)]
    got, expected = (tiny.run(engine, requests(0.0)) for engine in engines)
    assert engines[0].graphs is not None
    assert got == expected
    assert engines[0].stats.num_blocks == engines[1].stats.num_blocks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the kernels run on it")
def test_a_card_s_kernels_draft_the_same():
    pytest.importorskip("triton")
    interpreted = kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)
    asked = [(SHARED[:14], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))]
    found = []
    for kernels in (REFERENCE, interpreted):
        plan = {"width": 3, "page_size": 4, "num_pages": 24, "max_num_seqs": 2, "max_model_len": 24}
        plan |= {"max_positions": 40, "draft_ngram": LEAST, "dtype": "float32", "kernels": kernels}
        engine = tiny.engine("ngram", **plan)
        found.append((tiny.run(engine, asked), engine.stats.num_blocks))
    assert found[0] == found[1]
