"""The gated delta rule on a CUDA device: states and tails are read and written where they lie.

Four kernels. `_mix`, one program per token and head: the convolution, then what a token gives to the
recurrence (unit key and query, their product, value, decay and rate). `_scan`, one program per row, value
head and slice of the state's columns: a slice stays in registers while the row's tokens pass in order. Known
tokens leave the state and the tail behind at once; a block to verify leaves a tape. `_fold` redoes the first
tokens of a tape. `_norm` is the gated RMS norm behind the layer.

The operations behind one column v of a state S [K, V]:

  held   = sum of key[k] * S[k, v]
  delta  = rate * (value - decay * held)
  out    = decay * (sum of query[k] * S[k, v]) + (query . key) * delta, which is query . (the new S)
  S[k, v] = fma(key[k], delta, S[k, v] * decay)

`_fold` does the last line alone, by the function that `_scan` calls. Multiply-adds are written out, so no
compiler chooses which product is rounded. One `_scan` serves every number of rows and tokens, known or not:
its order of summation over k is fixed by constants of the shape. So bits do not depend on how a sequence is
cut, on the rows beside it, or on the slices.

A state is stored with k innermost: the threads of a warp that share a column then meet by shuffles, and
no sum passes through shared memory.

Rows may repeat only where nobody reads the result: padding rows that all name the scratch row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.gated_delta import EPS, DeltaWeights, RowStates
from blockdraft.kernels.triton.launch import has_pdl

BLOCK_V = 16  # columns of a program of `_scan` and `_fold`
NUM_WARPS = 2  # of such a program; columns are divided among them
NORM_HEADS = 4  # heads of a program of `_norm`

_EPS = tl.constexpr(EPS)


class RowTape(NamedTuple):
    """What a block leaves for `fold`, float32 but for the inputs."""

    decay: Tensor  # [N, H]
    key: Tensor  # [N, G, K] of length 1
    delta: Tensor  # [N, H, V]
    inputs: Tensor  # [N, C] of the convolution, in their dtype


class _Tokens(NamedTuple):
    """What `_mix` makes of the stream, for `_scan`."""

    query: Tensor  # [N, G, K] of length K ** -0.5, float32
    key: Tensor  # [N, G, K] of length 1, float32
    alike: Tensor  # [N, G] query . key, float32
    value: Tensor  # [N, H, V] in x's dtype
    decay: Tensor  # [N, H] float32
    rate: Tensor  # [N, H] float32
    inputs: Tensor  # [N, C] a copy of x where a tape is kept, else empty


@triton.jit
def _convolved(x, n, place, tail, is_old, conv, channel, mask, x_stride, CHANNELS, WIDTH: tl.constexpr):
    """silu of the convolution at token n, the row's `place`-th: float32 numbers that x's dtype can hold.

    x points at the stream and `tail` at the row's own; `is_old` is False where the row has no past.
    """
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        is_here = place >= back
        here = tl.load(x + (n - back) * x_stride + channel, mask=mask & is_here, other=0.0)
        there = tail + (place + tap) * CHANNELS + channel
        before = tl.load(there, mask=mask & is_old & (place < back), other=0.0)
        weight = tl.load(conv + channel * WIDTH + tap, mask=mask, other=0.0)
        value = tl.where(is_here, here, before).to(tl.float32)
        total = tl.fma(value, weight.to(tl.float32), total)
    return (total / (1.0 + tl.exp(-total))).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _keep(x, n, inputs, channel, mask, x_stride, CHANNELS):
    """Copy these channels of token n: x itself is part of a wider projection, which need not live on."""
    tl.store(inputs + n * CHANNELS + channel, tl.load(x + n * x_stride + channel, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["has_tape"])
def _mix(
    x,
    beta,
    gate,
    conv,
    decay_log,
    gate_bias,
    tail,
    rows,
    starts,
    offsets,
    query,
    key,
    alike,
    value,
    decay,
    rate,
    inputs,
    x_stride,
    beta_stride,
    gate_stride,
    has_tape,
    scale,
    CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0)
    part = tl.program_id(1)  # a key head, or a value head past those
    r = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    n = tl.load(offsets + r) + place
    if n >= tl.load(offsets + r + 1):
        return
    is_old = tl.load(starts + r) > 0
    tail_r = tail + tl.load(rows + r) * (WIDTH - 1) * CHANNELS
    if part < NUM_GROUPS:
        k = tl.arange(0, BLOCK_K)
        mask = k < K
        channel = part * K + k
        q_n = _convolved(x, n, place, tail_r, is_old, conv, channel, mask, x_stride, CHANNELS, WIDTH)
        if has_tape:
            _keep(x, n, inputs, channel, mask, x_stride, CHANNELS)
        channel += NUM_GROUPS * K
        k_n = _convolved(x, n, place, tail_r, is_old, conv, channel, mask, x_stride, CHANNELS, WIDTH)
        if has_tape:
            _keep(x, n, inputs, channel, mask, x_stride, CHANNELS)
        q_n = q_n * tl.rsqrt(tl.sum(q_n * q_n, axis=0) + _EPS) * scale
        k_n = k_n * tl.rsqrt(tl.sum(k_n * k_n, axis=0) + _EPS)
        at = n * NUM_GROUPS + part
        tl.store(query + at * K + k, q_n, mask=mask)
        tl.store(key + at * K + k, k_n, mask=mask)
        tl.store(alike + at, tl.sum(q_n * k_n, axis=0))
    else:
        head = part - NUM_GROUPS
        v = tl.arange(0, BLOCK_V)
        # Names of their own: a name has one shape in both branches, and V need not be K.
        v_mask = v < V
        v_channel = 2 * NUM_GROUPS * K + head * V + v
        v_n = _convolved(x, n, place, tail_r, is_old, conv, v_channel, v_mask, x_stride, CHANNELS, WIDTH)
        if has_tape:
            _keep(x, n, inputs, v_channel, v_mask, x_stride, CHANNELS)
        at = n * NUM_HEADS + head
        tl.store(value + at * V + v, v_n, mask=v_mask)
        logit = tl.load(gate + n * gate_stride + head).to(tl.float32) + tl.load(gate_bias + head)
        # log1p(u) = log(w) * u / (w - 1) with w = 1 + u as it was rounded; log(w) alone loses a small u.
        u = tl.exp(-tl.abs(logit))
        w = 1.0 + u
        log1p = tl.where(w == 1.0, u, tl.log(w) * u / tl.where(w == 1.0, 1.0, w - 1.0))
        softplus = tl.maximum(logit, 0.0) + log1p
        tl.store(decay + at, tl.exp(-tl.exp(tl.load(decay_log + head)) * softplus))
        chance = tl.load(beta + n * beta_stride + head).to(tl.float32)
        tl.store(rate + at, 1.0 / (1.0 + tl.exp(-chance)))


@triton.jit
def _quarter(pointer, part: tl.constexpr, K: tl.constexpr, PART: tl.constexpr):
    """Keys are taken in four parts: one thread's numbers of a part are one wide load."""
    k = part * PART + tl.arange(0, PART)
    return tl.load(pointer + k, mask=k < K, other=0.0)


