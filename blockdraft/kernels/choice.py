"""Which implementation a call takes: the PyTorch reference, or the kernels for where its tensors live.

An operation whose kernel does not compile on this card is switched off at the start (`start/ready.py`), for
the whole process and for all its shapes: from then on its reference serves. Every dispatch names its
operation, so that the start knows which one failed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

Operation = Literal[
    "attention",
    "places",
    "products",
    "packed products",
    "gated products",
    "gated tiles",
    "norms",
    "activations",
    "heads",
    "heads' gates",
    "gated delta",
    "gated norms",
    "routing",
    "experts",
    "sampling",
    "acceptance",
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
# Their references ask the device for numbers, or branch on what the host knows of the rows of one step: a
# CUDA graph would keep the answer of its capture. Those of experts do too, which `moe.why_no_kernel` says.
HOST_BOUND = frozenset[Operation]({"attention", "places", "sampling", "acceptance"})


class _Choice(threading.local):
    """One per thread: a check in one thread leaves the engine in another alone."""

    is_reference = False
    is_triton = False
    last: Operation | None = None  # the operation that was sent to Triton last


_choice = _Choice()
_switched_off: set[Operation] = set()  # of the process, so of every engine in it; written at a start alone


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


def takes_triton(tensor: Tensor, operation: Operation) -> bool:
    """Whether Triton's kernels serve: on a GPU, in the dtypes that they compute in. Asked after the above."""
    return is_on_gpu(tensor, operation) and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)


def is_on_gpu(tensor: Tensor, operation: Operation) -> bool:
    """Whether Triton's kernels can read it, and the one of `operation` was not switched off."""
    if not (tensor.is_cuda or _choice.is_triton) or operation in _switched_off or not has_triton():
        return False
    _choice.last = operation
    return True


def sent(operation: Operation) -> None:
    """Note who launches next, where other operations have run since it was asked who serves."""
    _choice.last = operation


def last_sent() -> Operation | None:
    """The operation whose kernels this thread has launched last, or tried to."""
    return _choice.last


def switch_off(operation: Operation) -> None:
    """From now on `operation` takes its reference, in every thread. For a start, before it serves."""
    _switched_off.add(operation)


def switched_off() -> tuple[Operation, ...]:
    """The operations that take their references because their kernels do not compile here."""
    return tuple(operation for operation in OPERATIONS if operation in _switched_off)


def is_switched_off(operation: Operation) -> bool:
    return operation in _switched_off


@contextlib.contextmanager
def without(*operations: Operation) -> Iterator[None]:
    """Inside the `with`, these are switched off as well; afterwards everything is as it was. For tests."""
    before = set(_switched_off)
    _switched_off.update(operations)
    try:
        yield
    finally:
        _switched_off.clear()
        _switched_off.update(before)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
