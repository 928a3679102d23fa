"""Which number formats the card computes in, and what this engine makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from blockdraft.machine.cards import Capability, has_bf16, has_fp4, has_fp8, has_tma

ATTENTION = {9: "FlashAttention 3", 10: "FlashAttention 4"}  # by major capability; elsewhere 2
BF16_FEATURES = ("bf16", "avx512_bf16", "amx_bf16")
State = Literal["native", "emulated", "no"]


@dataclass(frozen=True, slots=True)
class Ability:
    """`state` is of the hardware: emulated is right, at the speed of the format that it is widened to."""

    name: str
    state: State
    native_engine: str  # what this engine does with it
    others: str  # what vLLM and SGLang do with it


def abilities(capability: Capability | None, cpu_features: frozenset[str]) -> Iterator[Ability]:
    """None: no GPU, or one that nobody knows."""
    if capability is None or capability == (0, 0):
        yield from _of_cpu(cpu_features)
        return
    widened = (
        "unpacked to bf16 when loaded; --quantization keep unpacks at every product instead, without graphs"
    )
    yield Ability("bf16", _state(has_bf16(capability)), "the default", "the default")
    yield Ability(
        "fp8",
        _state(has_fp8(capability)),
        "weights in fp8; up to 16 tokens widened exactly, "
        + ("beyond them fp8 by fp8" if has_fp8(capability) else "beyond them too"),
        "fp8 by fp8" if has_fp8(capability) else "weight only (Marlin)",
    )
    fp4 = (
        "FP4 tensor cores" if has_fp4(capability) else "weight only (Marlin): memory is saved, not arithmetic"
    )
    yield Ability("NVFP4", _state(has_fp4(capability)), widened, fp4)
    yield Ability(
        "MXFP4",
        _state(has_fp4(capability)),
        "experts stay in four bits and are widened in the kernel (gpt-oss); other weights as NVFP4",
        fp4,
    )
    yield Ability("int8", "native", "weights in int8, widened in the kernel", "int8 by int8")
    yield Ability("int4 (GPTQ, AWQ)", "emulated", widened, "weight only (Marlin)")
    tma = (
        "in gate and up of 17 to 128 tokens" if capability[0] == 9 else "not used: that kernel is for Hopper"
    )
    yield Ability(
        "TMA",
        "native" if has_tma(capability) else "no",
        tma if has_tma(capability) else "the plain kernels",
        ATTENTION.get(capability[0], "FlashAttention 2") + (" and CUTLASS" if has_tma(capability) else ""),
    )
    yield _launches(capability)


def _launches(capability: Capability) -> Ability:
    has_pdl = capability >= (9, 0)
    ours = "every kernel is resident before the one in front has ended" if has_pdl else "not used"
    return Ability(
        "programmatic dependent launch",
        "native" if has_pdl else "no",
        ours,
        "some kernels" if has_pdl else "not used",
    )


def _state(is_native: bool) -> State:
    return "native" if is_native else "emulated"


def _of_cpu(features: frozenset[str]) -> Iterator[Ability]:
    yield Ability("float32", "native", "the default", "--dtype float32")
    has_own = not features.isdisjoint(BF16_FEATURES)
    yield Ability(
        "bf16",
        _state(has_own),
        "by --dtype bfloat16, with PyTorch's kernels: ours compute in float32",
        "the default" if has_own else "--dtype float32 instead: bf16 is slow, or ends with SIGILL",
    )
    for name in ("fp8", "NVFP4", "MXFP4", "int4 (GPTQ, AWQ)"):
        yield Ability(name, "emulated", "unpacked to float32 when loaded", "not checked by us")
