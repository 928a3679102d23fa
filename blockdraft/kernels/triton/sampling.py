"""Sampling on a CUDA device: `choose`, without sorting the vocabulary, and `forbid`.

See `kernels/sampling.py` for the contracts. All parameters are read from the tables on the device. The
vocabulary is divided into chunks of CHUNK tokens, equal for every batch, and the chunks' results are merged
in order, so a token depends only on its own column.

1. `_scan` finds the best token of each chunk, greedy or with noise; for filtered rows only the largest score.
2. `_bound` finds where top_k ends, for rows with top_k.
3. `_draw` finds, for filtered rows, the best noisy token of each chunk among those that min_p and top_k keep.
   The best of all chunks is the candidate.
4. `_weigh` sums the probability mass ranked before the candidate, and the whole mass.
5. `_draw` and `_weigh` run again. If top_p does not keep a candidate, it keeps no token ranked after it, so
   the next candidate is searched among the tokens ranked before it.
6. `_settle` merges, writes the result, and repeats step 5 itself for the few columns that need it.

A token is ranked before another if its score is greater, or equal with a lower id.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.sampling import Allowed, Places, SamplingBatch
from blockdraft.kernels.sampling_tables import Real, Whole
from blockdraft.kernels.triton.launch import let_next_start, num_multiprocessors, overlap, wait_for_previous
from blockdraft.kernels.triton.scores import (
    MIN_TEMPERATURE,
    NEVER,
    NUM_REAL,
    NUM_WHOLE,
    TEMPERATURE,
    load_logits,
    noise_of,
    scores_of,
)

CHUNK = tl.constexpr(2048)  # tokens; the bits of the sums depend on it
GROUP = tl.constexpr(64)  # tokens whose largest score `_scan` keeps for `_bound`
MAX_GROUPS = tl.constexpr(128)  # groups that `_bound` holds at once: enough for top_k up to 128 without ties
_WORDS = 64  # words of 32 tokens per program of `_forbid`

_TOP_P = tl.constexpr(int(Real.TOP_P))
_LOG_MIN_P = tl.constexpr(int(Real.LOG_MIN_P))
_SEED = tl.constexpr(int(Whole.SEED))
_TOP_K = tl.constexpr(int(Whole.TOP_K))
_IS_FILTERED = tl.constexpr(int(Whole.IS_FILTERED))
_NO_ID = tl.constexpr(0x7FFFFFFF)
_LOWEST_KEY = tl.constexpr(-0x80000000)

# Kernels must not be specialised on these arguments, which differ between batches: sizes, and offsets in a
# buffer.
_VARYING = (
    *("recent", "C", "J", "chunks_per_program", "peaks", "group_peaks"),
    *("best_values", "best_ids", "best_scores", "before", "total"),
)


@triton.jit
def _best(values, ids):
    """Return the greatest value and the lowest id that has it."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, _NO_ID), axis=0)


@triton.jit
def _is_before(scores, ids, score, token):
    return (scores > score) | ((scores == score) & (ids < token))


@triton.jit
def _merge(values, tokens, scores, index, num_chunks, CHUNKS: tl.constexpr):
    """Return the value, id and score of the best token of all chunks of a column."""
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    found = tl.load(values + index * num_chunks + chunk, mask=is_chunk, other=NEVER)
    ids = tl.load(tokens + index * num_chunks + chunk, mask=is_chunk, other=_NO_ID)
    best, token = _best(found, ids)
    their = tl.load(scores + index * num_chunks + chunk, mask=is_chunk, other=NEVER)
    return best, token, tl.max(tl.where(ids == token, their, NEVER), axis=0)


@triton.jit
def _merge_floor(peaks, row, real, index, num_chunks, CHUNKS: tl.constexpr):
    """Return the largest score of a column, and the least score that min_p keeps."""
    chunk = tl.arange(0, CHUNKS)
    peak = tl.max(tl.load(peaks + index * num_chunks + chunk, mask=chunk < num_chunks, other=NEVER), axis=0)
    return peak, peak + tl.load(real + row * NUM_REAL + _LOG_MIN_P)


@triton.jit
def _merge_weights(weights, index, num_chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(weights + index * num_chunks + chunk, mask=chunk < num_chunks, other=0.0), axis=0)


