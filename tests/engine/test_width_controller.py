"""The width of a step: nearly the best fixed one at any load, in simulation; and the same tokens."""

import math
from collections import defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest

from blockdraft import LLM, SamplingParams
from blockdraft.engine import width_controller as module
from blockdraft.engine.scheduler import Scheduler
from blockdraft.engine.sequence import Tally
from blockdraft.engine.stats import Stats
from blockdraft.engine.trial_engine import trial_engine
from blockdraft.engine.width_controller import (
    DraftChances,
    DraftRecord,
    StepCosts,
    WidthController,
    always,
    likeliest_widths,
)
from blockdraft.step.drafter import NoDrafter
from blockdraft.step.step_sizes import (
    WIDTHS,
    StepSize,
    all_means,
    few_means,
    fill,
    tight,
    uneven,
    uneven_places,
)
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
        # The first draft is always right, and nobody tries the second.
        chances.count([2, 2, 2, 2], [1, 1, 1, 1])
    first, second = np.exp(chances.logs[:2])
    assert first > 0.95
    assert second > 0.95


def test_the_tokens_of_a_step_are_those_of_each_row_and_place_added_up():
    """With the definitions written out, over a history of steps of different widths and rows."""
    draw, known = np.random.default_rng(0), [0.8, 0.7, 0.7, 0.5, 0.6]
    chances, records = DraftChances(known), [DraftRecord() for _ in range(5)]
    tried, right = [0.0] * 5, [0.0] * 5
    for widths in ([6] * 4, [4, 1, 6, 2], [6, 6, 5, 5], [2] * 4, [1, 1, 1, 6]):
        num_right = [int(count) for count in draw.integers(0, widths)]
        chances.count(widths, num_right)
        for record, width, count in zip(records, widths, num_right, strict=False):
            record.count(width, count)
        fade = module.FADE ** (4 / (4 + module.FEW))
        for place in range(5):
            is_tried = [n >= place and place < w - 1 for w, n in zip(widths, num_right, strict=True)]
            tried[place] = fade * tried[place] + sum(is_tried)
            right[place] = fade * right[place] + sum(n > place for n in num_right)
    logs, expected = [], known[0]
    for place in range(5):
        if place:
            expected = math.exp(logs[-1] * math.log(known[place]) / math.log(known[place - 1]))
        share = (right[place] + module.PRIOR * expected) / (tried[place] + module.PRIOR)
        logs.append(math.log(share))
    assert chances.logs == pytest.approx(logs)
    middle, by_width = math.exp(sum(logs[:4]) / 4), []
    for width in (1, 3, 6):
        tokens = 0.0
        for one in records:
            chance = (module.BELIEF * middle + one.num_right) / (module.BELIEF + one.num_tried)
            power = 0.5 * math.log(chance) / math.log(middle)
            tokens += 1 + sum(math.exp(power * sum(logs[: place + 1])) for place in range(width - 1))
        by_width.append(tokens)
    assert chances.committed(records, (1, 3, 6), hope=0.5) == pytest.approx(by_width)


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


def test_one_late_step_of_a_width_that_was_never_timed_does_not_exclude_it():
    costs = StepCosts({(1, 1): 1.0, (1, 16): 1.0}, [1])
    for width in (4, 4, 4, 4, 8):
        costs.observe(1, width, 5.0 if width == 8 else 1.0)
    assert costs.seconds(1, 8) == pytest.approx(1.0)
    for _ in range(8):
        for width in (4, 4, 4, 4, 8):
            costs.observe(1, width, 5.0 if width == 8 else 1.0)
    assert costs.seconds(1, 8) == pytest.approx(5.0), "it always takes so long"


def test_a_step_is_learnt_by_what_ran():
    """With a request's own width in the batch, rows do not fill the size."""
    for widths, size, mean in (
        ((6, 5, 3, 1), StepSize(4, 13, 16), 4),
        ((6, 5, 3, 1), None, 4),
        ((3, 3, 2), StepSize(4, 13, 16), 4),
        ((2, 1), StepSize(4, 4, 16), 4),
        ((3, 3, 3), None, 3),
    ):
        costs = StepCosts({(4, 1): 1.0}, SIZES)
        controller = WidthController(costs, DraftChances([0.8] * 15), first=4, block=BLOCK)
        for _ in range(50):
            controller.observe(widths, [0] * len(widths), 7.0, size)
        assert costs.seconds(len(widths), mean) == pytest.approx(7.0)
        assert costs.age(len(widths), mean) == 0


