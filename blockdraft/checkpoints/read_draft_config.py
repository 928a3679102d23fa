"""Reads the configuration of a drafter of any kind in the layout of z-lab or `speculators`.

The files of XPress's authors (`Qwen3XPressModel`) have z-lab's layout with more keys at the top level. The
files of DeepSpec (`Qwen3DSparkModel`) and SpecForge (`DSparkDraftModel`) have z-lab's layout with more
keys, at the top level or in `dflash_config`. Their block size counts the drafts without the anchor. Domino's
keys are in `dflash_config`; its architecture may be DFlash's.

Layer ids follow z-lab: `taps[i] = k` is the output of target block k, 0-based. `speculators` stores k + 1
(its list starts at the embedding); only this file converts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from blockdraft.checkpoints.config_fields import (
    Fields,
    T,
    read_heads,
    read_rope,
    read_softcap,
    read_windows,
)
from blockdraft.errors import ModelError
from blockdraft.models.draft_config import (
    KIND_NAMES,
    Dflash2Head,
    DominoHead,
    DraftConfig,
    DraftKind,
    LiLiCorrHead,
    XPressHead,
)

# The defaults of both layouts.
ZLAB_BLOCK = 16
SPECULATORS_BLOCK = 8
SPECULATORS_RANK = 256  # default rank of the Markov head of a speculators 'dspark'
# The sizes of DFlash2, in the order of Dflash2Head, and their defaults in both layouts.
DFLASH2_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
SKIPS_FIRST = "selector_skips_first"  # our own key; other engines use the selector for the first draft, too
DFLASH2_KEYS = (*DFLASH2_SIZES, SKIPS_FIRST)
# The sizes of XPress and their defaults, as vLLM and speculators have them. speculators has no XPRESS_TOP_K.
XPRESS_RANK, XPRESS_INNER, XPRESS_RATIO, XPRESS_PASSES, XPRESS_TOP_K = 256, 512, 2, 6, 512
CONV_KEYS = ("conv_kernel_size", "conv_group_size")
LILICORR_KEYS = tuple(
    f"lilicorr_{key}"
    for key in (
        "enabled", "candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim",
        "vector_eps", "logit_scale",
    )
)  # fmt: skip
MAX_CANDIDATES = 64  # a kernel holds all pairs of candidates at once; published drafters have 16
ARCHITECTURES: dict[str, DraftKind] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "Qwen3XPressModel": "xpress",
    "DominoDraftModel": "domino",
    "LiLiCorrDraftModel": "lilicorr",
}
SPECULATORS: tuple[DraftKind, ...] = ("dflash", "dflash2", "dspark", "xpress")
SERVED = (
    "Supported are DFlash, causal or not, DFlash2, DSpark, XPress, Domino and LiLiCorr "
    f"({', '.join(ARCHITECTURES)}; speculators 'dflash', 'dflash2', 'dspark' and 'xpress'). See "
    "docs/models.md."
)


def read_draft_config(raw: Mapping[str, object], *, name: str) -> DraftConfig:
    """Return the configuration of a drafter from its config.json, in either layout."""
    fields, is_speculators = Fields(raw, owner=name), "speculators_model_type" in raw
    kind = draft_kind(raw)
    if kind is None:
        raise _unsupported(fields)
    dflash = fields if is_speculators else fields.section("dflash_config")  # the options of DFlash
    body = fields.section("transformer_layer_config") if is_speculators else fields  # the Qwen3-style decoder
    from_anchor = _from_anchor(dflash, fields, kind)
    _refuse_variants(fields, dflash, kind, from_anchor=from_anchor)
    body.refuse("hidden_act", "silu", "swish")
    body.refuse("attention_bias", False)
    windows, taps, is_causal = _layers(fields, dflash, body, kind)
    hidden_size = body.positive("hidden_size")
    num_heads, num_kv_heads, head_dim = read_heads(body, hidden_size)
    vocab_size = body.positive("vocab_size")
    mask_token_id = _either(dflash, fields, "mask_token_id", int)
    has_own_head = fields.get("has_own_lm_head", bool, False)
    return DraftConfig(
        name=name,
        block=_block(dflash, fields, from_anchor=from_anchor and kind != "domino"),
        mask_token_id=fields.get("mask_token_id", int) if mask_token_id is None else mask_token_id,
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
        has_anchored_window=is_speculators,
        embedding_scale=dflash.optional("input_embedding_scale", float),
        logit_scale=dflash.get("output_multiplier", float, 1.0),
        logit_softcap=read_softcap(dflash) or read_softcap(fields),
        target_hidden_size=fields.positive("target_hidden_size", hidden_size),
        num_target_layers=None if is_speculators else fields.optional("num_target_layers", int),
        drafts_from_anchor=from_anchor,
        copies_head=kind == "dspark" or (kind == "lilicorr" and not has_own_head),
        dflash2=_read_dflash2(dflash, fields, hidden_size, vocab_size, kind),
        markov_rank=_markov_rank(dflash, fields) if kind == "dspark" else 0,
        xpress=_read_xpress(fields) if kind == "xpress" else None,
        domino=_read_domino(dflash, fields) if kind == "domino" else None,
        lilicorr=_read_lilicorr(dflash, fields, hidden_size, vocab_size) if kind == "lilicorr" else None,
    )


def draft_block(raw: Mapping[str, object]) -> int:
    """Return the block size, including the anchor, of any drafter, even of an unsupported one."""
    sections = [section for section in (raw.get("dflash_config"), raw) if isinstance(section, Mapping)]
    stored = next((one["sample_from_anchor"] for one in sections if "sample_from_anchor" in one), None)
    kind = draft_kind(raw)
    anchor = int(kind == "dspark" if stored is None else stored is True and kind != "domino")
    for section in sections:
        block = section.get("block_size")
        if isinstance(block, int) and not isinstance(block, bool) and block > 1:
            return block + anchor
    return (SPECULATORS_BLOCK if "speculators_model_type" in raw else ZLAB_BLOCK) + anchor


def draft_kind(raw: Mapping[str, object]) -> DraftKind | None:
    """Return the kind that the file names, or None if the kind is not supported.

    A 'dspark' drafts from the anchor by default; it may lack DSpark's heads.
    """
    if "speculators_model_type" in raw:
        return next((kind for kind in SPECULATORS if kind == raw["speculators_model_type"]), None)
    names, section = raw.get("architectures"), raw.get("dflash_config")
    found = names if isinstance(names, list | tuple) else ()
    kind = next((kind for name, kind in ARCHITECTURES.items() if name in found), None)
    is_domino = isinstance(section, Mapping) and section.get("projector_type") == "domino"
    return "domino" if kind == "dflash" and is_domino else kind


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return z-lab's taps: evenly from block 1 to the third from the end; a single tap is in the middle."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (num_taps - 1)) for index in range(num_taps))


def _unsupported(fields: Fields) -> ModelError:
    if "speculators_model_type" in fields.raw:
        what = f"speculators model type '{fields.get('speculators_model_type', str)}'"
    else:
        what = ", ".join(fields.items("architectures", str) or ()) or "no architecture"
    return ModelError(f"'{fields.owner}': {what} is not a supported DFlash drafter. {SERVED}")


def _either(dflash: Fields, fields: Fields, key: str, kind: type[T]) -> T | None:
    """Return an option from `dflash_config`, or from the top level."""
    value = dflash.optional(key, kind)
    return fields.optional(key, kind) if value is None else value


def _from_anchor(dflash: Fields, fields: Fields, kind: DraftKind) -> bool:
    """Return whether the anchor's column also drafts."""
    key = "shift_label" if kind == "domino" else "sample_from_anchor"
    stored = _either(dflash, fields, key, bool)
    return kind == "dspark" if stored is None else stored


