"""What a drafter's config.json may say wrongly, and how the drafter would fare if it said something else.

A wrong key is no error: the drafter runs and commits less. So each suspect is changed in turn, and the
drafter is tried on documents that the target wrote greedily, without the engine (training/evaluate.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.engine.tokenizer import Tokenizer
from blockdraft.models.config import ModelConfig
from blockdraft.models.dflash import DFlash, DFlashLayer
from blockdraft.models.draft_config import DraftConfig, default_taps
from blockdraft.training.answers import Document
from blockdraft.training.evaluate import Fit, simulate
from blockdraft.training.objective import Head
from blockdraft.training.packing import Batch
from blockdraft.training.trainer import BlockForward, block_hidden
from blockdraft.training.view import Seen, dense_mask, sees

NUM_ANCHORS = 32  # tried at a time; masks grow with the square, logits with the number
MAX_MASKS = 4  # mask tokens tried


@dataclass(frozen=True, slots=True)
class Variation:
    """One key of config.json with another value."""

    name: str
    what: str
    config: DraftConfig
    key: str  # of config.json
    value: object  # None: without that key

    @property
    def advice(self) -> str:
        if self.value is None:
            return f'remove "{self.key}" from config.json'
        return f'set "{self.key}" to {_json(self.value)} in config.json'


def variations(
    config: DraftConfig, target: ModelConfig, tokenizer: Tokenizer, documents: Sequence[Document]
) -> Iterator[Variation]:
    """Everything to try, the most frequent mistake first."""
    yield from _taps(config, target)
    yield from _causality(config)
    yield from _masks(config, tokenizer, documents)
    yield from _scales(config, target)


def try_on(drafter: DFlashDrafter, config: DraftConfig, documents: Sequence[Document], width: int) -> Fit:
    """How `drafter` fares on `documents` with `config` instead of its own. The target's taps are put back."""
    target = drafter.target
    taps, target.taps = target.taps, config.taps
    try:
        return simulate(
            _Tried(drafter, config),
            documents,
            length=max(len(one.prompt_ids) + len(one.answer_ids) for one in documents),
            width=width,
            rows_per_step=1,
            num_anchors=NUM_ANCHORS,
        )["all"]
    finally:
        target.taps = taps


# ---- what to try


def _taps(config: DraftConfig, target: ModelConfig) -> Iterator[Variation]:
    """Lists that count from the embedding, or from 1, are off by one."""
    key = "aux_hidden_state_layer_ids" if _is_speculators(config) else "dflash_config.target_layer_ids"
    names = {tuple(tap + offset for tap in config.taps): f"tap offset {offset:+}" for offset in (1, -1)} | {
        default_taps(target.num_layers, len(config.taps)): "taps at z-lab's default layers"
    }
    names.pop(config.taps, None)
    for taps, name in names.items():
        if min(taps) >= 0 and max(taps) < target.num_layers and len(set(taps)) == len(taps):
            stored = [tap + _is_speculators(config) for tap in taps]
            what = f"reads layers {_listed(taps)}, not {_listed(config.taps)}"
            yield Variation(name, what, replace(config, taps=taps), key, stored)


def _causality(config: DraftConfig) -> Iterator[Variation]:
    windowed = tuple(window is not None for window in config.windows)
    flags: dict[tuple[bool, ...], tuple[str, object]]
    if _is_speculators(config):  # its full layers are never causal
        key = "sliding_window_non_causal"
        flags = {windowed: (key, False), (False,) * len(windowed): (key, True)}
    else:
        flags = {(flag,) * len(windowed): ("is_causal", flag) for flag in (False, True)}
        flags.setdefault(windowed, ("is_causal", None))
    flags.pop(config.is_causal, None)
    for causal, (key, value) in flags.items():
        where = "in all layers" if all(causal) else "in windowed layers" if any(causal) else "in no layer"
        yield Variation(
            "in-block causality", f"is causal {where}", replace(config, is_causal=causal), key, value
        )