def test_of_widths_that_would_have_to_be_waited_for_none_is_chosen():
    """Unless no other can be: then the best is waited for."""
    costs = StepCosts({(1, 1): 1.0, (1, 16): 1.5}, [1])
    controller = WidthController(costs, DraftChances([0.9] * 15), first=16, block=16)
    assert controller.next_width([DraftRecord()]) == 16
    assert controller.next_width([DraftRecord()], lambda rows, width, tokens: width in (1, 4)) == 4
    assert gain(controller) > 2
    assert controller.next_width([DraftRecord()], lambda rows, width, tokens: False) == 16


# ---- in simulation

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
NUM_STEPS = 1200
BLOCK = 16
ANSWERS = {
    "code": ([0.9] * 15, [0.9] * 15),
    "prose": ([0.75 * 0.985**place for place in range(15)],) * 2,
    "qa": ([0.58] * 15, [0.58] * 15),
    "trivia": ([0.5] * 15, [0.5] * 15),
    "nonsense": ([0.2] * 15, [0.2] * 15),
    "worse": ([0.85] * 15, [0.3] * 15),
    "better": ([0.3] * 15, [0.85] * 15),
}


# Milliseconds of an H200's forward of Qwen3-8B's shape, by its tokens (governor-h200 and rehearsal-h200 in
# benchmarks/results, without rows and drafter).
FORWARD_MS = {1: 4.77, 16: 4.92, 64: 5.18, 128: 6.1, 192: 7.4, 384: 12.85, 512: 13.9, 1024: 28.7, 2048: 56.2}


def large_card(rows, width):
    """Seconds, as of Qwen3-8B's shape on an H200: memory up to a hundred tokens, then arithmetic."""
    tokens, draft = rows * width, 0.95 + 0.05 * rows if width > 1 else 0.0
    beyond = 0.0269 * max(0, tokens - 2048)
    return (np.interp(tokens, *zip(*FORWARD_MS.items(), strict=True)) + beyond + 0.035 * rows + draft) / 1e3


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


def controller_for(cost, measured, *, chance=0.8, first=BLOCK, sizes=SIZES, means=None):
    costs = StepCosts({place: cost(*place) for place in measured}, sizes)
    return WidthController(costs, DraftChances([chance] * 15), first=first, block=BLOCK, means=means)


def relative_speed(cost, load, controller, seed, *, noise=0.03, fixed=WIDTHS):
    """The time that the best fixed width takes for the same tokens of as many rows, over the controlled time.

    Steps are padded to a number of rows that costs know. On a card the next width is chosen before the last
    step's result is there.
    """
    draw, records, unseen = np.random.default_rng(seed), defaultdict(DraftRecord), deque()
    taken, others = 0.0, np.zeros(len(fixed))
    for rows in load:
        widths, chances = controller.next_widths([records[row] for row in rows]), np.array([*rows.values()])
        is_tried = np.arange(BLOCK - 1) < np.array(widths)[:, None] - 1
        num_right = np.cumprod((draw.random(chances.shape) < chances) & is_tried, axis=1).sum(axis=1)
        size = controller.costs.size(len(rows))
        kept, seconds = np.cumprod(chances, axis=1), np.array([cost(size, one) for one in fixed])
        committed = np.array([len(rows) + kept[:, : one - 1].sum() for one in fixed])  # luck is left out
        is_even = len(set(widths)) == 1
        own_s = cost(size, widths[0] if is_even else (sum(widths) + size - len(rows)) / size)
        taken += own_s
        others += (len(rows) + kept[is_tried].sum()) * seconds / committed
        shown = own_s * (1 + abs(draw.normal(0, noise))) * (5 if draw.random() < 0.01 else 1)
        unseen.append((list(rows), widths, num_right.tolist(), shown))
        if cost is two_cores or len(unseen) > 1:
            tell(controller, records, *unseen.popleft())
    return others.min() / taken