@triton.jit
def _load_tile(state, v, mask, part: tl.constexpr, v_stride, k_stride, K: tl.constexpr, PART: tl.constexpr):
    """[BLOCK_V, PART] of a head's state; zero where `mask` [BLOCK_V] is not."""
    k = part * PART + tl.arange(0, PART)
    at = state + v[:, None] * v_stride + k[None, :] * k_stride
    return tl.load(at, mask=mask[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _store_tile(
    state, tile, v, mask, part: tl.constexpr, v_stride, k_stride, K: tl.constexpr, PART: tl.constexpr
):
    k = part * PART + tl.arange(0, PART)
    at = state + v[:, None] * v_stride + k[None, :] * k_stride
    tl.store(at, tile, mask=mask[:, None] & (k < K)[None, :])


@triton.jit
def _advance(tile, key, delta, decay):
    """A part of the state after one more token: the one place where a state changes."""
    return tl.fma(key[None, :], delta[:, None], tile * decay)


@triton.jit
def _dot(s0, s1, s2, s3, x0, x1, x2, x3):
    """[BLOCK_V]: the sum over k of S[k, v] * x[k]."""
    products = tl.fma(s1, x1[None, :], s0 * x0[None, :])
    products = tl.fma(s2, x2[None, :], products)
    return tl.sum(tl.fma(s3, x3[None, :], products), axis=1)


@triton.jit
def _shift_tail(
    tail,
    is_old,
    x,
    x_stride,
    count,
    part,
    CHANNELS: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The row's last WIDTH - 1 inputs after `count` more, in this program's share of the channels."""
    channel = part * SHARE + tl.arange(0, SHARE)
    entry = tl.arange(0, BLOCK_W)
    mask = (channel < CHANNELS)[None, :] & (entry < WIDTH - 1)[:, None]
    source = entry + count  # in the old tail followed by x
    is_tail = (source < WIDTH - 1)[:, None]
    old = tl.load(
        tail + source[:, None] * CHANNELS + channel[None, :], mask=mask & is_tail & is_old, other=0.0
    )
    place = (source - (WIDTH - 1))[:, None]
    new = tl.load(x + place * x_stride + channel[None, :], mask=mask & (place >= 0), other=0.0)
    tl.debug_barrier()  # entries move down: all are read before the first is overwritten
    tl.store(tail + entry[:, None] * CHANNELS + channel[None, :], tl.where(is_tail, old, new), mask=mask)


@triton.jit(do_not_specialize=["is_known"])
def _scan(
    query,
    key,
    alike,
    value,
    decay,
    rate,
    delta,
    reads,
    x,
    state,
    tail,
    rows,
    starts,
    offsets,
    x_stride,
    row_stride,
    head_stride,
    v_stride,
    k_stride,
    is_known,
    CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    r = tl.program_id(2)
    group = head // (NUM_HEADS // NUM_GROUPS)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = v < V
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + r)
    is_old = tl.load(starts + r) > 0
    begin = tl.load(offsets + r)
    end = tl.load(offsets + r + 1)
    if begin == end:
        return
    state += row * row_stride + head * head_stride
    s0 = _load_tile(state, v, mask & is_old, 0, v_stride, k_stride, K, PART)
    s1 = _load_tile(state, v, mask & is_old, 1, v_stride, k_stride, K, PART)
    s2 = _load_tile(state, v, mask & is_old, 2, v_stride, k_stride, K, PART)
    s3 = _load_tile(state, v, mask & is_old, 3, v_stride, k_stride, K, PART)
    query += group * K
    key += group * K
    # Token n's numbers are loaded while token n - 1 is computed.
    k0 = _quarter(key + begin * NUM_GROUPS * K, 0, K, PART)
    k1 = _quarter(key + begin * NUM_GROUPS * K, 1, K, PART)
    k2 = _quarter(key + begin * NUM_GROUPS * K, 2, K, PART)
    k3 = _quarter(key + begin * NUM_GROUPS * K, 3, K, PART)
    q0 = _quarter(query + begin * NUM_GROUPS * K, 0, K, PART)
    q1 = _quarter(query + begin * NUM_GROUPS * K, 1, K, PART)
    q2 = _quarter(query + begin * NUM_GROUPS * K, 2, K, PART)
    q3 = _quarter(query + begin * NUM_GROUPS * K, 3, K, PART)
    value_n = tl.load(value + (begin * NUM_HEADS + head) * V + v, mask=mask, other=0.0).to(tl.float32)
    decay_n = tl.load(decay + begin * NUM_HEADS + head)
    rate_n = tl.load(rate + begin * NUM_HEADS + head)
    alike_n = tl.load(alike + begin * NUM_GROUPS + group)
    for n in range(begin, end):
        after = tl.minimum(n + 1, end - 1)
        next_k0 = _quarter(key + after * NUM_GROUPS * K, 0, K, PART)
        next_k1 = _quarter(key + after * NUM_GROUPS * K, 1, K, PART)
        next_k2 = _quarter(key + after * NUM_GROUPS * K, 2, K, PART)
        next_k3 = _quarter(key + after * NUM_GROUPS * K, 3, K, PART)
        next_q0 = _quarter(query + after * NUM_GROUPS * K, 0, K, PART)
        next_q1 = _quarter(query + after * NUM_GROUPS * K, 1, K, PART)
        next_q2 = _quarter(query + after * NUM_GROUPS * K, 2, K, PART)
        next_q3 = _quarter(query + after * NUM_GROUPS * K, 3, K, PART)
        next_value = tl.load(value + (after * NUM_HEADS + head) * V + v, mask=mask, other=0.0).to(tl.float32)
        next_decay = tl.load(decay + after * NUM_HEADS + head)
        next_rate = tl.load(rate + after * NUM_HEADS + head)
        next_alike = tl.load(alike + after * NUM_GROUPS + group)

        held = _dot(s0, s1, s2, s3, k0, k1, k2, k3)
        read = _dot(s0, s1, s2, s3, q0, q1, q2, q3)
        delta_n = rate_n * tl.fma(-decay_n, held, value_n)
        out = tl.fma(alike_n, delta_n, decay_n * read)
        s0 = _advance(s0, k0, delta_n, decay_n)
        s1 = _advance(s1, k1, delta_n, decay_n)
        s2 = _advance(s2, k2, delta_n, decay_n)
        s3 = _advance(s3, k3, delta_n, decay_n)
        at = (n * NUM_HEADS + head) * V + v
        tl.store(reads + at, out.to(reads.dtype.element_ty), mask=mask)
        if is_known == 0:
            tl.store(delta + at, delta_n, mask=mask)

        k0 = next_k0
        k1 = next_k1
        k2 = next_k2
        k3 = next_k3
        q0 = next_q0
        q1 = next_q1
        q2 = next_q2
        q3 = next_q3
        value_n = next_value
        decay_n = next_decay
        rate_n = next_rate
        alike_n = next_alike
    if is_known != 0:
        _store_tile(state, s0, v, mask, 0, v_stride, k_stride, K, PART)
        _store_tile(state, s1, v, mask, 1, v_stride, k_stride, K, PART)
        _store_tile(state, s2, v, mask, 2, v_stride, k_stride, K, PART)
        _store_tile(state, s3, v, mask, 3, v_stride, k_stride, K, PART)
        part = head * tl.num_programs(0) + tl.program_id(0)
        tail += row * (WIDTH - 1) * CHANNELS
        x += begin * x_stride
        if WIDTH > 1:
            _shift_tail(tail, is_old, x, x_stride, end - begin, part, CHANNELS, SHARE, WIDTH, BLOCK_W)


@triton.jit
def _fold(
    key,
    decay,
    delta,
    inputs,
    state,
    tail,
    rows,
    starts,
    offsets,
    counts,
    row_stride,
    head_stride,
    v_stride,
    k_stride,
    CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    r = tl.program_id(2)
    group = head // (NUM_HEADS // NUM_GROUPS)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = v < V
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + r)
    is_old = tl.load(starts + r) > 0
    begin = tl.load(offsets + r)
    count = tl.load(counts + r)
    if count == 0:
        return
    state += row * row_stride + head * head_stride
    s0 = _load_tile(state, v, mask & is_old, 0, v_stride, k_stride, K, PART)
    s1 = _load_tile(state, v, mask & is_old, 1, v_stride, k_stride, K, PART)
    s2 = _load_tile(state, v, mask & is_old, 2, v_stride, k_stride, K, PART)
    s3 = _load_tile(state, v, mask & is_old, 3, v_stride, k_stride, K, PART)
    key += group * K
    k0 = _quarter(key + begin * NUM_GROUPS * K, 0, K, PART)
    k1 = _quarter(key + begin * NUM_GROUPS * K, 1, K, PART)
    k2 = _quarter(key + begin * NUM_GROUPS * K, 2, K, PART)
    k3 = _quarter(key + begin * NUM_GROUPS * K, 3, K, PART)
    delta_n = tl.load(delta + (begin * NUM_HEADS + head) * V + v, mask=mask, other=0.0)
    decay_n = tl.load(decay + begin * NUM_HEADS + head)
    for n in range(begin, begin + count):
        after = tl.minimum(n + 1, begin + count - 1)
        next_k0 = _quarter(key + after * NUM_GROUPS * K, 0, K, PART)
        next_k1 = _quarter(key + after * NUM_GROUPS * K, 1, K, PART)
        next_k2 = _quarter(key + after * NUM_GROUPS * K, 2, K, PART)
        next_k3 = _quarter(key + after * NUM_GROUPS * K, 3, K, PART)
        next_delta = tl.load(delta + (after * NUM_HEADS + head) * V + v, mask=mask, other=0.0)
        next_decay = tl.load(decay + after * NUM_HEADS + head)
        s0 = _advance(s0, k0, delta_n, decay_n)
        s1 = _advance(s1, k1, delta_n, decay_n)
        s2 = _advance(s2, k2, delta_n, decay_n)
        s3 = _advance(s3, k3, delta_n, decay_n)
        k0 = next_k0
        k1 = next_k1
        k2 = next_k2
        k3 = next_k3
        delta_n = next_delta
        decay_n = next_decay
    _store_tile(state, s0, v, mask, 0, v_stride, k_stride, K, PART)
    _store_tile(state, s1, v, mask, 1, v_stride, k_stride, K, PART)
    _store_tile(state, s2, v, mask, 2, v_stride, k_stride, K, PART)
    _store_tile(state, s3, v, mask, 3, v_stride, k_stride, K, PART)
    part = head * tl.num_programs(0) + tl.program_id(0)
    tail += row * (WIDTH - 1) * CHANNELS
    if WIDTH > 1:
        _shift_tail(
            tail, is_old, inputs + begin * CHANNELS, CHANNELS, count, part, CHANNELS, SHARE, WIDTH, BLOCK_W
        )


@triton.jit
def _norm(
    read,
    z,
    weight,
    out,
    z_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = tl.arange(0, BLOCK_V)
    mask = (h < NUM_HEADS)[:, None] & (v < V)[None, :]
    at = h[:, None] * V + v[None, :]
    scale = tl.load(weight + v, mask=v < V, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(read + n * NUM_HEADS * V + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + n * z_stride + at, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)[:, None]
    if weight.dtype.element_ty == read.dtype.element_ty:
        normed = normed.to(read.dtype.element_ty).to(tl.float32)  # as rms_norm rounds
    normed = (normed * scale.to(tl.float32)[None, :]).to(read.dtype.element_ty).to(tl.float32)
    gated = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + n * NUM_HEADS * V + at, gated.to(out.dtype.element_ty), mask=mask)


class _Shape(NamedTuple):
    """What the kernels are compiled for, from the tensors of a layer."""

    channels: int
    num_groups: int
    num_heads: int
    k: int
    v: int
    width: int  # of the convolution

    @property
    def num_slices(self) -> int:
        return -(-self.v // BLOCK_V)

    def constants(self, device: torch.device) -> dict[str, int | bool]:
        """Of `_scan` and `_fold`: equal, so that one redoes the other."""
        share = -(-self.channels // (self.num_heads * self.num_slices))
        return {
            "CHANNELS": self.channels,
            "NUM_GROUPS": self.num_groups,
            "NUM_HEADS": self.num_heads,
            "K": self.k,
            "V": self.v,
            "PART": triton.next_power_of_2(-(-self.k // 4)),
            "BLOCK_V": BLOCK_V,
            "SHARE": triton.next_power_of_2(share),
            "WIDTH": self.width,
            "BLOCK_W": triton.next_power_of_2(self.width),
            "PDL": has_pdl(device),
            "launch_pdl": has_pdl(device),
            "num_warps": NUM_WARPS,
            "num_stages": 1,
        }


def _shape(at: RowStates) -> _Shape:
    _, num_heads, k, v = at.state.shape
    channels = at.tail.shape[2]
    num_groups = (channels - num_heads * v) // (2 * k)
    assert channels == 2 * num_groups * k + num_heads * v
    assert num_heads % num_groups == 0
    assert at.state.dtype == torch.float32
    assert at.tail.is_contiguous()
    assert at.offsets.shape[0] == at.rows.shape[0] + 1 == at.starts.shape[0] + 1
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in at[2:5])
    return _Shape(channels, num_groups, num_heads, k, v, at.tail.shape[1] + 1)


def _strides(state: Tensor) -> tuple[int, int, int, int]:
    """Of rows, heads, v and k."""
    return state.stride(0), state.stride(1), state.stride(3), state.stride(2)


def scan(
    x: Tensor, beta: Tensor, gate: Tensor, weights: DeltaWeights, at: RowStates, *, is_known: bool
) -> tuple[Tensor, RowTape | None]:
    """The contract of `gated_delta.scan_rows`."""
    shape = _shape(at)
    assert x.shape[1] == shape.channels
    assert x.dtype == at.tail.dtype
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens = _mix_tokens(x, beta, gate, weights, at, shape, is_known=is_known)
    reads = torch.empty_like(tokens.value)
    delta = torch.empty(0 if is_known else reads.shape, dtype=torch.float32, device=x.device)
    if reads.numel() > 0:
        _scan[(shape.num_slices, shape.num_heads, at.rows.shape[0])](
            tokens.query, tokens.key, tokens.alike, tokens.value, tokens.decay, tokens.rate, delta, reads, x,
            at.state, at.tail, at.rows, at.starts, at.offsets, x.stride(0), *_strides(at.state),
            int(is_known), **shape.constants(x.device),
        )  # fmt: skip
    if is_known:
        return reads, None
    return reads, RowTape(tokens.decay, tokens.key, delta, tokens.inputs)


def _mix_tokens(
    x: Tensor,
    beta: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    at: RowStates,
    shape: _Shape,
    *,
    is_known: bool,
) -> _Tokens:
    count = x.shape[0]
    assert weights.conv.shape == (shape.channels, shape.width)
    assert weights.conv.is_contiguous()
    assert weights.decay_log.dtype == weights.gate_bias.dtype == torch.float32
    assert beta.shape == gate.shape == (count, shape.num_heads)
    assert beta.stride(1) == gate.stride(1) == 1

    def numbers(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=x.device)

    tokens = _Tokens(
        query=numbers(count, shape.num_groups, shape.k),
        key=numbers(count, shape.num_groups, shape.k),
        alike=numbers(count, shape.num_groups),
        value=numbers(count, shape.num_heads, shape.v, dtype=x.dtype),
        decay=numbers(count, shape.num_heads),
        rate=numbers(count, shape.num_heads),
        inputs=numbers(0 if is_known else count, shape.channels, dtype=x.dtype),
    )
    if count > 0:
        _mix[(at.max_count, shape.num_groups + shape.num_heads, at.rows.shape[0])](
            x, beta, gate, *weights, at.tail, at.rows, at.starts, at.offsets, *tokens, x.stride(0),
            beta.stride(0), gate.stride(0), int(not is_known), shape.k**-0.5, CHANNELS=shape.channels,
            NUM_GROUPS=shape.num_groups, NUM_HEADS=shape.num_heads, K=shape.k, V=shape.v,
            BLOCK_K=triton.next_power_of_2(shape.k), BLOCK_V=triton.next_power_of_2(shape.v),
            WIDTH=shape.width, PDL=has_pdl(x.device), launch_pdl=has_pdl(x.device), num_warps=1,
        )  # fmt: skip
    return tokens


def fold(tape: RowTape, at: RowStates, counts: Tensor) -> None:
    """The contract of `gated_delta.fold_rows`."""
    shape = _shape(at)
    assert counts.shape == at.rows.shape
    assert counts.dtype == torch.int64
    _fold[(shape.num_slices, shape.num_heads, at.rows.shape[0])](
        tape.key, tape.decay, tape.delta, tape.inputs, at.state, at.tail, at.rows, at.starts, at.offsets,
        counts, *_strides(at.state), **shape.constants(at.state.device),
    )  # fmt: skip


def gated_norm(read: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The contract of `gated_delta.gated_norm`."""
    num_tokens, num_heads, size = read.shape
    assert read.is_contiguous()
    assert z.stride(1) == 1
    assert z.shape == (num_tokens, num_heads * size)
    out = torch.empty_like(read)
    if num_tokens > 0:
        block = triton.next_power_of_2(size)
        _norm[(num_tokens, -(-num_heads // NORM_HEADS))](
            read, z, weight, out, z.stride(0), eps, NUM_HEADS=num_heads, V=size, BLOCK_H=NORM_HEADS,
            BLOCK_V=block, PDL=has_pdl(read.device), launch_pdl=has_pdl(read.device), num_warps=2,
        )  # fmt: skip
    return out
