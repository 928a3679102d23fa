"""The cache alone: pages, commits, recurrent tapes and compressed tiles, against layers without a cache."""

import itertools

import pytest
import torch

from blockdraft.cache.cache import SCRATCH_PAGE, Cache
from blockdraft.cache.paged import CompressedLayer, PagedKV
from blockdraft.cache.recurrent import RecurrentState
from blockdraft.cache.rows import Rows
from blockdraft.cache.spec import Compressed, Paged, Recurrent, SharedWith, bytes_per_token
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.gated_delta import DeltaWeights
from blockdraft.kernels.kv_positions import PositionRule

CPU, F64 = torch.device("cpu"), torch.float64
PAGE, PAGES, ROWS = 4, 40, 3
HEADS, DIM = 2, 8
MASK = Mask(scale=DIM**-0.5)
RECURRENT = Recurrent(num_key_heads=1, num_heads=2, key_dim=4, value_dim=3, conv_width=3)


class Bench:
    """A cache of 40 pages of 4 tokens and three rows; pages are dealt as tests say."""

    def __init__(self, *specs, num_exact_pages=0, page_size=PAGE):
        options = {"num_pages": PAGES, "num_rows": ROWS + 1, "page_size": page_size, "dtype": F64}
        self.cache = Cache(
            specs,
            **options,
            device=CPU,
            num_exact_pages=num_exact_pages,
            rule=PositionRule(window=16, block=16),
        )
        has_exact = bool(num_exact_pages)
        self.rows = Rows(
            max_rows=ROWS,
            max_pages=20,
            vocab_size=9,
            scratch_page=SCRATCH_PAGE,
            device=CPU,
            has_exact=has_exact,
        )

    def deal(self, row, *pages):
        self.rows.set_pages([(row, 0, pages)])

    def attend(self, view, tokens, layer=0):
        q, k, v = (table[tokens] for table in TABLES)
        return view.attend(layer, q, k, v, MASK, angles=None)

    def prefill(self, *texts):
        """Add a piece of text to each active row."""
        counts = tuple(map(len, texts))
        read = self.attend(self.cache.view(self.rows, counts, is_known=True), [*itertools.chain(*texts)])
        self.rows.extend(counts)
        return read.split(counts)

    def verify(self, *blocks, committed):
        """Verify a block of each active row and commit as many of its tokens as `committed` says."""
        view = self.cache.view(self.rows, len(blocks[0]))
        read = self.attend(view, [*itertools.chain(*blocks)])
        num_committed = torch.tensor(committed)
        self.cache.commit(self.rows, view.starts, num_committed)
        self.rows.length[self.rows.active] += num_committed
        return read.split(len(blocks[0]))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


TABLES = [drawn(30, heads, DIM, seed=heads) for heads in (2 * HEADS, HEADS, HEADS)]  # by token


def dense(text, num_last):
    """Attention of the last tokens of a text over all of it, without a cache."""
    q, k, v = (table[text] for table in TABLES)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * MASK.scale
    scores.masked_fill_(torch.ones(len(text), len(text)).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)[len(text) - num_last :]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# ---- pages


def test_a_row_reads_its_own_pages_wherever_they_lie():
    bench, texts = Bench(Paged(HEADS, DIM)), [list(range(6)), list(range(20, 9, -1))]
    bench.deal(2, 7, 3)
    bench.deal(0, 9, 2, 5)
    bench.rows.activate([2, 0])
    for read, text in zip(bench.prefill(*texts), texts, strict=True):
        same(read, dense(text, len(text)))


def test_a_page_of_two_rows_is_read_by_both():
    bench, text = Bench(Paged(HEADS, DIM)), [1, 2, 3, 4]
    bench.deal(0, 6, 7)
    bench.deal(1, 6, 8)
    bench.rows.activate([0])
    bench.prefill(text)
    bench.rows.length[1] = PAGE  # found in the prefix cache
    bench.rows.activate([0, 1])
    for read, rest in zip(bench.prefill([5, 6], [7, 8]), ([5, 6], [7, 8]), strict=True):
        same(read, dense(text + rest, 2))


def test_a_row_that_fills_up_a_batch_writes_to_the_scratch_page_alone():
    bench = Bench(Paged(HEADS, DIM))
    bench.deal(0, 4)
    storage = bench.cache.storage[0]
    storage.keys[:], storage.values[:] = 0, 0
    bench.rows.activate([0], 2)
    bench.verify([1, 2], [3, 4], committed=[1, 1])
    written = storage.keys.abs().sum(dim=(0, 2)).nonzero()[:, 0] // PAGE
    assert set(written.tolist()) == {4, SCRATCH_PAGE}


def test_a_layer_that_shares_has_no_storage_of_its_own():
    bench = Bench(Paged(HEADS, DIM), SharedWith(0), Paged(HEADS, DIM))
    first, shared, last = bench.cache.storage
    assert shared is first
    assert last is not first
    assert bench.cache.num_bytes == 2 * first.num_bytes
    assert bench.cache.num_bytes == PAGES * PAGE * bytes_per_token((Paged(HEADS, DIM),) * 2, 8)


# ---- commit


