"""Products with weights of few rows, such as routers: sums in four parts, for any number of tokens.

A tensor core adds sixteen products to a sum at once, and the next sixteen have to wait for it. A sum of a few
thousand products then takes longer than reading the weight, which few programs do. So the columns of a narrow
weight are always cut into PARTS, whose sums are added in order, ((p0 + p1) + p2) + p3. cuBLAS is no
alternative for few rows: it picks kernels that take ten times as long, for an odd number of rows a hundred
times (benchmarks/log.md).

For few tokens, a program computes the parts next to each other, a warp for each. For more, several programs
share a tile, and the last one adds their sums (`triton.linear`). Both give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton import linear as chains
from blockdraft.kernels.triton.launch import let_next_start, overlap, shared_memory, wait_for_previous

MAX_ROWS = 520  # of a narrow weight
PARTS = 4  # the kernel is written for four
MAX_TOKENS = 256  # for which a program computes all parts
STEP = 128  # a part is a multiple of it


class Config(NamedTuple):
    """The division of a product whose parts are computed by one program."""

    block_m: int
    block_n: int
    block_k: int
    stages: int


# Measured on an H200 with 32, 257, 264 and 513 rows (benchmarks/log.md).
_FEW = Config(16, 8, 256, stages=3)
_SOME = Config(32, 16, 128, stages=3)
_MANY_TOKENS, _MANY = 64, chains.Config(block_n=64, block_k=128, split=PARTS, warps=4, stages=3)


@triton.jit(do_not_specialize=["num_tokens"])
def _narrow(
    x, weight, bias, onto, out, num_tokens, num_outputs, num_inputs, part_size, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,  # blocks divide the rows and the parts, and parts the columns
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens by a strip of rows; dimension 0 of tensors is that of the parts."""
    let_next_start(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, is_token = row < num_outputs, token < num_tokens
    begin = tl.arange(0, 4)[:, None] * part_size
    column = tl.arange(0, BLOCK_K)[None, :]
    tokens = x + token.to(tl.int64)[None, :, None] * stride_x
    rows = weight + row.to(tl.int64)[None, None, :] * num_inputs
    place = token[:, None].to(tl.int64) * num_outputs + row[None, :]
    is_there = is_token[:, None] & is_row[None, :]
    wait_for_previous(PDL)
    if onto is not None:  # loaded early, as nothing would hide the latency at the end
        stream = tl.load(onto + place, mask=is_there, other=0.0)
    sums = tl.zeros((4, BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, part_size, BLOCK_K):
        at = begin + k + column
        if IS_EVEN:
            a = tl.load(tokens + at[:, None, :], mask=is_token[None, :, None], other=0.0)
            b = tl.load(rows + at[:, :, None])
        else:
            is_in = (k + column < part_size) & (at < num_inputs)
            a = tl.load(tokens + at[:, None, :], mask=is_token[None, :, None] & is_in[:, None, :], other=0.0)
            b = tl.load(rows + at[:, :, None], mask=is_row[None, None, :] & is_in[:, :, None], other=0.0)
        sums = tl.dot(a, b, sums)
    even, odd = tl.split(tl.permute(sums, (1, 2, 0)).reshape(BLOCK_M, BLOCK_N, 2, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    total = ((first + second) + third) + fourth
    if bias is not None:
        total += tl.load(bias + row, mask=is_row, other=0.0)[None, :]
    kind = out.dtype.element_ty
    if onto is not None:  # rounded first, as a sum of two tensors is
        total = total.to(kind).to(tl.float32) + stream
    tl.store(out + place, total.to(kind), mask=is_there)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether `weight` is narrow, and tensor cores multiply it."""
    is_half = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return is_half and x.dim() == 2 and weight.shape[0] <= MAX_ROWS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, onto: Tensor | None = None) -> Tensor:
    """Return x [M, K] times weight [N, K], which `takes` allows, with `bias` [N] and `onto` [M, N] added."""
    assert x.stride(1) == 1, "tokens without gaps"
    assert weight.is_contiguous(), "rows without gaps"
    assert bias is None or bias.is_contiguous(), "a bias without gaps"
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[0]
    part_size = triton.cdiv(num_inputs, PARTS * STEP) * STEP
    if num_tokens > MAX_TOKENS:
        return chains.linear(
            x, weight, bias, onto=onto, config=_MANY, block_m=_MANY_TOKENS, part_size=part_size
        )
    config = _fitted(_FEW if num_tokens <= _FEW.block_m else _SOME, shared_memory(x.device))
    block_m, block_n, block_k, stages = config
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    _narrow[(triton.cdiv(num_outputs, block_n), triton.cdiv(num_tokens, block_m))](
        x, weight, bias, None if onto is None else onto.contiguous(), out, num_tokens, num_outputs,
        num_inputs, part_size, x.stride(0), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        IS_EVEN=num_outputs % block_n == part_size % block_k == 0 and num_inputs == PARTS * part_size,
        num_warps=PARTS, num_stages=stages, **overlap(x.device),
    )  # fmt: skip
    return out


def _fitted(config: Config, shared: int) -> Config:
    """Return the config with steps that fit a multiprocessor; the bits do not depend on them."""
    while PARTS * (config.block_m + config.block_n) * config.block_k * 2 * config.stages > shared - 4096:
        config = config._replace(block_k=config.block_k // 2)
    return config
