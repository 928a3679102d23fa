"""Anchors where a drafter's steps begin, and blocks weighted by the steps they cost."""

import pytest
import torch

from blockdraft.training.job import Objective, TrainingRecipe
from blockdraft.training.objective import column_weights
from blockdraft.training.packing import BELIEF, FLOOR, Walk, draw, pack, with_anchors
from tests.training import pairs
from tests.training.test_evaluate import make_trainer

CPU = torch.device("cpu")


def test_hard_blocks_count_more_by_the_length_they_expect():
    confidence = torch.tensor([[0.5, 0.5, 0.9], [1.0, 1.0, 1.0]], dtype=torch.float64)
    is_label = torch.tensor([[True, True, False], [True, True, True]])
    plain = column_weights(confidence, is_label, Objective())
    length = torch.tensor([[1 + 0.5 + 0.25], [4.0]], dtype=torch.float64)  # nothing counts past the end
    for power in (1.0, 2.0):
        found = column_weights(confidence, is_label, Objective(hardness=power))
        torch.testing.assert_close(found, plain / length**power)


@pytest.fixture
def one_row():
    rows, _ = pack(pairs.random_documents([(2, 10)]), 16)
    return rows  # prompt at 0 and 1, answer at 2 … 11, anchors 1 … 10


def test_places_passed_over_fade_and_the_next_step_is_expected(one_row):
    batch = with_anchors(one_row, [0], torch.tensor([[1, 6]]), 4)
    walk = Walk(one_row.tokens.shape, CPU)
    walk.chance[:] = 0.8
    # From 1 two drafts are right: 2 and 3 are passed over, 4 begins a step. From 6 none is: 7 begins one.
    walk.learn([0], batch, torch.tensor([[True, True, False], [False, True, True]]))
    expected = torch.full((16,), 0.8)
    expected[[2, 3]] *= 1 - BELIEF
    expected[[4, 7]] = 0.8 + BELIEF * 0.2
    torch.testing.assert_close(walk.chance[0].float(), expected, atol=1e-3, rtol=0)


def test_where_blocks_disagree_a_step_may_begin(one_row):
    batch = with_anchors(one_row, [0], torch.tensor([[1, 2]]), 4)
    walk = Walk(one_row.tokens.shape, CPU)
    walk.chance[:] = 0.0
    # From 1 place 4 begins a step; from 2 it is passed over.
    walk.learn([0], batch, torch.tensor([[True, True, False], [True, True, True]]))
    assert walk.chance[0, 4] == BELIEF
    assert walk.chance[0, [2, 3, 5]].tolist() == [0, 0, 0]


def test_nothing_is_learnt_past_a_document_or_of_other_rows(one_row):
    rows, _ = pack(pairs.random_documents([(2, 10), (2, 10)]), 16)
    batch = with_anchors(rows, [1], torch.tensor([[10, 16]]), 8)  # one label left; and no anchor at all
    walk = Walk(rows.tokens.shape, CPU)
    walk.learn([1], batch, torch.ones(2, 7, dtype=torch.bool))
    expected = torch.ones(2, 16)
    expected[1, 11] = 1 - BELIEF
    torch.testing.assert_close(walk.chance.float(), expected)


def test_likely_places_are_drawn_more_often_and_none_is_lost(one_row):
    weights = torch.full((1, 16), FLOOR)
    weights[0, 5] = 1.0
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([draw(one_row, [0], 1, 4, generator, weights).anchors for _ in range(400)]).flatten()
    counts = drawn.bincount(minlength=16)
    assert counts[5] > 200  # 1 of 1 + 9 x 0.05: 69 %
    assert (counts[1:11] > 0).all()
    assert counts[0] == counts[11:].sum() == 0


def test_what_was_learnt_survives_an_interruption():
    documents = pairs.random_documents([(9, 50)] * 4)
    recipe = TrainingRecipe(
        rows_per_step=2, num_anchors=9, anchoring="walk", objective=Objective(hardness=1.0)
    )
    whole, first, second = (make_trainer(documents, recipe) for _ in range(3))
    for step in range(6):
        whole.step(step / 6)
    for step in range(3):
        first.step(step / 6)
    second.load_state(first.state())
    for step in range(3, 6):
        second.step(step / 6)
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(whole._walk.chance, second._walk.chance)
    assert whole._walk.chance.min() < 1
