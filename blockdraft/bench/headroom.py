"""Measures how fast the load generator can read, by a short burst from a server that computes nothing.

A true server writes one event to each of its streams after every step. So does this one, and leaves time
enough in between that no two events of a stream are read at once: events that pile up are read faster, but
late. What counts is therefore CPU time, and a neighbour on the same cores does not spoil it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from blockdraft.bench.client import Client
from blockdraft.bench.figures import GeneratorFigures
from blockdraft.bench.fleet import Fleet
from blockdraft.bench.null_server import StreamPace, null_server
from blockdraft.bench.records import SPECULATIVE, Ask, OfferedLoad, Prompt

BURST_S = 0.5
MIN_CHUNKS = 24  # per answer: with fewer, the cost of requests dominates
MIN_GAP_S = 0.002  # event-loop timers have millisecond resolution
MAX_EVENT_S = 0.0001  # an upper bound for reading an event: 0.04 ms on a Neoverse-N1
PROMPT = Prompt("null", "null", ("Say nothing. " * 40,))


async def measure_headroom(fleet: Fleet, loads: Sequence[OfferedLoad]) -> list[GeneratorFigures]:
    """Return what as many processes as each load has can read of as many streams."""
    return [await _burst(fleet, load) for load in dict.fromkeys(loads)]


async def _burst(fleet: Fleet, load: OfferedLoad) -> GeneratorFigures:
    streams = load.concurrency if load.rate is None else math.ceil(load.rate)
    count = fleet.num_processes(load)
    gap_s = max(MIN_GAP_S, streams / count * MAX_EVENT_S)
    pace = StreamPace(gap_s, gap_s, max(MIN_CHUNKS, round(BURST_S / gap_s)), 1, is_together=True)
    asks = [Ask(PROMPT, SPECULATIVE, max_tokens=pace.num_tokens)] * streams
    with null_server(pace) as (url, _):
        async with Client(url, "null") as client:
            ledger = await fleet.send_block(client, asks, OfferedLoad(concurrency=streams))
    num_events = sum(answer.num_events for answer in ledger.all_answers())
    return {
        "concurrency": load.concurrency,
        "rate": load.rate,
        "num_processes": count,
        "events_per_s": count * num_events / ledger.cpu_s if ledger.cpu_s > 0 else 0.0,
        "used": None,
    }
