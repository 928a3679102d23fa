"""Paged attention against one softmax per query in float64, and its promises on bits and on stray memory.

The reference and the CPU's kernel; Triton's has tiles and segments to test, in test_triton_attention.py.
"""

import itertools
import math

import pytest
import torch

from blockdraft.kernels.attention import QUERY_SLICE, Blocks, Mask
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from tests.kernels.implementations import CPU, implementation_of
from tests.matrix import slow_but

pytest.importorskip("llvmlite")
from blockdraft.kernels.llvm.attention_tile import MAX_VECTORS, divide

SCALE = 0.3
MASKS = {
    "causal": Mask(scale=SCALE),
    "bidirectional": Mask(scale=SCALE, is_causal=False),
    "window 1": Mask(scale=SCALE, window=1),
    "window": Mask(scale=SCALE, window=7),
    "wide window": Mask(scale=SCALE, window=300),
    "bidirectional window": Mask(scale=SCALE, is_causal=False, window=4),
    "anchored": Mask(scale=SCALE, window=5, is_anchored=True),
    "anchored bidirectional": Mask(scale=SCALE, is_causal=False, window=300, is_anchored=True),
}
DTYPES = [torch.float32, torch.float64]
both = pytest.mark.parametrize("way", ["reference", "llvm"])
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}


