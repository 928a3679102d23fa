"""Requests to the engine: sampling, limits, aborts and preemption."""

import math

import pytest
import torch

from blockdraft.engine.request import SamplingParams
from blockdraft.errors import RequestError
from tests import tiny

PROMPT = [2, 4, 6, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def greedy(**changes):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **changes})


def answer(params, prompt=PROMPT, **plan):
    """(token_ids, text, finish_reason, all deltas) of one request."""
    engine = tiny.engine(**{"width": tiny.BLOCK, **plan})
    engine.add(prompt, params)
    deltas = tiny.drain(engine)
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, "".join(d.text for d in deltas), deltas[-1].finish_reason, deltas


def test_max_tokens_cuts_inside_a_block():
    full, *_ = answer(GREEDY)
    for count in range(1, 12):
        tokens, _, reason, _ = answer(greedy(max_tokens=count))
        assert (tokens, reason) == (full[:count], "length")


def test_a_stop_token_ends_the_answer_inside_a_block_and_stays_out_of_the_text():
    full, text, *_ = answer(GREEDY)
    for place in range(1, 10):
        stop = full[place]
        first = full.index(stop)
        tokens, short, reason, deltas = answer(greedy(stop_token_ids=(stop,)))
        assert tokens == full[: first + 1]
        assert (reason, deltas[-1].stop_reason) == ("stop", stop)
        assert text.startswith(short)
        assert len(short.split()) == first


def test_a_stop_string_across_tokens_and_blocks_ends_the_answer_where_it_completes():
    full, text, *_ = answer(GREEDY)
    words = text.split()
    for place in range(1, 9):
        stop = f"{words[place]} {words[place + 1]}"
        tokens, short, reason, deltas = answer(greedy(stop=[stop, "never"]))
        end = text.index(stop)
        assert short == text[:end]
        assert (reason, deltas[-1].stop_reason) == ("stop", stop)
        assert tokens == full[: len(tokens)]
        assert len(tokens) == len(text[: end + len(stop)].split())
        _, kept, *_ = answer(greedy(stop=[stop], include_stop_str_in_output=True))
        assert kept == text[: end + len(stop)]


def test_eos_ends_the_answer_unless_ignored_or_below_min_tokens():
    eos = greedy(ignore_eos=False, logit_bias={62: 100.0})
    assert answer(eos)[:3] == ([62], "", "stop")
    tokens, _, reason, _ = answer(greedy(logit_bias={62: 100.0}, max_tokens=5))
    assert (tokens, reason) == ([62] * 5, "length")
    tokens, _, reason, _ = answer(greedy(ignore_eos=False, logit_bias={62: 100.0}, min_tokens=6))
    assert len(tokens) == 7
    assert tokens[-1] == 62
    assert 62 not in tokens[:-1]
    assert reason == "stop"


def test_the_context_limit_ends_the_answer():
    tokens, _, reason, _ = answer(greedy(max_tokens=None), max_model_len=30)
    assert len(PROMPT) + len(tokens) == 30
    assert reason == "length"


def test_choices_of_one_request_differ_and_the_first_is_the_single_answer():
    params = {"temperature": 1.0, "seed": 9, "max_tokens": 20, "ignore_eos": True}
    alone = tiny.run(tiny.engine(), [(PROMPT, SamplingParams(**params))])[0]
    together = tiny.run(tiny.engine(page_size=2), [(PROMPT, SamplingParams(n=4, **params))])[0]
    assert together[0] == alone[0]
    assert len({tuple(tokens) for tokens, _, _ in together}) == 4


def test_a_prefix_that_another_row_holds_is_offered_again_only_when_pages_were_forgotten(monkeypatch):
    engine = tiny.engine(page_size=4)
    pages, offers = engine.scheduler.pages, []
    remember = pages.remember

    def counted(*args, **kwargs):
        offers.append(args)
        return remember(*args, **kwargs)

    monkeypatch.setattr(pages, "remember", counted)
    for _ in range(2):  # admitted together: neither finds the other's pages
        engine.add(PROMPT, greedy(max_tokens=40, ignore_eos=True))
    engine.step()
    second = engine.scheduler.running[1]
    while len(second.token_ids) < len(PROMPT) + 12:
        engine.step()
    assert sum(pages_of is second.pages for _, pages_of, *_ in offers) == 1
    assert second.num_remembered_pages == 0
    pages.num_forgotten += 1
    engine.step()
    assert sum(pages_of is second.pages for _, pages_of, *_ in offers) == 2


def test_offering_a_page_does_not_copy_the_tokens_before_it():
    class Tokens(list):
        def __getitem__(self, place):
            assert not isinstance(place, slice) or len(range(len(self))[place]) <= 4
            return super().__getitem__(place)

    engine = tiny.engine("none", page_size=4, prefix_cache=True)
    engine.add(PROMPT, greedy(max_tokens=20, ignore_eos=True))
    engine.step()
    (sequence,) = engine.scheduler.running
    sequence.token_ids = Tokens(sequence.token_ids)
    tiny.drain(engine)
    assert len(sequence.token_ids) == len(PROMPT) + 20


