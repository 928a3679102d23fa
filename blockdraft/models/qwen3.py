"""Qwen3, dense: queries and keys are normalised per head."""

from __future__ import annotations

from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import Attention, DecoderLayer, GatedMLP


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    bias = config.has_attention_bias
    attention = Attention(config, index, bias=bias, out_bias=bias, has_qk_norm=True)
    return DecoderLayer(config, attention, GatedMLP(config.hidden_size, config.intermediate_size))
