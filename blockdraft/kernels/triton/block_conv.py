"""Convolutions over the columns of a block on a CUDA device: one program per token and some channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton.launch import overlap, start_and_wait

_CHANNELS = 1024  # of a program; arbitrary


@triton.jit(do_not_specialize=["num_columns"])
def _convolve(
    x, base, deltas, onto, out, delta_stride, num_columns, E, GROUPS, GROUP: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, HAS_ONTO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < E
    column = token % num_columns
    y = tl.zeros([CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        learnt = tl.load(base + tap * E + channel, mask=is_channel, other=0.0).to(tl.float32)
        place = deltas + token * delta_stride + tap * GROUPS + channel // GROUP
        kernel = learnt + tl.load(place, mask=is_channel, other=0.0).to(tl.float32)
        seen = is_channel & (column >= tap)
        y += kernel * tl.load(x + (token - tap) * E + channel, mask=seen, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if HAS_ONTO:
        stream = tl.load(onto + token * E + channel, mask=is_channel, other=0.0)
        y = (stream.to(tl.float32) + y.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + token * E + channel, y, mask=is_channel)


def block_conv(
    x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor | None = None
) -> Tensor:
    """`block_conv.reference_block_conv`; the last two dimensions of deltas are contiguous."""
    x, base = x.contiguous(), base.contiguous()
    num_tokens, size = x.shape
    _, taps, num_groups = deltas.shape
    assert deltas.stride()[1:] == (num_groups, 1)
    assert onto is None or onto.is_contiguous()
    out = torch.empty_like(x)
    _convolve[(num_tokens, triton.cdiv(size, _CHANNELS))](
        x,
        base,
        deltas,
        out if onto is None else onto,
        out,
        deltas.stride(0),
        num_columns,
        size,
        num_groups,
        GROUP=size // num_groups,
        TAPS=taps,
        CHANNELS=_CHANNELS,
        HAS_ONTO=onto is not None,
        **overlap(x.device),
        num_warps=4,
        enable_fp_fusion=False,  # as the reference rounds
    )
    return out
