"""Attention over exact and 4-bit keys and values in Gluon: codes become operands without leaving registers.

It serves what `serves` says, in place of `kv_attention`, whose contract it shares. Scores are computed
transposed, keys by queries: few queries make small tiles then, and no value has to change lanes between the
bytes that a lane loads and the operand that it gives to a tensor core. So the coordinates of a head are taken
in an order of their own (`_key_steps`, `_dim_rows`).

Compressed chunks are computed in whole numbers: levels are such, a query is rounded to 11 bits, and so are
the weights of a chunk's values. Sums of their products are exact, so that it is no part of the bits which
instructions compute them: few queries are multiplied in int8, whose codes decode in half the time, and many
in float16, whose tensor cores are faster.

The keys that a query sees are cut by position alone: chunks of TILE, at most MAX_SEGMENTS segments of equal
length (`segment_length`), and runs of RUN segments. An online softmax runs through the chunks of a segment,
segments are folded into their run in order, and runs into the result. Who does the folding has no part in the
bits: LEVEL 0 leaves each segment for the merge, 1 each run, 2 (a prefill) folds everything itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.kv_codec import WHOLE_LEVELS, KvFormat
from blockdraft.kernels.kv_cold import ColdPages
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.triton.attention import (
    LOG2_E,
    MAX_SPLIT_COUNT,
    ROW_BLOCK,
    divided,
    row_of,
    segment_length,
    visible_keys,
)
from blockdraft.kernels.triton.kv_codes import (
    FOUR_WORDS_AS_STEPS,
    STEP_TABLES,
    STEPS_AS_LEVELS,
    STEPS_AS_LEVELS_IN_ORDER,
    WORD_AS_STEPS,
    kind_of,
)
from blockdraft.kernels.triton.launch import has_pdl, let_next_start, overlap, wait_for_previous
from blockdraft.kernels.triton.turning import signs, turn_blocks

# All three are part of the result's bits.
SEGMENT = 64  # keys of the shortest segments
MAX_SEGMENTS = 128  # enough for one row to fill the device
RUN = 4  # segments

HEAD_DIMS = (64, 128)
ENOUGH_WARPS = 1024  # that large cards are busy with
_N = gl.constexpr(TILE)
_RUN = gl.constexpr(RUN)
_SEGMENT = gl.constexpr(SEGMENT)
_MAX_SEGMENTS = gl.constexpr(MAX_SEGMENTS)
_ROUNDING = gl.constexpr(1.5 * 2**23)  # what is added to it has no places behind the point left
# A level is two steps less the largest one, of 1/32. Sums of products of such whole numbers, over all that a
# chunk or a head has, are below 2 ** 24.
_LOWEST = gl.constexpr(WHOLE_LEVELS[-1])
_LARGEST_QUERY = gl.constexpr(1023.0)
_LARGEST_WEIGHT = gl.constexpr(2047.0)
_QUERY_UNIT = gl.constexpr(1 / (1023 * 32))
_WEIGHT_UNIT = gl.constexpr(1 / (2047 * 32))
_TURN = gl.constexpr(39)  # odd, about 0.618 of a chunk: its multiples lie evenly wherever one begins and ends
MERGED_RUNS = 2  # whose sums are loaded together


@dataclass(frozen=True, slots=True)
class Config:
    """How the work is cut: a function of host-known shapes only, and no part of the result's bits."""

    tokens: int  # queries of one row in a tile
    queries: int  # those times the query heads of a key/value head, padded
    warps: int  # each has all keys of some columns; several decode codes for each other
    level: int  # what a program leaves for the merge: segments, runs or the whole
    parts: int  # programs that share the segments of a tile


# ---- layouts: who has what of a tensor. A quad is four lanes, g its number, t a lane's number in it.


@gluon.constexpr_function
def _basis(rank, axis, bit):
    return [(1 << bit) if at == axis else 0 for at in range(rank)]


@gluon.constexpr_function
def _bits(count):
    return count.bit_length() - 1


@gluon.constexpr_function
def _layout(shape, registers, lanes, warps, splits):
    """Registers: (axis, first bit, number of bits), the fastest first; lanes: five (axis, bit), None: alike.

    The first axis has groups of 16 keys. `splits`: each warp has its share of them, else all of them.
    """
    rank = len(shape)
    log_warps = _bits(warps)
    split = min(log_warps, 2) if splits else 0
    return gl.DistributedLinearLayout(
        reg_bases=[_basis(rank, axis, bit + i) for axis, bit, count in registers for i in range(count)]
        + [_basis(rank, 0, bit) for bit in range(split, 2)],
        lane_bases=[[0] * rank if one is None else _basis(rank, one[0], one[1]) for one in lanes],
        warp_bases=[_basis(rank, 0, bit) if bit < split else [0] * rank for bit in range(log_warps)],
        block_bases=[],
        shape=shape,
    )


@gluon.constexpr_function
def _key_layout(size, halves, warps, splits):
    """[4, 16, size] parts of keys: the lanes of quad g have keys g and g + 8, a quarter of each half."""
    each = _bits(size) - _bits(halves) - 2
    lanes = [(2, each), (2, each + 1), (1, 0), (1, 1), (1, 2)]
    registers = [(2, 0, each), (2, each + 2, _bits(halves)), (1, 3, 1)]
    return _layout([4, 16, size], registers, lanes, warps, splits)


@gluon.constexpr_function
def _value_layout(size, halves, warps, splits):
    """[4, 8, size] parts of every other value: lanes t have t and t + 4, quad g an eighth of each half."""
    each = _bits(size) - _bits(halves) - 3
    lanes = [(1, 0), (1, 1), (2, each), (2, each + 1), (2, each + 2)]
    registers = [(2, 0, each), (2, each + 3, _bits(halves)), (1, 2, 1)]
    return _layout([4, 8, size], registers, lanes, warps, splits)


@gluon.constexpr_function
def _query_layout(columns, dim, warps):
    """[columns, dim]: quad g has column g of a warp's eight, a lane a quarter of each half."""
    each = _bits(dim) - 3
    more = _bits(columns) - 3
    return gl.DistributedLinearLayout(
        reg_bases=[_basis(2, 1, bit) for bit in (*range(each), each + 2)]
        + [_basis(2, 0, 3 + bit) for bit in range(_bits(warps), more)],
        lane_bases=[_basis(2, axis, bit) for axis, bit in ((1, each), (1, each + 1), (0, 0), (0, 1), (0, 2))],
        warp_bases=[_basis(2, 0, 3 + bit) for bit in range(_bits(warps))],
        block_bases=[],
        shape=[columns, dim],
    )


