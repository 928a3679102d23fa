"""Llama and models built like it: SmolLM2, TinyLlama, Llama 3.x; Qwen2 and Qwen2.5, which add biases."""

from __future__ import annotations

from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import Attention, DecoderLayer, RMSNorm
from blockdraft.models.moe import feed_forward

norm = RMSNorm


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    return DecoderLayer(config, Attention(config, index), feed_forward(config, index))
