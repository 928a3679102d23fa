"""Reads the measured quality of int8 products by model. `auto` uses int8 only for models in this table."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("quality.toml")
MAX_PERPLEXITY = 0.005  # the largest rise of perplexity, as a share of float32's
MAX_COMMITTED = 0.02  # the largest loss of committed tokens per step, as a share of float32's


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality lost by int8 products, as shares of float32's figures."""

    perplexity: float  # the rise of perplexity
    committed: float  # the loss of committed tokens per step

    @property
    def is_kept(self) -> bool:
        return self.perplexity <= MAX_PERPLEXITY and self.committed <= MAX_COMMITTED

    def __str__(self) -> str:
        return f"perplexity {self.perplexity:+.1%}, tokens per step {-self.committed:+.1%} (docs/quality.md)"


def measured_quality(model: str) -> Quality | None:
    """Return the quality of the model with this name, or None if it is not measured or not good enough."""
    found = _table().get(model)
    return found if found is not None and found.is_kept else None


@functools.cache
def _table() -> dict[str, Quality]:
    raw = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {name: Quality(one["perplexity"], one["committed"]) for name, one in raw.items()}
