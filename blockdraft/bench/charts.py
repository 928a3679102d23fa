"""Charts as SVG text, without a script; the page's style sheet colours them, in light and dark.

All are WIDTH units wide, which is about a phone's width, so that their text stays readable on one. Hovering
over a mark shows its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from blockdraft.bench.figures import Interval
from blockdraft.bench.sheet import clean

WIDTH = 360
BAR_HEIGHT = 180
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 10, 30
ROW_HEIGHT = 30
MAX_LABEL = 52  # characters; more do not fit
NUM_QUANTILES = 21
LOG_FROM = 30.0  # largest over smallest value from which an axis of times is logarithmic


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its interval; `style` is a class of the style sheet."""

    value: float | None
    style: str
    note: str
    interval: Interval = None


@dataclass(frozen=True, slots=True)
class Strip:
    """A distribution: quantiles at 0, 5, ... 100 %, and p99."""

    label: str
    style: str
    quantiles: Sequence[float]
    p99: float
    note: str


def text(value: object) -> str:
    """Anything, safe inside HTML and SVG, attributes included."""
    return escape(clean(str(value)), quote=True)


def shorten(label: str) -> str:
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 3]}..."


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str, unit: str, top: float = 0.0) -> str:
    """Upright bars from zero to `top` or to the tallest, in groups named beneath."""
    top = max([top, *(_reach(bar) for _, group in groups for bar in group)])
    ticks = linear_ticks(top)
    height = BAR_HEIGHT - TOP - BOTTOM
    scale = height / ticks[-1]
    marks = []
    for tick in ticks:
        y = TOP + height - tick * scale
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="tick end" x="{LEFT - 5}" y="{y + 3.5:.1f}">{text(_short(tick))}</text>')
    room = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    for place, (name, group) in enumerate(groups):
        left = LEFT + place * room
        thick = min(26.0, room * 0.8 / max(1, len(group)))
        start = left + (room - thick * len(group)) / 2
        for index, bar in enumerate(group):
            marks.append(_upright(bar, x=start + index * thick, thick=thick, scale=scale, base=TOP + height))
        marks.append(
            f'<text class="tick middle" x="{left + room / 2:.1f}" y="{TOP + height + 14}">{text(name)}</text>'
        )
    marks.append(
        f'<text class="unit middle" x="{(LEFT + WIDTH) / 2}" y="{BAR_HEIGHT - 3}">{text(unit)}</text>'
    )
    return _svg(marks, height=BAR_HEIGHT, title=title)


def strips(rows: Sequence[Strip], *, title: str, unit: str) -> str:
    """Distributions in rows: 5 to 95 % a line, 25 to 75 % a box, the median a bar, p99 a dot."""
    values = [value for row in rows for value in (*row.quantiles, row.p99) if value > 0]
    if not values or any(len(row.quantiles) != NUM_QUANTILES for row in rows):
        return ""
    low, high = min(values), max(values)
    axis = Axis.logarithmic(low, high) if high / low >= LOG_FROM else Axis.linear(high)
    height = len(rows) * ROW_HEIGHT + BOTTOM
    marks = _upright_grid(axis, height=height - BOTTOM + 4)
    for place, row in enumerate(rows):
        y = place * ROW_HEIGHT + 22
        at = [axis.place(value) for value in row.quantiles]
        dot = axis.place(row.p99)
        marks.append(
            f'<g class="{text(row.style)}"><title>{text(row.note)}</title>'
            f'<text class="label" x="{RIGHT}" y="{y - 9}">{text(shorten(row.label))}</text>'
            f'<line class="whisker" x1="{at[1]:.1f}" x2="{at[19]:.1f}" y1="{y}" y2="{y}"/>'
            f'<rect class="fill" x="{at[5]:.1f}" y="{y - 5}" width="{max(1.0, at[15] - at[5]):.1f}" '
            f'height="10"/>'
            f'<line class="median" x1="{at[10]:.1f}" x2="{at[10]:.1f}" y1="{y - 6}" y2="{y + 6}"/>'
            f'<circle class="fill" cx="{dot:.1f}" cy="{y}" r="2.5"/></g>'
        )
    name = f"{unit}, logarithmic" if axis.is_logarithmic else unit
    marks.append(f'<text class="unit middle" x="{WIDTH / 2}" y="{height - 3}">{text(name)}</text>')
    return _svg(marks, height=height, title=title)


