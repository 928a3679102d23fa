"""The report as one HTML file: no network, no script, light and dark, readable on a phone.

Everything that comes from a server, a prompt or a file passes `charts.text` on its way in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from blockdraft.bench.charts import Bar, Strip, bars, lying_bars, strips, text
from blockdraft.bench.figures import Distribution, Key, Pair, headline_speedup
from blockdraft.bench.layout import (
    agreement_line,
    details,
    fact_text,
    headline,
    start_lines,
    summary,
    verdict_lines,
)
from blockdraft.bench.records import SPECULATIVE, Arm
from blockdraft.bench.report import Report, ReportCell, Row, arm_names, whole_rows
from blockdraft.bench.sheet import Sheet, estimate, interval_text, label, load_text, milliseconds, number

FOLDER = Path(__file__).parent / "page"
ArmNames = Mapping[Arm, str]


def render(report: Report) -> str:
    """The whole page."""
    whole = whole_rows(report)
    names = arm_names(report["cells"])
    legend = _legend(names)
    machine = report["machine"]
    parts = [
        _top(report),
        _table(headline(report)),
        _section("Throughput by concurrency", legend, _charts(_throughput_charts(whole, names))),
        _section("What speculation gains", "", _charts(_speedup_charts(report["pairs"]))),
        _section("Acceptance by position", _ACCEPTANCE_NOTE, _charts(_acceptance_charts(whole))),
        _section("Times", legend + _TIMES_NOTE, _charts(_time_charts(whole, names))),
        _section("All cells", "", _table(details(report))),
        _section("Agreement", "", _agreement([row.pair for row in whole if row.pair is not None])),
        _section("Start-up and warm-up", "", _paragraphs(start_lines(report))),
        _section("How it was run", "", _facts(_how(report))),
        _section("What the figures mean", "", _facts(report["definitions"])),
    ]
    template = Template((FOLDER / "report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=text(summary(report)),
        subtitle=text(
            f"measured from {machine.get('platform')}, {machine.get('cpu')}, {_gpu_names(machine)}"
        ),
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        sections="\n".join(part for part in parts if part),
    )


_ACCEPTANCE_NOTE = (
    '<p class="muted">Share of verify steps that accepted the draft at each position, at the lowest load.</p>'
)
_TIMES_NOTE = (
    '<p class="muted">Time to first token (TTFT) and per output token after it (TPOT). Box: the middle half; '
    "line: 5 to 95 %; upright bar: median; dot: p99.</p>"
)


_VERDICT_STYLES = {"pays": "speculative", "loses": "loses", "unclear": "unclear", "too little": "unclear"}


def _top(report: Report) -> str:
    lines = [*verdict_lines(report), agreement_line(report) or ""]
    return (
        "".join(f'<p class="lead">{text(line)}</p>' for line in lines if line)
        + "".join(f'<p class="warning">{text(line)}</p>' for line in report["warnings"])
        + "".join(f'<p class="muted">Note: {text(line)}</p>' for line in report["notes"])
    )


def _legend(names: ArmNames) -> str:
    speculative = "with speculation" if names[SPECULATIVE] == "speculative" else names[SPECULATIVE]
    return (
        f'<div class="legend"><span class="speculative">{speculative}</span>'
        '<span class="plain">without (baseline)</span></div>'
    )


def _section(title: str, before: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2>{before}{body}</section>" if body else ""


def _charts(charts: Sequence[tuple[str, str]]) -> str:
    figures = [
        f'<figure class="chart"><h3>{text(title)}</h3>{chart}</figure>' for title, chart in charts if chart
    ]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _throughput_charts(rows: Sequence[Row], names: ArmNames) -> list[tuple[str, str]]:
    charts = []
    for title, members in _by_workload(rows).items():
        groups = [
            (
                load_text(row.key),
                [
                    Bar(
                        value=cell["tokens_per_s"]["value"],
                        interval=cell["tokens_per_s"]["interval"],
                        style=cell["arm"],
                        note=f"{names[cell['arm']]}: {number(cell['tokens_per_s']['value'])} tok/s, "
                        f"95 %: {interval_text(cell['tokens_per_s']['interval'])}",
                    )
                    for cell in row.cells
                ],
            )
            for row in members
        ]
        unit = "tok/s by concurrency" if members[0].key["rate"] is None else "tok/s by request rate"
        charts.append((title, bars(groups, title=f"Throughput of {title}", unit=unit)))
    return charts


def _speedup_charts(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """A chart per load, with a bar per workload and class."""
    loads: dict[str, list[tuple[str, Bar]]] = {}
    for pair in pairs:
        speedup = headline_speedup(pair["key"], pair["speedup"])
        if speedup["value"] is None:
            continue
        bar = Bar(
            value=speedup["value"],
            interval=speedup["interval"],
            style=_VERDICT_STYLES[pair["verdict"]],
            note=f"{number(speedup['value'])}x, 95 %: {interval_text(speedup['interval'])} {pair['verdict']}",
        )
        shown = f"{label(pair['key'])}: {estimate(speedup, suffix='x')}"
        loads.setdefault(_setting(pair["key"], with_load=True), []).append((shown, bar))
    return [
        (load, lying_bars(rows, title=f"Speedup, {load}", unit="speedup; 1 = no gain", mark_at=1.0))
        for load, rows in loads.items()
    ]


def _acceptance_charts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    charts = []
    for title, members in _by_workload(rows).items():
        figures = members[0].cell["speculation"]
        shares = figures["acceptance_by_position"]
        if not shares:
            continue
        groups = [
            (str(place), [Bar(value=share, style="speculative", note=f"position {place}: {share:.1%}")])
            for place, share in enumerate(shares, start=1)
        ]
        committed = estimate(figures["committed_per_step"])
        shown = f"{title}: {committed} committed per step"
        charts.append(
            (shown, bars(groups, title=f"Acceptance of {title}", unit="position of the draft", top=1.0))
        )
    return charts


def _time_charts(rows: Sequence[Row], names: ArmNames) -> list[tuple[str, str]]:
    """TTFT and TPOT, a chart per load."""
    loads: dict[str, list[ReportCell]] = {}
    for row in rows:
        loads.setdefault(_setting(row.key, with_load=True), []).extend(row.cells)
    charts = []
    for name in ("TTFT", "TPOT"):
        for load, cells in loads.items():
            found = [strip for cell in cells for strip in _strips(cell, name, names[cell["arm"]])]
            charts.append((f"{name}, {load}", strips(found, title=f"{name}, {load}", unit="ms")))
    return charts


def _strips(cell: ReportCell, name: str, arm: str) -> list[Strip]:
    """One, or none where nothing was measured."""
    times: Distribution = cell["ttft_s"] if name == "TTFT" else cell["tpot_s"]
    if times["p99"] is None:
        return []
    figures = (f"{part} {milliseconds(value)} ms" for part, value in _named_times(times))
    return [
        Strip(
            label=label(cell["key"]),
            style=cell["arm"],
            quantiles=[value * 1000 for value in times["quantiles"]],
            p99=times["p99"] * 1000,
            note=f"{label(cell['key'])}, {arm}: {', '.join(figures)}",
        )
    ]


def _named_times(times: Distribution) -> list[tuple[str, float | None]]:
    return [("p50", times["p50"]), ("p90", times["p90"]), ("p99", times["p99"])]


def _by_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in their load only, lowest load first, under a name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{label(row.key)}, {_setting(row.key, with_load=False)}", []).append(row)
    for members in found.values():
        members.sort(key=lambda row: (row.key["rate"] or 0.0, row.key["concurrency"]))
    return found


def _setting(key: Key, *, with_load: bool) -> str:
    words = []
    if with_load:
        words.append(f"{key['rate']:g}/s" if key["rate"] is not None else f"concurrency {key['concurrency']}")
    elif key["rate"] is not None:
        words.append("at a rate")
    if key["depth"]:
        words.append(f"depth {key['depth']}")
    return ", ".join([*words, f"T {key['temperature']:g}"])


def _agreement(pairs: Sequence[Pair]) -> str:
    lines, divergences = [], []
    for pair in pairs:
        agreement = pair["agreement"]
        if agreement is None:
            continue
        where = f"{label(pair['key'])}, {_setting(pair['key'], with_load=True)}"
        for name, turns in (("first", agreement["first_turns"]), ("later", agreement["later_turns"])):
            if name == "later" and not turns["num_compared"] + turns["num_after_divergence"]:
                continue
            share = "-" if turns["share_equal"] is None else f"{turns['share_equal']:.1%}"
            counts = (turns["num_compared"], turns["num_equal"], turns["num_failed"])
            lines.append(
                (where, name, *(str(count) for count in counts), str(turns["num_after_divergence"]), share)
            )
        for one in agreement["divergences"]:
            place = f"turn {one['turn']}, character {one['position']}"
            divergences.append((where, one["prompt"], place, one["speculative"], one["plain"]))
    if not lines:
        return ""
    header = ("workload", "turns", "compared", "equal", "failed", "after a divergence", "share equal")
    table = _table(Sheet(title="", header=header, rows=tuple(lines), num_labels=2))
    if not divergences:
        return table
    shown = ("workload", "prompt", "where", "with speculation", "without")
    sheet = Sheet(title="", header=shown, rows=tuple(divergences), num_labels=5)
    return f"{table}<h2>First divergences</h2>{_table(sheet, style='text')}"


def _table(sheet: Sheet, *, style: str = "") -> str:
    words = ["word" if place < sheet.num_labels else "" for place in range(len(sheet.header))]
    head = "".join(
        f'<th class="{word}">{text(name)}</th>' for word, name in zip(words, sheet.header, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{word} {style}">{text(entry)}</td>' for word, entry in zip(words, row, strict=True)
        )
        + "</tr>"
        for row in sheet.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{text(line)}</p>" for line in lines)


def _how(report: Report) -> dict[str, object]:
    sections: dict[str, object] = {"schema": report["schema"], "date": report["date"]}
    parts: dict[str, Mapping[str, object]] = {
        "endpoint": report["endpoint"],
        "baseline": report["baseline"] or {},
        "option": report["options"],
        "machine": report["machine"],
        "version": report["versions"],
    }
    for part, facts in parts.items():
        sections.update({f"{part}: {name}": value for name, value in facts.items()})
    return sections


def _facts(facts: Mapping[str, object]) -> str:
    entries = (f"<dt>{text(name)}</dt><dd>{text(fact_text(value))}</dd>" for name, value in facts.items())
    return f"<dl>{''.join(entries)}</dl>"


def _gpu_names(machine: Mapping[str, object]) -> str:
    gpus = machine.get("gpus")
    names = (
        [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, Mapping)] if isinstance(gpus, list) else []
    )
    return ", ".join(names) or "no GPU seen"