def test_requests_without_a_seed_differ_and_the_engine_seed_repeats_them():
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    first, second = (tiny.run(tiny.engine(seed=4), [(PROMPT, params)] * 2) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    assert tiny.run(tiny.engine(seed=5), [(PROMPT, params)] * 2) != first


def test_logprobs_are_the_models_own_and_come_with_every_token_of_a_block():
    tokens, _, _, deltas = answer(greedy(logprobs=3, logit_bias={1: 1.5}, max_tokens=12))
    items = [item for delta in deltas for item in delta.logprobs]
    assert [item.token_id for item in items] == tokens
    engine = tiny.engine("none", width=1)
    for index, item in enumerate(items):
        expected = target_logprobs(engine.models, PROMPT + tokens[:index])
        values, ids = expected.topk(3)
        assert math.isclose(item.logprob, expected[item.token_id], abs_tol=1e-9)
        assert [token for token, _ in item.top] == ids.tolist()
        assert [value for _, value in item.top] == pytest.approx(values.tolist(), abs=1e-9)


def test_prompt_logprobs_cover_the_prompt_in_chunks_and_despite_a_cached_prefix():
    prompt = list(range(3, 23))
    for plan in ({"max_prefill_tokens": 3}, {"max_prefill_tokens": 64}):
        engine = tiny.engine(page_size=4, **plan)
        engine.add(prompt, greedy(max_tokens=2))
        tiny.drain(engine)
        engine.add(prompt, greedy(max_tokens=12, prompt_logprobs=2))
        deltas = tiny.drain(engine)
        listed = deltas[0].prompt_logprobs
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])
        assert listed[0] is None
        assert [item.token_id for item in listed[1:]] == prompt[1:]
        for index in range(1, len(prompt)):
            expected = target_logprobs(engine.models, prompt[:index])
            assert math.isclose(listed[index].logprob, expected[prompt[index]], abs_tol=1e-9)
            assert [token for token, _ in listed[index].top] == expected.topk(2).indices.tolist()


@torch.inference_mode()
def test_penalties_count_every_token_before_the_one_being_chosen():
    """Against the rule by hand: the token just emitted counts too, the prompt for repetition only."""
    params = greedy(
        repetition_penalty=1.2,
        frequency_penalty=0.6,
        presence_penalty=0.9,
        logit_bias={7: 8.0, 9: 8.0},
        max_tokens=25,
    )
    tokens, *_ = answer(params)
    models = tiny.load("float64")
    for index, token in enumerate(tokens):
        scores = target_logits(models, PROMPT + tokens[:index])
        scores[[7, 9]] += 8.0
        for seen in set(PROMPT + tokens[:index]):
            scores[seen] = scores[seen] / 1.2 if scores[seen] > 0 else scores[seen] * 1.2
        for seen in tokens[:index]:
            scores[seen] -= 0.6
        for seen in set(tokens[:index]):
            scores[seen] -= 0.9
        assert token == scores.argmax()


def target_logprobs(models, token_ids):
    return target_logits(models, token_ids).log_softmax(-1)


@torch.inference_mode()
def target_logits(models, token_ids):
    """Logits after `token_ids`, from one forward over all of them in a fresh engine."""
    engine = tiny.engine("none", width=1, prefix_cache=False)
    engine.add([*token_ids, 0], greedy(max_tokens=1))
    batch = engine.scheduler.schedule()
    engine._place(batch)
    view = engine.cache.view(engine.rows, batch.counts)
    hidden, _ = models.target(torch.tensor(token_ids), view)
    return models.target.logits(hidden[-1:])[0].clone()


def test_abort_frees_rows_and_pages_at_any_moment_and_leaves_the_others_alone():
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    alone = tiny.run(tiny.engine(), [(PROMPT, params)])[0][0][0]
    for overlap in (False, True):
        for moment in range(overlap, 12, 2):
            engine = tiny.engine(max_num_seqs=2, max_prefill_tokens=4, overlap=overlap)
            kept = engine.add(PROMPT, params)
            gone = engine.add(list(range(30)), GREEDY)
            queued = engine.add(PROMPT, GREEDY)
            deltas = [delta for _ in range(moment) for delta in engine.step()]
            ended = engine.abort(gone) + engine.abort(queued) + engine.abort("never added")
            assert {d.finish_reason for d in ended} == {"abort"}
            engine.check()
            deltas += tiny.drain(engine)
            assert [t for d in deltas if d.request_id == kept for t in d.token_ids] == alone


