"""DFlashDrafter: one forward over [anchor, mask, mask, …], sampled with the target's own noise."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import View
from blockdraft.kernels.sampling import NEVER, Recent, choose
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

    def draft(self, rows: Rows, cache: Cache, width: int) -> Tensor:
        """Always runs the block it was trained for and returns its first `width` columns."""
        anchor = rows.anchor[rows.active][:, None]  # [R, 1]
        if width == 1:
            return anchor
        logits = self.block_logits(rows, cache)[:, : width - 1]
        start = rows.length[rows.active][:, None]
        column = torch.arange(1, width, device=anchor.device)
        recent = Recent(token_ids=anchor, positions=start, num_visible=torch.ones_like(column))
        proposals = choose(logits, start + column, rows.sampling(), recent)
        return torch.cat((anchor, proposals), dim=1)

    def block_logits(self, rows: Rows, cache: Cache) -> Tensor:
        """[R, block - 1, V]: what the drafter believes of columns 1 … block - 1."""
        config = self.model.config
        anchor = rows.anchor[rows.active][:, None]
        masks = torch.full_like(anchor, config.mask_token_id).expand(-1, self.block - 1)
        block = torch.cat((anchor, masks), dim=1)  # [R, block]
        view = cache.view(rows, self.block)
        hidden = self.model(self._embed(block.flatten()), view)
        hidden = hidden.unflatten(0, block.shape)[:, 1:]
        return self._logits(hidden)

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
        logits = softcap(head(hidden) * config.logit_scale, cap)
        if self.vocab_map is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], config.vocab_size), NEVER)
        full[..., self.vocab_map] = logits
        return full
