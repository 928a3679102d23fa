"""SparkDrafter: a block's columns are computed at once, its drafts are chosen one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.kernels.walk import Candidates, Transition
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash
from blockdraft.models.spark import MarkovHead
from blockdraft.step.dflash import DFlashDrafter, add_hints

# Of a draft, by the head alone: the token before it chooses among these. Arbitrary; vLLM's examples have 16.
NUM_CANDIDATES = 32


class SparkDrafter(DFlashDrafter):
    """Drafts with a model that has a Markov head (models/spark.py)."""

    def __init__(
        self, model: DFlash, target: Decoder, vocab_map: Tensor | None = None, *, draft_ngram: int = 0
    ) -> None:
        super().__init__(model, target, vocab_map, draft_ngram=draft_ngram)
        self.num_candidates = min(NUM_CANDIDATES, model.config.draft_vocab_size)

    @property
    def markov(self) -> MarkovHead:
        assert self.model.markov is not None
        return self.model.markov

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows) -> Tensor:
        logits = self.head_logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        scores, places = logits.topk(self.num_candidates, dim=-1)
        found = Candidates(scores, places if self.vocab_map is None else self.vocab_map[places])
        markov = self.markov
        if markov.kind != "vanilla":
            return self._step_by_step(hidden, found, places, anchor, starts, rows)
        transition = Transition(markov.before.weight, markov.after.weight, places)
        return rows.kernels.walk(found, anchor, starts, rows.sampling(), transition)

    def _step_by_step(
        self, hidden: Tensor, found: Candidates, places: Tensor, path: Tensor, starts: Tensor, rows: Rows
    ) -> Tensor:
        """The same walk where a latent is more than a row of a table."""
        markov, state = self.markov, self.markov.begin(len(path))
        wide = torch.promote_types(found.scores.dtype, torch.float32)
        for draft in range(hidden.shape[1]):
            latent, state = markov.step(hidden[:, draft], path[:, -1], state)
            after = markov.after.weight[places[:, draft]].to(wide)  # [R, K, rank]
            scores = found.scores[:, draft].to(wide) + (after * latent[:, None].to(wide)).sum(dim=2)
            one = Candidates(scores[:, None], found.token_ids[:, draft, None])
            path = torch.cat((path, rows.kernels.walk(one, path, starts, rows.sampling(), None)), dim=1)
        return path[:, 1:]

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.markov.latents(hidden, before)

    def hinted(self, logits: Tensor, hints: Tensor) -> Tensor:
        return add_hints(logits, hints, self.markov.after.weight, self.num_candidates)
