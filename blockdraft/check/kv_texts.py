"""Makes texts for measuring compressed keys and values: the built-in text, users' texts, and needles.

Needles are made-up facts, "The code of Alden is 4821.", at even depths of a text. The end of the text
asks for all of them in another order; by then all are compressed. A needle is found if every token of its
answer is the likeliest token after the right tokens before it, as greedy decoding would write it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.errors import SettingsError
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.kv_positions import PositionRule

BUILT_IN = Path(__file__).with_name("kv_text.txt")  # prose and code, written for this purpose
BEGIN = 512  # the first counted depth; half the length in texts of less than twice this


def begin_of(length: int) -> int:
    """Return the first counted token. Raise SettingsError if the texts are too short to be compressed."""
    least = PositionRule().window + 3 * TILE
    if length < least:
        raise SettingsError(
            f"In texts of {length} tokens nothing is compressed long enough to be read: use --length {least} "
            "or more."
        )
    return min(BEGIN, length // 2)


def built_in(encode: Encode, length: int) -> Iterator[list[int]]:
    """Yield texts of `length` tokens without end: the built-in paragraphs, shuffled anew each time."""
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
    """Return the texts of at least `length` tokens, cut to that. Raise SettingsError if all are shorter."""
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


# ---- needles


NAMES = (
    *("Alden", "Bertha", "Cyrus", "Dora", "Edmund", "Flora", "Gideon", "Harriet", "Isaac", "Judith"),
    *("Kenneth", "Lydia", "Martin", "Nora", "Oscar", "Pauline", "Quentin", "Rosa", "Silas", "Thelma"),
)
DIGITS = 4
PER_TEXT = 10
AGAIN = "\n\nAs written above, these are the codes:\n"

Encode = Callable[[str], Sequence[int]]
Likeliest = Callable[[Sequence[int]], Tensor]  # maps a text to the likeliest token after each token


@dataclass(frozen=True, slots=True)
class NeedleText:
    """The tokens of a text, and the place [begin, end) of each answer."""

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


def hide(filler: Sequence[int], encode: Encode, *, length: int, count: int, seed: int) -> NeedleText:
    """Return a text of at most `length` tokens: repeated `filler` with `count` needles."""
    choice = random.Random(seed)
    names = choice.sample(NAMES, count)
    numbers = [str(choice.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in names]
    facts = [
        (list(encode(f"\nThe code of {name} is")), list(encode(f" {number}")))
        for name, number in zip(names, numbers, strict=True)
    ]
    stop, again = list(encode(".\n")), list(encode(AGAIN))
    used = 2 * sum(len(asked) + len(answer) + len(stop) for asked, answer in facts) + len(again)
    last = PositionRule().window + TILE  # between the last needle and the questions: more than stays exact
    piece = (length - used - last) // count
    if piece < TILE:
        least = used + last + count * TILE
        raise SettingsError(
            f"{count} needles need a text of {least} tokens, not {length}: use --length {least}."
        )
    place, tokens = choice.randrange(len(filler)), list[int]()
    for asked, answer in facts:
        tokens += [filler[(place + i) % len(filler)] for i in range(piece)] + asked + answer + stop
        place += piece
    tokens += [filler[(place + i) % len(filler)] for i in range(last)] + again
    answers = []
    for asked, answer in choice.sample(facts, count):
        tokens += asked
        answers.append((len(tokens), len(tokens) + len(answer)))
        tokens += answer + stop
    return NeedleText(tuple(tokens), tuple(answers))


def found(text: NeedleText, likeliest: Likeliest) -> list[bool]:
    """Return, for each answer, whether the model writes it."""
    written, wanted = likeliest(text.tokens), torch.tensor(text.tokens)
    return [torch.equal(written[a - 1 : b - 1].cpu(), wanted[a:b]) for a, b in text.answers]
