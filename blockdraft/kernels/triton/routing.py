"""Routing on a GPU: chooses experts for each token, and groups the (token, expert) pairs by expert.

A pair is one of the K choices of a token, numbered token * K + index. `order` lists the pairs expert by
expert, and `tiles` [3, T] divides that list. Tile t has the expert tiles[0, t], begins at order[tiles[1, t]]
and has tiles[2, t] pairs; unused tiles have expert -1. T depends only on shapes, so one CUDA graph works for
every routing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.triton.launch import overlap, start_and_wait

Groups = tuple[Tensor, Tensor]  # order and tiles, see the module's docstring

MAX_FEW = 512  # pairs; up to this number, tiles are as low as a tensor core allows
LOW = 16  # pairs of such a low tile
MAX_COMPARED = 1024  # the most pairs to sort by comparing all with all; more are counted first
CHUNK = 128  # pairs that a program of a larger sort compares with each other
MAX_SHARES = 128  # the most programs of such a sort, as each reads the counts of all


# ---- routing


@triton.jit
def _in_order(bits):
    """Map the upper half of a float's bits to a number that orders like the float, or that number back."""
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@triton.jit
def _route_kernel(
    logits, expert_scale, weights, ids, stride_token,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, IS_OVER_ALL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Do `route`, with one program per token."""
    start_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    x = tl.load(logits + token * stride_token + expert, mask=is_expert, other=0.0).to(tl.float32)
    # NaN logits are chosen last, but keep ids in range; -inf is below all logits and marks chosen experts.
    lowest = -2.9774707105582116e38  # 1.75 * 2 ** 127, which bfloat16 holds
    x = tl.where(x >= lowest, x, lowest)
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 equals 0.0
    x = tl.where(is_expert, x, -float("inf"))
    top = tl.max(x, axis=0)
    weight = tl.exp(x - top)
    place = tl.full((BLOCK,), -1, tl.int32)
    total = top * 0.0
    if logits.dtype.element_ty == tl.bfloat16:
        # Logit and id as one integer: the hardware finds the greatest of a warp at once.
        key = (_in_order(x.to(tl.int32, bitcast=True) >> 16) << 16) | (0xFFFF - expert)
        for k in range(NUM_CHOSEN):
            best_key = tl.max(key, axis=0)
            is_winner = key == best_key
            place = tl.where(is_winner, k, place)
            total += tl.exp((_in_order(best_key >> 16) << 16).to(tl.float32, bitcast=True) - top)
            key = tl.where(is_winner, -0x80000000, key)
    else:
        for k in range(NUM_CHOSEN):
            best, winner = tl.max(x, axis=0, return_indices=True)  # ties: the lowest id
            is_winner = expert == winner
            place = tl.where(is_winner, k, place)
            total += tl.exp(best - top)
            x = tl.where(is_winner, -float("inf"), x)
    if IS_OVER_ALL:
        # Sums of integer multiples of 2 ** -40 are equal in any order.
        total = tl.sum((weight * 1099511627776.0).to(tl.int64), axis=0).to(tl.float32) / 1099511627776.0
    weight = weight / total
    if expert_scale is not None:
        weight *= tl.load(expert_scale + expert, mask=is_expert, other=0.0).to(tl.float32)
    is_chosen = is_expert & (place >= 0)
    pair = token * NUM_CHOSEN + place
    tl.store(weights + pair, weight, mask=is_chosen)
    tl.store(ids + pair, expert.to(tl.int64), mask=is_chosen)


def route(
    logits: Tensor, num_chosen: int, *, is_over_all: bool, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights [N, K] float32 and ids [N, K] int64, largest first; see `pick.mixtures.pick_route`."""
    num_tokens, num_experts = logits.shape
    assert num_chosen <= num_experts
    weights = logits.new_empty(num_tokens, num_chosen, dtype=torch.float32)
    ids = logits.new_empty(num_tokens, num_chosen, dtype=torch.int64)
    if num_tokens == 0:
        return weights, ids
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    _route_kernel[(num_tokens,)](
        logits, expert_scale, weights, ids, logits.stride(0),
        NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen, BLOCK=triton.next_power_of_2(num_experts),
        IS_OVER_ALL=is_over_all, num_warps=1, **overlap(logits.device),
    )  # fmt: skip
    return weights, ids


# ---- pairs grouped by expert


@triton.jit
def _write_tiles(tiles, first, count, expert, num_tiles, BLOCK_M: tl.constexpr):
    """Divide each expert's `count` pairs, from `first` on, into tiles; mark the rest of `tiles` as unused."""
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
    ids, order, tiles, num_pairs, num_tiles,
    NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort SHARE pairs per program by counting those before them; the first program writes the tiles."""
    start_and_wait(PDL)
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
        count = tl.histogram(others, BLOCK_X)  # entries past num_pairs are in bin NUM_EXPERTS
        count = tl.where(expert < NUM_EXPERTS, count, 0)
        _write_tiles(tiles, tl.cumsum(count, axis=0) - count, count, expert, num_tiles, BLOCK_M)


@triton.jit
def _read_chunk(ids, begin, num_pairs, NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the numbers of CHUNK pairs and their experts, NUM_EXPERTS past the last pair."""
    pair = begin + tl.arange(0, CHUNK)
    return pair, tl.load(ids + pair, mask=pair < num_pairs, other=NUM_EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs", "share"])
def _count_kernel(
    ids, counts, num_pairs, share,
    NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the pairs of each expert in `share` pairs per program; the first launch of a large sort."""
    start_and_wait(PDL)
    program = tl.program_id(0)
    expert = tl.arange(0, BLOCK_X)
    count = tl.zeros((BLOCK_X,), tl.int32)
    for begin in range(program * share, (program + 1) * share, CHUNK):
        _, chosen = _read_chunk(ids, begin, num_pairs, NUM_EXPERTS, CHUNK)
        count += tl.histogram(chosen, BLOCK_X)
    tl.store(counts + program * NUM_EXPERTS + expert, count, mask=expert < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "share", "num_shares", "num_tiles"])
def _place_kernel(
    ids, counts, order, tiles, num_pairs, share, num_shares, num_tiles,
    NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Store the pairs of each program's share in their places; one more program writes the tiles."""
    start_and_wait(PDL)
    program = tl.program_id(0)
    expert = tl.arange(0, BLOCK_X)
    total = tl.zeros((BLOCK_X,), tl.int32)
    before = tl.zeros((BLOCK_X,), tl.int32)  # in the shares of earlier programs
    for begin in range(0, num_shares, 16):
        other = begin + tl.arange(0, 16)
        is_count = (other < num_shares)[:, None] & (expert < NUM_EXPERTS)[None, :]
        part = tl.load(counts + other[:, None] * NUM_EXPERTS + expert[None, :], mask=is_count, other=0)
        total += tl.sum(part, axis=0)
        before += tl.sum(tl.where(other[:, None] < program, part, 0), axis=0)
    first = tl.cumsum(total, axis=0) - total
    if program == num_shares:
        _write_tiles(tiles, first, total, expert, num_tiles, BLOCK_M)
        return
    place = first + before  # of each expert's next pair
    lane = tl.arange(0, CHUNK)
    for begin in range(program * share, (program + 1) * share, CHUNK):
        pair, chosen = _read_chunk(ids, begin, num_pairs, NUM_EXPERTS, CHUNK)
        is_earlier = (chosen[None, :] == chosen[:, None]) & (lane[None, :] < lane[:, None])
        position = tl.gather(place, chosen, 0) + tl.sum(is_earlier.to(tl.int32), axis=1)
        tl.store(order + position, pair, mask=pair < num_pairs)
        place += tl.histogram(chosen, BLOCK_X)


def group(ids: Tensor, num_experts: int, block_m: int) -> Groups:
    """Return int32 `order` [P] and `tiles` [3, T] of the pairs in ids [N, K]."""
    num_pairs = ids.numel()
    num_tiles = max_tiles(num_pairs, num_experts, block_m)
    tiles = ids.new_empty(3, num_tiles, dtype=torch.int32)
    order = ids.new_empty(num_pairs, dtype=torch.int32)
    sizes = {
        "NUM_EXPERTS": num_experts,
        "BLOCK_X": triton.next_power_of_2(num_experts + 1),  # a place for entries past the last pair
        **overlap(ids.device),
    }
    if num_pairs > MAX_COMPARED:
        num_shares, share = _shares(num_pairs)
        counts = ids.new_empty(num_shares, num_experts, dtype=torch.int32)
        _count_kernel[(num_shares,)](ids, counts, num_pairs, share, CHUNK=CHUNK, num_warps=4, **sizes)
        _place_kernel[(num_shares + 1,)](
            ids, counts, order, tiles, num_pairs, share, num_shares, num_tiles,
            CHUNK=CHUNK, BLOCK_M=block_m, num_warps=8, **sizes,
        )  # fmt: skip
        return order, tiles
    pairs = max(16, triton.next_power_of_2(num_pairs))
    share = min(pairs, 32)
    _group_kernel[(triton.cdiv(num_pairs, share),)](
        ids, order, tiles, num_pairs, num_tiles,
        PAIRS=pairs, SHARE=share, BLOCK_M=block_m, num_warps=4, **sizes,
    )  # fmt: skip
    return order, tiles


def _shares(num_pairs: int) -> tuple[int, int]:
    """Return how many programs sort so many pairs, and the pairs of each."""
    share = CHUNK * triton.cdiv(num_pairs, CHUNK * MAX_SHARES)
    return triton.cdiv(num_pairs, share), share


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the most tiles that a routing can need: one per expert in use, and further full tiles."""
    in_use = min(num_pairs, num_experts)
    return (num_pairs + in_use * (block_m - 1)) // block_m
