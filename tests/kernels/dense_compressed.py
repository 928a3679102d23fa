"""Attention over exact and compressed keys without pages: an oracle of kernels and of the quality check."""

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.attention import Mask
from blockdraft.kernels.kv_positions import PositionRule


def reference_attend_compressed(
    q: Tensor, exact: tuple[Tensor, Tensor], compressed: tuple[Tensor, Tensor], rule: PositionRule, mask: Mask
) -> Tensor:
    """Attention of q [N, H, D], the last N of L positions. `compressed` are all keys and values come back.

    Causal, in float32 or wider. A query's bits follow from its position and what it sees: each group of
    queries is computed whole, at a shape that its number decides, with zeros for whoever is not there.
    """
    assert mask.is_causal
    assert not mask.is_anchored
    wide = torch.promote_types(q.dtype, torch.float32)
    length, start = len(exact[0]), len(exact[0]) - len(q)
    exact_k, exact_v, compressed_k, compressed_v = (x.to(wide).transpose(0, 1) for x in (*exact, *compressed))
    parts = []
    for group in range(rule.group(start), rule.group(length - 1) + 1):
        begin = rule.group_begin(group)
        end, first, last = begin + rule.stride, max(begin, start), min(begin + rule.stride, length)
        compressed_end_at = rule.compressed_end_at(first)
        k = _mixed(exact_k, compressed_k, rule.sinks, compressed_end_at, end)
        v = _mixed(exact_v, compressed_v, rule.sinks, compressed_end_at, end)
        block = functional.pad(
            q[first - start : last - start].to(wide), (0, 0, 0, 0, first - begin, end - last)
        )
        parts.append(_attend_group(block, k, v, begin, mask)[first - begin : last - begin])
    return torch.cat(parts).to(q.dtype)


def _mixed(exact: Tensor, compressed: Tensor, sinks: int, compressed_end_at: int, end: int) -> Tensor:
    """[G, end, D]: of each position what is read, and zeros past the last one."""
    first = min(sinks, compressed_end_at)
    mixed = torch.cat(
        (exact[:, :first], compressed[:, first:compressed_end_at], exact[:, compressed_end_at:end]), dim=1
    )
    return functional.pad(mixed, (0, 0, 0, end - mixed.shape[1]))


def _attend_group(q: Tensor, k: Tensor, v: Tensor, begin: int, mask: Mask) -> Tensor:
    """q [stride, H, D] from position `begin` on, over k and v [G, end, D]."""
    count, num_heads, dim = q.shape
    num_groups, end = k.shape[:2]
    shared = num_heads // num_groups
    rows = (q * mask.scale).view(count, num_groups, shared, dim).permute(1, 2, 0, 3)  # [G, shared, stride, D]
    scores = rows.reshape(num_groups, shared * count, dim) @ k.mT
    scores = scores.view(num_groups, shared, count, end)
    query = torch.arange(begin, begin + count, device=q.device).clamp(min=0)[:, None]
    key = torch.arange(end, device=q.device)
    own = max(begin, 0)  # what lies before is seen by the whole group
    scores[..., own:].masked_fill_(key[own:] > query, float("-inf"))
    if mask.window is not None:
        scores.masked_fill_(key <= query - mask.window, float("-inf"))
    weights = scores.softmax(dim=-1).view(num_groups, shared * count, end)
    out = (weights @ v).view(num_groups, shared, count, dim)
    return out.permute(2, 0, 1, 3).reshape(count, num_heads, dim)
