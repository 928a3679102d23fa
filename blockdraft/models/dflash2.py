"""DFlash2: DFlash whose sublayers are convolved along the block, with a choice among candidates by pairs.

A block is filled in at once, so its columns know little of each other. Two things repair that and cost hardly
anything. Around every sublayer each column is mixed with those before it in the block, by kernels that it
adjusts itself. And drafts are not the best tokens of each column alone: `candidate_selector` scores pairs of
neighbours, and `kernels.candidates` walks from the anchor on. Context vectors are never convolved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.rows import Angles
from blockdraft.models.dflash import DFlash, DFlashLayer
from blockdraft.models.draft_config import Dflash2Head, DraftConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import PlainLinear

BEFORE, AFTER = 0, 1  # the sublayer


class BlockConv(KernelModule):
    """The convolutions before and after a sublayer; both follow from what goes into it, normalised."""

    def __init__(self, hidden: int, head: Dflash2Head) -> None:
        super().__init__()
        self.shape = (2, head.conv_taps, hidden // head.conv_group)
        self.base_kernel = nn.Parameter(torch.empty(2, head.conv_taps, hidden))
        self.kernel_projection = PlainLinear(hidden, 2 * head.conv_taps * self.shape[2])

    def deltas(self, x: Tensor) -> Tensor:
        """[N, 2, taps, groups]: what tokens x [N, E] add to both kernels."""
        return self.kernel_projection(x).view(-1, *self.shape)  # type: ignore[no-any-return]

    def forward(
        self, x: Tensor, deltas: Tensor, side: int, num_columns: int, onto: Tensor | None = None
    ) -> Tensor:
        """x [N, E] in blocks of `num_columns`, convolved, and added to `onto` where that is given."""
        return self.kernels.block_conv(x, self.base_kernel[side], deltas[:, side], num_columns, onto)


class DFlash2Layer(DFlashLayer):
    """A drafter layer with convolutions around its attention and around its feed-forward part."""

    def __init__(self, config: DraftConfig, index: int, layer: int) -> None:
        super().__init__(config, index, layer)
        self.attention_conv = BlockConv(config.hidden_size, _head(config))
        self.mlp_conv = BlockConv(config.hidden_size, _head(config))

    def forward(self, x: Tensor, angles: Angles, view: View, num_columns: int) -> Tensor:
        normed = self.attention_norm(x)
        deltas = self.attention_conv.deltas(normed)
        mixed = self.attention_conv(normed, deltas, BEFORE, num_columns)
        attended = self.out(self.attend(self.qkv(mixed), angles, view))
        x = self.attention_conv(attended, deltas, AFTER, num_columns, x)
        normed = self.mlp_norm(x)
        deltas = self.mlp_conv.deltas(normed)
        mixed = self.mlp_conv(normed, deltas, BEFORE, num_columns)
        return self.mlp_conv(self.mlp(mixed), deltas, AFTER, num_columns, x)  # type: ignore[no-any-return]


class CandidateSelector(nn.Module):
    """What pairs of neighbouring tokens are worth; the codebooks are only ever looked up."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        head = _head(config)
        self.top_k, self.skips_first = head.top_k, head.skips_first
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, head.rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, head.rank))
        self.hidden_projection = PlainLinear(config.hidden_size, head.rank)

    def mixture(self, hidden: Tensor) -> Tensor:
        """[R, C, rank] of columns with hidden states [R, C, E]."""
        return self.spared(self.hidden_projection(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1))

    def spared(self, mixture: Tensor) -> Tensor:
        """Mixtures [R, C, rank], new ones, without the first column's where pairs do not count for it."""
        if self.skips_first:
            mixture[:, 0] = 0
        return mixture


class DFlash2(DFlash):
    """The drafter's body and its selector."""

    layer_type = DFlash2Layer

    def __init__(
        self,
        config: DraftConfig,
        *,
        first_layer: int,
        max_positions: int,
        has_head: bool,
        device: torch.device,
    ) -> None:
        super().__init__(
            config, first_layer=first_layer, max_positions=max_positions, has_head=has_head, device=device
        )
        self.candidate_selector = CandidateSelector(config)


def body_type(config: DraftConfig) -> type[DFlash]:
    """The class of the drafter that `config` describes."""
    return DFlash if config.dflash2 is None else DFlash2


def _head(config: DraftConfig) -> Dflash2Head:
    assert config.dflash2 is not None
    return config.dflash2
