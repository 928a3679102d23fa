"""A decoding step with trees of drafts: as `decode_parts`, but each row verifies several paths at once.

The target has one sample at each position, so at most one child of a node carries it, and the accepted path
is the one that plain decoding takes. Each node is computed as the end of its own path (cache/tree_view.py).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.tree_view import TreeView
from blockdraft.kernels.tree_size import TreeSize
from blockdraft.models.decoder import Decoder
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.verify import Verdict


@torch.inference_mode()
def decode_tree(
    *, target: Decoder, drafter: DFlashDrafter, cache: Cache, rows: Rows, size: TreeSize
) -> Verdict:
    """Grow a tree for every active row, verify it in one target forward, and commit the accepted path."""
    tree = drafter.grow(rows, cache, size)
    view = cache.tree_view(rows, tree)  # each node at its own position
    hidden, features = target(tree.token_ids, view)
    path_ids = tree.path_ids  # [R * P, W]
    sampled = sample(target.logits(hidden), path_ids, rows, view)[tree.paths]  # [R * P, W]
    counts = rows.kernels.count_accepted(sampled, path_ids, tree.lengths).view(-1, size.branches)
    branch, num_committed = longest(counts, rows)  # [R]
    view.keep(branch, num_committed)
    chain = cache.view(rows, size.width)
    drafter.absorb(features[tree.paths[branch].flatten()], chain)
    cache.commit(rows, chain.starts, num_committed)
    kept = sampled[branch]  # [R, W]
    rows.advance(path_ids[branch], kept, num_committed)
    chains = torch.stack((tree.lengths[:: size.branches], counts[:, 0]), dim=1)
    return Verdict(kept, num_committed, None, chains)


def sample(logits: Tensor, path_ids: Tensor, rows: Rows, view: TreeView) -> Tensor:
    """Sample the target behind every node [N], by the rules of its row and the tokens of its path."""
    num_branches = view.tree.size.branches
    batch = dataclasses.replace(rows.sampling(), rows=rows.active.repeat_interleave(num_branches))
    return rows.kernels.choose(logits, view.path_starts, path_ids, batch, view.places)


def longest(counts: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the branch that commits the most tokens of each row [R], and how many [R].

    `counts` [R, P]: what each branch alone would commit.
    """
    most, rank = counts.max(dim=1)
    first = torch.arange(len(rank), device=rank.device) * counts.shape[1]
    return first + rank, most.minimum(rows.limits)
