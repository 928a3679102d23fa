"""One reader per family: what published files mean, and that nothing a file could ask for is passed over."""

import dataclasses
import functools
import json

import pytest
from transformers import Gemma4Config, Qwen3_5Config, Qwen3_5MoeConfig

from blockdraft.cache.spec import Paged, Recurrent, SharedWith, Windowed
from blockdraft.checkpoints.read_model_config import FAMILIES, read_model_config
from blockdraft.errors import ModelError
from blockdraft.models.config import (
    AttentionConfig,
    DeltaConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    Rope,
)
from tests.checkpoints.published import published_config
from tests.models.families import BASE, CASES, CONFIGS, DELTA, FULL, HYBRIDS, SLIDING

NAME = "some/model"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
SPARSE = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "gemma4", "gpt_oss")
# Configurations that use as many keys as one file can.
BROAD = {
    "llama": "llama-biases",
    "qwen2": "qwen2-layer-types",
    "qwen3": "qwen3-slides",
    "qwen3_moe": "qwen3_moe-some-dense",
    "qwen3_next": "qwen3_next-unnormalised",
    "qwen3_5": "qwen3_5-whole",
    "qwen3_5_moe": "qwen3_5_moe-whole",
    "gemma4": "gemma4-mixture",
    "gpt_oss": "gpt_oss-whole",
}


@functools.cache
def saved(family):
    return json.dumps(CONFIGS[family](**{**BASE, **CASES[BROAD[family]][1]}).to_dict())


def tiny(family, /, **changes):
    """config.json of a small model, as transformers writes it; None removes a key."""
    raw = json.loads(saved(family)) | {"architectures": [ARCHITECTURES[family]], **changes}
    return {key: value for key, value in raw.items() if value is not None}


def read(raw, /, **changes):
    return read_model_config({**raw, **changes}, name=NAME)


def refusal(raw, /, **changes):
    with pytest.raises(ModelError) as caught:
        read(raw, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"'{NAME}': config.json ")
    assert message.endswith("See docs/models.md.")
    return message


def published(name, **changes):
    """A published file, with changes of its text part."""
    raw = published_config(name)
    raw.get("text_config", raw).update(changes)
    return raw


def windows(config):
    return [layer.mixer.window for layer in config.layers]


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


# ---- published files


def test_every_architecture_has_a_family_and_every_family_an_architecture():
    assert set(FAMILIES.values()) == set(CONFIGS)
    for family, architecture in ARCHITECTURES.items():
        assert FAMILIES[architecture] == family
        assert read(tiny(family)).family == family


def test_llama_3_1():
    config = read(published("meta-llama/Llama-3.1-8B-Instruct"))
    rope = Rope(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192)
    assert config.layers == (LayerConfig(AttentionConfig(32, 8, 128, rope), mlp=MLPConfig(14336)),) * 32
    assert (config.vocab_size, config.hidden_size, config.norm_eps) == (128256, 4096, 1e-5)
    assert (config.max_positions, config.ties_embeddings) == (131072, False)


def test_qwen2_5_and_qwen3():
    config = read(published("Qwen/Qwen2.5-7B-Instruct"))
    attention = AttentionConfig(28, 4, 128, Rope(theta=1e6), has_bias=True)
    assert config.layers == (LayerConfig(attention, mlp=MLPConfig(18944)),) * 28
    config = read(published("Qwen/Qwen3-8B"))
    attention = AttentionConfig(32, 8, 128, Rope(theta=1e6))
    assert config.layers == (LayerConfig(attention, mlp=MLPConfig(12288)),) * 36
    assert (config.norm_eps, config.max_positions, config.ties_embeddings) == (1e-6, 40960, False)


def test_qwen3_with_the_rope_that_its_card_recommends_for_long_texts():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read(published("Qwen/Qwen3-8B", rope_scaling=yarn)).layers[0].mixer.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_positions) == ("yarn", 1e6, 4.0, 32768)
    assert rope.is_truncated
    assert rope.attention_scale == pytest.approx(1.1386294)


