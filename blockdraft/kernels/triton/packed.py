"""Products with 4-bit weights, whose codes are widened on the way to the tensor cores.

A code becomes the value that `dequantise` gives it, bit for bit, and sixteen columns at a time are added in
order, as in `triton.linear`. So on Hopper the product has the bits of the same product with the unpacked
weight. The weight is the left operand, as its rows fill the tensor cores however few tokens there are.

`kernels.packed` defines the order of the words: a lane loads four at once, which hold the codes that the
tensor cores expect of it, so no value moves between lanes. The compiler would reorder columns after a
`tl.join`; it does not look behind an assembler block with effects (`_in_order`), which is empty.

In bfloat16, instructions widen two codes at a time (`kernels.triton.packed_asm`); otherwise, for GGUF's Q4_1
and Q8_0, and if NVFP4's second factor has no two pieces or its columns have factors, a code is widened in
float32, in the operations of `dequantise`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.packed import CHUNK, TILE, PackedWords
from blockdraft.kernels.packed_speeds import Code
from blockdraft.kernels.triton import packed_few
from blockdraft.kernels.triton.launch import let_next_start, overlap, start_and_wait, wait_for_previous
from blockdraft.kernels.triton.moe import e2m1
from blockdraft.kernels.triton.packed_asm import widening
from blockdraft.kernels.triton.packed_few import Division
from blockdraft.kernels.triton.pointwise import gate_values


@dataclass(frozen=True, slots=True)
class Config:
    """The division of a product: tokens and tiles of 16 rows of a program, chunks of 64 columns of a step."""

    block_m: int
    tiles: int
    chunks: int
    warps: int
    stages: int


# ---- widening


@triton.jit
def _for_words(numbers, COUNT: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr):
    """Give numbers [COUNT * TILES * 32, 2] of runs of chunks to both words of each."""
    runs = numbers.reshape(COUNT, TILES, 32, 2)[:, None, :, :, :, None]
    wide = tl.broadcast_to(runs, (COUNT, CHUNKS // COUNT, TILES, 32, 2, 2))
    return wide.reshape(CHUNKS, TILES, 32, 2, 2)


@triton.jit
def _scale(
    scales, part, first_tile, chunk, num_chunks, num_rows,
    PARTS: tl.constexpr, SPAN: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Load a part of each chunk's scales, or the one scale of SPAN chunks, for the rows of a lane."""
    COUNT: tl.constexpr = CHUNKS // SPAN if CHUNKS % SPAN == 0 else 1 if SPAN % CHUNKS == 0 else CHUNKS
    i, half = tl.arange(0, COUNT * TILES * 32)[:, None], tl.arange(0, 2)[None, :]
    first = chunk + i // (TILES * 32) * (CHUNKS // COUNT)
    row = (first_tile + i // 32 % TILES) * 16
    group = row // 16 * (num_chunks // SPAN * PARTS) + first // SPAN * PARTS + part
    places = scales + group * 16 + i % 32 // 4 * 2 + half
    if IS_EVEN:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=(first < num_chunks) & (row < num_rows), other=0)
    return _for_words(found, COUNT, TILES, CHUNKS)


