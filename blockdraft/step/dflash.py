"""DFlashDrafter: one forward over [anchor, mask, mask, …], sampled with the target's own noise.

Column k drafts the token at column k, so the anchor's own column drafts nothing. In a drafter that drafts
from the anchor, column k drafts the token after column k, and there is one mask less.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.kernels.candidates import PairScores
from blockdraft.kernels.sampling import NEVER, Places
from blockdraft.kernels.tree import Tree
from blockdraft.kernels.tree_size import TreeSize
from blockdraft.models.decoder import Decoder, softcap
from blockdraft.models.dflash import DFlash
from blockdraft.models.draft_config import TREE_KINDS
from blockdraft.models.kernel_module import with_kernels
from blockdraft.step.ngram import overwrite_matches


class DFlashDrafter:
    """Drafts with `model`, whose embedding and (unless it brings its own) head are the target's.

    `vocab_map` [draft vocabulary] gives the target's token id for each row of a reduced head. If the last
    `draft_ngram` tokens of a row have occurred before, their continuation is drafted instead; 0: never.
    """

    drafts_alone = True

    def __init__(
        self, model: DFlash, target: Decoder, vocab_map: Tensor | None = None, *, draft_ngram: int = 0
    ) -> None:
        self.model = model
        self.target = target
        self.vocab_map = vocab_map
        self.draft_ngram = draft_ngram
        self.block = model.config.block
        self.num_columns = model.config.num_columns
        # Then no column reads a later one, so the forward can leave out the later ones.
        self.is_causal = all(model.config.is_causal)

    def beside(self, target: Decoder) -> DFlashDrafter:
        """Return a copy with shared weights, for another copy of its target and with that copy's kernels."""
        other = copy.copy(self)
        other.model, other.target = with_kernels(self.model, target.kernels), target
        return other

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        """Draft blocks [R, width]. Run the whole block, or fewer columns if that gives the same drafts.

        The head takes as long as several layers, so it runs only on the columns that will be verified.
        """
        anchor = rows.anchor[rows.active][:, None]  # [R, 1]
        if width == 1:
            return anchor
        hidden = self._hidden_of(anchor, rows, cache, view, width)
        if view.draft_places is None or not self.drafts_alone:
            drafts = self.propose(hidden, anchor, view.starts, rows, width - 1)
        else:
            drafts = self.propose_stream(hidden, anchor, view.starts, rows, view.draft_places)
        block = torch.cat((anchor, drafts), dim=1)
        if self.draft_ngram:
            overwrite_matches(block, rows, view, self.draft_ngram)
        return block

    def _hidden_of(self, anchor: Tensor, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        """Return the hidden states of blocks, of which a step with this view verifies `width` columns."""
        num_columns = self.columns_for(width)
        own = view if view.places is None and width == num_columns else cache.view(rows, num_columns)
        return self.block_hidden(anchor, own, num_columns)

    @property
    def grows_trees(self) -> bool:
        """Say if drafts can be weighed before any is chosen."""
        return self.model.config.kind in TREE_KINDS

    def grow(self, rows: Rows, cache: Cache, view: CacheView, size: TreeSize) -> Tree:
        """Return trees of drafts behind the anchors of the active rows; `view` is that of chains."""
        anchor = rows.anchor[rows.active][:, None]
        hidden = self._hidden_of(anchor, rows, cache, view, size.width)
        columns = self.drafting(hidden, size.width - 1)
        given = self.column_logits(columns), self.pairs(columns), view.starts, anchor, rows.sampling()
        return rows.kernels.grow(rows.kernels.weigh(*given), anchor, size)

    def pairs(self, hidden: Tensor) -> PairScores | None:
        """Return the scores of adjacent drafts for hidden states [R, D, E], or None if drafts have none."""
        return None

    def columns_for(self, width: int) -> int:
        """Return how many columns the forward has for a step of `width`."""
        return self.model.config.first_column + width - 1 if self.is_causal else self.num_columns

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows, num_drafts: int) -> Tensor:
        """Return drafts [R, D] for a block's hidden states, after the anchor [R, 1] at `starts` [R]."""
        logits = self.column_logits(self.drafting(hidden, num_drafts))
        return rows.kernels.choose(logits, starts, anchor, rows.sampling())

    def propose_stream(
        self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows, places: Places
    ) -> Tensor:
        """Do as `propose` for the drafts at these places alone: rows of other widths need no other logits."""
        logits = self.logits(places.take(self.drafting(hidden, places.num_columns)))
        return places.put(rows.kernels.choose(logits, starts, anchor, rows.sampling(), places))

    def drafting(self, hidden: Tensor, num_drafts: int | None = None) -> Tensor:
        """Return the part [R, D, E] of a block's hidden states [R, columns, E] that drafts, or its start."""
        first = self.model.config.first_column
        return hidden[:, first : None if num_drafts is None else first + num_drafts]

    def block_hidden(self, anchor: Tensor, view: View, num_columns: int | None = None) -> Tensor:
        """Return hidden states [R, columns, E] of a block, given the anchor [R, 1].

        `view` must have as many columns as the forward: `num_columns`, or by default a whole block's.
        """
        num_masks = (self.num_columns if num_columns is None else num_columns) - 1
        masks = anchor.new_full((len(anchor), num_masks), self.model.config.mask_token_id)
        block = torch.cat((anchor, masks), dim=1)  # [R, columns]
        hidden = self.model(self.embed(block.flatten()), view, block.shape[1])
        return hidden.view(*block.shape, -1)  # type: ignore[no-any-return]

    def block_logits(self, anchor: Tensor, view: View) -> Tensor:
        """Return logits [R, B - 1, V] for all drafts of a block, given the anchor [R, 1]."""
        return self.column_logits(self.drafting(self.block_hidden(anchor, view)))

    def column_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, D, V] of hidden states [R, D, E]."""
        return self.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the target's embeddings, scaled as in the drafter's training."""
        scale = self.model.config.embedding_scale
        if scale is None:
            return self.target.embed(token_ids)
        x: Tensor = self.target.embedding(token_ids)
        return x if scale == 1 else x * scale

    def absorb(self, features: Tensor, view: View) -> None:
        self.model.absorb(features, view)

    def follow(self, hidden: Tensor, next_ids: Tensor, num_kept: Tensor, view: CacheView, rows: Rows) -> None:
        """Do nothing: the features say what the drafter needs."""

    def weighs_pairs(self, num_drafts: int, num_rows: int = 1) -> bool:
        """Say if each draft's choice depends on the token before it, for this many drafts and rows."""
        return False

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """Return hints for drafts behind the tokens `before` [R, D], or None; hidden [R, columns, E]."""
        return None

    def hinted(self, logits: Tensor, hints: Tensor) -> Tensor:
        """Return the logits [..., V] with the hints added: drafts are chosen by these."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, hints: Tensor | None = None) -> Tensor:
        """Return logits [..., V] over the target's vocabulary, NEVER for tokens that the head lacks."""
        config = self.model.config
        logits = self.head_logits(hidden)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        logits = self.spread(softcap(logits, config.logit_softcap), NEVER)
        return logits if hints is None else self.hinted(logits, hints)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits [..., rows of the head], neither scaled nor capped."""
        head = self.target.head_logits if self.model.head is None else self.model.head
        return head(hidden)

    def spread(self, values: Tensor, missing: float) -> Tensor:
        """Return `values` of the head's rows as values [..., V] of the target's tokens."""
        if self.vocab_map is None:
            return values
        full = values.new_full((*values.shape[:-1], self.model.config.vocab_size), missing)
        full[..., self.vocab_map] = values
        return full
