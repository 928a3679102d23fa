"""Which implementation a call takes: the PyTorch reference, or the kernels for where its tensors live."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor


class _Choice(threading.local):
    """One per thread: a check in one thread leaves the engine in another alone."""

    is_reference = False
    is_triton = False


_choice = _Choice()


@contextlib.contextmanager
def use(path: Literal["reference", "triton"]) -> Iterator[None]:
    """Inside the `with`, every operation that this thread calls takes its reference, or Triton's kernels.

    The latter is for tests: on a CPU it needs Triton's interpreter, and on a GPU nobody has to ask.
    """
    if path not in ("reference", "triton"):
        raise ValueError(f"use({path!r}): the paths that can be asked for are 'reference' and 'triton'")
    before = _choice.is_reference, _choice.is_triton
    _choice.is_reference, _choice.is_triton = path == "reference", path == "triton"
    try:
        yield
    finally:
        _choice.is_reference, _choice.is_triton = before


def takes_reference(*tensors: Tensor) -> bool:
    """What every dispatch asks: inside `use("reference")` or torch.compile, or a gradient may be asked for.

    The kernels have no gradient. One function, not two: this runs before every operation of a step.
    Compiled code makes kernels of its own out of the references, and does not see what `use` has chosen: the
    compiler of PyTorch 2.11 reads a thread's variable as if it had never been set.
    """
    if torch.compiler.is_compiling() or _choice.is_reference:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def takes_triton(tensor: Tensor) -> bool:
    """Whether Triton's kernels serve: on a GPU, in the dtypes that they compute in. Asked after the above."""
    return is_on_gpu(tensor) and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether Triton's kernels can read it."""
    return (tensor.is_cuda or _choice.is_triton) and has_triton()


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
