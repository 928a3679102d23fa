"""Writes readable notes of any length, which are put before prompts as context.

Sentences are patterns with gaps, filled from word lists, so that neither a drafter nor a cache profits from
repeated text. Equal seeds give equal notes, and a longer text begins with the shorter one.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

_NOTES = tomllib.loads((Path(__file__).parent / "prompts" / "notes.toml").read_text(encoding="utf-8"))
_PATTERNS: list[str] = _NOTES["patterns"]
_WORDS = {name: " ".join(words.split()).split("; ") for name, words in _NOTES["words"].items()}
_MAX_NUMBER = 240
_MAX_SMALL = 9


def filler(num_words: int, *, seed: str) -> str:
    """Return exactly `num_words` words of notes, in paragraphs."""
    words = 0
    kept: list[str] = []
    for paragraph in _paragraphs(random.Random(f"filler/{seed}")):
        parts = paragraph.split()
        if words + len(parts) >= num_words:
            kept.append(" ".join(parts[: num_words - words]))
            return "\n\n".join(kept)
        kept.append(paragraph)
        words += len(parts)
    raise AssertionError("the notes do not end")


def _paragraphs(draw: random.Random) -> Iterator[str]:
    number = draw.randint(100, 900)
    while True:
        number += draw.randint(1, 7)
        sentences = draw.sample(_PATTERNS, draw.randint(3, 7))
        title = f"Note {number}, {draw.randint(1, 28)} {draw.choice(_WORDS['month'])}."
        yield " ".join([title, *(_filled(sentence, draw) for sentence in sentences)])


def _filled(pattern: str, draw: random.Random) -> str:
    """Return a pattern with its gaps filled; no listed word is used twice."""
    used: set[str] = set()
    pieces: list[str] = []
    for piece in pattern.replace("}", "{").split("{"):
        is_gap = len(pieces) % 2 == 1
        pieces.append(_word(piece, draw, used) if is_gap else piece)
    text = "".join(pieces)
    return text[0].upper() + text[1:]


def _word(gap: str, draw: random.Random, used: set[str]) -> str:
    match gap:
        case "number":
            return str(draw.randint(2, _MAX_NUMBER))
        case "small":
            return str(draw.randint(2, _MAX_SMALL))
        case "hour":
            return f"{draw.randint(1, 12)}:{draw.randint(0, 59):02}"
        case "side":
            return draw.choice(("north", "south", "east", "west"))
        case "daypart":
            return draw.choice(("morning", "afternoon", "evening"))
    choices = [word for word in _WORDS[gap] if word not in used]
    word = draw.choice(choices)
    used.add(word)
    return word
