"""Compares two reports: lists changes, says which are noise, and warns if the runs are not comparable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from rich.console import Group as Renderables
from rich.text import Text

from blockdraft.bench.figures import BenchReport, Cell, Distribution, Estimate, make_estimate
from blockdraft.bench.layout import fact_text
from blockdraft.bench.records import Key
from blockdraft.bench.report_rows import arm_names, rows_of
from blockdraft.bench.sheet import NOTHING, Sheet, clean, label, load_text, number, to_rich
from blockdraft.errors import BenchError

Outcome = Literal["better", "worse", "within noise", "unknown"]
HEADLINE = {  # figure: its title, and whether higher is better
    "tokens_per_s": ("tok/s", True),
    "request_tokens_per_s": ("tok/s a request", True),
    "ttft_ms": ("TTFT p50 ms", False),
    "tpot_ms": ("TPOT p50 ms", False),
    "committed_per_step": ("committed/step", True),
    "speedup": ("speedup", True),
}
LEGEND = "* the 95 % intervals do not overlap; ? no interval."
# Facts that a user may change on purpose.
_SERVER = ("kind", "version", "drafter", "drafter_kind", "drafter_hash", "kv_dtype")
# Parameters, besides its key, that decide what a cell asks.
ASKED = ("prompts_hash", "max_tokens", "thinking", "ignores_eos", "is_salted", "is_raw")


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one cell in both reports. `ratio` is B over A."""

    figure: str
    a: Estimate
    b: Estimate
    ratio: float | None
    overlaps: bool | None  # None if an interval is missing
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Match:
    """A cell that is in both reports, with its name in B."""

    key: Key
    arm: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The result. `warnings` say why the numbers are not comparable; `differences` lists other changes."""

    warnings: tuple[str, ...]
    differences: tuple[str, ...]
    matches: tuple[Match, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


class _Side(NamedTuple):
    """A cell of one report, with the name of its arm in that report."""

    cell: Cell
    arm: str  # the arm's name in the report
    speedup: Estimate

    @property
    def name(self) -> str:
        return _name(self.cell["key"], self.arm)

    def identity(self, *, with_temperature: bool) -> str:
        left_out = () if with_temperature else ("temperature",)
        key = {name: value for name, value in self.cell["key"].items() if name not in left_out}
        return json.dumps([key, self.cell["arm"]], sort_keys=True)

    def asked(self) -> dict[str, object]:
        return {**self.cell["asked"], "temperature": self.cell["key"]["temperature"]}

    def figures(self) -> dict[str, Estimate]:
        cell = self.cell
        return {
            "tokens_per_s": cell["tokens_per_s"],
            "request_tokens_per_s": _median(cell["request_tokens_per_s"], scale=1),
            "ttft_ms": _median(cell["ttft_s"], scale=1000),
            "tpot_ms": _median(cell["tpot_s"], scale=1000),
            "committed_per_step": cell["speculation"]["committed_per_step"],
            "speedup": self.speedup,
        }


def refuse_other_models(a: BenchReport, b: BenchReport, names: tuple[str, str] = ("A", "B")) -> None:
    """Raise BenchError if the two runs measured different models."""
    models = [str(report["endpoint"].get("model")) for report in (a, b)]
    if models[0] != models[1]:
        of = [f"{name} is of '{clean(model)}'" for name, model in zip(names, models, strict=True)]
        raise BenchError(f"{of[0]}, {of[1]}: two models cannot be compared.")


def compare(a: BenchReport, b: BenchReport, names: tuple[str, str] = ("A", "B")) -> RunComparison:
    """Match cells by workload, class, load, depth, temperature and arm; BenchError if none match.

    If only the temperature differs, cells are matched with a warning.
    """
    pairs, only_a, only_b = _matched(_sides(a), _sides(b))
    if not pairs:
        measured = [
            f"{name} has {clean(sides[0].name) if sides else 'nothing'}"
            for name, sides in zip(names, (only_a, only_b), strict=True)
        ]
        raise BenchError(f"the reports have no load in common: {measured[0]}, {measured[1]}.")
    return RunComparison(
        warnings=(*_differences(*_facts(a, b)), *_cell_warnings(pairs)),
        differences=tuple(_differences(a["endpoint"], b["endpoint"], _SERVER)),
        matches=tuple(Match(two.cell["key"], two.arm, tuple(_changes(one, two))) for one, two in pairs),
        only_a=tuple(side.name for side in only_a),
        only_b=tuple(side.name for side in only_b),
    )


def sheet(comparison: RunComparison) -> Sheet:
    """Return a table with a row per figure; it fits a terminal of 80 columns."""
    rows = []
    for match in comparison.matches:
        name = _name(match.key, match.arm)
        for change in match.changes:
            if change.a["value"] is None and change.b["value"] is None:
                continue
            sign = {True: "", False: "*", None: "?"}[change.overlaps]
            ratio = NOTHING if change.ratio is None else f"{change.ratio:.2f}x{sign}"
            values = number(change.a["value"]), number(change.b["value"])
            rows.append((name, HEADLINE[change.figure][0], *values, ratio))
            name = ""  # only the first row names the cell
    return Sheet("", ("cell", "figure", "A", "B", "B / A"), tuple(rows), num_labels=2)


def terminal(comparison: RunComparison) -> Renderables:
    """Return the comparison as objects that rich can print, warnings first."""
    sides = (("A", comparison.only_a), ("B", comparison.only_b))
    return Renderables(
        *(Text(f"NOT COMPARABLE: {clean(line)}", style="bold red") for line in comparison.warnings),
        *(Text(clean(line), style="yellow") for line in comparison.differences),
        to_rich(sheet(comparison)),
        *(Text(clean(f"Only in {side}: {'; '.join(cells)}.")) for side, cells in sides if cells),
        Text(LEGEND, style="dim"),
    )


def to_json(comparison: RunComparison) -> str:
    return json.dumps(asdict(comparison), indent=1, allow_nan=False) + "\n"


def _sides(report: BenchReport) -> list[_Side]:
    """Return the cells of a report in the report's order."""
    names, rows = arm_names(report["cells"]), rows_of(report)
    speedups = {id(row.speculative): row.speedup for row in rows}
    return [
        _Side(cell, names[cell["arm"]], speedups.get(id(cell), make_estimate())) for cell in report["cells"]
    ]


