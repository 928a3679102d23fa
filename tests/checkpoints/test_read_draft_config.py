"""config.json of a drafter in both layouts, and whether it belongs to its target."""

import copy
from dataclasses import replace

import pytest

from blockdraft.cache.spec import Newest
from blockdraft.checkpoints.read_draft_config import (
    ARCHITECTURES,
    default_taps,
    draft_block,
    read_draft_config,
)
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.errors import ModelError
from blockdraft.models.draft_config import Dflash2Head, DominoHead, LiLiCorrHead, XPressHead, check_pair
from tests.checkpoints.published_drafters import DRAFTERS
from tests.fixtures import make_pair

NAME = "some/drafter"
BODY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e6,
}
ZLAB = BODY | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 10,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 3, 4]},
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashDraftModel"],
    "transformer_layer_config": BODY,
    "draft_vocab_size": 100,
    "block_size": 10,
    "mask_token_id": 99,
    "aux_hidden_state_layer_ids": [2, 4, 5],
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 6,
}
NO_WINDOW = SLIDING | {"use_sliding_window": False}


def zlab(*, dflash=None, **top):
    raw = copy.deepcopy(ZLAB) | top
    raw["dflash_config"] = {k: v for k, v in (raw["dflash_config"] | (dflash or {})).items() if v is not None}
    return raw


NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}


