"""The gated delta rule on a CPU: a few columns of a head's state at a time, which stay in the L1 cache.

Columns of a state are independent: a work item is (row, value head, piece of the columns), and processes all
tokens in order. The operations for one column v of a state S [K, V] are the same in every piece:

  held   = exp(gate) * sum of key[k] * S[k, v]: fused multiply-adds, k in order
  delta  = beta * (value - held)
  S[k, v] = fma(key[k], delta, S[k, v] * exp(gate))
  out    = sum of query[k] * S[k, v]: in the same way

`fold` computes only the third line, with the delta that `scan` stored. So bits do not depend on rows, tokens,
threads or pieces. The convolution is one pass over the inputs, token by token.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels.gated_delta import EPS, Saves, Tape
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.language import (
    Int,
    Longs,
    Real,
    Reals,
    Registers,
    Type,
    fma,
    load,
    pieces,
    sigmoid,
    smallest,
    store,
)
from blockdraft.kernels.llvm.pointwise import SERIAL_ELEMENTS, WIDE, llvm_rows

_VECTOR_BYTES = 16  # a register size that every CPU has
_VECTORS = 8  # vectors of columns in a piece: enough sums to hide a multiply-add's latency
_SERIAL_OPS = 1 << 16  # multiply-adds; below, waking a thread costs more than it saves


class GatedDeltaKernels:
    """The kernels for kernels/gated_delta.py in float32 or float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._piece = columns_of_piece(REALS[dtype])
        self._rms_norm = llvm_rows(dtype).rms_norm
        self._scan = Jit(do_tokens, real=REALS[dtype], is_fold=False, saves=False)
        self._fold = Jit(do_tokens, real=REALS[dtype], is_fold=True, saves=False)
        self._save = Jit(do_tokens, real=REALS[dtype], is_fold=True, saves=True)
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
        self._run(self._scan, state, tape, (query, value, rate, out, None, None, None))
        return out.to(v.dtype), tape

    def fold(self, state: Tensor, tape: Tape, counts: Tensor, saves: Saves | None = None) -> None:
        assert counts.shape == state.shape[:1]
        tape = Tape(*(part.contiguous() for part in tape))
        counts = counts.to(torch.int64).contiguous()
        if saves is None:
            self._run(self._fold, state, tape, (None, None, None, None, counts, None, None))
            return
        states, slots = saves
        assert states.dtype == self._dtype
        assert states[:1].is_contiguous()
        assert slots.shape == tape.decay.shape[:2]
        assert slots.dtype == torch.int64
        saved = (states, slots.contiguous())
        self._run(self._save, state, tape, (None, None, None, None, counts, *saved), states.stride(0))

    def _run(
        self, jit: Jit, state: Tensor, tape: Tape, others: tuple[Tensor | None, ...], saved_stride: int = 0
    ) -> None:
        """Run a kernel; `others` are its other arrays, None where they are unused."""
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
        jit(
            num_rows * num_heads * num_pieces, num_pieces, num_tokens, num_heads, num_groups, key_size,
            value_size, state.stride(0), saved_stride, state, *tape, *others,
            is_small=state.numel() * num_tokens < _SERIAL_OPS,
        )  # fmt: skip

    def convolve(self, x: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
        num_rows, num_tokens, num_channels = x.shape
        taps = weight.shape[1]
        assert x.dtype == tail.dtype == weight.dtype == self._dtype
        assert tail.shape == (num_rows, taps - 1, num_channels)
        assert weight.shape[0] == num_channels
        if taps not in self._convolve:
            self._convolve[taps] = Jit(convolve, real=REALS[self._dtype], taps=taps)
        x, tail = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, tail))
        weight = weight.contiguous()
        y = x.new_empty(x.shape)
        self._convolve[taps](
            num_rows * num_tokens, num_tokens, num_channels, *x.stride()[:2], *tail.stride()[:2],
            x, tail, weight, y, is_small=y.numel() < SERIAL_ELEMENTS,
        )  # fmt: skip
        return y


@functools.cache
def _scale(dtype: torch.dtype, size: int, power: float) -> Tensor:
    return torch.full((size,), size**power, dtype=dtype, device="cpu")


def columns_of_piece(real: Type) -> int:
    return _VECTORS * _VECTOR_BYTES * 8 // real.bits


def vectors_of_pieces(real: Type) -> list[tuple[int, int]]:
    """Return (vectors, lanes) of the parts that a piece is divided into, the largest first."""
    lanes = _VECTOR_BYTES * 8 // real.bits
    return [*((_VECTORS >> i, lanes) for i in range(_VECTORS.bit_length())), (1, 1)]


class HeadPlace(NamedTuple):
    """Pointers for a value head of one row: its state, and the inputs and outputs of its first token."""

    state: Reals
    decay: Reals
    beta: Reals
    key: Reals
    query: Reals
    value: Reals
    delta: Reals
    out: Reals
    saved: Reals
    slots: Longs


class Sizes(NamedTuple):
    """The sizes of a head's state, and the strides from one token to the next."""

    key: Int
    value: Int
    head_step: Int
    key_step: Int
    value_step: Int
    saved_step: Int  # from one saved state to the next


