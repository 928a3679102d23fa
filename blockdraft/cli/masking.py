"""Hide keys in the words of a command line before they are printed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

HIDDEN = "***"
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_NOT_SECRET = ("TOKENS", "TOKENIZER")  # --max-num-batched-tokens


def is_secret(name: str) -> bool:
    """Return whether the value of a flag or variable of this name may be a key."""
    text = name.upper()
    for harmless in _NOT_SECRET:
        text = text.replace(harmless, "")
    return any(word in text for word in _SECRET)


def masked(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words with keys hidden: in `--api-key KEY`, `--api-key=KEY` and inside --engine-args=."""
    return tuple(_masked(word, before) for word, before in zip(words, ("", *words), strict=False))


def _masked(word: str, before: str) -> str:
    flag, equals, value = word.partition("=")
    if flag == "--engine-args" and equals:
        return f"{flag}={shlex.join(masked(shlex.split(value)))}"
    if flag == "--engine-env" and equals:
        name, _, _ = value.partition("=")
        return f"{flag}={name}={HIDDEN}" if is_secret(name) else word
    if flag.startswith("-") and equals and is_secret(flag):
        return f"{flag}={HIDDEN}"
    return HIDDEN if before.startswith("-") and "=" not in before and _takes_secret(before, word) else word


def _takes_secret(flag: str, word: str) -> bool:
    # A file name is no secret, and a flag is not the value of the flag before it.
    return is_secret(flag) and not flag.endswith("-file") and not word.startswith("--")
