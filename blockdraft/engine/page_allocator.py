"""PageAllocator: tracks which pages are free, which sequences hold them, and which prefixes they store.

A page is in exactly one state: free and blank, free but remembered (its content can be claimed again), or
held by one or more sequences. Remembered prefixes form a tree: a node is found by (its parent, the page's
tokens), compared exactly, so a hash collision cannot hand one prompt another's cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

# The parent node, or the first page's salt; the tokens of a full page, and `num_later` tokens after them.
Key = tuple[int | str, tuple[int, ...]]

ROOT = 0


class OutOfPages(Exception):
    """There are not enough free pages now: the scheduler preempts a sequence, or lets the request wait."""


@dataclass(frozen=True, slots=True)
class Node:
    """A remembered page. The chain of its parents identifies its prefix."""

    id: int
    key: Key


class PageAllocator:
    """Hands out pages `first` … `num_pages - 1`; a page is reused only when no sequence holds it.

    A page's content depends on its tokens and `num_later` tokens after them: 1 if an MTP head writes to it.
    """

    def __init__(self, *, num_pages: int, first: int, page_size: int, num_later: int = 0) -> None:
        self.page_size = page_size
        self.num_later = num_later
        self._all = range(first, num_pages)
        self._blank = list(reversed(self._all))
        self._holders = [0] * num_pages
        self._remembered: OrderedDict[int, None] = OrderedDict()  # free pages, oldest first
        self._pages: dict[Key, int] = {}
        self._nodes: dict[int, Node] = {}  # by page
        self._next_node = ROOT + 1
        self.num_forgotten = 0  # remembered pages that were reused for other content, since the start
        self.on_forget: Callable[[int], None] = lambda node: None

    @property
    def num_pages(self) -> int:
        return len(self._all)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._remembered)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages: blank pages first, then the least recently used remembered ones."""
        if count > self.num_free:
            raise OutOfPages
        pages = []
        for _ in range(count):
            if not self._blank:
                self._forget(next(iter(self._remembered)))
            page = self._blank.pop()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Items[int]) -> None:
        """Give pages back. The last pages are reused before the first, which more prompts share."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} released twice"
            if self._holders[page] == 0:
                if page in self._nodes:
                    self._remembered[page] = None
                else:
                    self._blank.append(page)

    def recover(self) -> None:
        """Free every page and keep all remembered prefixes, after an interrupt at any line of this class.

        Everything else follows from `_nodes`: a page is in it from when its prefix is remembered until that
        prefix is forgotten, and no other prefix is written there before.
        """
        newest_first = sorted(self._nodes, key=lambda page: -self._nodes[page].id)  # tails before heads
        free = [page for page in self._remembered if page in self._nodes]
        self._remembered = OrderedDict.fromkeys([*free, *newest_first])
        self._blank = [page for page in reversed(self._all) if page not in self._nodes]
        self._pages = {node.key: page for page, node in self._nodes.items()}
        self._holders = [0] * len(self._holders)

    def match(self, token_ids: Items[int], salt: str | None = None, length: int | None = None) -> list[int]:
        """Hold and return the pages of the longest remembered prefix made of whole pages.

        It is a prefix of the first `length` token_ids (None: all). A prompt with a salt shares pages only
        with prompts of the same salt.
        """
        pages: list[int] = []
        parent: int | str = ROOT if salt is None else salt
        for tokens in self._chunks(token_ids, 0, len(token_ids) if length is None else length):
            page = self._pages.get((parent, tokens))
            if page is None:
                break
            self._holders[page] += 1
            self._remembered.pop(page, None)
            parent = self._nodes[page].id
            pages.append(page)
        return pages

    def remember(
        self,
        token_ids: Items[int],
        pages: Items[int],
        num_done: int,
        salt: str | None = None,
        length: int | None = None,
    ) -> int:
        """Register the full pages of the first `length` token_ids (None: all). These tokens are committed.

        The first `num_done` pages are registered already; return how many are registered now. If another page
        stores a page's prefix already, that page and all pages after it stay private: their parent would be
        the other page. A later call can only register more after pages were forgotten (`num_forgotten`).
        """
        root: int | str = ROOT if salt is None else salt
        parent = self._nodes[pages[num_done - 1]].id if num_done else root
        length = len(token_ids) if length is None else length
        for index, tokens in enumerate(self._chunks(token_ids, num_done, length), num_done):
            node = self.remember_page((parent, tokens), pages[index])
            if node is None:
                break
            parent, num_done = node, index + 1
        return num_done

    def remember_page(self, key: Key, page: int) -> int | None:
        """Register one page and return its node, or None if another page stores its prefix already."""
        if key in self._pages:
            return None
        node = Node(self._next_node, key)
        self._next_node += 1
        self._pages[key] = page
        self._nodes[page] = node
        return node.id

    def nodes_of(self, token_ids: Items[int], length: int, salt: str | None = None) -> list[int]:
        """Return the nodes of the longest remembered prefix of the first `length` tokens, in any pages."""
        parent: int | str = ROOT if salt is None else salt
        nodes: list[int] = []
        for tokens in self._chunks(token_ids, 0, length):
            page = self._pages.get((parent, tokens))
            if page is None:
                break
            parent = self._nodes[page].id
            nodes.append(self._nodes[page].id)
        return nodes

    def node_of(self, page: int) -> int | None:
        """Return the node of the prefix that this page ends, or None if the page is not remembered."""
        node = self._nodes.get(page)
        return None if node is None else node.id

    def latest(self) -> list[tuple[int, Node]]:
        """Return the remembered pages that nobody holds, the latest used first: parents before children."""
        return [(page, self._nodes[page]) for page in reversed(self._remembered)]

    def _forget(self, page: int) -> None:
        node = self._nodes.pop(page)
        self.on_forget(node.id)
        del self._pages[node.key]
        del self._remembered[page]
        self._blank.append(page)
        self.num_forgotten += 1

    def _chunks(self, token_ids: Items[int], first: int, length: int) -> Iterable[tuple[int, ...]]:
        """Yield the tokens of each page that the first `length` tokens fill, from page `first` on."""
        size = self.page_size
        for begin in range(first * size, length - size + 1, size):
            yield tuple(token_ids[begin : begin + size + self.num_later])

    def check(self, held: Iterable[Items[int]]) -> None:
        """Assert that nothing is leaked or shared wrongly, given the page lists of all live sequences."""
        expected = [0] * len(self._holders)
        for pages in held:
            assert len(set(pages)) == len(pages), f"a sequence holds a page twice: {pages}"
            for page in pages:
                expected[page] += 1
        assert expected == self._holders, "holders differ from the live sequences: leak or double use"
        free = set(self._blank) | set(self._remembered)
        assert len(self._blank) + len(self._remembered) == len(free), "a page is free twice"
        in_use = {page for page in self._all if self._holders[page]}
        assert free.isdisjoint(in_use), "a page is free and in use"
        assert free | in_use == set(self._all), "a page is lost"
        assert all(self._pages[node.key] == page for page, node in self._nodes.items())
        assert len(self._pages) == len(self._nodes), "two prefixes point at one page"
        shared = {page for page in self._all if self._holders[page] > 1}
        assert shared <= self._nodes.keys(), "a page that is not a remembered prefix is shared"
