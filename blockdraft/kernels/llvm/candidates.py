"""The walk over candidates on a CPU; see `kernels/candidates.py` for the contract.

1. `scan` finds the best candidates of every part of a column, best first. It reads only the blocks of tokens
   with the largest scores. If rows sample without filters, candidates are the best with noise, which is drawn
   only for tokens that it can make candidates, as in `llvm/sampling.py`.
2. `follow` goes through the columns of a row in order. The previous draft is then known, so a column needs
   one pair score per candidate instead of one per pair.

A pair score is summed in a fixed order, so its bits do not depend on the batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from blockdraft.kernels.candidates import PairScores, reference_walk
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import Jit, repeat
from blockdraft.kernels.llvm.language import (
    Floats,
    Int,
    Longs,
    Pointer,
    Value,
    exp,
    f32,
    fma,
    i32,
    i64,
    largest,
    load,
    select,
    store,
)
from blockdraft.kernels.llvm.sampling import (
    MOST_NOISE,
    adjusted_at,
    counters,
    greatest_of,
    gumbel_of,
    least_word,
    noise_of,
    philox,
)
from blockdraft.kernels.sampling import MIN_TEMPERATURE, NEVER, Places, SamplingBatch
from blockdraft.kernels.sampling_tables import Real as Column
from blockdraft.kernels.sampling_tables import Whole

MOST = 64  # the most candidates of a column
_PART = 1 << 15  # tokens that a thread takes at a time, at least
_BLOCK, _WIDE = 64, 16  # tokens of a block, and of a register
_LANES = 16  # of a sum of pair scores
_FOUR = 4  # candidates whose noise is drawn at once
_DRAWN = 32  # tokens of a column whose noise is drawn at once


def takes(scores: Tensor, pairs: PairScores) -> bool:
    given = [scores, pairs.predecessors, pairs.successors]
    given += [] if pairs.mixture is None else [pairs.mixture]
    is_plain = all(one.dtype == torch.float32 and one.is_contiguous() for one in given)
    return is_plain and pairs.top_k <= min(MOST, scores.shape[-1])


def walk(
    logits: Tensor,
    pairs: PairScores,
    starts: Tensor,
    anchor: Tensor,
    batch: SamplingBatch,
    places: Places | None = None,
) -> Tensor:
    """Walk as the reference. Each replay of a captured step reads again which options the rows need."""
    *shape, vocab_size = logits.shape
    num_rows, num_columns = len(starts), shape[-1]
    drafts = torch.empty(shape, dtype=torch.int64)
    where = (None, None, None) if places is None else places[:3]

    def run() -> None:
        if not takes(logits, pairs):
            drafts.copy_(reference_walk(logits, pairs, starts, anchor, batch, places))
            return
        assert batch.real.is_contiguous()
        assert batch.whole.is_contiguous()
        scores, begins = adjusted_at(logits, starts, anchor, batch, places), starts.contiguous()
        num_parts = max(1, vocab_size // _PART)
        sizes = (drafts.numel() * num_parts, pairs.top_k)
        best, ids = torch.empty(sizes, dtype=torch.float32), torch.empty(sizes, dtype=torch.int64)
        _SCAN(
            drafts.numel(), num_columns, num_parts, vocab_size, pairs.top_k, scores, begins,
            batch.rows, batch.real, batch.whole, *where[:2], best, ids,
        )  # fmt: skip
        _FOLLOW(
            num_rows, num_columns, num_parts, pairs.top_k, pairs.predecessors.shape[1],
            int(pairs.skips_first), where[2], best, ids, begins, anchor.contiguous(), batch.rows, batch.real,
            batch.whole, pairs.predecessors, pairs.successors, pairs.mixture, pairs.successor_rows, drafts,
            is_small=num_rows == 1,
        )  # fmt: skip

    repeat(run)
    return drafts


@kernel
def scan(
    num_items: Int, num_columns: Int, num_parts: Int, vocab_size: Int, top_k: Int, x: Floats, starts: Longs,
    rows: Longs, real: Floats, whole: Longs, row_of: Longs, column_of: Longs, scores: Floats, ids: Longs,
) -> None:  # fmt: skip
    best, who = candidates(x)
    tops, few = x.scratch(f32, 2 * _PART // _BLOCK), x.scratch(f32, 2 * _DRAWN)
    for item in taken(num_items * num_parts):
        part, place = item % num_parts, item // num_parts
        column, row, number = x + place * vocab_size, place // num_columns, place % num_columns
        if row_of.is_given:
            row, number = row_of[place], column_of[place]
        first, end = begin_of(part, num_parts, vocab_size), begin_of(part + 1, num_parts, vocab_size)
        reals, wholes = real + rows[row] * len(Column), whole + rows[row] * len(Whole)
        clear(best, who, top_k)
        if is_open(reals, wholes):
            scale, seed = 1.0 / reals[int(Column.TEMPERATURE)], wholes[int(Whole.SEED)]
            position = starts[row] + 1 + number
            offer_noisy(best, who, top_k, column, first, end, scale, seed, position, few)
        else:
            offer_all(best, who, top_k, column, first, end, tops)
        for i in range(top_k):
            scores[item * top_k + i] = best[i]
            ids[item * top_k + i] = who[i]


@inlined
def begin_of(part: Int, num_parts: Int, vocab_size: Int) -> Int:
    """Return the first token of a part, which is the first of a block, so that noise can be drawn from it."""
    first = part * vocab_size // num_parts // _BLOCK * _BLOCK
    if part == num_parts:
        first = vocab_size
    return first


def is_open(reals: Floats, wholes: Longs) -> Int:
    """Return True if the row samples with noise and without filters."""
    return (reals[int(Column.TEMPERATURE)] >= MIN_TEMPERATURE) & (wholes[int(Whole.IS_FILTERED)] == 0)


@inlined
def offer_all(
    best: Floats, who: Longs, top_k: Int, column: Floats, first: Int, end: Int, tops: Floats
) -> None:
    """Offer the tokens of those blocks whose largest scores are the `top_k` largest among blocks."""
    num_blocks = (end - first) // _BLOCK
    for i in range(num_blocks):
        tops[i] = largest_of(column + first + i * _BLOCK)
        offer(best, who, top_k, tops[i], i)
    least = best[top_k - 1]
    clear(best, who, top_k)
    for i in range(num_blocks):
        if tops[i] >= least:
            for token in range(first + i * _BLOCK, first + (i + 1) * _BLOCK):
                offer(best, who, top_k, column[token], token)
    for token in range(first + num_blocks * _BLOCK, end):
        offer(best, who, top_k, column[token], token)


@inlined
def offer_noisy(
    best: Floats, who: Longs, top_k: Int, column: Floats, first: Int, end: Int, scale: Value, seed: Int,
    position: Int, few: Floats,
) -> None:  # fmt: skip
    """Offer tokens with the score x * `scale` + noise; `few` is scratch memory."""
    noisy = few + _DRAWN
    for at in range(first, end, _DRAWN):
        tokens = column + at
        if end - at < _DRAWN:
            for i in range(_DRAWN):
                few[i] = NEVER
            for i in range(end - at):
                few[i] = tokens[i]
            tokens = few
        values = load(tokens, _DRAWN) * scale
        top, least = values.halved(largest), best[top_k - 1]
        if top + MOST_NOISE > least:
            words = philox(counters(at // 4, _DRAWN // 4), position, seed)
            if greatest_of(words) >= least_word(top, least):
                with_noise = values + noise_of(words)
                if with_noise.halved(largest) > least:
                    store(noisy, with_noise)
                    for i in range(_DRAWN):
                        offer(best, who, top_k, noisy[i], at + i)


def largest_of(block: Pointer) -> Value:
    most = load(block, _WIDE)
    for i in range(_WIDE, _BLOCK, _WIDE):
        most = largest(most, load(block + i, _WIDE))
    return most.halved(largest)


@inlined
def clear(scores: Floats, ids: Longs, top_k: Int) -> None:
    """Set all candidates to token 0 with the score NEVER."""
    for i in range(top_k):
        scores[i] = NEVER
        ids[i] = 0


def candidates(like: Value) -> tuple[Pointer, Pointer]:
    """Allocate scores and token ids of candidates, with a sentinel before the first."""
    scores, ids = (like.scratch(type, MOST + 2 * _FOUR) + _FOUR for type in (f32, i64))
    for i in range(_FOUR):
        scores[i - _FOUR] = math.inf
        ids[i - _FOUR] = -1
    return scores, ids


@inlined
def offer(scores: Floats, ids: Longs, top_k: Int, score: Value, token: Int) -> None:
    """Insert a token if its score exceeds the last candidate's."""
    if score > scores[top_k - 1]:
        insert(scores, ids, top_k - 1, score, token)


