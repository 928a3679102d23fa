"""Chooses drafts among a few candidates per column by the scores of adjacent pairs of tokens.

A column keeps the `top_k` best tokens by the scores that `sampling` would choose from. The score of a
candidate b that follows a token a is its own score plus the pair's, the sum over k of A[a]_k m_k B[b]_k,
where m is the column's mixture (DFlash2) or ones (DSpark). Drafts are then chosen from the first column to
the last: greedily, or with the temperature, filters and noise of the request. Noise is keyed by position and
token, so the target draws with the same noise.

Without filters, candidates are the best by score / temperature + noise, so without pair scores the walk draws
the tokens that `choose` draws. With filters, noise is added only to the candidates that the filters keep.

A column's choice depends only on the candidate chosen in the column before. So all choices are computed at
once, one for each candidate of that column, and the walk only follows them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.kernels.noise import gumbel_at
from blockdraft.kernels.sampling import (
    Places,
    SamplingBatch,
    adjusted,
    is_warm,
    keep_likely,
    noise_of,
    scales,
)
from blockdraft.kernels.sampling_tables import Whole


class PairScores(NamedTuple):
    """The factors of the pair scores, for the columns of a block."""

    predecessors: Tensor  # A [V, rank]
    successors: Tensor  # B [V or fewer, rank]
    mixture: Tensor | None  # m [R, C, rank]; None: ones
    top_k: int
    successor_rows: Tensor | None = None  # [V] int64: each token's row of `successors`; None: its id
    skips_first: bool = False  # column 0 has no pair scores; only with a mixture


class WalkCandidates(Protocol):
    """Chooses drafts one after the other, as `reference_walk` does."""

    def __call__(
        self,
        logits: Tensor,
        pairs: PairScores,
        starts: Tensor,
        anchor: Tensor,
        batch: SamplingBatch,
        places: Places | None = None,
    ) -> Tensor: ...


def reference_walk(
    logits: Tensor,
    pairs: PairScores,
    starts: Tensor,
    anchor: Tensor,
    batch: SamplingBatch,
    places: Places | None = None,
) -> Tensor:
    """Return drafts [R, C] after the anchors [R, 1] at `starts`; column c is at starts[r] + 1 + c.

    Ties go to the lowest id. Penalties count the anchor, but no drafts. With `places`, logits [N, V], the
    mixture [N, rank] and the drafts [N] are streams of some columns: of each row the first ones.
    """
    if places is not None:
        if pairs.mixture is not None:
            pairs = pairs._replace(mixture=places.put(pairs.mixture))
        return places.take(reference_walk(places.put(logits), pairs, starts, anchor, batch))
    warm, is_filtered = is_warm(batch), batch.integers(Whole.IS_FILTERED) != 0
    is_open = warm & ~is_filtered  # noise, but no filter
    own = adjusted(logits, starts, anchor, batch)
    if batch.needs.random:
        own = torch.where(is_open[:, None, None], _noisy(own, starts, batch), own)
    unary, ids = best_tokens(own, pairs.top_k)  # [R, C, K]
    before = torch.cat((anchor[:, :, None].expand_as(ids[:, :1]), ids[:, :-1]), dim=1)
    scale = torch.where(is_open, scales(batch, unary.dtype), 1.0)[:, None, None, None]
    paired = pair_scores(pairs, before, ids).to(unary.dtype)
    scores = unary[:, :, None] + paired * scale  # [R, C, K before, K]
    best = scores.argmax(dim=-1)
    if batch.needs.filter:
        scaled = scores * scales(batch, scores.dtype)[:, None, None, None]
        drawn = draw_scores(scaled, ids, starts, batch).argmax(dim=-1)
        best = torch.where((warm & is_filtered)[:, None, None], drawn, best)
    candidate = best[:, :1, 0]  # the anchor is before all candidates of column 0
    chosen = [candidate]
    for column in range(1, ids.shape[1]):
        candidate = best[:, column].gather(1, candidate)
        chosen.append(candidate)
    return ids.gather(2, torch.stack(chosen, dim=1)).squeeze(2)


def best_tokens(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the `top_k` largest of scores [R, C, V] and their ids, sorted by id; ties: the lowest ids."""
    found = scores.topk(min(top_k + 1, scores.shape[-1]), dim=-1)
    least, others = found.values[..., top_k - 1 : top_k], found.values[..., top_k:]
    if bool((others < least).all()):  # no tie with a score that was left out
        ids = found.indices[..., :top_k].sort(dim=-1).values
    else:
        ids = _lowest_ids(scores, least, top_k)
    return scores.gather(-1, ids), ids


def _lowest_ids(scores: Tensor, least: Tensor, top_k: int) -> Tensor:
    """Return `top_k` ids: all with scores above `least`, then the lowest of those with that score."""
    is_above, is_tied = scores > least, scores == least
    missing = top_k - is_above.sum(dim=-1, keepdim=True)
    is_kept = is_above | (is_tied & (is_tied.cumsum(dim=-1) <= missing))
    order = torch.arange(scores.shape[-1], 0, -1, device=scores.device)  # larger for lower ids
    ids = scores.shape[-1] - torch.where(is_kept, order, 0).topk(top_k, dim=-1, sorted=True).values
    return ids.clamp(max=scores.shape[-1] - 1)  # NaN scores leave too few ids


def pair_scores(pairs: PairScores, before: Tensor, ids: Tensor) -> Tensor:
    """Return pair scores [R, C, K before, K] of tokens `ids` [R, C, K] that follow `before` [R, C, K]."""
    wide = torch.promote_types(pairs.predecessors.dtype, torch.float32)
    mixed = pairs.predecessors[before].to(wide)
    if pairs.mixture is not None:
        mixed = mixed * pairs.mixture[:, :, None].to(wide)
    if pairs.skips_first:
        mixed[:, 0] = 0
    return (
        mixed
        @ pairs.successors[ids if pairs.successor_rows is None else pairs.successor_rows[ids]].to(wide).mT
    )


def _noisy(scores: Tensor, starts: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the scores [R, C, V] by which `choose` draws without filters: scaled, with noise."""
    return scores * scales(batch, scores.dtype)[:, None, None] + noise_of(scores, starts, batch)


def draw_scores(scaled: Tensor, ids: Tensor, starts: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the scores [R, C, K before, K] by which candidates are drawn with filters and noise."""
    likely = keep_likely(scaled.flatten(1, 2), batch).view(scaled.shape)
    positions = starts[:, None] + 1 + torch.arange(ids.shape[1], device=ids.device)
    noise = gumbel_at(batch.integers(Whole.SEED), positions, ids, scaled.dtype)  # [R, C, K]
    return likely + noise[:, :, None]