def test_qwen3_moe():
    config = read(published("Qwen/Qwen3-30B-A3B"))
    moe = MoEConfig(num_experts=128, num_chosen=8, inner_size=768, is_normalised=True)
    attention = AttentionConfig(32, 4, 128, Rope(theta=1e6))
    assert config.layers == (LayerConfig(attention, moe=moe),) * 48
    assert not config.is_hybrid


def test_qwen3_next():
    config = read(published("Qwen/Qwen3-Next-80B-A3B-Instruct"))
    moe = MoEConfig(num_experts=512, num_chosen=10, inner_size=512, shared_size=512)
    delta = DeltaConfig(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4)
    attention = AttentionConfig(16, 2, 256, Rope(theta=1e7, part=0.25))
    assert config.layers == ((LayerConfig(delta, moe=moe),) * 3 + (LayerConfig(attention, moe=moe),)) * 12
    assert config.is_hybrid
    kinds = [type(spec) for spec in config.layer_specs()]
    assert kinds == ([Recurrent] * 3 + [Paged]) * 12


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B"])
def test_qwen3_5(name):
    config = read(published(name))
    delta = DeltaConfig(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, conv_width=4)
    attention = AttentionConfig(24, 4, 256, Rope(theta=1e7, part=0.25))
    mlp = MLPConfig(17408)
    assert config.layers == ((LayerConfig(delta, mlp=mlp),) * 3 + (LayerConfig(attention, mlp=mlp),)) * 16
    assert (config.vocab_size, config.max_positions) == (248320, 262144)
    assert config.left_out == ("vision",)
    assert not config.ties_embeddings


def test_qwen3_5_moe():
    config = read(published("Qwen/Qwen3.5-35B-A3B"))
    moe = MoEConfig(num_experts=256, num_chosen=8, inner_size=512, shared_size=512)
    assert {layer.moe for layer in config.layers} == {moe}
    assert {layer.mlp for layer in config.layers} == {None}
    assert (config.family, config.num_layers, config.left_out) == ("qwen3_5_moe", 40, ("vision",))


def test_gemma_4_dense():
    config = read(published("google/gemma-4-31B-it"))
    near = AttentionConfig(32, 16, 256, Rope(theta=1e4), window=1024)
    far_rope = Rope(theta=1e6, kind="proportional", part=0.25)
    far = AttentionConfig(32, 4, 512, far_rope, has_values=False)
    mlp = MLPConfig(21504)
    assert config.layers == ((LayerConfig(near, mlp=mlp),) * 5 + (LayerConfig(far, mlp=mlp),)) * 10
    assert (config.embedding_scale, config.logit_softcap) == (5376**0.5, 30.0)
    assert (config.ties_embeddings, config.left_out) == (True, ("vision",))
    specs = config.layer_specs()
    assert specs[0] == Windowed(num_kv_heads=16, head_dim=256, window=1024)
    assert specs[5] == Paged(num_kv_heads=4, head_dim=512)


def test_gemma_4_mixture():
    config = read(published("google/gemma-4-26B-A4B-it"))
    assert {layer.moe for layer in config.layers} == {MoEConfig(128, 8, 704)}
    assert {layer.mlp for layer in config.layers} == {MLPConfig(2112)}
    assert config.num_layers == 30


def test_gemma_4_with_per_layer_embeddings_is_refused_by_name():
    message = refusal(published("google/gemma-4-E2B-it"))
    assert "hidden_size_per_layer_input = 256" in message
    assert "Gemma 4 E2B and E4B" in message
    assert "not implemented" in message
    raw = published("google/gemma-4-31B-it")
    del raw["text_config"]["hidden_size_per_layer_input"]
    assert "hidden_size_per_layer_input = 256" in refusal(raw)


def test_gemma_4_layers_that_share_keys_read_the_last_of_their_kind():
    """As the small model would be read, were it not for its per-layer embeddings."""
    config = read(published("google/gemma-4-E2B-it", hidden_size_per_layer_input=0))
    assert config.left_out == ("vision", "audio")
    shared = [layer.mixer.shared_with for layer in config.layers]
    expected = [14 if window is None else 13 for window in windows(config)[15:]]
    assert shared == [None] * 15 + expected
    assert config.layer_specs()[-1] == SharedWith(14)
    assert [layer.mlp.inner_size for layer in config.layers] == [6144] * 15 + [2 * 6144] * 20