def _masks(config: DraftConfig, tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[Variation]:
    key = "mask_token_id" if _is_speculators(config) else "dflash_config.mask_token_id"
    for token in _mask_ids(config, tokenizer, documents)[:MAX_MASKS]:
        name = tokenizer.decode([token], skip_special_tokens=False)
        shown = f"{token} ({name})" if name else str(token)
        what = f"masks with token {shown}, not {config.mask_token_id}"
        yield Variation("mask token", what, replace(config, mask_token_id=token), key, token)


def _mask_ids(config: DraftConfig, tokenizer: Tokenizer, documents: Sequence[Document]) -> list[int]:
    """Likely ones first: called a mask, the first row past the tokenizer's, unused special tokens."""
    used = {token for one in documents for token in (*one.prompt_ids, *one.answer_ids)}
    special = sorted(tokenizer.special_ids, reverse=True)
    named = [one for one in special if "mask" in tokenizer.decode([one], skip_special_tokens=False).lower()]
    unused = [one for one in special if one not in used]
    past = [one for one in (tokenizer.vocab_size, config.vocab_size - 1) if one >= tokenizer.vocab_size]
    never = {config.mask_token_id, *tokenizer.eos_ids}
    found = dict.fromkeys((*named, *past, *unused))
    return [one for one in found if one < config.vocab_size and one not in never]


def _scales(config: DraftConfig, target: ModelConfig) -> Iterator[Variation]:
    """Rows of the embedding as they are, as the target scales them, or by the root of their size."""
    key = "input_embedding_scale" if _is_speculators(config) else "dflash_config.input_embedding_scale"
    own = target.embedding_scale if config.embedding_scale is None else config.embedding_scale
    for scale in dict.fromkeys((target.embedding_scale, 1.0, math.sqrt(target.hidden_size))):
        if math.isclose(scale, own, rel_tol=0.01):
            continue
        value = None if scale == target.embedding_scale else scale
        what = f"scales embeddings by {scale:g}, not {own:g}"
        yield Variation("embedding scale", what, replace(config, embedding_scale=value), key, value)


def _is_speculators(config: DraftConfig) -> bool:
    return config.has_anchored_window  # only that layout has them


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- how to try it


@dataclass(frozen=True, slots=True)
class _ServedHead(Head):
    """The head that serves the drafter, packed or reduced; `weight` says only its dtype and device."""

    served: Callable[[Tensor], Tensor] = lambda hidden: hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.served(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)


class _ServedDrafter(DFlashDrafter):
    def head(self, dtype_of: Tensor) -> Head:
        return _ServedHead(dtype_of, served=self._logits)


class _Tried(BlockForward):
    """A drafter as it serves, its weights shared, under another configuration.

    Few blocks are tried, so masks are spelled out on a GPU too: nothing has to be compiled.
    """

    def __init__(self, drafter: DFlashDrafter, config: DraftConfig) -> None:
        model: DFlash = copy.copy(drafter.model)
        model.config = config
        super().__init__(model, drafter.target)
        self._served = _ServedDrafter(model, drafter.target, drafter.vocab_map)
        layers = [one for one in model.layers if isinstance(one, DFlashLayer)]
        self._masks = {
            one.layer: replace(one.mask, is_causal=is_causal)
            for one, is_causal in zip(layers, config.is_causal, strict=True)
        }

    def head(self) -> Head:
        return self._served.head(self.target.norm.weight)

    @torch.no_grad()
    def __call__(self, batch: Batch, features: Tensor) -> Tensor:
        ids = batch.block_ids(self.model.config.mask_token_id)
        x = self._served.embed(ids.flatten())
        kinds = {kind: dense_mask(batch, sees(batch, kind)) for kind in set(self._masks.values())}
        masks: dict[int, Seen] = {layer: kinds[kind] for layer, kind in self._masks.items()}
        positions = batch.positions.flatten(), batch.block_positions()
        hidden = block_hidden(self.model, features, x, *positions, len(batch.tokens), masks)
        return hidden.view(-1, batch.block, x.shape[1])[:, 1:]