@inlined
def insert(scores: Floats, ids: Longs, last: Int, score: Value, token: Int) -> None:
    """Insert a token after all candidates with scores at least as large; drop the candidate at `last`."""
    at = last
    while scores[at - 1] < score:
        scores[at] = scores[at - 1]
        ids[at] = ids[at - 1]
        at = at - 1
    scores[at] = score
    ids[at] = token


@kernel
def follow(
    num_rows: Int, num_columns: Int, num_parts: Int, top_k: Int, rank: Int, skips_first: Int,
    offsets: Longs, part_scores: Floats, part_ids: Longs, starts: Longs, anchor: Longs, rows: Longs,
    real: Floats, whole: Longs, predecessors: Floats, successors: Floats, mixture: Floats,
    successor_rows: Longs, drafts: Longs,
) -> None:  # fmt: skip
    scores, ids = candidates(real)
    ordered, order = candidates(real)
    weighted = real.scratch(f32, rank)
    for row in taken(num_rows):
        reals, wholes = real + rows[row] * len(Column), whole + rows[row] * len(Whole)
        is_warm = reals[int(Column.TEMPERATURE)] >= MIN_TEMPERATURE
        scale = select(is_warm, 1.0 / reals[int(Column.TEMPERATURE)], 1.0)
        weight = select(is_open(reals, wholes), scale, 1.0)
        before = anchor[row]
        begin, count = row * num_columns, num_columns
        if offsets.is_given:
            begin, count = offsets[row], offsets[row + 1] - offsets[row]
        for column in range(count):
            item = begin + column
            merge(scores, ids, top_k, num_parts, part_scores, part_ids, item * num_parts * top_k)
            by_id(scores, ids, top_k)
            weigh(weighted, predecessors + before * rank, mixture, item, rank)
            share = select((skips_first != 0) & (column == 0), 0.0, weight)
            for i in range(top_k):
                own = ids[i]
                if successor_rows.is_given:
                    own = successor_rows[own]
                scores[i] = scores[i] + dot(weighted, successors + own * rank, rank) * share
            if is_warm & (wholes[int(Whole.IS_FILTERED)] != 0):
                for i in range(top_k):
                    scores[i] = scores[i] * scale
                keep_likely(scores, ordered, order, top_k, reals, wholes)
                draw(scores, ids, top_k, wholes[int(Whole.SEED)], starts[row] + 1 + column)
            before = ids[first_of_largest(scores, top_k)]
            drafts[item] = before


