"""Turns a report into tables and text for the terminal and Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, TypeVar

from rich.console import Group as Renderables
from rich.text import Text

from blockdraft.bench.figures import Agreement, BenchReport, Cell
from blockdraft.bench.report import generator_used
from blockdraft.bench.report_rows import ReportRow, arm_names, rows_of, whole_rows
from blockdraft.bench.sheet import (
    NOTHING,
    Sheet,
    clean,
    escape_markdown,
    estimate,
    full_label,
    interval_text,
    label,
    load_text,
    milliseconds,
    number,
    row_name,
    setting,
    to_markdown,
    to_rich,
)
from blockdraft.bench.weak_spots import DraftCounts, weak_spots
from blockdraft.errors import BenchError
from blockdraft.settings.shipped import model_title

Of = TypeVar("Of")
Column = tuple[str, Callable[[Of], str]]  # a title, and the text for a row or a cell


def headline(report: BenchReport) -> Sheet:
    """Return a short table: the speculative arm (or the only arm) and its speed-up."""
    rows = rows_of(report)
    has_generator = bool(report.get("generator"))
    columns: list[Column[ReportRow]] = [
        ("workload", lambda row: label(row.key)),
        ("conc", lambda row: load_text(row.key)),
        *(column for column in VARYING if len({column[1](row) for row in rows}) > 1),
        ("tok/s\n(±)", FIGURES["tokens_per_s"][1]),
        ("speedup\n(±)", FIGURES["speedup"][1]),
        ("commit\n/step", FIGURES["committed_per_step"][1]),
        (
            "TTFT ms\np50/p99",
            lambda row: "/".join(milliseconds(row.cell["ttft_s"][at]) for at in ("p50", "p99")),
        ),
        ("TPOT ms\np50", FIGURES["tpot"][1]),
        ("failed", lambda row: _failed_text(row.cells)),
        *([("client\nused", lambda row: _percent_of(generator_used(report, row)))] if has_generator else []),
    ]
    lines = (tuple(text(row) for _, text in columns) for row in rows)
    return Sheet("", tuple(title for title, _ in columns), tuple(lines))


def details(report: BenchReport) -> Sheet:
    """Return a table of every cell of both arms."""
    names = arm_names(report["cells"])
    rows = tuple(
        (label(cell["key"]), names[cell["arm"]], *(text(cell) for _, text in DETAILS))
        for row in rows_of(report)
        for cell in row.cells
    )
    return Sheet("", ("workload", "arm", *(title for title, _ in DETAILS)), rows, num_labels=2)


def acceptance(report: BenchReport) -> Sheet:
    """Return the share of steps that accepted the draft at each position, if the server reports it.

    Each class of a workload has its own row.
    """
    found = [
        (row_name(row.key), row.cell["speculation"])
        for row in rows_of(report)
        if row.cell["speculation"]["acceptance_by_position"]
    ]
    shares = [[f"{share:.1%}" for share in figures["acceptance_by_position"] or []] for _, figures in found]
    width = max(map(len, shares), default=0)
    rows = tuple(
        (name, estimate(figures["committed_per_step"]), *line, *[NOTHING] * (width - len(line)))
        for (name, figures), line in zip(found, shares, strict=True)
    )
    return Sheet("", ("workload", "committed/step", *map(str, range(1, width + 1))), rows)


def agreement(report: BenchReport) -> Sheet:
    """Return how many turns of the arms were compared, and how many are equal."""
    rows = []
    for name, compared in _agreements(report):
        for kind, turns in (("first", compared["first_turns"]), ("later", compared["later_turns"])):
            if kind == "later" and not turns["num_compared"] + turns["num_after_divergence"]:
                continue
            counts = [str(value) for figure, value in turns.items() if figure != "share_equal"]
            rows.append((name, kind, *counts, _percent(turns["share_equal"])))
    header = ("workload", "turns", "compared", "equal", "failed", "after a divergence", "share equal")
    return Sheet("", header, tuple(rows), num_labels=2)


def divergences(report: BenchReport) -> Sheet:
    """Return the first place where the two arms' answers differ, for each such turn."""
    rows = tuple(
        (name, one["prompt"], str(one["turn"]), str(one["position"]), one["speculative"], one["plain"])
        for name, compared in _agreements(report)
        for one in compared["divergences"]
    )
    header = ("workload", "prompt", "turn", "character", "with speculation", "without")
    return Sheet("", header, rows, num_labels=6)


