"""Responses that a client may come back to, in bounded memory: the oldest go first.

Each one holds its whole conversation, so that it can be continued when those before it have gone. Their ids
are random: only its client knows one. They are kept as JSON text, whose size is known; the objects that
it describes would take up to twenty times as much.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockdraft.server.api.translation import Message
from blockdraft.server.http.replies import json_of

MAX_RESPONSES = 4096  # arbitrary
MAX_BYTES = 128 << 20  # of all together; conversations that share messages count each time
ENTRY_BYTES = 1024  # a response takes about so much beside its text
ITEM_BYTES = 512  # and each of its items


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as it was sent, and the conversation up to its end without instructions."""

    answer: Mapping[str, object]
    messages: tuple[Message, ...]
    items: Mapping[str, Mapping[str, object]]  # the answer's own, by id


@dataclass(frozen=True, slots=True)
class _Kept:
    """A response as UTF-8 text, field by field."""

    answer: bytes
    messages: bytes
    items: bytes
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        num_text = len(self.answer) + len(self.messages) + len(self.items)
        return num_text + ENTRY_BYTES + ITEM_BYTES * len(self.item_ids)


class ResponseStore:
    """Stored responses, in memory only."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._owners: dict[str, str] = {}  # of each item: the response that it is part of
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str) -> StoredResponse | None:
        kept = self._kept.get(response_id)
        if kept is None:
            return None
        return StoredResponse(_read(kept.answer), tuple(_read(kept.messages)), _read(kept.items))

    def item(self, item_id: str) -> Mapping[str, object] | None:
        """An item of any stored response."""
        owner = self._owners.get(item_id)
        if owner is None:
            return None
        found: Mapping[str, object] = _read(self._kept[owner].items)[item_id]
        return found

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone is too large."""
        kept = _Kept(
            _written(stored.answer), _written(stored.messages), _written(stored.items), tuple(stored.items)
        )
        if kept.num_bytes > self._max_bytes:
            return
        self._kept[response_id] = kept
        self._owners.update(dict.fromkeys(kept.item_ids, response_id))
        self.num_bytes += kept.num_bytes
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._kept)))

    def remove(self, response_id: str) -> bool:
        """Delete a response, and return whether it was there."""
        kept = self._kept.pop(response_id, None)
        if kept is None:
            return False
        self.num_bytes -= kept.num_bytes
        for item_id in kept.item_ids:
            self._owners.pop(item_id, None)
        return True


def _written(value: object) -> bytes:
    return json_of(value).encode(errors="surrogatepass")


def _read(text: bytes) -> Any:  # noqa: ANN401  # what was written is read
    return json.loads(text.decode(errors="surrogatepass"))
