"""Shows the progress of a proof: a bar on a terminal, else a line for each way."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from blockdraft.bench.sheet import clean
from blockdraft.prove.findings import WayResult
from blockdraft.prove.ways import ProveWatcher


class ProveProgress(ProveWatcher):
    """The progress on a console, as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)
        self._task = None if self._bar is None else self._bar.add_task("", total=None)

    def __enter__(self) -> ProveProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, way: str, num_questions: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, total=num_questions, description=way)
        else:
            self._console.print(f"{way}: {num_questions} questions")

    def step(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)

    def end(self, finding: WayResult) -> None:
        counts = f"{finding.greedy} equal at T 0, {finding.seeded} with a seed"
        self._console.print(clean(f"{finding.way}: {counts}"))
