"""Texts to measure compressed keys and values with: the one that ships here, and what others bring."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from blockdraft.check.kv_needles import Encode
from blockdraft.errors import SettingsError
from blockdraft.kernels.kv_positions import PositionRule

BUILT_IN = Path(__file__).with_name("kv_text.txt")  # written for this purpose, prose and code
BEGIN = 512  # tokens count from this depth on; from half of a text that is shorter than twice that


def least_length() -> int:
    """Tokens of a text some of whose queries read something compressed."""
    rule = PositionRule()
    return rule.sinks + rule.window + 2 * rule.stride


def begin_of(length: int) -> int:
    """The first token of a text that counts. SettingsError: texts of that length have nothing compressed."""
    if length < least_length():
        raise SettingsError(
            f"In texts of {length} tokens nothing is compressed long enough to be read: use --length "
            f"{least_length()} or more."
        )
    return min(BEGIN, length // 2)


def built_in(encode: Encode, length: int) -> Iterator[list[int]]:
    """Without end: the text's paragraphs in another order each time, again where it is too short."""
    paragraphs = BUILT_IN.read_text(encoding="utf-8").split("\n\n")
    choice = random.Random("kv")
    if not encode(paragraphs[0]):
        raise SettingsError("This model's tokenizer knows no English text: give texts of your own (--texts).")
    while True:
        ids = list[int]()
        while len(ids) < length:
            ids += encode("\n\n".join(choice.sample(paragraphs, len(paragraphs))) + "\n\n")
        yield ids[:length]


def long_enough(texts: Iterable[Sequence[int]], length: int, source: str) -> list[list[int]]:
    """Those of at least `length` tokens, cut there. SettingsError: there is none."""
    longest, found = 0, []
    for ids in texts:
        longest = max(longest, len(ids))
        if len(ids) >= length:
            found.append(list(ids[:length]))
    if not found:
        raise SettingsError(
            f"No text of {source} has {length} tokens; the longest has {longest}: use a lower --length, or "
            "longer texts."
        )
    return found
