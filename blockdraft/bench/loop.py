"""The event loop of whatever measures: uvloop, where there is one, reads an event in half the time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run_in_loop(work: Coroutine[object, object, T]) -> T:
    """Run to the end, as asyncio.run does."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(work)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
