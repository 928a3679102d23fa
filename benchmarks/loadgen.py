"""The delay that the load generator adds: 500 streams at once against a server of a known pace.

    python -m benchmarks.loadgen [--streams 500] [--rounds 3] [--out FILE]
    python -m benchmarks.loadgen --ceiling [--out FILE]

The generator has one core and the server another, in a process of its own, where there are two. The server
writes into each answer when it read the request and when it wrote the first chunk: what a time to first token
has beyond that was added on the way, and with one stream alone it is the machine's least. Closed loop: all
streams begin at once, and again as they end. Open loop: as many on average, by a Poisson process. Nothing
else may run meanwhile: the load before the start is recorded, and how long the generator waited for its core.

--ceiling: how many events one process can read. "together": one event of every stream at a time, as after an
engine's step, so slowly that no two are read at once; the figure is events over CPU time. "ready": events lie
ready in thousands and are read many at once, which no generator of a true server sees; over the clock's time.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import context, save, table
from blockdraft.bench.client import Client
from blockdraft.bench.load import poisson, run_in_loop, send_block
from blockdraft.bench.null_server import StreamPace, null_server
from blockdraft.bench.records import SPECULATIVE, Answer, Ask, OfferedLoad, Prompt

MAX_ADDED_MS = 5.0
MAX_PACE_ERROR = 0.02
MAX_EVENT_S = 0.0002  # to read one: a server that writes no faster is never waiting for the generator
PROMPT = Prompt(id="p", category="c", turns=("Tell a story of a hundred words. " * 20,))


@contextlib.contextmanager
def serving(pace: StreamPace, core: int | None) -> Iterator[str]:
    """Run the server; yield its address."""
    with null_server(pace) as (url, pid):
        if core is not None:
            os.sched_setaffinity(pid, {core})
        yield url


# ---- the generator


def take_core() -> int | None:
    """Stay on one core; the number of another, for the server."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    return cores[1] if len(cores) > 1 else None


