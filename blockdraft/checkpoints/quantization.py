"""How a checkpoint is quantised, read from config.json and hf_quant_config.json.

Each method has its own way to say which modules it left alone; each is matched here by the rule of the
library that writes it: regular expressions with module boundaries (transformers), substrings (AutoAWQ),
exact names and "re:" (compressed-tensors), globs (ModelOpt). What is not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from blockdraft.checkpoints.compressed_groups import compressed_schemes
from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.gptq_config import read_auto_round, read_awq, read_gptq
from blockdraft.checkpoints.module_rules import (
    Quantization,
    compressed_match,
    is_router,
    modelopt_match,
    names,
    regex,
    transformers_rule,
)
from blockdraft.checkpoints.schemes import (
    FLOATS,
    FusedMxfp4Scheme,
    ModeloptNvfp4Scheme,
    ScaledScheme,
    Scheme,
    TensorSpec,
)
from blockdraft.errors import ModelError

__all__ = ["Quantization", "Scheme", "TensorSpec", "read_quantization"]

_FP8 = torch.float8_e4m3fn


class _QuantFileFields(Fields):
    """The same reads, of ModelOpt's own file."""

    def error(self, what: str) -> ModelError:
        return ModelError(f"'{self.owner}': hf_quant_config.json {what}. See docs/models.md.")


def read_quantization(
    config: Mapping[str, object], quant_file: Mapping[str, object] | None, *, name: str
) -> Quantization | None:
    """What config.json and hf_quant_config.json (None: not there) say; None: nothing is quantised."""
    section = _find_section(Fields(config, owner=name))
    file = None if quant_file is None else _QuantFileFields(quant_file, owner=name)
    if section is None:
        return None if file is None else _modelopt(_file_section(file))
    method = _method(section)
    if method.startswith("modelopt"):
        return _modelopt(_modelopt_section(section, file))
    if file is not None:
        raise section.error(
            f"says {section.prefix}quant_method = {method!r}, but hf_quant_config.json says the weights are "
            "ModelOpt's; remove the one that is not true"
        )
    if method not in _READERS:
        raise section.error(
            f"says {section.prefix}quant_method = {method!r}, which is not supported; supported: "
            f"{', '.join([*_READERS, 'modelopt'])}"
        )
    return _READERS[method](section)


def _find_section(fields: Fields) -> Fields | None:
    places = (
        fields.section("quantization_config"),
        fields.section("text_config").section("quantization_config"),
        fields.section("compression_config"),
    )
    return next((section for section in places if section.raw), None)


def _method(section: Fields) -> str:
    method = section.optional("quant_method", str)
    if method is not None:
        return method.lower()
    if section.raw.get("load_in_4bit") or section.raw.get("load_in_8bit"):
        return "bitsandbytes"
    if section.raw.get("quant_algo"):
        return "modelopt"
    raise section.error(f"has {section.prefix.rstrip('.')} without a quant_method")


# Fine-grained and per-tensor fp8


def _fp8(section: Fields) -> Quantization:
    section.refuse("fmt", "e4m3")
    section.refuse("expert_dtype", "fp8")
    section.refuse("modules_to_convert", [])
    block = _block_size(section)
    if block is not None:
        scheme = ScaledScheme(
            name=f"fp8, {block[0]}x{block[1]} blocks",
            dtype=_FP8,
            block=block,
            scale_suffix=".weight_scale_inv",
            scale_dtypes=(*FLOATS, torch.float8_e8m0fnu),
        )
    else:
        # transformers writes an explicit null and keeps its own name; AutoFP8 has no such key.
        suffix = ".weight_scale_inv" if "weight_block_size" in section.raw else ".weight_scale"
        scheme = ScaledScheme(
            name="fp8, one scale per tensor", dtype=_FP8, block=(None, None), scale_suffix=suffix
        )
    skipped = names(section, "modules_to_not_convert")
    if skipped is None:
        skipped = names(section, "ignored_layers")
    is_skipped = transformers_rule(section, ["lm_head"] if skipped is None else skipped)
    return Quantization(
        name="fp8", rule=lambda module: None if is_router(module) or is_skipped(module) else scheme
    )


def _block_size(section: Fields) -> tuple[int, int] | None:
    sides = section.items("weight_block_size", int)
    if sides is None:
        return None
    if len(sides) != 2 or min(sides) <= 0:
        raise section.error(f"says {section.prefix}weight_block_size = {list(sides)}, expected two sizes")
    return sides[0], sides[1]


