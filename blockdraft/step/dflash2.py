"""DFlash2Drafter: pairs are weighed by each column's own mixture."""

from __future__ import annotations

from torch import Tensor

from blockdraft.models.dflash2 import DFlash2
from blockdraft.step.pairs import PairDrafter


class DFlash2Drafter(PairDrafter):
    """Drafts with a DFlash2 model, whose selector knows the pairs (models/dflash2.py)."""

    model: DFlash2

    def tables(self) -> tuple[Tensor, Tensor]:
        selector = self.model.candidate_selector
        return selector.predecessor_codebook, selector.successor_codebook

    @property
    def skips_first(self) -> bool:
        return self.model.candidate_selector.skips_first

    def mixture(self, hidden: Tensor) -> Tensor:
        return self.model.candidate_selector.mixture(hidden)