def _block(dflash: Fields, fields: Fields, *, from_anchor: bool) -> int:
    stored = _either(dflash, fields, "block_size", int)
    if stored is None:
        stored = SPECULATORS_BLOCK if "speculators_model_type" in fields.raw else ZLAB_BLOCK
    if stored + from_anchor < 2:
        raise fields.error(f"says block_size = {stored}, but a block is an anchor and at least one draft")
    return stored + from_anchor


def _layers(
    fields: Fields, dflash: Fields, body: Fields, kind: DraftKind
) -> tuple[tuple[int | None, ...], tuple[int, ...], tuple[bool, ...]]:
    """Return the window of each layer, the taps, and for each layer whether it is causal inside the block."""
    num_layers = body.positive("num_hidden_layers")
    windows = read_windows(body, num_layers)
    if body is not fields:
        ids = fields.items("aux_hidden_state_layer_ids", int)
        if not ids:
            raise fields.error("has no 'aux_hidden_state_layer_ids'")
        taps = tuple(layer - 1 for layer in ids)
        causal = False if fields.get("sliding_window_non_causal", bool, kind == "dflash2") else None
    else:
        if dflash.get("use_swa", bool, False):
            windows = (dflash.positive("swa_window_size"),) * num_layers
        taps = _zlab_taps(fields, dflash, num_layers)
        causal = fields.optional("is_causal", bool)
        for key in ("causal", "causal_head"):
            causal = dflash.optional(key, bool) if causal is None else causal
    if not taps or min(taps) < 0:
        raise fields.error(f"reads target layers {list(taps)}, but needs at least one, from 0 on")
    return windows, taps, tuple(window is not None if causal is None else causal for window in windows)


