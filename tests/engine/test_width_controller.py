"""The width of a step: nearly the best fixed one at any load, in simulation; and the same tokens."""

import math
from collections import defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest

from blockdraft import LLM, SamplingParams
from blockdraft.engine import width_controller as module
from blockdraft.engine.scheduler import Scheduler, always
from blockdraft.engine.sequence import Tally
from blockdraft.engine.stats import Stats
from blockdraft.engine.trial_engine import trial_engine
from blockdraft.engine.width_controller import WIDTHS, DraftChances, DraftRecord, StepCosts, WidthController
from blockdraft.step.drafter import NoDrafter
from tests import stepping, tiny
from tests.matrix import slow_but

COSTS = {1: 1.0, 2: 1.42, 3: 1.53, 4: 1.68, 6: 2.0, 8: 2.4}  # two cores and the default model, one row
CHANCES = (0.6,) * 7


# ---- what is known of drafts


def test_drafts_behind_the_first_wrong_one_were_not_put_to_the_test(monkeypatch):
    monkeypatch.setattr(module, "FADE", 1.0)
    cases = {(8, 0): (1, 0), (8, 3): (4, 3), (8, 7): (7, 7), (2, 0): (1, 0), (2, 1): (1, 1), (1, 0): (0, 0)}
    for step, expected in cases.items():
        record = DraftRecord()
        record.count(*step)
        assert (record.num_tried, record.num_right) == expected, step


def test_a_tally_counts_the_steps_that_accepted_each_draft():
    tally = Tally()
    for width, num_committed in ((4, 3), (4, 1), (2, 2), (1, 1)):
        tally.blocks[width, num_committed, num_committed] += 1
    assert (tally.steps, tally.drafted, tally.accepted) == (4, 7, (2, 1, 0))
    # The first wrong one was reached as well; what was not drafted was not.
    assert tally.reached == (3, 1, 1)


def test_a_tally_counts_no_draft_behind_the_end_of_an_answer():
    tally = Tally()
    tally.blocks[8, 8, 8] += 1
    tally.blocks[8, 8, 2] += 1
    assert (tally.steps, tally.drafted, sum(tally.accepted), sum(tally.reached)) == (2, 7 + 1, 7 + 1, 7 + 1)
    assert tally.is_cut
    tally.blocks[8, 3, 0] += 1  # an answer that was ended before it took anything
    assert (tally.steps, tally.drafted, sum(tally.accepted)) == (3, 8, 8)


def test_nothing_being_known_what_a_step_commits_is_what_the_start_expects():
    chances = DraftChances([0.8, 0.5, 0.25])
    found = chances.committed([DraftRecord(), DraftRecord()], (1, 2, 3, 4))
    assert found / 2 == pytest.approx([1.0, 1.8, 2.2, 2.3])


def test_what_is_found_at_one_place_is_expected_behind_it():
    chances = DraftChances([0.5] * 4)
    for _ in range(100):
        chances.count(2, np.array([1, 1, 1, 1]))  # the first draft is always right, nobody tries the second
    first, second = np.exp(chances.logs[:2])
    assert first > 0.95
    assert second > 0.95


def test_a_row_whose_drafts_fail_is_told_from_the_others():
    chances, bad, good = DraftChances([0.6] * 7), DraftRecord(), DraftRecord()
    for _ in range(30):
        bad.count(8, 0)
        good.count(8, 7)
    alone = [chances.committed([record], (8,))[0] for record in (bad, DraftRecord(), good)]
    assert alone == sorted(alone)
    assert alone[0] < 1.5
    assert alone[2] > 4
    assert chances.committed([bad, good], (8,))[0] == pytest.approx(alone[0] + alone[2])


# ---- what steps take


def test_what_was_not_measured_lies_between():
    costs = StepCosts({(1, 1): 1.0, (1, 16): 2.0, (8, 1): 3.0, (8, 16): 10.0}, range(1, 17))
    assert costs.seconds(1, 8) == pytest.approx(1.0 + 7 / 15)
    assert costs.seconds(4, 1) == pytest.approx(1.0 + 2 * 3 / 7)
    assert costs.seconds(8, 16) == 10.0
    assert costs.seconds(16, 16) == pytest.approx(10.0 + 8 * 8 / 7)
    assert costs.seconds(1, 31) == pytest.approx(2.5), "wider than measured: rather too little than too much"
    assert StepCosts({(1, 1): 1.0}, [1, 2, 4]).seconds(3, 8) == 1.0, "nothing else is known"


