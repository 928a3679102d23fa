"""Which modules a quantisation covers: the matching rules of the libraries that write the lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.schemes import Scheme

# Names that end like this are routers, which AutoGPTQ, AutoAWQ and DeepSeek's fp8 never quantise.
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of one checkpoint."""

    name: str
    # How the module of a Hugging Face path (without ".weight") is stored; None: plain.
    scheme: Callable[[str], Scheme | None]


def transformers_rule(section: Fields, patterns: Sequence[str]) -> Callable[[str], bool]:
    """transformers' rule: an expression from the start up to a module boundary, or a literal end."""
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
    """A glob; a path alone, or with one star at its end, means that module and all below it."""
    stem = pattern.removesuffix("*").removesuffix(".")
    if stem and "*" not in stem and "?" not in stem and "[" not in stem:
        return module == stem or module.startswith(f"{stem}.")
    return fnmatchcase(module, pattern)