def test_what_was_not_committed_is_never_read():
    bench, text = Bench(Paged(HEADS, DIM)), [1, 2, 3]
    bench.deal(0, 5, 6, 7)
    bench.rows.activate([0])
    bench.prefill(text)
    (read,) = bench.verify([4, 20, 21], committed=[1])
    same(read, dense([*text, 4, 20, 21], 3))
    (read,) = bench.verify([5, 6, 22], committed=[2])
    same(read, dense([*text, 4, 5, 6, 22], 3))
    (read,) = bench.verify([7], committed=[1])
    same(read, dense([*text, 4, 5, 6, 7], 1))


# ---- recurrent layers


WEIGHTS = DeltaWeights(drawn(RECURRENT.conv_channels, 3), drawn(2, seed=1), drawn(2, seed=2))
INPUTS = [drawn(30, size, seed=size) for size in (RECURRENT.conv_channels, 2, 2)]  # by token


def scan(bench, view, tokens):
    return view.scan(0, *(table[tokens] for table in INPUTS), WEIGHTS)


def states_of(bench, row):
    storage = bench.cache.storage[0]
    assert isinstance(storage, RecurrentState)
    return storage.state[row].clone(), storage.tail[row].clone()


def told(text, row=0):
    """The states of a row that was told a text, and what its tokens read."""
    bench = Bench(RECURRENT)
    bench.rows.activate([row])
    read = scan(bench, bench.cache.view(bench.rows, len(text), is_known=True), text)
    return states_of(bench, row), read


@pytest.mark.parametrize("committed", [(1, 3), (2, 1)])
def test_a_commit_folds_as_many_tokens_of_the_tape_as_each_row_accepted(committed):
    bench, blocks = Bench(RECURRENT), ([4, 5, 6], [7, 8, 9])
    storage = bench.cache.storage[0]
    storage.state[:] = storage.tail[:] = float("nan")  # of whoever had the rows before
    bench.rows.activate([2, 0])
    view = bench.cache.view(bench.rows, 2, is_known=True)
    scan(bench, view, [1, 2, 2, 3])
    bench.rows.extend([2, 2])
    before = states_of(bench, 2)
    view = bench.cache.view(bench.rows, 3)
    read = scan(bench, view, [*blocks[0], *blocks[1]]).split(3)
    same(states_of(bench, 2), before)  # nothing moves before the commit
    bench.cache.commit(bench.rows, view.starts, torch.tensor(committed))
    texts = [[1, 2, *blocks[0]], [2, 3, *blocks[1]]]
    for row, text, count, its in zip((2, 0), texts, committed, read, strict=True):
        same(states_of(bench, row), told(text[: 2 + count])[0])
        same(its, told(text)[1][2:])
    assert storage.state[1].isnan().all(), "another row is left alone"


# ---- layers that compress


def compressing(length):
    """A row of `length` tokens, read in two chunks, whose exact pages are not those of its codes."""
    bench = Bench(Compressed(HEADS, 64, "int8"), num_exact_pages=30, page_size=16)
    num_pages = -(-length // 16)
    bench.deal(0, *range(2, 2 + num_pages))
    bench.rows.set_exact_pages([(0, 0, list(range(29, 29 - num_pages, -1)))])
    bench.rows.activate([0])
    k, v, q = (drawn(length, HEADS, 64, seed=seed) for seed in (1, 2, 3))
    for part in (slice(0, 100), slice(100, length)):
        count = len(k[part])
        view = bench.cache.view(bench.rows, (count,), is_known=True)
        view.attend(0, q[part], k[part], v[part], MASK, angles=None)
        bench.rows.extend((count,))
    return bench, k, v


@pytest.mark.parametrize(("length", "end"), [(128, 64), (129, 128), (200, 192)])
def test_whole_tiles_behind_the_window_are_compressed_and_the_rest_stays_exact(length, end):
    bench, k, v = compressing(length)
    layer = bench.cache.storage[0]
    assert isinstance(layer, CompressedLayer)
    position = torch.arange(length)
    slot = bench.rows.page_table[0, position // 16] * 16 + position % 16
    exact = bench.rows.exact_table[0, position // 16] * 16 + position % 16
    pages = layer.pages
    same(pages.exact_keys[0][:, exact], k.transpose(0, 1))
    same(pages.exact_values[0][:, exact], v.transpose(0, 1))
    rule = bench.cache._rule
    assert rule.compressed_end(length) == end
    for codec, codes, x in ((pages.format.keys, pages.keys, k), (pages.format.values, pages.values, v)):
        expected = codec.encode(x.transpose(0, 1))
        assert torch.equal(codes.codes[0][:, slot[:end]], expected.codes[:, :end])
        assert torch.equal(codes.scale[0][:, slot[:end]], expected.scale[:, :end])
        assert not codes.codes[0][:, slot[end:]].any(), "nothing else is compressed"


def test_a_cache_says_which_layers_it_has():
    plain, mixed = Bench(Paged(HEADS, DIM)).cache, Bench(RECURRENT, Paged(HEADS, DIM)).cache
    assert (plain.reads_offsets, mixed.reads_offsets) == (True, False), "the references of scans need counts"
    assert isinstance(mixed.storage[1], PagedKV)
    assert not plain.compressed
