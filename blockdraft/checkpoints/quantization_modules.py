"""Decides which modules a quantisation covers, by the rules of the libraries that write the lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.schemes import Scheme

# The last part of a router's name. AutoGPTQ, AutoAWQ and DeepSeek's fp8 never quantise routers.
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of one checkpoint."""

    name: str
    # Returns the scheme of a module by its Hugging Face path (without ".weight"); None if it is plain.
    scheme: Callable[[str], Scheme | None]


def transformers_rule(section: Fields, patterns: Sequence[str]) -> Callable[[str], bool]:
    """The rule of transformers: a regular expression up to a module boundary, or a literal suffix."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    expressions = [regex(section, "modules_to_not_convert", f"(?:{key}){boundary}") for key in patterns]

    def rule(module: str) -> bool:
        return module.endswith(tuple(patterns)) or any(expression.match(module) for expression in expressions)

    return rule


def regex(section: Fields, key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise section.error(
            f"has {pattern!r} in {section.prefix}{key}, which is not a regular expression ({error})"
        ) from None


def is_router(module: str) -> bool:
    return module.rpartition(".")[2] in _ROUTERS


def is_head(module: str) -> bool:
    return module.rpartition(".")[2] == "lm_head"


def modelopt_match(module: str, pattern: str) -> bool:
    """Match a glob; a plain path, or one with a final star, matches that module and everything below it."""
    stem = pattern.removesuffix("*").removesuffix(".")
    if stem and "*" not in stem and "?" not in stem and "[" not in stem:
        return module == stem or module.startswith(f"{stem}.")
    return fnmatchcase(module, pattern)
