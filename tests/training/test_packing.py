"""Documents in rows: nothing overlaps, nothing is lost but ends that do not fit, anchors sit where asked."""

import pytest
import torch

from blockdraft.training import packing
from blockdraft.training.answers import Document
from blockdraft.training.packing import BELIEF, FLOOR, MIN_ANSWER, Walk, draw, pack, with_anchors
from tests.training import pairs

LENGTH = 40
SIZES = [(5, 12), (1, 2), (30, 10), (3, 20), (10, 9), (2, 5), (20, 15), (4, 4), (1, 30), (8, 8)]


@pytest.fixture
def documents():
    return pairs.random_documents(SIZES)


def seeded(number=0):
    return torch.Generator().manual_seed(number)


def test_every_document_is_whole_in_a_place_of_its_own(documents):
    rows, places = pack(documents, LENGTH)
    assert sorted(place.document for place in places) == list(range(len(documents)))
    taken = torch.zeros(rows.tokens.shape, dtype=torch.int64)
    for place in places:
        one = documents[place.document]
        end = place.begin + len(one.prompt_ids) + len(one.answer_ids)
        assert end <= LENGTH
        assert rows.tokens[place.row, place.begin : end].tolist() == [*one.prompt_ids, *one.answer_ids]
        assert set(rows.starts[place.row, place.begin : end].tolist()) == {place.begin}
        assert set(rows.ends[place.row, place.begin : end].tolist()) == {end}
        assert (place.begin, end) in rows.spans[place.row]
        taken[place.row, place.begin : end] += 1
    assert taken.max() == 1
    assert sum(map(len, rows.spans)) == len(documents)
    assert not rows.tokens[taken == 0].any()
    assert not rows.is_anchor[taken == 0].any()


def test_anchors_are_the_last_prompt_token_and_every_answer_token_but_the_last(documents):
    rows, places = pack(documents, LENGTH)
    expected = torch.zeros(rows.tokens.shape, dtype=torch.bool)
    for place in places:
        one = documents[place.document]
        last_prompt = place.begin + len(one.prompt_ids) - 1
        expected[place.row, last_prompt : last_prompt + len(one.answer_ids)] = True
    assert torch.equal(rows.is_anchor, expected)


def test_the_longest_go_first_and_each_into_the_fullest_row_with_room(monkeypatch):
    monkeypatch.setattr(packing, "SHORT", 0.0)  # all are long ones
    sizes = [4, 12, 9, 7, 8, 30, 3]
    documents = pairs.random_documents([(1, size - 1) for size in sizes])
    rows, places = pack(documents, LENGTH)
    assert [sizes[place.document] for place in places] == sorted(sizes, reverse=True)
    # 30 | 30 12 | 30 9, 12 | 30 9, 12 8 | 30 9, 12 8 7 | …: 4 into the room of 13, 3 into the room of 9
    assert {sizes[place.document]: (place.row, place.begin) for place in places} == {
        30: (0, 0),
        12: (1, 0),
        9: (0, 30),
        8: (1, 12),
        7: (1, 20),
        4: (1, 27),
        3: (1, 31),
    }
    assert len(rows) == 2


def test_a_document_that_is_too_long_loses_the_end_of_its_answer():
    documents = pairs.random_documents([(30, 25)])
    rows, places = pack(documents, LENGTH)
    assert len(places) == 1
    assert rows.tokens[0].tolist() == [*documents[0].prompt_ids, *documents[0].answer_ids[:10]]
    assert rows.is_anchor[0].nonzero().flatten().tolist() == list(range(29, 39))
    assert rows.spans == (((0, LENGTH),),)


def test_documents_without_enough_answer_are_left_out():
    at_the_end = LENGTH - MIN_ANSWER
    documents = pairs.random_documents(
        [(at_the_end, 9), (at_the_end + 1, 9), (60, 9), (5, 1), (5, 0), (3, 2)]
    )
    documents.append(Document((), (1, 2, 3), "all", is_greedy=True))
    _, places = pack(documents, LENGTH)
    assert sorted(place.document for place in places) == [0, 5]


def test_nothing_to_pack_is_no_row():
    rows, places = pack([], LENGTH)
    assert len(rows) == 0
    assert places == []


