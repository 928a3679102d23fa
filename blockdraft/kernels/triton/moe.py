"""Mixtures of experts on a GPU: route, group the pairs by expert, two grouped products, combine.

A pair is a (token, place) of the router's choice, numbered token * K + place; all scratch rows are in that
order. `order` lists the pairs expert by expert, and `tiles` [3, T] cuts it: tile t is expert tiles[0, t] with
tiles[2, t] pairs from order[tiles[1, t]] on; surplus tiles have expert -1. T follows from the shapes alone,
so a CUDA graph holds for every routing.

A pair's bits follow from its token's row and its expert: sums run over the columns in one fixed order, and a
tile's other rows do not matter. The tile's height changes at MAX_FEW pairs, and bits may change with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton.launch import has_pdl

if TYPE_CHECKING:
    from blockdraft.kernels.moe import Activation, Groups, Matrices, Parts, Shared

MAX_FEW = 512  # pairs up to which tiles are as low as a tensor core allows
LOW = 16  # pairs of such a tile
MAX_LOGITS = 1 << 13  # that one program keeps in its registers
MAX_COMPARED = 1024  # pairs that are sorted by comparing all with all; above, PyTorch sorts


class Config(NamedTuple):
    """Sizes of one grouped product: a tile is M pairs x N rows of the weight, K columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# ---- routing


@triton.jit
def _choose(
    logits,
    expert_scale,
    token,
    num_tokens,
    stride_token,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_OVER_ALL: tl.constexpr,
):
    """For each token [T] and expert: its place in the token's choice, or -1, and its weight; [T, BLOCK] each.

    No sum follows the layout of the tile, so a token's bits are the same in every tile.
    """
    expert = tl.arange(0, BLOCK)[None, :]
    is_expert = (expert < NUM_EXPERTS) & (token < num_tokens)[:, None]
    pointers = logits + token.to(tl.int64)[:, None] * stride_token + expert
    x = tl.load(pointers, mask=is_expert, other=0.0).to(tl.float32)
    # Undefined logits lose but keep the ids in range; -inf is below all of them and marks what is taken.
    x = tl.where(x >= -3.0e38, x, -3.0e38)
    x = tl.where(expert < NUM_EXPERTS, x, -float("inf"))
    top = tl.max(x, axis=1)
    weight = tl.exp(x - top[:, None])
    place = tl.full(x.shape, -1, tl.int32)
    total = tl.zeros(top.shape, tl.float32)
    for k in range(NUM_CHOSEN):
        best, winner = tl.max(x, axis=1, return_indices=True)  # the lowest id of several
        is_winner = expert == winner[:, None]
        place = tl.where(is_winner, k, place)
        total += tl.exp(best - top)
        x = tl.where(is_winner, -float("inf"), x)
    if IS_OVER_ALL:
        # Whole multiples of 2 ** -40 add up to the same in any order.
        total = tl.sum((weight * 1099511627776.0).to(tl.int64), axis=1).to(tl.float32) / 1099511627776.0
    weight = weight / total[:, None]
    if expert_scale is not None:
        weight *= tl.load(expert_scale + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)
    return tl.where(is_expert, place, -1), weight


@triton.jit
def _store_choice(weights, ids, token, place, weight, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    pair = token[:, None] * NUM_CHOSEN + place
    expert = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], place.shape)
    tl.store(weights + pair, weight, mask=place >= 0)
    tl.store(ids + pair, expert.to(tl.int64), mask=place >= 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits,
    expert_scale,
    weights,
    ids,
    num_tokens,
    stride_token,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_OVER_ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) + tl.arange(0, 1)
    place, weight = _choose(
        logits,
        expert_scale,
        token,
        num_tokens,
        stride_token,
        NUM_EXPERTS,
        NUM_CHOSEN,
        BLOCK,
        IS_OVER_ALL,
    )
    _store_choice(weights, ids, token, place, weight, NUM_CHOSEN, BLOCK)


