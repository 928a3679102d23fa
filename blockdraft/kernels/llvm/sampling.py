"""Sampling on a CPU without sorting the vocabulary; see `kernels/sampling.py` for the contract.

A thread takes a column at a time. The column's tokens are divided into blocks:
1. `scan` finds the largest score of every block, so that later steps can skip blocks.
2. `last_kept` finds where top_k cuts the ranking, by bisecting the range of scores.
3. For top_p, `mass` sums the weights of the kept tokens; `enough` finds a score below which top_p keeps none.
4. `draw` finds the kept token with the best noisy score. Noise has a maximum, and random words below some
   number cannot make a token of a block the best, so most logarithms are never computed.
5. `mass` sums the weights of tokens ranked before that token. If top_p does not keep the token, top_p keeps
   none ranked after it either, so step 4 is repeated among the tokens ranked before it.

A token is ranked before another if its score is greater, or equal with a lower id. The kept tokens are always
those ranked before some (score, id). Sums are in order of ids, so they do not depend on the batch. For greedy
columns, and for columns whose largest score is infinite, the first token with the largest score is chosen;
NaN counts as the largest.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

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
    f64,
    fma,
    i1,
    i32,
    i64,
    largest,
    load,
    log,
    select,
    smallest,
    store,
)
from blockdraft.kernels.noise import MULTIPLIERS, WEYL
from blockdraft.kernels.sampling import (
    MIN_TEMPERATURE,
    NEVER,
    Places,
    SamplingBatch,
    adjusted,
    reference_choose,
)
from blockdraft.kernels.sampling_tables import Real, Whole

_BLOCK, _WIDE = 64, 16  # tokens that are skipped at once, and tokens of a register
_DRAWN = 32  # tokens whose noise is drawn together
MOST_NOISE, LEAST_NOISE = 16.64, -2.82  # `noise.gumbel` of the extreme words is 16.636 and -2.811
_NO_MASS = -32.0  # a million weights of e**-32 are below the rounding error of a sum that is at least 1
# e**r = 1 + r + r**2 * (…), largest degree first: fitted for |r| <= ln(2) / 2, within 1.1e-7.
_WEIGHT = (0.008312501, 0.04189033, 0.16667116, 0.4999923)
_LOWEST_KEY = -0x7F800001  # its `score_of` is -inf


def choose(
    logits: Tensor, starts: Tensor, recent: Tensor, batch: SamplingBatch, places: Places | None = None
) -> Tensor:
    """Choose as the reference. Each replay of a captured step reads again which options the rows need."""
    *shape, vocab_size = logits.shape
    chosen = torch.empty(shape, dtype=torch.int64)

    def run() -> None:
        if logits.dtype == torch.float64:
            chosen.copy_(reference_choose(logits, starts, recent, batch, places))
            return
        assert batch.real.is_contiguous()
        assert batch.whole.is_contiguous()
        scores = adjusted_at(logits, starts, recent, batch, places)
        _CHOOSE(
            chosen.numel(), shape[-1], vocab_size, scores.contiguous(), starts.contiguous(), batch.rows,
            batch.real, batch.whole, *(places or (None, None))[:2], chosen, is_small=chosen.numel() == 1,
        )  # fmt: skip

    repeat(run)
    return chosen


def adjusted_at(
    logits: Tensor, starts: Tensor, recent: Tensor, batch: SamplingBatch, places: Places | None
) -> Tensor:
    """Return `adjusted` scores, of a stream with `places`."""
    needs = batch.needs
    if places is None or not (needs.bias or needs.min_end or needs.penalty):
        return adjusted(logits, starts, recent, batch)
    return places.take(adjusted(places.put(logits), starts, recent, batch))


class Column(NamedTuple):
    """A column of scores in a kernel. The last block may be shorter: it is copied to `tail`."""

    x: Pointer
    tops: Pointer  # the largest score of every block
    tail: Pointer  # the last block, padded with NEVER
    num_whole: Int  # number of blocks that are not copied
    num_blocks: Int
    scale: Value  # factor of logits


@kernel
def choose_columns(
    num_items: Int, num_columns: Int, vocab_size: Int, x: Floats, starts: Longs, rows: Longs, real: Floats,
    whole: Longs, row_of: Longs, column_of: Longs, chosen: Longs,
) -> None:  # fmt: skip
    num_blocks = (vocab_size + _BLOCK - 1) // _BLOCK
    tops, tail = x.scratch(f32, num_blocks + _WIDE), x.scratch(f32, _BLOCK)
    for i in range(_WIDE):
        tops[num_blocks + i] = NEVER
    for i in range(_BLOCK):
        tail[i] = NEVER
    for item in taken(num_items):
        row, number = item // num_columns, item % num_columns
        if row_of.is_given:
            row, number = row_of[item], column_of[item]
        reals, wholes = real + rows[row] * len(Real), whole + rows[row] * len(Whole)
        temperature = reals[int(Real.TEMPERATURE)]
        is_warm = temperature >= MIN_TEMPERATURE
        scale = select(is_warm, 1.0 / temperature, 1.0)
        column = Column(x + item * vocab_size, tops, tail, vocab_size // _BLOCK, num_blocks, scale)
        best, has_nan = scan(column, vocab_size)
        if has_nan:
            chosen[item] = first_nan(column)
        elif is_warm & (abs(best) < math.inf):
            position = starts[row] + 1 + number
            chosen[item] = sampled(column, best, vocab_size, reals, wholes, position)
        else:
            chosen[item] = first_of(column, best)


@inlined
def scan(column: Column, vocab_size: Int) -> tuple[Value, Int]:
    """Fill `tops` and `tail`; return the largest score, and whether any score is NaN."""
    first = column.num_whole * _BLOCK
    for i in range(first, vocab_size):
        column.tail[i - first] = column.x[i]
    best = column.x.zeros(f32) + NEVER
    has_nan = column.x.zeros(i1.wide(_WIDE))
    for i in range(column.num_blocks):
        block = block_at(column, i)
        most = column.x.zeros(f32.wide(_WIDE)) + NEVER
        for part in unrolled(0, _BLOCK, _WIDE):
            values = load(block + part, _WIDE) * column.scale
            most = largest(most, values)
            has_nan = has_nan | (values != values)
        column.tops[i] = most.halved(largest)
        best = largest(best, column.tops[i])
    return best, has_nan.halved(operator.or_)


@inlined
def first_nan(column: Column) -> Int:
    token = column.x.zeros(i64)
    while column.x[token] == column.x[token]:
        token += 1
    return token


@inlined
def first_of(column: Column, best: Value) -> Int:
    """Return the first token with the largest score, which may be infinite."""
    token = block_of(column, best) * _BLOCK
    while column.x[token] * column.scale != best:
        token += 1
    return token


@inlined
def block_of(column: Column, best: Value) -> Int:
    """Return the first block with the largest score."""
    block = best.zeros(i64)
    while column.tops[block] != best:
        block += 1
    return block


@inlined
def block_at(column: Column, block: Int) -> Floats:
    at = column.x + block * _BLOCK
    if block >= column.num_whole:
        at = column.tail
    return at


@inlined
def sampled(column: Column, best: Value, vocab_size: Int, reals: Floats, wholes: Longs, position: Int) -> Int:
    """Return a random token of a column whose largest score `best` is finite."""
    line, until = reals.zeros(f32) + NEVER, vocab_size
    if wholes[int(Whole.TOP_K)] < vocab_size:
        line, until = last_kept(column, best, wholes[int(Whole.TOP_K)], vocab_size)
    floor = best + reals[int(Real.LOG_MIN_P)]
    if floor > line:
        line, until = floor, vocab_size
    top_p, seed = reals[int(Real.TOP_P)], wholes[int(Whole.SEED)]
    total, token = reals.zeros(f64), reals.zeros(i64)
    if top_p < 1.0:
        if line > NEVER:  # noqa: SIM108 - both sides of an expression would be computed
            total = mass(column, best, line, until)
        else:
            total = whole_mass(column, best)
        reached = enough(column, best, total, top_p)
        if reached > line:
            line, until = reached, vocab_size
    goes_on = 1
    while goes_on != 0:
        score, drawn = draw(column, best, line, until, seed, position)
        token, goes_on = drawn, 0
        if top_p < 1.0:
            before = mass(column, best, score, drawn)
            # The likeliest token, with nothing before it, is always kept.
            if (before > 0.0) & is_cut(before, total, top_p):
                line, until, goes_on = score, drawn, 1
    return token


def is_cut(before: Value, total: Value, top_p: Value) -> Value:
    return (before / total).to(f32) >= top_p


@inlined
def enough(column: Column, best: Value, total: Value, top_p: Value) -> Value:
    """Return a score below which top_p keeps no token."""
    depth, reached = best.zeros(f32) + 1.0, best.zeros(f64)
    while is_cut(reached, total, top_p) == 0:
        depth = depth * 1.3
        reached = mass(column, best, best - depth, _BLOCK * column.num_blocks)
    return best - depth


@inlined
def last_kept(column: Column, best: Value, top_k: Int, vocab_size: Int) -> tuple[Value, Int]:
    """Return (score, id) such that exactly `top_k` tokens are ranked before it."""
    low, high = best.zeros(i64) + _LOWEST_KEY, key_of(best) + 1
    if top_k <= column.num_blocks:  # at least top_k tokens reach the k-th largest of `tops`
        above = high
        while above - low > 1:
            middle = (low + above).above(1)
            if num_blocks_from(column, score_of(middle)) >= top_k:
                low = middle
            else:
                above = middle
    fewer, until = best.zeros(i64), vocab_size  # number of tokens with keys from `high` on
    while high - low > 1:
        middle = (low + high).above(1)
        count = num_tokens_from(column, score_of(middle))
        if count < top_k:
            high, fewer = middle, count
        else:
            low = middle
            if count == top_k:
                high, fewer = middle + 1, top_k
    line = score_of(low)
    if fewer < top_k:
        until = behind(column, line, top_k - fewer)
    return line, until


def key_of(score: Value) -> Value:
    """Return an integer; these integers are ordered as their scores."""
    bits = score.bits_as(i32)
    return select(bits < 0, bits ^ 0x7FFFFFFF, bits).to(i64)


def score_of(key: Value) -> Value:
    bits = key.to(i32)
    return select(bits < 0, bits ^ 0x7FFFFFFF, bits).bits_as(f32)


@inlined
def num_blocks_from(column: Column, score: Value) -> Int:
    """Return the number of blocks that have a token of at least this score."""
    counts = score.zeros(i32.wide(_WIDE))
    for i in range(0, column.num_blocks, _WIDE):
        counts = counts + (load(column.tops + i, _WIDE) >= score).to(i32)
    return counts.halved().to(i64)


@inlined
def num_tokens_from(column: Column, score: Value) -> Int:
    counts = score.zeros(i32.wide(_WIDE))
    for i in range(column.num_blocks):
        if column.tops[i] >= score:
            block = block_at(column, i)
            for part in unrolled(0, _BLOCK, _WIDE):
                counts = counts + (load(block + part, _WIDE) * column.scale >= score).to(i32)
    return counts.halved().to(i64)


@inlined
def behind(column: Column, score: Value, count: Int) -> Int:
    """Return the id after the last of the first `count` tokens that have exactly this score."""
    left, until = count, 0
    for i in range(column.num_blocks):
        if (column.tops[i] >= score) & (left > 0):
            block = block_at(column, i)
            for part in range(_BLOCK):
                if (block[part] * column.scale == score) & (left > 0):
                    left, until = left - 1, i * _BLOCK + part + 1
    return until


@inlined
def draw(column: Column, best: Value, line: Value, until: Int, seed: Int, position: Int) -> tuple[Value, Int]:
    """Return score and id of the token with the best noisy score among those ranked before (line, until).

    The likeliest token is one of them, so the best noisy score is at least its score plus the least noise.
    Its block is searched first.
    """
    noisy = best.scratch(f32, _DRAWN)
    most, token, score = best + LEAST_NOISE, until, line
    likeliest = block_of(column, best)
    for step in range(column.num_blocks + 1):
        i = step - 1
        if step == 0:
            i = likeliest
        top = column.tops[i]
        if (top >= line) & (top + MOST_NOISE >= most):
            least = least_word(top, most)
            block = block_at(column, i)
            for part in range(0, _BLOCK, _DRAWN):
                first = i * _BLOCK + part
                values = load(block + part, _DRAWN) * column.scale
                upper = values.halved(largest)
                if (upper >= line) & (upper + MOST_NOISE >= most):
                    words = philox(counters(first // 4, _DRAWN // 4), position, seed)
                    if greatest_of(words) >= least:
                        lowest = open_from(_DRAWN, first, line, until)
                        with_noise = select(values >= lowest, values + noise_of(words), NEVER)
                        if with_noise.halved(largest) >= most:
                            store(noisy, with_noise)
                            for lane in range(_DRAWN):
                                value, other = noisy[lane], first + lane
                                if (value > most) | ((value == most) & (other < token)):
                                    most, token, score = value, other, block[part + lane] * column.scale
    return score, token


def least_word(top: Value, most: Value) -> Value:
    """Return the least u * 2**23 whose noise can raise score `top` to `most`, minus a rounding margin.

    For u < 1 - y, the noise is less than -log(y).
    """
    missing = smallest(top - most + abs(most) * 1e-6 + 1e-3, 4.0)
    return ((1.0 - exp(missing)) * 2.0**23 - 2.0).to(i32)


def greatest_of(words: list[Value]) -> Value:
    """Return the greatest value of the words' highest 23 bits, of which noise is made."""
    parts = [word >> 9 for word in words]
    return largest(largest(parts[0], parts[1]), largest(parts[2], parts[3])).halved(largest)


