"""`lay_out`, `settle` and `copy_slots` on a CUDA device; see `kernels/branches.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.branches import Branches, BranchPages, Copies, Kept, RowPages, Stores
from blockdraft.kernels.tree import Tree
from blockdraft.kernels.tree_size import pages_per_branch
from blockdraft.kernels.triton.launch import overlap, start_and_wait

_PAGES = 1024  # entries of a page table that one program writes
_SLOTS = 16  # slots that one program copies


@triton.jit(do_not_specialize=["first_page"])
def _lay_out(
    rows, length, page_table, token_ids, branches, columns, firsts, lengths, paths, out_rows, out_starts,
    out_begins, out_ids, out_positions, out_table, out_slots, out_sources, out_targets, first_page,
    table_stride, num_pages,
    NODES: tl.constexpr, BRANCHES: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr,
    PER_BRANCH: tl.constexpr, PAGE_SIZE: tl.constexpr, SHARED: tl.constexpr, PAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Lay out one branch; grid (branches of all rows, parts of a page table). SHARED pads the page size."""
    start_and_wait(PDL)
    branch = tl.program_id(0).to(tl.int64)
    r = branch // BRANCHES
    rank = branch % BRANCHES
    row = tl.load(rows + r)
    start = tl.load(length + row)
    page_table += row * table_stride
    begin_page = start // PAGE_SIZE
    own_first = first_page + (r * (BRANCHES - 1) - 1) * PER_BRANCH  # of the pages of the branch of rank 0
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    is_page = page < num_pages
    entry = tl.load(page_table + page, mask=is_page, other=0)
    place = page - begin_page
    is_own = (place >= 0) & (place < PER_BRANCH) & (rank > 0)
    entry = tl.where(is_own, own_first + rank * PER_BRANCH + place, entry)
    tl.store(out_table + branch * num_pages + page, entry, mask=is_page)
    if tl.program_id(1) > 0:
        return
    first = tl.load(firsts + branch)
    column = tl.arange(0, W)
    number = tl.load(paths + branch * WIDTH + column, mask=column < WIDTH, other=0)
    tl.store(out_ids + branch * WIDTH + column, tl.load(token_ids + number), mask=column < WIDTH)
    tl.store(out_rows + branch, row)
    tl.store(out_starts + branch, start)
    tl.store(out_begins + branch, start + first)
    token = r * NODES + tl.arange(0, NODES)
    column = tl.load(columns + token)
    is_ancestor = (tl.load(paths + branch * WIDTH + column) == token) & (column < first)
    holder = tl.where(is_ancestor, rank, tl.load(branches + token) - r * BRANCHES)
    position = start + column
    page = position // PAGE_SIZE
    entry = tl.load(page_table + page)
    entry = tl.where(holder > 0, own_first + holder * PER_BRANCH + page - begin_page, entry)
    tl.store(out_slots + token * BRANCHES + rank, entry * PAGE_SIZE + position % PAGE_SIZE)
    if rank == 0:
        tl.store(out_positions + token, position)
    if SHARED > 0:
        place = tl.arange(0, SHARED)
        is_in = place < PAGE_SIZE - 1
        is_copied = (place < start % PAGE_SIZE) & (rank > 0) & (tl.load(lengths + branch) > 1)
        source = tl.load(page_table + begin_page) * PAGE_SIZE + place
        target = (own_first + rank * PER_BRANCH) * PAGE_SIZE + place
        out = branch * (PAGE_SIZE - 1) + place
        tl.store(out_sources + out, tl.where(is_copied, source, 0), mask=is_in)
        tl.store(out_targets + out, tl.where(is_copied, target, 0), mask=is_in)


