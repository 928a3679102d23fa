"""Replaces a kernel that does not compile on this GPU by its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.errors import ModelError
from blockdraft.kernels.choice import Operation
from blockdraft.kernels.failure import DoesNotCompile, kernel_errors, why_no_compiler
from blockdraft.start.memory import release

T = TypeVar("T")


def with_kernels_that_compile(
    models: LoadedPair, make: Callable[[LoadedPair], T], tell: Callable[[Operation, str], None]
) -> T:
    """Return the result of `make`. Call it again without each operation whose kernel does not compile.

    The choice is made before serving, and holds for this engine and all shapes. `tell` gets each operation
    with the compiler's message. Raise ModelError if nothing compiles on this machine.
    """
    while True:
        try:
            return make(models)
        except DoesNotCompile as failure:
            operation, why = failure.operation, failure.why
        except kernel_errors() as error:
            missing = why_no_compiler(error)
            if missing is None:
                raise
            raise ModelError(f"Triton cannot compile the GPU's kernels, {missing}.") from error
        release()  # no reference to the last try is left, not even through its error
        models = models.with_kernels(models.target.kernels.without(operation))
        tell(operation, why)
