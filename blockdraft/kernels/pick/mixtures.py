"""Picks routing and experts, and decides which formats of experts the kernels read."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.moe import (
    FP4_GROUPS,
    MIN_COLUMNS,
    Activation,
    Beside,
    ExpertChoice,
    ExpertProduct,
    Matrices,
    Onto,
    Parts,
    Route,
    RunExperts,
    Shared,
    Summed,
    Weighing,
    reference_experts,
    reference_route,
)
from blockdraft.kernels.pointwise import GateMul, RmsNorm

_HALVES = (torch.bfloat16, torch.float16)
_MAX_JOINED = 2048  # pairs of a token and an expert


def pick_route(at: Available) -> Route:
    """Pick the router: it chooses the `num_chosen` largest logits [N, X] of each token, largest first.

    Weights are a softmax over all experts ("all"), that softmax rescaled to sum to one ("renormalised"), or a
    softmax over the chosen experts ("chosen"); the last two differ only by rounding. Weights are float32 or
    wider; with "chosen" they may have the logits' dtype. Each is multiplied by its expert's `expert_scale`.
    The kernel resolves ties to the lowest id; PyTorch guarantees no order.
    """
    if not at.has_triton("routing"):
        return reference_route
    from blockdraft.kernels.triton import routing

    choose = named("routing", routing.route)

    def route(
        logits: Tensor, num_chosen: int, weighing: Weighing, expert_scale: Tensor | None
    ) -> ExpertChoice:
        return ExpertChoice(
            *choose(logits, num_chosen, is_over_all=weighing == "all", expert_scale=expert_scale)
        )

    return route


def pick_experts(at: Available, gate_mul: GateMul, rms_norm: RmsNorm) -> RunExperts:
    """Pick the experts' kernel: the sum [N, E] of weight * down(activation(gate_up(x))) over chosen experts.

    Weights and weighted outputs are rounded to x's dtype. The sum is computed in float32 or wider, then
    rounded. Then `shared` is added and the sum rounded, then the residual stream, and rounded again. With
    `onto`, the norm of the sum is computed, too.
    """
    one_by_one = functools.partial(reference_experts, gate_mul=gate_mul, rms_norm=rms_norm)
    if not at.has_triton("experts"):
        return one_by_one
    from blockdraft.kernels.triton import moe

    run = named("experts", moe.run_experts)

    def experts(
        x: Tensor,
        gate_up: ExpertProduct,
        down: ExpertProduct,
        choice: ExpertChoice,
        activation: Activation,
        shared: Shared | None,
        onto: Onto | None,
    ) -> Summed:
        parts = _readable(at, gate_up, down)
        if isinstance(parts, str):
            return one_by_one(x, gate_up, down, choice, activation, shared, onto)
        beside = None if shared is None else _beside(x, shared, parts, choice.ids.numel())
        return run(x, parts, choice, activation, beside, onto)

    return experts


def _beside(x: Tensor, shared: Shared, parts: Parts, num_pairs: int) -> Beside:
    """Return the shared expert's matrices, to run with the routed experts, or (for many pairs) its output.

    Measured on an H200 (benchmarks/log.md).
    """
    if num_pairs <= _MAX_JOINED or parts.gate.scale is not None:
        stored = shared.expert.parts()
        if stored is not None and all(map(_can_join, stored, parts)):
            return Beside(shared.gate, stored)
    return Beside(shared.gate, shared.expert(x))


def _can_join(shared: Matrices, routed: Matrices) -> bool:
    """Return whether one kernel can read both experts with wide loads."""
    if routed.zero is not None or routed.second is not None:
        return False
    return _layout(shared, 1) == _layout(routed, 1) and shared.values.data_ptr() % 16 == 0


def why_no_kernel(at: Available, gate_up: ExpertProduct, down: ExpertProduct) -> str | None:
    """Return why the kernels cannot run these experts, so no CUDA graph can capture them, or None."""
    found = at.why_reference("experts") or _readable(at, gate_up, down)
    return found if isinstance(found, str) else None


def tile_counts(
    at: Available, gate_up: ExpertProduct, down: ExpertProduct, num_chosen: int, most_tokens: int
) -> tuple[int, ...]:
    """Return the least number of tokens for each size of tiles that up to `most_tokens` tokens reach.

    Pairs that are sorted in another way count as another size. Without the kernels there are no tiles.
    """
    parts = _readable(at, gate_up, down) if at.has_triton("experts") else ""
    if isinstance(parts, str):
        return ()
    from blockdraft.kernels.triton.moe import choose_configs
    from blockdraft.kernels.triton.routing import MAX_COMPARED

    found: dict[object, int] = {}
    for count in range(1, most_tokens + 1):
        num_pairs = count * num_chosen
        found.setdefault((choose_configs(parts, at.dtype, num_pairs), num_pairs > MAX_COMPARED), count)
    return tuple(found.values())


def _readable(at: Available, gate_up: ExpertProduct, down: ExpertProduct) -> Parts | str:
    """Return the matrices for the kernels, or why they cannot read them."""
    dtype, device = at.dtype, at.device
    stacked, single = gate_up.matrices(), down.matrices()
    if stacked is None or single is None:
        return "no kernel reads the format of these experts"
    parts = Parts(*stacked, *single)
    if _layout(parts.gate) != _layout(parts.up):
        return "an expert's gate and up are stored in different formats"
    return _why_unreadable(parts.gate, dtype, device) or _why_unreadable(parts.down, dtype, device) or parts


def _layout(part: Matrices, begin: int = 0) -> tuple[object, ...]:
    """Return the memory layout of dimensions from `begin` on; 1 leaves out the dimension of experts."""
    values, scale, bias = (
        None if tensor is None else (tensor.dtype, tensor.shape[begin:], tensor.stride()[begin:])
        for tensor in (part.values, part.scale, part.bias)
    )
    return values, scale, bias, part.block, part.code, part.is_divisor, part.zero is None


def _has_gaps(tensor: Tensor) -> bool:
    return tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def _why_unreadable(part: Matrices, dtype: torch.dtype, device: torch.device) -> str | None:
    stored, scale = part.values.dtype, part.scale
    if any(tensor is not None and _has_gaps(tensor) for tensor in (part.values, scale, part.bias)):
        return "the columns of experts are not next to each other in memory"
    if scale is None:
        return None if stored == dtype else f"experts in {stored} cannot be multiplied by {dtype}"
    if part.code is not None:
        return _why_no_code(part, scale, dtype)
    is_scaled = stored in (torch.float8_e4m3fn, torch.int8) and scale.dtype in (*_HALVES, torch.float32)
    if not is_scaled:
        return f"no kernel reads experts in {stored} with scales in {scale.dtype}"
    if part.block[1] < part.values.shape[2] and part.block[1] % MIN_COLUMNS != 0:
        return f"no kernel reads experts with a scale for every {part.block[1]} columns"
    is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    if stored == torch.float8_e4m3fn and dtype != torch.bfloat16 and is_old:
        return f"this card cannot convert fp8 to {dtype} (compute capability 8.9 and above can)"
    if dtype not in _HALVES and stored != torch.int8:
        return f"the kernels read {stored} only in half-precision models, not in {dtype}"
    return None


def _why_no_code(part: Matrices, scale: Tensor, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot read 4-bit codes, or None if they can."""
    code, group, columns = part.code, part.block[1], 2 * part.values.shape[2]
    if dtype not in _HALVES:
        return f"the kernels read {code} only in half-precision models, not in {dtype}"
    if code != "int4":
        is_known = part.block == (1, FP4_GROUPS[code or "mxfp4"])
        return None if is_known else f"no kernel reads experts in {code} with a scale for {group} columns"
    if scale.dtype not in (*_HALVES, torch.float32):
        return f"no kernel reads experts in int4 with scales in {scale.dtype}"
    if columns % group or (group < columns and (group < MIN_COLUMNS or group & (group - 1))):
        return f"no kernel reads experts in int4 with groups of {group} columns"
    if part.zero is not None and part.zero.stride() != scale.stride():
        return "the zero points of experts do not lie as their scales do"
    return None
