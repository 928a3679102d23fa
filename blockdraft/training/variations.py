"""Lists likely mistakes in a drafter's config.json.

A wrong value raises no error: the drafter runs and commits fewer tokens. So each suspicious key is changed in
turn, and the drafter is simulated on greedy answers of the target (training/probe.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from blockdraft.checkpoints.read_draft_config import default_taps
from blockdraft.models.config import ModelConfig
from blockdraft.models.draft_config import DraftConfig
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.training.answers import Document

MAX_MASKS = 4  # mask tokens tried


@dataclass(frozen=True, slots=True)
class Variation:
    """A drafter's configuration with one key of config.json changed."""

    name: str
    what: str
    config: DraftConfig
    key: str  # of config.json
    value: object  # None: the key is removed

    @property
    def advice(self) -> str:
        if self.value is None:
            return f'remove "{self.key}" from config.json'
        return f'set "{self.key}" to {json.dumps(self.value)} in config.json'


def variations(
    config: DraftConfig, target: ModelConfig, tokenizer: Tokenizer, documents: Sequence[Document]
) -> Iterator[Variation]:
    """Yield the changes to try, for the most frequent mistakes first."""
    yield from _taps(config, target)
    yield from _causality(config)
    yield from _masks(config, tokenizer, documents)
    yield from _scales(config, target)


def _taps(config: DraftConfig, target: ModelConfig) -> Iterator[Variation]:
    """Yield other lists of taps, such as shifted by one: some files count from the embedding or from 1."""
    key = "aux_hidden_state_layer_ids" if _is_speculators(config) else "dflash_config.target_layer_ids"
    names = {tuple(tap + offset for tap in config.taps): f"tap offset {offset:+}" for offset in (1, -1)} | {
        default_taps(target.num_layers, len(config.taps)): "taps at z-lab's default layers"
    }
    names.pop(config.taps, None)
    for taps, name in names.items():
        if min(taps) >= 0 and max(taps) < target.num_layers and len(set(taps)) == len(taps):
            stored = [tap + _is_speculators(config) for tap in taps]
            others, own = (", ".join(map(str, one)) for one in (taps, config.taps))
            what = f"reads layers {others}, not {own}"
            yield Variation(name, what, replace(config, taps=taps), key, stored)


def _causality(config: DraftConfig) -> Iterator[Variation]:
    windowed = tuple(window is not None for window in config.windows)
    flags: dict[tuple[bool, ...], tuple[str, object]]
    if _is_speculators(config):  # full-attention layers are never causal in this layout
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
    """Return possible mask tokens, likely ones first.

    These are tokens named mask, ids past the tokenizer's, and unused special tokens.
    """
    used = {token for one in documents for token in (*one.prompt_ids, *one.answer_ids)}
    special = sorted(tokenizer.special_ids, reverse=True)
    named = [one for one in special if "mask" in tokenizer.decode([one], skip_special_tokens=False).lower()]
    unused = [one for one in special if one not in used]
    past = [one for one in (tokenizer.vocab_size, config.vocab_size - 1) if one >= tokenizer.vocab_size]
    never = {config.mask_token_id, *tokenizer.eos_ids}
    found = dict.fromkeys((*named, *past, *unused))
    return [one for one in found if one < config.vocab_size and one not in never]


def _scales(config: DraftConfig, target: ModelConfig) -> Iterator[Variation]:
    """Yield other embedding scales: the target's, 1, and the square root of the hidden size."""
    key = "input_embedding_scale" if _is_speculators(config) else "dflash_config.input_embedding_scale"
    own = target.embedding_scale if config.embedding_scale is None else config.embedding_scale
    for scale in dict.fromkeys((target.embedding_scale, 1.0, math.sqrt(target.hidden_size))):
        if math.isclose(scale, own, rel_tol=0.01):
            continue
        may_be_left_out = config.kind == "dflash" and not (config.copies_head or _is_speculators(config))
        value = None if scale == target.embedding_scale and may_be_left_out else scale
        what = f"scales embeddings by {scale:g}, not {own:g}"
        yield Variation("embedding scale", what, replace(config, embedding_scale=scale), key, value)


def _is_speculators(config: DraftConfig) -> bool:
    return config.has_anchored_window  # only this layout has such windows
