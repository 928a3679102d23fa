"""Samples tokens from logits: bias, minimum length, penalties, temperature, filters, keyed noise, argmax.

A token depends only on its row's own prefix, not on its column in a block, so drafting and verification call
one function. The order of the steps is vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.kernels.noise import gumbel
from blockdraft.kernels.sampling_tables import Real, Whole

NEVER = float("-inf")
MIN_TEMPERATURE = 1e-5  # lower temperatures are greedy; dividing by 1e-38 would overflow


@dataclass(slots=True)
class Needs:
    """The parts of sampling that at least one active row needs."""

    random: bool = False
    filter: bool = False
    penalty: bool = False
    bias: bool = False
    min_end: bool = False


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling tables of all rows, and the R rows to sample.

    A row of zeros is greedy. The ids of a list are sorted. `needs`, on the host, describes the rows that are
    active now; only the reference reads it.
    """

    real: Tensor  # [rows, len(Real)] float32
    whole: Tensor  # [rows, len(Whole)] int64
    stop_ids: Tensor  # [rows, MAX_LISTED] int64 padded with -1
    bias_ids: Tensor  # [rows, MAX_LISTED] int64 padded with -1
    bias_values: Tensor  # [rows, MAX_LISTED] float32
    prompt_seen: Tensor  # [rows, V] bool
    output_counts: Tensor  # [rows, V] int32, of positions [output_start, length)
    rows: Tensor  # [R] int64
    needs: Needs

    def numbers(self, column: Real) -> Tensor:
        return self.real[self.rows, column]

    def integers(self, column: Whole) -> Tensor:
        return self.whole[self.rows, column]


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that structured output allows."""

    words: Tensor  # [R, C, ceil(V / 32)] int32: bit i of word w is token 32 w + i
    counts: Tensor  # [R] int32: the number of constrained columns, from the first on; 0: no structured output


class Places(NamedTuple):
    """The places of a stream of N tokens: token n is in column columns[n] of row rows[n] of R rows."""

    rows: Tensor  # [N] int64
    columns: Tensor  # [N] int64
    offsets: Tensor  # [R + 1] int64: tokens [offsets[r], offsets[r + 1]) are in row r
    num_columns: int  # no row has more

    def take(self, box: Tensor) -> Tensor:
        """Return the entries [N, ...] at these places of a box [R, C, ...], which may have more columns."""
        return box.flatten(0, 1)[self.rows * box.shape[1] + self.columns]

    def put(self, stream: Tensor) -> Tensor:
        """Return a box [R, C, ...] with the stream's entries at these places, and zeros elsewhere."""
        num_rows = len(self.offsets) - 1
        box = stream.new_zeros(num_rows * self.num_columns, *stream.shape[1:])
        box[self.rows * self.num_columns + self.columns] = stream
        return box.view(num_rows, self.num_columns, *stream.shape[1:])


def places_of(offsets: Tensor, num_tokens: int, num_columns: int) -> Places:
    """Return the places of a stream in which tokens [offsets[r], offsets[r + 1]) belong to row r."""
    token = torch.arange(num_tokens, device=offsets.device)
    row = torch.searchsorted(offsets[1:], token, right=True)
    return Places(row, token - offsets[row], offsets, num_columns)


class Choose(Protocol):
    """Chooses tokens, as `reference_choose` does."""

    def __call__(
        self,
        logits: Tensor,
        starts: Tensor,
        recent: Tensor,
        batch: SamplingBatch,
        places: Places | None = None,
    ) -> Tensor: ...


class Forbid(Protocol):
    """Forbids tokens, as `reference_forbid` does."""

    def __call__(self, logits: Tensor, allowed: Allowed, places: Places | None = None) -> None: ...