def _agreements(report: BenchReport) -> list[tuple[str, Agreement]]:
    """Return the comparisons at temperature 0, each with the name of its row."""
    return [
        (row_name(row.key), row.pair["agreement"])
        for row in whole_rows(report)
        if row.pair is not None and row.pair["agreement"] is not None
    ]


def grid(report: BenchReport, rows: Sequence[str], columns: Sequence[int], figure: str) -> Sheet:
    """Return a table of one figure: a row per workload ("name" or "name / class"), a column per concurrency.

    A workload that was measured at several depths or temperatures has a row for each.
    """
    if figure not in FIGURES:
        raise BenchError(f"no figure is called {figure!r}: choose one of {', '.join(FIGURES)}.")
    found = [row for row in rows_of(report) if row.key["rate"] is None]
    variants = sorted({(row.key["depth"], row.key["temperature"]) for row in found}) or [(0, 0.0)]
    lines = []
    for name in rows:
        for variant in variants:
            cells = {
                row.key["concurrency"]: FIGURES[figure][1](row)
                for row in found
                if label(row.key) == name and (row.key["depth"], row.key["temperature"]) == variant
            }
            if cells or variant == variants[0]:
                shown = name if len(variants) == 1 else f"{name} (depth {variant[0]}, T {variant[1]:g})"
                lines.append((shown, *(cells.get(column, NOTHING) for column in columns)))
    header = ("workload", *(f"concurrency {column}" for column in columns))
    return Sheet(title=FIGURES[figure][0], header=header, rows=tuple(lines))


def verdict_lines(report: BenchReport) -> list[str]:
    """Return a line for each verdict: whether speculation pays."""
    words = {
        "pays": "Speculation pays",
        "loses": "Speculation costs",
        "unclear": "No clear difference",
        "too little": "Too little to say",
    }
    lines = []
    for verdict, text in words.items():
        loads: dict[str, list[str]] = {}
        for pair in report["pairs"]:
            if pair["verdict"] == verdict:
                loads.setdefault(full_label(pair["key"]), []).append(load_text(pair["key"]))
        if loads:
            named = "; ".join(f"{workload} at {', '.join(at)}" for workload, at in loads.items())
            lines.append(f"{text}: {named}.")
    if any(pair["key"]["rate"] is not None for pair in report["pairs"]):
        lines.append("At a rate the arrivals decide the aggregate tok/s: the speedup is that of TPOT.")
    return lines


def lead_lines(report: BenchReport) -> list[str]:
    """Return the verdicts, and how many greedy answers are equal in both arms."""
    turns = [part[name] for _, part in _agreements(report) for name in ("first_turns", "later_turns")]
    total, equal = sum(one["num_compared"] for one in turns), sum(one["num_equal"] for one in turns)
    line = f"Greedy answers with and without speculation: {equal:,} of {total:,} equal."
    return [*verdict_lines(report), *([line] if total else [])]


def draft_lines(report: BenchReport) -> list[str]:
    """Return lines on each workload at its lowest load: acceptance by position, ranges, weak spots."""
    found = [
        line
        for row in _lowest_loads(report)
        for line in (
            _share_line("Drafts accepted by position", row, "acceptance_by_position"),
            _share_line("Drafts right where reached", row, "acceptance_where_reached"),
            _range_line(row),
        )
        if line is not None
    ]
    return [*found, *_weak_lines(report)]


def _lowest_loads(report: BenchReport) -> list[ReportRow]:
    """Return one row per workload, depth and temperature."""
    found: dict[str, ReportRow] = {}
    for row in sorted(whole_rows(report), key=lambda row: (row.key["rate"] or 0.0, row.key["concurrency"])):
        found.setdefault(full_label(row.key), row)
    return list(found.values())


