"""Two reports side by side: what changed, whether the intervals leave it open, and what forbids comparing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Group as Renderables
from rich.text import Text

from blockdraft.bench.figures import (
    BenchReport,
    Cell,
    Distribution,
    Estimate,
    Key,
    headline_speedup,
    make_estimate,
)
from blockdraft.bench.layout import fact_text
from blockdraft.bench.records import Arm
from blockdraft.bench.report import arm_names, rows_of
from blockdraft.bench.sheet import (
    NOTHING,
    Sheet,
    clean,
    label,
    load_text,
    number,
    to_rich,
)

Outcome = Literal["better", "worse", "within noise", "unknown"]
HEADLINE = {  # figure: its title, and whether more of it is better
    "tokens_per_s": ("tok/s", True),
    "request_tokens_per_s": ("tok/s a request", True),
    "ttft_ms": ("TTFT p50 ms", False),
    "tpot_ms": ("TPOT p50 ms", False),
    "committed_per_step": ("committed/step", True),
    "speedup": ("speedup", True),
}
LEGEND = "* the 95 % intervals do not overlap; ? no interval."


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one cell in both reports; `ratio` is B over A."""

    figure: str
    a: Estimate
    b: Estimate
    ratio: float | None
    overlaps: bool | None  # None: without an interval in both there is nothing to overlap
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Match:
    """A cell that both reports have, named as in B."""

    key: Key
    arm: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`warnings` say why numbers are not comparable, `differences` what else is not the same."""

    warnings: tuple[str, ...]
    differences: tuple[str, ...]
    matches: tuple[Match, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare(a: BenchReport, b: BenchReport) -> Comparison:
    """Cells are matched by workload, class, load, depth, temperature and arm.

    A cell without a partner for its temperature alone is matched all the same, with a warning.
    """
    pairs, only_a, only_b = _matched(a["cells"], b["cells"])
    speedups = _speedups(a), _speedups(b)
    names_a, names_b = arm_names(a["cells"]), arm_names(b["cells"])
    matches = tuple(
        Match(key=two["key"], arm=names_b[two["arm"]], changes=tuple(_changes(one, two, speedups)))
        for one, two in pairs
    )
    return Comparison(
        warnings=(*_run_warnings(a, b), *_cell_warnings(pairs, names_b)),
        differences=tuple(_differences(a, b)),
        matches=matches,
        only_a=tuple(_cell_name(cell["key"], names_a[cell["arm"]]) for cell in only_a),
        only_b=tuple(_cell_name(cell["key"], names_b[cell["arm"]]) for cell in only_b),
    )


def sheet(comparison: Comparison) -> Sheet:
    """One row per figure that either report has, so that a terminal of 80 columns shows all of it."""
    rows = []
    for match in comparison.matches:
        name = _cell_name(match.key, match.arm)
        for change in match.changes:
            if change.a["value"] is None and change.b["value"] is None:
                continue
            title, _ = HEADLINE[change.figure]
            rows.append((name, title, number(change.a["value"]), number(change.b["value"]), _ratio(change)))
            name = ""  # the cell is named once
    header = ("cell", "figure", "A", "B", "B / A")
    return Sheet(title="", header=header, rows=tuple(rows), num_labels=2)


def terminal(comparison: Comparison) -> Renderables:
    """For rich, the warnings first."""
    return Renderables(
        *(Text(f"NOT COMPARABLE: {clean(line)}", style="bold red") for line in comparison.warnings),
        *(Text(clean(line), style="yellow") for line in comparison.differences),
        to_rich(sheet(comparison)) if comparison.matches else Text("No cell is in both.", style="bold red"),
        *(Text(clean(line)) for line in _missing_lines(comparison)),
        Text(LEGEND, style="dim"),
    )


def to_json(comparison: Comparison) -> str:
    return json.dumps(asdict(comparison), indent=1, allow_nan=False) + "\n"


def _matched(a: Sequence[Cell], b: Sequence[Cell]) -> tuple[list[tuple[Cell, Cell]], list[Cell], list[Cell]]:
    """Pairs, and what is left of either side."""
    pairs: list[tuple[Cell, Cell]] = []
    rest_a, rest_b = list(a), list(b)
    for with_temperature in (True, False):
        for two in list(rest_b):
            name = _identity(two, with_temperature=with_temperature)
            partners = [one for one in rest_a if _identity(one, with_temperature=with_temperature) == name]
            rivals = [one for one in rest_b if _identity(one, with_temperature=with_temperature) == name]
            if len(partners) == len(rivals) == 1:
                pairs.append((partners[0], two))
                rest_a.remove(partners[0])
                rest_b.remove(two)
    order = {id(cell): place for place, cell in enumerate(b)}
    return sorted(pairs, key=lambda pair: order[id(pair[1])]), rest_a, rest_b


def _identity(cell: Cell, *, with_temperature: bool) -> str:
    key = {name: value for name, value in cell["key"].items() if with_temperature or name != "temperature"}
    return json.dumps([key, cell["arm"]], sort_keys=True)


def _speedups(report: BenchReport) -> dict[str, Estimate]:
    """The speedup of each speculative cell that has a baseline."""
    return {
        _identity(row.speculative, with_temperature=True): headline_speedup(row.key, row.pair["speedup"])
        for row in rows_of(report)
        if row.speculative is not None and row.pair is not None
    }


def _changes(
    one: Cell, two: Cell, speedups: tuple[dict[str, Estimate], dict[str, Estimate]]
) -> Iterable[Change]:
    before, after = (_figures(cell, found) for cell, found in zip((one, two), speedups, strict=True))
    for figure, (_, is_more_better) in HEADLINE.items():
        yield _change(figure, before[figure], after[figure], is_more_better=is_more_better)


def _figures(cell: Cell, speedups: dict[str, Estimate]) -> dict[str, Estimate]:
    return {
        "tokens_per_s": cell["tokens_per_s"],
        "request_tokens_per_s": _median(cell["request_tokens_per_s"], scale=1),
        "ttft_ms": _median(cell["ttft_s"], scale=1000),
        "tpot_ms": _median(cell["tpot_s"], scale=1000),
        "committed_per_step": cell["speculation"]["committed_per_step"],
        "speedup": speedups.get(_identity(cell, with_temperature=True), make_estimate()),
    }


def _median(distribution: Distribution, *, scale: float) -> Estimate:
    value, interval = distribution["p50"], distribution["p50_interval"]
    return {
        "value": None if value is None else value * scale,
        "interval": None if interval is None else [bound * scale for bound in interval],
    }


def _change(figure: str, a: Estimate, b: Estimate, *, is_more_better: bool) -> Change:
    ratio = b["value"] / a["value"] if a["value"] and b["value"] is not None else None
    overlaps = None
    if a["interval"] is not None and b["interval"] is not None:
        overlaps = a["interval"][0] <= b["interval"][1] and b["interval"][0] <= a["interval"][1]
    outcome: Outcome = "unknown"
    if overlaps:
        outcome = "within noise"
    elif ratio is not None and overlaps is not None:
        outcome = "better" if (ratio > 1) == is_more_better else "worse"
    return Change(figure=figure, a=a, b=b, ratio=ratio, overlaps=overlaps, outcome=outcome)


def _ratio(change: Change) -> str:
    if change.ratio is None:
        return NOTHING
    sign = {True: "", False: "*", None: "?"}[change.overlaps]
    return f"{change.ratio:.2f}x{sign}"


def _run_warnings(a: BenchReport, b: BenchReport) -> list[str]:
    """What differs between the runs as a whole and makes their numbers those of different things."""
    facts = {
        "model": (a["endpoint"].get("model"), b["endpoint"].get("model")),
        "definitions of the figures": (a["definitions"], b["definitions"]),
    }
    for name in ("cpu", "num_cpus", "gpus"):
        facts[f"machine ({name})"] = (a["machine"].get(name), b["machine"].get(name))
    return [_difference(name, one, two) for name, (one, two) in facts.items() if one != two]


def _differences(a: BenchReport, b: BenchReport) -> list[str]:
    """What differs as well, and may be what the comparison is about."""
    facts = {
        name: (a["endpoint"].get(name), b["endpoint"].get(name))
        for name in ("kind", "version", "drafter", "drafter_hash")
    }
    return [_difference(name, one, two) for name, (one, two) in facts.items() if one != two]


def _difference(name: str, one: object, two: object) -> str:
    if isinstance(one, dict) or isinstance(two, dict):
        return f"the {name} differ."
    return f"{name}: {fact_text(one)} in A, {fact_text(two)} in B."


def _cell_warnings(pairs: Sequence[tuple[Cell, Cell]], names: Mapping[Arm, str]) -> list[str]:
    """What was asked differently, with the cells it concerns."""
    found: dict[str, list[str]] = {}
    for one, two in pairs:
        asked = {**one["asked"], "temperature": one["key"]["temperature"]}
        then = {**two["asked"], "temperature": two["key"]["temperature"]}
        for name in (
            "prompts_hash",
            "temperature",
            "max_tokens",
            "thinking",
            "ignores_eos",
            "is_salted",
            "is_raw",
        ):
            if asked[name] != then[name]:
                text = _difference(name, asked[name], then[name])
                found.setdefault(text, []).append(_cell_name(two["key"], names[two["arm"]]))
    return [f"{text} Cells: {'; '.join(cells)}." for text, cells in found.items()]


def _cell_name(key: Key, arm: str) -> str:
    depth = f", depth {key['depth']}" if key["depth"] else ""
    return f"{label(key)} at {load_text(key)}{depth}, T {key['temperature']:g}, {arm}"


def _missing_lines(comparison: Comparison) -> list[str]:
    sides = (("A", comparison.only_a), ("B", comparison.only_b))
    return [f"Only in {side}: {'; '.join(cells)}." for side, cells in sides if cells]
