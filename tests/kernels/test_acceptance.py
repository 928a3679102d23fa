"""Acceptance and commit of a verified block: every implementation against plain counting in Python."""

import random

import pytest
import torch

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels.acceptance import Progress
from blockdraft.kernels.kernels import REFERENCE
from blockdraft.kernels.noise import philox
from tests.kernels.implementations import CPU, DEVICE, HAS_CARD, implementation_of, only_triton, quiet

pytestmark = quiet
NONE = torch.tensor(2**30)  # no limit
CASES = {  # samples, block, tokens to commit
    "width 1": ([[4]], [[9]], [1]),
    "all right": ([[1, 2, 3, 4]], [[9, 1, 2, 3]], [4]),
    "all wrong": ([[1, 2, 3, 4]], [[9, 8, 7, 6]], [1]),
    "the last is wrong": ([[1, 2, 3, 4]], [[9, 1, 2, 7]], [3]),
    "a mismatch, then matches": ([[1, 2, 3, 4]], [[9, 1, 7, 3]], [2]),
    "the first is wrong, then matches": ([[1, 2, 3, 4]], [[9, 7, 2, 3]], [1]),
    "the anchor is no draft": ([[1, 2]], [[1, 2]], [1]),
    "rows": ([[1, 2, 3], [1, 2, 3], [0, 0, 0]], [[5, 1, 2], [5, 2, 2], [0, 0, 0]], [3, 1, 3]),
    "beyond 32 bits": ([[2**40 + 1, 5]], [[3, 1]], [1]),
}


def count(samples, block):
    """Drafts from the left that equal the sample before them, and one more."""
    found = 1
    while found < len(block) and samples[found - 1] == block[found]:
        found += 1
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_draft_counts_while_it_equals_the_sample_before_it(implementation, name):
    sampled, block, expected = CASES[name]
    assert [count(*rows) for rows in zip(sampled, block, strict=True)] == expected
    given = [torch.tensor(one, device=implementation.device) for one in (sampled, block)]
    for limit in (1, 2, 3, 2**30):
        limits = torch.full((len(block),), limit, device=implementation.device)
        got = implementation.kernels.count_accepted(*given, limits)
        assert got.dtype == torch.int64
        assert got.tolist() == [min(one, limit) for one in expected]


@pytest.mark.parametrize("width", [2, 3, 8, 16, 17])
def test_drawn_blocks_count_as_one_by_one(implementation, width):
    num_rows = 20 if implementation.is_interpreted else 200
    generator, count_accepted = torch.Generator().manual_seed(width), implementation.kernels.count_accepted
    limits = torch.randint(1, width + 2, (num_rows,), generator=generator)
    sampled, block = torch.randint(0, 2, (2, num_rows, width + 1), generator=generator)
    sampled[:3, :-2] = block[:3, 1:-1]
    sampled, block = sampled.to(implementation.device)[:, :width], block.to(implementation.device)[:, :width]
    expected = [count(*rows) for rows in zip(sampled.tolist(), block.tolist(), strict=True)]
    assert set(expected) >= {1, width}
    expected = [min(pair) for pair in zip(expected, limits.tolist(), strict=True)]
    limits = limits.to(implementation.device)
    assert count_accepted(sampled, block, limits).tolist() == expected  # parts of wider tensors
    assert count_accepted(sampled.contiguous(), block.contiguous(), limits).tolist() == expected
    turned = sampled.T.contiguous().T, block.T.contiguous().T
    assert count_accepted(*turned, limits).tolist() == expected


# ---- advance


