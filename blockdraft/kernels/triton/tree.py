"""`weigh` and `grow` on a CUDA device; see `kernels/tree.py`.

A tree grows one token after the other, so one program grows a row's whole tree, with all nodes in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels import tree
from blockdraft.kernels.candidates import PairScores
from blockdraft.kernels.sampling import SamplingBatch
from blockdraft.kernels.sampling_tables import Whole
from blockdraft.kernels.tree import Choices, Tree
from blockdraft.kernels.tree_size import NUM_CHOICES, TreeSize
from blockdraft.kernels.triton.candidates import (
    best_of_chunks,
    candidates_of,
    filtered,
    is_open,
    key_id,
    key_score,
    paired,
)
from blockdraft.kernels.triton.launch import overlap, start_and_wait
from blockdraft.kernels.triton.scores import (
    MIN_TEMPERATURE,
    NEVER,
    NUM_REAL,
    NUM_WHOLE,
    TEMPERATURE,
    noise_at,
)

_SEED = tl.constexpr(int(Whole.SEED))
_IS_FILTERED = tl.constexpr(int(Whole.IS_FILTERED))
_LEAST = tl.constexpr(tree.LEAST)


@triton.jit
def _weigh(
    keys, num_keys, recent, starts, rows, real, whole, predecessors, successors, mixture, successor_rows,
    RANK, C, J, top_k, out_ids, out_chances, out_places,
    K: tl.constexpr, KEYS: tl.constexpr, HAS_PAIRS: tl.constexpr, HAS_MIXTURE: tl.constexpr,
    SKIPS_FIRST: tl.constexpr, HAS_SUCCESSOR_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weigh the candidates of a column behind each candidate before; grid (columns of all rows,)."""
    start_and_wait(PDL)
    index = tl.program_id(0).to(tl.int64)
    r = index // C
    c = index % C
    row = tl.load(rows + r)
    place = tl.arange(0, K)
    is_one = place < top_k
    best_keys = best_of_chunks(keys, index, num_keys, top_k, K, KEYS)
    ids = tl.where(is_one, key_id(best_keys), 0x7FFFFFFF)
    tl.store(out_ids + index * K + place, tl.where(is_one, ids, 0).to(tl.int64))
    temperature = tl.load(real + row * NUM_REAL + TEMPERATURE)
    factor = tl.where(temperature >= MIN_TEMPERATURE, tl.div_rn(1.0, temperature), 1.0)
    unary = tl.where(is_one, key_score(best_keys), NEVER)
    if is_open(temperature, row, whole):
        unary = tl.div_rn(unary, factor)
    scores = tl.zeros([K, K], tl.float32) + unary[None, :]
    if HAS_PAIRS:
        scores += paired(
            keys, index, num_keys, ids, recent + r * J, c, predecessors, successors, mixture, successor_rows,
            RANK, top_k, K, KEYS, HAS_MIXTURE, SKIPS_FIRST, HAS_SUCCESSOR_ROWS,
        )  # fmt: skip
    if (temperature >= MIN_TEMPERATURE) & (tl.load(whole + row * NUM_WHOLE + _IS_FILTERED) != 0):
        scores = filtered(scores * factor, ids, top_k, row, real, whole, K)
        seed = tl.load(whole + row * NUM_WHOLE + _SEED)
        noise = noise_at(tl.where(is_one, ids, 0), seed, tl.load(starts + r) + 1 + c)
        scores = tl.div_rn(scores + noise[None, :], factor)
    scores = tl.where(is_one[None, :], scores, NEVER)
    best = tl.max(scores, axis=1)[:, None]
    total = tl.sum(tl.exp(scores - best), axis=1)[:, None]
    chances = scores - best - tl.log(total)
    chances = tl.where(chances >= _LEAST, chances, _LEAST)  # NaN, too
    chances = tl.where(is_one[None, :], chances, NEVER)
    rank = tl.zeros([K, K], tl.int32)
    for other in range(K):
        is_other = place == other
        value = tl.max(tl.where(is_other[None, :], chances, NEVER), axis=1)[:, None]
        its_id = tl.max(tl.where(is_other, ids, -1), axis=0)
        is_first = (its_id < ids) | ((its_id == ids) & (other < place))
        rank += ((value > chances) | ((value == chances) & is_first[None, :])).to(tl.int32)
    lines = K if HAS_PAIRS else 1
    at = (index * lines + place[:, None]) * K + rank
    is_line = (place < lines)[:, None]
    tl.store(out_chances + at, chances, mask=is_line)
    tl.store(out_places + at, tl.zeros([K, K], tl.int64) + place[None, :], mask=is_line)


