"""Recognises errors of kernels that do not compile on this GPU, and describes them in one line.

Triton fails in several stages: its front end (CompilationError), MLIR's passes (a RuntimeError), ptxas
(PTXASError), and the first launch, if the GPU has less shared memory, registers or threads than the kernel
needs (OutOfResources), or if the driver rejects its code. Out-of-memory errors and a lost context are not
recognised, as a reference would not help.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from blockdraft.kernels.choice import Operation, has_triton
from blockdraft.machine.remedies import NO_COMPILER, NO_HEADERS

MAX_CHARACTERS = 160  # of the described error
# Texts of RuntimeErrors: the first is MLIR's, the others are the driver's when it loads the kernel.
REFUSALS = (
    "PassManager::run failed",
    "Triton Error [CUDA]: device kernel image is invalid",
    "Triton Error [CUDA]: invalid argument",
    "Triton Error [CUDA]: invalid device function",
    "Triton Error [CUDA]: no kernel image is available",
    "Triton Error [CUDA]: a PTX JIT compilation failed",
    "Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain",
    "Triton Error [CUDA]: too many resources requested for launch",
)


P = ParamSpec("P")
T = TypeVar("T")


class DoesNotFit(ValueError):
    """A shape for which a kernel has no tile that fits this GPU."""


class DoesNotCompile(Exception):
    """The kernel of `operation` does not compile on this GPU; `why` is the compiler's message."""

    def __init__(self, operation: Operation, why: str) -> None:
        super().__init__(f"the kernel of {operation} does not compile on this card: {why}")
        self.operation: Operation = operation
        self.why = why


def named(operation: Operation, kernel: Callable[P, T]) -> Callable[P, T]:
    """Make `kernel` raise DoesNotCompile with its operation's name if it does not compile."""

    @functools.wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return kernel(*args, **kwargs)
        except kernel_errors() as error:
            why = why_not_compiled(error)
            if why is None:
                raise
            raise DoesNotCompile(operation, why) from error

    return call


def why_not_compiled(error: Exception) -> str | None:
    """Return the compiler's message in one line; None if `error` has another cause."""
    if isinstance(error, DoesNotFit):
        return _shortened(str(error))
    if isinstance(error, RuntimeError):
        text = str(error)
        return _shortened(text) if any(refusal in text for refusal in REFUSALS) else None
    if not has_triton() or not isinstance(error, _compile_errors()):
        return None
    name, text = type(error).__name__, str(error)
    message: str | None = getattr(error, "error_message", None)
    if name == "PTXASError":
        lines = (message or text).splitlines()
        text = next((line for line in lines if line.startswith("ptxas ")), message or text)
    elif message is not None:  # the text of a CompilationError begins with its source
        text = message
    elif error.__cause__ is not None and str(error.__cause__):
        text = str(error.__cause__)
    elif "out of resource" not in text:
        text = text.strip().splitlines()[-1] if text.strip() else ""
    return _shortened(f"{name}: {_first_line(text)}" if text.strip() else name)


def why_no_compiler(error: Exception) -> str | None:
    """Return which compiler part this machine lacks, and what to do; None if `error` has another cause."""
    if isinstance(error, subprocess.CalledProcessError):  # of the C compiler: ptxas has its own error
        return f"the C compiler ended with code {error.returncode}: {NO_HEADERS}"
    if isinstance(error, RuntimeError) and "Failed to find C compiler" in str(error):
        return f"there is no C compiler: {NO_COMPILER}"
    return None


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return all errors that `why_not_compiled` and `why_no_compiler` may recognise."""
    own = (RuntimeError, DoesNotFit, subprocess.CalledProcessError)
    return (*own, *_compile_errors()) if has_triton() else own


@functools.cache
def _compile_errors() -> tuple[type[Exception], ...]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return CompilationError, OutOfResources, PTXASError


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _shortened(text: str) -> str:
    line = _first_line(text)
    return line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 1] + "…"
