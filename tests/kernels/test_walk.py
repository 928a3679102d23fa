"""A walk over candidates: what `choose` would make of a row in which nothing else can be chosen."""

import pytest
import torch

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.llvm.tape import Arena, StepTape
from blockdraft.kernels.sampling import NEVER, reference_choose
from blockdraft.kernels.walk import Candidates, Transition, reference_walk

VOCAB, RANK = 50, 6
CPU = torch.device("cpu")
RULES = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "filters": {"temperature": 1.5, "top_k": 5, "top_p": 0.7, "min_p": 0.02},
    "banned": {"stop_ids": (3, 4), "min_end": 9, "bias": ((3, 20.0), (7, 2.0))},
    "penalties": {"temperature": 0.7, "presence": 3.0, "frequency": 2.0, "repetition": 1.5},
}


def place_rows(rules, vocab_size=VOCAB, device=CPU):
    """Rows of short texts, all but the first token of which were answered."""
    rows = Rows(max_rows=len(rules), max_pages=1, vocab_size=vocab_size, scratch_page=0, device=device)
    for row, rule in enumerate(rules):
        text = [1 + row % 5, 2, 3, 2, 1 + row][: 3 + row % 3]
        rows.place(row, text, len(text) - 1, RowSampling(seed=40 + row, output_start=1, **rule))
    rows.activate(range(len(rules)))
    return rows


def make_walk(rows, num_drafts, num_candidates, *, dtype=torch.float32, spread=2.0, seed=0, num_places=None):
    """Candidates that are drawn, and what tokens say of the next."""
    generator = torch.Generator().manual_seed(seed)
    num_places = num_places or rows.vocab_size
    shape = (len(rows.active), num_drafts, num_candidates)
    order = torch.rand(*shape[:2], num_places, generator=generator).argsort(dim=-1)
    places = order[..., :num_candidates]
    tokens = torch.randperm(rows.vocab_size, generator=generator)[:num_places]
    scores = torch.randn(shape, generator=generator) * spread
    before, after = (torch.randn(n, RANK, generator=generator) for n in (rows.vocab_size, num_places))
    found = Candidates(scores.to(rows.device, dtype), tokens[places].to(rows.device))
    transition = Transition(
        before.to(rows.device, dtype), after.to(rows.device, dtype), places.to(rows.device)
    )
    return found, transition


def walked(walk, rows, found, transition):
    starts = rows.length[rows.active]
    return walk(found, rows.anchor[rows.active][:, None], starts, rows.sampling(), transition)


@pytest.mark.parametrize("with_transition", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_each_draft_is_what_choose_makes_of_its_candidates_behind_those_before(rule, with_transition):
    rows = place_rows([RULES[rule]] * 3)
    found, transition = make_walk(rows, 4, 9, dtype=torch.float64)
    transition = transition if with_transition else None
    drafts = walked(reference_walk, rows, found, transition)
    starts, batch = rows.length[rows.active], rows.sampling()
    block = torch.cat((rows.anchor[rows.active][:, None], drafts), dim=1)
    logits = torch.full((3, 4, VOCAB), NEVER, dtype=torch.float64)
    for r in range(3):
        for draft in range(4):
            for k in range(9):
                token = found.token_ids[r, draft, k]
                logits[r, draft, token] = found.scores[r, draft, k]
                if with_transition:
                    place = transition.places[r, draft, k]
                    logits[r, draft, token] += transition.before[block[r, draft]] @ transition.after[place]
    assert torch.equal(drafts, reference_choose(logits, starts, block, batch))


def test_a_draft_depends_on_the_one_before():
    rows = place_rows([{}])
    found, transition = make_walk(rows, 3, 9)
    drafts = walked(reference_walk, rows, found, transition)
    assert not torch.equal(drafts, walked(reference_walk, rows, found, None))


def test_a_walk_goes_on_from_any_place_of_its_path():
    """Draft by draft it is the same, whatever the rows ask for."""
    rows = place_rows(list(RULES.values()))
    found, transition = make_walk(rows, 5, 9, dtype=torch.float64)
    expected = walked(reference_walk, rows, found, transition)
    path, starts = rows.anchor[rows.active][:, None], rows.length[rows.active]
    for draft in range(5):
        one = Candidates(found.scores[:, draft, None], found.token_ids[:, draft, None])
        places = Transition(transition.before, transition.after, transition.places[:, draft, None])
        path = torch.cat((path, reference_walk(one, path, starts, rows.sampling(), places)), dim=1)
    assert torch.equal(path[:, 1:], expected)


@pytest.mark.parametrize("rule", RULES)
def test_on_a_cpu_a_recorded_walk_asks_anew_what_the_rows_need(rule):
    walk = kernels_for(torch.float32, CPU).walk
    rows = place_rows([{}, {}])
    found, transition = make_walk(rows, 4, 9)
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        drafts = walked(walk, rows, found, transition)
    for row in range(2):
        rows.place(row, [5, 6, 7], 2, RowSampling(seed=row, output_start=1, **RULES[rule]))
    rows.activate(range(2))
    tape.replay()
    assert drafts.tolist() == walked(reference_walk, rows, found, transition).tolist()