@gluon.constexpr_function
def _scale_layout(warps):
    """[4, 16] as the rows of a tile of scores."""
    lanes = [None, None, (1, 0), (1, 1), (1, 2)]
    return _layout([4, 16], [(1, 3, 1)], lanes, warps, False)


@triton.jit
def _dim_rows(dim, DIM: tl.constexpr):
    """Which row of the sums a coordinate is: of a half, quad g's number j is 8 j + g."""
    d = dim % (DIM // 2)
    return dim - d + d % (DIM // 16) * 8 + d // (DIM // 16)


# ---- loads


@gluon.jit
def _slots(table, chunk, end, PAGE_SIZE: gl.constexpr, layout: gl.constexpr):
    """First slots [4] of a chunk's groups of 16 keys; 0, which is never written, for those from `end` on."""
    key = chunk * _N + 16 * gl.arange(0, 4, layout)
    page = gl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    return page * PAGE_SIZE + key % PAGE_SIZE


@gluon.jit
def _places(slot, first, STEP: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """Offsets [4, .., SIZE] of what slots hold, of every STEP-th of a group's 16 from `first` on."""
    key = gl.arange(0, 16 // STEP, gl.SliceLayout(0, gl.SliceLayout(2, layout))) * STEP + first
    part = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    slot = gl.expand_dims(gl.expand_dims(slot, 1), 2)
    inside = gl.expand_dims(gl.expand_dims(key, 0), 2) * SIZE + gl.expand_dims(gl.expand_dims(part, 0), 1)
    return slot * SIZE + inside


@gluon.jit
def _load_scales(scales, slot, layout: gl.constexpr):
    key = gl.arange(0, 16, gl.SliceLayout(0, layout))
    return gl.load(scales + gl.expand_dims(slot, 1) + gl.expand_dims(key, 0))


@gluon.jit
def _chunk_slots(table, chunk, end, PAGE_SIZE: gl.constexpr, WORDS: gl.constexpr, WARPS: gl.constexpr,
                 SPLITS: gl.constexpr):  # fmt: skip
    """First slots of a compressed chunk's groups: as codes are loaded, and as scales are."""
    K: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _key_layout(WORDS, 1, WARPS, SPLITS)))
    SCALES: gl.constexpr = gl.SliceLayout(1, _scale_layout(WARPS))
    slot = _slots(table, chunk, end, PAGE_SIZE, K)
    if SPLITS:
        scale_slot = _slots(table, chunk, end, PAGE_SIZE, SCALES)
    else:
        scale_slot = gl.convert_layout(slot, SCALES, assert_trivial=True)
    return slot, scale_slot


@gluon.jit
def _load_keys(stores, slots, WORDS: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr):
    """Words of codes, and scales, of a compressed chunk's keys."""
    slot, scale_slot = slots
    k = gl.load(stores[0] + _places(slot, 0, 1, WORDS, _key_layout(WORDS, 1, WARPS, SPLITS)))
    return k, _load_scales(stores[1], scale_slot, _scale_layout(WARPS))


@gluon.jit
def _load_values(stores, slots, WORDS: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr):
    """The same of its values: the even ones, the odd ones, scales."""
    V: gl.constexpr = _value_layout(WORDS, 1, WARPS, SPLITS)
    slot, scale_slot = slots
    v_slot = gl.convert_layout(slot, gl.SliceLayout(1, gl.SliceLayout(2, V)), assert_trivial=True)
    even = gl.load(stores[2] + _places(v_slot, 0, 2, WORDS, V))
    odd = gl.load(stores[2] + _places(v_slot, 1, 2, WORDS, V))
    return even, odd, _load_scales(stores[3], scale_slot, _scale_layout(WARPS))


# ---- operands


@gluon.jit
def _operand(x, SPLITS: gl.constexpr, layout: gl.constexpr):
    """What `_loaded` makes an operand of. Where the warps have shared the work, they exchange it."""
    if SPLITS:
        VECTOR: gl.constexpr = 16 if x.dtype == gl.int8 else 8
        PHASES: gl.constexpr = 8 if x.shape[1] >= 8 * VECTOR else 4
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 8 // PHASES, PHASES, [1, 0])
        x = gl.allocate_shared_memory(x.dtype, x.shape, swizzled, x)
    else:
        x = gl.convert_layout(x, layout, assert_trivial=True)  # nothing moves
    return x


@gluon.jit
def _loaded(x, SPLITS: gl.constexpr, layout: gl.constexpr):
    if SPLITS:
        x = x.load(layout)
    return x


@gluon.jit
def _pairs(x, dtype: gl.constexpr):
    """Words [..] as two numbers each [.., 2]."""
    even = x.to(gl.int16).to(dtype, bitcast=True)
    odd = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(even, odd)


@gluon.jit
def _bytes(x):
    """Words [..] as four whole numbers each [.., 2, 2]."""
    even = gl.join(x.to(gl.int8), (x >> 16).to(gl.int8))
    odd = gl.join((x >> 8).to(gl.int8), (x >> 24).to(gl.int8))
    return gl.join(even, odd)


@gluon.jit
def _levels(steps, code: gl.constexpr):
    """Words of four steps [..] as levels [.., 2, 2]: first which word of pairs."""
    one, two = gl.inline_asm_elementwise(
        code, "=r,=r,r", [steps], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return _pairs(gl.join(one, two), gl.float16)


@gluon.jit
def _key_steps(word, tables, DIM: gl.constexpr, SPLITS: gl.constexpr):
    """Words of codes, DIM / 8 of each key, as [64, DIM] steps; or levels, where warps share the work."""
    low, high = gl.inline_asm_elementwise(
        WORD_AS_STEPS, "=r,=r,r,r,r", [word, tables[0], tables[1]],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    words = gl.join(low, high)
    if SPLITS:
        x = gl.reshape(_levels(words, STEPS_AS_LEVELS), [_N, 4, DIM // 32, 2, 2, 2])
        x = gl.permute(x, [0, 4, 2, 3, 1, 5])  # from key, t, i, h, half, e
    else:
        x = gl.reshape(_bytes(words), [_N, 4, DIM // 32, 2, 4])
        x = gl.permute(x, [0, 2, 3, 1, 4])  # from key, t, word, half of it, e
    return gl.reshape(x, [_N, DIM])


@gluon.jit
def _query_steps(x, DIM: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Whole numbers [COLUMNS, DIM] as an operand for `_key_steps`: a word has its halves' codes in turn."""
    x = gl.reshape(x, [COLUMNS, 2, 4, DIM // 32, 2, 2])  # column, head's half, t, word, its half, e / 2
    x = gl.reshape(gl.permute(x, [3, 4, 2, 5, 1, 0]), [DIM, COLUMNS])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _exact_keys(x, DIM: gl.constexpr):
    """Keys [4, 16, DIM] as [64, DIM], lanes in turn."""
    x = gl.reshape(x, [_N, 2, 4, DIM // 32, 2, 2])  # key, half, t, i, h, e
    return gl.reshape(gl.permute(x, [0, 1, 3, 4, 2, 5]), [_N, DIM])


@gluon.jit
def _exact_queries(x, DIM: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Numbers [COLUMNS, DIM] as an operand for `_exact_keys`."""
    x = gl.reshape(x, [COLUMNS, 2, 4, DIM // 32, 2, 2])  # column, half, t, i, h, e
    x = gl.reshape(gl.permute(x, [1, 3, 4, 2, 5, 0]), [DIM, COLUMNS])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _value_steps(even, odd, tables, DIM: gl.constexpr, SPLITS: gl.constexpr):
    """Words of codes, DIM / 8 of every other value, as [DIM, 64], rows as `_dim_rows` says; or levels.

    Of 16 values, lane t has numbers 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: steps come in this order.
    """
    WORDS: gl.constexpr = DIM // 8
    w0, w2 = gl.split(gl.permute(gl.reshape(even, [4, 2, 4, WORDS]), [0, 2, 3, 1]))
    w1, w3 = gl.split(gl.permute(gl.reshape(odd, [4, 2, 4, WORDS]), [0, 2, 3, 1]))
    l0, l1, l2, l3, h0, h1, h2, h3 = gl.inline_asm_elementwise(
        FOUR_WORDS_AS_STEPS, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [w0, w1, w2, w3, tables[0], tables[1]],
        dtype=(gl.int32,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    low = gl.join(gl.join(l0, l2), gl.join(l1, l3))
    high = gl.join(gl.join(h0, h2), gl.join(h1, h3))
    words = gl.join(low, high)
    if SPLITS:
        x = gl.reshape(_levels(words, STEPS_AS_LEVELS_IN_ORDER), [4, 4, 8, DIM // 16, 2, 2, 2])
        x = gl.permute(x, [4, 3, 2, 0, 5, 1, 6])  # from group, t, g, j, half, pair, e
    else:
        x = gl.reshape(_bytes(words), [16, 8, DIM // 16, 2, 4])
        x = gl.permute(x, [3, 2, 1, 0, 4])  # from group and t, g, j, half, e
    return gl.reshape(x, [DIM, _N])


@gluon.jit
def _exact_values(even, odd, DIM: gl.constexpr):
    """Values [4, 8, DIM] as [DIM, 64], rows likewise."""
    x = gl.reshape(gl.join(even, odd), [_N // 2, 2, 8, DIM // 16, 2])  # pair of values, half, g, j, e
    return gl.reshape(gl.permute(x, [1, 3, 2, 0, 4]), [DIM, _N])


@gluon.jit
def _weights_operand(weights, COLUMNS: gl.constexpr, KIND: gl.constexpr, layout: gl.constexpr):
    """Weights [64, COLUMNS], as scores lie, in KIND as an operand lies: tiles of 8 x 8 are transposed."""
    even, odd = gl.split(gl.reshape(weights, [_N, COLUMNS // 2, 2]))
    x = gl.inline_asm_elementwise(
        "{ .reg .b32 r; cvt.rn." + KIND + "x2.f32 r, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, r; }",
        "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    x = gl.reshape(
        _pairs(x, gl.bfloat16 if KIND == "bf16" else gl.float16), [8, 8, COLUMNS // 8, 4, 2]
    )  # now tile, column, tile, pair of keys, e
    x = gl.reshape(gl.permute(x, [0, 3, 4, 2, 1]), [_N, COLUMNS])
    return gl.convert_layout(x, layout, assert_trivial=True)


# ---- whole numbers. A warp alone has each as two of 8 bits, in columns of their own, the high one first;
# warps that decode for each other have it as a number of 16 bits. Sums of products are exact in either way.


@gluon.jit
def _whole(x, by, more):
    """The whole number next to x times `by` plus `more`, as the low bits of a word, and as a number."""
    moved = gl.fma(x, by + gl.zeros_like(x), more + gl.zeros_like(x)) + _ROUNDING
    return moved.to(gl.int32, bitcast=True), moved - _ROUNDING


@gluon.jit
def _joined(x):
    """Products [.., COLUMNS] of steps as those of levels, but for the lowest level's part."""
    high, low = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return high * 512 + low * 2


@gluon.jit
def _of_queries(x, SPLITS: gl.constexpr):
    """[.., COLUMNS] of each query's first column."""
    if not SPLITS:
        x, _ = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return x


# ---- sums: of DIM by COLUMNS, with tops and totals of each column


@gluon.jit
def _nothing(DIM: gl.constexpr, COLUMNS: gl.constexpr, SPLITS: gl.constexpr, mma: gl.constexpr):
    sums = _of_queries(gl.zeros([DIM, COLUMNS], gl.float32, mma), SPLITS)
    query: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    top = gl.full([sums.shape[1]], float("-inf"), gl.float32, query)
    return sums, top, gl.zeros([sums.shape[1]], gl.float32, query)


@gluon.jit
def _like(x, other):
    """Of each query, as `other` [.., queries] lies."""
    return gl.convert_layout(x, gl.SliceLayout(0, other.type.layout), assert_trivial=True)


@gluon.jit
def _folded(whole, acc, scale):
    """What the keys of a segment add to those before it, as `attention.fold`."""
    top = gl.maximum(whole[1], acc[1])
    base = gl.where(top == float("-inf"), 0.0, top)
    before = gl.exp2((whole[1] - base) * scale)
    after = gl.exp2((acc[1] - base) * scale)
    total = gl.fma(acc[2], after, whole[2] * before)
    sums = whole[0] * gl.expand_dims(before, 0)
    return gl.fma(acc[0], gl.expand_dims(after, 0) + gl.zeros_like(sums), sums), top, total


@gluon.jit
def _weighed(acc, scores, is_seen, scale):
    """Online softmax in powers of 2: weights of scores [64, queries], what shrinks sums, tops and totals."""
    sums, top, total = acc
    scores = gl.where(is_seen, scores, float("-inf"))
    new_top = gl.maximum(top, _like(gl.max(scores, 0), sums))
    # A query that has seen nothing yet keeps its sums at zero.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    offset = gl.expand_dims(_like(-(base * scale), scores), 0) + gl.zeros_like(scores)
    weights = gl.exp2(gl.fma(scores, gl.zeros_like(scores) + scale, offset))
    shrink = gl.exp2((top - base) * scale)
    total = gl.fma(total, shrink, _like(gl.sum(weights, 0), sums))
    return weights, gl.expand_dims(shrink, 0), new_top, total


@gluon.jit
def _with_exact(acc, scores, is_seen, v, scale, COLUMNS: gl.constexpr, SPLITS: gl.constexpr,
                mma: gl.constexpr):  # fmt: skip
    """What an exact chunk with scores [64, queries] adds."""
    weights, shrink, top, total = _weighed(acc, scores, is_seen, scale)
    if not SPLITS:
        weights = gl.reshape(gl.join(weights, gl.zeros_like(weights)), [_N, COLUMNS])
    weights = _weights_operand(weights, COLUMNS, "bf16", gl.DotOperandLayout(1, mma, 2))
    v = _loaded(v, SPLITS, gl.DotOperandLayout(0, mma, 2))
    sums = _of_queries(mma_v2(v, weights, gl.zeros([v.shape[0], COLUMNS], gl.float32, mma)), SPLITS)
    return gl.fma(acc[0], shrink + gl.zeros_like(acc[0]), sums), top, total


@gluon.jit
def _with_cold(acc, products, v, scales, asked, chunk, COLUMNS: gl.constexpr, SPLITS: gl.constexpr,
               mma: gl.constexpr):  # fmt: skip
    """What a compressed chunk adds: of products [64, COLUMNS] of its keys, and of its values.

    Weights are rounded to multiples of what the largest scale of a value allows, up or down by position, so
    that many small ones do not all become nothing.
    """
    lowest, unit, cold_end, scale = asked
    if not SPLITS:
        products = _joined(products)
        products = (products - gl.expand_dims(_like(lowest, products), 0)).to(gl.float32)
    ROWS: gl.constexpr = gl.SliceLayout(1, products.type.layout)
    by_key = gl.convert_layout(gl.reshape(scales[0], [_N]), ROWS, assert_trivial=True).to(gl.float32)
    by_value = gl.convert_layout(gl.reshape(scales[1], [_N]), ROWS, assert_trivial=True).to(gl.float32)
    scores = products * (gl.expand_dims(by_key, 1) * gl.expand_dims(_like(unit, products), 0))
    is_colder = gl.expand_dims(_like(chunk * _N < cold_end, products), 0)
    weights, shrink, top, total = _weighed(acc, scores, is_colder, scale)
    largest = gl.max(by_value, 0)
    by = by_value * gl.where(largest > 0, _LARGEST_WEIGHT / largest, 0.0)
    row = gl.arange(0, _N, ROWS)
    more = (row * _TURN % _N).to(gl.float32) * (1 / _N) + (0.5 / _N - 0.5)
    bits, wholes = _whole(weights, gl.expand_dims(by, 1), gl.expand_dims(more, 1))
    if SPLITS:
        both = _weights_operand(wholes, COLUMNS, "f16", gl.DotOperandLayout(1, mma, 2))
        v = v.load(gl.DotOperandLayout(0, mma, 2))
        levels = mma_v2(v, both, gl.zeros([v.shape[0], COLUMNS], gl.float32, mma))
    else:
        both = gl.join(((bits + 128) >> 8).to(gl.int8), bits.to(gl.int8))
        both = gl.reshape(both, [4, 2, 4, 2, COLUMNS])  # group, half, t, e: as `_value_steps` has them
        both = gl.reshape(gl.permute(both, [0, 2, 1, 3, 4]), [_N, COLUMNS])
        both = gl.convert_layout(both, gl.DotOperandLayout(1, mma, 4))
        steps = _joined(mma_v2(v, both, gl.zeros([v.shape[0], COLUMNS], gl.int32, mma))).to(gl.float32)
        levels = steps + gl.expand_dims(_like(gl.sum(wholes, 0), acc[0]) * -_LOWEST, 0)
    added = levels * (largest * _WEIGHT_UNIT)
    return gl.fma(acc[0], shrink + gl.zeros_like(acc[0]), added), top, total


# ---- chunks


@gluon.jit
def _kept(nothing, IS_SHARED: gl.constexpr):
    """Sums of nothing, in shared memory where they are many and needed rarely."""
    sums = nothing[0]
    if IS_SHARED:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        sums = gl.allocate_shared_memory(gl.float32, sums.shape, flat, sums)
    return sums, nothing[1], nothing[2]


@gluon.jit
def _read(kept, like, IS_SHARED: gl.constexpr):
    sums = kept[0]
    if IS_SHARED:
        sums = sums.load(like.type.layout)
    return sums, kept[1], kept[2]


@gluon.jit
def _added(kept, acc, scale, IS_SHARED: gl.constexpr):
    sums, top, total = _folded(_read(kept, acc[0], IS_SHARED), acc, scale)
    if IS_SHARED:
        kept[0].store(sums)
        sums = kept[0]
    return sums, top, total


@gluon.jit
def _folds_now(whole, run, acc, chunk, length, scale, LEVEL: gl.constexpr, DIM: gl.constexpr,
               COLUMNS: gl.constexpr, SPLITS: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """Where a segment of `length` chunks begins, the one before is folded into its run; so are runs."""
    if LEVEL > 0:  # noqa: SIM102  # the one is known to the compiler
        if chunk % length == 0:
            run = _added(run, acc, scale, SPLITS)
            acc = _nothing(DIM, COLUMNS, SPLITS, mma)
            if LEVEL > 1:  # noqa: SIM102
                if chunk % (length * _RUN) == 0:
                    whole = _added(whole, _read(run, acc[0], SPLITS), scale, True)
                    if SPLITS:
                        run[0].store(acc[0])
                        run = run[0], acc[1], acc[2]
                    else:
                        run = acc
    return whole, run, acc


@gluon.jit
def _whole_queries(q_place, in_tile, DIM: gl.constexpr, COLUMNS: gl.constexpr, SPLITS: gl.constexpr,
                   mma: gl.constexpr):  # fmt: skip
    """Queries as an operand of whole numbers; what the lowest level adds to their products; their unit."""
    q = gl.load(q_place, mask=in_tile, other=0.0).to(gl.float32)
    largest = gl.max(gl.abs(q), 1)
    by = gl.where(largest > 0, _LARGEST_QUERY / largest, 0.0)
    bits, wholes = _whole(q, gl.expand_dims(by, 1), 0.0)
    C: gl.constexpr = gl.SliceLayout(0, mma)
    unit = gl.convert_layout(largest * _QUERY_UNIT, C)
    lowest = unit
    if SPLITS:
        q = _exact_queries(wholes.to(gl.float16), DIM, COLUMNS, gl.DotOperandLayout(1, mma, 2))
    else:
        is_low = gl.arange(0, COLUMNS, gl.SliceLayout(1, q.type.layout)) % 2
        bits = (bits + gl.expand_dims(128 - 128 * is_low, 1)) >> gl.expand_dims(8 - 8 * is_low, 1)
        q = _query_steps(bits.to(gl.int8), DIM, COLUMNS, gl.DotOperandLayout(1, mma, 4))
        unit, _ = gl.split(gl.reshape(unit, [COLUMNS // 2, 2]))
        lowest = gl.convert_layout(gl.sum(wholes, 1).to(gl.int32) * _LOWEST, C)
        lowest, _ = gl.split(gl.reshape(lowest, [COLUMNS // 2, 2]))
    return q, lowest, unit


@gluon.jit
def _attend_cold(
    whole, run, acc, q_place, in_tile, keys, key_scale, values, value_scale, table, first_chunk, last_chunk,
    cold_end, length, scale,
    DIM: gl.constexpr, COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Compressed chunks: each is seen whole by the queries with a later c(t), and by no other."""
    WORDS: gl.constexpr = DIM // 8
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2 if SPLITS else 4)
    PRODUCTS: gl.constexpr = gl.float32 if SPLITS else gl.int32
    stores = keys, key_scale, values, value_scale
    end = last_chunk * _N
    slots = _chunk_slots(table, first_chunk, end, PAGE_SIZE, WORDS, WARPS, SPLITS)
    # Zero is added, unknown to the compiler, which would move constants into place each time.
    zero = end >> 31 if SPLITS else (gl.max(slots[0], 0) >> 62).to(gl.int32)
    tables = STEP_TABLES[0] + zero, STEP_TABLES[1] + zero
    q, lowest, unit = _whole_queries(q_place, in_tile, DIM, COLUMNS, SPLITS, mma)
    asked = lowest, unit, cold_end, scale
    k, by_key = _load_keys(stores, slots, WORDS, WARPS, SPLITS)
    for chunk in range(first_chunk, last_chunk):
        even, odd, by_value = _load_values(stores, slots, WORDS, WARPS, SPLITS)
        slots = _chunk_slots(table, chunk + 1, end, PAGE_SIZE, WORDS, WARPS, SPLITS)
        whole, run, acc = _folds_now(whole, run, acc, chunk, length, scale, LEVEL, DIM, COLUMNS, SPLITS, mma)
        k = _operand(_key_steps(k, tables, DIM, SPLITS), SPLITS, A)
        if SPLITS:  # before the others wait for the keys
            v = _operand(_value_steps(even, odd, tables, DIM, SPLITS), SPLITS, A)
        products = mma_v2(_loaded(k, SPLITS, A), q, gl.zeros([_N, COLUMNS], PRODUCTS, mma))
        scales = by_key, by_value
        k, by_key = _load_keys(stores, slots, WORDS, WARPS, SPLITS)  # of the next one
        if not SPLITS:
            v = _operand(_value_steps(even, odd, tables, DIM, SPLITS), SPLITS, A)
        acc = _with_cold(acc, products, v, scales, asked, chunk, COLUMNS, SPLITS, mma)
    return whole, run, acc


@gluon.jit
def _keys_left(left, COUNT: gl.constexpr, layout: gl.constexpr):
    """[4, COUNT, 1]: whether every (16 / COUNT)-th of a chunk's keys is one of the first `left`."""
    group = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout))) * 16
    inside = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, layout))) * (16 // COUNT)
    key = gl.expand_dims(gl.expand_dims(group, 1), 2) + gl.expand_dims(gl.expand_dims(inside, 0), 2)
    return key < left


@gluon.jit
def _attend_exact(
    whole, run, acc, q_place, in_tile, keys, values, table, first_chunk, last_chunk, folds_from, tile_hi, hi,
    cold_end, length, scale,
    DIM: gl.constexpr, COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Exact chunks: of those from c(t) on, and of chunk 0, a query sees the keys before `hi`.

    Before `folds_from`, segments have begun already, when the chunk came compressed.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    K: gl.constexpr = _key_layout(DIM, 2, WARPS, SPLITS)
    V: gl.constexpr = _value_layout(DIM, 2, WARPS, SPLITS)
    q = gl.load(q_place, mask=in_tile, other=0.0)
    if not SPLITS:
        is_first = gl.arange(0, COLUMNS, gl.SliceLayout(1, q.type.layout)) % 2 == 0
        q = gl.where(gl.expand_dims(is_first, 1), q, 0.0).to(gl.bfloat16)
    q = _exact_queries(q, DIM, COLUMNS, gl.DotOperandLayout(1, mma, 2))
    for chunk in range(first_chunk, last_chunk):
        left = tile_hi - chunk * _N  # what lies behind is nobody's yet
        k_slot = _slots(table, chunk, tile_hi, PAGE_SIZE, gl.SliceLayout(1, gl.SliceLayout(2, K)))
        v_slot = gl.convert_layout(k_slot, gl.SliceLayout(1, gl.SliceLayout(2, V)), assert_trivial=True)
        k = gl.load(keys + _places(k_slot, 0, 1, DIM, K), mask=_keys_left(left, 16, K), other=0.0)
        even = gl.load(values + _places(v_slot, 0, 2, DIM, V), mask=_keys_left(left, 8, V), other=0.0)
        odd = gl.load(values + _places(v_slot, 1, 2, DIM, V), mask=_keys_left(left - 1, 8, V), other=0.0)
        if LEVEL > 0:  # noqa: SIM102
            if chunk >= folds_from:
                whole, run, acc = _folds_now(
                    whole, run, acc, chunk, length, scale, LEVEL, DIM, COLUMNS, SPLITS, mma
                )
        k = _operand(_exact_keys(k, DIM), SPLITS, A)
        v = _operand(_exact_values(even, odd, DIM), SPLITS, A)
        scores = mma_v2(_loaded(k, SPLITS, A), q, gl.zeros([_N, COLUMNS], gl.float32, mma))
        scores = _of_queries(scores, SPLITS)
        row = gl.arange(0, _N, gl.SliceLayout(1, scores.type.layout))
        is_warmer = (chunk * _N >= cold_end) | (chunk == 0)
        is_seen = gl.expand_dims(row + chunk * _N, 1) < gl.expand_dims(_like(hi, scores), 0)
        is_seen = is_seen & gl.expand_dims(_like(is_warmer, scores), 0)
        acc = _with_exact(acc, scores, is_seen, v, scale, COLUMNS, SPLITS, mma)
    return whole, run, acc


# ---- the kernels


@gluon.jit
def _row_of(offsets, num_rows, tile, TOKENS: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """As `attention.row_of`."""
    row = -1
    for begin in range(0, num_rows, ROWS):
        r = begin + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32 // WARPS], [32], [WARPS], [0]))
        first = gl.load(offsets + r, mask=r < num_rows, other=0) // TOKENS + r
        row += gl.sum(((first <= tile) & (r < num_rows)).to(gl.int32), 0)
    return row


@gluon.jit
def _segment_chunks(hi):
    """`attention.segment_length` in chunks."""
    multiple = (hi - 1) // (_MAX_SEGMENTS * _SEGMENT) + 1
    bits = multiple.to(gl.float32).to(gl.int32, bitcast=True)
    bits = ((bits + 0x1FFFFF) >> 21) << 21
    return bits.to(gl.float32, bitcast=True).to(gl.int32) * (_SEGMENT // _N)


@gluon.jit(
    do_not_specialize=["num_rows", "tiles_per_row", "cold_window", "table_stride", "exact_table_stride",
                       "num_units"]
)  # fmt: skip
def _attend_kernel(
    q, exact_keys, exact_values, keys, key_scale, values, value_scale, part, part_top, part_total,
    page_table, exact_page_table, rows, starts, offsets, scale, cold_window, num_rows, tiles_per_row,
    table_stride, exact_table_stride, num_units, q_stride, q_head_stride, exact_stride, key_stride,
    value_stride, scale_stride,
    TOKENS: gl.constexpr, SHARED: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr, IS_EVEN: gl.constexpr,
    IS_CAUSAL: gl.constexpr, ROW_BLOCK: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid (tiles, key/value heads, parts), as `kv_attention`'s."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False,
                                  pack=1)  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]
    )
    PARTS: gl.constexpr = 1 if SPLITS else 2  # columns of a query
    QUERIES: gl.constexpr = COLUMNS // PARTS
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    group = gl.program_id(1)
    if IS_EVEN:
        row = tile // tiles_per_row
        tile = tile % tiles_per_row
    else:
        row = _row_of(offsets, num_rows, tile, TOKENS, ROW_BLOCK, WARPS)
        tile -= (gl.load(offsets + row) // TOKENS + row).to(gl.int32)
    stream = gl.load(offsets + row)
    count = (gl.load(offsets + row + 1) - stream).to(gl.int32)
    start = gl.load(starts + row).to(gl.int32)
    home = gl.load(rows + row)
    first = tile * TOKENS
    if first >= count:  # not before the loads: they are under way together
        return
    table = page_table + home * table_stride
    exact_table = exact_page_table + home * exact_table_stride
    wide = group.to(gl.int64)
    exact_keys += wide * exact_stride
    exact_values += wide * exact_stride
    keys = (keys + wide * key_stride).to(gl.pointer_type(gl.int32))
    values = (values + wide * value_stride).to(gl.pointer_type(gl.int32))
    key_scale += wide * scale_stride
    value_scale += wide * scale_stride

    # Each query, and then the tile, sees keys before `hi`; compressed ones before `cold_end`.
    last = gl.minimum(first + TOKENS, count) - 1
    nothing = _nothing(DIM, COLUMNS, SPLITS, mma)
    STATE: gl.constexpr = nothing[0].type.layout
    query = gl.arange(0, QUERIES, gl.SliceLayout(0, STATE))
    token = gl.minimum(first + query // SHARED, last)
    hi = start + (token + 1 if IS_CAUSAL else token * 0 + count)
    tile_hi = start + (last + 1 if IS_CAUSAL else count)
    cold_end = gl.maximum(start + token - cold_window, 0) // _N * _N
    cold_chunk = gl.maximum(start + last - cold_window, 0) // _N  # the first that is compressed for no query
    exact_chunk = gl.maximum(gl.maximum(start + first - cold_window, 0) // _N, 1)  # the first exact for some
    last_chunk = (tile_hi + _N - 1) // _N

    Q: gl.constexpr = _query_layout(COLUMNS, DIM, WARPS)
    q_query = gl.arange(0, COLUMNS, gl.SliceLayout(1, Q)) // PARTS
    q_token = first + q_query // SHARED
    in_tile = gl.expand_dims((q_query < TOKENS * SHARED) & (q_token < count), 1)
    q_at = (stream + q_token) * q_stride + (group * SHARED + q_query % SHARED) * q_head_stride
    q_place = q + gl.expand_dims(q_at, 1) + gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, Q)), 0)

    lengths = _segment_chunks(hi)  # of a tile's queries there are one or two
    shortest = _segment_chunks(start + first + 1 if IS_CAUSAL else tile_hi)
    longest = _segment_chunks(tile_hi)
    out_row = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(1, STATE)), 1)
    result = (stream + first + query // SHARED) * HEADS + group * SHARED + query % SHARED
    is_kept = (query < TOKENS * SHARED) & (first + query // SHARED < count)
    for turn in range(1 + (longest != shortest).to(gl.int32)):
        length = gl.where(turn == 0, shortest, longest)
        turn_last = gl.minimum(last_chunk, length * _MAX_SEGMENTS)  # the other turn's queries see more
        unit_length = turn_last
        num_mine = 1
        if LEVEL < 2:
            unit_length = length if LEVEL == 0 else length * _RUN
            num_mine = (turn_last + unit_length - 1) // unit_length
        each = (num_mine + gl.num_programs(2) - 1) // gl.num_programs(2)
        begin_unit = gl.program_id(2) * each
        for unit in range(begin_unit, gl.minimum(begin_unit + each, num_mine)):
            begin = unit * unit_length
            end = gl.minimum(turn_last, begin + unit_length)
            acc = nothing
            run = _kept(nothing, SPLITS and LEVEL > 0)
            whole = _kept(nothing, LEVEL > 1)
            # Chunk 0, compressed chunks, then exact ones: each kind once in the code.
            for phase in range(2):
                whole, run, acc = _attend_exact(
                    whole, run, acc, q_place, in_tile, exact_keys, exact_values, exact_table,
                    gl.where(phase == 0, begin, gl.maximum(begin, exact_chunk)),
                    gl.where(phase == 0, gl.minimum(end, 1), end),
                    gl.where(phase == 0, 1, cold_chunk), tile_hi, hi, cold_end, length, scale,
                    DIM, COLUMNS, PAGE_SIZE, LEVEL, WARPS, SPLITS, mma,
                )  # fmt: skip
                first_cold = gl.maximum(begin, 1)
                last_cold = gl.where(phase == 0, gl.minimum(end, cold_chunk), 0)
                if first_cold < last_cold:
                    whole, run, acc = _attend_cold(
                        whole, run, acc, q_place, in_tile, keys, key_scale, values, value_scale, table,
                        first_cold, last_cold, cold_end, length, scale,
                        DIM, COLUMNS, PAGE_SIZE, LEVEL, WARPS, SPLITS, mma,
                    )  # fmt: skip
            if LEVEL > 0:
                acc = _read(_added(run, acc, scale, SPLITS), nothing[0], SPLITS)
            if LEVEL > 1:
                acc = _read(_added(whole, acc, scale, True), nothing[0], True)
            is_mine = is_kept & (lengths == length)
            at = result * num_units + unit
            gl.store(part_top + at, acc[1], mask=is_mine)
            gl.store(part_total + at, acc[2], mask=is_mine)
            place = part + gl.expand_dims(at, 0) * DIM + out_row
            gl.store(place, acc[0], mask=gl.expand_dims(is_mine, 0) & (out_row >= 0))


@triton.jit
def _part(part, part_top, part_total, at, is_there, DIM: tl.constexpr):
    """Sums [DIM], top and total of a unit, or of nothing."""
    top = tl.load(part_top + at, mask=is_there, other=float("-inf"))
    total = tl.load(part_total + at, mask=is_there, other=0.0)
    return tl.load(part + at * DIM + tl.arange(0, DIM), mask=is_there, other=0.0), top, total


@triton.jit
def _fold(whole, acc, scale):
    """As `_folded`, for one query, whose top and total need no place of their own among the lanes."""
    top = tl.maximum(whole[1], acc[1])
    base = tl.where(top == float("-inf"), 0.0, top)
    before = tl.exp2((whole[1] - base) * scale)
    after = tl.exp2((acc[1] - base) * scale)
    total = tl.fma(acc[2], after, whole[2] * before)
    return tl.fma(acc[0], after + tl.zeros_like(acc[0]), whole[0] * before), top, total


@triton.jit(do_not_specialize=["num_rows", "tokens_per_row", "num_units"])
def _merge_kernel(
    part, part_top, part_total, out, starts, offsets, sinks, sign, scale, num_rows, tokens_per_row, num_units,
    HEADS: tl.constexpr, DIM: tl.constexpr, LEVEL: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SINKS: tl.constexpr, ROW_BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, query heads): the units that hold keys of a token, folded in order, and turned back."""
    let_next_start(PDL)
    head = tl.program_id(1)
    number = tl.program_id(0)
    wait_for_previous(PDL)
    row = number // tokens_per_row if IS_EVEN else row_of(offsets, num_rows, number, 0, ROW_BLOCK)
    stream = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - stream).to(tl.int32)
    start = tl.load(starts + row).to(tl.int32)
    if number >= tl.load(offsets + num_rows):  # not before the loads: they are under way together
        return
    _, hi = visible_keys(start, number - stream.to(tl.int32), count, 0, IS_CAUSAL, False, False)
    length = segment_length(hi, SEGMENT, MAX_SEGMENTS)
    result = number.to(tl.int64) * HEADS + head
    at = result * num_units
    dim = tl.arange(0, DIM)
    nothing = tl.zeros([DIM], tl.float32), scale * 0.0 - float("inf"), scale * 0.0
    whole = nothing
    if LEVEL == 2:
        whole = _part(part, part_top, part_total, at, True, DIM)
    else:
        for first in range(0, tl.cdiv(hi, length * RUN), RUNS):
            for run in tl.static_range(RUNS):
                begin = (first + run) * RUN  # the run's first segment
                if LEVEL == 1:
                    acc = _part(part, part_top, part_total, at + first + run, begin * length < hi, DIM)
                else:
                    acc = nothing
                    for segment in tl.static_range(RUN):
                        is_there = (begin + segment) * length < hi
                        one = _part(part, part_top, part_total, at + begin + segment, is_there, DIM)
                        acc = _fold(acc, one, scale)
                whole = _fold(whole, acc, scale)
    sink = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        sink += tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    one = tl.arange(0, 1)
    outputs = divided((whole[0][None, :], whole[1] + one, (whole[2] + one)[:, None]), sink, scale, HAS_SINKS)
    outputs = tl.gather(outputs, _dim_rows(dim, DIM)[None, :], 1)
    outputs = turn_blocks(outputs, DIM, DIM) * tl.load(sign + dim)[None, :]
    tl.store(out + result * DIM + dim[None, :], outputs.to(out.dtype.element_ty))


# ---- the host's side


def fits(form: KvFormat, head_dim: int, dtype: torch.dtype, page_size: int, device: torch.device) -> bool:
    """Whether this kernel is for such keys and values, and for that card."""
    return (
        device.type == "cuda"
        and has_pdl(device)
        and dtype == torch.bfloat16
        and head_dim in HEAD_DIMS
        and {kind_of(form.keys), kind_of(form.values)} == {"bits4"}
        and page_size % 16 == 0
    )


def serves(q: Tensor, pages: ColdPages, blocks: Blocks, mask: Mask) -> bool:
    """Whether it computes that layer: a question of the model and the card, not of the batch."""
    is_kind = fits(pages.format, q.shape[2], q.dtype, blocks.page_size, q.device)
    return is_kind and q.shape[1] // pages.exact_keys.shape[1] <= 64 and mask.window is None


def choose(*, num_rows: int, num_groups: int, shared: int, max_count: int) -> Config:
    """Few columns: a warp for a segment. Many: four warps that decode for each other, for runs or for all."""
    wanted = max_count * shared
    queries = next((size for size in (4, 8, 16, 32) if wanted <= size), 64)
    tokens = min(queries // shared, TILE)
    warps = 1 if queries <= 8 else queries // 16 if queries > 16 else 2
    num_tiles = num_rows * -(-max_count // tokens) * num_groups
    level = 0 if warps == 1 and num_tiles < 64 else 1
    if max_count > MAX_SPLIT_COUNT or num_tiles * warps >= ENOUGH_WARPS:
        level = 2  # nothing is left to share, and much would be stored
    parts = (MAX_SEGMENTS, MAX_SEGMENTS // RUN, 1)[level]
    return Config(tokens, queries, warps, level, parts)


def attend(q: Tensor, pages: ColdPages, blocks: Blocks, mask: Mask, sinks: Tensor | None) -> Tensor:
    """Attention of q [N, H, D] over one layer's ColdPages, as `kv_attention.attend_cold`."""
    num_groups = pages.exact_keys.shape[1]
    config = choose(
        num_rows=blocks.rows.shape[0],
        num_groups=num_groups,
        shared=q.shape[1] // num_groups,
        max_count=max(blocks.counts),
    )
    return attend_as(config, q, pages, blocks, mask, sinks)


def attend_as(
    config: Config, q: Tensor, pages: ColdPages, blocks: Blocks, mask: Mask, sinks: Tensor | None
) -> Tensor:
    """The same, cut as asked."""
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    segments = min(MAX_SEGMENTS, -(-blocks.table.shape[1] * blocks.page_size // SEGMENT))
    units = (segments, -(-segments // RUN), 1)[config.level]
    shape = (num_tokens, num_heads, units)
    parts = [torch.empty(s, dtype=torch.float32, device=q.device) for s in ((*shape, head_dim), shape, shape)]
    _launch(config, q, pages, blocks, mask, parts, units)
    num_rows, max_count = blocks.rows.shape[0], max(blocks.counts)
    _merge_kernel[(num_tokens, num_heads)](
        *parts,
        out,
        blocks.starts,
        blocks.offsets,
        out if sinks is None else sinks,
        signs(head_dim, q.device),
        mask.scale * LOG2_E,
        num_rows,
        max_count,
        units,
        HEADS=num_heads,
        DIM=head_dim,
        LEVEL=config.level,
        IS_EVEN=num_tokens == num_rows * max_count,
        IS_CAUSAL=mask.is_causal,
        HAS_SINKS=sinks is not None,
        ROW_BLOCK=ROW_BLOCK,
        SEGMENT=SEGMENT,
        MAX_SEGMENTS=MAX_SEGMENTS,
        RUN=RUN,
        RUNS=MERGED_RUNS,
        num_warps=1,
        **overlap(q.device),
    )
    return out


def _launch(
    config: Config,
    q: Tensor,
    pages: ColdPages,
    blocks: Blocks,
    mask: Mask,
    parts: list[Tensor],
    units: int,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_groups, num_rows, tokens = pages.exact_keys.shape[1], blocks.rows.shape[0], config.tokens
    assert blocks.exact_table is not None
    tiles_per_row = -(-max(blocks.counts) // tokens)
    is_even = num_rows * tiles_per_row <= num_tokens // tokens + num_rows
    num_tiles = num_rows * tiles_per_row if is_even else num_tokens // tokens + num_rows
    _attend_kernel[(num_tiles, num_groups, min(config.parts, units))](
        q,
        pages.exact_keys,
        pages.exact_values,
        *pages.keys,
        *pages.values,
        *parts,
        blocks.table,
        blocks.exact_table,
        blocks.rows,
        blocks.starts,
        blocks.offsets,
        mask.scale * LOG2_E,  # exp2 takes the place of exp
        pages.rule.window,
        num_rows,
        tiles_per_row,
        blocks.table.stride(0),
        blocks.exact_table.stride(0),
        units,
        q.stride(0),
        q.stride(1),
        pages.exact_keys.stride(1),
        pages.keys.codes.stride(1),
        pages.values.codes.stride(1),
        pages.keys.scale.stride(1),
        TOKENS=tokens,
        SHARED=num_heads // num_groups,
        HEADS=num_heads,
        DIM=head_dim,
        COLUMNS=config.queries if config.warps > 1 else 2 * config.queries,
        PAGE_SIZE=blocks.page_size,
        LEVEL=config.level,
        IS_EVEN=is_even,
        IS_CAUSAL=mask.is_causal,
        ROW_BLOCK=ROW_BLOCK,
        WARPS=config.warps,
        SPLITS=config.warps > 1,
        num_warps=config.warps,
        **overlap(q.device),
    )