@triton.jit
def _is_kept(before, total, row, real):
    """Return whether top_p keeps a token with mass `before` it; the likeliest token has none and is kept."""
    top_p = tl.load(real + row * NUM_REAL + _TOP_P)
    return (top_p >= 1.0) | (before == 0.0) | (before < top_p * total)


@triton.jit
def _is_drawn_with_filters(row, real, whole):
    is_random = tl.load(real + row * NUM_REAL + TEMPERATURE) >= MIN_TEMPERATURE
    return is_random & (tl.load(whole + row * NUM_WHOLE + _IS_FILTERED) != 0)


@triton.jit
def _begin(logits, row_stride, column_stride, row_of, column_of, rows, C, PDL: tl.constexpr):
    """Return this program's column: its index, r and c, the row of r in the tables, its logits.

    Of a stream, `row_of` and `column_of` tell r and c; the strides are as if it were one row.
    """
    let_next_start(PDL)
    index = tl.program_id(0)
    r = index // C
    c = index % C
    logits += r.to(tl.int64) * row_stride + c.to(tl.int64) * column_stride
    wait_for_previous(PDL)
    if row_of is not None:
        r = tl.load(row_of + index).to(tl.int32)
        c = tl.load(column_of + index).to(tl.int32)
    return index, r, c, tl.load(rows + r), logits


@triton.jit
def _chunks_of_program(logits, V, num_chunks, chunks_per_program):
    """Return the range of this program's chunks, and the logits of the first."""
    begin = tl.program_id(1) * chunks_per_program
    end = tl.minimum(begin + chunks_per_program, num_chunks)
    return begin, end, load_logits(logits, begin * CHUNK + tl.arange(0, CHUNK), V)