@pytest.mark.parametrize(("name", "num_layers", "num_experts"), [("20b", 24, 32), ("120b", 36, 128)])
def test_gpt_oss(name, num_layers, num_experts):
    config = read(published(f"openai/gpt-oss-{name}"))
    assert windows(config) == [128, None] * (num_layers // 2)
    assert {layer.moe for layer in config.layers} == {MoEConfig(num_experts, 4, 2880)}
    attention = config.layers[1].mixer
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (64, 8, 64)
    assert (attention.has_bias, attention.has_out_bias) == (True, True)
    assert attention.rope == Rope(
        theta=150000.0,
        kind="yarn",
        factor=32.0,
        original_max_positions=4096,
        is_truncated=False,
        attention_scale=pytest.approx(1.3465736),
    )
    assert (config.swiglu_limit, config.norm_eps, config.ties_embeddings) == (7.0, 1e-5, False)


# ---- spellings


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-27B", "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"])
def test_a_text_part_on_its_own_is_read_alike(name):
    raw = published(name)
    (architecture,) = raw["architectures"]
    alone = raw["text_config"] | {
        "architectures": [architecture.replace("ConditionalGeneration", "CausalLM")]
    }
    assert dataclasses.replace(read(raw), left_out=()) == read(alone)


def test_what_is_left_out_is_what_the_file_has():
    raw = published("google/gemma-4-31B-it")
    assert read(raw, vision_config=None).left_out == ()
    assert read(raw, audio_config={"hidden_size": 8}).left_out == ("vision", "audio")
    assert read(without(raw, "vision_config", "audio_config")).left_out == ()


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-27B", "google/gemma-4-31B-it"])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False, None])
def test_whether_the_head_is_tied_is_said_by_the_outer_config(name, outer, inner):
    raw = published(name, tie_word_embeddings=inner) | {"tie_word_embeddings": outer}
    assert read(raw).ties_embeddings is outer
    if inner is not None:
        assert read(without(raw, "tie_word_embeddings")).ties_embeddings is inner


def test_without_a_word_only_gemma_ties_its_head():
    for family in CONFIGS:
        assert read(tiny(family, tie_word_embeddings=None)).ties_embeddings is (family == "gemma4")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", *HYBRIDS, "gpt_oss"])
def test_ropes_are_read_from_older_files_too(family):
    rope = {"rope_type": "linear", "factor": 2.0}
    newer = tiny(family, rope_parameters={**rope, "rope_theta": 777.0})
    older = tiny(family, rope_parameters=None, rope_scaling=rope, rope_theta=777.0)
    oldest = tiny(family, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2}, rope_theta=777)
    expected = Rope(theta=777.0, kind="linear", factor=2.0, part=0.25 if family in HYBRIDS else 1.0)
    for raw in (newer, older, oldest):
        mixers = [layer.mixer for layer in read(raw).layers]
        assert {m.rope for m in mixers if isinstance(m, AttentionConfig)} == {expected}


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_rotated_share_of_hybrids_is_read_from_either_place(family):
    def part(**changes):
        config = read(tiny(family, rope_parameters=None, **changes))
        return {
            m.rope.part for m in (layer.mixer for layer in config.layers) if isinstance(m, AttentionConfig)
        }

    assert part() == {0.25}
    assert part(partial_rotary_factor=0.5) == {0.5}
    assert part(partial_rotary_factor=1.0) == {1.0}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    assert part(rope_scaling=rope) == {0.75}
    assert part(rope_scaling=rope, partial_rotary_factor=0.5) == {0.75}
    assert "share of 0.2" in refusal(tiny(family, rope_parameters={**rope, "partial_rotary_factor": 0.2}))


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_rope_for_pictures_is_the_ordinary_one_for_text(family):
    rope = {"rope_theta": 1e4, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    for kind in ("default", "mrope"):
        config = read(tiny(family, rope_parameters={**rope, "rope_type": kind}))
        ropes = {layer.mixer.rope for layer in config.layers if isinstance(layer.mixer, AttentionConfig)}
        assert ropes == {Rope(theta=1e4, part=0.25)}


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(("interval", "kinds"), [(None, "dddf"), (2, "dfdf"), (3, "ddfd"), (1, "ffff")])
def test_hybrids_without_layer_types_attend_at_intervals(family, interval, kinds):
    config = read(tiny(family, layer_types=None, full_attention_interval=interval))
    assert "".join("d" if isinstance(layer.mixer, DeltaConfig) else "f" for layer in config.layers) == kinds
    listed = [DELTA if kind == "d" else FULL for kind in kinds]
    assert read(tiny(family, layer_types=listed, full_attention_interval=4)) == config


@pytest.mark.parametrize(("num_layers", "num_full"), [(6, 1), (7, 2), (12, 2)])
def test_gemma_without_layer_types_attends_globally_every_sixth_layer_and_in_the_last(num_layers, num_full):
    raw = tiny("gemma4", layer_types=None, per_layer_config=None, num_hidden_layers=num_layers)
    config = read(raw)
    assert [window is None for window in windows(config)].count(True) == num_full
    assert windows(config)[-1] is None
    assert windows(config)[5] is None


def test_gemmas_last_layer_attends_globally_whatever_the_file_says():
    raw = tiny("gemma4", layer_types=[SLIDING] * 4, per_layer_config=None)
    assert windows(read(raw)) == [6, 6, 6, None]


def test_gemmas_global_heads_are_read_in_both_spellings():
    older = without(tiny("gemma4", attention_k_eq_v=True), "per_layer_config", "global_head_dim")
    older |= {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1}
    own = {"head_dim": 16, "num_key_value_heads": 1}
    newer = without(older, "global_head_dim", "num_global_key_value_heads")
    config = read(older)
    assert [(m.head_dim, m.num_kv_heads) for m in (layer.mixer for layer in config.layers)] == [
        (8, 2),
        (8, 2),
        (16, 1),
        (16, 1),
    ]
    assert read(newer | {"per_layer_config": {"2": own, "3": own}}) == config
    # transformers pads the indices so that they sort.
    assert read(newer | {"per_layer_config": {"02": own, "03": own}}) == config
    assert read(newer | {"per_layer_config": {}}).layers[3].mixer.head_dim == 8
    assert read(newer).layers[3].mixer.head_dim == 512


def test_gemmas_global_layers_have_fewer_key_heads_only_where_keys_are_values():
    older = without(tiny("gemma4"), "per_layer_config") | {"num_global_key_value_heads": 1}
    assert read(older).layers[3].mixer.num_kv_heads == 2
    assert read(older, attention_k_eq_v=True).layers[3].mixer.num_kv_heads == 1
    assert read(older, attention_k_eq_v=True).layers[0].mixer.has_values
    assert not read(older, attention_k_eq_v=True).layers[3].mixer.has_values


def test_gemmas_ropes_without_a_word():
    config = read(tiny("gemma4", rope_parameters=None))
    assert config.layers[0].mixer.rope == Rope(theta=1e4)
    assert config.layers[3].mixer.rope == Rope(theta=1e6, kind="proportional", part=0.25)


def test_a_large_model_saved_by_transformers_is_read_as_published():
    raw = published("google/gemma-4-31B-it")
    saved = json.loads(json.dumps(Gemma4Config(**raw).to_dict()))
    assert any(key.startswith("0") for key in saved["text_config"]["per_layer_config"])  # "05", … "59"
    assert read(saved, architectures=raw["architectures"]) == read(raw)


def test_gpt_oss_in_older_spellings():
    raw = tiny("gpt_oss")
    assert windows(read(raw, layer_types=None)) == [6, None, 6, None]
    assert read(without(raw, "num_experts_per_tok") | {"experts_per_token": 2}) == read(raw)
    assert read(without(raw, "rms_norm_eps")).norm_eps == 1e-5
    assert "rope_scaling" in refusal(without(raw, "rope_parameters"))


def test_a_window_in_qwen3_moe_is_for_all_layers():
    raw = tiny("qwen3_moe", sliding_window=7, max_window_layers=2)
    assert windows(read(raw)) == [None] * 5
    assert windows(read(raw, use_sliding_window=True)) == [7] * 5
    kinds = [SLIDING, FULL] * 2 + [SLIDING]
    for switch in (True, False):
        assert f"layer_types = {kinds!r}" in refusal(raw, layer_types=kinds, use_sliding_window=switch)
    assert windows(read(raw, layer_types=[FULL] * 5)) == [None] * 5


def test_dense_layers_among_sparse_ones():
    moe, mlp = MoEConfig(6, 2, 20, is_normalised=False), MLPConfig(48)

    def layers(**changes):
        return [layer.moe or layer.mlp for layer in read(tiny("qwen3_moe"), **changes).layers]

    assert layers(mlp_only_layers=[1], decoder_sparse_step=2) == [mlp, mlp, mlp, moe, mlp]
    assert layers(mlp_only_layers=[1], decoder_sparse_step=1) == [moe, mlp, moe, moe, moe]
    assert layers(mlp_only_layers=[], decoder_sparse_step=1) == [moe] * 5
    assert layers(mlp_only_layers=None, decoder_sparse_step=None) == [moe] * 5


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_the_number_of_experts_goes_by_two_names(family):
    raw = without(tiny(family), "num_local_experts", "num_experts")
    assert read(raw, num_experts=6) == read(raw, num_local_experts=6) == read(tiny(family))
    assert "has no 'num_local_experts'" in refusal(raw)


# ---- numbers that cannot be


@pytest.mark.parametrize("family", SPARSE)
def test_more_experts_chosen_than_there_are_is_refused(family):
    key = "top_k_experts" if family == "gemma4" else "num_experts_per_tok"
    count = "num_local_experts" if family == "gpt_oss" else "num_experts"
    raw = without(tiny(family), "num_local_experts", "num_experts") | {count: 3}
    assert read(raw, **{key: 3}).layers[-1].moe is not None or family in ("qwen3_moe", "qwen3_next")
    assert f"{key} = 4, but {count} = 3" in refusal(raw, **{key: 4})


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"linear_num_key_heads": 3}, "4 linear value heads for 3 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim = 0, expected a positive number"),
        ({"linear_value_head_dim": None}, "has no 'linear_value_head_dim'"),
        ({"layer_types": [DELTA] * 3}, "3 layer_types for 4 layers"),
        ({"layer_types": [SLIDING] * 4}, "layer type 'sliding_attention'"),
        ({"layer_types": ["mamba"] * 4}, "layer type 'mamba'"),
        ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval = 0"),
        ({"num_key_value_heads": 3}, "4 query heads for 3 key/value heads"),
    ],
)
def test_hybrids_that_cannot_be_are_refused(family, changes, named):
    raw = tiny(family, linear_num_key_heads=2, linear_num_value_heads=4)
    message = refusal(raw, **changes)
    assert named in message
    if "layer type '" in named:
        assert "not implemented" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4, but has 4 layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1, but has 4 layers"),
        (
            {"num_kv_shared_layers": 3},
            "full_attention layers that share keys and values, but none that stores",
        ),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"layer_types": [DELTA] * 4}, "'linear_attention', which is not implemented"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e6}}}, "has no 'rope_parameters.sliding_attention'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "has no 'rope_parameters."),
        ({"per_layer_config": {"4": {"head_dim": 8}}}, "'per_layer_config.4'"),
        ({"per_layer_config": {"full_attention": {"head_dim": 8}}}, "'per_layer_config.full_attention'"),
        ({"per_layer_config": {"3": {"sliding_window": 8}}}, "per_layer_config.3.sliding_window = 8"),
        ({"per_layer_config": {"3": {"head_dim": 7}}}, "heads of 7 in layer 3"),
        ({"per_layer_config": {"3": {"num_key_value_heads": 3}}}, "4 query and 3 key heads"),
        ({"top_k_experts": None}, "has no 'top_k_experts'"),
    ],
)
def test_gemmas_that_cannot_be_are_refused(changes, named):
    assert named in refusal(tiny("gemma4"), **changes)