def _zlab_taps(fields: Fields, dflash: Fields, num_layers: int) -> tuple[int, ...]:
    taps = dflash.items("target_layer_ids", int)
    taps = fields.items("target_layer_ids", int) if taps is None else taps
    if taps is not None:
        return taps
    num_target_layers = fields.optional("num_target_layers", int)
    if num_target_layers is None:
        raise fields.error("has neither dflash_config.target_layer_ids nor num_target_layers")
    return default_taps(num_target_layers, num_layers)


def _markov_rank(dflash: Fields, fields: Fields) -> int:
    """Return the rank of DSpark's Markov head, or 0 if there is no head and the drafter works like DFlash."""
    rank = _either(dflash, fields, "markov_rank", int)
    if rank is None:
        return SPECULATORS_RANK if "speculators_model_type" in fields.raw else 0
    if rank < 0:
        raise fields.wrong("markov_rank", rank, "expected 0 or a positive number")
    return rank


def _refuse_variants(fields: Fields, dflash: Fields, kind: DraftKind, *, from_anchor: bool) -> None:
    """Raise an error for variants of DFlash that would load but draft nonsense."""
    fields, dflash = replace(fields, remedy=SERVED), replace(dflash, remedy=SERVED)
    fields.refuse("use_gemma_norm", False)
    fields.refuse("rope_is_neox_style", True)
    dflash.refuse("shift_label", from_anchor)
    dflash.refuse("attention_mode", "gqa")
    dflash.refuse("dspark_backbone_conv_enabled", False)
    dflash.refuse("attention_sink_bias", False)
    dflash.refuse("attention_value_scale", 1, 1.0)
    dflash.refuse("projector_type", kind if kind in ("domino", "lilicorr") else "dspark")
    for place in (fields, dflash):
        place.refuse("markov_head_type", "vanilla")  # no published drafter has another
        if kind != "dspark":
            place.refuse("markov_rank", 0)
        if kind in ("dflash2", "lilicorr"):
            place.refuse("sample_from_anchor", False)
        if kind == "domino":
            place.refuse("sample_from_anchor", from_anchor)
    kinds: dict[DraftKind, tuple[str, ...]] = {
        "dflash2": DFLASH2_KEYS,
        "lilicorr": (*LILICORR_KEYS, *CONV_KEYS),
    }
    known = kinds.get(kind, ())
    for key in dflash.raw:
        if key.startswith(("lilicorr_", "conv_", "selector_")) and key not in known:
            dflash.refuse(key)


