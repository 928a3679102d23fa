"""Writes the JSON of large answers in slices, in a thread, so that the event loop goes on.

Python's encoder holds the interpreter's lock for a whole call. A large answer in one call would therefore
stop the event loop, whichever thread encodes it.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from starlette.responses import JSONResponse, Response

from blockdraft.engine.request import Delta

P = ParamSpec("P")
T = TypeVar("T")
SLICE = 256  # items of a list that are written in one call
LARGE_ANSWER = 4096  # numbers and names; larger answers are written in a thread; arbitrary

_json_of = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class MadeLate:
    """A list whose items are made one by one while they are written, to save memory."""

    def __init__(self, items: Iterable[object]) -> None:
        self.items = items


def size_of(delta: Delta) -> int:
    """Return the rough number of tokens and log-probabilities that are written for a delta."""
    scored = (*delta.logprobs[:1], *(delta.prompt_logprobs or ())[-1:])  # all positions have as many
    num_each = 1 + max((len(item.top) for item in scored if item is not None), default=0)
    return len(delta.token_ids) + num_each * (len(delta.logprobs) + len(delta.prompt_logprobs or ()))


@functools.cache
def _writer() -> ThreadPoolExecutor:
    """Return the one shared thread. More threads would take more time from the event loop."""
    return ThreadPoolExecutor(1, "large answers")


def beside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Run `work` in the thread that writes large answers."""
    loop = asyncio.get_running_loop()
    return loop.run_in_executor(_writer(), functools.partial(work, *args, **kwargs))


async def json_response(make: Callable[[], object], size: int) -> Response:
    """Return the JSON of what `make` returns, which holds about `size` numbers and names."""
    if size <= LARGE_ANSWER:
        return JSONResponse(make())
    body = await beside(lambda: b"".join(map(str.encode, in_slices(make()))))
    return Response(body, media_type="application/json")


def event_in_slices(data: Mapping[str, object]) -> str:
    """Return one server-sent event, encoded in slices."""
    return f"data: {''.join(in_slices(data))}\n\n"


def in_slices(value: object) -> Iterator[str]:
    """Yield the JSON of a value in short parts: objects name by name, long lists in slices."""
    if isinstance(value, Mapping):
        yield "{"
        for number, (name, item) in enumerate(value.items()):
            yield ("," if number else "") + _json_of(name) + ":"
            yield from in_slices(item)
        yield "}"
    elif isinstance(value, list | tuple) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            yield ("," if start else "[") + _json_of(value[start : start + SLICE])[1:-1]
        yield "]"
    elif isinstance(value, list | tuple | MadeLate):
        yield "["
        for number, item in enumerate(value.items if isinstance(value, MadeLate) else value):
            yield "," if number else ""
            yield from in_slices(item)
        yield "]"
    else:
        yield _json_of(value)
