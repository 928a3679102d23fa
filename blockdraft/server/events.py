"""What the live page shows: the start, and what the engine does now, once a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict

from blockdraft.engine.loop import EngineLoop
from blockdraft.engine.stats import Snapshot

INTERVAL_S = 1.0
WINDOW_S = 3  # whole seconds over which "now" is averaged
Json = dict[str, object]


async def live_events(loop: EngineLoop) -> AsyncIterator[Json]:
    """An object per second until the loop is closed; the first one carries the history."""
    sent_s = -1
    while not loop.is_closed:
        snapshot = loop.snapshot()
        fresh = [] if snapshot is None else [point for point in snapshot.recent if point.time_s > sent_s]
        sent_s = fresh[-1].time_s if fresh else sent_s
        yield {
            "startup": loop.startup.snapshot(),
            "engine": None if loop.engine_info is None else asdict(loop.engine_info),
            "now": None if snapshot is None else _now(snapshot),
            "history": [[point.time_s, point.tokens] for point in fresh],
        }
        await asyncio.sleep(INTERVAL_S)


def _now(snapshot: Snapshot) -> Json:
    window = snapshot.recent[-WINDOW_S:]
    drafts = snapshot.num_drafts
    return {
        "tokens_per_second": _mean([point.tokens for point in window]),
        "steps_per_second": _mean([point.steps for point in window]),
        "tokens_per_step": round(1 + snapshot.num_accepted / drafts, 3) if drafts else 1.0,
        "acceptance": [round(count / drafts, 4) for count in snapshot.accepted] if drafts else [],
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "pages_used": snapshot.num_pages_used,
        "num_pages": snapshot.num_pages,
    }


def _mean(values: list[int]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0
