"""Turns LLVM assembly into functions that run on PyTorch's own OpenMP threads.

Every module defines `worker(ptr job)`: all threads run it on the same job, whose first field is a counter
they take work from. `Target` names the types; the text that several kernels share is written here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from blockdraft.settings.cache_files import keep
from blockdraft.settings.settings import cache_dir

Job = ctypes.Array[ctypes.c_int64]


@dataclass(frozen=True)
class Target:
    """One element type in vectors of 16 bytes, which every CPU has: its size is part of a result's bits."""

    scalar: str  # LLVM's name of the element type
    suffix: str  # and of its intrinsics
    element_bytes: int

    @property
    def lanes(self) -> int:
        return 16 // self.element_bytes

    @property
    def vector(self) -> str:
        return self.wide(self.lanes)

    def wide(self, lanes: int) -> str:
        return f"<{lanes} x {self.scalar}>"

    def number(self, value: float) -> str:
        """A constant; LLVM writes floats as the hexadecimal of the double they are exactly equal to."""
        exact = torch.tensor(value, dtype=self.dtype).double().view(torch.int64).item()
        return f"0x{int(exact) & 0xFFFFFFFFFFFFFFFF:016X}"

    def splat(self, value: float, lanes: int) -> str:
        return "<" + ", ".join([f"{self.scalar} {self.number(value)}"] * lanes) + ">"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.element_bytes == 4 else torch.float64


TARGETS = {torch.float32: Target("float", "f32", 4), torch.float64: Target("double", "f64", 8)}


class Jit:
    """Owns the machine code of one module; calling it runs `worker` on a job."""

    def __init__(self, source: str) -> None:
        llvm = importlib.import_module("llvmlite.binding")
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        host = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=host[0], features=host[1], opt=3
        )
        module = llvm.parse_assembly(source)
        module.verify()
        self._engine = llvm.create_mcjit_compiler(module, machine)
        compiled = _Compiled(source, str(llvm.llvm_version_info), machine.triple, *host)
        self._engine.set_object_cache(compiled.store, compiled.load)
        self._engine.finalize_object()
        self._address: int = self._engine.get_function_address("worker")
        self._run_serial = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._run_parallel = _gomp_parallel()

    def __call__(self, job: Job, *, is_small: bool) -> None:
        """Run to the end; a small job is not worth waking a thread for."""
        threads = 1 if is_small else torch.get_num_threads()
        if threads == 1:
            self._run_serial(ctypes.addressof(job))
        else:
            self._run_parallel(self._address, ctypes.addressof(job), threads, 0)


class _Compiled:
    """A module's machine code on the disk, after its digest: a start need not compile what another has.

    It is named after all that decides it: the source, LLVM's version and the processor.
    """

    def __init__(self, *facts: str) -> None:
        name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
        self._file = cache_dir() / "kernels" / f"{name}.o"

    def load(self, module: object) -> bytes | None:
        """None: it has to be compiled."""
        try:
            digest, code = (raw := self._file.read_bytes())[:32], raw[32:]
        except OSError:
            return None
        return code if hashlib.sha256(code).digest() == digest else None

    def store(self, module: object, code: bytes) -> None:
        keep(self._file, hashlib.sha256(code).digest() + code)


@functools.cache
def _gomp_parallel() -> ctypes._NamedFuncPointer:
    """The libgomp that PyTorch itself loaded: a second pool would fight over the cores."""
    function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_uint] * 2
    return function


def fields(names: Iterable[str], *, pointers: str) -> str:
    """Loads of a job's fields, in order; `pointers` lists those that are addresses.

    The first is the shared counter: it is only touched atomically, through `%next.p`.
    """
    lines = []
    for index, name in enumerate(names):
        kind = "ptr" if name in pointers.split() else "i64"
        lines.append(f"  %{name}.p = getelementptr i64, ptr %job, i64 {index}")
        if index > 0:
            lines.append(f"  %{name} = load {kind}, ptr %{name}.p")
    return "\n".join(lines)


def worker(loads: str, body: str, *, before: str = "", limit: str = "num_items") -> str:
    """`worker` itself: `body` for every %item in [0, limit), each taken by one thread.

    `loads` are the `fields`; `before` is done once per thread. `body` begins in block `begin` and branches to
    `take` at its end.
    """
    return f"""
define void @worker(ptr %job) {{
entry:
{loads}
{before}
  br label %take
take:
  %item = atomicrmw add ptr %next.p, i64 1 monotonic
  %is_left = icmp slt i64 %item, %{limit}
  br i1 %is_left, label %begin, label %done
begin:
{body}
done:
  ret void
}}
"""


def load(target: Target, name: str, pointer: str, index: str, lanes: int) -> list[str]:
    """`name` = `lanes` elements from pointer[index] on."""
    return [
        f"  {name}.p = getelementptr {target.scalar}, ptr {pointer}, i64 {index}",
        f"  {name} = load {target.wide(lanes)}, ptr {name}.p, align {target.element_bytes}",
    ]


def store(target: Target, name: str, pointer: str, index: str, lanes: int) -> list[str]:
    """The `lanes` elements of `name` go to pointer[index] and on."""
    return [
        f"  {name}.to = getelementptr {target.scalar}, ptr {pointer}, i64 {index}",
        f"  store {target.wide(lanes)} {name}, ptr {name}.to, align {target.element_bytes}",
    ]


