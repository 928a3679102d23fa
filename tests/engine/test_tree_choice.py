"""The choice between chains and trees: simulated steps with known times and chances."""

import random

import pytest
import torch

from blockdraft.engine.tree_choice import TreeChoice
from blockdraft.engine.width_controller import DraftChances, DraftRecord, StepCosts, WidthController
from blockdraft.kernels.branches import reference_lay_out, reference_settle
from blockdraft.kernels.tree import Choices, reference_grow
from blockdraft.kernels.tree_size import tree_size

BLOCK = 16
CHAIN_MS = {(1, 1): 1.0, (1, 16): 1.2}


def simulated(
    tree_ms, *, saved=0.5, num_steps=1500, chance=0.8, is_ready=lambda rows, size: True, rows=1, untimed=0
):
    """The sizes of the trees of each step. A tree's wrong draft is `saved` by another branch that often."""
    drawn, records = random.Random(0), [DraftRecord() for _ in range(rows)]
    controller = WidthController(
        StepCosts(CHAIN_MS, [1, 2, 4]), DraftChances([0.7] * (BLOCK - 1)), first=BLOCK, block=BLOCK
    )
    choice, sizes = TreeChoice(controller, list(tree_ms), BLOCK), []
    for number in range(num_steps):
        widths, size = controller.next_widths(records), choice.next_tree(records, is_ready)
        sizes.append(size)
        right = [num_right(drawn, chance, BLOCK) for _ in records]
        noise = drawn.uniform(1.0, 1.1)
        if not size:
            right = [min(count, width - 1) for count, width in zip(right, widths, strict=True)]
            seconds = CHAIN_MS[1, 1] + (CHAIN_MS[1, 16] - CHAIN_MS[1, 1]) * (max(widths) - 1) / 15
            controller.observe(widths, right, seconds * noise)
            chains = list(zip(widths, right, strict=True))
        else:
            committed = [1 + min(BLOCK - 1, saved_by(drawn, count, saved, chance)) for count in right]
            ms = tree_ms[size](number) if callable(tree_ms[size]) else tree_ms[size]
            is_timed = sizes.count(size) > untimed
            choice.observe(size, records, committed, ms * noise if is_timed else None)
            chains = [(BLOCK, count) for count in right]
            choice.count_chains(chains)
        for record, (width, count) in zip(records, chains, strict=True):
            record.count(width, count)
    return sizes


def num_right(drawn, chance, block):
    count = 0
    while count < block - 1 and drawn.random() < chance:
        count += 1
    return count


def saved_by(drawn, count, saved, chance):
    if drawn.random() < saved:
        return count + 1 + num_right(drawn, chance, BLOCK)
    return count


def share(sizes, size):
    return sizes.count(size) / len(sizes)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_tree_that_pays_is_taken_nearly_always(rows):
    assert share(simulated({16: 1.25, 32: 1.3}, rows=rows)[200:], 0) < 0.03


def test_the_cheapest_of_trees_that_commit_as_much_is_taken():
    sizes = simulated({16: 1.25, 32: 1.6, 64: 2.5})[500:]
    assert share(sizes, 16) > 0.9


def test_trees_that_take_too_long_are_tried_now_and_then():
    sizes = simulated({16: 4.0, 32: 60.0, 64: 100.0}, num_steps=6000)
    assert 3 < sizes.count(16) < 20
    assert sizes.count(32) <= 12
    assert sizes.count(64) == 0, "a smaller tree takes far too long"


def test_a_size_whose_first_steps_were_not_timed_is_tried_again():
    assert share(simulated({16: 1.25}, untimed=5)[1000:], 16) > 0.9


def test_a_clock_that_shows_no_time_passing_ends_nothing():
    assert len(simulated({16: 0.0}, num_steps=300)) == 300


def test_trees_that_save_nothing_are_left():
    assert share(simulated({16: 1.25}, saved=0.0)[200:], 0) > 0.9


def test_a_change_of_what_trees_take_is_noticed():
    def slower(number):
        return 1.25 if number < 700 else 4.0

    sizes = simulated({16: slower})
    assert share(sizes[300:700], 16) > 0.9
    assert share(sizes[800:], 16) < 0.1


def test_what_chains_take_is_timed_again():
    sizes = simulated({16: 1.25})[200:]
    assert 0 < share(sizes, 0) < 0.03


def test_a_size_that_cannot_run_yet_is_not_chosen():
    sizes = simulated({16: 1.2, 32: 1.1}, is_ready=lambda rows, size: size == 16, num_steps=300)
    assert set(sizes) == {0, 16}
    assert set(simulated({16: 1.2}, is_ready=lambda rows, size: False, num_steps=50)) == {0}


def test_chances_learnt_from_trees_are_those_of_chains():
    """Though a tree's first branch ends where the drafter is unsure."""
    generator, nodes, rows, columns = torch.Generator().manual_seed(0), 16, 64, BLOCK - 1
    chances, committed = DraftChances([0.7] * columns), []
    controller = WidthController(StepCosts(CHAIN_MS, [1]), chances, first=BLOCK, block=BLOCK)
    choice = TreeChoice(controller, [nodes], BLOCK)
    ids = torch.arange(8).expand(rows, columns, 8).contiguous()
    for _ in range(40):
        is_sure = torch.rand(rows, columns, 1, generator=generator) < 0.7
        best = torch.where(is_sure, 0.97, 0.4)
        each = torch.cat((best, (1 - best) / 7 * torch.ones(7)), dim=-1)[:, :, None]
        choices = Choices(ids, each.log(), ids[:, :, None])
        anchors, zeros = torch.full((rows, 1), 9), torch.zeros(rows, dtype=torch.int64)
        tree = reference_grow(choices, anchors, tree_size(nodes, BLOCK))
        drawn = torch.multinomial(each.flatten(0, 2), 1, generator=generator).view(rows, columns)
        drawn = torch.cat((drawn, torch.full((rows, 1), 99)), dim=1)  # behind the last column
        sampled = drawn[tree.branches // tree.size.branches, tree.columns]
        found = reference_lay_out(tree, zeros, zeros, [], 1)
        kept = reference_settle(tree, found, sampled, zeros + BLOCK, 1)
        choice.count_chains([(width, count - 1) for width, count, _ in kept.chains.tolist()])
        committed += (1 + (drawn == 0).long().cumprod(dim=1).sum(dim=1)).tolist()
    expected = float(chances.committed([DraftRecord()], [BLOCK])[0])
    assert expected == pytest.approx(sum(committed) / len(committed), rel=0.015)
