"""Products of a few tokens with a large weight: read the weight once, as fast as memory gives it.

Each program multiplies all tokens by a strip of BLOCK_N weight rows. Where a weight has too few strips to
fill the card, the columns are cut into SPLIT parts: partial sums go to memory, and the last program of a
strip to arrive adds them up in order. The counter that tells it so is an integer: no sum ever depends on who
came first. So a token's bits follow from its own values and from the weight, and do not change with its place
among up to BLOCK_M tokens.

With programmatic dependent launch a program is resident before the kernel in front has ended. Asking for its
weights that early gains nothing: the kernel in front loses what this one wins (benchmarks/log.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton.launch import (
    let_next_start,
    num_multiprocessors,
    overlap,
    start_and_wait,
    wait_for_previous,
)
from blockdraft.kernels.triton.rows import gate_values


@dataclass(frozen=True, slots=True)
class Config:
    """How a product is cut."""

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int


@triton.jit
def widen(stored, like):
    """Stored values in the dtype of `like`; bytes (uint8) hold fp8 numbers, e4m3, whose value is exact.

    Their bits are shifted to where the wider exponent ends; a product then moves the exponent to its place.
    The hardware's conversion runs at a fraction of the speed at which memory delivers, and Ampere has none.
    What is no number, which the check at the start refuses, becomes 480 in bf16.
    """
    if stored.dtype != tl.uint8:
        wide = stored.to(like.dtype)
    elif like.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, part, sign, zero, scale;
            mov.b32 zero, 0x80008000;
            mov.b32 scale, 0x7b807b80;
            mov.b32 sign, 0;
            prmt.b32 low, sign, $2, 0x5040;
            prmt.b32 high, sign, $2, 0x7060;
            shr.b32 part, low, 4;
            and.b32 part, part, 0x07f007f0;
            lop3.b32 low, low, zero, part, 0xea;
            shr.b32 part, high, 4;
            and.b32 part, part, 0x07f007f0;
            lop3.b32 high, high, zero, part, 0xea;
            fma.rn.bf16x2 $0, low, scale, zero;
            fma.rn.bf16x2 $1, high, scale, zero;
            }""",
            "=r,=r,r",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = stored.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    return wide


