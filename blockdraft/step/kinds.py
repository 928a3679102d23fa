"""Which class drafts with a model of which kind."""

from __future__ import annotations

from blockdraft.models.draft_config import DraftConfig
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.dflash2 import DFlash2Drafter
from blockdraft.step.spark import SparkDrafter


def drafter_type(config: DraftConfig) -> type[DFlashDrafter]:
    """The class of the drafter that `config` describes."""
    if config.dflash2 is not None:
        return DFlash2Drafter
    return SparkDrafter if config.spark is not None and config.spark.rank else DFlashDrafter
