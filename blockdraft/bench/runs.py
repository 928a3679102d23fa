"""Cells that were measured several times: one cell of all answers, and the figures of each run beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from blockdraft.bench.figures import Cell, RunFigures
from blockdraft.bench.records import Group
from blockdraft.bench.report_rows import key_text
from blockdraft.bench.speculation import total_of


def by_cell(groups: Sequence[Group]) -> list[list[Group]]:
    """Return the groups of each cell and arm, run by run, in the order in which cells first appear."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault((key_text(group.key), group.arm), []).append(group)
    return list(found.values())


def merged(runs: Sequence[Group]) -> Group:
    """Return all runs of a cell as one group: a prompt's answers of every run are drawn together."""
    if len(runs) == 1:
        return runs[0]
    metered = [run.metered for run in runs if run.metered is not None]
    return Group(
        key=runs[0].key,
        arm=runs[0].arm,
        answers=[answer for run in runs for answer in run.answers],
        busy_s=sum(run.busy_s for run in runs),
        metered=total_of(metered) if metered else None,
        blocks=[block for run in runs for block in run.blocks],
    )


def run_figures(cell: Cell) -> RunFigures:
    """Return the figures of one run."""
    return {
        "tokens_per_s": cell["tokens_per_s"]["value"],
        "ttft_s": cell["ttft_s"]["p50"],
        "tpot_s": cell["tpot_s"]["p50"],
        "latency_s": cell["latency_s"]["p50"],
        "committed_per_step": cell["speculation"]["committed_per_step"]["value"],
    }


def spread(cell: Cell) -> float | None:
    """Return by how much runs differ: the fastest less the slowest, over their mean."""
    speeds = [run["tokens_per_s"] for run in cell.get("runs", [])]
    known = [speed for speed in speeds if speed is not None]
    if len(known) < 2 or not any(known):
        return None
    return (max(known) - min(known)) / statistics.mean(known)