def open_from(lanes: int, first: Int, line: Value, until: Int) -> Value:
    """Return the least scores with which tokens first, first + 1, … are ranked before (line, until)."""
    ids = first.constants(i32, range(lanes))
    above = score_of(key_of(line + 0.0) + 1)  # + 0.0 turns -0 into 0, so that 0 is not above -0
    return select(ids < (until - first).to(i32), line.spread(lanes), above.spread(lanes))


@inlined
def mass(column: Column, best: Value, line: Value, until: Int) -> Value:
    """Return the sum of weights of tokens ranked before (line, until); the likeliest token has weight 1."""
    total = best.zeros(f64)
    least = largest(line, best + _NO_MASS)
    for i in range(column.num_blocks):
        if column.tops[i] >= least:
            block = block_at(column, i)
            sums = best.zeros(f32.wide(_WIDE))
            for part in range(0, _BLOCK, _WIDE):
                values = load(block + part, _WIDE) * column.scale
                if values.halved(largest) >= least:
                    lowest = open_from(_WIDE, i * _BLOCK + part, line, until)
                    sums = sums + select(values >= lowest, weight(values - best), 0.0)
            total = total + sums.halved().to(f64)
    return total


@inlined
def whole_mass(column: Column, best: Value) -> Value:
    """Return the sum of weights of all tokens; this takes fewer operations than `mass`."""
    total = best.zeros(f64)
    for i in range(column.num_blocks):
        if column.tops[i] >= best + _NO_MASS:
            block = block_at(column, i)
            sums = best.zeros(f32.wide(_WIDE))
            for part in unrolled(0, _BLOCK, _WIDE):
                sums = sums + weight(load(block + part, _WIDE) * column.scale - best)
            total = total + sums.halved().to(f64)
    return total