def _matched(
    a: Sequence[_Side], b: Sequence[_Side]
) -> tuple[list[tuple[_Side, _Side]], list[_Side], list[_Side]]:
    """Return the matched pairs in the order of B, and the unmatched cells of A and of B."""
    partners: dict[int, _Side] = {}  # by the index in B
    rest_a, rest_b = list(a), dict(enumerate(b))
    for exact in (True, False):
        for place, two in list(rest_b.items()):
            name = two.identity(with_temperature=exact)
            found = [one for one in rest_a if one.identity(with_temperature=exact) == name]
            rivals = [one for one in rest_b.values() if one.identity(with_temperature=exact) == name]
            if len(found) == len(rivals) == 1:
                partners[place] = found[0]
                rest_a.remove(found[0])
                del rest_b[place]
    return [(partners[place], b[place]) for place in sorted(partners)], rest_a, list(rest_b.values())


def _median(distribution: Distribution, *, scale: float) -> Estimate:
    value, interval = distribution["p50"], distribution["p50_interval"]
    return make_estimate(
        None if value is None else value * scale,
        None if interval is None else [bound * scale for bound in interval],
    )


def _changes(one: _Side, two: _Side) -> Iterator[Change]:
    before, after = one.figures(), two.figures()
    for figure, (_, is_more_better) in HEADLINE.items():
        a, b = before[figure], after[figure]
        ratio = b["value"] / a["value"] if a["value"] and b["value"] is not None else None
        overlaps = None
        if a["interval"] is not None and b["interval"] is not None:
            overlaps = a["interval"][0] <= b["interval"][1] and b["interval"][0] <= a["interval"][1]
        outcome: Outcome = "unknown"
        if overlaps:
            outcome = "within noise"
        elif ratio is not None and overlaps is not None:
            outcome = "better" if (ratio > 1) == is_more_better else "worse"
        yield Change(figure=figure, a=a, b=b, ratio=ratio, overlaps=overlaps, outcome=outcome)


def _facts(*reports: BenchReport) -> list[dict[str, object]]:
    """Return the facts of each report that must be equal in both runs."""
    shared = set.intersection(*(set(report["definitions"]) for report in reports))  # newer ones have more
    return [
        {
            "definitions of the figures": {name: report["definitions"][name] for name in sorted(shared)},
            **{f"machine ({name})": report["machine"].get(name) for name in ("cpu", "num_cpus", "gpus")},
        }
        for report in reports
    ]


def _differences(
    a: Mapping[str, object], b: Mapping[str, object], names: Iterable[str] | None = None
) -> list[str]:
    """Return a line for each fact that differs. Without `names`, compare all facts of `a`."""
    lines = []
    for name in a if names is None else names:
        one, two = a.get(name), b.get(name)
        if one != two and (isinstance(one, dict) or isinstance(two, dict)):
            lines.append(f"the {name} differ.")
        elif one != two:
            lines.append(f"{name}: {fact_text(one)} in A, {fact_text(two)} in B.")
    return lines


def _cell_warnings(pairs: Sequence[tuple[_Side, _Side]]) -> list[str]:
    """Return a line for each request parameter that differs, with the names of the cells."""
    found: dict[str, list[str]] = {}
    for one, two in pairs:
        for text in _differences(one.asked(), two.asked(), ("temperature", *ASKED)):
            found.setdefault(text, []).append(two.name)
    return [f"{text} Cells: {'; '.join(cells)}." for text, cells in found.items()]


def _name(key: Key, arm: str) -> str:
    depth = f", depth {key['depth']}" if key["depth"] else ""
    return f"{label(key)} at {load_text(key)}{depth}, T {key['temperature']:g}, {arm}"