def route(
    logits: Tensor, num_chosen: int, *, is_over_all: bool, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [N, K] float32 and ids [N, K] int64, the largest first; see `kernels.moe.route`."""
    num_tokens, num_experts = logits.shape
    assert num_chosen <= num_experts
    weights = logits.new_empty(num_tokens, num_chosen, dtype=torch.float32)
    ids = logits.new_empty(num_tokens, num_chosen, dtype=torch.int64)
    if num_tokens == 0:
        return weights, ids
    logits = _with_whole_rows(logits)
    pdl = has_pdl(logits.device)
    _route_kernel[(num_tokens,)](
        logits,
        expert_scale,
        weights,
        ids,
        num_tokens,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=num_chosen,
        BLOCK=triton.next_power_of_2(num_experts),
        IS_OVER_ALL=is_over_all,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return weights, ids


def _with_whole_rows(x: Tensor) -> Tensor:
    """Rows may be apart, as in some columns of a wider tensor, but values of one row are neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


# ---- pairs grouped by expert


@triton.jit
def _write_tiles(tiles, first, count, expert, num_tiles, BLOCK_M: tl.constexpr):
    """`count` pairs from `first` on for each expert, cut into tiles; the rest of `tiles` is surplus."""
    cuts = (count + BLOCK_M - 1) // BLOCK_M
    place = tl.cumsum(cuts, axis=0) - cuts
    for cut in range(tl.max(cuts, axis=0)):
        is_tile = cut < cuts
        done = cut * BLOCK_M
        tl.store(tiles + place + cut, expert, mask=is_tile)
        tl.store(tiles + num_tiles + place + cut, first + done, mask=is_tile)
        tl.store(tiles + 2 * num_tiles + place + cut, tl.minimum(count - done, BLOCK_M), mask=is_tile)
    lane = tl.arange(0, 128)
    for begin in range(tl.sum(cuts, axis=0), num_tiles, 128):
        tl.store(tiles + begin + lane, -1, mask=begin + lane < num_tiles)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _group_kernel(
    ids,
    order,
    tiles,
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program places SHARE pairs by counting those before them; the first one writes the tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    other = tl.arange(0, PAIRS)
    others = tl.load(ids + other, mask=other < num_pairs, other=NUM_EXPERTS).to(tl.int32)
    keys = others * PAIRS + other
    pair = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    is_pair = pair < num_pairs
    key = tl.load(ids + pair, mask=is_pair, other=NUM_EXPERTS).to(tl.int32) * PAIRS + pair
    position = tl.sum((keys[None, :] < key[:, None]).to(tl.int32), axis=1)
    tl.store(order + position, pair, mask=is_pair)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, BLOCK_X)
        count = tl.histogram(others, BLOCK_X)  # what is beyond num_pairs falls into bin NUM_EXPERTS
        count = tl.where(expert < NUM_EXPERTS, count, 0)
        _write_tiles(tiles, tl.cumsum(count, axis=0) - count, count, expert, num_tiles, BLOCK_M)


@triton.jit(do_not_specialize=["num_tiles"])
def _tiles_kernel(
    starts, tiles, num_tiles, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr
):
    expert = tl.arange(0, BLOCK_X)
    is_expert = expert < NUM_EXPERTS
    first = tl.load(starts + expert, mask=is_expert, other=0).to(tl.int32)
    end = tl.load(starts + expert + 1, mask=is_expert, other=0).to(tl.int32)
    _write_tiles(tiles, first, end - first, expert, num_tiles, BLOCK_M)


def group(ids: Tensor, num_experts: int, block_m: int) -> Groups:
    """order [P] and tiles [3, T], int32, of the pairs ids [N, K]."""
    num_pairs = ids.numel()
    num_tiles = max_tiles(num_pairs, num_experts, block_m)
    tiles = ids.new_empty(3, num_tiles, dtype=torch.int32)
    if num_pairs > MAX_COMPARED:
        ranked, order = ids.flatten().sort(stable=True)
        experts = torch.arange(num_experts + 1, device=ids.device)
        starts = torch.searchsorted(ranked, experts)
        _tiles_kernel[(1,)](
            starts,
            tiles,
            num_tiles,
            NUM_EXPERTS=num_experts,
            BLOCK_M=block_m,
            BLOCK_X=triton.next_power_of_2(num_experts),
        )
        return order.to(torch.int32), tiles
    order = ids.new_empty(num_pairs, dtype=torch.int32)
    pairs = max(16, triton.next_power_of_2(num_pairs))
    share = min(pairs, 32)
    pdl = has_pdl(ids.device)
    _group_kernel[(triton.cdiv(num_pairs, share),)](
        ids,
        order,
        tiles,
        num_pairs,
        num_tiles,
        NUM_EXPERTS=num_experts,
        PAIRS=pairs,
        SHARE=share,
        BLOCK_M=block_m,
        BLOCK_X=triton.next_power_of_2(num_experts + 1),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return order, tiles


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _route_and_group_kernel(
    logits,
    expert_scale,
    weights,
    ids,
    order,
    tiles,
    num_tokens,
    num_tiles,
    stride_token,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_OVER_ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for all tokens; an expert's pairs are in the order of their tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.arange(0, TOKENS)
    place, weight = _choose(
        logits,
        expert_scale,
        token,
        num_tokens,
        stride_token,
        NUM_EXPERTS,
        NUM_CHOSEN,
        BLOCK,
        IS_OVER_ALL,
    )
    _store_choice(weights, ids, token, place, weight, NUM_CHOSEN, BLOCK)
    is_chosen = (place >= 0).to(tl.int32)
    count = tl.sum(is_chosen, axis=0)
    first = tl.cumsum(count, axis=0) - count
    position = first[None, :] + tl.cumsum(is_chosen, axis=0) - is_chosen
    tl.store(order + position, token[:, None] * NUM_CHOSEN + place, mask=place >= 0)
    _write_tiles(tiles, first, count, tl.arange(0, BLOCK), num_tiles, BLOCK_M)


def can_group_at_once(num_tokens: int, num_experts: int, num_chosen: int) -> bool:
    """Whether one program can hold the logits of all tokens, and the tiles are low."""
    num_logits = triton.next_power_of_2(num_tokens) * triton.next_power_of_2(num_experts)
    return 0 < num_tokens * num_chosen <= MAX_FEW and num_logits <= MAX_LOGITS


def route_and_group(
    logits: Tensor, num_chosen: int, *, is_over_all: bool, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Groups]:
    """`route`, and `group` into tiles of LOW pairs, in one launch."""
    num_tokens, num_experts = logits.shape
    assert num_chosen <= num_experts
    assert can_group_at_once(num_tokens, num_experts, num_chosen)
    num_pairs = num_tokens * num_chosen
    weights = logits.new_empty(num_tokens, num_chosen, dtype=torch.float32)
    ids = logits.new_empty(num_tokens, num_chosen, dtype=torch.int64)
    order = logits.new_empty(num_pairs, dtype=torch.int32)
    tiles = logits.new_empty(3, max_tiles(num_pairs, num_experts, LOW), dtype=torch.int32)
    tokens, block = triton.next_power_of_2(num_tokens), triton.next_power_of_2(num_experts)
    logits = _with_whole_rows(logits)
    pdl = has_pdl(logits.device)
    _route_and_group_kernel[(1,)](
        logits,
        expert_scale,
        weights,
        ids,
        order,
        tiles,
        num_tokens,
        tiles.shape[1],
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=num_chosen,
        TOKENS=tokens,
        BLOCK=block,
        BLOCK_M=LOW,
        IS_OVER_ALL=is_over_all,
        PDL=pdl,
        num_warps=min(8, max(1, tokens * block // 256)),
        launch_pdl=pdl,
    )
    return weights, ids, (order, tiles)


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most that any routing asks for: a tile per expert in use, and the full tiles beyond those."""
    in_use = min(num_pairs, num_experts)
    return (num_pairs + in_use * (block_m - 1)) // block_m


# ---- the grouped products


@triton.jit
def _e2m1(code, factor):
    """The value of 4-bit codes: their bits as the ends of a float's exponent and mantissa, times a power."""
    code = code.to(tl.uint32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor  # 2 ** 126


@triton.jit
def _multiply_fp4(
    total,
    x,
    values,
    scale,
    rows,
    begin,
    stride_row,
    stride_scale,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_N: tl.constexpr = rows.shape[0]
    GROUPS: tl.constexpr = BLOCK_K // 32
    row = rows[:, None].to(tl.int64)
    byte = begin // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
    group = begin // 32 + tl.arange(0, GROUPS)[None, :]
    if COLUMNS % BLOCK_K == 0:
        codes = tl.load(values + row * stride_row + byte)
        exponent = tl.load(scale + row * stride_scale + group)
    else:
        codes = tl.load(values + row * stride_row + byte, mask=byte < COLUMNS // 2, other=0)
        exponent = tl.load(scale + row * stride_scale + group, mask=group < COLUMNS // 32, other=0)
    exponent = exponent.to(tl.int32)
    power = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)  # 2 ** (e - 127)
    power = tl.broadcast_to(power[:, :, None], (BLOCK_N, GROUPS, 16)).reshape(BLOCK_N, BLOCK_K // 2)
    weight = tl.join(_e2m1(codes & 15, power).to(x.dtype), _e2m1(codes >> 4, power).to(x.dtype))
    weight = weight.reshape(BLOCK_N, BLOCK_K)
    return tl.dot(x, tl.trans(weight), total, input_precision=PRECISION)


@triton.jit
def _multiply(
    total,
    x,
    values,
    scale,
    rows,
    begin,
    stride_row,
    stride_scale,
    COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    IS_FP4: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + x @ W^T for columns from `begin` on; the scales of whole rows are left to the end."""
    if IS_FP4:
        total = _multiply_fp4(
            total, x, values, scale, rows, begin, stride_row, stride_scale, COLUMNS, BLOCK_K, PRECISION
        )
    else:
        column = begin + tl.arange(0, BLOCK_K)
        pointers = values + rows[None, :].to(tl.int64) * stride_row + column[:, None]
        if COLUMNS % BLOCK_K == 0:
            weight = tl.load(pointers)
        else:
            weight = tl.load(pointers, mask=column[:, None] < COLUMNS, other=0)
        if SCALE_COLUMNS == 0 or SCALE_COLUMNS >= COLUMNS:
            total = tl.dot(x, weight.to(x.dtype), total, input_precision=PRECISION)
        else:
            block = (rows // SCALE_ROWS) * stride_scale + begin // SCALE_COLUMNS
            factor = tl.load(scale + block).to(tl.float32)
            total += tl.dot(x, weight.to(x.dtype), input_precision=PRECISION) * factor[None, :]
    return total


@triton.jit
def _finish(
    total,
    scale,
    bias,
    rows,
    stride_scale,
    COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    IS_FP4: tl.constexpr,
):
    """Scales of whole rows, and the bias."""
    if SCALE_COLUMNS >= COLUMNS and not IS_FP4:
        total *= tl.load(scale + (rows // SCALE_ROWS) * stride_scale).to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + rows).to(tl.float32)[None, :]
    return total


@triton.jit
def _gated(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """See `kernels.moe.Activation`; comparisons rather than minima, so that undefined values stay."""
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


@triton.jit(do_not_specialize=["num_tiles"])
def _experts_kernel(
    x,
    out,
    order,
    tiles,
    num_tiles,
    first_values,
    second_values,
    first_scale,
    second_scale,
    first_bias,
    second_bias,
    stride_expert,
    stride_row,
    stride_scale_expert,
    stride_scale_row,
    stride_bias,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED_BY: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    IS_FP4: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = x[pair // SHARED_BY] @ first^T, or, with an activation of KIND, of that and of @ second^T.

    One program per tile and BLOCK_N rows of the weights; tiles of one expert run next to each other.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    begin_pair = tl.load(tiles + num_tiles + tile)
    num_valid = tl.load(tiles + 2 * num_tiles + tile)
    lane = tl.arange(0, BLOCK_M)
    is_pair = lane < num_valid
    pair = tl.load(order + begin_pair + lane, mask=is_pair, other=0)
    x_row = x + (pair // SHARED_BY).to(tl.int64)[:, None] * COLUMNS

    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.where(row < ROWS, row, 0)  # what is past the end is computed from row 0 and not stored
    first_values += expert * stride_expert
    if SCALE_COLUMNS > 0:
        first_scale += expert * stride_scale_expert
    if first_bias is not None:
        first_bias += expert * stride_bias
    if KIND is not None:
        second_values += expert * stride_expert
        if SCALE_COLUMNS > 0:
            second_scale += expert * stride_scale_expert
        if second_bias is not None:
            second_bias += expert * stride_bias

    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, COLUMNS, BLOCK_K):
        column = begin + tl.arange(0, BLOCK_K)[None, :]
        is_inside = is_pair[:, None]
        if COLUMNS % BLOCK_K != 0:
            is_inside = is_inside & (column < COLUMNS)
        part = tl.load(x_row + column, mask=is_inside, other=0.0)
        first = _multiply(
            first,
            part,
            first_values,
            first_scale,
            rows,
            begin,
            stride_row,
            stride_scale_row,
            COLUMNS,
            SCALE_ROWS,
            SCALE_COLUMNS,
            IS_FP4,
            BLOCK_K,
            PRECISION,
        )
        if KIND is not None:
            second = _multiply(
                second,
                part,
                second_values,
                second_scale,
                rows,
                begin,
                stride_row,
                stride_scale_row,
                COLUMNS,
                SCALE_ROWS,
                SCALE_COLUMNS,
                IS_FP4,
                BLOCK_K,
                PRECISION,
            )
    first = _finish(
        first, first_scale, first_bias, rows, stride_scale_row, COLUMNS, SCALE_ROWS, SCALE_COLUMNS, IS_FP4
    )
    if KIND is not None:
        second = _finish(
            second,
            second_scale,
            second_bias,
            rows,
            stride_scale_row,
            COLUMNS,
            SCALE_ROWS,
            SCALE_COLUMNS,
            IS_FP4,
        )
        first = _gated(first, second, KIND, LIMIT)
    place = pair.to(tl.int64)[:, None] * ROWS + row[None, :]
    tl.store(out + place, first.to(out.dtype.element_ty), mask=is_pair[:, None] & (row < ROWS)[None, :])


def run_experts(
    x: Tensor,
    parts: Parts,
    ids: Tensor,
    activation: Activation,
    groups: Groups | None = None,
    configs: tuple[Config, Config] | None = None,
) -> Tensor:
    """The chosen experts' outputs [N, K, E] in x's dtype, not weighed yet; x [N, E], ids [N, K].

    `groups` are those of `route_and_group`, where there are any.
    """
    num_tokens, num_chosen = ids.shape
    num_experts, inner, _ = parts.gate.values.shape
    outputs = x.new_empty(num_tokens, num_chosen, x.shape[1])
    if ids.numel() == 0:
        return outputs
    gated, last = configs or (
        choose_config(parts.gate, x.dtype, ids.numel(), 2),
        choose_config(parts.down, x.dtype, ids.numel(), 1),
    )
    assert gated.block_m == last.block_m, "one list of tiles serves both products"
    if groups is None:
        groups = group(ids.contiguous(), num_experts, gated.block_m)
    else:
        assert gated.block_m == LOW, "the groups are of low tiles"
    hidden = x.new_empty(ids.numel(), inner)
    _launch(x.contiguous(), hidden, groups, (parts.gate, parts.up), gated, activation, num_chosen)
    _launch(hidden, outputs, groups, (parts.down,), last, None, 1)
    return outputs


def choose_config(part: Matrices, dtype: torch.dtype, num_pairs: int, num_parts: int) -> Config:
    """By shapes alone. Few pairs: bound by reading weights, so low tiles and many loads in flight."""
    is_fp4 = part.values.dtype == torch.uint8
    columns = part.values.shape[2] * (2 if is_fp4 else 1)
    if dtype == torch.float32:
        config = Config(LOW, 32, 32, num_warps=4, num_stages=3)
    elif num_pairs > MAX_FEW:
        config = Config(64, 64, 64, num_warps=4, num_stages=3)
    else:
        # Gate and up together read 2 x 32 rows a step. Measured on an H200 (benchmarks/log.md).
        config = Config(LOW, 32, 128, num_warps=4, num_stages=4)
        if num_parts == 1 and not is_fp4:
            config = Config(LOW, 16, 128, num_warps=2, num_stages=5)
    if part.scale is not None and part.block[1] < columns and not is_fp4:
        while part.block[1] % config.block_k != 0:  # the columns of one step share a scale
            config = config._replace(block_k=config.block_k // 2)
    return config


def _launch(
    x: Tensor,
    out: Tensor,
    groups: Groups,
    parts: tuple[Matrices, ...],
    config: Config,
    activation: Activation | None,
    shared_by: int,
) -> None:
    order, tiles = groups
    first, second = parts[0], parts[-1]
    rows, is_fp4 = first.values.shape[1], first.values.dtype == torch.uint8
    columns = first.values.shape[2] * (2 if is_fp4 else 1)
    scales = [None if part.scale is None else _readable_scale(part.scale) for part in (first, second)]
    strides = (0, 0) if scales[0] is None else scales[0].stride()[:2]
    pdl = has_pdl(x.device)
    _experts_kernel[(tiles.shape[1], triton.cdiv(rows, config.block_n))](
        x,
        out,
        order,
        tiles,
        tiles.shape[1],
        first.values,
        second.values,
        *scales,
        first.bias,
        second.bias,
        *first.values.stride()[:2],
        *strides,
        0 if first.bias is None else first.bias.stride(0),
        ROWS=rows,
        COLUMNS=columns,
        SHARED_BY=shared_by,
        SCALE_ROWS=first.block[0],
        SCALE_COLUMNS=0 if first.scale is None else first.block[1],
        IS_FP4=is_fp4,
        KIND=None if activation is None else activation.kind,
        LIMIT=None if activation is None else activation.limit,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )


def _readable_scale(scale: Tensor) -> Tensor:
    """Triton has no e8m0: its bytes are read as they are."""
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


# ---- the outputs weighed and summed


@triton.jit
def _combine_kernel(
    outputs,
    weights,
    shared_gate,
    shared_value,
    onto,
    total,
    stride_gate,
    SIZE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and BLOCK values; every rounding is that of `reference_combine`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype = total.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < SIZE
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
    tl.store(total + place, result, mask=is_inside)


def combine(
    outputs: Tensor, weights: Tensor, shared: Shared | None = None, onto: Tensor | None = None
) -> Tensor:
    """[N, E] of outputs [N, K, E] and weights [N, K]; see `kernels.moe.experts`."""
    num_tokens, num_chosen, size = outputs.shape
    total = outputs.new_empty(num_tokens, size)
    if num_tokens == 0:
        return total
    block = min(512, triton.next_power_of_2(size))
    pdl = has_pdl(outputs.device)
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        outputs,
        weights.contiguous(),
        None if shared is None else shared.gate,
        None if shared is None else shared.value.contiguous(),
        None if onto is None else onto.contiguous(),
        total,
        0 if shared is None else shared.gate.stride(0),
        SIZE=size,
        NUM_CHOSEN=num_chosen,
        BLOCK=block,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    return total
