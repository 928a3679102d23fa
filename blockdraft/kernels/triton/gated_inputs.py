"""What the gated delta rule's recurrence reads of each token: `mix` computes it, one kernel before the scan.

With one program per head and token, or few tokens, it computes the convolution and then the token's inputs
to the recurrence (unit key and query, their product, value, decay and rate). It loads weights and channels
once for all its tokens. Its grid follows from the number of tokens alone: the device finds a token's row, so
a captured prefill takes rows of any counts.

It also saves tails at multiples of a grid, before it is known if the token is committed: if it is not,
another token at its position saves again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdraft.kernels.gated_delta import EPS
from blockdraft.kernels.triton.launch import let_next_start, wait_for_previous

_EPS = tl.constexpr(EPS)


@triton.jit
def slot_after(saves, row, length, num_saves, GRID: tl.constexpr):
    """Return the slot for the row's state after `length` tokens; 0: not saved."""
    cell = length // GRID - 1
    is_saved = (length % GRID == 0) & (cell < num_saves)
    return tl.load(saves + row * num_saves + cell, mask=is_saved, other=0)


@triton.jit
def _loaded(x, first, channel, mask, num_tokens, x_stride, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the channels of x at WIDTH - 1 tokens before `first` and COUNT from it; zeros past the ends."""
    found = ()
    for i in tl.static_range(WIDTH - 1 + COUNT):
        n = first - (WIDTH - 1) + i
        is_there = mask & (n >= 0) & (n < num_tokens)
        value = tl.load(x + n * x_stride + channel, mask=is_there, other=0.0)
        found = found + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _taps(conv, channel, mask, WIDTH: tl.constexpr):
    """Return the weights of the convolution's taps in float32."""
    found = ()
    for tap in tl.static_range(WIDTH):
        weight = tl.load(conv + channel * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
        found = found + (weight,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _inputs(window, place, tail, is_old, channel, mask, CHANNELS, WIDTH: tl.constexpr):
    """Return the convolution's inputs at a token, number `place` of its row: `window`, or the row's tail.

    `is_old` is False if the row has no earlier tokens.
    """
    found = ()
    for tap in tl.static_range(WIDTH - 1):
        value = window[tap]
        if place < WIDTH - 1 - tap:
            there = tail + (place + tap) * CHANNELS + channel
            value = tl.load(there, mask=mask & is_old, other=0.0)
        found = found + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return found + (window[WIDTH - 1],)  # noqa: RUF005


@triton.jit
def _convolved(inputs, taps, WIDTH: tl.constexpr):
    """Return silu of the convolution in float32, rounded to the dtype of the inputs."""
    total = tl.zeros(inputs[0].shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        total = tl.fma(inputs[tap].to(tl.float32), taps[tap], total)
    return (total / (1.0 + tl.exp(-total))).to(inputs[0].dtype).to(tl.float32)


@triton.jit
def _keep(inputs, taped, saved, channel, mask, is_taped, is_saved, CHANNELS, WIDTH: tl.constexpr):
    """Copy a token's channels to the tape, as x is freed earlier, and the last inputs to the tail `saved`."""
    if is_taped:
        tl.store(taped + channel, inputs[WIDTH - 1], mask=mask)
    if is_saved:
        for tap in tl.static_range(1, WIDTH):
            tl.store(saved + (tap - 1) * CHANNELS + channel, inputs[tap], mask=mask)


@triton.jit
def _row_of(n, offsets, num_active, num_each, BLOCK_R: tl.constexpr):
    """Return the row of token n: the number of rows that end at or before it.

    `num_each`: each row has so many tokens; 0: only `offsets` tell.
    """
    r = n // tl.maximum(num_each, 1)
    if num_each == 0:
        r = tl.zeros((), tl.int64)
        for first in range(0, num_active, BLOCK_R):
            index = first + tl.arange(0, BLOCK_R)
            end = tl.load(offsets + 1 + index, mask=index < num_active, other=2**62)
            r += tl.sum((end <= n).to(tl.int64), axis=0)
    return r


@triton.jit
def _at(n, before, offsets, starts, rows, num_active, num_each):
    """Return begin, end, start and row of token n's row; `before` are those of the token before it."""
    begin, end, start, row = before
    if n >= end:
        r = _row_of(n, offsets, num_active, num_each, 32)
        begin, end = tl.load(offsets + r), tl.load(offsets + r + 1)
        start, row = tl.load(starts + r), tl.load(rows + r)
    return begin, end, start, row


@triton.jit
def _mix_key(
    x, conv, tail, rows, starts, offsets, saves, query, key, dots, inputs, first, group, x_stride, tape,
    num_taped, num_tokens, num_active, num_each, num_saves, scale,
    CHANNELS: tl.constexpr, NUM_GROUPS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr, GRID: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write unit query, unit key and their product of TOKENS tokens from `first` on."""
    k = tl.arange(0, BLOCK_K)
    mask = k < K
    q_channel, k_channel = group * K + k, (NUM_GROUPS + group) * K + k
    q_taps, k_taps = _taps(conv, q_channel, mask, WIDTH), _taps(conv, k_channel, mask, WIDTH)
    wait_for_previous(PDL)
    q_window = _loaded(x, first, q_channel, mask, num_tokens, x_stride, TOKENS, WIDTH)
    k_window = _loaded(x, first, k_channel, mask, num_tokens, x_stride, TOKENS, WIDTH)
    none = tl.zeros((), tl.int64)
    at = (none, none, none, none)
    for i in tl.static_range(TOKENS):
        n = first + i
        if n < num_tokens:
            at = _at(n, at, offsets, starts, rows, num_active, num_each)
            begin, _, start, row = at
            old = tail + row * (WIDTH - 1) * CHANNELS
            q_in = _inputs(q_window[i:], n - begin, old, start > 0, q_channel, mask, CHANNELS, WIDTH)
            k_in = _inputs(k_window[i:], n - begin, old, start > 0, k_channel, mask, CHANNELS, WIDTH)
            q_n, k_n = _convolved(q_in, q_taps, WIDTH), _convolved(k_in, k_taps, WIDTH)
            q_n = q_n * tl.rsqrt(tl.sum(q_n * q_n, axis=0) + _EPS) * scale
            k_n = k_n * tl.rsqrt(tl.sum(k_n * k_n, axis=0) + _EPS)
            place = n * NUM_GROUPS + group
            tl.store(query + place * K + k, q_n, mask=mask)
            tl.store(key + (tape * NUM_GROUPS + place) * K + k, k_n, mask=mask)
            tl.store(dots + place, tl.sum(q_n * k_n, axis=0))
            slot = slot_after(saves, row, start + n - begin + 1, num_saves, GRID)
            saved, taped = tail + slot * (WIDTH - 1) * CHANNELS, inputs + (tape + n) * CHANNELS
            _keep(q_in, taped, saved, q_channel, mask, num_taped != 0, slot > 0, CHANNELS, WIDTH)
            _keep(k_in, taped, saved, k_channel, mask, num_taped != 0, slot > 0, CHANNELS, WIDTH)


@triton.jit
def _mix_value(
    x, beta, gate, conv, decay_log, gate_bias, tail, rows, starts, offsets, saves, value, decay, rate, inputs,
    first, head, x_stride, beta_stride, gate_stride, tape, num_taped, num_tokens, num_active, num_each,
    num_saves,
    CHANNELS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr, GRID: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write value, decay and rate of TOKENS tokens from `first` on."""
    v = tl.arange(0, BLOCK_V)
    mask = v < V
    channel = 2 * NUM_GROUPS * K + head * V + v
    taps = _taps(conv, channel, mask, WIDTH)
    bias, speed = tl.load(gate_bias + head), tl.exp(tl.load(decay_log + head))
    wait_for_previous(PDL)
    window = _loaded(x, first, channel, mask, num_tokens, x_stride, TOKENS, WIDTH)
    n = first + tl.arange(0, TOKENS)
    is_token = n < num_tokens
    logit = tl.load(gate + n * gate_stride + head, mask=is_token, other=0.0).to(tl.float32) + bias
    chance = tl.load(beta + n * beta_stride + head, mask=is_token, other=0.0).to(tl.float32)
    # log1p(u) = log(w) * u / (w - 1) with the rounded w = 1 + u; just log(w) would lose a small u.
    u = tl.exp(-tl.abs(logit))
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * u / tl.where(w == 1.0, 1.0, w - 1.0))
    softplus = tl.maximum(logit, 0.0) + log1p
    tl.store(decay + (tape + n) * NUM_HEADS + head, tl.exp(-speed * softplus), mask=is_token)
    tl.store(rate + n * NUM_HEADS + head, 1.0 / (1.0 + tl.exp(-chance)), mask=is_token)
    none = tl.zeros((), tl.int64)
    at = (none, none, none, none)
    for i in tl.static_range(TOKENS):
        n = first + i
        if n < num_tokens:
            at = _at(n, at, offsets, starts, rows, num_active, num_each)
            begin, _, start, row = at
            old = tail + row * (WIDTH - 1) * CHANNELS
            v_in = _inputs(window[i:], n - begin, old, start > 0, channel, mask, CHANNELS, WIDTH)
            tl.store(value + (n * NUM_HEADS + head) * V + v, _convolved(v_in, taps, WIDTH), mask=mask)
            slot = slot_after(saves, row, start + n - begin + 1, num_saves, GRID)
            saved, taped = tail + slot * (WIDTH - 1) * CHANNELS, inputs + (tape + n) * CHANNELS
            _keep(v_in, taped, saved, channel, mask, num_taped != 0, slot > 0, CHANNELS, WIDTH)


@triton.jit(
    do_not_specialize=["layer", "num_rows", "num_taped", "num_tokens", "num_active", "num_each", "num_saves"]
)
def mix(
    x, beta, gate, conv, decay_log, gate_bias, tail, rows, starts, offsets, saves, query, key, dots, value,
    decay, rate, inputs, x_stride, beta_stride, gate_stride, layer, num_rows, num_taped, num_tokens,
    num_active, num_each, num_saves, scale,
    CHANNELS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr, GRID: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    part = tl.program_id(1)  # a key head, or a value head past those
    first = tl.program_id(0).to(tl.int64) * TOKENS
    layer = layer.to(tl.int64)
    tail += layer * num_rows * (WIDTH - 1) * CHANNELS
    tape = layer * num_taped  # where the layer begins in the tape of all layers; 0 without a tape
    if part < NUM_GROUPS:
        _mix_key(
            x, conv, tail, rows, starts, offsets, saves, query, key, dots, inputs, first, part, x_stride,
            tape, num_taped, num_tokens, num_active, num_each, num_saves, scale, CHANNELS, NUM_GROUPS, K,
            BLOCK_K, WIDTH, GRID, TOKENS, PDL,
        )  # fmt: skip
    else:
        _mix_value(
            x, beta, gate, conv, decay_log, gate_bias, tail, rows, starts, offsets, saves, value, decay, rate,
            inputs, first, part - NUM_GROUPS, x_stride, beta_stride, gate_stride, tape, num_taped, num_tokens,
            num_active, num_each, num_saves, CHANNELS, NUM_GROUPS, NUM_HEADS, K, V, BLOCK_V, WIDTH, GRID,
            TOKENS, PDL,
        )  # fmt: skip
