"""One decoding step: draft, verify, commit. Read this first; everything else exists to keep it this short.

It rests on three facts. A row's `length` is its commit: cache slots at or past it are scratch, so nothing is
ever rolled back. Noise is keyed by (seed, position), so every emitted token is the target's own sample,
whatever was drafted. Plain decoding is this function at width 1. If `num_tokens` are fewer than `width` for
each row, each row has its own width (Rows.activate): the target then runs a stream of tokens, row after row.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.kernels.sampling import Allowed
from blockdraft.models.decoder import Decoder
from blockdraft.step.drafter import Drafter
from blockdraft.step.verify import Verdict, verify


@torch.inference_mode()
def decode_parts(  # noqa: PLR0913
    *,
    target: Decoder,
    drafter: Drafter,
    cache: Cache,
    rows: Rows,
    width: int,
    num_tokens: int | None = None,
    allowed: Allowed | None = None,
    num_logprobs: int | None = None,
    rates: Tensor | None = None,
) -> Generator[Tensor, None, Verdict]:
    """Draft a block for every active row, verify it in one target forward, and commit the matching drafts."""
    view = cache.view(rows, width, num_tokens=num_tokens)  # positions length .. length + its width - 1
    block = drafter.draft(rows, cache, view, width)  # [R, B] the anchor, then width - 1 proposals
    yield block  # the host may overwrite drafts that a structured output forces
    hidden, features = target(view.stream(block), view)  # writes scratch slots and tapes
    yield block  # the host may forbid tokens that the structured output does not allow
    logits = target.logits(hidden)  # [N, V]
    verdict = verify(logits, block, rows, view, allowed, num_logprobs=num_logprobs, rates=rates)
    drafter.absorb(features, view)  # unmasked: rejected positions are scratch
    drafter.follow(hidden, view.stream(verdict.token_ids), verdict.num_committed, view, rows)
    cache.commit(rows, view.starts, verdict.num_committed)  # folds the tapes; keys and values stay
    rows.advance(block, verdict.token_ids, verdict.num_committed)
    return verdict


def run_all_parts(parts: Generator[Tensor, None, Verdict]) -> Verdict:
    """Run all parts in a row and return the verdict. A GPU captures this as one graph per StepSize."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict
