"""Convolutions over the columns of a block on a CUDA device; see `kernels/block_conv.py` for the contract.

In `conv_before`, a program has some groups of channels of a tile of tokens. It computes the terms that the
tokens add to both convolution kernels of these groups, by a product that adds columns in order. Then it
convolves the channels.
In `conv_after`, a program has all channels of a token, since a norm follows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton.launch import let_next_start, overlap, wait_for_previous

_STRIP = 2  # groups per program: few, so that many loads of the weight are in flight
_AHEAD_BYTES = 1 << 16  # of tokens and weights in flight per program; all GPUs have this much memory
_FEW, _SOME = 16, 64  # tokens of a tile


@triton.jit(do_not_specialize=["num_tokens", "num_columns"])
def _conv_before(
    x, base, weight, out, deltas, num_tokens, num_columns, E, GROUPS, GROUP: tl.constexpr, TAPS: tl.constexpr,
    STRIP: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_token = (token < num_tokens)[:, None]
    output = tl.arange(0, OUTPUTS)
    group = tl.program_id(0) * STRIP + output % STRIP
    row = output // STRIP * GROUPS + group  # row of the weight, ordered by kernel, tap and group
    is_row = (output < 2 * TAPS * STRIP) & (group < GROUPS)
    place = tl.arange(0, CHANNELS)
    channel = tl.program_id(0) * (STRIP * GROUP) + place
    is_channel = (place < STRIP * GROUP) & (channel < E)
    wait_for_previous(PDL)
    sums = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for first in range(0, E, DEPTH):
        column = first + tl.arange(0, DEPTH)
        is_in = column < E
        a = tl.load(x + token[:, None] * E + column[None, :], mask=is_token & is_in[None, :], other=0.0)
        wanted = is_row[None, :] & is_in[:, None]
        b = tl.load(weight + row[None, :] * E + column[:, None], mask=wanted, other=0.0)
        sums = tl.dot(a, b.to(a.dtype), sums, input_precision=PRECISION)
    added = sums.to(deltas.dtype.element_ty)
    tl.store(deltas + token[:, None] * (2 * TAPS * GROUPS) + row[None, :], added, is_token & is_row[None, :])
    y = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        is_own = output[:, None] == (tap * STRIP + place // GROUP)[None, :]
        own = tl.dot(added, is_own.to(added.dtype), input_precision="ieee")  # spread to channels, exactly
        learnt = tl.load(base + tap * E + channel, mask=is_channel, other=0.0).to(tl.float32)
        seen = is_token & (token % num_columns >= tap)[:, None] & is_channel[None, :]
        before = tl.load(x + (token - tap)[:, None] * E + channel[None, :], mask=seen, other=0.0)
        y += (learnt[None, :] + own) * before.to(tl.float32)
    at = token[:, None] * E + channel[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=is_token & is_channel[None, :])


@triton.jit(do_not_specialize=["num_columns"])
def _conv_after(
    x, base, deltas, onto, weight, out, normed, delta_stride, num_columns, E, GROUPS, eps,
    GROUP: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    is_channel = channel < E
    scale = tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    column = token % num_columns
    y = tl.zeros((CHANNELS,), tl.float32)
    for tap in tl.static_range(TAPS):
        learnt = tl.load(base + tap * E + channel, mask=is_channel, other=0.0).to(tl.float32)
        own = deltas + token * delta_stride + tap * GROUPS + channel // GROUP
        kernel = learnt + tl.load(own, mask=is_channel, other=0.0).to(tl.float32)
        seen = is_channel & (column >= tap)
        y += kernel * tl.load(x + (token - tap) * E + channel, mask=seen, other=0.0).to(tl.float32)
    place = token * E + channel
    stream = tl.load(onto + place, mask=is_channel, other=0.0)
    stream = (stream.to(tl.float32) + y.to(stream.dtype).to(tl.float32)).to(
        stream.dtype
    )  # y is rounded first
    tl.store(out + place, stream, mask=is_channel)
    value = stream.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / E + eps)
    tl.store(normed + place, (value * scale).to(normed.dtype.element_ty), mask=is_channel)


def conv_before(x: Tensor, base: Tensor, projection: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Implement `block_conv.reference_conv_before`."""
    (num_tokens, size), (taps, _) = x.shape, base.shape
    groups = len(projection) // (2 * taps)
    group = size // groups
    x, out = x.contiguous(), torch.empty_like(x)
    deltas = x.new_empty(num_tokens, 2, taps, groups)
    tokens = _FEW if num_tokens <= _FEW else _SOME
    depth = 256 if size >= 1024 and num_tokens <= _FEW else 64
    outputs = max(16, triton.next_power_of_2(2 * taps * _STRIP))
    num_ahead = _AHEAD_BYTES // ((tokens + outputs) * depth * x.element_size())
    _conv_before[(triton.cdiv(groups, _STRIP), triton.cdiv(num_tokens, tokens))](
        *(x, base.contiguous(), projection, out, deltas, num_tokens, num_columns, size, groups),
        GROUP=group, TAPS=taps, STRIP=_STRIP, TOKENS=tokens, OUTPUTS=outputs,
        CHANNELS=max(16, triton.next_power_of_2(_STRIP * group)), DEPTH=depth,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4,
        num_stages=min(num_ahead, triton.cdiv(size, depth) + 1), **overlap(x.device),
        enable_fp_fusion=False,  # as the reference rounds
    )  # fmt: skip
    return out, deltas


def conv_after(
    x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Implement `block_conv.reference_conv_after`; the last two dimensions of deltas are contiguous."""
    size, (_, taps, groups) = x.shape[1], deltas.shape
    assert deltas.stride()[1:] == (groups, 1)
    assert onto.is_contiguous()
    channels = triton.next_power_of_2(size)
    x, out, normed = x.contiguous(), torch.empty_like(onto), torch.empty_like(onto)
    _conv_after[(len(x),)](
        *(x, base.contiguous(), deltas, onto, weight, out, normed),
        *(deltas.stride(0), num_columns, size, groups, eps),
        GROUP=size // groups, TAPS=taps, CHANNELS=channels, num_warps=max(1, min(16, channels // 256)),
        enable_fp_fusion=False,  # as the reference rounds
        **overlap(x.device),
    )  # fmt: skip
    return out, normed
