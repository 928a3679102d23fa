"""The feed of the live page: sends the start's progress and the engine's numbers once a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Items
from typing import Protocol

from blockdraft.engine.stats import LATELY_S, Snapshot

INTERVAL_S = 1.0
WINDOW_S = 3  # whole seconds over which "now" is averaged
Json = dict[str, object]


class Feed(Protocol):
    """The source of an engine's numbers."""

    async def refresh(self) -> None:
        """Read the engine's present numbers."""

    def now(self) -> Json | None:
        """Return the present state, or None if it is not known yet."""

    def history(self, after_s: float) -> Items[tuple[float, float]]:
        """Return (second, tokens per second) of the seconds after `after_s`."""


async def live_events(
    feed: Feed, startup: Callable[[], Json], engine: Callable[[], Json | None], is_closed: Callable[[], bool]
) -> AsyncIterator[Json]:
    """Yield an object per second until the server ends; the first one carries the history."""
    sent_s = float("-inf")
    while not is_closed():
        await feed.refresh()
        fresh = feed.history(sent_s)
        sent_s = fresh[-1][0] if fresh else sent_s
        yield {"startup": startup(), "engine": engine(), "now": feed.now(), "history": fresh}
        await asyncio.sleep(INTERVAL_S)


class LoopFeed:
    """The numbers of our own engine, from its snapshots."""

    def __init__(self, snapshot: Callable[[], Awaitable[Snapshot | None]]) -> None:
        self._ask = snapshot
        self._snapshot: Snapshot | None = None

    async def refresh(self) -> None:
        self._snapshot = await self._ask()

    def history(self, after_s: float) -> list[tuple[float, float]]:
        recent = () if self._snapshot is None else self._snapshot.recent
        return [(point.time_s, point.tokens) for point in recent if point.time_s > after_s]

    def now(self) -> Json | None:
        snapshot = self._snapshot
        if snapshot is None:
            return None
        window, lately = snapshot.recent[-WINDOW_S:], snapshot.lately
        return {
            "tokens_per_second": _mean([point.tokens for point in window]),
            "steps_per_second": _mean([point.steps for point in window]),
            **fate_of_drafts(lately.tokens_per_block, lately.acceptance),
            "num_drafts": snapshot.num_drafts,
            "running": snapshot.num_running,
            "waiting": snapshot.num_waiting,
            "speculation": snapshot.speculation,
            "governed_width": snapshot.chosen_width,
            "speedup": None if snapshot.speedup is None else round(snapshot.speedup, 3),
            "pages_used": snapshot.num_pages_used,
            "num_pages": snapshot.num_pages,
        }


def fate_of_drafts(tokens_per_step: float | None, acceptance: Items[float]) -> Json:
    """Return acceptance in the last LATELY_S seconds; None and an empty list if nothing was decoded."""
    return {
        "lately_s": LATELY_S,
        "tokens_per_step": None if tokens_per_step is None else round(tokens_per_step, 3),
        "acceptance": [round(share, 4) for share in acceptance],
    }


def _mean(values: list[int]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0
