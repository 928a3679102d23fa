"""Doing without a kernel that does not compile on this card: its reference serves from then on."""

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
    """What `make` returns; each operation whose kernel does not compile costs one more try without it.

    So the choice is made before anything is served, for this engine and for all shapes. `tell` hears of each,
    with the compiler's words. ModelError: nothing compiles on this machine.
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
        release()  # nobody holds the last try any more, not even its error
        models = models.with_kernels(models.target.kernels.without(operation))
        tell(operation, why)
