"""SparkDrafter: pairs as DSpark's Markov head has them, a draft at a time where its latents ask for that."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.models.spark import MarkovHead
from blockdraft.step.pairs import PairDrafter


class SparkDrafter(PairDrafter):
    """Drafts with a model that has a Markov head (models/spark.py)."""

    @property
    def markov(self) -> MarkovHead:
        assert self.model.markov is not None
        return self.model.markov

    @property
    def is_walked(self) -> bool:
        return self.markov.kind == "vanilla"

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.markov.before.weight, self.markov.after.weight

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows) -> Tensor:
        if self.is_walked:
            return super().propose(hidden, anchor, starts, rows)
        logits, path, state = self.column_logits(hidden), anchor, self.markov.begin(len(anchor))
        for draft in range(hidden.shape[1]):
            last = path[:, -1]
            latent, state = self.markov.step(hidden[:, draft], last, state)
            column = self.hinted(logits[:, draft], latent)[:, None]
            chosen = rows.kernels.choose(column, starts + draft, last[:, None], rows.sampling())
            path = torch.cat((path, chosen), dim=1)
        return path[:, 1:]

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.markov.latents(hidden, before)
