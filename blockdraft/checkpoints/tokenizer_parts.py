"""The tokenizer of a checkpoint, with the settings that belong to it."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer with its chat template and special tokens."""

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]  # every id that ends a turn (generation_config and config together)
