"""Examine this machine: graphics cards, processor, memory, container limits, disks and libraries. Report
which number formats and kernels work here, and why the others do not. Compare every kernel with its
reference. List known problems of the installed driver, Linux kernel, card and libraries. The exit code is 1
if there is a problem, and 0 if there are only warnings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_flags
from blockdraft.errors import SettingsError

if TYPE_CHECKING:
    from blockdraft.doctor.finding import Finding
    from blockdraft.doctor.report import Diagnosis

SUMMARY = "examine this machine: hardware, limits, libraries, kernels"
USAGE = "blockdraft doctor [flags]"
DEVICES = ("auto", "cpu", "cuda")
EXIT_PROBLEM = 1
WIDTH = 110  # of tables in files and pipes
AREAS = ("machine", "limits", "disk", "libraries", "kernels", "known problems")
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
VERDICTS = {
    "ok": "No problem found.",
    "warning": "blockdraft runs here. The warnings name what costs speed or may fail later.",
    "problem": "There are problems. The line 'do:' below each says how to solve it.",
}


FLAGS = """
--device NAME: device to check: cpu, cuda or cuda:N (default: auto, cuda if PyTorch finds a card, else cpu)
--quick: do not compare kernels with their references
--json: print one JSON object instead of text
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, FLAGS, device="auto")


def run(args: argparse.Namespace) -> int:
    from blockdraft.doctor.report import as_json, examine

    if args.device.partition(":")[0] not in DEVICES:
        raise SettingsError(f"device '{args.device}' is unknown: use auto, cpu, cuda or cuda:1.")
    note = partial(print, file=sys.stderr, flush=True) if sys.stderr.isatty() else lambda text: None
    report = examine(args.device, with_kernels=not args.quick, note=note)
    if args.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        _show(report)
    return EXIT_PROBLEM if report.verdict == "problem" else 0


def _show(report: Diagnosis) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table("format", "hardware", "this engine", "vLLM, SGLang", box=None, pad_edge=False)
    for ability in report.abilities:
        table.add_row(ability.name, ability.state, ability.native_engine, ability.others)
    for title in AREAS:
        area = title.split()[0]
        found = [finding for finding in report.findings if finding.area == area]
        if area == "known":
            console.print("[bold]Number formats[/bold]", Padding(table, (0, 0, 1, 2)), sep="\n")
        elif not found:
            continue
        console.print(f"[bold]{title.capitalize()}[/bold]")
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
