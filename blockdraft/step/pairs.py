"""PairDrafter: DFlash2 and DSpark compute a block's columns at once, but choose its drafts one by one.

Each draft is chosen among a few candidates of its column, whose scores depend on the token before
(kernels/candidates.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.kernels.candidates import PairScores
from blockdraft.kernels.sampling import NEVER
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash, DFlash2
from blockdraft.models.draft_config import DraftConfig
from blockdraft.step.dflash import DFlashDrafter

LEAST_WALKED = 7  # drafts from which choosing them one by one gains about what it costs (docs/models.md)
MOST_WALKED = 4  # rows; with 16 rows a greedy walk costs more than it gains; 5 to 15 were not measured


class PairDrafter(DFlashDrafter):
    """Drafts with a model that scores pairs of tokens, and with the noise that the target samples with."""

    def __init__(
        self, model: DFlash, target: Decoder, vocab_map: Tensor | None = None, *, draft_ngram: int = 0
    ) -> None:
        super().__init__(model, target, vocab_map, draft_ngram=draft_ngram)
        self.num_candidates = model.config.num_candidates
        self.places: Tensor | None = None  # [V]: rows of a reduced head by token; 0 where it has none
        if vocab_map is not None:
            self.places = vocab_map.new_zeros(model.config.vocab_size)
            self.places[vocab_map] = torch.arange(len(vocab_map), device=vocab_map.device)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return two tables: by preceding token [V, rank], and by draft [rows of the head, rank]."""
        raise NotImplementedError

    def mixture(self, hidden: Tensor) -> Tensor | None:
        """Return weights [R, D, rank] for hidden states [R, D, E], or None if all weights are 1."""
        return None

    @property
    def skips_first(self) -> bool:
        """Say if the first draft is chosen without pairs."""
        return False

    def pairs(self, hidden: Tensor) -> PairScores:
        mixture = self.mixture(hidden)
        return PairScores(*self.tables(), mixture, self.num_candidates, self.places, self.skips_first)

    def weighs_pairs(self, num_drafts: int, num_rows: int = 1) -> bool:
        return True

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows) -> Tensor:
        num_rows, num_drafts, _ = hidden.shape
        if not self.weighs_pairs(num_drafts, num_rows):
            return super().propose(hidden, anchor, starts, rows)
        logits, pairs = self.column_logits(hidden), self.pairs(hidden)
        return rows.kernels.walk(logits, pairs, starts, anchor, rows.sampling())

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor:
        said, mixture = self.tables()[0][before], self.mixture(hidden)
        if mixture is not None:
            said = said * mixture
        if self.skips_first:
            said[:, 0] = 0
        return said

    def hinted(self, logits: Tensor, hints: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        scores, ids = logits.to(wide).topk(self.num_candidates, dim=-1)
        drafts = self.tables()[1][ids if self.places is None else self.places[ids]]
        scores = scores + (drafts.to(wide) @ hints.to(wide)[..., None])[..., 0]
        return torch.full_like(logits, NEVER, dtype=wide).scatter(-1, ids, scores)


class DFlash2Drafter(PairDrafter):
    """Drafts with a DFlash2 model, whose selector scores the pairs (models/dflash.py)."""

    model: DFlash2

    def weighs_pairs(self, num_drafts: int, num_rows: int = 1) -> bool:
        """Return False if pairs gain too little: without convolutions, for narrow blocks or many rows."""
        if self.model.is_convolved:
            return True
        return num_drafts >= min(LEAST_WALKED, self.block - 1) and num_rows <= MOST_WALKED

    def tables(self) -> tuple[Tensor, Tensor]:
        selector = self.model.candidate_selector
        return selector.predecessor_codebook, selector.successor_codebook

    @property
    def skips_first(self) -> bool:
        return self.model.candidate_selector.skips_first

    def mixture(self, hidden: Tensor) -> Tensor:
        return self.model.candidate_selector.mixture(hidden)


class SparkDrafter(PairDrafter):
    """Drafts with a model that has DSpark's Markov head."""

    def tables(self) -> tuple[Tensor, Tensor]:
        assert self.model.markov is not None
        return self.model.markov.before.weight, self.model.markov.after.weight


def drafter_type(config: DraftConfig) -> type[DFlashDrafter]:
    """Return the class of the drafter that `config` describes."""
    if config.dflash2 is not None:
        return DFlash2Drafter
    return SparkDrafter if config.markov_rank else DFlashDrafter
