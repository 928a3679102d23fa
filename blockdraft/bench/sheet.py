"""Tables of text for the terminal and for Markdown, and the text form of figures.

Names, errors and texts come from servers and files, so control characters and markup are removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from blockdraft.bench.figures import Estimate, GeneratorFigures, Interval
from blockdraft.bench.records import Key

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table. The first `num_labels` columns are words, the others figures. Titles may have two lines."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_labels: int = 1


def to_rich(sheet: Sheet) -> Table:
    """Return the table for rich; it fits a terminal of 80 columns."""
    table = Table(
        title=Text(clean(sheet.title)) if sheet.title else None,
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for place, name in enumerate(sheet.header):
        is_label = place < sheet.num_labels
        table.add_column(
            Text("\n".join(clean(line) for line in name.split("\n"))),
            justify="left" if is_label else "right",
            overflow="fold",
            no_wrap=not is_label,
            min_width=max(map(len, name.split("\n"))),
        )
    for row in sheet.rows:
        table.add_row(*(Text(clean(text)) for text in row))
    return table


def to_markdown(sheet: Sheet) -> str:
    places = range(len(sheet.header))
    lines = [
        tuple(clean(name) for name in sheet.header),
        tuple(":--" if place < sheet.num_labels else "--:" for place in places),
        *(tuple(escape_markdown(text) for text in row) for row in sheet.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def clean(text: str) -> str:
    """Return a text on one line, without control characters and without changes of writing direction."""
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "�" for letter in text)


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", clean(text))


def number(value: float | None) -> str:
    """Return a number as text with at least three digits and no exponent."""
    return NOTHING if value is None else f"{value:,.{_decimals(value)}f}"


def milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else number(seconds * 1000)


def estimate(figure: Estimate, *, suffix: str = "") -> str:
    """Return an estimate as text: the value and half the width of its interval."""
    value, interval = figure["value"], figure["interval"]
    if value is None:
        return NOTHING
    half = "" if interval is None else f" ±{(interval[1] - interval[0]) / 2:,.{_decimals(value)}f}"
    return f"{number(value)}{suffix}{half}"


def interval_text(interval: Interval) -> str:
    return NOTHING if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def label(key: Key) -> str:
    """Return the workload's name, with the class if the cell is one class."""
    return key["workload"] if key["category"] == "all" else f"{key['workload']} / {key['category']}"


def full_label(key: Key) -> str:
    """Return workload and class, with depth and temperature if they are not 0."""
    return f"{label(key)}{setting(key)}"


def setting(key: Key) -> str:
    """Return depth and temperature, each after a comma; leave out those that are 0."""
    depth = f", depth {key['depth']}" if key["depth"] else ""
    temperature = f", T {key['temperature']:g}" if key["temperature"] else ""
    return depth + temperature


def row_name(key: Key) -> str:
    """Return the name of a row: workload, class, depth, temperature and load."""
    return f"{full_label(key)} at {load_text(key)}"


def load_text(key: Key | GeneratorFigures) -> str:
    """Return how requests arrive: their concurrency or rate."""
    return str(key["concurrency"]) if key["rate"] is None else f"{key['rate']:g}/s"


def _decimals(value: float) -> int:
    size = abs(value)
    return 0 if size >= 100 else 1 if size >= 10 else 2
