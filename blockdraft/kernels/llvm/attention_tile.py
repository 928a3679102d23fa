"""The steps of paged attention over one tile of queries: scores of a chunk of keys, softmax, weighed values.

Each is the text of an LLVM function; attention.py, which has the contract, calls them chunk by chunk.
"""

from __future__ import annotations

import math

import torch

from blockdraft.kernels.llvm.jit import Target, exp, fma, load, load_spread, repeat, spread, store

CHUNK = 256  # keys; a multiple of SUM_LANES, and part of a result's bits
SUM_LANES = 16  # likewise
_KEYS = {1: 8, 2: 8, 3: 4, 4: 4}  # keys scored together, by tile: what registers hold
_COLUMNS = {1: 16, 2: 8, 3: 4, 4: 4}  # vectors of `out` summed together, by tile
_PREFETCH_LEVEL = 2  # llvm.prefetch's locality: into the L2


def split(target: Target, dim: int, tile: int) -> list[tuple[int, int]]:
    """`out`'s vectors in (first, size) pieces that fit the registers."""
    pieces, first, total = [], 0, dim // target.lanes
    while first < total:
        size = _COLUMNS[tile]
        while size > total - first:
            size //= 2
        pieces.append((first, size))
        first += size
    return pieces


def scores(target: Target, dim: int, tile: int) -> str:
    """s[t][key] = scale * dot(q[t], k[key]) for keys [from, to) of a chunk, rounded out to whole groups."""
    s, v, n, keys = target.scalar, target.vector, target.lanes, _KEYS[tile]
    steps = next(u for u in (4, 2, 1) if dim // n % u == 0)
    cells = [(j, t) for t in range(tile) for j in range(keys)]
    lines = [
        f"define internal void @scores_{tile}(ptr %qs, ptr %s, ptr %slots, ptr %keys, ptr %values, "
        f"{s} %scale, i64 %from, i64 %to) {{",
        "entry:",
        *(f"  %q{t}.p = getelementptr ptr, ptr %qs, i64 {t}" for t in range(tile)),
        *(f"  %q{t} = load ptr, ptr %q{t}.p" for t in range(tile)),
        *spread(target, "%scale", "%scale.v", n),
        f"  %first = and i64 %from, -{keys}",
        "  %last = sub i64 %to, 1",
        "  %any = icmp slt i64 %from, %to",
        "  br i1 %any, label %group, label %done",
        "group:",
        "  %g = phi i64 [ %first, %entry ], [ %g.next, %store ]",
    ]  # fmt: skip
    for j in range(keys):
        lines += [
            f"  %i{j} = add i64 %g, {j}",
            f"  %a{j} = call i64 @llvm.smax.i64(i64 %i{j}, i64 %from)",
            f"  %b{j} = call i64 @llvm.smin.i64(i64 %a{j}, i64 %last)",
            f"  %slot{j}.p = getelementptr i64, ptr %slots, i64 %b{j}",
            f"  %slot{j} = load i64, ptr %slot{j}.p",
            f"  %at{j} = mul i64 %slot{j}, {dim}",
            f"  %k{j} = getelementptr {s}, ptr %keys, i64 %at{j}",
            *(_prefetch(target, dim, j) if len(split(target, dim, tile)) > 1 else []),
        ]
    lines += [
        "  br label %dot",
        "dot:",
        "  %d = phi i64 [ 0, %group ], [ %d.next, %dot ]",
        *(
            f"  %x{j}.{t}.0 = phi {v} [ zeroinitializer, %group ], [ %x{j}.{t}.{steps}, %dot ]"
            for j, t in cells
        ),
    ]
    for u in range(steps):
        lines.append(f"  %d{u} = add i64 %d, {u * n}")
        for name in (*(f"k{j}" for j in range(keys)), *(f"q{t}" for t in range(tile))):
            lines += load(target, f"%{name}.v{u}", f"%{name}", f"%d{u}", n)
        lines += [
            fma(target, f"%x{j}.{t}.{u + 1}", (f"%k{j}.v{u}", f"%q{t}.v{u}", f"%x{j}.{t}.{u}"), n)
            for j, t in cells
        ]
    lines += [*repeat("%d", steps * n, dim, loop="dot", after="store"), "store:"]
    for t in range(tile):
        lines += _add_pairs(target, [f"%x{j}.{t}.{steps}" for j in range(keys)], t)
    lines += [*repeat("%g", keys, "%to", loop="group", after="done"), "done:", "  ret void", "}"]
    return "\n".join(lines)


def _prefetch(target: Target, dim: int, j: int) -> list[str]:
    """Ask for the key's value, which `weigh` reads in pieces: too short for the hardware's own prefetcher.

    156 -> 112 us for one token over 512 keys, 9 heads, 3 key heads, float32 (one Neoverse-N1, 2026-11).
    """
    s, line = target.scalar, 64 // target.element_bytes
    lines = [f"  %v{j} = getelementptr {s}, ptr %values, i64 %at{j}"]
    for d in range(0, dim, line):
        lines += [
            f"  %v{j}.{d} = getelementptr {s}, ptr %v{j}, i64 {d}",
            f"  call void @llvm.prefetch.p0(ptr %v{j}.{d}, i32 0, i32 {_PREFETCH_LEVEL}, i32 1)",
        ]
    return lines


def _add_pairs(target: Target, names: list[str], t: int) -> list[str]:
    """Neighbouring lanes are added until each dot product is one lane; then they are scaled and stored."""
    v, n = target.vector, target.lanes
    even = ", ".join(f"i32 {i}" for i in range(0, 2 * n, 2))
    odd = ", ".join(f"i32 {i}" for i in range(1, 2 * n, 2))
    lines = []
    for level in range(n.bit_length() - 1):
        pairs = list(zip(names[::2], names[1::2], strict=True))
        names = []
        for index, (one, two) in enumerate(pairs):
            base = f"%p{t}.{level}.{index}"
            lines += [
                f"  {base}.e = shufflevector {v} {one}, {v} {two}, <{n} x i32> <{even}>",
                f"  {base}.o = shufflevector {v} {one}, {v} {two}, <{n} x i32> <{odd}>",
                f"  {base} = fadd {v} {base}.e, {base}.o",
            ]
            names.append(base)
    for index, name in enumerate(names):
        lines += [
            f"  %r{t}.{index} = fmul {v} {name}, %scale.v",
            f"  %r{t}.{index}.i = add i64 %g, {t * CHUNK + index * n}",
            *store(target, f"%r{t}.{index}", "%s", f"%r{t}.{index}.i", n),
        ]
    return lines


def _hide_ends(target: Target) -> list[str]:
    """What lies in the first and last group, but outside [from, to), weighs exp(-inf) = 0."""
    s, minus_infinity = target.scalar, target.number(-math.inf)
    return [
        "lead:",
        "  %a = phi i64 [ %first, %begin ], [ %a.next, %lead.set ]",
        "  %is_lead = icmp slt i64 %a, %from",
        "  br i1 %is_lead, label %lead.set, label %tail",
        "lead.set:",
        f"  %a.p = getelementptr {s}, ptr %s, i64 %a",
        f"  store {s} {minus_infinity}, ptr %a.p",
        "  %a.next = add i64 %a, 1",
        "  br label %lead",
        "tail:",
        "  %b = phi i64 [ %to, %lead ], [ %b.next, %tail.set ]",
        "  %is_tail = icmp slt i64 %b, %last",
        "  br i1 %is_tail, label %tail.set, label %find",
        "tail.set:",
        f"  %b.p = getelementptr {s}, ptr %s, i64 %b",
        f"  store {s} {minus_infinity}, ptr %b.p",
        "  %b.next = add i64 %b, 1",
        "  br label %tail",
    ]


def _rescale(target: Target, dim: int) -> list[str]:
    """Where the max grew from %old to %new: sum and out so far are multiplied by exp(old - new)."""
    s, v, n, w, wide = target.scalar, target.vector, target.lanes, SUM_LANES, target.wide(SUM_LANES)
    return [
        "rescale:",
        f"  %fall = fsub {s} %old, %new",
        *spread(target, "%fall", "%fall.v", n),
        *exp(target, "%fall.v", "%factor", n),
        f"  %factor.w = shufflevector {v} %factor, {v} poison, <{w} x i32> zeroinitializer",
        f"  %sum.old = load {wide}, ptr %sum.p, align {target.element_bytes}",
        f"  %sum.less = fmul {wide} %sum.old, %factor.w",
        f"  store {wide} %sum.less, ptr %sum.p, align {target.element_bytes}",
        "  br label %column",
        "column:",
        "  %d = phi i64 [ 0, %rescale ], [ %d.next, %column ]",
        *load(target, "%o", "%out", "%d", n),
        f"  %o.less = fmul {v} %o, %factor",
        f"  store {v} %o.less, ptr %o.p, align {target.element_bytes}",
        *repeat("%d", n, dim, loop="column", after="weigh"),
    ]


def softmax(target: Target, dim: int) -> str:
    """Scores [from, to) of one query become weights; its max, sum and out so far follow."""
    s, f, w, wide = target.scalar, target.suffix, SUM_LANES, target.wide(SUM_LANES)
    least = target.splat(torch.finfo(target.dtype).min, w)
    lines = [
        "define internal void @softmax(ptr %out, ptr %max.p, ptr %sum.p, ptr %s, i64 %from, i64 %to) {",
        "entry:",
        "  %any = icmp slt i64 %from, %to",
        "  br i1 %any, label %begin, label %done",
        "begin:",
        f"  %first = and i64 %from, -{w}",
        f"  %to.up = add i64 %to, {w - 1}",
        f"  %last = and i64 %to.up, -{w}",
        f"  %old = load {s}, ptr %max.p",
        "  br label %lead",
        *_hide_ends(target),
        "find:",
        "  %g = phi i64 [ %first, %tail ], [ %g.next, %find ]",
        f"  %best = phi {wide} [ {least}, %tail ], [ %best.next, %find ]",
        *load(target, "%x", "%s", "%g", w),
        f"  %best.next = call {wide} @llvm.maxnum.v{w}{f}({wide} %best, {wide} %x)",
        *repeat("%g", w, "%to", loop="find", after="found"),
        "found:",
        f"  %chunk.max = call {s} @llvm.vector.reduce.fmax.v{w}{f}({wide} %best.next)",
        f"  %new = call {s} @llvm.maxnum.{f}({s} %old, {s} %chunk.max)",
        f"  store {s} %new, ptr %max.p",
        *spread(target, "%new", "%new.v", w),
        f"  %grew = fcmp ogt {s} %new, %old",
        "  br i1 %grew, label %rescale, label %weigh",
        *_rescale(target, dim),
        "weigh:",
        f"  %sum.0 = load {wide}, ptr %sum.p, align {target.element_bytes}",
        "  br label %each",
        "each:",
        "  %h = phi i64 [ %first, %weigh ], [ %h.next, %each ]",
        f"  %sum = phi {wide} [ %sum.0, %weigh ], [ %sum.next, %each ]",
        *load(target, "%y", "%s", "%h", w),
        f"  %below = fsub {wide} %y, %new.v",
        *exp(target, "%below", "%e", w),
        f"  store {wide} %e, ptr %y.p, align {target.element_bytes}",
        f"  %sum.next = fadd {wide} %sum, %e",
        *repeat("%h", w, "%to", loop="each", after="end"),
        "end:",
        f"  store {wide} %sum.next, ptr %sum.p, align {target.element_bytes}",
        "  br label %done",
        "done:",
        "  ret void",
        "}",
    ]  # fmt: skip
    return "\n".join(lines)


def weigh(target: Target, dim: int, tile: int, columns: int) -> str:
    """out[t][d] += s[t][key] * v[key][d] for keys [from, to) in order, `columns` vectors of d."""
    s, v, n = target.scalar, target.vector, target.lanes
    cells = [(t, c) for t in range(tile) for c in range(columns)]
    lines = [
        f"define internal void @weigh_{tile}x{columns}(ptr %outs, ptr %s, ptr %slots, ptr %values, "
        "i64 %first, i64 %from, i64 %to) {",
        "entry:",
        "  %any = icmp slt i64 %from, %to",
        "  br i1 %any, label %begin, label %done",
        "begin:",
        f"  %values.d = getelementptr {s}, ptr %values, i64 %first",
    ]  # fmt: skip
    for t in range(tile):
        lines += [
            f"  %o{t}.pp = getelementptr ptr, ptr %outs, i64 {t}",
            f"  %o{t}.base = load ptr, ptr %o{t}.pp",
            f"  %o{t} = getelementptr {s}, ptr %o{t}.base, i64 %first",
        ]
    for t, c in cells:
        lines += load(target, f"%o{t}.{c}", f"%o{t}", str(c * n), n)
    lines += [
        "  br label %key",
        "key:",
        "  %i = phi i64 [ %from, %begin ], [ %i.next, %key ]",
        *(f"  %x{t}.{c} = phi {v} [ %o{t}.{c}, %begin ], [ %y{t}.{c}, %key ]" for t, c in cells),
        "  %slot.p = getelementptr i64, ptr %slots, i64 %i",
        "  %slot = load i64, ptr %slot.p",
        f"  %at = mul i64 %slot, {dim}",
        f"  %v = getelementptr {s}, ptr %values.d, i64 %at",
    ]
    for c in range(columns):
        lines += load(target, f"%v{c}", "%v", str(c * n), n)
    for t in range(tile):
        lines += [
            f"  %w{t}.i = add i64 %i, {t * CHUNK}",
            *load_spread(target, f"%w{t}", "%s", f"%w{t}.i", n),
        ]
    lines += [
        *(fma(target, f"%y{t}.{c}", (f"%v{c}", f"%w{t}", f"%x{t}.{c}"), n) for t, c in cells),
        *repeat("%i", 1, "%to", loop="key", after="store"),
        "store:",
        *(f"  store {v} %y{t}.{c}, ptr %o{t}.{c}.p, align {target.element_bytes}" for t, c in cells),
        "  br label %done",
        "done:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)
