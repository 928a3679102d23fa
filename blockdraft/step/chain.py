"""ChainDrafter: Domino computes a block's columns at once, but chooses its drafts one after the other.

Each draft is read by a recurrent layer, whose state then takes part in the choice of the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.kernels.sampling import NEVER
from blockdraft.models.draft_heads import PrefixHead
from blockdraft.step.hints import HintDrafter


class ChainDrafter(HintDrafter):
    """Drafts with a model that has Domino's head."""

    @property
    def head(self) -> PrefixHead:
        assert self.model.prefix is not None
        return self.model.prefix

    @property
    def table(self) -> Tensor:
        return self.head.after.weight

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows, num_drafts: int) -> Tensor:
        columns, drafts = self.drafting(hidden, num_drafts), [anchor]
        logits, state, sampling = self.column_logits(columns), None, rows.sampling()
        candidates = self.candidates(logits)
        scores = torch.full_like(logits[:, :1], NEVER)
        for draft in range(num_drafts):
            state = self.head.read(self.embed(drafts[-1][:, 0]), state)
            found = candidates.at(draft)
            chosen = found.scores(self._latent(draft, columns[:, draft], state))
            scores.fill_(NEVER).scatter_(-1, found.ids[:, None], chosen[:, None])
            drafts.append(rows.kernels.choose(scores, starts + draft, drafts[-1], sampling))
        return torch.cat(drafts[1:], dim=1)

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor:
        columns, state, latents = self.drafting(hidden, before.shape[1]), None, []
        for draft in range(before.shape[1]):
            state = self.head.read(self.embed(before[:, draft]).to(hidden.dtype), state)
            latents.append(self._latent(draft, columns[:, draft], state))
        return torch.stack(latents, dim=1)

    def _latent(self, draft: int, column: Tensor, state: Tensor) -> Tensor:
        """Return the latent [R, rank] of a draft, 0 for the first drafts, which the head leaves alone."""
        assert self.model.config.domino is not None
        latent = self.head.latent(column, state)
        return torch.zeros_like(latent) if draft < self.model.config.domino.num_plain else latent