# Milliseconds of steps with WIDTHS, by rows: Qwen3.5-35B-A3B's shape on an H200 (benchmarks/log.md).
# A drafter makes width 2 dearer than can be known.
MIXTURE = {
    1: (2.82, 4.22, 4.63, 4.98, 5.84, 6.58, 8.03, 9.22),
    8: (6.22, 9.82, 12.13, 13.74, 16.0, 17.51, 19.64, 20.5),
    32: (14.12, 19.41, 21.39, 22.19, 23.54, 24.51, 27.0, 29.32),
}


@pytest.mark.parametrize("rows", MIXTURE)
def test_a_mixture_s_costs_grow_with_the_experts_that_tokens_touch(rows):
    measured = {(one, width): MIXTURE[one][WIDTHS.index(width)] for one in (1, 32) for width in (1, 16)}
    costs = StepCosts(measured, [1, 8, 32], chosen_share=8 / 256)
    for width, expected in zip(WIDTHS, MIXTURE[rows], strict=True):
        if (rows, width) not in {(1, 2), (1, 3), (1, 4)}:
            assert costs.seconds(rows, width) == pytest.approx(expected, rel=0.1)
    dense = StepCosts(measured, [1, 8, 32])
    assert dense.seconds(8, 16) == pytest.approx(13.76, rel=0.01), "linear in the tokens"


def test_steps_that_take_longer_make_all_widths_dearer_and_one_late_step_does_not():
    costs = StepCosts({(1, 1): 1.0, (1, 4): 2.0}, [1])
    for _ in range(20):
        costs.observe(1, 4, 2.0)
    plain = costs.seconds(1, 1)
    costs.observe(1, 4, 50.0)
    assert costs.seconds(1, 4) == pytest.approx(2.0)
    for _ in range(100):
        costs.observe(1, 4, 3.0)
    assert costs.seconds(1, 4) == pytest.approx(3.0, rel=0.01)
    assert costs.seconds(1, 1) == pytest.approx(1.5 * plain, rel=0.01), "the machine is slower for all"
    for _ in range(100):
        costs.observe(1, 4, 0.1)
    assert costs.seconds(1, 1) == pytest.approx(0.05 * plain, rel=0.01)


def test_steps_that_always_take_far_longer_are_believed_in_the_end():
    costs = StepCosts({(1, 1): 1.0}, [1])
    for _ in range(60):
        costs.observe(1, 1, 10.0)
    assert costs.seconds(1, 1) == pytest.approx(10.0, rel=0.05)


def test_of_widths_that_would_have_to_be_waited_for_none_is_chosen():
    """Unless no other can be: then the best is waited for."""
    costs = StepCosts({(1, 1): 1.0, (1, 16): 1.5}, [1])
    controller = WidthController(costs, DraftChances([0.9] * 15), first=16, block=16)
    assert controller.next_width([DraftRecord()]) == 16
    assert controller.next_width([DraftRecord()], lambda rows, width: width in (1, 4)) == 4
    assert gain(controller) > 2
    assert controller.next_width([DraftRecord()], lambda rows, width: False) == 16


# ---- in simulation

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
NUM_STEPS = 1200
BLOCK = 16
ANSWERS = {
    "code": ([0.9] * 15, [0.9] * 15),
    "prose": ([0.75 * 0.985**place for place in range(15)],) * 2,
    "trivia": ([0.5] * 15, [0.5] * 15),
    "nonsense": ([0.2] * 15, [0.2] * 15),
    "worse": ([0.85] * 15, [0.3] * 15),
    "better": ([0.3] * 15, [0.85] * 15),
}


