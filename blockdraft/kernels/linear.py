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
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.choice import has_triton, is_switched_off, takes_reference, takes_triton
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.rows import gelu_mul, silu_mul

if TYPE_CHECKING:
    from blockdraft.kernels.llvm.linear import TileLinear

MAX_TOKENS = 16  # of the GPU's own kernel; for more, cuBLAS is as fast or faster (H200, benchmarks/log.md)
WIDENED_VALUES = 1 << 26  # of a weight, where the reference computes in a wider dtype than it is stored in
GATES: dict[Callable[[Tensor], Tensor], str] = {silu_mul: "silu", gelu_mul: "gelu"}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, onto: Tensor | None = None) -> Tensor:
    """The contract, on the path chosen for this dtype and device. Training takes the reference."""
    if takes_reference(x, weight):
        return reference_linear(x, weight, bias, onto=onto)
    if takes_triton(x, "products"):
        return _on_gpu(x, weight, bias, onto)
    if (kernel := _chosen(x.dtype, x.device)) is None:
        return reference_linear(x, weight, bias, onto=onto)
    out = kernel(x, weight, bias)
    return out if onto is None else onto + out


def reference_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, onto: Tensor | None = None
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


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """`activate`, silu_mul or gelu_mul, of the product: the halves of [..., 2 I] joined to [..., I]."""
    if takes_reference(x, weight) or activate not in GATES:
        return activate(linear(x, weight, bias))
    is_small = _is_small(x)
    if takes_triton(x, "gated products" if is_small else "gated tiles"):
        from blockdraft.kernels.triton import gated_tile
        from blockdraft.kernels.triton.linear import linear as multiply

        if is_small:
            return multiply(x, weight, bias, gate=GATES[activate])
        if gated_tile.fits(x, weight):
            return gated_tile.gated_linear(x, weight, bias, GATES[activate])
    return activate(linear(x, weight, bias))


def scaled_linear(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    onto: Tensor | None = None,
    activate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | None:
    """The product with fp8 or int8 values [N, K] times one scale [N] per row; None where there is no kernel.

    Up to MAX_TOKENS tokens, where reading the weight is what takes time, it is widened on its way to the
    tensor cores. Beyond, a card that multiplies fp8 natively does so: each token is rounded to fp8 by a scale
    of its own, and the result differs from the widened product by that rounding.
    """
    if takes_reference(x):
        if not rounds_tokens(x, values):
            return None
        product = _scaled_reference(rounded_to_fp8(x), values, scale)
        product = product if bias is None else product + bias
        product = product if activate is None else activate(product)
        return product if onto is None else onto + product
    if not takes_triton(x, "packed products") or x.dim() != 2:
        return None
    from blockdraft.kernels.triton import linear as gpu

    if not gpu.can_read(values, x.dtype):
        return None
    if _is_small(x):
        gate = "none" if activate is None else GATES.get(activate)
        if gate is None:
            return None
        return gpu.linear(x, values, bias, scale=scale, onto=onto, gate=gate)
    if not gpu.has_fp8_product(x, values):
        return None
    product = gpu.fp8_product(x, values, scale)
    if bias is not None:
        product += bias
    product = product if activate is None else activate(product)
    return product if onto is None else onto.add_(product)


def _scaled_reference(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """The product with the values as numbers, some rows at a time."""
    rows = max(1, WIDENED_VALUES // values.shape[1])
    parts = zip(torch.split(values, rows), torch.split(scale, rows), strict=True)
    return torch.cat(
        [reference_linear(x, part.float().mul_(by[:, None]).to(x.dtype)) for part, by in parts], dim=-1
    )


def rounds_tokens(x: Tensor, values: Tensor) -> bool:
    """Whether `scaled_linear` rounds these tokens to fp8."""
    if not x.is_cuda or not has_triton() or x.dim() != 2 or _is_small(x):
        return False
    if is_switched_off("packed products"):
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


def _on_gpu(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None) -> Tensor:
    if _is_small(x):
        from blockdraft.kernels.triton.linear import linear as multiply

        return multiply(x, weight, bias, onto=onto)
    if onto is not None and bias is None and x.dim() == 2:
        return onto.addmm_(x, weight.T)
    return reference_linear(x, weight, bias, onto=onto)


@functools.cache
def _chosen(dtype: torch.dtype, device: torch.device) -> TileLinear | None:
    if why_no_llvm(dtype, device) is not None:
        return None
    from blockdraft.kernels.llvm.linear import TileLinear

    return TileLinear(dtype)
