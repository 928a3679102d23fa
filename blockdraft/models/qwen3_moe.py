"""Qwen3 mixtures of experts (Qwen3-30B-A3B, Qwen3-Coder-30B-A3B): Qwen3's attention, routed experts."""

from __future__ import annotations

from torch import nn

from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import Attention, DecoderLayer, GatedMLP, RMSNorm
from blockdraft.models.moe import MoE

norm = RMSNorm


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    return DecoderLayer(config, Attention(config, index, has_qk_norm=True), feed_forward(config, index))


def feed_forward(config: ModelConfig, index: int) -> nn.Module:
    """A mixture, or in some layers a dense part in its place."""
    part = config.layers[index]
    if part.moe is not None:
        return MoE(config.hidden_size, part.moe)
    assert part.mlp is not None
    return GatedMLP(config.hidden_size, part.mlp.inner_size)
