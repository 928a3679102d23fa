"""Counters of an engine since it started, for /metrics, the live page and the benchmark.

The engine's thread counts; any thread may take a snapshot. Histograms have vLLM's names and buckets, so that
vLLM's dashboards work.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from threading import Lock
from typing import TYPE_CHECKING, Any

from blockdraft.engine.histogram import Histogram, Recorder, added, at_least, one_two_five
from blockdraft.engine.request import Delta, Metrics, counted_width

if TYPE_CHECKING:  # these modules import torch, which a reader of snapshots does not need
    from blockdraft.engine.scheduler import Batch, Committed
    from blockdraft.engine.sequence import Sequence

RECENT_S = 300
ENOUGH_BLOCKS = 8  # recent blocks needed to report a speedup
LATELY_S = 10  # whole seconds over which recent drafts are reported; arbitrary

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_CHOICES = (1, 2, 5, 10, 20)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_preemptions: int = 0  # since the start
    num_refused_full: int = 0  # requests, since the start, because the queue was full
    num_refused_wait: int = 0  # and because they would have waited too long
    expected_wait_s: float = 0.0  # of a new request, for a row
    num_states: int = 0  # slots for saved recurrent states
    num_states_saved: int = 0
    num_states_evicted: int = 0  # since the start
    num_pages_restored: int = 0  # from the prefix disk, at the start
    num_pages_damaged: int = 0  # there, and not used
    chosen_rows: int = 0  # of the last step whose width was chosen; 0: no step yet
    chosen_tokens: int = 0  # of all rows
    speedup: float | None = None  # lately, against plain steps of as many rows; None: not known

    @property
    def chosen_width(self) -> float:
        """Return the mean tokens of a row in that step."""
        return self.chosen_tokens / self.chosen_rows if self.chosen_rows else 0.0

    @property
    def speculation(self) -> str:
        """Return a sentence on whether speculation pays, or "" if no width was chosen yet."""
        if not self.chosen_rows:
            return ""
        at_once = "one answer" if self.chosen_rows == 1 else f"{self.chosen_rows} answers at once"
        if self.chosen_tokens == self.chosen_rows:
            return f"speculation: off for now, plain decoding is as fast with {at_once}"
        tried = f"speculation: on, {self.chosen_tokens} tokens tried per step with {at_once}"
        if self.chosen_rows > 1:
            tried += f" ({self.chosen_width:.3g} of each)"
        if self.speedup is None:
            return tried
        speedup = math.floor(10 * self.speedup) / 10  # rounded up, it could exceed the tokens per step
        return f"{tried}, lately {speedup:.1f}x the speed of plain decoding"


@dataclass(frozen=True, slots=True)
class Point:
    """The work of one second."""

    time_s: int  # its start, on the engine's clock
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Counts of verified rows and of their drafts. Drafts after an answer's end do not count."""

    num_blocks: int = 0
    drafted: tuple[int, ...] = ()  # [i]: drafts that were verified at position i + 1; narrow blocks have few
    accepted: tuple[int, ...] = ()  # [i]: drafts at position i + 1 that were accepted
    plain_blocks: float = 0.0  # blocks that plain steps would have verified in the same time
    num_untold: int = 0  # blocks whose time in plain steps is not known

    def since(self, before: Drafts) -> Drafts:
        """Return the counts added since `before`."""
        return Drafts(
            self.num_blocks - before.num_blocks,
            _differences(self.drafted, before.drafted),
            _differences(self.accepted, before.accepted),
            self.plain_blocks - before.plain_blocks,
            self.num_untold - before.num_untold,
        )

    def together(self, other: Drafts) -> Drafts:
        """Return the counts of two engines."""
        return Drafts(
            self.num_blocks + other.num_blocks,
            _sums((self.drafted, other.drafted)),
            _sums((self.accepted, other.accepted)),
            self.plain_blocks + other.plain_blocks,
            self.num_untold + other.num_untold,
        )

    @property
    def tokens_per_block(self) -> float | None:
        """Return the mean tokens that a block commits, or None if no block was verified."""
        return 1 + sum(self.accepted) / self.num_blocks if self.num_blocks else None

    @property
    def speedup(self) -> float | None:
        """Return the speed relative to plain steps, at most `tokens_per_block`.

        None if it is unknown, or if there were fewer than ENOUGH_BLOCKS blocks.
        """
        if self.num_untold or self.num_blocks < ENOUGH_BLOCKS:
            return None
        return (self.num_blocks + sum(self.accepted)) / self.plain_blocks

    @property
    def acceptance(self) -> list[float]:
        """Return the share of accepted drafts at each position."""
        return [kept / tried for kept, tried in zip(self.accepted, self.drafted, strict=True) if tried]


