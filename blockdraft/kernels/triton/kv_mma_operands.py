"""Operands of tensor cores from exact and 4-bit keys and values: their layouts, loads and conversions.

Scores are computed transposed, keys by queries: few queries then make small tiles, and no value moves between
lanes on its way from the loaded bytes to the operand of a tensor core. So the coordinates of a head are used
in a different order (`column_dims`, `dim_rows`), which changes only the rounding of sums. A quad is four
lanes; g is the quad's number, t the lane's number in its quad.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.triton.kv_codes import PAIR_BY_CURVE, WORD_BY_TABLE

_N = gl.constexpr(TILE)


# ---- layouts of tensors


@gluon.constexpr_function
def _basis(rank, axis, bit):
    return [(1 << bit) if at == axis else 0 for at in range(rank)]


@gluon.constexpr_function
def _bits(count):
    return count.bit_length() - 1


@gluon.constexpr_function
def _layout(shape, registers, lanes, warps, splits, groups=4):
    """Return a layout, whose first axis counts `groups` groups of 16 keys.

    `registers` are (axis, first bit, number of bits), the fastest first. `lanes` are five (axis, bit), or
    None if lanes hold equal values. With `splits`, each warp has its share of the groups, otherwise all.
    """
    rank = len(shape)
    log_warps = _bits(warps)
    split = min(log_warps, _bits(groups)) if splits else 0
    return gl.DistributedLinearLayout(
        reg_bases=[_basis(rank, axis, bit + i) for axis, bit, count in registers for i in range(count)]
        + [_basis(rank, 0, bit) for bit in range(split, _bits(groups))],
        lane_bases=[[0] * rank if one is None else _basis(rank, one[0], one[1]) for one in lanes],
        warp_bases=[_basis(rank, 0, bit) if bit < split else [0] * rank for bit in range(log_warps)],
        block_bases=[],
        shape=shape,
    )


@gluon.constexpr_function
def key_layout(size, halves, warps, splits):
    """Return the layout [4, 16, size] of keys: quad g has keys g and g + 8, a lane a quarter of each half."""
    each = _bits(size) - _bits(halves) - 2
    lanes = [(2, each), (2, each + 1), (1, 0), (1, 1), (1, 2)]
    registers = [(2, 0, each), (2, each + 2, _bits(halves)), (1, 3, 1)]
    return _layout([4, 16, size], registers, lanes, warps, splits)


@gluon.constexpr_function
def value_layout(size, halves, warps, splits):
    """Return the layout [4, 8, size] of every other value.

    Lanes t have values t and t + 4, of which quad g has an eighth of each half.
    """
    each = _bits(size) - _bits(halves) - 3
    lanes = [(1, 0), (1, 1), (2, each), (2, each + 1), (2, each + 2)]
    registers = [(2, 0, each), (2, each + 3, _bits(halves)), (1, 2, 1)]
    return _layout([4, 8, size], registers, lanes, warps, splits)


@gluon.constexpr_function
def _group_key_layout(words):
    """Return the layout [16, words] of one group of keys for a single warp, like `key_layout`."""
    each = _bits(words) - 2
    lanes = [(1, each), (1, each + 1), (0, 0), (0, 1), (0, 2)]
    return _layout([16, words], [(1, 0, each), (0, 3, 1)], lanes, 1, False, 1)


@gluon.constexpr_function
def _group_value_layout(words):
    """Return the layout [8, words] of a group's every other value for one warp, like `value_layout`."""
    each = _bits(words) - 3
    lanes = [(0, 0), (0, 1), (1, each), (1, each + 1), (1, each + 2)]
    return _layout([8, words], [(1, 0, each), (0, 2, 1)], lanes, 1, False, 1)


@gluon.constexpr_function
def scale_layout(warps):
    """Return the layout [4, 16] of scales, which is that of the rows of a tile of scores."""
    lanes = [None, None, (1, 0), (1, 1), (1, 2)]
    return _layout([4, 16], [(1, 3, 1)], lanes, warps, False)


@gluon.constexpr_function
def column_scale_layout(warps):
    """Return the layout [4, 16] of scales, which is that of the columns of scores of `wgmma`."""
    lanes = [(1, 1), (1, 2), None, None, None]
    return _layout([4, 16], [(1, 0, 1), (1, 3, 1)], lanes, warps, False)