def test_the_chances_of_many_rows_are_read_every_few_steps(monkeypatch):
    read, committed = [], DraftChances.committed
    monkeypatch.setattr(DraftChances, "committed", lambda *what: read.append(what) or committed(*what))
    for num_rows, expected in ((1, 12), (15, 12), (16, 6), (47, 4), (64, 3), (256, 3)):
        read.clear()
        controller, records = (
            controller_for(two_cores, [(1, 1), (1, 16)]),
            [DraftRecord() for _ in range(num_rows)],
        )
        for _ in range(12):
            controller.next_width(records)
        assert len(read) == expected, num_rows
    read.clear()
    controller.next_width(records[:15])  # few rows are left
    assert len(read) == 1


def test_many_rows_try_drafts_as_often_as_one_and_for_one_step():
    tries, places = [], [*CORNERS, (1, 2), (256, 2)]
    for num_rows in (1, 16, 64):
        controller = controller_for(lambda rows, width: 1.0 + 0.3 * (width > 1), places, chance=0.1, first=1)
        records = [DraftRecord() for _ in range(num_rows)]
        tries.append([step for step in range(100) if controller.next_width(records) > 1])
    assert tries == [tries[0]] * 3
    assert len(tries[0]) > 3
    assert 1 not in np.diff(tries[0])


def tell(controller, records, rows, widths, num_right, seconds):
    for row, width, count in zip(rows, widths, num_right, strict=True):
        records[row].count(width, count)
    controller.observe(widths, num_right, seconds)


CORNERS = [(1, 1), (1, BLOCK), (256, 1), (256, BLOCK)]


def check_speed(cost, rows, answer, num_seeds, means=None, least=0.97):
    found = [
        relative_speed(cost, steady(rows, answer), controller_for(cost, CORNERS, means=means), seed)
        for seed in range(num_seeds)
    ]
    assert np.mean(found) > least


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


def mixed(rows, *answers):
    """Rows with these answers by turns, in every step."""
    chances = {row: ANSWERS[answers[row % len(answers)]][0] for row in range(rows)}
    return [chances] * NUM_STEPS


@pytest.mark.parametrize(
    ("rows", "least"), slow_but([(16, 1.08), (64, 1.08), (256, 1.03)], (16, 1.08), (64, 1.08))
)
def test_with_a_width_of_its_own_for_each_row_mixed_answers_are_faster_than_with_any_one_width(rows, least):
    load = mixed(rows, "code", "prose", "trivia")
    assert relative_speed(large_card, load, controller_for(large_card, CORNERS, means=few_means), 0) > least


EQUAL = [
    (cost, rows, answer)
    for cost in (large_card, small_model, two_cores)
    for rows in (2, 4, 8, 16, 64, 256)
    for answer in ANSWERS
]


@pytest.mark.parametrize(
    ("cost", "rows", "answer"), slow_but(EQUAL, (small_model, 2, "qa"), (large_card, 8, "prose"))
)
def test_with_a_width_of_its_own_for_each_row_equal_answers_are_nearly_as_fast(cost, rows, answer):
    """With many rows, the best width may lie between two that are captured."""
    means, least = all_means if cost is two_cores else few_means, 0.96 if rows <= 8 else 0.94
    check_speed(cost, rows, answer, num_seeds=1 if rows <= 8 else 2, means=means, least=least)


@pytest.mark.slow
@pytest.mark.parametrize("answers", [("code",), ("prose",), ("qa",), ("trivia",), ("code", "prose", "qa")])
@pytest.mark.parametrize("cost", [large_card, small_model])
@pytest.mark.parametrize("rows", [1, 3, 8, 24, 64, 256])
def test_drafts_are_hardly_ever_slower_than_plain_decoding(cost, rows, answers):
    controller = controller_for(cost, CORNERS, means=few_means)
    assert relative_speed(cost, mixed(rows, *answers), controller, 0, fixed=(1,)) > 0.96


def test_each_token_goes_to_the_row_where_it_is_likeliest_to_be_committed():
    kept = np.array([[0.9, 0.8, 0.7], [0.5, 0.2, 0.1], [0.75, 0.5, 0.3]])
    assert likeliest_widths(kept, 0) == [1, 1, 1]
    assert likeliest_widths(kept, 3) == [3, 1, 2]
    assert likeliest_widths(kept, 5) == [4, 2, 2], "of equal chances, the first row's"
    assert likeliest_widths(kept, 9) == [4, 4, 4]


