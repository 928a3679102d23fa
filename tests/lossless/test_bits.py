"""float32 on the CPU kernels: not only the tokens but every bit of a log-probability is plain decoding's.

tests/lossless/test_lossless.py needs float64 to keep arithmetic noise away from decisions. Here there is
none: linear, attention, norm, activation and rotation compute a token by one order of operations, whatever
the width, batch, pages, chunks, hits and preemptions. So do products in whole numbers. Steps with
log-probabilities are not captured, so of captured ones the keys and values are compared.
"""

from dataclasses import dataclass

import pytest
import torch

from blockdraft.engine.request import SamplingParams
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.models.decoder import Decoder
from blockdraft.models.packed_int8 import Int8Matrix
from tests import tiny
from tests.matrix import slow_but

pytestmark = pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)

PROMPTS = [
    [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 2, 4],
    [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 8],
    [40, 41, 42],
    [i * 7 % 60 for i in range(70)],
]
# Products in int8 are made by token: pages, hits and preemptions do not reach them.
of_floats = pytest.mark.parametrize("plain", ["none"], indirect=True)
# Drafters that choose among candidates.
PAIRS = [(kind, 8) for kind in ("DFlash2", "DSpark", "XPress", "Domino", "LiLiCorr")]


def params(index, **changes):
    temperature = 0.8 * (index % 2)
    changes = {"logprobs": 3, "temperature": temperature, **changes}
    return SamplingParams(max_tokens=24, ignore_eos=True, seed=index, **changes)


def serve(engine, indices):
    """Return for each request every token with its log-probabilities."""
    return serve_with_metrics(engine, indices)[0]


def serve_with_metrics(engine, indices):
    ids = [engine.add(PROMPTS[index], params(index)) for index in indices]
    deltas = tiny.drain(engine)
    answers = [[x for one in deltas if one.request_id == name for x in one.logprobs] for name in ids]
    return answers, [delta.metrics for delta in deltas if delta.metrics is not None]


@dataclass(frozen=True, repr=False)
class Plain:
    """Every request alone, without a drafter, one token at a time."""

    weights: str
    answers: list
    cached: dict

    def engine(self, drafter="trained", **plan):
        """Return another engine for the same requests."""
        return tiny.engine(drafter, dtype="float32", weights=self.weights, **plan)


@pytest.fixture(scope="module", params=["none", "int8"])
def plain(request):
    answers, cached = [], {}
    for index in range(len(PROMPTS)):
        engine = tiny.engine(
            "none", dtype="float32", weights=request.param, width=1, prefix_cache=False, page_size=16
        )
        engine.add(PROMPTS[index], params(index, width=1))
        deltas, found = watch(engine)
        answers.append([one for delta in deltas for one in delta.logprobs])
        cached |= found
    assert all(len(answer) == 24 for answer in answers)
    assert isinstance(engine.models.target.embedding.weight, Int8Matrix) is (request.param == "int8")
    return Plain(request.param, answers, cached)


def watch(engine):
    """Run an engine to its end; return its deltas, and by seed the longest keys and values that it had."""
    deltas, cached = [], {}
    while engine.has_work:
        deltas += engine.step()
        cached |= {
            sequence.sampling.seed: keys_and_values(engine, sequence.row)
            for sequence in engine.scheduler.running
            if sequence.num_placed_pages is not None
        }
    return deltas, cached