def waited_s() -> float:
    """Return how long this process waited for a core, as Linux counts it."""
    path = Path("/proc/self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


@dataclass(frozen=True)
class Sample:
    """Answers, and what share of the time the generator ran, and waited for its core."""

    answers: list[Answer]
    busy: float
    waited: float
    seconds: float


async def measure(url: str, load: OfferedLoad, times: list[float | None]) -> Sample:
    asks = [Ask(prompt=PROMPT, arm=SPECULATIVE, max_tokens=64, at_s=at_s) for at_s in times]
    clock = time.monotonic
    async with Client(url, "m", clock=clock) as client:
        start_s, busy_s, ready_s = clock(), time.process_time(), waited_s()
        answers = (await send_block(client, asks, load)).all_answers()
        seconds = clock() - start_s
    failed = [answer.error for answer in answers if answer.error is not None]
    assert not failed, failed[0]
    busy = (time.process_time() - busy_s) / seconds
    return Sample(answers, busy=busy, waited=(waited_s() - ready_s) / seconds, seconds=seconds)


def added_ms(answers: list[Answer]) -> list[float]:
    """Time to first token beyond what the server took."""
    found = []
    for answer in answers:
        assert answer.ttft_s is not None
        read_s, written_s = map(float, answer.text.split()[:2])
        found.append((answer.ttft_s - (written_s - read_s)) * 1e3)
    return found


def figures(sample: Sample, pace: StreamPace) -> dict[str, object]:
    answers = sample.answers
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    tpots = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    lags = [(answer.sent_s - answer.planned_s) * 1e3 for answer in answers]
    return {
        "requests": len(answers),
        "ttft_ms": percentiles([answer.ttft_s * 1e3 for answer in answers if answer.ttft_s is not None]),
        "added_ms": percentiles(added_ms(answers)),
        "sent_late_ms": percentiles(lags),
        "tpot_error": statistics.mean(tpots) / pace.tpot_s - 1,
        "gap_error": statistics.mean(gaps) / pace.gap_s - 1,
        "busy": sample.busy,
        "waited": sample.waited,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}


def run_round(url: str, pace: StreamPace, num_streams: int) -> dict[str, dict[str, object]]:
    rate, num_asks = num_streams / pace.duration_s, 2 * num_streams
    loads: dict[str, tuple[OfferedLoad, list[float | None]]] = {
        "alone": (OfferedLoad(concurrency=1), [None] * 6),
        "closed": (OfferedLoad(concurrency=num_streams), [None] * num_asks),
        "open": (OfferedLoad(rate=rate), [*poisson(num_asks, rate, seed=1)]),
    }
    return {name: figures(run_in_loop(measure(url, *load)), pace) for name, load in loads.items()}


def ceiling(core: int | None) -> list[dict[str, float]]:
    """Measure how fast one process reads, by streams and tokens per event."""
    found = []
    for streams in (16, 64, 256):
        for tokens in (1, 3):
            gap_s = streams * MAX_EVENT_S
            together = StreamPace(0.0, gap_s, max(8, round(2.0 / gap_s)), tokens, is_together=True)
            ready = StreamPace(0.0, 0.0, 1 + 64 * 8, tokens, chunks_per_write=64)
            row: dict[str, float] = {"streams": streams, "tokens": tokens}
            for name, pace in (("together", together), ("ready", ready)):
                num_asks, load = streams * (1 if name == "together" else 2), OfferedLoad(streams)
                with serving(pace, core) as url:
                    sample = run_in_loop(measure(url, load, [None] * num_asks))
                num_events = sum(1 + len(answer.gaps_s) for answer in sample.answers)
                taken_s = sample.seconds * (sample.busy if name == "together" else 1.0)
                row[name] = num_events / taken_s
            found.append(row)
    return found


def rows(rounds: list[dict[str, dict[str, object]]], num_streams: int) -> list[list[object]]:
    found: list[list[object]] = []
    for number, round_ in enumerate(rounds):
        alone = round_["alone"]["added_ms"]["p50"]  # type: ignore[index]
        for name, cell in round_.items():
            added, late = cell["added_ms"], cell["sent_late_ms"]
            pace_error = max(cell["tpot_error"], cell["gap_error"], key=abs)  # type: ignore[type-var,arg-type]
            label = f"{number + 1} {name}, {1 if name == 'alone' else num_streams} streams"
            found.append(
                [label]
                + [added[cut] - alone for cut in ("p50", "p90", "p99", "max")]  # type: ignore[index]
                + [late["p99"], pace_error * 100, cell["busy"] * 100, cell["waited"] * 100]  # type: ignore[index,operator]
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--gap-ms", type=float, default=100.0)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--tokens-per-chunk", type=int, default=4)
    parser.add_argument("--ceiling", action="store_true", help="how many events a process can read")
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args()
    if options.ceiling:
        result = context()
        cells = ceiling(take_core())
        print(
            table(["streams, tokens per event, events/s", *cells[0]], [["", *row.values()] for row in cells])
        )
        save(options.out, result | {"ceiling": cells})
        return
    pace = StreamPace(options.ttft_ms / 1e3, options.gap_ms / 1e3, options.chunks, options.tokens_per_chunk)
    result = context() | {"streams": options.streams, "pace": asdict(pace)}
    with serving(pace, take_core()) as url:
        rounds = [run_round(url, pace, options.streams) for _ in range(options.rounds)]
    result["rounds"] = rounds
    header = ["added to TTFT, ms", "p50", "p90", "p99", "max", "late p99", "pace %", "busy %", "waited %"]
    print(table(header, rows(rounds, options.streams)))
    print(f"aim: p99 below {MAX_ADDED_MS:g} ms, pace within {MAX_PACE_ERROR:.0%}")
    save(options.out, result)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
