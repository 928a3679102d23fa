"""Verify: sample the target at every column of the block, keep the samples up to the first wrong draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView
from blockdraft.kernels.sampling import Allowed

LOGIT_SLICE = 64  # positions whose logits are converted to float32 at a time for log-probabilities


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities under the model itself, before bias, penalties and temperature, as in vLLM."""

    chosen: Tensor  # [..., ]
    top_ids: Tensor  # [..., K]
    top_values: Tensor  # [..., K]


def joined(parts: list[Logprobs]) -> Logprobs:
    """Concatenate the parts, position after position."""
    return Logprobs(
        chosen=torch.cat([part.chosen for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_values=torch.cat([part.top_values for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a step, on the device: row r emits token_ids[r, :num_committed[r]].

    What is past a row's own width is not read.
    """

    token_ids: Tensor  # [R, B] the target's own samples
    num_committed: Tensor  # [R] accepted drafts + 1
    logprobs: Logprobs | None  # [R, B], if a row requests them
    chains: Tensor | None = None  # [R, 3] of trees: see kernels.branches.Kept


def verify(
    logits: Tensor,
    block: Tensor,
    rows: Rows,
    view: CacheView,
    allowed: Allowed | None = None,
    *,
    num_logprobs: int | None = None,
    rates: Tensor | None = None,
) -> Verdict:
    """Sample logits [N, V] by each row's rules. Accept a draft if the previous column's sample equals it.

    Each emitted token is the target's sample under noise keyed by (seed, position), so a drafter changes how
    many tokens a step yields, but never which tokens. `allowed` masks the tokens that structured outputs
    forbid. With `rates`, for timing only, the number of accepted drafts is random: the text is nonsense.
    """
    places, num_columns = view.places, block.shape[1]
    is_read_again = allowed is not None and num_logprobs is not None
    scores = logits.clone() if is_read_again else logits  # log-probabilities are the model's own
    if places is None:
        scores = scores.view(*block.shape, -1)
    if allowed is not None:
        rows.kernels.forbid(scores, allowed, places)
    sampled = rows.kernels.choose(scores, view.starts, block, rows.sampling(), places)  # [R, B] or [N]
    found = sampled if places is None else view.box(sampled, num_columns)
    if rates is None:
        num_committed = rows.kernels.count_accepted(found, block, rows.limits)
    else:
        rates = rates[: num_columns - 1]
        num_committed = rows.kernels.draw_accepted(rates, view.starts, rows.limits, rows.sampling())
    logprobs = None if num_logprobs is None else measure(logits, sampled.flatten(), num_logprobs)
    return Verdict(found, num_committed, None if logprobs is None else boxed(logprobs, view, num_columns))


def boxed(logprobs: Logprobs, view: CacheView, num_columns: int) -> Logprobs:
    """Return the log-probabilities [N] of a stream as those [R, columns] of a box."""
    parts = logprobs.chosen, logprobs.top_ids, logprobs.top_values
    return Logprobs(*(view.box(part, num_columns) for part in parts))


def measure(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Return the log-probabilities of token_ids [...] and of the `num_top` likeliest under logits [..., V].

    Work in slices, so that only LOGIT_SLICE positions exist in float32 at a time.
    """
    if token_ids.numel() > LOGIT_SLICE:
        slices = zip(
            torch.split(logits.flatten(0, -2), LOGIT_SLICE),
            torch.split(token_ids.flatten(), LOGIT_SLICE),
            strict=True,
        )
        flat, shape = joined([measure(part, ids, num_top) for part, ids in slices]), token_ids.shape
        return Logprobs(
            flat.chosen.view(shape), flat.top_ids.view(*shape, -1), flat.top_values.view(*shape, -1)
        )
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    logprobs = wide.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[..., None]).squeeze(-1)
    values, ids = _likeliest(logprobs, min(num_top, logprobs.shape[-1]))
    return Logprobs(chosen=chosen, top_ids=ids, top_values=values)


def _likeliest(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return values and ids [..., count], the likeliest first; ties go to the smaller id.

    How `topk` orders ties depends on the count and on the number of positions. So it gets distinct int64
    keys: the value's bits above, the complement of the id below.
    """
    if count == 0:
        return logprobs[..., :0], torch.empty_like(logprobs[..., :0], dtype=torch.int64)
    if logprobs.dtype == torch.float64:  # with its bits there is no room for an id
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        return values[..., :count], ids[..., :count]
    bits = (logprobs + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the values
    last = logprobs.shape[-1] - 1
    keys = (rising.to(torch.int64) << 32) + torch.arange(last, -1, -1, device=logprobs.device)
    ids = last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
    return logprobs.gather(-1, ids), ids
