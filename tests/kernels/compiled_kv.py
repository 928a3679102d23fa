"""Compiles the Gluon kernels for sm_90 where Triton does not interpret, and runs their PTX on a CPU.

python -m tests.kernels.compiled_kv compiles 128 wide 4 2   # head, columns, warps, level
python -m tests.kernels.compiled_kv agrees 64               # all ways to cut the work, on a small case
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from blockdraft.kernels.kernels import REFERENCE
from blockdraft.kernels.kv_codec import rotate_back
from blockdraft.kernels.kv_positions import PositionRule
from blockdraft.kernels.triton import kv_mma, kv_segments, kv_wide
from blockdraft.kernels.triton.attention import LOG2_E
from tests.kernels import compressed_case, ptx_kernel

KINDS = {
    "*bf16": "q exact_keys exact_values",
    "*u8": "keys values",
    "*fp16": "key_scale value_scale",
    "*fp32": "part part_top part_total",
    "*i64": "page_table exact_page_table rows starts offsets",
    "fp32": "scale",
    "i32": "cold_window num_rows tiles_per_row table_stride exact_table_stride num_units q_stride "
    "q_head_stride exact_stride key_stride value_stride scale_stride",
}
MAX_SEGMENTS = 5  # few, so that a block may straddle a border of lengths


def compiled(config, dim, *, groups=1, shared=4):
    """Return the kernel of `config`, compiled for ragged rows in pages of 16 tokens."""
    signature = {name: kind for kind, names in KINDS.items() for name in names.split()}
    constants = {
        "TOKENS": config.tokens, "SHARED": shared, "HEADS": groups * shared, "DIM": dim,
        "COLUMNS": config.columns, "PAGE_SIZE": 16, "LEVEL": config.level, "IS_EVEN": False,
        "IS_CAUSAL": True, "ROW_BLOCK": 256, "WARPS": config.warps, "SPLITS": config.warps > 1, "PDL": True,
    }  # fmt: skip
    kernel = kv_wide.attend_wide_kernel if config.is_wide else kv_mma._attend_kernel
    names = kernel.arg_names
    strides = [name for name in signature if name.endswith("_stride") and "table" not in name]
    source = GluonASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items() if name in names},
        {(names.index(name),): [["tt.divisibility", 16]] for name in strides},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config.warps})


def check_compiles(dim, columns, warps, level):
    is_wide = columns == "wide"
    columns = kv_wide.WIDE_ROWS if is_wide else int(columns)
    made = compiled(kv_mma.Config(columns // 4, columns, warps, level, 1, is_wide), dim)
    assert ("wgmma.mma" in made.asm["ptx"]) == is_wide
    assert ("mma.sync.aligned.m16n8k16" in made.asm["ptx"]) != is_wide


def folded(whole, acc, scale):
    """`attention.fold` in the machine's arithmetic."""

    def fma(a, b, c):
        return (a.double() * b.double() + c.double()).float()

    top = torch.maximum(whole[1], acc[1])
    base = torch.where(top == -math.inf, 0.0, top)
    before, after = (torch.exp2(((one - base) * scale).double()).float() for one in (whole[1], acc[1]))
    sums = fma(acc[0], after[:, None], whole[0] * before[:, None])
    return sums, top, fma(acc[2], after, whole[2] * before)


