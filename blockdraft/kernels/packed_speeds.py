"""The codes of packed weights that a card's kernel was measured to multiply faster than unpacked ones.

Weights of other codes, or on other cards, are unpacked when they are loaded, or at every product. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

Code = Literal["int4", "nvfp4", "mxfp4", "q4_0", "q4_1", "q8_0"]  # the last three are GGUF's
CODES: tuple[Code, ...] = get_args(Code)


class KernelSpeed(NamedTuple):
    """Up to how many tokens the kernel of `triton.packed` is faster, and its share of a copy's bandwidth."""

    unpacking: int  # than unpacking the weight first
    plain: int = 0  # than a product with the unpacked weight, if memory holds both forms
    gated: int = 0  # the same of products whose halves a gate joins
    stream: float = 1.0  # with one token

    def most(self, *, has_values: bool, is_gated: bool) -> int:
        """Return the most tokens for the kernel. `has_values`: memory holds the unpacked weight, too."""
        if not has_values:
            return self.unpacking
        return self.gated if is_gated else self.plain


# By compute capability and code, by `python -m benchmarks.packed_products`. "auto" keeps dense weights of
# these codes packed if no step has more tokens; `--quantization both` holds both forms.
MEASURED: dict[tuple[tuple[int, int], Code], KernelSpeed] = {
    ((9, 0), "int4"): KernelSpeed(64, plain=16, gated=64, stream=0.39),
    ((9, 0), "nvfp4"): KernelSpeed(64, plain=16, gated=16, stream=0.29),
}
NOT_MEASURED = KernelSpeed(0)
_FLOATS: tuple[Code, ...] = ("nvfp4", "mxfp4")
_INTEGERS = ("gptq", "awq", "auto-round", "intel/auto-round", "compressed-tensors")


def code_of(method: str | None, config: Mapping[str, object], *, ggml_type: str | None = None) -> Code | None:
    """Return the code that a checkpoint's configuration names, or that most of a GGUF file has; else None."""
    if method == "GGUF":
        name = (ggml_type or "").lower()
        return next((code for code in CODES if code == name and code.startswith("q")), None)
    text = f"{method} {config}".lower()
    for code in _FLOATS:
        if code in text:
            return code
    is_integer = method is not None and method.lower().partition(" ")[0] in _INTEGERS
    return "int4" if is_integer and re.search(r"'(num_)?bits': 4\b", text) else None
