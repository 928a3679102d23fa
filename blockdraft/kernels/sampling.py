"""From logits to tokens: bias, minimum length, penalties, temperature, filters, keyed noise, argmax.

Everything here is a function of a row's own prefix, so it means the same at any column of a block: the
target's verify and the drafter's proposals call one function. The order is vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.kernels.noise import gumbel

NEVER = float("-inf")
MIN_TEMPERATURE = 1e-5  # colder is greedy; dividing by 1e-38 would overflow


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling state of R rows. A `has_` flag is a host value: some row of the batch needs that part."""

    temperature: Tensor  # [R]; 0 is greedy
    top_k: Tensor  # [R]; vocabulary size means off
    top_p: Tensor  # [R]; 1 means off
    min_p: Tensor  # [R]; 0 means off
    repetition: Tensor  # [R]; 1 means off
    presence: Tensor  # [R]
    frequency: Tensor  # [R]
    seed: Tensor  # [R] int64
    output_start: Tensor  # [R] positions from here on count as output
    min_end: Tensor  # [R] before this position no token of `stop_ids` is chosen
    stop_ids: Tensor  # [R, K] padded with -1
    bias_ids: Tensor  # [R, K] padded with -1
    bias_values: Tensor  # [R, K]
    prompt_seen: Tensor  # [R, V] bool
    output_counts: Tensor  # [R, V] of positions [output_start, length)
    has_random: bool
    has_filter: bool
    has_penalty: bool
    has_bias: bool
    has_min_end: bool


@dataclass(frozen=True, slots=True)
class Recent:
    """Tokens at positions length, length + 1, …: in the block, but not counted in the table yet."""

    token_ids: Tensor  # [R, J]
    positions: Tensor  # [R, J]
    num_visible: Tensor  # [C] how many of them column c may count


def choose(logits: Tensor, positions: Tensor, batch: SamplingBatch, recent: Recent) -> Tensor:
    """One token for each of [R, C]: logits [R, C, V], positions [R, C] of the tokens being chosen."""
    scores = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    if batch.has_bias:
        scores = _add_sparse(scores, batch.bias_ids, batch.bias_values[:, None])
    if batch.has_min_end:
        ban = torch.where(positions < batch.min_end[:, None], NEVER, 0.0)  # [R, C]
        scores = _add_sparse(scores, batch.stop_ids, ban[..., None])
    if batch.has_penalty:
        scores = penalise(scores, batch, recent)
    greedy = scores.argmax(dim=-1)
    if not batch.has_random:
        return greedy
    warm = batch.temperature >= MIN_TEMPERATURE
    scaled = scores / torch.where(warm, batch.temperature, 1.0)[:, None, None].to(scores.dtype)
    if batch.has_filter:
        scaled = keep_likely(scaled, batch)
    noise = gumbel(batch.seed, positions, scores.shape[-1], scores.dtype)
    return torch.where(warm[:, None], (scaled + noise).argmax(dim=-1), greedy)


def penalise(scores: Tensor, batch: SamplingBatch, recent: Recent) -> Tensor:
    """Repetition, frequency and presence penalties, as each column would see them in plain decoding.

    First with the committed counts for the whole vocabulary, then once more at the few tokens of the
    block itself, whose counts differ from column to column.
    """
    counts = batch.output_counts[:, None].to(scores.dtype)  # [R, 1, V]
    out = _penalise(scores, counts, batch.prompt_seen[:, None], batch)
    ids = recent.token_ids  # [R, J]
    is_output = recent.positions >= batch.output_start[:, None]  # [R, J]
    columns = torch.arange(ids.shape[1], device=ids.device)
    counted = (columns < recent.num_visible[:, None])[None] & is_output[:, None]  # [R, C, J]
    same = (ids[:, :, None] == ids[:, None, :]).to(scores.dtype)  # [R, J, J]
    extra = counted.to(scores.dtype) @ same  # [R, C, J]
    index = ids[:, None].expand(-1, scores.shape[1], -1)
    base = counts.squeeze(1).gather(1, ids)[:, None]
    seen = batch.prompt_seen.gather(1, ids)[:, None]
    return out.scatter(2, index, _penalise(scores.gather(2, index), base + extra, seen, batch))


def _penalise(scores: Tensor, counts: Tensor, seen: Tensor, batch: SamplingBatch) -> Tensor:
    repetition, frequency, presence = (
        value[:, None, None].to(scores.dtype) for value in (batch.repetition, batch.frequency, batch.presence)
    )
    is_output = counts > 0
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen | is_output, repeated, scores)
    return scores - frequency * counts - presence * is_output


def keep_likely(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """min_p, then top_k, then top_p over what top_k left; the likeliest token always stays."""
    best = scaled.amax(dim=-1, keepdim=True)
    floor = best + torch.log(batch.min_p)[:, None, None].to(scaled.dtype)
    scaled = scaled.masked_fill(scaled < floor, NEVER)
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(rank >= batch.top_k[:, None, None], NEVER)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    cut = (before >= batch.top_p[:, None, None]) & (batch.top_p < 1.0)[:, None, None]
    cut[..., 0] = False
    return torch.empty_like(scaled).scatter_(-1, order, values.masked_fill_(cut, NEVER))


def _add_sparse(scores: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """scores [R, C, V] with `values` [R, 1 or C, 1 or K] added at `ids` [R, K]; id -1 adds nothing."""
    shape = (ids.shape[0], scores.shape[1], ids.shape[1])
    is_used = (ids >= 0)[:, None].expand(shape)
    index = ids.clamp(min=0)[:, None].expand(shape)
    added = torch.where(is_used, values.to(scores.dtype).expand(shape), 0.0)
    return scores.scatter_add(2, index, added)