def test_a_batch_says_where_its_blocks_are_and_what_they_should_draft():
    rows, _ = pack(pairs.random_documents([(3, 9), (2, 6)]), 24)  # documents [0, 12) and [12, 20)
    batch = with_anchors(rows, [0], torch.tensor([[2, 10, 13, 18, 24]]), 4)
    tokens = rows.tokens[0].tolist()
    assert batch.is_real.tolist() == [[True, True, True, True, False]]
    assert batch.anchors.tolist() == [[2, 10, 13, 18, 0]]
    assert batch.block_starts.tolist() == [[0, 0, 12, 12, 0]]
    assert batch.labels.tolist() == [
        [tokens[3:6], [tokens[11], -1, -1], tokens[14:17], [tokens[19], -1, -1], [-1, -1, -1]]
    ]
    assert batch.positions.tolist() == [[*range(12), *range(8), *range(4)]]
    assert batch.block_positions().view(5, 4).tolist() == [
        [2, 3, 4, 5],
        [10, 11, 12, 13],
        [1, 2, 3, 4],
        [6, 7, 8, 9],
        [0, 1, 2, 3],
    ]
    ids = batch.block_ids(63)
    assert ids[0, :4].tolist() == [[tokens[place], 63, 63, 63] for place in (2, 10, 13, 18)]


def test_drawn_anchors_are_allowed_sorted_unique_and_all_there_when_they_fit(documents):
    rows, _ = pack(documents, LENGTH)
    for num_anchors in (3, 20, 100):
        batch = draw(rows, range(len(rows)), num_anchors, 4, seeded())
        assert batch.anchors.shape[1] == min(num_anchors, LENGTH)
        for row in range(len(rows)):
            mine = batch.anchors[row][batch.is_real[row]].tolist()
            assert mine == sorted(set(mine))
            assert rows.is_anchor[row, mine].all()
            assert len(mine) == min(num_anchors, int(rows.is_anchor[row].sum()))


def test_anchors_are_drawn_anew_by_seed_and_evenly(documents):
    rows, _ = pack(documents, LENGTH)
    drawn = [draw(rows, [0], 5, 4, seeded(number)).anchors for number in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    generator, seen = seeded(), torch.zeros(LENGTH)
    for _ in range(400):
        seen[draw(rows, [0], 5, 4, generator).anchors[0]] += 1
    allowed = rows.is_anchor[0]
    expected = 400 * 5 / int(allowed.sum())
    assert (seen[allowed] > 0.6 * expected).all()
    assert (seen[allowed] < 1.5 * expected).all()


# ---- anchors where steps begin


@pytest.fixture
def one_row():
    rows, _ = pack(pairs.random_documents([(2, 10)]), 16)
    return rows  # prompt at 0 and 1, answer at 2 … 11, anchors 1 … 10


def test_places_passed_over_fade_and_the_next_step_is_expected(one_row):
    batch = with_anchors(one_row, [0], torch.tensor([[1, 6]]), 4)
    walk = Walk(one_row.tokens.shape, pairs.CPU)
    walk.chance[:] = 0.8
    # From 1 two drafts are right: 2 and 3 are passed over, 4 begins a step. From 6 none is: 7 begins one.
    walk.learn([0], batch, torch.tensor([[True, True, False], [False, True, True]]))
    expected = torch.full((16,), 0.8)
    expected[[2, 3]] *= 1 - BELIEF
    expected[[4, 7]] = 0.8 + BELIEF * 0.2
    torch.testing.assert_close(walk.chance[0].float(), expected, atol=1e-3, rtol=0)


def test_where_blocks_disagree_a_step_may_begin(one_row):
    batch = with_anchors(one_row, [0], torch.tensor([[1, 2]]), 4)
    walk = Walk(one_row.tokens.shape, pairs.CPU)
    walk.chance[:] = 0.0
    # From 1 place 4 begins a step; from 2 it is passed over.
    walk.learn([0], batch, torch.tensor([[True, True, False], [True, True, True]]))
    assert walk.chance[0, 4] == BELIEF
    assert walk.chance[0, [2, 3, 5]].tolist() == [0, 0, 0]


def test_nothing_is_learnt_past_a_document_or_of_other_rows(one_row):
    rows, _ = pack(pairs.random_documents([(2, 10), (2, 10)]), 16)
    batch = with_anchors(rows, [1], torch.tensor([[10, 16]]), 8)  # one label left; and no anchor at all
    walk = Walk(rows.tokens.shape, pairs.CPU)
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