def weigh(
    logits: Tensor, pairs: PairScores | None, starts: Tensor, anchor: Tensor, batch: SamplingBatch
) -> Choices:
    """Implement `reference_weigh` for logits of 16 or 32 bits whose last dimension is contiguous."""
    num_rows, num_columns, vocab_size = logits.shape
    top_k = min(NUM_CHOICES if pairs is None else pairs.top_k, vocab_size)
    size, anchor = max(16, triton.next_power_of_2(top_k)), anchor.contiguous()
    keys = candidates_of(logits, starts, anchor, batch, top_k, size)
    lines, lead = 1 if pairs is None else size, (num_rows, num_columns)
    ids = torch.empty(*lead, size, dtype=torch.int64, device=logits.device)
    places = torch.empty(*lead, lines, size, dtype=torch.int64, device=logits.device)
    chances = torch.empty(*lead, lines, size, dtype=torch.float32, device=logits.device)
    tables = (ids,) * 4  # not read
    if pairs is not None:
        mixture = ids if pairs.mixture is None else pairs.mixture.contiguous()
        rows = ids if pairs.successor_rows is None else pairs.successor_rows
        tables = pairs.predecessors, pairs.successors, mixture, rows
    _weigh[(num_rows * num_columns,)](
        *(keys, keys.shape[1], anchor, starts, batch.rows, batch.real, batch.whole, *tables),
        *(tables[0].shape[1], num_columns, anchor.shape[1], top_k, ids, chances, places),
        K=size, KEYS=triton.next_power_of_2(keys.shape[1]), HAS_PAIRS=pairs is not None,
        HAS_MIXTURE=pairs is not None and pairs.mixture is not None,
        SKIPS_FIRST=pairs is not None and pairs.skips_first,
        HAS_SUCCESSOR_ROWS=pairs is not None and pairs.successor_rows is not None,
        num_warps=4, **overlap(logits.device), enable_fp_fusion=False,
    )  # fmt: skip
    return Choices(ids, chances, places)


