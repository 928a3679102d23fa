"""Llama, and what is built like it: SmolLM2, TinyLlama, Llama 3.x; Qwen2 and Qwen2.5, which add biases."""

from __future__ import annotations

from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import Attention, DecoderLayer, GatedMLP, RMSNorm

norm = RMSNorm


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    mlp = config.layers[index].mlp
    assert mlp is not None
    gated = GatedMLP(config.hidden_size, mlp.inner_size, bias=mlp.has_bias)
    return DecoderLayer(config, Attention(config, index), gated)