@pytest.mark.parametrize(
    ("kind", "section", "named"),
    [
        (SLIDING, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (FULL, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (FULL, {"rope_type": "longrope"}, "rope_parameters.full_attention.rope_type = 'longrope'"),
        (FULL, {"rope_type": "dynamic"}, "rope_parameters.full_attention.rope_type = 'dynamic'"),
        (SLIDING, {"rope_theta": None}, "has no 'rope_parameters.sliding_attention.rope_theta'"),
    ],
)
def test_gemmas_other_ropes_are_refused(kind, section, named):
    ropes = tiny("gemma4")["rope_parameters"]
    base = {"rope_type": "default", "rope_theta": 1e4}
    assert named in refusal(tiny("gemma4"), rope_parameters={**ropes, kind: {**base, **section}})


def test_gemmas_stretched_ropes_are_read():
    ropes = tiny("gemma4")["rope_parameters"]
    stretched = {**ropes[FULL], "factor": 8.0}
    config = read(tiny("gemma4"), rope_parameters={**ropes, FULL: stretched})
    assert config.layers[3].mixer.rope.factor == 8.0
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
    config = read(tiny("gemma4"), rope_parameters={**ropes, SLIDING: linear})
    assert config.layers[0].mixer.rope == Rope(theta=1e4, kind="linear", factor=8.0)


# ---- every key of transformers' classes is read, harmless or refused

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 99,
    "rms_norm_eps": 0.5,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0},
}
_WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": 3,
    "max_window_layers": 0,
    "layer_types": [FULL] * 3,
}
_DELTAS = {
    "linear_conv_kernel_dim": 7,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 8,
}
_EXPERTS = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 4}
_SPARSE_STEPS = {"norm_topk_prob": None, "decoder_sparse_step": 3, "mlp_only_layers": [0]}

