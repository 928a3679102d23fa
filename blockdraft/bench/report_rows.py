"""The rows of a report: the cells of one workload at one load, with the pair of its arms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.bench.figures import ArmPair, BenchReport, Cell, Estimate, headline_speedup, make_estimate
from blockdraft.bench.records import PLAIN, SPECULATIVE, Arm, Key


@dataclass(frozen=True, slots=True)
class ReportRow:
    """The cells of one workload at one load: one arm or both."""

    key: Key
    speculative: Cell | None
    plain: Cell | None
    pair: ArmPair | None

    @property
    def cell(self) -> Cell:
        """Return the speculative cell if there is one, else the plain one."""
        cell = self.speculative or self.plain
        assert cell is not None
        return cell

    @property
    def speedup(self) -> Estimate:
        return make_estimate() if self.pair is None else headline_speedup(self.key, self.pair["speedup"])

    @property
    def cells(self) -> list[Cell]:
        return [cell for cell in (self.speculative, self.plain) if cell is not None]


def rows_of(report: BenchReport) -> list[ReportRow]:
    """Return one row per workload, class and load, in the order of the cells."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in report["cells"]:
        found.setdefault(key_text(cell["key"]), {})[cell["arm"]] = cell
    pairs = {key_text(pair["key"]): pair for pair in report["pairs"]}
    return [
        ReportRow(
            key=next(iter(arms.values()))["key"],
            speculative=arms.get(SPECULATIVE),
            plain=arms.get(PLAIN),
            pair=pairs.get(key),
        )
        for key, arms in found.items()
    ]


def whole_rows(report: BenchReport) -> list[ReportRow]:
    """Return the rows that are not one class of another row's workload."""
    rows = rows_of(report)
    wholes = {row.key["workload"] for row in rows if row.key["category"] == "all"}
    return [row for row in rows if row.key["category"] == "all" or row.key["workload"] not in wholes]


def arm_names(cells: Sequence[Cell]) -> dict[Arm, str]:
    """Return the names of the arms. A server without visible speculation is not called speculative."""
    is_seen = any(
        cell["arm"] == SPECULATIVE and cell["speculation"]["acceptance"] in ("answers", "metered")
        for cell in cells
    )
    return {SPECULATIVE: "speculative" if is_seen else "as served", PLAIN: "plain"}


def key_text(key: Key) -> str:
    return json.dumps(key, sort_keys=True)
