"""Makes the keys of Triton's cache equal in all processes.

In Triton 3.6 and 3.7, a kernel's key includes the constants of a function that it calls only if that
function's key was computed earlier. So keys depend on which kernel runs first, and a process may recompile
kernels that another process has compiled. Computing all keys in one fixed order makes them equal everywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITFunction

from blockdraft.kernels import triton as package


def settle_cache_keys() -> None:
    """Compute all keys; call it before the first kernel is compiled."""
    for function in own_functions():
        function.cache_key  # noqa: B018  # a cached property


def own_functions() -> Iterator[JITFunction[Any]]:
    """Yield every kernel and every function that kernels call, in a fixed order."""
    for found in sorted(pkgutil.iter_modules(package.__path__), key=lambda found: found.name):
        if found.name != "compile_workers":  # it is a program, which is not imported
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            yield from (value for value in vars(module).values() if isinstance(value, JITFunction))
