"""A finding of the doctor: one line, its level, and advice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")  # from good to bad
Area = Literal["machine", "limits", "disk", "libraries", "kernels", "known"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A warning costs speed or may cause failures later; a problem means no start or wrong answers."""

    area: Area
    name: str
    level: Level
    says: str
    advice: str | None = None  # what to do; each warning and problem has one
    thread: str | None = None  # where it was reported

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.advice, f"{self.name}: what is to be done?"


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
