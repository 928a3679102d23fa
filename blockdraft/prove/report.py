"""Shows the findings: on the terminal, as JSON, and as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template

from blockdraft.bench.endpoint import Endpoint
from blockdraft.bench.sheet import Sheet, clean, to_markdown
from blockdraft.prove.findings import Counts, Difference, WayResult

SCHEMA = 1
SHOWN = 3  # most differences of one way to show
STYLE = Path(__file__).parents[1] / "bench" / "page" / "style.css"
PAGE = Path(__file__).with_name("page.html")


class ProveReport:
    """All findings about one server, with the facts of the run."""

    def __init__(
        self,
        findings: Sequence[WayResult],
        endpoint: Endpoint,
        *,
        machine: Mapping[str, object],
        options: Mapping[str, object],
        date: str,
        trouble: str | None = None,
    ) -> None:
        """Make the report. `trouble` says why some questions were not asked, if so."""
        self.findings = list(findings)
        self.endpoint = endpoint
        self.machine = machine
        self.options = options
        self.date = date
        self.trouble = trouble

    @property
    def is_equal(self) -> bool:
        return not any(finding.is_different for finding in self.findings)

    @property
    def is_whole(self) -> bool:
        """Return whether every question was asked and answered."""
        return self.trouble is None and not total(self.findings).errors

    @property
    def title(self) -> str:
        endpoint = self.endpoint
        version = f" {endpoint.version}" if endpoint.version else ""
        return f"{endpoint.kind}{version}: {endpoint.title or endpoint.model}"

    @property
    def verdict(self) -> str:
        """Return one sentence that sums up all ways."""
        tested = [finding for finding in self.findings if finding.untested is None]
        different = [finding for finding in tested if finding.is_different]
        counts = total(tested)
        asked = f"{counts.num_equal} of {counts.num_asked} answers are equal"
        num_failed = len(total(self.findings).errors)
        failed = f", and {num_failed} requests failed" if num_failed else ""
        if self.trouble is not None:
            return f"Some questions were not asked: {self.trouble} So far {asked}{failed}."
        if not different and num_failed:
            return f"No difference was found in {len(tested)} ways, but not all was tested: {asked}{failed}."
        if not different:
            return f"The same answer in every one of {len(tested)} ways: {asked}."
        return f"Different answers in {len(different)} of {len(tested)} ways: {asked}{failed}."

    def sheet(self) -> Sheet:
        rows = [
            (finding.way, str(finding.greedy), str(finding.seeded), _remark(finding))
            for finding in self.findings
        ]
        return Sheet(self.title, ("way", "equal at T 0", "equal with a seed", ""), tuple(rows), num_labels=1)

    def details(self) -> list[str]:
        """Return the first differences of each way, one per line."""
        return [
            f"{finding.way}, question {one.question} ({_begin(one.prompt)}): after {one.at} characters "
            f"…{one.before!r} the baseline has {one.expected!r}, this one {one.found!r}{_closeness(one)}"
            for finding in self.findings
            for one in finding.differences[:SHOWN]
        ]

    def as_json(self) -> dict[str, object]:
        endpoint = asdict(self.endpoint)
        endpoint.pop("switches")
        return {
            "schema": SCHEMA,
            "date": self.date,
            "is_equal": self.is_equal,
            "verdict": self.verdict,
            "trouble": self.trouble,
            "endpoint": endpoint,
            "options": dict(self.options),
            "machine": dict(self.machine),
            "ways": [_as_json(finding) for finding in self.findings],
        }

    def to_json(self) -> str:
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        return f"{to_markdown(self.sheet())}\n\n{clean(self.verdict)}\n"

    def to_html(self) -> str:
        sheet = self.sheet()
        head = "".join(f"<th>{escape(name)}</th>" for name in sheet.header)
        rows = "".join(
            f"<tr{' class=loses' if finding.is_different else ''}>"
            + "".join(f"<td>{escape(clean(cell))}</td>" for cell in row)
            + "</tr>"
            for finding, row in zip(self.findings, sheet.rows, strict=True)
        )
        facts = {**self.options, **self.machine}
        return Template(PAGE.read_text(encoding="utf-8")).substitute(
            style=STYLE.read_text(encoding="utf-8"),
            title=escape(clean(self.title)),
            date=escape(self.date),
            verdict=escape(clean(self.verdict)),
            table=f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>",
            details="".join(f"<li>{escape(clean(line))}</li>" for line in self.details()),
            facts="".join(
                f"<dt>{escape(name)}</dt><dd>{escape(clean(str(value)))}</dd>"
                for name, value in facts.items()
            ),
        )


def total(findings: Sequence[WayResult]) -> Counts:
    """Return the counts of all ways together."""
    whole = Counts()
    for finding in findings:
        whole.num_equal += finding.greedy.num_equal + finding.seeded.num_equal
        whole.differences += finding.differences
        whole.errors += finding.errors
    return whole


def _as_json(finding: WayResult) -> dict[str, object]:
    def counts(found: Counts) -> dict[str, object]:
        return {
            "asked": found.num_asked,
            "equal": found.num_equal,
            "failed": len(found.errors),
            "differences": [asdict(one) for one in found.differences],
        }

    return {
        "way": finding.way,
        "greedy": counts(finding.greedy),
        "seeded": counts(finding.seeded),
        "problem": finding.problem,
        "untested": finding.untested,
        "note": finding.note,
        "as_with_drafts": finding.num_as_drafted,
        "errors": sorted(set(finding.errors)),
    }


def _remark(finding: WayResult) -> str:
    if finding.untested is not None:
        return f"not tested: {finding.untested}"
    errors = f"failed: {finding.errors[0]}" if finding.errors else None
    remark = finding.problem or finding.note or errors or ("different" if finding.is_different else "")
    if not finding.num_as_drafted:
        return remark
    num_different = len(finding.differences)
    return f"{remark}; {finding.num_as_drafted} of {num_different} have the answer of 'with drafts'"


def _begin(prompt: str) -> str:
    line = prompt.split("\n")[0]
    return line if len(line) <= 48 else line[:47] + "…"


def _closeness(difference: Difference) -> str:
    if difference.tie is None:
        return ""
    return f"; the two likeliest tokens there are {difference.tie:.3g} nats apart"
