"""Makes sure that no key of a drafter's config.json is ignored silently.

A key is computed with, harmless, refused by name or, outside `dflash_config`, reported at the start: trainers
leave notes in a config that no list foresees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.models.draft_config import DraftConfig

# Keys that change no draft.
HARMLESS = {
    # names, formats and what a runtime returns
    *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attn_implementation"),
    *("architectures", "auto_map", "chunk_size_feed_forward", "dtype", "finetuning_task", "id2label"),
    *("has_no_defaults_at_init", "is_decoder", "is_encoder_decoder", "label2id", "model_type"),
    *("output_attentions", "output_hidden_states", "output_scores", "problem_type", "return_dict"),
    *("speculators_config", "speculators_model_type", "speculators_version", "target_model_type"),
    *("target_text_model_type", "task_specific_params", "tf_legacy_loss", "tokenizer_class"),
    *("torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache"),
    # read where the weights are, or needed only with another key
    *("compression_config", "has_embed_tokens", "has_lm_head", "max_position_embeddings"),
    *("max_window_layers", "quantization_config", "sliding_window", "tie_word_embeddings"),
    "use_sliding_window",
    # tokens, and how a text model would sample
    *("bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id"),
    *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
    *("length_penalty", "mask_token", "max_length", "min_length", "no_repeat_ngram_size"),
    *("num_beam_groups", "num_beams", "num_return_sequences", "pad_token_id", "remove_invalid_values"),
    *("repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens"),
    *("temperature", "top_k", "top_p", "typical_p"),
    # how it was trained, and DSpark's confidence head, which is not read
    *("attention_dropout", "initializer_range", "loss_decay_gamma", "max_anchors", "num_anchors"),
    *("confidence_head_alpha", "confidence_head_with_markov", "enable_confidence_head"),
    "use_confidence_head",
    # the width that another engine would choose
    *("block_size_policy", "dflash_initial_block_size", "prefer_requested_block_size"),
    "runtime_block_size",
}
# Variants of DFlash that would load but draft nonsense, with the values that ask for none of them.
VARIANTS: Mapping[str, tuple[object, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_mode": ("gqa", "mha"),  # the same arithmetic
    "attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "dspark_backbone_conv_enabled": (False,),
    "dspark_fixup_head_type": ("markov",),
    "dspark_markov_head_type": ("vanilla",),
    "eagle_config": (),
    "enable_qwen35_gated_q_proj": (False,),
    "is_neox_style": (True,),
    "log_snr_conditioning": (False,),
    "logit_scale": (1, 1.0),
    "markov_head_type": ("vanilla",),  # no published drafter has another
    "mlp_bias": (False,),
    "rope_is_neox_style": (True,),
    "train_embed_tokens": (False,),
    "use_aux_hidden_state": (True,),
    "use_gemma_norm": (False,),
}
# Beginnings of options that only some kinds have, refused where nothing reads them.
OF_A_KIND = ("conv_", "emb_dim", "gru_", "lilicorr_", "num_jacobi_", "pure_draft_", "selector_", "xpress_")
ROPE_KEYS = {
    *("attention_factor", "beta_fast", "beta_slow", "factor", "factors", "high_freq_factor"),
    *("low_freq_factor", "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim"),
    *("original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type"),
    *("truncate", "type"),
}


class Watched(Mapping[str, object]):
    """A mapping that remembers which keys were asked for."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self._raw = raw
        self._asked: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self._asked.add(key)
        return self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def unasked(self) -> list[str]:
        """Return the keys that have a value, may change drafts, and were not asked for."""
        rest = self._raw.keys() - self._asked - HARMLESS
        return sorted(key for key in rest if self._raw[key] not in (None, {}, []))


def watched(fields: Fields) -> Fields:
    return replace(fields, raw=Watched(fields.raw))


def refuse_variants(*places: Fields) -> None:
    for place in places:
        for key, allowed in VARIANTS.items():
            place.refuse(key, *allowed)


def refuse_contradictions(fields: Fields, dflash: Fields, config: DraftConfig) -> None:
    """Raise an error if another engine's name for a key says something else than what was read."""
    taps, mask_token_id = list(config.taps), config.mask_token_id
    twins: dict[str, object] = {
        "dspark_block_size": config.num_columns,
        "dspark_bonus_anchor": not config.drafts_from_anchor,
        "dspark_markov_rank": config.markov_rank,
        "dspark_noise_token_id": mask_token_id,
        "dspark_target_layer_ids": taps,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "num_aux_layers": len(taps),
        "pard_token": mask_token_id,
        "ptd_token_id": mask_token_id,
    }
    for key, value in twins.items():
        _check_twin(fields, key, value)
    section = fields.section("dspark_config")  # some trainers repeat keys here
    for key in section.raw:
        _check_twin(section, key, dflash.raw.get(key, fields.raw.get(key)))
    if config.copies_head and config.draft_vocab_size == config.vocab_size:
        fields.refuse("has_own_lm_head", False)


def _check_twin(fields: Fields, key: str, expected: object) -> None:
    stored = fields.raw.get(key)
    if stored is not None and stored != expected:
        raise fields.wrong(key, stored, f"but the rest of the file says {expected}")


def unread_keys(dflash: Fields, body: Fields) -> tuple[str, ...]:
    """Return the keys that nothing here reads and that may change drafts, with their sections.

    Raise an error instead for one in `dflash_config` or in a rope, and for an option of another kind.
    """
    for key in ("rope_parameters", "rope_scaling"):
        rope = body.section(key)
        for name in sorted(rope.raw.keys() - ROPE_KEYS):
            rope.refuse(name)
    found = []
    for place in (dflash, body):
        assert isinstance(place.raw, Watched)
        for key in place.raw.unasked():
            if place.prefix == "dflash_config." or key.startswith(OF_A_KIND):
                place.refuse(key)
            found.append(f"{place.prefix}{key}")
    return tuple(found)