def lay_out(tree: Tree, rows: Tensor, length: Tensor, kinds: Sequence[RowPages], page_size: int) -> Branches:
    """Implement `reference_lay_out` for a power of 2 of nodes: one launch for each kind of pages."""
    size, num_branches, num_tokens = tree.size, len(tree.firsts), len(tree.token_ids)
    assert size.nodes == triton.next_power_of_2(size.nodes)
    assert all(kind.table.stride(1) == 1 for kind in kinds)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=rows.device)

    starts, begins, homes = (integers(num_branches) for _ in range(3))
    common = homes, starts, begins, integers(num_branches, size.width), integers(num_tokens)
    pages = []
    for kind in kinds:
        num_pages, num_shared = kind.table.shape[1], num_branches * (page_size - 1)
        table, slots = integers(num_branches, num_pages), integers(num_tokens, size.branches)
        copies = Copies(integers(num_shared), integers(num_shared))
        _lay_out[(num_branches, triton.cdiv(num_pages, _PAGES))](
            rows, length, kind.table, tree.token_ids, tree.branches, tree.columns, tree.firsts, tree.lengths,
            tree.paths, *common, table, slots, *copies, kind.first, kind.table.stride(0), num_pages,
            NODES=size.nodes, BRANCHES=size.branches, WIDTH=size.width,
            W=triton.next_power_of_2(size.width), PER_BRANCH=pages_per_branch(size.width, page_size),
            PAGE_SIZE=page_size, SHARED=triton.next_power_of_2(page_size) if page_size > 1 else 0,
            PAGES=_PAGES, num_warps=4, **overlap(rows.device),
        )  # fmt: skip
        pages.append(BranchPages(table, slots, copies))
    return Branches(*common, tuple(pages))


