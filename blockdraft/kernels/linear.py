"""`y = x @ weight.T + bias` for a few tokens at a time, the bulk of a forward.

Contract: x [..., K], weight [N, K] contiguous, bias [N] or None, one dtype; returns a new [..., N]. With
`onto` [..., N], the residual stream, it returns onto + y, y rounded first; `onto` may be overwritten by it.
The weight keeps PyTorch's own layout, so nothing is packed or copied: an embedding table tied to
the head, `weight[rows]` and `F.linear` all work on the same storage.

`reference_linear` is `F.linear`. It promises nothing on bits: BLAS picks a kernel by the number of
tokens M, so a token's result changes with its neighbours, and M = 2 costs three times M = 1.

`llvm.linear.TileLinear` is the fast path on a CPU. It promises that output (token, n) has the same bits
for every M, at every index in the batch and with every number of threads: it is one fixed chain of
operations on x[token] and weight[n].

`triton.linear` is the fast path on a GPU for some tokens, with the same promise. More tokens go to cuBLAS,
which is told to cut no sums: on Hopper both then add in the same order (docs/lossless.md; the start compares
them with the real weights). Kernels that are `is_fast` let cuBLAS do as it likes. On Hopper gate and up of up
to 128 tokens have a kernel that joins them too, `triton.gated_tile`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.choice import Available, has_triton
from blockdraft.kernels.failure import named
from blockdraft.kernels.rows import Gate, GateMul, reference_gate_mul

MAX_FEW = 16  # tokens; of the GPU's lowest tile
WIDENED_VALUES = 1 << 26  # of a weight, where the reference computes in a wider dtype than it is stored in


Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]  # x, weight, bias, onto
GatedMultiply = Callable[[Tensor, Tensor, Tensor | None, Gate], Tensor]  # x, weight, bias, gate
ScaledMultiply = Callable[  # x, values, scale, bias, onto, gate
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Gate | None], Tensor | None
]


def pick_linear(at: Available) -> Multiply:
    if at.has_triton("products"):
        return _triton_linear(is_fast=at.is_fast)
    return _llvm_linear(at.dtype) if at.has_llvm() else reference_linear


def _triton_linear(*, is_fast: bool) -> Multiply:
    from blockdraft.kernels.triton import linear as kernels

    multiply = named("products", kernels.linear)
    if not is_fast:
        _cut_no_sums()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        if kernels.takes(x, weight, is_fast=is_fast):
            return multiply(x, weight, bias, onto=onto, is_fast=is_fast)
        if is_fast and onto is not None and bias is None and x.dim() == 2:
            return onto.addmm_(x, weight.T)  # which may round once, or twice
        return reference_linear(x, weight, bias, onto)

    return linear


@functools.cache
def _cut_no_sums() -> None:
    """Tell cuBLAS so, for the whole process: PyTorch has no other way."""
    if not torch.cuda.is_available():
        return
    with _silent():  # PyTorch calls the choice of a library experimental, on stderr
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


@contextmanager
def _silent() -> Iterator[None]:
    """What C++ writes to stderr meanwhile is lost."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@functools.cache
def _llvm_linear(dtype: torch.dtype) -> Multiply:
    from blockdraft.kernels.llvm.linear import TileLinear

    multiply = TileLinear(dtype)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        out = multiply(x, weight, bias)
        return out if onto is None else onto + out

    return linear


def reference_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    if weight.dtype.itemsize < x.dtype.itemsize:
        out = _widened(x, weight, bias)
    elif x.device.type == "cpu" and x.dtype in _slow_on_cpu():
        out = _widened(x.float(), weight, bias).to(x.dtype)
    else:
        out = functional.linear(x, weight, bias)
    return out if onto is None else onto + out


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in x's dtype, which is wider than the weight's: some rows at a time, never a whole copy."""
    rows = max(1, WIDENED_VALUES // weight.shape[1])
    out = torch.cat([functional.linear(x, part.to(x.dtype)) for part in torch.split(weight, rows)], dim=-1)
    return out if bias is None else out + bias


@functools.cache
def _slow_on_cpu() -> tuple[torch.dtype, ...]:
    """Half precision that this CPU has no products of: PyTorch's own then take up to fifty times as long."""
    is_fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return (torch.float16,) if is_fast else (torch.float16, torch.bfloat16)