def weight(x: Value) -> Value:
    """Return e**x for x <= 0, by the same operations in every lane; return e**-80 if x is below -80.

    x = n ln 2 + r as in `language.exp`, but with fewer operations; the results differ by at most 5e-7.
    """
    x = largest(x, -80.0)
    shift = 1.5 * 2.0**23 + 127  # adding it leaves round(x) and the bias of exponents in the low bits
    shifted = fma(x, 1.0 / math.log(2.0), shift)
    r = fma(shifted - shift, -math.log(2.0), x)
    polynomial = r.constant(_WEIGHT[0])
    for coefficient in _WEIGHT[1:]:
        polynomial = fma(polynomial, r, coefficient)
    power = (shifted.bits_as(i32.wide(x.type.lanes)) << 23).bits_as(x.type)
    return fma(fma(polynomial, r * r, r), power, power)


def noise_of(words: list[Value]) -> Value:
    """Return noise in the order of token ids; each counter has words for four consecutive tokens."""
    lanes = words[0].type.lanes
    even, odd = (one.lanes(range(2 * lanes), other) for one, other in (words[0::2], words[1::2]))
    order = [lane for i in range(lanes) for lane in (i, i + 2 * lanes, i + lanes, i + 3 * lanes)]
    return gumbel_of(even.lanes(order, odd))


