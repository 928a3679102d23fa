"""config.json of a target: what is read, and how everything else is refused."""

import math
from dataclasses import replace

import pytest

from blockdraft.cache.spec import Paged, Windowed
from blockdraft.checkpoints.config_fields import Fields, rope_of
from blockdraft.errors import ModelError
from blockdraft.models.config import AttentionConfig, LayerConfig, MLPConfig, Rope
from tests.checkpoints.test_read_model_config import NAME, read, refusal

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SLIDING = ["sliding_attention"] * 3
PLAIN = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(theta=10000.0))
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def mixer(raw, /, **changes):
    """The attention of the first layer."""
    return read(raw, **changes).layers[0].mixer


def windows(config):
    return tuple(layer.mixer.window for layer in config.layers)


def test_a_plain_config_is_read_in_our_words():
    config = read(LLAMA)
    assert (config.name, config.family, config.num_layers) == (NAME, "llama", 3)
    assert (config.vocab_size, config.hidden_size) == (100, 32)
    assert (config.norm_eps, config.max_positions) == (1e-5, 512)
    assert config.layers == (LayerConfig(PLAIN, mlp=MLPConfig(64)),) * 3
    assert windows(config) == (None, None, None)
    assert not config.ties_embeddings
    assert not config.is_hybrid
    assert (config.embedding_scale, config.logit_softcap, config.left_out) == (1.0, None, ())
    assert config.layer_specs() == (Paged(num_kv_heads=2, head_dim=8),) * 3


def test_biases_are_read_where_a_family_has_them():
    config = read(LLAMA, attention_bias=True, mlp_bias=True)
    assert config.layers[0].mixer == replace(PLAIN, has_bias=True, has_out_bias=True)
    assert config.layers[0].mlp == MLPConfig(64, has_bias=True)
    assert mixer(QWEN2) == replace(PLAIN, has_bias=True)  # without a key, and none on the output
    qwen3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
    assert mixer(qwen3) == PLAIN
    assert mixer(qwen3, attention_bias=True) == replace(PLAIN, has_bias=True, has_out_bias=True)


def test_keys_that_are_null_count_as_absent():
    heads = mixer(LLAMA, num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None)
    assert (heads.num_kv_heads, heads.head_dim) == (4, 8)


def test_head_dim_need_not_be_the_hidden_size_over_the_heads():
    assert mixer(LLAMA, head_dim=64).head_dim == 64


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 500000.0},
        {"rope_theta": 500000},  # a whole number in JSON
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0},
    ],
)
def test_theta_is_found_in_both_layouts(rope):
    assert mixer(LLAMA, **rope).rope == Rope(theta=5e5)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_scaled_ropes_are_found_in_both_layouts(place):
    linear = {"type" if place == "rope_scaling" else "rope_type": "linear", "factor": 4}
    assert mixer(LLAMA, rope_theta=7.0, **{place: linear}).rope == Rope(theta=7.0, kind="linear", factor=4.0)
    assert mixer(LLAMA, rope_theta=7.0, **{place: LLAMA3}).rope == Rope(
        theta=7.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_yarn_is_found_in_both_layouts(place):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    expected = Rope(
        theta=7.0,
        kind="yarn",
        factor=4.0,
        original_max_positions=128,
        attention_scale=0.1 * math.log(4.0) + 1.0,
    )
    assert mixer(LLAMA, rope_theta=7.0, **{place: yarn}).rope == expected
    options = {"beta_fast": 16, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5}
    assert mixer(LLAMA, rope_theta=7.0, **{place: yarn | options}).rope == replace(
        expected, beta_fast=16.0, beta_slow=2.0, is_truncated=False, attention_scale=1.5
    )
    del yarn["original_max_position_embeddings"]  # the model's own then
    assert mixer(LLAMA, rope_theta=7.0, **{place: yarn}).rope == replace(expected, original_max_positions=512)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "axial", "YaRN"])
