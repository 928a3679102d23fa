"""The parts of every comparison of an operation with its reference: inputs, results, tolerances, modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from blockdraft.engine.engine import Engine

T = TypeVar("T")

# Of |result| + the results' root mean square. Measured: 4e-7 in float32, 4e-3 in bfloat16; the rest is room
# for longer sums. What a wrong kernel does is larger by far.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Numbers:
    """Random numbers that are the same in every run, on the models' device and in their dtype."""

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
    """One result of an operation, and its reference's in float64.

    Integers must be equal. Others may differ by their dtype's rounding, once for each of `num_steps`.
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
    """Return the comparison of two calls on the same inputs, widened for the reference."""
    expected = reference(*wide(inputs))  # first: the other may overwrite its inputs
    return Comparison(where, fast(*inputs), expected, num_steps)


def wide(value: T) -> T:
    """Return copies of real tensors in float64, also inside tuples; anything else as it is."""
    found: object = value
    if isinstance(value, Tensor) and value.is_floating_point():
        found = value.to(torch.float64, copy=True)
    elif isinstance(value, tuple):
        items = [wide(item) for item in value]
        found = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return cast(T, found)


@dataclass(frozen=True, slots=True)
class KernelResult:
    """The comparison of an operation that came closest to its tolerance, or went past it."""

    operation: str
    where: str
    error: float  # of integers the share that differ; none may
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
    """Return every module of a kind, of all models."""
    return [part for model in engine.models.models() for part in model.modules() if isinstance(part, kind)]


def distinct(items: Iterable[T], key: Callable[[T], object]) -> list[T]:
    """Return the first item of each key."""
    found: dict[object, T] = {}
    for item in items:
        found.setdefault(key(item), item)
    return list(found.values())
