"""Stores responses in bounded memory, replays them as events of a stream, and lists their input items.

Each response holds its whole conversation, so that it can be continued after earlier responses were dropped.
Ids are random, so that only the client that made a response knows its id. Responses are kept as JSON text,
whose size is known; as Python objects they would take up to twenty times as much.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, cast

from blockdraft.errors import RequestError
from blockdraft.server.api.chat.messages import calls_of
from blockdraft.server.api.responses import schemas
from blockdraft.server.api.responses.fields import namespaces_of
from blockdraft.server.api.responses.writer import (
    added_event,
    call_item,
    closed_events,
    opened_events,
    output_text,
)
from blockdraft.server.api.translation import AnswerPart, Message
from blockdraft.server.http.body import shown
from blockdraft.server.http.replies import json_of, named_event

MAX_RESPONSES = 4096  # arbitrary
MAX_BYTES = 128 << 20  # for all responses; messages that several conversations share count each time
ENTRY_BYTES = 1024  # a response takes about this much in addition to its text
ITEM_BYTES = 512  # and this much for each item


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as it was sent, and the conversation up to and with it, without instructions."""

    answer: Mapping[str, object]
    messages: tuple[Message, ...]
    items: Mapping[str, Mapping[str, object]]  # the answer's items, by id


class ResponseStore:
    """Stored responses, in memory only: each as UTF-8 JSON, with the ids of its items."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[bytes, tuple[str, ...]]] = OrderedDict()
        self._owners: dict[str, str] = {}  # by item id: the id of its response
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str) -> StoredResponse | None:
        if response_id not in self._kept:
            return None
        answer, messages, items = json.loads(self._kept[response_id][0].decode(errors="surrogatepass"))
        return StoredResponse(answer, tuple(messages), items)

    def item(self, item_id: str) -> Mapping[str, object] | None:
        """Return an item of any stored response."""
        owner = self.get(self._owners.get(item_id, ""))
        return None if owner is None else owner.items[item_id]

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it is too large. The oldest responses are dropped to make space."""
        text = json_of((stored.answer, stored.messages, stored.items)).encode(errors="surrogatepass")
        num_bytes = _num_bytes(text, stored.items)
        if num_bytes > self._max_bytes:
            return
        self._kept[response_id] = text, tuple(stored.items)
        self._owners.update(dict.fromkeys(stored.items, response_id))
        self.num_bytes += num_bytes
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._kept)))

    def remove(self, response_id: str) -> bool:
        """Delete a response, and return whether it was there."""
        if response_id not in self._kept:
            return False
        text, item_ids = self._kept.pop(response_id)
        self.num_bytes -= _num_bytes(text, item_ids)
        for item_id in item_ids:
            self._owners.pop(item_id, None)
        return True


def _num_bytes(text: bytes, item_ids: Collection[str]) -> int:
    return len(text) + ENTRY_BYTES + ITEM_BYTES * len(item_ids)


MAX_PAGE = 100  # items, as OpenAI allows
PAGE = 20


def flag(query: Mapping[str, str], name: str) -> bool:
    """Return a boolean of the query; False if it is missing."""
    given = query.get(name, "false")
    if given not in ("true", "false"):
        raise RequestError(f"'{name}' is {shown(given)}: use true or false.", name)
    return given == "true"


def number(query: Mapping[str, str], name: str, default: int, *, least: int, most: int) -> int:
    """Return an integer of the query; `default` if it is missing."""
    given = query.get(name, str(default))
    is_number = given.isascii() and given.isdecimal() and len(given) < 16
    if not is_number or not least <= int(given) <= most:
        raise RequestError(f"'{name}' is {shown(given)}: use a number from {least} to {most}.", name)
    return int(given)


# ---- events


def replayed(answer: schemas.Response, starting_after: int | None) -> str:
    """Return the events of a stored response after number `starting_after`, with each text in one piece.

    The events are numbered from 0. The last event, which holds the whole response, is always among them.
    """
    events = [*_events(answer)]
    first = 0 if starting_after is None else min(starting_after + 1, len(events) - 1)
    numbered = [{**event, "sequence_number": number} for number, event in enumerate(events)]
    return "".join(named_event(str(event["type"]), event) for event in numbered[first:])


def _events(answer: schemas.Response) -> Iterator[dict[str, object]]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(answer["output"]):
        part = _part(index, item)
        yield from opened_events(part, _begun(item))
        if part.text:
            yield added_event(part, item["id"], part.text)
        yield from closed_events(part, item)
    yield {"type": f"response.{answer['status']}", "response": answer}


def _part(index: int, item: schemas.Item) -> AnswerPart:
    if item["type"] == "function_call":
        return AnswerPart("call", index, item["call_id"], item["name"], added=[item["arguments"]])
    kind: Literal["text", "reasoning"] = "text" if item["type"] == "message" else "reasoning"
    return AnswerPart(kind, index, added=[part["text"] for part in item["content"]])


def _begun(item: schemas.Item) -> schemas.Item:
    """Return the item as it was before it had any content."""
    empty: dict[str, object] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    kept = {name: value for name, value in item.items() if name != "encrypted_content"}
    return cast(schemas.Item, {**kept, **empty, "status": "in_progress"})


# ---- input items


def input_page(
    answer: schemas.Response, messages: Items[Message], query: Mapping[str, str]
) -> schemas.InputItems:
    """Return a page of a response's input items, newest first unless `order` is asc."""
    limit, order = number(query, "limit", PAGE, least=1, most=MAX_PAGE), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"'order' is {shown(order)}: use asc or desc.", "order")
    found = _input_items(answer, messages)
    if order == "desc":
        found.reverse()
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(found, 1) if item["id"] == after]
        if not places:
            raise RequestError(
                f"'after' is {shown(after)}, which is not an item of this response: use an id of its items.",
                "after",
            )
        found = found[places[0] :]
    page = found[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(found) > limit
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}


def _input_items(answer: schemas.Response, messages: Items[Message]) -> list[schemas.InputItem]:
    """Return all items of the conversation except the last ones, which are the answer's."""
    name = answer["id"].removeprefix("resp_")
    spaces = namespaces_of(answer["tools"])
    items = [item for message in messages for item in _items(message, spaces)]
    num_own = sum(not is_half_a_call(item) for item in answer["output"])
    named = [
        {**item, "id": f"{_PREFIXES[str(item['type'])]}_{name}_{place}"} for place, item in enumerate(items)
    ]
    return cast(list[schemas.InputItem], named[: len(named) - num_own])


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def is_half_a_call(item: schemas.Item) -> bool:
    """Return whether the item is a call that was cut off, which no template could render."""
    return item["type"] == "function_call" and item["status"] != "completed"


def _items(message: Message, spaces: Mapping[str, tuple[str, str]]) -> Iterator[dict[str, object]]:
    """Yield the items of one chat message, in the order in which a model writes them."""
    role, done = message["role"], {"status": "completed"}
    if role == "tool":
        result = {"call_id": message["tool_call_id"], "output": message["content"]}
        yield {"type": "function_call_output", **done, **result}
        return
    if role != "assistant":
        content = [{"type": "input_text", "text": message["content"]}]
        yield {"type": "message", **done, "role": role, "content": content}
        return
    if "reasoning_content" in message:
        thoughts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        yield {"type": "reasoning", **done, "summary": [], "content": thoughts}
    if "content" in message:
        text = output_text(str(message["content"]))
        yield {"type": "message", **done, "role": role, "content": [text]}
    for call in calls_of(message):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield {**call_item(call["id"], name, arguments, "completed", spaces)}
