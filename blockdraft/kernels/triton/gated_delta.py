"""The gated delta rule on a CUDA device: states and tails are read and written in place.

`triton.gated_inputs` computes what the recurrence reads of each token.

`_advance`, with one program per row, value head and slice of the state's columns, keeps the slice in
registers for all of the row's tokens. As a scan, it updates state and tail for known tokens, or writes a tape
for a block to verify. As a fold, it repeats the first tokens of a tape, in all layers at once. `_norm` is the
gated RMS norm after the layer.

The operations for one column v of a state S [K, V]:

  held   = sum of key[k] * S[k, v]
  delta  = rate * (value - decay * held)
  out    = decay * (sum of query[k] * S[k, v]) + (query . key) * delta, which is query . (the new S)
  S[k, v] = fma(key[k], delta, S[k, v] * decay)

A fold takes the deltas from its tape and computes only the last line. Bits do not depend on how a sequence is
cut, on other rows, or on the slices: multiply-adds are explicit, the order of summation over k depends only
on constants of the shape, and kernels are not specialised on numbers that vary, nor on a layer's alignment
(a kernel gets the layer's number instead of a pointer). Only the scratch row, which pads a batch, may occur
twice, as its results are not used.

`_advance` also saves states at multiples of a grid, and `mix` the tails.

A state is stored with k innermost: the threads of a warp that share a column then sum by shuffles, without
shared memory. Four parts of k are four tensors, so that a thread reads its share of each by one wide load. A
program is one warp, and vectors are loaded in the layout of the state's tensors: whatever changes layouts
costs more than a token's arithmetic. What is left is the latency of loads, so a prompt's are far ahead: the
next multiple of the grid is on its way to the L2 cache, the next tokens to registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.gated_delta import DeltaWeights, RowStates, RowTape
from blockdraft.kernels.triton.gated_inputs import mix, slot_after
from blockdraft.kernels.triton.launch import let_next_start, overlap, wait_for_previous

ROWS = 4  # columns per program of `_advance` that lie side by side in a warp
# Columns per program of a block or fold, and of a prompt, and how many tokens' numbers are loaded ahead. Bits
# depend on neither.
BLOCK_VS = 8, 4
DEPTHS = 1, 4
MANY_TOKENS, MIX_TOKENS = 128, 4  # from so many on, a program of `mix` has several
NORM_HEADS = 8  # heads per program of `_norm`


@triton.jit
def _load_parts(pointer, K: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr):
    """Return the K numbers at `pointer` in four parts [1, ROWS, PART], the same in all rows.

    They lie in the same threads as a state's parts: others would have to go through shared memory.
    """
    k = tl.arange(0, PART)[None, None, :] + tl.zeros((1, ROWS, 1), tl.int32)
    return (
        tl.load(pointer + k, mask=k < K, other=0.0),
        tl.load(pointer + PART + k, mask=PART + k < K, other=0.0),
        tl.load(pointer + 2 * PART + k, mask=2 * PART + k < K, other=0.0),
        tl.load(pointer + 3 * PART + k, mask=3 * PART + k < K, other=0.0),
    )


@triton.jit
def _tile(state, v, mask, v_stride, k_stride, K: tl.constexpr, PART: tl.constexpr):
    """Return pointers to columns v [., ROWS] of a head's state in four parts [., ROWS, PART], and masks."""
    k = tl.arange(0, PART)[None, None, :]
    at = state + v[:, :, None] * v_stride + k * k_stride
    step = PART * k_stride
    mask = mask[:, :, None]
    return (at, at + step, at + 2 * step, at + 3 * step), (
        mask & (k < K),
        mask & (PART + k < K),
        mask & (2 * PART + k < K),
        mask & (3 * PART + k < K),
    )


@triton.jit
def _store_parts(at, s, is_there):
    tl.store(at[0], s[0], mask=is_there[0])
    tl.store(at[1], s[1], mask=is_there[1])
    tl.store(at[2], s[2], mask=is_there[2])
    tl.store(at[3], s[3], mask=is_there[3])


