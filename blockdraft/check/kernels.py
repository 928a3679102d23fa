"""Every operation the models use, at their real shapes, on this device, against its reference in float64.

A comparison runs an operation twice on the same random numbers: by whatever path serving takes, and by the
PyTorch reference on the numbers widened to float64. Where no kernel of ours was chosen, it is PyTorch's own
on this device and in this dtype that is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from blockdraft.check.comparison import Comparison, Numbers
from blockdraft.check.operations import OPERATIONS
from blockdraft.engine.engine import Engine

# Of |result| + the results' root mean square. Measured: 4e-7 in float32, 4e-3 in bfloat16; the rest is room
# for longer sums. What a wrong kernel does is larger by far.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class KernelResult:
    """The comparison of an operation that came closest to its tolerance, or went past it.

    The error of whole numbers is the share that differ; none may.
    """

    operation: str
    where: str
    error: float
    tolerance: float
    num_comparisons: int = 1

    @property
    def is_passed(self) -> bool:
        return self.error <= self.tolerance


@torch.inference_mode()
def check_kernels(engine: Engine) -> Iterator[KernelResult]:
    """One result for each operation that the engine's models use."""
    for operation, compare in OPERATIONS.items():
        found = [measure(operation, comparison) for comparison in compare(engine, Numbers(engine))]
        if found:
            worst = max(found, key=lambda result: result.error / max(result.tolerance, 1e-300))
            yield replace(worst, num_comparisons=len(found))


def measure(operation: str, comparison: Comparison) -> KernelResult:
    where, got, expected, num_steps = comparison
    if got.dtype == torch.int64:
        return KernelResult(operation, where, float((got != expected).double().mean()), tolerance=0.0)
    scale = expected.abs() + expected.square().mean().sqrt()
    error = float(((got.double() - expected).abs() / scale.clamp(min=1e-300)).max())
    tolerance = num_steps * TOLERANCES[got.dtype]
    return KernelResult(operation, where, error if math.isfinite(error) else math.inf, tolerance)
