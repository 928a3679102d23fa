"""The integer methods: GPTQ, AWQ and AutoRound, which writes the tensors of either."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.module_rules import Quantization, is_head, is_router, names, regex
from blockdraft.checkpoints.schemes import AwqScheme, GptqScheme, Scheme

_REGEX_CHARACTERS = frozenset("*+?^$()[]{}|\\")


@dataclass(frozen=True, slots=True)
class _GptqSettings:
    """What GPTQ and AutoRound say once for all modules and may change for some."""

    bits: int
    group_size: int
    is_symmetric: bool
    is_reordered: bool
    zero_offset: int | None

    def changed(self, fields: Fields) -> _GptqSettings:
        return replace(
            self,
            bits=fields.get("bits", int, self.bits),
            group_size=fields.get("group_size", int, self.group_size),
            is_symmetric=fields.get("sym", bool, self.is_symmetric),
            is_reordered=fields.get("desc_act", bool, self.is_reordered),
        )

    def scheme(self, fields: Fields, method: str) -> Scheme:
        if self.bits not in (4, 8):
            raise fields.error(f"says {fields.prefix}bits = {self.bits}; {method} is read with 4 or 8 bits")
        if self.zero_offset is None and not self.is_symmetric:
            raise fields.error(
                f"says {fields.prefix}sym = false with a packing_format whose zero points are ambiguous; "
                "use one in 'auto_round:auto_gptq' or 'auto_round:auto_awq'"
            )
        return GptqScheme(
            name=f"{method}, {self.bits} bit",
            bits=self.bits,
            group_size=_group_size(fields, self.group_size),
            is_symmetric=self.is_symmetric,
            is_reordered=self.is_reordered,
            zero_offset=self.zero_offset,
        )


def read_gptq(section: Fields) -> Quantization:
    section.refuse("is_marlin_format", False)
    section.refuse("pack_dtype", "int32")
    section.refuse("rotation")  # GPTQModel turns the inputs of such a model
    section.refuse("adapter")
    layout = section.get("checkpoint_format", str, section.get("format", str, "gptq")).lower()
    if layout not in ("gptq", "gptq_v2"):
        raise section.error(f"says {section.prefix}checkpoint_format = {layout!r}, which is not supported")
    settings = _GptqSettings(
        bits=section.get("bits", int),
        group_size=section.get("group_size", int, 128),
        is_symmetric=section.get("sym", bool, True),
        is_reordered=section.get("desc_act", bool, False),
        zero_offset=1 if layout == "gptq" else 0,
    )
    scheme = settings.scheme(section, "gptq")
    has_head = section.get("lm_head", bool, False)
    inside = _flat_names(section, "modules_in_block_to_quantize")
    dynamic = _dynamic(section, settings)

    def rule(module: str) -> Scheme | None:
        if is_router(module) or (is_head(module) and not has_head):
            return None
        if inside and not any(f".{module}".endswith(f".{name}") for name in inside):
            return None
        for pattern, changed in dynamic:
            if pattern.match(module):
                return changed
        return scheme

    return Quantization(name=f"gptq {settings.bits} bit", rule=rule)


def _dynamic(section: Fields, settings: _GptqSettings) -> list[tuple[re.Pattern[str], Scheme | None]]:
    """GPTQModel's exceptions: "-:" and an expression leaves modules alone, "+:" or none changes them."""
    rules = section.section("dynamic")
    exceptions: list[tuple[re.Pattern[str], Scheme | None]] = []
    for key in rules.raw:
        sign, pattern = (key[0], key[2:]) if key[:2] in ("-:", "+:") else ("+", key)
        changed = None if sign == "-" else settings.changed(rules.section(key)).scheme(section, "gptq")
        exceptions.append((regex(section, "dynamic", pattern), changed))
    return exceptions


def read_awq(section: Fields) -> Quantization:
    version = section.get("version", str, section.get("checkpoint_format", str, "gemm")).lower()
    if version != "gemm":
        raise section.error(f"says {section.prefix}version = {version!r}; only 'gemm' is supported")
    scheme = _awq_scheme(
        section,
        bits=section.get("bits", int, section.get("w_bit", int, 4)),
        group_size=section.get("group_size", int, section.get("q_group_size", int, 128)),
    )
    skipped = names(section, "modules_to_not_convert") or []
    has_head = section.get("lm_head", bool, False)

    def rule(module: str) -> Scheme | None:
        if is_router(module) or (is_head(module) and not has_head):
            return None
        return None if any(name in module for name in skipped) else scheme

    return Quantization(name="awq 4 bit", rule=rule)


def _awq_scheme(fields: Fields, *, bits: int, group_size: int) -> Scheme:
    if bits != 4:
        raise fields.error(f"says {fields.prefix}bits = {bits}; awq is read with 4 bits")
    return AwqScheme(name="awq, 4 bit", group_size=_group_size(fields, group_size))


def read_auto_round(section: Fields) -> Quantization:
    section.refuse("data_type", "int")
    section.refuse("super_bits")
    section.refuse("rotation_config", {})
    section.refuse("hadamard_config", {})
    layout = section.get("packing_format", str, "auto_round").lower()
    if layout not in ("auto_round", "auto_round:gptq", "auto_round:auto_gptq", "auto_round:auto_awq"):
        raise section.error(f"says {section.prefix}packing_format = {layout!r}, which is not supported")
    is_awq = layout == "auto_round:auto_awq"
    settings = _GptqSettings(
        bits=section.get("bits", int),
        group_size=section.get("group_size", int, 128),
        is_symmetric=section.get("sym", bool, True),
        is_reordered=False,
        zero_offset=1 if layout == "auto_round:auto_gptq" else None,
    )

    def build(fields: Fields, settings: _GptqSettings) -> Scheme | None:
        if settings.bits >= 16:
            return None
        fields.refuse("data_type", "int")
        if is_awq:
            return _awq_scheme(fields, bits=settings.bits, group_size=settings.group_size)
        return settings.scheme(fields, "auto-round (gptq)")

    scheme = build(section, settings)
    extra = section.section("extra_config")
    exact = {key: build(extra.section(key), settings.changed(extra.section(key))) for key in extra.raw}
    patterns = [
        (regex(section, "extra_config", key), exact[key]) for key in exact if _REGEX_CHARACTERS & set(key)
    ]
    blocks = _comma_names(section, "block_name_to_quantize") or _comma_names(section, "to_quant_block_names")

    def rule(module: str) -> Scheme | None:
        if module in exact:
            return exact[module]
        for pattern, changed in patterns:
            if pattern.search(module):
                return changed
        if blocks:
            return scheme if module.startswith(tuple(blocks)) else None
        return None if is_head(module) else scheme

    return Quantization(name=f"auto-round {settings.bits} bit", rule=rule)


def _group_size(fields: Fields, size: int) -> int | None:
    if size == -1:
        return None
    if size <= 0:
        raise fields.error(f"says {fields.prefix}group_size = {size}, expected a positive number or -1")
    return size


def _comma_names(fields: Fields, key: str) -> list[str]:
    """A list of names, also written as one string with commas."""
    value = fields.raw.get(key)
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return names(fields, key) or []


def _flat_names(fields: Fields, key: str) -> list[str]:
    """A list of names or of lists of names."""
    value = fields.raw.get(key)
    if not isinstance(value, list | tuple):
        return names(fields, key) or []
    flat: Iterable[object] = (
        name for item in value for name in (item if isinstance(item, list | tuple) else [item])
    )
    return names(Fields({key: list(flat)}, owner=fields.owner, prefix=fields.prefix), key) or []