def large_card(rows, width):
    """Seconds, as of Qwen3-8B's shape on an H200: memory up to a hundred tokens, then arithmetic."""
    tokens, draft = rows * width, 0.95 + 0.05 * rows if width > 1 else 0.0
    ms = 4.8 + 0.035 * rows + draft + 0.02 * min(tokens, 100) + 0.0235 * max(0, tokens - 100)
    return ms / 1e3


def small_model(rows, width):
    return (0.76 + (0.25 if width > 1 else 0.0) + 0.0018 * rows * width + 0.002 * rows) / 1e3


def two_cores(rows, width):
    return (16 + (8 if width > 1 else 0) + 4.0 * (rows * width - 1)) / 1e3


def slow_host(rows, width):
    """The step is not what takes the time."""
    return (1.0 + 0.02 * rows) / 1e3


def steady(rows, answer):
    """As many rows in every step, and what their drafts are like: by row, one chance for each place."""
    halves = [dict.fromkeys(range(rows), chances) for chances in ANSWERS[answer]]
    return [halves[2 * step // NUM_STEPS] for step in range(NUM_STEPS)]


def changing(seed, mean=0.6, num_answers=24, num_steps=200):
    """Answers that begin and end at different times, so that one to eight rows run."""
    draw = np.random.default_rng(1000 + seed)
    begun = np.sort(draw.integers(0, 7 * num_steps, num_answers))
    chances = [[chance] * 15 for chance in draw.uniform(mean - 0.1, mean + 0.1, num_answers)]
    steps = [
        {one: chances[one] for one in range(num_answers) if begun[one] <= step < begun[one] + num_steps}
        for step in range(8 * num_steps)
    ]
    return [dict(list(rows.items())[:8]) for rows in steps if rows]


def controller_for(cost, measured, *, chance=0.8, first=BLOCK, sizes=SIZES):
    costs = StepCosts({place: cost(*place) for place in measured}, sizes)
    return WidthController(costs, DraftChances([chance] * 15), first=first, block=BLOCK)


def relative_speed(cost, load, controller, seed, *, noise=0.03):
    """The time that the best fixed width takes for the same tokens of as many rows, over the controlled time.

    On a card the next width is chosen before the last step's result is there.
    """
    draw, records, unseen = np.random.default_rng(seed), defaultdict(DraftRecord), deque()
    taken, others = 0.0, np.zeros(len(WIDTHS))
    for rows in load:
        width, chances = controller.next_width([records[row] for row in rows]), np.array(list(rows.values()))
        num_right = np.cumprod(draw.random(chances.shape) < chances, axis=1)[:, : width - 1].sum(axis=1)
        kept, seconds = np.cumprod(chances, axis=1), np.array([cost(len(rows), one) for one in WIDTHS])
        committed = np.array([len(rows) + kept[:, : one - 1].sum() for one in WIDTHS])  # luck is left out
        taken += cost(len(rows), width)
        others += committed[WIDTHS.index(width)] * seconds / committed
        shown = cost(len(rows), width) * (1 + abs(draw.normal(0, noise))) * (5 if draw.random() < 0.01 else 1)
        unseen.append((list(rows), width, num_right.tolist(), shown))
        if cost is two_cores or len(unseen) > 1:
            tell(controller, records, *unseen.popleft())
    return others.min() / taken


def tell(controller, records, rows, width, num_right, seconds):
    for row, count in zip(rows, num_right, strict=True):
        records[row].count(width, count)
    controller.observe(width, num_right, seconds)


def check_speed(cost, rows, answer, num_seeds):
    corners = [(1, 1), (1, BLOCK), (256, 1), (256, BLOCK)]
    found = [
        relative_speed(cost, steady(rows, answer), controller_for(cost, corners), seed)
        for seed in range(num_seeds)
    ]
    assert np.mean(found) > 0.97


@pytest.mark.parametrize(
    ("cost", "answer"),
    slow_but(
        [(cost, answer) for cost in (large_card, two_cores) for answer in ANSWERS],
        *((large_card, answer) for answer in list(ANSWERS)[::2]),
        *((two_cores, answer) for answer in list(ANSWERS)[1::2]),
    ),
)
def test_it_is_nearly_as_fast_as_the_best_width(cost, answer):
    """The best width is not known before; drafts may turn good or bad on the way."""
    check_speed(cost, 4, answer, num_seeds=1)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("cost", [large_card, small_model, two_cores, slow_host])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256])
