"""ExactPages: allocates pages for the tokens that compressing layers still keep exact.

A running row holds exact pages for its first tile, its window and the tokens it is about to write. A cached
prefix can only be reused if the exact tokens at its end, its tail, are still there. So tails that later
prompts may need are kept (`Scheduler._keep_tail`), under their prefixes' nodes, until the pages are needed.
A page is in exactly one state: blank, kept, or held by sequences; some held pages belong to a tail already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from blockdraft.engine.page_allocator import OutOfPages
from blockdraft.kernels.kv_formats import TILE

NO_PAGE = 0  # stands for a page that a row no longer holds; no kernel reads it


class ExactPages:
    """Hands out pages `first` … `num_pages - 1`. `compressed_end_at` is `PositionRule.compressed_end_at`."""

    def __init__(
        self, *, num_pages: int, first: int, page_size: int, compressed_end_at: Callable[[int], int]
    ) -> None:
        self.page_size = page_size
        self._compressed_end_at = compressed_end_at
        self._all = range(first, num_pages)
        self._blank = list(reversed(self._all))
        self._holders = [0] * num_pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # of tails that no sequence holds, oldest first
        self._pages: dict[int, int] = {}  # by node
        self._nodes: dict[int, int] = {}  # by page

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Return how many pages hold tails."""
        return len(self._pages)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages: blank pages first, then the pages of the oldest tails."""
        if count > self.num_free:
            raise OutOfPages
        pages = []
        for _ in range(count):
            if not self._blank:
                self.forget(self._nodes[next(iter(self._kept))])
            page = self._blank.pop()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back, and skip NO_PAGE."""
        for page in pages:
            if page == NO_PAGE:
                continue
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"exact page {page} released twice"
            if self._holders[page] == 0:
                if page in self._nodes:
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    def recover(self) -> None:
        """Free every page and keep all tails, after an interrupt at any line. See `PageAllocator.recover`."""
        kept = [page for page in self._kept if page in self._nodes]
        self._kept = OrderedDict.fromkeys([*kept, *self._nodes])
        self._blank = [page for page in reversed(self._all) if page not in self._nodes]
        self._pages = {node: page for page, node in self._nodes.items()}
        self._holders = [0] * len(self._holders)

    # ---- tails

    def needed(self, num_pages: int) -> list[int]:
        """Return which pages must be exact to continue from a prefix of `num_pages` full pages."""
        behind = self._compressed_end_at(num_pages * self.page_size) // self.page_size
        first = min(-(-TILE // self.page_size), behind)
        return [*range(first), *range(behind, num_pages)]

    def first_needed(self, length: int) -> int:
        """Return the first page after the first tile that a row of `length` tokens must hold."""
        behind = self._compressed_end_at(length // self.page_size * self.page_size) // self.page_size
        return max(behind, -(-TILE // self.page_size))

    def keep(self, node: int, page: int) -> None:
        """Record that the held `page` has the exact tokens of the prefix `node`, unless another page does."""
        assert self._holders[page] > 0
        if node not in self._pages and page not in self._nodes:
            self._pages[node] = page
            self._nodes[page] = node

    def page_of(self, node: int) -> int | None:
        """Return the page that was kept for this node."""
        return self._pages.get(node)

    def forget(self, node: int) -> None:
        """Stop offering the page of this node."""
        page = self._pages.pop(node, None)
        if page is None:
            return
        del self._nodes[page]
        if page in self._kept:
            del self._kept[page]
            self._blank.append(page)

    def find(self, nodes: Items[int]) -> list[int]:
        """Hold and return the exact pages of the longest prefix of these nodes whose tail was kept.

        The list has an entry for each page of the prefix; NO_PAGE where no exact page is needed.
        """
        for count in range(len(nodes), 0, -1):
            needed = self.needed(count)
            if all(nodes[index] in self._pages for index in reversed(needed)):
                pages = [NO_PAGE] * count
                for index in needed:
                    page = pages[index] = self._pages[nodes[index]]
                    self._holders[page] += 1
                    self._kept.pop(page, None)
                return pages
        return []

    def check(self, held: Iterable[Items[int]]) -> None:
        """Assert that nothing is leaked, given the exact pages of all live sequences."""
        expected = [0] * len(self._holders)
        for pages in held:
            for page in pages:
                expected[page] += page != NO_PAGE
        assert expected == self._holders, "holders differ from the live sequences: leak or double use"
        free = {*self._blank, *self._kept}
        assert len(free) == self.num_free, "an exact page is free twice"
        assert free.isdisjoint(page for page in self._all if self._holders[page])
        assert all(page in free or self._holders[page] for page in self._all), "an exact page is lost"
        assert {self._pages[node]: node for node in self._pages} == self._nodes
        assert self._kept.keys() <= self._nodes.keys()
