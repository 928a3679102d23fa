"""Tools to compare operations with their references: inputs, results, tolerances, modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from blockdraft.engine.engine import Engine

T = TypeVar("T")

# Allowed errors, relative to |result| + the root mean square of all results. Measured errors are 4e-7 in
# float32 and 4e-3 in bfloat16; the limits allow for longer sums. The errors of a wrong kernel are far larger.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Numbers:
    """Generates equal random numbers in every run, on the models' device and in their dtype."""

    def __init__(self, engine: Engine) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.dtype: torch.dtype = getattr(torch, engine.plan.dtype)
        self.device = engine.models.device
        self.kernels = engine.models.target.kernels

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(device=self.device, dtype=dtype or self.dtype)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.rand(shape, generator=self._generator)
        return drawn.to(device=self.device, dtype=dtype or self.dtype)

    def integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=self._generator).to(self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator).to(self.device)

    def whole(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


class Comparison(NamedTuple):
    """One result of an operation, and the reference's result in float64.

    Integers must be equal. Floats may differ by `num_steps` times the tolerance of their dtype.
    """

    where: str
    got: Tensor
    expected: Tensor
    num_steps: int = 1


Comparisons = Iterator[Comparison]


def run(
    where: str,
    fast: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    *inputs: object,
    num_steps: int = 1,
) -> Comparison:
    """Call both functions and return their comparison; the reference gets float64 copies of the inputs."""
    expected = reference(*wide(inputs))  # first, because `fast` may overwrite its inputs
    return Comparison(where, fast(*inputs), expected, num_steps)


def wide(value: T) -> T:
    """Copy floating-point tensors to float64, also inside tuples; return other values unchanged."""
    found: object = value
    if isinstance(value, Tensor) and value.is_floating_point():
        found = value.to(torch.float64, copy=True)
    elif isinstance(value, tuple):
        items = [wide(item) for item in value]
        found = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return cast(T, found)


@dataclass(frozen=True, slots=True)
class KernelResult:
    """The comparison of an operation with the largest error, relative to its tolerance."""

    operation: str
    where: str
    error: float  # for integers: the share that differ, which must be 0
    tolerance: float
    num_comparisons: int = 1

    @property
    def is_passed(self) -> bool:
        return self.error <= self.tolerance


def measure(operation: str, comparison: Comparison) -> KernelResult:
    where, got, expected, num_steps = comparison
    if got.dtype == torch.int64:
        return KernelResult(operation, where, float((got != expected).double().mean()), tolerance=0.0)
    scale = expected.abs() + expected.square().mean().sqrt()
    error = float(((got.double() - expected).abs() / scale.clamp(min=1e-300)).max())
    tolerance = num_steps * TOLERANCES[got.dtype]
    return KernelResult(operation, where, error if math.isfinite(error) else math.inf, tolerance)


# ---- the parts of an engine's models


def parts_of(engine: Engine, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Return the modules of the given type in all models."""
    return [part for model in engine.models.models() for part in model.modules() if isinstance(part, kind)]


def distinct(items: Iterable[T], key: Callable[[T], object]) -> list[T]:
    """Return the first item for each key."""
    found: dict[object, T] = {}
    for item in items:
        found.setdefault(key(item), item)
    return list(found.values())
