"""Qwen3-Next and Qwen3-Coder-Next: gated delta rules with gated attention every fourth layer, and experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.models.config import DeltaConfig, ModelConfig
from blockdraft.models.gated_delta import Inputs, hybrid_layer
from blockdraft.models.layers import DecoderLayer, Linear, RMSNorm, ZeroCentredNorm

norm = ZeroCentredNorm


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    return hybrid_layer(config, index, InterleavedInputs)


class InterleavedInputs(nn.Module):
    """Two projections; each has the rows of a key head next to those of its value heads."""

    def __init__(self, hidden: int, config: DeltaConfig) -> None:
        super().__init__()
        shared = config.num_value_heads // config.num_key_heads  # value heads of one key head
        self.num_key_heads = config.num_key_heads
        self.sizes = (config.key_dim, config.key_dim, shared * config.value_dim, shared * config.value_dim)
        self.shared = shared
        self.qkvz = Linear(hidden, config.num_key_heads * sum(self.sizes))
        self.ba = Linear(hidden, 2 * config.num_value_heads)

    def forward(self, x: Tensor, norm: RMSNorm) -> Inputs:
        x = norm(x)
        q, k, v, z = self.qkvz(x).unflatten(1, (self.num_key_heads, -1)).split(self.sizes, dim=2)
        beta, gate = self.ba(x).unflatten(1, (self.num_key_heads, -1)).split(self.shared, dim=2)
        qkv = [part.flatten(1) for part in (q, k, v)]
        return torch.cat(qkv, dim=1), z.flatten(1), beta.flatten(1), gate.flatten(1)
