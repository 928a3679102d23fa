"""Typed, checked reads of config.json, and the parts of it that several families share. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from blockdraft.errors import ModelError
from blockdraft.models.config import Rope

T = TypeVar("T", int, float, bool, str)
_HUGE = 2**31  # numbers beyond are mistakes; NaN is not below it either


def _shown(value: object) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of over 30 digits"
    return text[:40]


class Fields:
    """A mapping that answers with the asked type, or with an error that names the key and the value."""

    def __init__(
        self, raw: Mapping[str, object], *, owner: str, prefix: str = "", file: str = "layers.py"
    ) -> None:
        self.raw = raw
        self.owner = owner
        self.prefix = prefix
        self.file = file  # the one that would have to implement what is refused

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`; None in the file counts as absent."""
        value = self.optional(key, kind)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"has no '{self.prefix}{key}'")
        return default

    def optional(self, key: str, kind: type[T]) -> T | None:
        value = self.raw.get(key)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not abs(value) < _HUGE:  # type: ignore[arg-type]
            raise self.error(f"says {self.prefix}{key} = {_shown(value)}, which no model has")
        if kind is float and is_number:
            value = float(value)  # type: ignore[arg-type]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"says {self.prefix}{key} = {value!r}, expected {kind.__name__}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value <= 0:
            raise self.error(f"says {self.prefix}{key} = {value}, expected a positive number")
        return value

    def above_zero(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, default)
        if not value > 0:
            raise self.error(f"says {self.prefix}{key} = {value}, expected a positive number")
        return value

    def items(self, key: str, kind: type[T]) -> tuple[T, ...] | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.error(f"says {self.prefix}{key} = {value!r}, expected a list")
        one = (Fields({key: item}, owner=self.owner, prefix=self.prefix, file=self.file) for item in value)
        return tuple(fields.get(key, kind) for fields in one)

    def section(self, key: str) -> Fields:
        """A nested object; an absent one reads as empty."""
        value = self.raw.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(f"says {self.prefix}{key} = {value!r}, expected an object")
        return Fields(value, owner=self.owner, prefix=f"{self.prefix}{key}.", file=self.file)

    def refuse(self, key: str, *allowed: object) -> None:
        """A key that we implement for `allowed` (and absence) only."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            what = f"asks for {self.prefix}{key} = {value!r}"
            raise self.error(f"{what}, which blockdraft/models/{self.file} does not implement")

    def error(self, what: str) -> ModelError:
        return ModelError(f"'{self.owner}': config.json {what}. See docs/models.md.")


def read_heads(fields: Fields, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, key/value heads and their dimension."""
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(f"has {num_heads} query heads for {num_kv_heads} key/value heads")
    head_dim = fields.positive("head_dim", max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise fields.error(f"says head_dim = {head_dim}, but rotary positions need an even one")
    return num_heads, num_kv_heads, head_dim


def read_rope(fields: Fields, *, head_dim: int, theta: float = 10000.0, part: float | None = None) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before); defaults as given.

    Without a default `part`, heads are always rotated as a whole.
    """
    section, older = fields.section("rope_parameters"), fields.section("rope_scaling")
    if section.raw and older.raw and section.raw != older.raw:
        raise fields.error("has both 'rope_parameters' and 'rope_scaling', and they differ: keep one")
    section = section if section.raw else older
    nested = [key for key, value in section.raw.items() if isinstance(value, Mapping)]
    if nested:
        raise section.error(f"has a rope of its own for {nested[0]!r}, which is not implemented")
    has_own = section.raw.get("rope_theta") is not None
    theta = section.above_zero("rope_theta") if has_own else fields.above_zero("rope_theta", theta)
    if part is None:
        # transformers passes over the key in these families, other engines heed it.
        section.refuse("partial_rotary_factor", 1)
        fields.refuse("partial_rotary_factor", 1)
        part = 1.0
    part = section.optional("partial_rotary_factor", float) or fields.get(
        "partial_rotary_factor", float, part
    )
    return rope_of(section, fields, head_dim=head_dim, theta=theta, part=part)


def rope_of(section: Fields, fields: Fields, *, head_dim: int, theta: float, part: float) -> Rope:
    """The rope that `section` describes, for heads of `head_dim`."""
    if not 0 < part <= 1 or int(head_dim * part) % 2 or int(head_dim * part) == 0:
        raise section.error(f"rotates a share of {part} of heads of {head_dim}, not an even number of values")
    kind = section.optional("rope_type", str) or section.get("type", str, "default")
    if kind in ("default", "mrope"):  # mrope: three positions, which are one and the same for text
        return Rope(theta=theta, part=part)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", part=part, factor=section.above_zero("factor"))
    if kind in ("llama3", "yarn"):
        # Phi-3 keeps it outside; where both places say something else, engines disagree on which counts.
        fields.refuse("original_max_position_embeddings", section.raw.get("original_max_position_embeddings"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind="llama3",
            part=part,
            factor=section.above_zero("factor"),
            low_freq_factor=section.above_zero("low_freq_factor"),
            high_freq_factor=section.above_zero("high_freq_factor"),
            original_max_positions=section.positive("original_max_position_embeddings"),
        )
    if kind == "proportional":
        factor = section.above_zero("factor") if "factor" in section.raw else 1.0
        return Rope(theta=theta, kind="proportional", part=part, factor=factor)
    if kind == "yarn":
        return _yarn(section, fields, theta=theta, part=part)
    if kind == "factors":
        factors = section.items("factors", float) or ()
        if len(factors) != head_dim // 2:
            raise fields.error(f"has {len(factors)} rope factors for {head_dim // 2} rotated pairs")
        return Rope(theta=theta, kind="factors", factors=factors)
    raise section.error(
        f"asks for {section.prefix}rope_type = '{kind}', which blockdraft/models/rotary.py does not implement"
    )


def _yarn(section: Fields, fields: Fields, *, theta: float, part: float) -> Rope:
    original = section.optional("original_max_position_embeddings", int)
    original = original or fields.positive("max_position_embeddings")
    factor = section.above_zero("factor")
    if theta <= 1:
        raise section.error(f"scales a rope of theta = {theta} by yarn, which needs more than 1")
    scale = None if section.raw.get("attention_factor") is None else section.above_zero("attention_factor")
    if scale is None:
        mscale, all_dim = section.optional("mscale", float), section.optional("mscale_all_dim", float)
        scale = _yarn_scale(factor, 1.0)
        if mscale and all_dim:
            scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    return Rope(
        theta=theta,
        kind="yarn",
        part=part,
        factor=factor,
        original_max_positions=original,
        # As in transformers, a border of zero is none.
        beta_fast=section.above_zero("beta_fast", 32.0) if section.raw.get("beta_fast") else 32.0,
        beta_slow=section.above_zero("beta_slow", 1.0) if section.raw.get("beta_slow") else 1.0,
        is_truncated=section.get("truncate", bool, True),
        attention_scale=scale,
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_softcap(fields: Fields) -> float | None:
    """What squeezes the logits; None: nothing."""
    key = "final_logit_softcapping"
    return None if fields.raw.get(key) is None else fields.above_zero(key)


def read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer: `layer_types` where given, else the older Qwen2 keys."""
    layer_types = fields.items("layer_types", str)
    is_used = fields.optional("use_sliding_window", bool)
    if is_used is False or (layer_types is None and is_used is None):
        return (None,) * num_layers  # as in transformers, where the switch overrules layer_types
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
        raise fields.error(f"has sliding layers and sliding_window = {window}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def check_layer_types(fields: Fields, layer_types: tuple[str, ...], num_layers: int, known: set[str]) -> None:
    if len(layer_types) != num_layers:
        raise fields.error(f"lists {len(layer_types)} layer_types for {num_layers} layers")
    unknown = set(layer_types) - known
    if unknown:
        raise fields.error(
            f"has layer type {sorted(unknown)[0]!r}, which blockdraft/models/{fields.file} does not implement"
        )
