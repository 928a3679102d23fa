"""Qwen3.5 and 3.6, dense and mixtures: like Qwen3-Next, with a separate projection for each input.

Only the text part: images would be embeddings with two-dimensional positions. For text the three position
axes are equal, and the rope is the usual one.
"""

from __future__ import annotations

from torch import Tensor, nn

from blockdraft.models.config import DeltaConfig, ModelConfig
from blockdraft.models.gated_delta import Inputs, hybrid_layer
from blockdraft.models.layers import DecoderLayer, Linear, RMSNorm, ZeroCentredNorm

norm = ZeroCentredNorm


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    return hybrid_layer(config, index, SeparateInputs)


class SeparateInputs(nn.Module):
    """Projects queries, keys and values, the output gate, and the logits of beta and of the decay."""

    def __init__(self, hidden: int, config: DeltaConfig) -> None:
        super().__init__()
        value_size = config.num_value_heads * config.value_dim
        self.sizes = (
            2 * config.num_key_heads * config.key_dim + value_size,
            value_size,
            config.num_value_heads,
            config.num_value_heads,
        )
        self.all = Linear(hidden, *self.sizes)

    def forward(self, x: Tensor, norm: RMSNorm) -> Inputs:
        return self.all(x, norm=norm).split(self.sizes, dim=1)  # type: ignore[no-any-return]
