"""The keys of Triton's cache, made the same in every process.

A kernel's key holds the constants of the functions that it calls, but (Triton 3.6 and 3.7) only of those that
had a key of their own before it: so it depends on which kernel ran first, and a process may compile anew what
another has compiled. Once all keys were asked for in one order, they are the same everywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITFunction

from blockdraft.kernels import triton as package


def settle_cache_keys() -> None:
    """Before the first kernel is compiled."""
    for function in own_functions():
        function.cache_key  # noqa: B018  # computed once, then kept


def own_functions() -> Iterator[JITFunction[Any]]:
    """Every kernel, and every function that kernels call, in a fixed order."""
    for found in sorted(pkgutil.iter_modules(package.__path__), key=lambda found: found.name):
        if found.name != "compile_workers":  # which is run, not imported
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            yield from (value for value in vars(module).values() if isinstance(value, JITFunction))