def test_a_width_that_has_not_run_for_long_runs_where_its_neighbours_cannot():
    """Here of mean widths 1, 4 and 16 alone."""

    def cost(_, width):
        return 1.0 + width / 20

    controller = controller_for(cost, CORNERS, means=lambda rows, block: (1, 4, 16))
    records = [DraftRecord()] * 8
    seen = []
    for _ in range(400):
        widths = controller.next_widths(records)
        seen.append(sum(widths) / 8)
        controller.observe(widths, [min(6, one - 1) for one in widths], cost(8, seen[-1]))
    assert seen[0] == seen[-1] == 16
    assert 4 in seen


def test_a_step_s_tokens_fill_a_captured_step():
    """Rows that pad it have a token each, and nobody more than its size allows."""
    for rows in (40, 70, 130, 200):
        controller = controller_for(large_card, CORNERS, chance=0.9, means=few_means)
        records = [DraftRecord() for _ in range(rows)]
        for row, record in enumerate(records):
            for _ in range(20):
                record.count(8, 7 * (row % 2))
        widths = controller.next_widths(records)
        padded = min(size for size in SIZES if size >= rows)
        mean = (sum(widths) + padded - rows) / padded
        assert mean in few_means(padded, BLOCK)
        assert mean > 1
        assert max(widths) > min(widths)
        size = uneven(padded, int(mean), BLOCK)
        assert size.has_room(tight(widths))
        assert fill(widths, size).limits == ()
        own = (4, 1, 6)  # of the first three rows, as their requests set them
        chosen = controller.next_widths(records[3:], others=own)
        assert len(chosen) == rows - 3
        assert size.has_room(tight([*own, *chosen]))
        assert controller.last.num_tokens == sum(own) + sum(chosen)


def test_rows_that_set_a_width_leave_what_the_captured_step_has_beyond_theirs():
    """A step that holds twelve whole blocks among sixteen rows has room for four more."""
    controller = controller_for(large_card, CORNERS, chance=0.8, means=few_means)
    records = [DraftRecord() for _ in range(4)]
    for own, expected in (((16,) * 12, [16] * 4), ((1,) * 12, None), ((16,) * 4, None)):
        chosen = controller.next_widths(records, others=own)
        mean = controller.last.width
        size = uneven(min(size for size in SIZES if size >= 4 + len(own)), mean, BLOCK)
        assert size.has_room(tight([*own, *chosen]))
        assert chosen == expected or sum(own) + sum(chosen) == size.tokens
        dealt = controller.chances.kept(records)[:, : size.width - 1]
        kept = sum(float(row[: width - 1].sum()) for row, width in zip(dealt, chosen, strict=True))
        assert controller.last.tokens == pytest.approx(1 + kept / 4)


def test_few_rows_fill_a_captured_step_too():
    """Five rows run as eight do: what the other three leave is theirs."""
    costs = {(1, 1): 1.0, (1, 8): 1.3, (8, 1): 1.2, (8, 8): 4.0}
    plan = replace(tiny.plan("float64"), max_num_seqs=8, step_costs=costs, draft_chances=CHANCES)
    controller = WidthController.of(plan, few_means)
    widths = controller.next_widths([DraftRecord() for _ in range(5)])
    assert 1 < controller.last.width < 8
    assert sum(widths) + 3 == 8 * controller.last.width


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
        controller.observe([width], [num_right], cost(1, width) * factor)
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
        controller.observe([width], [width - 1], 1.0 + 0.25 * (width - 1))
    seconds = 1.0 + 0.25 * (controller.last.width - 1)
    assert gain(controller) == pytest.approx(controller.last.tokens / seconds, rel=0.01)


