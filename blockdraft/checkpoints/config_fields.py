"""Reads values of config.json with type checks, and the sections that model families share. Without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from blockdraft.errors import ModelError
from blockdraft.models.config import Rope

T = TypeVar("T", int, float, bool, str)
Number = TypeVar("Number", int, float)
_MAX_VALUE_CHARS = 200  # longest value in an error message; arbitrary
_HUGE = 2**31  # larger numbers are mistakes; comparing with it also rejects NaN


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping that returns values of the requested type, or raises an error with the key and the value."""

    raw: Mapping[str, object]
    owner: str  # the checkpoint, as the user wrote it
    prefix: str = ""  # before keys in messages: the enclosing sections, each with a dot
    file: str = "config.json"
    remedy: str = "See docs/models.md."

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of `key`; null in the file counts as absent."""
        value = self.optional(key, kind)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"has no '{self.prefix}{key}'")
        return default

    def optional(self, key: str, kind: type[T]) -> T | None:
        value = self.raw.get(key)
        return None if value is None else self._typed(key, value, kind)

    def positive(self, key: str, default: int | None = None) -> int:
        return self._above_zero(key, self.get(key, int, default))

    def above_zero(self, key: str, default: float | None = None) -> float:
        return self._above_zero(key, self.get(key, float, default))

    def items(self, key: str, kind: type[T]) -> tuple[T, ...] | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.wrong(key, value, "expected a list")
        return tuple(self._typed(key, item, kind) for item in value)

    def section(self, key: str) -> Fields:
        """Return a nested object; an absent one reads as empty."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, value, "expected an object")
        return replace(self, raw=value or {}, prefix=f"{self.prefix}{key}.")

    def refuse(self, key: str, *allowed: object) -> None:
        """Raise an error if the key has a value outside `allowed`, because no other value is implemented."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            what = f"asks for {self.prefix}{key} = {_abridged(value)}"
            raise self.error(f"{what}, which is not implemented")

    def regex(self, key: str, pattern: str) -> re.Pattern[str]:
        """Compile `pattern`, which is in the value of `key`; raise an error if it is invalid."""
        try:
            return re.compile(pattern)
        except re.error as error:
            raise self.error(
                f"has {pattern!r} in {self.prefix}{key}, which is not a regular expression ({error})"
            ) from None

    def wrong(self, key: str, value: object, why: str) -> ModelError:
        return self.error(f"says {self.prefix}{key} = {_abridged(value)}, {why}")

    def error(self, what: str) -> ModelError:
        return ModelError(f"'{self.owner}': {self.file} {what}. {self.remedy}")

    def _typed(self, key: str, value: object, kind: type[T]) -> T:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not abs(value) < _HUGE:  # type: ignore[arg-type]
            raise self.wrong(key, value, "which is too large to be true")
        if kind is float and is_number:
            value = float(value)  # type: ignore[arg-type]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(key, value, f"expected {kind.__name__}")
        return value

    def _above_zero(self, key: str, value: Number) -> Number:
        if not value > 0:
            raise self.wrong(key, value, "expected a positive number")
        return value


def _abridged(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def read_heads(fields: Fields, hidden_size: int, default_dim: int | None = None) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key/value heads, and their dimension.

    Without `default_dim`, a missing dimension follows from the hidden size.
    """
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(f"has {num_heads} query heads for {num_kv_heads} key/value heads: not a multiple")
    head_dim = fields.positive("head_dim", default_dim or max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise fields.wrong("head_dim", head_dim, "but rotary positions need an even number")
    return num_heads, num_kv_heads, head_dim


def read_rope(fields: Fields, *, head_dim: int, theta: float = 10000.0, part: float | None = None) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    `theta` and `part` are defaults. If `part` is None, a config that rotates only a part of a head is
    refused.
    """
    section, older = fields.section("rope_parameters"), fields.section("rope_scaling")
    if section.raw and older.raw and section.raw != older.raw:
        raise fields.error("has both 'rope_parameters' and 'rope_scaling', and they differ: keep one")
    section = section if section.raw else older
    nested = [key for key, value in section.raw.items() if isinstance(value, Mapping)]
    if nested:
        raise section.error(f"has a separate rope for {nested[0]!r}, which is not implemented")
    has_own = section.raw.get("rope_theta") is not None
    theta = section.above_zero("rope_theta") if has_own else fields.above_zero("rope_theta", theta)
    if part is None:
        # transformers ignores the key in these families, other engines do not.
        section.refuse("partial_rotary_factor", 1)
        fields.refuse("partial_rotary_factor", 1)
        part = 1.0
    part = section.optional("partial_rotary_factor", float) or fields.get(
        "partial_rotary_factor", float, part
    )
    return rope_of(section, fields, head_dim=head_dim, theta=theta, part=part)


def rope_of(section: Fields, fields: Fields, *, head_dim: int, theta: float, part: float) -> Rope:
    """Build the rope that `section` describes, for heads of `head_dim`."""
    if not 0 < part <= 1 or int(head_dim * part) % 2 or int(head_dim * part) == 0:
        raise section.error(
            f"rotates a share of {part} of heads of {head_dim} values, which is not an even number of values"
        )
    kind = section.optional("rope_type", str) or section.get("type", str, "default")
    rope = Rope(theta=theta, part=part)
    if kind in ("default", "mrope"):  # mrope has three positions, which are equal for text
        return rope
    if kind == "linear":
        return replace(rope, kind="linear", factor=section.above_zero("factor"))
    if kind in ("llama3", "yarn"):
        # Phi-3 has the key outside the section; if the two differ, engines disagree on which one counts.
        fields.refuse("original_max_position_embeddings", section.raw.get("original_max_position_embeddings"))
    if kind == "llama3":
        return replace(
            rope,
            kind="llama3",
            factor=section.above_zero("factor"),
            low_freq_factor=section.above_zero("low_freq_factor"),
            high_freq_factor=section.above_zero("high_freq_factor"),
            original_max_positions=section.positive("original_max_position_embeddings"),
        )
    if kind == "proportional":
        factor = section.above_zero("factor") if "factor" in section.raw else 1.0
        return replace(rope, kind="proportional", factor=factor)
    if kind == "yarn":
        return _yarn(rope, section, fields)
    if kind == "factors":
        factors = section.items("factors", float) or ()
        if len(factors) != head_dim // 2:
            raise fields.error(f"has {len(factors)} rope factors for {head_dim // 2} rotated pairs")
        return Rope(theta=theta, kind="factors", factors=factors)
    raise section.error(f"asks for {section.prefix}rope_type = '{kind}', which is not implemented")


def _yarn(rope: Rope, section: Fields, fields: Fields) -> Rope:
    original = section.optional("original_max_position_embeddings", int)
    original = original or fields.positive("max_position_embeddings")
    factor = section.above_zero("factor")
    if rope.theta <= 1:
        raise section.error(f"scales a rope of theta = {rope.theta} by yarn, which needs more than 1")
    scale = None if section.raw.get("attention_factor") is None else section.above_zero("attention_factor")
    if scale is None:
        mscale, all_dim = section.optional("mscale", float), section.optional("mscale_all_dim", float)
        scale = _yarn_scale(factor, 1.0)
        if mscale and all_dim:
            scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        # As in transformers, zero means the default.
        beta_fast=section.above_zero("beta_fast", 32.0) if section.raw.get("beta_fast") else 32.0,
        beta_slow=section.above_zero("beta_slow", 1.0) if section.raw.get("beta_slow") else 1.0,
        is_truncated=section.get("truncate", bool, True),
        attention_scale=scale,
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_softcap(fields: Fields) -> float | None:
    """Return the bound of the logits, or None if they are not capped."""
    key = "final_logit_softcapping"
    return None if fields.raw.get(key) is None else fields.above_zero(key)


def read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, from `layer_types` or from the older Qwen2 keys."""
    layer_types = fields.items("layer_types", str)
    is_used = fields.optional("use_sliding_window", bool)
    if is_used is False or (layer_types is None and is_used is None):
        return (None,) * num_layers  # as in transformers, where the switch overrides layer_types
    if layer_types is None:
        first = fields.get("max_window_layers", int, 28)  # transformers' default for Qwen2 and Qwen3
        layer_types = tuple(
            "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
        )
    return windows_of(fields, layer_types, num_layers)


def windows_of(fields: Fields, layer_types: tuple[str, ...], num_layers: int) -> tuple[int | None, ...]:
    check_layer_types(fields, layer_types, num_layers, {"full_attention", "sliding_attention"})
    window = fields.optional("sliding_window", int)
    if "sliding_attention" in layer_types and (window is None or window <= 0):
        raise fields.error(f"has sliding layers, but sliding_window = {window}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def check_layer_types(fields: Fields, layer_types: tuple[str, ...], num_layers: int, known: set[str]) -> None:
    if len(layer_types) != num_layers:
        raise fields.error(f"lists {len(layer_types)} layer_types for {num_layers} layers")
    for kind in sorted(set(layer_types) - known):
        raise fields.error(f"has layer type {kind!r}, which is not implemented")
