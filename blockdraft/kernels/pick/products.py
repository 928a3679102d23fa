"""Picks products with weights (plain, gated, packed, int8), and packs int8 weights for the picked kernel."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.choice import Available
from blockdraft.kernels.cpu import product_path
from blockdraft.kernels.failure import named
from blockdraft.kernels.int8 import (
    ROWS,
    Int8LookUp,
    Int8Multiply,
    Int8Weight,
    reference_int8_linear,
    reference_look_up,
    rotated_columns,
    round_tokens,
)
from blockdraft.kernels.linear import (
    FP8_SIDE,
    GatedMultiply,
    Multiply,
    ScaledMultiply,
    has_fp8_product,
    is_few,
    reference_linear,
    reference_scaled_linear,
)
from blockdraft.kernels.llvm.int8 import Int8Kernels
from blockdraft.kernels.llvm.linear import TileLinear
from blockdraft.kernels.packed import TILE, PackedMultiply, PackedWords, speed_of
from blockdraft.kernels.pointwise import Gate, GateMul

_llvm_linear = functools.cache(TileLinear)
_llvm_int8 = functools.cache(Int8Kernels)


def pick_linear(at: Available) -> Multiply:
    if not at.has_triton("products"):
        return _llvm_linear(at.dtype) if at.has_llvm() else reference_linear
    from blockdraft.kernels.triton import linear as kernels
    from blockdraft.kernels.triton import narrow

    multiply, is_fast = named("products", kernels.linear), at.is_fast
    multiply_narrow = named("products", narrow.linear)
    if not is_fast:
        _cut_no_sums()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        if narrow.takes(x, weight):
            return multiply_narrow(x, weight, bias, onto=onto)
        if kernels.takes(x, weight, is_fast=is_fast):
            return multiply(x, weight, bias, onto=onto, is_fast=is_fast)
        if is_fast and onto is not None and bias is None and x.dim() == 2:
            return onto.addmm_(x, weight.T)  # may round once or twice
        return reference_linear(x, weight, bias, onto)

    return linear


@functools.cache
def _cut_no_sums() -> None:
    """Configure cuBLAS not to split sums; PyTorch can set this only for the whole process."""
    if not torch.cuda.is_available():
        return
    with _silent():  # PyTorch prints a warning that this is experimental
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


@contextmanager
def _silent() -> Iterator[None]:
    """Discard all output of C++ code to stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def pick_gated_linear(at: Available, linear: Multiply, gate_mul: GateMul) -> GatedMultiply:
    """Pick gate(a) * b [..., I] for the halves a and b of a product [..., 2 I], in one kernel or two."""

    def in_two_steps(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        return gate_mul(linear(x, weight, bias, None), gate)

    has_small, has_tiles = at.has_triton("gated products"), at.has_triton("gated tiles")
    if not has_small and not has_tiles:
        return in_two_steps
    from blockdraft.kernels.triton import gated_tile, narrow
    from blockdraft.kernels.triton.linear import linear as kernel

    multiply, tiles = named("gated products", kernel), named("gated tiles", gated_tile.gated_linear)
    is_fast = at.is_fast

    def gated(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        if narrow.takes(x, weight):
            return in_two_steps(x, weight, bias, gate)
        if is_few(x):
            if has_small:
                return multiply(x, weight, bias, gate=gate, is_fast=is_fast)
        elif has_tiles and gated_tile.fits(x, weight):
            return tiles(x, weight, bias, gate)
        return in_two_steps(x, weight, bias, gate)

    return gated


def pick_scaled_linear(at: Available, gate_mul: GateMul) -> ScaledMultiply:
    """Pick the product with fp8 or int8 values [N, K] and scales [N]; it returns None if no kernel fits.

    The kernel widens the weight on its way to the tensor cores. For many tokens, native fp8 products are
    faster: if `is_fast` allows them, each token is rounded to fp8 with its own scale, which changes the
    result.
    """
    if at.path == "reference" and at.is_fast and "packed products" not in at.off:
        return reference_scaled_linear
    if not at.has_triton("packed products"):
        return lambda *_: None
    from blockdraft.kernels.triton import linear as kernels

    multiply, is_fast = named("packed products", kernels.linear), at.is_fast
    fp8_product = named("packed products", kernels.fp8_product)

    def scaled(
        x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, onto: Tensor | None, gate: Gate | None
    ) -> Tensor | None:
        if x.dim() != 2 or not kernels.can_read(values, x.dtype):
            return None
        if is_few(x) or not is_fast:
            return multiply(x, values, bias, scale=scale, onto=onto, gate=gate or "none", is_fast=is_fast)
        if not has_fp8_product(x, values):
            return None
        product = fp8_product(x, values, scale)
        if bias is not None:
            product += bias
        product = product if gate is None else gate_mul(product, gate)
        return product if onto is None else onto.add_(product)

    return scaled


def pick_packed_linear(at: Available, linear: Multiply, gated_linear: GatedMultiply) -> PackedMultiply:
    """Pick the product with 4-bit codes in words. It has the bits of a product with the unpacked weight.

    For more tokens than MEASURED says, the weight is unpacked into scratch memory first, or its values are
    there already. So it is for narrow weights, which are multiplied in another order (`triton.narrow`).
    """
    if not at.has_triton("packed products") or at.dtype == torch.float32:
        return lambda *_: None
    from blockdraft.kernels.triton import narrow
    from blockdraft.kernels.triton import packed as kernels

    multiply = named("packed products", kernels.linear)
    unpack = named("packed products", kernels.unpack)

    def packed(
        x: Tensor, weight: PackedWords, bias: Tensor | None, onto: Tensor | None, gate: Gate | None
    ) -> Tensor | None:
        if x.dim() != 2 or x.dtype != at.dtype:
            return None
        rows = weight.shape[0]
        is_whole = gate is None or rows % (2 * TILE) == 0
        speed, values = speed_of(weight.code, x.device), weight.values
        most = speed.most(has_values=values is not None, is_gated=gate is not None)
        if is_whole and rows > narrow.MAX_ROWS and x.shape[0] <= most:
            return multiply(x, weight, bias, onto=onto, gate=gate or "none")
        values = unpack(weight, x.dtype) if values is None else values
        return linear(x, values, bias, onto) if gate is None else gated_linear(x, values, bias, gate)

    return packed


def why_unpacked(at: Available, values: Tensor) -> str | None:
    """Return why products unpack values [..., N, K] with a scale per row, or None if a kernel reads them."""
    if "packed products" in at.off:
        return None  # a start names kernels that do not compile by themselves
    name = str(values.dtype).removeprefix("torch.")
    if not at.has_triton("packed products"):
        return f"no kernel of this device reads {name} with a scale for each row"
    from blockdraft.kernels.triton.linear import can_read

    if not can_read(values, at.dtype):
        return f"this card cannot convert fp8 to {at.dtype} (compute capability 8.9 and above can)"
    sides = values.shape[-2:]
    if at.is_fast and values.dtype == torch.float8_e4m3fn and any(side % FP8_SIDE for side in sides):
        rows, columns = sides
        return f"fp8 products of many tokens take sides of multiples of {FP8_SIDE}, not {rows} x {columns}"
    return None


def pick_int8(at: Available) -> tuple[Int8Multiply, Int8LookUp]:
    if not at.has_llvm() or at.dtype != torch.float32:
        return reference_int8_linear, reference_look_up
    kernels = _llvm_int8(product_path())
    return kernels.linear, kernels.look_up


def pack(weight: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, K] of a weight, rounded like tokens to int8 [n, padded K], and their scales [n]."""
    rotated = rotated_columns(weight.shape[1])
    if _is_native():
        kernels = _llvm_int8(product_path())
        values, scale = kernels.round(weight.float(), rotated, 1 / factors, is_weight=True)
    else:
        values, scale = round_tokens(weight.float(), rotated, 1 / factors)
    return values, scale / rotated  # exact: a power of two


def interleave(values: Tensor, scale: Tensor, factors: Tensor) -> Int8Weight:
    """Return an Int8Weight built from the rows and scales that `pack` returned."""
    rows, columns = values.shape[0], factors.shape[0]
    if _is_native():
        packed, sums = _llvm_int8(product_path()).interleaved(values.contiguous())
    else:
        full = functional.pad(values, (0, 0, 0, -rows % ROWS))
        packed = full.view(-1, ROWS, full.shape[1] // 4, 4).transpose(1, 2).contiguous()
        sums = -128 * full.sum(dim=1, dtype=torch.int32)
    scale = functional.pad(scale, (0, -rows % ROWS))
    return Int8Weight(packed, sums, scale, factors, rows, columns, rotated_columns(columns))


def _is_native() -> bool:
    return Available("llvm").has_llvm()
