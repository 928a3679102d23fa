"""The first seconds of a server: its speed under a load that begins when `/ready` is green, and later.

    python -m benchmarks.first_seconds [--streams 1 16] [--early 6] [--seconds 14] [--json FILE] [FLAGS]

More flags are for `serve`. Each number of streams has a server of its own, whose start finds what an earlier
one has kept. Each stream asks for code, one answer after the other, without prefix hits. The tokens of an
answer count evenly over its events. "Later" is what follows the first `--early` seconds. "Steady" is the time
from the command until one second had 0.9 of the later speed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks import record
from benchmarks.soak import prompts_of
from benchmarks.start import ready
from blockdraft.bench.client import Client
from blockdraft.bench.load import run_in_loop
from blockdraft.bench.records import SPECULATIVE, Answer, Ask, Prompt
from blockdraft.machine.machine import free_port

STEADY = 0.9  # of the later speed
MODEL = "default"


@dataclass(frozen=True, slots=True)
class Load:
    """Answers, and when the load began and how long it went on; all times are of one clock."""

    answers: list[Answer]
    begun_s: float
    seconds: float

    def events(self) -> list[tuple[float, float]]:
        """Return the time of each event, and its tokens."""
        found = []
        for one in self.answers:
            if one.first_s is not None and one.completion_tokens:
                times = itertools.accumulate(one.gaps_s, initial=one.first_s)
                found += [(at_s, one.completion_tokens / one.num_events) for at_s in times]
        return sorted(found)

    def speed(self, from_s: float, to_s: float) -> float:
        """Return the tokens per second between two times after the load's begin."""
        low, high = self.begun_s + from_s, self.begun_s + to_s
        return sum(tokens for at_s, tokens in self.events() if low <= at_s < high) / (to_s - from_s)

    def ttft_ms(self, from_s: float, to_s: float) -> tuple[float, float]:
        """Return the median and the 99th percentile of requests sent between two times."""
        low, high = self.begun_s + from_s, self.begun_s + to_s
        found = [one.ttft_s * 1e3 for one in self.answers if one.ttft_s and low <= one.sent_s < high]
        if len(found) < 2:
            return (found * 2 or [float("nan")] * 2)[0], float("nan")
        cuts = statistics.quantiles(found, n=100, method="inclusive")
        return cuts[49], cuts[98]

    def steady_s(self, later: float) -> float | None:
        """Return the end of the first second with `STEADY` of the later speed, after the load's begin."""
        begins = [number / 10 for number in range(int(self.seconds * 10) - 10)]
        return next((at + 1.0 for at in begins if self.speed(at, at + 1.0) >= STEADY * later), None)


@contextmanager
def serving(flags: list[str]) -> Iterator[tuple[str, float]]:
    """Yield a server's address the moment it is ready, and the seconds that its start took."""
    port = free_port()
    command = [sys.executable, "-m", "blockdraft", "serve", "--port", str(port), *flags]
    begun_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=dict(os.environ), stdout=log, stderr=log)
        try:
            while ready(port).get("state") != "ready":
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read())
                time.sleep(0.005)
            yield f"http://127.0.0.1:{port}", time.perf_counter() - begun_s
        finally:
            process.terminate()
            process.wait()


async def load(url: str, num_streams: int, seconds: float, max_tokens: int) -> Load:
    """Ask in `num_streams` streams for so many seconds, and give up what has not ended then."""
    answers: list[Answer] = []
    numbers = itertools.count()
    prompts = prompts_of("code")
    async with Client(url, MODEL) as client:
        begun_s = client.clock()

        async def stream() -> None:
            while True:
                number = next(numbers)
                prompt = Prompt(str(number), "code", (prompts[number % len(prompts)],))
                ask = Ask(prompt, SPECULATIVE, max_tokens, ignores_eos=True, cache_salt=str(number))
                await client.converse(ask, on_answer=answers.append)

        tasks = [asyncio.ensure_future(stream()) for _ in range(num_streams)]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    failed = [one.error for one in answers if one.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
    return Load(answers, begun_s, seconds)


def measure(num_streams: int, options: argparse.Namespace, flags: list[str]) -> dict[str, object]:
    with serving(flags) as (url, start_s):
        found = run_in_loop(load(url, num_streams, options.seconds, options.max_tokens))
    later = found.speed(options.early, options.seconds)
    steady_s = found.steady_s(later)
    return {
        "streams": num_streams,
        "start_s": start_s,
        "requests": len(found.answers),
        "early_tokens_per_s": found.speed(0.0, options.early),
        "later_tokens_per_s": later,
        "early_ttft_ms": found.ttft_ms(0.0, options.early),
        "later_ttft_ms": found.ttft_ms(options.early, options.seconds),
        "steady_s": None if steady_s is None else start_s + steady_s,
    }


def row(found: dict[str, object]) -> list[object]:
    early, later = found["early_tokens_per_s"], found["later_tokens_per_s"]
    share = early / later if later else float("nan")  # type: ignore[operator]
    times = [*found["early_ttft_ms"], *found["later_ttft_ms"]]  # type: ignore[misc]
    steady_s = "never" if found["steady_s"] is None else found["steady_s"]
    return [found["streams"], early, later, share, *times, found["start_s"], steady_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--early", type=float, default=6.0, metavar="S")
    parser.add_argument("--seconds", type=float, default=14.0, metavar="S")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--json", metavar="FILE")
    options, flags = parser.parse_known_args()
    with serving(flags):
        pass  # it leaves compiled kernels and measured widths for the next
    found = [measure(count, options, flags) for count in options.streams]
    header = ["streams", "tok/s early", "later", "share", "TTFT p50", "p99", "later p50", "p99"]
    print(record.table([*header, "ready, s", "steady, s"], [row(one) for one in found]))
    result = {"what": "the first seconds", "settings": vars(options), **record.context(), "loads": found}
    record.save(options.json, result)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
