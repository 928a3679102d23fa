"""DFlash: a few Qwen3-style layers that draft a whole block at once from the target's features.

For every committed token, the target's tapped hidden states are fused into one context vector,
`hidden_norm(fc(features))`. A context vector does not enter the residual stream: every layer computes keys
and values from it. The block's stream starts from the target's embeddings of [anchor, mask, mask, …], and the
output at column k predicts the token at column k.

All columns of a block are drafted at once, so a column does not depend on the drafts before it. DFlash2 adds
two cheap remedies. Before and after every sublayer, a convolution mixes each column with the columns before
it. And `candidate_selector` scores pairs of neighbouring tokens; `kernels.candidates` uses these scores to
choose drafts one after the other, from the anchor on. Context vectors are never convolved.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from blockdraft.cache.view import View
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.heads import HeadNorms
from blockdraft.kernels.pointwise import Angles
from blockdraft.models.draft_config import Dflash2Head, DraftConfig
from blockdraft.models.draft_heads import MarkovHead, PrefixHead, Refiner
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.lattice import Lattice
from blockdraft.models.layers import GatedMLP, Linear, PlainLinear, RMSNorm
from blockdraft.models.rotary import Rotary

BEFORE, AFTER = 0, 1  # indices of the convolutions around a sublayer


class DFlashLayer(nn.Module):
    """One drafter layer; `layer` is its index in the cache, which target and drafter share."""

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
        self.qkv = Linear(hidden, config.num_heads * config.head_dim, size, size, bias=config.has_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.out = Linear(config.num_heads * config.head_dim, hidden, bias=config.has_bias)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size)

    def keys_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, G, D] of context vectors [N, E], by the projection that blocks use."""
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
        """Return the layer's output [N, E] for the stream x [N, E] of blocks of `num_columns`."""
        x = self.out(self.attend(self.qkv(x, norm=self.attention_norm), angles, view), x)
        return self.mlp(x, self.mlp_norm)  # type: ignore[no-any-return]


