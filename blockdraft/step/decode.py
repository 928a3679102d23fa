"""One decoding step: draft, verify, commit. Read this first; everything else exists to keep it this short.

Three facts carry it. Length is the commit: cache slots at or past `length` are scratch, so nothing is ever
rolled back. Noise is keyed by (seed, position): every emitted token is the target's own sample, whatever
was drafted. And plain decoding is this same function at width 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView
from blockdraft.kernels.sampling import Allowed
from blockdraft.models.decoder import Decoder
from blockdraft.step.drafter import Drafter
from blockdraft.step.verify import Verdict, verify


@dataclass(slots=True)
class DecodeStep:
    """One step in its three parts: where an answer has a form, the host has a say between them.

    Fixed shapes: on a GPU the parts are three graphs, or all of them one.
    """

    target: Decoder
    drafter: Drafter
    cache: Cache
    rows: Rows
    width: int
    view: CacheView = field(init=False)  # positions length .. length + width - 1
    block: Tensor = field(init=False)  # [R, B] the anchor, then width - 1 proposals
    hidden: Tensor = field(init=False)
    features: Tensor = field(init=False)

    @torch.inference_mode()
    def draft(self) -> None:
        """Propose a block for every active row."""
        self.view = self.cache.view(self.rows, self.width)
        self.block = self.drafter.draft(self.rows, self.cache, self.view, self.width)

    @torch.inference_mode()
    def forward(self) -> None:
        """The target reads the blocks; writes scratch slots and tapes."""
        self.hidden, self.features = self.target(self.block.flatten(), self.view)

    @torch.inference_mode()
    def settle(
        self,
        *,
        num_logprobs: int | None = None,
        rates: Tensor | None = None,
        allowed: Allowed | None = None,
    ) -> Verdict:
        """Verify the blocks and commit what matched. `allowed`: what each column may choose from."""
        block, rows, starts = self.block, self.rows, self.view.starts
        logits = self.target.logits(self.hidden).view(*block.shape, -1)
        verdict = verify(logits, block, rows, starts, num_logprobs=num_logprobs, rates=rates, allowed=allowed)
        self.drafter.absorb(self.features, self.view)  # unmasked: rejected positions are scratch
        self.cache.commit(rows, starts, verdict.num_committed)  # folds the tapes; keys and values stay
        rows.advance(block, verdict.token_ids, verdict.num_committed)
        return verdict


def decode_step(
    *,
    target: Decoder,
    drafter: Drafter,
    cache: Cache,
    rows: Rows,
    width: int,
    num_logprobs: int | None = None,
    rates: Tensor | None = None,
) -> Verdict:
    """Draft a block for every active row, verify it in one target forward, commit what matched.

    No word to the host: on a GPU this whole function is one graph per (rows, width).
    """
    step = DecodeStep(target, drafter, cache, rows, width)
    step.draft()
    step.forward()
    return step.settle(num_logprobs=num_logprobs, rates=rates)