def test_it_is_so_at_any_load(cost, rows, answer):
    check_speed(cost, rows, answer, num_seeds=3)


@pytest.mark.parametrize("cost", slow_but([large_card, two_cores], two_cores))
def test_it_is_so_while_answers_come_and_go(cost):
    """Here tries, and times that are believed too soon, cost most: plain steps are nearly as fast."""
    measured = [*((1, width) for width in (1, 2, 3, 4, 6, 8)), (4, 1), (4, 3)]
    for seed in range(2):
        controller = controller_for(cost, measured, chance=0.6, first=3, sizes=range(1, 9))
        assert relative_speed(cost, changing(seed), controller, seed, noise=0.1) > 0.985


# ---- on a busy machine


def disturbed(draw, num_steps):
    """Return a factor on each step's time: calm and busy spells, and single steps that wait for a core."""
    spells = np.repeat(draw.choice([1.0, 1.0, 2.0, 5.0], num_steps // 40 + 1), 40)[:num_steps]
    return spells * np.where(draw.random(num_steps) < 0.2, draw.uniform(1, 4, num_steps), 1.0)


def gain(controller):
    """Return the speedup of the last chosen width over plain steps; None: not known."""
    num_plain = controller.costs.num_plain(1, controller.last.width)
    return None if num_plain is None else controller.last.tokens / num_plain


def run_busy(seed, *, chance, cost=two_cores, is_sure=True, num_steps=2000):
    """Return the width, the known gain and the expected tokens of each step."""
    draw = np.random.default_rng(seed)
    places = [(1, width) for width in (1, 2, 3, 4, 6, 8)]
    factors = [1 + 0.1 * draw.random() if is_sure else disturbed(draw, 81)[::40].min() for _ in places]
    measured = {place: cost(*place) * factor for place, factor in zip(places, factors, strict=True)}
    costs = StepCosts(measured, [1], is_sure=is_sure)
    controller, record = WidthController(costs, DraftChances([0.6] * 15), first=3, block=BLOCK), DraftRecord()
    found = []
    for factor in disturbed(draw, num_steps):
        width = controller.next_width([record])
        found.append(
            (width, gain(controller), controller.chances.committed([record], [controller.last.width])[0])
        )
        num_right = int(np.cumprod(draw.random(width - 1) < chance).sum())
        record.count(width, num_right)
        controller.observe(width, [num_right], cost(1, width) * factor)
    return found


@pytest.mark.parametrize("chance", slow_but([0.3, 0.6, 0.9], 0.6))
def test_noise_never_gives_a_speedup_beyond_the_tokens_of_a_step(chance):
    """Drafts only add to what a plain step takes."""
    for seed in range(6):
        for _, said, tokens in run_busy(seed, chance=chance, num_steps=600):
            assert said is None or said <= tokens + 1e-9


def speed(width, chance):
    """Tokens in the time of a plain step, on two cores that nothing disturbs."""
    kept = np.cumprod([chance] * (width - 1)).sum()
    return (1 + kept) * two_cores(1, 1) / two_cores(1, width)


@pytest.mark.parametrize(
    ("chance", "is_sure"), slow_but([(c, sure) for c in (0.3, 0.8) for sure in (True, False)], (0.8, False))
)
def test_noise_hardly_changes_widths_nor_what_is_said_of_them(chance, is_sure):
    best, speeds, said = max(speed(width, chance) for width in WIDTHS), [], []
    for seed in range(3):
        steps = run_busy(seed, chance=chance, is_sure=is_sure, num_steps=1500)[700:]
        seconds = sum(two_cores(1, width) for width, _, _ in steps)
        tokens = sum(speed(width, chance) * two_cores(1, width) for width, _, _ in steps)
        speeds.append(tokens / seconds)
        said.append(np.median([one for _, one, _ in steps if one is not None]))
    assert np.mean(speeds) > 0.95 * best
    assert np.median(said) == pytest.approx(best, rel=0.15)


@pytest.mark.parametrize("seed", slow_but([40, 52], 40))
def test_a_plain_step_that_was_timed_too_low_does_not_end_all_tries(seed):
    """Busy spells between a plain step and the steps beside it made plain steps look four times too cheap."""
    widths = [width for width, _, _ in run_busy(seed, chance=0.8, is_sure=False, num_steps=1000)]
    assert widths[-300:].count(1) < 150


def test_what_drafts_gain_is_not_said_before_plain_steps_were_timed():
    """The machine was too busy at the start: then plain steps are tried soon, and what is said is theirs."""
    costs = StepCosts({(1, 1): 9.0, (1, 4): 2.0}, [1], is_sure=False)
    controller, plain = WidthController(costs, DraftChances([0.9] * 7), first=4, block=8), 0
    for _ in range(150):
        width = controller.next_width([DraftRecord()])
        if plain < module.BELIEVED:
            assert gain(controller) is None
        plain += width == 1
        controller.observe(width, [width - 1], 1.0 + 0.25 * (width - 1))
    seconds = 1.0 + 0.25 * (controller.last.width - 1)
    assert gain(controller) == pytest.approx(controller.last.tokens / seconds, rel=0.01)


def test_a_plain_step_is_tried_now_and_then_even_where_it_seems_slow():
    """Else times that were measured wrong at the start would be believed for ever."""
    costs = StepCosts({(1, 1): 8.0, **{(1, width): 9.0 for width in (2, 4, 8)}}, [1])
    controller, widths = WidthController(costs, DraftChances([0.9] * 7), first=8, block=8), []
    for _ in range(3000):
        widths.append(controller.next_width([DraftRecord()]))
        controller.observe(widths[-1], [widths[-1] - 1], 1.0 + widths[-1])
    assert 3 <= widths.count(1) < 0.01 * len(widths)
    assert gain(controller) == pytest.approx(controller.last.tokens * 2 / (1 + controller.last.width))


# ---- in the engine


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny.TARGET, tiny.DRAFT, dtype="float64", device="cpu", width=3, max_num_seqs=4, graphs=False)


@pytest.fixture
def widths(llm, monkeypatch):
    """The widths of all steps from here on; afterwards the engine follows its own plan again."""
    seen, plan = [], llm.engine.plan
    decode = llm.engine.decode
    monkeypatch.setattr(llm.engine, "decode", lambda width, *more: seen.append(width) or decode(width, *more))
    monkeypatch.setattr(StepCosts, "observe", lambda *what: None)  # times of a busy machine decide nothing
    yield seen
    llm.engine.replan(plan)


def follow_costs(llm, crowd=1.0):
    """Costs of one row; four rows take `crowd` times as long to verify drafts."""
    plan = llm.engine.plan
    places = {(1, w): cost for w, cost in COSTS.items()}
    places |= {(4, w): cost * (crowd if w > 1 else 1.0) for w, cost in COSTS.items()}
    llm.engine.replan(replace(plan, width=3, step_costs=places, draft_chances=CHANCES))


def test_every_step_of_a_sequence_is_recorded():
    """The last token of a step is the target's own; the others are drafts that were right."""
    costs = {(1, width): cost for width, cost in COSTS.items()}
    engine = tiny.engine(width=3, step_costs=costs, draft_chances=CHANCES)
    engine.add([2, 4, 6, 8], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    engine.step()
    (sequence,), expected = engine.scheduler.running, DraftRecord()
    for _ in range(5):
        (delta,) = engine.step()
        expected.count(engine.scheduler._last_width, len(delta.token_ids) - 1)
    assert sequence.tally.record == expected != DraftRecord()


@pytest.mark.parametrize("temperature", slow_but([0.0, 1.0], 1.0))
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
    assert len(set(widths)) > 1


def test_where_rows_cost_too_much_they_decode_plainly_together_and_not_alone(llm, widths):
    follow_costs(llm, crowd=10.0)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    llm.generate([[1, 2, 3], [10, 12, 14], [7], [40, 39, 38, 37]], params)
    assert widths.count(1) > 0.8 * len(widths)
    widths.clear()
    llm.generate([[1, 2, 3]], params)
    assert widths.count(1) < 0.5 * len(widths)


def test_a_snapshot_says_what_speculation_gains_and_against_what(llm, widths):
    follow_costs(llm)
    llm.engine.stats = Stats()  # no step of another test is one of late
    assert llm.engine.snapshot().speculation == ""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)
    found = llm.engine.snapshot()
    assert found.chosen_rows == 1
    assert found.chosen_width > 1
    assert found.speculation == (
        f"speculation: on, {found.chosen_width} tokens tried per step with one answer, lately "
        f"{math.floor(10 * found.speedup) / 10:.1f}x the speed of plain decoding"
    )
    unknown = replace(found, speedup=None)
    assert (
        unknown.speculation == f"speculation: on, {found.chosen_width} tokens tried per step with one answer"
    )
    plain = replace(found, chosen_rows=4, chosen_width=1, speedup=1.0)
    assert plain.speculation == "speculation: off for now, plain decoding is as fast with 4 answers at once"


def test_a_width_that_was_asked_for_stays(llm, widths):
    follow_costs(llm)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, width=5))
    assert set(widths) == {5}


