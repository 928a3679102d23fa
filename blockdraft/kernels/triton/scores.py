"""The score and the noise of single tokens in a column, for `triton.sampling` and `triton.candidates`.

The score includes penalties, biases, bans and temperature; see `kernels.sampling.SamplingBatch` for the
tables.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdraft.kernels import sampling
from blockdraft.kernels.sampling_tables import MAX_LISTED, Real, Whole

_MAX_LISTED = tl.constexpr(MAX_LISTED)
MIN_TEMPERATURE = tl.constexpr(sampling.MIN_TEMPERATURE)
NUM_REAL = tl.constexpr(len(Real))
NUM_WHOLE = tl.constexpr(len(Whole))
TEMPERATURE = tl.constexpr(int(Real.TEMPERATURE))
_REPETITION = tl.constexpr(int(Real.REPETITION))
_PRESENCE = tl.constexpr(int(Real.PRESENCE))
_FREQUENCY = tl.constexpr(int(Real.FREQUENCY))
_OUTPUT_START = tl.constexpr(int(Whole.OUTPUT_START))
_MIN_END = tl.constexpr(int(Whole.MIN_END))
_NUM_STOPS = tl.constexpr(int(Whole.NUM_STOPS))
_NUM_BIASES = tl.constexpr(int(Whole.NUM_BIASES))
_IS_PENALISED = tl.constexpr(int(Whole.IS_PENALISED))
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _entries_within(entries, count, first, past):
    """Return the range [from, to) of the entries of a sorted list that are in [first, past)."""
    place = tl.arange(0, _MAX_LISTED)
    ids = tl.load(entries + place, mask=place < count, other=0x7FFFFFFF)
    return tl.sum((ids < first).to(tl.int32)), tl.sum((ids < past).to(tl.int32))


@triton.jit
def load_logits(logits, ids, V):
    return tl.load(logits + ids, mask=ids < V, other=NEVER)


@triton.jit
def scores_of(raw, ids, first, past, column):
    """Return `adjusted_scores`, divided by the temperature unless it is greedy."""
    scores = adjusted_scores(raw, ids, first, past, column)
    _, _, row, tables = column
    _, _, real, _, _, _, _, _, _, _, _ = tables
    temperature = tl.load(real + row * NUM_REAL + TEMPERATURE)
    if temperature >= MIN_TEMPERATURE:
        scores = scores * tl.div_rn(1.0, temperature)
    return scores


@triton.jit
def adjusted_scores(raw, ids, first, past, column):
    """Return `raw` logits of `ids` with biases, bans and penalties applied; -inf for ids from V on.

    All ids are in [first, past). `column` is (r, c, the row of r in the tables, the tables).
    """
    r, c, row, tables = column
    starts, recent, real, whole, stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, J = tables
    is_token = ids < V
    scores = raw.to(tl.float32)
    real += row * NUM_REAL
    whole += row * NUM_WHOLE
    num_biases = tl.load(whole + _NUM_BIASES)
    if num_biases > 0:
        bias_ids += row * _MAX_LISTED
        bias_values += row * _MAX_LISTED
        begin, end = _entries_within(bias_ids, num_biases, first, past)
        for place in range(begin, end):
            added = tl.load(bias_values + place)
            scores = tl.where(ids == tl.load(bias_ids + place), scores + added, scores)
    num_stops = tl.load(whole + _NUM_STOPS)
    start = tl.load(starts + r)
    if (num_stops > 0) & (start + 1 + c < tl.load(whole + _MIN_END)):
        stop_ids += row * _MAX_LISTED
        begin, end = _entries_within(stop_ids, num_stops, first, past)
        for place in range(begin, end):
            scores = tl.where(ids == tl.load(stop_ids + place), NEVER, scores)
    if tl.load(whole + _IS_PENALISED) != 0:
        counts = tl.load(output_counts + row * V + ids, mask=is_token, other=0)
        seen = tl.load(prompt_seen + row * V + ids, mask=is_token, other=0) != 0
        output_start = tl.load(whole + _OUTPUT_START)
        for place in range(tl.minimum(c + 1, J)):
            is_output = start + place >= output_start
            token = tl.load(recent + r * J + place)
            counts += ((ids == token) & is_output).to(tl.int32)
        repetition = tl.load(real + _REPETITION)
        factor = tl.where(scores > 0, tl.div_rn(1.0, repetition), repetition)
        scores = tl.where(seen | (counts > 0), scores * factor, scores)
        scores = scores - tl.load(real + _FREQUENCY) * counts.to(tl.float32)
        scores = scores - tl.load(real + _PRESENCE) * (counts > 0).to(tl.float32)
    return tl.where(is_token, scores, NEVER)


@triton.jit
def noise_of(first, seed, position, SIZE: tl.constexpr):
    """Return the Gumbel noise of ids [first, first + SIZE), as in `kernels.noise`."""
    zero = tl.zeros([SIZE // 4], dtype=tl.uint32)
    counter = (tl.arange(0, SIZE // 4) + first // 4).to(tl.uint32)
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + (position >> 32).to(tl.uint32)
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(counter, low, high, zero, key_low, key_high, 10)
    return _gumbel(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [SIZE]))  # in the order of the ids


@triton.jit
def noise_at(ids, seed, position):
    """Return the noise of `ids`, which may be in any order."""
    counter = (ids // 4).to(tl.uint32)
    zero = counter * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + (position >> 32).to(tl.uint32)
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(counter, low, high, zero, key_low, key_high, 10)
    lane = ids % 4
    return _gumbel(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def _gumbel(words):
    # 1 + word / 2**23, less 1 - 2**-24: every step is exact.
    uniform = ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
    return -_log(-_log(uniform))


@triton.jit
def _log(x):
    """Return the natural logarithm of positive normal numbers within 1.2e-7, in a third of tl.log's time.

    x = 2**n * (1 + f) with f in [-1/3, 1/3), where log(1 + f) = f + f**2 * P(f); P is a minimax polynomial.
    """
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - 0x3F2AAAAB) & -0x800000  # n, at the bits of the exponent; 0x3F2AAAAB is 2 / 3
    f = (bits - power).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(f, 0.1402635859233628, -0.15388548693230472)
    p = tl.fma(p, f, 0.13995807124598145)
    p = tl.fma(p, f, -0.16415959264491264)
    p = tl.fma(p, f, 0.20011168656311246)
    p = tl.fma(p, f, -0.25007818964222983)
    p = tl.fma(p, f, 0.3333319813734227)
    p = tl.fma(p, f, -0.4999993607800894)
    return tl.fma((power >> 23).to(tl.float32), 0.6931471805599453, tl.fma(f * f, p, f))