def _differences(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(new - old for new, old in zip_longest(after, before, fillvalue=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Load):
    """All counters at one moment. Durations and times are on the engine's clock."""

    time_s: float
    num_prefill_tokens: int  # prompt tokens that went through the model
    num_cached_tokens: int  # prompt tokens found in the prefix cache instead
    prompt_tokens: int  # of all choices that have begun their answer
    generation_tokens: int
    num_decode_steps: int
    num_prefill_steps: int
    num_blocks: int  # rows verified, over all decode steps
    num_drafts: int  # blocks that held drafts: verified at a width above 1
    num_drafted: int
    num_trees: int  # blocks whose drafts were trees
    num_tree_tokens: int  # that their rows verified
    accepted: tuple[int, ...]  # [i]: drafts at position i + 1 that were accepted
    num_accepted: int
    finished: Mapping[str, int]  # choices, by reason; "error": lost with a failed step
    histograms: Mapping[str, Histogram]
    num_rechecked: int  # answers that were computed again by plain decoding
    num_different: int  # of them, those that differ
    recent: tuple[Point, ...]  # whole seconds without a gap, newest last, at most RECENT_S
    lately: Drafts  # of the last LATELY_S seconds, the current one included


def combined(snapshots: Items[Snapshot]) -> Snapshot | None:
    """Return the counters of several engines together, or None if there are none."""
    if len(snapshots) < 2:
        return snapshots[0] if snapshots else None
    busiest = max(snapshots, key=lambda one: one.num_running)
    values = {item.name: [getattr(one, item.name) for one in snapshots] for item in fields(Snapshot)}
    totals = {name: _TOGETHER.get(name, sum)(each) for name, each in values.items() if name not in _WIDTH}
    return Snapshot(**totals, **{name: getattr(busiest, name) for name in _WIDTH})


def _sums(rows: Items[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


def _points(rows: Items[tuple[Point, ...]]) -> tuple[Point, ...]:
    """Add up the points of each second; all engines of a machine have the same clock."""
    found: dict[int, Point] = {}
    for point in (point for row in rows for point in row):
        before = found.get(point.time_s, Point(point.time_s, 0, 0))
        found[point.time_s] = Point(point.time_s, before.tokens + point.tokens, before.steps + point.steps)
    return tuple(found[second] for second in sorted(found))[-RECENT_S:]


_WIDTH = ("chosen_rows", "chosen_tokens", "speedup")  # of the engine with the most rows
_TOGETHER: dict[str, Callable[[list[Any]], object]] = {  # the others are added up
    "time_s": max,
    "expected_wait_s": min,  # requests go where it is short
    "recent": _points,
    "lately": functools.partial(functools.reduce, Drafts.together),
    "accepted": _sums,
    "finished": lambda counts: sum(map(Counter, counts), Counter()),
    "histograms": lambda all_: {name: added([one[name] for one in all_]) for name in all_[0]},
}


class Stats:
    """Totals since the start. `accepted[i]` counts the drafts at position i + 1 that were accepted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_model_len: int = 1_000_000) -> None:
        self.num_prefill_steps = 0
        self.num_prefill_tokens = 0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self.num_decode_steps = 0
        self.num_blocks = 0  # rows verified, over all decode steps
        self.plain_blocks = 0.0  # blocks that plain steps would have verified in the same time
        self.num_untold = 0  # blocks whose time in plain steps is not known
        self.num_drafts = 0  # blocks that held drafts
        self.num_drafted = 0
        self.num_trees = self.num_tree_tokens = 0
        self.num_emitted = 0
        self.drafted: list[int] = []  # [i]: drafts at position i + 1
        self.accepted: list[int] = []
        self.finished: Counter[str] = Counter()
        self.num_rechecked = 0  # answers that were computed again by plain decoding
        self.num_different = 0  # of them, those that differ
        self._clock = clock
        self._ended: dict[str, list[int]] = {}  # of each request, the tokens of choices that have ended
        self._recorders = _recorders(max_model_len)
        self._recent = _Recent(clock())
        self._begins: deque[tuple[int, Drafts]] = deque(maxlen=LATELY_S)  # of seconds in which blocks ended
        self._lock = Lock()

    def count(self, batch: Batch, committed: Committed, num_plain: float | None = None) -> None:
        """Count one step. `num_plain`: how many plain steps take as long, if known."""
        with self._lock:
            if batch.kind == "prefill":
                self.num_prefill_steps += 1
                self.num_prefill_tokens += sum(batch.counts)
                self._observe("iteration_tokens_total", sum(batch.counts))
            else:
                num_kept = committed.num_kept
                if batch.tree:
                    self.num_trees += len(num_kept)
                    self.num_tree_tokens += len(num_kept) * batch.tree
                self._count_blocks(committed.widths, committed.num_committed, num_kept)
                if num_plain is None:
                    self.num_untold += len(num_kept)
                else:
                    self.plain_blocks += len(num_kept) * num_plain
                self._count_latencies(committed.sequences)
                self._count_ended(committed.ended)
                num_tokens = sum(num_kept)
                self.num_emitted += num_tokens
                self._observe("iteration_tokens_total", num_tokens)
            num_steps = self.num_prefill_steps + self.num_decode_steps
            self._recent.count(self._clock(), num_tokens=self.num_emitted, num_steps=num_steps)

    def count_aborted(self, deltas: Items[Delta]) -> None:
        """Count aborted choices."""
        with self._lock:
            for delta in deltas:
                self._ended.pop(delta.request_id, None)
            self.finished["abort"] += len(deltas)

    def count_lost(self, sequences: Items[Sequence]) -> None:
        """Count choices that ended with a failed step."""
        with self._lock:
            for sequence in sequences:
                self._ended.pop(sequence.request.id, None)
            self.finished["error"] += len(sequences)

    def count_recheck(self, *, is_equal: bool) -> None:
        """Count an answer that was computed again by plain decoding."""
        with self._lock:
            self.num_rechecked += 1
            self.num_different += not is_equal

    def snapshot(self, load: Load) -> Snapshot:
        """Return all counters. Any thread may call this."""
        with self._lock:
            now_s = self._clock()
            lately = self._lately(int(now_s))
            return Snapshot(
                **asdict(replace(load, speedup=lately.speedup)),
                time_s=now_s,
                num_prefill_tokens=self.num_prefill_tokens,
                num_cached_tokens=self.num_cached_tokens,
                prompt_tokens=self.num_prompt_tokens,
                generation_tokens=self.num_emitted,
                num_decode_steps=self.num_decode_steps,
                num_prefill_steps=self.num_prefill_steps,
                num_blocks=self.num_blocks,
                num_drafts=self.num_drafts,
                num_drafted=self.num_drafted,
                num_trees=self.num_trees,
                num_tree_tokens=self.num_tree_tokens,
                accepted=tuple(self.accepted),
                num_accepted=sum(self.accepted),
                finished=dict(self.finished),
                histograms={n: r.histogram() for n, r in self._recorders.items()},
                num_rechecked=self.num_rechecked,
                num_different=self.num_different,
                recent=self._recent.points(now_s),
                lately=lately,
            )

    # ---- with the lock held

    def _drafts(self) -> Drafts:
        counts = tuple(self.drafted), tuple(self.accepted)
        return Drafts(self.num_blocks, *counts, self.plain_blocks, self.num_untold)

    def _lately(self, second: int) -> Drafts:
        now = self._drafts()
        return now.since(next((begin for at, begin in self._begins if at > second - LATELY_S), now))

    def _count_blocks(self, widths: Items[int], num_committed: Items[int], num_kept: Items[int]) -> None:
        """Count the rows of one step, by how many tokens each committed and its answer kept."""
        second = int(self._clock())
        if not self._begins or self._begins[-1][0] < second:
            self._begins.append((second, self._drafts()))
        self.num_decode_steps += 1
        self.num_blocks += len(num_kept)
        most = max(widths, default=1)
        for counts in (self.drafted, self.accepted):
            counts.extend([0] * (most - 1 - len(counts)))
        by_width, by_kept = [0] * (most + 1), [0] * (most + 1)  # [n]: rows of n tokens
        for width, kept in zip(widths, num_kept, strict=True):
            by_width[width] += 1
            by_kept[kept] += 1
        if num_committed != num_kept:  # an answer ended inside a block
            for width, committed, kept in zip(widths, num_committed, num_kept, strict=True):
                by_width[width] -= 1
                by_width[counted_width(width, committed, kept)] += 1
        drafted = at_least(by_width)[2:]
        self.num_drafts += drafted[0] if drafted else 0
        self.num_drafted += sum(drafted)
        for position, (num_drafted, num_accepted) in enumerate(
            zip(drafted, at_least(by_kept)[2:], strict=True)
        ):
            self.drafted[position] += num_drafted
            self.accepted[position] += num_accepted

    def _count_latencies(self, sequences: Items[Sequence]) -> None:
        now_s = self._clock()
        num_rows: dict[float, int] = {}  # by the time of their last tokens: rows of one step have the same
        for sequence in sequences:
            before_s = sequence.tally.last_token_s
            sequence.tally.last_token_s = now_s
            if before_s is None:
                self._count_first_token(sequence, now_s)
            else:
                num_rows[before_s] = num_rows.get(before_s, 0) + 1
        for before_s, count in num_rows.items():
            # As in vLLM: the time between two steps of an answer, however many tokens a step commits.
            self._observe("inter_token_latency_seconds", now_s - before_s, count)

    def _count_first_token(self, sequence: Sequence, now_s: float) -> None:
        self.num_prompt_tokens += sequence.num_prompt
        self.num_cached_tokens += sequence.tally.num_cached_tokens
        self._observe("time_to_first_token_seconds", now_s - sequence.request.arrival_s)

    def _count_ended(self, ended: Items[tuple[Sequence, Delta]]) -> None:
        for sequence, delta in ended:
            assert delta.finish_reason is not None
            assert delta.metrics is not None
            self.finished[delta.finish_reason] += 1
            self._count_answer(delta.metrics)
            self._observe("request_params_max_tokens", sequence.max_length - sequence.num_prompt)
            self._count_request(sequence, delta.metrics.num_tokens)

    def _count_request(self, sequence: Sequence, num_tokens: int) -> None:
        """Count a request when the last of its choices has ended."""
        ended, n = self._ended.setdefault(sequence.request.id, []), sequence.request.sampling.n
        ended.append(num_tokens)
        if len(ended) == n:
            del self._ended[sequence.request.id]
            self._observe("request_params_n", n)
            self._observe("request_max_num_generation_tokens", max(ended))

    def _count_answer(self, metrics: Metrics) -> None:
        self._observe("e2e_request_latency_seconds", metrics.seconds)
        self._observe("request_queue_time_seconds", metrics.queue_s)
        self._observe("request_prefill_time_seconds", metrics.first_token_s - metrics.queue_s)
        self._observe("request_decode_time_seconds", metrics.seconds - metrics.first_token_s)
        self._observe("request_inference_time_seconds", metrics.seconds - metrics.queue_s)
        self._observe("request_prompt_tokens", metrics.num_prompt_tokens)
        self._observe("request_generation_tokens", metrics.num_tokens)
        if metrics.num_tokens > 1:
            decode_s = metrics.seconds - metrics.first_token_s
            self._observe("request_time_per_output_token_seconds", decode_s / (metrics.num_tokens - 1))

    def _observe(self, name: str, value: float, count: int = 1) -> None:
        self._recorders[name].observe(value, count)


class _Recent:
    """Keeps a point for each of the last seconds: the totals at its end minus those at its start."""

    def __init__(self, now_s: float) -> None:
        self._points: deque[Point] = deque(maxlen=RECENT_S)
        self._second = int(now_s)  # the current second
        self._before = self._now = (0, 0)  # tokens and steps

    def count(self, now_s: float, *, num_tokens: int, num_steps: int) -> None:
        """Add a step's work to the second in which it ended."""
        self._roll(int(now_s))
        self._now = num_tokens, num_steps

    def points(self, now_s: float) -> tuple[Point, ...]:
        self._roll(int(now_s))
        return tuple(self._points)

    def _roll(self, second: int) -> None:
        """Close every second before `second`, but skip the seconds that the ring has no room for."""
        first = max(self._second, second - RECENT_S)
        if first > self._second:
            self._before = self._now
        for closing in range(first, second):
            tokens, steps = (now - before for now, before in zip(self._now, self._before, strict=True))
            self._points.append(Point(closing, tokens, steps))
            self._before = self._now
        self._second = max(self._second, second)


def _recorders(max_model_len: int) -> dict[str, Recorder]:
    return {
        "time_to_first_token_seconds": Recorder(_FIRST_TOKEN_S),
        "inter_token_latency_seconds": Recorder(_TOKEN_S),
        "request_time_per_output_token_seconds": Recorder(_TOKEN_S),
        "e2e_request_latency_seconds": Recorder(_REQUEST_S),
        "request_queue_time_seconds": Recorder(_REQUEST_S),
        "request_prefill_time_seconds": Recorder(_REQUEST_S),
        "request_decode_time_seconds": Recorder(_REQUEST_S),
        "request_inference_time_seconds": Recorder(_REQUEST_S),
        "request_prompt_tokens": Recorder(one_two_five(max_model_len)),
        "request_generation_tokens": Recorder(one_two_five(max_model_len)),
        "request_max_num_generation_tokens": Recorder(one_two_five(max_model_len)),
        "request_params_max_tokens": Recorder(one_two_five(max_model_len)),
        "request_params_n": Recorder(_CHOICES),
        "iteration_tokens_total": Recorder(_STEP_TOKENS),
    }
