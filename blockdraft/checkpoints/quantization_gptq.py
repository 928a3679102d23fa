"""Reads the quantisation of GPTQ, AWQ and AutoRound; AutoRound uses the layout of GPTQ or of AWQ."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.schemes import (
    AwqScheme,
    GptqScheme,
    Quantization,
    Scheme,
    is_head,
    is_router,
)

_REGEX_CHARACTERS = frozenset("*+?^$()[]{}|\\")


def _changed(base: GptqScheme, fields: Fields) -> GptqScheme:
    """Return `base` with the settings in `fields`, which are for the whole checkpoint or for some modules."""
    scheme = replace(
        base,
        bits=fields.get("bits", int, base.bits),
        group_size=_group_size(fields, fields.get("group_size", int, base.group_size or -1)),
        is_symmetric=fields.get("sym", bool, base.is_symmetric),
        is_reordered=fields.get("desc_act", bool, base.is_reordered),
    )
    if scheme.bits not in (4, 8):
        raise fields.error(f"says {fields.prefix}bits = {scheme.bits}; {base.name} is read with 4 or 8 bits")
    if scheme.zero_offset is None and not scheme.is_symmetric:
        raise fields.error(
            f"says {fields.prefix}sym = false with a packing_format whose zero points are ambiguous; "
            "use one in 'auto_round:auto_gptq' or 'auto_round:auto_awq'"
        )
    return scheme


def read_gptq(section: Fields) -> Quantization:
    section.refuse("is_marlin_format", False)
    section.refuse("pack_dtype", "int32")
    section.refuse("rotation")  # GPTQModel rotates the inputs of such a model
    section.refuse("adapter")
    layout = section.get("checkpoint_format", str, section.get("format", str, "gptq")).lower()
    if layout not in ("gptq", "gptq_v2"):
        raise section.wrong("checkpoint_format", layout, "which is not supported")
    zero_offset = 1 if layout == "gptq" else 0
    scheme = _changed(GptqScheme("gptq", section.get("bits", int), 128, True, zero_offset), section)
    is_left_out = _left_out(section)
    inside = _flat_names(section, "modules_in_block_to_quantize")
    dynamic = _dynamic(section, scheme)

    def rule(module: str) -> Scheme | None:
        if is_left_out(module):
            return None
        if inside and not any(f".{module}".endswith(f".{name}") for name in inside):
            return None
        for pattern, changed in dynamic:
            if pattern.match(module):
                return changed
        return scheme

    return Quantization(f"gptq {scheme.bits} bit", rule)


def _left_out(section: Fields) -> Callable[[str], bool]:
    """Return a rule for modules that GPTQ and AWQ skip: routers, and the head unless `lm_head` is set."""
    has_head = section.get("lm_head", bool, False)
    return lambda module: is_router(module) or (is_head(module) and not has_head)


def _dynamic(section: Fields, scheme: GptqScheme) -> list[tuple[re.Pattern[str], Scheme | None]]:
    """Return GPTQModel's exceptions by expression: "-:" skips modules, "+:" or no sign changes settings."""
    rules = section.section("dynamic")
    exceptions: list[tuple[re.Pattern[str], Scheme | None]] = []
    for key in rules.raw:
        sign, pattern = (key[0], key[2:]) if key[:2] in ("-:", "+:") else ("+", key)
        changed = None if sign == "-" else _changed(scheme, rules.section(key))
        exceptions.append((section.regex("dynamic", pattern), changed))
    return exceptions


def read_awq(section: Fields) -> Quantization:
    version = section.get("version", str, section.get("checkpoint_format", str, "gemm")).lower()
    if version != "gemm":
        raise section.error(f"says {section.prefix}version = {version!r}; only 'gemm' is supported")
    bits = section.get("bits", int, section.get("w_bit", int, 4))
    group_size = section.get("group_size", int, section.get("q_group_size", int, 128))
    scheme = _awq_scheme(section, bits=bits, group_size=group_size)
    skipped = section.items("modules_to_not_convert", str) or ()
    is_left_out = _left_out(section)

    def rule(module: str) -> Scheme | None:
        return None if is_left_out(module) or any(name in module for name in skipped) else scheme

    return Quantization("awq 4 bit", rule)


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
        raise section.wrong("packing_format", layout, "which is not supported")
    bits, group_size = section.get("bits", int), section.get("group_size", int, 128)
    zero_offset = 1 if layout == "auto_round:auto_gptq" else None
    is_symmetric = section.get("sym", bool, True)
    base = GptqScheme("auto-round (gptq)", bits, _group_size(section, group_size), is_symmetric, zero_offset)

    def build(fields: Fields) -> Scheme | None:
        own_bits = fields.get("bits", int, bits)
        if own_bits >= 16:
            return None
        fields.refuse("data_type", "int")
        if layout == "auto_round:auto_awq":
            own_size = fields.get("group_size", int, group_size)
            return _awq_scheme(fields, bits=own_bits, group_size=own_size)
        return replace(_changed(base, fields), is_reordered=False)

    scheme = build(section)
    extra = section.section("extra_config")
    exact = {key: build(extra.section(key)) for key in extra.raw}
    patterns = [
        (section.regex("extra_config", key), exact[key]) for key in exact if _REGEX_CHARACTERS & set(key)
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

    return Quantization(f"auto-round {bits} bit", rule)


def _group_size(fields: Fields, size: int) -> int | None:
    if size == -1:
        return None
    if size <= 0:
        raise fields.wrong("group_size", size, "expected a positive number or -1")
    return size


def _comma_names(fields: Fields, key: str) -> tuple[str, ...]:
    """Return names from a list, or from one string with commas."""
    value = fields.raw.get(key)
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return fields.items(key, str) or ()


def _flat_names(fields: Fields, key: str) -> tuple[str, ...]:
    """Return names from a list of names or of lists of names."""
    value = fields.raw.get(key)
    if isinstance(value, list | tuple):
        flat = [name for item in value for name in (item if isinstance(item, list | tuple) else [item])]
        fields = replace(fields, raw={key: flat})
    return fields.items(key, str) or ()