@triton.jit(do_not_specialize=_VARYING)
def _scan(
    logits, row_stride, column_stride, row_of, column_of, starts, recent, rows, real, whole,
    stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, C, J,
    best_values, best_ids, peaks, group_peaks, num_chunks, chunks_per_program,
    PDL: tl.constexpr,
):  # fmt: skip
    tables = (starts, recent, real, whole, stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, J)
    index, r, c, row, logits = _begin(
        logits, row_stride, column_stride, row_of, column_of, rows, C, PDL
    )  # fmt: skip
    column = (r, c, row, tables)
    is_random = tl.load(real + row * NUM_REAL + TEMPERATURE) >= MIN_TEMPERATURE
    is_filtered = is_random & (tl.load(whole + row * NUM_WHOLE + _IS_FILTERED) != 0)
    has_top_k = tl.load(whole + row * NUM_WHOLE + _TOP_K) < V
    seed = tl.load(whole + row * NUM_WHOLE + _SEED)
    position = tl.load(starts + r) + 1 + c
    begin, end, upcoming = _chunks_of_program(logits, V, num_chunks, chunks_per_program)
    for chunk in range(begin, end):
        first = chunk * CHUNK
        ids = first + tl.arange(0, CHUNK)
        raw = upcoming
        upcoming = load_logits(logits, ids + CHUNK, tl.minimum(V, end * CHUNK))  # for the next iteration
        scores = scores_of(raw, ids, first, first + CHUNK, column)
        if is_filtered:
            tl.store(peaks + index * num_chunks + chunk, tl.max(scores, axis=0))
            if has_top_k:
                groups = tl.max(tl.reshape(scores, [CHUNK // GROUP, GROUP]), axis=1)
                group = (index * num_chunks + chunk) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
                tl.store(group_peaks + group, groups)
        else:
            if is_random:
                scores += noise_of(first, seed, position, CHUNK)
            best, token = _best(scores, ids)
            tl.store(best_values + index * num_chunks + chunk, best)
            tl.store(best_ids + index * num_chunks + chunk, token)


@triton.jit
def _key(scores):
    """Return an int32 that orders like the scores; both zeros are equal."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _kth_key(keys, k):
    """Return the k-th greatest of at least k `keys`."""
    low = tl.min(keys, axis=0).to(tl.int64)  # at least k keys are >= low
    high = tl.max(keys, axis=0).to(tl.int64) + 1  # fewer than k keys are >= high
    while high - low > 1:
        middle = (low + high) >> 1
        is_low = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= k
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    return low.to(tl.int32)


@triton.jit(do_not_specialize=_VARYING)
def _bound(
    logits, row_stride, column_stride, row_of, column_of, starts, recent, rows, real, whole,
    stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, C, J,
    group_peaks, chosen_groups, bound_scores, bound_ids, num_chunks,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store score and id + 1 of each column's k-th ranked token; top_k keeps the tokens before that pair."""
    tables = (starts, recent, real, whole, stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, J)
    index, r, c, row, logits = _begin(
        logits, row_stride, column_stride, row_of, column_of, rows, C, PDL
    )  # fmt: skip
    column = (r, c, row, tables)
    k = tl.load(whole + row * NUM_WHOLE + _TOP_K)
    bound_score = tl.full([], NEVER, tl.float32)
    past_id = tl.full([], _NO_ID, tl.int32)
    if _is_drawn_with_filters(row, real, whole) & (k < V):
        group = tl.arange(0, GROUPS)
        num_groups = num_chunks * (CHUNK // GROUP)
        peaks = tl.load(group_peaks + index * num_groups + group, mask=group < num_groups, other=NEVER)
        keys = _key(peaks)
        # k groups reach the k-th greatest peak, so k tokens do. The first k are in groups that reach it.
        lowest = _kth_key(keys, tl.minimum(k, GROUPS))
        is_chosen = keys >= lowest
        num_chosen = tl.sum(is_chosen.to(tl.int32), axis=0)
        if num_chosen <= MAX_GROUPS:
            place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
            tl.store(chosen_groups + index * MAX_GROUPS + place, group, mask=is_chosen)
            tl.debug_barrier()
            place = tl.arange(0, MAX_GROUPS)
            chosen = tl.load(chosen_groups + index * MAX_GROUPS + place, mask=place < num_chosen, other=V)
            ids = tl.reshape(chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [MAX_GROUPS * GROUP])
            scores = scores_of(load_logits(logits, ids, V), ids, 0, V, column)
            token_keys = tl.where(ids < V, _key(scores), _LOWEST_KEY)
            key = _kth_key(token_keys, k)
            num_missing = k - tl.sum((token_keys > key).to(tl.int32), axis=0)
            is_tied = token_keys == key
            is_last = is_tied & (tl.cumsum(is_tied.to(tl.int32), axis=0) == num_missing)
            past_id = tl.max(tl.where(is_last, ids, -1), axis=0) + 1
            bound_score = _score_of(key)
        else:
            # Many ties, or a large k: halve the range of scores, then of ids, counting the whole vocabulary.
            low = tl.where(k <= GROUPS, lowest, _LOWEST_KEY).to(tl.int64)
            high = tl.max(keys, axis=0).to(tl.int64) + 1
            past_id = tl.full([], 0, tl.int32) + V
            first_id = tl.full([], 0, tl.int32)
            num_greater = tl.full([], 0, tl.int32)
            while (high - low > 1) | (past_id - first_id > 1):
                by_score = high - low > 1
                middle = (low + high) >> 1
                middle_id = (first_id + past_id) >> 1
                count = tl.full([], 0, tl.int32)
                for chunk in range(num_chunks):
                    first = chunk * CHUNK
                    ids = first + tl.arange(0, CHUNK)
                    raw = load_logits(logits, ids, V)
                    token_keys = _key(scores_of(raw, ids, first, first + CHUNK, column))
                    is_counted = (token_keys == low.to(tl.int32)) & (ids < middle_id)
                    if by_score:
                        is_counted = token_keys >= middle.to(tl.int32)
                    count += tl.sum((is_counted & (ids < V)).to(tl.int32), axis=0)
                if by_score:
                    if count >= k:
                        low = middle
                    else:
                        high = middle
                        num_greater = count
                else:
                    if count >= k - num_greater:
                        past_id = middle_id
                    else:
                        first_id = middle_id
            bound_score = _score_of(low.to(tl.int32))
    tl.store(bound_scores + index, bound_score)
    tl.store(bound_ids + index, past_id)


@triton.jit
def _limits(peaks, bound_scores, bound_ids, row, real, index, num_chunks, CHUNKS: tl.constexpr):
    """Return a column's largest score, and its limits: min_p's least score, top_k's bound (score, id)."""
    peak, floor = _merge_floor(peaks, row, real, index, num_chunks, CHUNKS)
    return peak, (floor, tl.load(bound_scores + index), tl.load(bound_ids + index))


@triton.jit
def _open_tokens(raw, first, limits, column):
    """Return the ids of a chunk, their scores, and whether min_p and top_k keep them."""
    ids = first + tl.arange(0, CHUNK)
    scores = scores_of(raw, ids, first, first + CHUNK, column)
    floor, bound_score, bound_id = limits
    return ids, scores, (scores >= floor) & _is_before(scores, ids, bound_score, bound_id)


@triton.jit
def _draw_chunk(raw, first, score, token, limits, seed, position, column):
    """Return value, id and score of a chunk's best noisy kept token that ranks before (score, token)."""
    ids, scores, is_open = _open_tokens(raw, first, limits, column)
    is_open = is_open & _is_before(scores, ids, score, token)
    best = tl.full([], NEVER, tl.float32)
    best_id = tl.full([], _NO_ID, tl.int32)
    best_score = tl.full([], NEVER, tl.float32)
    if tl.max(is_open.to(tl.int32), axis=0) > 0:
        noisy = tl.where(is_open, scores + noise_of(first, seed, position, CHUNK), NEVER)
        best, best_id = _best(noisy, ids)
        best_score = tl.max(tl.where(ids == best_id, scores, NEVER), axis=0)
    return best, best_id, best_score


@triton.jit
def _weigh_chunk(raw, first, score, token, peak, limits, column):
    """Return the mass of a chunk's kept tokens before (score, token), and of all; score `peak` weighs 1."""
    ids, scores, is_open = _open_tokens(raw, first, limits, column)
    weights = tl.where(is_open, tl.exp(scores - peak), 0.0)
    before = tl.where(_is_before(scores, ids, score, token), weights, 0.0)
    return tl.sum(before, axis=0), tl.sum(weights, axis=0)


@triton.jit(do_not_specialize=_VARYING)
def _draw(
    logits, row_stride, column_stride, row_of, column_of, starts, recent, rows, real, whole,
    stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, C, J,
    peaks, bound_scores, bound_ids, best_values, best_ids, best_scores, before, total,
    num_chunks, chunks_per_program,
    ROUND: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tables = (starts, recent, real, whole, stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, J)
    index, r, c, row, logits = _begin(
        logits, row_stride, column_stride, row_of, column_of, rows, C, PDL
    )  # fmt: skip
    column = (r, c, row, tables)
    if not _is_drawn_with_filters(row, real, whole):
        return
    columns = tl.num_programs(0)
    score = tl.full([], NEVER, tl.float32)
    token = tl.full([], _NO_ID, tl.int32)
    if ROUND > 0:
        _, token, score = _merge(best_values, best_ids, best_scores, index, num_chunks, CHUNKS)
        ahead = _merge_weights(before, index, num_chunks, CHUNKS)
        if _is_kept(ahead, _merge_weights(total, index, num_chunks, CHUNKS), row, real):
            return
    _, limits = _limits(peaks, bound_scores, bound_ids, row, real, index, num_chunks, CHUNKS)
    seed = tl.load(whole + row * NUM_WHOLE + _SEED)
    position = tl.load(starts + r) + 1 + c
    begin, end, upcoming = _chunks_of_program(logits, V, num_chunks, chunks_per_program)
    for chunk in range(begin, end):
        raw = upcoming
        upcoming = load_logits(logits, (chunk + 1) * CHUNK + tl.arange(0, CHUNK), tl.minimum(V, end * CHUNK))
        best, best_id, best_score = _draw_chunk(
            raw, chunk * CHUNK, score, token, limits, seed, position, column
        )
        place = (ROUND * columns + index) * num_chunks + chunk
        tl.store(best_values + place, best)
        tl.store(best_ids + place, best_id)
        tl.store(best_scores + place, best_score)


@triton.jit(do_not_specialize=_VARYING)
def _weigh(
    logits, row_stride, column_stride, row_of, column_of, starts, recent, rows, real, whole,
    stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, C, J,
    peaks, bound_scores, bound_ids, best_values, best_ids, best_scores, before, total,
    num_chunks, chunks_per_program,
    ROUND: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tables = (starts, recent, real, whole, stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, J)
    index, r, c, row, logits = _begin(
        logits, row_stride, column_stride, row_of, column_of, rows, C, PDL
    )  # fmt: skip
    column = (r, c, row, tables)
    if not _is_drawn_with_filters(row, real, whole):
        return
    if tl.load(real + row * NUM_REAL + _TOP_P) >= 1.0:
        return
    columns = tl.num_programs(0)
    if ROUND > 0:
        ahead = _merge_weights(before, index, num_chunks, CHUNKS)
        if _is_kept(ahead, _merge_weights(total, index, num_chunks, CHUNKS), row, real):
            return
    _, token, score = _merge(
        best_values, best_ids, best_scores, ROUND * columns + index, num_chunks, CHUNKS
    )  # fmt: skip
    peak, limits = _limits(peaks, bound_scores, bound_ids, row, real, index, num_chunks, CHUNKS)
    begin, end, upcoming = _chunks_of_program(logits, V, num_chunks, chunks_per_program)
    for chunk in range(begin, end):
        raw = upcoming
        upcoming = load_logits(logits, (chunk + 1) * CHUNK + tl.arange(0, CHUNK), tl.minimum(V, end * CHUNK))
        ahead, mass = _weigh_chunk(raw, chunk * CHUNK, score, token, peak, limits, column)
        tl.store(before + (ROUND * columns + index) * num_chunks + chunk, ahead)
        if ROUND == 0:
            tl.store(total + index * num_chunks + chunk, mass)


@triton.jit(do_not_specialize=_VARYING)
def _settle(
    logits, row_stride, column_stride, row_of, column_of, starts, recent, rows, real, whole,
    stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, C, J,
    peaks, bound_scores, bound_ids, best_values, best_ids, best_scores, before, total, out, num_chunks,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tables = (starts, recent, real, whole, stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, J)
    index, r, c, row, logits = _begin(
        logits, row_stride, column_stride, row_of, column_of, rows, C, PDL
    )  # fmt: skip
    column = (r, c, row, tables)
    columns = tl.num_programs(0)
    _, answer, _ = _merge(best_values, best_ids, best_values, index, num_chunks, CHUNKS)
    if _is_drawn_with_filters(row, real, whole):
        mass = _merge_weights(total, index, num_chunks, CHUNKS)
        if not _is_kept(_merge_weights(before, index, num_chunks, CHUNKS), mass, row, real):
            place = columns + index
            _, answer, score = _merge(best_values, best_ids, best_scores, place, num_chunks, CHUNKS)
            ahead = _merge_weights(before, place, num_chunks, CHUNKS)
            peak, limits = _limits(peaks, bound_scores, bound_ids, row, real, index, num_chunks, CHUNKS)
            seed = tl.load(whole + row * NUM_WHOLE + _SEED)
            position = tl.load(starts + r) + 1 + c
            # Every round leaves fewer tokens. The loop also ends if no token is left, which needs NaN logits.
            while (answer != _NO_ID) & (not _is_kept(ahead, mass, row, real)):
                best = tl.full([], NEVER, tl.float32)
                best_id = tl.full([], _NO_ID, tl.int32)
                best_score = tl.full([], NEVER, tl.float32)
                for chunk in range(num_chunks):
                    raw = load_logits(logits, chunk * CHUNK + tl.arange(0, CHUNK), V)
                    value, token, its_score = _draw_chunk(
                        raw, chunk * CHUNK, score, answer, limits, seed, position, column
                    )
                    if value > best:
                        best = value
                        best_id = token
                        best_score = its_score
                answer = best_id
                score = best_score
                ahead = tl.full([], 0.0, tl.float32)
                for chunk in range(num_chunks):
                    raw = load_logits(logits, chunk * CHUNK + tl.arange(0, CHUNK), V)
                    added, _ = _weigh_chunk(raw, chunk * CHUNK, score, answer, peak, limits, column)
                    ahead += added
    tl.store(out + index, tl.minimum(answer, V - 1).to(tl.int64))


def choose(
    logits: Tensor, starts: Tensor, recent: Tensor, batch: SamplingBatch, places: Places | None = None
) -> Tensor:
    """Implement `reference_choose` for logits of 16 or 32 bits whose last dimension is contiguous."""
    if places is not None:
        logits = logits[None]
    num_rows, num_columns, vocab_size = logits.shape
    device, count = logits.device, num_rows * num_columns
    assert logits.stride(2) == 1
    assert batch.prompt_seen.shape[1] == vocab_size
    num_chunks = triton.cdiv(vocab_size, CHUNK.value)
    out = torch.empty(num_rows, num_columns, dtype=torch.int64, device=device)
    numbers = torch.empty(8, count, num_chunks, dtype=torch.float32, device=device)
    best_values, best_scores, before, (peaks, total) = numbers[:2], numbers[2:4], numbers[4:6], numbers[6:]
    best_ids = torch.empty(2, count, num_chunks, dtype=torch.int32, device=device)
    num_groups = num_chunks * (CHUNK.value // GROUP.value)
    group_peaks = torch.empty(count, num_groups, dtype=torch.float32, device=device)
    chosen_groups = torch.empty(count, MAX_GROUPS.value, dtype=torch.int32, device=device)
    bound_scores = torch.empty(count, dtype=torch.float32, device=device)
    bound_ids = torch.empty(count, dtype=torch.int32, device=device)
    column = (
        *(logits, logits.stride(0), logits.stride(1), *(places or (None, None))[:2]),
        *(starts, recent.contiguous(), batch.rows),
        *(batch.real, batch.whole, batch.stop_ids, batch.bias_ids, batch.bias_values),
        *(batch.prompt_seen, batch.output_counts, vocab_size, num_columns, recent.shape[1]),
    )
    found = (peaks, bound_scores, bound_ids, best_values, best_ids, best_scores, before, total)
    per_program = _chunks_per_program(count, num_chunks, num_multiprocessors(device))
    grid = (count, triton.cdiv(num_chunks, per_program))
    padded = triton.next_power_of_2(num_chunks)
    # Fused multiply-adds would round penalties differently from the reference.
    options = {**overlap(device), "enable_fp_fusion": False}
    _scan[grid](
        *column, best_values, best_ids, peaks, group_peaks, num_chunks, per_program, num_warps=4, **options
    )
    _bound[(count,)](
        *(*column, group_peaks, chosen_groups, bound_scores, bound_ids, num_chunks),
        GROUPS=triton.next_power_of_2(num_groups),
        num_warps=16,
        **options,
    )
    for number in range(2):
        rounds = {"ROUND": number, "CHUNKS": padded, "num_warps": 4}
        _draw[grid](*column, *found, num_chunks, per_program, **rounds, **options)
        _weigh[grid](*column, *found, num_chunks, per_program, **rounds, **options)
    _settle[(count,)](*column, *found, out, num_chunks, CHUNKS=padded, num_warps=8, **options)
    return out if places is None else out[0]


def _chunks_per_program(num_columns: int, num_chunks: int, num_multiprocessors: int) -> int:
    """Return how many chunks a program takes, so that programs fill the device but idle ones cost little."""
    wanted = max(1, 32 * num_multiprocessors // num_columns)
    return -(-num_chunks // min(num_chunks, wanted))


@triton.jit(do_not_specialize=["width"])
def _forbid(
    logits, row_of, column_of, words, counts, width, vocab_size, num_words,
    NEVER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64)
    r = column // width
    c = column % width
    if row_of is not None:
        r = tl.load(row_of + column)
        c = tl.load(column_of + column)
    if c < tl.load(counts + r):
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        bits = tl.load(words + (r * width + c) * num_words + word, mask=word < num_words, other=0)
        bit = tl.arange(0, 32)
        token = word[:, None] * 32 + bit[None, :]
        is_forbidden = ((bits[:, None] >> bit[None, :]) & 1) == 0
        never = tl.full((WORDS, 32), NEVER, logits.dtype.element_ty)
        tl.store(logits + column * vocab_size + token, never, mask=is_forbidden & (token < vocab_size))


def forbid(logits: Tensor, allowed: Allowed, places: Places | None = None) -> None:
    """Implement `sampling.reference_forbid`; write only the forbidden logits, and read none."""
    *shape, vocab_size = logits.shape
    _, width, num_words = allowed.words.shape
    assert logits.is_contiguous()
    assert allowed.words.is_contiguous()
    _forbid[(math.prod(shape), triton.cdiv(num_words, _WORDS))](
        logits, *(places or (None, None))[:2], allowed.words, allowed.counts, width, vocab_size, num_words,
        NEVER=float("-inf"), WORDS=_WORDS, num_warps=4,
    )  # fmt: skip
