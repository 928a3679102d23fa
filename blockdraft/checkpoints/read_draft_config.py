"""Reads a drafter's configuration: DFlash, DFlash2 or DSpark, as z-lab or as `speculators` writes it.

DeepSpec's files (`Qwen3DSparkModel`) and SpecForge's (`DSparkDraftModel`) are z-lab's layout with more keys,
at the top or in `dflash_config`. What they call a block is the drafts alone, as all their columns draft.

Layer ids are counted as z-lab counts them: `taps[i] = k` is the output of target block k, 0-based.
`speculators` stores k + 1 (its list starts at the embedding); the conversion happens in this file only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from blockdraft.checkpoints.config_fields import Fields, read_heads, read_rope, read_softcap, read_windows
from blockdraft.checkpoints.read_dflash2_config import DFLASH2_KEYS, read_dflash2
from blockdraft.checkpoints.read_spark_config import read_spark
from blockdraft.errors import ModelError
from blockdraft.models.draft_config import KIND_NAMES, DraftConfig, DraftKind

# Where a config.json names no block.
ZLAB_BLOCK = 16
SPECULATORS_BLOCK = 8
ARCHITECTURES: dict[str, DraftKind] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}
SERVED = (
    f"Served are DFlash, causal or not, DFlash2 and DSpark ({', '.join(ARCHITECTURES)}; speculators "
    "'dflash', 'dflash2' and 'dspark'). See docs/models.md."
)


def read_draft_config(raw: Mapping[str, object], *, name: str) -> DraftConfig:
    """The drafter described by a config.json in either layout."""
    fields = Fields(raw, owner=name)
    if "speculators_model_type" in raw:
        return _speculators(fields)
    return _zlab(fields)


def draft_block(raw: Mapping[str, object]) -> int:
    """The block of any drafter, anchor included, whether or not we compute it."""
    section = raw.get("dflash_config")
    places = [place for place in (section, raw) if isinstance(place, Mapping)]
    said = next((place["sample_from_anchor"] for place in places if "sample_from_anchor" in place), None)
    anchor = int(draft_kind(raw) == "dspark" if said is None else said is True)
    for place in places:
        block = place.get("block_size")
        if isinstance(block, int) and not isinstance(block, bool) and block > 1:
            return block + anchor
    return (SPECULATORS_BLOCK if "speculators_model_type" in raw else ZLAB_BLOCK) + anchor


def draft_kind(raw: Mapping[str, object]) -> DraftKind | None:
    """What its file says it is, with the layout that goes with it; None: nothing that we serve.

    A 'dspark' drafts from the anchor where it does not say so; it may have none of DSpark's heads.
    """
    if "speculators_model_type" in raw:
        return next((kind for kind in KIND_NAMES if kind == raw["speculators_model_type"]), None)
    names = raw.get("architectures")
    found = names if isinstance(names, list | tuple) else ()
    return next((kind for name, kind in ARCHITECTURES.items() if name in found), None)


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's rule: evenly from block 1 to the third from the end; one tap sits in the middle."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (num_taps - 1)) for index in range(num_taps))


def _zlab(fields: Fields) -> DraftConfig:
    architectures = fields.items("architectures", str) or ()
    kind = draft_kind(fields.raw)
    if kind is None:
        raise ModelError(
            f"'{fields.owner}': {', '.join(architectures) or 'no architecture'} is not a DFlash drafter that "
            f"this version runs. {SERVED}"
        )
    dflash = fields.section("dflash_config")
    source = _source(fields, dflash, fields, kind)
    num_target_layers = fields.optional("num_target_layers", int)
    windows = _zlab_windows(fields, dflash)
    taps = dflash.items("target_layer_ids", int)
    taps = fields.items("target_layer_ids", int) if taps is None else taps
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
        source,
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
    kind = draft_kind(fields.raw)
    if kind is None:
        said = fields.get("speculators_model_type", str)
        raise ModelError(f"'{fields.owner}': speculators model type '{said}' is not supported. {SERVED}")
    body = fields.section("transformer_layer_config")
    windows = read_windows(body, body.positive("num_hidden_layers"))
    ids = fields.items("aux_hidden_state_layer_ids", int)
    if not ids:
        raise fields.error("has no 'aux_hidden_state_layer_ids'")
    is_bidirectional = fields.get("sliding_window_non_causal", bool, kind == "dflash2")
    return _draft(
        _source(fields, fields, body, kind),
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
    kind: DraftKind  # that it says it is
    from_anchor: bool  # its anchor's column drafts, too


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
    fields, dflash, body, kind, from_anchor = source
    if block + from_anchor < 2:
        raise fields.error(f"says block_size = {block}, but a block is an anchor and at least one draft")
    if not taps or min(taps) < 0:
        raise fields.error(f"reads target layers {list(taps)}")
    body.refuse("hidden_act", "silu", "swish")
    body.refuse("attention_bias", False)
    hidden_size = body.positive("hidden_size")
    num_heads, num_kv_heads, head_dim = read_heads(body, hidden_size)
    vocab_size = body.positive("vocab_size")
    softcap = read_softcap(dflash)
    return DraftConfig(
        name=fields.owner,
        block=block + from_anchor,
        mask_token_id=mask_token_id,
        taps=taps,
        vocab_size=vocab_size,
        draft_vocab_size=fields.positive("draft_vocab_size", vocab_size),
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
        drafts_from_anchor=from_anchor,
        copies_head=kind == "dspark",
        dflash2=read_dflash2(dflash, fields, hidden_size, vocab_size) if kind == "dflash2" else None,
        spark=read_spark(dflash, fields, is_dspark=kind == "dspark"),
    )


def _source(fields: Fields, dflash: Fields, body: Fields, kind: DraftKind) -> _Source:
    said = dflash.optional("sample_from_anchor", bool)
    said = fields.optional("sample_from_anchor", bool) if said is None else said
    source = _Source(fields, dflash, body, kind, from_anchor=kind == "dspark" if said is None else said)
    _refuse_variants(source)
    return source


def _refuse_variants(source: _Source) -> None:
    """Refuse relatives of DFlash that would load and then propose nonsense."""
    fields, dflash = (replace(one, remedy=SERVED) for one in (source.fields, source.dflash))
    fields.refuse("use_gemma_norm", False)
    fields.refuse("rope_is_neox_style", True)
    dflash.refuse("shift_label", source.from_anchor)
    dflash.refuse("attention_mode", "gqa")
    dflash.refuse("dspark_backbone_conv_enabled", False)
    dflash.refuse("attention_sink_bias", False)
    dflash.refuse("attention_value_scale", 1, 1.0)
    dflash.refuse("projector_type", "dspark")
    if source.kind == "dflash2":  # with drafts from the anchor, or with DSpark's heads, nobody has made one
        for place in (fields, dflash):
            place.refuse("sample_from_anchor", False)
            place.refuse("markov_rank", 0)
            place.refuse("enable_confidence_head", False)
    known = DFLASH2_KEYS if source.kind == "dflash2" else ()
    for key in dflash.raw:
        if key.startswith(("lilicorr_", "conv_", "selector_")) and key not in known:
            dflash.refuse(key)