class Rows:
    """Keys, values and queries by position; laid into shuffled pages anew for every forward."""

    def __init__(self, way, lengths, *, heads=6, groups=2, dim=8, dtype=torch.float32):
        self.attends = REFERENCE.attend
        if way == "llvm":
            self.attends = implementation_of(way, dtype).kernels.attend
        generator = torch.Generator().manual_seed(sum(lengths) + dim + heads)
        self.dtype, self.groups, self.dim = dtype, groups, dim
        self.k = [torch.randn(groups, n, dim, generator=generator).to(dtype) for n in lengths]
        self.v = [torch.randn(groups, n, dim, generator=generator).to(dtype) for n in lengths]
        self.q = [torch.randn(n, heads, dim, generator=generator).to(dtype) for n in lengths]

    def laid_out(self, parts, *, page_size, seed=0, scratch=math.nan, device=CPU, most=None):
        """q, keys, values and the blocks of parts (row, start, count). All memory of no row is `scratch`.

        With `most`, kernels are told that rows have that many tokens, and their counts by offsets alone.
        """
        num_pages = max(-(-(start + count) // page_size) for _, start, count in parts) + 1
        generator = torch.Generator().manual_seed(seed)
        order = (torch.randperm(len(parts) * num_pages, generator=generator) + 1).view(len(parts), num_pages)
        homes = torch.randperm(2 * len(parts), generator=generator)[: len(parts)]
        table = torch.zeros(2 * len(parts), num_pages, dtype=torch.int64)
        shape = (self.groups, (order.numel() + 1) * page_size, self.dim)
        keys, values = (torch.full(shape, scratch, dtype=self.dtype) for _ in range(2))
        for pages, home, (row, start, count) in zip(order, homes, parts, strict=True):
            used = -(-(start + count) // page_size)
            table[home, :used] = pages[:used]
            position = torch.arange(start + count)
            slots = pages[position // page_size] * page_size + position % page_size
            keys[:, slots] = self.k[row][:, : start + count]
            values[:, slots] = self.v[row][:, : start + count]
        counts = [count for _, _, count in parts]
        blocks = Blocks(
            pages=table.to(device),
            rows=homes.to(device),
            starts=torch.tensor([start for _, start, _ in parts], device=device),
            counts=tuple(counts) if most is None else (most,) * len(counts),
            page_size=page_size,
            offsets=torch.tensor([0, *itertools.accumulate(counts)], device=device),
        )
        q = torch.cat([self.q[row][start : start + count] for row, start, count in parts])
        return q.to(device), keys.to(device), values.to(device), blocks

    def attend(self, mask, parts, *, page_size=16, seed=0, sinks=None, attend=None):
        """The outputs of each part's queries."""
        q, keys, values, blocks = self.laid_out(parts, page_size=page_size, seed=seed)
        keys[:, 0] = values[:, 0] = 0
        out = (attend or self.attends)(q, keys, values, blocks, mask, sinks)
        return list(out.split([count for _, _, count in parts]))

    def naive(self, mask, row, start, count, sinks=None):
        """In float64, only over the keys that a query sees."""
        out = torch.empty(self.q[row][start : start + count].shape, dtype=torch.float64)
        shared = out.shape[1] // self.groups
        for column in range(count):
            p = start + column
            lo, hi = 0, p + 1 if mask.is_causal else start + count
            if mask.window is not None and mask.is_anchored:
                lo = max(0, start - mask.window)
            elif mask.window is not None:
                lo, hi = max(0, p - mask.window + 1), min(hi, p + mask.window)
            for head in range(out.shape[1]):
                k, v = (t[row][head // shared, lo:hi].double() for t in (self.k, self.v))
                scores = k @ self.q[row][p, head].double() * mask.scale
                logits = scores if sinks is None else torch.cat([scores, sinks[head : head + 1].double()])
                out[column, head] = logits.softmax(0)[: hi - lo] @ v
        return out


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(1, 1, 4), (3, 3, 20), (4, 2, 64), (9, 3, 80), (7, 1, 20), (40, 2, 4)]
)
def test_every_ratio_of_heads_and_head_size(way, heads, groups, dim, dtype):
    rows = Rows(way, [300], heads=heads, groups=groups, dim=dim, dtype=dtype)
    out = rows.attend(MASKS["causal"], [(0, 295, 3)])[0]
    expected = rows.naive(MASKS["causal"], 0, 295, 3)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=10 * TOLERANCE[dtype])


# ---- sinks

SINKS = {
    "small": [-3.0, 0.4, -0.1, 1.5, 0.0, 2.0],
    "large": [9.0, 2.0, 40.0, 5.0, 300.0, 3.0],
    "some are none": [-math.inf, 0.5, -math.inf, 1.0, -500.0, -1e30],
}


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "sinks"),
    slow_but(
        [(name, sinks) for name in MASKS for sinks in (None, *SINKS)],
        *((name, None) for name in MASKS),
        *zip(MASKS, [*SINKS] * 3, strict=False),
    ),
)
def test_ragged_rows_agree_with_one_softmax_per_query(way, name, sinks, dtype):
    """A sink takes its share and has no value."""
    rows = Rows(way, [40, 700, 9, 1], dtype=dtype)
    parts = [(0, 23, 17), (1, 690, 8), (2, 0, 9), (3, 0, 1)]
    given = None if sinks is None else torch.tensor(SINKS[sinks], dtype=dtype)
    for part, out in zip(parts, rows.attend(MASKS[name], parts, sinks=given), strict=True):
        expected = rows.naive(MASKS[name], *part, sinks=given)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@both
def test_a_sink_that_weighs_nothing_changes_no_bit(way):
    rows = Rows(way, [600])
    none = torch.full((6,), -math.inf)
    plain, sunk = (rows.attend(MASKS["causal"], [(0, 590, 8)], sinks=sinks)[0] for sinks in (None, none))
    assert torch.equal(plain, sunk)


@both
def test_a_sink_that_is_not_a_number_is_not_hidden(way):
    rows = Rows(way, [30])
    sinks = torch.tensor([0.0, math.nan, 0.0, 0.0, 0.0, 0.0])
    out = rows.attend(MASKS["causal"], [(0, 20, 3)], sinks=sinks)[0]
    assert out[:, 1].isnan().all()
    assert not out[:, [0, 2, 3, 4, 5]].isnan().any()


# ---- bits


@pytest.mark.parametrize(
    ("name", "dtype", "has_sinks"),
    slow_but(
        list(itertools.product(["causal", "window", "wide window"], DTYPES, [False, True])),
        ("causal", torch.float32, True),
        ("window", torch.float64, True),
        ("wide window", torch.float32, False),
        ("causal", torch.float64, False),
    ),
    ids=str,
)
def test_bits_do_not_depend_on_cuts_pages_neighbours_or_threads(name, dtype, has_sinks):
    rows = Rows("llvm", [530, 300], dtype=dtype, dim=32)  # enough work for several threads
    sinks = torch.tensor(SINKS["small"], dtype=dtype) if has_sinks else None
    whole = rows.attend(MASKS[name], [(0, 0, 530)], sinks=sinks)[0]
    threads = torch.get_num_threads()
    try:
        for size in (1, 3, 16, 100):
            torch.set_num_threads(1 + size % 3)
            for start in range(0, 530, 106) if size == 100 else range(240, 275, 7):  # any place of a tile
                parts = [(1, 290, size % 10), (0, start, size)]
                out = rows.attend(MASKS[name], parts, page_size=size, sinks=sinks)[1]
                assert torch.equal(out, whole[start : start + size])
    finally:
        torch.set_num_threads(threads)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_bits_do_not_depend_on_the_other_rows(way, name, dtype):
    rows = Rows(way, [1100, 30, 300, 256, 5], dtype=dtype, heads=9, groups=3)
    parts = [(0, 1080, 9), (1, 0, 30), (2, 255, 1), (3, 248, 8), (4, 0, 2), (0, 500, 16)]
    for sinks in (None, torch.tensor(SINKS["small"], dtype=dtype).repeat(2)[:9]):
        together = rows.attend(MASKS[name], parts, sinks=sinks)
        for part, out in zip(parts, together, strict=True):
            assert torch.equal(rows.attend(MASKS[name], [part], sinks=sinks)[0], out)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_pages(way, dtype):
    rows = Rows(way, [1200], dtype=dtype)
    for name in ("causal", "wide window", "anchored bidirectional"):
        expected = rows.attend(MASKS[name], [(0, 1190, 8)])[0]
        for page_size in (1, 3, 64):
            out = rows.attend(MASKS[name], [(0, 1190, 8)], page_size=page_size, seed=page_size)[0]
            assert torch.equal(out, expected)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(way, dtype):
    rows = Rows(way, [1200, 700], dtype=dtype, heads=9, groups=3, dim=64)
    parts = [(0, 1100, 100), (1, 650, 50)]
    threads = torch.get_num_threads()
    try:
        results = [
            torch.set_num_threads(n) or torch.cat(rows.attend(MASKS["causal"], parts)) for n in (1, 2, 3)
        ]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", MASKS)
def test_keys_that_only_a_neighbour_sees_reach_nobody_else(name):
    """NaN at one position of the block: exactly the queries that see it turn NaN."""
    rows = Rows("llvm", [40], dtype=torch.float32)
    clean = rows.attend(MASKS[name], [(0, 20, 12)])[0]
    for part in (rows.k, rows.v):
        kept = part[0][:, 26].clone()
        part[0][:, 26] = math.nan
        out, sees = rows.attend(MASKS[name], [(0, 20, 12)])[0], rows.naive(MASKS[name], 0, 20, 12).isnan()
        assert torch.equal(out.isnan(), sees)
        assert torch.equal(out[~sees], clean[~sees])
        part[0][:, 26] = kept


@both
def test_a_query_that_is_a_strided_slice_gives_the_same_bits(way):
    rows = Rows(way, [20])
    expected = rows.attend(MASKS["causal"], [(0, 10, 4)])[0]
    rows.q[0] = torch.cat([rows.q[0], rows.q[0]], dim=1)[:, :6]
    assert torch.equal(rows.attend(MASKS["causal"], [(0, 10, 4)])[0], expected)


# ---- memory


def test_lengths_are_read_when_the_kernel_runs():
    """Other lengths and pages in the same tensors are enough: nothing else tells the kernel."""
    rows = Rows("llvm", [600])
    attend, kept = kernels_for(torch.float32, CPU).attend, []

    def keep(q, keys, values, blocks, mask, sinks):
        kept.append((q.clone(), keys.clone(), values.clone(), blocks, mask, sinks))
        return attend(*kept[-1])

    long = rows.attend(MASKS["window"], [(0, 520, 4)], attend=keep)[0]
    short = rows.attend(MASKS["window"], [(0, 17, 4)], attend=keep)[0]
    (q, keys, values, blocks, mask, _), (q_short, keys_short, values_short, other, *_) = kept
    assert torch.equal(attend(q, keys, values, blocks, mask, None), long)
    blocks.starts.copy_(other.starts)
    blocks.rows.copy_(other.rows)
    blocks.table.zero_()[:, : other.table.shape[1]] = other.table
    q.copy_(q_short)
    assert torch.equal(attend(q, keys_short, values_short, blocks, mask, None), short)


@pytest.mark.parametrize("rest", [0, 1 << 50])
@pytest.mark.parametrize("name", MASKS)
def test_pages_out_of_sight_are_not_looked_at(name, rest):
    """The page table past a row's end, and before what a window shows, holds anything."""
    rows = Rows("llvm", [700])
    attend = kernels_for(torch.float32, CPU).attend

    def spoiled(q, keys, values, blocks, mask, sinks):
        table = torch.nn.functional.pad(blocks.table, (0, 3), value=rest)
        if mask.window is not None:
            table[:, : max(0, 600 - mask.window) // 16] = rest
        moved = Blocks(
            pages=table, rows=blocks.rows, starts=blocks.starts, counts=blocks.counts, page_size=16
        )
        return attend(q, keys, values, moved, mask, sinks)

    part = [(0, 600, 9)]
    assert torch.equal(rows.attend(MASKS[name], part)[0], rows.attend(MASKS[name], part, attend=spoiled)[0])


@pytest.mark.parametrize("threads", [1, 2, 6, 16])
@pytest.mark.parametrize(("shared", "groups"), [(1, 1), (3, 3), (8, 2), (20, 1)])
@pytest.mark.parametrize("counts", [(1,), (8,), (1, 1, 1), (0, 5, 40), (100,)])
def test_all_work_is_divided_once_and_threads_have_some(counts, shared, groups, threads):
    units = divide(counts, shared, groups, threads)
    done = [(row, vector) for row, first, last in units.tolist() for vector in range(first, last)]
    assert done == [(row, vector) for row, count in enumerate(counts) for vector in range(count * shared)]
    assert all(0 < last - first <= MAX_VECTORS for _, first, last in units.tolist())
    assert len(units) * groups >= min(threads, len(done) * groups) * 0.5


# ---- places


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(
    "counts",
    [(1,), (3, 3, 3), (2, 0, 7, 1), (0, 0, 4, 0), (130, 2, 0, 200), (1,) * 130],
    ids=lambda counts: f"{len(counts)}rows{sum(counts)}",
)
def test_tokens_are_where_counting_says(implementation, counts, page_size):
    generator, num_rows = torch.Generator().manual_seed(len(counts)), len(counts)
    table = torch.randint(0, 2**40, (num_rows + 3, 300 // page_size + 1), generator=generator)
    rows = torch.randperm(num_rows + 3, generator=generator)[:num_rows]
    starts = torch.randint(0, 90, (num_rows,), generator=generator)
    expected = [
        (position, int(table[row, position // page_size]) * page_size + position % page_size)
        for count, start, row in zip(counts, starts.tolist(), rows.tolist(), strict=True)
        for position in range(start, start + count)
    ]
    blocks = Blocks(
        pages=table.to(implementation.device),
        rows=rows.to(implementation.device),
        starts=starts.to(implementation.device),
        counts=counts,
        page_size=page_size,
        locate=implementation.kernels.locate,
    )
    found = zip(blocks.positions.tolist(), blocks.write_slots.tolist(), strict=True)
    assert list(found) == expected


# ---- range


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_accurate_over_the_whole_range_of_exp(dtype):
    """Two keys, scores 0 and -x: the second value's weight is exp(-x) / (1 + exp(-x))."""
    x = torch.linspace(0, 80, 4001, dtype=dtype)
    n = len(x)
    keys = torch.zeros(1, 2 * n, 4, dtype=dtype)
    keys[0, 1::2, 0] = -x
    values = torch.zeros(1, 2 * n, 4, dtype=dtype)
    values[0, 1::2, 0] = 1
    q = torch.zeros(n, 1, 4, dtype=dtype)
    q[:, 0, 0] = 1
    blocks = Blocks(
        pages=torch.arange(n)[:, None], starts=torch.ones(n, dtype=torch.int64), counts=(1,) * n, page_size=2
    )
    attend = kernels_for(dtype, torch.device("cpu")).attend
    out = attend(q, keys, values, blocks, Mask(scale=1.0))[:, 0, 0].double()
    expected = torch.sigmoid(-x.double())
    eps = torch.finfo(dtype).eps
    assert ((out - expected).abs() / expected).max() < 4 * eps  # exp, sum and quotient


@both
def test_large_scores_do_not_overflow_and_far_ones_weigh_nothing(way):
    rows = Rows(way, [600])
    rows.q[0] *= 1e4
    out = rows.attend(MASKS["causal"], [(0, 590, 8)])[0]
    torch.testing.assert_close(out.double(), rows.naive(MASKS["causal"], 0, 590, 8), rtol=0, atol=1e-3)


@both
def test_a_hundred_thousand_keys(way):
    rows = Rows(way, [100_003], heads=1, groups=1, dim=4)
    out = rows.attend(MASKS["causal"], [(0, 100_001, 2)])[0]
    torch.testing.assert_close(out.double(), rows.naive(MASKS["causal"], 0, 100_001, 2), rtol=0, atol=1e-6)


# ---- the reference


@pytest.mark.parametrize("count", [QUERY_SLICE, 2 * QUERY_SLICE + 7])
@pytest.mark.parametrize("name", ["causal", "anchored"])
def test_long_prefill_is_sliced_without_losing_its_place(name, count):
    rows = Rows("reference", [6 + count, count], heads=4, groups=2, dim=4, dtype=torch.float64)
    sinks = torch.tensor([-3.0, 0.4, -0.1, 1.5], dtype=torch.float64)
    for given in (None, sinks):
        parts = [(0, 6, count), (1, 0, count)]
        for part, out in zip(parts, rows.attend(MASKS[name], parts, sinks=given), strict=True):
            torch.testing.assert_close(out, rows.naive(MASKS[name], *part, given), rtol=0, atol=1e-12)


def test_half_precision_rounds_once():
    """Sums are made in float32, so an output is the nearest bfloat16 but for ties."""
    rows = Rows("reference", [276], dtype=torch.bfloat16)
    for name, sinks in zip(MASKS, itertools.cycle(SINKS.values()), strict=False):
        given = torch.tensor(sinks, dtype=torch.bfloat16)
        exact = rows.naive(MASKS[name], 0, 270, 6, given)
        out = rows.attend(MASKS[name], [(0, 270, 6)], sinks=given)[0]
        assert out.dtype == torch.bfloat16
        assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()


def test_sinks_have_gradients():
    q, keys, values, blocks = Rows("reference", [7], dtype=torch.float64).laid_out([(0, 3, 4)], page_size=4)
    keys[:, 0] = values[:, 0] = 0
    sinks = torch.tensor(SINKS["small"], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s: REFERENCE.attend(q, keys, values, blocks, MASKS["window"], s), (sinks,)
    )


def test_masks_of_one_forward_are_kept_apart():
    """Layers share the reads of a forward: a cached mask must not serve a layer with another one."""
    rows, parts = Rows("reference", [13, 9]), [(0, 9, 4), (1, 5, 4)]
    *given, blocks = rows.laid_out(parts, page_size=4, scratch=0.0)
    for is_causal, window, is_anchored in itertools.product((True, False), (None, 3, 5), (True, False)):
        mask = Mask(scale=SCALE, is_causal=is_causal, window=window, is_anchored=is_anchored)
        out = REFERENCE.attend(*given, blocks, mask, None)
        assert torch.equal(out, torch.cat(rows.attend(mask, parts, page_size=4)))


@both
def test_bits_of_a_causal_query_do_not_depend_on_what_follows_it(way):
    rows = Rows(way, [258])
    before = rows.attend(MASKS["causal"], [(0, 250, 8)])[0]
    rows.k[0][:, -3:] *= -2
    rows.v[0][:, -3:] += 5
    after = rows.attend(MASKS["causal"], [(0, 250, 8)])[0]
    assert torch.equal(after[:5], before[:5])
    assert not torch.equal(after[5:], before[5:])
