"""Renders the report as one HTML file that needs no network. Tables repeat every figure of the charts.

uPlot draws the charts, as on the live page. The page's policy allows only uPlot and our own script. All data
from a server, a prompt or a file is escaped by `text` or written as JSON.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

from blockdraft.bench import layout
from blockdraft.bench.figures import BenchReport, Estimate, Interval
from blockdraft.bench.records import SPECULATIVE, Arm, Key
from blockdraft.bench.report_rows import ReportRow, arm_names, rows_of, whole_rows
from blockdraft.bench.sheet import (
    Sheet,
    clean,
    estimate,
    full_label,
    interval_text,
    label,
    load_text,
    milliseconds,
    number,
    setting,
)

FOLDER = Path(__file__).parent / "page"
UPLOT = Path(__file__).parents[1] / "server" / "page" / "uplot"  # the live page's copy
_COLOURS = {"pays": "speculative", "loses": "error", "unclear": "muted", "too little": "muted"}
_TIMES_NOTE = (
    '<p class="muted">Time to first token (TTFT) and per output token after it (TPOT). Box: the middle half; '
    "line: 5 to 95 %; upright bar: median; dot: p99.</p>"
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A value or a distribution in a chart. `style` names a colour of the style sheet."""

    style: str
    note: str  # shown while the cursor is over the mark
    box: tuple[float, float]  # from, to
    line: Interval = None
    tick: float | None = None
    dot: float | None = None


Groups = list[tuple[str, list[Mark]]]  # the marks under each name


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart, as charts.js reads it."""

    title: str
    unit: str
    groups: Groups
    is_horizontal: bool = False  # one row per group; bars grow from left to right
    is_time: bool = False  # the values are times, which may span powers of ten
    mark_at: float | None = None  # draw a line at this value
    top: float | None = None  # end of the axis; None to fit the marks


def render(report: BenchReport, tables: Sequence[Sheet] = ()) -> str:
    """Return the whole page, including tables in the shape of published tables."""
    rows, names = whole_rows(report), arm_names(report["cells"])
    speeds, gains = _throughput_charts(rows, names), _speedup_charts(rows_of(report))
    shares, times = _acceptance_charts(rows), _time_charts(rows, names)
    legend = _legend(names)
    begun = [*layout.start_lines(report), *layout.generator_lines(report)]
    sections = [
        *((text(sheet.title), _table(sheet)) for sheet in tables),
        ("Throughput by concurrency", _figures(speeds, legend)),
        ("What speculation gains", _figures(gains)),
        ("Acceptance by position", _figures(shares) + _table(layout.acceptance(report))),
        ("Times", _figures(times, legend + _TIMES_NOTE) + _paragraphs(layout.draft_lines(report))),
        ("All cells", _table(layout.details(report))),
        ("Agreement", _table(layout.agreement(report))),
        ("First divergences", _table(layout.divergences(report), style="text")),
        ("Start-up, warm-up, load generator", _paragraphs(begun)),
        ("How it was run", _facts(_how(report))),
        ("What the figures mean", _facts(report["definitions"])),
    ]
    body = "\n".join(f"<section><h2>{title}</h2>{part}</section>" for title, part in sections if part)
    library = f"/* {_read(UPLOT / 'LICENSE')} */\n{_read(UPLOT / 'uPlot.iife.min.js')}"
    script = _read(FOLDER / "charts.js")
    charts = [asdict(chart) for chart in (*speeds, *gains, *shares, *times)]  # in the page's order
    return Template(_read(FOLDER / "report.html")).substitute(
        title=text(layout.summary(report)),
        subtitle=text(f"measured from {_machine(report['machine'])}"),
        style=_read(UPLOT / "uPlot.min.css") + _read(FOLDER / "style.css"),
        sections=_top(report) + body,
        data=json.dumps({"charts": charts}, allow_nan=False).replace(
            "<", "\\u003c"
        ),  # so no text can end the script element
        library=library,
        script=script,
        hashes=f"{_hash(library)} {_hash(script)}",
    )


def text(value: object) -> str:
    """Return a value as text that is safe in HTML, including in attributes."""
    return escape(clean(str(value)), quote=True)


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{text(line)}</p>" for line in lines)


def _hash(script: str) -> str:
    """Return a script's hash as the page's content security policy names it."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


_read = partial(Path.read_text, encoding="utf-8")


def _top(report: BenchReport) -> str:
    return (
        "".join(f'<p class="lead">{text(line)}</p>' for line in layout.lead_lines(report))
        + "".join(f'<p class="warning">{text(line)}</p>' for line in report["warnings"])
        + "".join(f'<p class="muted">Note: {text(line)}</p>' for line in report["notes"])
        + _table(layout.headline(report))
    )


def _legend(names: Mapping[Arm, str]) -> str:
    speculative = "with speculation" if names[SPECULATIVE] == "speculative" else names[SPECULATIVE]
    return (
        f'<div class="legend"><span class="speculative">{speculative}</span>'
        '<span class="plain">without (baseline)</span></div>'
    )


def _figures(charts: Sequence[Chart], before: str = "") -> str:
    """Return an empty place for each chart. The script fills the places in order."""
    figures = "".join(
        f'<figure class="chart"><h3>{text(chart.title)}</h3><div class="plot" role="img" '
        f'aria-label="{text(chart.title)}"></div><figcaption class="muted"></figcaption></figure>'
        for chart in charts
    )
    return f'{before}<div class="charts">{figures}</div>' if charts else ""


# ---- charts


def _bar(figure: Estimate, style: str, before: str, unit: str, after: str = "") -> list[Mark]:
    """Return one mark, or no mark if nothing was measured."""
    value, interval = figure["value"], figure["interval"]
    if value is None:
        return []
    note = f"{before}{number(value)}{unit}, 95 %: {interval_text(interval)}{after}"
    return [Mark(style, note, (0.0, value), interval)]