# ---- what a step took


@pytest.fixture
def seconds(monkeypatch):
    """The seconds that the scheduler is told of each decode step."""
    heard, commit = [], Scheduler.commit

    def listening(scheduler, batch, outcome, seconds=None):
        if batch.kind == "decode":
            heard.append(seconds)
        return commit(scheduler, batch, outcome, seconds)

    monkeypatch.setattr(Scheduler, "commit", listening)
    return heard


def timed_engine(monkeypatch, *, overlap, launch_s=1.0, step_s=5.0):
    """One whose clock moves when a step is launched, and when one is read: at its end on a device."""
    now, free = [100.0], [0.0]
    engine = tiny.engine(width=3, overlap=overlap)
    engine.clock = engine.scheduler.clock = lambda: now[0]
    launch, outcome = engine._launch, engine._outcome

    def launching(batch):
        found = launch(batch)
        now[0] += launch_s
        free[0] = max(now[0], free[0]) + (20 * step_s if batch.kind == "prefill" else step_s)
        ends[id(found)] = free[0]
        return found

    def reading(batch, launched):
        now[0] = max(now[0], ends.pop(id(launched)))
        return outcome(batch, launched)

    ends = {}
    monkeypatch.setattr(engine, "_launch", launching)
    monkeypatch.setattr(engine, "_outcome", reading)
    return engine


