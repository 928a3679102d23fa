"""Paged attention on a CPU: every query over its own range of keys, read where they lie.

The operations behind one output, the same wherever the query stands. Keys are counted from the sequence's
first; a query sees [lo, hi), cut at multiples of CHUNK. Per chunk, in order:

  score(key) = scale * dot(q, k): lane j sums d = j, j + lanes, … by fused multiply-add, then pairs are added
  max        = the largest score so far; where it grew, sum and out are multiplied by exp(old - new)
  weight     = exp(score - max), 0 outside [lo, hi)
  sum        : lane = key mod SUM_LANES
  out[d]     : one fused multiply-add per key, in order

and last out / sum, the lanes of `sum` halved. A sink is where max and sum begin: its score, and exp(0) = 1 in
the first lane. So page size, other rows, other queries of the row, threads and tiles do not enter. A key
outside [lo, hi) of every query of a tile is never read; one that only a neighbour sees reaches neither max,
sum nor out.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch
from torch import Tensor

from blockdraft.kernels.llvm.attention_tile import CHUNK, SUM_LANES, scores, softmax, split, weigh
from blockdraft.kernels.llvm.jit import TARGETS, Jit, Target, fields, halve, spread, worker

MAX_VECTORS = 16  # query vectors (tokens x heads of one key head) that a thread takes at a time
MAX_TILE = 4  # query vectors that share one pass over a chunk of keys
_TILES = range(1, MAX_TILE + 1)
_SERIAL_OPS = 1 << 16  # multiply-adds below which waking a thread costs more than it saves


class PagedAttention:
    """The kernel for one dtype and head size, a multiple of 4."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        assert head_dim % 4 == 0
        self._dim = head_dim
        self._jit = Jit(_module(TARGETS[dtype], head_dim))

    def __call__(  # noqa: PLR0913
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        slots: Tensor,
        ranges: Tensor,
        units: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [N, H, D] over keys and values [G, S, D]; returns [N, H, D].

        `slots`: where each key of each row lies, rows after one another. `ranges` [2, N]: lo and hi.
        `units` [U, 4] from `divide`: the row's place in `slots`, its first token, first and last vector.
        `sinks` [H]: one more score per head, which has no value.
        """
        num_groups, num_slots, dim = keys.shape
        assert dim == self._dim
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert ranges.is_contiguous()
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
        out = q.new_empty(q.shape)
        num_heads = q.shape[1]
        if sinks is not None:
            assert sinks.shape == (num_heads,)
            sinks = sinks.to(q.dtype).contiguous()
        job = _JOB(
            0, units.shape[0] * num_groups, num_groups, num_heads // num_groups, num_heads * dim,
            q.stride(0), num_slots * dim, q.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(),
            slots.data_ptr(), ranges.data_ptr(), ranges.data_ptr() + 8 * q.shape[0], units.data_ptr(),
            0 if sinks is None else sinks.data_ptr(), _bits(scale),
        )  # fmt: skip
        is_small = slots.shape[0] * num_heads * dim < _SERIAL_OPS
        self._jit(job, is_small=is_small)
        return out


_FIELDS = (
    "next", "num_items", "num_groups", "shared", "out_stride", "q_stride", "head_stride", "q", "out", "keys",
    "values", "slots", "lo", "hi", "units", "sinks", "scale_bits",
)  # fmt: skip
_POINTERS = "q out keys values slots lo hi units sinks"
_JOB = ctypes.c_int64 * len(_FIELDS)


@functools.cache
def _bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])


def divide(counts: tuple[int, ...], ends: list[int], shared: int) -> Tensor:
    """The work [U, 4] of rows with `counts[r]` tokens and `ends[r]` keys, `shared` vectors per token."""
    units, place, token = [], 0, 0
    for count, end in zip(counts, ends, strict=True):
        total = count * shared
        pieces = max(1, -(-total // MAX_VECTORS))
        size = max(1, -(-total // pieces))
        size += -size % MAX_TILE if pieces > 1 else 0
        units += [(place, token, i, min(i + size, total)) for i in range(0, total, size)]
        place, token = place + end, token + count
    return torch.tensor(units, dtype=torch.int64).view(-1, 4)


def _module(target: Target, dim: int) -> str:
    s, f, wide = target.scalar, target.suffix, target.wide(SUM_LANES)
    declared = [
        "declare i64 @llvm.smax.i64(i64, i64)",
        "declare i64 @llvm.smin.i64(i64, i64)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        f"declare {s} @llvm.maxnum.{f}({s}, {s})",
        f"declare {s} @llvm.vector.reduce.fmax.v{SUM_LANES}{f}({wide})",
        f"declare {wide} @llvm.maxnum.v{SUM_LANES}{f}({wide}, {wide})",
        *(
            f"declare {target.wide(n)} @llvm.fma.v{n}{f}({', '.join([target.wide(n)] * 3)})"
            for n in (target.lanes, SUM_LANES)
        ),
    ]
    parts = ["\n".join(declared), softmax(target, dim)]
    columns = {(tile, size) for tile in _TILES for _, size in split(target, dim, tile)}
    parts += [weigh(target, dim, tile, size) for tile, size in sorted(columns)]
    for tile in _TILES:
        parts += [scores(target, dim, tile), _tile(target, dim, tile)]
    return "\n".join([*parts, _worker(target, dim)])


def _tile(target: Target, dim: int, tile: int) -> str:
    """One chunk for `tile` queries: keys that all of them see together, the others one query at a time."""
    s = target.scalar
    pointers = ("qs", "outs", "lo", "hi", "max", "sum", "s", "slots", "keys", "values")
    arguments = ", ".join(f"ptr %{name}" for name in pointers)
    lines = [
        f"define internal void @tile_{tile}({arguments}, {s} %scale, i64 %chunk) {{",
        "entry:",
        f"  %end = add i64 %chunk, {CHUNK}",
    ]
    for t in range(tile):
        lines += [
            f"  %lo{t}.p = getelementptr i64, ptr %lo, i64 {t}",
            f"  %lo{t} = load i64, ptr %lo{t}.p",
            f"  %hi{t}.p = getelementptr i64, ptr %hi, i64 {t}",
            f"  %hi{t} = load i64, ptr %hi{t}.p",
            f"  %a{t}.at = call i64 @llvm.smax.i64(i64 %lo{t}, i64 %chunk)",
            f"  %a{t} = sub i64 %a{t}.at, %chunk",
            f"  %b{t}.at = call i64 @llvm.smin.i64(i64 %hi{t}, i64 %end)",
            f"  %b{t} = sub i64 %b{t}.at, %chunk",
            f"  %s{t} = getelementptr {s}, ptr %s, i64 {t * CHUNK}",
            f"  %max{t} = getelementptr {s}, ptr %max, i64 {t}",
            f"  %sum{t} = getelementptr {target.wide(SUM_LANES)}, ptr %sum, i64 {t}",
            f"  %outs{t} = getelementptr ptr, ptr %outs, i64 {t}",
            f"  %out{t} = load ptr, ptr %outs{t}",
        ]
    # Some query sees keys [low, high), all of them see [in, out).
    bounds = (("low", "smin", "a"), ("high", "smax", "b"), ("in", "smax", "a"), ("out", "smin", "b"))
    for name, pick, of in bounds:
        lines.append(f"  %{name}.0 = add i64 %{of}0, 0")
        lines += [
            f"  %{name}.{t} = call i64 @llvm.{pick}.i64(i64 %{name}.{t - 1}, i64 %{of}{t})"
            for t in range(1, tile)
        ]
    last = tile - 1
    lines += [
        f"  call void @scores_{tile}(ptr %qs, ptr %s, ptr %slots, ptr %keys, ptr %values, {s} %scale, "
        f"i64 %low.{last}, i64 %high.{last})",
        *(
            f"  call void @softmax(ptr %out{t}, ptr %max{t}, ptr %sum{t}, ptr %s{t}, i64 %a{t}, i64 %b{t})"
            for t in range(tile)
        ),
        f"  %is_shared = icmp slt i64 %in.{last}, %out.{last}",
    ]
    for t in range(tile):
        lines.append(f"  %lead{t} = select i1 %is_shared, i64 %in.{last}, i64 %b{t}")
        lines += _weigh_calls(target, dim, 1, f"%outs{t}", f"%s{t}", f"%a{t}", f"%lead{t}")
    lines += _weigh_calls(target, dim, tile, "%outs", "%s", f"%in.{last}", f"%out.{last}")
    for t in range(tile):
        lines.append(f"  %tail{t} = select i1 %is_shared, i64 %out.{last}, i64 %b{t}")
        lines += _weigh_calls(target, dim, 1, f"%outs{t}", f"%s{t}", f"%tail{t}", f"%b{t}")
    return "\n".join([*lines, "  ret void", "}"])


def _weigh_calls(target: Target, dim: int, tile: int, outs: str, s: str, begin: str, end: str) -> list[str]:
    return [
        f"  call void @weigh_{tile}x{size}(ptr {outs}, ptr {s}, ptr %slots, ptr %values, "
        f"i64 {first * target.lanes}, i64 {begin}, i64 {end})"
        for first, size in split(target, dim, tile)
    ]


def _worker(target: Target, dim: int) -> str:
    wide = target.wide(SUM_LANES)
    names = ("qs", "outs", "lo", "hi", "max", "sum")
    kinds = ("ptr", "ptr", "i64", "i64", target.scalar, wide)
    offsets = "\n".join(
        f"  %{name}.t = getelementptr {kind}, ptr %u.{name}, i64 %t"
        for name, kind in zip(names, kinds, strict=True)
    )
    call = (
        ", ".join(f"ptr %{name}.t" for name in names)
        + f", ptr %u.s, ptr %slots.c, ptr %keys.g, ptr %values.g, {target.scalar} %scale, i64 %chunk"
    )
    scale = "fptrunc double %scale.d to float" if target.suffix == "f32" else "fadd double %scale.d, 0.0"
    state = "\n".join(
        f"  %u.{name} = alloca {kind}, i64 {MAX_VECTORS}" for name, kind in zip(names, kinds, strict=True)
    )
    before = f"""  %scale.d = bitcast i64 %scale_bits to double
  %scale = {scale}
  %has_sinks = icmp ne ptr %sinks, null
{state}
  %u.s = alloca {target.scalar}, i64 {MAX_TILE * CHUNK}"""
    total = halve(target, "%sum.v", "%total", SUM_LANES) + spread(target, "%total", "%total.v", target.lanes)
    body = _ITEM.format(
        s=target.scalar, v=target.vector, wide=wide, lanes=target.lanes, dim=dim, chunk=CHUNK,
        max_tile=MAX_TILE, align=target.element_bytes, least=target.number(torch.finfo(target.dtype).min),
        one=target.number(1.0), offsets=offsets, cases=" ".join(f"i64 {n}, label %case{n}" for n in _TILES),
        calls="\n".join(f"case{n}:\n  call void @tile_{n}({call})\n  br label %tile.end" for n in _TILES),
        total="\n".join(total),
    )  # fmt: skip
    return worker(fields(_FIELDS, pointers=_POINTERS), body, before=before)


# Every thread takes items (unit, key head) until none is left: set up the unit's vectors, chunk by chunk
# all its tiles, then divide. The unit's state lives on the stack, `out` in its place.
_ITEM = """  %unit = udiv i64 %item, %num_groups
  %group = urem i64 %item, %num_groups
  %unit.p = getelementptr [4 x i64], ptr %units, i64 %unit
  %place = load i64, ptr %unit.p
  %token.p = getelementptr i64, ptr %unit.p, i64 1
  %token = load i64, ptr %token.p
  %first.p = getelementptr i64, ptr %unit.p, i64 2
  %first = load i64, ptr %first.p
  %last.p = getelementptr i64, ptr %unit.p, i64 3
  %last = load i64, ptr %last.p
  %count = sub i64 %last, %first
  %head.at = mul i64 %group, %head_stride
  %keys.g = getelementptr {s}, ptr %keys, i64 %head.at
  %values.g = getelementptr {s}, ptr %values, i64 %head.at
  %slots.r = getelementptr i64, ptr %slots, i64 %place
  %head.0 = mul i64 %group, %shared
  br label %vector
vector:
  %i = phi i64 [ 0, %begin ], [ %i.next, %vector.end ]
  %low = phi i64 [ 9223372036854775807, %begin ], [ %low.next, %vector.end ]
  %high = phi i64 [ 0, %begin ], [ %high.next, %vector.end ]
  %at = add i64 %first, %i
  %row.token = udiv i64 %at, %shared
  %n = add i64 %token, %row.token
  %head.in = urem i64 %at, %shared
  %head = add i64 %head.0, %head.in
  %head.d = mul i64 %head, {dim}
  %q.n = mul i64 %n, %q_stride
  %q.at = add i64 %q.n, %head.d
  %q.i = getelementptr {s}, ptr %q, i64 %q.at
  %out.n = mul i64 %n, %out_stride
  %out.at = add i64 %out.n, %head.d
  %out.i = getelementptr {s}, ptr %out, i64 %out.at
  %lo.n = getelementptr i64, ptr %lo, i64 %n
  %lo.i = load i64, ptr %lo.n
  %hi.n = getelementptr i64, ptr %hi, i64 %n
  %hi.i = load i64, ptr %hi.n
  %qs.i = getelementptr ptr, ptr %u.qs, i64 %i
  store ptr %q.i, ptr %qs.i
  %outs.i = getelementptr ptr, ptr %u.outs, i64 %i
  store ptr %out.i, ptr %outs.i
  %u.lo.i = getelementptr i64, ptr %u.lo, i64 %i
  store i64 %lo.i, ptr %u.lo.i
  %u.hi.i = getelementptr i64, ptr %u.hi, i64 %i
  store i64 %hi.i, ptr %u.hi.i
  %max.i = getelementptr {s}, ptr %u.max, i64 %i
  store {s} {least}, ptr %max.i
  %sum.i = getelementptr {wide}, ptr %u.sum, i64 %i
  store {wide} zeroinitializer, ptr %sum.i
  %low.next = call i64 @llvm.smin.i64(i64 %low, i64 %lo.i)
  %high.next = call i64 @llvm.smax.i64(i64 %high, i64 %hi.i)
  br i1 %has_sinks, label %sink, label %clear
sink:
  %sink.p = getelementptr {s}, ptr %sinks, i64 %head
  %sink.h = load {s}, ptr %sink.p
  store {s} %sink.h, ptr %max.i
  %is_nan = fcmp uno {s} %sink.h, %sink.h
  %sink.sum = select i1 %is_nan, {s} %sink.h, {s} {one}
  store {s} %sink.sum, ptr %sum.i
  br label %clear
clear:
  %z = phi i64 [ 0, %vector ], [ 0, %sink ], [ %z.next, %clear ]
  %z.p = getelementptr {s}, ptr %out.i, i64 %z
  store {v} zeroinitializer, ptr %z.p, align {align}
  %z.next = add i64 %z, {lanes}
  %z.more = icmp slt i64 %z.next, {dim}
  br i1 %z.more, label %clear, label %vector.end
vector.end:
  %i.next = add i64 %i, 1
  %i.more = icmp slt i64 %i.next, %count
  br i1 %i.more, label %vector, label %chunks
chunks:
  %chunk.0 = and i64 %low.next, -{chunk}
  br label %chunk.head
chunk.head:
  %chunk = phi i64 [ %chunk.0, %chunks ], [ %chunk.next, %chunk.end ]
  %is_chunk = icmp slt i64 %chunk, %high.next
  br i1 %is_chunk, label %chunk.begin, label %divide
chunk.begin:
  %slots.c = getelementptr i64, ptr %slots.r, i64 %chunk
  br label %tile
tile:
  %t = phi i64 [ 0, %chunk.begin ], [ %t.next, %tile.end ]
  %t.left = sub i64 %count, %t
  %t.count = call i64 @llvm.smin.i64(i64 %t.left, i64 {max_tile})
{offsets}
  switch i64 %t.count, label %tile.end [ {cases} ]
{calls}
tile.end:
  %t.next = add i64 %t, {max_tile}
  %t.more = icmp slt i64 %t.next, %count
  br i1 %t.more, label %tile, label %chunk.end
chunk.end:
  %chunk.next = add i64 %chunk, {chunk}
  br label %chunk.head
divide:
  %j = phi i64 [ 0, %chunk.head ], [ %j.next, %divide.end ]
  %sum.j = getelementptr {wide}, ptr %u.sum, i64 %j
  %sum.v = load {wide}, ptr %sum.j
{total}
  %outs.j = getelementptr ptr, ptr %u.outs, i64 %j
  %out.j = load ptr, ptr %outs.j
  br label %quotient
quotient:
  %d = phi i64 [ 0, %divide ], [ %d.next, %quotient ]
  %o.p = getelementptr {s}, ptr %out.j, i64 %d
  %o = load {v}, ptr %o.p, align {align}
  %o.end = fdiv {v} %o, %total.v
  store {v} %o.end, ptr %o.p, align {align}
  %d.next = add i64 %d, {lanes}
  %d.more = icmp slt i64 %d.next, {dim}
  br i1 %d.more, label %quotient, label %divide.end
divide.end:
  %j.next = add i64 %j, 1
  %j.more = icmp slt i64 %j.next, %count
  br i1 %j.more, label %divide, label %take"""