def _read_dflash2(
    section: Fields, top: Fields, hidden_size: int, vocab_size: int, kind: DraftKind
) -> Dflash2Head | None:
    """Return DFlash2's options, for LiLiCorr those of the convolutions, or None without convolutions."""
    if kind not in ("dflash2", "lilicorr"):
        return None
    _need_whole_vocabulary(top, vocab_size, kind)
    if kind == "lilicorr":
        if not any(section.get(key, int, 0) for key in CONV_KEYS):
            return None
        taps, group = (section.positive(key) for key in CONV_KEYS)
        head = Dflash2Head(taps, group, rank=0, top_k=0)
    else:
        taps, group, rank, top_k = (section.positive(key, default) for key, default in DFLASH2_SIZES.items())
        head = Dflash2Head(taps, group, rank, top_k, section.get(SKIPS_FIRST, bool, False))
    if hidden_size % head.conv_group:
        why = f"which does not divide the hidden size of {hidden_size}"
        raise section.wrong("conv_group_size", head.conv_group, why)
    most = min(MAX_CANDIDATES, vocab_size)
    if head.top_k > most:
        raise section.wrong("selector_top_k", head.top_k, f"but at most {most} candidates are supported")
    return head


def _read_xpress(fields: Fields) -> XPressHead:
    own, block = fields.optional("xpress_block_size", int), fields.get("block_size", int, ZLAB_BLOCK)
    if own not in (None, block):
        raise fields.wrong("xpress_block_size", own, f"but block_size = {block}")
    top_k = fields.get("xpress_topc", int, XPRESS_TOP_K)
    if top_k < 0:
        raise fields.wrong("xpress_topc", top_k, "expected 0 or a positive number")
    rank = fields.positive("xpress_rank", XPRESS_RANK)
    if "speculators_model_type" in fields.raw:
        inner = rank * fields.positive("xpress_mlp_ratio", XPRESS_RATIO)
        return XPressHead(rank, inner, fields.positive("num_jacobi_passes", XPRESS_PASSES), top_k)
    inner = fields.positive("xpress_mlp_hidden", XPRESS_INNER)
    return XPressHead(rank, inner, fields.positive("xpress_num_passes", XPRESS_PASSES), top_k)


def _read_domino(dflash: Fields, fields: Fields) -> DominoHead:
    rank = (fields if dflash.raw.get("emb_dim") is None else dflash).positive("emb_dim")
    fields.refuse("emb_dim", rank)
    block = fields.get("block_size", int, ZLAB_BLOCK)
    _need_whole_vocabulary(fields, fields.positive("vocab_size"), "domino")
    num_plain = dflash.get("pure_draft_prefix_len", int, 0)
    if not 0 <= num_plain < block:
        raise dflash.wrong("pure_draft_prefix_len", num_plain, f"expected 0 to {block - 1}")
    return DominoHead(dflash.positive("gru_hidden_dim"), rank, num_plain)


def _need_whole_vocabulary(top: Fields, vocab_size: int, kind: DraftKind) -> None:
    draft_vocab_size = top.positive("draft_vocab_size", vocab_size)
    if draft_vocab_size != vocab_size:
        why = f"but a {KIND_NAMES[kind]} drafter has all {vocab_size} tokens of its target"
        raise top.wrong("draft_vocab_size", draft_vocab_size, why)


def _read_lilicorr(dflash: Fields, fields: Fields, hidden_size: int, vocab_size: int) -> LiLiCorrHead:
    dflash.refuse("lilicorr_enabled", True)
    size = dflash.get("lilicorr_hidden_size", int) or hidden_size
    num_heads, top_k = dflash.positive("lilicorr_num_heads"), dflash.positive("lilicorr_candidate_topk")
    if size < 1 or size % num_heads:
        raise dflash.wrong("lilicorr_num_heads", num_heads, f"which does not divide the size of {size}")
    if top_k > min(MAX_CANDIDATES, vocab_size):
        why = f"but at most {min(MAX_CANDIDATES, vocab_size)} candidates are supported"
        raise dflash.wrong("lilicorr_candidate_topk", top_k, why)
    return LiLiCorrHead(
        top_k=top_k,
        size=size,
        num_layers=dflash.get("lilicorr_num_layers", int),
        num_heads=num_heads,
        mlp_ratio=dflash.above_zero("lilicorr_mlp_ratio"),
        factor_size=dflash.positive("lilicorr_factor_dim"),
        eps=dflash.above_zero("lilicorr_vector_eps"),
        scale=dflash.above_zero("lilicorr_logit_scale"),
    )
