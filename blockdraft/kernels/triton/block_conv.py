"""Convolutions over the columns of a block on a CUDA device: one program per token and some channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton.launch import let_next_start, overlap, start_and_wait, wait_for_previous

_CHANNELS = 1024  # of a program; arbitrary


@triton.jit
def _convolved(
    x, base, deltas, token, channel, is_channel, delta_stride, num_columns, E, GROUPS,
    GROUP: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """What a token's channels become, in float32."""
    column = token % num_columns
    y = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        learnt = tl.load(base + tap * E + channel, mask=is_channel, other=0.0).to(tl.float32)
        place = deltas + token * delta_stride + tap * GROUPS + channel // GROUP
        kernel = learnt + tl.load(place, mask=is_channel, other=0.0).to(tl.float32)
        seen = is_channel & (column >= tap)
        y += kernel * tl.load(x + (token - tap) * E + channel, mask=seen, other=0.0).to(tl.float32)
    return y


@triton.jit
def _added(onto, place, is_channel, y):
    """y, rounded, on the stream."""
    stream = tl.load(onto + place, mask=is_channel, other=0.0)
    return (stream.to(tl.float32) + y.to(stream.dtype).to(tl.float32)).to(stream.dtype)


@triton.jit(do_not_specialize=["num_columns"])
def _convolve(
    x, base, deltas, onto, out, delta_stride, num_columns, E, GROUPS, GROUP: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, HAS_ONTO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < E
    y = _convolved(
        x, base, deltas, token, channel, is_channel, delta_stride, num_columns, E, GROUPS, GROUP, TAPS
    )
    place = token * E + channel
    if HAS_ONTO:
        tl.store(out + place, _added(onto, place, is_channel, y), mask=is_channel)
    else:
        tl.store(out + place, y.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["num_columns"])
def _convolve_and_norm(
    x, base, deltas, onto, weight, out, normed, delta_stride, num_columns, E, GROUPS, eps,
    GROUP: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    is_channel = channel < E
    scale = tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    y = _convolved(
        x, base, deltas, token, channel, is_channel, delta_stride, num_columns, E, GROUPS, GROUP, TAPS
    )
    place = token * E + channel
    stream = _added(onto, place, is_channel, y)
    tl.store(out + place, stream, mask=is_channel)
    value = stream.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / E + eps)
    tl.store(normed + place, (value * scale).to(normed.dtype.element_ty), mask=is_channel)


def block_conv(
    x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor | None = None
) -> Tensor:
    """`block_conv.reference_block_conv`; the last two dimensions of deltas are contiguous."""
    x, base, options = _checked(x, base, deltas, onto)
    size = x.shape[1]
    out = torch.empty_like(x)
    _convolve[(len(x), triton.cdiv(size, _CHANNELS))](
        *(x, base, deltas, out if onto is None else onto, out),
        *(deltas.stride(0), num_columns, size, deltas.shape[2]),
        CHANNELS=_CHANNELS,
        HAS_ONTO=onto is not None,
        num_warps=4,
        **options,
    )
    return out


def block_conv_norm(
    x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The same onto the stream, and that stream / rms * weight: a program has all channels of a token."""
    x, base, options = _checked(x, base, deltas, onto)
    size = x.shape[1]
    channels = triton.next_power_of_2(size)
    out, normed = torch.empty_like(x), torch.empty_like(x)
    _convolve_and_norm[(len(x),)](
        *(x, base, deltas, onto, weight, out, normed),
        *(deltas.stride(0), num_columns, size, deltas.shape[2], eps),
        CHANNELS=channels,
        num_warps=max(1, min(16, channels // 256)),
        **options,
    )
    return out, normed


def _checked(
    x: Tensor, base: Tensor, deltas: Tensor, onto: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, int | bool]]:
    """x and base without gaps, and what both kernels are launched with."""
    _, taps, num_groups = deltas.shape
    assert deltas.stride()[1:] == (num_groups, 1)
    assert onto is None or onto.is_contiguous()
    options = {"GROUP": x.shape[1] // num_groups, "TAPS": taps, **overlap(x.device)}
    return x.contiguous(), base.contiguous(), options | {"enable_fp_fusion": False}  # as the reference rounds
