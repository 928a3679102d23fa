"""HintDrafter: a draft is chosen by its logits plus the product of a hint and a table of the tokens.

The hint depends on the tokens before the draft. Only a few candidates of each column can be drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels.sampling import NEVER
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash
from blockdraft.step.dflash import DFlashDrafter


class Candidates(NamedTuple):
    """The likeliest tokens of columns."""

    own: Tensor  # [..., K] their logits
    ids: Tensor  # [..., K]
    table: Tensor  # [..., K, rank] their rows of the table

    def at(self, column: int) -> Candidates:
        """Return the candidates [R, K] of one column."""
        return Candidates(self.own[:, column], self.ids[:, column], self.table[:, column])

    def scores(self, hints: Tensor) -> Tensor:
        """Return the scores [..., K], given hints [..., rank]."""
        dtype = self.own.dtype
        return self.own + (self.table.to(dtype) @ hints.to(dtype)[..., None])[..., 0]


class HintDrafter(DFlashDrafter):
    """Drafts with a model whose head gives hints."""

    drafts_alone = False

    def __init__(
        self, model: DFlash, target: Decoder, vocab_map: Tensor | None = None, *, draft_ngram: int = 0
    ) -> None:
        super().__init__(model, target, vocab_map, draft_ngram=draft_ngram)
        self.num_candidates = model.config.num_candidates
        self.places: Tensor | None = None  # [V]: rows of a reduced head by token; 0 where it has none
        if vocab_map is not None:
            self.places = vocab_map.new_zeros(model.config.vocab_size)
            self.places[vocab_map] = torch.arange(len(vocab_map), device=vocab_map.device)

    @property
    def table(self) -> Tensor:
        """The table [rows of the head, rank] that hints are multiplied with."""
        raise NotImplementedError

    def weighs_pairs(self, num_drafts: int, num_rows: int = 1) -> bool:
        return True

    def candidates(self, logits: Tensor) -> Candidates:
        found = logits.topk(self.num_candidates, dim=-1, sorted=False)
        rows = found.indices if self.places is None else self.places[found.indices]
        return Candidates(found.values, found.indices, self.table[rows])

    def hinted(self, logits: Tensor, hints: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        candidates = self.candidates(wide)
        return torch.full_like(wide, NEVER).scatter(-1, candidates.ids, candidates.scores(hints))

    def with_hints(self, logits: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that returns the logits [..., V] with the given hints added.

        The function may overwrite `logits` and its own last result.
        """
        if self.num_candidates == self.model.config.draft_vocab_size:
            return lambda hints: logits + self.spread(hints @ self.table.T, 0.0)
        candidates = self.candidates(logits)
        logits.fill_(NEVER)
        return lambda hints: logits.scatter_(-1, candidates.ids, candidates.scores(hints))
