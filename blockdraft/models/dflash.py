"""DFlash: a few Qwen3-style layers that fill in a whole block at once, reading the target's own features.

For every committed token the target's tapped hidden states are fused into one context vector,
`hidden_norm(fc(features))`. It never enters the residual stream: each layer only adds its key and value,
so depth keeps direct access to what the target knows. The block's own stream starts from the target's
embeddings of [anchor, mask, mask, …], and the output at column k is a guess of the token at column k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.rows import Angles, rotate
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.layers import GatedMLP, Linear, RMSNorm
from blockdraft.models.rotary import Rotary


class DFlashLayer(nn.Module):
    """One drafter layer; `layer` is its place in the shared cache."""

    def __init__(self, config: DraftConfig, index: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.mask = Mask(
            scale=config.head_dim**-0.5,
            is_causal=config.is_causal[index],
            window=config.windows[index],
            is_anchored=config.has_anchored_window,
        )
        hidden, size = config.hidden_size, config.num_kv_heads * config.head_dim
        self.attention_norm = RMSNorm(hidden, config.norm_eps)
        self.q = Linear(hidden, config.num_heads * config.head_dim)
        self.kv = Linear(hidden, size, size)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.out = Linear(config.num_heads * config.head_dim, hidden)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size)

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values [N, G, D] of block rows or of context vectors: the same projection."""
        k, v = (part.unflatten(1, (-1, self.head_dim)) for part in self.kv(x).chunk(2, dim=1))
        return rotate(self.k_norm(k), angles), v

    def forward(self, x: Tensor, angles: Angles, view: View) -> Tensor:
        h = self.attention_norm(x)
        q = rotate(self.q_norm(self.q(h).unflatten(1, (-1, self.head_dim))), angles)
        k, v = self.keys_values(h, angles)
        x = x + self.out(view.attend(self.layer, q, k, v, self.mask).flatten(1))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class DFlash(nn.Module):
    """The drafter's body; `first_layer` is where its layers begin in the shared cache."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        first_layer: int,
        max_positions: int,
        has_head: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = Linear(len(config.taps) * config.target_hidden_size, hidden)
        self.hidden_norm = RMSNorm(hidden, config.norm_eps)
        self.layers = nn.ModuleList(
            DFlashLayer(config, index, first_layer + index) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim, max_positions, device)
        self.head = Linear(hidden, config.draft_vocab_size) if has_head else None

    def absorb(self, features: Tensor, view: View) -> None:
        """Leave the context's keys and values of these positions in the cache: features [N, taps * E]."""
        context = self.hidden_norm(self.fc(features))
        angles = self.rotary(view.positions)
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            view.write(layer.layer, *layer.keys_values(context, angles))

    def forward(self, x: Tensor, view: View) -> Tensor:
        """Hidden states [N, E] of a block whose embeddings are x [N, E]."""
        angles = self.rotary(view.positions)
        for layer in self.layers:
            x = layer(x, angles, view)
        return self.norm(x)  # type: ignore[no-any-return]
