"""Hashes of prompts by page: the server knows from them which replica has most of a prompt in its cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from typing import TypeAlias

MAX_PROMPT_PAGES = 2048  # of one prompt; later pages decide nothing. Arbitrary
MAX_SEEN_PAGES = 65_536  # of one replica; about 100 bytes each. Arbitrary

# Of each page, the place of its parent here, or its salt, and its tokens; the latest used first.
PageTree: TypeAlias = Items[tuple[int | str | None, Items[int]]]


def page_hashes(prompt_ids: Items[int], page_size: int, salt: str | None = None) -> list[int]:
    """Return a hash for each full page of a prompt; each covers all tokens up to the page's end.

    The last token is left out: it is always computed, so the page that it ends cannot be a hit.
    """
    hashes, chained = [], hash(salt)
    end = min(len(prompt_ids) - 1, MAX_PROMPT_PAGES * page_size)
    for begin in range(0, end - page_size + 1, page_size):
        chained = hash((chained, *prompt_ids[begin : begin + page_size]))
        hashes.append(chained)
    return hashes


def tree_hashes(tree: PageTree, page_size: int) -> list[int]:
    """Return the hash that `page_hashes` gives to each page."""
    hashes: list[int] = []
    for parent, token_ids in tree:
        before = hashes[parent] if isinstance(parent, int) else hash(parent)
        hashes.append(hash((before, *token_ids[:page_size])))
    return hashes


class SeenPages:
    """The pages of the prompts that a replica got lately. Its engine may have forgotten some of them."""

    def __init__(self, max_pages: int = MAX_SEEN_PAGES) -> None:
        self.max_pages = max_pages
        self._pages: OrderedDict[int, None] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, hashes: Items[int]) -> int:
        """Return how many pages of a prompt were seen, from its beginning."""
        count = 0
        for one in hashes:
            if one not in self._pages:
                break
            count += 1
        return count

    def add(self, hashes: Items[int]) -> None:
        """Add the pages of a prompt. The first ones, which more prompts share, are forgotten last."""
        for one in reversed(hashes):
            self._pages[one] = None
            self._pages.move_to_end(one)
        while len(self._pages) > self.max_pages:
            self._pages.popitem(last=False)