def _share_line(
    title: str, row: ReportRow, figure: Literal["acceptance_by_position", "acceptance_where_reached"]
) -> str | None:
    shares = row.cell["speculation"].get(figure) or []
    percents = " ".join(NOTHING if share is None else f"{share * 100:.0f}" for share in shares)
    return f"{title}, in %, {row_name(row.key)}: {percents}" if shares else None


def _weak_lines(report: BenchReport) -> list[str]:
    """Return the weak spots among the classes (or workloads without classes), at their lowest load."""
    wholes: dict[str, list[ReportRow]] = {}
    for row in _lowest_loads(report):
        if row.cell["speculation"]["steps"]:
            wholes.setdefault(setting(row.key), []).append(row)
    lines = []
    for at, rows in wholes.items():
        parts = {label(one.key): _counts([one]) for row in rows for one in _classes(report, row)}
        lines += [f"Weak{at}: {line}." for line in weak_spots(_counts(rows), parts).lines()]
    return lines


def _classes(report: BenchReport, row: ReportRow) -> list[ReportRow]:
    """Return the rows of a workload's classes at the same load, or the row itself without classes."""
    keys = (row.key, {**row.key, "category": "all"})
    found = [
        one
        for one in rows_of(report)
        if one.key not in keys and {**one.key, "category": "all"} in keys and one.cell["speculation"]["steps"]
    ]
    return found or [row]


def _counts(rows: Sequence[ReportRow]) -> DraftCounts:
    """Add up the drafts of rows, by position if all rows have positions."""
    figures = [row.cell["speculation"] for row in rows]
    steps, accepted = (sum(one[name] or 0 for one in figures) for name in ("steps", "accepted"))

    def sums(name: Literal["reached_by_position", "acceptance_by_position"]) -> tuple[int, ...]:
        listed = [[round(share * (one["steps"] or 0)) for share in one.get(name) or ()] for one in figures]
        return tuple(map(sum, zip_longest(*listed, fillvalue=0))) if all(listed) else ()

    reached = sums("reached_by_position")
    by_position = sums("acceptance_by_position") if reached else ()
    return DraftCounts(steps, 1 + accepted / max(steps, 1), reached, by_position[: len(reached)])


def _range_line(row: ReportRow) -> str | None:
    ranges = row.cell.get("over_time")
    speeds = None if ranges is None else ranges["tokens_per_s"]
    if ranges is None or speeds is None:
        return None
    line = f"{number(speeds[0])} to {number(speeds[1])} tok/s"
    if (rates := ranges["draft_acceptance_rate"]) is not None:
        line += f", {rates[0]:.1%} to {rates[1]:.1%} of the drafts accepted"
    windows = f"{ranges['num_windows']} windows of {ranges['window_s']:g} s"
    return f"Over time, {row_name(row.key)}: {line} ({windows})."


def summary(report: BenchReport) -> str:
    """Return one line that says what was measured."""
    endpoint = report["endpoint"]
    model = endpoint.get("title") or _without_path(endpoint["model"])
    drafter = f" with drafter {_without_path(endpoint['drafter'])}" if endpoint["drafter"] else ""
    drafter += f" ({endpoint['drafter_kind']})" if drafter and endpoint.get("drafter_kind") else ""
    return f"{model}{drafter}, {endpoint['kind']} {endpoint['version'] or ''}, {report['date']}"


def _without_path(name: object) -> str:
    """Return a model's name without its folder on the machine; keep org/name of the hub."""
    return model_title(str(name)) if str(name).startswith(("/", "~", ".")) else str(name)


def terminal(report: BenchReport) -> Renderables:
    """Return the headline table, warnings and notes as objects that rich can print."""
    lines = [*lead_lines(report), *draft_lines(report), *start_lines(report), *generator_lines(report)]
    return Renderables(
        Text(clean(summary(report)), style="bold"),
        to_rich(headline(report)),
        *(Text(clean(line)) for line in lines),
        *(Text(f"warning: {clean(line)}", style="yellow") for line in report["warnings"]),
        *(Text(f"note: {clean(line)}", style="dim") for line in report["notes"]),
        Text(
            "± is half of the 95 % interval; commit/step: tokens an answer commits per step, accepted + 1.",
            style="dim",
        ),
    )


