"""Compiles kernels for this processor by llvmlite, and runs them on all threads (pool.py).

While a tape (tape.py) records in this thread, the tape gets each run of a kernel, and code from `repeat`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import itertools
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.kernels.cpu import extra_features
from blockdraft.kernels.llvm.compiler import Written, assembly, field_types
from blockdraft.kernels.llvm.language import f32, f64
from blockdraft.kernels.llvm.pool import Pool, allow, follow, lead, pause_hint, table
from blockdraft.settings.cache_files import keep
from blockdraft.settings.settings import cache_dir

REALS = {torch.float32: f32, torch.float64: f64}


class NotRecordable(RuntimeError):
    """The step reads values on the host; a replay would not read them again."""


class _Recorder(threading.local):
    tape: Any = None  # the StepTape that records


recorder = _Recorder()


def repeat(run: Callable[[], None]) -> None:
    """Run `run` now and, if a tape records, at each replay of the tape."""
    if recorder.tape is None:
        run()
    else:
        recorder.tape.add_python(run)


class Jit:
    """A kernel with its compile-time constants; the first call compiles it. A call runs it on its fields."""

    def __init__(self, kernel: Written, **known: Any) -> None:
        self._kernel, self._known = kernel, known

    @functools.cached_property
    def _address(self) -> int:
        return _compiler().address(self._kernel, self._known)

    def compile(self) -> None:
        """Compile the kernel now instead of on the first call."""
        assert self._address

    @functools.cached_property
    def _fields(self) -> struct.Struct:
        return struct.Struct(
            "q" + "".join("d" if one == "Real" else "q" for one in field_types(self._kernel))
        )

    @functools.cached_property
    def _run_alone(self) -> Callable[[int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, *fields: float | Tensor | None, is_small: bool = False) -> None:
        """Run the kernel, only on this thread if `is_small`. A recording tape keeps its arguments alive."""
        values = [one.data_ptr() if isinstance(one, Tensor) else one or 0 for one in fields]
        job = ctypes.create_string_buffer(self._fields.pack(0, *values))
        num_threads = 1 if is_small else torch.get_num_threads()
        if num_threads == 1:
            self._run_alone(ctypes.addressof(job))
        else:
            run_together(table([(self._address, job)]), num_threads)
        if recorder.tape is not None:
            recorder.tape.add((self._address, job), (one for one in fields if isinstance(one, Tensor)))


def run_together(calls: ctypes.Array[ctypes.c_int64], num_threads: int) -> None:
    """Run the kernels of a `pool.table` one after another, each on up to `num_threads` threads."""
    pool().run(calls, num_threads)


class _Compiler:
    """Compiles by LLVM for this machine, and keeps the code on disk for the next start."""

    def __init__(self) -> None:
        self._llvm = importlib.import_module("llvmlite.binding")
        self._llvm.initialize_native_target()
        self._llvm.initialize_native_asmprinter()
        features = ",".join((self._llvm.get_host_cpu_features().flatten(), *extra_features()))
        host = self._llvm.get_host_cpu_name(), features
        self._machine = self._llvm.Target.from_default_triple().create_target_machine(
            cpu=host[0], features=host[1], opt=3
        )
        self._jit = self._llvm.create_lljit_compiler(self._machine)
        self._facts = (_sources(), str(self._llvm.llvm_version_info), self._machine.triple, *host)
        self._names = itertools.count()
        self._linked: list[object] = []  # keeps the code from being freed

    def address(self, kernel: Written, known: dict[str, Any]) -> int:
        """Return the address of the kernel's `worker`, compiled for the constants `known`."""
        name = f"{kernel.function.__module__}.{kernel.function.__name__}"
        compiled = _Compiled(name, repr(sorted(known.items())), *self._facts)
        code = compiled.load()
        if code is None:
            code = self._compile(assembly(kernel, **known))
            compiled.store(code)
        library = self._llvm.JITLibraryBuilder().add_object_img(code).export_symbol("worker")
        linked = library.link(self._jit, f"kernel{next(self._names)}")
        self._linked.append(linked)
        address: int = linked["worker"]
        return address

    def _compile(self, source: str) -> bytes:
        module = self._llvm.parse_assembly(source)
        module.verify()
        builder = self._llvm.create_pass_builder(self._machine, self._llvm.create_pipeline_tuning_options())
        passes = self._llvm.create_new_function_pass_manager()  # O2 is slower to compile, and no better
        passes.add_sroa_pass()
        passes.add_simplify_cfg_pass()
        passes.add_instruction_combine_pass()
        passes.add_loop_rotate_pass()
        passes.add_sinking_pass()
        passes.add_new_gvn_pass()
        passes.run(module.get_function("worker"), builder)
        code: bytes = self._machine.emit_object(module)
        return code


@functools.cache
def _compiler() -> _Compiler:
    return _Compiler()


def new_pool() -> Pool:
    known = {"hint": pause_hint()}
    address = _compiler().address
    return Pool(address(lead, known), address(follow, known), address(allow, {}))


pool = functools.cache(new_pool)


@functools.cache
def _sources() -> str:
    """Return a digest of the source code of kernels and compiler."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Compiled:
    """A kernel's file on disk: a digest, then the code. The file's name is a hash of `facts`."""

    def __init__(self, *facts: str) -> None:
        name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
        self._file = cache_dir() / "kernels" / f"{name}.o"

    def load(self) -> bytes | None:
        """Return the code; None if the file is missing or damaged."""
        try:
            digest, code = (raw := self._file.read_bytes())[:32], raw[32:]
        except OSError:
            return None
        return code if hashlib.sha256(code).digest() == digest else None

    def store(self, code: bytes) -> None:
        keep(self._file, hashlib.sha256(code).digest() + code)
