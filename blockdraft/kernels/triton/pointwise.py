"""Operations on single tokens on a CUDA device: norms, activations, and writes of heads to the cache.

Sums over a token's values are one reduction of fixed shape, so a token's bits do not depend on other tokens.
Values are computed in float32 and rounded once; the references round after each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton.hadamard import hadamard_blocks
from blockdraft.kernels.triton.launch import let_next_start, overlap, start_and_wait, wait_for_previous

if TYPE_CHECKING:
    from blockdraft.kernels.heads import HeadNorms, Slots
    from blockdraft.kernels.pointwise import Angles


@triton.jit
def _rms_norm(
    x, weight, out, stride, size, eps,
    BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in = column < size
    if HAS_WEIGHT:
        scale = tl.load(weight + column, mask=is_in, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + row * stride + column, mask=is_in, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    if HAS_WEIGHT:
        value *= scale
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=is_in)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Implement `pointwise.reference_rms_norm` for x [..., E]."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm[(flat.shape[0],)](
        flat, weight if weight is not None else flat, out, flat.stride(0), size, eps,
        BLOCK=block, HAS_WEIGHT=weight is not None, **overlap(x.device),
        num_warps=norm_warps(block),
    )  # fmt: skip
    return out


def norm_warps(block: int) -> int:
    """Return the warps of a program that normalises `block` values; the bits depend on them."""
    return max(1, min(16, block // 512))


@triton.jit
def gate_values(gate, up, GATE: tl.constexpr):
    """Return silu(gate) * up or gelu(gate) * up, with one exponential."""
    if GATE == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner)) * up  # (1 + tanh(z)) / 2 is sigmoid(2 z)


@triton.jit
def _gate_mul(x, out, stride, size, GATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < size
    gate = tl.load(x + row * stride + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + size + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, gate_values(gate, up, GATE).to(out.dtype.element_ty), mask=is_in)


def gate_mul(gate_up: Tensor, gate: str) -> Tensor:
    """Implement `pointwise.reference_gate_mul` for gate_up [..., 2 I]."""
    size = gate_up.shape[-1] // 2
    flat = gate_up.reshape(-1, 2 * size).contiguous()
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(4096, triton.next_power_of_2(size))
    _gate_mul[(flat.shape[0], triton.cdiv(size, block))](
        flat, out, flat.stride(0), size, GATE=gate, BLOCK=block, num_warps=8, **overlap(gate_up.device)
    )
    return out


@triton.jit
def _gate_heads(x, gate, out, size, stride, head_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    is_in = d < size
    place = (token * tl.num_programs(1) + head) * size + d
    value = tl.load(x + place, mask=is_in, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * stride + head * head_stride + d, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + place, (value / (1.0 + tl.exp(-opened))).to(out.dtype.element_ty), mask=is_in)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """Implement `heads.reference_gate_heads`; x is contiguous, and so is each head of gate."""
    num_tokens, num_heads, size = x.shape
    x = x.contiguous()
    assert gate.stride(2) == 1, "a head without gaps"
    out = torch.empty_like(x)
    _gate_heads[(num_tokens, num_heads)](
        x, gate, out, size, gate.stride(0), gate.stride(1),
        BLOCK=triton.next_power_of_2(size), **overlap(x.device), num_warps=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _locate(
    page_table, rows, starts, offsets, positions, slots, num_pages, page_size, num_rows, num_tokens,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = token < num_tokens
    # A token's row is the number of rows that end at or before it.
    index = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_rows, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        end = tl.load(offsets + 1 + row, mask=row < num_rows, other=2**62)
        index += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), axis=1)
    is_in &= index < num_rows
    position = tl.load(starts + index, mask=is_in, other=0) + token
    position -= tl.load(offsets + index, mask=is_in, other=0)
    row = tl.load(rows + index, mask=is_in, other=0)
    page = tl.load(page_table + row * num_pages + position // page_size, mask=is_in, other=0)
    tl.store(positions + token, position, mask=is_in)
    tl.store(slots + token, page * page_size + position % page_size, mask=is_in)


def locate(
    page_table: Tensor, rows: Tensor, starts: Tensor, offsets: Tensor, *, num_tokens: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Return the position and the slot [N] of each token in the stream; see `attention.Blocks`."""
    positions = torch.empty(num_tokens, dtype=torch.int64, device=rows.device)
    slots = torch.empty_like(positions)
    _locate[(triton.cdiv(num_tokens, 128),)](
        page_table, rows, starts, offsets, positions, slots, page_table.shape[1], page_size, len(rows),
        num_tokens,
        BLOCK=128, BLOCK_R=32, **overlap(rows.device), num_warps=4,
    )  # fmt: skip
    return positions, slots


