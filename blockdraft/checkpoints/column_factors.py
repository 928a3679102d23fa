"""Powers of two that columns of tokens are multiplied by before they are rounded to 8 bits, where measured.

They come from `python -m scripts.make_column_factors`: 2**-n for a column whose largest values are about 4**n
times the usual. Any factors give sound products; good ones round less. A checkpoint is known by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).with_name("column_factors")


def column_factors(checkpoint: str) -> Mapping[str, Tensor]:
    """float32 [columns] of each module that has a matrix, by its path; empty: nobody has measured them."""
    file = FOLDER / f"{Path(checkpoint).name}.safetensors"
    if not file.is_file():
        return {}
    return {path: torch.exp2(exponent.float()) for path, exponent in load_file(file).items()}
