"""The tokenizer of a checkpoint, with the settings that belong to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import tokenizers

from blockdraft.errors import ModelError


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer with its chat template and special tokens."""

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]  # every id that ends a turn (generation_config and config together)


@contextlib.contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Raise ModelError if the `tokenizers` library refuses the file.

    It raises Exception itself, ValueError for a template's pieces, and for merges longer than any token a
    PanicException, which has no name that can be imported. All other classes are bugs of ours.
    """
    try:
        yield
    except BaseException as error:
        if type(error) not in (Exception, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what} ({error}). {remedy}") from error
