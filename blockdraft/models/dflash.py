"""DFlash: a few Qwen3-style layers that draft a whole block at once and read the target's features.

For every committed token, the target's tapped hidden states are fused into one context vector,
`hidden_norm(fc(features))`. It does not enter the residual stream: every layer computes its own keys and
values from it. The block's stream starts from the target's embeddings of [anchor, mask, mask, …], and the
output at column k predicts the token at column k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.heads import HeadNorms
from blockdraft.kernels.pointwise import Angles
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import GatedMLP, Linear, RMSNorm
from blockdraft.models.rotary import Rotary


class DFlashLayer(nn.Module):
    """One drafter layer; `layer` is its index in the cache, which it shares with the target."""

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
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.qkv = Linear(hidden, config.num_heads * config.head_dim, size, size)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.out = Linear(config.num_heads * config.head_dim, hidden)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size)

    def keys_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, G, D] of context vectors [N, E], by the block's own projection."""
        k, v = self.qkv.last(context, 2).view(len(context), -1, self.head_dim).chunk(2, dim=1)
        return k, v

    def norms(self) -> HeadNorms:
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def attend(self, projected: Tensor, angles: Angles, view: View) -> Tensor:
        """Return [N, H * D] for queries, keys and values side by side [N, (H + G + G) * D]."""
        q, k, v = torch.split(projected.view(len(projected), -1, self.head_dim), list(self.heads), dim=1)
        attended = view.attend(self.layer, q, k, v, self.mask, angles=angles, norms=self.norms())
        return attended.flatten(1)

    def forward(self, x: Tensor, angles: Angles, view: View, num_columns: int) -> Tensor:
        """Run the layer on the stream [N, E] of blocks of `num_columns`."""
        x = self.out(self.attend(self.qkv(x, norm=self.attention_norm), angles, view), x)
        return self.mlp(x, self.mlp_norm)  # type: ignore[no-any-return]


class Table(nn.Module):
    """A row of values for each token."""

    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, size))


class MarkovHead(nn.Module):
    """DSpark's: the token before a draft adds `after @ before[token]` to its logits.

    `after` has a row for each row of the drafter's head. Both tables stay as they are stored.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.before = Table(config.vocab_size, config.markov_rank)
        self.after = Table(config.draft_vocab_size, config.markov_rank)


class DFlash(KernelModule):
    """The drafter's body; `first_layer` is the index of its first layer in the shared cache."""

    layer_type: type[DFlashLayer] = DFlashLayer

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
            self.layer_type(config, index, first_layer + index) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim, max_positions, device)
        self.head = Linear(hidden, config.draft_vocab_size) if has_head else None
        self.markov = MarkovHead(config) if config.markov_rank else None

    def absorb(self, features: Tensor, view: View) -> None:
        """Write the context's keys and values of these positions to the cache: features [N, taps * E]."""
        self.check_no_gradient(features)
        context = self.hidden_norm(self.fc(features))
        angles = self.rotary(view.positions)
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            view.write(layer.layer, *layer.keys_values(context), angles=angles, norms=layer.norms())

    def forward(self, x: Tensor, view: View, num_columns: int) -> Tensor:
        """Return hidden states [N, E] of blocks of `num_columns` with embeddings x [N, E]."""
        self.check_no_gradient(x)
        angles = self.rotary(view.positions)
        for layer in self.layers:
            x = layer(x, angles, view, num_columns)
        return self.norm(x)  # type: ignore[no-any-return]
