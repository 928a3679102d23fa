"""Gate and up in one product, for 17 to 128 tokens on Hopper: a tile holds every token and is loaded by TMA.

cuBLAS reads the weight about as fast, but needs another launch for the activation. Each program multiplies
all tokens by a strip of BLOCK_N + TAIL rows of both halves, so the weight is read once. Every strip reads all
tokens again, from the L2 cache, so wide strips are faster. TAIL, the size of a second block, allows widths
that are no power of two, such as 96, which divides Qwen3-8B's weight into 128 strips for 132 multiprocessors.

A token's bits depend on its own values, the weight, and the number of tokens rounded up to a power of two.
The weight is described as [2, rows, columns], so both halves are one operand; values past an end are zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blockdraft.kernels.triton.launch import let_next_start, num_multiprocessors, overlap, wait_for_previous
from blockdraft.kernels.triton.pointwise import gate_values

MAX_TOKENS = 128
MIN_BLOCK_M = 64  # the fewest rows that the tensor cores take as tokens
BLOCK_K = 64
WIDTHS = ((32, 0), (32, 16), (64, 0), (64, 32), (128, 0))  # outputs of a strip: block and tail
SHARED_BYTES = 205 * 1024  # for blocks in flight, of a multiprocessor's 227 kB


@dataclass(frozen=True, slots=True)
class Config:
    """The division of a product: a strip has block_n + tail outputs, from twice as many weight rows."""

    block_n: int
    tail: int
    warps: int
    stages: int


@triton.jit
def _leave(
    sums, bias, out, num_tokens, num_outputs,
    begin,  # the first output of this block
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Store gate(a) * b for the sums [BLOCK_M, 2 * BLOCK] of gate and up, with bias."""
    token = tl.arange(0, BLOCK_M)
    row = begin + tl.arange(0, BLOCK)
    is_row = row < num_outputs
    gate, up = sums.reshape(BLOCK_M, 2, BLOCK).permute(0, 2, 1).split()
    if HAS_BIAS:
        gate += tl.load(bias + row, mask=is_row, other=0.0)[None, :]
        up += tl.load(bias + num_outputs + row, mask=is_row, other=0.0)[None, :]
    kind = out.dtype.element_ty
    joined = gate_values(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), GATE)
    place = token.to(tl.int64)[:, None] * num_outputs + row[None, :]
    tl.store(out + place, joined.to(kind), mask=(token < num_tokens)[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_tile(
    x,  # x [M, K], weight [2, N, K] in blocks of BLOCK_N rows, and in blocks of TAIL rows, are descriptors
    weight, tail_weight, bias, out, num_tokens, num_outputs, num_inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    begin_row = tl.program_id(0) * (BLOCK_N + TAIL)
    sums = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    tail_sums = tl.zeros((BLOCK_M, 2 * TAIL if TAIL else 1), tl.float32)
    wait_for_previous(PDL)
    for k in range(0, num_inputs, BLOCK_K):
        tokens = x.load([0, k])
        rows = weight.load([0, begin_row, k]).reshape(2 * BLOCK_N, BLOCK_K)
        sums = tl.dot(tokens, rows.T, sums, input_precision=PRECISION)
        if TAIL:
            rows = tail_weight.load([0, begin_row + BLOCK_N, k]).reshape(2 * TAIL, BLOCK_K)
            tail_sums = tl.dot(tokens, rows.T, tail_sums, input_precision=PRECISION)
    _leave(sums, bias, out, num_tokens, num_outputs, begin_row, BLOCK_M, BLOCK_N, GATE, HAS_BIAS)
    if TAIL:
        begin_row += BLOCK_N
        _leave(tail_sums, bias, out, num_tokens, num_outputs, begin_row, BLOCK_M, TAIL, GATE, HAS_BIAS)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether this kernel takes the product: it needs Hopper, 16-bit values, and aligned rows."""
    if not x.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype or x.dim() != 2:
        return False
    return 1 <= x.shape[0] <= MAX_TOKENS and weight.is_contiguous() and _is_aligned(x, weight)


def _is_aligned(x: Tensor, weight: Tensor) -> bool:
    """Return whether TMA can read both operands; tokens may have gaps between them, but may not overlap."""
    has_rows = x.stride(1) == 1 and _stride(x) >= x.shape[1]
    strides = _stride(x), weight.shape[1]
    is_even = not any(stride * x.element_size() % 16 for stride in strides)
    return has_rows and is_even and not any(tensor.data_ptr() % 16 for tensor in (x, weight))


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: str, config: Config | None = None
) -> Tensor:
    """Return gate(a) * b [M, N / 2] for the halves a and b of x [M, K] times weight [N, K], if `fits`."""
    assert 1 <= x.shape[0] <= MAX_TOKENS, "one tile of tokens"
    assert weight.is_contiguous(), "rows without gaps"
    assert _is_aligned(x, weight), "rows that begin at 16 bytes"
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2
    block_m = _block_m(num_tokens)
    if config is None:
        config = choose(block_m, num_outputs, num_multiprocessors(x.device))
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    _gated_tile[(triton.cdiv(num_outputs, config.block_n + config.tail),)](
        TensorDescriptor(x, [num_tokens, num_inputs], [_stride(x), 1], [block_m, BLOCK_K]),
        _halves(weight, config.block_n), _halves(weight, config.tail or config.block_n),
        bias if bias is not None else weight, out, num_tokens, num_outputs, num_inputs,
        BLOCK_M=block_m, BLOCK_N=config.block_n, TAIL=config.tail, BLOCK_K=BLOCK_K, GATE=gate,
        HAS_BIAS=bias is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **overlap(x.device), num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def _block_m(num_tokens: int) -> int:
    return max(MIN_BLOCK_M, int(triton.next_power_of_2(num_tokens)))


def _stride(x: Tensor) -> int:
    """Return the stride between tokens, or the length of a single token, whose stride is arbitrary."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _halves(weight: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of the weight as [2, N, K], read in blocks of `rows` of each half."""
    num_rows, num_inputs = weight.shape[0] // 2, weight.shape[1]
    shape, strides = [2, num_rows, num_inputs], [num_rows * num_inputs, num_inputs, 1]
    return TensorDescriptor(weight, shape, strides, [2, rows, BLOCK_K])


@functools.cache
def choose(block_m: int, num_outputs: int, multiprocessors: int) -> Config:
    """Choose the width with which a multiprocessor reads the fewest bytes for its strips and tokens."""

    def fetched(config: Config) -> int:
        width = config.block_n + config.tail
        waves = -(-num_outputs // (width * multiprocessors))
        return waves * (2 * width + block_m)

    return min((_config(block_m, *width) for width in WIDTHS), key=fetched)


def _config(block_m: int, block_n: int, tail: int) -> Config:
    """Return the division with this width, and with as many blocks in flight as fit shared memory."""
    rows = 2 * (block_n + tail)
    stages = min(6, SHARED_BYTES // ((rows + block_m) * BLOCK_K * 2))
    return Config(block_n, tail, warps=8 if rows * block_m >= 128 * 128 else 4, stages=stages)
