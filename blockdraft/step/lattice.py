"""LatticeDrafter: LiLiCorr scores all candidates of a block at once; drafts are walked from the anchor on."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.kernels.sampling import NEVER
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash
from blockdraft.models.lattice import Lattice
from blockdraft.step.dflash import DFlashDrafter


class LatticeDrafter(DFlashDrafter):
    """Drafts with a model that has LiLiCorr's head, by its scores alone."""

    drafts_alone = False  # all columns are scored together

    def __init__(
        self, model: DFlash, target: Decoder, vocab_map: Tensor | None = None, *, draft_ngram: int = 0
    ) -> None:
        super().__init__(model, target, vocab_map, draft_ngram=draft_ngram)
        self.is_causal = False  # candidates attend to those of later columns

    @property
    def lattice(self) -> Lattice:
        assert self.model.lilicorr is not None
        return self.model.lilicorr

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows, num_drafts: int) -> Tensor:
        ids, scores = self.scored(hidden)
        place, drafts, sampling = torch.zeros_like(anchor), [anchor], rows.sampling()
        line = scores.new_empty(len(ids), 1, self.model.config.vocab_size)
        for draft in range(num_drafts):
            found = ids[:, draft : draft + 1]
            after = scores[:, draft].gather(1, place[..., None].expand_as(found))
            line.fill_(NEVER).scatter_(-1, found, after)
            drafts.append(rows.kernels.choose(line, starts + draft, drafts[-1], sampling))
            place = _place(found[:, 0], drafts[-1])
        return torch.cat(drafts[1:], dim=1)

    def scored(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return candidates [R, D, K] of a block's columns, and their scores [R, D, K before, K]."""
        columns = self.drafting(hidden)
        logits = self.head_logits(columns.flatten(0, 1)).view(*columns.shape[:2], -1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found = logits.topk(self.lattice.head.top_k, dim=-1)
        likelihood = found.values - logits.logsumexp(dim=-1, keepdim=True)
        return found.indices, self.score(hidden, found.indices, likelihood).to(logits.dtype)

    def score(self, hidden: Tensor, ids: Tensor, likelihood: Tensor) -> Tensor:
        """Return scores [R, D, K before, K] of candidates `ids` [R, D, K] with these log-probabilities."""
        embedded = self.target.embedding(ids).to(hidden.dtype)
        return self.lattice.scores(embedded, likelihood, self.drafting(hidden), hidden[:, 0])

    def weighs_pairs(self, num_drafts: int, num_rows: int = 1) -> bool:
        return True

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return [R, D, 2 * K]: candidates as numbers, and their scores behind the tokens `before` [R, D]."""
        ids, scores = (one[:, : before.shape[1]] for one in self.scored(hidden))
        places = _place(torch.cat((ids[:, :1], ids[:, :-1]), dim=1), before[..., None])  # [R, D, 1]
        after = scores.gather(2, places[..., None].expand_as(ids[:, :, None]))[:, :, 0]
        return torch.cat((ids.to(scores.dtype), after), dim=-1)

    def hinted(self, logits: Tensor, hints: Tensor) -> Tensor:
        ids, scores = hints.chunk(2, dim=-1)
        return torch.full_like(logits, NEVER, dtype=hints.dtype).scatter(-1, ids.long(), scores)


def _place(ids: Tensor, tokens: Tensor) -> Tensor:
    """Return where `tokens` [..., 1] are among ids [..., K]; 0 if they are not."""
    return (ids == tokens).int().argmax(dim=-1, keepdim=True)
