"""Makes the keys of Triton's cache equal in all processes.

A kernel's key includes the constants of the functions that it calls, but (Triton 3.6 and 3.7) only of those
whose keys were computed before. So it depends on which kernel runs first, and a process may compile again
what another has compiled. Computing all keys in one fixed order makes them equal everywhere.
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
        if found.name != "compile_workers":  # a program, not imported
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            yield from (value for value in vars(module).values() if isinstance(value, JITFunction))
