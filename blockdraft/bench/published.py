"""Fills the shape of published tables (presets.toml) with the figures of a report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from blockdraft.bench.figures import BenchReport, Cell, headline_speedup
from blockdraft.bench.layout import FIGURES, grid
from blockdraft.bench.options import PRESETS
from blockdraft.bench.report_rows import ReportRow, arm_names, whole_rows
from blockdraft.bench.sheet import NOTHING, Sheet, estimate, full_label, load_text, number, row_name


def published_tables(report: BenchReport) -> list[Sheet]:
    """Return the tables for --table, else of the runs if there are several, and for --also-eager."""
    rows = whole_rows(report)
    preset = PRESETS.get(str(report["options"].get("table")))
    if preset is None:
        return [*runs_table(report, rows), *graphs_table(report)]
    names = list(dict.fromkeys(row.key["workload"] for row in rows))
    loads = sorted({row.key["concurrency"] for row in rows})
    return [
        *(grid(report, names, loads, figure) for figure in preset.figures),
        *(sheet for name in preset.tables for sheet in TABLES[name](report, rows)),
        *graphs_table(report),
    ]


def graphs_table(report: BenchReport) -> list[Sheet]:
    """Return one table: each cell without CUDA graphs and with them. Empty without --also-eager."""
    arms = arm_names(report["cells"])
    lines = tuple(
        (
            row_name(one["key"]),
            arms[one["arm"]],
            estimate(one["eager_tokens_per_s"]),
            estimate(one["graphs_tokens_per_s"]),
            estimate(headline_speedup(one["key"], one["gain"]), suffix="x"),
        )
        for one in report.get("graph_gains", [])
    )
    header = ("workload", "arm", "eager\ntok/s (±)", "graphs\ntok/s (±)", "graphs / eager\n(±)")
    return [Sheet("Warm, without CUDA graphs and with them", header, lines, num_labels=2)] if lines else []


def runs_table(report: BenchReport, rows: Sequence[ReportRow]) -> list[Sheet]:
    """Return one table: tok/s of each run, and tokens of prompts and answers. Empty for a single run."""
    cells = [cell for row in rows for cell in row.cells if cell.get("runs")]
    count = max((len(cell["runs"]) for cell in cells), default=0)
    if not count:
        return []
    arms = arm_names(report["cells"])
    has_arms = len({cell["arm"] for cell in cells}) > 1
    lines = []
    for cell in cells:
        speeds = [number(run["tokens_per_s"]) for run in cell["runs"]]
        lines.append(
            (
                full_label(cell["key"]) + (f", {arms[cell['arm']]}" if has_arms else ""),
                load_text(cell["key"]),
                _per_answer(cell, cell["tokens_in"]),
                _per_answer(cell, cell["tokens_out"]),
                *speeds,
                *[NOTHING] * (count - len(speeds)),
                spread_text(cell),
            )
        )
    runs = (f"run {place}" for place in range(1, count + 1))
    header = ("workload", "conc", "prompt\ntokens", "answer\ntokens", *runs, "spread")
    return [Sheet("tok/s, run by run", header, tuple(lines))]


def _styles(report: BenchReport, rows: Sequence[ReportRow]) -> list[Sheet]:
    """Return one table with a row per workload, at the lowest load."""
    lowest = min((row.key["concurrency"] for row in rows), default=1)
    streams = "one stream" if lowest == 1 else f"{lowest} streams"
    found = [(full_label(row.key), row) for row in rows if row.key["concurrency"] == lowest]
    header = ("workload", "tok/s", "TPOT p50 ms", "committed/step", "speedup", "spread")
    figures = ("tokens_per_s", "tpot", "committed_per_step", "speedup")
    return [Sheet(f"By prompt style, {streams}", header, _lines(found, figures))]


def _classes(report: BenchReport, rows: Sequence[ReportRow]) -> list[Sheet]:
    """Return one table per workload, with a row per concurrency."""
    found: dict[str, list[ReportRow]] = {}
    for row in rows:
        found.setdefault(full_label(row.key), []).append(row)
    header = ("concurrency", "tok/s", "median per request", "TTFT p50 ms", "TPOT p50 ms", "spread")
    figures = ("tokens_per_s", "request_tokens_per_s", "ttft", "tpot")
    return [
        Sheet(name, header, _lines([(load_text(row.key), row) for row in members], figures))
        for name, members in found.items()
    ]


def _pages(report: BenchReport, rows: Sequence[ReportRow]) -> list[Sheet]:
    """Return one table: the time of a whole answer, with drafts and without."""
    arms = arm_names(report["cells"])
    lines = tuple(
        (
            full_label(row.key),
            arms[cell["arm"]],
            number(cell["latency_s"]["p50"]),
            _per_answer(cell, cell["tokens_out"]),
            number(cell["tokens_per_s"]["value"]),
            number(cell["speculation"]["committed_per_step"]["value"]),
        )
        for row in rows
        for cell in row.cells
    )
    header = ("workload", "arm", "seconds", "tokens", "tok/s", "committed/step")
    return [Sheet("A whole page", header, lines, num_labels=2)]


def _lines(rows: Iterable[tuple[str, ReportRow]], figures: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the rows of a table: name, the given figures of layout.FIGURES, and spread of the runs."""
    return tuple(
        (name, *(FIGURES[figure][1](row) for figure in figures), spread_text(row.cell)) for name, row in rows
    )


def spread_text(cell: Cell) -> str:
    """Return the spread of the runs: (fastest - slowest) / mean."""
    speeds = [run["tokens_per_s"] for run in cell.get("runs", [])]
    known = [speed for speed in speeds if speed is not None]
    if len(known) < 2 or not any(known):
        return NOTHING
    return f"{(max(known) - min(known)) / statistics.mean(known):.1%}"


def _per_answer(cell: Cell, tokens: int | None) -> str:
    good = cell["num_requests"] - cell["num_failed"]
    return NOTHING if tokens is None or not good else f"{tokens / good:.0f}"


TABLES: dict[str, Callable[[BenchReport, Sequence[ReportRow]], list[Sheet]]] = {
    "runs": runs_table,
    "styles": _styles,
    "classes": _classes,
    "pages": _pages,
}
