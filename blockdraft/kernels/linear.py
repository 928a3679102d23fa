"""`y = x @ weight.T + bias` for a few tokens at a time, which takes most of a forward's time.

Contract: x [..., K], weight [N, K] contiguous, bias [N] or None, one dtype; returns a new [..., N]. With
`onto` [..., N], the residual stream, it returns onto + y, with y rounded first, and may overwrite `onto`. The
weight keeps PyTorch's layout: a head tied to the embedding, `weight[rows]` and `F.linear` share its storage.

`reference_linear` is `F.linear`, which is not batch-invariant: BLAS chooses a kernel by the number of tokens.
The fast paths are batch-invariant: output (token, n) is one fixed chain of operations on x[token] and
weight[n]. On a CPU, `llvm.linear.TileLinear` serves any number of tokens. On a GPU, `triton.linear` serves
few tokens, and on Hopper `triton.gated_tile` multiplies gate and up together for up to 128. More tokens go to
cuBLAS, which is set not to split sums: on Hopper it then adds in the same order as the kernels
(docs/lossless.md; at the start, both are compared with the real weights). With `is_fast`, cuBLAS may choose
any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.choice import has_triton
from blockdraft.kernels.pointwise import Gate, reference_gate_mul

MAX_FEW = 16  # tokens; the height of the GPU's smallest tile
FP8_SIDE = 16  # both sides of a weight must be a multiple of it for cuBLAS's products of fp8 values
WIDENED_VALUES = 1 << 26  # values of a weight that the reference converts to a wider dtype at a time


Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]  # x, weight, bias, onto
GatedMultiply = Callable[[Tensor, Tensor, Tensor | None, Gate], Tensor]  # x, weight, bias, gate
ScaledMultiply = Callable[  # x, values, scale, bias, onto, gate
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Gate | None], Tensor | None
]


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
    """Multiply in x's dtype, wider than the weight's, without converting the whole weight at once."""
    rows = max(1, WIDENED_VALUES // weight.shape[1])
    out = torch.cat([functional.linear(x, part.to(x.dtype)) for part in torch.split(weight, rows)], dim=-1)
    return out if bias is None else out + bias


@functools.cache
def _slow_on_cpu() -> tuple[torch.dtype, ...]:
    """Return half-precision dtypes without CPU instructions, in which PyTorch is up to 50 times slower."""
    is_fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return (torch.float16,) if is_fast else (torch.float16, torch.bfloat16)


def reference_scaled_linear(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, onto: Tensor | None, gate: Gate | None
) -> Tensor | None:
    """Multiply tokens rounded to fp8, if the kernel would round them; return None if it would not."""
    if not rounds_tokens(x, values):
        return None
    product = _scaled_reference(rounded_to_fp8(x), values, scale)
    product = product if bias is None else product + bias
    product = product if gate is None else reference_gate_mul(product, gate)
    return product if onto is None else onto + product


def _scaled_reference(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Multiply x by dequantised values, a slice of rows at a time."""
    rows = max(1, WIDENED_VALUES // values.shape[1])
    parts = zip(torch.split(values, rows), torch.split(scale, rows), strict=True)
    return torch.cat(
        [reference_linear(x, part.float().mul_(by[:, None]).to(x.dtype)) for part, by in parts], dim=-1
    )


def rounds_tokens(x: Tensor, values: Tensor) -> bool:
    """Return whether the fast kernel of packed products rounds these tokens to fp8."""
    if not x.is_cuda or not has_triton() or x.dim() != 2 or is_few(x):
        return False
    return has_fp8_product(x, values)


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Return x [..., K], rounded as in fp8 products: each token's scale makes its largest magnitude 448."""
    wide = x.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def is_few(x: Tensor) -> bool:
    """Return whether x has so few tokens that reading the weight takes most of the time."""
    return x.dim() == 2 and x.shape[0] <= MAX_FEW


@functools.cache
def has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def has_fp8_product(x: Tensor, values: Tensor) -> bool:
    """Return whether the GPU multiplies x by fp8 values natively."""
    is_fp8 = values.dtype == torch.float8_e4m3fn and x.dtype == torch.bfloat16
    return is_fp8 and x.is_cuda and has_fp8(x.device) and not any(side % FP8_SIDE for side in values.shape)
