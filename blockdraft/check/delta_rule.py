"""Compares the gated delta rule of recurrent layers with its reference: scans, commits and the norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.cache.recurrent import RecurrentState, RecurrentStates, Scan
from blockdraft.cache.spec import Recurrent
from blockdraft.check.comparison import Comparison, Comparisons, Numbers, distinct, parts_of, run, wide
from blockdraft.engine.engine import Engine
from blockdraft.kernels import gated_delta, pointwise
from blockdraft.models.gated_delta import GatedDelta


def compare_delta(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare a prompt and a partly kept block, computed with a state; then compare the norm after it."""
    found = []
    for part in parts_of(engine, GatedDelta):
        storage = engine.cache.storage[part.layer]
        assert isinstance(storage, RecurrentState)
        found.append((storage.spec, part))
    for spec, part in distinct(found, lambda item: item[0]):
        name = f"{spec.num_key_heads}/{spec.num_heads} heads of {spec.key_dim} x {spec.value_dim}"
        weights = gated_delta.DeltaWeights(part.conv[:, 0], part.decay_log, part.gate_bias)
        width = max(engine.plan.block, 2)
        yield from _compare_states(spec, name, weights, numbers, width=width)
        read = numbers.normal(5, spec.num_heads, spec.value_dim)
        z = numbers.normal(5, spec.num_heads * (spec.value_dim + 1))[:, spec.num_heads :]  # of a projection
        where = f"norm, {spec.num_heads} heads of {spec.value_dim}"
        norm = (part.norm.weight, part.norm.eps)
        gated_norm = numbers.kernels.gated_norm
        yield run(where, gated_norm, _reference_gated_norm, read, z, *norm, num_steps=2)


def _reference_gated_norm(read: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return pointwise.reference_rms_norm(read, weight, eps) * functional.silu(z.reshape(read.shape))


def _compare_states(
    spec: Recurrent, name: str, weights: gated_delta.DeltaWeights, numbers: Numbers, *, width: int
) -> Comparisons:
    """Compare rows 2 and 0 of three, with 5 and 3 prompt tokens; of a block, they keep all tokens and one.

    Two layers with equal weights and different tokens are committed together.
    """
    known, kept, sizes = (5, 3), (width, 1), (spec.conv_channels, spec.num_heads, spec.num_heads)
    dtype, device, kernels = numbers.dtype, numbers.device, numbers.kernels
    states = RecurrentStates(spec, num_layers=2, num_rows=3, dtype=dtype, device=device, kernels=kernels)
    states.state.fill_(math.nan)  # a new sequence must not read these
    states.tail.fill_(math.nan)
    row_ids, starts = numbers.whole(2, 0), numbers.whole(*known)
    begin = Scan(row_ids, starts * 0, known, True, numbers.whole(0, known[0], sum(known)), max(known))
    block = Scan(row_ids, starts, (width, width), False, numbers.whole(0, width, 2 * width), width)
    inputs = [[numbers.normal(count + width, sum(sizes)) for count in known] for _ in range(2)]  # of each row
    reads: list[list[Tensor]] = [[], []]  # of each layer: its rows' known tokens, then their block
    for scan, piece in ((begin, 0), (block, 1)):
        for layer, of_rows in enumerate(inputs):
            parts = [row.tensor_split([count])[piece] for row, count in zip(of_rows, known, strict=True)]
            x, beta, gate = torch.split(torch.cat(parts), list(sizes), dim=1)
            found = states.scan(layer, x, beta, gate, weights, scan)
            reads[layer] += torch.split(found, [len(part) for part in parts])
    states.commit(row_ids, starts, numbers.whole(*kept))
    for layer, of_rows in enumerate(inputs):
        for index, row in enumerate((2, 0)):
            length = known[index] + kept[index]
            expected, state = _reference_row(spec, of_rows[index].double(), wide(weights), length)
            yield Comparison(f"reads, {name}", torch.cat(reads[layer][index::2]), expected, num_steps=6)
            # Compare in the stream's dtype, because the state's inputs have no more digits.
            got = states.state[layer, row].to(numbers.dtype)
            yield Comparison(f"state, {name}", got, state, num_steps=6)
            last = of_rows[index][length - spec.conv_width + 1 : length, : spec.conv_channels]
            yield Comparison(f"last inputs, {name}", states.tail[layer, row], last.double())


def _reference_row(
    spec: Recurrent, inputs: Tensor, weights: gated_delta.DeltaWeights, length: int
) -> tuple[Tensor, Tensor]:
    """Return the outputs of all tokens, and the state after the first `length` tokens."""
    x, beta, gate = torch.split(inputs[None], [spec.conv_channels, spec.num_heads, spec.num_heads], dim=2)
    rate, decay = gated_delta.gates(beta, gate, weights)
    tail = x.new_zeros(1, spec.conv_width - 1, spec.conv_channels)
    mixed = gated_delta.reference_convolve(x, tail, weights.conv)
    keys, values = (spec.num_key_heads, spec.key_dim), (spec.num_heads, spec.value_dim)
    q, k, v = torch.split(mixed, [math.prod(keys), math.prod(keys), math.prod(values)], dim=2)
    q, k, v = (x.reshape(1, -1, *shape) for x, shape in ((q, keys), (k, keys), (v, values)))
    state = x.new_zeros(1, spec.num_heads, spec.key_dim, spec.value_dim)
    reads, tape = gated_delta.reference_scan(q, k, v, decay, rate, state)
    gated_delta.reference_fold(state, tape, torch.tensor([length], device=x.device))
    return reads[0], state[0]
