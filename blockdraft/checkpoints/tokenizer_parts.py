"""TokenizerParts: what a checkpoint says about its text side."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer, and what goes with it."""

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]  # every id that ends a turn (generation_config and config together)
