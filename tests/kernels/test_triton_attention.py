"""The Triton attention kernel against the reference in float64, and its promise on bits."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.triton import attention as kernel
from blockdraft.kernels.triton.attention import Config, attend, choose, segment_length
from tests.kernels import test_attention as attention
from tests.kernels.implementations import DEVICE, on_card, slow_interpreted
from tests.matrix import slow_but

H200 = {"multiprocessors": 132, "shared_memory": 228 * 1024}
MASKS = {
    "causal": Mask(scale=0.3),
    "block": Mask(scale=0.3, is_causal=False),
    "window 1": Mask(scale=0.3, window=1),
    "window": Mask(scale=0.3, window=21),
    "wide window": Mask(scale=0.3, window=1000),
    "block window": Mask(scale=0.3, is_causal=False, window=4),
    "anchored": Mask(scale=0.3, window=21, is_anchored=True),
    "anchored block": Mask(scale=0.3, is_causal=False, window=21, is_anchored=True),
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
HALVES = [torch.float16, torch.bfloat16]
# Small chunks and segments, so that short rows have many; one tile per row, or many.
ONE_TILE = {
    name: Config(tokens=5, block_m=16, block_n=16, warps=4, stages=2, parts=parts, segment=16)
    for name, parts in {"whole": 1, "split": 16, "parts": 3}.items()
}
MANY_TILES = {name: replace(config, tokens=2) for name, config in ONE_TILE.items()}


class Rows(attention.Rows):
    """With sinks, and on the device."""

    def __init__(self, lengths, *, heads=3, groups=1, dim=24, dtype=torch.float32):
        super().__init__("triton", lengths, heads=heads, groups=groups, dim=dim, dtype=dtype)
        self.sinks = torch.randn(heads, generator=torch.Generator().manual_seed(heads)).to(dtype)

    def laid_out(self, parts, *, page_size=4, **options):
        return super().laid_out(parts, page_size=page_size, device=DEVICE, **options)

    def attend(self, mask, parts, *, config=None, sinks=None, **options):
        q, keys, values, blocks = self.laid_out(parts, **options)
        sinks = None if sinks is None else sinks.to(DEVICE)
        out = attend(q, keys, values, blocks, mask, sinks, config)
        return list(out.cpu().split([count for _, _, count in parts]))


def assert_agrees(rows, mask, parts, *, sinks=None, **options):
    out = torch.cat(rows.attend(mask, parts, sinks=sinks, **options))
    expected = torch.cat([rows.naive(mask, *part, sinks=sinks) for part in parts])
    tolerance = TOLERANCE[rows.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "splits"),
    slow_but(
        [(name, splits) for name in MASKS for splits in ("whole", "split")],
        *((name, "whole") for name in list(MASKS)[::2]),
        ("anchored block", "split"),
    ),
)
def test_blocks_of_any_start_agree_with_the_reference(name, splits):
    mask = MASKS[name]
    rows = Rows([75, 5, 40])
    parts = [(0, 71, 4), (2, 40, 0), (1, 0, 3), (2, 37, 1)]
    assert_agrees(rows, mask, parts, config=ONE_TILE[splits], sinks=rows.sinks)


@pytest.mark.parametrize(
    ("name", "splits"),
    slow_but(
        [
            ("causal", "whole"),
            ("causal", "split"),
            ("block", "whole"),
            ("block window", "whole"),
            ("anchored", "split"),
        ],
        ("causal", "whole"),
        ("block window", "whole"),
    ),
)
def test_rows_of_many_tiles_agree_with_the_reference(name, splits):
    rows = Rows([60, 40, 3])
    parts = [(0, 51, 9), (1, 2, 0), (2, 0, 3), (1, 34, 1)]
    assert_agrees(rows, MASKS[name], parts, config=MANY_TILES[splits])


def test_a_tile_finds_its_row_among_many(monkeypatch):
    monkeypatch.setattr(kernel, "ROW_BLOCK", 4)
    rows = Rows([12])
    counts = [0, 0, 6, 1, 2, 0, 3, 1, 5, 0, 1, 0]
    parts = [(0, position, count) for position, count in enumerate(counts, start=1) if position + count <= 12]
    assert_agrees(rows, MASKS["causal"], [*parts, (0, 0, 6)], config=MANY_TILES["whole"])


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "page_size", "count", "num_rows", "dtype"),
    [
        (3, 3, 64, 1, 7, 200, torch.float16),
        (9, 3, 64, 16, 16, 200, torch.float16),
        (8, 2, 96, 4, 1, 1, torch.float16),
        (8, 1, 128, 64, 16, 300, torch.float16),
        (4, 2, 256, 16, 2, 1, torch.float16),
        (4, 1, 80, 5, 17, 300, torch.float32),
        (2, 2, 8, 3, 2, 1, torch.float32),
    ],
)
def test_geometries_agree_with_the_reference(heads, groups, dim, page_size, count, num_rows, dtype):
    rows = Rows([150, 33], heads=heads, groups=groups, dim=dim, dtype=dtype)
    mask = Mask(scale=dim**-0.5)
    parts = [(0, 150 - count, count), (1, 0, count)]
    config = config_of(num_rows, groups, heads // groups, dim, count, element_size=dtype.itemsize)
    assert (config.parts == 1) == (num_rows > 1)
    assert_agrees(rows, mask, parts, page_size=page_size, config=config)


def test_queries_may_be_a_view_of_something_wider():
    rows = Rows([40])
    parts = [(0, 37, 3)]
    wide = torch.randn(3, 3, 2, 24)  # tokens, heads, query and gate
    wide[:, :, 0] = rows.q[0][37:]
    q, *rest = rows.laid_out(parts)
    rest.append(MASKS["causal"])
    assert torch.equal(attend(wide.to(DEVICE)[:, :, 0], *rest), attend(q, *rest))


@pytest.mark.parametrize(
    ("window", "splits"),
    slow_but(
        [(None, "whole"), (None, "split"), (70, "whole"), (70, "split")], (None, "whole"), (70, "whole")
    ),
)
def test_bits_do_not_depend_on_the_column_or_the_block(window, splits):
    mask = Mask(scale=0.3, window=window)
    rows = Rows([120])
    options = {"config": ONE_TILE[splits], "sinks": rows.sinks, "most": 5}
    (whole,) = rows.attend(mask, [(0, 99, 5)], **options)
    # A block from 101 on has its window's first key in the chunk from 32 on, the earlier ones have not.
    for start, count in [(100, 3), (97, 5), (103, 1)]:
        (block,) = rows.attend(mask, [(0, start, count)], **options)
        lo, hi = max(start, 99), min(start + count, 104)
        assert torch.equal(block[lo - start : hi - start], whole[lo - 99 : hi - 99])


@pytest.mark.parametrize(
    ("name", "splits"),
    slow_but([("causal", "whole"), ("window", "whole"), ("causal", "split")], ("window", "whole")),
)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(name, splits):
    rows = Rows([24], dtype=torch.float16)
    (whole,) = rows.attend(MASKS[name], [(0, 0, 24)], config=ONE_TILE[splits])
    parts = [(0, 0, 13), (0, 13, 1), (0, 14, 10)]
    assert torch.equal(torch.cat(rows.attend(MASKS[name], parts, config=ONE_TILE[splits])), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "block", "window"])
def test_bits_do_not_depend_on_who_folds_the_segments(name):
    rows = Rows([275], dtype=torch.float16)  # segments have 16 keys up to 256, then 32
    parts = [(0, 265, 5), (0, 253, 5), (0, 31, 2)]
    options = {"sinks": rows.sinks, "most": 5}
    whole, split, parted = (
        rows.attend(MASKS[name], parts, config=config, **options) for config in ONE_TILE.values()
    )
    for one, other, third in zip(split, whole, parted, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    if name != "block":  # there a query sees its whole block
        (long,) = rows.attend(MASKS[name], [(0, 250, 20)], config=ONE_TILE["whole"], sinks=rows.sinks)
        assert torch.equal(long[15:], split[0])
        assert torch.equal(long[3:8], split[1])


@triton.jit
def lengths_kernel(out, hi, SEGMENT: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, segment_length(tl.load(hi + at), SEGMENT, MAX))


def lengths_of(hi, segment, most):
    """`segment_length` of all positions hi, a multiple of 4096 of them."""
    out = torch.empty(len(hi), dtype=torch.int32, device=DEVICE)
    lengths_kernel[(len(hi) // 4096,)](out, hi.int().to(DEVICE), segment, most, 4096)
    return out.cpu().long()


def expected_length(hi, segment, most):
    multiple = -(-hi // (most * segment))
    step = 1
    while multiple > 8 * step:  # 8, 10, 12, 14, 16, 20, ...: four steps for each doubling
        step *= 2
    return -(-multiple // step) * step * segment


@pytest.mark.parametrize(("segment", "most"), [(128, 16), (64, 64), (16, 2), (1, 1)])
def test_the_length_of_segments_follows_its_rule(segment, most):
    border = [(2**i + j) * segment * most for i in range(24) for j in (0, 1, 2, 3, 2**i // 2, 2**i // 4)]
    near = [hi + d for hi in border for d in (-1, 0, 1, 2) if hi + d < 2**24]
    hi = torch.tensor([*range(1, 16 * 1024 + 1), *near, 2**24 - 1])
    hi = torch.nn.functional.pad(hi, (0, -len(hi) % 4096), value=1)
    expected = torch.tensor([expected_length(one, segment, most) for one in hi.tolist()])
    assert torch.equal(lengths_of(hi, segment, most), expected)


@pytest.mark.parametrize(("segment", "most"), [(128, 16), (64, 64)])
def test_segments_are_enough_and_the_queries_of_a_tile_have_two_lengths_at_most(segment, most):
    hi = torch.arange(1, 2**18 + 1)
    length = lengths_of(hi, segment, most)
    num_segments = -(-hi // length)
    assert num_segments.max() == most
    assert (5 * num_segments > 4 * most)[hi > 4 * most * segment].all()
    change = length.diff()
    assert (change >= 0).all()
    assert change.nonzero().flatten().diff().min() >= 128  # no tile has more queries


@pytest.mark.parametrize(("border", "window"), slow_but([(64, None), (256, None), (320, 200)], (64, None)))
def test_bits_do_not_depend_on_the_width_where_segments_become_longer(border, window, monkeypatch):
    monkeypatch.setattr(kernel, "MAX_SEGMENTS", 2)  # lengths change behind 32 times 1 to 8, 10, 12, ...
    mask = Mask(scale=0.3, window=window)
    rows = Rows([border + 8], heads=1, dtype=torch.float16)
    first = border - 8
    whole = Config(tokens=16, block_m=16, block_n=16, warps=4, stages=2, parts=1, segment=16)
    split = replace(whole, parts=2)
    wide = [(0, first, 16)]
    assert_agrees(rows, mask, wide, config=whole)
    (folded,) = rows.attend(mask, wide, config=whole)
    assert torch.equal(rows.attend(mask, wide, config=split)[0], folded)
    columns = [7, 8]  # the last query with short segments, and the first with long ones
    alone = rows.attend(mask, [(0, first + column, 1) for column in columns], config=split)
    assert torch.equal(torch.cat(alone), folded[columns])


@pytest.mark.parametrize(
    ("name", "splits"),
    slow_but(
        [
            (name, how)
            for name in ("causal", "block", "block window", "anchored")
            for how in ("whole", "split")
        ],
        ("causal", "split"),
        ("anchored", "whole"),
    ),
)
def test_bits_depend_neither_on_neighbours_nor_on_what_scratch_holds(name, splits):
    rows = Rows([60, 90, 7], dtype=torch.float16)
    options = {"config": ONE_TILE[splits], "most": 5}
    (alone,) = rows.attend(MASKS[name], [(0, 55, 3)], scratch=0.0, **options)
    crowd = [(1, 88, 2), (2, 3, 2), (0, 55, 3), (1, 9, 0)]
    out = rows.attend(MASKS[name], crowd, scratch=math.nan, seed=2, page_size=7, **options)
    assert torch.equal(out[2], alone)
    assert torch.isfinite(torch.cat(out)).all()


def test_pages_before_the_window_are_not_read():
    rows = Rows([60])
    for mask, first in [(MASKS["window"], 55 - 20), (MASKS["anchored"], 55 - 21)]:
        (before,) = rows.attend(mask, [(0, 55, 5)], config=ONE_TILE["whole"])
        rows.k[0][:, :first] = rows.v[0][:, :first] = math.nan
        (after,) = rows.attend(mask, [(0, 55, 5)], config=ONE_TILE["whole"])
        assert torch.equal(after, before)
        rows = Rows([60])


@pytest.mark.parametrize("mask", [MASKS["window 1"], MASKS["window"]], ids=["window 1", "window"])
def test_a_query_may_see_nothing_of_its_tile_s_first_chunk(mask):
    rows = Rows([40])
    assert_agrees(rows, mask, [(0, 34, 5), (0, 14, 5)], config=ONE_TILE["whole"])


@slow_interpreted
def test_tokens_past_the_last_offset_are_left_alone(monkeypatch):
    rows = Rows([40])
    (whole,) = rows.attend(MASKS["causal"], [(0, 35, 5)], config=ONE_TILE["split"])
    q, *rest = rows.laid_out([(0, 35, 5)])
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: torch.full(shape, 7.0, **kind))
    out = attend(torch.cat([q, q]), *rest, MASKS["causal"], None, ONE_TILE["split"])
    assert torch.equal(out[:5].cpu(), whole)
    assert (out[5:] == 7.0).all()


def test_no_tokens_at_all_give_no_outputs():
    rows = Rows([4])
    (out,) = rows.attend(MASKS["causal"], [(0, 4, 0)], most=1)
    assert out.shape == (0, 3, 24)


def test_other_dtypes_are_refused():
    rows = Rows([4], dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        rows.attend(MASKS["causal"], [(0, 2, 2)])


SHAPES = {  # rows, groups, shared, head_dim, max_count
    "qwen": (1, 8, 4, 128, 16),
    "qwen 32": (32, 8, 4, 128, 16),
    "qwen plain": (1, 8, 4, 128, 1),
    "smol": (1024, 3, 3, 64, 1),
    "gpt-oss": (1, 8, 8, 64, 16),
    "gemma local": (1, 8, 2, 256, 16),
    "qwen next": (1, 2, 8, 256, 16),
    "phi": (1, 8, 4, 96, 16),
}


def config_of(rows, groups, shared, head_dim, max_count, *, window=None, element_size=2, card=H200):
    return choose(
        num_rows=rows,
        num_groups=groups,
        shared=shared,
        head_dim=head_dim,
        element_size=element_size,
        max_count=max_count,
        window=window,
        **card,
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_block_is_one_tile(shape):
    config = config_of(*shape)
    assert config.tokens >= shape[4] or shape[3] == 256
    assert config.tokens * shape[2] <= config.block_m


@pytest.mark.parametrize("kilobytes", [100, 164, 228])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256, 512])
def test_buffers_fit_the_multiprocessor(head_dim, kilobytes):
    card = {"multiprocessors": 132, "shared_memory": kilobytes * 1024}
    for shared in (1, 2, 3, 4, 7, 8, 16):
        for element_size, max_count in [(2, 1), (2, 16), (2, 2048), (4, 16)]:
            if element_size * head_dim == 2048 and kilobytes == 100:
                continue  # refused
            config = config_of(1, 2, shared, head_dim, max_count, element_size=element_size, card=card)
            assert 1 <= config.tokens * shared <= config.block_m
            row_bytes = max(16, 1 << (head_dim - 1).bit_length()) * element_size
            buffers = config.stages * 2 * config.block_n * row_bytes + config.block_m * row_bytes
            assert buffers <= (kilobytes - 2) * 1024


def test_a_device_too_small_is_refused():
    with pytest.raises(ValueError, match="100 KB of shared memory"):
        config_of(1, 1, 64, 512, 1, card={"multiprocessors": 132, "shared_memory": 100 * 1024})


def test_several_programs_share_a_tile_where_tiles_are_few():
    assert config_of(1, 8, 4, 128, 16).parts == kernel.MAX_SEGMENTS
    assert config_of(1, 1, 4, 128, 1).parts == kernel.MAX_SEGMENTS
    assert config_of(8, 8, 4, 128, 16).parts == 4  # two programs for each of 132 multiprocessors
    assert config_of(32, 8, 4, 128, 16).parts == 1
    assert config_of(1024, 3, 3, 64, 1).parts == 1
    assert config_of(1, 8, 4, 128, 2048).parts == 1


def test_heads_of_256_have_low_tiles_until_these_fill_the_device():
    configs = [config_of(rows, 2, 8, 256, count) for rows, count in ((1, 16), (8, 16), (32, 16), (1, 2048))]
    assert [(config.block_m, config.parts) for config in configs] == [(16, 16), (16, 1), (64, 1), (128, 1)]
    assert {config.block_n for config in configs} == {64}
    assert config_of(32, 2, 8, 256, 1).parts == 4, "short programs rather than few"


def test_a_short_window_has_one_program_to_a_tile():
    assert config_of(1, 8, 8, 64, 1, window=128).parts == 1
    assert config_of(1, 8, 8, 64, 1, window=1024).parts == kernel.MAX_SEGMENTS


@pytest.mark.parametrize("kilobytes", [100, 164, 228])
@pytest.mark.parametrize(("shared", "head_dim"), [(4, 128), (8, 256), (3, 64), (1, 512), (8, 64)])
def test_chunks_and_segments_are_the_same_for_any_number_of_rows_and_tokens(shared, head_dim, kilobytes):
    card = {"multiprocessors": 132, "shared_memory": kilobytes * 1024}
    shapes = [(1, 1), (1, 4), (1, 16), (4, 16), (32, 1), (32, 16), (1, 65), (1, 2048), (8, 300), (999, 1)]
    configs = [config_of(rows, 2, shared, head_dim, count, card=card) for rows, count in shapes]
    assert len({(config.block_n, config.segment) for config in configs}) == 1
    assert configs[0].segment % configs[0].block_n == 0
    assert {config.parts for config in configs} >= {1, 16}


def test_more_than_128_heads_on_one_key_head_are_refused():
    with pytest.raises(ValueError, match="129 query heads"):
        config_of(1, 1, 129, 64, 1)


REAL = {  # heads, groups, dim, lengths, count, mask
    "qwen": (32, 8, 128, [5000, 1024, 16, 777], 16, Mask(scale=128**-0.5)),
    "qwen plain": (32, 8, 128, [5000, 1024, 1, 777], 1, Mask(scale=128**-0.5)),
    "qwen prefill": (32, 8, 128, [1500, 700], 650, Mask(scale=128**-0.5)),
    "drafter": (32, 8, 128, [3000, 20], 16, Mask(scale=128**-0.5, is_causal=False, window=2048)),
    "smol": (9, 3, 64, [512, 100, 3, 511], 1, Mask(scale=64**-0.5)),
    "gpt-oss": (64, 8, 64, [3000, 130], 16, Mask(scale=64**-0.5, window=128)),
    "gemma local": (8, 4, 256, [3000, 700], 16, Mask(scale=256**-0.5, window=512)),
    "gemma global": (16, 2, 512, [900, 100], 16, Mask(scale=512**-0.5)),
    "heads of 256": (8, 4, 256, [900, 100], 16, Mask(scale=256**-0.5)),
    "phi": (32, 8, 96, [900, 100], 16, Mask(scale=96**-0.5)),
    "mha": (8, 8, 80, [900, 300], 130, Mask(scale=80**-0.5)),
}


@on_card
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_agree_with_the_reference(name, dtype):
    heads, groups, dim, lengths, count, mask = REAL[name]
    rows = Rows(lengths, heads=heads, groups=groups, dim=dim, dtype=dtype)
    parts = [(row, max(length - count, 0), min(count, length)) for row, length in enumerate(lengths)]
    options = {"page_size": 16, "sinks": rows.sinks}
    assert_agrees(rows, mask, parts, **options)
    assert_agrees(rows, mask, parts[:1], **options)


@on_card
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["qwen", "smol", "gpt-oss", "gemma global", "heads of 256"])
def test_real_bits_depend_on_the_prefix_only(name, dtype):
    """Against one row and one token at a time: blocks, crowds, chunks of a prompt, and the whole prompt."""
    heads, groups, dim, (length, *_), _, mask = REAL[name]
    rows = Rows([length, 2 * length], heads=heads, groups=groups, dim=dim, dtype=dtype)
    options = {"page_size": 16, "sinks": rows.sinks}
    first = length - 20
    alone = torch.cat([rows.attend(mask, [(0, first + i, 1)], **options)[0] for i in range(20)])
    for num_rows, start, count in [
        (1, first + 2, 16), (3, first, 16), (64, first + 3, 1), (64, first + 4, 16), (3, first - 5, 16),
        (1, first - 70, 90), (2, first - 200, 210), (1, 0, length),
    ]:  # fmt: skip
        crowd = [(1, 2 * length - count, count)] * (num_rows - 1)
        *_, block = rows.attend(mask, [*crowd, (0, start, count)], seed=start, **options)
        lo, hi = max(start, first), min(start + count, first + 20)
        assert torch.equal(block[lo - start : hi - start], alone[lo - first : hi - first])


@on_card
@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [1, 40])
def test_a_captured_graph_reads_what_it_is_replayed_with(num_parts):
    rows = Rows([300, 50], heads=32, groups=8, dim=128, dtype=torch.bfloat16)
    mask = Mask(scale=128**-0.5)

    def parts_of(length, count):
        return [(0, length - count, count), *[(1, 50 - count, count)] * (num_parts - 1)]

    def inputs(length, count, seed):
        parts = parts_of(length, count)
        whole = [(row, 0, 300 if row == 0 else 50) for row, _, _ in parts]
        _, keys, values, blocks = rows.laid_out(whole, page_size=16, seed=seed)
        starts, offsets = [start for _, start, _ in parts], [index * count for index in range(num_parts + 1)]
        q = torch.zeros(16 * num_parts, 32, 128, dtype=torch.bfloat16)
        q[: count * num_parts] = torch.cat([rows.q[row][start : start + count] for row, start, _ in parts])
        moved = (t.to(DEVICE) for t in (q, torch.tensor(starts), torch.tensor(offsets)))
        return [*moved, keys, values, blocks.table, blocks.rows]

    def call(q, starts, offsets, keys, values, table, home):
        blocks = Blocks(
            pages=table, rows=home, starts=starts, counts=(16,) * num_parts, page_size=16, offsets=offsets
        )
        return attend(q, keys, values, blocks, mask)

    static = inputs(300, 16, seed=0)
    call(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*static)
    for length, count in [(300, 16), (200, 16), (77, 5)]:
        new = inputs(length, count, seed=length)
        for target, source in zip(static, new, strict=True):
            target.copy_(source)
        graph.replay()
        used = count * num_parts
        assert torch.equal(out[:used], call(*new)[:used])
        expected = torch.cat([rows.naive(mask, *part) for part in parts_of(length, count)])
        torch.testing.assert_close(out[:used].double().cpu(), expected, atol=2e-2, rtol=2e-2)