@triton.jit
def _dot(s, x):
    """Return the sums [., ROWS] over k of S[k, v] * x[k]."""
    products = tl.fma(s[1], x[1], s[0] * x[0])
    products = tl.fma(s[2], x[2], products)
    return tl.sum(tl.fma(s[3], x[3], products), axis=2)


@triton.jit
def _step(s, key, delta, decay):
    """Return the state after one more token."""
    delta = delta[:, :, None]
    return (
        tl.fma(key[0], delta, s[0] * decay),
        tl.fma(key[1], delta, s[1] * decay),
        tl.fma(key[2], delta, s[2] * decay),
        tl.fma(key[3], delta, s[3] * decay),
    )


@triton.jit
def _and_token(
    tokens, query, key, dots, value, decay, rate, n, v, mask,
    NUM_GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, IS_FOLD: tl.constexpr,
):  # fmt: skip
    """Return `tokens` and the numbers of token n: of a fold only key, decay, and value."""
    key_n = _load_parts(key + n * NUM_GROUPS * K, K, PART, ROWS)
    decay_n = tl.load(decay + n * NUM_HEADS)
    value_n = tl.load(value + n * NUM_HEADS * V + v, mask=mask, other=0.0).to(tl.float32)
    if IS_FOLD:
        query_n, rate_n, dot_n = key_n, decay_n, decay_n
    else:
        query_n = _load_parts(query + n * NUM_GROUPS * K, K, PART, ROWS)
        rate_n, dot_n = tl.load(rate + n * NUM_HEADS), tl.load(dots + n * NUM_GROUPS)
    return tokens + ((key_n, decay_n, value_n, query_n, rate_n, dot_n),)  # noqa: RUF005


