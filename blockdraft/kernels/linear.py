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

`triton.linear` is the fast path on a GPU for up to MAX_TOKENS tokens, with the same promise among those. More
tokens go to cuBLAS, which promises nothing across numbers of tokens, and adds `onto` before it rounds. On
Hopper gate and up of up to 128 tokens have a kernel that joins them too, `triton.gated_tile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.choice import Available, has_triton
from blockdraft.kernels.failure import named
from blockdraft.kernels.rows import Gate, GateMul, reference_gate_mul

MAX_TOKENS = 16  # of the GPU's own kernel; for more, cuBLAS is as fast or faster (H200, benchmarks/log.md)
WIDENED_VALUES = 1 << 26  # of a weight, where the reference computes in a wider dtype than it is stored in


Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]  # x, weight, bias, onto
GatedMultiply = Callable[[Tensor, Tensor, Tensor | None, Gate], Tensor]  # x, weight, bias, gate
ScaledMultiply = Callable[  # x, values, scale, bias, onto, gate
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Gate | None], Tensor | None
]


def pick_linear(at: Available) -> Multiply:
    if at.has_triton("products"):
        return _triton_linear()
    return _llvm_linear(at.dtype) if at.has_llvm() else reference_linear


def _triton_linear() -> Multiply:
    from blockdraft.kernels.triton.linear import linear as kernel

    multiply = named("products", kernel)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        if _is_small(x):
            return multiply(x, weight, bias, onto=onto)
        if onto is not None and bias is None and x.dim() == 2:
            return onto.addmm_(x, weight.T)
        return reference_linear(x, weight, bias, onto)

    return linear


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

    def gated(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        if _is_small(x):
            if has_small:
                return multiply(x, weight, bias, gate=gate)
        elif has_tiles and gated_tile.fits(x, weight):
            return tiles(x, weight, bias, gate)
        return in_two_steps(x, weight, bias, gate)

    return gated


def pick_scaled_linear(at: Available, gate_mul: GateMul) -> ScaledMultiply:
    """The product with fp8 or int8 values [N, K] times one scale [N] per row; None where there is no kernel.

    Up to MAX_TOKENS tokens, where reading the weight is what takes time, it is widened on its way to the
    tensor cores. Beyond, a card that multiplies fp8 natively does so: each token is rounded to fp8 by a scale
    of its own, and the result differs from the widened product by that rounding.
    """
    if at.path == "reference" and "packed products" not in at.off:
        return reference_scaled_linear
    return _triton_scaled(gate_mul) if at.has_triton("packed products") else lambda *_: None


def _triton_scaled(gate_mul: GateMul) -> ScaledMultiply:
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
        if _is_small(x):
            return multiply(x, values, bias, scale=scale, onto=onto, gate=gate or "none")
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
    """Whether the kernel of packed products rounds these tokens to fp8."""
    if not x.is_cuda or not has_triton() or x.dim() != 2 or _is_small(x):
        return False
    from blockdraft.kernels.triton.linear import has_fp8_product

    return has_fp8_product(x, values)


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Each token [..., K] as it is multiplied there: rounded by a scale that makes its largest value 448."""
    wide = x.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _is_small(x: Tensor) -> bool:
    return x.dim() == 2 and x.shape[0] <= MAX_TOKENS