def reference_forbid(logits: Tensor, allowed: Allowed, places: Places | None = None) -> None:
    """Set logits [R, C, V] to NEVER for tokens that the constrained columns may not choose.

    With `places`, the logits are a stream [N, V] of some of the columns.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    words, columns = allowed.words, torch.arange(allowed.words.shape[1], device=logits.device)
    is_constrained = columns < allowed.counts[:, None]  # [R, C]
    if places is not None:
        words, is_constrained = places.take(words), places.take(is_constrained)
    is_allowed = (words.view(torch.uint8)[..., None] >> bits & 1).flatten(-2)[..., : logits.shape[-1]]
    logits.masked_fill_((is_allowed == 0) & is_constrained[..., None], NEVER)


def reference_choose(
    logits: Tensor, starts: Tensor, recent: Tensor, batch: SamplingBatch, places: Places | None = None
) -> Tensor:
    """Choose tokens [R, C]: column c of logits [R, C, V] chooses the token at position starts[r] + 1 + c.

    The tokens `recent` [R, J] are at positions starts[r], starts[r] + 1, …, and the tables do not count them
    yet: column c counts the first min(c + 1, J) of them. With `places`, the logits are a stream [N, V] of
    some of the columns, and the tokens are a stream [N].
    """
    if places is not None:
        box = places.put(logits)
        return places.take(reference_choose(box, starts, recent, batch))
    scores = adjusted(logits, starts, recent, batch)
    greedy = scores.argmax(dim=-1)
    if not batch.needs.random:
        return greedy
    scaled = scores * scales(batch, scores.dtype)[:, None, None]
    if batch.needs.filter:
        scaled = keep_likely(scaled, batch)
    drawn = (scaled + noise_of(scores, starts, batch)).argmax(dim=-1)
    return torch.where(is_warm(batch)[:, None], drawn, greedy)


def is_warm(batch: SamplingBatch) -> Tensor:
    """Return a mask [R]: True where noise is added."""
    return batch.numbers(Real.TEMPERATURE) >= MIN_TEMPERATURE


def scales(batch: SamplingBatch, dtype: torch.dtype) -> Tensor:
    """Return the factors [R] that apply the temperature to scores: 1 / temperature, or 1 if greedy."""
    return 1.0 / torch.where(is_warm(batch), batch.numbers(Real.TEMPERATURE), 1.0).to(dtype)


def noise_of(scores: Tensor, starts: Tensor, batch: SamplingBatch) -> Tensor:
    """Return noise [R, C, V] for scores [R, C, V], whose columns are at starts + 1, starts + 2, …"""
    positions = _positions(scores, starts)
    return gumbel(batch.integers(Whole.SEED), positions, scores.shape[-1], scores.dtype)


def adjusted(logits: Tensor, starts: Tensor, recent: Tensor, batch: SamplingBatch) -> Tensor:
    """Return scores [R, C, V] with biases, bans and penalties, before the temperature."""
    scores = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    if batch.needs.bias:
        scores = _add_sparse(scores, batch.bias_ids[batch.rows], batch.bias_values[batch.rows][:, None])
    if batch.needs.min_end:
        is_early = _positions(scores, starts) < batch.integers(Whole.MIN_END)[:, None]
        ban = torch.where(is_early, NEVER, 0.0)  # [R, C]
        scores = _add_sparse(scores, batch.stop_ids[batch.rows], ban[..., None])
    return penalise(scores, starts, recent, batch) if batch.needs.penalty else scores


def _positions(scores: Tensor, starts: Tensor) -> Tensor:
    """Return the positions [R, C] of scores [R, C, V]: starts + 1, starts + 2, …"""
    return starts[:, None] + 1 + torch.arange(scores.shape[1], device=scores.device)


def penalise(scores: Tensor, starts: Tensor, recent: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply repetition, frequency and presence penalties as in plain decoding of each column.

    The committed counts are applied to the whole vocabulary, then the few tokens of the block are penalised
    again, as their counts differ from column to column.
    """
    counts = batch.output_counts[batch.rows][:, None].to(scores.dtype)  # [R, 1, V]
    seen = batch.prompt_seen[batch.rows]  # [R, V]
    out = _penalise(scores, counts, seen[:, None], batch)
    order = torch.arange(recent.shape[1], device=recent.device)  # [J]
    is_output = starts[:, None] + order >= batch.integers(Whole.OUTPUT_START)[:, None]  # [R, J]
    column = torch.arange(scores.shape[1], device=recent.device)
    counted = (order <= column[:, None])[None] & is_output[:, None]  # [R, C, J]
    same = (recent[:, :, None] == recent[:, None, :]).to(scores.dtype)  # [R, J, J]
    extra = counted.to(scores.dtype) @ same  # [R, C, J]
    index = recent[:, None].expand(-1, scores.shape[1], -1)
    base = counts.squeeze(1).gather(1, recent)[:, None]
    known = seen.gather(1, recent)[:, None]
    return out.scatter(2, index, _penalise(scores.gather(2, index), base + extra, known, batch))


def _penalise(scores: Tensor, counts: Tensor, seen: Tensor, batch: SamplingBatch) -> Tensor:
    repetition, frequency, presence = (
        batch.numbers(column)[:, None, None].to(scores.dtype)
        for column in (Real.REPETITION, Real.FREQUENCY, Real.PRESENCE)
    )
    is_output = counts > 0
    repeated = scores * torch.where(scores > 0, 1.0 / repetition, repetition)
    penalised = torch.where(seen | is_output, repeated, scores) - frequency * counts - presence * is_output
    is_penalised = batch.integers(Whole.IS_PENALISED)[:, None, None] != 0
    return torch.where(is_penalised, penalised, scores)


def keep_likely(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the scores, NEVER where min_p, then top_k, then top_p remove the token; the likeliest stays."""
    best = scaled.amax(dim=-1, keepdim=True)
    floor = best + batch.numbers(Real.LOG_MIN_P)[:, None, None].to(scaled.dtype)
    scaled = scaled.masked_fill(scaled < floor, NEVER)
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(rank >= batch.integers(Whole.TOP_K)[:, None, None], NEVER)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = batch.numbers(Real.TOP_P)[:, None, None]
    cut = (before >= top_p) & (top_p < 1.0)
    cut[..., 0] = False
    return torch.empty_like(scaled).scatter_(-1, order, values.masked_fill_(cut, NEVER))


def _add_sparse(scores: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return scores [R, C, V] plus `values` [R, 1 or C, 1 or K] at `ids` [R, K]; id -1 adds nothing."""
    shape = (ids.shape[0], scores.shape[1], ids.shape[1])
    is_used = (ids >= 0)[:, None].expand(shape)
    index = ids.clamp(min=0)[:, None].expand(shape)
    added = torch.where(is_used, values.to(scores.dtype).expand(shape), 0.0)
    return scores.scatter_add(2, index, added)
