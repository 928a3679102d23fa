"""PrefixDisk: a folder that keeps remembered prefixes from the end of a server to its next start.

At the end, when no row runs, `write` copies the pages that the allocator remembers, latest used first, with
their exact pages and recurrent states. `read` copies them back and remembers them. What is read has the bits
that were written, or it is refused: all of it if a part differs on which these bits depend, and a page with
its descendants if its hash is wrong. So a hit after a restart gives the same answer as a hit before it.

    index.json   the parts, and for each page its parent, its tokens and a hash of its bytes
    pages-N.bin  for each page its bytes, then those of its exact page and of its state, if it has them

The index is replaced last and at once, so that a killed write leaves the prefixes of the write before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, NamedTuple

import torch
from filelock import FileLock, Timeout

from blockdraft.cache.cache import Cache
from blockdraft.engine.page_allocator import ROOT
from blockdraft.engine.saved_states import SavedState
from blockdraft.engine.scheduler import Scheduler

INDEX, PARTIAL = "index.json", "index.json.partial"
WRITE_S = 20.0  # after which a write ends with the pages it has, and so does a read; arbitrary
BATCH_BYTES = 32 << 20  # copied at once; arbitrary
DISK_SHARE = 10  # this part of the free disk is what a folder takes by default, and what it always leaves


class PrefixesRefused(Exception):
    """Raised if nothing in a folder can be used, with one sentence that says why."""


class StoredPage(NamedTuple):
    """A page in the index."""

    parent: int | str | None  # the number of an earlier page; of a first page, its salt
    token_ids: Items[int]  # and those after the page on which an MTP head's keys depend
    has_exact: bool
    state: tuple[int, int] | None  # its length in tokens, and when it was used, on SavedStates' clock
    digest: str = ""


class Restored(NamedTuple):
    """What an engine has read."""

    num_pages: int = 0
    num_states: int = 0
    num_refused: int = 0  # pages that were damaged, and their descendants
    num_bytes: int = 0
    seconds: float = 0.0
    # Of each page, the number of its parent here, or its salt, and its tokens; the latest used first.
    tree: Items[tuple[int | str | None, Items[int]]] = ()

    def __str__(self) -> str:
        states = f" and {self.num_states} states" if self.num_states else ""
        size = f"{self.num_pages} pages{states}, {self.num_bytes / 1e6:,.1f} MB"
        return f"{size}, in {self.seconds:.1f} s"


class _Place(NamedTuple):
    """Where an engine has a page."""

    page: int
    exact: int | None = None
    slot: int | None = None  # of its state


class PrefixDisk:
    """The folder of one engine. `parts` are all that the bits of its prefixes depend on, besides tokens.

    Raise PrefixesRefused if another process has the folder, or if it cannot be written.
    """

    def __init__(self, folder: Path, parts: Mapping[str, str], max_bytes: int | None = None) -> None:
        self.folder = folder
        self._parts = dict(parts)
        self._max_bytes = max_bytes  # None: by the free disk
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(folder / "lock", mode=0o600)
            self._lock.acquire(timeout=0)  # until this process ends
        except Timeout:
            raise PrefixesRefused(f"another process keeps its prefixes in {folder}") from None
        except OSError as error:
            raise PrefixesRefused(f"{folder} cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Let other processes have the folder."""
        self._lock.release()

    # ---- at the start

    def read(self, cache: Cache, scheduler: Scheduler) -> Restored:
        """Give an idle engine as many of the folder's prefixes as fit.

        Without an index there are none. Raise PrefixesRefused if there are some, and none can be used.
        """
        if not (self.folder / INDEX).exists():
            return Restored()
        begun_s, memory = time.monotonic(), _Memory(cache)
        file, pages = self._index()
        self._clean(file)
        with _Prefixes(scheduler, pages) as found:
            try:
                with (self.folder / file).open("rb") as stream:
                    num_seen, num_bytes = found.fill(stream, memory)
            except OSError as error:
                raise PrefixesRefused(f"{self.folder / file} cannot be read ({error.strerror})") from None
            nodes = found.remember()
            num_states = found.save_states(nodes)
        seconds, num_pages = time.monotonic() - begun_s, len(found.places)
        return Restored(num_pages, num_states, num_seen - num_pages, num_bytes, seconds, found.tree())

    def _index(self) -> tuple[str, list[StoredPage]]:
        """Return the name of the file and its pages."""
        try:
            raw = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            if raw.pop("digest") != _digest_of(raw):
                raise ValueError("not what was written")
            self._compare(raw["parts"])  # first: another version's pages may have another form
            return Path(raw["file"]).name, [StoredPage(*page) for page in raw["pages"]]
        except OSError as error:
            raise PrefixesRefused(f"{self.folder / INDEX} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise PrefixesRefused(f"{self.folder / INDEX} is damaged") from None

    def _compare(self, parts: Mapping[str, str]) -> None:
        names = [name for name in {**parts, **self._parts} if parts.get(name) != self._parts.get(name)]
        if names:
            told = (f"{name}: {parts.get(name)}, now {self._parts.get(name)}" for name in names)
            raise PrefixesRefused(f"those in {self.folder} are another engine's ({'; '.join(told)})")

    # ---- at the end

    def write(self, cache: Cache, scheduler: Scheduler) -> str:
        """Replace the folder's prefixes by those of an engine without requests; return a line for the log."""
        listed = _listed(scheduler)
        if not listed:
            return f"there are no prefixes to keep in {self.folder}"
        file = self.folder / f"pages-{time.time_ns()}.bin"
        try:
            done = self._write(file, cache, listed)
        except OSError as error:
            _delete(file, self.folder / PARTIAL)
            return f"prefixes could not be kept in {self.folder} ({error.strerror})"
        self._clean(file.name)
        left = len(listed) - done.num_pages
        over = f"; {left} more are over --prefix-disk-bytes, the disk or {WRITE_S:g} s" if left else ""
        return f"prefixes are kept in {self.folder}: {done}{over}"

    def _write(self, file: Path, cache: Cache, listed: list[tuple[_Place, StoredPage]]) -> Restored:
        begun_s, memory = time.monotonic(), _Memory(cache)
        room, pages = self._room(), list[StoredPage]()
        with _private(file) as stream:
            for batch in _batches(listed, memory, room):
                for (_, page), raw in zip(batch, memory.read([place for place, _ in batch]), strict=True):
                    stream.writelines(raw)
                    pages.append(page._replace(digest=_digest(*raw)))
                _flush(stream)
                if time.monotonic() - begun_s > WRITE_S:
                    break
            num_bytes = stream.tell()
        if not pages:  # so the prefixes of the write before stay
            raise OSError(errno.ENOSPC, "there is no room for one page")
        index = {"parts": self._parts, "file": file.name, "pages": pages}
        with _private(self.folder / PARTIAL) as stream:
            stream.write(json.dumps({"digest": _digest_of(index), **index}).encode())
            _flush(stream)
        (self.folder / PARTIAL).replace(self.folder / INDEX)
        num_states = sum(page.state is not None for page in pages)
        return Restored(len(pages), num_states, 0, num_bytes, time.monotonic() - begun_s)

    def _room(self) -> int:
        free = shutil.disk_usage(self.folder).free
        share = free // DISK_SHARE
        return share if self._max_bytes is None else min(self._max_bytes, free - share)

    def _clean(self, file: str) -> None:
        """Delete what earlier writes have left, all but `file`."""
        _delete(*(old for old in self.folder.glob("pages-*.bin") if old.name != file))


class _Memory:
    """The bytes of an engine's pages, exact pages and states."""

    def __init__(self, cache: Cache) -> None:
        self._kinds = cache.raw()

    def sizes(self, page: StoredPage) -> list[int]:
        """Return the bytes of the page, of its exact page and of its state."""
        is_there = (True, page.has_exact, page.state is not None)
        return [kind.num_bytes if there else 0 for kind, there in zip(self._kinds, is_there, strict=True)]

    def read(self, places: Items[_Place]) -> list[list[memoryview]]:
        """Return the bytes of all that each place has, in parts."""
        found: list[list[memoryview]] = [[] for _ in places]
        for kind, numbers in zip(self._kinds, zip(*places, strict=True), strict=True):
            there = [index for index, number in enumerate(numbers) if number is not None]
            if not there:
                continue
            for index, raw in zip(there, kind.read([numbers[index] for index in there]), strict=True):
                found[index].append(raw.numpy().data)
        return found

    def write(self, places: Items[_Place], pages: Items[StoredPage], raw: Items[bytearray]) -> None:
        """Fill the places with the bytes of the pages. A place may lack what its page has."""
        begins = [0] * len(pages)
        for kind, numbers, which in zip(self._kinds, zip(*places, strict=True), range(3), strict=True):
            there = [index for index, number in enumerate(numbers) if number is not None]
            of_kind = partial(torch.frombuffer, dtype=torch.uint8, count=kind.num_bytes)
            rows = [of_kind(raw[index], offset=begins[index]) for index in there]
            if rows:
                kind.write([numbers[index] for index in there], torch.stack(rows))
            begins = [begin + self.sizes(page)[which] for begin, page in zip(begins, pages, strict=True)]


class _Prefixes:
    """Prefixes on their way into an engine: places are held until all prefixes are remembered."""

    def __init__(self, scheduler: Scheduler, pages: Items[StoredPage]) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self.places: dict[int, _Place] = {}  # by the number of a stored page
        self._reserved: set[int] = set()  # slots of states

    def __enter__(self) -> _Prefixes:
        return self

    def __exit__(self, *error: object) -> None:
        """Give everything back in turn, so that what was used last is forgotten last."""
        scheduler, places = self._scheduler, list(self.places.values())
        if scheduler.exact is not None:
            scheduler.exact.release(place.exact for place in reversed(places) if place.exact is not None)
        if scheduler.states is not None:
            scheduler.states.free(self._reserved)
        scheduler.pages.release([place.page for place in places])

    def fill(self, stream: BufferedReader, memory: _Memory) -> tuple[int, int]:
        """Copy whole pages to places while there is room. Return how many pages and bytes were read."""
        batch: list[tuple[_Place, StoredPage, bytearray]] = []
        num_seen = num_bytes = batch_bytes = 0
        end_s = time.monotonic() + WRITE_S
        for number, page in enumerate(self._pages):
            if not self._scheduler.pages.num_free or time.monotonic() > end_s:
                break
            num_seen += 1
            raw = bytearray(sum(memory.sizes(page)))
            stream.readinto(raw)
            has_parent = not isinstance(page.parent, int) or page.parent in self.places
            if not has_parent or _digest(raw) != page.digest:
                continue
            batch.append((self._place(number, page), page, raw))
            num_bytes, batch_bytes = num_bytes + len(raw), batch_bytes + len(raw)
            if batch_bytes >= BATCH_BYTES:
                memory.write(*zip(*batch, strict=True))
                batch, batch_bytes = [], 0
        if batch:
            memory.write(*zip(*batch, strict=True))
        return num_seen, num_bytes

    def _place(self, number: int, page: StoredPage) -> _Place:
        """Take a free page, and what there is room for beside it."""
        pages, exact, states = self._scheduler.pages, self._scheduler.exact, self._scheduler.states
        exact_page = slot = None
        if page.has_exact and exact is not None and exact.num_free:
            [exact_page] = exact.allocate(1)
        if page.state is not None and states is not None:
            slot = states.reserve()
            self._reserved |= set() if slot is None else {slot}
        self.places[number] = _Place(pages.allocate(1)[0], exact_page, slot)
        return self.places[number]

    def remember(self) -> dict[int | None, int]:
        """Offer pages and exact pages to later prompts; return the nodes by the numbers of stored pages."""
        pages, exact, nodes = self._scheduler.pages, self._scheduler.exact, dict[int | None, int]()
        nodes[None] = ROOT
        for number, place in self.places.items():
            before, token_ids = self._pages[number][:2]
            parent = before if isinstance(before, str) else nodes.get(before)
            node = None if parent is None else pages.remember_page((parent, tuple(token_ids)), place.page)
            if node is None:
                continue  # the engine has this prefix already
            nodes[number] = node
            if exact is not None and place.exact is not None:
                exact.keep(node, place.exact)
        return nodes

    def tree(self) -> list[tuple[int | str | None, Items[int]]]:
        """Return the pages as Restored has them."""
        ranks = {number: rank for rank, number in enumerate(self.places)}
        pages = [self._pages[number] for number in self.places]
        parents = [ranks[page.parent] if isinstance(page.parent, int) else page.parent for page in pages]
        return [(parent, page.token_ids) for parent, page in zip(parents, pages, strict=True)]

    def save_states(self, nodes: Mapping[int | None, int]) -> int:
        """Save states, each behind the longest before it, and use them in their old order; count them."""
        states = self._scheduler.states
        if states is None:
            return 0
        longest: dict[int | str | None, SavedState | None] = {}
        used: list[tuple[int, int]] = []
        for number, place in self.places.items():
            page = self._pages[number]
            longest[number] = longest.get(page.parent)
            if place.slot is None or page.state is None or number not in nodes:
                continue
            self._reserved.discard(place.slot)
            longest[number] = states.save(place.slot, nodes[number], page.state[0], longest[number])
            used.append((page.state[1], nodes[number]))
        before = None
        for now, node in sorted(used):
            if now != before:
                states.count_prompt()
            state, before = states.find([node]), now
            assert state is not None
            states.release(state)
        return len(used)


def _listed(scheduler: Scheduler) -> list[tuple[_Place, StoredPage]]:
    """Return all that is remembered, the latest used first, and parents before their children."""
    found: list[tuple[_Place, StoredPage]] = []
    numbers: dict[int, int] = {}  # by node
    exact, states = scheduler.exact, scheduler.states
    for page, node in scheduler.pages.latest():
        before, token_ids = node.key
        parent = before if isinstance(before, str) else numbers.get(before)
        if parent is None and before != ROOT:
            continue  # its parent was forgotten, so no prompt can find it
        exact_page = None if exact is None else exact.page_of(node.id)
        state = None if states is None else states.state_of(node.id)
        place = _Place(page, exact_page, None if state is None else state.slot)
        told = None if state is None else (state.length, state.used)
        numbers[node.id] = len(found)
        found.append((place, StoredPage(parent, token_ids, exact_page is not None, told)))
    return found


def _batches(
    listed: Items[tuple[_Place, StoredPage]], memory: _Memory, room: int
) -> Iterator[list[tuple[_Place, StoredPage]]]:
    """Yield the first of these that fit into `room` bytes, about BATCH_BYTES at a time."""
    batch, num_bytes = list[tuple[_Place, StoredPage]](), 0
    for one in listed:
        size = sum(memory.sizes(one[1]))
        room -= size
        if room < 0:
            break
        batch.append(one)
        num_bytes += size
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _private(file: Path) -> IO[bytes]:
    """Open a new file that only its owner may read: it holds what users have written."""
    file.unlink(missing_ok=True)  # what a killed write has left, or a link to elsewhere
    return open(file, "xb", opener=partial(os.open, mode=0o600))


def _delete(*files: Path) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _flush(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _digest(*parts: bytes | bytearray | memoryview) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _digest_of(index: Mapping[str, object]) -> str:
    return _digest(json.dumps(index).encode())