def deepspec(**top):
    """As deepseek-ai publishes dflash_*_block7."""
    own = {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_target_layers": 6, "num_anchors": 512}
    return BODY | own | {"mask_token_id": 99, "target_layer_ids": [1, 3, 4]} | NO_HEADS | top


def specforge(*, dflash=None, **top):
    own = {"projector_type": "dspark", "attention_mode": "gqa"} | (dflash or {})
    return zlab(architectures=["DSparkDraftModel"], dflash=own, **top)


def speculators(*, body=None, **top):
    return SPECULATORS | {"transformer_layer_config": BODY | (body or {})} | top


def dspark_speculators(*, proposed=None, **top):
    methods = [{"proposal_type": "greedy", "speculative_tokens": proposed}]
    own = {"speculators_model_type": "dspark", "speculators_config": {"proposal_methods": methods}}
    return speculators(**own | NO_HEADS | top)


def dflash2(layout, **fields):
    if layout is zlab:
        return zlab(architectures=["DFlash2DraftModel"], **SLIDING, dflash=fields)
    return speculators(speculators_model_type="dflash2", body=SLIDING, **fields)


def read(raw):
    return read_draft_config(raw, name=NAME)


def refusal(raw):
    with pytest.raises(ModelError) as caught:
        read(raw)
    message = str(caught.value)
    assert "\n" not in message
    assert f"'{NAME}'" in message
    assert message.endswith("See docs/models.md.")
    return message


def test_both_layouts_describe_the_same_drafter():
    mine, theirs = read(zlab()), read(speculators())
    assert mine.taps == (1, 3, 4)
    assert (mine.block, mine.mask_token_id, mine.num_layers, mine.rope.theta) == (10, 99, 2, 1e6)
    same = {"num_target_layers": None, "embedding_scale": 1.0}  # None in z-lab's layout: the target's
    assert replace(mine, **same) == replace(theirs, has_anchored_window=False)
    assert theirs.has_anchored_window
    assert not mine.has_anchored_window


@pytest.mark.parametrize(
    ("num_target_layers", "num_taps", "taps"),
    [  # published drafters
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (60, 6, (1, 12, 23, 35, 46, 57)),
        (28, 1, (14,)),
    ],
)
def test_default_taps_are_those_of_the_published_drafters(num_target_layers, num_taps, taps):
    assert default_taps(num_target_layers, num_taps) == taps


def test_taps_default_to_the_rule_with_one_per_layer():
    raw = zlab(num_hidden_layers=5, num_target_layers=36, dflash={"target_layer_ids": None})
    assert read(raw).taps == (1, 9, 17, 25, 33)
    assert "num_target_layers" in refusal(zlab(num_target_layers=None, dflash={"target_layer_ids": None}))


@pytest.mark.parametrize(
    ("raw", "block"),
    [
        (zlab(dflash={"block_size": 7}), 7),  # over the top level's 10
        (zlab(), 10),
        (zlab(block_size=None), 16),
        (speculators(block_size=None), 8),
        (zlab(block_size=2), 2),
    ],
)
def test_block_size_is_read_from_where_each_layout_keeps_it(raw, block):
    assert read(raw).block == block


@pytest.mark.parametrize(
    "raw", [zlab(block_size=1), zlab(dflash={"block_size": -3}), speculators(block_size=1)]
)
def test_a_block_without_a_draft_is_refused(raw):
    assert "block_size" in refusal(raw)


def test_mask_id_may_be_at_the_top_and_may_be_zero():
    assert read(zlab(mask_token_id=5, dflash={"mask_token_id": None})).mask_token_id == 5
    assert read(zlab(mask_token_id=5, dflash={"mask_token_id": 0})).mask_token_id == 0
    assert "has no 'mask_token_id'" in refusal(zlab(dflash={"mask_token_id": None}))
    assert "has no 'mask_token_id'" in refusal(speculators(mask_token_id=None))


@pytest.mark.parametrize(
    ("raw", "is_causal"),
    [
        (zlab(), (False, False)),
        (zlab(**SLIDING), (True, False)),
        (zlab(**SLIDING, is_causal=False), (False, False)),
        (zlab(**SLIDING, is_causal=True), (True, True)),
        (zlab(**SLIDING, dflash={"causal": False}), (False, False)),
        (zlab(**SLIDING, dflash={"causal": True}), (True, True)),
        (zlab(dflash={"causal_head": True}), (True, True)),
        (zlab(**SLIDING, is_causal=False, dflash={"causal": True}), (False, False)),  # as in vLLM
        (zlab(**SLIDING, dflash={"causal": False, "causal_head": True}), (False, False)),
        (zlab(**SLIDING, dflash_query_causal=False), (False, False)),
        (zlab(**SLIDING, dflash_query_causal=False, dflash={"causal": True}), (True, True)),
        (zlab(**NO_WINDOW), (True, False)),  # as in z-lab's code
        (zlab(dflash={"use_swa": True, "swa_window_size": 4}), (False, False)),  # as in vLLM
        (speculators(body=NO_WINDOW), (False, False)),  # as speculators trains
        (speculators(), (False, False)),
        (speculators(body=SLIDING), (True, False)),
        (speculators(body=SLIDING, sliding_window_non_causal=False), (True, False)),
        (speculators(body=SLIDING, sliding_window_non_causal=True), (False, False)),
    ],
)
def test_causality_inside_the_block(raw, is_causal):
    assert read(raw).is_causal == is_causal


def test_windows_in_every_spelling():
    assert read(zlab()).windows == (None, None)
    assert read(zlab(**SLIDING)).windows == (6, None)
    swa = {"use_swa": True, "swa_window_size": 4}
    assert read(zlab(dflash=swa)).windows == (4, 4)
    assert read(zlab(**SLIDING, dflash=swa)).windows == (4, None)
    assert read(zlab(**NO_WINDOW, dflash={"swa_window_size": 4})).windows == (4, None)
    assert read(zlab(**NO_WINDOW)).windows == read(speculators(body=NO_WINDOW)).windows == (None, None)
    older = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    assert read(zlab(**older)).windows == (None, 5)
    assert read(speculators(body=SLIDING)).windows == (6, None)
    assert "swa_window_size = 0" in refusal(zlab(**SLIDING, dflash={"swa_window_size": 0}))
    unsaid = {key: value for key, value in SLIDING.items() if key != "use_sliding_window"}
    for raw in (zlab(**unsaid), speculators(body=unsaid), zlab(dflash={"use_swa": True})):
        assert "neither dflash_config.swa_window_size nor use_sliding_window" in refusal(raw)
    assert "'strange'" in refusal(zlab(layer_types=["strange", "full_attention"]))


SCALES = {"input_embedding_scale": 73, "output_multiplier": 0.196, "final_logit_softcapping": 20}


@pytest.mark.parametrize(
    "raw",
    [
        zlab(dflash=SCALES),
        zlab(**SCALES),
        zlab(dflash=SCALES, **dict.fromkeys(SCALES, 5.0)),
        speculators(**SCALES),
    ],
)
def test_scales_and_softcap_are_read_from_either_place(raw):
    config = read(raw)
    assert (config.embedding_scale, config.logit_scale, config.logit_softcap) == (73.0, 0.196, 20.0)


@pytest.mark.parametrize(
    ("raw", "scale"),
    [  # None: the target's
        (zlab(), None),
        (speculators(), 1.0),
        (deepspec(), 1.0),
        (dflash2(zlab), 1.0),
        (make_pair.xpress_config(), 1.0),
        (make_pair.domino_config(), 1.0),
        (make_pair.lilicorr_config(), 1.0),
    ],
)
def test_what_is_not_said_of_scales(raw, scale):
    config = read(raw)
    assert (config.embedding_scale, config.logit_scale, config.logit_softcap) == (scale, 1.0, None)
    assert config.unread_keys == ()


@pytest.mark.parametrize("cap", [0, -1.0, None])
def test_a_softcap_of_zero_is_none_and_hides_the_one_at_the_top(cap):
    raw = zlab(final_logit_softcapping=30.0)
    raw["dflash_config"]["final_logit_softcapping"] = cap
    assert read(raw).logit_softcap is None
    assert read(zlab(final_logit_softcapping=cap)).logit_softcap is None


@pytest.mark.parametrize("layout", [zlab, lambda **top: speculators(body=top)])
def test_the_decoder_has_the_defaults_of_transformers(layout):
    config = read(layout(head_dim=None, attention_bias=True))
    assert (config.head_dim, config.has_bias) == (128, True)
    assert not read(layout()).has_bias


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (zlab(architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
        (zlab(architectures=None), "no architecture"),
        (zlab(dflash={"conv_kernel_size": 2}), "dflash_config.conv_kernel_size = 2"),
        (zlab(dflash={"selector_rank": 256}), "dflash_config.selector_rank = 256"),
        (zlab(dflash={"projector_type": "causal_v5"}), "dflash_config.projector_type = 'causal_v5'"),
        (zlab(dflash={"lilicorr_top_k": 8}), "dflash_config.lilicorr_top_k = 8"),
        (zlab(architectures=["Gemma4DSparkModel"]), "Gemma4DSparkModel"),
        (zlab(architectures=["KimiK3DFlashDraftModel"]), "KimiK3DFlashDraftModel"),
        (zlab(dflash={"shift_label": True}), "dflash_config.shift_label = True"),
        (zlab(dflash={"sample_from_anchor": "yes"}), "dflash_config.sample_from_anchor = 'yes', expected"),
        (specforge(dflash={"attention_mode": "mla"}), "dflash_config.attention_mode = 'mla'"),
        (specforge(dflash={"dspark_backbone_conv_enabled": True}), "dspark_backbone_conv_enabled = True"),
        (specforge(dflash={"shift_label": False}), "dflash_config.shift_label = False"),
        (speculators(speculators_model_type="domino"), "'domino'"),
        (zlab(dflash={"attention_sink_bias": True}), "dflash_config.attention_sink_bias = True"),
        (zlab(dflash={"attention_value_scale": 0.5}), "dflash_config.attention_value_scale = 0.5"),
        (zlab(use_gemma_norm=True), "use_gemma_norm = True"),
        (zlab(rope_is_neox_style=False), "rope_is_neox_style = False"),
        (zlab(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (speculators(speculators_model_type="eagle3"), "'eagle3'"),
        (speculators(selector_top_k=16), "selector_top_k = 16"),
        (zlab(selector_top_k=16), "selector_top_k = 16"),
        (zlab(attention_sink_bias=True), "attention_sink_bias = True"),
        (zlab(is_neox_style=False), "is_neox_style = False"),
        (zlab(logit_scale=0.5), "logit_scale = 0.5"),
        (zlab(v_head_dim=16), "v_head_dim = 16"),
        (zlab(use_aux_hidden_state=False), "use_aux_hidden_state = False"),
        (zlab(train_embed_tokens=True), "train_embed_tokens = True"),
        (deepspec(has_own_lm_head=True), "has_own_lm_head = True"),
        (deepspec(log_snr_conditioning=True), "log_snr_conditioning = True"),
        (zlab(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling.rope_type = 'dynamic'"),
        (zlab(rope_parameters={"rope_type": "default", "strange": 2}), "rope_parameters.strange = 2"),
        (speculators(body={"is_causal": True}), "transformer_layer_config.is_causal = True"),
        (zlab(rope_parameters={"rope_theta": 5.0}), "for rope_theta: keep one"),
        (speculators(body={"rope_theta": None}), "has no 'transformer_layer_config.rope_theta'"),
        (zlab(dflash={"strange": 0}), "dflash_config.strange = 0"),
        *(
            (zlab(**{key: 8}), f"asks for {key} = 8, which is not implemented")
            for key in ("xpress_rank", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "lilicorr_top_k")
        ),
        (zlab(dflash={"gru_hidden_dim": 8}), "dflash_config.gru_hidden_dim = 8"),
        (zlab(projector_type="domino"), "projector_type = 'domino'"),
        (zlab(has_own_lm_head="yes"), "has_own_lm_head = 'yes', expected bool"),
        (speculators(body={"hidden_act": "gelu"}), "transformer_layer_config.hidden_act = 'gelu'"),
    ],
)
def test_relatives_and_variants_are_refused_by_name(raw, named):
    assert named in refusal(raw)


def test_dflash2_is_read_in_both_layouts_with_the_defaults_of_both():
    head = Dflash2Head(conv_taps=2, conv_group=16, rank=256, top_k=16)
    assert read(dflash2(zlab)).dflash2 == read(dflash2(speculators)).dflash2 == head
    own = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6}
    assert read(dflash2(zlab) | own).dflash2 == Dflash2Head(3, 4, 5, 6)
    assert read(dflash2(zlab, selector_top_k=7) | own).dflash2 == Dflash2Head(3, 4, 5, 7)
    for layout in (zlab, speculators):
        assert read(dflash2(layout, **own)).dflash2 == Dflash2Head(3, 4, 5, 6)
        assert read(layout()).dflash2 is None
        assert read(dflash2(layout, selector_skips_first=True)).dflash2 == replace(head, skips_first=True)
    assert read(dflash2(speculators)).is_causal == (False, False)
    assert read(dflash2(speculators, sliding_window_non_causal=False)).is_causal == (True, False)
    assert read(dflash2(zlab)).is_causal == (True, False)


@pytest.mark.parametrize("layout", [zlab, speculators])
@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("conv_group_size", 5, "does not divide the hidden size of 32"),
        ("selector_top_k", 65, "at most 64 candidates"),
        ("selector_rank", 0, "expected a positive number"),
        ("selector_skips_first", 1, "expected bool"),
        ("conv_kernel_size", 2.5, "expected int"),
        ("selector_head", "gated", "not implemented"),
        ("lilicorr_top_k", 8, "not implemented"),
        ("sample_from_anchor", True, "not implemented"),
        ("markov_rank", 8, "not implemented"),
    ],
)
def test_what_a_dflash2_drafter_must_not_say_is_refused_by_name(layout, key, value, why):
    message = refusal(dflash2(layout, **{key: value}))
    assert f"{key} = {value!r}" in message
    assert why in message


NEMOTRON = {  # of nvidia's DSpark drafter for Nemotron-3.5-Lightning
    "dspark_bonus_anchor": True,
    "dspark_fixup_head_type": "markov",
    "dspark_markov_rank": 8,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "has_embed_tokens": True,
    "num_aux_layers": 3,
    "pard_token": 99,
    "train_embed_tokens": False,
}
RADIXARK = {"dspark_config": {"markov_rank": 8, "mask_token_id": 99, "target_layer_ids": [1, 3, 4]}}


def test_other_names_of_a_key_may_repeat_it_and_must_not_contradict_it():
    raw = deepspec(markov_rank=8, **NEMOTRON, **RADIXARK)
    config = read(raw)
    assert (config.drafts_from_anchor, config.block, config.unread_keys) == (False, 7, ())
    assert draft_block(raw) == 7
    for key, value in (NEMOTRON | {"dspark_target_layer_ids": [1, 2], "dspark_block_size": 6}).items():
        if key not in ("dspark_fixup_head_type", "has_embed_tokens", "train_embed_tokens"):
            other = [7, 8] if isinstance(value, list) else not value if value is True else 5
            assert f"says {key} = {other!r}, but the rest of the file says" in refusal(
                raw | {"sample_from_anchor": False, key: other}
            )
    assert "dspark_config.markov_rank = 9" in refusal(raw | {"dspark_config": {"markov_rank": 9}})
    assert "dspark_config.strange = 1" in refusal(raw | {"dspark_config": {"strange": 1}})


def test_keys_that_nothing_reads_are_named_unless_they_are_harmless():
    top = {"strange": 0, "num_anchors": 512, "torch_dtype": "bfloat16", "other": None, "empty": {}}
    assert read(zlab(**top, dflash={"num_anchors": 4096, "loss_decay_gamma": 7.0})).unread_keys == (
        "strange",
    )
    assert read(speculators(body=top, strange=1, max_anchors=8)).unread_keys == (
        "strange",
        "transformer_layer_config.strange",
    )


@pytest.mark.parametrize(
    ("name", "block", "layers", "refused"),
    [
        ("z-lab/Qwen3.5-4B-DFlash", 16, {(4096, True), (None, False)}, None),
        ("z-lab/Qwen3.8-27B-DFlash2", 8, {(2048, False)}, None),
        ("z-lab/Muse-Glimmer-30B-DFlash2", 16, {(2048, False)}, None),
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DFlash", 16, {(None, False)}, None),
        (
            "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark",
            8,
            {(1024, True)},
            "attention_sink_bias",
        ),
        ("XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash", 8, {(1024, False)}, "attention_sink_bias"),
        ("RadixArk/Qwen3.8-27B-DSpark", 8, {(None, False)}, None),
    ],
)
def test_published_drafters_are_read_as_vllm_reads_them(name, block, layers, refused):
    raw = DRAFTERS[name]
    if refused is not None:
        assert f"{refused} = True, which is not implemented" in refusal(raw)
        without = {"attention_sink_bias", "attention_value_scale", "backbone_rotary_base"}
        section = {key: value for key, value in raw["dflash_config"].items() if key not in without}
        raw = {key: value for key, value in raw.items() if key not in {*without, "partial_rotary_factor"}}
        raw["dflash_config"] = section
    config = read(raw)
    found = set(zip(config.windows, config.is_causal, strict=True))
    assert (config.block, found, config.unread_keys) == (block, layers, ())


def test_a_dflash2_drafter_has_the_whole_vocabulary():
    assert "draft_vocab_size = 50" in refusal(dflash2(speculators, draft_vocab_size=50))


@pytest.mark.parametrize(
    "raw",
    [
        zlab(architectures=["DFlashLagunaForCausalLM"]),
        zlab(dflash={"lilicorr_top_k": 8}),
        zlab(dflash={"projector_type": "causal_v5"}),
        speculators(speculators_model_type="domino"),
    ],
)
def test_a_refused_relative_is_told_which_kinds_are_served(raw):
    message = refusal(raw)
    for name in ARCHITECTURES:
        assert name in message
    for kind in ("'dflash'", "'dflash2'", "'dspark'", "'xpress'"):
        assert kind in message


DOMINO = {"projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 12}


def domino(*, dflash=None, **top):
    return zlab(dflash=DOMINO | (dflash or {}), **top)


def test_domino_is_read_as_its_authors_and_specforge_write_it():
    one = read(domino(dflash={"shift_label": True, "pure_draft_prefix_len": 1}))
    assert (one.kind, one.domino) == ("domino", DominoHead(state_size=12, rank=7, num_plain=1))
    assert (one.block, one.num_columns, one.first_column, one.num_candidates) == (10, 10, 0, 100)
    assert read(domino(dflash={"shift_label": True, "sample_from_anchor": True})) == replace(
        one, domino=replace(one.domino, num_plain=0)
    )
    for said in ({"shift_label": True}, {"shift_label": True, "sample_from_anchor": True}, {"block_size": 7}):
        raw = domino(dflash=said)
        assert read(raw).block == draft_block(raw) == said.get("block_size", 10)
    behind = read(domino())
    assert (behind.block, behind.num_columns, behind.first_column) == (10, 10, 1)
    assert behind.domino == DominoHead(12, 7, 0)
    assert read(domino(architectures=["DominoDraftModel"])) == behind
    assert read(domino(dflash={"emb_dim": None}, emb_dim=7)) == behind


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (domino(dflash={"emb_dim": None}), "has no 'emb_dim'"),
        (domino(dflash={"gru_hidden_dim": None}), "has no 'dflash_config.gru_hidden_dim'"),
        (domino(emb_dim=8), "emb_dim = 8"),
        (domino(dflash={"pure_draft_prefix_len": 10}), "pure_draft_prefix_len = 10, expected 0 to 9"),
        (domino(dflash={"pure_draft_prefix_len": 7, "block_size": 7}), "expected 0 to 6"),
        (domino(gru_hidden_dim=9), "gru_hidden_dim = 9"),
        (domino(xpress_rank=8), "xpress_rank = 8"),
        (domino(shift_label=True, dflash={"shift_label": False}), "shift_label = True"),
        (domino(dflash={"sample_from_anchor": True}), "dflash_config.sample_from_anchor = True"),
        (domino(dflash={"shift_label": 1}), "dflash_config.shift_label = 1, expected bool"),
        (domino(draft_vocab_size=50), "draft_vocab_size = 50, but a Domino drafter has all 100 tokens"),
        (domino(dflash={"markov_rank": 8}), "markov_rank = 8"),
        (zlab(architectures=["DominoDraftModel"], dflash={"projector_type": "dspark"}), "'dspark'"),
    ],
)
def test_what_a_domino_drafter_must_not_say_is_refused_by_name(raw, why):
    assert why in refusal(raw)


def lilicorr(**dflash):
    sizes = {f"lilicorr_{key}": value for key, value in make_pair.LILICORR.items()}
    return zlab(architectures=["LiLiCorrDraftModel"], dflash=sizes | {"lilicorr_num_heads": 4} | dflash)


def test_lilicorr_is_read_as_vllm_reads_it():
    one = read(lilicorr())
    head = LiLiCorrHead(4, 12, num_layers=2, num_heads=4, mlp_ratio=1.5, factor_size=5, eps=1e-6, scale=10.0)
    assert (one.kind, one.lilicorr, one.dflash2) == ("lilicorr", head, None)
    assert read(lilicorr(lilicorr_hidden_size=0)).lilicorr == replace(head, size=32)
    convs = read(lilicorr(conv_kernel_size=2, conv_group_size=4))
    assert convs.dflash2 == Dflash2Head(2, 4, rank=0, top_k=0)
    assert convs.kind == "lilicorr"
    assert read(lilicorr(conv_kernel_size=0, conv_group_size=0)).dflash2 is None
    assert one.layer_specs() == (*read(zlab()).layer_specs(), Newest(num_kv_heads=2, head_dim=8))
    assert not one.has_own_head(is_stored=True)
    assert read(lilicorr() | {"has_own_lm_head": True}).has_own_head(is_stored=True)
    assert not read(lilicorr() | {"has_own_lm_head": False}).has_own_head(is_stored=True)
    assert read(lilicorr(projector_type="lilicorr")) == one


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (lilicorr(lilicorr_enabled=False), "lilicorr_enabled = False"),
        (lilicorr(lilicorr_num_heads=5), "lilicorr_num_heads = 5, which does not divide the size of 12"),
        (lilicorr(lilicorr_candidate_topk=65), "lilicorr_candidate_topk = 65, but at most 64 candidates"),
        (lilicorr(lilicorr_candidate_topk=None), "has no 'dflash_config.lilicorr_candidate_topk'"),
        (lilicorr(lilicorr_margin=0.1), "lilicorr_margin = 0.1"),
        (lilicorr(conv_kernel_size=2), "has no 'dflash_config.conv_group_size'"),
        (lilicorr(selector_rank=8), "selector_rank = 8"),
        (lilicorr(sample_from_anchor=True), "sample_from_anchor = True"),
        (lilicorr() | {"lilicorr_num_heads": 2}, "asks for lilicorr_num_heads = 2"),
        (lilicorr() | {"selector_rank": 8}, "selector_rank = 8"),
        (lilicorr(emb_dim=8), "emb_dim = 8"),
        (lilicorr(projector_type="domino"), "projector_type = 'domino'"),
        (lilicorr() | {"draft_vocab_size": 50}, "but a LiLiCorr drafter has all 100 tokens"),
    ],
)
def test_what_a_lilicorr_drafter_must_not_say_is_refused_by_name(raw, why):
    assert why in refusal(raw)


