"""A checkpoint: a configuration, named tensors and a tokenizer, whatever the files look like.

Three layouts answer to one protocol: a Hugging Face folder, a hub id (resolved to such a folder), and
a GGUF file. Names, shapes and configuration keys are Hugging Face's in all of them, so that nothing
past this file knows where a model came from. Nothing is ever unpickled or executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import tokenizers
import torch


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a checkpoint says about its text side."""

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]          # every id that ends a turn (generation_config and config together)


class Checkpoint(Protocol):
    """Read access to one model's files."""

    name: str                          # as the user wrote it, for messages
    config: Mapping[str, object]       # config.json, or its equivalent built from GGUF metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str) -> torch.Tensor: ...          # CPU, in the stored (or dequantised) dtype
    def tokenizer_parts(self) -> TokenizerParts: ...