@triton.jit
def _copies_of(
    slots, table, r, numbers, position, is_kept, num_pages, out, out_sources, out_targets, is_in,
    BRANCHES: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Store the copies of a path to the pages of its row's first branch."""
    source = tl.load(slots + numbers * BRANCHES, mask=is_kept, other=0)
    page = tl.load(table + r * BRANCHES * num_pages + position // PAGE_SIZE, mask=is_kept, other=0)
    target = tl.where(is_kept, page * PAGE_SIZE + position % PAGE_SIZE, 0)
    tl.store(out_sources + out, source, mask=is_in)
    tl.store(out_targets + out, target, mask=is_in)


@triton.jit
def _settle(
    sampled, limits, token_ids, lengths, paths, following_ids, starts,
    out_committed, out_numbers, out_ids, out_sampled, out_chains, slots, table, num_pages,
    out_sources, out_targets, exact_slots, exact_table, num_exact_pages, exact_sources, exact_targets,
    BRANCHES: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Settle one row; P and W pad the number of branches and the width to powers of 2."""
    start_and_wait(PDL)
    r = tl.program_id(0).to(tl.int64)
    rank, column = tl.arange(0, P), tl.arange(0, W)
    is_branch, is_in = rank < BRANCHES, column < WIDTH
    path = paths + (r * BRANCHES + rank)[:, None] * WIDTH + column[None, :]
    is_there = is_branch[:, None] & is_in[None, :]
    number = tl.load(path, mask=is_there, other=0)
    ends = tl.load(lengths + r * BRANCHES + rank, mask=is_branch, other=1)
    is_followed = is_there & (column[None, :] + 1 < ends[:, None])
    following = tl.load(token_ids + tl.load(path + 1, mask=is_followed, other=0), mask=is_followed, other=-1)
    agrees = is_followed & (tl.load(sampled + number) == following)
    counts = tl.min(tl.where(agrees, W, column[None, :]), axis=1) + 1
    counts = tl.where(is_branch, counts, 0)
    best = tl.max(counts, axis=0)
    chosen = tl.min(tl.where(counts == best, rank, P), axis=0)
    committed = tl.minimum(best, tl.load(limits + r))
    numbers = tl.sum(tl.where((rank == chosen)[:, None], number, 0), axis=0)
    tl.store(out_committed + r, committed.to(tl.int64))
    width, alone = tl.load(lengths + r * BRANCHES), tl.sum(tl.where(rank == 0, counts, 0), axis=0)
    next_id = tl.load(following_ids + r)
    last = tl.load(sampled + tl.load(paths + r * BRANCHES * WIDTH + width - 1))
    deepest = tl.max(tl.where(is_branch & (counts == best), ends, 0), axis=0)
    tl.store(out_chains + 3 * r, width + (next_id >= 0))
    tl.store(out_chains + 3 * r + 1, alone.to(tl.int64) + ((alone == width) & (last == next_id)))
    tl.store(out_chains + 3 * r + 2, tl.minimum(deepest, best + 1).to(tl.int64))
    out = r * WIDTH + column
    tl.store(out_numbers + out, numbers, mask=is_in)
    tl.store(out_ids + out, tl.load(token_ids + numbers), mask=is_in)
    tl.store(out_sampled + out, tl.load(sampled + numbers), mask=is_in)
    position, is_kept = tl.load(starts + r * BRANCHES) + column, is_in & (column < committed)
    _copies_of(
        slots, table, r, numbers, position, is_kept, num_pages, out, out_sources, out_targets, is_in,
        BRANCHES, PAGE_SIZE,
    )  # fmt: skip
    if HAS_EXACT:
        _copies_of(
            exact_slots, exact_table, r, numbers, position, is_kept, num_exact_pages, out, exact_sources,
            exact_targets, is_in, BRANCHES, PAGE_SIZE,
        )  # fmt: skip


def settle(tree: Tree, branches: Branches, sampled: Tensor, limits: Tensor, page_size: int) -> Kept:
    """Implement `reference_settle` for one or two kinds of pages."""
    size, num_rows = tree.size, len(limits)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=sampled.device)

    numbers, token_ids, kept = (integers(num_rows, size.width) for _ in range(3))
    found = integers(num_rows), numbers, token_ids, kept, integers(num_rows, 3)
    copies = [Copies(*(integers(num_rows * size.width) for _ in range(2))) for _ in branches.pages]
    kinds = [
        (kind.slots, kind.table, kind.table.shape[1], *its)
        for kind, its in zip(branches.pages, copies, strict=True)
    ]
    _settle[(num_rows,)](
        sampled, limits, tree.token_ids, tree.lengths, tree.paths, tree.following, branches.starts,
        *found, *kinds[0], *kinds[-1],
        BRANCHES=size.branches, P=triton.next_power_of_2(size.branches), WIDTH=size.width,
        W=triton.next_power_of_2(size.width), PAGE_SIZE=page_size, HAS_EXACT=len(kinds) > 1, num_warps=1,
        **overlap(sampled.device),
    )  # fmt: skip
    return Kept(*found, tuple(copies))


@triton.jit(do_not_specialize=["count"])
def _copy_slots(
    keys, offsets, sources, targets, count, group_stride,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy SLOTS slots of one key/value head of a layer; grid (parts of all slots, heads, layers)."""
    start_and_wait(PDL)
    place = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    source = tl.load(sources + place, mask=place < count, other=0)
    target = tl.load(targets + place, mask=place < count, other=0)
    layer, group = tl.program_id(2), tl.program_id(1).to(tl.int64) * group_stride
    of_keys, of_values = tl.load(offsets + 2 * layer), tl.load(offsets + 2 * layer + 1)
    if DIM % 16 == 0:  # then all layers begin at multiples of it, as memory does
        of_keys, of_values = tl.multiple_of(of_keys, 16), tl.multiple_of(of_values, 16)
    dim = tl.arange(0, DIM_PAD)
    is_copied = (source != target)[:, None] & (dim < DIM)[None, :]
    at, to = source[:, None] * DIM + dim[None, :], target[:, None] * DIM + dim[None, :]
    k = tl.load(keys + of_keys + group + at, mask=is_copied)
    v = tl.load(keys + of_values + group + at, mask=is_copied)
    tl.store(keys + of_keys + group + to, k, mask=is_copied)
    tl.store(keys + of_values + group + to, v, mask=is_copied)


def copy_slots(stores: Stores, copies: Copies) -> None:
    """Implement `reference_copy_slots` in one launch."""
    first, count = stores.keys[0], len(copies.sources)
    num_groups, _, dim = first.shape
    if count == 0:
        return
    _copy_slots[(triton.cdiv(count, _SLOTS), num_groups, len(stores.keys))](
        first, stores.offsets, *copies, count, first.stride(0),
        DIM=dim, DIM_PAD=triton.next_power_of_2(dim), SLOTS=_SLOTS, num_warps=4, **overlap(first.device),
    )  # fmt: skip
