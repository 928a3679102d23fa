"""A training run on a terminal: one bar per stage; and every line of it in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from blockdraft.training.run import Ears


def stage_bars(*, is_quiet: bool) -> Progress:
    """One line per stage, drawn only where somebody looks."""
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=is_quiet or not console.is_terminal)


def ears(log: TextIO, bar: Progress, *, is_quiet: bool) -> Ears:
    """Every line into the log and, where no bar is drawn, to stderr."""
    begin_s = time.monotonic()
    stages: dict[str, TaskID] = {}

    def say(line: str) -> None:
        text = f"{time.monotonic() - begin_s:7.1f} s  {line}"
        print(text, file=log, flush=True)
        if bar.disable and not is_quiet:
            print(text, file=sys.stderr, flush=True)

    def show(stage: str, share: float | None, detail: str) -> None:
        if stage not in stages:
            for task in stages.values():
                bar.update(task, total=1.0, completed=1.0)
            stages[stage] = bar.add_task(stage, total=None, detail="")
        total = None if share is None else 1.0
        bar.update(stages[stage], total=total, completed=share or 0.0, detail=detail)

    return Ears(say=say, show=show)