def test_other_ropes_are_refused_by_name(place, kind):
    message = refusal(LLAMA, **{place: {"rope_type": kind, "factor": 2.0}})
    assert f"{place}.rope_type = '{kind}', which is not implemented" in message


def test_two_ropes_that_differ_are_refused():
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    message = refusal(LLAMA, rope_parameters=parameters, rope_scaling=yarn)
    assert "'rope_parameters' and 'rope_scaling', and they differ" in message
    same = mixer(LLAMA, rope_parameters=parameters, rope_scaling=parameters)
    assert same.rope == Rope(theta=5e5)
    assert mixer(LLAMA, rope_parameters=parameters, rope_scaling={}).rope == Rope(theta=5e5)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_an_original_length_outside_the_rope_must_be_the_one_inside(kind):
    rope = LLAMA3 | {"rope_type": kind}
    message = refusal(LLAMA, rope_scaling=rope, original_max_position_embeddings=4096)
    assert "original_max_position_embeddings = 4096" in message
    same = mixer(LLAMA, rope_scaling=rope, original_max_position_embeddings=8192)
    assert same.rope.original_max_positions == 8192


@pytest.mark.parametrize("key", [key for key in LLAMA3 if key != "rope_type"])
def test_incomplete_ropes_are_refused_with_the_missing_key(key):
    rope = {k: v for k, v in LLAMA3.items() if k != key}
    assert f"has no 'rope_parameters.{key}'" in refusal(LLAMA, rope_parameters=rope)


def test_a_rope_per_layer_type_is_refused():
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert "'full_attention'" in refusal(QWEN2, rope_parameters=nested)


@pytest.mark.parametrize(
    "where", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_partial_rotation_is_refused_where_whole_heads_turn(where, family):
    raw = LLAMA | {"architectures": [f"{family}ForCausalLM"]}
    message = refusal(raw, **where)
    assert "partial_rotary_factor = 0.5" in message
    assert "which is not implemented" in message
    assert mixer(raw, partial_rotary_factor=1.0).rope == Rope(theta=10000.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 9}, (None,) * 3),  # Mistral's and Qwen's files have the key and do not use it
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, (None,) * 3),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, (9,) * 3),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, (None, None, 9)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, (None,) * 3),
        ({"use_sliding_window": True, "sliding_window": 9}, (None,) * 3),  # from layer 28 on by default
        (
            {
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 3}, (None,) * 3),
        ({"use_sliding_window": False, "sliding_window": 4, "layer_types": SLIDING}, (None,) * 3),
        ({"use_sliding_window": True, "sliding_window": 4, "layer_types": SLIDING}, (4,) * 3),
    ],
)
def test_windows_are_found_in_both_layouts(changes, expected):
    config = read(QWEN2, **changes)
    assert windows(config) == expected
    kinds = tuple(type(spec) for spec in config.layer_specs())
    assert kinds == tuple(Paged if window is None else Windowed for window in expected)


def test_unknown_layer_types_are_refused_by_name():
    kinds = ["full_attention", "linear_attention", "full_attention"]
    message = refusal(QWEN2, layer_types=kinds)
    assert "'linear_attention', which is not implemented" in message


def test_layer_types_of_another_depth_are_refused():
    assert "2 layer_types for 3 layers" in refusal(QWEN2, layer_types=["full_attention"] * 2)


@pytest.mark.parametrize("window", [None, 0, -1])
def test_sliding_layers_without_a_window_are_refused(window):
    kinds = ["sliding_attention"] * 3
    assert f"sliding_window = {window}" in refusal(QWEN2, layer_types=kinds, sliding_window=window)


@pytest.mark.parametrize(
    ("architectures", "named"),
    [
        (["GemmaForCausalLM"], "GemmaForCausalLM"),
        (["MixtralForCausalLM", "OlmoForCausalLM"], "MixtralForCausalLM, OlmoForCausalLM"),
        (["Qwen2MoeForCausalLM"], "Qwen2MoeForCausalLM"),
        (["llamaforcausallm"], "llamaforcausallm"),
        ([], "missing"),
        (None, "missing"),
    ],
)
def test_unknown_architectures_are_refused_by_name_with_those_that_work(architectures, named):
    known = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    message = rf"^'{NAME}': architecture .*{known}.* See docs/models\.md\.$"
    with pytest.raises(ModelError, match=message) as caught:
        read(LLAMA, architectures=architectures)
    assert named in str(caught.value)


