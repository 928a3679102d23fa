"""The segments of 4-bit attention, and the row of a tile: what both Gluon kernels compute alike."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blockdraft.kernels.kv_formats import TILE

# The result's bits depend on these three numbers.
SEGMENT = 64  # keys of the shortest segments
MAX_SEGMENTS = 128  # enough for one row to fill the device
RUN = 4  # segments

_N = gl.constexpr(TILE)
_SEGMENT = gl.constexpr(SEGMENT)
_MAX_SEGMENTS = gl.constexpr(MAX_SEGMENTS)


@gluon.jit
def row_of_tile(offsets, num_rows, tile, TOKENS: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return the row of a tile, like `attention.row_of`."""
    row = -1
    for begin in range(0, num_rows, ROWS):
        r = begin + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32 // WARPS], [32], [WARPS], [0]))
        first = gl.load(offsets + r, mask=r < num_rows, other=0) // TOKENS + r
        row += gl.sum(((first <= tile) & (r < num_rows)).to(gl.int32), 0)
    return row


@gluon.jit
def segment_chunks(hi):
    """Return `attention.segment_length` in chunks."""
    multiple = (hi - 1) // (_MAX_SEGMENTS * _SEGMENT) + 1
    bits = multiple.to(gl.float32).to(gl.int32, bitcast=True)
    bits = ((bits + 0x1FFFFF) >> 21) << 21
    return bits.to(gl.float32, bitcast=True).to(gl.int32) * (_SEGMENT // _N)
