"""The gated delta rule, a recurrence used instead of attention: the contract and its PyTorch reference.

Every value head keeps a state S [K, V] that maps keys to values. Each token first decays S. Then it moves the
value that S has for the token's key towards the token's value. Last, it reads S with its query.

A scan of a drafted block does not change the state. Once the number of committed tokens is known, `fold`
repeats their steps from the tape that the scan wrote. This is lossless because the bits of outputs and states
do not depend on how a sequence is cut into scans and folds, on other rows, or on the number of threads. The
reference, which uses only elementwise operations, guarantees this, and so does each kernel. Their bits
differ, so one sequence must use one implementation throughout.

A fold can also save the states that a sequence has at multiples of a grid, for later prompts that begin with
the same tokens.

On a CUDA device, the kernels of `InPlace` read and write the rows' states in place, with all indices on the
device, and include the convolution and the gates. The states of all layers are in one tensor, and so are
their tapes, so one launch folds all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.pointwise import sigmoid, softplus

EPS = 1e-6  # in the normalisation of keys and queries; a constant in the published models' code


class DeltaWeights(NamedTuple):
    """A layer's parameters between its projections and its recurrence."""

    conv: Tensor  # [C, W]
    decay_log: Tensor  # [H] float32 or wider
    gate_bias: Tensor  # [H] float32 or wider


class Tape(NamedTuple):
    """The values that `fold` needs to repeat the steps of a scan, in the state's dtype."""

    decay: Tensor  # [R, T, H] exp(gate)
    key: Tensor  # [R, T, G, K] of length 1
    delta: Tensor  # [R, T, H, V] beta * (v - key^T S)


class SaveTable(NamedTuple):
    """The states that rows save: after (i + 1) * grid tokens to the slot slots[row, i]; 0: not saved."""

    slots: Tensor  # [rows, cells] int64
    grid: int


class Saves(NamedTuple):
    """Where a fold saves states on its way."""

    states: Tensor  # [S, H, K, V]
    slots: Tensor  # [R, T] the index in `states` for the state after each token; 0: not saved


DeltaScan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tape]]
DeltaFold = Callable[[Tensor, Tape, Tensor, Saves | None], None]
Convolve = Callable[[Tensor, Tensor, Tensor], Tensor]
GatedNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def reference_scan(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tape]:
    """Scan T > 0 tokens of R rows; return the outputs [R, T, H, V] in v's dtype, and the tape.

    q, k [R, T, G, K], v [R, T, H, V], gate, beta [R, T, H]. Value head h has key head h // (H / G).
    state [R, H, K, V], float32 or float64, is read only; all arithmetic is done in its dtype. Per token:

      S = S * exp(gate);  delta = beta * (v - k^T S);  S = S + k delta^T;  out = q^T S

    with q and k divided by sqrt(sum of squares + EPS), and q by sqrt(K) too.
    """
    dtype = state.dtype
    query = _unit(q.to(dtype)) * q.shape[-1] ** -0.5
    key, decay = _unit(k.to(dtype)), torch.exp(gate.to(dtype))
    value, rate = v.to(dtype), beta.to(dtype)
    outs, deltas = [], []
    for t in range(q.shape[1]):
        key_t, query_t = (_by_value_head(x[:, t], v.shape[2]) for x in (key, query))  # [R, H, K, 1]
        state = state * decay[:, t, :, None, None]
        delta = rate[:, t, :, None] * (value[:, t] - _sum(state * key_t))
        state = state + key_t * delta.unsqueeze(2)
        outs.append(_sum(state * query_t))
        deltas.append(delta)
    out = torch.stack(outs, dim=1).to(v.dtype)
    return out, Tape(decay=decay, key=key, delta=torch.stack(deltas, dim=1))


def reference_fold(state: Tensor, tape: Tape, counts: Tensor, saves: Saves | None = None) -> None:
    """Update state [R, H, K, V] in place to the state after the first counts[r] tokens of row r, 0..T.

    It repeats the operations of the scan that wrote the tape, in the same order, so the bits are equal.
    """
    kept = state
    for t in range(tape.decay.shape[1]):
        key = _by_value_head(tape.key[:, t], state.shape[1])
        after = kept * tape.decay[:, t, :, None, None] + key * tape.delta[:, t].unsqueeze(2)
        kept = torch.where((counts > t)[:, None, None, None], after, kept)
        if saves is not None:
            saved = torch.nonzero((counts > t) & (saves.slots[:, t] > 0)).flatten()
            saves.states[saves.slots[saved, t]] = kept[saved]
    state.copy_(kept)


