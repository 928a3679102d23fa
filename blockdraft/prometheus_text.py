"""Reads the samples of a /metrics page in Prometheus' text format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name, labels and value of each sample whose value is finite."""
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield found[1], dict(_LABEL.findall(found[2] or "")), value
