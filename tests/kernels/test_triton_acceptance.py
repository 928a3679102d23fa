"""What a verified block means, in Triton: the reference's integers, and rows that stay where they are."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytest.importorskip("triton")

from blockdraft.kernels import acceptance as contract  # noqa: E402
from blockdraft.kernels.kernels import kernels_for  # noqa: E402
from blockdraft.kernels.triton.acceptance import advance, count_accepted, draw_accepted  # noqa: E402
from tests.kernels.test_acceptance import CASES, Case, seeded  # noqa: E402

# The interpreter computes with NumPy, which warns where unsigned words wrap as they should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
KERNELS = kernels_for(torch.float64, DEVICE, is_interpreted=True)  # whole numbers are exact in any dtype
NUM_ROWS = 500 if DEVICE.type == "cuda" else 60


def on_device(values):
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("name", CASES)
def test_a_draft_counts_while_it_equals_the_sample_before_it(name):
    sampled, block, expected = CASES[name]
    got = count_accepted(on_device(sampled), on_device(block))
    assert got.dtype == torch.int64
    assert got.tolist() == expected


@pytest.mark.parametrize("width", [2, 3, 8, 16, 17])
def test_drawn_blocks_count_as_in_the_reference(width):
    generator = torch.Generator().manual_seed(width)
    sampled, block = torch.randint(0, 2, (2, NUM_ROWS, width), generator=generator).to(DEVICE)
    sampled[:3, :-1] = block[:3, 1:]
    expected = contract.reference_count_accepted(sampled, block)
    assert torch.equal(count_accepted(sampled, block), expected)
    assert torch.equal(
        count_accepted(sampled[:, :-1], block[:, 1:]),
        count_accepted(sampled[:, :-1].contiguous(), block[:, 1:].contiguous()),
    )
    assert torch.equal(KERNELS.count_accepted(sampled, block), expected)


@pytest.mark.parametrize("padding", [0, 3])
def test_rows_advance_and_the_scratch_row_stays(padding):
    """Padding is the scratch row, as often as it takes: not even its counts move."""
    case = Case(DEVICE, padding)
    length, anchor, counts = case.expected()
    case.advance(advance)
    assert case.rows.length.tolist() == length
    assert case.rows.anchor.tolist() == anchor
    assert case.rows._output_counts.tolist() == counts


def test_a_penalised_scratch_row_would_stay_too():
    case = Case(DEVICE, padding=2)
    case.rows._whole[-1] = case.rows._whole[4]
    length, anchor, counts = case.expected()
    case.advance(advance)
    assert case.rows.length.tolist() == length
    assert case.rows.anchor.tolist() == anchor
    assert case.rows._output_counts.tolist() == counts


def test_advance_takes_parts_of_wider_blocks():
    case = Case(DEVICE)
    length, anchor, counts = case.expected()
    case.block, case.sampled = (torch.cat((x, x), dim=1)[:, : case.width] for x in (case.block, case.sampled))
    case.advance(KERNELS.advance)
    assert case.rows.length.tolist() == length
    assert case.rows.anchor.tolist() == anchor
    assert case.rows._output_counts.tolist() == counts


@pytest.mark.parametrize("num_rates", [0, 1, 7, 15, 16])
def test_drawn_acceptance_is_the_reference_s_integer(num_rates):
    generator = torch.Generator().manual_seed(num_rates)
    seeds = torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), generator=generator).tolist()
    seeds[:4] = [0, -1, 2**63 - 1, -(2**63)]
    starts = torch.randint(0, 2**20, (NUM_ROWS,), generator=generator)
    starts[::3] += 2**32 * torch.arange(1, len(starts[::3]) + 1)
    rates = torch.linspace(0.97, 0.05, num_rates)
    batch = seeded(seeds, DEVICE)
    given = rates.to(DEVICE), starts.to(DEVICE), batch
    expected = contract.reference_draw_accepted(*given)
    assert num_rates < 7 or len(expected.unique()) > 4
    assert draw_accepted(*given).tolist() == expected.tolist()
    assert KERNELS.draw_accepted(*given).tolist() == expected.tolist()


def test_frequencies_follow_the_rates():
    rates = torch.tensor([0.8, 0.5, 0.1], device=DEVICE)
    batch = seeded(list(range(NUM_ROWS)), DEVICE)
    turns = 40 if DEVICE.type == "cuda" else 3
    drawn = torch.cat(
        [draw_accepted(rates, torch.full((NUM_ROWS,), start, device=DEVICE), batch) for start in range(turns)]
    )
    for index, rate in enumerate(rates.tolist()):
        share = float((drawn > index + 1).double().mean())
        assert abs(share - rate) < 4 * (rate * (1 - rate) / len(drawn)) ** 0.5


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_a_captured_step_follows_its_tensors():
    case, other = Case(DEVICE, padding=2), Case(DEVICE, padding=2)
    progress = contract.Progress(case.rows.length, case.rows.anchor)
    batch = case.rows.sampling()
    count_accepted(case.sampled, case.block)  # compiled before it is captured
    case.advance(advance)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counted = count_accepted(case.sampled, case.block)
        advance(progress, case.block, case.sampled, counted, batch)
    for tensor, fresh in (
        (case.rows.length, other.rows.length),
        (case.rows.anchor, other.rows.anchor),
        (case.rows._output_counts, other.rows._output_counts),
    ):
        tensor.copy_(fresh)
    case.sampled[:, :3] = case.block[:, 1:4]
    other.sampled.copy_(case.sampled)
    other.num_committed = count_accepted(other.sampled, other.block)
    length, anchor, counts = other.expected()
    graph.replay()
    assert case.rows.length.tolist() == length
    assert case.rows.anchor.tolist() == anchor
    assert case.rows._output_counts.tolist() == counts