def test_a_plain_step_is_tried_now_and_then_even_where_it_seems_slow():
    """Else times that were measured wrong at the start would be believed for ever."""
    costs = StepCosts({(1, 1): 8.0, **{(1, width): 9.0 for width in (2, 4, 8)}}, [1])
    controller, widths = WidthController(costs, DraftChances([0.9] * 7), first=8, block=8), []
    for _ in range(3000):
        widths.append(controller.next_width([DraftRecord()]))
        controller.observe([widths[-1]], [widths[-1] - 1], 1.0 + widths[-1])
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
    engine.add([2, 4, 6, 8], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    engine.step()
    (sequence,), expected = engine.scheduler.running, DraftRecord()
    schedule, batches = engine.scheduler.schedule, []
    engine.scheduler.schedule = lambda: batches.append(schedule()) or batches[-1]
    for _ in range(5):
        (delta,) = engine.step()
        expected.count(*batches[-1].counts, len(delta.token_ids) - 1)
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


@pytest.mark.parametrize("is_captured", [False, True])
def test_rows_with_chosen_widths_of_their_own_emit_the_same_tokens(is_captured):
    """As on a card, on the CPU's kernels; one of the requests has a width of its own."""
    costs = {(1, 1): 1.0, (1, 8): 1.1, (4, 1): 1.2, (4, 8): 2.0}
    requests = [
        ([4, 6, 8 + row], SamplingParams(temperature=row % 2, seed=row, max_tokens=40, ignore_eos=True))
        for row in range(4)
    ]
    requests[3] = requests[3][0], replace(requests[3][1], width=3)
    expected = tiny.run(tiny.engine("none", dtype="float32", width=1), requests)
    engine = tiny.engine(
        dtype="float32", width=8, max_num_seqs=4, step_costs=costs, draft_chances=CHANCES, is_captured=False
    )
    engine.scheduler.means = all_means
    engine.scheduler.follow(engine.plan)
    if is_captured:
        tiny.capture(engine)
    schedule, batches = engine.scheduler.schedule, []
    engine.scheduler.schedule = lambda: batches.append(schedule()) or batches[-1]
    controller, ran = engine.scheduler._width_controller, []
    observe = controller.observe
    controller.observe = lambda *what: ran.append(what) or observe(*what)
    assert tiny.run(engine, requests) == expected
    assert all(size.has_room(tight(widths)) for widths, _, _, size in ran)
    assert not is_captured or all(size in engine.graphs.places for *_, size in ran)
    counts = [batch.counts for batch in batches if batch is not None and batch.kind == "decode"]
    assert any(len(set(widths[:3])) > 1 for widths in counts)
    assert all(widths[3] == 3 for widths in counts if len(widths) == 4)


@pytest.mark.parametrize("means", [None, all_means])
def test_an_idle_engine_captures_steps_with_widths_of_their_own_only_where_rows_get_them(means):
    costs = {(1, 1): 1.0, (1, 8): 1.1, (4, 1): 1.2, (4, 8): 4.0}
    engine = tiny.engine(max_num_seqs=4, step_costs=costs, draft_chances=CHANCES)
    engine.graphs = stepping.KernelByKernel(engine.decode, engine.rows)
    engine.graphs.capture([1, 4], range(1, 9), now=(), uneven=uneven_places([4], 8, all_means))
    engine.scheduler.means = means
    engine.scheduler.follow(engine.plan)
    while engine.prepare():
        pass
    sizes = engine.graphs._graphs
    assert any(not size.is_even for size in sizes) is (means is not None)
    assert {StepSize(4, 1, 4), StepSize(1, 1, 1)} < set(sizes)


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
    assert found.chosen_tokens > 1
    assert found.speculation == (
        f"speculation: on, {found.chosen_tokens} tokens tried per step with one answer, lately "
        f"{math.floor(10 * found.speedup) / 10:.1f}x the speed of plain decoding"
    )
    unknown = replace(found, speedup=None)
    assert (
        unknown.speculation == f"speculation: on, {found.chosen_tokens} tokens tried per step with one answer"
    )
    several = replace(found, chosen_rows=3, chosen_tokens=13, speedup=None)
    assert several.speculation == (
        "speculation: on, 13 tokens tried per step with 3 answers at once (4.33 of each)"
    )
    plain = replace(found, chosen_rows=4, chosen_tokens=4, speedup=1.0)
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

    def listening(scheduler, batch, outcome, seconds=None, size=None):
        if batch.kind == "decode":
            heard.append(seconds)
        return commit(scheduler, batch, outcome, seconds, size)

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
