"""Whether a call takes its PyTorch reference though a kernel was chosen: asked for, or for training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor


class _Choice(threading.local):
    """One per thread: a check in one thread leaves the engine in another alone."""

    is_reference = False


_choice = _Choice()


@contextlib.contextmanager
def use(path: Literal["reference"]) -> Iterator[None]:
    """Inside the `with`, every operation that this thread calls takes its reference."""
    if path != "reference":
        raise ValueError(f"use({path!r}): the only path that can be asked for is 'reference'")
    before, _choice.is_reference = _choice.is_reference, True
    try:
        yield
    finally:
        _choice.is_reference = before


def takes_reference(*tensors: Tensor) -> bool:
    """What every dispatch asks: inside `use("reference")`, or a gradient may be asked of `tensors`.

    The kernels have no gradient. One function, not two: this runs before every operation of a step.
    """
    if _choice.is_reference:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