def xpress(layout, **fields):
    if layout is zlab:
        return zlab(architectures=["Qwen3XPressModel"], sample_from_anchor=False, **fields)
    return speculators(speculators_model_type="xpress", **fields)


def test_xpress_is_read_in_both_layouts_with_the_defaults_of_both():
    head = XPressHead(rank=256, inner_size=512, num_passes=6, top_k=512)
    assert read(xpress(zlab)).xpress == read(xpress(speculators)).xpress == head
    own = {"xpress_rank": 4, "xpress_mlp_hidden": 5, "xpress_num_passes": 6, "xpress_topc": 0}
    assert read(xpress(zlab, **own, xpress_block_size=10)).xpress == XPressHead(4, 5, 6, 0)
    assert read(xpress(zlab, dflash={"block_size": 7}, xpress_block_size=7)).block == 7
    own = {"xpress_rank": 4, "xpress_mlp_ratio": 3, "num_jacobi_passes": 2}
    assert read(xpress(speculators, **own)).xpress == XPressHead(4, 12, 2, 512)
    assert (read(xpress(zlab)).num_candidates, read(xpress(zlab, xpress_topc=7)).num_candidates) == (100, 7)
    assert read(xpress(speculators, draft_vocab_size=50)).num_candidates == 50
    both = read(xpress(speculators)), read(xpress(speculators, sample_from_anchor=True))
    assert [(one.block, one.num_columns) for one in both] == [(10, 10), (11, 10)]
    assert (both[0].kind, read(zlab()).xpress) == ("xpress", None)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("xpress_block_size", 16, "but block_size = 10"),
        ("xpress_topc", -1, "expected 0 or a positive number"),
        ("xpress_rank", 0, "expected a positive number"),
        ("xpress_num_passes", 0, "expected a positive number"),
        ("markov_rank", 8, "not implemented"),
        ("num_jacobi_passes", 2, "not implemented"),  # speculators' key
        ("xpress_mlp_ratio", 2, "not implemented"),
        ("selector_rank", 8, "not implemented"),
    ],
)
def test_what_an_xpress_drafter_must_not_say_is_refused_by_name(key, value, why):
    message = refusal(xpress(zlab, **{key: value}))
    assert f"{key} = {value!r}" in message
    assert why in message