def markdown(report: BenchReport, tables: Sequence[Sheet] = ()) -> str:
    """Return the report as Markdown, including tables in the shape of published tables."""
    lines = [*lead_lines(report), *draft_lines(report), *start_lines(report), *generator_lines(report)]
    facts, parted = {**report["machine"], **report["versions"]}, divergences(report)
    by_position = acceptance(report)
    parts = [
        f"# {escape_markdown(summary(report))}",
        to_markdown(headline(report)),
        "\n".join(f"- {escape_markdown(line)}" for line in lines),
        "\n".join(f"- **Warning**: {escape_markdown(line)}" for line in report["warnings"]),
        "\n".join(f"- Note: {escape_markdown(line)}" for line in report["notes"]),
        *(f"## {escape_markdown(sheet.title)}\n\n{to_markdown(sheet)}" for sheet in tables),
        "## All cells",
        to_markdown(details(report)),
        *(["## Acceptance by position", to_markdown(by_position)] if by_position.rows else []),
        *(["## First divergences", to_markdown(parted)] if parted.rows else []),
        "## How it was run",
        _list_facts({"endpoint": report["endpoint"], "baseline": report["baseline"]}),
        _list_facts(report["options"]),
        _list_facts(facts),
        "## What the figures mean",
        _list_facts(report["definitions"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def fact_text(value: object) -> str:
    """Return a fact as text: strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _committed_text(cell: Cell) -> str:
    figures = cell["speculation"]
    committed = figures["committed_per_step"]["value"]
    return figures["acceptance"] if committed is None else number(committed)


def _card_text(row: ReportRow) -> str:
    speedup = row.speedup["value"]
    gain = "" if speedup is None else f" ({number(speedup)}x)"
    return f"{number(row.cell['tokens_per_s']['value'])}{gain}"


FIGURES: dict[str, Column[ReportRow]] = {
    "tokens_per_s": ("tok/s", lambda row: estimate(row.cell["tokens_per_s"])),
    "speedup": ("speedup over plain decoding", lambda row: estimate(row.speedup, suffix="x")),
    "committed_per_step": ("tokens committed per step (accepted + 1)", lambda row: _committed_text(row.cell)),
    "request_tokens_per_s": (
        "tok/s of one request, p50",
        lambda row: number(row.cell["request_tokens_per_s"]["p50"]),
    ),
    "ttft": ("TTFT p50, ms", lambda row: milliseconds(row.cell["ttft_s"]["p50"])),
    "tpot": ("TPOT p50, ms", lambda row: milliseconds(row.cell["tpot_s"]["p50"])),
    "card": ("tok/s (speedup)", _card_text),
}
VARYING: tuple[Column[ReportRow], ...] = (  # columns only if the report has several values of them
    ("depth", lambda row: str(row.key["depth"])),
    ("temperature", lambda row: f"{row.key['temperature']:g}"),
)
DETAILS: tuple[Column[Cell], ...] = (
    ("conc", lambda cell: load_text(cell["key"])),
    ("depth", lambda cell: str(cell["key"]["depth"])),
    ("temp", lambda cell: f"{cell['key']['temperature']:g}"),
    ("requests", lambda cell: str(cell["num_requests"])),
    ("failed", lambda cell: _failed_detail(cell)),
    ("tokens in", lambda cell: _count(cell["tokens_in"])),
    ("cached", lambda cell: _count(cell["cached_tokens"])),
    ("tokens out", lambda cell: _count(cell["tokens_out"])),
    ("tok/s", lambda cell: number(cell["tokens_per_s"]["value"])),
    ("95 %", lambda cell: interval_text(cell["tokens_per_s"]["interval"])),
    ("tok/s a request p50", lambda cell: number(cell["request_tokens_per_s"]["p50"])),
    ("committed/step", _committed_text),
    ("95 %", lambda cell: interval_text(cell["speculation"]["committed_per_step"]["interval"])),
    ("drafts accepted", lambda cell: _percent(cell["speculation"]["draft_acceptance_rate"])),
    ("tok/s over time", lambda cell: _over_time_text(cell)),
    ("TTFT p50", lambda cell: milliseconds(cell["ttft_s"]["p50"])),
    ("p90", lambda cell: milliseconds(cell["ttft_s"]["p90"])),
    ("p99 ms", lambda cell: milliseconds(cell["ttft_s"]["p99"])),
    ("TPOT p50", lambda cell: milliseconds(cell["tpot_s"]["p50"])),
    ("p90", lambda cell: milliseconds(cell["tpot_s"]["p90"])),
    ("p99 ms", lambda cell: milliseconds(cell["tpot_s"]["p99"])),
    ("ITL p50", lambda cell: milliseconds(cell["itl_s"]["p50"])),
    ("p99 ms", lambda cell: milliseconds(cell["itl_s"]["p99"])),
    ("end to end p50", lambda cell: number(cell["latency_s"]["p50"])),
    ("p99 s", lambda cell: number(cell["latency_s"]["p99"])),
    ("send lag p99 ms", lambda cell: milliseconds(cell["send_lag_s"]["p99"])),
)


def _failed_text(cells: Sequence[Cell]) -> str:
    failed = sum(cell["num_failed"] for cell in cells)
    return f"{failed}/{sum(cell['num_requests'] for cell in cells)}" if failed else "0"


def _failed_detail(cell: Cell) -> str:
    not_sent = f" +{cell['num_not_sent']} not sent" if cell["num_not_sent"] else ""
    not_ended = f" +{cell['num_not_ended']} given up" if cell["num_not_ended"] else ""
    return f"{cell['num_failed']}{not_sent}{not_ended}"


def _over_time_text(cell: Cell) -> str:
    ranges = cell.get("over_time")
    return NOTHING if ranges is None else interval_text(ranges["tokens_per_s"])


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def _percent_of(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _count(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def generator_lines(report: BenchReport) -> list[str]:
    """Return a line for each load: how fast the load generator itself can read."""
    parts = [
        f"{number(one['events_per_s'])} at {load_text(one)} ({one['num_processes']} "
        f"process{'es' if one['num_processes'] > 1 else ''}, {_percent_of(one['used'])} used)"
        for one in report.get("generator", [])
    ]
    return [f"The load generator itself can read, in events/s: {', '.join(parts)}."] if parts else []


def start_lines(report: BenchReport) -> list[str]:
    """Return lines on FP4 kernels (if a log names any), on each start and on the warm-up."""
    kernels = report["endpoint"].get("fp4_kernels")
    lines = (
        [f"FP4 kernels: {', '.join(map(str, kernels))}."]
        if isinstance(kernels, list | tuple) and kernels
        else []
    )
    for one in report["startup"]:
        phases = ", ".join(f"{phase['name']} {number(phase['seconds'])} s" for phase in one["phases"])
        phases = f" ({phases})" if phases else ""
        lines.append(
            f"Start-up {one['label']}: ready after {number(one['ready_s'])} s{phases}. First request: "
            f"first token after {milliseconds(one['first_ttft_s'])} ms, the last after "
            f"{number(one['first_latency_s'])} s."
        )
    warm = report["warmup"]
    if warm["num_requests"]:
        lines.append(
            f"Warm-up, in no other figure: {warm['num_requests']} requests, {warm['num_failed']} failed. "
            f"The first, cold: first token after {milliseconds(warm['first_ttft_s'])} ms (the others of its "
            f"arm, p50: {milliseconds(warm['rest_ttft_s'])}), {number(warm['first_tokens_per_s'])} tok/s."
        )
    return lines


def _list_facts(facts: Mapping[str, object]) -> str:
    return "\n".join(
        f"- {escape_markdown(name)}: {escape_markdown(fact_text(value))}" for name, value in facts.items()
    )
