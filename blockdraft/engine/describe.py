"""Describes an engine: its info, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import nn

from blockdraft.cache.spec import bytes_per_token
from blockdraft.engine.engine import Engine
from blockdraft.engine.info import EngineInfo
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.prefix_disk import WRITE_S
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.planner.draft_title import drafting_title
from blockdraft.planner.plan import ELEMENT_BYTES, Plan

NUM_SAMPLED = 256  # bytes of each tensor that a fingerprint hashes


def engine_info(engine: Engine) -> EngineInfo:
    models, plan = engine.models, engine.plan
    draft = None if models.draft_config is None else models.draft_stored
    return EngineInfo(
        target=models.config.name,
        target_title=models.stored.title,
        target_format=models.stored.format,
        target_bytes=models.stored.num_bytes,
        target_computed=_computed(plan, has_int8_kernels=models.target.kernels.available.path == "llvm"),
        draft=models.draft_name,
        draft_title=None if draft is None else draft.title,
        draft_format=None if draft is None else draft.format,
        draft_bytes=None if draft is None else draft.num_bytes,
        draft_kind=drafting_title(models.draft_config, plan.draft_ngram),
        draft_hash=None if models.drafter.model is None else fingerprint(models.drafter.model),
        family=models.config.family,
        vocab_size=models.config.vocab_size,
        width=plan.width,
        width_reason=plan.reasons["width"],
        block=plan.block,
        dtype=plan.dtype,
        device=str(models.device),
        quantization=plan.quantization,
        max_model_len=plan.max_model_len,
        most_context=models.most_context(plan),
        max_num_seqs=plan.max_num_seqs,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        num_cache_bytes=engine.cache.num_bytes,
        kv_dtype=_kv_dtype(plan.kv_dtype, plan),
        draft_kv_dtype=None if draft is None else _kv_dtype(plan.draft_kv_dtype, plan),
        kv_window=plan.kv_window if plan.num_exact_pages else None,
        kv_bytes_per_token=kv_bytes_per_token(models, plan),
        kv_compression=kv_compression(models, plan),
        has_prefix_cache=plan.prefix_cache,
        write_s=0.0 if engine.prefix_disk is None else WRITE_S,
        same_bits=plan.same_bits,
        same_bits_reason=plan.reasons.get("same_bits", ""),
        fingerprint=engine.fingerprint,
        is_dummy=models.labels.is_dummy,
        synthetic_acceptance=models.labels.synthetic_acceptance,
        sampling=models.sampling,
        system_prompt=models.tokenizer.inserted_system_prompt(),
        notices=models.labels.notices,
    )


def kv_bytes_per_token(models: LoadedPair, plan: Plan) -> int:
    """Return the bytes that one token takes in the cache, compressed, over all layers of both models."""
    return bytes_per_token(models.cache_specs(plan.kv_dtype, plan.draft_kv_dtype), ELEMENT_BYTES[plan.dtype])


def kv_compression(models: LoadedPair, plan: Plan) -> float:
    """Return how many times fewer cache bytes a token takes than without compression."""
    taken = kv_bytes_per_token(models, plan)
    exact = replace(plan, kv_dtype=EXACT, draft_kv_dtype=EXACT)
    return kv_bytes_per_token(models, exact) / taken if taken else 1.0


def kv_text(models: LoadedPair, plan: Plan) -> str:
    """Return "keys and values in tq4 (3.9x)" for the log, or "" if nothing is compressed."""
    if not plan.num_exact_pages:
        return ""
    kept = _kv_dtype(plan.kv_dtype, plan)
    draft = plan.draft_kv_dtype
    kept += f", the drafter's in {draft}" if draft not in (EXACT, plan.kv_dtype) else ""
    return f"keys and values in {kept} ({kv_compression(models, plan):.1f}x)"


def _kv_dtype(format: str, plan: Plan) -> str:
    return plan.dtype if format == EXACT else format


def _computed(plan: Plan, *, has_int8_kernels: bool) -> str:
    if plan.quantization in ("none", "keep", "both"):
        return f"computed in {plan.dtype}"
    if plan.quantization == "int8" and has_int8_kernels:
        return "computed in int8"
    return f"kept in {plan.quantization}, computed in {plan.dtype}"


def fingerprint(model: nn.Module) -> str:
    """Hash weights to 16 hex digits: names, shapes, dtypes, and bytes spread evenly over each tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        if raw.numel():
            places = torch.linspace(0, raw.numel() - 1, min(NUM_SAMPLED, raw.numel()), dtype=torch.float64)
            digest.update(raw[places.round().long().to(raw.device)].cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
