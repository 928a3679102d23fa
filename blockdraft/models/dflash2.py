"""DFlash2: DFlash whose sublayers are convolved along the block, with a choice among candidates by pairs.

A block is filled in at once, so its columns know little of each other. Two things repair that and cost hardly
anything. Around every sublayer each column is mixed with those before it in the block, by kernels that it
adjusts itself. And drafts are not the best tokens of each column alone: `candidate_selector` scores pairs of
neighbours, and `kernels.candidates` walks from the anchor on. Context vectors are never convolved.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.pointwise import Angles
from blockdraft.models.dflash import DFlash, DFlashLayer
from blockdraft.models.draft_config import Dflash2Head, DraftConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import PlainLinear, RMSNorm

BEFORE, AFTER = 0, 1  # the sublayer


class BlockConv(KernelModule):
    """The convolutions before and after a sublayer; both follow from what goes into it, normalised."""

    def __init__(self, hidden: int, head: Dflash2Head) -> None:
        super().__init__()
        self.shape = (2, head.conv_taps, hidden // head.conv_group)
        self.base_kernel = nn.Parameter(torch.empty(2, head.conv_taps, hidden))
        self.kernel_projection = PlainLinear(hidden, 2 * head.conv_taps * self.shape[2])

    def changes_nothing(self) -> bool:
        """Whether every token comes out as it went in."""
        first, others = self.base_kernel[:, :1], self.base_kernel[:, 1:]
        weight = self.kernel_projection.weight
        assert isinstance(weight, Tensor)
        return bool((first == 1).all()) and not (others.any() or weight.any())

    def before(self, x: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        """What goes into the sublayer: x [N, E] in blocks of `num_columns`, convolved. And for `after`:

        [N, 2, taps, groups], what the tokens add to both kernels.
        """
        weight = self.kernel_projection.weight
        assert isinstance(weight, Tensor)
        return self.kernels.conv_before(x, self.base_kernel[BEFORE], weight, num_columns)

    def after(
        self, x: Tensor, deltas: Tensor, num_columns: int, stream: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """The stream with what comes out of the sublayer, convolved; and that, normalised."""
        base, own = self.base_kernel[AFTER], deltas[:, AFTER]
        return self.kernels.conv_after(x, base, own, num_columns, stream, norm.weight, norm.eps)


class DFlash2Layer(DFlashLayer):
    """A drafter layer with convolutions around its attention and around its feed-forward part.

    `forward` is the layer without them.
    """

    def __init__(self, config: DraftConfig, index: int, layer: int) -> None:
        super().__init__(config, index, layer)
        self.attention_conv = BlockConv(config.hidden_size, _head(config))
        self.mlp_conv = BlockConv(config.hidden_size, _head(config))

    def advance(
        self, x: Tensor, normed: Tensor, angles: Angles, view: View, num_columns: int, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """The stream behind this layer, and that by the norm of what comes next; `normed` is x by our own."""
        mixed, deltas = self.attention_conv.before(normed, num_columns)
        attended = self.out(self.attend(self.qkv(mixed), angles, view))
        x, normed = self.attention_conv.after(attended, deltas, num_columns, x, self.mlp_norm)
        mixed, deltas = self.mlp_conv.before(normed, num_columns)
        return self.mlp_conv.after(self.mlp(mixed), deltas, num_columns, x, next_norm)


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
        return self.hidden_projection(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)  # type: ignore[no-any-return]


class DFlash2(DFlash):
    """The drafter's body and its selector."""

    layer_type = DFlash2Layer
    is_convolved = True

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

    def leave_out_idle_convs(self) -> None:
        """Do without convolutions if none changes anything: whoever trained the selector alone has such."""
        convs = [part for part in self.modules() if isinstance(part, BlockConv)]
        self.is_convolved = not all(conv.changes_nothing() for conv in convs)

    def forward(self, x: Tensor, view: View, num_columns: int) -> Tensor:
        """As DFlash's; each norm is computed with the convolution before it."""
        if not self.is_convolved:
            return super().forward(x, view, num_columns)
        self.check_no_gradient(x)
        angles, layers = self.rotary(view.positions), [cast(DFlash2Layer, layer) for layer in self.layers]
        normed: Tensor = layers[0].attention_norm(x)
        for layer, norm in zip(layers, [*(one.attention_norm for one in layers[1:]), self.norm], strict=True):
            x, normed = layer.advance(x, normed, angles, view, num_columns, norm)
        return normed


def body_type(config: DraftConfig) -> type[DFlash]:
    """The class of the drafter that `config` describes."""
    return DFlash if config.dflash2 is None else DFlash2


def _head(config: DraftConfig) -> Dflash2Head:
    assert config.dflash2 is not None
    return config.dflash2
