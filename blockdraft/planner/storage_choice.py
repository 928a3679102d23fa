"""StorageChoice: how the weights of target and drafter are held. The resolver asks it, with the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from blockdraft.errors import SettingsError
from blockdraft.kernels.cpu import why_not_here
from blockdraft.kernels.packed_speeds import MEASURED, NOT_MEASURED, Code, KernelSpeed
from blockdraft.machine.machine import Machine
from blockdraft.models.config import ModelConfig, Storage
from blockdraft.planner.plan import ELEMENT_BYTES, Weights
from blockdraft.planner.quality import Quality, measured_quality
from blockdraft.settings.model_source import known_name

UNPACK_SHARE = 0.5  # of the free memory; weights that would take more stay packed
NO_DRAFT_FORMAT = "int4 drafts are accepted less, fp8 and int8 were not timed (docs/quality.md)"
Take = Callable[[str, Storage, str], Storage]  # a setting's name, its value for "auto", and the reason


@dataclass(frozen=True, slots=True)
class StorageRequest:
    """The settings that matter here, and the tokens of a row's widest block."""

    model: str
    dtype: str
    is_dummy: bool  # no files are read
    wanted: dict[str, Storage | str]  # by the setting's name
    max_num_seqs: int | str
    block: int


class StorageChoice:
    """Chooses for one setup. `take` returns the user's value or ours, and records the reason."""

    def __init__(
        self, asked: StorageRequest, machine: Machine, model: ModelConfig, *, is_cpu: bool, take: Take
    ) -> None:
        self._asked, self._machine, self._model = asked, machine, model
        self._is_cpu, self._take = is_cpu, take

    def choose(
        self, both: tuple[Weights, Weights], memory: int, dtype: str, *, has_int8: bool
    ) -> tuple[Storage, Storage, int]:
        """Return how the weights of target and drafter are held, and the bytes of both."""
        if self._asked.is_dummy:  # random weights are not packed
            both = (replace(both[0], method=None), replace(both[1], method=None))
        element_bytes = ELEMENT_BYTES[dtype]
        multiplies_int8 = self._is_cpu and dtype == "float32" and why_not_here() is None
        quality = measured_quality(known_name(self._asked.model)) if multiplies_int8 and has_int8 else None
        choose = partial(
            self._storage,
            fits=lambda one, storage: _weight_bytes(one, storage, element_bytes) <= memory * UNPACK_SHARE,
            quality=quality,
            multiplies_int8=multiplies_int8,
        )
        target, draft = choose("quantization", both[0]), choose("draft_quantization", both[1])
        held = sum(_weight_bytes(*one, element_bytes) for one in zip(both, (target, draft), strict=True))
        return target, draft, held

    def _storage(
        self,
        name: str,
        weights: Weights,
        *,
        fits: Callable[[Weights, Storage], bool],
        quality: Quality | None,
        multiplies_int8: bool,
    ) -> Storage:
        """Choose how to hold a checkpoint's weights. `fits`: whether they fit easily in a storage.

        Most packed formats have no kernel: every forward unpacks them again. So weights stay packed only if
        memory requires it. `quality`: the cost of int8 products on this CPU, or None if not measured.
        """
        method = weights.method
        self._check_storage(name, weights)
        if self._asked.is_dummy:
            made: Storage = self._take(name, "none", "no files are read")
            return "none" if made == "keep" else made
        if quality is not None and method in (None, "GGUF"):
            return self._take(name, "int8", f"whole numbers are fastest on a CPU; {quality}")
        if method is None:
            why = "the file is not quantised"
            if name == "draft_quantization" and not self._is_cpu:
                why += f"; {NO_DRAFT_FORMAT}"
            return self._take(name, "none", why)
        speed = self._speed(weights.code, is_draft=name == "draft_quantization")
        if method != "GGUF" and self._multiplies_packed(speed):  # GGUF packs embeddings, too
            why = "steps of so few rows are faster packed, with the same bits (benchmarks/log.md)"
            return self._take(name, "keep", f"the file is {method}, and {why}")
        if not fits(weights, "none"):
            size = f"unpacked it would take over {UNPACK_SHARE:.0%} of the memory"
            return self._take(name, "keep", f"the file is {method}, and {size}")
        # "both" is faster for few rows and as fast for many, by its products: no card has served with it yet.
        faster = "both" if speed.plain and fits(weights, "both") else "keep"
        flag = "--" + name.replace("_", "-")
        but = f" for many rows; with few, {flag} {faster} is" if speed.unpacking else ""
        why = f"the file is {method}; unpacked it fits easily and is faster{but}"
        if multiplies_int8 and name == "quantization":
            why += (
                "; int8 is faster still (--quantization int8), but its cost in quality is not measured here"
            )
        return self._take(name, "none", why)

    def _check_storage(self, name: str, weights: Weights) -> None:
        """Refuse a format that cannot be made, or that no kernel multiplies."""
        wanted, is_draft = self._asked.wanted[name], name == "draft_quantization"
        code: Code | None = "int4" if self._asked.is_dummy else weights.code
        if wanted == "int4" and not self._speed("int4", is_draft=is_draft).unpacking:
            raise SettingsError(
                f"{name} = int4, but on this device no kernel was measured that multiplies this model in "
                "int4: that takes dense layers, an H100 or H200, and bfloat16 or float16. Use int8 or fp8."
            )
        if wanted == "both" and not self._speed(code, is_draft=is_draft).plain:
            raise SettingsError(
                f"{name} = both, but on this device no kernel was measured that multiplies these weights "
                f"({weights.method or 'not quantised'}) packed: that takes dense layers in int4 or NVFP4, "
                "and an H100 or H200. Use keep or none."
            )
        if wanted in ("fp8", "int8", "int4") and weights.method not in (None, "GGUF"):
            raise SettingsError(
                f"{name} = {wanted}, but the checkpoint is quantised already ({weights.method}): use keep "
                "or none, or give the unquantised checkpoint."
            )

    def _multiplies_packed(self, speed: KernelSpeed) -> bool:
        """Return whether the packed product is the faster one in all steps: so few rows were asked for."""
        rows = self._asked.max_num_seqs
        return isinstance(rows, int) and rows * self._asked.block <= speed.unpacking

    def _speed(self, code: Code | None, *, is_draft: bool = False) -> KernelSpeed:
        """Return what was measured of the kernel on such a card; experts have none."""
        is_dense = is_draft or all(layer.moe is None for layer in self._model.layers)
        has_kernel = self._asked.dtype in ("auto", "bfloat16", "float16") and not self._is_cpu
        if not has_kernel or not self._machine.gpus or code is None or not is_dense:
            return NOT_MEASURED
        return MEASURED.get((self._machine.gpus[0].capability, code), NOT_MEASURED)


def _weight_bytes(weights: Weights, storage: Storage, element_bytes: int) -> int:
    """Return the bytes of the weights. Packed formats count half a byte for each value."""
    each = {"none": float(element_bytes), "fp8": 1.0, "int8": 1.0, "int4": 0.54, "keep": 0.5}
    each["both"] = each["none"] + (1.07 if weights.code == "q8_0" else 0.63)
    return int(weights.num_values * each[storage])
