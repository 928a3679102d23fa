"""Muon for matrices, AdamW for all other parameters, and the learning rate schedule.

Muon updates a matrix with the orthogonal factor of its momentum, computed by a few Newton-Schulz steps. The
update is scaled so that an entry moves as far as with AdamW; one learning rate then fits both. Matrices of
equal shape are orthogonalised in one batch: for a small drafter on a fast GPU, single matrices would need
more launches than the backward pass. Stacked projections (q, k and v in one Linear) are separate matrices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from blockdraft.models.layers import Linear

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's coefficients for five steps
NUM_ITERATIONS = 5
ADAM_RMS = 0.2  # root mean square of an AdamW update, measured by Moonshot (arXiv 2502.16982)


class Muon(torch.optim.Optimizer):
    """Muon for matrices. Each parameter comes with the numbers of rows of its stacked projections."""

    def __init__(
        self,
        matrices: Iterable[tuple[nn.Parameter, tuple[int, ...]]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        listed = list(matrices)
        super().__init__([one for one, _ in listed], {"lr": lr})
        self._parts = [list(parts) for _, parts in listed]
        self._momentum, self._weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        rate, parameters = group["lr"], group["params"]
        gradients = [one.grad for one in parameters]
        momenta = [self._state(one) for one in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
        ahead = torch._foreach_lerp(gradients, momenta, self._momentum)  # Nesterov's
        alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter, update, parts in zip(parameters, ahead, self._parts, strict=True):
            for target, direction in zip(
                torch.split(parameter, parts), torch.split(update, parts), strict=True
            ):
                alike[tuple(target.shape)].append((target, direction))
        torch._foreach_mul_(parameters, 1 - rate * self._weight_decay)
        for shape, pairs in alike.items():
            turned = orthogonal(torch.stack([direction for _, direction in pairs]))
            scale = -rate * ADAM_RMS * math.sqrt(max(shape))
            torch._foreach_add_([target for target, _ in pairs], list(turned.unbind()), alpha=scale)

    def _state(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonal(matrices: Tensor) -> Tensor:
    """Return approximate orthogonal factors (singular values near one) of matrices [n, rows, columns]."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


def make_optimizers(
    model: nn.Module, *, name: str, rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return optimizers that together train all parameters of `model` that require a gradient."""
    matrices = [
        (module.weight, module.parts)
        for module in model.modules()
        if isinstance(module, Linear)
        and isinstance(module.weight, nn.Parameter)
        and module.weight.requires_grad
    ]
    trained = [one for one in model.parameters() if one.requires_grad]
    if name == "adamw":
        return [_adamw(trained, rate, weight_decay)]
    in_muon = {id(one) for one, _ in matrices}
    rest = [one for one in trained if id(one) not in in_muon]
    return [Muon(matrices, rate, weight_decay=weight_decay), _adamw(rest, rate, 0.0)]


def _adamw(parameters: list[nn.Parameter], rate: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=parameters[0].is_cuda
    )


def rate_at(progress: float, *, warm_up: float, floor: float) -> float:
    """Return the learning rate at `progress` in [0, 1], as a share of the highest one.

    The rate rises linearly for `warm_up`, then falls along a cosine to `floor`.
    """
    if progress < warm_up:
        return progress / warm_up
    done = min((progress - warm_up) / (1 - warm_up), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
