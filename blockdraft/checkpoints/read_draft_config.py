"""Reads a DFlash drafter's configuration, in z-lab's layout or in that of `speculators`.

Layer ids are counted as z-lab counts them: `taps[i] = k` is the output of target block k, 0-based.
`speculators` stores k + 1 (its list starts at the embedding); the conversion happens in this file only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from blockdraft.checkpoints.config_fields import Fields, read_heads, read_rope, read_softcap, read_windows
from blockdraft.errors import ModelError
from blockdraft.models.draft_config import Dflash2Head, DraftConfig

# Where a config.json names no block.
ZLAB_BLOCK = 16
SPECULATORS_BLOCK = 8

# What DFlash2 adds, in the order of Dflash2Head, with the defaults of both layouts.
_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
MAX_CANDIDATES = 64  # that a kernel holds at once, and all pairs of them; published drafters have 16


def read_draft_config(raw: Mapping[str, object], *, name: str) -> DraftConfig:
    """The drafter described by a config.json in either layout."""
    fields = Fields(raw, owner=name)
    if "speculators_model_type" in raw:
        return _speculators(fields)
    return _zlab(fields)


def draft_block(raw: Mapping[str, object]) -> int:
    """The block of any drafter, anchor included, whether or not we compute it."""
    section = raw.get("dflash_config")
    for place in (section, raw):
        block = place.get("block_size") if isinstance(place, Mapping) else None
        if isinstance(block, int) and not isinstance(block, bool) and block > 1:
            return block
    return SPECULATORS_BLOCK if "speculators_model_type" in raw else ZLAB_BLOCK


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's rule: evenly from block 1 to the third from the end; one tap sits in the middle."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (num_taps - 1)) for index in range(num_taps))


def _zlab(fields: Fields) -> DraftConfig:
    architectures = fields.items("architectures", str) or ()
    is_dflash2 = "DFlash2DraftModel" in architectures
    if "DFlashDraftModel" not in architectures and not is_dflash2:
        raise ModelError(
            f"'{fields.owner}': {', '.join(architectures) or 'no architecture'} is not a DFlash drafter "
            "that this version runs (DFlashDraftModel, DFlash2DraftModel, or speculators 'dflash' and "
            "'dflash2'). See docs/models.md."
        )
    dflash = fields.section("dflash_config")
    _refuse_variants(fields, dflash, is_dflash2=is_dflash2)
    num_target_layers = fields.optional("num_target_layers", int)
    windows = _zlab_windows(fields, dflash)
    taps = dflash.items("target_layer_ids", int)
    if taps is None:
        if num_target_layers is None:
            raise fields.error("has neither dflash_config.target_layer_ids nor num_target_layers")
        taps = default_taps(num_target_layers, len(windows))
    block = dflash.optional("block_size", int)
    block = fields.get("block_size", int, ZLAB_BLOCK) if block is None else block
    mask = dflash.optional("mask_token_id", int)
    mask = fields.get("mask_token_id", int) if mask is None else mask
    causal = fields.optional("is_causal", bool)
    for key in ("causal", "causal_head"):
        causal = dflash.optional(key, bool) if causal is None else causal
    return _draft(
        _Source(fields, dflash=dflash, body=fields, is_dflash2=is_dflash2),
        block=block,
        mask_token_id=mask,
        taps=taps,
        windows=windows,
        is_causal=tuple(window is not None if causal is None else causal for window in windows),
        num_target_layers=num_target_layers,
    )


def _zlab_windows(fields: Fields, dflash: Fields) -> tuple[int | None, ...]:
    num_layers = fields.positive("num_hidden_layers")
    if dflash.get("use_swa", bool, False):
        return (dflash.positive("swa_window_size"),) * num_layers
    return read_windows(fields, num_layers)


def _speculators(fields: Fields) -> DraftConfig:
    kind = fields.get("speculators_model_type", str)
    if kind not in ("dflash", "dflash2"):
        raise ModelError(
            f"'{fields.owner}': speculators model type '{kind}' is not supported; supported: dflash, "
            "dflash2. See docs/models.md."
        )
    is_dflash2 = kind == "dflash2"
    _refuse_variants(fields, fields, is_dflash2=is_dflash2)
    body = fields.section("transformer_layer_config")
    windows = read_windows(body, body.positive("num_hidden_layers"))
    ids = fields.items("aux_hidden_state_layer_ids", int)
    if not ids:
        raise fields.error("has no 'aux_hidden_state_layer_ids'")
    is_bidirectional = fields.get("sliding_window_non_causal", bool, is_dflash2)
    return _draft(
        _Source(fields, dflash=fields, body=body, is_dflash2=is_dflash2),
        block=fields.positive("block_size", SPECULATORS_BLOCK),
        mask_token_id=fields.get("mask_token_id", int),
        taps=tuple(layer - 1 for layer in ids),
        windows=windows,
        is_causal=tuple(window is not None and not is_bidirectional for window in windows),
        num_target_layers=None,
    )


class _Source(NamedTuple):
    """Where a layout keeps its keys."""

    fields: Fields  # the whole file
    dflash: Fields  # what is particular to DFlash
    body: Fields  # the Qwen3-style decoder
    is_dflash2: bool


def _draft(
    source: _Source,
    *,
    block: int,
    mask_token_id: int,
    taps: tuple[int, ...],
    windows: tuple[int | None, ...],
    is_causal: tuple[bool, ...],
    num_target_layers: int | None,
) -> DraftConfig:
    """What both layouts share."""
    fields, dflash, body, is_dflash2 = source
    if block < 2:
        raise fields.error(f"says block_size = {block}, but a block is an anchor and at least one draft")
    if not taps or min(taps) < 0:
        raise fields.error(f"reads target layers {list(taps)}")
    body.refuse("hidden_act", "silu", "swish")
    body.refuse("attention_bias", False)
    hidden_size = body.positive("hidden_size")
    num_heads, num_kv_heads, head_dim = read_heads(body, hidden_size)
    vocab_size = body.positive("vocab_size")
    draft_vocab_size = fields.positive("draft_vocab_size", vocab_size)
    head = None
    if is_dflash2:
        if draft_vocab_size != vocab_size:
            why = f"but a DFlash2 drafter has all {vocab_size} tokens of its target"
            raise fields.wrong("draft_vocab_size", draft_vocab_size, why)
        head = _dflash2_head(dflash, hidden_size=hidden_size, vocab_size=vocab_size)
    softcap = read_softcap(dflash)
    return DraftConfig(
        name=fields.owner,
        block=block,
        mask_token_id=mask_token_id,
        taps=taps,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=hidden_size,
        intermediate_size=body.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=body.above_zero("rms_norm_eps", 1e-6),
        rope=read_rope(body, head_dim=head_dim),
        windows=windows,
        is_causal=is_causal,
        has_anchored_window="speculators_model_type" in fields.raw,
        embedding_scale=dflash.optional("input_embedding_scale", float),
        logit_scale=dflash.get("output_multiplier", float, 1.0),
        logit_softcap=softcap or read_softcap(fields),
        target_hidden_size=fields.positive("target_hidden_size", hidden_size),
        num_target_layers=num_target_layers,
        dflash2=head,
    )


def _dflash2_head(dflash: Fields, *, hidden_size: int, vocab_size: int) -> Dflash2Head:
    values = [dflash.positive(key, default) for key, default in _DFLASH2.items()]
    head = Dflash2Head(*values)
    if hidden_size % head.conv_group:
        why = f"which does not divide the hidden size of {hidden_size}"
        raise dflash.wrong("conv_group_size", head.conv_group, why)
    if head.top_k > min(MAX_CANDIDATES, vocab_size):
        raise dflash.wrong(
            "selector_top_k", head.top_k, f"but at most {min(MAX_CANDIDATES, vocab_size)} are walked"
        )
    return head


def _refuse_variants(fields: Fields, dflash: Fields, *, is_dflash2: bool) -> None:
    """Refuse relatives of DFlash that would load and then propose nonsense."""
    fields.refuse("use_gemma_norm", False)
    fields.refuse("rope_is_neox_style", True)
    dflash.refuse("sample_from_anchor", False)
    dflash.refuse("attention_sink_bias", False)
    dflash.refuse("attention_value_scale", 1, 1.0)
    dflash.refuse("projector_type")
    known = _DFLASH2 if is_dflash2 else ()
    for key in dflash.raw:
        if key.startswith(("lilicorr_", "conv_", "selector_")) and key not in known:
            dflash.refuse(key)
