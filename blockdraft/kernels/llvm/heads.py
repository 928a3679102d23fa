"""Writes heads to the cache on a CPU: finds tokens' slots; norm, rotation and copy are one pass.

A thread takes a token. The bits are those of `pointwise.rms_norm`, then `pointwise.rotate`, then a copy,
then, with compression, `kv_codec.rotate`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from blockdraft.kernels.heads import HeadNorms, Slots
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken
from blockdraft.kernels.llvm.copies import copy
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.kv_codec import LANES, hadamard_head, sign_head
from blockdraft.kernels.llvm.language import Int, Longs, Real, Reals, Type, load, store
from blockdraft.kernels.llvm.pointwise import SERIAL_ELEMENTS, normalise, rotate_head
from blockdraft.kernels.pointwise import Angles


def locate(
    page_table: Tensor, rows: Tensor, starts: Tensor, offsets: Tensor, *, num_tokens: int, page_size: int
) -> tuple[Tensor, Tensor]:
    given = (page_table, rows, starts, offsets)
    assert all(one.dtype == torch.int64 and one.stride(-1) == 1 for one in given)
    positions, slots = (starts.new_empty(num_tokens) for _ in range(2))
    is_small = num_tokens < SERIAL_ELEMENTS
    _LOCATE(len(rows), page_size, page_table.stride(0), *given, positions, slots, is_small=is_small)
    return positions, slots


class HeadKernels:
    """The kernel for kernels/heads.py in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        real = REALS[dtype]
        self._write = functools.cache(functools.partial(Jit, norm_rope_write, real=real))

    def norm_rope_write(
        self, q: Tensor | None, k: Tensor, v: Tensor, norms: HeadNorms | None, angles: Angles, slots: Slots
    ) -> Tensor | None:
        num_tokens, groups, dim = k.shape
        k, v = _whole_heads(k), _whole_heads(v)
        given = k.new_empty(num_tokens, 0, dim) if q is None else _whole_heads(q)
        heads = given.shape[1]
        out = k.new_empty(num_tokens, heads, dim)
        keys, values, slot_ids = slots[:3]
        cos, sin = angles
        assert cos.shape == sin.shape == (num_tokens, 1, cos.shape[-1])
        assert keys.shape == values.shape == (groups, keys.shape[1], dim)
        assert 2 * cos.shape[-1] <= dim
        assert all(one.is_contiguous() for one in (keys, values, slot_ids, cos, sin))
        assert all(one.dtype == k.dtype for one in (given, v, keys, values, cos, sin))
        assert slot_ids.shape[0] == num_tokens
        assert slot_ids.dtype == torch.int64
        weights = (None, None) if norms is None else norms[:2]
        assert all(one is None or (one.dtype == k.dtype and one.is_contiguous()) for one in weights)
        signs, centre = _rotation_of(slots, k.dtype)
        run = self._write(has_norms=norms is not None, rotated=0 if signs is None else dim)
        run(
            num_tokens, heads, groups, dim, cos.shape[-1], keys.shape[1],
            1 if slot_ids.dim() == 1 else slot_ids.shape[1],
            *given.stride()[:2], *k.stride()[:2], *v.stride()[:2], given, k, v, out, keys, values, slot_ids,
            cos, sin, *weights, 0.0 if norms is None else norms.eps, signs, centre,
            is_small=num_tokens * (heads + 2 * groups) * dim < SERIAL_ELEMENTS,
        )  # fmt: skip
        return None if q is None else out


def _rotation_of(slots: Slots, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return the signs [D] and centre [G, D] of the Hadamard rotation; (None, None) without one."""
    if slots.rotation is None:
        return None, None
    signs, centre = (one.to(dtype).contiguous() for one in slots.rotation)
    assert signs.shape == slots.keys.shape[2:]
    assert centre.shape == (slots.keys.shape[0], slots.keys.shape[2])
    return signs, centre


def _whole_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@kernel
def find_slots(
    num_rows: Int, page_size: Int, num_pages: Int, page_table: Longs, rows: Longs, starts: Longs,
    offsets: Longs, positions: Longs, slots: Longs,
) -> None:  # fmt: skip
    """Find positions and slots of tokens; tokens [offsets[row], offsets[row + 1]) begin at starts[row]."""
    for row in taken(num_rows):
        pages = page_table + rows[row] * num_pages
        first = offsets[row]
        for token in range(first, offsets[row + 1]):
            position = starts[row] + token - first
            positions[token] = position
            slots[token] = pages[position // page_size] * page_size + position % page_size


@kernel
def norm_rope_write(
    num_tokens: Int, heads: Int, groups: Int, dim: Int, size: Int, num_slots: Int, each: Int,
    q_stride: Int, q_head: Int, k_stride: Int, k_head: Int, v_stride: Int, v_head: Int,
    q: Reals, k: Reals, v: Reals, out: Reals, keys: Reals, values: Reals, slot_ids: Longs,
    cos: Reals, sin: Reals, q_weight: Reals, k_weight: Reals, eps: Real, signs: Reals, centre: Reals,
    *, real: Type, has_norms: bool, rotated: int,
) -> None:  # fmt: skip
    """Write queries to `out`, keys and values to the token's slots, `each` of them in `slot_ids`.

    `.._head` are strides of heads.
    `rotated` is 0, or the head size: then a Hadamard rotation follows in place, and `centre` is subtracted
    from keys.
    """
    for token in taken(num_tokens):
        token_cos, token_sin = cos + token * size, sin + token * size
        for head in range(heads):
            source, target = q + token * q_stride + head * q_head, out + (token * heads + head) * dim
            norm_and_rope(
                source, target, q_weight, token_cos, token_sin, dim, size, eps, real=real, has_norms=has_norms
            )
            if rotated:
                rotate_signed(target, signs, rotated)
        for head in range(groups):
            slot = (head * num_slots + slot_ids[token * each]) * dim
            source, target = k + token * k_stride + head * k_head, keys + slot
            norm_and_rope(
                source, target, k_weight, token_cos, token_sin, dim, size, eps, real=real, has_norms=has_norms
            )
            copy(v + token * v_stride + head * v_head, values + slot, dim)
            if rotated:
                rotate_signed(target, signs, rotated)
                rotate_signed(values + slot, signs, rotated)
                for i in range(0, rotated, LANES):
                    less = load(target + i, LANES) - load(centre + head * rotated + i, LANES)
                    store(target + i, less)
            for place in range(1, each):
                other = (head * num_slots + slot_ids[token * each + place]) * dim
                if other != slot:
                    copy(target, keys + other, dim)
                    copy(values + slot, values + other, dim)


@inlined
def norm_and_rope(
    x: Reals, y: Reals, weight: Reals, cos: Reals, sin: Reals, dim: Int, size: Int, eps: Real,
    *, real: Type, has_norms: bool,
) -> None:  # fmt: skip
    """Normalise one head if `has_norms`, and rotate its first 2 * size values."""
    if has_norms:
        normalise(x, y, weight, dim, eps, real)
        rotate_head(y, y, cos, sin, size)
    else:
        rotate_head(x, y, cos, sin, size)
        copy(x + 2 * size, y + 2 * size, dim - 2 * size)


@inlined
def rotate_signed(row: Reals, signs: Reals, dim: int) -> None:
    """Do the Hadamard rotation `kv_codec.rotate` in place."""
    sign_head(row, signs, dim)
    hadamard_head(row, dim)


_LOCATE = Jit(find_slots)
