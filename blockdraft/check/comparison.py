"""What the checks of single operations share: numbers to compute with, and a pair of results to compare."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockdraft.engine.engine import Engine
from blockdraft.step.dflash import DFlashDrafter


class Comparison(NamedTuple):
    """One operation at one shape: what was computed, and what its reference says in float64.

    Whole numbers must be equal. Others may differ by their dtype's rounding, once for each of `num_steps`.
    """

    where: str
    got: Tensor
    expected: Tensor
    num_steps: int = 1


class Numbers:
    """Random numbers that are the same in every run, where and as the models have them."""

    def __init__(self, engine: Engine) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.dtype: torch.dtype = getattr(torch, engine.models.plan.dtype)
        self.device = engine.models.device

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


def models_of(engine: Engine) -> list[nn.Module]:
    """The target, and the drafter's own model if it has one."""
    drafter = engine.models.drafter
    return [engine.models.target, *([drafter.model] if isinstance(drafter, DFlashDrafter) else [])]


def parts_of(engine: Engine) -> list[nn.Module]:
    """Every module of every model."""
    return [part for model in models_of(engine) for part in model.modules()]
