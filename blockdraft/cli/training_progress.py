"""Shows a long run in stages: bars on a terminal, lines elsewhere, and the log of a training run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from blockdraft.training.run import Listener

LINE_S = 5.0  # between two lines of one stage

Show = Callable[[str, float | None, str], None]  # stage, share done, what to show


def stage_bars(*, is_quiet: bool) -> Progress:
    """Return progress bars with a line per stage, drawn only on a terminal."""
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=is_quiet or not console.is_terminal)


def stage_shower(bars: Progress, *, is_quiet: bool) -> Show:
    """Return a function that updates the bars, or prints a line per stage and every few seconds."""
    return _lines() if bars.disable and not is_quiet else _bars(bars)


def listener(log: TextIO, bars: Progress, *, is_quiet: bool) -> Listener:
    """Return a listener that logs every line, and prints it to stderr if no bars are drawn."""
    begin_s = time.monotonic()

    def say(line: str) -> None:
        text = f"{time.monotonic() - begin_s:7.1f} s  {line}"
        print(text, file=log, flush=True)
        if bars.disable and not is_quiet:
            print(text, file=sys.stderr, flush=True)

    def tell(line: str) -> None:
        say(line)
        if not bars.disable:
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    return Listener(say=say, tell=tell, show=_bars(bars))


def _bars(bars: Progress) -> Show:
    stages: dict[str, TaskID] = {}

    def show(stage: str, share: float | None, detail: str) -> None:
        if stage not in stages:
            for task in stages.values():
                bars.update(task, total=1.0, completed=1.0)
            stages[stage] = bars.add_task(stage, total=None, detail="")
        total = None if share is None else 1.0
        bars.update(stages[stage], total=total, completed=share or 0.0, detail=detail)

    return show


def _lines() -> Show:
    begin_s = time.monotonic()
    last, last_s = "", begin_s

    def show(stage: str, share: float | None, detail: str) -> None:
        nonlocal last, last_s
        now_s = time.monotonic()
        if stage == last and share is not None and now_s - last_s < LINE_S:
            return
        last, last_s = stage, now_s
        done = "" if share is None else f" {share:4.0%}"
        print(f"{now_s - begin_s:7.1f} s  {stage}{done}  {detail}", file=sys.stderr, flush=True)

    return show
