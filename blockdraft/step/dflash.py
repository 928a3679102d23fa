"""DFlashDrafter: one forward over [anchor, mask, mask, …], sampled with the target's own noise."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.kernels.sampling import NEVER
from blockdraft.models.decoder import Decoder, softcap
from blockdraft.models.dflash import DFlash
from blockdraft.models.kernel_module import with_kernels
from blockdraft.step.ngram import recall


class DFlashDrafter:
    """Drafts with `model`, whose embedding and (unless it brings its own) head are the target's.

    `vocab_map` [draft vocabulary] gives the target's token id for each row of a reduced head. Where the last
    `draft_ngram` tokens of a row have occurred before, what followed them is drafted instead; 0: nowhere.
    """

    def __init__(
        self, model: DFlash, target: Decoder, vocab_map: Tensor | None = None, *, draft_ngram: int = 0
    ) -> None:
        self.model = model
        self.target = target
        self.vocab_map = vocab_map
        self.draft_ngram = draft_ngram
        self.block = model.config.block
        # No column then reads a later one, so the later ones need not be there.
        self.is_causal = all(model.config.is_causal)

    def beside(self, target: Decoder) -> DFlashDrafter:
        """The same drafter, weights shared, for another copy of its target: by the kernels of that one."""
        twin = copy.copy(self)
        twin.model, twin.target = with_kernels(self.model, target.kernels), target
        return twin

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        """Runs its whole block, or only the first `width` columns where that gives the same drafts.

        Its head, which takes as long as several layers, runs on the columns that will be verified.
        """
        anchor = rows.anchor[rows.active][:, None]  # [R, 1]
        if width == 1:
            return anchor
        num_columns = width if self.is_causal else self.block
        own = view if width == num_columns else cache.view(rows, num_columns)
        hidden = self.block_hidden(anchor, own, num_columns)[:, : width - 1]
        block = torch.cat((anchor, self.propose(hidden, anchor, view.starts, rows)), dim=1)
        if self.draft_ngram:
            recall(block, rows, view, self.draft_ngram)
        return block

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows) -> Tensor:
        """Drafts [R, D] of columns with hidden states [R, D, E], behind the anchor [R, 1] at `starts` [R]."""
        return rows.kernels.choose(self.column_logits(hidden), starts, anchor, rows.sampling())

    def block_hidden(self, anchor: Tensor, view: View, num_columns: int | None = None) -> Tensor:
        """[R, B - 1, E]: hidden states of columns 1 … B - 1, given column 0 [R, 1].

        B, for which `view` is made, is `num_columns`, or the whole block.
        """
        num_masks = (self.block if num_columns is None else num_columns) - 1
        masks = anchor.new_full((len(anchor), num_masks), self.model.config.mask_token_id)
        block = torch.cat((anchor, masks), dim=1)  # [R, B]
        hidden = self.model(self.embed(block.flatten()), view)
        return hidden.view(*block.shape, -1)[:, 1:]  # type: ignore[no-any-return]

    def block_logits(self, anchor: Tensor, view: View) -> Tensor:
        """[R, B - 1, V]: what the drafter believes of columns 1 … B - 1, given column 0 [R, 1]."""
        return self.column_logits(self.block_hidden(anchor, view))

    def column_logits(self, hidden: Tensor) -> Tensor:
        """[R, D, V] of hidden states [R, D, E]."""
        return self.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embeddings, scaled as in the drafter's training: as the target does, or as it says."""
        scale = self.model.config.embedding_scale
        return self.target.embed(token_ids) if scale is None else self.target.embedding(token_ids) * scale

    def absorb(self, features: Tensor, view: View) -> None:
        self.model.absorb(features, view)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of the target's vocabulary for hidden states [..., E]; NEVER where the head has no row."""
        config = self.model.config
        head = self.target.head_logits if self.model.head is None else self.model.head
        cap = config.logit_softcap if config.logit_softcap is not None else self.target.config.logit_softcap
        logits = head(hidden)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        logits = softcap(logits, cap)
        if self.vocab_map is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], config.vocab_size), NEVER)
        full[..., self.vocab_map] = logits
        return full
