"""MtpDrafter: drafts with the checkpoint's own MTP head, one run of the head for each draft.

The keys and values of pair p (models/mtp.py) are in the cache slot of position p. `follow` writes them after
every target forward, because it knows the tokens that follow. So at a step's start all pairs before `length`
are in the cache. The first run reads the last of these pairs; later runs write scratch slots.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.models.decoder import Decoder
from blockdraft.models.kernel_module import with_kernels
from blockdraft.models.mtp import MtpHead
from blockdraft.step.ngram import overwrite_matches


class MtpDrafter:
    """Drafts with `model`, whose embedding, rope and logits are the target's.

    If the last `draft_ngram` tokens of a row have occurred before, their continuation is drafted instead; 0:
    never.
    """

    vocab_map: None = None
    drafts_alone = False  # the head runs once for each column

    def __init__(self, model: MtpHead, target: Decoder, *, draft_ngram: int = 0) -> None:
        self.model = model
        self.target = target
        self.draft_ngram = draft_ngram
        self.block = model.config.block

    def beside(self, target: Decoder) -> MtpDrafter:
        """Return a copy with shared weights, for another copy of its target and with that copy's kernels."""
        other = copy.copy(self)
        other.model, other.target = with_kernels(self.model, target.kernels), target
        return other

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        """Draft blocks [R, width]. A row without a committed token has no pair: its drafts are arbitrary."""
        assert rows.last_hidden is not None, "the engine keeps it for this drafter"
        hidden = rows.last_hidden[rows.active]  # [R, E]
        block = [rows.anchor[rows.active][:, None]]  # of [R, 1] each
        for column in range(1, width):
            pair = cache.view(rows, 1, shift=column - 2)
            hidden = self.run(block[-1][:, 0], hidden, pair)
            logits = self.target.logits(hidden)[:, None]  # [R, 1, V]
            block.append(rows.kernels.choose(logits, view.starts + (column - 1), block[-1], rows.sampling()))
        drafted = torch.cat(block, dim=1)
        if self.draft_ngram:
            overwrite_matches(drafted, rows, view, self.draft_ngram)
        return drafted

    def run(self, token_ids: Tensor, hidden: Tensor, view: View) -> Tensor:
        """Return the head's hidden states [N, E] after pairs of `hidden` [N, E] and token_ids [N]."""
        angles = self.target.angles(view.positions)[0]
        return self.model(self.target.embed(token_ids), hidden, angles, view)  # type: ignore[no-any-return]

    def absorb(self, features: Tensor, view: View) -> None:
        """Do nothing: the head reads no features."""

    def follow(self, hidden: Tensor, next_ids: Tensor, num_kept: Tensor, view: CacheView, rows: Rows) -> None:
        assert rows.last_hidden is not None, "the engine keeps it for this drafter"
        angles = self.target.angles(view.positions)[0]
        self.model.absorb(self.target.embed(next_ids), hidden, angles, view)
        rows.last_hidden[rows.active] = hidden[view.offsets[:-1] + num_kept - 1]
