"""Reads how a checkpoint is quantised, from config.json and hf_quant_config.json.

Each method has its own list of unquantised modules. The list is matched by the rule of the library that
writes it: regular expressions with module boundaries (transformers), substrings (AutoAWQ), exact names and
"re:" (compressed-tensors), globs (ModelOpt). Unsupported methods raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.quantization_compressed import read_compressed
from blockdraft.checkpoints.quantization_gptq import read_auto_round, read_awq, read_gptq
from blockdraft.checkpoints.schemes import (
    FLOATS,
    FUSED_MXFP4,
    MODELOPT_NVFP4,
    MODELOPT_NVFP4_AWQ,
    Quantization,
    ScaledScheme,
    Scheme,
    is_router,
)

_FP8 = torch.float8_e4m3fn


def read_quantization(
    config: Mapping[str, object], quant_file: Mapping[str, object] | None, *, name: str
) -> Quantization | None:
    """Return the quantisation, or None for plain weights. `quant_file` is hf_quant_config.json or None."""
    section = _find_section(Fields(config, owner=name))
    file = None if quant_file is None else Fields(quant_file, owner=name, file="hf_quant_config.json")
    if section is None:
        return None if file is None else _modelopt(_file_section(file))
    method = _method(section)
    if method.startswith("modelopt"):
        return _modelopt(_modelopt_section(section, file))
    if file is not None:
        why = "but hf_quant_config.json says the weights are ModelOpt's; remove the wrong one"
        raise section.wrong("quant_method", method, why)
    if method not in _READERS:
        known = ", ".join([*_READERS, "modelopt"])
        raise section.wrong("quant_method", method, f"which is not supported; supported: {known}")
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


# ---- transformers: fine-grained and per-tensor fp8, and gpt-oss


def _fp8(section: Fields) -> Quantization:
    section.refuse("fmt", "e4m3")
    section.refuse("expert_dtype", "fp8")
    section.refuse("modules_to_convert", [])
    block = section.items("weight_block_size", int)
    if block is None:
        # transformers writes an explicit null and keeps its own name; AutoFP8 has no such key.
        suffix = ".weight_scale_inv" if "weight_block_size" in section.raw else ".weight_scale"
        scheme = ScaledScheme("fp8, one scale per tensor", _FP8, (None, None), suffix)
    elif len(block) != 2 or min(block) <= 0:
        raise section.wrong("weight_block_size", list(block), "expected two sizes")
    else:
        name, dtypes = f"fp8, {block[0]}x{block[1]} blocks", (*FLOATS, torch.float8_e8m0fnu)
        scheme = ScaledScheme(name, _FP8, (block[0], block[1]), ".weight_scale_inv", dtypes)
    skipped = section.items("modules_to_not_convert", str)
    if skipped is None:
        skipped = section.items("ignored_layers", str)
    is_skipped = _transformers_rule(section, ["lm_head"] if skipped is None else skipped)
    return Quantization("fp8", lambda module: None if is_router(module) or is_skipped(module) else scheme)


def _transformers_rule(section: Fields, patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return transformers' rule as a function: regular expressions up to a module boundary, or suffixes."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    expressions = [section.regex("modules_to_not_convert", f"(?:{key}){boundary}") for key in patterns]

    def rule(module: str) -> bool:
        return module.endswith(tuple(patterns)) or any(expression.match(module) for expression in expressions)

    return rule


def _mxfp4(section: Fields) -> Quantization:
    """Return the quantisation of gpt-oss, in which only the fused experts are quantised."""
    is_skipped = _transformers_rule(section, section.items("modules_to_not_convert", str) or ())

    def rule(module: str) -> Scheme | None:
        parent, _, projection = module.rpartition(".")
        is_expert = projection in ("gate_up_proj", "down_proj") and parent.endswith("experts")
        return FUSED_MXFP4 if is_expert and not is_skipped(parent) else None

    return Quantization("mxfp4", rule)


# ---- ModelOpt


def _modelopt_section(section: Fields, file: Fields | None) -> Fields:
    """Return the section with the algorithm: in config.json (maybe nested), or in ModelOpt's own file."""
    here = section.section("quantization") if section.raw.get("quantization") else section
    if file is None:
        return here
    there = _file_section(file)
    if not here.raw.get("quant_algo"):
        return there
    if _algorithm(here) != _algorithm(there):
        other = there.raw.get("quant_algo")
        why = f"but hf_quant_config.json says {other!r}; remove the wrong one"
        raise here.wrong("quant_algo", here.raw.get("quant_algo"), why)
    return here


def _file_section(file: Fields) -> Fields:
    if file.raw.get("quantization") is None:
        raise file.wrong("quantization", None, "expected an object")
    return file.section("quantization")


def _modelopt(fields: Fields) -> Quantization | None:
    algorithm = _algorithm(fields)
    if algorithm is None:
        return None  # only the cache is quantised, which we ignore
    excluded = [*(fields.items("exclude_modules", str) or ()), *(fields.items("ignore", str) or ())]
    schemes: Mapping[str, Scheme] | None = None
    default: Scheme | None = None
    if algorithm == "MIXED_PRECISION" and isinstance(fields.raw.get("quantized_layers"), Mapping):
        layers = fields.section("quantized_layers")
        schemes = {name: _modelopt_scheme(layers.section(name)) for name in layers.raw}
    else:
        default = _modelopt_scheme(fields)

    def rule(module: str) -> Scheme | None:
        if any(_modelopt_match(module, pattern) for pattern in excluded):
            return None
        return default if schemes is None else schemes.get(module)

    return Quantization(f"modelopt {algorithm}", rule)


def _modelopt_match(module: str, pattern: str) -> bool:
    """Match a glob. A plain path, or a path with a final star, matches its module and all modules below."""
    stem = pattern.removesuffix("*").removesuffix(".")
    if stem and "*" not in stem and "?" not in stem and "[" not in stem:
        return module == stem or module.startswith(f"{stem}.")
    return fnmatchcase(module, pattern)


def _algorithm(fields: Fields) -> str | None:
    algorithm = fields.optional("quant_algo", str)
    return None if algorithm is None else algorithm.upper()


def _modelopt_scheme(fields: Fields) -> Scheme:
    algorithm = _algorithm(fields) or "missing"
    fields.refuse("has_zero_point", False)
    if algorithm in ("NVFP4", "NVFP4_AWQ"):
        fields.refuse("group_size", 16)
        has_factors = algorithm == "NVFP4_AWQ" or bool(fields.raw.get("pre_quant_scale"))
        return MODELOPT_NVFP4_AWQ if has_factors else MODELOPT_NVFP4
    fields.refuse("pre_quant_scale", False)
    blocks = {"FP8": (None, None), "FP8_PER_CHANNEL_PER_TOKEN": (1, None), "FP8_PB_WO": (128, 128)}
    if algorithm not in blocks:
        known = ", ".join(["NVFP4", "NVFP4_AWQ", *blocks])
        raise fields.wrong("quant_algo", algorithm, f"which is not supported; supported: {known}")
    return ScaledScheme(f"ModelOpt {algorithm}", _FP8, blocks[algorithm])


_READERS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "compressed-tensors": read_compressed,
}