class Case:
    """Rows with and without penalties in one step, and what Python's own counting says of them."""

    width, vocab_size = 5, 12

    def __init__(self, device=CPU, padding=0):
        rng = random.Random(1)
        rules = [
            RowSampling(presence=0.5, output_start=3),
            RowSampling(output_start=3),  # not penalised
            RowSampling(repetition=1.3, output_start=9),  # its outputs begin inside the block
            RowSampling(frequency=0.1, output_start=50),  # still in its prompt
        ]
        self.rows = Rows(max_rows=6, max_pages=1, vocab_size=self.vocab_size, scratch_page=0, device=device)
        self.places = [4, 0, 2, 5]
        lengths = [6, 7, 7, 4]
        for row, rule, length in zip(self.places, rules, lengths, strict=True):
            self.rows.place(row, [rng.randrange(4) for _ in range(length + 1)], length, rule)
        self.rows.activate(self.places, len(self.places) + padding)
        tokens = [[rng.randrange(4) for _ in range(self.width)] for _ in range(len(self.places) + padding)]
        self.block = torch.tensor(tokens, device=device)  # few tokens: some come twice
        self.sampled = self.block + 100
        kept = [5, 4, 4, 3, *(1 + index % 3 for index in range(padding))]
        self.num_committed = torch.tensor(kept, device=device)
        self.penalised = [4, 2, 5]

    def expected(self):
        """Lengths, anchors and output counts afterwards."""
        rows = self.rows
        length, anchor, counts = rows.length.tolist(), rows.anchor.tolist(), rows._output_counts.tolist()
        for index, row in enumerate(self.places):
            first = rows._host[row].output_start
            for column in range(int(self.num_committed[index])):
                if row in self.penalised and length[row] + column >= first:
                    counts[row][int(self.block[index, column])] += 1
        for index, row in enumerate(self.places):
            length[row] += int(self.num_committed[index])
            anchor[row] = int(self.sampled[index, self.num_committed[index] - 1])
        return length, anchor, counts

    def advance(self, function):
        progress = Progress(self.rows.length, self.rows.anchor)
        function(progress, self.block, self.sampled, self.num_committed, self.rows.sampling())


def check_advance(implementation, case):
    """Only rows with a penalty need counts; Triton's kernel leaves those of others alone, too."""
    length, anchor, counts = case.expected()
    case.advance(implementation.kernels.advance)
    assert case.rows.length.tolist() == length
    assert case.rows.anchor.tolist() == anchor
    for row in range(7) if implementation.name == "triton" else case.penalised:
        assert case.rows._output_counts[row].tolist() == counts[row]


@pytest.mark.parametrize("padding", [0, 3])
def test_rows_advance_by_what_is_committed(implementation, padding):
    """The scratch row, which a step is filled up with, stays where it is."""
    case = Case(implementation.device, padding)
    before = case.rows._output_counts.clone()
    check_advance(implementation, case)
    gained = case.rows._output_counts[4] - before[4]
    assert gained.max() > 1, "a token comes twice"


@only_triton
def test_a_penalised_scratch_row_would_stay_too(implementation):
    case = Case(implementation.device, padding=2)
    case.rows._whole[-1] = case.rows._whole[4]
    check_advance(implementation, case)


def test_advance_takes_parts_of_wider_blocks(implementation):
    case = Case(implementation.device)
    case.block, case.sampled = (torch.cat((x, x), dim=1)[:, : case.width] for x in (case.block, case.sampled))
    check_advance(implementation, case)


def test_without_a_penalty_nothing_is_counted(implementation):
    case = Case(implementation.device)
    case.rows.activate([0])
    batch = case.rows.sampling()
    assert not batch.needs.penalty
    before = case.rows._output_counts.clone()
    progress = Progress(case.rows.length, case.rows.anchor)
    some = (case.block[1:2], case.sampled[1:2], case.num_committed[1:2])
    implementation.kernels.advance(progress, *some, batch)
    assert torch.equal(case.rows._output_counts, before)
    assert case.rows.length[0] == 7 + 4


# ---- drawn acceptance, for timing


def seeded(seeds, device=CPU):
    rows = Rows(max_rows=len(seeds), max_pages=1, vocab_size=4, scratch_page=0, device=device)
    for row, seed in enumerate(seeds):
        rows.place(row, [0, 1], 1, RowSampling(seed=seed))
    rows.activate(range(len(seeds) - 1, -1, -1))  # not in the tables' order
    return rows.sampling()