@triton.jit
def _sum_parts(
    partial, place, size, is_there, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in range(SPLIT):
        total += tl.load(partial + part * size + place, mask=is_there, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _linear(
    x, weight, scale, bias, onto, out, partial, counters, num_tokens,
    num_outputs,  # of the result: half the weight's rows where GATE joins two
    num_inputs, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ONTO: tl.constexpr,
    IS_EVEN: tl.constexpr,  # whole blocks of outputs and, in each split, of inputs
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    strip = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.arange(0, BLOCK_M)
    row = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(num_inputs, BLOCK_K * SPLIT)
    begin = part * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, num_inputs)
    is_row = row < num_outputs
    is_token = token < num_tokens
    first = weight + row.to(tl.int64) * num_inputs
    second = first + tl.cast(num_outputs, tl.int64) * num_inputs
    wait_for_previous(PDL)
    x_row = x + token.to(tl.int64) * stride_x
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin, end, BLOCK_K):
        if IS_EVEN:
            a = tl.load(x_row[:, None] + k + column[None, :], mask=is_token[:, None], other=0.0)
            b = tl.load(first[None, :] + k + column[:, None], eviction_policy="evict_first")
        else:
            is_in = k + column < end
            a = tl.load(
                x_row[:, None] + k + column[None, :], mask=is_token[:, None] & is_in[None, :], other=0.0
            )
            wanted = is_row[None, :] & is_in[:, None]
            b = tl.load(first[None, :] + k + column[:, None], mask=wanted, other=0.0)
        sums = tl.dot(a, widen(b, a), sums, input_precision=PRECISION)
        if GATE != "none":
            if IS_EVEN:
                b = tl.load(second[None, :] + k + column[:, None], eviction_policy="evict_first")
            else:
                b = tl.load(second[None, :] + k + column[:, None], mask=wanted, other=0.0)
            up_sums = tl.dot(a, widen(b, a), up_sums, input_precision=PRECISION)

    is_there = is_token[:, None] & is_row[None, :]
    place = token[:, None] * num_outputs + row[None, :]
    if SPLIT > 1:
        size = num_tokens * num_outputs
        tl.store(partial + part * size + place, sums, mask=is_there)
        if GATE != "none":
            tl.store(partial + (SPLIT + part) * size + place, up_sums, mask=is_there)
        tl.debug_barrier()  # every thread has stored before the counter says so
        arrived = tl.atomic_add(counters + strip, 1, sem="acq_rel", scope="gpu")
        if arrived != SPLIT - 1:
            return
        tl.store(counters + strip, 0)  # for the next product
        sums = _sum_parts(partial, place, size, is_there, SPLIT, BLOCK_M, BLOCK_N)
        if GATE != "none":
            up_sums = _sum_parts(partial + SPLIT * size, place, size, is_there, SPLIT, BLOCK_M, BLOCK_N)
    if HAS_SCALE:
        sums *= tl.load(scale + row, mask=is_row, other=0.0)[None, :]
        if GATE != "none":
            up_sums *= tl.load(scale + num_outputs + row, mask=is_row, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + row, mask=is_row, other=0.0)[None, :]
        if GATE != "none":
            up_sums += tl.load(bias + num_outputs + row, mask=is_row, other=0.0)[None, :]
    kind = out.dtype.element_ty
    if GATE != "none":
        sums = gate_values(sums.to(kind).to(tl.float32), up_sums.to(kind).to(tl.float32), GATE)
    if HAS_ONTO:  # rounded first, as a sum of two tensors is
        sums = sums.to(kind).to(tl.float32) + tl.load(onto + place, mask=is_there, other=0.0)
    tl.store(out + place, sums.to(kind), mask=is_there)


@functools.cache
def counters(device: torch.device) -> Tensor:
    """How many parts of each strip have arrived; every product leaves zeros behind."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    onto: Tensor | None = None,
    gate: str = "none",
    config: Config | None = None,
) -> Tensor:
    """x [M, K] times weight [N, K], which has one `scale` per row where it is fp8 or int8.

    `onto` [M, N] is added. `gate` "silu" or "gelu": the halves of the result are joined, [M, N / 2].
    """
    assert x.stride(1) == 1, "tokens without gaps"
    assert weight.is_contiguous(), "rows without gaps"
    onto = None if onto is None else onto.contiguous()
    num_tokens, num_inputs = x.shape
    num_rows = weight.shape[0]
    num_outputs = num_rows if gate == "none" else num_rows // 2
    device = x.device
    if config is None:
        config = choose(num_tokens, num_outputs, num_inputs, weight.dtype.itemsize, gate != "none", device)
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=device)
    num_parts = config.split * (1 if gate == "none" else 2)
    partial = out
    if config.split > 1:
        partial = torch.empty((num_parts, num_tokens, num_outputs), dtype=torch.float32, device=device)
    is_even = num_outputs % config.block_n == 0 and num_inputs % (config.block_k * config.split) == 0
    if weight.dtype == torch.float8_e4m3fn:
        weight = weight.view(torch.uint8)
    _linear[(triton.cdiv(num_outputs, config.block_n), config.split)](
        x,
        weight,
        scale if scale is not None else weight,
        bias if bias is not None else weight,
        onto if onto is not None else x,
        out,
        partial,
        counters(device),
        num_tokens,
        num_outputs,
        num_inputs,
        x.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(num_tokens)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT=config.split,
        GATE=gate,
        HAS_SCALE=scale is not None,
        HAS_BIAS=bias is not None,
        HAS_ONTO=onto is not None,
        IS_EVEN=is_even,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **overlap(device),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


@triton.jit
def _round_tokens(x, out, scales, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in = column < size
    value = tl.load(x + token * size + column, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / 448.0, 1e-12)  # 448: the largest e4m3
    tl.store(out + token * size + column, (value / scale).to(out.dtype.element_ty), mask=is_in)
    tl.store(scales + token, scale)


def can_read(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether the card's kernels widen such values to `dtype`; its own fp8 came with Ada and Hopper."""
    if values.dtype != torch.float8_e4m3fn or not values.is_cuda or dtype == torch.bfloat16:
        return True
    return has_fp8(values.device)


@functools.cache
def has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def has_fp8_product(x: Tensor, values: Tensor) -> bool:
    """Whether the card multiplies these natively; cuBLAS wants sides that are multiples of 16."""
    is_fp8 = values.dtype == torch.float8_e4m3fn and x.dtype == torch.bfloat16
    return is_fp8 and x.is_cuda and has_fp8(x.device) and not any(side % 16 for side in values.shape)


def fp8_product(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """x [M, K] rounded to fp8, times values [N, K] with a scale [N] per row."""
    x = x.contiguous()
    num_tokens, size = x.shape
    rounded = torch.empty_like(x, dtype=values.dtype)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    _round_tokens[(num_tokens,)](
        x,
        rounded,
        scales,
        size,
        BLOCK=triton.next_power_of_2(size),
        **overlap(x.device),
        num_warps=8,
    )
    return torch._scaled_mm(rounded, values.T, scale_a=scales, scale_b=scale.view(1, -1), out_dtype=x.dtype)


@functools.cache
def choose(
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    element_bytes: int,
    is_gated: bool,
    device: torch.device,
) -> Config:
    """Measured on an H200 at the shapes of Qwen3-8B and SmolLM2-135M (benchmarks/log.md).

    It does not depend on num_tokens: a token's bits are the same in any batch that this kernel takes.
    """
    multiprocessors = num_multiprocessors(device)
    if num_inputs * num_outputs < 1 << 22:  # a few megabytes: latency, not bandwidth
        block_k = 128 if num_inputs > 1024 else 64
        block_n = 32 if is_gated else 16
        split = _split(num_inputs, block_k, 1 if is_gated else num_inputs // 512)
        return Config(block_n, block_k, split, warps=4 if is_gated else 2, stages=6 if block_k == 64 else 4)
    is_wide = element_bytes > 1
    narrow_k = 128 if num_inputs % 128 == 0 else 64
    if is_gated:
        return Config(32, narrow_k, 1, warps=4, stages=4 if is_wide else 6)
    if num_outputs >= 128 * 4 * multiprocessors:
        return Config(128, narrow_k, 1, 4, 3) if is_wide else Config(64, narrow_k, 1, 4, 4)
    has_long_steps = num_inputs % 256 == 0 and (num_inputs >= 8192 or not is_wide)
    block_k = 256 if has_long_steps else narrow_k
    block_n = 64 if is_wide or num_outputs > 32 * 160 else 32
    strips = triton.cdiv(num_outputs, block_n)
    if strips >= multiprocessors and is_wide:  # up to two programs to a multiprocessor, and no sums to add
        return Config(block_n, narrow_k, 1, warps=4, stages=4)
    wanted = triton.cdiv(19 * multiprocessors, 10 * strips)
    split = _split(num_inputs, block_k, triton.next_power_of_2(wanted))
    stages = 6 if block_k < 256 or block_n < 64 else 3 if is_wide else 4
    return Config(block_n, block_k, split, warps=4, stages=stages)


def _split(num_inputs: int, block_k: int, wanted: int) -> int:
    """The first number of equal parts from `wanted` on that whole blocks fill; `wanted` where none does."""
    fitting = [n for n in range(max(wanted, 1), 2 * wanted + 1) if num_inputs % (block_k * n) == 0]
    return fitting[0] if fitting else max(wanted, 1)