@pytest.mark.parametrize(
    ("raw", "block", "from_anchor"),
    [
        (zlab(), 10, False),
        (zlab(dflash={"sample_from_anchor": False}), 10, False),
        (zlab(dflash={"sample_from_anchor": True}), 11, True),
        (zlab(dflash={"sample_from_anchor": True, "shift_label": True}), 11, True),
        (zlab(sample_from_anchor=True), 11, True),
        (deepspec(), 8, True),
        (deepspec(sample_from_anchor=False), 7, False),
        (specforge(), 11, True),
        (speculators(), 10, False),
        (speculators(sample_from_anchor=True), 11, True),
        (dspark_speculators(sample_from_anchor=True), 11, True),
        (dspark_speculators(sample_from_anchor=False), 10, False),
        (dspark_speculators(proposed=10), 11, True),
        (dspark_speculators(proposed=9), 10, False),  # as RedHat's for GLM-5.2
    ],
)
def test_a_block_has_a_draft_more_where_the_anchor_drafts(raw, block, from_anchor):
    config = read(raw)
    assert (config.block, config.drafts_from_anchor) == (block, from_anchor)
    assert config.num_columns == block - from_anchor
    assert draft_block(raw) == block


@pytest.mark.parametrize("proposed", [None, 5])
def test_speculators_dspark_must_say_whether_the_anchor_drafts(proposed):
    """Its trainer's default is yes, vLLM's is no."""
    assert "has no 'sample_from_anchor'" in refusal(dspark_speculators(proposed=proposed))


