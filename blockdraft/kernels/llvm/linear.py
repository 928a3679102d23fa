"""`TileLinear`: dot products of a few tokens with every weight row, each weight read once."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from blockdraft.kernels.llvm.jit import TARGETS, Jit, Target, fields, fma, halve, load

_LINE_BYTES = 64
_MAX_TOKENS = 8  # tokens of one tile; more are done in several passes over cached weight rows
_MAX_ACCUMULATORS = 16  # vector registers that may hold sums
_CHUNK_BYTES = 256 * 1024  # weight handed to a thread at a time; 32 KB costs 29 % more at M = 1
_PREFETCH_LEVEL = 3  # llvm.prefetch's locality: into the L1; the L2 costs 15 % more at M = 2
_SERIAL_OPS = 1 << 16  # below this many multiply-adds, waking a thread costs more than it saves


class TileLinear:
    """The contract of kernels/linear.py for float32 or float64 on a CPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._jit = Jit(_module(TARGETS[dtype]))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        n, k = weight.shape
        assert x.shape[-1] == k
        assert x.dtype == weight.dtype == self._dtype
        assert weight.is_contiguous()
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], n)
        m = math.prod(x.shape[:-1])
        chunk = max(8, _CHUNK_BYTES // (k * x.itemsize + 1))
        job = _JOB(0, weight.data_ptr(), x.data_ptr(), y.data_ptr(), m, n, k, chunk)
        self._jit(job, is_small=m * n * k < _SERIAL_OPS)
        return y if bias is None else y.add_(bias)


_FIELDS = ("next", "w", "x", "y", "m", "n", "k", "chunk")  # chunk: weight rows taken at a time
_JOB = ctypes.c_int64 * len(_FIELDS)


def _rows(tokens: int) -> int:
    """Weight rows per tile: one stream while memory is the limit, then what registers hold."""
    return 1 if tokens <= 2 else min(4, _MAX_ACCUMULATORS // tokens)


def _line(target: Target) -> int:
    """Elements of a cache line."""
    return _LINE_BYTES // target.element_bytes


def _module(target: Target) -> str:
    s, v = target.scalar, target.vector
    tokens = range(1, _MAX_TOKENS + 1)
    shapes = {(rows, m) for m in tokens for rows in (1, _rows(m))}
    return "\n".join(
        [
            f"declare {v} @llvm.fma.v{target.lanes}{target.suffix}({v}, {v}, {v})",
            f"declare {s} @llvm.fma.{target.suffix}({s}, {s}, {s})",
            "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
            "declare i64 @llvm.smin.i64(i64, i64)",
            _REST.format(s=s, suffix=target.suffix),
            *(_tile(target, rows=rows, tokens=m) for rows, m in sorted(shapes)),
            *(_BLOCK.format(s=s, m=m, rows=_rows(m)) for m in tokens),
            _worker(target),
        ]
    )


def _tile(target: Target, *, rows: int, tokens: int) -> str:
    """`y[m, r] = dot(weight[r], x[m])` for `rows` x `tokens` outputs, each weight read once.

    The chain of one output, the same in every tile: lane j sums k = j, j + lanes, ... in order by
    fused multiply-add over the whole cache lines; lanes are halved by adding the upper half to the
    lower; the last K % line elements follow one by one (`_REST`).
    """
    s, v, line = target.scalar, target.vector, _line(target)
    cells = [(r, m) for m in range(tokens) for r in range(rows)]
    steps = line // target.lanes
    lines = [
        f"define internal void @tile_{rows}x{tokens}(ptr %w0, ptr %x0, ptr %y0, i64 %k, i64 %n) {{",
        "entry:",
        f"  %rest = urem i64 %k, {line}",
        "  %kv = sub i64 %k, %rest",
        "  %is_whole = icmp eq i64 %rest, 0",
        *(f"  %w{r} = getelementptr {s}, ptr %w{r - 1}, i64 %k" for r in range(1, rows)),
        *(f"  %x{m} = getelementptr {s}, ptr %x{m - 1}, i64 %k" for m in range(1, tokens)),
        *(f"  %y{m} = getelementptr {s}, ptr %y{m - 1}, i64 %n" for m in range(1, tokens)),
        f"  %next = getelementptr {s}, ptr %w{rows - 1}, i64 %k",
        "  br label %head",
        "head:",
        "  %i = phi i64 [ 0, %entry ], [ %i.next, %body ]",
        *(
            f"  %a{r}.{m}.0 = phi {v} [ zeroinitializer, %entry ], [ %a{r}.{m}.{steps}, %body ]"
            for r, m in cells
        ),
        "  %more = icmp slt i64 %i, %kv",
        "  br i1 %more, label %body, label %sum",
        "body:",
        *_prefetch(target, rows=rows),
        *(text for u in range(steps) for text in _step(target, rows=rows, tokens=tokens, u=u)),
        f"  %i.next = add i64 %i, {line}",
        "  br label %head",
        "sum:",
        *(text for r, m in cells for text in _sum_lanes(target, r=r, m=m)),
        "  br i1 %is_whole, label %done, label %rest.body",
        "rest.body:",
        *(f"  call void @rest(ptr %o{r}.{m}, ptr %w{r}, ptr %x{m}, i64 %kv, i64 %k)" for r, m in cells),
        "  br label %done",
        "done:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def _prefetch(target: Target, *, rows: int) -> list[str]:
    """Ask for the next tile's weights, which follow this one's, front to back.

    Row by row, as the sums read them, they are too many streams for the hardware's own prefetcher:
    56 -> 40 ms for the linears of a SmolLM2-135M forward of 8 tokens, in a prototype of this kernel
    (2 Neoverse-N1 cores, 2026-11; not repeated with the kernel as it is).
    """
    lines = [f"  %f = mul i64 %i, {rows}"]
    for r in range(rows):
        lines += [
            f"  %f{r} = add i64 %f, {r * _line(target)}",
            f"  %f{r}.p = getelementptr {target.scalar}, ptr %next, i64 %f{r}",
            f"  call void @llvm.prefetch.p0(ptr %f{r}.p, i32 0, i32 {_PREFETCH_LEVEL}, i32 1)",
        ]
    return lines


def _step(target: Target, *, rows: int, tokens: int, u: int) -> list[str]:
    """One vector of every row and token: `a[r][m] += w[r] * x[m]`."""
    lines = [f"  %i.{u} = add i64 %i, {u * target.lanes}"]
    for name in (*(f"w{r}" for r in range(rows)), *(f"x{m}" for m in range(tokens))):
        lines += load(target, f"%{name}.v{u}", f"%{name}", f"%i.{u}", target.lanes)
    for m in range(tokens):
        for r in range(rows):
            operands = (f"%w{r}.v{u}", f"%x{m}.v{u}", f"%a{r}.{m}.{u}")
            lines.append(fma(target, f"%a{r}.{m}.{u + 1}", operands, target.lanes))
    return lines


def _sum_lanes(target: Target, *, r: int, m: int) -> list[str]:
    """`y[m][r]` = the lanes of `a[r][m]`, halved until one is left."""
    s = target.scalar
    return [
        *halve(target, f"%a{r}.{m}.0", f"%s{r}.{m}", target.lanes),
        f"  %o{r}.{m} = getelementptr {s}, ptr %y{m}, i64 {r}",
        f"  store {s} %s{r}.{m}, ptr %o{r}.{m}",
    ]


# *o += w[i] * x[i] for i in [start, k), in order.
_REST = """
define internal void @rest(ptr %o, ptr %w, ptr %x, i64 %start, i64 %k) noinline {{
entry:
  %first = load {s}, ptr %o
  br label %body
body:
  %i = phi i64 [ %start, %entry ], [ %i.next, %body ]
  %sum = phi {s} [ %first, %entry ], [ %sum.next, %body ]
  %w.p = getelementptr {s}, ptr %w, i64 %i
  %x.p = getelementptr {s}, ptr %x, i64 %i
  %w.s = load {s}, ptr %w.p
  %x.s = load {s}, ptr %x.p
  %sum.next = call {s} @llvm.fma.{suffix}({s} %w.s, {s} %x.s, {s} %sum)
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %k
  br i1 %more, label %body, label %done
done:
  store {s} %sum.next, ptr %o
  ret void
}}
"""

# `m` tokens against `count` rows: tiles of `rows`, then one row at a time.
_BLOCK = """
define internal void @block_{m}(ptr %w, ptr %x, ptr %y, i64 %count, i64 %k, i64 %n) {{
entry:
  %odd = urem i64 %count, {rows}
  %even = sub i64 %count, %odd
  br label %head
head:
  %r = phi i64 [ 0, %entry ], [ %r.tile, %tile ], [ %r.one, %one ]
  %offset = mul i64 %r, %k
  %w.r = getelementptr {s}, ptr %w, i64 %offset
  %y.r = getelementptr {s}, ptr %y, i64 %r
  %is_tile = icmp slt i64 %r, %even
  br i1 %is_tile, label %tile, label %check
tile:
  call void @tile_{rows}x{m}(ptr %w.r, ptr %x, ptr %y.r, i64 %k, i64 %n)
  %r.tile = add i64 %r, {rows}
  br label %head
check:
  %is_one = icmp slt i64 %r, %count
  br i1 %is_one, label %one, label %done
one:
  call void @tile_1x{m}(ptr %w.r, ptr %x, ptr %y.r, i64 %k, i64 %n)
  %r.one = add i64 %r, 1
  br label %head
done:
  ret void
}}
"""


def _worker(target: Target) -> str:
    """What every thread runs: take chunks of rows until none is left, all tokens for each."""
    tokens = range(1, _MAX_TOKENS + 1)
    call = "(ptr %w.c, ptr %x.c, ptr %y.c, i64 %rows, i64 %k, i64 %n)"
    cases = " ".join(f"i64 {m}, label %case{m}" for m in tokens)
    calls = [f"case{m}:\n  call void @block_{m}{call}\n  br label %after" for m in tokens]
    return _WORKER.format(
        s=target.scalar, fields=fields(_FIELDS, pointers="w x y"), cases=cases, calls="\n".join(calls),
        max_tokens=_MAX_TOKENS,
    )  # fmt: skip


_WORKER = """
define void @worker(ptr %job) {{
entry:
{fields}
  br label %take
take:
  %row = atomicrmw add ptr %next.p, i64 %chunk monotonic
  %left = sub i64 %n, %row
  %is_left = icmp sgt i64 %left, 0
  br i1 %is_left, label %begin, label %done
begin:
  %rows = call i64 @llvm.smin.i64(i64 %chunk, i64 %left)
  %w.at = mul i64 %row, %k
  %w.c = getelementptr {s}, ptr %w, i64 %w.at
  br label %pass
pass:
  %t = phi i64 [ 0, %begin ], [ %t.next, %after ]
  %t.left = sub i64 %m, %t
  %count = call i64 @llvm.smin.i64(i64 {max_tokens}, i64 %t.left)
  %x.at = mul i64 %t, %k
  %x.c = getelementptr {s}, ptr %x, i64 %x.at
  %y.row = mul i64 %t, %n
  %y.at = add i64 %y.row, %row
  %y.c = getelementptr {s}, ptr %y, i64 %y.at
  %t.next = add i64 %t, %count
  switch i64 %count, label %take [ {cases} ]
{calls}
after:
  br label %pass
done:
  ret void
}}
"""