def spread(target: Target, scalar: str, out: str, lanes: int) -> list[str]:
    """`out` = the scalar in every lane."""
    v = target.wide(lanes)
    return [
        f"  {out}.0 = insertelement {v} poison, {target.scalar} {scalar}, i32 0",
        f"  {out} = shufflevector {v} {out}.0, {v} poison, <{lanes} x i32> zeroinitializer",
    ]


def load_spread(target: Target, name: str, pointer: str, index: str, lanes: int) -> list[str]:
    """`name` = pointer[index] in every lane."""
    return [
        f"  {name}.p = getelementptr {target.scalar}, ptr {pointer}, i64 {index}",
        f"  {name}.s = load {target.scalar}, ptr {name}.p",
        *spread(target, f"{name}.s", name, lanes),
    ]


def fma(target: Target, out: str, operands: tuple[str, str, str], lanes: int) -> str:
    """`out` = the first operand times the second plus the third, rounded once."""
    arguments = ", ".join(f"{target.wide(lanes)} {name}" for name in operands)
    return f"  {out} = call {target.wide(lanes)} @llvm.fma.v{lanes}{target.suffix}({arguments})"


def repeat(index: str, step: int, limit: int | str, *, loop: str, after: str) -> list[str]:
    """The end of block `loop`: once more with `index` raised by `step` while that is below `limit`."""
    return [
        f"  {index}.next = add i64 {index}, {step}",
        f"  {index}.more = icmp slt i64 {index}.next, {limit}",
        f"  br i1 {index}.more, label %{loop}, label %{after}",
    ]


def halve(target: Target, name: str, out: str, lanes: int) -> list[str]:
    """`out` = the sum of vector `name`: the upper half is added to the lower until one lane is left."""
    lines = []
    while lanes > 1:
        half, whole, base = lanes // 2, target.wide(lanes), f"{out}.h{lanes}"
        low = ", ".join(f"i32 {i}" for i in range(half))
        high = ", ".join(f"i32 {i}" for i in range(half, lanes))
        shuffle = f"shufflevector {whole} {name}, {whole} poison, <{half} x i32>"
        lines += [
            f"  {base}.low = {shuffle} <{low}>",
            f"  {base}.high = {shuffle} <{high}>",
            f"  {base} = fadd {target.wide(half)} {base}.low, {base}.high",
        ]
        lanes, name = half, base
    return [*lines, f"  {out} = extractelement {target.wide(1)} {name}, i32 0"]


_LN2 = {"f32": (0.693359375, -2.12194440e-4), "f64": (6.93145751953125e-1, 1.42860682030941723212e-6)}
# Largest degree first, down to that of x**2. float32: Cephes' expf; float64: Taylor's to x**13.
_EXP = {
    "f32": (1.98756915e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.50000001201),
    "f64": tuple(1.0 / math.factorial(n) for n in range(13, 1, -1)),
}


def exp(target: Target, x: str, out: str, lanes: int) -> list[str]:
    """`out` = e**x for each lane of `x`, which is below 80: every lane by the same operations.

    x = n ln 2 + r, e**x = 2**n * (1 + r + r**2 * polynomial(r)). Below the smallest normal number the
    result is 0; NaN stays NaN. Within 2 units of the last place.
    """
    v, f = target.wide(lanes), target.suffix
    bits, bias, mantissa = (32, 127, 23) if f == "f32" else (64, 1023, 52)
    w = f"<{lanes} x i{bits}>"
    least = target.splat(-87.3 if f == "f32" else -708.3, lanes)
    round_up = target.splat(1.5 * 2.0**mantissa, lanes)  # adding it leaves round(x) in the low bits
    high, low = (target.splat(-part, lanes) for part in _LN2[f])
    fma = f"call {v} @llvm.fma.v{lanes}{f}"

    def whole(value: int) -> str:
        return "<" + ", ".join([f"i{bits} {value}"] * lanes) + ">"

    lines = [
        f"  {out}.t = {fma}({v} {x}, {v} {target.splat(1.4426950408889634, lanes)}, {v} {round_up})",
        f"  {out}.n = fsub {v} {out}.t, {round_up}",
        f"  {out}.r0 = {fma}({v} {out}.n, {v} {high}, {v} {x})",
        f"  {out}.r = {fma}({v} {out}.n, {v} {low}, {v} {out}.r0)",
    ]
    previous = target.splat(_EXP[f][0], lanes)
    for index, coefficient in enumerate(_EXP[f][1:]):
        lines.append(
            f"  {out}.c{index} = {fma}({v} {previous}, {v} {out}.r, {v} {target.splat(coefficient, lanes)})"
        )
        previous = f"{out}.c{index}"
    return [
        *lines,
        f"  {out}.r2 = fmul {v} {out}.r, {out}.r",
        f"  {out}.q = {fma}({v} {previous}, {v} {out}.r2, {v} {out}.r)",
        f"  {out}.m = fadd {v} {out}.q, {target.splat(1.0, lanes)}",
        f"  {out}.b0 = bitcast {v} {out}.t to {w}",
        f"  {out}.b1 = add {w} {out}.b0, {whole(bias)}",
        f"  {out}.b2 = shl {w} {out}.b1, {whole(mantissa)}",
        f"  {out}.two = bitcast {w} {out}.b2 to {v}",
        f"  {out}.e = fmul {v} {out}.m, {out}.two",
        f"  {out}.tiny = fcmp olt {v} {x}, {least}",
        f"  {out} = select <{lanes} x i1> {out}.tiny, {v} zeroinitializer, {v} {out}.e",
    ]