@inlined
def merge(
    scores: Floats, ids: Longs, top_k: Int, num_parts: Int, part_scores: Floats, part_ids: Longs, first: Int
) -> None:
    """Find the best candidates of all parts; of equal scores the lower id wins, as parts are in order."""
    for i in range(top_k):
        scores[i] = part_scores[first + i]
        ids[i] = part_ids[first + i]
    for i in range(first + top_k, first + num_parts * top_k):
        offer(scores, ids, top_k, part_scores[i], part_ids[i])


@inlined
def by_id(scores: Floats, ids: Longs, top_k: Int) -> None:
    for i in range(1, top_k):
        score, token, at = scores[i], ids[i], i
        while ids[at - 1] > token:
            scores[at] = scores[at - 1]
            ids[at] = ids[at - 1]
            at = at - 1
        scores[at] = score
        ids[at] = token


@inlined
def weigh(weighted: Floats, row: Floats, mixture: Floats, item: Int, rank: Int) -> None:
    """Multiply the previous token's codebook row by the column's mixture, if there is one."""
    for i in range(rank):
        one = row[i]
        if mixture.is_given:
            one = one * mixture[item * rank + i]
        weighted[i] = one


@inlined
def dot(one: Floats, two: Floats, size: Int) -> Any:
    sums = one.zeros(f32.wide(_LANES))
    whole = size - size % _LANES
    for i in range(0, whole, _LANES):
        sums = fma(load(one + i, _LANES), load(two + i, _LANES), sums)
    total = sums.halved()
    for i in range(whole, size):
        total = fma(one[i], two[i], total)
    return total


@inlined
def keep_likely(
    scores: Floats, ordered: Floats, order: Longs, top_k: Int, reals: Floats, wholes: Longs
) -> None:
    """Set the scores of candidates that filters drop to NEVER, as `sampling.keep_likely` does."""
    for i in range(top_k):
        insert(ordered, order, i, scores[i], i)
    best = ordered[0]
    floor = best + reals[int(Column.LOG_MIN_P)]
    most = wholes[int(Whole.TOP_K)]
    for i in range(top_k):
        if (ordered[i] < floor) | (i >= most):
            scores[order[i]] = NEVER
            ordered[i] = NEVER
    top_p = reals[int(Column.TOP_P)]
    if top_p < 1.0:
        total = reals.zeros(f32)
        for i in range(top_k):
            ordered[i] = exp(ordered[i] - best)
            total = total + ordered[i]
        so_far = ordered[0] / total
        for i in range(1, top_k):
            likely = ordered[i] / total
            so_far = so_far + likely
            if so_far - likely >= top_p:
                scores[order[i]] = NEVER


@inlined
def draw(scores: Floats, ids: Longs, top_k: Int, seed: Int, position: Int) -> None:
    """Add the noise of `kernels/noise.py`; the memory after the candidates is scratch."""
    for i in range(0, top_k, _FOUR):
        tokens = load(ids + i, _FOUR)
        words = philox((tokens >> 2).to(i32), position, seed)
        lane = (tokens & 3).to(i32)
        word = words[0]
        for other in unrolled(1, 4):
            word = select(lane == other, words[other], word)
        store(scores + i, load(scores + i, _FOUR) + gumbel_of(word))


@inlined
def first_of_largest(scores: Floats, top_k: Int) -> Int:
    best, index = scores[0], 0
    for i in range(1, top_k):
        if scores[i] > best:
            best = scores[i]
            index = i
    return index


_SCAN, _FOLLOW = Jit(scan), Jit(follow)
