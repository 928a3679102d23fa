"""Shows the progress of a run: a line for each measured cell and, on a terminal, a bar below the lines."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from blockdraft.bench.records import PLAIN, Answer, Group
from blockdraft.bench.run import LoadPoint, Watcher
from blockdraft.bench.sheet import clean, setting


class ProgressView(Watcher):
    """Shows the progress on a console. Use it as a context manager; `total` counts conversations."""

    def __init__(self, total: int, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            TextColumn("conversations, left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        # The clock starts with the first cell: the warm-up does not predict the cells' time.
        self._task = self._bar.add_task("warming up", start=False, total=total)
        self._cell = ""
        self._num_failed = self._num_tokens = 0
        self._cell_start_s = 0.0

    def __enter__(self) -> ProgressView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, point: LoadPoint, num_conversations: int) -> None:
        if not self._cell:
            self._bar.start_task(self._task)
        self._cell, self._cell_start_s = clean("  ".join(_words(point))), time.monotonic()
        self._num_failed = self._num_tokens = 0

    def take(self, answer: Answer) -> None:
        if not self._cell:
            return  # this is the warm-up
        is_last = not answer.is_ok or answer.turn == len(answer.ask.prompt.turns) - 1 or answer.ask.is_raw
        self._num_failed += not answer.is_ok
        self._num_tokens += answer.completion_tokens or 0
        speed = self._num_tokens / max(time.monotonic() - self._cell_start_s, 1e-9)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        self._bar.update(
            self._task, advance=is_last, description=f"{self._cell}  {speed:.1f} tok/s so far{failed}"
        )

    def end(self, groups: Sequence[Group]) -> None:
        speeds = []
        for group in groups:
            tokens = sum(answer.completion_tokens or 0 for answer in group.answers if answer.is_ok)
            arm = " plain" if group.arm == PLAIN else ""
            speeds.append(f"{tokens / group.busy_s:.1f} tok/s{arm}" if group.busy_s else "none")
        failed = sum(not answer.is_ok for group in groups for answer in group.answers)
        line = f"{self._cell}  {', '.join(speeds)}" + (f"  {failed} failed" if failed else "")
        self._console.print(Text(line), soft_wrap=True)


def _words(point: LoadPoint) -> tuple[str, ...]:
    load = f"{point.load.concurrency} at a time" if point.load.rate is None else f"{point.load.rate:g}/s"
    run = f" run {point.run}" if point.run > 1 else ""
    return point.workload.name, load + setting(point.key).replace(",", "") + run
