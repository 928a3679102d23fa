"""Reads shapes.toml: small models whose shapes matter to kernels.

Kernels are compared with references on random weights, so each model is only a config.json.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("shapes.toml")
Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ProbeShape:
    """A pair of models to build: config.json of both, and the formats of weights, keys and values."""

    name: str
    covers: str
    target: Config
    draft: Config | None = None
    quantization: str = "none"
    kv_dtype: str = "auto"


def _read_shapes() -> tuple[ProbeShape, ...]:
    file = tomllib.loads(FILE.read_text(encoding="utf-8"))
    models = {name: {**file["sizes"], **config} for name, config in file["model"].items()}
    return tuple(
        ProbeShape(**shape | {"target": models[shape["target"]], "draft": models.get(shape.get("draft"))})
        for shape in file["shape"]
    )


SHAPES = _read_shapes()
SHAPE_NAMES = tuple(shape.name for shape in SHAPES)
