"""The gated delta rule on a CPU: a few columns of a head's state at a time, which stay in the nearest cache.

Columns of a state do not meet: one work item is (row, value head, piece of the columns), its tokens in order.
The operations behind one column v of a state S [K, V], the same in every piece:

  held   = exp(gate) * sum of key[k] * S[k, v]: fused multiply-adds, k in order
  delta  = beta * (value - held)
  S[k, v] = fma(key[k], delta, S[k, v] * exp(gate))
  out    = sum of query[k] * S[k, v]: as above

`fold` does the third line alone, from the delta that `scan` stored. So rows, tokens, threads and pieces do
not enter. The convolution is one pass over the inputs, a token at a time.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from blockdraft.kernels.gated_delta import EPS, Tape
from blockdraft.kernels.llvm.jit import (
    TARGETS,
    Jit,
    Target,
    fields,
    fma,
    load,
    load_spread,
    repeat,
    store,
    worker,
)
from blockdraft.kernels.llvm.pointwise import each, intrinsics, sigmoid
from blockdraft.kernels.rows import llvm_rows

_VECTORS = 8  # of columns in a piece: enough sums to hide the latency of a multiply-add
_SERIAL_OPS = 1 << 16  # multiply-adds below which waking a thread costs more than it saves
_SERIAL_ELEMENTS = 1 << 14  # likewise, outputs of a convolution


class GatedDeltaKernels:
    """The contract of kernels/gated_delta.py for float32 or float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._piece = _VECTORS * TARGETS[dtype].lanes
        self._rms_norm = llvm_rows(dtype).rms_norm
        self._scan = Jit(_module(TARGETS[dtype], is_fold=False))
        self._fold = Jit(_module(TARGETS[dtype], is_fold=True))
        self._convolve: dict[int, Jit] = {}  # by the number of taps

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tape]:
        dtype, (num_rows, num_tokens, num_heads, _) = self._dtype, v.shape
        assert num_tokens > 0
        assert gate.shape == beta.shape == (num_rows, num_tokens, num_heads)
        assert q.shape == k.shape
        # RMS norms: x / sqrt(mean + eps / K) * K ** -0.5 is x / sqrt(sum + eps).
        size = k.shape[-1]
        key = self._rms_norm(k.to(dtype), _scale(dtype, size, -0.5), EPS / size)
        query = self._rms_norm(q.to(dtype), _scale(dtype, size, -1.0), EPS / size)
        value, rate = v.to(dtype).contiguous(), beta.to(dtype).contiguous()
        decay = torch.exp(gate.to(dtype)).contiguous()
        tape = Tape(decay=decay, key=key, delta=torch.empty_like(value))
        out = torch.empty_like(value)
        self._run(self._scan, state, tape, (query, value, rate, out, None))
        return out.to(v.dtype), tape

    def fold(self, state: Tensor, tape: Tape, counts: Tensor) -> None:
        assert counts.shape == state.shape[:1]
        assert counts.numel() == 0 or 0 <= int(counts.min()) <= int(counts.max()) <= tape.decay.shape[1]
        tape = Tape(*(part.contiguous() for part in tape))
        self._run(self._fold, state, tape, (None, None, None, None, counts.to(torch.int64).contiguous()))

    def _run(self, jit: Jit, state: Tensor, tape: Tape, others: tuple[Tensor | None, ...]) -> None:
        """`others`: query, value, beta, out and counts, where the worker reads them."""
        num_rows, num_heads, key_size, value_size = state.shape
        num_tokens, num_groups = tape.key.shape[1:3]
        assert tape.key.shape == (num_rows, num_tokens, num_groups, key_size)
        assert tape.delta.shape == (num_rows, num_tokens, num_heads, value_size)
        assert num_heads % num_groups == 0
        assert state.dtype == self._dtype
        assert all(part.is_contiguous() and part.dtype == self._dtype for part in tape)
        if num_rows > 0:
            assert state[0].is_contiguous()
        num_pieces = -(-value_size // self._piece)
        job = _JOB(
            0, num_rows * num_heads * num_pieces, num_pieces, num_tokens, num_heads, num_heads // num_groups,
            num_groups * key_size, key_size, value_size, state.stride(0), state.data_ptr(),
            *(part.data_ptr() for part in tape),
            *(0 if part is None else part.data_ptr() for part in others),
        )  # fmt: skip
        jit(job, is_small=state.numel() * num_tokens < _SERIAL_OPS)

    def convolve(self, x: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
        num_rows, num_tokens, num_channels = x.shape
        taps = weight.shape[1]
        assert x.dtype == tail.dtype == weight.dtype == self._dtype
        assert tail.shape == (num_rows, taps - 1, num_channels)
        assert weight.shape[0] == num_channels
        if taps not in self._convolve:
            self._convolve[taps] = Jit(_convolution(TARGETS[self._dtype], taps))
        x, tail = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, tail))
        weight = weight.contiguous()
        y = x.new_empty(x.shape)
        job = _CONVOLVE_JOB(
            0, num_rows * num_tokens, num_tokens, num_channels, *x.stride()[:2], *tail.stride()[:2],
            x.data_ptr(), tail.data_ptr(), weight.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        self._convolve[taps](job, is_small=y.numel() < _SERIAL_ELEMENTS)
        return y


@functools.cache
def _scale(dtype: torch.dtype, size: int, power: float) -> Tensor:
    return torch.full((size,), size**power, dtype=dtype, device="cpu")


_FIELDS = (
    "next", "num_items", "num_pieces", "tokens", "num_heads", "shared", "key_stride", "key_size",
    "value_size", "state_stride", "state", "decay", "key", "delta", "query", "value", "beta", "out", "counts",
)  # fmt: skip
_POINTERS = "state decay key delta query value beta out counts"
_JOB = ctypes.c_int64 * len(_FIELDS)


def _kinds(target: Target) -> list[tuple[int, int]]:
    """(vectors, lanes) of the pieces that columns are done in, the largest that fits first."""
    vectors = [_VECTORS >> i for i in range(_VECTORS.bit_length())]
    return [*((count, target.lanes) for count in vectors), (1, 1)]


def _module(target: Target, *, is_fold: bool) -> str:
    v, one = target.vector, target.wide(1)
    parts = [
        "declare i64 @llvm.smin.i64(i64, i64)",
        f"declare {v} @llvm.fma.v{target.lanes}{target.suffix}({v}, {v}, {v})",
        f"declare {one} @llvm.fma.v1{target.suffix}({one}, {one}, {one})",
        *(_columns(target, count, lanes, is_fold=is_fold) for count, lanes in _kinds(target)),
        _worker(target, is_fold=is_fold),
    ]
    return "\n".join(parts)


# Pointers of one work item: at its first token, head and column. `s` is memory of the thread's own.
_ARGUMENTS = (
    "ptr %s, ptr %state.c, ptr %decay.c, ptr %key.c, ptr %delta.c, ptr %query.c, ptr %value.c, ptr %beta.c, "
    "ptr %out.c, i64 %count, i64 %key_size, i64 %value_size, i64 %key_stride, i64 %num_heads, "
    "i64 %value_stride"
)


def _columns(target: Target, count: int, lanes: int, *, is_fold: bool) -> str:
    """All tokens for `count` vectors of columns. The first token reads the state itself, the others `s`."""
    s = target.scalar
    # A scan never writes the state; a fold's last token does.
    last = "%is_last" if is_fold else "false"
    lines = [
        f"define internal void @columns_{count}x{lanes}({_ARGUMENTS}) {{",
        "entry:",
        "  %last = sub i64 %count, 1",
        "  br label %token",
        "token:",
        "  %t = phi i64 [ 0, %entry ], [ %t.next, %token.end ]",
        "  %is_first = icmp eq i64 %t, 0",
        "  %is_last = icmp eq i64 %t, %last",
        "  %from = select i1 %is_first, ptr %state.c, ptr %s",
        f"  %from.stride = select i1 %is_first, i64 %value_size, i64 {count * lanes}",
        f"  %to = select i1 {last}, ptr %state.c, ptr %s",
        f"  %to.stride = select i1 {last}, i64 %value_size, i64 {count * lanes}",
        "  %head.at = mul i64 %t, %num_heads",
        "  %key.at = mul i64 %t, %key_stride",
        "  %column.at = mul i64 %t, %value_stride",
        f"  %key.t = getelementptr {s}, ptr %key.c, i64 %key.at",
        f"  %query.t = getelementptr {s}, ptr %query.c, i64 %key.at",
        f"  %delta.t = getelementptr {s}, ptr %delta.c, i64 %column.at",
        f"  %value.t = getelementptr {s}, ptr %value.c, i64 %column.at",
        f"  %out.t = getelementptr {s}, ptr %out.c, i64 %column.at",
        *load_spread(target, "%decay", "%decay.c", "%head.at", lanes),
        *(_load_deltas(target, count, lanes) if is_fold else _make_deltas(target, count, lanes)),
        "  br label %update",
        *_update(target, count, lanes, reads=not is_fold),
        "token.end:",
        *([] if is_fold else _store_outs(target, count, lanes)),
        *repeat("%t", 1, "%count", loop="token", after="done"),
        "done:",
        "  ret void",
        "}",
    ]  # fmt: skip
    return "\n".join(lines)


def _store_outs(target: Target, count: int, lanes: int) -> list[str]:
    lines = []
    for i in range(count):
        lines += store(target, f"%o{i}.next", "%out.t", str(i * lanes), lanes)
    return lines


def _load_deltas(target: Target, count: int, lanes: int) -> list[str]:
    lines = []
    for i in range(count):
        lines += load(target, f"%d{i}", "%delta.t", str(i * lanes), lanes)
    return [*lines, "  br label %ready", "ready:"]


def _make_deltas(target: Target, count: int, lanes: int) -> list[str]:
    """delta = beta * (value - decay * sum of key[k] * S[k]), stored as well."""
    s, v, columns = target.scalar, target.wide(lanes), range(count)
    lines = [
        *load_spread(target, "%beta", "%beta.c", "%head.at", lanes),
        "  br label %dot",
        "dot:",
        "  %j = phi i64 [ 0, %token ], [ %j.next, %dot ]",
        *(f"  %a{i} = phi {v} [ zeroinitializer, %token ], [ %a{i}.next, %dot ]" for i in columns),
        *load_spread(target, "%kj", "%key.t", "%j", lanes),
        "  %j.at = mul i64 %j, %from.stride",
        f"  %j.row = getelementptr {s}, ptr %from, i64 %j.at",
    ]
    for i in columns:
        lines += load(target, f"%x{i}", "%j.row", str(i * lanes), lanes)
        lines.append(fma(target, f"%a{i}.next", ("%kj", f"%x{i}", f"%a{i}"), lanes))
    lines += [*repeat("%j", 1, "%key_size", loop="dot", after="ready"), "ready:"]
    for i in columns:
        lines += [
            *load(target, f"%v{i}", "%value.t", str(i * lanes), lanes),
            f"  %held{i} = fmul {v} %a{i}.next, %decay",
            f"  %miss{i} = fsub {v} %v{i}, %held{i}",
            f"  %d{i} = fmul {v} %miss{i}, %beta",
            *store(target, f"%d{i}", "%delta.t", str(i * lanes), lanes),
        ]
    return lines


def _update(target: Target, count: int, lanes: int, *, reads: bool) -> list[str]:
    """S[k] = fma(key[k], delta, S[k] * decay) for every k; where it `reads`, o += query[k] * S[k]."""
    s, v, columns = target.scalar, target.wide(lanes), range(count)
    lines = ["update:", "  %k = phi i64 [ 0, %ready ], [ %k.next, %update ]"]
    if reads:
        lines += [f"  %o{i} = phi {v} [ zeroinitializer, %ready ], [ %o{i}.next, %update ]" for i in columns]
        lines += load_spread(target, "%qk", "%query.t", "%k", lanes)
    lines += [
        *load_spread(target, "%kk", "%key.t", "%k", lanes),
        "  %from.at = mul i64 %k, %from.stride",
        f"  %from.row = getelementptr {s}, ptr %from, i64 %from.at",
        "  %to.at = mul i64 %k, %to.stride",
        f"  %to.row = getelementptr {s}, ptr %to, i64 %to.at",
    ]
    for i in columns:
        lines += [
            *load(target, f"%y{i}", "%from.row", str(i * lanes), lanes),
            f"  %less{i} = fmul {v} %y{i}, %decay",
            fma(target, f"%new{i}", ("%kk", f"%d{i}", f"%less{i}"), lanes),
            *store(target, f"%new{i}", "%to.row", str(i * lanes), lanes),
        ]
        if reads:
            lines.append(fma(target, f"%o{i}.next", ("%qk", f"%new{i}", f"%o{i}"), lanes))
    return [*lines, *repeat("%k", 1, "%key_size", loop="update", after="token.end")]


def _worker(target: Target, *, is_fold: bool) -> str:
    cases = []
    for index, (count, lanes) in enumerate(_kinds(target)):
        fits, call = f"%fits{index}", f"call void @columns_{count}x{lanes}({_ARGUMENTS})"
        cases.append(f"""try{index}:
  {fits} = icmp sge i64 %left, {count * lanes}
  br i1 {fits}, label %do{index}, label %try{index + 1}
do{index}:
  {call}
  %column.{index} = add i64 %column, {count * lanes}
  br label %piece""")
    back = ", ".join(f"[ %column.{index}, %do{index} ]" for index in range(len(cases)))
    piece = _VECTORS * target.lanes
    before = f"""  %s.size = mul i64 %key_size, {piece}
  %s = alloca {target.scalar}, i64 %s.size, align 64
  %value_stride = mul i64 %num_heads, %value_size
  %head_size = mul i64 %key_size, %value_size"""
    body = _ITEM.format(
        s=target.scalar, piece=piece, back=back, cases="\n".join(cases), end=f"try{len(cases)}",
        count="load i64, ptr %counts.r" if is_fold else "add i64 %tokens, 0",
    )  # fmt: skip
    return worker(fields(_FIELDS, pointers=_POINTERS), body, before=before)


# What a thread does with one %item: a piece of the columns of one row and value head.
_ITEM = """  %piece.n = urem i64 %item, %num_pieces
  %row.head = udiv i64 %item, %num_pieces
  %head = urem i64 %row.head, %num_heads
  %row = udiv i64 %row.head, %num_heads
  %group = udiv i64 %head, %shared
  %counts.r = getelementptr i64, ptr %counts, i64 %row
  %count = {count}
  %is_any = icmp sgt i64 %count, 0
  %token = mul i64 %row, %tokens
  %decay.row = mul i64 %token, %num_heads
  %decay.at = add i64 %decay.row, %head
  %decay.c = getelementptr {s}, ptr %decay, i64 %decay.at
  %beta.c = getelementptr {s}, ptr %beta, i64 %decay.at
  %key.row = mul i64 %token, %key_stride
  %key.head = mul i64 %group, %key_size
  %key.at = add i64 %key.row, %key.head
  %key.c = getelementptr {s}, ptr %key, i64 %key.at
  %query.c = getelementptr {s}, ptr %query, i64 %key.at
  %state.row = mul i64 %row, %state_stride
  %state.head = mul i64 %head, %head_size
  %state.at = add i64 %state.row, %state.head
  %value.at = mul i64 %decay.at, %value_size
  %first = mul i64 %piece.n, {piece}
  %end.full = add i64 %first, {piece}
  %end = call i64 @llvm.smin.i64(i64 %end.full, i64 %value_size)
  br i1 %is_any, label %piece, label %take
piece:
  %column = phi i64 [ %first, %begin ], {back}
  %left = sub i64 %end, %column
  %state.c.at = add i64 %state.at, %column
  %state.c = getelementptr {s}, ptr %state, i64 %state.c.at
  %value.c.at = add i64 %value.at, %column
  %value.c = getelementptr {s}, ptr %value, i64 %value.c.at
  %delta.c = getelementptr {s}, ptr %delta, i64 %value.c.at
  %out.c = getelementptr {s}, ptr %out, i64 %value.c.at
  br label %try0
{cases}
{end}:
  br label %take"""


_CONVOLVE_FIELDS = (
    "next", "num_items", "tokens", "size", "x_row", "x_token", "tail_row", "tail_token", "x", "tail",
    "weight", "y",
)  # fmt: skip
_CONVOLVE_JOB = ctypes.c_int64 * len(_CONVOLVE_FIELDS)


def _convolution(target: Target, taps: int) -> str:
    """y[c] = silu(sum of weight[c, i] * input[i, c]): fused multiply-adds, i in order."""
    s = target.scalar

    def body(p: str, index: str, lanes: int) -> list[str]:
        v, many = target.wide(lanes), target.wide(lanes * taps)
        lines = [
            f"  {p}.w.at = mul i64 {index}, {taps}",
            *load(target, f"{p}.w", "%weight", f"{p}.w.at", lanes * taps),
        ]
        for i in range(taps):
            lanes_of_tap = ", ".join(f"i32 {lane * taps + i}" for lane in range(lanes))
            lines += [
                *load(target, f"{p}.x{i}", f"%x{i}", index, lanes),
                f"  {p}.w{i} = shufflevector {many} {p}.w, {many} poison, <{lanes} x i32> <{lanes_of_tap}>",
                f"  {p}.a0 = fmul {v} {p}.x0, {p}.w0"
                if i == 0
                else fma(target, f"{p}.a{i}", (f"{p}.x{i}", f"{p}.w{i}", f"{p}.a{i - 1}"), lanes),
            ]
        total = f"{p}.a{taps - 1}"
        return [
            *lines,
            *sigmoid(target, total, f"{p}.g", lanes),
            f"  {p}.y = fmul {v} {total}, {p}.g",
            *store(target, f"{p}.y", "%y.n", index, lanes),
        ]

    inputs = "\n".join(_input(target, i, taps) for i in range(taps))
    token = f"""  %row = udiv i64 %item, %tokens
  %t = urem i64 %item, %tokens
  %x.at = mul i64 %row, %x_row
  %x.r = getelementptr {s}, ptr %x, i64 %x.at
  %tail.at = mul i64 %row, %tail_row
  %tail.r = getelementptr {s}, ptr %tail, i64 %tail.at
  %y.at = mul i64 %item, %size
  %y.n = getelementptr {s}, ptr %y, i64 %y.at
{inputs}
  br label %each
{each(target, body, before="begin", after="take")}"""
    return intrinsics(target) + worker(fields(_CONVOLVE_FIELDS, pointers="x tail weight y"), token)


def _input(target: Target, i: int, taps: int) -> str:
    """%x{i} = where the input of tap i lies: in x, or before it in the tail."""
    s = target.scalar
    return f"""  %t{i} = add i64 %t, {i - (taps - 1)}
  %u{i} = add i64 %t, {i}
  %is_tail{i} = icmp slt i64 %t{i}, 0
  %x{i}.at = mul i64 %t{i}, %x_token
  %x{i}.in = getelementptr {s}, ptr %x.r, i64 %x{i}.at
  %tail{i}.at = mul i64 %u{i}, %tail_token
  %tail{i}.in = getelementptr {s}, ptr %tail.r, i64 %tail{i}.at
  %x{i} = select i1 %is_tail{i}, ptr %tail{i}.in, ptr %x{i}.in"""