def slots_at(table: SaveTable, rows: Tensor, starts: Tensor, num_tokens: int) -> Tensor:
    """Return the slots [R, T] for the states after each of `num_tokens` tokens from `starts` [R] on."""
    last = table.slots.shape[1] - 1
    lengths = starts[:, None] + torch.arange(1, num_tokens + 1, device=starts.device)
    cells = lengths // table.grid - 1
    is_saved = (lengths % table.grid == 0) & (cells <= last)
    return table.slots[rows[:, None], cells.clamp(0, last)].masked_fill(~is_saved, 0)


def reference_convolve(x: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
    """Return silu of the causal convolution of each channel [R, T, C]: x [R, T, C], weight [C, W].

    tail [R, W - 1, C] holds the inputs before x. The last weight is for the token itself. Half precision is
    computed in float32. Products are added oldest first, so a token's bits depend only on its W inputs.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return reference_convolve(x.float(), tail.float(), weight.float()).to(x.dtype)
    inputs, length = torch.cat([tail, x], dim=1), x.shape[1]
    total = inputs[:, :length] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        total = total + inputs[:, tap : tap + length] * weight[:, tap]
    return total * sigmoid(total)


def gates(beta: Tensor, gate: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Return beta, in (0, 1), and gate, below 0 in gate_bias's dtype, for `scan` from logits [N, H]."""
    wide = gate.to(weights.gate_bias.dtype)
    return sigmoid(beta), -weights.decay_log.exp() * softplus(wide + weights.gate_bias)


# ---- in place, on a CUDA device


class RowStates(NamedTuple):
    """The states of L layers, and the rows of one forward: rows[r] has tokens [offsets[r], offsets[r + 1]).

    Every token belongs to a row. Only scratch rows may occur twice. A slot in `saves` is an index of `state`
    and `tail`.
    """

    state: Tensor  # [L, rows, H, K, V] float32
    tail: Tensor  # [L, rows, W - 1, C] the last inputs of the convolution, in x's dtype
    rows: Tensor  # [R] int64
    starts: Tensor  # [R] int64; 0: the state counts as zero
    offsets: Tensor  # [R + 1] int64
    max_count: int  # the most tokens per row
    saves: SaveTable


class RowTape(NamedTuple):
    """The tape of a block of N tokens in L layers for `InPlace.fold`, in float32 except for the inputs."""

    decay: Tensor  # [L, N, H]
    key: Tensor  # [L, N, G, K] of length 1
    delta: Tensor  # [L, N, H, V]
    inputs: Tensor  # [L, N, C] the inputs of the convolution, in their own dtype


def empty_states(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of shape [..., K, V] in the memory layout that the device's kernels need."""
    if device.type == "cuda":
        *lead, key_size, value_size = shape
        return torch.zeros(*lead, value_size, key_size, dtype=dtype, device=device).mT
    return torch.zeros(shape, dtype=dtype, device=device)


class ScanRows(Protocol):
    """Does the convolution, `gates` and scan of x [N, C] and logits beta and gate [N, H]; returns [N, H, V].

    With a tape, for a block to verify, it fills the layer's part of the tape and does not change states and
    tails. Without a tape, for known tokens, it updates states and tails.
    """

    def __call__(
        self,
        x: Tensor,
        beta: Tensor,
        gate: Tensor,
        weights: DeltaWeights,
        at: RowStates,
        *,
        layer: int,
        tape: RowTape | None,
    ) -> Tensor: ...


class InPlace(NamedTuple):
    """The kernels that compute the gated delta rule on states in place.

    `fold` advances the rows' states and tails of all layers by the first counts[r] tokens of the tape, 0..T.
    It needs the `offsets` of the scan. A row with a count of 0 does not change.
    """

    scan: ScanRows
    fold: Callable[[RowTape, RowStates, Tensor], None]


def _unit(x: Tensor) -> Tensor:
    """Return x / sqrt(sum of squares + EPS) over the last dimension."""
    return x * torch.rsqrt(_sum((x * x).unsqueeze(-1)) + EPS)


def _by_value_head(x: Tensor, num_heads: int) -> Tensor:
    """Return x [R, G, K] of the key heads, repeated for their value heads: [R, H, K, 1]."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1).unsqueeze(-1)


def _sum(x: Tensor) -> Tensor:
    """Return the sum of x [..., K, V] over K: add the upper half to the lower until one value is left."""
    while (size := x.shape[-2]) > 1:
        if size % 2 == 1:
            x = functional.pad(x, (0, 0, 0, 1))
        low, high = x.chunk(2, dim=-2)
        x = low + high
    return x.squeeze(-2)
