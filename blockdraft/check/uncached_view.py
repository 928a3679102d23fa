"""WholeView: the view of a whole sequence at once, without cache and pages.

The check at the start uses this view for its oracle. Attention is one softmax over all keys, and the gated
delta rule is solved as one triangular system, so the view shares no code with the kernels it checks. Inputs
and outputs have the tokens' dtype; the computation is in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.cache.spec import LayerSpec, Recurrent, SharedWith
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.gated_delta import EPS, DeltaWeights, gates, reference_convolve
from blockdraft.kernels.heads import HeadNorms
from blockdraft.kernels.pointwise import Angles, reference_rms_norm, reference_rotate

Kept = dict[int, tuple[Tensor, Tensor]]  # keys and values [N, G, D] of a layer, as attention reads them


class WholeView:
    """The view of one row for each position in `starts`, with `count` tokens from that position on.

    The keys and values of the tokens before `start` are the first `start` entries of `context`.
    """

    def __init__(
        self,
        specs: tuple[LayerSpec, ...],
        *,
        count: int,
        device: torch.device,
        starts: Sequence[int] = (0,),
        context: Kept | None = None,
    ) -> None:
        self.positions = torch.cat([torch.arange(start, start + count, device=device) for start in starts])
        self.kept: Kept = {}
        self._specs = specs
        self._count = count
        self._starts = starts
        self._context = context or {}

    def attend(  # noqa: PLR0913
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        mask: Mask,
        *,
        angles: Angles | None,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if k is not None and v is not None:
            if angles is None:
                self.kept[layer] = k, v
            else:
                q = _entered(q, None if norms is None else norms.q, norms, angles)
                self.write(layer, k, v, angles=angles, norms=norms)
        spec = self._specs[layer]
        own = self.kept[spec.layer if isinstance(spec, SharedWith) else layer]
        queries, keys, values = (torch.split(x, self._count) for x in (q, *own))
        rows = zip(self._starts, queries, keys, values, strict=True)
        return torch.cat([self._attend_row(layer, start, q, k, v, mask, sinks) for start, q, k, v in rows])

    def _attend_row(
        self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None
    ) -> Tensor:
        if layer in self._context:
            k, v = (
                torch.cat((before[:start], own))
                for before, own in zip(self._context[layer], (k, v), strict=True)
            )
        return _attend(q, k, v, _visible(mask, start, len(q), len(k), q.device), mask, sinks)

    def write(self, layer: int, k: Tensor, v: Tensor, *, angles: Angles, norms: HeadNorms | None) -> None:
        self.kept[layer] = _entered(k, None if norms is None else norms.k, norms, angles), v

    def before(self, layer: int) -> tuple[Tensor, Tensor]:
        last = torch.tensor(self._starts, device=self.positions.device) - 1
        k, v = (x[last.clamp(min=0)] * (last >= 0)[:, None, None] for x in self._context[layer])
        return k, v

    def scan(self, layer: int, x: Tensor, beta: Tensor, gate: Tensor, weights: DeltaWeights) -> Tensor:
        """Apply the gated delta rule without a state: solve for the corrections of all tokens at once."""
        spec = self._specs[layer]
        assert isinstance(spec, Recurrent)
        assert tuple(self._starts) == (0,), "a state has no past here"
        wide = torch.promote_types(x.dtype, torch.float32)
        mixed = reference_convolve(x[None], x.new_zeros(1, spec.conv_width - 1, x.shape[1]), weights.conv)[0]
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        q, k, v = torch.split(mixed.to(wide), [keys, keys, values], dim=1)
        q, k = (_unit(_by_head(part, spec.num_key_heads, spec.num_heads)) for part in (q, k))  # [H, N, K]
        v = _by_head(v, spec.num_heads, spec.num_heads)  # [H, N, V]
        rates, decays = gates(beta, gate, weights)
        rate, faded = rates.to(wide).T[..., None], decays.double().cumsum(0).T  # [H, N, 1], [H, N]
        # [i, j]: the share of token j's write that is left at token i; zero for j > i.
        left = (faded[:, :, None] - faded[:, None, :]).tril().exp().tril().to(wide)
        seen = rate * (k @ k.mT) * left.tril(-1)
        delta = torch.linalg.solve_triangular(
            seen + torch.eye(len(x), dtype=wide, device=x.device), rate * v, upper=False, unitriangular=True
        )
        read: Tensor = ((q @ k.mT) * left) @ delta * spec.key_dim**-0.5
        return read.transpose(0, 1).to(x.dtype)


def _visible(mask: Mask, start: int, count: int, num_keys: int, device: torch.device) -> Tensor:
    """Return a mask [N, L] of the keys that the queries from `start` on attend to (see Mask)."""
    query = torch.arange(start, start + count, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    visible = key <= query if mask.is_causal else torch.ones_like(key <= query)
    if mask.window is None:
        return visible
    if mask.is_anchored:
        return visible & (key >= start - mask.window)
    return visible & ((key - query).abs() < mask.window)


def _entered(x: Tensor, weight: Tensor | None, norms: HeadNorms | None, angles: Angles) -> Tensor:
    """Return `x` normalised per head (if there are `norms`) and rotated to its position."""
    if norms is not None:
        x = reference_rms_norm(x, weight, norms.eps)
    return reference_rotate(x, angles)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Mask, sinks: Tensor | None) -> Tensor:
    """Return the attention of q [N, H, D] over keys and values [L, G, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    num_heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(shared, dim=1).transpose(0, 1) for x in (k, v))  # [H, L, D]
    scores = q.to(wide).transpose(0, 1) @ keys.mT * mask.scale  # [H, N, L]
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide).view(num_heads, 1, 1).expand(-1, len(q), 1)
        weights = torch.cat((scores, sink), dim=2).softmax(dim=2)[..., :-1]
    else:
        weights = scores.softmax(dim=2)
    return (weights @ values).transpose(0, 1).to(q.dtype)


def _by_head(x: Tensor, num_heads: int, num_wanted: int) -> Tensor:
    """Reshape [N, num_heads * D] to [num_wanted, N, D], with each head repeated."""
    heads = x.view(len(x), num_heads, -1)
    return heads.repeat_interleave(num_wanted // num_heads, dim=1).transpose(0, 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)
