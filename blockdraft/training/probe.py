"""Simulates a drafter on a few documents under several configurations.

The target's features do not depend on the drafter, so they are read once, of every layer that a configuration
taps. A trial then walks all documents side by side, as the engine would: one block per document and round,
and of its drafts only those up to the first that is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
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
from blockdraft.training.view import Kept, Seen, TrainView, dense_mask, sees


class AcceptanceProbe:
    """Documents that the target wrote greedily, with its features of the layers `taps`."""

    def __init__(self, drafter: DFlashDrafter, documents: Sequence[Document], taps: Iterable[int]) -> None:
        self._drafter, self._documents = drafter, documents
        self._taps = tuple(sorted(set(taps)))
        length = max(len(one.prompt_ids) + len(one.answer_ids) for one in documents)
        self._rows = pack(documents, length, is_shared=False)[0].to(drafter.target.norm.weight.device)
        self._features = self._read()

    @torch.inference_mode()
    def walk(self, config: DraftConfig, width: int) -> DrafterFit:
        """Return what the drafter commits in steps of `width` with `config` instead of its own."""
        trial = _Trial(self._drafter, config)
        kept = trial.keep(self._features[:, :, [self._taps.index(tap) for tap in config.taps]])
        anchors = [len(one.prompt_ids) - 1 for one in self._documents]
        lasts = [len(one.prompt_ids) + len(one.answer_ids) - 1 for one in self._documents]
        steps: list[list[int]] = [[] for _ in self._documents]
        while rows := [row for row, last in enumerate(lasts) if anchors[row] < last]:
            places = torch.tensor([[anchors[row]] for row in rows], device=self._features.device)
            batch = with_anchors(self._rows, rows, places, trial.num_labels(width) + 1)
            runs = trial.runs(batch, _of_rows(kept, rows, len(lasts)), width)
            for row, run in zip(rows, runs, strict=True):
                committed = min(run + 1, lasts[row] - anchors[row])
                steps[row].append(committed)
                anchors[row] += committed
        return fit_of_steps(steps, config.block)

    def _read(self) -> Tensor:
        """Read the features [R, L, taps, E], row by row to save memory."""
        target, rows = self._drafter.target, self._rows
        reader = FeatureReader(target, num_rows=1, length=rows.tokens.shape[1])
        own, target.taps = target.taps, self._taps
        try:
            read = [reader.read(rows, [row])[1] for row in range(len(rows))]
        finally:
            target.taps = own
        return torch.stack(read).view(*rows.tokens.shape, len(self._taps), -1)


def _of_rows(kept: Kept, rows: Sequence[int], num_rows: int) -> Kept:
    """Return the context of some rows; streams are [R * L, H, D]."""
    split = {layer: [x.view(num_rows, -1, *x.shape[1:]) for x in pair] for layer, pair in kept.items()}
    return {layer: (k[rows].flatten(0, 1), v[rows].flatten(0, 1)) for layer, (k, v) in split.items()}


class _Trial:
    """A drafter as it serves, its weights shared, under another configuration."""

    def __init__(self, drafter: DFlashDrafter, config: DraftConfig) -> None:
        model: DFlash = copy.copy(drafter.model)
        model.config = config
        ngram = drafter.draft_ngram
        self.drafter = type(drafter)(model, drafter.target, drafter.vocab_map, draft_ngram=ngram)
        self.config = config
        layers = [one for one in model.layers if isinstance(one, DFlashLayer)]
        causal = zip(layers, config.is_causal, strict=True)
        self._masks = {one.layer: replace(one.mask, is_causal=is_causal) for one, is_causal in causal}

    def num_labels(self, width: int) -> int:
        """Return the number of labels whose forward has as many columns as when serving."""
        return self.drafter.columns_for(width) - self.config.first_column

    def keep(self, features: Tensor) -> Kept:
        """Return keys and values of the context from features [R, L, taps, E]."""
        kept: Kept = {}
        num_rows, length = features.shape[:2]
        positions = torch.arange(length, device=features.device).repeat(num_rows)
        view = TrainView(positions, kept, num_rows=num_rows, masks={})
        self.drafter.absorb(features.flatten(2).flatten(0, 1), view)
        return kept

    def runs(self, batch: TrainingBatch, kept: Kept, width: int) -> list[int]:
        """Return how many of the width - 1 drafts match after the anchor of each row of `batch`."""
        drafter, batch = self.drafter, replace(batch, first_column=self.config.first_column)
        kinds = {kind: dense_mask(batch, sees(batch, kind)) for kind in set(self._masks.values())}
        masks: dict[int, Seen] = {layer: kinds[kind] for layer, kind in self._masks.items()}
        view = TrainView(batch.block_positions(), kept, num_rows=len(batch.tokens), masks=masks)
        ids = batch.block_ids(self.config.mask_token_id)
        hidden = drafter.model(drafter.embed(ids.flatten()), view, batch.num_columns)
        hidden = hidden.view(len(batch.tokens), batch.num_columns, -1)[:, batch.first_column :]
        # Only rows whose drafts were right are asked, so the tokens before are the true ones.
        hints = drafter.hints(hidden, batch.tokens_before()) if drafter.weighs_pairs(width - 1) else None
        recalled = self._recalled(batch, width)
        runs = [0] * len(hidden)
        rows = torch.arange(len(hidden), device=hidden.device)  # those whose drafts were all right so far
        for draft in range(width - 1):
            said = None if hints is None else hints[rows, draft]
            best = drafter.logits(hidden[rows, draft], said).argmax(dim=-1)
            best = torch.where(recalled[rows, draft] < 0, best, recalled[rows, draft])
            rows = rows[best == batch.labels[rows, 0, draft]]
            for row in rows.tolist():
                runs[row] = draft + 1
            if not len(rows):
                break
        return runs

    def _recalled(self, batch: TrainingBatch, width: int) -> Tensor:
        """Return the drafts of n-grams [R, width - 1], or -1; each row has one document."""
        starts = batch.anchors[:, 0]
        block = torch.full((len(starts), width), -1, device=starts.device)
        if self.drafter.draft_ngram:
            rows = torch.arange(len(starts), device=starts.device)
            reference_lookup(block, batch.tokens, rows, starts, self.drafter.draft_ngram)
        return block[:, 1:]
