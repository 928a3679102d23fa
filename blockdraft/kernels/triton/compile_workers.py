"""Compiles Triton kernels for a start: `python -m blockdraft.kernels.triton.compile_workers NUMBER`.

One process imports all modules and then forks NUMBER workers. They read one line per kernel: its module, its
Triton specialisation and the target GPU. They write a line for each finished kernel, which the start then
finds in Triton's cache on disk. They end when the start closes their input.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from blockdraft.kernels.triton.cache_keys import own_functions, settle_cache_keys


def main(num_workers: int) -> None:
    settle_cache_keys()
    # Fork after the imports, which take longest; there is no thread and no open GPU yet.
    with multiprocessing.get_context("fork").Pool(num_workers) as workers:
        for answer in workers.imap_unordered(_answer, sys.stdin):
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()


def _answer(line: str) -> str:
    """Compile one kernel. An error is only reported: the start gets the error again, and handles it."""
    asked, error = json.loads(line), None
    try:
        compile_kernel(asked["module"], asked["specialization"], GPUTarget(**asked["target"]))
    # Any: a raise here would end the workers with all the kernels still queued, and nobody would read it.
    except Exception as raised:  # noqa: BLE001
        error = f"{type(raised).__name__}: {raised}"[:300]
    return json.dumps({"name": asked["name"], "error": error})


def compile_kernel(module: str, specialization: str, target: GPUTarget) -> None:
    """Compile like JITFunction.preload, but for the GPU in the job instead of the one in this machine.

    Triton 3.6 also compiles C code for each signature, which launches the kernel; later versions do not.
    """
    found = json.loads(specialization)
    function = getattr(importlib.import_module(module), found["name"].rpartition(".")[2])
    values = map(_constant, found["constant_vals"])
    constants = dict(zip(map(tuple, found["constant_keys"]), values, strict=True))
    attributes = dict(zip(map(tuple, found["attrs_keys"]), found["attrs_vals"], strict=True))
    signature = {name: _tuples(kind) for name, kind in found["signature"].items()}
    options = {name: _tuples(value) for name, value in found["options"].items()}
    source = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    kernel = triton.compile(
        source(function, signature, constants, attributes),
        target=target,
        options=make_backend(target).parse_options(options).__dict__,
    )
    if target.backend == "cuda" and hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _constant(value: Any) -> Any:
    """Decode a value that Triton serialised; names of types stay strings, as no constant is a type."""
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    if isinstance(value, dict) and "jit_function" in value:
        return _functions()[value["jit_function"]]
    return value


def _functions() -> dict[str, JITFunction[Any]]:
    """Return our kernels by their names in Triton."""
    return {f"{function.module}:{function.fn.__qualname__}": function for function in own_functions()}


def _tuples(kind: Any) -> Any:
    """Return `kind` with lists turned into tuples: JSON has only lists, and no kernel has a list argument."""
    return tuple(map(_tuples, kind)) if isinstance(kind, list) else kind


if __name__ == "__main__":
    main(int(sys.argv[1]))
