"""Products of a few tokens with a large weight, which read the weight once, at the speed of memory.

Each program multiplies a tile of tokens by a strip of BLOCK_N weight rows, taking columns in order. On Hopper
a token's bits then depend only on its own values and the weight: a tensor core adds sixteen products to the
sum at once, in the same way for every shape of tile, and so does cuBLAS if it does not split sums.

If a weight has too few strips to fill the GPU, `is_fast` allows splitting the columns into SPLIT parts. The
last program of a tile to finish adds the partial sums in order, so the result does not depend on the order
in which programs finish. Weights with the rows of a router are split in any case; see `triton.narrow`.

With programmatic dependent launch, a program is resident before the previous kernel has ended. Loading
weights that early gains nothing: the previous kernel loses the time that this kernel gains
(benchmarks/log.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.linear import MAX_FEW, has_fp8
from blockdraft.kernels.triton.launch import (
    let_next_start,
    num_multiprocessors,
    overlap,
    shared_memory,
    start_and_wait,
    wait_for_previous,
)
from blockdraft.kernels.triton.pointwise import gate_values

MAX_SOME = 64  # tokens of a tile; cuBLAS multiplies more tokens by an unquantised weight
MANY = 128  # tokens of a tile if there are more than MAX_SOME
MANY_ROWS = 6144  # rows of a large weight
MAX_TILES = 1 << 16  # of a product with split sums


@dataclass(frozen=True, slots=True)
class Config:
    """The division of a product."""

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int


# Divisions of weights with few rows, whose programs are small and resident before the previous kernel has
# ended: tokens of a tile, most rows, least columns. Measured on an H200 (benchmarks/log.md).
_FEW_STRIPS = (
    (MAX_FEW, 3072, 12288, Config(16, 512, 1, warps=2, stages=3)),
    (MAX_FEW, 3072, 4096, Config(8, 512, 1, warps=1, stages=3)),
    (MAX_FEW, 1 << 30, 4096, Config(16, 256, 1, warps=2, stages=5)),
    (MAX_FEW, 1 << 30, 0, Config(16, 512, 1, warps=2, stages=3)),
    (MAX_SOME, 2112, 8192, Config(16, 256, 1, warps=4, stages=4)),
    (MAX_SOME, 2112, 0, Config(16, 128, 1, warps=4, stages=6)),
    (MAX_SOME, 3072, 0, Config(32, 128, 1, warps=4, stages=5)),
    (MAX_SOME, 1 << 30, 0, Config(16, 256, 1, warps=4, stages=4)),
)


@triton.jit
def widen(stored, like):
    """Convert stored values to the dtype of `like`; bytes (uint8) are fp8 (e4m3) and converted exactly.

    The bits of fp8 are shifted into the wider format, and a multiplication corrects the exponent. The
    hardware's conversion is slower than memory, and Ampere does not have it. NaN, which the check at the
    start refuses, becomes 480 in bf16.
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


