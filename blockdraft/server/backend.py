"""What the routes need from the engine, and the engine's loop dressed up as that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Items
from typing import Protocol, cast

from blockdraft.engine.loop import EngineLoop, Stream
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.stats import Load, Stats
from blockdraft.server.events import live_events
from blockdraft.server.metrics import render
from blockdraft.server.shapes import Start
from blockdraft.text.tokenizer import Tokenizer


class Info(Protocol):
    """The facts of a ready engine that requests are checked against."""

    @property
    def max_context(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def sampling(self) -> Mapping[str, float]: ...


class Backend(Protocol):
    """An engine behind its loop; `tokenizer` and `engine_info` are None until it is ready."""

    @property
    def error(self) -> str | None: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def engine_info(self) -> Info | None: ...
    async def submit(self, prompt_ids: Items[int], sampling: SamplingParams) -> Stream: ...
    def start(self) -> Start: ...
    def render_metrics(self, name: str) -> tuple[bytes, str]: ...
    def events(self) -> AsyncIterator[dict[str, object]]: ...


class LoopBackend:
    """An EngineLoop, from the first moment of its start; `is_hanging` is its watchdog's word."""

    def __init__(self, loop: EngineLoop, is_hanging: Callable[[], bool]) -> None:
        self._loop = loop
        self._is_hanging = is_hanging

    @property
    def error(self) -> str | None:
        return "a step does not come back" if self._is_hanging() else self._loop.error

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._loop.tokenizer

    @property
    def engine_info(self) -> Info | None:
        return self._loop.engine_info

    async def submit(self, prompt_ids: Items[int], sampling: SamplingParams) -> Stream:
        return await self._loop.submit(prompt_ids, sampling)

    def start(self) -> Start:
        return cast(Start, self._loop.startup.snapshot())

    def render_metrics(self, name: str) -> tuple[bytes, str]:
        snapshot = self._loop.snapshot() or Stats().snapshot(Load())
        return render(snapshot, self._loop.engine_info, name, self._loop.startup.snapshot())

    def events(self) -> AsyncIterator[dict[str, object]]:
        return live_events(self._loop)