@triton.jit
def _to_l2(pointers):
    """Ask for the lines of the pointers to come from memory to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _fetch(
    query, key, dots, value, decay, rate, first, last, part, other,
    NUM_GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Fetch this program's share of the numbers of the tokens from `first` on: one key, two values."""
    lane = tl.arange(0, 32)
    n = tl.minimum(first + other, last)
    sector = lane % 16 * 8 % K
    _to_l2(tl.where(lane < 16, key, query) + n * NUM_GROUPS * K + sector)
    n = tl.minimum(first + 2 * part + lane % 2, last)
    at = (value + n * NUM_HEADS * V + lane // 2 % 8 * 16 % V).to(tl.int64)
    at = tl.where(lane // 2 == 8, (decay + n * NUM_HEADS).to(tl.int64), at)
    at = tl.where(lane // 2 == 9, (rate + n * NUM_HEADS).to(tl.int64), at)
    _to_l2(tl.where(lane // 2 == 10, (dots + n * NUM_GROUPS).to(tl.int64), at))


@triton.jit
def _shift_tail(
    tail, is_old, x, x_stride, count, part,
    CHANNELS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write the row's last WIDTH - 1 inputs, including `count` new ones, for this program's channels."""
    channel = part * SHARE + tl.arange(0, SHARE)
    entry = tl.arange(0, BLOCK_W)
    mask = (channel < CHANNELS)[None, :] & (entry < WIDTH - 1)[:, None]
    source = entry + count  # index in the old tail followed by x
    is_tail = (source < WIDTH - 1)[:, None]
    old = tl.load(
        tail + source[:, None] * CHANNELS + channel[None, :], mask=mask & is_tail & is_old, other=0.0
    )
    place = (source - (WIDTH - 1))[:, None]
    new = tl.load(x + place * x_stride + channel[None, :], mask=mask & (place >= 0), other=0.0)
    tl.debug_barrier()  # entries move down, so all are read before the first is overwritten
    tl.store(tail + entry[:, None] * CHANNELS + channel[None, :], tl.where(is_tail, old, new), mask=mask)


@triton.jit(do_not_specialize=["first_layer", "num_rows", "num_taped", "num_saves"])
def _advance(
    query, key, dots, value, decay, rate, delta, reads, x, state, tail, rows, starts, offsets, saves, counts,
    x_stride, row_stride, head_stride, v_stride, k_stride, first_layer, num_rows, num_taped, num_saves,
    CHANNELS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, SHARE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, GRID: tl.constexpr, DEPTH: tl.constexpr, FETCH: tl.constexpr,
    IS_FOLD: tl.constexpr, IS_KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scan or fold; see the module's docstring.

    A fold reads a tape of num_taped tokens per layer, the first `counts` of each row; x holds the tape's
    inputs. A scan reads all tokens of a row and writes `reads`. If IS_KEPT, the scan updates states and
    tails, and num_taped is 0. Otherwise it does not change them, and writes `delta` to the tape, to which
    `mix` has written key and decay.
    """
    let_next_start(PDL)
    slices: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // slices
    r = tl.program_id(1)
    layer = (first_layer + tl.program_id(2)).to(tl.int64)
    group = head // (NUM_HEADS // NUM_GROUPS)
    v = tl.program_id(0) % slices * BLOCK_V + (
        tl.arange(0, BLOCK_V // ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    )
    mask = v < V
    wait_for_previous(PDL)
    row = tl.load(rows + r)
    start = tl.load(starts + r)
    is_old = start > 0
    begin = tl.load(offsets + r)
    end = begin + tl.load(counts + r) if IS_FOLD else tl.load(offsets + r + 1)
    if begin == end:
        return
    key += (layer * num_taped * NUM_GROUPS + group) * K
    decay += layer * num_taped * NUM_HEADS + head
    delta += (layer * num_taped * NUM_HEADS + head) * V
    if IS_FOLD:
        x += layer * num_taped * CHANNELS
        value = delta
    else:
        value += head * V
        query += group * K
        rate += head
        dots += group
        reads += head * V
    state += layer * num_rows * row_stride + head * head_stride
    at, is_there = _tile(state + row * row_stride, v, mask, v_stride, k_stride, K, PART)
    s = (
        tl.load(at[0], mask=is_there[0] & is_old, other=0.0),
        tl.load(at[1], mask=is_there[1] & is_old, other=0.0),
        tl.load(at[2], mask=is_there[2] & is_old, other=0.0),
        tl.load(at[3], mask=is_there[3] & is_old, other=0.0),
    )
    # The numbers of the next DEPTH tokens: a load takes longer than a token.
    ahead = ()
    for d in tl.static_range(DEPTH):
        n = tl.minimum(begin + d, end - 1)
        ahead = _and_token(
            ahead, query, key, dots, value, decay, rate, n, v, mask, NUM_GROUPS, NUM_HEADS, K, V, PART, ROWS,
            IS_FOLD,
        )  # fmt: skip
    # Up to one multiple of GRID tokens after the other; a block to verify, which saves nothing, at once.
    size: tl.constexpr = GRID if IS_KEPT else 2**30
    for first in range(begin - start % size, end, size):
        stop = tl.minimum(first + size, end)
        if FETCH and IS_KEPT:
            _fetch(
                query, key, dots, value, decay, rate, stop, end - 1, tl.program_id(0) % slices,
                tl.program_id(0) % (slices * (NUM_HEADS // NUM_GROUPS)), NUM_GROUPS, NUM_HEADS, K, V,
            )  # fmt: skip
        for n in tl.range(tl.maximum(first, begin), stop, loop_unroll_factor=DEPTH):
            key_n, decay_n, value_n, query_n, rate_n, dot_n = ahead[0]  # type: ignore[misc]
            ahead = _and_token(
                ahead[1:], query, key, dots, value, decay, rate, tl.minimum(n + DEPTH, end - 1), v, mask,
                NUM_GROUPS, NUM_HEADS, K, V, PART, ROWS, IS_FOLD,
            )  # fmt: skip
            if IS_FOLD:
                delta_n = value_n
            else:
                held = _dot(s, key_n)
                read = _dot(s, query_n)
                delta_n = rate_n * tl.fma(-decay_n, held, value_n)
                out = tl.fma(dot_n, delta_n, decay_n * read)
                tl.store(reads + n * NUM_HEADS * V + v, out.to(reads.dtype.element_ty), mask=mask)
                if not IS_KEPT:
                    tl.store(delta + n * NUM_HEADS * V + v, delta_n, mask=mask)
            s = _step(s, key_n, delta_n, decay_n)
        if IS_KEPT:
            slot = slot_after(saves, row, start + stop - begin, num_saves, GRID)
            if slot > 0:
                saved, _ = _tile(state + slot * row_stride, v, mask, v_stride, k_stride, K, PART)
                _store_parts(saved, s, is_there)
    if IS_KEPT:
        _store_parts(at, s, is_there)
        if WIDTH > 1:
            tail += (layer * num_rows + row) * (WIDTH - 1) * CHANNELS
            x += begin * x_stride
            _shift_tail(
                tail, is_old, x, x_stride, end - begin, tl.program_id(0), CHANNELS, SHARE, WIDTH, BLOCK_W
            )


@triton.jit
def _norm(
    read, z, weight, out, z_stride, eps,
    NUM_HEADS: tl.constexpr, V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = tl.arange(0, BLOCK_V)
    mask = (h < NUM_HEADS)[:, None] & (v < V)[None, :]
    at = h[:, None] * V + v[None, :]
    scale = tl.load(weight + v, mask=v < V, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(read + n * NUM_HEADS * V + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + n * z_stride + at, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)[:, None]
    if weight.dtype.element_ty == read.dtype.element_ty:
        normed = normed.to(read.dtype.element_ty).to(tl.float32)  # rounded as in rms_norm
    normed = (normed * scale.to(tl.float32)[None, :]).to(read.dtype.element_ty).to(tl.float32)
    gated = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + n * NUM_HEADS * V + at, gated.to(out.dtype.element_ty), mask=mask)


class _Shape(NamedTuple):
    """The sizes for which kernels are compiled, taken from the tensors of a layer."""

    channels: int
    num_groups: int
    num_heads: int
    k: int
    v: int
    width: int  # of the convolution

    def launch(self, *, is_long: bool, device: torch.device) -> tuple[int, dict[str, int | bool]]:
        """Return the programs of `_advance` for a row, and its constants."""
        block = BLOCK_VS[is_long]
        num_programs = self.num_heads * -(-self.v // block)
        constants = {
            "CHANNELS": self.channels,
            "NUM_GROUPS": self.num_groups,
            "NUM_HEADS": self.num_heads,
            "K": self.k,
            "V": self.v,
            "PART": triton.next_power_of_2(-(-self.k // 4)),
            "ROWS": ROWS,
            "BLOCK_V": block,
            "SHARE": triton.next_power_of_2(-(-self.channels // num_programs)),
            "WIDTH": self.width,
            "BLOCK_W": triton.next_power_of_2(self.width),
            "DEPTH": DEPTHS[is_long],
            "FETCH": is_long and device.type == "cuda" and torch.version.hip is None,
            **overlap(device),
            "num_warps": 1,
            "num_stages": 1,
        }
        return num_programs, constants


def _shape(at: RowStates) -> _Shape:
    _, num_rows, num_heads, k, v = at.state.shape
    channels = at.tail.shape[3]
    num_groups = (channels - num_heads * v) // (2 * k)
    assert channels == 2 * num_groups * k + num_heads * v
    assert num_heads % num_groups == 0
    assert at.state.dtype == torch.float32
    assert at.state.stride(0) == num_rows * at.state.stride(1)
    assert at.tail.is_contiguous()
    assert at.offsets.shape[0] == at.rows.shape[0] + 1 == at.starts.shape[0] + 1
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in (*at[2:5], at.saves.slots))
    return _Shape(channels, num_groups, num_heads, k, v, at.tail.shape[2] + 1)


def _strides(state: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of rows, heads, v and k."""
    return state.stride(1), state.stride(2), state.stride(4), state.stride(3)


def scan(
    x: Tensor,
    beta: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    at: RowStates,
    *,
    layer: int,
    tape: RowTape | None,
) -> Tensor:
    """Implement `gated_delta.ScanRows`."""
    shape, count = _shape(at), x.shape[0]
    assert x.shape[1] == shape.channels
    assert x.dtype == at.tail.dtype
    assert weights.conv.shape == (shape.channels, shape.width)
    assert weights.conv.is_contiguous()
    assert weights.decay_log.dtype == weights.gate_bias.dtype == torch.float32
    assert beta.shape == gate.shape == (count, shape.num_heads)
    x, beta, gate = (part if part.stride(1) == 1 else part.contiguous() for part in (x, beta, gate))

    def numbers(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=x.device)

    query = numbers(count, shape.num_groups, shape.k)  # of length K ** -0.5
    dots = numbers(count, shape.num_groups)  # query . key
    rate = numbers(count, shape.num_heads)
    value, reads = (numbers(count, shape.num_heads, shape.v, dtype=x.dtype) for _ in range(2))
    num_taped = 0
    if tape is None:
        key, decay = numbers(count, shape.num_groups, shape.k), numbers(count, shape.num_heads)
        delta, inputs = numbers(0), x  # neither is written
    else:
        num_taped = count
        decay, key, delta, inputs = tape
        assert all(part.is_contiguous() and part.shape[:2] == (at.state.shape[0], count) for part in tape)
    if count == 0:
        return reads
    where, num_active = (layer, at.state.shape[1], num_taped), at.rows.shape[0]
    tokens = 1 if count < MANY_TOKENS else MIX_TOKENS  # of a program of `mix`
    slots, grid = at.saves
    num_each = at.max_count if count == num_active * at.max_count else 0
    mix[(-(-count // tokens), shape.num_groups + shape.num_heads)](
        x, beta, gate, *weights, at.tail, at.rows, at.starts, at.offsets, slots, query, key, dots, value,
        decay, rate, inputs, x.stride(0), beta.stride(0), gate.stride(0), *where, count, num_active,
        num_each, slots.shape[1], shape.k**-0.5,
        CHANNELS=shape.channels, NUM_GROUPS=shape.num_groups, NUM_HEADS=shape.num_heads, K=shape.k, V=shape.v,
        BLOCK_K=triton.next_power_of_2(shape.k), BLOCK_V=triton.next_power_of_2(shape.v), WIDTH=shape.width,
        GRID=grid, TOKENS=tokens, num_warps=1, **overlap(x.device),
    )  # fmt: skip
    # One row leaves the card empty but for its own loads, a prompt's or a block's.
    is_long = at.max_count > 1 and (tape is None or num_active == 1)
    num_programs, constants = shape.launch(is_long=is_long, device=x.device)
    _advance[(num_programs, num_active, 1)](
        query, key, dots, value, decay, rate, delta, reads, x, at.state, at.tail, at.rows, at.starts,
        at.offsets, slots, None, x.stride(0), *_strides(at.state), *where, slots.shape[1],
        GRID=grid, IS_FOLD=False, IS_KEPT=tape is None, **constants,
    )  # fmt: skip
    return reads


def fold(tape: RowTape, at: RowStates, counts: Tensor) -> None:
    """Implement the fold of `gated_delta.InPlace`."""
    shape, (slots, grid) = _shape(at), at.saves
    num_layers, num_rows = at.state.shape[:2]
    assert tape.decay.shape[0] == num_layers
    assert counts.shape == at.rows.shape
    assert counts.dtype == torch.int64
    num_programs, constants = shape.launch(is_long=False, device=at.state.device)
    _advance[(num_programs, at.rows.shape[0], num_layers)](
        None, tape.key, None, None, tape.decay, None, tape.delta, None, tape.inputs, at.state, at.tail,
        at.rows, at.starts, at.offsets, slots, counts, shape.channels, *_strides(at.state), 0, num_rows,
        tape.decay.shape[1], slots.shape[1], GRID=grid, IS_FOLD=True, IS_KEPT=True, **constants,
    )  # fmt: skip


def gated_norm(read: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(read) * silu(z); see `pick.recurrent.pick_gated_norm`."""
    num_tokens, num_heads, size = read.shape
    assert read.is_contiguous()
    assert z.stride(1) == 1
    assert z.shape == (num_tokens, num_heads * size)
    out = torch.empty_like(read)
    if num_tokens > 0:
        block = triton.next_power_of_2(size)
        _norm[(num_tokens, -(-num_heads // NORM_HEADS))](
            read, z, weight, out, z.stride(0), eps, NUM_HEADS=num_heads, V=size, BLOCK_H=NORM_HEADS,
            BLOCK_V=block, num_warps=2, **overlap(read.device),
        )  # fmt: skip
    return out
