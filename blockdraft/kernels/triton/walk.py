"""`walk` in one launch: a program for each row goes from draft to draft.

What `choose` asks of a whole vocabulary is asked of K candidates here, so ranks and masses are counted by
comparing all of them with all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.sampling import SamplingBatch
from blockdraft.kernels.sampling_tables import Real, Whole
from blockdraft.kernels.triton.scores import (
    MIN_TEMPERATURE,
    NEVER,
    NUM_REAL,
    NUM_WHOLE,
    TEMPERATURE,
    noise_at,
    scores_of,
)
from blockdraft.kernels.walk import Candidates, Transition

_TOP_P = tl.constexpr(int(Real.TOP_P))
_LOG_MIN_P = tl.constexpr(int(Real.LOG_MIN_P))
_SEED = tl.constexpr(int(Whole.SEED))
_TOP_K = tl.constexpr(int(Whole.TOP_K))
_IS_FILTERED = tl.constexpr(int(Whole.IS_FILTERED))
_NO_ID = tl.constexpr(0x7FFFFFFF)
_RANK_TILE = 64  # of the rows that are multiplied, at a time


@triton.jit
def _added(before, after, places, token, is_candidate, rank, K: tl.constexpr, TILE: tl.constexpr):
    """What `token` adds to the score of each candidate."""
    added = tl.zeros([K], dtype=tl.float32)
    for first in range(0, rank, TILE):
        part = first + tl.arange(0, TILE)
        own = tl.load(before + token * rank + part, mask=part < rank, other=0.0).to(tl.float32)
        is_value = is_candidate[:, None] & (part < rank)[None, :]
        rows = tl.load(after + places[:, None] * rank + part[None, :], mask=is_value, other=0.0)
        added += tl.sum(rows.to(tl.float32) * own[None, :], axis=1)
    return added


@triton.jit
def _is_kept(scores, ids, row, real, whole):
    """Whether min_p, top_k and top_p keep each candidate, of these alone."""
    floor = tl.max(scores, axis=0) + tl.load(real + row * NUM_REAL + _LOG_MIN_P)
    is_open = scores >= floor
    open_scores = tl.where(is_open, scores, NEVER)
    ahead = (open_scores[None, :] > open_scores[:, None]) | (
        (open_scores[None, :] == open_scores[:, None]) & (ids[None, :] < ids[:, None])
    )  # [candidate, whether another ranks before it]
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    is_open = is_open & (rank < tl.load(whole + row * NUM_WHOLE + _TOP_K))
    weights = tl.where(is_open, tl.exp(scores - tl.max(scores, axis=0)), 0.0)
    mass = tl.sum(tl.where(ahead, weights[None, :], 0.0), axis=1)
    top_p = tl.load(real + row * NUM_REAL + _TOP_P)
    limit = tl.where(top_p >= 1.0, float("inf"), top_p * tl.sum(weights, axis=0))
    return is_open & ((rank == 0) | (mass < limit))


@triton.jit(do_not_specialize=("num_drafts", "num_before", "J"))
def _walk(
    scores, token_ids, places, before, after, rank, starts, rows, real, whole,
    stop_ids, bias_ids, bias_values, prompt_seen, output_counts, path, V, J,
    num_drafts, num_before, num_candidates,
    HAS_TRANSITION: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`path` [R, J] has `num_before` tokens, and gets the drafts behind them."""
    tables = (starts, path, real, whole, stop_ids, bias_ids, bias_values, prompt_seen, output_counts, V, J)
    r = tl.program_id(0)
    row = tl.load(rows + r)
    k = tl.arange(0, K)
    is_candidate = k < num_candidates
    is_random = tl.load(real + row * NUM_REAL + TEMPERATURE) >= MIN_TEMPERATURE
    is_filtered = tl.load(whole + row * NUM_WHOLE + _IS_FILTERED) != 0
    seed = tl.load(whole + row * NUM_WHOLE + _SEED)
    token = tl.load(path + r * J + num_before - 1)
    for draft in range(num_drafts):
        place = (r * num_drafts + draft) * num_candidates + k
        ids = tl.load(token_ids + place, mask=is_candidate, other=V).to(tl.int32)
        raw = tl.load(scores + place, mask=is_candidate, other=NEVER).to(tl.float32)
        if HAS_TRANSITION:
            at = tl.load(places + place, mask=is_candidate, other=0)
            raw += _added(before, after, at, token, is_candidate, rank, K, TILE)
        c = num_before - 1 + draft
        found = scores_of(raw, ids, 0, V, (r, c, row, tables))
        if is_random:
            noisy = found + noise_at(ids, seed, tl.load(starts + r) + 1 + c)
            if is_filtered:
                noisy = tl.where(_is_kept(found, ids, row, real, whole), noisy, NEVER)
            found = noisy
        best = tl.max(found, axis=0)
        token = tl.min(tl.where((found == best) & is_candidate, ids, _NO_ID), axis=0).to(tl.int64)
        tl.store(path + r * J + num_before + draft, token)
        tl.debug_barrier()  # the next draft's penalties read it


def walk(
    found: Candidates,
    path: Tensor,
    starts: Tensor,
    batch: SamplingBatch,
    transition: Transition | None = None,
) -> Tensor:
    """walk.reference_walk"""
    num_rows, num_drafts, num_candidates = found.scores.shape
    num_before = path.shape[1]
    whole_path = torch.empty(num_rows, num_before + num_drafts, dtype=torch.int64, device=path.device)
    whole_path[:, :num_before] = path
    scores, token_ids = found.scores.contiguous(), found.token_ids.contiguous()
    before, after, places, rank = scores, scores, token_ids, 0  # not read
    if transition is not None:
        before, after, places = transition.before, transition.after, transition.places.contiguous()
        assert before.is_contiguous()
        assert after.is_contiguous()
        rank = before.shape[1]
    _walk[(num_rows,)](
        *(scores, token_ids, places, before, after, rank, starts, batch.rows, batch.real, batch.whole),
        *(batch.stop_ids, batch.bias_ids, batch.bias_values, batch.prompt_seen, batch.output_counts),
        *(whole_path, batch.prompt_seen.shape[1], num_before + num_drafts),
        *(num_drafts, num_before, num_candidates),
        HAS_TRANSITION=transition is not None,
        K=triton.next_power_of_2(num_candidates),
        TILE=_RANK_TILE,
        num_warps=4,
        enable_fp_fusion=False,  # fused multiply-adds would round penalties differently from the reference
    )
    return whole_path[:, num_before:]