def length_of(hi):
    """`attention.segment_length`."""
    multiple = (hi - 1) // (MAX_SEGMENTS * kv_segments.SEGMENT) + 1
    unit = 1 << max(0, multiple.bit_length() - 3)
    return -(-multiple // unit) * unit * kv_segments.SEGMENT


def merged(parts, hi, level, scale):
    """What the merge makes of a token's units [H, U, ..]."""
    heads, _, dim = parts[0].shape
    nothing = torch.zeros(heads, dim), torch.full((heads,), -math.inf), torch.zeros(heads)
    length = (length_of(hi), length_of(hi) * kv_segments.RUN, hi)[level]
    units = [tuple(part[:, unit] for part in parts) for unit in range(-(-hi // length))]
    whole = nothing
    for begin in range(0, len(units), kv_segments.RUN if level == 0 else 1):
        run = units[begin]
        if level == 0:
            run = nothing
            for unit in units[begin : begin + kv_segments.RUN]:
                run = folded(run, unit, scale)
        whole = folded(whole, run, scale) if level < 2 else run
    out = whole[0] / whole[2][:, None]
    d = torch.arange(dim)
    half = d % (dim // 2)
    return out[:, d - half + half % (dim // 16) * 8 + half // (dim // 16)]


def attend(case, config, made, *, is_late=False):
    """Attend with the compiled kernel; merge as the second kernel does."""
    q, pages, blocks = case.q, case.pages, case.blocks
    num_tokens, heads, dim = q.shape
    units = (MAX_SEGMENTS, -(-MAX_SEGMENTS // kv_segments.RUN), 1)[config.level]
    shape = (num_tokens, heads, units)
    parts = [torch.full(size, math.nan) for size in ((*shape, dim), shape, shape)]
    memory = ptx_kernel.Memory()
    scale = np.float32(case.mask.scale * LOG2_E)
    tensors = [
        q, pages.exact_keys, pages.exact_values, *pages.keys, *pages.values, *parts,
        blocks.table, blocks.exact_table, blocks.rows, blocks.starts, blocks.offsets,
    ]  # fmt: skip
    numbers = [
        scale, pages.rule.window, len(blocks.counts), 1, blocks.table.stride(0),
        blocks.exact_table.stride(0), units, *q.stride()[:2], pages.exact_keys.stride(1),
        pages.keys.codes.stride(1), pages.values.codes.stride(1), pages.keys.scale.stride(1),
    ]  # fmt: skip
    kernel = ptx_kernel.Kernel(made.asm["ptx"], config.warps, made.metadata.shared, is_late)
    num_tiles = num_tokens // config.tokens + len(blocks.counts)
    grid = num_tiles, pages.exact_keys.shape[1], min(config.parts, units)
    kernel.run(memory, grid, [*map(memory.place, tensors), *numbers])
    out, ends = torch.empty(num_tokens, heads, dim), []
    for start, count in zip(blocks.starts.tolist(), blocks.counts, strict=True):
        ends += range(start + 1, start + count + 1)
    for number, hi in enumerate(ends):
        out[number] = merged([part[number] for part in parts], hi, config.level, torch.tensor(scale))
    return rotate_back(out)


def check_agrees(dim):
    """Hold the wide kernel, at all levels, to the bits of a single warp and to the reference."""
    for module in (kv_segments, kv_mma, kv_wide):
        module._MAX_SEGMENTS = gl.constexpr(MAX_SEGMENTS)
    case = compressed_case.make(
        form="tq4", dtype=torch.bfloat16, dim=dim, heads=4, groups=1, lengths=(324, 40, 230),
        counts=(9, 3, 4), rule=PositionRule(window=16),
    )  # fmt: skip
    REFERENCE.compress(case.pages, case.tiles)
    exact = [x.float() for x in (case.pages.exact_keys, case.pages.exact_values)]
    wide = case.pages._replace(exact_keys=exact[0], exact_values=exact[1])
    expected = REFERENCE.attend_compressed(case.q.float(), wide, case.blocks, case.mask, None)
    narrow = kv_mma.Config(4, 16, 1, 1, 1)
    out = attend(case, narrow, compiled(narrow, dim))
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    for level in (0, 1, 2):
        config = kv_mma.Config(16, 64, 4, level, MAX_SEGMENTS, is_wide=True)
        made = compiled(config, dim)
        for is_late in (False, True):
            assert torch.equal(attend(case, config, made, is_late=is_late), out), (level, is_late)
    split = replace(narrow, tokens=16, columns=64, warps=4)
    assert torch.equal(attend(case, split, compiled(split, dim)), out)


if __name__ == "__main__":
    if sys.argv[1] == "compiles":
        dim, columns, warps, level = sys.argv[2:]
        check_compiles(int(dim), columns, int(warps), int(level))
    else:
        check_agrees(int(sys.argv[2]))
