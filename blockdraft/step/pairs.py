"""PairDrafter: DFlash2 and DSpark compute a block's columns at once, but choose its drafts one by one.

Each draft is chosen among a few candidates of its column, whose scores depend on the token before
(kernels/candidates.py).
"""

from __future__ import annotations

from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.kernels.candidates import PairScores
from blockdraft.kernels.sampling import Places
from blockdraft.models.dflash import DFlash2
from blockdraft.models.draft_config import DraftConfig
from blockdraft.step.chain import ChainDrafter
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.hints import HintDrafter
from blockdraft.step.lattice import LatticeDrafter
from blockdraft.step.refined import RefinedDrafter

LEAST_WALKED = 7  # drafts from which choosing them one by one gains about what it costs (docs/models.md)
MOST_WALKED = 4  # rows; with 16 rows a greedy walk costs more than it gains; 5 to 15 were not measured


class PairDrafter(HintDrafter):
    """Drafts with a model that scores pairs of tokens, and with the noise that the target samples with."""

    drafts_alone = True

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

    @property
    def table(self) -> Tensor:
        return self.tables()[1]

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows, num_drafts: int) -> Tensor:
        if not self.weighs_pairs(num_drafts, len(hidden)):
            return super().propose(hidden, anchor, starts, rows, num_drafts)
        columns = self.drafting(hidden, num_drafts)
        logits, pairs = self.column_logits(columns), self.pairs(columns)
        return rows.kernels.walk(logits, pairs, starts, anchor, rows.sampling())

    def propose_stream(
        self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows, places: Places
    ) -> Tensor:
        if not self.weighs_pairs(places.num_columns, len(hidden)):
            return super().propose_stream(hidden, anchor, starts, rows, places)
        columns = places.take(self.drafting(hidden, places.num_columns))
        pairs = self.pairs(columns[None])
        if pairs.mixture is not None:
            pairs = pairs._replace(mixture=pairs.mixture[0])
        logits = self.logits(columns)
        return places.put(rows.kernels.walk(logits, pairs, starts, anchor, rows.sampling(), places))

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor:
        said, mixture = self.tables()[0][before], self.mixture(self.drafting(hidden, before.shape[1]))
        if mixture is not None:
            said = said * mixture
        if self.skips_first:
            said[:, 0] = 0
        return said


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
    if config.lilicorr is not None:
        return LatticeDrafter
    if config.dflash2 is not None:
        return DFlash2Drafter
    if config.xpress is not None:
        return RefinedDrafter
    if config.domino is not None:
        return ChainDrafter
    return SparkDrafter if config.markov_rank else DFlashDrafter
