"""Layers of Qwen3-Next and Qwen3.5: gated attention, and the gated delta rule after a short convolution.

A delta layer's state is a matrix per head. Each token decays the state, corrects its value for the token's
key, and reads it with the token's query (kernels/gated_delta.py). The View holds the state; this module has
the projections around it. For text, the rope's three position axes are equal, so the usual rope is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.gated_delta import DeltaWeights
from blockdraft.kernels.heads import HeadNorms
from blockdraft.kernels.pointwise import Angles
from blockdraft.models.config import DeltaConfig, ModelConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import (
    DecoderLayer,
    Linear,
    RMSNorm,
    ZeroCentredNorm,
    attention_config,
    wide_dtype,
)
from blockdraft.models.moe import feed_forward

# qkv [N, C], z [N, H * V], the logits of beta and of the gate [N, H]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class GatedDelta(KernelModule):
    """A delta layer; Qwen3-Next and Qwen3.5 lay out its input projections differently."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        config = model.layers[layer].mixer
        assert isinstance(config, DeltaConfig)
        self.layer = layer
        inputs = InterleavedInputs if model.family == "qwen3_next" else SeparateInputs
        self.inputs = inputs(model.hidden_size, config)
        self.conv = nn.Parameter(torch.empty(config.spec().conv_channels, 1, config.conv_width))
        self.decay_log = nn.Parameter(torch.empty(config.num_value_heads, dtype=wide_dtype()))
        self.gate_bias = nn.Parameter(torch.empty(config.num_value_heads, dtype=wide_dtype()))
        self.norm = RMSNorm(config.value_dim, model.norm_eps)
        self.out = Linear(config.num_value_heads * config.value_dim, model.hidden_size)

    def forward(self, x: Tensor, normed: Tensor, angles: Angles | None, view: View) -> Tensor:
        qkv, z, beta, gate = self.inputs(normed)
        weights = DeltaWeights(self.conv[:, 0], self.decay_log, self.gate_bias)
        read = view.scan(self.layer, qkv, beta, gate, weights)  # [N, H, V]
        gated = self.kernels.gated_norm(read, z, self.norm.weight, self.norm.eps)
        return self.out(gated.flatten(1), x)  # type: ignore[no-any-return]


class SeparateInputs(nn.Module):
    """Qwen3.5's projections: q, k and v; the output gate; the logits of beta; the logits of the decay."""

    def __init__(self, hidden: int, config: DeltaConfig) -> None:
        super().__init__()
        num_heads, value_size = config.num_value_heads, config.num_value_heads * config.value_dim
        qkv_size = 2 * config.num_key_heads * config.key_dim + value_size
        self.sizes = (qkv_size, value_size, num_heads, num_heads)
        self.all = Linear(hidden, *self.sizes)

    def forward(self, x: Tensor) -> Inputs:
        return self.all(x).split(self.sizes, dim=1)  # type: ignore[no-any-return]


class InterleavedInputs(nn.Module):
    """Qwen3-Next's two projections; each has a key head's rows next to those of its value heads."""

    def __init__(self, hidden: int, config: DeltaConfig) -> None:
        super().__init__()
        shared = config.num_value_heads // config.num_key_heads  # value heads of one key head
        self.num_key_heads = config.num_key_heads
        self.sizes = (config.key_dim, config.key_dim, shared * config.value_dim, shared * config.value_dim)
        self.shared = shared
        self.qkvz = Linear(hidden, config.num_key_heads * sum(self.sizes))
        self.ba = Linear(hidden, 2 * config.num_value_heads)

    def forward(self, x: Tensor) -> Inputs:
        q, k, v, z = self.qkvz(x).unflatten(1, (self.num_key_heads, -1)).split(self.sizes, dim=2)
        beta, gate = self.ba(x).unflatten(1, (self.num_key_heads, -1)).split(self.shared, dim=2)
        qkv = [part.flatten(1) for part in (q, k, v)]
        return torch.cat(qkv, dim=1), z.flatten(1), beta.flatten(1), gate.flatten(1)


class GatedAttention(KernelModule):
    """Attention whose output values have gates, which are projected together with the queries."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        config = attention_config(model, layer)
        self.layer = layer
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.heads = (2 * config.num_heads, config.num_kv_heads, config.num_kv_heads)
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.mask = Mask(scale=config.head_dim**-0.5, window=config.window)
        self.qkv = Linear(model.hidden_size, 2 * size, kv_size, kv_size, bias=config.has_bias)
        self.out = Linear(size, model.hidden_size, bias=config.has_out_bias)
        self.q_norm = ZeroCentredNorm(config.head_dim, model.norm_eps)
        self.k_norm = ZeroCentredNorm(config.head_dim, model.norm_eps)

    def forward(self, x: Tensor, normed: Tensor, angles: Angles, view: View) -> Tensor:
        heads = self.qkv(normed).unflatten(1, (-1, self.head_dim))  # [N, 2 H + G + G, D]
        queries, k, v = heads.split(self.heads, dim=1)
        q, gate = queries[:, 0::2], queries[:, 1::2]  # each head's query, then its gate
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        attended = view.attend(self.layer, q, k, v, self.mask, angles=angles, norms=norms)
        return self.out(self.kernels.gate_heads(attended, gate).flatten(1), x)  # type: ignore[no-any-return]


def hybrid_layer(config: ModelConfig, index: int) -> DecoderLayer:
    """Build a layer of gated delta rule or gated attention, with its feed-forward part."""
    is_delta = isinstance(config.layers[index].mixer, DeltaConfig)
    mixer = GatedDelta(config, index) if is_delta else GatedAttention(config, index)
    return DecoderLayer(config, mixer, feed_forward(config, index), norm=ZeroCentredNorm)
