"""Grows trees of drafts, the likeliest first, in a form that chains' kernels can verify.

A tree is a number of branches: paths from the anchor to a leaf. Each token belongs to the first branch that
reaches it, so a branch's own tokens are the last columns of its path, and a branch is verified like a row
whose committed tokens include its ancestors.

A node's chance is the product of the chances along its path. The tree grows by the likeliest next token, so
it holds the likeliest paths of all, as far as its number of branches allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.kernels.candidates import PairScores, best_tokens, draw_scores, pair_scores
from blockdraft.kernels.sampling import NEVER, SamplingBatch, adjusted, is_warm, noise_of, scales
from blockdraft.kernels.sampling_tables import Whole
from blockdraft.kernels.tree_size import NUM_CHOICES, TreeSize

LEAST = -1e4  # the logarithm of the chance of what cannot follow


class Choices(NamedTuple):
    """The tokens that may follow in each column, behind each candidate of the column before, likeliest first.

    Where the token before makes no difference, there is one list for all, and B is 1.
    """

    ids: Tensor  # [R, C, K] candidates
    chances: Tensor  # [R, C, B, K] natural logarithms, float32 or wider; NEVER behind the last
    places: Tensor  # [R, C, B, K] int64: which candidate has this chance


class Tree(NamedTuple):
    """The trees of R rows, each of K tokens in P branches. All tokens are a stream, branch after branch."""

    size: TreeSize
    token_ids: Tensor  # [R * K]
    branches: Tensor  # [R * K] int64, like all that follow
    columns: Tensor  # [R * K]
    offsets: Tensor  # [R * P + 1]: a branch's own tokens are [offsets[b], offsets[b + 1]), perhaps none
    firsts: Tensor  # [R * P]: the column of the first of them; 0 if there is none
    lengths: Tensor  # [R * P]: the columns of a branch's path, ancestors included; 1 if it has no tokens
    paths: Tensor  # [R * P, width]: the number in the stream of each column's token; past the end the last's
    following: Tensor  # [R]: the draft that a chain has behind the first branch; -1 if that is a whole block

    @property
    def path_ids(self) -> Tensor:
        """The token ids [R * P, width] along each path."""
        return self.token_ids[self.paths]


class Weigh(Protocol):
    """Finds what may follow, as `reference_weigh` does."""

    def __call__(
        self, logits: Tensor, pairs: PairScores | None, starts: Tensor, anchor: Tensor, batch: SamplingBatch
    ) -> Choices: ...


def reference_weigh(
    logits: Tensor, pairs: PairScores | None, starts: Tensor, anchor: Tensor, batch: SamplingBatch
) -> Choices:
    """Return the likeliest tokens of each column of draft logits [R, C, V] behind the anchors [R, 1].

    Candidates and their scores are those that a chain is drafted from (kernels/candidates.py). With a
    temperature, a score holds the noise that the target will draw with. It counts times the temperature, so
    that the chances are those of greedy decoding if it is low.
    """
    warm, is_filtered = is_warm(batch), batch.integers(Whole.IS_FILTERED) != 0
    is_open = (warm & ~is_filtered)[:, None, None]  # noise, but no filter
    own = adjusted(logits, starts, anchor, batch)
    factor = scales(batch, own.dtype)[:, None, None]
    if batch.needs.random:
        own = torch.where(is_open, (own * factor + noise_of(own, starts, batch)) / factor, own)
    unary, ids = best_tokens(own, min(NUM_CHOICES if pairs is None else pairs.top_k, own.shape[-1]))
    scores = unary[:, :, None]
    if pairs is not None:
        before = torch.cat((anchor[:, :, None].expand_as(ids[:, :1]), ids[:, :-1]), dim=1)
        scores = scores + pair_scores(pairs, before, ids).to(unary.dtype)  # [R, C, K before, K]
    if batch.needs.filter:
        filtered = draw_scores(scores * factor[..., None], ids, starts, batch) / factor[..., None]
        scores = torch.where((warm & is_filtered)[:, None, None, None], filtered, scores)
    chances = scores.log_softmax(dim=-1).nan_to_num(nan=LEAST, neginf=LEAST).clamp(min=LEAST)
    return Choices(ids, *chances.sort(dim=-1, descending=True, stable=True))


class Grow(Protocol):
    """Grows trees, as `reference_grow` does."""

    def __call__(self, choices: Choices, anchor: Tensor, size: TreeSize) -> Tree: ...


def reference_grow(choices: Choices, anchor: Tensor, size: TreeSize) -> Tree:
    """Grow a tree behind each anchor [R, 1]. Of equal chances, the earlier node's child comes first.

    A branch begins only where the branches left can still hold all tokens left.
    """
    device, ids, chances, places = anchor.device, *(one.tolist() for one in choices)
    token_ids: list[int] = []
    columns: list[int] = []
    counts: list[int] = []
    firsts: list[int] = []
    lengths: list[int] = []
    paths: list[list[int]] = []
    following: list[int] = []
    for row, (first,) in enumerate(anchor.tolist()):
        grown = _grown(ids[row], chances[row], places[row], first, size)
        leaf = grown[0][-1]
        following.append(-1)
        if leaf.column < len(ids[row]):
            line = places[row][leaf.column]
            following[-1] = ids[row][leaf.column][line[min(leaf.place, len(line) - 1)][0]]
        nodes = [node for path in grown for node in path if node.path is path]
        number = {id(node): len(token_ids) + place for place, node in enumerate(nodes)}
        for path in (grown + [grown[0][:1]] * size.branches)[: size.branches]:
            own = [node.column for node in path if node.path is path]
            counts.append(len(own))
            firsts.append(own[0] if own else 0)
            lengths.append(len(path))
            paths.append([number[id(path[min(column, len(path) - 1)])] for column in range(size.width)])
        token_ids += [node.token for node in nodes]
        columns += [node.column for node in nodes]
    branches = [branch for branch, count in enumerate(counts) for _ in range(count)]

    def tensor(values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Tree(
        size,
        tensor(token_ids),
        tensor(branches),
        tensor(columns),
        tensor([0, *accumulate(counts)]),
        tensor(firsts),
        tensor(lengths),
        tensor(paths),
        tensor(following),
    )


@dataclass(slots=True, eq=False)
class _Node:
    """A token of a tree."""

    token: int
    column: int
    place: int  # among the column's candidates
    chance: float
    path: list[_Node]  # of the branch that it belongs to
    rank: int = 0  # of its next child: so many children are in the tree
    following: float = NEVER  # the chance of its next child


def _grown(
    ids: Sequence[Sequence[int]],
    chances: Sequence[Sequence[Sequence[float]]],
    places: Sequence[Sequence[Sequence[int]]],
    anchor: int,
    size: TreeSize,
) -> list[list[_Node]]:
    """Return the paths of a tree's branches."""

    def look_ahead(node: _Node) -> None:
        node.following = NEVER
        if node.column < len(ids) and node.rank < len(ids[0]):
            line = chances[node.column]
            node.following = node.chance + line[min(node.place, len(line) - 1)][node.rank]

    root = _Node(anchor, 0, 0, 0.0, [])
    root.path.append(root)
    nodes, paths, spare = [root], [root.path], size.spare
    look_ahead(root)
    while len(nodes) < size.nodes:
        deepest = spare + 1 if len(paths) < size.branches else -1  # column whose tokens may get more children
        parent = max(
            (node for node in nodes if node.rank == 0 or node.column <= deepest),
            key=lambda node: node.following,
        )
        column, path, line = parent.column + 1, parent.path, places[parent.column]
        if parent.rank > 0:
            path = path[:column]
            paths.append(path)
            spare += 2 - column
        place = line[min(parent.place, len(line) - 1)][parent.rank]
        child = _Node(ids[parent.column][place], column, place, parent.following, path)
        path.append(child)
        nodes.append(child)
        parent.rank += 1
        look_ahead(parent)
        look_ahead(child)
    return paths
