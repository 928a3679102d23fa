"""What a verified block means: the reference and the CPU's kernel against plain counting in Python."""

import random

import pytest
import torch

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels.acceptance import (
    Progress,
    reference_advance,
    reference_count_accepted,
    reference_draw_accepted,
)
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.noise import philox

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["reference", "kernel"])
def functions(request):
    """Counting and advancing."""
    if request.param == "reference":
        return reference_count_accepted, reference_advance
    kernels = native()
    return kernels.count_accepted, kernels.advance


def native():
    if why_no_llvm(torch.float32, CPU) is not None:
        pytest.skip("the CPU kernels are not chosen")
    from blockdraft.kernels.llvm.acceptance import AcceptanceKernels

    return AcceptanceKernels()


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
def test_a_draft_counts_while_it_equals_the_sample_before_it(functions, name):
    sampled, block, expected = CASES[name]
    assert [count(*rows) for rows in zip(sampled, block, strict=True)] == expected
    assert functions[0](torch.tensor(sampled), torch.tensor(block)).tolist() == expected


def test_drawn_blocks_count_as_one_by_one(functions):
    sampled, block = torch.randint(0, 2, (2, 200, 9), generator=torch.Generator().manual_seed(0))
    expected = [count(*rows) for rows in zip(sampled.tolist(), block.tolist(), strict=True)]
    assert set(expected) >= {1, 2, 3, 4}
    assert functions[0](sampled, block).tolist() == expected
    turned = sampled.T.contiguous().T, block.T.contiguous().T
    assert functions[0](*turned).tolist() == expected


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


@pytest.mark.parametrize("padding", [0, 3])
def test_rows_advance_by_what_is_committed(functions, padding):
    """But the scratch row, which a step is filled up with."""
    case = Case(padding=padding)
    length, anchor, counts = case.expected()
    before = case.rows._output_counts.clone()
    case.advance(functions[1])
    assert case.rows.length.tolist() == length
    assert case.rows.anchor.tolist() == anchor
    for row in case.penalised:
        assert case.rows._output_counts[row].tolist() == counts[row]
    assert max(counts[4][token] - int(before[4, token]) for token in range(12)) > 1, "a token comes twice"


def test_the_kernel_advances_drawn_rows_as_the_reference_does():
    rng, kernels = random.Random(3), native()
    for num_rows in range(1, 9):
        tables = []
        rules = [
            RowSampling(presence=rng.choice([0.0, 0.5]), output_start=rng.randrange(12))
            for _ in range(num_rows)
        ]
        prompts = [[rng.randrange(9) for _ in range(rng.randrange(2, 9))] for _ in range(num_rows)]
        places = rng.sample(range(num_rows), rng.randint(1, num_rows))
        width = rng.randint(1, 6)
        for _ in range(2):
            rows = Rows(max_rows=num_rows, max_pages=1, vocab_size=9, scratch_page=0, device=CPU)
            for row, (prompt, rule) in enumerate(zip(prompts, rules, strict=True)):
                rows.place(row, prompt, len(prompt) - 1, rule)
            rows.activate(places)
            tables.append(rows)
        block, sampled = torch.randint(0, 9, (2, len(places), width))
        kept = torch.randint(1, width + 1, (len(places),))
        for rows, advance in zip(tables, (reference_advance, kernels.advance), strict=True):
            advance(Progress(rows.length, rows.anchor), block, sampled, kept, rows.sampling())
        mine, its = tables
        assert torch.equal(mine.length, its.length)
        assert torch.equal(mine.anchor, its.anchor)
        for row, rule in enumerate(rules):
            if rule.is_penalised:
                assert torch.equal(mine._output_counts[row], its._output_counts[row])


def test_without_a_penalty_nothing_is_counted(functions):
    case = Case()
    case.rows.activate([0])
    batch = case.rows.sampling()
    assert not batch.has_penalty
    before = case.rows._output_counts.clone()
    progress = Progress(case.rows.length, case.rows.anchor)
    functions[1](progress, case.block[1:2], case.sampled[1:2], case.num_committed[1:2], batch)
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
    assert reference_draw_accepted(torch.ones(7), starts, batch).tolist() == [8, 8]
    assert reference_draw_accepted(torch.zeros(7), starts, batch).tolist() == [1, 1]
    assert reference_draw_accepted(torch.tensor([1.0, 1.0, 0.0]), starts, batch).tolist() == [3, 3]
    assert reference_draw_accepted(torch.ones(0), starts, batch).tolist() == [1, 1]


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
            assert reference_draw_accepted(torch.tensor([uniform + shift]), starts, batch).tolist() == [
                expected
            ]


def test_frequencies_follow_the_rates():
    rates = torch.tensor([0.9, 0.6, 0.6, 0.25, 0.02])
    num_rows = 40
    batch = seeded(list(range(num_rows)))
    drawn = torch.cat(
        [reference_draw_accepted(rates, torch.full((num_rows,), start), batch) for start in range(250)]
    )
    total = len(drawn)
    for index, rate in enumerate(rates.tolist()):
        share = float((drawn > index + 1).double().mean())
        assert abs(share - rate) < 4 * (rate * (1 - rate) / total) ** 0.5
