"""The small steps between matrix products: RMS norm, gated activations, rotary positions, each in one pass.

A row is taken by one thread and done by one order of operations, so its bits depend on the row alone.
Elements past the last whole vector are done by the same text at one lane.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from blockdraft.kernels.llvm.jit import TARGETS, Jit, Target, exp, fields, halve, load, store, worker

WIDE = 16  # elements at a time; part of a sum's bits
_SERIAL_ELEMENTS = 1 << 14  # below this, waking a thread costs more than it saves
_FIELDS = ("next", "num_rows", "size", "stride", "heads", "dim", "x", "y", "a", "b")
_JOB = ctypes.c_int64 * len(_FIELDS)
_Body = Callable[[str, str, int], list[str]]  # (prefix of its registers, index, lanes)
_Argument = Callable[[Target, str, int], tuple[list[str], str]]  # (target, prefix, lanes): lines, register


class RowKernels:
    """All of them for one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        target = TARGETS[dtype]
        self._norm = Jit(_norm(target))
        self._silu = Jit(_gate_mul(target, _silu_argument))
        self._gelu = Jit(_gate_mul(target, _gelu_argument))
        self._rotate = Jit(_rotate(target))

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        size = x.shape[-1]
        if weight is None:
            weight = x.new_ones(size)
        assert x.dtype == weight.dtype
        x = x.contiguous()
        y = torch.empty_like(x)
        epsilon = ctypes.c_double(eps)
        job = _JOB(
            0, x.numel() // size, size, size, 0, 0, x.data_ptr(), y.data_ptr(), weight.data_ptr(),
            ctypes.addressof(epsilon),
        )  # fmt: skip
        self._norm(job, is_small=x.numel() < _SERIAL_ELEMENTS)
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(self._silu, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(self._gelu, gate_up)

    def _gate_mul(self, jit: Jit, gate_up: Tensor) -> Tensor:
        assert gate_up.shape[-1] % 2 == 0
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        y = gate_up.new_empty(*gate_up.shape[:-1], size)
        job = _JOB(
            0, gate_up.numel() // (2 * size), size, 2 * size, 0, 0, gate_up.data_ptr(), y.data_ptr(), 0, 0
        )  # fmt: skip
        jit(job, is_small=y.numel() < _SERIAL_ELEMENTS)
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        num_rows, heads, dim = x.shape
        size = cos.shape[-1]
        assert 2 * size <= dim
        assert cos.shape == sin.shape == (num_rows, 1, size)
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        if x.stride()[1:] != (dim, 1):
            x = x.contiguous()
        # The kernel writes what it rotates, so the rest must be there already.
        y = x.new_empty(x.shape) if 2 * size == dim else x.clone(memory_format=torch.contiguous_format)
        job = _JOB(
            0, num_rows, size, x.stride(0), heads, dim, x.data_ptr(), y.data_ptr(), cos.data_ptr(),
            sin.data_ptr(),
        )  # fmt: skip
        self._rotate(job, is_small=x.numel() < _SERIAL_ELEMENTS)
        return y


def intrinsics(target: Target) -> str:
    """What the text below calls on vectors, declared."""
    lines = []
    for lanes in (1, WIDE):
        v, suffix = target.wide(lanes), f"v{lanes}{target.suffix}"
        lines += [f"declare {v} @llvm.fma.{suffix}({v}, {v}, {v})", f"declare {v} @llvm.fabs.{suffix}({v})"]
    return "\n".join(lines)


def _module(target: Target, *, row: str) -> str:
    """`row` is what is done with the row %item from block `begin` on; it ends with a branch to `take`."""
    s, f = target.scalar, target.suffix
    body = f"""  %x.at = mul i64 %item, %stride
  %x.n = getelementptr {s}, ptr %x, i64 %x.at
{row}"""
    return f"""
{intrinsics(target)}
declare {s} @llvm.fma.{f}({s}, {s}, {s})
declare {s} @llvm.sqrt.{f}({s})
{worker(fields(_FIELDS, pointers="x y a b"), body, limit="num_rows")}"""


def each(target: Target, body: _Body, *, before: str, after: str) -> str:
    """`body` over [0, size): WIDE elements at a time, then one at a time by the same operations."""
    lines = [
        "each:",
        f"  %i = phi i64 [ 0, %{before} ], [ %i.next, %each.wide ]",
        f"  %i.next = add i64 %i, {WIDE}",
        "  %i.fits = icmp sle i64 %i.next, %size",
        "  br i1 %i.fits, label %each.wide, label %rest",
        "each.wide:",
        *body("%w", "%i", WIDE),
        "  br label %each",
        "rest:",
        "  %j = phi i64 [ %i, %each ], [ %j.next, %rest.one ]",
        "  %j.next = add i64 %j, 1",
        "  %j.fits = icmp slt i64 %j, %size",
        f"  br i1 %j.fits, label %rest.one, label %{after}",
        "rest.one:",
        *body("%o", "%j", 1),
        "  br label %rest",
    ]
    return "\n".join(lines)


def _norm(target: Target) -> str:
    """y = x * (1 / sqrt(mean(x**2) + eps)) * weight; a = weight, b = eps."""
    s, f, wide = target.scalar, target.suffix, target.wide(WIDE)

    def body(p: str, index: str, lanes: int) -> list[str]:
        v, one = target.wide(lanes), target.wide(1)
        return [
            *load(target, f"{p}.x", "%x.n", index, lanes),
            *load(target, f"{p}.w", "%a", index, lanes),
            f"  {p}.s = shufflevector {one} %scale.0, {one} poison, <{lanes} x i32> zeroinitializer",
            f"  {p}.n = fmul {v} {p}.x, {p}.s",
            f"  {p}.y = fmul {v} {p}.n, {p}.w",
            *store(target, f"{p}.y", "%y.n", index, lanes),
        ]

    convert = "fptrunc double %eps.d to float" if f == "f32" else "fadd double %eps.d, 0.0"
    total = "\n".join(halve(target, "%acc", "%total", WIDE))
    row = f"""
  %y.n = getelementptr {s}, ptr %y, i64 %x.at
  br label %sum
sum:
  %k = phi i64 [ 0, %begin ], [ %k.next, %sum.wide ]
  %acc = phi {wide} [ zeroinitializer, %begin ], [ %acc.next, %sum.wide ]
  %k.next = add i64 %k, {WIDE}
  %k.fits = icmp sle i64 %k.next, %size
  br i1 %k.fits, label %sum.wide, label %sum.rest
sum.wide:
  %k.p = getelementptr {s}, ptr %x.n, i64 %k
  %k.x = load {wide}, ptr %k.p, align {target.element_bytes}
  %acc.next = call {wide} @llvm.fma.v{WIDE}{f}({wide} %k.x, {wide} %k.x, {wide} %acc)
  br label %sum
sum.rest:
{total}
  br label %sum.each
sum.each:
  %l = phi i64 [ %k, %sum.rest ], [ %l.next, %sum.one ]
  %squares = phi {s} [ %total, %sum.rest ], [ %squares.next, %sum.one ]
  %l.fits = icmp slt i64 %l, %size
  br i1 %l.fits, label %sum.one, label %scale
sum.one:
  %l.p = getelementptr {s}, ptr %x.n, i64 %l
  %l.x = load {s}, ptr %l.p
  %squares.next = call {s} @llvm.fma.{f}({s} %l.x, {s} %l.x, {s} %squares)
  %l.next = add i64 %l, 1
  br label %sum.each
scale:
  %eps.d = load double, ptr %b
  %eps = {convert}
  %size.f = sitofp i64 %size to {s}
  %mean = fdiv {s} %squares, %size.f
  %mean.eps = fadd {s} %mean, %eps
  %root = call {s} @llvm.sqrt.{f}({s} %mean.eps)
  %inverse = fdiv {s} 1.0, %root
  %scale.0 = insertelement {target.wide(1)} poison, {s} %inverse, i32 0
  br label %each
{each(target, body, before="scale", after="take")}"""
    return _module(target, row=row)


def sigmoid(target: Target, x: str, out: str, lanes: int) -> list[str]:
    """`out` = 1 / (1 + exp(-x)) for each lane of `x`, by exp(-|x|), which cannot overflow."""
    v, one = target.wide(lanes), target.splat(1.0, lanes)
    return [
        f"  {out}.abs = call {v} @llvm.fabs.v{lanes}{target.suffix}({v} {x})",
        f"  {out}.neg = fneg {v} {out}.abs",
        *exp(target, f"{out}.neg", f"{out}.e", lanes),
        f"  {out}.below = fadd {v} {out}.e, {one}",
        f"  {out}.is_up = fcmp oge {v} {x}, zeroinitializer",
        f"  {out}.above = select <{lanes} x i1> {out}.is_up, {v} {one}, {v} {out}.e",
        f"  {out} = fdiv {v} {out}.above, {out}.below",
    ]


def _silu_argument(_target: Target, p: str, _lanes: int) -> tuple[list[str], str]:
    """z = gate."""
    return [], f"{p}.g"


def _gelu_argument(target: Target, p: str, lanes: int) -> tuple[list[str], str]:
    """z = 2 sqrt(2 / pi) (gate + 0.044715 gate**3): gelu's (1 + tanh(z / 2)) / 2 is sigmoid(z)."""
    v, one = target.wide(lanes), target.splat(1.0, lanes)
    cubic, factor = target.splat(0.044715, lanes), target.splat(2 * math.sqrt(2 / math.pi), lanes)
    lines = [
        f"  {p}.g2 = fmul {v} {p}.g, {p}.g",
        f"  {p}.g3 = call {v} @llvm.fma.v{lanes}{target.suffix}({v} {p}.g2, {v} {cubic}, {v} {one})",
        f"  {p}.g4 = fmul {v} {p}.g, {p}.g3",
        f"  {p}.z = fmul {v} {p}.g4, {factor}",
    ]
    return lines, f"{p}.z"


def _gate_mul(target: Target, argument: _Argument) -> str:
    """y = gate * sigmoid(z) * up, z made from the gate."""

    def body(p: str, index: str, lanes: int) -> list[str]:
        v = target.wide(lanes)
        lines, z = argument(target, p, lanes)
        return [
            *load(target, f"{p}.g", "%x.n", index, lanes),
            *load(target, f"{p}.u", "%up", index, lanes),
            *lines,
            *sigmoid(target, z, f"{p}.sigmoid", lanes),
            f"  {p}.gated = fmul {v} {p}.g, {p}.sigmoid",
            f"  {p}.y = fmul {v} {p}.gated, {p}.u",
            *store(target, f"{p}.y", "%y.n", index, lanes),
        ]

    row = f"""
  %up = getelementptr {target.scalar}, ptr %x.n, i64 %size
  %y.at = mul i64 %item, %size
  %y.n = getelementptr {target.scalar}, ptr %y, i64 %y.at
  br label %each
{each(target, body, before="begin", after="take")}"""
    return _module(target, row=row)


def _rotate(target: Target) -> str:
    """Halves (u, v) of the first 2 * size of every head become (u cos - v sin, v cos + u sin).

    a = cos, b = sin. The values past them are not written.
    """
    s = target.scalar

    def body(p: str, index: str, lanes: int) -> list[str]:
        v = target.wide(lanes)
        return [
            *load(target, f"{p}.u", "%u", index, lanes),
            *load(target, f"{p}.v", "%v", index, lanes),
            *load(target, f"{p}.c", "%cos", index, lanes),
            *load(target, f"{p}.s", "%sin", index, lanes),
            f"  {p}.uc = fmul {v} {p}.u, {p}.c",
            f"  {p}.vs = fmul {v} {p}.v, {p}.s",
            f"  {p}.vc = fmul {v} {p}.v, {p}.c",
            f"  {p}.us = fmul {v} {p}.u, {p}.s",
            f"  {p}.one = fsub {v} {p}.uc, {p}.vs",
            f"  {p}.two = fadd {v} {p}.vc, {p}.us",
            *store(target, f"{p}.one", "%u.y", index, lanes),
            *store(target, f"{p}.two", "%v.y", index, lanes),
        ]

    row = f"""
  %angle.at = mul i64 %item, %size
  %cos = getelementptr {s}, ptr %a, i64 %angle.at
  %sin = getelementptr {s}, ptr %b, i64 %angle.at
  %y.first = mul i64 %item, %heads
  br label %head
head:
  %h = phi i64 [ 0, %begin ], [ %h.next, %head.end ]
  %h.at = mul i64 %h, %dim
  %u = getelementptr {s}, ptr %x.n, i64 %h.at
  %v = getelementptr {s}, ptr %u, i64 %size
  %y.head = add i64 %y.first, %h
  %y.at = mul i64 %y.head, %dim
  %u.y = getelementptr {s}, ptr %y, i64 %y.at
  %v.y = getelementptr {s}, ptr %u.y, i64 %size
  br label %each
{each(target, body, before="head", after="head.end")}
head.end:
  %h.next = add i64 %h, 1
  %h.more = icmp slt i64 %h.next, %heads
  br i1 %h.more, label %head, label %take"""
    return _module(target, row=row)
