"""Int8Matrix: a weight whose products are computed in int8, on a CPU (see kernels/int8.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from blockdraft.errors import ModelError
from blockdraft.kernels.int8 import Int8Weight, reference_look_up, rotated_columns
from blockdraft.kernels.kernels import REFERENCE, Kernels
from blockdraft.kernels.pick.products import interleave, pack
from blockdraft.models.packed import Packed

_BLOCK = 16  # rows


class Int8Matrix(Packed):
    """A weight [rows, columns], rotated by a Hadamard matrix, as int8 with a scale per row, in row blocks."""

    packed: Tensor
    sums: Tensor
    scale: Tensor
    factors: Tensor

    def __init__(self, weight: Int8Weight) -> None:
        super().__init__((weight.rows, weight.columns))
        self.register_buffer("packed", weight.packed)
        self.register_buffer("sums", weight.sums)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("factors", weight.factors)

    @staticmethod
    def of(rows: Iterable[Tensor], shape: Sequence[int], factors: Tensor | None = None) -> Int8Matrix:
        """Build a matrix from slices of rows; `factors` (powers of two) multiply columns of activations."""
        if factors is None:
            factors = torch.ones(shape[1])
        values, scales = zip(*(pack(one, factors) for one in rows), strict=True)
        scale = torch.cat(scales)
        if not bool(torch.isfinite(scale).all()):
            raise ModelError("a weight holds infinite or undefined values and cannot be quantised.")
        return Int8Matrix(interleave(torch.cat(values), scale, factors))

    @property
    def weight(self) -> Int8Weight:
        rows, columns = self.shape
        return Int8Weight(
            self.packed, self.sums, self.scale, self.factors, rows, columns, rotated_columns(columns)
        )

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return reference_look_up(torch.arange(self.shape[0]), self.weight).to(dtype)

    def look_up(self, rows: Tensor, kernels: Kernels) -> Tensor:
        """Return rows as floats; for embeddings."""
        return kernels.int8_look_up(rows, self.weight)

    def matmul(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        onto: Tensor | None = None,
        kernels: Kernels = REFERENCE,
    ) -> Tensor:
        return kernels.int8_linear(x, self.weight, bias, onto)

    def rows_from(self, begin: int) -> Int8Matrix:
        if begin % _BLOCK:
            rows = self.dequantise(torch.float32)[begin:]
            return Int8Matrix.of([rows], rows.shape, self.factors)
        rest = self.weight._replace(
            packed=self.packed[begin // _BLOCK :],
            sums=self.sums[begin:],
            scale=self.scale[begin:],
            rows=self.shape[0] - begin,
        )
        return Int8Matrix(rest)

    def __getitem__(self, index: int | Tensor) -> Packed:
        raise TypeError("rows of an Int8Matrix are in blocks: use look_up")

    def stack_with(self, others: Sequence[Packed]) -> Packed:
        raise TypeError("an Int8Matrix cannot be stacked")
