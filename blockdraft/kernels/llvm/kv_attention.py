"""Paged attention over compressed keys and values on a CPU; see `kernels/kv_compressed.py` for the contract.

The steps and their bits are as in attention.py. CHUNK equals kv_formats.TILE, so a query reads all keys of a
chunk exact, or all of them compressed. A chunk's compressed keys and values are decoded to the thread's own
memory, once for all vectors of a unit. If only the earlier queries of a unit read a chunk exact, they are
processed first, then those that read it compressed, so a vector's operations do not depend on the other
vectors. Only slots that a query reads are accessed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.cpu import has_permute
from blockdraft.kernels.kv_codec import KvFormat, signs
from blockdraft.kernels.kv_compressed import CompressedPages
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.llvm.attention import (
    attend,
    divided,
    find,
    is_small,
    mask_fields,
    places,
    prepare,
    whole_vectors,
)
from blockdraft.kernels.llvm.attention_tile import CHUNK, GROUP, MAX_TILE, MAX_VECTORS, State, room
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.kv_codec import decode, hadamard_head, num_bytes, sign_head
from blockdraft.kernels.llvm.language import (
    Bytes,
    Halves,
    Int,
    Longs,
    Real,
    Reals,
    Type,
    i64,
    largest,
    select,
    smallest,
)

assert CHUNK == TILE


class CompressedAttention:
    """The kernel for one dtype, head size (a multiple of 4) and KV format."""

    def __init__(
        self, dtype: torch.dtype, head_dim: int, form: KvFormat, *, permute: bool | None = None
    ) -> None:
        assert head_dim % 4 == 0
        self._dim, self._form = head_dim, form
        self._signs = signs(head_dim, torch.device("cpu")).to(dtype) if form.is_rotated else None
        self._jit = Jit(
            compressed_attention,
            real=REALS[dtype],
            dim=head_dim,
            form=form,
            permute=has_permute() if permute is None else permute,
        )

    def __call__(
        self, q: Tensor, pages: CompressedPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with q [N, H, D] over one layer's pages; return [N, H, D]."""
        num_groups, num_exact, dim = pages.exact_keys.shape[1:]
        exact_table, table = blocks.exact_table, blocks.table
        stores = (pages.exact_keys, pages.exact_values, *pages.keys, *pages.values)
        assert dim == self._dim
        assert pages.format == self._form
        assert exact_table is not None
        assert all(one.is_contiguous() and one.shape[0] == 1 for one in stores)
        assert pages.exact_keys.dtype == pages.exact_values.dtype == q.dtype
        q, sinks = whole_vectors(q, sinks)
        out, num_heads, where = q.new_empty(q.shape), q.shape[1], places(blocks, exact_table, table)
        units = blocks.units(num_heads, num_groups)
        self._jit(
            units.shape[0] * num_groups, num_groups, num_heads // num_groups, q.stride(0), num_exact,
            pages.keys.scale.shape[2], *mask_fields(mask), pages.rule.window, blocks.page_size,
            exact_table.shape[1], table.shape[1], *where, units, q, out, *stores, sinks, self._signs,
            is_small=is_small(blocks, num_heads * dim),
        )  # fmt: skip
        return out


