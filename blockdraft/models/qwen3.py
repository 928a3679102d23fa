"""Qwen3, dense: queries and keys are normalised per head."""

from __future__ import annotations

from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import Attention, DecoderLayer, GatedMLP, RMSNorm

norm = RMSNorm


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    mlp = config.layers[index].mlp
    assert mlp is not None
    attention = Attention(config, index, has_qk_norm=True)
    return DecoderLayer(config, attention, GatedMLP(config.hidden_size, mlp.inner_size))
