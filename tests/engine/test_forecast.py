"""What a drafter says of its drafts, in the governor: worth what comes true of it, and nothing without it."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import confidence as simulation
from blockdraft import LLM, SamplingParams
from blockdraft.engine.forecast import RowForecast
from blockdraft.engine.width_controller import BELIEF, DraftChances, DraftRecord, StepCosts, WidthController
from blockdraft.grammar.structured_output import StructuredOutputs
from tests import tiny
from tests.grammar import json_tokens
from tests.matrix import slow_but

COSTS = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 6: 1.5, 8: 1.8}
LOGS = np.full(7, math.log(0.7))


# ---- what it is worth


def learnt(head, num_steps=300, num_rows=4):
    """What confidence is worth where rows differ, and stay as they are."""
    draw, forecast = np.random.default_rng(1), RowForecast(len(LOGS))
    own = draw.normal(size=(num_rows, 1))  # log-odds of a row's drafts against all rows'
    sureness = np.zeros(num_rows)
    for _ in range(num_steps):
        noise, odds = draw.normal(size=(2, num_rows, len(LOGS))), own + math.log(0.7 / 0.3)
        right = np.cumprod(draw.random(noise[0].shape) < 1 / (1 + np.exp(-odds)), axis=1).sum(axis=1)
        said = forecast.learn(np.ones(num_rows), sureness, LOGS, right, head(odds + 0.3 * noise[0], noise[1]))
        sureness = said / len(LOGS)
    return forecast.worth[1]


def test_confidence_is_worth_what_comes_true_of_it():
    good = learnt(lambda odds, noise: odds)
    assert good > 0.5
    assert learnt(lambda odds, noise: 5 * odds + 3) == pytest.approx(good, rel=0.01), (
        "exaggerating changes nothing"
    )
    assert learnt(lambda odds, noise: noise) < 0.25 * good
    assert learnt(lambda odds, noise: np.zeros_like(odds)) == 0
    assert learnt(lambda odds, noise: -odds) == 0, "what is always wrong is not believed the other way round"


def test_a_row_that_the_drafter_is_sure_of_is_expected_to_do_better():
    forecast = RowForecast(7)
    forecast.worth = np.array([1.0, 0.8])
    powers = forecast.powers(np.ones(3), np.array([-1.0, 0.0, 1.0]))
    assert (np.diff(powers, axis=0) < 0).all(), "a higher power of a chance is a lower chance"
    assert powers[1] == pytest.approx(1)


def test_all_drafts_are_heard_and_fade_also_while_steps_are_plain():
    record = DraftRecord()
    record.hear(7, 3.5)
    before = record.sureness
    record.count(8, 0)
    assert record.sureness == before > 0
    for _ in range(60):
        record.count(1, 0)
    assert 0 < record.sureness < 0.2 * before


# ---- nobody says anything


def silently(chances, records, widths, hope):
    """What a step commits, by outcomes alone, written down once more."""
    logs = chances.logs
    middle = float(np.exp(logs[:4].mean()))
    reached = np.zeros(len(logs))
    for one in records:
        chance = np.clip((BELIEF * middle + one.num_right) / (BELIEF + one.num_tried), 0.01, 0.99)
        reached += np.exp(hope * np.log(chance) / math.log(middle) * np.cumsum(logs))
    return [len(records) + reached[: width - 1].sum() for width in widths]


@pytest.mark.parametrize("hope", [1.0, 0.4])
def test_without_confidence_outcomes_alone_decide(hope):
    draw, chances, records = (
        np.random.default_rng(0),
        DraftChances([0.6] * 7),
        [DraftRecord() for _ in range(5)],
    )
    governor = WidthController(StepCosts({(1, 1): 1.0}, [8]), chances, first=8, block=8)
    for _ in range(20):
        right = draw.integers(0, 8, 5)
        governor.observe(8, right.tolist(), 1.0, records, None)
        for record, count in zip(records, right.tolist(), strict=True):
            record.count(8, count)
        found = chances.committed(records, (1, 2, 8), hope)
        assert found == pytest.approx(silently(chances, records, (1, 2, 8), hope), rel=1e-13)
    assert chances.forecast is None
    assert {(one.num_said, one.sum_said) for one in records} == {(0.0, 0.0)}


@pytest.mark.parametrize("drafter", ["trained", "DFlash2", "ngram"])
def test_a_drafter_without_the_head_says_nothing(drafter):
    engine = governed_engine(drafter, draft_ngram=1 if drafter == "ngram" else 0)
    heard = listen(engine)
    ask(engine)
    assert heard
    assert {said for _, _, said in heard} == {None}
    assert engine.scheduler._width_controller.chances.forecast is None


# ---- in simulation


speed = functools.cache(simulation.run)


def gain(head, cost, *, rows=1, seeds=3):
    world = simulation.World(cost, rows, stretch=50, overlap=cost is simulation.large_card, tokens=2000)
    return np.mean([speed(world, head, seed) / speed(world, None, seed) for seed in range(seeds)])


@pytest.mark.parametrize("head", slow_but(["well calibrated", "overconfident"], "well calibrated"))
def test_a_head_that_knows_something_makes_steps_faster_where_wrong_drafts_cost_much(head):
    seeds = 3 if head == "well calibrated" else 10  # three seeds alone differ by 2 %
    assert gain(head, simulation.two_cores, seeds=seeds) > 1.02


@pytest.mark.parametrize("head", slow_but(["useless", "opposite", "of tokens only"], "useless"))
def test_a_head_that_knows_nothing_costs_nothing(head):
    assert gain(head, simulation.two_cores) > 0.995


@pytest.mark.parametrize("head", slow_but(["well calibrated", "overconfident", "useless"], "useless"))
@pytest.mark.parametrize("rows", slow_but([1, 4], 1))
def test_where_wide_steps_are_cheap_anyway_next_to_nothing_is_lost(head, rows):
    """The first hundred steps count here, too, in which nobody knows what confidence is worth."""
    assert gain(head, simulation.large_card, rows=rows, seeds=2) > 0.985


# ---- in the engine


def governed_engine(drafter="DSpark", max_num_seqs=4, **plan):
    costs = {(rows, width): cost for width, cost in COSTS.items() for rows in (1, 4)}
    return tiny.engine(
        drafter, width=8, max_num_seqs=max_num_seqs, step_costs=costs, draft_chances=(0.6,) * 7, **plan
    )


def listen(engine):
    """(width, drafts that were right, what was said of all drafts) of every step from here on."""
    heard, governor = [], engine.scheduler._width_controller
    observe = governor.observe

    def listening(width, num_right, seconds, records=(), odds=None):
        heard.append((width, tuple(num_right), None if odds is None else odds.copy().tobytes()))
        if odds is not None:
            assert odds.shape == (len(num_right), width - 1)
            assert len(records) == len(num_right)
        observe(width, num_right, None, records, odds)  # the clock decides nothing

    governor.observe = listening
    return heard


def requests(temperature=0.0, **more):
    params = SamplingParams(temperature=temperature, max_tokens=40, **{"ignore_eos": True} | more)
    return [([i, i + 1, i + 2, i + 3], replace(params, seed=i)) for i in range(6)]


def ask(engine, **more):
    return tiny.run(engine, requests(**more))


@pytest.mark.parametrize("kind", slow_but(tiny.SPARKS, "DSpark"))
def test_captured_steps_say_what_others_do(kind):
    said = []
    for is_captured in (False, True):
        engine = governed_engine(kind, is_captured=is_captured)
        said.append(listen(engine))
        widths = itertools.cycle((8, 2, 5, 1, 3))
        engine.scheduler._width_controller.next_width = lambda *asked, its=widths: next(its)
        tiny.run(engine, requests(1.0)[:4])
    assert said[0] == said[1]
    assert {width for width, _, odds in said[0] if odds is not None} == {8, 2, 5, 3}
    assert {width for width, _, odds in said[0] if odds is None} == {1}


def test_what_the_governor_hears_is_what_the_drafter_said():
    engine = governed_engine(max_num_seqs=1)
    heard, drafter, drafted = listen(engine), engine.models.drafter, []
    draft = type(drafter).draft

    class Noting(type(drafter)):
        def draft(self, *asked):
            drafted.append(draft(self, *asked).confidence)
            return draft(self, *asked)

    engine.models = replace(engine.models, drafter=Noting(drafter.model, drafter.target))
    ask(engine)
    assert len(heard) == len(drafted)
    for (width, _, said), odds in zip(heard, drafted, strict=True):
        if width > 1:
            found = np.frombuffer(said).reshape(1, width - 1)
            assert np.allclose(found, odds.numpy(), atol=1 / 1024)
    assert engine.scheduler._width_controller.chances.forecast.worth[1] >= 0


@functools.cache
def first_said(dtype, quantization="auto"):
    """Of the first block behind a prompt."""
    options = {"draft_quantization": quantization, "width": 8, "graphs": False, "overlap": False}
    llm = LLM(tiny.TARGET, tiny.SPARK, dtype=dtype, device="cpu", **options)
    said, outcome = [], llm.engine._outcome
    llm.engine._outcome = lambda *step: said.append(outcome(*step)) or said[-1]
    llm.generate([[2, 4, 6, 8]], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    return next(one.confidence for one in said if one.confidence is not None)


@pytest.mark.parametrize(
    ("dtype", "weights"), [("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8"), ("float32", "fp8")]
)
def test_other_numbers_say_nearly_the_same(dtype, weights):
    assert np.allclose(first_said(dtype, weights), first_said("float64"), atol=0.1)
    assert np.ptp(first_said("float64")) > 0


def test_confidence_of_a_trained_head_is_believed():
    """The tiny pair's head was trained with it: what it says comes true."""
    engine = governed_engine()
    listen(engine)
    for _ in range(3):
        ask(engine, temperature=1.0)
    assert engine.scheduler._width_controller.chances.forecast.worth[1] > 0


def test_steps_in_parts_say_it_too():
    engine = governed_engine(tokenizer=json_tokens.tokenizer())
    heard = listen(engine)
    ask(engine, structured_outputs=StructuredOutputs(regex="([xy]truetrue){4}"), ignore_eos=False)
    assert any(width > 1 for width, _, _ in heard)
    assert all(odds is not None for width, _, odds in heard if width > 1)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_widths_by_confidence_change_no_token(temperature, overlap, is_captured):
    engine = governed_engine(overlap=overlap, is_captured=is_captured)
    heard = listen(engine)
    expected = tiny.run(tiny.engine("none", width=1), requests(temperature))
    assert ask(engine, temperature=temperature) == expected
    assert len({width for width, _, _ in heard}) > 1
