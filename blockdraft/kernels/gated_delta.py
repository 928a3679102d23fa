"""The gated delta rule, a recurrence in place of attention: the contract and its PyTorch reference.

Every value head keeps a state S [K, V] that maps keys to values. A token makes it forget a share, then
corrects what S holds for the token's key towards the token's value, and reads S with its query.

A drafted block is scanned without touching the state; once it is known how many of its tokens are kept,
`fold` redoes those steps from the tape that the scan left. The promise that makes this lossless: the bits of
outputs and states do not depend on how a sequence is cut into scans and folds, on the rows beside it or on
the number of threads. Reference and kernel each keep it; their bits differ from one another, so one sequence
must stay with one of them. The reference keeps it by elementwise operations only: PyTorch's sums and matrix
products choose their order by shape.

On a CUDA device nothing is gathered: the kernels of `InPlace` address the rows' states where they lie, with
all indices on the device, and take the convolution and the gates along. They keep the same promise. The
states of all layers lie in one tensor, and so do their tapes: one launch folds them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.pointwise import sigmoid, softplus

if TYPE_CHECKING:
    pass

EPS = 1e-6  # of the keys' and queries' length; the published models' code has it as a constant


class DeltaWeights(NamedTuple):
    """The parameters between a layer's projections and its recurrence."""

    conv: Tensor  # [C, W]
    decay_log: Tensor  # [H] float32 or wider
    gate_bias: Tensor  # [H] likewise


class Tape(NamedTuple):
    """What `fold` needs to redo the steps of a scan, in the state's dtype."""

    decay: Tensor  # [R, T, H] exp(gate)
    key: Tensor  # [R, T, G, K] of length 1
    delta: Tensor  # [R, T, H, V] beta * (v - key^T S)


DeltaScan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tape]]
DeltaFold = Callable[[Tensor, Tape, Tensor], None]
Convolve = Callable[[Tensor, Tensor, Tensor], Tensor]
GatedNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def reference_scan(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tape]:
    """T tokens of R rows, T > 0: the outputs [R, T, H, V] in v's dtype, and the tape.

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


def reference_fold(state: Tensor, tape: Tape, counts: Tensor) -> None:
    """In place: state [R, H, K, V] becomes the state after the first counts[r] tokens of row r, 0..T.

    The same operations in the same order as in the scan that wrote the tape, hence the same bits.
    """
    kept = state
    for t in range(tape.decay.shape[1]):
        key = _by_value_head(tape.key[:, t], state.shape[1])
        after = kept * tape.decay[:, t, :, None, None] + key * tape.delta[:, t].unsqueeze(2)
        kept = torch.where((counts > t)[:, None, None, None], after, kept)
    state.copy_(kept)


def reference_convolve(x: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
    """silu of the causal convolution of each channel: x [R, T, C], weight [C, W], returns [R, T, C].

    tail [R, W - 1, C]: the inputs before x. The last weight is the token's own. Half precision is computed in
    float32. Products are added oldest first, so a token's bits follow from its W inputs alone.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return reference_convolve(x.float(), tail.float(), weight.float()).to(x.dtype)
    inputs, length = torch.cat([tail, x], dim=1), x.shape[1]
    total = inputs[:, :length] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        total = total + inputs[:, tap : tap + length] * weight[:, tap]
    return total * sigmoid(total)


def gates(beta: Tensor, gate: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """The beta and the gate of `scan` from their logits [N, H]: in (0, 1) in beta's dtype; below 0, wide."""
    wide = gate.to(weights.gate_bias.dtype)
    return sigmoid(beta), -weights.decay_log.exp() * softplus(wide + weights.gate_bias)


# ---- in place, on a CUDA device


class RowStates(NamedTuple):
    """All rows of L layers, and those of one forward: tokens [offsets[r], offsets[r + 1]) are row rows[r]'s.

    Every token is some row's. Rows are distinct, but for those whose results nobody reads.
    """

    state: Tensor  # [L, rows, H, K, V] float32
    tail: Tensor  # [L, rows, W - 1, C] the inputs before, in x's dtype
    rows: Tensor  # [R] int64
    starts: Tensor  # [R] int64; 0: the row has no past, whatever its state holds
    offsets: Tensor  # [R + 1] int64
    max_count: int  # no row has more tokens


class RowTape(NamedTuple):
    """What a block of N tokens leaves in L layers for `InPlace.fold`; float32 but for the inputs."""

    decay: Tensor  # [L, N, H]
    key: Tensor  # [L, N, G, K] of length 1
    delta: Tensor  # [L, N, H, V]
    inputs: Tensor  # [L, N, C] of the convolution, in their dtype


def empty_states(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of shape [..., K, V], laid out in memory as the device's kernels like it."""
    if device.type == "cuda":
        *lead, key_size, value_size = shape
        return torch.zeros(*lead, value_size, key_size, dtype=dtype, device=device).mT
    return torch.zeros(shape, dtype=dtype, device=device)


class ScanRows(Protocol):
    """The convolution, `gates` and the scan of x [N, C], beta and gate [N, H] logits: outputs [N, H, V].

    Tokens of a block leave the rows' states and tails, and fill the layer's part of the tape. Known tokens
    come without a tape and move them.
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
    """The rule on states where they lie.

    `fold`, in every layer: the rows' states and tails after the tape's first counts[r] tokens, 0..T. There
    `offsets` are those of the scan. A row that keeps nothing is not touched.
    """

    scan: ScanRows
    fold: Callable[[RowTape, RowStates, Tensor], None]


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(sum of squares + EPS) over the last dimension."""
    return x * torch.rsqrt(_sum((x * x).unsqueeze(-1)) + EPS)


def _by_value_head(x: Tensor, num_heads: int) -> Tensor:
    """[R, G, K] of the key heads, for every value head: [R, H, K, 1]."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1).unsqueeze(-1)


def _sum(x: Tensor) -> Tensor:
    """x [..., K, V] over K: the upper half is added to the lower until one is left."""
    while (size := x.shape[-2]) > 1:
        if size % 2 == 1:
            x = functional.pad(x, (0, 0, 0, 1))
        low, high = x.chunk(2, dim=-2)
        x = low + high
    return x.squeeze(-2)
