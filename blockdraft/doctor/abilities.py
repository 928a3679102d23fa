"""Lists the number formats that the card supports, and how the engines use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from blockdraft.kernels.packed_speeds import MEASURED, Code
from blockdraft.machine.cards import Capability, has_bf16, has_fp4, has_fp8, has_tma

ATTENTION = {9: "FlashAttention 3", 10: "FlashAttention 4"}  # by major capability; else 2
BF16_FEATURES = ("bf16", "avx512_bf16", "amx_bf16")
State = Literal["native", "emulated", "no"]


@dataclass(frozen=True, slots=True)
class Ability:
    """A number format here. `state` is the hardware's; "emulated" is as slow as the wider format in use."""

    name: str
    state: State
    native_engine: str  # what our engine does with the format
    others: str  # what vLLM and SGLang do with the format


def abilities(capability: Capability | None, cpu_features: frozenset[str]) -> Iterator[Ability]:
    """Yield the card's abilities, or the processor's if `capability` is None or (0, 0), which is unknown."""
    if capability is None or capability == (0, 0):
        yield from _of_cpu(cpu_features)
        return
    fp8, fp4, tma = has_fp8(capability), has_fp4(capability), has_tma(capability)
    marlin = "weight only (Marlin)"
    cores = "FP4 tensor cores" if fp4 else f"{marlin}: memory is saved, not arithmetic"
    others = _four_bits(capability, "mxfp4")
    experts = f"experts stay in four bits and are widened in the kernel (gpt-oss); others: {others}"
    yield Ability("bf16", _state(has_bf16(capability)), "the default", "the default")
    ours = "weights in fp8, widened exactly" + (
        "; --allow-batch-variance: many tokens fp8 by fp8" if fp8 else ""
    )
    yield Ability("fp8", _state(fp8), ours, "fp8 by fp8" if fp8 else marlin)
    yield Ability("NVFP4", _state(fp4), _four_bits(capability, "nvfp4"), cores)
    yield Ability("MXFP4", _state(fp4), experts, cores)
    yield Ability("int8", "native", "weights in int8, widened in the kernel", "int8 by int8")
    yield Ability("int4 (GPTQ, AWQ)", "emulated", _four_bits(capability, "int4"), marlin)
    hopper: State = "native" if tma else "no"  # both came with TMA
    attention = ATTENTION.get(capability[0], "FlashAttention 2")
    if not tma:
        ours = "the plain kernels"
    elif capability[0] == 9:
        ours = "used in gate and up products of 17 to 128 tokens"
    else:
        ours = "not used: that kernel is for Hopper"
    yield Ability("TMA", hopper, ours, f"{attention} and CUTLASS" if tma else attention)
    ours = "each kernel starts before the previous one has ended" if tma else "not used"
    yield Ability("programmatic dependent launch", hopper, ours, "some kernels" if tma else "not used")


def _four_bits(capability: Capability, code: Code) -> str:
    if (capability, code) in MEASURED:
        return (
            "dense layers are held packed and unpacked where memory allows, and each step takes the faster; "
            "experts are unpacked when loaded"
        )
    return (
        "unpacked to bf16 when loaded; --quantization keep unpacks dense layers at every product instead, "
        "without graphs"
    )


def _state(is_native: bool) -> State:
    return "native" if is_native else "emulated"


def _of_cpu(features: frozenset[str]) -> Iterator[Ability]:
    whole = "the default where its loss was measured (docs/quality.md); else by --quantization int8"
    yield Ability("int8", "native", whole, "not checked by us")
    yield Ability("float32", "native", "the default of other models", "--dtype float32")
    has_own = not features.isdisjoint(BF16_FEATURES)
    ours = "by --dtype bfloat16, with PyTorch's kernels: ours compute in float32"
    others = "the default" if has_own else "--dtype float32 instead: bf16 is slow, or ends with SIGILL"
    yield Ability("bf16", _state(has_own), ours, others)
    for name in ("fp8", "NVFP4", "MXFP4", "int4 (GPTQ, AWQ)"):
        yield Ability(name, "emulated", "unpacked to float32 when loaded", "not checked by us")
