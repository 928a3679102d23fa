"""`walk` on a CUDA device, in three launches; see `kernels/candidates.py` for the contract.

1. `_scan` finds the best candidates of every chunk of CHUNK tokens of a column, best first, with noise if the
   row has no filter.
2. `_link` merges the chunks of a column. For each candidate of the previous column, it stores the index of
   the candidate that the column then chooses.
3. `_follow` does the walk, with one program per row.

A candidate is stored as a key: its score in the upper half, its inverted id in the lower half. Keys have the
order of candidates, with the lower id first if scores are equal, and the keys of a column are distinct.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.candidates import PairScores
from blockdraft.kernels.sampling import Places, SamplingBatch
from blockdraft.kernels.sampling_tables import Real, Whole
from blockdraft.kernels.triton.launch import let_next_start, overlap, start_and_wait, wait_for_previous
from blockdraft.kernels.triton.scores import (
    MIN_TEMPERATURE,
    NEVER,
    NUM_REAL,
    NUM_WHOLE,
    TEMPERATURE,
    adjusted_scores,
    load_logits,
    noise_at,
    noise_of,
)

CHUNK = tl.constexpr(2048)  # tokens
_RANKS = tl.constexpr(64)  # ranks of the pair scores, a step at a time
_TOP_P = tl.constexpr(int(Real.TOP_P))
_LOG_MIN_P = tl.constexpr(int(Real.LOG_MIN_P))
_SEED = tl.constexpr(int(Whole.SEED))
_TOP_K = tl.constexpr(int(Whole.TOP_K))
_IS_FILTERED = tl.constexpr(int(Whole.IS_FILTERED))
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_NO_KEY = tl.constexpr(-0x8000000000000000)
_VARYING = ("recent", "C", "J", "num_keys")


@triton.jit
def _keys_of(scores, ids):
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) | (ids ^ _LAST_ID).to(tl.int64)


@triton.jit
def key_score(keys):
    order = (keys >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def key_id(keys):
    return (keys & 0x7FFFFFFF).to(tl.int32) ^ _LAST_ID


@triton.jit
def _largest(keys, top_k, K: tl.constexpr):
    """Return the `top_k` largest of `keys`, largest first, in a vector of K padded with _NO_KEY."""
    place = tl.arange(0, K)
    found = tl.full([K], _NO_KEY, tl.int64)
    for index in range(top_k):
        best = tl.max(keys, axis=0)
        found = tl.where(place == index, best, found)
        keys = tl.where(keys == best, _NO_KEY, keys)
    return found


@triton.jit
def is_open(temperature, row, whole):
    """Return whether the row has noise, but no filter."""
    return (temperature >= MIN_TEMPERATURE) & (tl.load(whole + row * NUM_WHOLE + _IS_FILTERED) == 0)


@triton.jit(do_not_specialize=_VARYING)
def _scan(
    logits, row_stride, column_stride, row_of, column_of, starts, recent, rows, real, whole,
    stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, C, J, top_k, keys,
    K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    tables = (starts, recent, real, whole, stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, J)
    index = tl.program_id(0)
    chunk = tl.program_id(1)
    r = index // C
    c = index % C
    logits += r.to(tl.int64) * row_stride + c.to(tl.int64) * column_stride
    first = chunk * CHUNK
    ids = first + tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    if row_of is not None:
        r = tl.load(row_of + index).to(tl.int32)
        c = tl.load(column_of + index).to(tl.int32)
    row = tl.load(rows + r)
    scores = adjusted_scores(load_logits(logits, ids, V), ids, first, first + CHUNK, (r, c, row, tables))
    temperature = tl.load(real + row * NUM_REAL + TEMPERATURE)
    if is_open(temperature, row, whole):
        seed = tl.load(whole + row * NUM_WHOLE + _SEED)
        noise = noise_of(first, seed, tl.load(starts + r) + 1 + c, CHUNK)
        scores = scores * tl.div_rn(1.0, temperature) + noise
    own = tl.where(ids < V, _keys_of(scores, ids), _NO_KEY)
    place = (index * tl.num_programs(1) + chunk) * K + tl.arange(0, K)
    tl.store(keys + place, _largest(own, top_k, K))


@triton.jit
def best_of_chunks(keys, index, num_keys, top_k, K: tl.constexpr, KEYS: tl.constexpr):
    """Return the keys [K] of a column's candidates, best first."""
    place = tl.arange(0, KEYS)
    found = tl.load(keys + index * num_keys + place, mask=place < num_keys, other=_NO_KEY)
    return _largest(found, top_k, K)


