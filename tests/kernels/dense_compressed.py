"""Attention over exact and compressed keys without pages: an oracle of kernels and of the quality check."""

import torch
from torch import Tensor

from blockdraft.kernels.attention import Mask
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.kv_positions import PositionRule


def reference_attend_compressed(
    q: Tensor, exact: tuple[Tensor, Tensor], compressed: tuple[Tensor, Tensor], rule: PositionRule, mask: Mask
) -> Tensor:
    """Attend with q [N, H, D], the last N of L positions, over keys and values [L, G, D] stored in both ways.

    Causal, in float32 or wider.
    """
    assert mask.is_causal
    assert not mask.is_anchored
    wide, shared = torch.promote_types(q.dtype, torch.float32), q.shape[1] // exact[0].shape[1]
    key = torch.arange(len(exact[0]))
    query = key[len(key) - len(q) :, None]
    is_compressed = (key >= TILE) & (key < rule.compressed_end_at(query))  # [N, L]
    is_hidden = key > query
    if mask.window is not None:
        is_hidden |= key <= query - mask.window
    (k, v), (k_back, v_back) = (
        [x.to(wide).repeat_interleave(shared, dim=1) for x in store] for store in (exact, compressed)
    )
    scores, back = (torch.einsum("qhd,khd->hqk", q.to(wide), keys) * mask.scale for keys in (k, k_back))
    weights = torch.where(is_compressed, back, scores).masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    out = torch.einsum("hqk,khd->qhd", weights * ~is_compressed, v)
    return (out + torch.einsum("hqk,khd->qhd", weights * is_compressed, v_back)).to(q.dtype)
