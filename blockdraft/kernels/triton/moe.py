"""Mixtures of experts on a GPU: two grouped products over the pairs that `routing` grouped, and their sum.

Scratch rows are in the order of the pairs, token * K + index of the choice. A pair's bits depend only on its
token's row and its expert: columns are summed in one fixed order. The size of tiles changes with the number
of pairs per expert. On Hopper this does not change the bits: a tensor core adds sixteen products to the sum
at once, in the same way for every shape of tile, and a step of more columns is more such additions. If
columns share a scale that multiplies sums, tiles of all sizes take the same number of columns in a step.
Scales of 4-bit codes multiply the codes, as `dequantise` does, so bits are those of the unpacked weight.

A shared expert that is stored like the routed experts runs with them. Its tiles, of tokens in order, and its
scratch rows, one per token, follow those of the routed experts.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton.launch import (
    let_next_start,
    overlap,
    shared_memory,
    start_and_wait,
    wait_for_previous,
)
from blockdraft.kernels.triton.linear import widen
from blockdraft.kernels.triton.pointwise import norm_warps
from blockdraft.kernels.triton.routing import LOW, MAX_FEW, Groups, group

if TYPE_CHECKING:
    from blockdraft.kernels.moe import (
        Activation,
        Beside,
        ExpertChoice,
        Matrices,
        Onto,
        Parts,
        Summed,
    )


class Config(NamedTuple):
    """Sizes of one grouped product: a tile is M pairs x N rows of the weight, K columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def fits(self, num_parts: int, device: torch.device) -> bool:
        """Return whether a program's steps, of `num_parts` half-precision weights, fit a multiprocessor."""
        rows = self.block_m + num_parts * self.block_n
        return self.num_stages * rows * self.block_k * 2 <= shared_memory(device) - 4096


MANY = Config(64, 64, 64, num_warps=4, num_stages=3)

# Tiles for more than MAX_FEW pairs: from how many pairs per expert, for gate and up together, for down.
# Measured on an H200 with unquantised weights (benchmarks/log.md).
_BY_PAIRS = (
    (64, Config(128, 128, 64, num_warps=8, num_stages=4), Config(128, 256, 64, num_warps=8, num_stages=3)),
    (32, MANY, Config(64, 128, 64, num_warps=4, num_stages=3)),
    (16, Config(32, 64, 128, num_warps=4, num_stages=3), Config(32, 64, 128, num_warps=4, num_stages=3)),
    (0, Config(LOW, 64, 128, num_warps=4, num_stages=3), Config(LOW, 64, 128, num_warps=4, num_stages=3)),
)

# Tiles for up to MAX_FEW pairs, which are limited by weight reads: low ones, with many loads in flight. From
# how many pairs and columns on. Gate and up together read twice the rows of a tile in a step.
_FEW_GATED = (
    (0, 2049, Config(LOW, 32, 128, num_warps=4, num_stages=4)),
    (32, 0, Config(LOW, 32, 256, num_warps=4, num_stages=3)),
    (0, 0, Config(LOW, 32, 128, num_warps=4, num_stages=5)),
)
_FEW_DOWN = (
    (32, 512, Config(LOW, 32, 128, num_warps=2, num_stages=5)),
    (0, 513, Config(LOW, 16, 128, num_warps=2, num_stages=5)),
    (0, 512, Config(LOW, 32, 128, num_warps=2, num_stages=5)),
    (0, 0, Config(LOW, 16, 128, num_warps=2, num_stages=5)),
)
_FEW_CODES = Config(LOW, 32, 128, num_warps=4, num_stages=4)


# ---- the grouped products