@triton.jit
def filtered(scaled, ids, top_k, row, real, whole, K: tl.constexpr):
    """Apply min_p, top_k and top_p to each line of scaled [K, K]; see `sampling.keep_likely`."""
    best = tl.max(scaled, axis=1)
    floor = best + tl.load(real + row * NUM_REAL + _LOG_MIN_P)
    scaled = tl.where(scaled < floor[:, None], NEVER, scaled)
    place = tl.arange(0, K)
    most = tl.minimum(tl.load(whole + row * NUM_WHOLE + _TOP_K), K).to(tl.int32)
    rank = tl.zeros([K, K], dtype=tl.int32)
    for other in range(top_k):
        value = tl.max(tl.where(place[None, :] == other, scaled, NEVER), axis=1)[:, None]
        is_behind = ids > tl.max(tl.where(place == other, ids, 0), axis=0)  # decides if they are equal
        is_before = (value > scaled) | ((value == scaled) & is_behind[None, :])
        rank += is_before.to(tl.int32)
    scaled = tl.where(rank >= most, NEVER, scaled)
    top_p = tl.load(real + row * NUM_REAL + _TOP_P)
    if top_p < 1.0:
        weights = tl.exp(scaled - best[:, None])
        total = tl.sum(weights, axis=1)[:, None]
        before = tl.zeros([K, K], dtype=tl.float32)
        for other in range(top_k):
            is_other = place[None, :] == other
            its_rank = tl.max(tl.where(is_other, rank, 0), axis=1)[:, None]
            weight = tl.sum(tl.where(is_other, weights, 0.0), axis=1)[:, None]
            before += tl.where(its_rank < rank, weight, 0.0)
        scaled = tl.where((before >= top_p * total) & (rank > 0), NEVER, scaled)
    return scaled


@triton.jit
def paired(
    keys, index, num_keys, ids, anchor, c, predecessors, successors, mixture, successor_rows, RANK, top_k,
    K: tl.constexpr, KEYS: tl.constexpr, HAS_MIXTURE: tl.constexpr, SKIPS_FIRST: tl.constexpr,
    HAS_SUCCESSOR_ROWS: tl.constexpr,
):  # fmt: skip
    """Return the pair scores [K before, K] of the candidates `ids` of column c."""
    is_one = tl.arange(0, K) < top_k
    own = tl.where(is_one, ids, 0).to(tl.int64)
    if c == 0:
        before = tl.zeros([K], dtype=tl.int64) + tl.load(anchor)
    else:
        keys_before = best_of_chunks(keys, index - 1, num_keys, top_k, K, KEYS)
        before = tl.where(is_one, key_id(keys_before), 0).to(tl.int64)
    at = own
    if HAS_SUCCESSOR_ROWS:
        at = tl.load(successor_rows + own)
    pairs = tl.zeros([K, K], dtype=tl.float32)
    for first in range(0, RANK, _RANKS):
        rank = first + tl.arange(0, _RANKS)
        is_rank = (rank < RANK)[None, :]
        left = tl.load(predecessors + before[:, None] * RANK + rank[None, :], mask=is_rank, other=0.0)
        right = tl.load(successors + at[:, None] * RANK + rank[None, :], mask=is_rank, other=0.0)
        left = left.to(tl.float32)
        if HAS_MIXTURE:
            is_said = (rank < RANK) & ((c > 0) | (not SKIPS_FIRST))
            mixed = tl.load(mixture + index * RANK + rank, mask=is_said, other=0.0)
            left = left * mixed.to(tl.float32)[None, :]
        pairs = tl.dot(left, tl.trans(right.to(tl.float32)), pairs, input_precision="ieee")
    return pairs


