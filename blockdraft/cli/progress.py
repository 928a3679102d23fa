"""Draw a start on a terminal: one line per phase, with a bar."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from blockdraft.phases import StartProgress

REDRAW_S = 0.1


class Detail(ProgressColumn):
    """The text about a phase; only this column is cut if a line is too long."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["detail"], style="dim", no_wrap=True, overflow="ellipsis")


def draw(startup: StartProgress, console: Console | None = None) -> None:
    """Draw until the start has ended, well or not."""
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        Detail(),
    )
    console = console if console is not None else Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        while True:
            is_over = startup.state != "starting"
            for phase in startup.phases():
                if phase.state == "waiting" or phase.state == "skipped":
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
