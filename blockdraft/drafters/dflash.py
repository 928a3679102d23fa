"""DFlashDrafter: one forward over [anchor, mask, mask, …], sampled with the target's own noise."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.kernels.sampling import NEVER, choose
from blockdraft.models.decoder import Decoder, softcap
from blockdraft.models.dflash import DFlash


class DFlashDrafter:
    """Drafts with `model`, whose embedding and (unless it brings its own) head are the target's.

    `vocab_map` [draft vocabulary] gives the target's token id for each row of a reduced head.
    """

    def __init__(self, model: DFlash, target: Decoder, vocab_map: Tensor | None = None) -> None:
        self.model = model
        self.target = target
        self.vocab_map = vocab_map
        self.block = model.config.block

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        """Always runs the block it was trained for and returns its first `width` columns."""
        anchor = rows.anchor[rows.active][:, None]  # [R, 1]
        if width == 1:
            return anchor
        own = view if width == self.block else cache.view(rows, self.block)
        logits = self.block_logits(anchor, own)[:, : width - 1]
        proposals = choose(logits, view.starts, anchor, rows.sampling())
        return torch.cat((anchor, proposals), dim=1)

    def block_logits(self, anchor: Tensor, view: View) -> Tensor:
        """[R, block - 1, V]: what the drafter believes of columns 1 … block - 1, given column 0 [R, 1]."""
        masks = anchor.new_full((len(anchor), self.block - 1), self.model.config.mask_token_id)
        block = torch.cat((anchor, masks), dim=1)  # [R, block]
        hidden = self.model(self._embed(block.flatten()), view)
        hidden = hidden.unflatten(0, block.shape)[:, 1:]
        return self._logits(hidden.flatten(0, 1)).view(len(anchor), self.block - 1, -1)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """The target's embeddings, scaled as in the drafter's training: as the target does, or as it says."""
        scale = self.model.config.embedding_scale
        return self.target.embed(token_ids) if scale is None else self.target.embedding(token_ids) * scale

    def absorb(self, features: Tensor, view: View) -> None:
        self.model.absorb(features, view)

    def _logits(self, hidden: Tensor) -> Tensor:
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
