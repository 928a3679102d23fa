"""Products of up to 16 tokens with 4-bit weights on Hopper, whose loop is PTX; see `triton.packed_loop`.

Bits are those of `triton.packed`: codes are widened by the same assembly, and sixteen columns at a time are
added in order. There, tokens are loaded just before each product, which waits for them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.packed import CHUNK, TILE, PackedWords
from blockdraft.kernels.triton.launch import let_next_start, overlap
from blockdraft.kernels.triton.packed_loop import CHUNKS, THREADS, TILES, Loop, assembly


@dataclass(frozen=True, slots=True)
class Division:
    """The tokens of a program, which multiplies them by 64 rows: 8 or 16."""

    tokens: int


@triton.jit
def _finish(value, row, token, bias, onto, out, num_tokens, num_outputs):
    """Store values, of a row and a token each, as `triton.packed` does."""
    is_there = token < num_tokens
    place = token.to(tl.int64) * num_outputs + row
    kind = out.dtype.element_ty
    if bias is not None:
        value += tl.load(bias + row)
    if onto is not None:
        value = value.to(kind).to(tl.float32) + tl.load(onto + place, mask=is_there, other=0.0)
    tl.store(out + place, value.to(kind), mask=is_there)


@triton.jit(do_not_specialize=["num_tokens"])
def _few(
    x, words, scales, pieces, bias, onto, out, num_tokens, num_outputs, num_chunks, stride_x,
    TOKENS: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply TOKENS tokens by 64 rows; programs of the same rows follow each other."""
    let_next_start(PDL)
    SUMS: tl.constexpr = TOKENS // 2
    first = tl.program_id(0) * TOKENS
    strip = tl.program_id(1) * 64
    # A value of a thread, and no layout that Triton could change.
    thread = tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [tl.arange(0, THREADS)], dtype=tl.int32, is_pure=False, pack=1
    )
    sums = tl.inline_asm_elementwise(
        ASM, CONSTRAINTS,
        [
            (x + first.to(tl.int64) * stride_x).to(tl.int64), words.to(tl.int64), scales.to(tl.int64),
            pieces.to(tl.int64), num_tokens - first, num_chunks, stride_x, strip // 16, thread,
        ],
        dtype=(tl.float32,) * SUMS, is_pure=False, pack=1,
    )  # fmt: skip
    row, pair = strip + thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    for i in tl.static_range(TOKENS // 8):
        for odd in tl.static_range(2):
            token = first + 8 * i + pair + odd
            _finish(sums[4 * i + odd], row, token, bias, onto, out, num_tokens, num_outputs)
            _finish(sums[4 * i + 2 + odd], row + 8, token, bias, onto, out, num_tokens, num_outputs)


def loop_of(weight: PackedWords, division: Division, *, has_pdl: bool) -> Loop:
    parts, span = max(1, CHUNK // weight.group), max(1, weight.group // CHUNK)
    if weight.is_float:
        parts = span = 1  # a word for each chunk
    return Loop(weight.arithmetic, parts, span, weight.is_half, division.tokens, has_pdl)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    is_card = device.type == "cuda" and torch.version.hip is None
    return is_card and torch.cuda.get_device_capability(device) == (9, 0)


def takes(x: Tensor, weight: PackedWords, gate: str, division: Division) -> bool:
    """Return whether the kernel computes a product in this division."""
    rows, columns = weight.shape
    return (
        _is_hopper(x.device)
        and gate == "none"
        and x.dtype == torch.bfloat16
        and weight.is_fast
        and loop_of(weight, division, has_pdl=False).is_possible
        and rows % (TILE * TILES) == 0
        and columns % (CHUNK * CHUNKS) == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def linear(
    x: Tensor,
    weight: PackedWords,
    bias: Tensor | None = None,
    *,
    onto: Tensor | None = None,
    division: Division,
) -> Tensor:
    """Return what `triton.packed.linear` returns, for products that the kernel `takes`."""
    num_tokens, (num_outputs, num_inputs) = x.shape[0], weight.shape
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    options = overlap(x.device)
    asm, constraints = assembly(loop_of(weight, division, has_pdl=options["PDL"]))
    _few[(triton.cdiv(num_tokens, division.tokens), num_outputs // (TILE * TILES))](
        x, weight.words, weight.scales, weight.words if weight.pieces is None else weight.pieces, bias,
        None if onto is None else onto.contiguous(), out, num_tokens, num_outputs, num_inputs // CHUNK,
        x.stride(0), TOKENS=division.tokens, ASM=asm, CONSTRAINTS=constraints, THREADS=THREADS, **options,
        num_warps=THREADS // 32,
    )  # fmt: skip
    return out
