"""The shapes of published tables (presets.toml).

A preset reproduces the shape, never the numbers: machine, model and engine are yours.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import BenchError


@dataclass(frozen=True, slots=True)
class Preset:
    """What a table was measured with; presets.toml says what the fields mean. The defaults are no table's."""

    published: str = ""
    workloads: Sequence[str] = ("code", "reasoning", "dialogue", "prose")
    concurrencies: Sequence[int] = (1,)
    max_tokens: int = 256
    temperature: float = 0.0
    num_prompts: int = 8
    figures: Sequence[str] = ()
    max_turns: int | None = None
    num_warmups: int = 2
    thinking: bool | None = None


_TABLE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS = {name: Preset(**facts) for name, facts in _TABLE.items()}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(PRESETS)}."
        raise BenchError(f"unknown table '{name}': {hint}")
    return PRESETS[name]
