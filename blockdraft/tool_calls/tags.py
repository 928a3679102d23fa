"""Finds tags in text that comes in pieces: a possible beginning of a tag waits for the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Found(NamedTuple):
    """Text is certain up to `end`. Behind it stands `tag`, or None: nothing yet."""

    end: int
    tag: str | None


class TagFinder:
    """Finds the first of some tags; of two that begin at one place, the longer."""

    def __init__(self, tags: Iterable[str]) -> None:
        longest_first = sorted(set(tags), key=len, reverse=True)
        self.tags = frozenset(longest_first)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {tag[:size] for tag in longest_first for size in range(1, len(tag))}
        self._longest = max(map(len, longest_first), default=0)

    def find(self, text: str, start: int, is_over: bool) -> Found:
        """Find the first tag from `start` on. When the text is over, nothing waits for more of it."""
        match = self._pattern.search(text, start)
        waiting = len(text) if is_over else self._first_beginning(text, start)
        if match is None or (waiting < len(text) and waiting <= match.start()):
            return Found(waiting, None)
        return Found(match.start(), match.group())

    def _first_beginning(self, text: str, start: int) -> int:
        """Return the place where a tag may begin at the end of the text, or the text's length."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at:] in self._beginnings:
                return at
        return len(text)


class TagFilter:
    """Leaves tags out of a text that comes in pieces."""

    def __init__(self, finder: TagFinder) -> None:
        self._finder = finder
        self._held = ""

    def push(self, text: str, is_last: bool) -> str:
        text, at = self._held + text, 0
        kept = []
        while True:
            end, tag = self._finder.find(text, at, is_last)
            kept.append(text[at:end])
            if tag is None:
                self._held = text[end:]
                return "".join(kept)
            at = end + len(tag)
