"""Compares products with weights, plain and packed, with their references in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.check.comparison import Comparison, Comparisons, Numbers, distinct, parts_of
from blockdraft.engine.engine import Engine
from blockdraft.kernels import linear, pointwise
from blockdraft.kernels.kernels import Kernels
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import Embedding, GatedMLP, Linear
from blockdraft.models.moe import ExpertLinear
from blockdraft.models.packed import Packed, Scaled, Stacked
from blockdraft.models.packed_int8 import Int8Matrix

MAX_OUTPUTS = 512  # weight rows whose products are recomputed; all of them are multiplied
EVERY_TILE = (1, 2, 3, 4, 5, 6, 7, 8, 19)  # token counts; the CPU's matrix product has code for each
GATED_TILES = (17, 65, 129)  # token counts; a GPU has another kernel for each


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight by which activations are multiplied."""

    weight: Tensor | Packed
    bias: Tensor | None
    kernels: Kernels  # of the weight's module

    def multiply(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if isinstance(self.weight, Packed):
            return self.weight.matmul(x, self.bias, onto=onto, kernels=self.kernels)
        return self.kernels.linear(x, self.weight, self.bias, onto)

    def reference(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the `chosen` outputs of the product in float64; round tokens to 8 bits as served."""
        weight, bias = self.weight, self.bias
        is_fast = self.kernels.available.is_fast and "packed products" not in self.kernels.off
        if is_fast and isinstance(weight, Scaled) and weight.has_row_scales:
            x = linear.rounded_to_fp8(x) if linear.rounds_tokens(x, weight.values) else x
        if isinstance(weight, Int8Matrix):  # also rounds tokens, by an exact rule
            product = self.kernels.references().int8_linear(x, weight.weight, bias, None).double()
            return product if chosen is None else product[..., chosen]
        if bias is not None:
            bias = (bias if chosen is None else bias[chosen]).double()
        return linear.reference_linear(x.double(), _values(weight, chosen).double(), bias)

    def kind(self) -> tuple[object, bool]:
        """Return the shape of a plain weight or the format of a packed one, and whether there is no bias."""
        weight = self.weight
        return _format(weight) if isinstance(weight, Packed) else tuple(weight.shape), self.bias is None

    def size(self) -> int:
        return math.prod(self.weight.shape)

    def compare(
        self, name: str, numbers: Numbers, counts: tuple[int, ...], *, has_stream: bool
    ) -> Comparisons:
        """Compare the product for each count of tokens, with `has_stream` also its sum with a stream."""
        chosen = _sample(self.weight.shape[0], numbers.device)
        for count in counts:
            where = f"{name}{list(self.weight.shape)} x {count} tokens"
            x = numbers.normal(count, self.weight.shape[1])
            expected = self.reference(x, chosen)
            yield Comparison(where, self.multiply(x)[:, chosen], expected)
            if has_stream:
                onto = numbers.normal(count, self.weight.shape[0])
                sums = expected + onto[:, chosen].double()  # first, as the product may overwrite the stream
                got = self.multiply(x, onto)[:, chosen]
                yield Comparison(f"{where}, onto the stream", got, sums, num_steps=2)


def _values(weight: Tensor | Packed, chosen: Tensor | None) -> Tensor:
    """Return the `chosen` rows as floats; unpack the whole weight if its format cannot be indexed."""
    if chosen is not None:
        try:
            return _values(weight[chosen], None)
        except TypeError:
            return _values(weight, None)[chosen]
    return weight.dequantise(torch.float32) if isinstance(weight, Packed) else weight


def _format(weight: Packed) -> str:
    if isinstance(weight, Stacked):
        return " and ".join(sorted({_format(part) for part in weight.members()}))
    return type(weight).__name__


def _sample(count: int, device: torch.device) -> Tensor:
    """Return the indices of at most MAX_OUTPUTS of `count` rows, including the first and the last."""
    return torch.linspace(0, count - 1, min(count, MAX_OUTPUTS), dtype=torch.float64).long().to(device)


def _matrices(engine: Engine, kind: type) -> list[Matrix]:
    """Return every matrix by which activations are multiplied, if its weight is of the given type."""
    found: list[Matrix] = []
    for part in parts_of(engine, KernelModule):
        if isinstance(part, Linear):
            found.append(matrix_of(part))
        elif isinstance(part, ExpertLinear):
            found.append(matrix_of(part, 0))
        elif isinstance(part, Embedding):
            is_tied = engine.models.config.ties_embeddings
            found += [Matrix(part.weight, None, part.kernels)] if is_tied else []
        else:  # a router's
            weights = (weight for weight in part.parameters(recurse=False) if weight.dim() == 2)
            found += [Matrix(weight, None, part.kernels) for weight in weights]
    return [matrix for matrix in found if isinstance(matrix.weight, kind)]


def matrix_of(part: Linear | ExpertLinear, expert: int | None = None) -> Matrix:
    if expert is None:
        return Matrix(part.weight, part.bias, part.kernels)
    bias = None if part.bias is None else part.bias[expert]
    return Matrix(part.weight[expert], bias, part.kernels)


def compare_linear(engine: Engine, numbers: Numbers) -> Comparisons:
    matrices = distinct(_matrices(engine, Tensor), Matrix.kind)
    tiled = min(matrices, key=Matrix.size, default=None)  # one matrix is enough to test every tile
    configs = (engine.models.config, engine.models.draft_config)
    stream_sizes = {config.hidden_size for config in configs if config is not None}
    for matrix in matrices:
        counts = EVERY_TILE if matrix is tiled else (1, max(engine.plan.block, 5), *_many(numbers))
        has_stream = matrix.weight.shape[0] in stream_sizes
        yield from matrix.compare("", numbers, counts, has_stream=has_stream)


def compare_packed(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare the smallest matrix of each format."""
    matrices = sorted(_matrices(engine, Packed), key=Matrix.size)
    for matrix in distinct(matrices, lambda matrix: matrix.kind()[0]):
        counts = (5, *_many(numbers))
        yield from matrix.compare(f"{matrix.kind()[0]} ", numbers, counts, has_stream=True)


def compare_gated(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare one plain weight of each shape, and the smallest packed weight of each format."""
    found = [(matrix_of(part.gate_up), part) for part in parts_of(engine, GatedMLP)]
    found.sort(key=lambda item: item[0].size())
    tiles = GATED_TILES if numbers.device.type == "cuda" else ()
    for matrix, part in distinct(found, lambda item: (item[0].kind(), item[1].gate)):
        chosen, inner = _sample(part.gate_up.parts[0], numbers.device), part.gate_up.parts[0]
        for count in dict.fromkeys((1, max(engine.plan.block, 5), *tiles)):
            x = numbers.normal(count, matrix.weight.shape[1])
            both = matrix.reference(x, torch.cat((chosen, chosen + inner)))
            where = f"{list(matrix.weight.shape)} x {count} tokens"
            got = part.gate_up.gated(x, part.gate)[:, chosen]
            yield Comparison(where, got, pointwise.reference_gate_mul(both, part.gate), num_steps=2)


def _many(numbers: Numbers) -> tuple[int, ...]:
    """Return larger token counts, for which a GPU has other kernels; none on a CPU."""
    return (linear.MAX_FEW + 1, 130) if numbers.device.type == "cuda" else ()
