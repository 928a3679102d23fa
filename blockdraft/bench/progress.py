"""Shows the progress of a run: a growing table on a terminal, else a line per cell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from blockdraft.bench.records import PLAIN, Answer, Group
from blockdraft.bench.run import LoadPoint, Watcher
from blockdraft.bench.sheet import clean, setting

REDRAWS_PER_S = 4


class ProgressView(Watcher):
    """Shows the progress on a console, as a context; `total` is the number of conversations of the run."""

    def __init__(self, total: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._console = console
        self._clock = clock
        self._start_s: float | None = None  # start of the first cell: warming up does not predict the rest
        self._done = 0
        self._rows: list[tuple[str, ...]] = []
        self._point: LoadPoint | None = None
        self._num_cell = 0
        self._num_failed = 0
        self._num_tokens = 0
        self._cell_start_s = 0.0
        self._cell_done = 0
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._table, refresh_per_second=REDRAWS_PER_S, transient=True
            )

    def __enter__(self) -> ProgressView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    # ---- what the runner tells

    def begin(self, point: LoadPoint, num_conversations: int) -> None:
        now_s = self._clock()
        self._start_s = now_s if self._start_s is None else self._start_s
        self._point, self._num_cell, self._cell_start_s = point, num_conversations, now_s
        self._cell_done = self._num_failed = self._num_tokens = 0

    def take(self, answer: Answer) -> None:
        if self._point is None:
            return  # warming up
        is_last = not answer.is_ok or answer.turn == len(answer.ask.prompt.turns) - 1 or answer.ask.is_raw
        self._cell_done += is_last
        self._done += is_last
        self._num_failed += not answer.is_ok
        self._num_tokens += answer.completion_tokens or 0

    def end(self, groups: Sequence[Group]) -> None:
        assert self._point is not None
        row = (*_words(self._point), *self._figures(groups))
        self._rows.append(row)
        if self._live is None:
            self._console.print(Text(clean("  ".join(row))), soft_wrap=True)

    # ---- what is shown

    def _figures(self, groups: Sequence[Group]) -> tuple[str, ...]:
        speeds = []
        for group in groups:
            tokens = sum(answer.completion_tokens or 0 for answer in group.answers if answer.is_ok)
            arm = " plain" if group.arm == PLAIN else ""
            speeds.append(f"{tokens / group.busy_s:.1f} tok/s{arm}" if group.busy_s else "none")
        failed = sum(not answer.is_ok for group in groups for answer in group.answers)
        return ", ".join(speeds), f"{failed} failed" if failed else ""

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for row in self._rows[-12:]:
            table.add_row(*(Text(clean(word)) for word in row))
        if self._point is None:
            table.add_row(Text("warming up", style="dim"))
            return table
        seconds = max(self._clock() - self._cell_start_s, 1e-9)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        done = f"{self._cell_done} of {self._num_cell}{failed}"
        figures = (f"{self._num_tokens / seconds:.1f} tok/s so far", done)
        if self._cell_done < self._num_cell:
            table.add_row(*(Text(clean(w), style="dim") for w in (*_words(self._point), *figures)))
        table.add_row(Text(self._progress(), style="bold"))
        return table

    def _progress(self) -> str:
        done = f"{self._done} of {self._total} conversations"
        if not self._done or self._start_s is None:
            return done
        left_s = (self._clock() - self._start_s) / self._done * (self._total - self._done)
        return f"{done}, about {_duration(left_s)} left"


def _words(point: LoadPoint) -> tuple[str, ...]:
    load = f"{point.load.concurrency} at a time" if point.load.rate is None else f"{point.load.rate:g}/s"
    run = f" run {point.run}" if point.run > 1 else ""
    return point.workload.name, load + setting(point.key).replace(",", "") + run


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
