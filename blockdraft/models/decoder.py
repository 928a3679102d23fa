"""Decoder: embedding, layers and norm of a target, with taps for a drafter. Serving and training share it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.pointwise import Angles
from blockdraft.models.config import AttentionConfig, ModelConfig, Rope
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import Embedding, Linear, RMSNorm
from blockdraft.models.rotary import Rotary


class Decoder(KernelModule):
    """A target model. A drafter reads the outputs of the layers `taps`."""

    def __init__(
        self,
        config: ModelConfig,
        layers: list[nn.Module],
        norm: RMSNorm,
        *,
        taps: tuple[int, ...],
        max_positions: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.taps = taps
        # Rounded to the model's dtype, as in training.
        scale = torch.tensor(config.embedding_scale, dtype=torch.get_default_dtype(), device="cpu")
        self._embedding_scale = scale.item()
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = None if config.ties_embeddings else Linear(config.hidden_size, config.vocab_size)
        kinds = [_rope(config, index) for index in range(config.num_layers)]
        ropes = list(dict.fromkeys(kind for kind in kinds if kind is not None))
        self.rotaries = nn.ModuleList(Rotary(*rope, max_positions, device) for rope in ropes)
        self._rotary_of = tuple(None if kind is None else ropes.index(kind) for kind in kinds)

    def embed(self, token_ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(token_ids)
        if self.config.embedding_scale == 1:
            return x
        return x * self._embedding_scale

    def forward(self, token_ids: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """Return hidden states [N, E] before the head and features [N, taps * E] for token_ids [N]."""
        x = self.embed(token_ids)
        angles = self.angles(view.positions)
        features = x.new_empty(len(x), len(self.taps), x.shape[1])
        normed = self._norm_before(0)(x)
        for index in range(len(self.layers)):
            x, normed = self._through(index, x, normed, angles, view)
            for position, tap in enumerate(self.taps):
                if tap == index:
                    features[:, position] = x  # a copy: the next layer may add its result in place
        return normed, features.flatten(1)

    def angles(self, positions: Tensor) -> list[Angles]:
        """Return the angles of every kind of rope that the layers have."""
        return [rotary(positions) for rotary in self.rotaries]

    def through(self, index: int, x: Tensor, angles: list[Angles], view: View) -> Tensor:
        """Return the output of layer `index` for x [N, E], which may be overwritten."""
        return self._through(index, x, self._norm_before(index)(x), angles, view)[0]

    def _through(
        self, index: int, x: Tensor, normed: Tensor, angles: list[Angles], view: View
    ) -> tuple[Tensor, Tensor]:
        """Return the output of layer `index`, and its norm for what follows; `normed` is that of x."""
        rotary = self._rotary_of[index]
        layer_angles = None if rotary is None else angles[rotary]
        next_norm = self._norm_before(index + 1)
        return self.layers[index](x, normed, layer_angles, view, next_norm=next_norm)  # type: ignore[no-any-return]

    def _norm_before(self, index: int) -> RMSNorm:
        """Return the norm in front of layer `index`, or of the head after the last layer."""
        return self.norm if index == len(self.layers) else self.layers[index].mixer_norm  # type: ignore[return-value]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden states [..., E]."""
        return softcap(self.head_logits(hidden), self.config.logit_softcap)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits before `softcap`."""
        self.check_no_gradient(hidden)
        return self.embedding.project(hidden) if self.head is None else self.head(hidden)


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """Squeeze logits into (-cap, cap)."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _rope(config: ModelConfig, index: int) -> tuple[Rope, int] | None:
    mixer = config.layers[index].mixer
    return (mixer.rope, mixer.head_dim) if isinstance(mixer, AttentionConfig) else None