@pytest.mark.parametrize("activation", ["silu", "swish", None])
def test_silu_goes_by_its_names(activation):
    assert read(LLAMA, hidden_act=activation).family == "llama"


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_keys_are_named(key):
    raw = {k: v for k, v in LLAMA.items() if k != key}
    assert f"has no '{key}'" in refusal(raw)


@pytest.mark.parametrize("key", [*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", ["32", 32.0, True, [32], {}])
def test_whole_numbers_of_another_type_are_refused(key, value):
    assert f"says {key} = {value!r}, expected int" in refusal(LLAMA, **{key: value})


@pytest.mark.parametrize("key", [*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_that_are_not_positive_are_refused(key, value):
    assert f"says {key} = {value}, expected a positive number" in refusal(LLAMA, **{key: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes', expected bool"),
        ({"attention_bias": 1}, "attention_bias = 1, expected bool"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5', expected float"),
        ({"rope_theta": True}, "rope_theta = True, expected float"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear', expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2', expected float"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM', expected a list"),
        ({"architectures": [3]}, "architectures = 3, expected str"),
        ({"layer_types": [1, 2, 3]}, "layer_types = 1, expected str"),
        (
            {"sliding_window": "9", "layer_types": ["sliding_attention"] * 3},
            "sliding_window = '9', expected int",
        ),
        ({"mlp_bias": "no"}, "mlp_bias = 'no', expected bool"),
    ],
)
def test_values_of_another_type_are_refused_with_the_value(changes, named):
    assert named in refusal(LLAMA, **changes)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_theta", "head_dim"]
)
@pytest.mark.parametrize("value", [10**400, 10**30, -(10**30), float("inf"), float("nan")])
def test_numbers_that_no_model_has_are_refused(key, value):
    assert f"{key} = " in refusal(LLAMA, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 0.0), ("rms_norm_eps", -1.0), ("rope_theta", -1.0)]
)
def test_numbers_that_must_be_positive_are_refused_with_the_value(key, value):
    assert f"{key} = {value}, expected a positive number" in refusal(LLAMA, **{key: value})


@pytest.mark.parametrize(
    "wrong", [{"beta_fast": -1.0}, {"beta_slow": -0.5}, {"attention_factor": 0.0}, {"rope_theta": 1.0}]
)
def test_yarn_that_cannot_be_computed_is_refused(wrong):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **wrong}
    refusal(LLAMA, rope_parameters=yarn)


def test_heads_that_cannot_share_are_refused():
    assert "4 query heads for 3 key/value heads" in refusal(LLAMA, num_key_value_heads=3)


def test_an_odd_head_cannot_be_rotated():
    assert "head_dim = 7" in refusal(LLAMA, head_dim=7)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "proportional"])
def test_a_rope_factor_of_zero_is_refused(kind):
    scaling = {
        "rope_type": kind,
        "factor": 0.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(ModelError, match=r"factor = 0\.0"):
        read(LLAMA, rope_scaling=scaling)


@pytest.mark.parametrize("part", [0.0, -0.5, 1.5, 0.3, 0.01])
def test_a_share_of_a_head_that_cannot_be_rotated_is_refused(part):
    section = Fields({}, owner=NAME)
    with pytest.raises(ModelError, match=f"share of {part} of heads of 10"):
        rope_of(section, section, head_dim=10, theta=1e4, part=part)
    assert rope_of(section, section, head_dim=10, theta=1e4, part=0.4) == Rope(theta=1e4, part=0.4)


def test_rope_factors_must_be_one_per_pair():
    with pytest.raises(ModelError, match="3 rope factors"):
        read(LLAMA, rope_scaling={"rope_type": "factors", "factors": [1.0] * 3})
