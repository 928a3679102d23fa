"""Writes a trained drafter into a folder in z-lab's layout, which this engine, vLLM and SGLang load.

config.json          DFlashDraftModel, or DFlash2DraftModel
model.safetensors    bfloat16 weights; embedding and head are missing, as the target's are used
fit.json             tokens committed per step and acceptance by position, for each category
README.md            the model card: data, recipe, numbers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from blockdraft.checkpoints.fit_file import FIT_FILE
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.checkpoints.weights import slots_of
from blockdraft.models.dflash import DFlash
from blockdraft.models.draft_config import KIND_NAMES
from blockdraft.training.evaluate import DrafterFit


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """Facts for a model card, in addition to the measured numbers."""

    target: str
    command: str
    data: str
    recipe: Mapping[str, object]


def named_weights(model: DFlash, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters by their checkpoint names; stacked parameters are split."""
    return {
        piece.tensor: slot.parameter.detach()[piece.begin : piece.begin + piece.shape[0]]
        .to("cpu", dtype)
        .contiguous()
        for slot in slots_of(model, {})
        for piece in slot.pieces
    }


def export(
    folder: Path,
    model: DFlash,
    config: Mapping[str, object],
    fits: Mapping[str, DrafterFit],
    card: DrafterCard,
) -> None:
    """Write or replace the drafter in `folder`. Without `fits` (not yet evaluated), write no fit.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = named_weights(model, torch.bfloat16)
    # `save_file` is unsuitable: only the owner can read its files, and a full disk raises no OSError.
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / FIT_FILE).unlink(missing_ok=True)
    if fits:
        (folder / FIT_FILE).write_text(json.dumps(fit_json(fits), indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card_text(weights, config, fits, card), encoding="utf-8")


def fit_json(fits: Mapping[str, DrafterFit]) -> dict[str, object]:
    """Return the contents of fit.json: tokens per step on greedy answers, for each category and for "all"."""
    return {
        name: {
            "committed_per_step": round(fit.committed, 4),
            "accepted_by_position": [round(share, 4) for share in fit.by_position],
            "documents": fit.num_documents,
            "tokens": fit.num_tokens,
        }
        for name, fit in fits.items()
    }


def card_text(
    weights: Mapping[str, Tensor],
    config: Mapping[str, object],
    fits: Mapping[str, DrafterFit],
    card: DrafterCard,
) -> str:
    num_values = sum(weight.numel() for weight in weights.values())
    shape = read_draft_config(config, name=card.target)
    rows = [
        f"| {name} | {fit.num_documents} | **{fit.committed:.2f}** | "
        + " | ".join(f"{fit.by_position[place]:.0%}" for place in _shown(fit))
        + " |"
        for name, fit in fits.items()
    ]
    places = _shown(next(iter(fits.values()))) if fits else []
    head = " | ".join(f"draft {place + 1}" for place in places)
    return f"""---
library_name: blockdraft
tags: [dflash, speculative-decoding, block-diffusion]
---
# A {KIND_NAMES[shape.kind]} drafter for {card.target}

It proposes blocks of {shape.block} tokens (the anchor included) in one forward, from the target's
own hidden states; the target verifies them. It changes how fast the target answers, never what it says.

    blockdraft generate --model {card.target} --draft PATH_OF_THIS_FOLDER "…"

{num_values / 1e6:.1f} M parameters in bfloat16, {shape.num_layers} layers, taps
{list(shape.taps)} (0-based target layers), mask token {shape.mask_token_id},
{"causal" if all(shape.is_causal) else "bidirectional"} inside the block. Embedding and head are the
target's.

## What it commits
Tokens per step, the target's own included, on held-out prompts: greedy, width {shape.block}, and
the share of steps in which the draft at a position was accepted.

| prompts | documents | per step | {head} |
|---|---|---|{"---|" * len(places)}
{chr(10).join(rows)}

## How it was made
{card.data}


    {card.command}

| setting | value |
|---|---|
{chr(10).join(f"| {name} | {value} |" for name, value in card.recipe.items())}
"""


def _shown(fit: DrafterFit) -> list[int]:
    """Return the positions to show in the model card's table."""
    return [place for place in (0, 1, 2, 3, 5, 7, 11, 14) if place < len(fit.accepted)]
