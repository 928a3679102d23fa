"""The `config_groups` of compressed-tensors: which targets are stored in which scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.schemes import (
    CompressedIntScheme,
    CompressedMxfp4Scheme,
    CompressedNvfp4Scheme,
    ScaledScheme,
    Scheme,
)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The `weights` of one group, with the library's defaults."""

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


def compressed_schemes(section: Fields) -> Mapping[str, Scheme | None]:
    """Target (a module name, "re:" and an expression, or a class name) -> its scheme; None: plain."""
    _refuse_what_changes_the_weights(section)
    groups = section.section("config_groups")
    if not groups.raw:
        raise section.error(f"has no {section.prefix}config_groups")
    targets: dict[str, Scheme | None] = {}
    for key, raw in groups.raw.items():
        if not isinstance(raw, Mapping):
            raise groups.error(f"says {groups.prefix}{key} = {raw!r}; a preset by name is not supported")
        group = groups.section(key)
        scheme = _group_scheme(section, group)
        for target in group.items("targets", str) or ():
            targets[target] = scheme
    return targets


def _refuse_what_changes_the_weights(section: Fields) -> None:
    sparsity = section.section("sparsity_config")
    sparsity.refuse("format", "dense")
    section.refuse("transform_config", {})
    section.refuse("moe_sparsity_config", {})


def _group_scheme(section: Fields, group: Fields) -> Scheme | None:
    if group.raw.get("weights") is None:
        return None
    weights = _read_weights(group.section("weights"))
    layout = group.optional("format", str) or section.get("format", str)
    if layout == "dense":
        return None
    if layout in ("float-quantized", "naive-quantized", "int-quantized"):
        return _scaled(weights, layout)
    if layout == "mxfp8-quantized":
        return _mxfp8(weights, layout)
    if layout == "pack-quantized":
        return _packed_int(weights, layout)
    if layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return _packed_float(weights, layout)
    raise group.error(f"says {group.prefix}format = {layout!r}, which is not supported")


def _read_weights(fields: Fields) -> _Weights:
    fields.refuse("dynamic", False)
    group_size = fields.optional("group_size", int)
    default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = fields.get("strategy", str, default).lower()
    order = fields.raw.get("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise fields.error(f"says {fields.prefix}actorder = {order!r}, which is not supported")
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
    """[128, 128], or "128x128" in older files."""
    value = fields.raw.get("block_structure")
    parts = value.split("x") if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and len(parts) == 2 and all(str(side).isdigit() for side in parts):
        rows, columns = int(parts[0]), int(parts[1])
        if rows > 0 and columns > 0:
            return rows, columns
    raise fields.error(f"says {fields.prefix}block_structure = {value!r}, expected two sizes")


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


def _mxfp8(weights: _Weights, layout: str) -> Scheme:
    found = (weights.kind, weights.bits, weights.strategy, weights.group_size, weights.is_symmetric)
    if found != ("float", 8, "group", 32, True):
        raise weights.refuse(layout)
    return ScaledScheme(
        name="compressed-tensors MXFP8",
        dtype=torch.float8_e4m3fn,
        block=(1, 32),
        scale_dtypes=(torch.uint8,),
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


def _packed_float(weights: _Weights, layout: str) -> Scheme:
    expected = ("tensor_group", 16) if layout.startswith("nvfp4") else ("group", 32)
    if (weights.kind, weights.bits, weights.is_symmetric) != ("float", 4, True):
        raise weights.refuse(layout)
    if (weights.strategy, weights.group_size) != expected:
        raise weights.refuse(layout)
    return CompressedNvfp4Scheme() if layout.startswith("nvfp4") else CompressedMxfp4Scheme()
