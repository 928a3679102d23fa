"""blockdraft doctor: what this machine is, what runs on it, and what is known to go wrong on it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from blockdraft.errors import SettingsError

if TYPE_CHECKING:
    from blockdraft.doctor.finding import Finding
    from blockdraft.doctor.report import Diagnosis

SUMMARY = "examine this machine: hardware, limits, libraries, kernels"
USAGE = "blockdraft doctor [flags]"
DESCRIPTION = (
    "Examine this machine: cards, processor, memory, limits of a container, disks and libraries; which "
    "number formats and kernels run here, and why others do not; every kernel against its reference on this "
    "device; and known problems with this driver, kernel, card or library. Exits with 1 if there is a "
    "problem, with 0 if there are warnings at most."
)
DEVICES = ("auto", "cpu", "cuda")
EXIT_PROBLEM = 1
WIDTH = 110  # of tables that no terminal looks at
AREAS = {
    "machine": "Machine",
    "limits": "Limits",
    "disk": "Disk",
    "libraries": "Libraries",
    "kernels": "Kernels",
    "known": "Known problems",
}
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
VERDICTS = {
    "ok": "No problem found.",
    "warning": "It runs; the warnings say what may cost speed, or bite later.",
    "problem": "There are problems: what to do stands below each.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="torch device whose kernels are checked (default: auto, cuda where torch finds one, else cpu)",
    )
    parser.add_argument("--quick", action="store_true", help="leave out the comparison of kernels")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not the text")


def run(args: argparse.Namespace) -> int:
    from blockdraft.doctor.report import as_json, examine

    if args.device.partition(":")[0] not in DEVICES:
        raise SettingsError(f"device '{args.device}' is unknown: use auto, cpu, cuda or cuda:1.")
    report = examine(args.device, with_kernels=not args.quick, note=_note)
    if args.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        _show(report)
    return EXIT_PROBLEM if report.verdict == "problem" else 0


def _note(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _show(report: Diagnosis) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table("format", "hardware", "this engine", "vLLM, SGLang", box=None, pad_edge=False)
    for ability in report.abilities:
        table.add_row(ability.name, ability.state, ability.native_engine, ability.others)
    for area, title in AREAS.items():
        found = [finding for finding in report.findings if finding.area == area]
        if area == "known":
            console.print("[bold]Number formats[/bold]", Padding(table, (0, 0, 1, 2)), sep="\n")
        elif not found:
            continue
        console.print(f"[bold]{title}[/bold]")
        if not found:
            console.print("  none for this driver, kernel, card and these libraries")
        for finding in found:
            for text in _lines(finding):
                console.print(text, soft_wrap=True)
        console.print()
    console.print(f"[{STYLES[report.verdict]}]{VERDICTS[report.verdict]}[/]")


def _lines(finding: Finding) -> Iterator[str]:
    from rich.markup import escape

    mark = f"[{STYLES[finding.level]}]{finding.level:7}[/]"
    yield f"  {mark}  {escape(finding.name)}: {escape(finding.says)}"
    if finding.advice:
        yield f"           do: {escape(finding.advice)}"
    if finding.thread:
        yield f"           see: {escape(finding.thread)}"