class BlockConv(KernelModule):
    """The convolutions before and after a sublayer; their kernels depend on its normalised input."""

    def __init__(self, hidden: int, head: Dflash2Head) -> None:
        super().__init__()
        self.shape = (2, head.conv_taps, hidden // head.conv_group)
        self.base_kernel = nn.Parameter(torch.empty(2, head.conv_taps, hidden))
        self.kernel_projection = PlainLinear(hidden, 2 * head.conv_taps * self.shape[2])

    def changes_nothing(self) -> bool:
        """Return True if the convolutions are identities."""
        first, others = self.base_kernel[:, :1], self.base_kernel[:, 1:]
        weight = self.kernel_projection.weight
        assert isinstance(weight, Tensor)
        return bool((first == 1).all()) and not (others.any() or weight.any())

    def before(self, x: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        """Return x [N, E] convolved in blocks, and tokens' changes of both kernels [N, 2, taps, groups]."""
        weight = self.kernel_projection.weight
        assert isinstance(weight, Tensor)
        return self.kernels.conv_before(x, self.base_kernel[BEFORE], weight, num_columns)

    def after(
        self, x: Tensor, deltas: Tensor, num_columns: int, stream: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Convolve the sublayer's output x and add it to `stream`; return the stream and norm(stream)."""
        base, own = self.base_kernel[AFTER], deltas[:, AFTER]
        return self.kernels.conv_after(x, base, own, num_columns, stream, norm.weight, norm.eps)


class DFlash2Layer(DFlashLayer):
    """A drafter layer with convolutions around both sublayers; `forward` leaves out the convolutions."""

    def __init__(self, config: DraftConfig, index: int, layer: int) -> None:
        super().__init__(config, index, layer)
        self.attention_conv = BlockConv(config.hidden_size, _head(config))
        self.mlp_conv = BlockConv(config.hidden_size, _head(config))

    def advance(
        self, x: Tensor, normed: Tensor, angles: Angles, view: View, num_columns: int, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Return the stream y after the layer, and next_norm(y); `normed` is attention_norm(x)."""
        mixed, deltas = self.attention_conv.before(normed, num_columns)
        attended = self.out(self.attend(self.qkv(mixed), angles, view))
        x, normed = self.attention_conv.after(attended, deltas, num_columns, x, self.mlp_norm)
        mixed, deltas = self.mlp_conv.before(normed, num_columns)
        return self.mlp_conv.after(self.mlp(mixed), deltas, num_columns, x, next_norm)


class CandidateSelector(nn.Module):
    """Scores pairs of neighbouring tokens by two codebooks and a mixture that depends on the column."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        head = _head(config)
        self.top_k, self.skips_first = head.top_k, head.skips_first
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, head.rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, head.rank))
        self.hidden_projection = PlainLinear(config.hidden_size, head.rank)

    def mixture(self, hidden: Tensor) -> Tensor:
        """Return the mixtures [R, C, rank] of columns with hidden states [R, C, E]."""
        return self.hidden_projection(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)  # type: ignore[no-any-return]


class DFlash(KernelModule):
    """The drafter; `first_layer` is the index of its first layer in the cache shared with the target."""

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
        self.refiner = Refiner(config) if config.xpress is not None else None
        self.prefix = PrefixHead(config) if config.domino is not None else None
        self.lilicorr = Lattice(config) if config.lilicorr is not None else None
        self.context_layer = first_layer + config.num_layers  # where LiLiCorr keeps context vectors
        if config.dflash2 is not None and config.dflash2.rank:
            self.add_module("candidate_selector", CandidateSelector(config))

    def absorb(self, features: Tensor, view: View) -> None:
        """Write the context's keys and values, computed from features [N, taps * E], to the cache."""
        self.check_no_gradient(features)
        context = self.hidden_norm(self.fc(features))
        angles = self.rotary(view.positions)
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            view.write(layer.layer, *layer.keys_values(context), angles=angles, norms=layer.norms())
        if self.lilicorr is not None:
            self._keep(context, angles, view)

    def _keep(self, context: Tensor, angles: Angles, view: View) -> None:
        """Write the context vectors [N, E] to the cache, as keys that are not rotated and as values."""
        dim = self.config.head_dim
        heads = pad(context, (0, -context.shape[1] % (2 * dim))).view(len(context), -1, dim)
        k, v = (part.contiguous() for part in heads.chunk(2, dim=1))
        still = torch.ones_like(angles[0]), torch.zeros_like(angles[1])
        view.write(self.context_layer, k, v, angles=still, norms=None)

    def _with_context(self, hidden: Tensor, view: View, num_columns: int) -> Tensor:
        """Return hidden states [N, E] of blocks; LiLiCorr has the anchor's context in the anchor's column."""
        if self.lilicorr is None:
            return hidden
        context = torch.cat(view.before(self.context_layer), dim=1).flatten(1)[:, None, : hidden.shape[1]]
        columns = hidden.view(-1, num_columns, hidden.shape[1])
        return torch.cat((context.to(hidden.dtype), columns[:, 1:]), dim=1).flatten(0, 1)

    def forward(self, x: Tensor, view: View, num_columns: int) -> Tensor:
        """Return the hidden states [N, E] for the embeddings x [N, E] of blocks of `num_columns`."""
        self.check_no_gradient(x)
        angles = self.rotary(view.positions)
        for layer in self.layers:
            x = layer(x, angles, view, num_columns)
        return self._with_context(self.norm(x), view, num_columns)


class DFlash2(DFlash):
    """A DFlash2 drafter: layers with convolutions, and a candidate selector."""

    candidate_selector: CandidateSelector
    layer_type = DFlash2Layer
    is_convolved = True

    def leave_out_idle_convs(self) -> None:
        """Skip the convolutions if all are identities, as when only the drafter's selector was trained."""
        convs = [part for part in self.modules() if isinstance(part, BlockConv)]
        self.is_convolved = not all(conv.changes_nothing() for conv in convs)

    def forward(self, x: Tensor, view: View, num_columns: int) -> Tensor:
        """Run as DFlash does, but compute each norm together with the convolution before it."""
        if not self.is_convolved:
            return super().forward(x, view, num_columns)
        self.check_no_gradient(x)
        angles, layers = self.rotary(view.positions), [cast(DFlash2Layer, layer) for layer in self.layers]
        normed: Tensor = layers[0].attention_norm(x)
        for layer, norm in zip(layers, [*(one.attention_norm for one in layers[1:]), self.norm], strict=True):
            x, normed = layer.advance(x, normed, angles, view, num_columns, norm)
        return self._with_context(normed, view, num_columns)


def body_type(config: DraftConfig) -> type[DFlash]:
    return DFlash if config.dflash2 is None else DFlash2


def _head(config: DraftConfig) -> Dflash2Head:
    assert config.dflash2 is not None
    return config.dflash2
