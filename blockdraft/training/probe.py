"""Simulates a drafter, without the engine, on documents that the target wrote.

The target's features do not depend on the drafter, so they are computed once, for all layers that trials tap.
A trial then steps through all documents in parallel, as the engine would: each round drafts one block per
document and accepts its drafts up to the first wrong one. In the engine, the exported drafter must commit the
same numbers of tokens.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.kernels.ngram_lookup import reference_lookup
from blockdraft.models.dflash import DFlash, DFlashLayer
from blockdraft.models.draft_config import DraftConfig
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.training.answers import Document
from blockdraft.training.evaluate import DrafterFit, fit_of_steps
from blockdraft.training.features import FeatureReader
from blockdraft.training.packing import TrainingBatch, pack, with_anchors
from blockdraft.training.trainer import half
from blockdraft.training.view import Kept, Seen, TrainView, dense_mask, sees

AT_ONCE = 64  # documents whose features are in memory at a time; arbitrary

# Returns drafts [n], given hidden states [n, E], the tokens before [n], the number of the draft, the blocks'
# positions [n], and the numbers of their documents [n].
Choice = Callable[[Tensor, Tensor, int, Tensor, Tensor], Tensor]


def simulate(
    drafter: DFlashDrafter,
    documents: Sequence[Document],
    *,
    length: int,
    choose: Choice | None = None,
    report: Callable[[float], None] = lambda share: None,
) -> dict[str, DrafterFit]:
    """Return the drafter's fit on `documents`, for each category and for "all".

    Documents are cut to `length` tokens. `choose` samples the drafts; None drafts greedily.
    """
    config = drafter.model.config
    steps: dict[str, list[list[int]]] = defaultdict(list)
    everything: list[list[int]] = []
    for first in range(0, len(documents), AT_ONCE):
        probe = AcceptanceProbe(drafter, documents[first : first + AT_ONCE], config.taps, length)
        for number, mine in zip(probe.numbers, probe.steps(config, config.block, choose, first), strict=True):
            steps[documents[first + number].category].append(mine)
            everything.append(mine)
        report(min(first + AT_ONCE, len(documents)) / len(documents))
    steps["all"] = everything  # documents of category "all" are among them
    return {name: fit_of_steps(listed, config.block) for name, listed in sorted(steps.items())}


class AcceptanceProbe:
    """Simulates drafters on documents, with the target's features of the layers `taps`."""

    def __init__(
        self,
        drafter: DFlashDrafter,
        documents: Sequence[Document],
        taps: Iterable[int],
        length: int | None = None,
    ) -> None:
        self._drafter = drafter
        self._taps = tuple(sorted(set(taps)))
        longest = max(len(one.prompt_ids) + len(one.answer_ids) for one in documents)
        rows, places = pack(documents, min(longest, length or longest), is_shared=False)
        self.numbers = [place.document for place in places]  # of the documents with an answer to draft
        self._first = [len(documents[number].prompt_ids) - 1 for number in self.numbers]
        self._last = [end - 1 for ((_, end),) in rows.spans]
        self._rows = rows.to(drafter.target.norm.weight.device)
        self._features = self._read()

    def walk(self, config: DraftConfig, width: int) -> DrafterFit:
        """Return the drafter's fit in steps of `width`, with `config` in place of its own configuration."""
        return fit_of_steps(self.steps(config, width), config.block)

    @torch.inference_mode()
    def steps(
        self, config: DraftConfig, width: int, choose: Choice | None = None, first: int = 0
    ) -> list[list[int]]:
        """Return the number of tokens that each step commits, by document.

        `first` is added to the document numbers that `choose` gets.
        """
        trial = _Trial(self._drafter, config, choose)
        kept = trial.keep(self._features[:, :, [self._taps.index(tap) for tap in config.taps]])
        anchors, device = self._first.copy(), self._features.device
        steps: list[list[int]] = [[] for _ in anchors]
        while rows := [row for row, last in enumerate(self._last) if anchors[row] < last]:
            places = torch.tensor([[anchors[row]] for row in rows], device=device)
            batch = with_anchors(self._rows, rows, places, trial.num_labels(width) + 1)
            numbers = torch.tensor([first + self.numbers[row] for row in rows], device=device)
            runs = trial.runs(batch, _of_rows(kept, rows, len(anchors)), width, numbers)
            for row, run in zip(rows, runs, strict=True):
                steps[row].append(min(run + 1, self._last[row] - anchors[row]))
                anchors[row] += steps[row][-1]
        return steps

    def _read(self) -> Tensor:
        """Compute the features [R, L, taps, E], row by row to save memory."""
        target, rows = self._drafter.target, self._rows
        reader = FeatureReader(target, num_rows=1, length=rows.tokens.shape[1])
        own, target.taps = target.taps, self._taps
        try:
            read = [reader.read(rows, [row])[1] for row in range(len(rows))]
        finally:
            target.taps = own
        return torch.stack(read).view(*rows.tokens.shape, len(self._taps), -1)