def keys_and_values(engine, row):
    """Return [layers of the target, 2, heads, positions, size]."""
    place = torch.arange(int(engine.rows.length[row]))
    page_size = engine.plan.page_size
    slots = engine.rows.page_table[row, place // page_size] * page_size + place % page_size
    layers = engine.cache.storage[: len(engine.models.config.layers)]
    return torch.stack([torch.stack((layer.keys[:, slots], layer.values[:, slots])) for layer in layers])


@pytest.mark.parametrize("width", [3, 8])
def test_bits_do_not_depend_on_the_width(plain, width):
    for index, answer in enumerate(plain.answers):
        assert serve(plain.engine(width=width), [index]) == [answer]


@pytest.mark.parametrize(("drafter", "width"), [("random", 5), *PAIRS])
def test_bits_do_not_depend_on_the_drafter(plain, drafter, width):
    assert serve(plain.engine(drafter, width=width), range(len(PROMPTS))) == plain.answers


@of_floats
@pytest.mark.parametrize(("drafter", "width"), slow_but(PAIRS, *PAIRS[:3]))
def test_a_row_is_drafted_for_alike_alone_and_beside_others(plain, drafter, width):
    """The number of steps is the same, captured or not."""
    engine = plain.engine(drafter, width=width)
    alone = [serve_with_metrics(engine, [index])[1][0].steps for index in range(len(PROMPTS))]
    assert min(alone) < 24, "nothing was accepted"
    for is_captured in (False, True):
        engine = plain.engine(drafter, width=width, is_captured=is_captured)
        ids = [engine.add(prompt, params(i, logprobs=None)) for i, prompt in enumerate(PROMPTS)]
        deltas = tiny.drain(engine)
        found = {delta.request_id: delta.metrics.steps for delta in deltas if delta.metrics is not None}
        assert [found[one] for one in ids] == alone


@pytest.mark.parametrize("drafter", slow_but(["trained", *dict(PAIRS)], "trained", "DFlash2"))
def test_a_row_of_its_own_width_is_drafted_for_alike_alone_and_beside_others(plain, drafter):
    widths = (5, 2, 8, 3)

    def steps(engine, indices):
        ids = [
            engine.add(PROMPTS[index], params(index, logprobs=None, width=widths[index])) for index in indices
        ]
        deltas = tiny.drain(engine)
        found = {delta.request_id: delta.metrics.steps for delta in deltas if delta.metrics is not None}
        return [found[one] for one in ids]

    alone = [steps(plain.engine(drafter, width=8), [index])[0] for index in range(len(PROMPTS))]
    assert min(alone) < 24, "nothing was accepted"
    for is_captured in (False, True):
        engine = plain.engine(drafter, width=8, is_captured=is_captured)
        assert steps(engine, range(len(PROMPTS))) == alone
    assert any(not size.is_even for size in engine.graphs._graphs)


PLANS = [
    {"max_prefill_tokens": 1, "page_size": 3},
    {"max_prefill_tokens": 7, "max_num_seqs": 2},
    {"chunks": 1, "page_size": 1},
]


@of_floats
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bits_do_not_depend_on_the_batch_chunks_and_pages(plain, plan):
    assert serve(plain.engine(**plan), range(len(PROMPTS))) == plain.answers


@of_floats
def test_bits_do_not_depend_on_a_prefix_hit(plain):
    engine = plain.engine(prefix_cache=True, page_size=2)
    assert serve(engine, [0]) == plain.answers[:1]
    answers, metrics = serve_with_metrics(engine, [1, 0])
    assert answers == [plain.answers[1], plain.answers[0]]
    assert all(one.num_cached_tokens > 0 for one in metrics)


@pytest.mark.parametrize("places", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_log_probabilities_do_not_depend_on_how_many_others_ask_for(monkeypatch, places):
    """Round logits to `places` bits, if given, so that many tokens are equally likely."""
    logits = Decoder.logits
    if places is not None:
        coarse = 2.0**places
        monkeypatch.setattr(Decoder, "logits", lambda self, x: (logits(self, x) * coarse).round() / coarse)
    counts = [1, 20, 0, 3]
    wishes = [{"logprobs": count, "prompt_logprobs": counts[-1 - i]} for i, count in enumerate(counts)]

    def served(indices):
        engine = tiny.engine("trained", dtype="float32", width=8, max_prefill_tokens=7)
        ids = [engine.add(PROMPTS[i], params(i, **wishes[i])) for i in indices]
        deltas = tiny.drain(engine)
        of_prompts = {one.request_id: one.prompt_logprobs for one in deltas if one.prompt_logprobs}
        of_answers = [[x for one in deltas if one.request_id == name for x in one.logprobs] for name in ids]
        return [([*of_prompts[name][1:], *found]) for name, found in zip(ids, of_answers, strict=True)]

    together = served(range(len(PROMPTS)))
    assert together == [found for i in range(len(PROMPTS)) for found in served([i])]
    tops = [one.top for found in together for one in found if one.top]
    assert {len(top) for top in tops} == {1, 3, 20}
    assert all(list(top) == sorted(top, key=lambda pair: (-pair[1], pair[0])) for top in tops)
    has_ties = [len({value for _, value in top}) < len(top) for top in tops]
    assert any(has_ties) is (places is not None)


@of_floats
def test_bits_do_not_depend_on_preemption(plain):
    engine = plain.engine(page_size=2, num_pages=80, prefix_cache=False)
    answers, metrics = serve_with_metrics(engine, range(len(PROMPTS)))
    assert answers == plain.answers
    assert any(one.preemptions > 0 for one in metrics)


@of_floats
def test_bits_do_not_depend_on_the_number_of_threads(plain):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert serve(plain.engine(), range(len(PROMPTS))) == plain.answers
        assert_captured_bits(plain, {})
    finally:
        torch.set_num_threads(threads)


@of_floats
@pytest.mark.parametrize("kind", ["trained", "DFlash2"])
def test_bits_do_not_depend_on_the_widths_of_rows(plain, kind):
    """Each row and step has its own; the log-probabilities are of steps that are not captured."""
    for seed in (1, 2):
        engine = plain.engine(kind, width=8, widths=seed, is_captured=seed == 2)
        assert serve(engine, range(len(PROMPTS))) == plain.answers


CAPTURED = [
    {"widths": 1},
    {"widths": 2, "overlap": True, "page_size": 3},
    {"width": 3, "max_num_seqs": 2},
    {"width": 1, "page_size": 3},
    {"max_prefill_tokens": 7, "overlap": True},
    {"drafter": "DFlash2"},
    {"drafter": "DSpark", "max_num_seqs": 2},
    {"drafter": "XPress"},
    {"drafter": "Domino"},
    {"drafter": "LiLiCorr", "draft_kv_dtype": "int8"},
]


@pytest.mark.parametrize(
    ("plain", "plan"),
    [("int8", CAPTURED[0]), *(("none", plan) for plan in CAPTURED[1:])],
    indirect=["plain"],
    ids=str,
)
def test_bits_do_not_depend_on_whether_a_step_is_captured(plain, plan):
    assert_captured_bits(plain, plan)


def assert_captured_bits(plain, plan):
    engine = plain.engine(is_captured=True, **plan)
    ids = [engine.add(PROMPTS[index], params(index, logprobs=None)) for index in range(len(PROMPTS))]
    deltas, cached = watch(engine)
    for request_id, answer in zip(ids, plain.answers, strict=True):
        tokens = [token for delta in deltas if delta.request_id == request_id for token in delta.token_ids]
        assert tokens == [one.token_id for one in answer]
    assert engine.graphs._graphs, "steps were captured"
    assert cached.keys() == plain.cached.keys()
    for seed, expected in plain.cached.items():
        length = min(expected.shape[3], cached[seed].shape[3])
        assert length > len(PROMPTS[seed]) + 14 - tiny.BLOCK
        assert torch.equal(cached[seed][:, :, :, :length], expected[:, :, :, :length])
