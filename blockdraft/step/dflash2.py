"""DFlash2Drafter: DFlash's block, from whose candidates the drafts are walked pair by pair."""

from __future__ import annotations

from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.kernels.candidates import best_behind
from blockdraft.models.dflash2 import DFlash2
from blockdraft.models.draft_config import DraftConfig
from blockdraft.step.dflash import DFlashDrafter


class DFlash2Drafter(DFlashDrafter):
    """Drafts with a DFlash2 model, by the noise that the target will draw with."""

    model: DFlash2

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows) -> Tensor:
        pairs = self.model.candidate_selector.pairs(hidden)
        return rows.kernels.walk(self.column_logits(hidden), pairs, starts, anchor, rows.sampling())

    def likeliest(self, hidden: Tensor, before: Tensor) -> Tensor:
        pairs = self.model.candidate_selector.pairs(hidden[:, None])
        return best_behind(self.logits(hidden), pairs, before)


def drafter_type(config: DraftConfig) -> type[DFlashDrafter]:
    """The class of the drafter that `config` describes."""
    return DFlashDrafter if config.dflash2 is None else DFlash2Drafter