# family -> key -> a value other than the one in BROAD
READ = {
    "llama": {"intermediate_size": 7, "head_dim": 4, "tie_word_embeddings": True}
    | {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"intermediate_size": 7, "tie_word_embeddings": False, **_WINDOWS},
    "qwen3": {"intermediate_size": 7, "head_dim": 4, "tie_word_embeddings": True, "attention_bias": True}
    | _WINDOWS,
    "qwen3_moe": {"intermediate_size": 7, "tie_word_embeddings": True, "attention_bias": True}
    | {"use_sliding_window": True, "sliding_window": 3}
    | {**_EXPERTS, **_SPARSE_STEPS, "norm_topk_prob": True},
    "qwen3_next": {"intermediate_size": 7, "head_dim": 8, "tie_word_embeddings": True}
    | {"attention_bias": False, "shared_expert_intermediate_size": 3, "layer_types": [FULL] * 4}
    | {**_DELTAS, **_EXPERTS, **_SPARSE_STEPS, "norm_topk_prob": True},
    "qwen3_5": {"intermediate_size": 7, "head_dim": 8, "tie_word_embeddings": False, "attention_bias": True}
    | {**_DELTAS, "layer_types": [FULL] * 4},
    "qwen3_5_moe": {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}
    | {"shared_expert_intermediate_size": 3, "layer_types": [FULL] * 4, **_DELTAS, **_EXPERTS},
    "gemma4": {"intermediate_size": 7, "head_dim": 4, "tie_word_embeddings": False, "sliding_window": 3}
    | {"layer_types": [FULL] * 4, "final_logit_softcapping": 5.0, "attention_k_eq_v": True}
    | {"num_kv_shared_layers": 1, "enable_moe_block": False, "use_double_wide_mlp": True}
    | {"num_experts": 9, "top_k_experts": 1, "moe_intermediate_size": 4}
    | {"rope_parameters": {SLIDING: {"rope_theta": 9.0}, FULL: {"rope_theta": 9.0}}},
    "gpt_oss": {"intermediate_size": 7, "head_dim": 4, "tie_word_embeddings": True, "sliding_window": 3}
    | {"layer_types": [FULL] * 4, "num_local_experts": 9, "num_experts_per_tok": 3}
    | {"attention_bias": False, "swiglu_limit": 1.0},
}
# What the change of a key needs around it to be seen.
CONTEXT = {
    ("*", "num_hidden_layers"): {"layer_types": None, "per_layer_config": None, "mlp_only_layers": []},
    ("qwen2", "max_window_layers"): {"layer_types": None},
    ("qwen3", "max_window_layers"): {"layer_types": None},
    ("qwen3_moe", "sliding_window"): {"use_sliding_window": True, "sliding_window": 8},
    ("qwen3_moe", "use_sliding_window"): {"sliding_window": 8},
    ("gemma4", "use_double_wide_mlp"): {"num_kv_shared_layers": 1},
    ("gpt_oss", "num_hidden_layers"): {"layer_types": None},
}
_ALWAYS_HARMLESS = {
    "attention_dropout": 0.5,  # in training only, as the next
    "initializer_range": 0.5,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "use_cache": False,
    "pad_token_id": 5,  # the tokenizer's files say which tokens end a text
    "bos_token_id": 6,
    "eos_token_id": 7,
    "dtype": "float16",
    "chunk_size_feed_forward": 4,
    "id2label": {"0": "x"},
    "label2id": {"x": 0},
    "is_encoder_decoder": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
    "transformers_version": "9.9.9",
}
HARMLESS = {
    "gemma4": {"vocab_size_per_layer_input": 5},  # rows of a table that a width of 0 leaves away
}
REFUSED = {
    "llama": {"hidden_act": "gelu", "pretraining_tp": 2},
    "qwen2": {"hidden_act": "gelu"},
    "qwen3": {"hidden_act": "relu2"},
    "qwen3_moe": {"hidden_act": "gelu"},
    "qwen3_next": {"hidden_act": "gelu"},
    "qwen3_5": {"hidden_act": "gelu"},
    "qwen3_5_moe": {"hidden_act": "gelu"},
    "gemma4": {"hidden_activation": "silu", "attention_bias": True, "use_bidirectional_attention": "all"}
    | {"hidden_size_per_layer_input": 32},
    "gpt_oss": {"hidden_act": "gelu", "swiglu_alpha": 1.0},
}
ALL_READ = {family: {**_SIZES, **keys} for family, keys in READ.items()}
ALL_HARMLESS = {family: {**_ALWAYS_HARMLESS, **HARMLESS.get(family, {})} for family in CONFIGS}


