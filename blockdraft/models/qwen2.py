"""Qwen2 and Qwen2.5, dense: biases on q, k and v, none on the output."""

from __future__ import annotations

from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import Attention, DecoderLayer, GatedMLP


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    attention = Attention(config, index, bias=True, out_bias=False, has_qk_norm=False)
    return DecoderLayer(config, attention, GatedMLP(config.hidden_size, config.intermediate_size))