def lying_bars(rows: Sequence[tuple[str, Bar]], *, title: str, unit: str, mark_at: float) -> str:
    """Bars lying from zero, with a line at a value that matters."""
    axis = Axis.linear(max(mark_at, *(_reach(bar) for _, bar in rows)))
    height = len(rows) * ROW_HEIGHT + BOTTOM
    marks = _upright_grid(axis, height=height - BOTTOM + 4)
    for place, (name, bar) in enumerate(rows):
        y = place * ROW_HEIGHT + 22
        end = axis.place(bar.value or 0.0)
        marks.append(
            f'<g class="{text(bar.style)}"><title>{text(bar.note)}</title>'
            f'<text class="label" x="{RIGHT}" y="{y - 9}">{text(shorten(name))}</text>'
            f'<rect class="fill" x="{axis.left}" y="{y - 5}" width="{max(0.0, end - axis.left):.1f}" '
            f'height="10"/>'
        )
        if bar.interval is not None:
            low, high = (axis.place(bound) for bound in bar.interval)
            marks.append(
                f'<path class="error" d="M{low:.1f} {y}H{high:.1f}'
                f'M{low:.1f} {y - 4}v8M{high:.1f} {y - 4}v8"/>'
            )
        marks.append("</g>")
    x = axis.place(mark_at)
    marks.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{height - BOTTOM + 4}"/>')
    marks.append(f'<text class="unit middle" x="{WIDTH / 2}" y="{height - 3}">{text(unit)}</text>')
    return _svg(marks, height=height, title=title)


@dataclass(frozen=True, slots=True)
class Axis:
    """Where values lie across a chart."""

    ticks: tuple[float, ...]
    is_logarithmic: bool = False
    left: float = RIGHT
    right: float = WIDTH - 16

    @classmethod
    def linear(cls, high: float) -> Axis:
        return cls(ticks=linear_ticks(high))

    @classmethod
    def logarithmic(cls, low: float, high: float) -> Axis:
        decades = range(floor(log10(low)), ceil(log10(high)) + 1)
        ticks = [10.0**decade for decade in decades]
        return cls(ticks=tuple(ticks), is_logarithmic=True)

    def place(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        if self.is_logarithmic:
            share = log10(max(value, low) / low) / log10(high / low)
        else:
            share = (value - low) / (high - low)
        return self.left + min(1.0, max(0.0, share)) * (self.right - self.left)


def linear_ticks(high: float) -> tuple[float, ...]:
    """From zero to at least `high`, in four to ten round steps."""
    if high <= 0:
        return (0.0, 1.0)
    rough = high / 5
    size = 10.0 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    return tuple(step * place for place in range(ceil(high / step - 1e-9) + 1))


def _upright_grid(axis: Axis, *, height: float) -> list[str]:
    marks = []
    for tick in axis.ticks:
        x = axis.place(tick)
        marks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{height}"/>')
        marks.append(f'<text class="tick middle" x="{x:.1f}" y="{height + 11}">{text(_short(tick))}</text>')
    return marks


def _upright(bar: Bar, *, x: float, thick: float, scale: float, base: float) -> str:
    if bar.value is None:
        return ""
    tall = bar.value * scale
    middle = x + thick / 2
    error = ""
    if bar.interval is not None:
        low, high = (base - bound * scale for bound in bar.interval)
        error = (
            f'<path class="error" d="M{middle:.1f} {low:.1f}V{high:.1f}'
            f'M{middle - 3:.1f} {low:.1f}h6M{middle - 3:.1f} {high:.1f}h6"/>'
        )
    return (
        f'<g class="{text(bar.style)}"><title>{text(bar.note)}</title><rect class="fill" x="{x + 1:.1f}" '
        f'y="{base - tall:.1f}" width="{max(1.0, thick - 2):.1f}" height="{tall:.1f}"/>{error}</g>'
    )


def _reach(bar: Bar) -> float:
    return max(bar.value or 0.0, bar.interval[1] if bar.interval else 0.0)


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,g}"


def _svg(marks: Sequence[str], *, height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{text(title)}">{"".join(marks)}</svg>'
    )