def test_a_step_that_overlaps_others_began_when_the_one_before_it_had_ended(monkeypatch, seconds):
    engine = timed_engine(monkeypatch, overlap=True)
    engine.add([2, 4, 6], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    for _ in range(8):
        engine.step()
    assert seconds == [5.0] * 6
    engine.add([3, 5, 7], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert seconds[6:] == [None, 5.0, 5.0, 5.0], "read after the prefill was launched, which takes a while"


def test_a_step_that_overlaps_nothing_took_the_time_since_it_began(monkeypatch, seconds):
    engine = timed_engine(monkeypatch, overlap=False)
    engine.add([2, 4, 6], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert seconds[1:] == [6.0, 6.0]


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_with_log_probabilities_and_captures_say_nothing_of_other_steps(monkeypatch, seconds, overlap):
    engine = timed_engine(monkeypatch, overlap=overlap)
    asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.add([2, 4, 6], replace(asked, logprobs=1))
    tiny.drain(engine)
    assert set(seconds) == {None}
    seconds.clear()
    stepping.pin(engine, is_captured=False, sizes=[1], now=())
    engine.add([2, 4, 6], asked)
    tiny.drain(engine)
    assert seconds[0] is None
    assert None not in seconds[2:]


def test_a_trial_engine_leaves_the_engine_its_graphs_and_an_engine_without_graphs_is_always_ready():
    engine = stepping.tiny_engine(stepping.HOST, is_captured=False)
    engine.scheduler.is_ready = engine.graphs.is_cheap
    trial_engine(engine, NoDrafter())
    assert engine.scheduler.is_ready == engine.graphs.is_cheap
    engine.drop_graphs()
    assert engine.graphs is None
    assert engine.scheduler.is_ready is always
