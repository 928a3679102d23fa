"""Reads from another engine's log which kernel multiplies four-bit weights.

CUTLASS multiplies four-bit numbers on the card's own units; Marlin widens the weights first and multiplies in
16 bits. The card, the build and variables decide which kernel runs, and only the log names it. Log lines
change between versions, so the result is shown to the user and used for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FALLBACK = (
    "FP4 weights are only stored in four bits: Marlin widens them and multiplies in 16, since this build "
    "finds no FP4 units. On a Blackwell card it was made for another architecture, or a flag or variable "
    "asks for Marlin: docs/troubleshooting.md."
)
_FALLBACK = re.compile(r"does not have native support for FP4 computation .*Marlin", re.IGNORECASE)
_KERNELS = (
    ("linear", re.compile(r"Using (?:\w+\.)?(?P<name>[\w-]+) for (?:NVFP4|MXFP4) GEMM", re.IGNORECASE)),
    ("experts", re.compile(r"Using '?(?P<name>[\w ]+?)'? (?:NVFP4|MXFP4) MoE backend", re.IGNORECASE)),
    # SGLang logs its settings on one line, for any model.
    ("linear", re.compile(r"quantization='\w*fp4'.*fp4_gemm_runner_backend='(?!auto')(?P<name>\w+)'")),
)
_FAMILIES = ("Marlin", "CUTLASS", "TRTLLM", "cuDNN", "CuteDSL", "b12x", "emulation")


def read_fp4_kernel(line: str) -> str | None:
    """Return the kernel that a log line names, as in "experts: CUTLASS (VLLM_CUTLASS)"; None if none."""
    for part, pattern in _KERNELS:
        if (found := pattern.search(line)) is not None:
            name = found["name"]
            family = next((one for one in _FAMILIES if one.lower() in name.lower()), None)
            return f"{part}: {name}" if family is None else f"{part}: {family} ({name})"
    return None


def is_fp4_fallback(line: str) -> bool:
    """Return whether the log line says that the engine uses Marlin because it finds no FP4 units."""
    return _FALLBACK.search(line) is not None


def read_fp4_kernels(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the kernels that a log names. Each is listed once, although every worker logs it."""
    found = (read_fp4_kernel(line) for line in lines)
    return tuple(dict.fromkeys(kernel for kernel in found if kernel is not None))
