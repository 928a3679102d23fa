"""MtpConfig: the shape of a checkpoint's own multi-token prediction (MTP) head; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blockdraft.cache.spec import LayerSpec
from blockdraft.models.config import ModelConfig
from blockdraft.models.draft_config import DraftConfig


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The shape of an MTP head, which drafts for the target in whose checkpoint it is."""

    name: str
    block: int  # the most tokens of a step, anchor included: each draft is one more run of the head
    shape: ModelConfig  # the target's, with the head's layer after the target's own

    @property
    def kind(self) -> Literal["mtp"]:
        return "mtp"

    @property
    def hidden_size(self) -> int:
        return self.shape.hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """The head reads no layers, but the target's final hidden state."""
        return ()

    @property
    def layer_index(self) -> int:
        """The index of the head's layer, in `shape` and in the cache."""
        return self.shape.num_layers - 1

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return (self.shape.layers[self.layer_index].mixer.spec(),)


AnyDraftConfig = DraftConfig | MtpConfig