def entries(table):
    return [(family, key, value) for family, keys in table.items() for key, value in keys.items()]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_key_of_transformers_is_sorted(family):
    sets = [set(table[family]) for table in (ALL_READ, ALL_HARMLESS, REFUSED)]
    known = {field.name for field in dataclasses.fields(CONFIGS[family])} - {"architectures"}
    assert known - set.union(*sets) == set(), "new keys: read or refuse them"
    assert sum(map(len, sets)) == len(set.union(*sets))


@pytest.mark.parametrize(("family", "key", "value"), entries(ALL_READ))
def test_keys_that_are_read_change_what_is_read(family, key, value):
    context = CONTEXT.get((family, key), CONTEXT.get(("*", key), {}))
    raw = {key: value for key, value in {**tiny(family), **context}.items() if value is not None}
    assert read(raw, **{key: value}) != read(raw)


@pytest.mark.parametrize("family", CONFIGS)
def test_harmless_keys_change_nothing(family):
    for key, value in ALL_HARMLESS[family].items():
        assert read(tiny(family), **{key: value}) == read(tiny(family)), key


@pytest.mark.parametrize(("family", "key", "value"), entries(REFUSED))
def test_keys_that_are_not_implemented_are_refused_with_key_value_and_file(family, key, value):
    message = refusal(tiny(family), **{key: value})
    assert f"{key} = {value if isinstance(value, int) else repr(value)}" in message
    assert "not implemented" in message


