"""A walk over candidates: what `choose` would make of a row in which nothing else can be chosen."""

import pytest
import torch

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels.candidates import PairScores, reference_walk
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.llvm.tape import Arena, StepTape
from blockdraft.kernels.sampling import NEVER, reference_choose

VOCAB, RANK, DRAFTS, TOP_K = 50, 6, 4, 9
CPU = torch.device("cpu")
RULES = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "filters": {"temperature": 1.5, "top_k": 5, "top_p": 0.7, "min_p": 0.02},
    "banned": {"stop_ids": (3, 4), "min_end": 9},
    "penalties": {"temperature": 0.7, "presence": 3.0, "frequency": 2.0, "repetition": 1.5},
}


def place_rows(rules):
    """Rows of short texts, all but the first token of which were answered."""
    rows = Rows(max_rows=len(rules), max_pages=1, vocab_size=VOCAB, scratch_page=0, device=CPU)
    for row, rule in enumerate(rules):
        text = [1 + row % 5, 2, 3, 2, 1 + row][: 3 + row % 3]
        rows.place(row, text, len(text) - 1, RowSampling(seed=40 + row, output_start=1, **rule))
    rows.activate(range(len(rules)))
    return rows


def make_walk(rows, *, has_mixture, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    num_rows = len(rows.active)
    mixture = noise(num_rows, DRAFTS, RANK)
    pairs = PairScores(noise(VOCAB, RANK), noise(VOCAB, RANK), mixture if has_mixture else None, TOP_K)
    return 2 * noise(num_rows, DRAFTS, VOCAB), pairs


def walked(walk, rows, logits, pairs):
    anchor = rows.anchor[rows.active][:, None]
    return walk(logits, pairs, rows.length[rows.active], anchor, rows.sampling())


@pytest.mark.parametrize("has_mixture", [True, False])
@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("banned", "penalties")])
def test_each_draft_is_what_choose_makes_of_its_candidates_behind_the_one_before(rule, has_mixture):
    rows = place_rows([RULES[rule]] * 3)
    logits, pairs = make_walk(rows, has_mixture=has_mixture, dtype=torch.float64)
    drafts = walked(reference_walk, rows, logits, pairs)
    block = torch.cat((rows.anchor[rows.active][:, None], drafts), dim=1)
    kept = torch.full_like(logits, NEVER)
    for r in range(3):
        for draft in range(DRAFTS):
            said = pairs.predecessors[block[r, draft]] * (pairs.mixture[r, draft] if has_mixture else 1)
            for token in logits[r, draft].topk(TOP_K).indices:
                kept[r, draft, token] = logits[r, draft, token] + said @ pairs.successors[token]
    assert torch.equal(drafts, reference_choose(kept, rows.length[rows.active], block, rows.sampling()))
    assert not torch.equal(drafts, reference_choose(logits, rows.length[rows.active], block, rows.sampling()))


@pytest.mark.parametrize("rule", RULES)
def test_on_a_cpu_a_recorded_walk_asks_anew_what_the_rows_need(rule):
    walk = kernels_for(torch.float32, CPU).walk
    rows = place_rows([{}, {}])
    logits, pairs = make_walk(rows, has_mixture=False)
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        drafts = walked(walk, rows, logits, pairs)
    for row in range(2):
        rows.place(row, [5, 6, 7], 2, RowSampling(seed=row, output_start=1, **RULES[rule]))
    rows.activate(range(2))
    tape.replay()
    assert drafts.tolist() == walked(reference_walk, rows, logits, pairs).tolist()
