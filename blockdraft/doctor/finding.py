"""A finding of the doctor: one line, its level, and advice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")  # from best to worst
Area = Literal["machine", "limits", "disk", "libraries", "kernels", "known"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. Warnings cost speed or may cause failures; problems prevent a start or right answers."""

    area: Area
    name: str
    level: Level
    says: str
    advice: str | None = None  # what to do; each warning and problem has one
    thread: str | None = None  # address of the report

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.advice, f"{self.name}: what is to be done?"


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