def test_rates_decide_how_far_a_step_gets():
    batch, starts = seeded([5, -5]), torch.tensor([3, 9])

    def drawn(rates, limits=NONE):
        return REFERENCE.draw_accepted(rates, starts, limits, batch).tolist()

    assert drawn(torch.ones(7)) == [8, 8]
    assert drawn(torch.ones(7), torch.tensor([3, 9])) == [3, 8]
    assert drawn(torch.zeros(7)) == [1, 1]
    assert REFERENCE.draw_accepted(
        torch.tensor([1.0, 1.0, 0.0]), starts, NONE.expand_as(starts), batch
    ).tolist() == [3, 3]
    assert drawn(torch.ones(0)) == [1, 1]


def test_the_number_of_a_row_is_philox_s_for_its_seed_and_length():
    """As the contract of the noise has it, with a fourth word of 1: apart from every number of sampling."""
    seeds, lengths = [7, -3, 2**62 + 1], [2**33 + 5, 0, 12]
    for seed, length in zip(seeds, lengths, strict=True):
        words = [0, length & 0xFFFFFFFF, length >> 32, 1]
        key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
        word = int(philox(tuple(map(torch.tensor, words)), tuple(map(torch.tensor, key)))[0])
        uniform = ((word >> 9) + 0.5) * 2.0**-23
        batch, starts = seeded([seed]), torch.tensor([length])
        for shift, expected in ((1e-4, 2), (-1e-4, 1)):
            assert REFERENCE.draw_accepted(
                torch.tensor([uniform + shift]), starts, NONE.expand_as(starts), batch
            ).tolist() == [expected]


@only_triton
@pytest.mark.parametrize("num_rates", [0, 1, 7, 15, 16])
def test_drawn_acceptance_is_the_references_integer(implementation, num_rates):
    generator, num_rows = torch.Generator().manual_seed(num_rates), 500 if HAS_CARD else 30
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator).tolist()
    seeds[:4] = [0, -1, 2**63 - 1, -(2**63)]
    starts = torch.randint(0, 2**20, (num_rows,), generator=generator)
    starts[::3] += 2**32 * torch.arange(1, len(starts[::3]) + 1)
    rates = torch.linspace(0.97, 0.05, num_rates)
    limits = torch.randint(1, 9, starts.shape, generator=generator)
    given = rates.to(DEVICE), starts.to(DEVICE), limits.to(DEVICE), seeded(seeds, DEVICE)
    expected = REFERENCE.draw_accepted(*given)
    assert num_rates < 7 or len(expected.unique()) > 4
    assert implementation.kernels.draw_accepted(*given).tolist() == expected.tolist()


@pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device")
def test_a_captured_step_follows_its_tensors():
    kernels = implementation_of("triton").kernels
    case, other = Case(DEVICE, padding=2), Case(DEVICE, padding=2)
    progress = Progress(case.rows.length, case.rows.anchor)
    batch = case.rows.sampling()
    kernels.count_accepted(case.sampled, case.block, case.rows.limits)  # compiled before it is captured
    case.advance(kernels.advance)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counted = kernels.count_accepted(case.sampled, case.block, case.rows.limits)
        kernels.advance(progress, case.block, case.sampled, counted, batch)
    for tensor, fresh in (
        (case.rows.length, other.rows.length),
        (case.rows.anchor, other.rows.anchor),
        (case.rows._output_counts, other.rows._output_counts),
    ):
        tensor.copy_(fresh)
    case.sampled[:, :3] = case.block[:, 1:4]
    other.sampled.copy_(case.sampled)
    other.num_committed = kernels.count_accepted(other.sampled, other.block, other.rows.limits)
    length, anchor, counts = other.expected()
    graph.replay()
    assert case.rows.length.tolist() == length
    assert case.rows.anchor.tolist() == anchor
    assert case.rows._output_counts.tolist() == counts
