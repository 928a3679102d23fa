"""Doing without a kernel that does not compile on this card: its reference serves from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from blockdraft.errors import ModelError
from blockdraft.kernels.choice import Operation, is_switched_off, last_sent, switch_off
from blockdraft.kernels.failure import kernel_errors, why_no_compiler, why_not_compiled
from blockdraft.start.memory import release

T = TypeVar("T")


class _Made(NamedTuple, Generic[T]):
    value: T


class _Failed(NamedTuple):
    """An operation whose kernel does not compile, and the compiler's words."""

    operation: Operation
    why: str


def with_kernels_that_compile(make: Callable[[], T], tell: Callable[[Operation, str], None]) -> T:
    """What `make` returns; each operation whose kernel does not compile costs one more try without it.

    So the choice is made before anything is served, for the whole process and for all shapes. `tell` hears
    of each, with the compiler's words. ModelError: nothing compiles on this machine.
    """
    while isinstance(outcome := _attempt(make), _Failed):
        release()  # nobody holds the last try any more, not even its error
        switch_off(outcome.operation)
        tell(outcome.operation, outcome.why)
    return outcome.value


def _attempt(make: Callable[[], T]) -> _Made[T] | _Failed:
    try:
        return _Made(make())
    except kernel_errors() as error:
        missing = why_no_compiler(error)
        if missing is not None:
            raise ModelError(f"Triton cannot compile the GPU's kernels, {missing}.") from error
        why, operation = why_not_compiled(error), last_sent()
        if why is None or operation is None or is_switched_off(operation):
            raise
        return _Failed(operation, why)