@triton.jit
def e2m1(code, factor):
    """Return the values of 4-bit codes: take their bits as exponent and mantissa, times a power of two."""
    code = code.to(tl.uint32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor  # 2 ** 126


@triton.jit
def _spread(numbers, SPAN: tl.constexpr):
    """Give numbers [N, groups] of SPAN columns to the bytes of these columns."""
    wide = tl.broadcast_to(numbers[:, :, None], (numbers.shape[0], numbers.shape[1], SPAN // 2))
    return wide.reshape(numbers.shape[0], numbers.shape[1] * SPAN // 2)


@triton.jit
def _multiply_codes(
    total, x, values, scale, zero, second, rows, begin, stride_row, stride_scale,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr, IS_DIVISOR: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, IS_CARD: tl.constexpr,
):  # fmt: skip
    """Return total + x @ W^T; codes are widened in the operations of `dequantise`."""
    BLOCK_N: tl.constexpr = rows.shape[0]
    SPAN: tl.constexpr = GROUP if GROUP < BLOCK_K and GROUP < COLUMNS else BLOCK_K
    IS_EVEN: tl.constexpr = COLUMNS % BLOCK_K == 0
    row = rows[:, None].to(tl.int64)
    byte = begin // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
    group = begin // GROUP + tl.arange(0, BLOCK_K // SPAN)[None, :]
    place = row * stride_scale + group
    if IS_EVEN:
        codes = tl.load(values + row * stride_row + byte)
        stored = tl.load(scale + place)
    else:
        codes = tl.load(values + row * stride_row + byte, mask=byte < COLUMNS // 2, other=0)
        stored = tl.load(scale + place, mask=group < COLUMNS // GROUP, other=0)
    if CODE == "int4":
        factor = _spread(stored.to(tl.float32), SPAN)
        if zero is None:
            middle = tl.full((BLOCK_N, BLOCK_K // 2), 8.0, tl.float32)
        elif IS_EVEN:
            middle = _spread(tl.load(zero + place).to(tl.float32), SPAN)
        else:
            found = tl.load(zero + place, mask=group < COLUMNS // GROUP, other=0)
            middle = _spread(found.to(tl.float32), SPAN)
        low = ((codes & 15).to(tl.float32) - middle) * factor
        high = ((codes >> 4).to(tl.float32) - middle) * factor
    else:
        bits = stored.to(tl.int32)
        if CODE == "mxfp4":
            power = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)  # 2 ** (e - 127)
        else:
            power = (((bits & 127) << 20) | ((bits & 128) << 24)).to(tl.float32, bitcast=True)
            power *= 1.329227995784916e36  # 2 ** 120
            whole = tl.broadcast_to(tl.load(second), power.shape)
            power = tl.div_rn(power, whole) if IS_DIVISOR else power * whole
        factor = _spread(power, SPAN)
        low, high = e2m1(codes & 15, factor), e2m1(codes >> 4, factor)
    weight = tl.join(low.to(x.dtype), high.to(x.dtype)).reshape(BLOCK_N, BLOCK_K)
    if IS_CARD:  # the compiler does not reorder columns behind it (`triton.packed`)
        weight = tl.inline_asm_elementwise("", "=h,0", [weight], dtype=weight.dtype, is_pure=False, pack=1)
    return tl.dot(x, tl.trans(weight), total, input_precision=PRECISION)


@triton.jit
def _multiply(
    total, x, values, scale, zero, second, rows, begin, stride_row, stride_scale,
    COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODE: tl.constexpr,
    IS_DIVISOR: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, IS_CARD: tl.constexpr,
):  # fmt: skip
    """Return total + x @ W^T for columns from `begin` on, without the scales of whole rows."""
    if CODE is not None:
        total = _multiply_codes(
            total, x, values, scale, zero, second, rows, begin, stride_row, stride_scale, COLUMNS,
            SCALE_COLUMNS, CODE, IS_DIVISOR, BLOCK_K, PRECISION, IS_CARD,
        )  # fmt: skip
    else:
        column = begin + tl.arange(0, BLOCK_K)
        pointers = values + rows[None, :].to(tl.int64) * stride_row + column[:, None]
        if COLUMNS % BLOCK_K == 0:
            weight = tl.load(pointers)
        else:
            weight = tl.load(pointers, mask=column[:, None] < COLUMNS, other=0)
        if SCALE_COLUMNS == 0 or SCALE_COLUMNS >= COLUMNS:
            total = tl.dot(x, widen(weight, x), total, input_precision=PRECISION)
        else:
            block = (rows // SCALE_ROWS) * stride_scale + begin // SCALE_COLUMNS
            factor = tl.load(scale + block).to(tl.float32)
            total = tl.fma(tl.dot(x, widen(weight, x), input_precision=PRECISION), factor[None, :], total)
    return total


@triton.jit
def _finish(
    total, scale, bias, rows, stride_scale,
    COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Return total with the scales of whole rows and the bias applied."""
    if SCALE_COLUMNS >= COLUMNS and CODE is None:
        total *= tl.load(scale + (rows // SCALE_ROWS) * stride_scale).to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + rows).to(tl.float32)[None, :]
    return total


@triton.jit
def _gated(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """Return the function of `kernels.moe.Activation`; comparisons, unlike minima, keep NaN."""
    if KIND == "silu":
        result = gate / (1 + tl.exp(-gate)) * up
    elif KIND == "gelu":
        wide = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        result = gate / (1 + tl.exp(-wide)) * up
    else:
        tl.static_assert(KIND == "swiglu_clamped")
        if LIMIT is not None:
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        result = (up + 1) * (gate / (1 + tl.exp(-1.702 * gate)))
    return result


@triton.jit
def _of_expert(first, shared, expert, stride, NUM_EXPERTS: tl.constexpr):
    """Return where the matrix, scales or bias of an expert begin."""
    place = first + expert * stride
    return place if shared is None else tl.where(expert == NUM_EXPERTS, shared, place)


@triton.jit(do_not_specialize=["num_tiles", "num_tokens"])
def _experts_kernel(
    x, out, ids, order, tiles, num_tiles, num_tokens, first_values, second_values, first_scale, second_scale,
    first_bias, second_bias, shared_first_values, shared_second_values, shared_first_scale,
    shared_second_scale, shared_first_bias, shared_second_bias, first_zero, second_zero, first_whole,
    second_whole, stride_expert, stride_row,
    stride_scale_expert, stride_scale_row, stride_bias,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, CHOSEN_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODE: tl.constexpr, IS_DIVISOR: tl.constexpr,
    IS_CARD: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_FEW: tl.constexpr,  # no more tokens than a tile has lanes, and pairs were not grouped
    IS_SINGLE: tl.constexpr,  # one token, whose pairs have an expert each
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[pair] = KIND(x[token] @ first^T, x[token] @ second^T), or x[pair] @ first^T without KIND.

    One program per tile and BLOCK_N rows of the weights; tiles of one expert run next to each other. Tiles
    from num_tiles on belong to the shared expert, whose id is NUM_EXPERTS. With IS_FEW, there is a tile for
    each pair: that of an expert's first pair computes all of the expert's pairs, the others do nothing.
    """
    start_and_wait(PDL)
    tile = tl.program_id(0)
    strip = tl.program_id(1)
    row = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    is_routed = tile < num_tiles
    lane = tl.arange(0, BLOCK_M)
    if IS_FEW:
        expert = tl.load(ids + tile, mask=is_routed, other=NUM_EXPERTS)
        if IS_SINGLE:
            is_pair = lane < 1
            token, pair = lane, tile + lane
        else:
            k = tl.arange(0, CHOSEN_PAD)[None, :]
            is_choice = (lane < num_tokens)[:, None] & (k < NUM_CHOSEN)
            pairs = lane[:, None] * NUM_CHOSEN + k
            is_same = tl.load(ids + pairs, mask=is_choice, other=-1) == expert
            if tl.min(tl.where(is_same, pairs, tile)) < tile:
                return
            choice = tl.max(tl.where(is_same, k, -1), axis=1)
            is_pair = choice >= 0
            token, pair = lane, lane * NUM_CHOSEN + choice
    else:
        expert = tl.load(tiles + tile, mask=is_routed, other=NUM_EXPERTS).to(tl.int64)
        if expert < 0:
            return
        begin_pair = tl.load(tiles + num_tiles + tile, mask=is_routed, other=0)
        num_valid = tl.load(tiles + 2 * num_tiles + tile, mask=is_routed, other=0)
        is_pair = lane < num_valid
        pair = tl.load(order + begin_pair + lane, mask=is_pair, other=0)
        token = pair // NUM_CHOSEN
    if shared_first_values is not None:
        own = (tile - num_tiles) * BLOCK_M + lane
        is_pair = tl.where(is_routed, is_pair, own < num_tokens)
        token = tl.where(is_routed, token, own)
        pair = tl.where(is_routed, pair, num_tokens * NUM_CHOSEN + own)
    source = pair if KIND is None else token
    x_row = x + source.to(tl.int64)[:, None] * COLUMNS

    rows = tl.where(row < ROWS, row, 0)  # rows past the end are computed from row 0 and not stored
    first_values = _of_expert(first_values, shared_first_values, expert, stride_expert, NUM_EXPERTS)
    if SCALE_COLUMNS > 0:
        first_scale = _of_expert(first_scale, shared_first_scale, expert, stride_scale_expert, NUM_EXPERTS)
    if first_zero is not None:
        first_zero += expert * stride_scale_expert
        second_zero += expert * stride_scale_expert
    if first_whole is not None:
        first_whole += expert
        second_whole += expert
    if first_bias is not None:
        first_bias = _of_expert(first_bias, shared_first_bias, expert, stride_bias, NUM_EXPERTS)
    if KIND is not None:
        second_values = _of_expert(second_values, shared_second_values, expert, stride_expert, NUM_EXPERTS)
        if SCALE_COLUMNS > 0:
            second_scale = _of_expert(
                second_scale, shared_second_scale, expert, stride_scale_expert, NUM_EXPERTS
            )
        if second_bias is not None:
            second_bias = _of_expert(second_bias, shared_second_bias, expert, stride_bias, NUM_EXPERTS)

    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, COLUMNS, BLOCK_K):
        column = begin + tl.arange(0, BLOCK_K)[None, :]
        is_inside = is_pair[:, None]
        if COLUMNS % BLOCK_K != 0:
            is_inside = is_inside & (column < COLUMNS)
        part = tl.load(x_row + column, mask=is_inside, other=0.0)
        first = _multiply(
            first, part, first_values, first_scale, first_zero, first_whole, rows, begin, stride_row,
            stride_scale_row, COLUMNS, SCALE_ROWS, SCALE_COLUMNS, CODE, IS_DIVISOR, BLOCK_K, PRECISION,
            IS_CARD,
        )  # fmt: skip
        if KIND is not None:
            second = _multiply(
                second, part, second_values, second_scale, second_zero, second_whole, rows, begin, stride_row,
                stride_scale_row, COLUMNS, SCALE_ROWS, SCALE_COLUMNS, CODE, IS_DIVISOR, BLOCK_K, PRECISION,
                IS_CARD,
            )  # fmt: skip
    first = _finish(
        first, first_scale, first_bias, rows, stride_scale_row, COLUMNS, SCALE_ROWS, SCALE_COLUMNS, CODE
    )
    if KIND is not None:
        second = _finish(
            second, second_scale, second_bias, rows, stride_scale_row, COLUMNS, SCALE_ROWS, SCALE_COLUMNS,
            CODE,
        )  # fmt: skip
        dtype: tl.constexpr = out.dtype.element_ty  # both are rounded first, as in the reference
        first = _gated(first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32), KIND, LIMIT)
    place = pair.to(tl.int64)[:, None] * ROWS + row[None, :]
    tl.store(out + place, first.to(out.dtype.element_ty), mask=is_pair[:, None] & (row < ROWS)[None, :])


def run_experts(
    x: Tensor,
    parts: Parts,
    choice: ExpertChoice,
    activation: Activation,
    beside: Beside | None = None,
    onto: Onto | None = None,
    configs: tuple[Config, Config] | None = None,
) -> Summed:
    """Return the experts' output for x [N, E]; see `pick.mixtures.pick_experts`."""
    ids = choice.ids
    num_tokens, num_chosen = ids.shape
    num_pairs = ids.numel()
    if num_pairs == 0:
        return x.new_empty(x.shape), None if onto is None else x.new_empty(x.shape)
    gated, last = configs or choose_configs(parts, x.dtype, num_pairs)
    assert gated.block_m == last.block_m, "one list of tiles serves both products"
    num_experts, inner, _ = parts.gate.values.shape
    ids = ids.contiguous()
    groups = None if num_tokens <= gated.block_m else group(ids, num_experts, gated.block_m)
    shared = None if beside is None or isinstance(beside.value, Tensor) else beside.value
    num_rows = num_pairs if shared is None else num_pairs + num_tokens
    hidden, outputs = x.new_empty(num_rows, inner), x.new_empty(num_rows, x.shape[1])
    launch = functools.partial(_launch, ids=ids, groups=groups)
    both = None if shared is None else (shared.gate, shared.up)
    launch(x.contiguous(), hidden, (parts.gate, parts.up), both, config=gated, activation=activation)
    if beside is not None and shared is not None:
        beside = beside._replace(value=outputs[num_pairs:])
    launch(hidden, outputs, (parts.down,), None if shared is None else (shared.down,), config=last)
    return combine(outputs[:num_pairs].view(num_tokens, num_chosen, -1), choice.weights, beside, onto)


def choose_configs(parts: Parts, dtype: torch.dtype, num_pairs: int) -> tuple[Config, Config]:
    """Choose the tiles of both products, gate and up together and down, by shapes."""
    if dtype == torch.float32:
        gated = last = Config(LOW, 32, 32, num_warps=4, num_stages=3)
    elif num_pairs <= MAX_FEW:
        gated, last = _for_few(parts.gate, 2, num_pairs), _for_few(parts.down, 1, num_pairs)
    elif parts.gate.scale is not None:
        gated = last = MANY
    else:
        gated, last = _for_many(num_pairs / parts.gate.values.shape[0], parts.gate.values.device)
    return _within_a_scale(gated, parts.gate, dtype), _within_a_scale(last, parts.down, dtype)


def _for_few(part: Matrices, num_parts: int, num_pairs: int) -> Config:
    """Return the tiles for so many pairs, at most MAX_FEW."""
    if _has_codes(part):
        return _FEW_CODES
    table, columns = _FEW_GATED if num_parts == 2 else _FEW_DOWN, _num_columns(part)
    return next(config for pairs, least, config in table if num_pairs >= pairs and columns >= least)


def _for_many(pairs_per_expert: float, device: torch.device) -> tuple[Config, Config]:
    """Return the tiles for so many pairs per expert that fit the device."""
    fitting = (
        (gated, last)
        for least, gated, last in _BY_PAIRS
        if pairs_per_expert >= least and gated.fits(2, device) and last.fits(1, device)
    )
    return next(fitting, (MANY, MANY))


def _within_a_scale(config: Config, part: Matrices, dtype: torch.dtype) -> Config:
    """Return the config with steps whose columns share a scale; equal for any number of pairs."""
    if part.scale is None or _has_codes(part) or part.block[1] >= _num_columns(part):
        return config
    block_k = 128 if dtype != torch.float32 else 32  # the bits depend on it
    while part.block[1] % block_k != 0:
        block_k //= 2
    return config._replace(block_k=block_k)


def _has_codes(part: Matrices) -> bool:
    return part.code is not None


def _num_columns(part: Matrices) -> int:
    return part.values.shape[2] * (2 if _has_codes(part) else 1)


def _launch(
    x: Tensor,
    out: Tensor,
    routed: tuple[Matrices, ...],
    shared: tuple[Matrices, ...] | None,
    *,
    ids: Tensor,
    groups: Groups | None,
    config: Config,
    activation: Activation | None = None,
) -> None:
    """Launch one product, either of gate and up or of down, for the experts `ids` [N, K] of each token."""
    order, tiles = (ids, ids) if groups is None else groups
    num_tiles = ids.numel() if groups is None else tiles.shape[1]
    first = routed[0]
    num_experts, rows, _ = first.values.shape
    num_tokens, num_chosen = ids.shape
    num_shared = 0 if shared is None else triton.cdiv(num_tokens, config.block_m)
    grid = (num_tiles + num_shared, triton.cdiv(rows, config.block_n))
    _experts_kernel[grid](
        x, out, ids, order, tiles, num_tiles, num_tokens, *_pointers(routed),
        *_pointers(shared), *_further_pointers(routed), *first.values.stride()[:2],
        *((0, 0) if first.scale is None else first.scale.stride()[:2]),
        0 if first.bias is None else first.bias.stride(0),
        NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen,
        CHOSEN_PAD=triton.next_power_of_2(num_chosen), ROWS=rows, COLUMNS=_num_columns(first),
        SCALE_ROWS=first.block[0], SCALE_COLUMNS=0 if first.scale is None else first.block[1],
        CODE=first.code, IS_DIVISOR=first.is_divisor, IS_CARD=x.is_cuda,
        KIND=None if activation is None else activation.kind,
        LIMIT=None if activation is None else activation.limit,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, IS_FEW=groups is None, IS_SINGLE=num_tokens == 1,
        num_warps=config.num_warps, num_stages=config.num_stages, **overlap(x.device),
    )  # fmt: skip


def _pointers(parts: tuple[Matrices, ...] | None) -> list[Tensor | None]:
    """Return values, scales and biases, each of the first part, then of the second (or the first again)."""
    if parts is None:
        return [None] * 6
    ends = (parts[0], parts[-1])
    scales = [None if part.scale is None else _readable_scale(part.scale) for part in ends]
    return [*(_readable_values(part.values) for part in ends), *scales, *(part.bias for part in ends)]


def _further_pointers(parts: tuple[Matrices, ...]) -> list[Tensor | None]:
    """Return zero points and second scales, in the order of `_pointers`."""
    ends = (parts[0], parts[-1])
    wholes = [None if part.second is None else part.second.flatten() for part in ends]
    return [*(part.zero for part in ends), *wholes]


def _readable_values(values: Tensor) -> Tensor:
    """Return values, with fp8 viewed as bytes, for `widen`."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _readable_scale(scale: Tensor) -> Tensor:
    """Return scales, with those of 8 bits viewed as bytes; Triton does not have e8m0."""
    return scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale


# ---- the weighted sum of the outputs


@triton.jit
def _combine_kernel(
    outputs, weights, shared_gate, shared_value, onto, norm_weight, total, normed, stride_gate, eps,
    SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum outputs with the rounding of `reference_combine`; one program per token and BLOCK values.

    With `onto`, a program has all values of a token, for the norm. Its bits are those of `rms_norm` if 16
    divides SIZE: the sum of squares then has the same layout in both.
    """
    let_next_start(PDL)
    dtype = total.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < SIZE
    if onto is not None:
        scale = tl.load(norm_weight + column, mask=is_inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    place = token * SIZE + column
    sums = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + k
        weight = tl.load(weights + pair).to(dtype).to(tl.float32)
        output = tl.load(outputs + pair * SIZE + column, mask=is_inside, other=0.0).to(tl.float32)
        sums += (weight * output).to(dtype).to(tl.float32)
    result = sums.to(dtype)
    if shared_value is not None:
        logit = tl.load(shared_gate + token * stride_gate).to(tl.float32)
        small = tl.exp(-tl.abs(logit)).to(dtype).to(tl.float32)
        below = (1 + small).to(dtype).to(tl.float32)
        share = (tl.where(logit >= 0, 1.0, small) / below).to(dtype).to(tl.float32)
        value = tl.load(shared_value + place, mask=is_inside, other=0.0).to(tl.float32)
        term = (share * value).to(dtype).to(tl.float32)
        result = (result.to(tl.float32) + term).to(dtype)
    if onto is not None:
        stream = tl.load(onto + place, mask=is_inside, other=0.0).to(tl.float32)
        result = (stream + result.to(tl.float32)).to(dtype)
        value = tl.where(is_inside, result.to(tl.float32), 0.0)
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
        tl.store(normed + place, (value * scale).to(dtype), mask=is_inside)
    tl.store(total + place, result, mask=is_inside)


def combine(
    outputs: Tensor, weights: Tensor, beside: Beside | None = None, onto: Onto | None = None
) -> Summed:
    """Return the weighted sum of outputs [N, K, E]; see `pick.mixtures.pick_experts`."""
    num_tokens, num_chosen, size = outputs.shape
    total = outputs.new_empty(num_tokens, size)
    normed = None if onto is None else torch.empty_like(total)
    gate, value = (None, None) if beside is None else beside
    assert value is None or isinstance(value, Tensor)
    stream, scale, eps = (None, None, 0.0) if onto is None else onto
    whole = triton.next_power_of_2(size)
    block = min(512, whole) if onto is None else whole
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        outputs, weights.contiguous(), gate, None if value is None else value.contiguous(),
        None if stream is None else stream.contiguous(), scale, total, normed,
        0 if gate is None else gate.stride(0), eps, SIZE=size, NUM_CHOSEN=num_chosen, BLOCK=block,
        num_warps=2 if onto is None else norm_warps(block), **overlap(outputs.device),
    )  # fmt: skip
    return total, normed