@triton.jit(do_not_specialize=["spare"])  # it changes, which a constant cannot
def _grow(
    ids, chances, places, anchors, out_tokens, out_branches, out_columns, out_offsets, out_firsts,
    out_lengths, out_paths, out_following, C, LINES, K, spare,
    NODES: tl.constexpr, BRANCHES: tl.constexpr, P: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grow the tree of one row; P and W pad the number of branches and the width to powers of 2."""
    start_and_wait(PDL)
    r = tl.program_id(0).to(tl.int64)
    node, branch, column = tl.arange(0, NODES), tl.arange(0, P), tl.arange(0, W)
    # Of each node. `rank` is that of its next child: so many children are in the tree.
    token = tl.zeros([NODES], tl.int64) + tl.load(anchors + r)
    branch_of, column_of = tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    place_of, rank = tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    chance = tl.zeros([NODES], tl.float32)
    following = tl.where(node == 0, tl.load(chances + r * C * LINES * K), NEVER)  # of its next child
    # Of each branch: the owner of each column of its path, and where its own columns begin and end.
    owner = tl.zeros([P, W], tl.int32)
    firsts, lengths = tl.zeros([P], tl.int32), tl.full([P], 1, tl.int32)
    num_branches = tl.full([], 1, tl.int32)
    for new in range(1, NODES):
        may_begin = (num_branches < BRANCHES) & (column_of <= spare + 1)
        offered = tl.where((rank == 0) | may_begin, following, NEVER)
        best = tl.max(offered, axis=0)
        parent = tl.min(tl.where(offered == best, node, NODES), axis=0)
        is_parent = node == parent
        its_rank = tl.sum(tl.where(is_parent, rank, 0), axis=0)
        its_place = tl.sum(tl.where(is_parent, place_of, 0), axis=0)
        its_branch = tl.sum(tl.where(is_parent, branch_of, 0), axis=0)
        its_chance = tl.sum(tl.where(is_parent, chance, 0.0), axis=0)
        depth = tl.sum(tl.where(is_parent, column_of, 0), axis=0) + 1
        begins = its_rank > 0
        own = tl.where(begins, num_branches, its_branch)
        line = ((r * C + depth - 1) * LINES + tl.minimum(its_place, LINES - 1)) * K
        place = tl.load(places + line + its_rank).to(tl.int32)
        sibling = tl.load(chances + line + its_rank + 1, mask=its_rank + 1 < K, other=NEVER)
        child_line = ((r * C + depth) * LINES + tl.minimum(place, LINES - 1)) * K
        child = tl.load(chances + child_line, mask=depth < C, other=NEVER)
        is_new = node == new
        token = tl.where(is_new, tl.load(ids + (r * C + depth - 1) * K + place), token)
        place_of = tl.where(is_new, place, place_of)
        branch_of = tl.where(is_new, own, branch_of)
        column_of = tl.where(is_new, depth, column_of)
        chance = tl.where(is_new, best, chance)
        following = tl.where(is_parent, its_chance + sibling, tl.where(is_new, best + child, following))
        rank = tl.where(is_parent, rank + 1, rank)
        if begins:
            owners = tl.max(tl.where((branch == its_branch)[:, None], owner, -1), axis=0)
            path = tl.where(column >= depth, own, owners)
            owner = tl.where((branch == own)[:, None], path[None, :], owner)
            firsts = tl.where(branch == own, depth, firsts)
            spare += 2 - depth
            num_branches += 1
        lengths = tl.where(branch == own, depth + 1, lengths)
    last_column = tl.sum(tl.where(branch == 0, lengths, 0), axis=0) - 1
    is_leaf = (branch_of == 0) & (column_of == last_column)
    its_place = tl.sum(tl.where(is_leaf, place_of, 0), axis=0)
    is_short = last_column < C
    line = ((r * C + last_column) * LINES + tl.minimum(its_place, LINES - 1)) * K
    place = tl.load(places + line, mask=is_short, other=0)
    its_id = tl.load(ids + (r * C + last_column) * K + place, mask=is_short, other=-1)
    tl.store(out_following + r, its_id)
    counts = tl.where(lengths > 1, lengths - firsts, 0)
    begin = tl.cumsum(counts, axis=0) - counts
    shift = begin - firsts  # of a column's number in the stream
    number, numbers = column_of, tl.zeros([P, W], tl.int32)
    for one in range(BRANCHES):
        its_shift = tl.sum(tl.where(branch == one, shift, 0), axis=0)
        number = tl.where(branch_of == one, number + its_shift, number)
        numbers = tl.where(owner == one, its_shift + column[None, :], numbers)
    last = tl.where(lengths > 1, shift + lengths - 1, 0)
    numbers = tl.where(column[None, :] < lengths[:, None], numbers, last[:, None])
    first_node, first_branch = r * NODES, r * BRANCHES
    tl.store(out_tokens + first_node + number, token)
    tl.store(out_branches + first_node + number, first_branch + branch_of)
    tl.store(out_columns + first_node + number, column_of.to(tl.int64))
    is_branch = branch < BRANCHES
    tl.store(out_offsets + first_branch + branch, first_node + begin, mask=is_branch)
    tl.store(out_offsets + first_branch + BRANCHES, first_node + NODES)
    tl.store(out_firsts + first_branch + branch, firsts.to(tl.int64), mask=is_branch)
    tl.store(out_lengths + first_branch + branch, lengths.to(tl.int64), mask=is_branch)
    at = (first_branch + branch)[:, None] * WIDTH + column[None, :]
    is_there = is_branch[:, None] & (column < WIDTH)[None, :]
    tl.store(out_paths + at, first_node + numbers, mask=is_there)


def grow(choices: Choices, anchor: Tensor, size: TreeSize) -> Tree:
    """Implement `reference_grow` for chances in float32, and a power of 2 of nodes."""
    num_rows, num_branches = len(anchor), len(anchor) * size.branches
    assert size.nodes == triton.next_power_of_2(size.nodes)
    assert all(one.is_contiguous() for one in choices)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=anchor.device)

    grown = Tree(
        size,
        token_ids=integers(num_rows * size.nodes),
        branches=integers(num_rows * size.nodes),
        columns=integers(num_rows * size.nodes),
        offsets=integers(num_branches + 1),
        firsts=integers(num_branches),
        lengths=integers(num_branches),
        paths=integers(num_branches, size.width),
        following=integers(num_rows),
    )
    _, num_columns, num_lines, num_ranks = choices.chances.shape
    _grow[(num_rows,)](
        *choices, anchor.contiguous(), *grown[1:],
        num_columns, num_lines, num_ranks, size.spare,
        NODES=size.nodes, BRANCHES=size.branches, P=triton.next_power_of_2(size.branches),
        W=triton.next_power_of_2(size.width), WIDTH=size.width, num_warps=1, **overlap(anchor.device),
    )  # fmt: skip
    return grown