@gluon.jit
def column_dims(column, DIM: gl.constexpr):
    """Return columns' coordinates: column 16 i + 8 h + 2 t + e of a half is lane t's number 4 i + 2 h + e."""
    c = column % (DIM // 2)
    return column - c + c // 2 % 4 * (DIM // 8) + c // 16 * 4 + c // 8 % 2 * 2 + c % 2


@triton.jit
def dim_rows(dim, DIM: tl.constexpr):
    """Return the rows of the sums for coordinates `dim`: number j of quad g in a half is row 8 j + g."""
    d = dim % (DIM // 2)
    return dim - d + d % (DIM // 16) * 8 + d // (DIM // 16)


# ---- loads


@gluon.jit
def first_slots(table, chunk, end, PAGE_SIZE: gl.constexpr, layout: gl.constexpr):
    """Return the first slots [4] of a chunk's groups of 16 keys; 0, which is never written, from `end` on."""
    key = chunk * _N + 16 * gl.arange(0, 4, layout)
    page = gl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    return page * PAGE_SIZE + key % PAGE_SIZE


@gluon.jit
def places(slot, first, STEP: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """Return the offsets [4, .., SIZE] of the data of every STEP-th of a group's 16 slots from `first` on."""
    key = gl.arange(0, 16 // STEP, gl.SliceLayout(0, gl.SliceLayout(2, layout))) * STEP + first
    part = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    slot = gl.expand_dims(gl.expand_dims(slot, 1), 2)
    inside = gl.expand_dims(gl.expand_dims(key, 0), 2) * SIZE + gl.expand_dims(gl.expand_dims(part, 0), 1)
    return slot * SIZE + inside


@gluon.jit
def load_scales(scales, slot, layout: gl.constexpr):
    key = gl.arange(0, 16, gl.SliceLayout(0, layout))
    return gl.load(scales + gl.expand_dims(slot, 1) + gl.expand_dims(key, 0))


@gluon.jit
def chunk_slots(table, chunk, end, PAGE_SIZE: gl.constexpr, WORDS: gl.constexpr, WARPS: gl.constexpr,
                 SPLITS: gl.constexpr):  # fmt: skip
    """Return the first slots of a compressed chunk's groups, in the layout of codes and in that of scales."""
    K: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, key_layout(WORDS, 1, WARPS, SPLITS)))
    SCALES: gl.constexpr = gl.SliceLayout(1, scale_layout(WARPS))
    slot = first_slots(table, chunk, end, PAGE_SIZE, K)
    if SPLITS:
        scale_slot = first_slots(table, chunk, end, PAGE_SIZE, SCALES)
    else:
        scale_slot = gl.convert_layout(slot, SCALES, assert_trivial=True)
    return slot, scale_slot


@gluon.jit
def load_chunk(keys, key_scale, values, value_scale, slots, WORDS: gl.constexpr, WARPS: gl.constexpr,
                SPLITS: gl.constexpr):  # fmt: skip
    """Return the words of codes, and the scales, of a compressed chunk."""
    K: gl.constexpr = key_layout(WORDS, 1, WARPS, SPLITS)
    V: gl.constexpr = value_layout(WORDS, 1, WARPS, SPLITS)
    SCALES: gl.constexpr = scale_layout(WARPS)
    slot, scale_slot = slots
    v_slot = gl.convert_layout(slot, gl.SliceLayout(1, gl.SliceLayout(2, V)), assert_trivial=True)
    k = gl.load(keys + places(slot, 0, 1, WORDS, K))
    even = gl.load(values + places(v_slot, 0, 2, WORDS, V))
    odd = gl.load(values + places(v_slot, 1, 2, WORDS, V))
    k_scale = load_scales(key_scale, scale_slot, SCALES)
    return k, even, odd, k_scale, load_scales(value_scale, scale_slot, SCALES)


@gluon.jit
def _group_slot(table, group, end, PAGE_SIZE: gl.constexpr):
    """Return the first slot of a group of 16 keys, or 0 from key `end` on."""
    key = group * 16
    page = gl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    return page * PAGE_SIZE + key % PAGE_SIZE


@gluon.jit
def _load_group(codes, slot, first, STEP: gl.constexpr, WORDS: gl.constexpr, layout: gl.constexpr):
    """Return the words of every STEP-th of a group's 16 keys from `first` on."""
    key = gl.arange(0, 16 // STEP, gl.SliceLayout(1, layout)) * STEP + first
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    return gl.load(codes + slot * WORDS + (gl.expand_dims(key * WORDS, 1) + gl.expand_dims(word, 0)))


@gluon.jit
def load_group_keys(keys, key_scale, table, group, end, WORDS: gl.constexpr, PAGE_SIZE: gl.constexpr,
                     mma: gl.constexpr):  # fmt: skip
    slot = _group_slot(table, group, end, PAGE_SIZE)
    scales = gl.load(key_scale + slot + gl.arange(0, 16, gl.SliceLayout(1, mma)))
    return _load_group(keys, slot, 0, 1, WORDS, _group_key_layout(WORDS)), scales


@gluon.jit
def load_group_values(values, table, group, end, WORDS: gl.constexpr, PAGE_SIZE: gl.constexpr):
    V: gl.constexpr = _group_value_layout(WORDS)
    slot = _group_slot(table, group, end, PAGE_SIZE)
    return _load_group(values, slot, 0, 2, WORDS, V), _load_group(values, slot, 1, 2, WORDS, V)


@gluon.jit
def keys_left(left, COUNT: gl.constexpr, layout: gl.constexpr):
    """Return a mask [4, COUNT, 1] of every (16 / COUNT)-th key of a chunk: True for its first `left` keys."""
    group = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout))) * 16
    inside = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, layout))) * (16 // COUNT)
    key = gl.expand_dims(gl.expand_dims(group, 1), 2) + gl.expand_dims(gl.expand_dims(inside, 0), 2)
    return key < left


# ---- operands


@gluon.jit
def operand(x, SPLITS: gl.constexpr, layout: gl.constexpr):
    """Return x in the operand's layout, or in shared memory for `loaded` if the warps shared the work."""
    if SPLITS:
        PHASES: gl.constexpr = 8 if x.shape[1] >= 64 else 4
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 8 // PHASES, PHASES, [1, 0])
        x = gl.allocate_shared_memory(x.dtype, x.shape, swizzled, x)
    else:
        x = gl.convert_layout(x, layout, assert_trivial=True)  # nothing moves
    return x


@gluon.jit
def loaded(x, SPLITS: gl.constexpr, layout: gl.constexpr):
    if SPLITS:
        x = x.load(layout)
    return x


@gluon.jit
def _pairs(x):
    """Return words [..] as pairs of bfloat16 numbers [.., 2]."""
    even = x.to(gl.int16).to(gl.bfloat16, bitcast=True)
    odd = (x >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(even, odd)


@gluon.jit
def key_levels(word, KEYS: gl.constexpr, DIM: gl.constexpr):
    """Return the levels [KEYS, DIM] of DIM / 8 words of codes per key, with columns as in `column_dims`."""
    lo_1, lo_2, hi_1, hi_2 = gl.inline_asm_elementwise(
        WORD_BY_TABLE, "=&r,=&r,=&r,=&r,r", [word], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )
    x = _pairs(gl.join(gl.join(lo_1, lo_2), gl.join(hi_1, hi_2)))
    x = gl.reshape(x, [KEYS, 4, DIM // 32, 2, 2, 2])  # key, t, i, h, half, e
    return gl.reshape(gl.permute(x, [0, 4, 2, 3, 1, 5]), [KEYS, DIM])


@gluon.jit
def arranged_keys(x, DIM: gl.constexpr):
    """Return keys [4, 16, DIM] as [64, DIM], with columns as in `column_dims`."""
    x = gl.reshape(x, [_N, 2, 4, DIM // 32, 2, 2])  # key, half, t, i, h, e
    return gl.reshape(gl.permute(x, [0, 1, 3, 4, 2, 5]), [_N, DIM])


@gluon.jit
def value_levels(even, odd, KEYS: gl.constexpr, DIM: gl.constexpr):
    """Return the levels [DIM, KEYS] of DIM / 8 words of codes per value, with rows as in `dim_rows`."""
    l0, l1, l2, l3, h0, h1, h2, h3 = gl.inline_asm_elementwise(
        PAIR_BY_CURVE,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [even, odd],
        dtype=(gl.int32,) * 8,
        is_pure=True,
        pack=1,
    )
    low = gl.join(gl.join(l0, l2), gl.join(l1, l3))
    high = gl.join(gl.join(h0, h2), gl.join(h1, h3))
    x = _pairs(gl.join(low, high))
    x = gl.reshape(x, [KEYS // 2, 8, DIM // 16, 2, 2])  # pair of values, g, j, half, e
    return gl.reshape(gl.permute(x, [3, 2, 1, 0, 4]), [DIM, KEYS])


@gluon.jit
def arranged_values(even, odd, DIM: gl.constexpr):
    """Return the values in `even` and `odd` [4, 8, DIM] as [DIM, 64], with rows as in `dim_rows`."""
    x = gl.reshape(gl.join(even, odd), [_N // 2, 2, 8, DIM // 16, 2])  # pair of values, half, g, j, e
    return gl.reshape(gl.permute(x, [1, 3, 2, 0, 4]), [DIM, _N])


@gluon.jit
def weights_operand(weights, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Return weights [64, COLUMNS] in the layout of scores as a bfloat16 operand: transpose 8 x 8 tiles."""
    even, odd = gl.split(gl.reshape(weights, [_N, COLUMNS // 2, 2]))
    x = gl.inline_asm_elementwise(
        "{ .reg .b32 r; cvt.rn.bf16x2.f32 r, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, r; }",
        "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    x = gl.reshape(_pairs(x), [8, 8, COLUMNS // 8, 4, 2])  # now: tile, column, tile, pair of keys, e
    x = gl.reshape(gl.permute(x, [0, 3, 4, 2, 1]), [_N, COLUMNS])
    return gl.convert_layout(x, layout, assert_trivial=True)
