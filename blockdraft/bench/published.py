"""The tables that people publish, filled with the figures of a report (presets.toml says which has which)."""

from __future__ import annotations

from blockdraft.bench.figures import BenchReport
from blockdraft.bench.layout import grid
from blockdraft.bench.options import PRESETS
from blockdraft.bench.report import whole_rows
from blockdraft.bench.sheet import Sheet


def published_tables(report: BenchReport) -> list[Sheet]:
    """Return the tables of the report's --table, one after the other; none without one."""
    preset = PRESETS.get(str(report["options"].get("table")))
    if preset is None:
        return []
    rows = whole_rows(report)
    names = list(dict.fromkeys(row.key["workload"] for row in rows))
    loads = sorted({row.key["concurrency"] for row in rows})
    return [grid(report, names, loads, figure) for figure in preset.figures]
