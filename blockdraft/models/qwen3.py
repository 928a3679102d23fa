"""Qwen3, dense and mixtures of experts: queries and keys are normalised per head."""

from __future__ import annotations

from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import Attention, DecoderLayer, RMSNorm
from blockdraft.models.moe import feed_forward

norm = RMSNorm


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    return DecoderLayer(config, Attention(config, index, has_qk_norm=True), feed_forward(config, index))
