"""Binds a model to kernels; the default is the reference kernels."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from blockdraft.kernels.kernels import REFERENCE, Kernels

Module = TypeVar("Module", bound=nn.Module)


class KernelModule(nn.Module):
    """A module that calls kernels. Training and torch.compile use the references."""

    kernels: Kernels = REFERENCE

    def check_no_gradient(self, x: Tensor) -> None:
        """Raise ValueError if a kernel would silently lose the gradient of x, the model's input."""
        if x.requires_grad and not self.kernels.is_reference:
            raise ValueError("this model is bound to kernels, which have no gradient: bind it to REFERENCE")


def bind(model: Module, kernels: Kernels) -> Module:
    """Make the model use `kernels`; ValueError if parameters need gradients, which only references have."""
    if not kernels.is_reference and any(one.requires_grad for one in model.parameters()):
        raise ValueError("parameters that require gradients can be bound to REFERENCE only")
    for part in model.modules():
        if isinstance(part, KernelModule):
            part.kernels = kernels
    return model


def with_kernels(model: Module, kernels: Kernels) -> Module:
    """Return a copy that shares the weights and uses `kernels`; see `bind`."""
    return bind(
        copy.deepcopy(model, {id(one): one for one in (*model.parameters(), *model.buffers())}), kernels
    )