@kernel
def do_tokens(
    num_items: Int, num_pieces: Int, num_tokens: Int, num_heads: Int, num_groups: Int, key_size: Int,
    value_size: Int, state_stride: Int, saved_stride: Int, state: Reals, decay: Reals, key: Reals,
    delta: Reals, query: Reals, value: Reals, beta: Reals, out: Reals, counts: Longs, saved: Reals,
    slots: Longs, *, real: Type, is_fold: bool, saves: bool,
) -> None:  # fmt: skip
    """Scan all tokens, or fold the first `counts[row]`; an item is a piece of one head's columns."""
    own = state.scratch(real, key_size * columns_of_piece(real))
    steps = (num_heads, num_groups * key_size, num_heads * value_size, saved_stride)
    sizes = Sizes(key_size, value_size, *steps)
    for item in taken(num_items):
        row = item // num_pieces // num_heads
        head = item // num_pieces % num_heads
        group = head // (num_heads // num_groups)
        count = counts[row] if is_fold else num_tokens
        head_at = row * num_tokens * num_heads + head
        key_at = row * num_tokens * sizes.key_step + group * key_size
        at = HeadPlace(
            state=state + (row * state_stride + head * key_size * value_size),
            decay=decay + head_at, beta=beta + head_at, key=key + key_at, query=query + key_at,
            value=value + head_at * value_size, delta=delta + head_at * value_size,
            out=out + head_at * value_size, saved=saved + head * key_size * value_size,
            slots=slots + row * num_tokens,
        )  # fmt: skip
        column = item % num_pieces * columns_of_piece(real)
        end = smallest(column + columns_of_piece(real), value_size)
        if count > 0:
            for vectors, lanes in vectors_of_pieces(real):
                while column + vectors * lanes <= end:
                    do_columns(at, sizes, column, count, own, real.wide(lanes), vectors, is_fold, saves)
                    column += vectors * lanes


@inlined
def do_columns(
    at: HeadPlace, sizes: Sizes, column: Int, count: Int, own: Reals, vector: Type, vectors: int,
    is_fold: bool, saves: bool,
) -> None:  # fmt: skip
    """Process all tokens for some vectors of columns.

    The first token reads the state; each other token reads `own`, which the previous token wrote. Only the
    last token of a fold writes the state.
    """
    lanes = vector.lanes
    source, source_stride = at.state + column, sizes.value
    for t in range(count):
        decay, key = at.decay[t * sizes.head_step], at.key + t * sizes.key_step
        columns_at = t * sizes.value_step + column
        if is_fold:
            deltas = [load(at.delta + (columns_at + i * lanes), lanes) for i in range(vectors)]
        else:
            held = Registers((vectors,), own.zeros(vector))
            for k in range(sizes.key):
                key_k, row = key[k], source + k * source_stride
                for i in unrolled(vectors):
                    held[i] = fma(key_k, load(row + i * lanes, lanes), held[i])
            values = [load(at.value + (columns_at + i * lanes), lanes) for i in range(vectors)]
            beta = at.beta[t * sizes.head_step]
            deltas = [(values[i] - held[i] * decay) * beta for i in range(vectors)]
            for i in unrolled(vectors):
                store(at.delta + (columns_at + i * lanes), deltas[i])
        target, target_stride = own, vectors * lanes
        if is_fold and t == count - 1:
            target, target_stride = at.state + column, sizes.value
        query, outs = at.query + t * sizes.key_step, Registers((vectors,), own.zeros(vector))
        for k in range(sizes.key):
            key_k, row, new_row = key[k], source + k * source_stride, target + k * target_stride
            if not is_fold:
                query_k = query[k]
            for i in unrolled(vectors):
                new = fma(key_k, deltas[i], load(row + i * lanes, lanes) * decay)
                store(new_row + i * lanes, new)
                if not is_fold:
                    outs[i] = fma(query_k, new, outs[i])
        if not is_fold:
            for i in unrolled(vectors):
                store(at.out + (columns_at + i * lanes), outs[i])
        if saves and at.slots[t] > 0:
            slot = at.saved + (at.slots[t] * sizes.saved_step + column)
            for k in range(sizes.key):
                for i in unrolled(vectors):
                    row = target + (k * target_stride + i * lanes)
                    store(slot + (k * sizes.value + i * lanes), load(row, lanes))
        source, source_stride = own, vectors * lanes


@kernel
def convolve(
    num_items: Int, num_tokens: Int, size: Int, x_row: Int, x_token: Int, tail_row: Int, tail_token: Int,
    x: Reals, tail: Reals, weight: Reals, y: Reals, *, real: Type, taps: int,
) -> None:  # fmt: skip
    """Compute y[c] = silu(sum over i of weight[c, i] * input[i, c]); inputs are the tail, then x."""
    for item in taken(num_items):
        row, token = item // num_tokens, item % num_tokens
        inputs = []
        for i in unrolled(taps):
            at = token + (i - (taps - 1))
            found = x + (row * x_row + at * x_token)
            if at < 0:
                found = tail + (row * tail_row + (token + i) * tail_token)
            inputs.append(found)
        for begin, end, lanes in pieces(size, WIDE):
            for c in range(begin, end, lanes):
                store(y + item * size + c, convolved([at + c for at in inputs], weight + c * taps, lanes))


def convolved(inputs: list[Reals], weight: Reals, lanes: int) -> Real:
    taps = len(inputs)
    weights = load(weight, lanes * taps)
    total = load(inputs[0], lanes) * weights.lanes(range(0, lanes * taps, taps))
    for i in range(1, taps):
        total = fma(load(inputs[i], lanes), weights.lanes(range(i, lanes * taps, taps)), total)
    return total * sigmoid(total)
