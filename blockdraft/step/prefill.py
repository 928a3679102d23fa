"""One prefill step: computes chunks of known tokens into the cache. It never samples.

A sequence is prefilled up to, but not including, its last known token: that one is the first anchor, so
every emitted token comes out of decode_parts, and a preempted sequence resumes exactly like a new one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.models.decoder import Decoder
from blockdraft.step.drafter import Drafter
from blockdraft.step.verify import LOGIT_SLICE, Logprobs, joined, measure


@torch.inference_mode()
def prefill_step(  # noqa: PLR0913
    *,
    target: Decoder,
    drafter: Drafter,
    cache: Cache,
    rows: Rows,
    token_ids: Tensor,
    next_ids: Tensor,
    counts: tuple[int, ...],
    offsets: Tensor | None = None,
) -> Tensor:
    """Run token_ids [N], `counts[r]` of them for each active row, and return hidden states [N, E].

    next_ids [N] are the tokens one position later. With `offsets` (as in Blocks), only the device knows how
    many tokens each row has.
    """
    view = cache.view(rows, counts, is_known=True, offsets=offsets)  # nothing to verify: written is committed
    hidden: Tensor
    hidden, features = target(token_ids, view)
    drafter.absorb(features, view)
    drafter.follow(hidden, next_ids, view.offsets.diff(), view, rows)
    rows.extend(counts if offsets is None else offsets.diff())
    return hidden


@torch.inference_mode()
def prompt_logprobs(target: Decoder, hidden: Tensor, next_ids: Tensor, num_top: int) -> Logprobs:
    """Return the log-probabilities of next_ids [N] after hidden [N, E], in slices of LOGIT_SLICE."""
    slices = zip(torch.split(hidden, LOGIT_SLICE), torch.split(next_ids, LOGIT_SLICE), strict=True)
    return joined([measure(target.logits(part), ids, num_top) for part, ids in slices])
