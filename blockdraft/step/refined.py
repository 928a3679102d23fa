"""RefinedDrafter: XPress chooses all drafts of a block at once, and several times over.

The first drafts are chosen by the logits alone. Each pass then gives the head the drafts of the pass before.
A draft depends only on the drafts before it, so after pass k the first k drafts are those that choosing one
after the other would give, under the request's noise, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash
from blockdraft.models.draft_heads import Refiner
from blockdraft.step.hints import HintDrafter


class RefinedDrafter(HintDrafter):
    """Drafts with a model that has XPress's refiner."""

    def __init__(
        self, model: DFlash, target: Decoder, vocab_map: Tensor | None = None, *, draft_ngram: int = 0
    ) -> None:
        super().__init__(model, target, vocab_map, draft_ngram=draft_ngram)
        assert model.config.xpress is not None
        self.num_passes = model.config.xpress.num_passes
        self.is_causal = False  # the refiner reads the whole block

    @property
    def refiner(self) -> Refiner:
        assert self.model.refiner is not None
        return self.model.refiner

    @property
    def table(self) -> Tensor:
        return self.refiner.after.weight

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows, num_drafts: int) -> Tensor:
        choose, sampling = rows.kernels.choose, rows.sampling()
        logits = self.column_logits(self.drafting(hidden, num_drafts))
        drafts = choose(logits, starts, anchor, sampling)
        seen, refined = self.refiner.look(hidden), self.with_hints(logits)
        for _ in range(min(self.num_passes, num_drafts)):
            before = torch.cat((anchor, drafts[:, :-1]), dim=1)
            drafts = choose(refined(self._latents(seen, before)), starts, before, sampling)
        return drafts

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self._latents(self.refiner.look(hidden), before)

    def _latents(self, seen: Tensor, before: Tensor) -> Tensor:
        """Return latents [R, D, rank]. As in vLLM, the anchor stands for the token before it."""
        first = self.model.config.first_column
        return self.refiner.latents(seen, torch.cat((before[:, :first], before), dim=1))[:, first:]
