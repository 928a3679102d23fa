"""Responses that a client may come back to, in bounded memory: the oldest go first.

Each one holds its whole conversation, so that it can be continued when those before it have gone. Their ids
are random: whoever knows one was given it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.server.conversation import Message
from blockdraft.server.responses import json_of

MAX_RESPONSES = 4096  # arbitrary
MAX_BYTES = 128 << 20  # of all together, as JSON; conversations that share messages count each time


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as it was sent, and the conversation up to its end without instructions."""

    answer: Mapping[str, object]
    messages: tuple[Message, ...]
    items: Mapping[str, Mapping[str, object]]  # the answer's own, by id


class ResponseStore:
    """What is kept; it is gone with the server."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._items: dict[str, Mapping[str, object]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._kept.get(response_id)
        return None if found is None else found[0]

    def item(self, item_id: str) -> Mapping[str, object] | None:
        """A part of any answer that is kept."""
        return self._items.get(item_id)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep it, unless it alone is too large."""
        num_bytes = len(json_of(stored.answer).encode()) + len(json_of(stored.messages).encode())
        if num_bytes > self._max_bytes:
            return
        self._kept[response_id] = stored, num_bytes
        self._items.update(stored.items)
        self.num_bytes += num_bytes
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._kept)))

    def remove(self, response_id: str) -> bool:
        """Whether it was there."""
        found = self._kept.pop(response_id, None)
        if found is None:
            return False
        stored, num_bytes = found
        self.num_bytes -= num_bytes
        for item_id in stored.items:
            self._items.pop(item_id, None)
        return True
