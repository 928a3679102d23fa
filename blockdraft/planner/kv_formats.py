"""Computes a token's bytes in the caches of vLLM and SGLang, from the name of the KV dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from blockdraft.cache.spec import Paged, Recurrent
from blockdraft.planner.shape import CacheSpec, Latent


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The bits of each element of a head's keys and values, and the bytes of their scales."""

    key_bits: float
    value_bits: float
    scale_bytes: int = 0  # norms, scales and zeros of the two together
    plain_ends: int = 0  # layers at either end that keep 2 bytes, unless the model has recurrent layers

    def head_bytes(self, head_dim: int) -> int:
        """Return the bytes of a key and a value, rounded up to an even number."""
        codes = math.ceil(head_dim * self.key_bits / 8) + math.ceil(head_dim * self.value_bits / 8)
        return -(-(codes + self.scale_bytes) // 2) * 2


PLAIN = KVFormat(16, 16)
# The first matching pattern counts; other names take two bytes a value. From vLLM 0.32.0, where turboquant_*
# leaves out the two layers at either end of models without recurrent layers. Block formats have a scale of a
# byte for every 16 or 32 values.
FORMATS: Mapping[str, KVFormat] = {
    "turboquant_k8v4*": KVFormat(8, 4, scale_bytes=4, plain_ends=2),
    "turboquant_4bit*": KVFormat(4, 4, scale_bytes=6, plain_ends=2),
    "turboquant_k3v4*": KVFormat(3, 4, scale_bytes=6, plain_ends=2),
    "turboquant_3bit*": KVFormat(3, 3, scale_bytes=6, plain_ends=2),
    "int4_per_token_head*": KVFormat(4, 4, scale_bytes=8),
    "*8_per_token_head*": KVFormat(8, 8, scale_bytes=8),
    "ultraquant_4bit*": KVFormat(4.25, 4.25),
    "nvfp4*": KVFormat(4.5, 4.5),
    "fp4_mx_block16*": KVFormat(4.5, 4.5),
    "mxfp8*": KVFormat(8.25, 8.25),
    "*fp8*": KVFormat(8, 8),
    "*int8*": KVFormat(8, 8),
}


def kv_format(kv_dtype: str) -> KVFormat:
    found = (known for pattern, known in FORMATS.items() if fnmatch(kv_dtype.lower(), pattern))
    return next(found, PLAIN)


def token_bytes(specs: tuple[CacheSpec, ...], kv_dtype: str) -> tuple[int, ...]:
    """Return a token's bytes in each layer."""
    wanted = kv_format(kv_dtype)
    attention = [index for index, spec in enumerate(specs) if isinstance(spec, Paged)]
    has_states = any(isinstance(spec, Recurrent) for spec in specs)
    ends = 0 if has_states else min(wanted.plain_ends, len(attention) // 2)
    plain = {*attention[:ends], *attention[len(attention) - ends :]}
    return tuple(_layer_bytes(spec, PLAIN if index in plain else wanted) for index, spec in enumerate(specs))


def _layer_bytes(spec: CacheSpec, found: KVFormat) -> int:
    if isinstance(spec, Paged):
        return spec.num_kv_heads * found.head_bytes(spec.head_dim)
    if isinstance(spec, Latent):
        return math.ceil((spec.rank + spec.rope_dim) * found.key_bits / 8)
    return 0