def pick_gated_linear(at: Available, linear: Multiply, gate_mul: GateMul) -> GatedMultiply:
    """`gate_mul` of the product: the halves of [..., 2 I] joined to [..., I].

    By the kernels that join both steps, or by `linear` and `gate_mul` one after the other.
    """

    def in_two_steps(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        return gate_mul(linear(x, weight, bias, None), gate)

    has_small, has_tiles = at.has_triton("gated products"), at.has_triton("gated tiles")
    if not has_small and not has_tiles:
        return in_two_steps
    from blockdraft.kernels.triton import gated_tile
    from blockdraft.kernels.triton.linear import linear as kernel

    multiply, tiles = named("gated products", kernel), named("gated tiles", gated_tile.gated_linear)
    is_fast = at.is_fast

    def gated(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        if _is_few(x):
            if has_small:
                return multiply(x, weight, bias, gate=gate, is_fast=is_fast)
        elif has_tiles and gated_tile.fits(x, weight):
            return tiles(x, weight, bias, gate)
        return in_two_steps(x, weight, bias, gate)

    return gated


def pick_scaled_linear(at: Available, gate_mul: GateMul) -> ScaledMultiply:
    """The product with fp8 or int8 values [N, K] times one scale [N] per row; None where there is no kernel.

    The weight is widened on its way to the tensor cores. Where reading it is not what takes time, a card that
    multiplies fp8 natively is faster: `is_fast` rounds each token to fp8 then, by a scale of its own, and the
    result differs from the widened product by that rounding.
    """
    if at.path == "reference" and at.is_fast and "packed products" not in at.off:
        return reference_scaled_linear
    if at.has_triton("packed products"):
        return _triton_scaled(gate_mul, is_fast=at.is_fast)
    return lambda *_: None


def _triton_scaled(gate_mul: GateMul, *, is_fast: bool) -> ScaledMultiply:
    from blockdraft.kernels.triton import linear as kernels

    multiply = named("packed products", kernels.linear)
    fp8_product = named("packed products", kernels.fp8_product)

    def scaled(
        x: Tensor,
        values: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        onto: Tensor | None,
        gate: Gate | None,
    ) -> Tensor | None:
        if x.dim() != 2 or not kernels.can_read(values, x.dtype):
            return None
        if _is_few(x) or not is_fast:
            return multiply(x, values, bias, scale=scale, onto=onto, gate=gate or "none", is_fast=is_fast)
        if not kernels.has_fp8_product(x, values):
            return None
        product = fp8_product(x, values, scale)
        if bias is not None:
            product += bias
        product = product if gate is None else gate_mul(product, gate)
        return product if onto is None else onto.add_(product)

    return scaled


def reference_scaled_linear(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    onto: Tensor | None,
    gate: Gate | None,
) -> Tensor | None:
    """With tokens rounded to fp8, where the kernel does that; None where it does not."""
    if not rounds_tokens(x, values):
        return None
    product = _scaled_reference(rounded_to_fp8(x), values, scale)
    product = product if bias is None else product + bias
    product = product if gate is None else reference_gate_mul(product, gate)
    return product if onto is None else onto + product


def _scaled_reference(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """The product with the values as numbers, some rows at a time."""
    rows = max(1, WIDENED_VALUES // values.shape[1])
    parts = zip(torch.split(values, rows), torch.split(scale, rows), strict=True)
    return torch.cat(
        [reference_linear(x, part.float().mul_(by[:, None]).to(x.dtype)) for part, by in parts], dim=-1
    )


def rounds_tokens(x: Tensor, values: Tensor) -> bool:
    """Whether the fast kernel of packed products rounds these tokens to fp8."""
    if not x.is_cuda or not has_triton() or x.dim() != 2 or _is_few(x):
        return False
    from blockdraft.kernels.triton.linear import has_fp8_product

    return has_fp8_product(x, values)


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Each token [..., K] as it is multiplied there: rounded by a scale that makes its largest value 448."""
    wide = x.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _is_few(x: Tensor) -> bool:
    """Tokens for which reading the weight is all that takes time."""
    return x.dim() == 2 and x.shape[0] <= MAX_FEW
