"""Drafts chosen among a few candidates of each column, by how well neighbours go together.

A column keeps the `top_k` best tokens of what `sampling` would choose from. A candidate b behind a token a is
worth its own score and the pair's, sum over k of A[a]_k m_k B[b]_k, with m the column's own mixture (DFlash2)
or ones (DSpark). Drafts are then walked from the anchor on: greedily, or with the temperature, the filters
and the noise of the request. Noise is keyed by position and token: the target will draw with the same.

Where nothing filters, the noise has its say before candidates are kept: they are the best of score /
temperature + noise, and without pairs the walk draws what `choose` does. Filters look at what is likely, so a
row with filters has the likeliest candidates, and noise among these alone.

Whatever a column chooses depends on the candidate before it and on nothing else, so all choices are made at
once, for every candidate that may come before; the walk only follows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels.noise import gumbel_at
from blockdraft.kernels.sampling import SamplingBatch, adjusted, is_warm, keep_likely, noise_of, scales
from blockdraft.kernels.sampling_tables import Whole


class PairScores(NamedTuple):
    """What a selector knows of pairs of tokens in these columns."""

    predecessors: Tensor  # A [V, rank]
    successors: Tensor  # B [V or fewer, rank]
    mixture: Tensor | None  # m [R, C, rank]; None: ones
    top_k: int
    places: Tensor | None = None  # [V] int64: the tokens' rows of `successors`; None: their ids
    skips_first: bool = False  # whether pairs say nothing of column 0; only with a mixture


Walk = Callable[[Tensor, PairScores, Tensor, Tensor, SamplingBatch], Tensor]


def reference_walk(
    logits: Tensor, pairs: PairScores, starts: Tensor, anchor: Tensor, batch: SamplingBatch
) -> Tensor:
    """Drafts [R, C] behind anchor [R, 1], which sits at starts [R]; column c is at starts[r] + 1 + c.

    Of equal candidates the one with the lowest id is taken. Penalties count the anchor, but no draft.
    """
    warm, is_filtered = is_warm(batch), batch.integers(Whole.IS_FILTERED) != 0
    is_open = warm & ~is_filtered  # the noise has a say, and no filter
    own = adjusted(logits, starts, anchor, batch)
    if batch.has_random:
        own = torch.where(is_open[:, None, None], _noisy(own, starts, batch), own)
    unary, ids = best_tokens(own, pairs.top_k)  # [R, C, K]
    before = torch.cat((anchor[:, :, None].expand_as(ids[:, :1]), ids[:, :-1]), dim=1)
    scale = torch.where(is_open, scales(batch, unary.dtype), 1.0)[:, None, None, None]
    said = pair_scores(pairs, before, ids).to(unary.dtype)
    scores = unary[:, :, None] + said * scale  # [R, C, K before, K]
    best = scores.argmax(dim=-1)
    if batch.has_filter:
        drawn = _draw_filtered(scores, ids, starts, batch)
        best = torch.where((warm & is_filtered)[:, None, None], drawn, best)
    place = best[:, :1, 0]  # all of them come behind the anchor
    places = [place]
    for column in range(1, ids.shape[1]):
        place = best[:, column].gather(1, place)
        places.append(place)
    return ids.gather(2, torch.stack(places, dim=1)).squeeze(2)


def best_tokens(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest `top_k` of scores [R, C, V] and their ids, by id; of equal ones those with the lowest."""
    found = scores.topk(min(top_k + 1, scores.shape[-1]), dim=-1)
    least, others = found.values[..., top_k - 1 : top_k], found.values[..., top_k:]
    if bool((others < least).all()):  # none that is as large was left out
        ids = found.indices[..., :top_k].sort(dim=-1).values
    else:
        ids = _lowest_ids(scores, least, top_k)
    return scores.gather(-1, ids), ids


def _lowest_ids(scores: Tensor, least: Tensor, top_k: int) -> Tensor:
    """The first `top_k` ids whose scores are above `least`, or equal to it as far as there is room."""
    is_above, is_tied = scores > least, scores == least
    missing = top_k - is_above.sum(dim=-1, keepdim=True)
    is_kept = is_above | (is_tied & (is_tied.cumsum(dim=-1) <= missing))
    order = torch.arange(scores.shape[-1], 0, -1, device=scores.device)  # the lower the id, the larger
    ids = scores.shape[-1] - torch.where(is_kept, order, 0).topk(top_k, dim=-1, sorted=True).values
    return ids.clamp(max=scores.shape[-1] - 1)  # of NaN there are none


def pair_scores(pairs: PairScores, before: Tensor, ids: Tensor) -> Tensor:
    """[R, C, K before, K] of tokens [R, C, K] behind those of `before` [R, C, K]."""
    wide = torch.promote_types(pairs.predecessors.dtype, torch.float32)
    mixed = pairs.predecessors[before].to(wide)
    if pairs.mixture is not None:
        mixed = mixed * pairs.mixture[:, :, None].to(wide)
    if pairs.skips_first:
        mixed[:, 0] = 0
    return mixed @ pairs.successors[ids if pairs.places is None else pairs.places[ids]].to(wide).mT


def _noisy(scores: Tensor, starts: Tensor, batch: SamplingBatch) -> Tensor:
    """What `choose` draws by where nothing filters: [R, C, V]."""
    return scores * scales(batch, scores.dtype)[:, None, None] + noise_of(scores, starts, batch)


def _draw_filtered(scores: Tensor, ids: Tensor, starts: Tensor, batch: SamplingBatch) -> Tensor:
    """[R, C, K before]: what the request's own noise picks, behind each candidate that may come before."""
    scaled = scores * scales(batch, scores.dtype)[:, None, None, None]
    likely = keep_likely(scaled.flatten(1, 2), batch).view(scores.shape)
    positions = starts[:, None] + 1 + torch.arange(ids.shape[1], device=ids.device)
    noise = gumbel_at(batch.integers(Whole.SEED), positions, ids, scores.dtype)  # [R, C, K]
    return (likely + noise[:, :, None]).argmax(dim=-1)
