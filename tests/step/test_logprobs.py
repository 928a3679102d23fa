"""Log-probabilities: the likeliest tokens in one order, whatever else is asked for or computed."""

import pytest
import torch

from blockdraft.step.verify import LOGIT_SLICE, measure

NEVER = float("-inf")


def logits_with_ties(num_positions, vocab_size, dtype, seed=0):
    """Few different numbers, zeros of both signs, and tokens that never come."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(num_positions, vocab_size, generator=generator) * 2).round() / 2
    drawn[:, ::7] = -0.0
    drawn[:, ::11] = NEVER
    return drawn.to(dtype)


def in_order(logits, count):
    """The likeliest by a whole sort: of equal ones the smaller id comes first."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    found = wide.log_softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    return found.values[..., :count], found.indices[..., :count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab_size", [5, 64, 3000])
def test_of_equally_likely_tokens_the_smaller_id_comes_first(dtype, vocab_size):
    logits = logits_with_ties(6, vocab_size, dtype)
    for count in (0, 1, 2, 3, 20):
        found = measure(logits, torch.zeros(6, dtype=torch.int64), count)
        values, ids = in_order(logits, count)
        assert torch.equal(found.top_ids, ids), count
        assert torch.equal(found.top_values, values), count


def test_the_order_depends_neither_on_the_count_nor_on_the_positions_beside_it():
    num_positions = LOGIT_SLICE + 9
    logits = logits_with_ties(num_positions, 500, torch.bfloat16).view(1, num_positions, 500)
    token_ids = torch.zeros(1, num_positions, dtype=torch.int64)
    whole = measure(logits, token_ids, 20)
    for place in (0, 5, LOGIT_SLICE, num_positions - 1):
        alone = measure(logits[:, place : place + 1], token_ids[:, :1], 3)
        assert torch.equal(alone.top_ids[0, 0], whole.top_ids[0, place, :3])
        assert torch.equal(alone.top_values[0, 0], whole.top_values[0, place, :3])


def test_one_token_that_is_certain_is_the_first():
    """Its log-probability is 0, of whichever sign."""
    logits = torch.full((1, 10), NEVER)
    logits[0, 4] = 3.0
    found = measure(logits, torch.tensor([4]), 4)
    assert found.top_ids.tolist() == [[4, 0, 1, 2]]
    assert found.chosen.tolist() == [0.0]
