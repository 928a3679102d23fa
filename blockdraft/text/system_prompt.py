"""Finds the system prompt that a chat template inserts by itself, by rendering with one and without."""

from __future__ import annotations

from blockdraft.errors import ModelError, RequestError
from blockdraft.text.tokenizer import Tokenizer

_SYSTEM, _USER = "\ue000system\ue000", "\ue000user\ue000"  # of the private use area: in no template


def inserted_system_prompt(tokenizer: Tokenizer) -> str:
    """The text in the place of a conversation's own system prompt; empty if none is found."""
    question = {"role": "user", "content": _USER}
    try:
        plain = tokenizer.render([question])
        ordered = tokenizer.render([{"role": "system", "content": _SYSTEM}, question])
    except (RequestError, ModelError):  # no template, or one that knows no system prompt
        return ""
    before, found, after = ordered.partition(_SYSTEM)
    if not found or len(plain) < len(before) + len(after):
        return ""
    is_framed_alike = plain.startswith(before) and plain.endswith(after)
    return plain[len(before) : len(plain) - len(after)].strip() if is_framed_alike else ""
