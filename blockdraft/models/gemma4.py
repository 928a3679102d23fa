"""Gemma 4 (text part), dense and mixtures: sliding and global layers, with heads of different sizes.

Global layers have wider heads, of which the rope rotates a quarter, and may use their keys as values. Scores
are not scaled: queries, keys and values are normalised instead. Each sublayer's output has a norm, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.moe import Activation, ExpertChoice
from blockdraft.kernels.pointwise import Angles
from blockdraft.models.config import AttentionConfig, ModelConfig, MoEConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import GatedMLP, Linear, RMSNorm, WideNorm, attention_config
from blockdraft.models.moe import Experts


class GemmaAttention(KernelModule):
    """Attention over keys and values of the layer itself or of another layer."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        config = attention_config(model, layer)
        self.layer = layer
        self.eps = model.norm_eps
        self.head_dim = config.head_dim
        self.mask = Mask(scale=1.0, window=config.window)
        self.sizes = _head_counts(config)
        self.qkv = Linear(model.hidden_size, *(count * config.head_dim for count in self.sizes))
        self.out = Linear(config.num_heads * config.head_dim, model.hidden_size)
        self.q_norm = WideNorm(config.head_dim, model.norm_eps)
        self.k_norm = WideNorm(config.head_dim, model.norm_eps) if config.shared_with is None else None

    def forward(self, x: Tensor, angles: Angles, view: View) -> Tensor:
        q, *keys_values = self.qkv(x).unflatten(1, (-1, self.head_dim)).split(self.sizes, dim=1)
        q = self.kernels.rotate(self.q_norm(q), angles)
        k: Tensor | None = None
        v: Tensor | None = None
        if self.k_norm is not None:
            k = self.kernels.rotate(self.k_norm(keys_values[0]), angles)
            v = self.kernels.rms_norm(keys_values[-1], None, self.eps)
        return self.out(view.attend(self.layer, q, k, v, self.mask, angles=None).flatten(1))  # type: ignore[no-any-return]


def _head_counts(config: AttentionConfig) -> tuple[int, ...]:
    """Return the numbers of heads that the layer projects: queries, then its own keys and values."""
    if config.shared_with is not None:
        return (config.num_heads,)
    return (config.num_heads, *(config.num_kv_heads,) * (2 if config.has_values else 1))


class GemmaRouter(KernelModule):
    """A router that reads the normalised stream; each expert's weight has a learned scale."""

    def __init__(self, hidden: int, config: MoEConfig, eps: float) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.eps = eps
        self.scale = nn.Parameter(torch.empty(hidden))
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden))
        self.expert_scale = nn.Parameter(torch.empty(config.num_experts))

    def forward(self, x: Tensor) -> ExpertChoice:
        return self.kernels.route(self.scores(x), self.num_chosen, "renormalised", self.expert_scale)

    def scores(self, x: Tensor) -> Tensor:
        """Return the logits [N, X] that choose the experts."""
        normed = self.kernels.rms_norm(x, None, self.eps) * self.scale * x.shape[-1] ** -0.5
        return self.kernels.linear(normed, self.weight, None, None)


class GemmaFeedForward(nn.Module):
    """A dense part, plus routed experts in mixtures; both have their own norms."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        part, size, eps = config.layers[index], config.hidden_size, config.norm_eps
        assert part.mlp is not None
        self.before = WideNorm(size, eps)
        self.dense = GatedMLP(size, part.mlp.inner_size, gate="gelu")
        self.after = WideNorm(size, eps)
        self.has_experts = part.moe is not None
        if part.moe is not None:
            self.dense_after = WideNorm(size, eps)
            self.router = GemmaRouter(size, part.moe, eps)
            self.experts_before = WideNorm(size, eps)
            self.experts = Experts(size, part.moe, activation=Activation("gelu"))
            self.experts_after = WideNorm(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dense(self.before(x))
        if self.has_experts:
            routed, _ = self.experts(self.experts_before(x), self.router(x))
            y = self.dense_after(y) + self.experts_after(routed)
        return self.after(y)  # type: ignore[no-any-return]


class GemmaLayer(nn.Module):
    """A layer with norms before and after each sublayer; a learned number scales the stream at the end."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.mixer_norm = WideNorm(config.hidden_size, config.norm_eps)
        self.mixer = GemmaAttention(config, index)
        self.mixer_after = WideNorm(config.hidden_size, config.norm_eps)
        self.mlp = GemmaFeedForward(config, index)
        self.scale = nn.Parameter(torch.empty(1))

    def forward(
        self, x: Tensor, normed: Tensor, angles: Angles, view: View, *, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Return the output y [N, E], and next_norm(y); `normed` is mixer_norm(x)."""
        x = x + self.mixer_after(self.mixer(normed, angles, view))
        y = (x + self.mlp(x)) * self.scale
        return y, next_norm(y)
