"""LiLiCorr's head: scores pairs of candidates of neighbouring columns, after candidates have seen each other.

The lattice has K candidates for each drafting column of a block. A candidate's state is made from its
embedding, the column's hidden state, five numbers about its likelihood, and learned vectors for the column
and the rank. A few layers let all candidates of the block attend to each other. Then each candidate gives two
unit vectors: its product with the next column's vectors scores what may follow it. The anchor's vector, which
comes from the context, scores the candidates of the first column.

Names are those of published files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize, silu

from blockdraft.models.draft_config import DraftConfig, LiLiCorrHead
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import PlainLinear, RMSNorm

NUM_FEATURES = 5


class SiluMLP(nn.Module):
    """Computes down(silu(up(x)))."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj = PlainLinear(inputs, inner, bias=True)
        self.down_proj = PlainLinear(inner, outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.up_proj(x)))  # type: ignore[no-any-return]


class LatticeAttention(KernelModule):
    """Attention of all candidates of a block to each other."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = PlainLinear(size, size, bias=True)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return [R * T, size] for x [R * T, size]; bias [heads, T, T] is added to the scores."""
        projected = self.kernels.linear(x, self.in_proj_weight, self.in_proj_bias, None)
        heads = projected.view(-1, bias.shape[1], 3, self.num_heads, x.shape[1] // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()  # [R, heads, T, D]
        scores = q @ k.mT * q.shape[-1] ** -0.5 + bias.to(q.dtype)
        return self.out_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class LatticeLayer(nn.Module):
    """A transformer layer over the lattice."""

    def __init__(self, head: LiLiCorrHead, size: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(size, eps)
        self.attn = LatticeAttention(size, head.num_heads)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = SiluMLP(size, int(size * head.mlp_ratio), size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Lattice(KernelModule):
    """The head."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        head, hidden, block = config.lilicorr, config.hidden_size, config.block
        assert head is not None
        size, self.head, self.block = head.size, head, block
        self.token_proj = PlainLinear(hidden, size, bias=True) if size != hidden else None
        self.pass_hidden_proj = PlainLinear(hidden, size, bias=True)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES)
        self.feature_mlp = SiluMLP(NUM_FEATURES, size, size)
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, block - 1, 1, size))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, head.top_k, size))
        self.relative_slot_bias = nn.Parameter(torch.empty(head.num_heads, 2 * block - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(head.num_heads))
        self.context_proj = PlainLinear(hidden, size, bias=True)
        self.layers = nn.ModuleList(LatticeLayer(head, size, config.norm_eps) for _ in range(head.num_layers))
        self.output_norm = RMSNorm(size, config.norm_eps)
        self.anchor_norm = RMSNorm(size, config.norm_eps)
        self.factor_input_proj = PlainLinear(3 * size, size, bias=True)
        self.out_head = PlainLinear(size, head.factor_size, bias=True)
        self.in_head = PlainLinear(size, head.factor_size, bias=True)
        self.anchor_out_head = PlainLinear(size, head.factor_size, bias=True)

    def scores(self, embedded: Tensor, likelihood: Tensor, hidden: Tensor, context: Tensor) -> Tensor:
        """Return scores [R, C, K before, K] of candidates that follow those of the column before.

        The candidates have embeddings [R, C, K, E] and log-probabilities [R, C, K], the likeliest first;
        columns have hidden states [R, C, E], the anchor has the context [R, E] before it. Before the first
        column there is only the anchor, so all rows of its scores are equal.
        """
        num_rows, num_columns, top_k = likelihood.shape
        x = self._states(embedded, likelihood, hidden).flatten(0, 2)
        bias = self._bias(num_columns * top_k)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).view(num_rows, -1, x.shape[1])
        anchor = self.anchor_norm(self.context_proj(context) * context.any(dim=1, keepdim=True))
        joined = torch.cat((x, anchor[:, None].expand_as(x), x * anchor[:, None]), dim=-1).flatten(0, 1)
        factors = silu(self.factor_input_proj(joined))
        after, before = (
            normalize(part(factors), dim=-1, eps=self.head.eps).view(num_rows, num_columns, top_k, -1)
            for part in (self.out_head, self.in_head)
        )
        first = normalize(self.anchor_out_head(anchor), dim=-1, eps=self.head.eps)
        first = first[:, None, None].expand(-1, 1, top_k, -1)
        return self.head.scale * (torch.cat((first, after[:, :-1]), dim=1) @ before.mT)

    def _states(self, embedded: Tensor, likelihood: Tensor, hidden: Tensor) -> Tensor:
        """Return the candidates' states [R, C, K, size] before the layers."""
        shape = *likelihood.shape, self.slot_embedding.shape[-1]
        tokens = embedded.flatten(0, 2)
        tokens = tokens if self.token_proj is None else self.token_proj(tokens)
        columns = self.pass_hidden_proj(hidden.flatten(0, 1)).view(*shape[:2], 1, -1)
        rank = torch.arange(shape[2], device=likelihood.device).to(likelihood.dtype)
        features = (
            likelihood,
            likelihood.exp(),
            likelihood - likelihood.amax(dim=-1, keepdim=True),
            (rank / max(shape[2] - 1, 1)).expand_as(likelihood),
            (rank == 0).to(likelihood.dtype).expand_as(likelihood),
        )
        norm = self.feature_norm
        scale, shift = norm.weight.to(tokens.dtype), norm.bias.to(tokens.dtype)
        normed = layer_norm(
            torch.stack(features, dim=-1).to(tokens.dtype), (NUM_FEATURES,), scale, shift, norm.eps
        )
        told = self.feature_mlp(normed.flatten(0, 2)).view(shape)
        state: Tensor = tokens.view(shape) + columns + told
        return state + self.slot_embedding[:, 0, : shape[1]] + self.rank_embedding[:, 0]

    def _bias(self, count: int) -> Tensor:
        """Return the bias [heads, T, T] of attention between the first `count` candidates of a block."""
        column = torch.arange(count, device=self.same_slot_bias.device) // self.head.top_k
        apart = column[:, None] - column
        same = (apart == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, apart + self.block - 1] + same
