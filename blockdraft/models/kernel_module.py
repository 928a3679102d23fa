"""Which kernels a model computes by: the references, unless it was bound to others when it was built."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from blockdraft.kernels.kernels import REFERENCE, Kernels

Module = TypeVar("Module", bound=nn.Module)


class KernelModule(nn.Module):
    """A module that calls kernels. One that is trained or compiled keeps the references."""

    kernels: Kernels = REFERENCE

    def check_no_gradient(self, x: Tensor) -> None:
        """A model asks this once of what enters it: a kernel would lose the gradient without a word."""
        if x.requires_grad and not self.kernels.is_reference:
            raise ValueError("this model is bound to kernels, which have no gradient: bind it to REFERENCE")


def bind(model: Module, kernels: Kernels) -> Module:
    """The model, which computes by `kernels` from now on.

    ValueError: it is being trained, and only the references have gradients.
    """
    if not kernels.is_reference and any(one.requires_grad for one in model.parameters()):
        raise ValueError("parameters that require gradients can be bound to REFERENCE only")
    for part in model.modules():
        if isinstance(part, KernelModule):
            part.kernels = kernels
    return model


def with_kernels(model: Module, kernels: Kernels) -> Module:
    """Another model that shares its weights and computes by `kernels`. Raises what `bind` raises."""
    return bind(
        copy.deepcopy(model, {id(one): one for one in (*model.parameters(), *model.buffers())}), kernels
    )