@triton.jit(do_not_specialize=["num_tokens"])
def _linear(
    x, weight, scale, bias, onto, out, partial, counters, num_tokens,
    num_outputs,  # outputs of the result: half the weight's rows if GATE joins two
    num_inputs,
    part_size,  # columns of each of SPLIT parts but the last
    stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ONTO: tl.constexpr,
    IS_EVEN: tl.constexpr,  # blocks divide the outputs and, in each split, the inputs
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    strip = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    begin = part * part_size
    end = tl.minimum(begin + part_size, num_inputs)
    is_row = row < num_outputs
    is_token = token < num_tokens
    first = weight + row.to(tl.int64) * num_inputs
    second = first + tl.cast(num_outputs, tl.int64) * num_inputs
    wait_for_previous(PDL)
    x_row = x + token.to(tl.int64) * stride_x
    is_there = is_token[:, None] & is_row[None, :]
    place = token[:, None].to(tl.int64) * num_outputs + row[None, :]
    if HAS_ONTO:  # loaded early, as nothing would hide the latency at the end
        stream = tl.load(onto + place, mask=is_there, other=0.0)
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

    if SPLIT > 1:
        size = num_tokens * num_outputs
        tl.store(partial + part * size + place, sums, mask=is_there)
        if GATE != "none":
            tl.store(partial + (SPLIT + part) * size + place, up_sums, mask=is_there)
        tl.debug_barrier()  # every thread has stored before the counter is raised
        tile = tl.program_id(2) * tl.num_programs(0) + strip
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived != SPLIT - 1:
            return
        tl.store(counters + tile, 0)  # for the next product
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
        sums = sums.to(kind).to(tl.float32) + stream
    tl.store(out + place, sums.to(kind), mask=is_there)


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Return the counters of finished parts per tile, which every product resets to zero."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    onto: Tensor | None = None,
    gate: str = "none",
    is_fast: bool = False,
    config: Config | None = None,
    block_m: int | None = None,
    part_size: int | None = None,
) -> Tensor:
    """Return x [M, K] times weight [N, K], which has one `scale` per row if it is fp8 or int8.

    `onto` [M, N] is added. With `gate` "silu" or "gelu", return gate(a) * b [M, N / 2] of the halves a, b.
    `part_size` says how many columns each part of a split sum has.
    """
    assert x.stride(1) == 1, "tokens without gaps"
    assert weight.is_contiguous(), "rows without gaps"
    assert bias is None or bias.is_contiguous(), "a bias without gaps"
    onto = None if onto is None else onto.contiguous()
    num_tokens, num_inputs = x.shape
    num_rows = weight.shape[0]
    num_outputs = num_rows if gate == "none" else num_rows // 2
    device = x.device
    block_m = block_m or _token_tile(num_tokens)
    if config is None:
        pick = choose_split if is_fast and block_m == MAX_FEW else choose
        config = pick(block_m, num_outputs, num_inputs, weight.dtype.itemsize, gate != "none", device)
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=device)
    grid = (triton.cdiv(num_outputs, config.block_n), config.split, triton.cdiv(num_tokens, block_m))
    assert config.split == 1 or grid[0] * grid[2] <= MAX_TILES, "a counter for each tile"
    num_parts = config.split * (1 if gate == "none" else 2)
    partial = out
    if config.split > 1:
        partial = torch.empty((num_parts, num_tokens, num_outputs), dtype=torch.float32, device=device)
    part_size = part_size or triton.cdiv(num_inputs, config.block_k * config.split) * config.block_k
    is_even = num_outputs % config.block_n == 0 and num_inputs % (config.block_k * config.split) == 0
    if weight.dtype == torch.float8_e4m3fn:
        weight = weight.view(torch.uint8)
    _linear[grid](
        x, weight, scale if scale is not None else weight, bias if bias is not None else weight,
        onto if onto is not None else x, out, partial, counters(device), num_tokens, num_outputs,
        num_inputs, part_size, x.stride(0),
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=config.split, GATE=gate,
        HAS_SCALE=scale is not None, HAS_BIAS=bias is not None, HAS_ONTO=onto is not None, IS_EVEN=is_even,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **overlap(device), num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
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
    """Return whether the kernels can convert `values` to `dtype` on this GPU."""
    if values.dtype != torch.float8_e4m3fn or not values.is_cuda or dtype == torch.bfloat16:
        return True
    return has_fp8(values.device)


def fp8_product(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Return x [M, K], rounded to fp8, times values [N, K] with scales [N]."""
    x = x.contiguous()
    num_tokens, size = x.shape
    rounded = torch.empty_like(x, dtype=values.dtype)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    _round_tokens[(num_tokens,)](
        x, rounded, scales, size,
        BLOCK=triton.next_power_of_2(size), **overlap(x.device), num_warps=8,
    )  # fmt: skip
    return torch._scaled_mm(rounded, values.T, scale_a=scales, scale_b=scale.view(1, -1), out_dtype=x.dtype)


def takes(x: Tensor, weight: Tensor, *, is_fast: bool = False) -> bool:
    """Return whether to multiply x [M, K] by this kernel, or by cuBLAS, which is as fast for many tokens.

    In float32, without tensor cores, only this kernel adds in one order for every M. For more than a few
    tokens, cuBLAS reads weights with many rows at the speed of memory.
    """
    if x.dim() != 2:
        return False
    num_tokens, num_rows = x.shape[0], weight.shape[0]
    if num_tokens <= MAX_FEW:
        return True
    return not is_fast and (x.dtype == torch.float32 or (num_tokens <= MAX_SOME and num_rows < MANY_ROWS))


def _token_tile(num_tokens: int) -> int:
    """Return the tokens per program."""
    return MAX_FEW if num_tokens <= MAX_FEW else MAX_SOME if num_tokens <= MAX_SOME else MANY


def _large(multiprocessors: int) -> int:
    """Return the rows of a weight that fill the GPU several times."""
    return 128 * 4 * multiprocessors


@functools.cache
def choose(
    block_m: int, num_outputs: int, num_inputs: int, element_bytes: int, is_gated: bool, device: torch.device
) -> Config:
    """Choose the division of a product without split sums.

    Measured on an H200 at the shapes of Qwen3-8B, Qwen3.5-35B-A3B and SmolLM2-135M (benchmarks/log.md).
    """
    narrow_k = 128 if num_inputs % 128 == 0 else 64
    wide_k = 256 if num_inputs % 256 == 0 else narrow_k
    strips, multiprocessors = triton.cdiv(num_outputs, 64), num_multiprocessors(device)
    if block_m == MANY:
        config = Config(128, 64, 1, warps=8, stages=3)
    elif num_inputs * num_outputs < 1 << 22:  # a few megabytes: latency, not bandwidth
        block_k = 128 if num_inputs > 1024 else 64
        if is_gated:
            config = Config(32, block_k, 1, warps=4, stages=6 if block_k == 64 else 4)
        elif block_m == MAX_SOME:
            config = Config(16, block_k, 1, warps=4, stages=4)
        else:
            config = Config(16, block_k, 1, *((4, 6) if num_inputs > 1024 else (1, 4)))
    elif is_gated:
        config = Config(32, narrow_k, 1, warps=4, stages=4 if element_bytes > 1 else 6)
    elif num_outputs >= _large(multiprocessors):
        config = Config(128, narrow_k, 1, 4, 3) if element_bytes > 1 else Config(64, narrow_k, 1, 4, 4)
    elif block_m == MAX_SOME and strips >= 48:
        config = Config(64, narrow_k, 1, 4, 5) if strips >= 96 else Config(32, wide_k, 1, 4, 4)
        if strips < 96 and wide_k < 256:  # a few long steps are fast, though the last has masks
            config = Config(64, 128, 1, 4, 4)
    elif 3 * strips >= 4 * multiprocessors:  # up to two programs to a multiprocessor
        config = Config(64, narrow_k, 1, warps=4, stages=4)
    else:
        config = _with_few_strips(block_m, num_outputs, num_inputs)
    return _fitted(config, block_m, 2 if is_gated else 1, shared_memory(device))


def _with_few_strips(block_m: int, num_outputs: int, num_inputs: int) -> Config:
    """Return the division of a weight with few rows. A few long steps are fast, though the last has masks."""
    config = next(
        found
        for tokens, most_rows, least_columns, found in _FEW_STRIPS
        if block_m == tokens and num_outputs <= most_rows and num_inputs >= least_columns
    )
    block_k = config.block_k
    while num_inputs <= 2048 and block_k > 64 and num_inputs % block_k != 0:
        block_k //= 2
    return replace(config, block_k=block_k)


def _fitted(config: Config, block_m: int, num_parts: int, shared_memory: int) -> Config:
    """Reduce stages to what fits a multiprocessor, and the width if two stages do not fit."""
    while True:
        step = (block_m + num_parts * config.block_n) * config.block_k * 2
        stages = min(config.stages, (shared_memory - 4096) // step)
        if stages >= 2 or config.block_k <= 32:
            return replace(config, stages=max(stages, 1))
        config = replace(config, block_k=config.block_k // 2)


@functools.cache
def choose_split(
    block_m: int, num_outputs: int, num_inputs: int, element_bytes: int, is_gated: bool, device: torch.device
) -> Config:
    """Choose the division of a product whose sums may be split; measured like `choose`."""
    multiprocessors = num_multiprocessors(device)
    if num_inputs * num_outputs < 1 << 22:  # a few megabytes: latency, not bandwidth
        block_k = 128 if num_inputs > 1024 else 64
        block_n = 32 if is_gated else 16
        split = _split(num_inputs, block_k, 1 if is_gated else num_inputs // 512)
        return Config(block_n, block_k, split, warps=4 if is_gated else 2, stages=6 if block_k == 64 else 4)
    is_wide = element_bytes > 1
    narrow_k = 128 if num_inputs % 128 == 0 else 64
    has_long_steps = num_inputs % 256 == 0 and (num_inputs >= 8192 or not is_wide)
    block_k = 256 if has_long_steps else narrow_k
    block_n = 64 if is_wide or num_outputs > 32 * 160 else 32
    strips = triton.cdiv(num_outputs, block_n)
    if is_gated or (strips >= multiprocessors and is_wide) or num_outputs >= _large(multiprocessors):
        return choose(block_m, num_outputs, num_inputs, element_bytes, is_gated, device)  # no split
    wanted = triton.cdiv(19 * multiprocessors, 10 * strips)
    split = _split(num_inputs, block_k, triton.next_power_of_2(wanted))
    stages = 6 if block_k < 256 or block_n < 64 else 3 if is_wide else 4
    return _fitted(Config(block_n, block_k, split, 4, stages), block_m, 1, shared_memory(device))


def _split(num_inputs: int, block_k: int, wanted: int) -> int:
    """Return the least number of parts from `wanted` on that whole blocks fill, or `wanted` if none does."""
    fitting = [n for n in range(max(wanted, 1), 2 * wanted + 1) if num_inputs % (block_k * n) == 0]
    return fitting[0] if fitting else max(wanted, 1)
