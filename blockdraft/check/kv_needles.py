"""Needles: made-up facts hidden in a long text, and whether a model still finds them at its end.

A text has several, "The code of Alden is 48213." each, at even depths. All are asked for at the end, in
another order, and a needle is found if every token of its answer is the likeliest one after the right ones
before it: what greedy decoding would write. When they are asked for all of them are compressed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.errors import SettingsError
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.kv_positions import PositionRule

NAMES = (
    *("Alden", "Bertha", "Cyrus", "Dora", "Edmund", "Flora", "Gideon", "Harriet", "Isaac", "Judith"),
    *("Kenneth", "Lydia", "Martin", "Nora", "Oscar", "Pauline", "Quentin", "Rosa", "Silas", "Thelma"),
)
DIGITS = 4
PER_TEXT = 10
AGAIN = "\n\nAs written above, these are the codes:\n"

Encode = Callable[[str], Sequence[int]]
Likeliest = Callable[[Sequence[int]], Tensor]  # of a text, the likeliest token after each of its tokens


@dataclass(frozen=True, slots=True)
class NeedleText:
    """Tokens, and where in them the answers stand, [begin, end) each."""

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


def hide(filler: Sequence[int], encode: Encode, *, length: int, count: int, seed: int) -> NeedleText:
    """A text of at most `length` tokens: `filler`, as often as it takes, with needles in it."""
    choice = random.Random(seed)
    names = choice.sample(NAMES, count)
    numbers = [str(choice.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in names]
    facts = [
        (list(encode(f"\nThe code of {name} is")), list(encode(f" {number}")))
        for name, number in zip(names, numbers, strict=True)
    ]
    stop, again = list(encode(".\n")), list(encode(AGAIN))
    used = 2 * sum(len(asked) + len(answer) + len(stop) for asked, answer in facts) + len(again)
    last = PositionRule().window + TILE  # between the last needle and the questions: more than is exact
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
    """Of each answer, whether the model writes it."""
    written, wanted = likeliest(text.tokens), torch.tensor(text.tokens)
    return [torch.equal(written[a - 1 : b - 1].cpu(), wanted[a:b]) for a, b in text.answers]