def test_preemption_happens_when_pages_run_out_and_changes_nothing():
    params = [
        SamplingParams(
            temperature=0.3,
            seed=i,
            max_tokens=40,
            ignore_eos=True,
            frequency_penalty=0.5,
            logit_bias={7: 8.0, 9: 8.0},
        )
        for i in range(4)
    ]
    requests = [([i, i + 1, i + 2], p) for i, p in enumerate(params)]
    roomy = tiny.run(tiny.engine(), requests)
    engine = tiny.engine(page_size=2, num_pages=40, prefix_cache=False)
    assert tiny.run(engine, requests) == roomy
    tight = tiny.engine(page_size=2, num_pages=40, prefix_cache=False)
    for prompt, sampling in requests:
        tight.add(prompt, sampling)
    assert sum(d.metrics.preemptions for d in tiny.drain(tight) if d.metrics) > 0


def test_penalty_counts_are_the_emitted_tokens_before_the_anchor_also_after_preemption():
    engine = tiny.engine(width=4, prefix_cache=False)
    engine.add(PROMPT, greedy(frequency_penalty=0.1, logit_bias={7: 20.0}))
    for moment in range(12):
        engine.step()
        for sequence in engine.scheduler.running:
            if sequence.is_decoding and sequence.num_placed_pages is not None:
                emitted = torch.tensor(sequence.token_ids[4:-1], dtype=torch.int64)
                expected = torch.bincount(emitted, minlength=64)
                assert torch.equal(engine.rows._output_counts[sequence.row], expected.int())
        if moment == 5:
            assert sequence.num_output > 4
            engine.scheduler._preempt(sequence)
    assert sequence.tally.preemptions == 1
    assert sequence.num_output > 8


def test_a_request_id_in_use_is_refused():
    engine = tiny.engine()
    engine.add(PROMPT, GREEDY, request_id="a")
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add(PROMPT, GREEDY, request_id="a")
    tiny.drain(engine)
    engine.add(PROMPT, GREEDY, request_id="a")


def test_widths_of_requests_are_obeyed_and_counted():
    engine = tiny.engine("trained", width=tiny.BLOCK)
    ids = {engine.add(PROMPT, greedy(width=width)): width for width in (1, 4, None)}
    ended = {ids[d.request_id]: d.metrics for d in tiny.drain(engine) if d.metrics}
    assert (ended[1].steps, ended[1].drafted, ended[1].accepted) == (40, 0, ())
    assert len(ended[4].accepted) == 3
    assert len(ended[None].accepted) == 7
    for metrics in ended.values():
        assert metrics.drafted == metrics.steps * len(metrics.accepted)
        assert sorted(metrics.accepted, reverse=True) == list(metrics.accepted)
        assert metrics.num_tokens == 40


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        (list(range(60)) * 4, {}, "240 tokens"),
        ([64], {}, "token id 64"),
        ([-1], {}, "token id -1"),
        ([1], {"logit_bias": {99: 1.0}}, "token id 99"),
        ([1], {"stop_token_ids": (64,)}, "token id 64"),
        ([1], {"width": 9}, "at most 8"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt, params, message):
    with pytest.raises(RequestError, match=message):
        tiny.engine(width=tiny.BLOCK).add(prompt, SamplingParams(**params))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": dict.fromkeys(range(4), 1.0)}, "logit_bias has 4 entries; at most 3"),
        ({"stop_token_ids": (5, 6, 7)}, "stop_token_ids has 4 entries .*; at most 3"),  # and the end of text
    ],
)
def test_a_list_longer_than_a_row_holds_is_refused(monkeypatch, params, message):
    monkeypatch.setattr("blockdraft.engine.engine.MAX_LISTED", 3)
    with pytest.raises(RequestError, match=message):
        tiny.engine().add(PROMPT, SamplingParams(**params))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": 2.0},
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"seed": 2**63},
        {"stop": [""]},
        {"stop": 5},
        {"stop_token_ids": None},
        {"stop_token_ids": [1.5]},
        {"logit_bias": [1]},
        {"stop": ["a"] * 65},
        {"logit_bias": {3: 101.0}},
        {"width": 0},
        {"n": True},
    ],
)
def test_impossible_sampling_values_are_refused_by_name(params):
    name = next(iter(params))
    with pytest.raises(RequestError, match=name.split("_")[0]) as caught:
        SamplingParams(**params)
    assert "\n" not in str(caught.value)


def test_a_freed_page_full_of_nan_reaches_nobody():
    """Leftovers of a broken sequence are never multiplied in, not even by zero."""
    engine = tiny.engine(page_size=4, prefix_cache=False)
    expected = tiny.run(engine, [(PROMPT, GREEDY)])
    for layer in engine.cache.storage:
        layer.keys[:, 4:] = float("nan")
        layer.values[:, 4:] = float("nan")
    assert tiny.run(engine, [(PROMPT, GREEDY)]) == expected
