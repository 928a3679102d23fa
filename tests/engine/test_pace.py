"""The width of a request's next step: what is known of its drafts, what follows, and the same tokens."""

import random
from dataclasses import replace

import pytest

from blockdraft import LLM, SamplingParams
from blockdraft.engine import pace as module
from blockdraft.engine.pace import DraftRecord, Pace
from blockdraft.engine.sequence import Tally
from tests import tiny

COSTS = {1: 1.0, 2: 1.42, 3: 1.53, 4: 1.68, 6: 2.0, 8: 2.4, 12: 3.4}  # two cores and the default model
PACE = Pace(3, COSTS)


def after(*steps):
    record = DraftRecord()
    for width, num_right in steps:
        record.count(width, num_right)
    return record


def test_drafts_behind_the_first_wrong_one_were_not_put_to_the_test(monkeypatch):
    monkeypatch.setattr(module, "FADE", 1.0)
    cases = {(8, 0): (1, 0), (8, 3): (4, 3), (8, 7): (7, 7), (2, 0): (1, 0), (2, 1): (1, 1), (1, 0): (0, 0)}
    for step, expected in cases.items():
        record = after(step)
        assert (record.num_tried, record.num_right) == expected, step
    record = after(*cases)
    assert (record.num_tried, record.num_right) == (14, 11)


def test_every_step_of_a_sequence_is_recorded():
    """The last token of a step is the target's own; the others are drafts that were right."""
    engine = tiny.engine(width=3, step_costs=COSTS)
    engine.add([2, 4, 6, 8], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    engine.step()
    (sequence,), steps = engine.scheduler.running, []
    for _ in range(5):
        (delta,) = engine.step()
        steps.append((engine.scheduler._last_width, len(delta.token_ids) - 1))
    assert sequence.tally.record == after(*steps) != DraftRecord()


def test_a_tally_counts_the_steps_that_accepted_each_draft():
    tally = Tally()
    for width, num_committed in ((4, 3), (4, 1), (2, 2), (1, 1)):
        tally.count_step(width, num_committed)
    assert (tally.steps, tally.drafted, tally.accepted) == (4, 7, (2, 1, 0))


@pytest.mark.parametrize("width", COSTS)
def test_a_request_begins_with_the_width_of_the_plan(width):
    pace = Pace(width, COSTS)
    assert pace.next_width(after()) == width
    assert pace.next_width(DraftRecord(1e-9, 0.0)) == width, "and it changes little by little"


def test_a_width_that_no_chance_makes_the_best_is_begun_with_all_the_same():
    pace = Pace(2, {1: 1.0, 2: 1.9, 3: 1.91})
    assert pace.next_width(after()) == 2
    assert pace.next_width(after((2, 1))) == 3


def test_drafts_that_lose_a_little_are_put_up_with():
    assert PACE.next_width(DraftRecord(1000.0, 360.0)) == 3, "0.97x"
    assert PACE.next_width(DraftRecord(1000.0, 280.0)) == 1, "0.89x"


def test_good_drafts_widen_a_step_and_bad_ones_narrow_it():
    assert PACE.next_width(after(*[(3, 2)] * 8)) == 6
    assert PACE.next_width(after(*[(3, 2)] * 8, *[(6, 0)] * 30)) == 1
    assert PACE.next_width(after(*[(3, 0)] * 20, *[(3, 2)] * 20)) == 6, "what was long ago is forgotten"


def speed(choose, chance, num_tokens=96):
    """Against plain decoding: many answers, every draft right with the same chance."""
    draw, tokens, cost = random.Random(3), 0, 0.0
    for _ in range(300):
        record, end = DraftRecord(), tokens + num_tokens
        while tokens < end:
            width = choose(record)
            num_right = next((n for n in range(width - 1) if draw.random() >= chance), width - 1)
            record.count(width, num_right)
            tokens, cost = tokens + num_right + 1, cost + COSTS[width]
    return tokens / cost


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_it_is_nearly_as_fast_as_the_best_width_would_have_been(chance):
    """Known only afterwards; and hardly ever slower than the plan's width."""
    fixed = {width: speed(lambda _, width=width: width, chance) for width in COSTS}
    found = speed(PACE.next_width, chance)
    assert found >= 0.88 * max(fixed.values())
    assert found >= 0.98 * fixed[3]


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny.TARGET, tiny.DRAFT, dtype="float64", device="cpu", width=3, max_rows=4)


@pytest.fixture
def widths(llm, monkeypatch):
    """The widths of all steps from here on; afterwards the engine follows its own plan again."""
    seen, plan = [], llm.engine.models.plan
    decode = llm.engine.decode
    monkeypatch.setattr(llm.engine, "decode", lambda width, *more: seen.append(width) or decode(width, *more))
    yield seen
    llm.engine.replan(plan)


def follow_costs(llm):
    plan = llm.engine.models.plan
    costs = {width: cost for width, cost in COSTS.items() if width <= plan.block}
    llm.engine.replan(replace(plan, width=3, step_costs=costs))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_widths_that_change_change_no_token(llm, widths, temperature):
    prompts = [[1, 2, 3], [10, 12, 14], [7], [40, 39, 38, 37]]
    params = SamplingParams(temperature=temperature, max_tokens=80, ignore_eos=True, seed=5)
    expected = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert set(widths) == {3}
    widths.clear()
    follow_costs(llm)
    assert [llm.generate([prompt], params)[0].token_ids for prompt in prompts] == expected
    assert len(set(widths)) > 2
    widths.clear()
    assert [one.token_ids for one in llm.generate(prompts, params)] == expected, "together, too"
    assert len(set(widths)) > 2


def test_a_width_that_was_asked_for_stays(llm, widths):
    follow_costs(llm)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, width=5))
    assert set(widths) == {5}
