"""Llama, and what is built like it: SmolLM2, TinyLlama, Llama 3.x."""

from __future__ import annotations

from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import Attention, DecoderLayer, GatedMLP


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    bias = config.has_attention_bias
    attention = Attention(config, index, bias=bias, out_bias=bias, has_qk_norm=False)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.has_mlp_bias)
    return DecoderLayer(config, attention, mlp)
