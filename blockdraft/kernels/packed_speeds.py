"""The codes of 4-bit weights that a card's kernel was measured to multiply faster than unpacked ones.

Weights of other codes, or on other cards, are unpacked when they are loaded, or at every product. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

Code = Literal["int4", "nvfp4", "mxfp4"]
CODES: tuple[Code, ...] = get_args(Code)
# Up to how many tokens the kernel of `triton.packed` beats unpacking the weight first, by compute capability
# and code, by `python -m benchmarks.packed_products`. An entry makes "auto" keep dense weights packed.
MEASURED: dict[tuple[tuple[int, int], Code], int] = {}
_FLOATS: tuple[Code, ...] = ("nvfp4", "mxfp4")
_INTEGERS = ("gptq", "awq", "auto-round", "intel/auto-round", "compressed-tensors")


def code_of(method: str | None, config: Mapping[str, object]) -> Code | None:
    """Return the 4-bit code that a checkpoint's configuration names; None if it names none."""
    text = f"{method} {config}".lower()
    for code in _FLOATS:
        if code in text:
            return code
    is_integer = method is not None and method.lower() in _INTEGERS
    return "int4" if is_integer and re.search(r"'(num_)?bits': 4\b", text) else None
