"""Names the parts of a pair that run slower than they could, because no kernel takes their shape or format.

A start warns of each: which part, why, and what runs instead. Answers stay exact. A part that merely gets
other tiles is not named. Kernels that do not compile on a GPU are found later, by `fallback`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from blockdraft.cache.spec import Compressed, Paged
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.kernels.pick.attention import why_no_heads
from blockdraft.kernels.pick.products import why_unpacked
from blockdraft.models.layers import Embedding, Linear
from blockdraft.models.moe import ExpertLinear, Experts
from blockdraft.models.packed import Packed, Scaled, Stacked
from blockdraft.models.packed_gguf import GgufPacked
from blockdraft.models.packed_groups import Fp4Groups, IntGroups
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.models.packed_words import Words, why_no_words
from blockdraft.planner.plan import Plan
from blockdraft.start.memory import why_no_graphs

_NAMES = {GgufPacked: "packed GGUF values", IntGroups: "integers in groups", Fp4Groups: "FP4 in groups"}


def slower_parts(models: LoadedPair, plan: Plan) -> tuple[str, ...]:
    """Return a line for each part that no kernel takes: which part, why, and what runs instead."""
    at = models.target.kernels.available
    if at.path == "reference":  # asked for
        return ()
    why = replace(at, off=frozenset()).why_reference("products")
    if why is not None:  # not named if it is the machine's fault: `doctor` examines machines
        is_dtype = replace(at, off=frozenset(), dtype=torch.float32).why_reference("products") is None
        return (f"{why}: PyTorch's operations run instead, which is slower.",) if is_dtype else ()
    is_captured = not plan.start.graphs or why_no_graphs(models, plan) is None
    also = "" if is_captured else " and steps are not captured"
    found = list(_attention(models, plan))
    for label, model in zip(("target", "drafter"), models.models(), strict=False):
        setting = "--quantization" if label == "target" else "--draft-quantization"
        if models.device.type != "cpu":  # a CPU has no kernels of experts
            found += [
                f"the {label}'s experts run one after another{also}, which is slower: {why}."
                for why in _experts(model)
            ]
        found += [
            f"the {label}'s weights are unpacked for every product{also}, which is slower: {why}. A step "
            f"moves {_size(num_bytes)} more. See {setting}."
            for why, num_bytes in _packed(model, has_expert_kernels=models.device.type != "cpu").items()
        ]
        found += [
            f"{_size(num_bytes)} of the {label}'s weights are held unpacked only, so small steps do not gain "
            f"from their packed form: {why}."
            for why, num_bytes in _unpacked_only(model).items()
        ]
    if not plan.prefix_cache and "prefix_cache" in plan.reasons:
        found.append(f"prompts that begin alike are computed whole: {plan.reasons['prefix_cache']}.")
    return tuple(dict.fromkeys(found))


def _attention(models: LoadedPair, plan: Plan) -> Iterator[str]:
    at = models.target.kernels.available
    for spec in models.cache_specs(plan.kv_dtype, plan.draft_kv_dtype):
        if isinstance(spec, Paged):
            kv_dtype = spec.format if isinstance(spec, Compressed) else EXACT
            why = why_no_heads(at, spec.head_dim, kv_dtype)
            if why is not None:
                yield f"PyTorch's attention runs instead of ours, which is slower: {why}."


def _experts(model: nn.Module) -> Iterator[str]:
    """Yield why a GPU's kernels do not run experts."""
    for part in model.modules():
        if isinstance(part, Experts) and "experts" not in part.kernels.off:
            why = part.why_not_captured()
            if why is not None:
                yield why


def _packed(model: nn.Module, *, has_expert_kernels: bool) -> Counter[str]:
    """Return why no kernel reads packed weights, and the bytes of their values, written and read again."""
    found: Counter[str] = Counter()
    for part in model.modules():
        if isinstance(part, ExpertLinear) and has_expert_kernels:
            continue  # named by `_experts`
        if isinstance(part, Linear | Embedding | ExpertLinear) and isinstance(part.weight, Packed):
            why = _why_unpacked(part, part.weight)
            if why is not None:
                found[why] += 2 * math.prod(part.weight.shape) * part.kernels.available.dtype.itemsize
    return found


def _unpacked_only(model: nn.Module) -> Counter[str]:
    """Return why weights of a plan for both forms have no packed one, and their bytes."""
    found: Counter[str] = Counter()
    for part in model.modules():
        if isinstance(part, Linear) and part.why_unpacked:
            found[part.why_unpacked] += sum(tensor.nbytes for tensor in part.parameters())
    return found


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def _why_unpacked(part: Linear | Embedding | ExpertLinear, weight: Packed) -> str | None:
    if isinstance(weight, Int8Matrix | Words):
        return None
    if isinstance(weight, Scaled) and weight.has_row_scales:
        return why_unpacked(part.kernels.available, weight.values)
    at = part.kernels.available
    why = "" if isinstance(part, ExpertLinear) else why_no_words(weight, at.dtype, at.device)
    return f"no kernel reads {_format(weight)}{why and f' ({why})'}"


def _format(weight: Packed) -> str:
    if isinstance(weight, Stacked):
        return " and ".join(sorted({_format(part) for part in weight.members()}))
    if isinstance(weight, Scaled):
        kind = str(weight.values.dtype).removeprefix("torch.")
        zero = "" if weight.zero is None else " and zero points"
        return f"{kind} with a scale for each {weight.block[0]} x {weight.block[1]} values{zero}"
    return next((name for kind, name in _NAMES.items() if isinstance(weight, kind)), type(weight).__name__)
