"""The Triton `walk` against its reference: on the card, or in Triton's interpreter without one."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from blockdraft.kernels.noise import gumbel  # noqa: E402
from blockdraft.kernels.triton.walk import walk  # noqa: E402
from blockdraft.kernels.walk import Candidates, reference_walk  # noqa: E402
from tests.kernels.test_triton_sampling import RULES  # noqa: E402
from tests.kernels.test_walk import make_walk, place_rows, walked  # noqa: E402

HAS_CARD = torch.cuda.is_available()
HALF = torch.bfloat16 if HAS_CARD else torch.float16
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def rules_within(vocab_size):
    """Those of the tests of `choose`, for a small vocabulary."""
    for rule in RULES.values():
        bias = tuple((token % vocab_size, value) for token, value in rule.get("bias", ()))
        stops = tuple(token % vocab_size for token in rule.get("stop_ids", ()))
        yield rule | {"bias": bias, "stop_ids": stops}


@pytest.mark.parametrize(
    ("num_drafts", "num_candidates", "dtype"),
    [(7, 32, torch.float32), (3, 5, HALF), (1, 1, torch.float32), (4, 17, torch.float32)],
)
@pytest.mark.parametrize("with_transition", [True, False])
def test_drafts_are_the_references(num_drafts, num_candidates, dtype, with_transition):
    rows = place_rows(list(rules_within(200)), vocab_size=200, device=DEVICE)
    found, transition = make_walk(rows, num_drafts, num_candidates, dtype=dtype)
    transition = transition if with_transition else None
    expected = walked(reference_walk, rows, found, transition)
    assert walked(walk, rows, found, transition).tolist() == expected.tolist()


def test_rows_of_a_reduced_head_are_not_the_tokens():
    rows = place_rows(list(rules_within(200)), vocab_size=200, device=DEVICE)
    found, transition = make_walk(rows, 5, 12, num_places=40)
    expected = walked(reference_walk, rows, found, transition)
    assert walked(walk, rows, found, transition).tolist() == expected.tolist()


def test_a_rank_that_is_no_multiple_of_a_tile():
    rows = place_rows([{}, {"temperature": 1.0}], vocab_size=200, device=DEVICE)
    found, transition = make_walk(rows, 5, 12)
    wide = [torch.randn(200, 70, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (1, 2)]
    transition = type(transition)(*wide, transition.places)
    expected = walked(reference_walk, rows, found, transition)
    assert walked(walk, rows, found, transition).tolist() == expected.tolist()


def test_a_path_of_several_tokens_counts_for_penalties():
    rule = {"temperature": 0.7, "presence": 3.0, "frequency": 2.0, "repetition": 1.5}
    rows = place_rows([rule] * 4, vocab_size=50, device=DEVICE)
    found, _ = make_walk(rows, 2, 12)
    path = found.token_ids[:, 0].gather(1, found.scores[:, 0].topk(3).indices)
    starts, batch = rows.length[rows.active], rows.sampling()
    expected = reference_walk(found, path, starts, batch)
    assert walk(found, path, starts, batch).tolist() == expected.tolist()
    assert reference_walk(found, path[:, -1:], starts + 2, batch).tolist() != expected.tolist()


def test_equal_scores_go_to_the_lowest_id():
    rows = place_rows([{}], vocab_size=50, device=DEVICE)
    found, _ = make_walk(rows, 2, 12)
    flat = Candidates(torch.zeros_like(found.scores), found.token_ids)
    assert walked(walk, rows, flat, None).tolist() == found.token_ids.min(dim=-1).values.tolist()


def test_noise_of_any_ids_is_that_of_the_whole_vocabulary():
    rows = place_rows([{"temperature": 1.0}] * 2, vocab_size=200, device=DEVICE)
    found, _ = make_walk(rows, 1, 64)
    flat = Candidates(torch.zeros_like(found.scores), found.token_ids)
    starts = rows.length[rows.active]
    noise = gumbel(torch.tensor([40, 41], device=DEVICE), starts[:, None] + 1, 200, torch.float32)
    best = noise[:, 0].gather(1, found.token_ids[:, 0]).argmax(dim=1)
    assert walked(walk, rows, flat, None)[:, 0].tolist() == found.token_ids[torch.arange(2), 0, best].tolist()
