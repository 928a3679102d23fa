"""A decoding step with trees of drafts: as `decode_parts`, but each row verifies several paths at once.

The target has one sample at each position, so at most one child of a node carries it, and the accepted path
is the one that plain decoding takes. Each node is computed as the end of its own path (kernels/branches.py).
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
    chain = cache.view(rows, size.width)  # of the block that the drafter reads, and of the accepted path
    tree = drafter.grow(rows, cache, chain, size)
    view = cache.tree_view(rows, tree)  # each node at its own position
    hidden, features = target(tree.token_ids, view)
    kept = view.keep(sample(target.logits(hidden), rows, view), rows.limits)
    drafter.absorb(features[kept.numbers.flatten()], chain)
    cache.commit(rows, chain.starts, kept.num_committed)
    rows.advance(kept.token_ids, kept.sampled, kept.num_committed)
    return Verdict(kept.sampled, kept.num_committed, None, kept.chains)


def sample(logits: Tensor, rows: Rows, view: TreeView) -> Tensor:
    """Sample the target behind every node [N], by the rules of its row and the tokens of its path."""
    branches = view.branches
    batch = dataclasses.replace(rows.sampling(), rows=branches.rows)
    return rows.kernels.choose(logits, branches.starts, branches.path_ids, batch, view.places)
