"""The promise: whatever drafter, width, batch, pages, chunks, hits, preemptions: the tokens are the target's.

And whether steps are captured or not.

In float64 arithmetic noise cannot reach a decision, so equality with plain decoding (no drafter, width 1,
alone, no prefix cache) is a statement about the algorithm.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.engine.request import SamplingParams
from blockdraft.engine.sequence import Sequence
from tests import tiny
from tests.grammar import json_tokens
from tests.matrix import slow_but

BASE = [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33]


LONG = [(7 * i + i * i // 5) % 60 for i in range(260)]  # keys are compressed from the 145th token on
LONG_CONTEXT = 400


ANSWERS = {}  # of plain decoding, which several drafters are compared with


def plain(requests, tokenizer=None, **kept):
    """Decode every request alone, one token at a time, in the same dtype and with keys `kept` likewise."""
    answers = []
    for prompt, params in requests:
        key = repr((prompt, params, kept, tokenizer is None))
        if key not in ANSWERS:
            engine = tiny.engine(
                "none", width=1, prefix_cache=False, page_size=16, tokenizer=tokenizer, **kept
            )
            with patch.object(Sequence, "go_on", lambda *_: None):  # each token is looked at
                ANSWERS[key] = tiny.run(engine, [(prompt, replace(params, width=1))])
        answers += ANSWERS[key]
    return answers


@st.composite
def sampling(draw, seed):
    max_tokens = draw(st.integers(1, 30))
    is_random = draw(st.booleans())
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        n=draw(st.sampled_from([1, 1, 1, 2])),
        width=draw(st.sampled_from([None, None, 1, 3, 8])),
        temperature=draw(st.sampled_from([0.6, 1.0, 1.5])) if is_random else 0.0,
        top_k=draw(st.sampled_from([0, 0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        logit_bias=draw(st.sampled_from([{}, {}, {7: 2.0, 62: 3.0}])),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from([None, None, ["t4 t5"], ["t1", "5 t"]])),
        stop_token_ids=draw(st.sampled_from([(), (), (12,), (20, 40)])),
    )


@st.composite
def bound(draw, params):
    """Return the request, perhaps with a structured output, thoughts, or both."""
    output, thinking = draw(st.one_of(st.none(), json_tokens.outputs)), draw(json_tokens.thoughts())
    if output is not None:
        params = replace(params, min_tokens=0, ignore_eos=False)
    return replace(params, structured_outputs=output, thinking=thinking)


@st.composite
def cases(draw):
    requests = []
    has_structured_outputs = draw(st.booleans())
    kv_dtype = draw(st.sampled_from(["exact", "exact", "exact", "int8", "int8"]))
    is_long = kv_dtype != "exact"
    for index in range(draw(st.integers(1, 4))):
        base = LONG[: draw(st.sampled_from([100, 200, 230, 260]))] if is_long else BASE
        shared = base[: draw(st.integers(0, len(BASE)))] if draw(st.booleans()) or not is_long else base
        own = draw(st.lists(st.integers(0, 61), min_size=0 if shared else 1, max_size=12))
        params = draw(sampling(seed=100 + index))
        requests.append((shared + own, draw(bound(params)) if has_structured_outputs else params))
    page_size = draw(st.sampled_from([3, 16, 16, 64] if is_long else [1, 2, 3, 5, 16]))
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in requests)
    least = -(-(longest + 2 * tiny.BLOCK) // page_size)
    plan = {
        "page_size": page_size,
        "num_pages": least + draw(st.integers(0, least)),
        "max_prefill_tokens": draw(st.sampled_from([7, 64, 150] if is_long else [1, 2, 7, 64])),
        "chunks": draw(st.sampled_from([None, None, 1, 2])),  # a seed: they change from step to step
        "max_num_seqs": draw(st.integers(1, 4)),
        "width": draw(st.integers(1, tiny.BLOCK)),
        "widths": draw(st.sampled_from([None, 1, 2])),  # a seed: of each row and step its own
        "tree": draw(st.sampled_from([0, 0, 16, 32, 64])),
        "prefix_cache": draw(st.booleans()),
        "overlap": draw(st.booleans()),
        "is_captured": draw(st.booleans()),
        "tokenizer": json_tokens.tokenizer() if has_structured_outputs else None,
    }
    if is_long:
        plan |= {
            "max_model_len": LONG_CONTEXT,
            "kv_dtype": kv_dtype,
            "kv_window": draw(st.sampled_from([16, 40])),
            "draft_kv_dtype": draw(st.sampled_from(["exact", kv_dtype])),
        }
    drafter = draw(st.sampled_from(["trained", "trained", "random", "none", "hinted", "ngram", *tiny.KINDS]))
    if drafter == "ngram" or (drafter in ("trained", *tiny.KINDS) and draw(st.booleans())):
        plan["draft_ngram"] = draw(st.sampled_from([1, 2, 4]))
    return requests, plan, drafter, draw(st.floats(0.5, 1.0))


def run_case(case):
    """The case's results, plain decoding's, and how often a sequence was preempted."""
    requests, plan, drafter, rate = case
    kept = {name: plan[name] for name in ("kv_dtype", "kv_window", "max_model_len") if name in plan}
    expected = plain(requests, plan["tokenizer"], **kept)
    if drafter == "hinted":
        answers = {
            params.seed: list(prompt) + choices[0][0]
            for (prompt, params), choices in zip(requests, expected, strict=True)
        }
        drafter = tiny.HintedDrafter(answers, rate)
    engine = tiny.engine(drafter, **plan)
    return tiny.run(engine, requests), expected


@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=cases())
def test_any_drafter_and_any_schedule_emit_the_tokens_of_plain_decoding(case):
    got, expected = run_case(case)
    assert got == expected


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(case=cases())
def test_many_more_schedules(case):
    got, expected = run_case(case)
    assert got == expected


@pytest.mark.parametrize(
    ("temperature", "drafter"),
    [
        pytest.param(0.0, "trained", marks=pytest.mark.slow),
        (1.0, "trained"),
        pytest.param(0.0, "DFlash2", marks=pytest.mark.slow),
        pytest.param(1.0, "DFlash2", marks=pytest.mark.slow),
        (1.0, tiny.SELECTOR),  # of few rows alone
        pytest.param(0.0, "DSpark", marks=pytest.mark.slow),
        pytest.param(1.0, "DSpark", marks=pytest.mark.slow),
    ],
)
def test_every_accepted_count_occurs_and_the_tokens_are_plain_decodings(temperature, drafter):
    """A drafter that never gets a full block accepted would hide half the bugs."""
    params = SamplingParams(temperature=temperature, max_tokens=80, ignore_eos=True)
    requests = [([i, i + 1, i + 2, i + 3], replace(params, seed=i)) for i in range(6)]
    results, deltas = tiny.watched_run(tiny.engine(drafter, width=tiny.BLOCK), requests)
    counts = {len(delta.token_ids) - 1 for delta in deltas if delta.finish_reason is None}
    if temperature > 0:
        assert counts == set(range(tiny.BLOCK))
    else:
        assert tiny.BLOCK - 1 in counts
    assert results == plain(requests)


@pytest.mark.parametrize(
    ("kind", "temperature", "is_captured"),
    slow_but(
        [(kind, t, is_captured) for kind in tiny.KINDS for t in (0.0, 1.0) for is_captured in (False, True)],
        *((kind, (0.0, 1.0)[place % 2], place % 2 == 1) for place, kind in enumerate(tiny.KINDS)),
    ),
)
def test_every_kind_of_drafter_at_every_width_emits_plain_decodings_tokens(kind, temperature, is_captured):
    params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
    requests = [
        ([i, i + 1, i + 2, i + 3], replace(params, seed=i, width=width))
        for i, width in enumerate((None, 2, 3, 5, tiny.BLOCK))
    ]
    engine = tiny.engine(kind, width=tiny.BLOCK, max_num_seqs=3, page_size=3, is_captured=is_captured)
    assert tiny.run(engine, requests) == plain(requests)


@pytest.mark.parametrize(
    ("temperature", "drafter"),
    slow_but(
        [(t, kind) for t in (0.0, 1.0) for kind in ("DFlash2", "DSpark")], (0.0, "DFlash2"), (1.0, "DSpark")
    ),
)
def test_n_grams_beside_any_kind_of_drafter_change_the_steps_and_no_token(temperature, drafter):
    params = SamplingParams(temperature=temperature, max_tokens=50, ignore_eos=True)
    prompts = ([30, 31] * 9, [3, 5, 7, 9, 11] * 4, [4, 6, 8])
    requests = [(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts)]
    num_blocks = set()
    for least in (0, 1):
        engine = tiny.engine(drafter, width=tiny.BLOCK, draft_ngram=least, is_captured=bool(least))
        assert tiny.run(engine, requests) == plain(requests)
        num_blocks.add(engine.stats.num_blocks)
    assert len(num_blocks) == 2, "nothing was overruled"


@pytest.mark.parametrize(
    ("dtype", "kept", "tree", "page_size"),
    [
        ("float64", {}, 32, 1),
        ("float32", {}, 64, 3),
        ("float32", {"kv_dtype": "int8", "kv_window": 16, "max_model_len": LONG_CONTEXT}, 32, 128),
    ],
)
def test_trees_that_accept_every_column_and_every_choice_emit_plain_decodings_tokens(
    dtype, kept, tree, page_size
):
    """In float32, too: a token is computed alike wherever its path is kept."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=0)
    prompt = LONG[:190] if kept else [4, 6, 8]
    requests = [
        (prompt, params),
        (prompt[1:], replace(params, seed=1, frequency_penalty=0.4, repetition_penalty=1.3)),
        (prompt[2:], replace(params, seed=2, temperature=0.0, presence_penalty=0.7)),
    ]
    expected = plain(requests, dtype=dtype, **kept)
    answers = {
        params.seed: [*prompt, *tokens]
        for (prompt, params), ((tokens, _, _),) in zip(requests, expected, strict=True)
    }
    shape = {"width": tiny.BLOCK, "tree": tree, "page_size": page_size, "max_num_seqs": 3}
    engine = tiny.engine("trained", dtype=dtype, **shape, **kept)
    ranks = tiny.hint_trees(engine, answers)
    results, deltas = tiny.watched_run(engine, requests)
    assert results == expected
    accepted = [told[: len(delta.token_ids) - 1] for told, delta in zip(ranks, deltas, strict=True)]
    counted = engine.stats
    assert counted.drafted[0] <= counted.num_blocks == len(ranks)
    assert all(tried <= right for tried, right in zip(counted.drafted[1:], counted.accepted, strict=False))
    assert {len(one) for one in accepted} == set(range(tiny.BLOCK))
    assert {rank for one in accepted for rank in one} == set(range(tiny.HINTS))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_full_blocks_in_every_step_with_a_step_in_flight(page_size):
    """Two whole blocks may be written past what the host knows: their pages must be there."""
    requests = [([4, 6, 8], SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True))]
    expected = plain(requests)
    drafter = tiny.HintedDrafter({5: [4, 6, 8, *expected[0][0][0]]}, rate=1.0)
    engine = tiny.engine(drafter, width=tiny.BLOCK, page_size=page_size, overlap=True)
    assert tiny.run(engine, requests) == expected
    assert engine.stats.num_emitted / engine.stats.num_blocks > 7


@pytest.mark.parametrize(
    ("temperature", "width"), slow_but([(t, w) for t in (0.0, 1.0) for w in (2, 4, 8)], (0.0, 8), (1.0, 4))
)
def test_float32_is_bit_equal_at_pinned_rows_and_width(width, temperature):
    """Same shapes, other drafts: the committed tokens and their log-probabilities are the same bits."""
    answers = []
    for drafter in ("none", "trained", "DFlash2", "DSpark"):
        engine = tiny.engine(drafter, dtype="float32", width=width, max_num_seqs=1)
        engine.add([2, 4, 6, 8], SamplingParams(temperature=temperature, seed=5, max_tokens=90, logprobs=1))
        deltas = tiny.drain(engine)
        answers.append([(item.token_id, item.logprob) for delta in deltas for item in delta.logprobs])
    assert answers[0] == answers[1] == answers[2] == answers[3]
