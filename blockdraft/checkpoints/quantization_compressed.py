"""Reads the quantisation of compressed-tensors: groups of target modules, each with one scheme."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.schemes import (
    COMPRESSED_MXFP4,
    COMPRESSED_NVFP4,
    CompressedIntScheme,
    Quantization,
    ScaledScheme,
    Scheme,
)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The `weights` settings of one group, with the library's defaults filled in."""

    fields: Fields
    bits: int
    kind: str  # int or float
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    is_symmetric: bool
    is_reordered: bool

    def refuse(self, layout: str) -> Exception:
        prefix = self.fields.prefix
        return self.fields.error(
            f"asks for {prefix}num_bits = {self.bits}, {prefix}type = {self.kind!r}, {prefix}strategy = "
            f"{self.strategy!r}, {prefix}group_size = {self.group_size}, {prefix}symmetric = "
            f"{self.is_symmetric} in format {layout!r}, which is not supported"
        )


def read_compressed(section: Fields) -> Quantization:
    targets = _schemes(section)
    ignored = section.items("ignore", str) or ()
    for key, patterns in (("config_groups", targets), ("ignore", ignored)):
        for pattern in patterns:
            if pattern.startswith("re:"):
                section.regex(key, pattern[3:])
    # The library matches exact names first, then expressions, then classes.
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))

    def rule(module: str) -> Scheme | None:
        if "Linear" in ignored or any(_matches(module, pattern) for pattern in ignored):
            return None
        matched = next((target for target in ordered if _matches(module, target)), "Linear")
        return targets.get(matched)

    return Quantization(f"compressed-tensors {section.get('format', str, 'mixed-precision')}", rule)


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def _schemes(section: Fields) -> Mapping[str, Scheme | None]:
    """Return the scheme (None: plain) of each target: a module name, "re:" and an expression, or a class."""
    section.section("sparsity_config").refuse("format", "dense")
    section.refuse("transform_config", {})
    section.refuse("moe_sparsity_config", {})
    groups = section.section("config_groups")
    if not groups.raw:
        raise section.error(f"has no {section.prefix}config_groups")
    targets: dict[str, Scheme | None] = {}
    for key, raw in groups.raw.items():
        if not isinstance(raw, Mapping):
            raise groups.error(f"says {groups.prefix}{key} = {raw!r}; a preset by name is not supported")
        group = groups.section(key)
        targets |= dict.fromkeys(group.items("targets", str) or (), _group_scheme(section, group))
    return targets


def _group_scheme(section: Fields, group: Fields) -> Scheme | None:
    if group.raw.get("weights") is None:
        return None
    weights = _read_weights(group.section("weights"))
    layout = group.optional("format", str) or section.get("format", str)
    if layout == "dense":
        return None
    if layout in ("float-quantized", "naive-quantized", "int-quantized"):
        return _scaled(weights, layout)
    if layout == "pack-quantized":
        return _packed_int(weights, layout)
    if layout not in _FLOAT_LAYOUTS:
        raise group.wrong("format", layout, "which is not supported")
    scheme, *expected = _FLOAT_LAYOUTS[layout]
    found = [weights.kind, weights.is_symmetric, weights.bits, weights.strategy, weights.group_size]
    if found != ["float", True, *expected]:
        raise weights.refuse(layout)
    return scheme


def _read_weights(fields: Fields) -> _Weights:
    fields.refuse("dynamic", False)
    group_size = fields.optional("group_size", int)
    default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = fields.get("strategy", str, default).lower()
    order = fields.raw.get("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise fields.wrong("actorder", order, "which is not supported")
    return _Weights(
        fields=fields,
        bits=fields.get("num_bits", int, 8),
        kind=fields.get("type", str, "int").lower(),
        strategy=strategy,
        group_size=fields.positive("group_size") if strategy in ("group", "tensor_group") else None,
        block=_read_block(fields) if strategy == "block" else None,
        is_symmetric=fields.get("symmetric", bool, True),
        is_reordered=order in (True, "group", "dynamic"),
    )


def _read_block(fields: Fields) -> tuple[int, int]:
    """Return the sides of a block from [128, 128], or from "128x128" in older files."""
    value = fields.raw.get("block_structure")
    parts = value.split("x") if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and len(parts) == 2 and all(str(side).isdigit() for side in parts):
        rows, columns = int(parts[0]), int(parts[1])
        if rows > 0 and columns > 0:
            return rows, columns
    raise fields.wrong("block_structure", value, "expected two sizes")


def _scaled(weights: _Weights, layout: str) -> Scheme:
    blocks: Mapping[str, tuple[int | None, int | None] | None] = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, weights.group_size),
        "block": weights.block,
    }
    block = blocks.get(weights.strategy)
    is_float = weights.kind == "float" and weights.bits == 8 and weights.is_symmetric
    is_int = weights.kind == "int" and weights.bits <= 8
    expected = {"float-quantized": is_float, "int-quantized": is_int, "naive-quantized": is_float or is_int}
    if block is None or weights.is_reordered or not expected[layout]:
        raise weights.refuse(layout)
    return ScaledScheme(
        name=f"compressed-tensors {layout}, {weights.kind}{weights.bits} per {weights.strategy}",
        dtype=torch.float8_e4m3fn if is_float else torch.int8,
        block=block,
        has_zero=not weights.is_symmetric,
    )


def _packed_int(weights: _Weights, layout: str) -> Scheme:
    is_per_tensor = weights.strategy == "tensor"
    is_known = weights.strategy in ("group", "channel") or (is_per_tensor and weights.is_symmetric)
    if weights.kind != "int" or weights.bits not in (4, 8) or not is_known:
        raise weights.refuse(layout)
    return CompressedIntScheme(
        name=f"compressed-tensors {layout}, int{weights.bits} per {weights.strategy}",
        bits=weights.bits,
        group_size=weights.group_size,
        is_symmetric=weights.is_symmetric,
        is_per_tensor=is_per_tensor,
        has_group_index=weights.is_reordered,
    )


_MXFP8 = ScaledScheme("compressed-tensors MXFP8", torch.float8_e4m3fn, (1, 32), scale_dtypes=(torch.uint8,))
_FLOAT_LAYOUTS: Mapping[str, tuple[Scheme, int, str, int]] = {  # scheme, bits, strategy, group size
    "mxfp8-quantized": (_MXFP8, 8, "group", 32),
    "mxfp4-pack-quantized": (COMPRESSED_MXFP4, 4, "group", 32),
    "nvfp4-pack-quantized": (COMPRESSED_NVFP4, 4, "tensor_group", 16),
}