def _of_rows(kept: Kept, rows: Sequence[int], num_rows: int) -> Kept:
    """Return the keys and values of only `rows`; all tensors are [R * L, H, D]."""
    split = {layer: [x.view(num_rows, -1, *x.shape[1:]) for x in pair] for layer, pair in kept.items()}
    return {layer: (k[rows].flatten(0, 1), v[rows].flatten(0, 1)) for layer, (k, v) in split.items()}


class _Trial:
    """The drafter with another configuration and the same weights."""

    def __init__(self, drafter: DFlashDrafter, config: DraftConfig, choose: Choice | None) -> None:
        model: DFlash = copy.copy(drafter.model)
        model.config = config
        ngram = drafter.draft_ngram
        self.drafter = type(drafter)(model, drafter.target, drafter.vocab_map, draft_ngram=ngram)
        self.config, self._choose = config, choose
        layers = [one for one in model.layers if isinstance(one, DFlashLayer)]
        causal = zip(layers, config.is_causal, strict=True)
        self._masks = {one.layer: replace(one.mask, is_causal=is_causal) for one, is_causal in causal}

    def _products(self, x: Tensor) -> AbstractContextManager[object]:
        """Return a context manager in which float32 weights multiply in the dtype of `x`."""
        return nullcontext() if next(self.drafter.model.parameters()).dtype == x.dtype else half(x)

    def num_labels(self, width: int) -> int:
        """Return the number of labels per block that gives the forward as many columns as in the server."""
        return self.drafter.columns_for(width) - self.config.first_column

    def keep(self, features: Tensor) -> Kept:
        """Return the keys and values of the context, computed from features [R, L, taps, E]."""
        kept: Kept = {}
        num_rows, length = features.shape[:2]
        positions = torch.arange(length, device=features.device).repeat(num_rows)
        view = TrainView(positions, kept, num_rows=num_rows, masks={})
        with self._products(features):
            self.drafter.absorb(features.flatten(2).flatten(0, 1), view)
        return kept

    def runs(self, batch: TrainingBatch, kept: Kept, width: int, numbers: Tensor) -> list[int]:
        """Return, for each row, how many of its width - 1 drafts are right before the first wrong one."""
        drafter, batch = self.drafter, replace(batch, first_column=self.config.first_column)
        # There are few blocks at a time, so a GPU uses dense masks too: nothing has to be compiled.
        kinds = {kind: dense_mask(batch, sees(batch, kind)) for kind in set(self._masks.values())}
        masks: dict[int, Seen] = {layer: kinds[kind] for layer, kind in self._masks.items()}
        view = TrainView(batch.block_positions(), kept, num_rows=len(batch.tokens), masks=masks)
        x = drafter.embed(batch.block_ids(self.config.mask_token_id).flatten())
        # Use the true tokens before each draft: rows with a wrong draft are dropped below.
        before, hints = batch.tokens_before(), None
        with self._products(x):
            hidden = drafter.model(x, view, batch.num_columns).view(len(before), batch.num_columns, -1)
            if self._choose is None and drafter.weighs_pairs(width - 1):
                hints = drafter.hints(hidden, before)
            hidden = drafter.drafting(hidden)
        recalled, starts = self._recalled(batch, width), (batch.anchors - batch.block_starts)[:, 0]
        runs = [0] * len(hidden)
        rows = torch.arange(len(hidden), device=hidden.device)  # rows whose drafts are all right so far
        for draft in range(width - 1):
            column = hidden[rows, draft]
            if self._choose is None:
                best = drafter.logits(column, None if hints is None else hints[rows, draft]).argmax(dim=-1)
            else:
                best = self._choose(column, before[rows, draft], draft, starts[rows], numbers[rows])
            best = torch.where(recalled[rows, draft] < 0, best, recalled[rows, draft])
            rows = rows[best == batch.labels[rows, 0, draft]]
            for row in rows.tolist():
                runs[row] = draft + 1
            if not len(rows):
                break
        return runs

    def _recalled(self, batch: TrainingBatch, width: int) -> Tensor:
        """Return the n-gram drafts [R, width - 1], -1 where there is no match; each row has one document."""
        starts = batch.anchors[:, 0]
        block = torch.full((len(starts), width), -1, device=starts.device)
        if self.drafter.draft_ngram:
            rows = torch.arange(len(starts), device=starts.device)
            reference_lookup(block, batch.tokens, rows, starts, self.drafter.draft_ngram)
        return block[:, 1:]
