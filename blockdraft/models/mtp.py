"""The multi-token prediction (MTP) head of Qwen3-Next and Qwen3.5: one more layer of the target that drafts.

The head attends over pairs. Pair p joins the target's final hidden state at position p with the embedding of
the token at position p + 1, and predicts the token at position p + 2. For the next draft, the head's output
takes the place of the target's hidden state. Embedding, rope and logits are the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.heads import HeadNorms
from blockdraft.kernels.pointwise import Angles
from blockdraft.models.gated_delta import GatedAttention, hybrid_layer
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import DecoderLayer, Linear, ZeroCentredNorm
from blockdraft.models.mtp_config import MtpConfig


class MtpHead(KernelModule):
    """The head; its modules have the names that checkpoints give them."""

    head: None = None  # its logits are the target's

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.shape.norm_eps
        self.pre_fc_norm_embedding = ZeroCentredNorm(size, eps)
        self.pre_fc_norm_hidden = ZeroCentredNorm(size, eps)
        self.fc = Linear(2 * size, size)
        self.layers = nn.ModuleList([hybrid_layer(config.shape, config.layer_index)])
        self.norm = ZeroCentredNorm(size, eps)

    @property
    def layer(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def absorb(self, embedded: Tensor, hidden: Tensor, angles: Angles, view: View) -> None:
        """Write the keys and values of pairs of `hidden` and `embedded` [N, E] to the cache."""
        self.check_no_gradient(hidden)
        attention = self.layer.mixer
        assert isinstance(attention, GatedAttention)
        normed = self.layer.mixer_norm(self._joined(embedded, hidden))
        heads = attention.qkv.last(normed, 2).view(len(normed), -1, attention.head_dim)
        k, v = heads.chunk(2, dim=1)
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
        view.write(attention.layer, k, v, angles=angles, norms=norms)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Angles, view: View) -> Tensor:
        """Return the hidden states [N, E] after pairs of `hidden` and `embedded` [N, E]."""
        self.check_no_gradient(hidden)
        x = self._joined(embedded, hidden)
        _, normed = self.layer(x, self.layer.mixer_norm(x), angles, view, next_norm=self.norm)
        return normed  # type: ignore[no-any-return]

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        return self.fc(torch.cat(both, dim=1))  # type: ignore[no-any-return]