def _mxfp4(section: Fields) -> Quantization:
    """gpt-oss: the fused experts and nothing else."""
    is_skipped = transformers_rule(section, names(section, "modules_to_not_convert") or [])
    scheme = FusedMxfp4Scheme()

    def rule(module: str) -> Scheme | None:
        parent, _, projection = module.rpartition(".")
        if projection not in ("gate_up_proj", "down_proj") or not parent.endswith("experts"):
            return None
        return None if is_skipped(parent) else scheme

    return Quantization(name="mxfp4", rule=rule)


# compressed-tensors


def _compressed(section: Fields) -> Quantization:
    targets = compressed_schemes(section)
    ignored = names(section, "ignore") or []
    for key, patterns in (("config_groups", list(targets)), ("ignore", ignored)):
        for pattern in patterns:
            if pattern.startswith("re:"):
                regex(section, key, pattern[3:])
    # The library's order: exact names, then expressions, then classes.
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))

    def rule(module: str) -> Scheme | None:
        if "Linear" in ignored or any(compressed_match(module, pattern) for pattern in ignored):
            return None
        matched = next((target for target in ordered if compressed_match(module, target)), "Linear")
        return targets.get(matched)

    layout = section.get("format", str, "mixed-precision")
    return Quantization(name=f"compressed-tensors {layout}", rule=rule)


# ModelOpt


def _modelopt_section(section: Fields, file: Fields | None) -> Fields:
    """The place with the algorithm: config.json, its nested form, or ModelOpt's own file."""
    here = section.section("quantization") if section.raw.get("quantization") else section
    if file is None:
        return here
    there = _file_section(file)
    if not here.raw.get("quant_algo"):
        return there
    if _algorithm(here) != _algorithm(there):
        raise here.error(
            f"says {here.prefix}quant_algo = {here.raw.get('quant_algo')!r}, but hf_quant_config.json says "
            f"{there.raw.get('quant_algo')!r}; remove the one that is not true"
        )
    return here


def _file_section(file: Fields) -> Fields:
    raw = file.raw.get("quantization")
    if not isinstance(raw, Mapping):
        raise file.error(f"says quantization = {raw!r}, expected an object")
    return _QuantFileFields(raw, owner=file.owner, prefix="quantization.")


def _modelopt(fields: Fields) -> Quantization | None:
    algorithm = _algorithm(fields)
    if algorithm is None:
        return None  # only the cache is quantised, and ours is not
    excluded = [*(names(fields, "exclude_modules") or []), *(names(fields, "ignore") or [])]
    layers = fields.raw.get("quantized_layers")
    schemes: Mapping[str, Scheme | None] | None = None
    default: Scheme | None = None
    if algorithm == "MIXED_PRECISION" and isinstance(layers, Mapping):
        schemes = {str(name): _modelopt_layer(fields, str(name), layer) for name, layer in layers.items()}
    else:
        default = _modelopt_scheme(fields, algorithm)

    def rule(module: str) -> Scheme | None:
        if any(modelopt_match(module, pattern) for pattern in excluded):
            return None
        return default if schemes is None else schemes.get(module)

    return Quantization(name=f"modelopt {algorithm}", rule=rule)


def _algorithm(fields: Fields) -> str | None:
    algorithm = fields.optional("quant_algo", str)
    return None if algorithm is None else algorithm.upper()


def _modelopt_layer(fields: Fields, name: str, layer: object) -> Scheme:
    if not isinstance(layer, Mapping):
        raise fields.error(f"says {fields.prefix}quantized_layers.{name} = {layer!r}, expected an object")
    inner = type(fields)(layer, owner=fields.owner, prefix=f"{fields.prefix}quantized_layers.{name}.")
    return _modelopt_scheme(inner, _algorithm(inner) or "missing")


def _modelopt_scheme(fields: Fields, algorithm: str) -> Scheme:
    fields.refuse("has_zero_point", False)
    fields.refuse("pre_quant_scale", False)
    if algorithm == "NVFP4":
        fields.refuse("group_size", 16)
        return ModeloptNvfp4Scheme()
    blocks = {"FP8": (None, None), "FP8_PER_CHANNEL_PER_TOKEN": (1, None), "FP8_PB_WO": (128, 128)}
    if algorithm not in blocks:
        raise fields.error(
            f"says {fields.prefix}quant_algo = {algorithm!r}, which is not supported; supported: NVFP4, "
            f"{', '.join(blocks)}"
        )
    return ScaledScheme(name=f"ModelOpt {algorithm}", dtype=_FP8, block=blocks[algorithm])


_READERS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "compressed-tensors": _compressed,
}
