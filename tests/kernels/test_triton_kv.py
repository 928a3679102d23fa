"""Triton's kernels for compressed keys and values against the references, and their promise on bits."""

import copy
from dataclasses import replace

import pytest
import torch

from blockdraft.kernels import kv_codec
from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.heads import HeadNorms, Rotation, Slots, apply_rotation
from blockdraft.kernels.kernels import REFERENCE
from blockdraft.kernels.kv_codec import FORMATS
from blockdraft.kernels.kv_positions import PositionRule
from blockdraft.kernels.triton import kv_attention as kernel
from blockdraft.kernels.triton.kv_attention import Config, attend_compressed
from blockdraft.kernels.triton.kv_compress import compress
from blockdraft.kernels.triton.pointwise import norm_rope_write
from tests.kernels import compressed_case
from tests.kernels.implementations import DEVICE, HALF, normal, quiet

pytestmark = [pytest.mark.slow, quiet]  # it interprets for a minute; a start on a card checks the same


# ---- heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96])
def test_heads_are_turned_last_of_all(dim, dtype):
    num_tokens, heads, groups = 3, 6, 2
    q, k, v = (normal(num_tokens, n, dim, dtype=dtype, seed=n) for n in (heads, groups, groups + 1))
    v = v[:, :groups]
    norms = HeadNorms(normal(dim, seed=7), normal(dim, seed=8), 1e-5)
    angle = normal(num_tokens, 1, dim // 2, seed=9)
    angles = (angle.cos(), angle.sin())
    rotation = Rotation(kv_codec.signs(dim, DEVICE), normal(groups, dim, seed=10))
    place = torch.tensor([4, 0, 2], device=DEVICE)

    def write(kind, rotation):
        parts = [x.to(kind) for x in (q, k, v)]
        store = [torch.zeros(groups, 6, dim, dtype=kind, device=DEVICE) for _ in range(2)]
        out = norm_rope_write(*parts, norms, angles, Slots(*store, place, rotation))
        return out, *(x[:, place].transpose(0, 1) for x in store)

    plain = write(torch.float32, None)
    expected = [apply_rotation(x, rotation, rotation.centre if n == 1 else None) for n, x in enumerate(plain)]
    for got, wanted in zip(write(dtype, rotation), expected, strict=True):
        torch.testing.assert_close(
            got, wanted.to(dtype), atol=1e-5, rtol=0.008 if dtype.itemsize == 2 else 1e-5
        )


# ---- attention


WHOLE = Config(tokens=8, block_m=16, warps=4, stages=2, parts=1)
SPLIT = replace(WHOLE, parts=32)
TWO = replace(WHOLE, parts=2)


def small(**options):
    """A case of one key/value head, compressed by the reference."""
    options = {"heads": 2, "groups": 1, "counts": (8,), "rule": PositionRule(window=16), **options}
    case = compressed_case.make(**options)
    REFERENCE.compress(case.pages, case.tiles)
    return case


def attend(case, config=WHOLE, sinks=None):
    there = compressed_case.on(case, DEVICE)
    sinks = None if sinks is None else sinks.to(DEVICE)
    return attend_compressed(there.q, there.pages, there.blocks, there.mask, sinks, config).cpu()


def reference(case, sinks=None):
    """The reference in float32."""
    pages = case.pages._replace(
        exact_keys=case.pages.exact_keys.float(), exact_values=case.pages.exact_values.float()
    )
    return REFERENCE.attend_compressed(case.q.float(), pages, case.blocks, case.mask, sinks)


def assert_agrees(case, config=WHOLE, sinks=None):
    tolerance = 2e-5 if case.q.dtype == torch.float32 else 2e-2
    out = attend(case, config, sinks).float()
    torch.testing.assert_close(out, reference(case, sinks), atol=tolerance, rtol=tolerance)


def part_of(case, first, last):
    """The queries [first, last) of a case of one row alone, in the same pages."""
    old = case.blocks
    blocks = Blocks(
        pages=old.table,
        exact_pages=old.exact_table,
        starts=old.starts + first,
        counts=(last - first,),
        page_size=old.page_size,
    )
    return replace(case, blocks=blocks, q=case.q[first:last])


@pytest.mark.parametrize(
    ("form", "dim", "page_size"),
    [("int8", 64, 16), ("int8", 128, 64), ("tq4", 96, 24), ("tq4v3", 128, 16), ("tq4v3", 80, 128)],
)
def test_formats_and_heads_agree_with_the_reference(form, dim, page_size):
    assert_agrees(small(form=form, dim=dim, page_size=page_size, lengths=(210,)))


def test_half_precision_agrees_with_the_reference():
    assert_agrees(small(form="tq4", dim=64, lengths=(210,), dtype=HALF), SPLIT)


@pytest.mark.parametrize(
    "length", [147, *(pytest.param(length, marks=pytest.mark.slow) for length in (60, 81, 144, 152, 211))]
)
def test_the_border_may_lie_at_every_offset(length):
    assert_agrees(small(lengths=(length,)), TWO)


def test_rows_of_different_lengths_do_not_meet():
    case = small(lengths=(40, 220), counts=(3, 8))
    assert_agrees(case, SPLIT)
    assert_agrees(case, replace(WHOLE, tokens=4))


@pytest.mark.parametrize(
    "mask",
    [
        Mask(scale=0.2, window=21),
        Mask(scale=0.2, window=150),
        Mask(scale=0.2, is_causal=False),
        Mask(scale=0.2, window=100, is_anchored=True, is_causal=False),
    ],
    ids=["window", "wide", "block", "anchored"],
)
def test_masks_and_sinks_agree_with_the_reference(mask):
    case = small(lengths=(212,), mask=mask)
    sinks = torch.tensor([0.5, -1.0])
    assert_agrees(case, TWO, sinks)
    assert_agrees(case, WHOLE, sinks)


SERVED = [
    (form, dim, name, sinks)
    for dim in (64, 128, 256, 512)
    for form in FORMATS
    for name, sinks in (("causal", False), ("window", False), ("wide", True))
    if dim < 512 or form != "tq4v3"
]
SERVED_MASKS = {"causal": {}, "window": {"window": 40}, "wide": {"window": 150}}


@pytest.mark.parametrize(("form", "dim", "name", "has_sinks"), SERVED, ids=str)
def test_heads_and_masks_of_the_families_have_equal_bits_at_every_width(form, dim, name, has_sinks):
    """Of Qwen3.5 (256), Gemma 4 (256 and 512, windows), gpt-oss (64, windows, sinks), drafters."""
    mask = Mask(scale=dim**-0.5, **SERVED_MASKS[name])
    case = small(form=form, dim=dim, lengths=(211,), counts=(4,), dtype=HALF, mask=mask)
    sinks = torch.tensor([0.5, -1.0]) if has_sinks else None
    chosen = {
        width: kernel.choose(
            num_rows=1, num_groups=1, shared=2, head_dim=dim, element_size=2, max_count=width,
            multiprocessors=132,
        )
        for width in (1, 4, 100)
    }  # fmt: skip
    assert chosen[1].parts > 1 == chosen[100].parts
    whole = attend(case, chosen[100], sinks)
    torch.testing.assert_close(whole.float(), reference(case, sinks), atol=2e-2, rtol=2e-2)
    assert torch.equal(attend(case, chosen[4], sinks), whole)
    for column in (0, 3):
        alone = attend(part_of(case, column, column + 1), chosen[1], sinks)
        assert torch.equal(alone, whole[column : column + 1])


@pytest.mark.parametrize("length", [147, pytest.param(275, marks=pytest.mark.slow)])
def test_bits_depend_neither_on_the_block_nor_on_who_folds(length):
    case = small(lengths=(length,), form="tq4v3")
    whole = attend(case)
    assert torch.equal(attend(case, SPLIT), whole)
    assert torch.equal(attend(case, replace(WHOLE, tokens=3, parts=2)), whole)
    for column in (0, 5):
        alone = attend(part_of(case, column, column + 1), replace(SPLIT, tokens=1))
        assert torch.equal(alone, whole[column : column + 1])


@pytest.mark.parametrize("border", [256, 512])
def test_bits_do_not_depend_on_the_width_where_segments_become_longer(border, monkeypatch):
    monkeypatch.setattr(kernel, "MAX_SEGMENTS", 2)  # lengths change behind 128 times 1 to 8, 10, 12, ...
    case = small(heads=1, lengths=(border + 8,), counts=(16,), dtype=torch.float16)
    whole = replace(WHOLE, tokens=16)
    folded = attend(case, whole)
    torch.testing.assert_close(folded.float(), reference(case), atol=2e-2, rtol=2e-2)
    assert torch.equal(attend(case, replace(whole, parts=2)), folded)
    for column in (7, 8):  # the last query with short segments, and the first with long ones
        alone = attend(part_of(case, column, column + 1), replace(whole, tokens=1, parts=2))
        assert torch.equal(alone, folded[column : column + 1])


def test_bits_do_not_depend_on_how_a_prompt_is_cut():
    case = small(lengths=(100,), counts=(100,))
    wide = replace(WHOLE, tokens=64, block_m=128)
    whole = attend(case, wide)
    cut = [attend(part_of(case, *ends), wide) for ends in ((0, 30), (30, 97), (97, 100))]
    assert torch.equal(torch.cat(cut), whole)


def test_what_no_query_reads_is_not_loaded():
    case = small(lengths=(240,), rule=PositionRule(window=80))
    before = attend(case, TWO)
    start, end = 64, int(case.pages.rule.compressed_end_at(torch.tensor(232)))
    position = torch.arange(240)
    is_compressed = (position >= start) & (position < end)
    assert is_compressed.any()
    page_size, pages = case.blocks.page_size, copy.deepcopy(case.pages)
    exact = case.blocks.exact_table[0, position // page_size] * page_size + position % page_size
    cold = case.blocks.table[0, position // page_size] * page_size + position % page_size
    for store in (pages.exact_keys, pages.exact_values):
        store[:, :, exact[is_compressed]] = float("nan")
    for store in (pages.keys.scale, pages.values.scale):
        store[:, :, cold[~is_compressed]] = float("nan")
    assert torch.equal(attend(replace(case, pages=pages), TWO), before)


@pytest.mark.parametrize("count", [1, 16, 2048])
@pytest.mark.parametrize("shared", [1, 4, 7, 16, 33, 100])
def test_tiles_of_64_rows_are_for_many_heads_and_have_8_warps(shared, count):
    config = kernel.choose(
        num_rows=4,
        num_groups=2,
        shared=shared,
        head_dim=128,
        element_size=2,
        max_count=count,
        multiprocessors=132,
    )
    assert (config.block_m >= 64) == (shared > 32)
    assert config.warps == (8 if config.block_m >= 64 else 4)
    assert 1 <= config.tokens <= config.block_m // shared


def test_it_cuts_its_work_itself():
    case = compressed_case.on(small(lengths=(150,), counts=(2,)), DEVICE)
    out = attend_compressed(case.q, case.pages, case.blocks, case.mask)
    torch.testing.assert_close(out.cpu(), reference(small(lengths=(150,), counts=(2,))), atol=2e-5, rtol=2e-5)


# ---- compression


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (96, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_vectors_become_the_reference_s_bytes(form, dim, dtype):
    case = compressed_case.make(form=form, lengths=(300, 150), counts=(16, 16), dim=dim, dtype=dtype)
    for value, slot in ((0.0, 40), (float("inf"), 41), (float("nan"), 42), (1e-30, 43)):
        case.pages.exact_keys[0, 0, slot, 3:] = value
    wanted = copy.deepcopy(case)
    REFERENCE.compress(wanted.pages, wanted.tiles)
    there = compressed_case.on(case, DEVICE)
    tiles = case.tiles
    moved = {
        name: getattr(tiles, name).to(DEVICE) for name in ("table", "exact_table", "rows", "starts", "counts")
    }
    compress(there.pages, replace(tiles, **moved))
    for got, expected in ((there.pages.keys, wanted.pages.keys), (there.pages.values, wanted.pages.values)):
        is_same = got.codes.cpu() == expected.codes
        assert is_same.float().mean() > 0.9999  # sums in another order, next to a border of two levels
        torch.testing.assert_close(
            got.scale.cpu().float(), expected.scale.float(), rtol=2e-3, atol=1e-7, equal_nan=True
        )