def test_one_column_is_a_block_where_the_anchor_drafts():
    assert read(deepspec(block_size=1)).block == 2
    assert "block_size" in refusal(deepspec(block_size=0))


def test_deepspec_keeps_at_the_top_what_others_keep_in_a_section():
    config = read(deepspec())
    assert (config.taps, config.mask_token_id, config.is_causal) == ((1, 3, 4), 99, (False, False))
    assert "has no 'mask_token_id'" in refusal(deepspec(mask_token_id=None))
    assert "reads target layers [-1, 2]" in refusal(deepspec(target_layer_ids=[-1, 2]))


def test_a_copy_of_the_targets_head_is_no_head_of_its_own():
    assert not read(deepspec()).has_own_head(is_stored=True)
    assert read(zlab()).has_own_head(is_stored=True)
    assert read(deepspec(draft_vocab_size=10)).has_own_head(is_stored=True)
    assert not read(zlab()).has_own_head(is_stored=False)


HEADS = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.mark.parametrize(
    ("raw", "rank"),
    [
        (zlab(), 0),
        (deepspec(), 0),
        (deepspec(**HEADS), 8),
        (deepspec(**HEADS | {"markov_head_type": None}), 8),
        (deepspec(enable_confidence_head=True, confidence_head_with_markov=False), 0),
        (specforge(dflash=HEADS), 8),
        (dspark_speculators(sample_from_anchor=True, **HEADS), 8),
        (dspark_speculators(sample_from_anchor=True, markov_rank=None), 256),
    ],
)
def test_the_rank_of_dsparks_head_is_read_where_each_layout_keeps_it(raw, rank):
    assert (read(raw).markov_rank, read(raw).kind) == (rank, "dspark" if rank else "dflash")


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (deepspec(**HEADS | {"markov_head_type": "gated"}), "markov_head_type = 'gated'"),
        (deepspec(**HEADS | {"markov_head_type": "rnn"}), "markov_head_type = 'rnn'"),
        (specforge(dflash=HEADS | {"markov_head_type": "rnn"}), "dflash_config.markov_head_type = 'rnn'"),
        (deepspec(**HEADS | {"markov_rank": -1}), "markov_rank = -1"),
        (deepspec(**HEADS | {"markov_rank": "8"}), "markov_rank = '8', expected int"),
        (zlab(sample_from_anchor=True, **HEADS), "markov_rank = 8"),
        (zlab(dflash=HEADS), "dflash_config.markov_rank = 8"),
        (speculators(**HEADS), "markov_rank = 8"),
    ],
)
def test_heads_that_cannot_be_are_named(raw, named):
    assert named in refusal(raw)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (zlab(dflash={"target_layer_ids": []}), "reads target layers []"),
        (zlab(dflash={"target_layer_ids": [-1, 2]}), "reads target layers [-1, 2]"),
        (zlab(dflash={"target_layer_ids": "1,2"}), "dflash_config.target_layer_ids = '1,2', expected a list"),
        (zlab(dflash={"target_layer_ids": [1.5]}), "dflash_config.target_layer_ids = 1.5, expected int"),
        (zlab(dflash={"mask_token_id": "99"}), "dflash_config.mask_token_id = '99', expected int"),
        (zlab(is_causal="no"), "is_causal = 'no', expected bool"),
        (speculators(transformer_layer_config=None), "'transformer_layer_config.num_hidden_layers'"),
        (speculators(transformer_layer_config=[1]), "transformer_layer_config = [1], expected an object"),
        (speculators(aux_hidden_state_layer_ids=None), "has no 'aux_hidden_state_layer_ids'"),
        (speculators(aux_hidden_state_layer_ids=[]), "has no 'aux_hidden_state_layer_ids'"),
        (speculators(aux_hidden_state_layer_ids=[0, 2]), "reads target layers [-1, 1]"),
    ],
)
def test_missing_and_wrong_values_are_named(raw, named):
    assert named in refusal(raw)


