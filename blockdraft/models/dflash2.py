"""DFlash2: DFlash with convolutions along the block, and drafts that are chosen by scores of token pairs.

All columns of a block are drafted at once, so they know little of each other. DFlash2 changes two things at
little cost. Before and after every sublayer, a convolution mixes each column with the columns before it. And
`candidate_selector` scores pairs of neighbouring tokens, by which `kernels.candidates` chooses drafts from
the anchor on. Context vectors are never convolved.
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

BEFORE, AFTER = 0, 1  # of a sublayer


class BlockConv(KernelModule):
    """The convolutions before and after a sublayer; their kernels depend on its normalised input."""

    def __init__(self, hidden: int, head: Dflash2Head) -> None:
        super().__init__()
        self.shape = (2, head.conv_taps, hidden // head.conv_group)
        self.base_kernel = nn.Parameter(torch.empty(2, head.conv_taps, hidden))
        self.kernel_projection = PlainLinear(hidden, 2 * head.conv_taps * self.shape[2])

    def changes_nothing(self) -> bool:
        """Whether the convolutions are identities."""
        first, others = self.base_kernel[:, :1], self.base_kernel[:, 1:]
        weight = self.kernel_projection.weight
        assert isinstance(weight, Tensor)
        return bool((first == 1).all()) and not (others.any() or weight.any())

    def before(self, x: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        """Convolve x [N, E] in blocks of `num_columns`; also return what `after` needs.

        That is [N, 2, taps, groups], what the tokens add to both kernels.
        """
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
    """A drafter layer with convolutions around its attention and its feed-forward part.

    `forward` runs the layer without them.
    """

    def __init__(self, config: DraftConfig, index: int, layer: int) -> None:
        super().__init__(config, index, layer)
        self.attention_conv = BlockConv(config.hidden_size, _head(config))
        self.mlp_conv = BlockConv(config.hidden_size, _head(config))

    def advance(
        self, x: Tensor, normed: Tensor, angles: Angles, view: View, num_columns: int, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Return the next stream, and next_norm(stream); `normed` is attention_norm(x)."""
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
        """Return [R, C, rank] for columns with hidden states [R, C, E]."""
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
        """Skip the convolutions if all are identities, as in a drafter whose selector alone was trained."""
        convs = [part for part in self.modules() if isinstance(part, BlockConv)]
        self.is_convolved = not all(conv.changes_nothing() for conv in convs)

    def forward(self, x: Tensor, view: View, num_columns: int) -> Tensor:
        """See DFlash; each norm is computed together with the convolution before it."""
        if not self.is_convolved:
            return super().forward(x, view, num_columns)
        self.check_no_gradient(x)
        angles, layers = self.rotary(view.positions), [cast(DFlash2Layer, layer) for layer in self.layers]
        normed: Tensor = layers[0].attention_norm(x)
        for layer, norm in zip(layers, [*(one.attention_norm for one in layers[1:]), self.norm], strict=True):
            x, normed = layer.advance(x, normed, angles, view, num_columns, norm)
        return normed


def body_type(config: DraftConfig) -> type[DFlash]:
    return DFlash if config.dflash2 is None else DFlash2


def _head(config: DraftConfig) -> Dflash2Head:
    assert config.dflash2 is not None
    return config.dflash2