@pytest.mark.parametrize("outer", [Qwen3_5Config, Qwen3_5MoeConfig, Gemma4Config])
def test_every_key_around_a_text_part_is_sorted(outer):
    read_keys = {"architectures", "text_config", "vision_config", "audio_config", "tie_word_embeddings"}
    tokens = {"image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id"}
    tokens |= {"vision_end_token_id", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_index"}
    known = {field.name for field in dataclasses.fields(outer)}
    assert known - read_keys - tokens - _ALWAYS_HARMLESS.keys() == set()


# ---- what relatives and forks ask for

# key -> a value to refuse, and one that changes nothing (None: there is none)
VARIANTS = {
    "is_causal": (False, True),
    "attn_logit_softcapping": (50.0, None),
    "attention_multiplier": (0.0156, None),
    "attention_chunk_size": (8192, None),
    "query_pre_attn_scalar": (256, None),
    "clip_qkv": (8.0, None),
    "attn_temperature_tuning": (True, False),
    "dual_chunk_attention_config": ({"chunk_size": 262144}, None),
    "no_rope_layers": ([1, 0], None),
    "no_rope_layer_interval": (4, None),
    "rope_is_neox_style": (False, True),
    "rope_interleave": (True, False),
    "alibi": (True, False),
    "embedding_multiplier": (12.0, 1.0),
    "residual_multiplier": (0.22, 1),
    "logits_scaling": (8.0, 1.0),
    "logit_scale": (0.0625, 1.0),
    "scale_emb": (12, 1),
    "scale_depth": (1.4, None),
    "dim_model_base": (256, None),
    "use_gemma_norm": (True, False),
    "use_parallel_residual": (True, False),
    "routed_scaling_factor": (2.5, 1.0),
    "scoring_func": ("sigmoid", "softmax"),
    "topk_method": ("noaux_tc", "greedy"),
    "n_group": (8, 1),
    "topk_group": (4, 1),
    "linear_attn_config": ({"kda_layers": [1]}, None),
    "allow_neg_eigval": (True, False),
    "mamba_d_state": (128, None),
    "mamba_expand": (2, None),
    "mup_width_multiplier": (8.0, None),
}


@pytest.mark.parametrize("family", ["llama", "gemma4"])
@pytest.mark.parametrize("key", VARIANTS)
def test_variants_are_refused_with_key_value_and_file(family, key):
    value, neutral = VARIANTS[key]
    message = refusal(tiny(family), **{key: value})
    assert f"{key} = {value!r}, which is not implemented" in message
    assert read(tiny(family), **{key: neutral}) == read(tiny(family))


@pytest.mark.parametrize(
    ("families", "key", "value", "neutral"),
    [
        ([f for f in CONFIGS if f != "gemma4"], "final_logit_softcapping", 30.0, None),
        ([f for f in CONFIGS if f != "gemma4"], "hidden_activation", "gelu_pytorch_tanh", "silu"),
        ([f for f in CONFIGS if f != "gemma4"], "per_layer_config", {"0": {"head_dim": 4}}, None),
        ([f for f in CONFIGS if f not in HYBRIDS], "partial_rotary_factor", 0.5, None),
        (["qwen2"], "attention_bias", False, True),
        (["gemma4"], "hidden_act", "silu", "gelu_pytorch_tanh"),
        (["gemma4"], "use_bidirectional_attention", True, "vision"),
        (["gemma4"], "rope_scaling", {"rope_type": "linear", "factor": 8.0}, None),
        (["gemma4"], "sliding_window_pattern", 4, 6),
        (["gemma4", "gpt_oss", "qwen3_5_moe"], "norm_topk_prob", False, True),
        (["qwen3_5_moe"], "decoder_sparse_step", 2, 1),
        (["qwen3_5_moe"], "mlp_only_layers", [1], []),
        (HYBRIDS, "output_gate_type", "sigmoid", "swish"),
        (HYBRIDS, "output_gate_type", "sigmoid", "silu"),
        (HYBRIDS, "attn_output_gate", False, True),
        (HYBRIDS, "use_sliding_window", True, False),
        (HYBRIDS, "hidden_act", "gelu", "swish"),
    ],
)
def test_variants_of_one_family_are_refused(families, key, value, neutral):
    for family in families:
        message = refusal(tiny(family), **{key: value})
        assert f"{key} = {value!r}, which is not implemented" in message
        assert read(tiny(family), **{key: neutral}) == read(without(tiny(family), key))


def test_in_a_text_part_the_whole_path_of_the_key_is_named():
    message = refusal(published("Qwen/Qwen3.5-27B", attn_logit_softcapping=50.0))
    assert "text_config.attn_logit_softcapping = 50.0" in message
    message = refusal(published("google/gemma-4-31B-it", use_bidirectional_attention="all"))
    assert "text_config.use_bidirectional_attention = 'all'" in message
    assert "has no 'text_config.vocab_size'" in refusal(without_text("Qwen/Qwen3.5-27B", "vocab_size"))


def without_text(name, key):
    raw = published(name)
    del raw["text_config"][key]
    return raw
