"""Shows a start or the stages of a long run: as bars on a terminal, else as lines. Logs trainings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TaskProgressColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from blockdraft.phases import StartProgress

if TYPE_CHECKING:
    from blockdraft.training.run import Listener

REDRAW_S = 0.1
LINE_S = 5.0  # least time between two lines of one stage

Show = Callable[[str, float | None, str], None]  # stage, share done, text to show


class Detail(ProgressColumn):
    """The column with a phase's text. Only this column is cut if a line is too long."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["detail"], style="dim", no_wrap=True, overflow="ellipsis")


def draw(startup: StartProgress, console: Console | None = None) -> None:
    """Draw the bars until the start has ended or failed."""
    columns = (TextColumn("{task.description:<9}"), BarColumn(bar_width=24), Elapsed(), Detail())
    console = console if console is not None else Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        while True:
            is_over = startup.state != "starting"
            for phase in startup.phases():
                if phase.state in ("waiting", "skipped"):
                    continue
                if phase.name not in tasks:
                    tasks[phase.name] = bars.add_task(phase.name, total=None, detail="")
                is_done = phase.state != "running"
                total = 1.0 if is_done or phase.progress is not None else None
                done = 1.0 if is_done else phase.progress or 0.0
                bars.update(tasks[phase.name], total=total, completed=done, detail=phase.detail or "")
            if is_over:
                return
            time.sleep(REDRAW_S)


def stage_bars(*, is_quiet: bool) -> Progress:
    """Return progress bars with a line per stage, drawn only on a terminal."""
    detail = TextColumn("{task.fields[detail]}", style="dim")
    name, bar = TextColumn("{task.description:<10}"), BarColumn(bar_width=24)
    columns = (name, bar, TaskProgressColumn(), Elapsed(), detail)
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=is_quiet or not console.is_terminal)


def stage_shower(bars: Progress, *, is_quiet: bool) -> Show:
    """Return a function that updates the bars, or prints a line for each stage and every few seconds."""
    return _lines() if bars.disable and not is_quiet else _bars(bars)


def listener(log: TextIO, bars: Progress, *, is_quiet: bool) -> Listener:
    """Return a listener that logs every line, and prints it to stderr if no bars are drawn."""
    from blockdraft.training.run import Listener

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
