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

from blockdraft.checkpoints.config_fields import Fields, T, check_layer_types, read_heads, read_rope
from blockdraft.checkpoints.draft_keys import (
    refuse_contradictions,
    refuse_variants,
    unread_keys,
    watched,
)
from blockdraft.errors import ModelError
from blockdraft.models.config import Rope
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
QWEN3_HEAD_DIM, QWEN3_FIRST_WINDOW = 128, 28  # defaults of transformers' Qwen3Config
# The sizes of DFlash2, in the order of Dflash2Head, and their defaults in both layouts.
DFLASH2_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
ANCHOR_KEYS = (("sample_from_anchor", True), ("dspark_bonus_anchor", False))  # the anchor drafts, too
SCALE = "output_multiplier"
QUERY_CAUSAL = "dflash_query_causal"  # the name that trainers of DSpark have for it
SKIPS_FIRST = "selector_skips_first"  # our own key; other engines use the selector for the first draft, too
CONV_KEYS = ("conv_kernel_size", "conv_group_size")
# The sizes of XPress and their defaults, as vLLM and speculators have them. speculators has no XPRESS_TOP_K.
XPRESS_RANK, XPRESS_INNER, XPRESS_RATIO, XPRESS_PASSES, XPRESS_TOP_K = 256, 512, 2, 6, 512
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
    fields, is_speculators = watched(Fields(raw, owner=name)), "speculators_model_type" in raw
    kind = draft_kind(raw)
    if kind is None:
        raise _unsupported(fields)
    # The options of DFlash, and the Qwen3-style decoder.
    dflash = fields if is_speculators else watched(fields.section("dflash_config"))
    body = watched(fields.section("transformer_layer_config")) if is_speculators else fields
    from_anchor = _from_anchor(dflash, fields, kind)
    _refuse_variants(fields, dflash, body, kind, from_anchor=from_anchor)
    windows, is_causal = _windows(fields, dflash, body, kind)
    hidden_size = body.positive("hidden_size")
    num_heads, num_kv_heads, head_dim = read_heads(body, hidden_size, QWEN3_HEAD_DIM)
    body.refuse("v_head_dim", head_dim)
    vocab_size = body.positive("vocab_size")
    mask_token_id = _either(dflash, fields, "mask_token_id", int)
    has_own_head = fields.get("has_own_lm_head", bool, False)
    block = _block(dflash, fields, from_anchor=from_anchor and kind != "domino")
    config = DraftConfig(
        name=name,
        block=block,
        mask_token_id=fields.get("mask_token_id", int) if mask_token_id is None else mask_token_id,
        taps=_taps(fields, dflash, len(windows)),
        vocab_size=vocab_size,
        draft_vocab_size=fields.positive("draft_vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=body.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        has_bias=body.get("attention_bias", bool, False),
        norm_eps=body.above_zero("rms_norm_eps", 1e-6),
        rope=_rope(body, head_dim, is_speculators=is_speculators),
        windows=windows,
        is_causal=is_causal,
        has_anchored_window=is_speculators,
        embedding_scale=_embedding_scale(dflash, fields, kind),
        logit_scale=_place(dflash, fields, SCALE).get(SCALE, float, 1.0),
        logit_softcap=_softcap(dflash, fields),
        target_hidden_size=fields.positive("target_hidden_size", hidden_size),
        num_target_layers=None if is_speculators else _either(dflash, fields, "num_target_layers", int),
        drafts_from_anchor=from_anchor,
        copies_head=kind == "dspark" or (kind == "lilicorr" and not has_own_head),
        dflash2=_read_dflash2(dflash, fields, hidden_size, vocab_size, kind),
        markov_rank=_markov_rank(dflash, fields) if kind == "dspark" else 0,
        xpress=_read_xpress(fields, block - from_anchor) if kind == "xpress" else None,
        domino=_read_domino(dflash, fields, block, vocab_size) if kind == "domino" else None,
        lilicorr=_read_lilicorr(dflash, fields, hidden_size, vocab_size) if kind == "lilicorr" else None,
    )
    refuse_contradictions(fields, dflash, config)
    served = (replace(place, remedy=SERVED) for place in (dflash, body))
    return replace(config, unread_keys=unread_keys(*served))


def draft_block(raw: Mapping[str, object]) -> int:
    """Return the block size, including the anchor, of any drafter, even of an unsupported one."""
    sections = [section for section in (raw.get("dflash_config"), raw) if isinstance(section, Mapping)]
    said = [one.get(key) is yes for key, yes in ANCHOR_KEYS for one in sections if one.get(key) is not None]
    kind = draft_kind(raw)
    if kind == "dspark":
        said.append(num_proposed(raw) in (None, raw.get("block_size")))
    anchor = int(any(said[:1]) and kind != "domino")
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


def _place(dflash: Fields, fields: Fields, key: str) -> Fields:
    """Return where an option is said: `dflash_config`, or else the top level."""
    said = [place for place in (dflash, fields) if place.raw.get(key) is not None]
    return said[0] if said else dflash


def _either(dflash: Fields, fields: Fields, key: str, kind: type[T]) -> T | None:
    return _place(dflash, fields, key).optional(key, kind)


def _from_anchor(dflash: Fields, fields: Fields, kind: DraftKind) -> bool:
    """Return whether the anchor's column also drafts."""
    if kind == "domino":
        return _either(dflash, fields, "shift_label", bool) is True
    said = [(_either(dflash, fields, key, bool), yes) for key, yes in ANCHOR_KEYS]
    stored = next((value is yes for value, yes in said if value is not None), None)
    if stored is not None or kind != "dspark" or "speculators_model_type" not in fields.raw:
        return kind == "dspark" if stored is None else stored
    proposed, block = num_proposed(fields.raw), fields.positive("block_size", SPECULATORS_BLOCK)
    if proposed not in (block - 1, block):
        raise fields.error("has no 'sample_from_anchor', for which trainers and engines differ")
    return proposed == block


def num_proposed(raw: Mapping[str, object]) -> int | None:
    """Return the number of drafts that a speculators file proposes, or None if it says none."""
    section = raw.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    proposed = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return proposed if isinstance(proposed, int) else None


def _block(dflash: Fields, fields: Fields, *, from_anchor: bool) -> int:
    stored = _either(dflash, fields, "block_size", int)
    if stored is None:
        stored = SPECULATORS_BLOCK if "speculators_model_type" in fields.raw else ZLAB_BLOCK
    if stored + from_anchor < 2:
        raise fields.error(f"says block_size = {stored}, but a block is an anchor and at least one draft")
    return stored + from_anchor


def _windows(
    fields: Fields, dflash: Fields, body: Fields, kind: DraftKind
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return the window of each layer, and for each layer whether it is causal inside the block."""
    slides = _sliding_layers(body)
    if body is not fields:
        windows = _sized(slides, body, None)
        body.refuse("is_causal")
        sees_all = fields.get("sliding_window_non_causal", bool, kind == "dflash2")
        return windows, tuple(window is not None and not sees_all for window in windows)
    # As in vLLM: where all layers are full, `use_swa` gives all of them a window and makes none causal.
    is_swa = dflash.get("use_swa", bool, False) and not any(slides)
    size = dflash.optional("swa_window_size", int)
    windows = _sized((True,) * len(slides) if is_swa else slides, body, size)
    places = ((fields, "is_causal"), (dflash, "causal"), (dflash, "causal_head"), (fields, QUERY_CAUSAL))
    said = [place.optional(key, bool) for place, key in places]
    causal = next((one for one in said if one is not None), None)
    return windows, slides if causal is None else (causal,) * len(slides)


def _sliding_layers(body: Fields) -> tuple[bool, ...]:
    """Return for each layer whether its type is a sliding one."""
    num_layers, kinds = body.positive("num_hidden_layers"), body.items("layer_types", str)
    if kinds is not None:
        check_layer_types(body, kinds, num_layers, {"full_attention", "sliding_attention"})
        return tuple(kind == "sliding_attention" for kind in kinds)
    is_used = body.get("use_sliding_window", bool, False)
    first = body.get("max_window_layers", int, QWEN3_FIRST_WINDOW)
    return tuple(is_used and layer >= first for layer in range(num_layers))


def _sized(slides: tuple[bool, ...], body: Fields, size: int | None) -> tuple[int | None, ...]:
    """Return the layers' windows: `size`, or what the decoder says, which may be that no layer has one."""
    if not any(slides):
        return (None,) * len(slides)
    if size is None:
        is_used = body.optional("use_sliding_window", bool)
        if is_used is None:
            raise body.error(
                "has sliding layers, but neither dflash_config.swa_window_size nor use_sliding_window, and "
                "engines disagree on their window: set use_sliding_window to true or false"
            )
        size = body.positive("sliding_window") if is_used else None
    elif size <= 0:
        raise body.error(f"has sliding layers, but swa_window_size = {size}")
    return tuple(size if one else None for one in slides)


def _taps(fields: Fields, dflash: Fields, num_layers: int) -> tuple[int, ...]:
    if "speculators_model_type" in fields.raw:
        ids = fields.items("aux_hidden_state_layer_ids", int)
        if not ids:
            raise fields.error("has no 'aux_hidden_state_layer_ids'")
        taps = tuple(layer - 1 for layer in ids)
    else:
        taps = _zlab_taps(fields, dflash, num_layers)
    if not taps or min(taps) < 0:
        raise fields.error(f"reads target layers {list(taps)}, but needs at least one, from 0 on")
    return taps


def _zlab_taps(fields: Fields, dflash: Fields, num_layers: int) -> tuple[int, ...]:
    taps = _place(dflash, fields, "target_layer_ids").items("target_layer_ids", int)
    if taps is not None:
        return taps
    num_target_layers = _either(dflash, fields, "num_target_layers", int)
    if num_target_layers is None:
        raise fields.error("has neither dflash_config.target_layer_ids nor num_target_layers")
    return default_taps(num_target_layers, num_layers)


def _rope(body: Fields, head_dim: int, *, is_speculators: bool) -> Rope:
    places = (body, body.section("rope_parameters"), body.section("rope_scaling"))
    said = {place.raw.get("rope_theta") for place in places} - {None}
    if len(said) > 1:
        raise body.error(f"says {' and '.join(map(str, said))} for rope_theta: keep one")
    if is_speculators and not said:
        raise body.error(f"has no '{body.prefix}rope_theta', for which trainers and engines differ")
    return read_rope(body, head_dim=head_dim)


def _embedding_scale(dflash: Fields, fields: Fields, kind: DraftKind) -> float | None:
    """Return what the target's stored embeddings are multiplied by; None means the target's own scale.

    Without the key, z-lab's code, vLLM and the trainers use 1. But z-lab's DFlash drafters for Gemma were
    made when its code called the target's own embedding.
    """
    is_early = kind == "dflash" and "speculators_model_type" not in fields.raw
    scale = _either(dflash, fields, "input_embedding_scale", float)
    return scale if scale is not None or is_early else 1.0


def _softcap(dflash: Fields, fields: Fields) -> float | None:
    """Return the bound of the logits. A null in `dflash_config` hides the top level's, as in z-lab's code."""
    key = "final_logit_softcapping"
    places = [place for place in (dflash, fields) if key in place.raw]
    cap = places[0].optional(key, float) if places else None
    return cap if cap is not None and cap > 0 else None


def _markov_rank(dflash: Fields, fields: Fields) -> int:
    """Return the rank of DSpark's Markov head, or 0 if there is no head and the drafter works like DFlash."""
    rank = _either(dflash, fields, "markov_rank", int)
    if rank is None:
        return SPECULATORS_RANK if "speculators_model_type" in fields.raw else 0
    if rank < 0:
        raise fields.wrong("markov_rank", rank, "expected 0 or a positive number")
    return rank


def _refuse_variants(
    fields: Fields, dflash: Fields, body: Fields, kind: DraftKind, *, from_anchor: bool
) -> None:
    """Raise an error for variants of DFlash that would load but draft nonsense."""
    fields, dflash, body = (replace(place, remedy=SERVED) for place in (fields, dflash, body))
    refuse_variants(dflash, body)
    for place in (fields, dflash):
        place.refuse("shift_label", from_anchor)
        place.refuse("projector_type", kind if kind in ("domino", "lilicorr") else "dspark")
        if kind != "dspark":
            place.refuse("markov_rank", 0)
        if kind in ("dflash2", "lilicorr"):
            place.refuse("sample_from_anchor", False)
        if kind == "domino":
            place.refuse("sample_from_anchor", from_anchor)
    body.refuse("hidden_act", "silu", "swish")


def _read_dflash2(
    dflash: Fields, top: Fields, hidden_size: int, vocab_size: int, kind: DraftKind
) -> Dflash2Head | None:
    """Return DFlash2's options, for LiLiCorr those of the convolutions, or None without convolutions."""
    if kind not in ("dflash2", "lilicorr"):
        return None
    _need_whole_vocabulary(top, vocab_size, kind)
    keys = DFLASH2_SIZES if kind == "dflash2" else CONV_KEYS
    places = {key: _place(dflash, top, key) for key in keys}
    if kind == "dflash2":
        taps, group, rank, top_k = (place.positive(key, DFLASH2_SIZES[key]) for key, place in places.items())
        head = Dflash2Head(taps, group, rank, top_k, dflash.get(SKIPS_FIRST, bool, False))
    elif any(place.get(key, int, 0) for key, place in places.items()):
        taps, group = (place.positive(key) for key, place in places.items())
        head = Dflash2Head(taps, group, rank=0, top_k=0)
    else:
        return None
    if hidden_size % head.conv_group:
        why = f"which does not divide the hidden size of {hidden_size}"
        raise places["conv_group_size"].wrong("conv_group_size", head.conv_group, why)
    most = min(MAX_CANDIDATES, vocab_size)
    if head.top_k > most:
        why = f"but at most {most} candidates are supported"
        raise places["selector_top_k"].wrong("selector_top_k", head.top_k, why)
    return head


def _read_xpress(fields: Fields, num_columns: int) -> XPressHead:
    own = fields.optional("xpress_block_size", int)
    if own not in (None, num_columns):
        raise fields.wrong("xpress_block_size", own, f"but block_size = {num_columns}")
    top_k = fields.get("xpress_topc", int, XPRESS_TOP_K)
    if top_k < 0:
        raise fields.wrong("xpress_topc", top_k, "expected 0 or a positive number")
    rank = fields.positive("xpress_rank", XPRESS_RANK)
    if "speculators_model_type" in fields.raw:
        inner = rank * fields.positive("xpress_mlp_ratio", XPRESS_RATIO)
        return XPressHead(rank, inner, fields.positive("num_jacobi_passes", XPRESS_PASSES), top_k)
    inner = fields.positive("xpress_mlp_hidden", XPRESS_INNER)
    return XPressHead(rank, inner, fields.positive("xpress_num_passes", XPRESS_PASSES), top_k)


def _read_domino(dflash: Fields, fields: Fields, block: int, vocab_size: int) -> DominoHead:
    rank = (fields if dflash.raw.get("emb_dim") is None else dflash).positive("emb_dim")
    fields.refuse("emb_dim", rank)
    _need_whole_vocabulary(fields, vocab_size, "domino")
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
