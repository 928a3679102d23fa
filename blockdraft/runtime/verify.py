"""Verify: sample the target at every column of the block, keep the samples up to the first wrong draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.kernels.sampling import Recent, choose


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities under the model itself, before bias, penalties and temperature, as in vLLM."""

    chosen: Tensor  # [..., ]
    top_ids: Tensor  # [..., K]
    top_values: Tensor  # [..., K]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step decided: row r emits token_ids[r, :num_committed[r]]."""

    token_ids: Tensor  # [R, B] the target's own samples
    num_committed: Tensor  # [R] accepted drafts + 1
    logprobs: Logprobs | None  # [R, B], when a row asked


def verify(logits: Tensor, block: Tensor, rows: Rows, num_logprobs: int | None) -> Verdict:
    """Sample logits [R, B, V] with each row's own rules; a draft counts while it equals the sample before it.

    Each emitted token is the target's sample under noise keyed by (seed, position), so a drafter can
    change how many tokens a step yields and never which tokens.
    """
    column = torch.arange(block.shape[1], device=block.device)
    positions = rows.length[rows.active][:, None] + column  # [R, B] of the block
    recent = Recent(token_ids=block, positions=positions, num_visible=column + 1)
    sampled = choose(logits, positions + 1, rows.sampling(), recent)  # [R, B]
    agrees = sampled[:, :-1] == block[:, 1:]  # [R, B - 1]
    num_committed = 1 + agrees.long().cumprod(dim=1).sum(dim=1)
    logprobs = None if num_logprobs is None else measure(logits, sampled, num_logprobs)
    return Verdict(sampled, num_committed, logprobs)


def measure(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of token_ids [...] and of the `num_top` likeliest under logits [..., V]."""
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    logprobs = wide.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[..., None]).squeeze(-1)
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return Logprobs(chosen=chosen, top_ids=ids, top_values=values)