@kernel
def compressed_attention(
    num_items: Int, num_groups: Int, shared: Int, q_stride: Int, num_exact: Int, num_slots: Int, scale: Real,
    is_causal: Int, window: Int, is_anchored: Int, exact_window: Int, page_size: Int, num_exact_pages: Int,
    num_pages: Int, exact_table: Longs, table: Longs, rows: Longs, starts: Longs,
    offsets: Longs, units: Longs, q: Reals, out: Reals, keys: Reals, values: Reals, key_codes: Bytes,
    key_scale: Halves, value_codes: Bytes, value_scale: Halves, sinks: Reals, signs: Reals,
    *, real: Type, dim: int, form: KvFormat, permute: bool,
) -> None:  # fmt: skip
    """Attend. An item is a unit's query vectors over one key head, as in `attention.paged_attention`."""
    state = room(q, real)
    ends = q.scratch(i64, MAX_VECTORS)  # for each vector, the end of the keys that it reads compressed
    near_keys, near_values = q.scratch(real, CHUNK * dim), q.scratch(real, CHUNK * dim)
    near = q.scratch(i64, CHUNK + GROUP)  # offsets of the chunk's keys in near_keys and near_values
    for key in range(CHUNK + GROUP):
        near[key] = key * dim
    for item in taken(num_items):
        unit, group = units + item // num_groups * 3, item % num_groups
        row, count = unit[0], unit[2] - unit[1]
        low, high = prepare(
            state, unit, group, num_groups, shared, q_stride, starts, offsets, is_causal, window, is_anchored,
            sinks, out, dim,
        )  # fmt: skip
        for i in range(count):
            position = starts[row] + (unit[1] + i) // shared
            ends[i] = largest((position - exact_window) & -TILE, 0)
        exact_pages, pages = exact_table + rows[row] * num_exact_pages, table + rows[row] * num_pages
        exact_head, head = group * num_exact * dim, group * num_slots
        begin = low & -CHUNK
        if low < high and (begin < TILE or begin >= ends[0]):
            find(exact_pages, page_size, state.key_at + (low & CHUNK), begin, low, high, dim)
        for chunk in range(begin, high, CHUNK):
            key_at = state.key_at + (chunk & CHUNK)
            following = key_at
            if chunk + CHUNK < high and chunk + CHUNK >= ends[0]:
                following = state.key_at + (CHUNK - (chunk & CHUNK))
                find(exact_pages, page_size, following, chunk + CHUNK, low, high, dim)
            num_exact_vectors = exact_vectors(ends, count, chunk)
            first = count * 0
            while first < count:
                is_exact, is_compressed = first < num_exact_vectors, first >= num_exact_vectors
                k, v, at, after = keys + exact_head, values + exact_head, key_at, following
                if is_compressed:
                    k, v, at, after = near_keys, near_values, near, near
                    if first == num_exact_vectors:
                        bring(
                            pages, page_size, chunk, state.lo[first], high,
                            key_codes + head * num_bytes(form.keys, dim), key_scale + head,
                            value_codes + head * num_bytes(form.values, dim), value_scale + head,
                            near_keys, near_values, dim, form, permute,
                        )  # fmt: skip
                size = smallest(select(is_exact, num_exact_vectors, count) - first, MAX_TILE)
                leads = is_exact and first == 0
                attend(state, first, size, chunk, at, after, q, out, k, v, scale, leads, dim)
                first = first + size
        divided(state, count, out, dim)
        if form.is_rotated:
            rotate_back(state, count, out, signs, dim)


@inlined
def exact_vectors(ends: Longs, count: Int, chunk: Int) -> Int:
    """Return how many vectors read the chunk exact; these come first, as `ends` never decrease."""
    found = chunk * 0
    for i in range(count):
        found = found + select(ends[i] <= chunk, 1, chunk * 0)
    return select(chunk < TILE, count, found)


@inlined
def bring(
    pages: Longs, page_size: Int, chunk: Int, low: Int, high: Int, key_codes: Bytes, key_scale: Halves,
    value_codes: Bytes, value_scale: Halves, near_keys: Reals, near_values: Reals, dim: int, form: KvFormat,
    permute: bool,
) -> None:  # fmt: skip
    """Decode the keys and values of the chunk in [low, high) to near_keys and near_values."""
    key, end = largest(low - chunk, 0), smallest(high - chunk, CHUNK)
    while key < end:
        inside = (chunk + key) % page_size
        first = pages[(chunk + key) // page_size] * page_size + inside - key
        until = smallest(key + page_size - inside, end)
        for one in range(key, until):
            slot = first + one
            decode(
                key_codes + slot * num_bytes(form.keys, dim), key_scale[slot], near_keys + one * dim, dim,
                form.keys, permute,
            )  # fmt: skip
            decode(
                value_codes + slot * num_bytes(form.values, dim), value_scale[slot], near_values + one * dim,
                dim, form.values, permute,
            )  # fmt: skip
        key = until


@inlined
def rotate_back(state: State, count: Int, out: Reals, signs: Reals, dim: int) -> None:
    """Undo the Hadamard rotation of the values in the outputs."""
    for i in range(count):
        hadamard_head(out + state.out[i], dim)
        sign_head(out + state.out[i], signs, dim)