def _throughput_charts(rows: Sequence[ReportRow], names: Mapping[Arm, str]) -> list[Chart]:
    charts = []
    for title, members in _by_workload(rows).items():
        groups: Groups = [(load_text(row.key), []) for row in members]
        for row, (_, marks) in zip(members, groups, strict=True):
            for cell in row.cells:
                marks += _bar(cell["tokens_per_s"], cell["arm"], f"{names[cell['arm']]}: ", " tok/s")
        unit = "tok/s by concurrency" if members[0].key["rate"] is None else "tok/s by request rate"
        charts.append(Chart(f"Throughput of {title}", unit, groups))
    return charts


def _speedup_charts(rows: Sequence[ReportRow]) -> list[Chart]:
    """Make a chart per load, with a bar per workload and class."""
    loads: dict[str, Groups] = {}
    for row in rows:
        verdict = "unclear" if row.pair is None else row.pair["verdict"]
        if marks := _bar(row.speedup, _COLOURS[verdict], "", "x", f" {verdict}"):
            name = clean(f"{label(row.key)}: {estimate(row.speedup, suffix='x')}")
            loads.setdefault(_load_title(row.key), []).append((name, marks))
    unit = "speedup; 1 = no gain"
    return [
        Chart(f"Speedup, {load}", unit, groups, is_horizontal=True, mark_at=1.0)
        for load, groups in loads.items()
    ]


def _acceptance_charts(rows: Sequence[ReportRow]) -> list[Chart]:
    """Make a chart per workload at its lowest load, if the server reports accepted drafts."""
    charts = []
    for title, members in _by_workload(rows).items():
        figures = members[0].cell["speculation"]
        groups = [
            (str(at), [Mark(SPECULATIVE, f"position {at}: {share:.1%}", (0.0, share))])
            for at, share in enumerate(figures["acceptance_by_position"] or [], start=1)
        ]
        if groups:
            shown = f"{title}: {estimate(figures['committed_per_step'])} committed per step"
            charts.append(Chart(shown, "share accepted at the lowest load, by position", groups, top=1.0))
    return charts


def _time_charts(rows: Sequence[ReportRow], names: Mapping[Arm, str]) -> list[Chart]:
    """Make two charts per load: TTFT and TPOT."""
    found: dict[str, Groups] = {}
    for name in ("TTFT", "TPOT"):
        for row in rows:
            for cell in row.cells:
                times = cell["ttft_s"] if name == "TTFT" else cell["tpot_s"]
                if times["p50"] is None or times["p99"] is None:
                    continue
                at = [value * 1000 for value in times["quantiles"]]  # 0, 5, ... 100 %
                parts = (("p50", times["p50"]), ("p90", times["p90"]), ("p99", times["p99"]))
                shown = ", ".join(f"{part} {milliseconds(value)} ms" for part, value in parts)
                note = clean(f"{label(row.key)}, {names[cell['arm']]}: {shown}")
                mark = Mark(cell["arm"], note, (at[5], at[15]), [at[1], at[19]], at[10], times["p99"] * 1000)
                title = f"{name}, {_load_title(row.key)}"
                found.setdefault(title, []).append((clean(label(row.key)), [mark]))
    return [Chart(title, "ms", groups, is_horizontal=True, is_time=True) for title, groups in found.items()]


def _by_workload(rows: Sequence[ReportRow]) -> dict[str, list[ReportRow]]:
    """Group rows that differ only in their load under one name, lowest load first."""
    found: dict[str, list[ReportRow]] = {}
    for row in sorted(rows, key=lambda row: (row.key["rate"] or 0.0, row.key["concurrency"])):
        at_rate = "" if row.key["rate"] is None else ", at a rate"
        found.setdefault(full_label(row.key) + at_rate, []).append(row)
    return found


def _load_title(key: Key) -> str:
    load = f"{key['rate']:g}/s" if key["rate"] is not None else f"concurrency {key['concurrency']}"
    return load + setting(key)


# ---- tables


def _table(sheet: Sheet, *, style: str = "") -> str:
    """Return the table as HTML, or an empty text if it has no rows."""
    words = ["word" if place < sheet.num_labels else "" for place in range(len(sheet.header))]

    def line(tag: str, entries: Sequence[str], classes: str = "") -> str:
        cells = zip(words, entries, strict=True)
        return "".join(f'<{tag} class="{word} {classes}">{text(entry)}</{tag}>' for word, entry in cells)

    body = "".join(f"<tr>{line('td', row, style)}</tr>" for row in sheet.rows)
    head = f"<thead><tr>{line('th', sheet.header)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>' if body else ""


def _how(report: BenchReport) -> dict[str, object]:
    parts: dict[str, Mapping[str, object]] = {
        "endpoint": report["endpoint"],
        "baseline": report["baseline"] or {},
        "option": report["options"],
        "machine": report["machine"],
        "version": report["versions"],
    }
    named = {f"{part}: {name}": value for part, facts in parts.items() for name, value in facts.items()}
    return {"schema": report["schema"], "date": report["date"], **named}


def _facts(facts: Mapping[str, object]) -> str:
    entries = (
        f"<dt>{text(name)}</dt><dd>{text(layout.fact_text(value))}</dd>" for name, value in facts.items()
    )
    return f"<dl>{''.join(entries)}</dl>"


def _machine(facts: Mapping[str, object]) -> str:
    gpus = facts.get("gpus")
    names = [str(gpu["name"]) for gpu in gpus if "name" in gpu] if isinstance(gpus, list) else []
    return f"{facts.get('platform')}, {facts.get('cpu')}, {', '.join(names) or 'no GPU seen'}"
