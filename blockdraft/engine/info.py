"""EngineInfo: describes an engine in plain values, for the live page, /metrics and the log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything but the request that decides an answer's tokens; check/fingerprint.py makes it."""

    id: str | None = None  # `system_fingerprint` of answers; None: answers cannot be repeated
    parts: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""  # why answers cannot be repeated

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Fingerprint:
        text = json.dumps(dict(parts), sort_keys=True)
        return cls("bd-" + hashlib.sha256(text.encode()).hexdigest()[:16], parts)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One engine: its pair, its plan, its memory."""

    target: str  # as the user named it
    target_title: str  # as people call it
    target_format: str  # of its files, "GGUF Q4_1" or "safetensors bfloat16"
    target_bytes: int
    target_computed: str  # what becomes of it here, "computed in int8"
    draft: str | None
    draft_title: str | None
    draft_format: str | None
    draft_bytes: int | None
    draft_kind: str | None  # "causal DFlash", "DFlash2 and n-grams of 12", "n-grams"
    draft_hash: str | None  # identifies the weights, whatever their name
    family: str
    vocab_size: int
    width: int  # of requests that set none; 1: plain decoding
    width_reason: str
    block: int
    dtype: str
    device: str
    quantization: str
    max_model_len: int
    most_context: int  # what --max-model-len could be raised to; less may fit into the memory
    max_num_seqs: int
    num_pages: int
    page_size: int
    num_cache_bytes: int
    kv_dtype: str  # of the target's keys and values: how they are compressed, or the dtype
    draft_kv_dtype: str | None
    kv_window: int | None  # tokens that each position reads exact, at least; None: nothing is compressed
    kv_bytes_per_token: int  # of both models
    kv_compression: float  # how many times fewer than in the dtype; 1: nothing is compressed
    has_prefix_cache: bool
    write_s: float  # the longest time that its end takes to write prefixes
    same_bits: bool  # a token's bits depend neither on the rest of the batch nor on how prompts are chunked
    same_bits_reason: str
    fingerprint: Fingerprint
    is_dummy: bool  # random weights, for timing only
    synthetic_acceptance: str | None  # the profile by which drafts are kept, for timing only
    sampling: Mapping[str, float]  # the defaults of requests
    system_prompt: str  # the chat template's default system prompt; empty: none
    notices: tuple[str, ...]  # what a reader of any output must know