@triton.jit(do_not_specialize=_VARYING)
def _link(
    keys, num_keys, row_of, column_of, recent, starts, rows, real, whole, predecessors, successors, mixture,
    successor_rows, RANK, C, J, top_k, out_ids, out,
    K: tl.constexpr, KEYS: tl.constexpr, HAS_MIXTURE: tl.constexpr,
    SKIPS_FIRST: tl.constexpr, HAS_SUCCESSOR_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    index = tl.program_id(0).to(tl.int64)
    r = index // C
    c = index % C
    if row_of is not None:
        r = tl.load(row_of + index)
        c = tl.load(column_of + index)
    row = tl.load(rows + r)
    place = tl.arange(0, K)
    is_one = place < top_k
    best_keys = best_of_chunks(keys, index, num_keys, top_k, K, KEYS)
    ids = tl.where(is_one, key_id(best_keys), _LAST_ID)
    tl.store(out_ids + index * K + place, ids)
    pairs = paired(
        keys, index, num_keys, ids, recent + r * J, c, predecessors, successors, mixture, successor_rows,
        RANK, top_k, K, KEYS, HAS_MIXTURE, SKIPS_FIRST, HAS_SUCCESSOR_ROWS,
    )  # fmt: skip
    unary = tl.where(is_one, key_score(best_keys), NEVER)
    temperature = tl.load(real + row * NUM_REAL + TEMPERATURE)
    if is_open(temperature, row, whole):
        pairs = pairs * tl.div_rn(1.0, temperature)
    total = unary[None, :] + pairs
    if (temperature >= MIN_TEMPERATURE) & (tl.load(whole + row * NUM_WHOLE + _IS_FILTERED) != 0):
        total = filtered(total * tl.div_rn(1.0, temperature), ids, top_k, row, real, whole, K)
        seed = tl.load(whole + row * NUM_WHOLE + _SEED)
        noise = noise_at(tl.where(is_one, ids, 0), seed, tl.load(starts + r) + 1 + c)
        total += noise[None, :]
    best = tl.max(total, axis=1)[:, None]
    is_best = (total == best) & is_one[None, :]
    lowest = tl.min(tl.where(is_best, ids[None, :], _LAST_ID), axis=1)[:, None]
    choice = tl.min(tl.where(ids[None, :] == lowest, place[None, :], K - 1), axis=1)
    tl.store(out + index * K + place, choice)


@triton.jit(do_not_specialize=_VARYING)
def _follow(links, ids, offsets, out, C, V, K: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    first = tl.program_id(0).to(tl.int64) * C
    if offsets is not None:
        first = tl.load(offsets + tl.program_id(0))
        C = (tl.load(offsets + tl.program_id(0) + 1) - first).to(tl.int32)
    column, candidate = tl.arange(0, COLUMNS), tl.arange(0, K)[None, :]
    at = (first + column)[:, None] * K + candidate
    all_links = tl.load(links + at, mask=(column < C)[:, None], other=0)  # all at once
    all_ids = tl.load(ids + at, mask=(column < C)[:, None], other=0)
    place = tl.full([], 0, tl.int32)
    chosen = tl.zeros([COLUMNS], dtype=tl.int32)
    for step in range(C):
        place = tl.sum(tl.where((column[:, None] == step) & (candidate == place), all_links, 0))
        chosen = tl.where(column == step, place, chosen)
    token = tl.sum(tl.where(candidate == chosen[:, None], all_ids, 0), axis=1)
    tl.store(out + first + column, tl.minimum(tl.maximum(token, 0), V - 1).to(tl.int64), mask=column < C)


def candidates_of(
    logits: Tensor,
    starts: Tensor,
    anchor: Tensor,
    batch: SamplingBatch,
    top_k: int,
    size: int,
    places: Places | None = None,
) -> Tensor:
    """Return the keys of the best `top_k` candidates of each chunk of logits [R, C, V], padded to `size`."""
    num_rows, num_columns, vocab_size = logits.shape
    assert logits.stride(2) == 1
    count, num_chunks = num_rows * num_columns, triton.cdiv(vocab_size, CHUNK.value)
    keys = torch.empty(count, num_chunks * size, dtype=torch.int64, device=logits.device)
    # Fused multiply-adds would round penalties differently from the reference.
    _scan[(count, num_chunks)](
        *(logits, logits.stride(0), logits.stride(1), *(places or (None, None))[:2]),
        *(starts, anchor, batch.rows, batch.real, batch.whole),
        *(batch.stop_ids, batch.bias_ids, batch.bias_values, batch.prompt_seen, batch.output_counts),
        *(vocab_size, num_columns, anchor.shape[1], top_k, keys),
        K=size, num_warps=4, **overlap(logits.device), enable_fp_fusion=False,
    )  # fmt: skip
    return keys


def walk(
    logits: Tensor,
    pairs: PairScores,
    starts: Tensor,
    anchor: Tensor,
    batch: SamplingBatch,
    places: Places | None = None,
) -> Tensor:
    """Implement `reference_walk` for logits of 16 or 32 bits whose last dimension is contiguous."""
    where = (None, None, None) if places is None else places[:3]
    if places is not None:
        logits = logits[None]
    num_rows, num_columns, vocab_size = logits.shape
    device, count, top_k = logits.device, num_rows * num_columns, pairs.top_k
    size = max(16, triton.next_power_of_2(top_k))  # the smallest product of pair scores
    ids, links = torch.empty(2, count, size, dtype=torch.int32, device=device)
    out = torch.empty(num_rows, num_columns, dtype=torch.int64, device=device)
    anchor = anchor.contiguous()
    keys = candidates_of(logits, starts, anchor, batch, top_k, size, places)
    mixture = pairs.predecessors if pairs.mixture is None else pairs.mixture.contiguous()  # or not read
    successor_rows = ids if pairs.successor_rows is None else pairs.successor_rows
    options = {"K": size, **overlap(device), "enable_fp_fusion": False}
    _link[(count,)](
        *(keys, keys.shape[1], *where[:2], anchor, starts, batch.rows, batch.real, batch.whole),
        *(pairs.predecessors, pairs.successors, mixture, successor_rows, pairs.predecessors.shape[1]),
        *(num_columns, anchor.shape[1], top_k, ids, links),
        KEYS=triton.next_power_of_2(keys.shape[1]), HAS_MIXTURE=pairs.mixture is not None,
        SKIPS_FIRST=pairs.skips_first, HAS_SUCCESSOR_ROWS=pairs.successor_rows is not None, num_warps=4,
        **options,
    )  # fmt: skip
    columns = triton.next_power_of_2(num_columns if places is None else places.num_columns)
    _follow[(len(starts),)](
        links, ids, where[2], out, num_columns, vocab_size, COLUMNS=columns, num_warps=1, **options
    )  # fmt: skip
    return out if places is None else out[0]