@triton.jit
def _norm_rope(
    source,  # the head's first value, one per head of the tile
    is_head, weight, cos, sin, size,
    num_rotated,  # R, the values of a head with rotary positions
    eps,
    BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Return heads [.., D], normalised and with rotary positions applied."""
    d = tl.arange(0, BLOCK_D)
    is_in = is_head[:, None] & (d < size)[None, :]
    value = tl.load(source[:, None] + d[None, :], mask=is_in, other=0.0).to(tl.float32)
    half = num_rotated // 2
    is_rotated = d < num_rotated
    other = tl.where(d < half, d + half, d - half)
    partner = tl.load(source[:, None] + other[None, :], mask=is_in & is_rotated[None, :], other=0.0)
    partner = partner.to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(value * value, axis=1) / size + eps)[:, None]
        value *= factor * tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)[None, :]
        partner *= factor * tl.load(weight + other, mask=is_rotated, other=0.0).to(tl.float32)[None, :]
    angle = tl.where(d < half, d, d - half)
    c = tl.load(cos + angle, mask=is_rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)
    s = tl.where(d < half, -s, s)
    return value * c[None, :] + partner * s[None, :]


@triton.jit
def _norm_rope_write(
    q, k, v, q_weight, k_weight, cos, sin, q_out, keys, values, slots, signs, centre, num_heads, num_kv_heads,
    num_slots, size, num_rotated, eps, q_stride, q_head_stride, k_stride, k_head_stride, v_stride,
    v_head_stride, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr, HAS_Q: tl.constexpr,
    ROTATED: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do `norm_rope_write`; ROTATED is the head size if heads are rotated for compression, otherwise 0.

    A token has SLOTS slots.
    """
    start_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    cos += token * (num_rotated // 2)
    sin += token * (num_rotated // 2)
    q_tiles = tl.cdiv(num_heads, BLOCK_H) if HAS_Q else 0
    kv_tiles = tl.cdiv(num_kv_heads, BLOCK_H)
    if tile < q_tiles:
        head = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = head < num_heads
        source = q + token * q_stride + head * q_head_stride
        result = _norm_rope(source, is_head, q_weight, cos, sin, size, num_rotated, eps, BLOCK_D, HAS_NORM)
        if ROTATED > 0:
            sign = tl.load(signs + d, mask=d < size, other=0.0)
            result = hadamard_blocks(result * sign[None, :], ROTATED, BLOCK_D)
        place = (token * num_heads + head[:, None]) * size + d[None, :]
        tl.store(
            q_out + place, result.to(q_out.dtype.element_ty), mask=is_head[:, None] & (d < size)[None, :]
        )
    else:
        is_key = tile < q_tiles + kv_tiles
        head = (tile - q_tiles - tl.where(is_key, 0, kv_tiles)) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = head < num_kv_heads
        slots += token * SLOTS
        slot = tl.load(slots)
        place = (head.to(tl.int64)[:, None] * num_slots + slot) * size + d[None, :]
        is_in = is_head[:, None] & (d < size)[None, :]
        if is_key:
            source = k + token * k_stride + head * k_head_stride
            result = _norm_rope(
                source, is_head, k_weight, cos, sin, size, num_rotated, eps, BLOCK_D, HAS_NORM
            )
            if ROTATED > 0:
                sign = tl.load(signs + d, mask=d < size, other=0.0)
                result = hadamard_blocks(result * sign[None, :], ROTATED, BLOCK_D)
                result -= tl.load(centre + head[:, None] * size + d[None, :], mask=is_in, other=0.0)
            stored, written = keys, result.to(keys.dtype.element_ty)
        else:
            source = v + token * v_stride + head * v_head_stride
            value = tl.load(source[:, None] + d[None, :], mask=is_in, other=0.0)
            if ROTATED > 0:
                sign = tl.load(signs + d, mask=d < size, other=0.0)
                value = hadamard_blocks(value.to(tl.float32) * sign[None, :], ROTATED, BLOCK_D)
            stored, written = values, value.to(values.dtype.element_ty)
        tl.store(stored + place, written, mask=is_in)
        for i in tl.range(1, SLOTS, loop_unroll_factor=1):
            further = (tl.load(slots + i) - slot) * size
            tl.store(stored + further + place, written, mask=is_in & (further != 0))


def norm_rope_write(
    q: Tensor | None, k: Tensor, v: Tensor, norms: HeadNorms | None, angles: Angles, slots: Slots
) -> Tensor | None:
    """Normalise and rotate q [N, H, D] and k; write k and v [N, G, D] to their slots; return q."""
    num_tokens, num_kv_heads, size = k.shape
    heads = [part for part in (q, k, v) if part is not None]
    assert all(part.stride(2) == 1 for part in heads), "heads without gaps"
    assert slots.slot_ids.is_contiguous()
    cos, sin = (part.contiguous() for part in angles)
    num_heads = 0 if q is None else q.shape[1]
    q_out = None if q is None else torch.empty((num_tokens, num_heads, size), dtype=q.dtype, device=q.device)
    block_h = min(4, triton.next_power_of_2(num_kv_heads))  # for any number of tokens, as bits depend on it
    tiles = triton.cdiv(num_heads, block_h) + 2 * triton.cdiv(num_kv_heads, block_h)
    given = k if q is None else q
    rotation = slots.rotation
    _norm_rope_write[(num_tokens, tiles)](
        given, k, v, k if norms is None else norms.q, k if norms is None else norms.k, cos, sin,
        q_out if q_out is not None else k, slots.keys, slots.values, slots.slot_ids,
        k if rotation is None else rotation.signs.float().contiguous(),
        k if rotation is None else rotation.centre.float().contiguous(), num_heads, num_kv_heads,
        slots.keys.shape[1], size, 2 * cos.shape[-1], 0.0 if norms is None else norms.eps, given.stride(0),
        given.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        BLOCK_H=block_h, BLOCK_D=triton.next_power_of_2(size), HAS_NORM=norms is not None,
        HAS_Q=q is not None, ROTATED=0 if rotation is None else size,
        SLOTS=1 if slots.slot_ids.dim() == 1 else slots.slot_ids.shape[1], **overlap(k.device), num_warps=2,
    )  # fmt: skip
    return q_out