@triton.jit
def _second(seconds, first_tile, num_rows, TILES: tl.constexpr):
    """Load the second factors of the rows of a lane."""
    i, half = tl.arange(0, TILES * 32)[:, None], tl.arange(0, 2)[None, :]
    row = (first_tile + i // 32) * 16
    return tl.load(seconds + row + i % 32 // 4 * 2 + half, mask=row < num_rows, other=0)


@triton.jit
def _wide(
    words, high, stored, second, factors,
    PLACE: tl.constexpr, CODE: tl.constexpr, IS_HALF: tl.constexpr, IS_DIVISOR: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the values of the codes in a place of each word; `factors` points to those of place 0."""
    J: tl.constexpr = PLACE // 2
    if CODE == "q4_1" or CODE == "q8_0":
        code = (words >> (4 * PLACE)) & 15
        if CODE == "q8_0":
            code |= ((high >> (4 * PLACE)) & 15) << 4
        code = (code | 0x4B000000).to(tl.float32, bitcast=True)  # plus 2 ** 23
        value = code - (8388608.0 if CODE == "q4_1" else 8388736.0)
        value *= (stored & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # exact
        if CODE == "q4_1":
            value += ((stored >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif CODE == "int4":
        code = ((words >> (4 * PLACE)) & 15).to(tl.float32)
        if IS_HALF:
            scale = (stored & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            scale = (stored << 16).to(tl.float32, bitcast=True)
        value = (code - ((stored >> 16) & 127).to(tl.float32)) * scale
    else:
        AT: tl.constexpr = PLACE % 4
        SIGN: tl.constexpr = 14 if AT == 0 else 12 if AT == 1 else 15 if AT == 2 else 13
        half = words >> (16 * (PLACE // 4))
        code = ((half >> (3 * AT)) & 7) | (((half >> SIGN) & 1) << 3)
        if CODE == "nvfp4":
            bits = stored >> (8 * J)
            bits = ((bits & 127) << 20) | ((bits & 128) << 24)
            scale = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
            scale = tl.div_rn(scale, second) if IS_DIVISOR else scale * second
        else:
            scale = ((stored >> (16 * (J // 2))) << 16).to(tl.float32, bitcast=True)
        value = e2m1(code, scale)
    if factors is not None:
        value *= tl.load(factors + 16 * J + 8 * (PLACE % 2))
    return value.to(DTYPE)


@triton.jit
def _in_order(values):
    """Return values. The compiler keeps the columns of a dot's operand in order, as it sees no join."""
    return tl.inline_asm_elementwise("", "=h,0", [values], dtype=values.dtype, is_pure=False, pack=1)


@triton.jit
def _values(
    words, scales, seconds, factors, first_tile, chunk, num_chunks, num_rows,
    CODE: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, IS_HALF: tl.constexpr,
    IS_DIVISOR: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, TILES: tl.constexpr,
    CHUNKS: tl.constexpr, IS_EVEN: tl.constexpr, DTYPE: tl.constexpr, IS_CARD: tl.constexpr,
):  # fmt: skip
    """Return values [16 * TILES, 64 * CHUNKS] of the words from `chunk` on; zeros past an end.

    `seconds` are NVFP4's second factors of the rows, or their pieces, if there is assembly.
    """
    # A lane's words are a row of two dimensions: for more, versions of Triton distribute them differently.
    i, word = tl.arange(0, CHUNKS * TILES * 32)[:, None], tl.arange(0, 4)[None, :]
    step, tile = chunk + i // (TILES * 32), first_tile + i // 32 % TILES
    PLANES: tl.constexpr = 2 if CODE == "q8_0" else 1
    places = words + (tile * num_chunks + step) * (128 * PLANES) + i % 32 * 4 + word
    if IS_EVEN:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=(step < num_chunks) & (tile * 16 < num_rows), other=0)
    found = found.reshape(CHUNKS, TILES, 32, 2, 2)
    high = found
    if PLANES == 2:
        if IS_EVEN:
            high = tl.load(places + 128)
        else:
            high = tl.load(places + 128, mask=(step < num_chunks) & (tile * 16 < num_rows), other=0)
        high = high.reshape(CHUNKS, TILES, 32, 2, 2)
    p0 = _scale(scales, 0, first_tile, chunk, num_chunks, num_rows, PARTS, SPAN, TILES, CHUNKS, IS_EVEN)
    p1, p2, p3 = p0, p0, p0
    if PARTS > 1:
        p2 = _scale(
            scales, PARTS // 2, first_tile, chunk, num_chunks, num_rows, PARTS, SPAN, TILES, CHUNKS, IS_EVEN
        )
        p3 = p2
    if PARTS > 2:
        p1 = _scale(scales, 1, first_tile, chunk, num_chunks, num_rows, PARTS, SPAN, TILES, CHUNKS, IS_EVEN)
        p3 = _scale(scales, 3, first_tile, chunk, num_chunks, num_rows, PARTS, SPAN, TILES, CHUNKS, IS_EVEN)
    if ASM is not None:
        inputs = [found, p0]
        if CODE == "nvfp4":
            inputs = [found, p0, _for_words(seconds, 1, TILES, CHUNKS)]
        elif PARTS == 2:
            inputs = [found, p0, p2]
        elif PARTS == 4:
            inputs = [found, p0, p1, p2, p3]
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, inputs, dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    else:
        second = seconds
        if CODE == "nvfp4":
            second = _for_words(seconds, 1, TILES, CHUNKS)
        at = factors
        if factors is not None:
            at_chunk = chunk + tl.arange(0, CHUNKS)[:, None, None, None, None]
            at_chunk = tl.where(at_chunk < num_chunks, at_chunk, 0)
            t, odd = (
                tl.arange(0, 32)[None, None, :, None, None] % 4,
                tl.arange(0, 2)[None, None, None, None, :],
            )
            at = factors + at_chunk * 64 + 2 * t + odd
        v0 = _wide(found, high, p0, second, at, 0, CODE, IS_HALF, IS_DIVISOR, DTYPE)
        v1 = _wide(found, high, p0, second, at, 1, CODE, IS_HALF, IS_DIVISOR, DTYPE)
        v2 = _wide(found, high, p1, second, at, 2, CODE, IS_HALF, IS_DIVISOR, DTYPE)
        v3 = _wide(found, high, p1, second, at, 3, CODE, IS_HALF, IS_DIVISOR, DTYPE)
        v4 = _wide(found, high, p2, second, at, 4, CODE, IS_HALF, IS_DIVISOR, DTYPE)
        v5 = _wide(found, high, p2, second, at, 5, CODE, IS_HALF, IS_DIVISOR, DTYPE)
        v6 = _wide(found, high, p3, second, at, 6, CODE, IS_HALF, IS_DIVISOR, DTYPE)
        v7 = _wide(found, high, p3, second, at, 7, CODE, IS_HALF, IS_DIVISOR, DTYPE)
    low = tl.join(tl.join(v0, v1), tl.join(v2, v3))
    values = tl.join(low, tl.join(tl.join(v4, v5), tl.join(v6, v7)))  # chunk, tile, lane, half, odd, q, j, j
    values = values.reshape(CHUNKS, TILES, 8, 4, 2, 2, 2, 2, 2).permute(1, 4, 2, 0, 8, 7, 6, 3, 5)
    values = values.reshape(16 * TILES, 64 * CHUNKS)
    return _in_order(values) if IS_CARD else values


# ---- products


@triton.jit
def _added(sums, IS_CARD: tl.constexpr):
    """Return sums that Triton waits for. It would let products go on while it overwrites their values."""
    if IS_CARD:
        sums = tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=False, pack=1)
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def _packed(
    x, words, scales, seconds, factors, bias, onto, out, num_tokens,
    num_outputs,  # outputs of the result: half the weight's rows if GATE joins two
    num_chunks, stride_x,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr,
    CODE: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, IS_HALF: tl.constexpr,
    IS_DIVISOR: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, GATE: tl.constexpr,
    IS_EVEN: tl.constexpr,  # steps divide the columns, and programs the rows
    IS_CARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M tokens by 16 * TILES rows; programs of the same rows follow each other."""
    let_next_start(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    num_rows = num_outputs if GATE == "none" else 2 * num_outputs
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(1) * TILES
    row = tl.program_id(1) * (16 * TILES) + tl.arange(0, 16 * TILES)
    column = tl.arange(0, 64 * CHUNKS)
    is_token, is_row = token < num_tokens, row < num_outputs
    is_there = is_row[:, None] & is_token[None, :]
    place = token[None, :].to(tl.int64) * num_outputs + row[:, None]
    second, up_second = seconds, seconds
    if CODE == "nvfp4":
        second = _second(seconds, tile, num_rows, TILES)
        if GATE != "none":
            up_second = _second(seconds, tile + num_outputs // 16, num_rows, TILES)
    wait_for_previous(PDL)
    x_row = x + token.to(tl.int64)[:, None] * stride_x
    if onto is not None:  # loaded early, as nothing would hide the latency at the end
        stream = tl.load(onto + place, mask=is_there, other=0.0)
    sums = tl.zeros((16 * TILES, BLOCK_M), tl.float32)
    up_sums = tl.zeros((16 * TILES, BLOCK_M), tl.float32)
    for chunk in range(0, num_chunks, CHUNKS):
        at = chunk * 64 + column
        is_in = is_token[:, None] if IS_EVEN else is_token[:, None] & (at < num_chunks * 64)[None, :]
        tokens = tl.load(x_row + at[None, :], mask=is_in, other=0.0).trans()
        values = _values(
            words, scales, second, factors, tile, chunk, num_chunks, num_rows, CODE, PARTS, SPAN,
            IS_HALF, IS_DIVISOR, ASM, CONSTRAINTS, TILES, CHUNKS, IS_EVEN, DTYPE, IS_CARD,
        )  # fmt: skip
        sums = _added(tl.dot(values, tokens, sums), IS_CARD)
        if GATE != "none":
            values = _values(
                words, scales, up_second, factors, tile + num_outputs // 16, chunk,
                num_chunks, num_rows, CODE, PARTS, SPAN, IS_HALF, IS_DIVISOR, ASM, CONSTRAINTS, TILES, CHUNKS,
                IS_EVEN, DTYPE, IS_CARD,
            )  # fmt: skip
            up_sums = _added(tl.dot(values, tokens, up_sums), IS_CARD)
    if bias is not None:
        sums += tl.load(bias + row, mask=is_row, other=0.0)[:, None]
        if GATE != "none":
            up_sums += tl.load(bias + num_outputs + row, mask=is_row, other=0.0)[:, None]
    if GATE != "none":
        sums = gate_values(sums.to(DTYPE).to(tl.float32), up_sums.to(DTYPE).to(tl.float32), GATE)
    if onto is not None:  # rounded first, as a sum of two tensors is
        sums = sums.to(DTYPE).to(tl.float32) + stream
    tl.store(out + place, sums.to(DTYPE), mask=is_there)


@triton.jit
def _unpack(
    words, scales, seconds, factors, out, num_rows, num_chunks,
    TILES: tl.constexpr, CHUNKS: tl.constexpr, CODE: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr,
    IS_HALF: tl.constexpr, IS_DIVISOR: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
    IS_CARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    tile = tl.program_id(0) * TILES
    row = tl.program_id(0) * (16 * TILES) + tl.arange(0, 16 * TILES)
    chunk = tl.program_id(1) * CHUNKS
    is_row = row < num_rows
    second = seconds
    if CODE == "nvfp4":
        second = _second(seconds, tile, num_rows, TILES)
    values = _values(
        words, scales, second, factors, tile, chunk, num_chunks, num_rows, CODE, PARTS, SPAN, IS_HALF,
        IS_DIVISOR, ASM, CONSTRAINTS, TILES, CHUNKS, False, out.dtype.element_ty, IS_CARD,
    )  # fmt: skip
    column = chunk * 64 + tl.arange(0, 64 * CHUNKS)
    is_there = is_row[:, None] & (column < num_chunks * 64)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * num_chunks * 64 + column[None, :], values, mask=is_there)


def _operands(
    weight: PackedWords, dtype: torch.dtype, *, is_card: bool
) -> tuple[list[object], dict[str, object]]:
    """Return the weight's tensors and its constants, for a kernel that computes in `dtype`."""
    is_fast = is_card and dtype == torch.bfloat16 and weight.is_fast
    parts, span = max(1, CHUNK // weight.group), max(1, weight.group // CHUNK)
    if weight.is_float:
        parts = span = 1  # a word for each chunk
    asm, constraints = widening(weight.arithmetic, parts, is_half=weight.is_half) if is_fast else (None, None)
    tensors = [weight.words, weight.scales, weight.pieces if is_fast else weight.second, weight.factors]
    constants: dict[str, object] = {
        "CODE": weight.arithmetic, "PARTS": parts, "SPAN": span, "IS_HALF": weight.is_half,
        "IS_DIVISOR": weight.is_divisor, "ASM": asm, "CONSTRAINTS": constraints, "IS_CARD": is_card,
    }  # fmt: skip
    return [*tensors], constants


def unpack(weight: PackedWords, dtype: torch.dtype) -> Tensor:
    """Return the values [rows, columns] in `dtype`, rounded once."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.words.device)
    tensors, constants = _operands(weight, dtype, is_card=out.is_cuda)
    tiles, chunks = 4, 2
    grid = (triton.cdiv(rows, TILE * tiles), triton.cdiv(columns, CHUNK * chunks))
    _unpack[grid](
        *tensors, out, rows, columns // CHUNK, TILES=tiles, CHUNKS=chunks, **constants, **overlap(out.device),
        num_warps=4,
    )  # fmt: skip
    return out


def linear(
    x: Tensor,
    weight: PackedWords,
    bias: Tensor | None = None,
    *,
    onto: Tensor | None = None,
    gate: str = "none",
    config: Config | Division | None = None,
) -> Tensor:
    """Return x [M, K] times weight [N, K], plus bias [N] and `onto` [M, N].

    With `gate`, return gate(a) * b of the halves of the product, which are whole tiles.
    """
    assert x.stride(1) == 1, "tokens without gaps"
    num_tokens, (num_rows, num_inputs) = x.shape[0], weight.shape
    num_outputs = num_rows if gate == "none" else num_rows // 2
    assert num_outputs % TILE == 0, "whole tiles"
    assert x.shape[1] == num_inputs, "a value for each column"
    config = config or choose(x, weight, gate)
    if isinstance(config, Division):
        return packed_few.linear(x, weight, bias, onto=onto, division=config)
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    tensors, constants = _operands(weight, x.dtype, is_card=x.is_cuda)
    height, width = TILE * config.tiles, CHUNK * config.chunks
    _packed[(triton.cdiv(num_tokens, config.block_m), triton.cdiv(num_outputs, height))](
        x, *tensors, bias, None if onto is None else onto.contiguous(), out, num_tokens, num_outputs,
        num_inputs // CHUNK, x.stride(0), BLOCK_M=config.block_m, TILES=config.tiles, CHUNKS=config.chunks,
        GATE=gate, IS_EVEN=num_outputs % height == num_inputs % width == 0, **constants, **overlap(x.device),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


# The fastest divisions on an H200 in the shapes of Qwen3-8B (benchmarks/log.md): for up to so many tokens and
# outputs, whether a gate joins two halves, and the division.
_ANY = 1 << 30
_MEASURED: dict[Code, tuple[tuple[int, int, bool, Config | Division], ...]] = {
    "int4": (
        (8, _ANY, True, Config(8, 4, 4, warps=4, stages=4)),
        (8, 8192, False, Division(8)),
        (8, _ANY, False, Config(8, 4, 4, warps=4, stages=4)),
        (16, _ANY, True, Config(16, 4, 4, warps=4, stages=3)),
        (16, 4096, False, Division(16)),
        (16, _ANY, False, Config(16, 1, 8, warps=1, stages=4)),
        (64, _ANY, True, Config(64, 8, 2, warps=8, stages=3)),
    ),
    "nvfp4": (
        (8, _ANY, True, Config(8, 4, 4, warps=4, stages=4)),
        (8, 4096, False, Division(8)),
        (8, _ANY, False, Config(8, 4, 2, warps=4, stages=4)),
        (16, _ANY, True, Config(16, 4, 4, warps=4, stages=3)),
        (16, 4096, False, Config(16, 1, 8, warps=2, stages=4)),
        (16, _ANY, False, Config(16, 2, 8, warps=2, stages=4)),
    ),
}


def choose(x: Tensor, weight: PackedWords, gate: str) -> Config | Division:
    """Return the measured division of such a product that fits it, else a likely one."""
    is_gated, num_tokens = gate != "none", x.shape[0]
    num_outputs = weight.shape[0] // 2 if is_gated else weight.shape[0]
    for most_tokens, most_outputs, gated, division in _MEASURED.get(weight.code, ()):
        is_such = num_tokens <= most_tokens and num_outputs <= most_outputs and gated == is_gated
        if is_such and (isinstance(division, Config) or packed_few.takes(x, weight, gate, division)):
            return division
    return likely(num_tokens, num_outputs)


@functools.cache
def likely(num_tokens: int, num_outputs: int) -> Config:
    """Return the division of a product that was not measured: enough programs, and words on their way."""
    if num_tokens > 64:
        return Config(128, 8, 1, warps=8, stages=3)
    if num_tokens > 16:
        return Config(64, 4, 2, warps=4, stages=3)
    block_m = 16 if num_tokens > 8 else 8
    if num_outputs >= 12288:
        return Config(block_m, 4, 4, warps=4, stages=3)
    return Config(block_m, 2, 8, warps=2, stages=4)
