"""What the comparisons of operations share: numbers to compute with, pairs of results, parts of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from blockdraft.engine.engine import Engine

T = TypeVar("T")


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
        """In [0, end)."""
        return torch.randint(0, end, shape, generator=self._generator).to(self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator).to(self.device)

    def whole(self, *values: int) -> Tensor:
        """These very integers."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)


class Comparison(NamedTuple):
    """One result of an operation: what was computed, and what its reference says in float64.

    Whole numbers must be equal. Others may differ by their dtype's rounding, once for each of `num_steps`.
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
    """Both calls on the same inputs, widened for the reference."""
    expected = reference(*wide(inputs))  # first: the other may overwrite its inputs
    return Comparison(where, fast(*inputs), expected, num_steps)


def wide(value: T) -> T:
    """Copies of real tensors in float64, also of those inside tuples; everything else as it is."""
    found: object = value
    if isinstance(value, Tensor) and value.is_floating_point():
        found = value.to(torch.float64, copy=True)
    elif isinstance(value, tuple):
        items = [wide(item) for item in value]
        found = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return cast(T, found)


# ---- the parts of an engine's models


def parts_of(engine: Engine, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Every module of a kind, of all models."""
    return [part for model in engine.models.models() for part in model.modules() if isinstance(part, kind)]


def distinct(items: Iterable[T], key: Callable[[T], object]) -> list[T]:
    """The first item of each key."""
    found: dict[object, T] = {}
    for item in items:
        found.setdefault(key(item), item)
    return list(found.values())