TARGET = read_model_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    },
    name="some/target",
)


@pytest.mark.parametrize(
    "raw", [speculators(), zlab(num_target_layers=None), zlab(dflash={"target_layer_ids": [0, 5]})]
)
def test_a_pair_that_fits_is_accepted(raw):
    check_pair(read(raw), TARGET, eos_ids=(98,))


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (zlab(hidden_size=64), "hidden size 64"),
        (zlab(target_hidden_size=48), "reads features of 48, but the target has 32"),
        (speculators(target_hidden_size=48), "reads features of 48"),
        (zlab(num_target_layers=36), "a target of 36 layers, but it has 6"),
        (zlab(dflash={"target_layer_ids": [1, 6]}), "reads layer 6, but the target has 6 layers"),
        (speculators(aux_hidden_state_layer_ids=[2, 7]), "reads layer 6, but the target has 6 layers"),
        (zlab(vocab_size=101), "vocabulary 101, but the target has 100"),
        (zlab(dflash={"mask_token_id": 100}), "token 100, outside 100 tokens"),
        (zlab(dflash={"mask_token_id": -1}), "token -1, outside 100 tokens"),
        (zlab(dflash={"mask_token_id": 98}), "token 98, which ends the target's text"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_both_names(raw, named):
    with pytest.raises(ModelError) as caught:
        check_pair(read(raw), TARGET, eos_ids=(7, 98))
    message = str(caught.value)
    assert "\n" not in message
    assert named in message
    assert f"draft '{NAME}'" in message
    assert "the pair does not match 'some/target'. See docs/models.md." in message
