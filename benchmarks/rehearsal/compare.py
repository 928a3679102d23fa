"""Compares a rehearsal with the last result of the same kind of machine in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import table
from benchmarks.rehearsal.sheet import Failure, Found

RESULTS = Path(__file__).parents[1] / "results"
MAX_WORSE = 0.10  # of what it was before


@dataclass(slots=True)
class Measured:
    """The numbers that must not get worse, by name."""

    starts_s: dict[str, float] = field(default_factory=dict)
    steps_ms: dict[str, float] = field(default_factory=dict)  # of one stream
    graphs: dict[str, int] = field(default_factory=dict)
    equal: dict[str, list[int]] = field(default_factory=dict)  # answers that are equal, of how many

    def __len__(self) -> int:
        return sum(map(len, (self.starts_s, self.steps_ms, self.graphs, self.equal)))

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Last:
    """The result to compare with."""

    name: str
    date: str
    commit: str
    measured: Measured


@dataclass(frozen=True, slots=True)
class Change:
    """One number, before and now."""

    what: str
    before: str
    now: str
    is_worse: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.now}"


def machine_kind(result: Mapping[str, Any]) -> str:
    """Return the card's name without its number, else the processor and its cores."""
    device = str(result["device"])
    if device.startswith("cuda"):
        return device.partition("(")[2].rstrip(")") or "a card without a name"
    return str(result["machine"])


def last_result(result: Mapping[str, Any], folder: Path = RESULTS) -> Last | None:
    """Return the newest result of this kind of machine that has numbers; None: there is none."""
    found = []
    for path in folder.glob("rehearsal-*.json"):
        one = json.loads(path.read_text())
        if "measured" in one and machine_kind(one) == machine_kind(result):
            found.append(Last(path.name, one["date"], one["commit"], Measured(**one["measured"])))
    return max(found, key=lambda last: last.date, default=None)


def changes(before: Measured, now: Measured) -> Iterator[Change]:
    """Every number that both have."""
    yield from _slower("start", before.starts_s, now.starts_s, "s")
    yield from _slower("step", before.steps_ms, now.steps_ms, "ms")
    for name, count in _shared(before.graphs, now.graphs):
        many = now.graphs[name]
        yield Change(f"graphs: {name}", f"{count}", f"{many}", many > count * (1 + MAX_WORSE))
    for name, (num_equal, total) in _shared(before.equal, now.equal):
        num_now, total_now = now.equal[name]
        is_lost = num_now * total < num_equal * total_now
        yield Change(f"equal: {name}", f"{num_equal} of {total}", f"{num_now} of {total_now}", is_lost)


def _slower(kind: str, before: Mapping[str, float], now: Mapping[str, float], unit: str) -> Iterator[Change]:
    for name, value in _shared(before, now):
        is_worse = now[name] > value * (1 + MAX_WORSE)
        yield Change(f"{kind}: {name}", f"{value:.2f} {unit}", f"{now[name]:.2f} {unit}", is_worse)


def _shared(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in before.items() if name in now)


def verdict(last: Last | None, found: Sequence[Change], num_measured: int) -> Found:
    """Return the finding of the step; raise Failure, with every line by name, if something is worse."""
    if last is None:
        return Found("no result of this kind of machine is in benchmarks/results: nothing to compare with")
    values = {"with": last.name, "commit": last.commit, "changes": [asdict(one) for one in found]}
    worse = [one for one in found if one.is_worse]
    when = f"{last.commit} ({last.date})"
    if worse:
        raise Failure(f"worse than at {when}: {'; '.join(map(str, worse))}", values)
    new = num_measured - len(found)
    beside = f"; {new} others were not measured then" if new else ""
    return Found(f"{len(found)} numbers, none worse than at {when}{beside}", values)


def lines(found: Sequence[Change]) -> list[str]:
    """A table of them; equality only where an answer differs, before or now."""
    if not found:
        return []
    shown = [one for one in found if not one.what.startswith("equal: ") or _is_unequal(one)]
    rows: list[list[object]] = [
        [one.what, one.before, one.now, "WORSE" if one.is_worse else ""] for one in shown
    ]
    return [
        line.rstrip() for line in table(["against the last result", "before", "now", ""], rows).splitlines()
    ]


def _is_unequal(change: Change) -> bool:
    return any(len(set(text.split(" of "))) > 1 for text in (change.before, change.now))
