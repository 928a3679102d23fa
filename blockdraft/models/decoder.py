"""Decoder: embed, layers, norm, with taps for a drafter. One definition for serving and for training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.linear import linear
from blockdraft.models.config import ModelConfig
from blockdraft.models.layers import DecoderLayer, Linear, RMSNorm, Rotary


class Decoder(nn.Module):
    """A target model. `taps` are the layers whose outputs a drafter reads."""

    def __init__(
        self,
        config: ModelConfig,
        layers: list[DecoderLayer],
        *,
        taps: tuple[int, ...],
        max_positions: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.taps = taps
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim, max_positions)
        self.head = None if config.ties_embeddings else Linear(config.hidden_size, config.vocab_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding[token_ids]

    def forward(self, token_ids: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """Hidden states [N, E] before the head, and features [N, taps * E], for token_ids [N]."""
        x = self.embed(token_ids)
        angles = self.rotary(view.positions)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, view)
            if index in self.taps:
                tapped[index] = x
        features = [tapped[index] for index in self.taps]
        return self.norm(x), torch.cat(features, dim=-1) if features else x[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] for hidden states [..., E]."""
        if self.head is None:
            return linear(hidden, self.embedding)
        return self.head(hidden)  # type: ignore[no-any-return]
