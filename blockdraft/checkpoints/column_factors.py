"""Measured powers of two that scale the columns of activations before they are rounded to int8.

`python -m scripts.make_column_factors` measures them: 2**-n for a column whose largest values are about 4**n
times the usual. Any factors give correct products; good ones reduce the rounding error. They are found by the
checkpoint's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).with_name("column_factors")


def column_factors(checkpoint: str) -> Mapping[str, Tensor]:
    """Return float32 [columns] by module path; empty if nothing was measured for this checkpoint."""
    file = FOLDER / f"{Path(checkpoint).name}.safetensors"
    if not file.is_file():
        return {}
    return {path: torch.exp2(exponent.float()) for path, exponent in load_file(file).items()}