def gumbel_of(words: Value) -> Value:
    return -log(-log(((words >> 9).to(f32) + 0.5) * 2.0**-23))


def counters(first: Int, count: int) -> Int:
    """Return `count` 32-bit counters first, first + 1, …"""
    return first.constants(i32, range(count)) + first.to(i32)


def philox(counter: Value, position: Value, seed: Value) -> list[Value]:
    """Return Philox-4x32-10 of (counter, position's halves, 0), keyed by the seed's halves (noise.py)."""
    lanes = counter.type.lanes
    c0, c1, c2 = counter, position.to(i32).spread(lanes), (position >> 32).to(i32).spread(lanes)
    c3 = counter.zeros(counter.type)
    k0, k1 = seed.to(i32), (seed >> 32).to(i32)
    for _ in range(10):
        high0, low0 = _halves(c0, MULTIPLIERS[0])
        high1, low1 = _halves(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _signed(WEYL[0]), k1 + _signed(WEYL[1])
    return [c0, c1, c2, c3]


def _halves(word: Value, constant: int) -> tuple[Value, Value]:
    """Return high and low half of a 32 x 32 bit product. A bitcast keeps LLVM from continuing in 64 bits."""
    twice = 2 * word.type.lanes
    parts = (word.widened(i64) * constant).bits_as(i32.wide(twice))
    return parts.lanes(range(1, twice, 2)), parts.lanes(range(0, twice, 2))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


_CHOOSE = Jit(choose_columns)
