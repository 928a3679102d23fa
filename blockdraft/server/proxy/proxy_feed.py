"""Reads the /metrics of vLLM and SGLang for our live page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import aiohttp
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from blockdraft.engine.stats import LATELY_S
from blockdraft.prometheus_text import samples
from blockdraft.server.page.live_feed import INTERVAL_S, WINDOW_S, Json, fate_of_drafts

HISTORY_S = 300
TIMEOUT_S = 5.0  # arbitrary; on loopback an answer takes milliseconds


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """One reading of an engine's metrics. Counts begin at its start; None if it does not report them."""

    tokens: float = 0.0
    prompt_tokens: float = 0.0
    steps: float | None = None
    drafts: float = 0.0
    accepted: float = 0.0
    by_position: tuple[float, ...] = ()  # accepted drafts, by position in the block
    rate: float | None = None  # tokens per second, if the engine measures it itself
    tokens_per_step: float | None = None  # if the engine measures it itself
    running: int = 0
    waiting: int = 0
    cache_share: float = 0.0  # the share in use, 0 to 1
    num_pages: int = 0


def read_metrics(text: str) -> MetricsReading | None:
    """Read the metrics of vLLM or SGLang; return None if `text` has neither."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    num_engines, num_pages = 0, 0
    for name, labels, value in samples(text):
        if not name.startswith(("vllm:", "sglang:")):
            continue
        totals[name] = totals.get(name, 0.0) + value
        if name.endswith("_accepted_tokens_per_pos_total") and labels.get("position", "").isdecimal():
            place = int(labels["position"])
            positions[place] = positions.get(place, 0.0) + value
        elif name in ("vllm:kv_cache_usage_perc", "sglang:token_usage"):
            num_engines += 1
        elif name == "vllm:cache_config_info" and labels.get("num_gpu_blocks", "").isdecimal():
            num_pages += int(labels["num_gpu_blocks"])
    if not totals:
        return None
    if any(name.startswith("vllm:") for name in totals):
        return _vllm(totals, positions, num_pages, max(1, num_engines))
    return _sglang(totals, max(1, num_engines))


def _vllm(
    totals: Mapping[str, float], positions: Mapping[int, float], num_pages: int, num_engines: int
) -> MetricsReading:
    spec = "vllm:spec_decode_num_"
    return MetricsReading(
        tokens=totals.get("vllm:generation_tokens_total", 0.0),
        prompt_tokens=totals.get("vllm:prompt_tokens_total", 0.0),
        steps=totals.get("vllm:iteration_tokens_total_count"),
        drafts=totals.get(f"{spec}drafts_total", 0.0),
        accepted=totals.get(f"{spec}accepted_tokens_total", 0.0),
        by_position=tuple(positions.get(place, 0.0) for place in range(max(positions, default=-1) + 1)),
        running=int(totals.get("vllm:num_requests_running", 0)),
        waiting=int(totals.get("vllm:num_requests_waiting", 0)),
        cache_share=totals.get("vllm:kv_cache_usage_perc", 0.0) / num_engines,
        num_pages=num_pages,
    )


def _sglang(totals: Mapping[str, float], num_engines: int) -> MetricsReading:
    """Read SGLang's metrics. It counts an answer's tokens at its end; until then, use the rate it reports."""
    running = int(totals.get("sglang:num_running_reqs", 0))
    return MetricsReading(
        tokens=totals.get("sglang:generation_tokens_total", 0.0),
        prompt_tokens=totals.get("sglang:prompt_tokens_total", 0.0),
        rate=totals.get("sglang:gen_throughput", 0.0) if running else 0.0,
        tokens_per_step=totals.get("sglang:spec_accept_length", 0.0) / num_engines or None,
        running=running,
        waiting=int(totals.get("sglang:num_queue_reqs", 0)),
        cache_share=totals.get("sglang:token_usage", 0.0) / num_engines,
        num_pages=int(totals.get("sglang:max_total_num_tokens", 0)),  # a page is a token there
    )


class MetricsFeed:
    """Reads an engine's metrics once a second, keeps the last minutes, and notices stalls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[tuple[float, MetricsReading]] = deque(maxlen=HISTORY_S + 1)
        self._moved_s = clock()

    async def run(self, look: Callable[[], Awaitable[str | None]]) -> None:
        """Read once a second, forever. `look` returns the text of /metrics, or None."""
        while True:
            self.take(await look())
            await asyncio.sleep(INTERVAL_S)

    def take(self, text: str | None) -> None:
        reading = None if text is None else read_metrics(text)
        if reading is None:
            return
        now_s, last = self._clock(), self._points[-1][1] if self._points else None
        if last is None or reading.running == 0 or _work(last) != _work(reading):
            self._moved_s = now_s
        self._points.append((now_s, reading))

    @property
    def stalled_s(self) -> float:
        """Return for how many seconds the engine has had requests while its counters stood still."""
        last = self._points[-1][1] if self._points else None
        # Without a counter of steps, counters only change when answers end: a busy engine may look idle.
        return (
            0.0 if last is None or last.steps is None or not last.running else self._clock() - self._moved_s
        )

    async def refresh(self) -> None:
        """Do nothing: `run` reads the metrics."""

    def now(self) -> Json | None:
        """Return the engine's present state; None before the first reading."""
        if not self._points:
            return None
        reading = self._points[-1][1]
        return {
            "tokens_per_second": round(self._rate(), 2),
            "steps_per_second": None if reading.steps is None else round(self._rate("steps"), 2),
            **self._lately(reading),
            "num_drafts": round(reading.drafts),
            "running": reading.running,
            "waiting": reading.waiting,
            "pages_used": round(reading.cache_share * reading.num_pages),
            "num_pages": reading.num_pages,
        }

    def history(self, after_s: float) -> list[tuple[float, float]]:
        """Return (second, tokens per second) for every reading after `after_s`."""
        points = list(self._points)
        return [
            (round(later[0], 3), round(_speed(earlier, later, "tokens"), 2))
            for earlier, later in pairwise(points)
            if later[0] > after_s
        ]

    def _lately(self, last: MetricsReading) -> Json:
        """Return acceptance in the last seconds. These engines verify every position of every block."""
        since_s = self._points[-1][0] - LATELY_S
        first = next(reading for at_s, reading in self._points if at_s >= since_s)
        drafts = last.drafts - first.drafts
        if drafts <= 0:  # no drafts, or the engine was restarted
            return fate_of_drafts(last.tokens_per_step if last.running else None, [])
        old = first.by_position + (0.0,) * (len(last.by_position) - len(first.by_position))
        shares = [(new - before) / drafts for new, before in zip(last.by_position, old, strict=False)]
        return fate_of_drafts(1 + (last.accepted - first.accepted) / drafts, shares)

    def _rate(self, name: str = "tokens") -> float:
        if len(self._points) < 2:
            return 0.0
        return _speed(self._points[max(-len(self._points), -1 - WINDOW_S)], self._points[-1], name)


def _speed(earlier: tuple[float, MetricsReading], later: tuple[float, MetricsReading], name: str) -> float:
    if name == "tokens" and later[1].rate is not None:
        return later[1].rate
    before, after = getattr(earlier[1], name) or 0.0, getattr(later[1], name) or 0.0
    return max(0.0, after - before) / max(1e-3, later[0] - earlier[0])


def _work(reading: MetricsReading) -> tuple[float | None, ...]:
    """Return the counters that change whenever the engine works."""
    return reading.tokens, reading.prompt_tokens, reading.steps, reading.drafts


async def fetch_metrics(session: aiohttp.ClientSession, url: str) -> tuple[str, str] | None:
    """Return the text of /metrics and its content type; None if it cannot be read now."""
    try:
        async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as response:
            if response.status != 200:
                return None
            text = await response.text(errors="replace")
            return text, response.headers.get("content-type", CONTENT_TYPE_LATEST)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
