"""config.json of a target: what is read, and how everything else is refused."""

import pytest

from blockdraft.cache.spec import Paged, Windowed
from blockdraft.errors import ModelError
from blockdraft.models.config import Rope, read_model_config

NAME = "some/model"
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
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(raw, /, **changes):
    return read_model_config({**raw, **changes}, name=NAME)


def refusal(raw, /, **changes):
    """The message: one line that names the model and says where to look."""
    with pytest.raises(ModelError) as caught:
        read(raw, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"'{NAME}': ")
    assert message.endswith("See docs/models.md.")
    return message


def test_a_plain_config_is_read_in_our_words():
    config = read(LLAMA)
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 3, 4, 2)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (100, 32, 64)
    assert (config.head_dim, config.norm_eps, config.max_positions) == (8, 1e-5, 512)
    assert config.rope == Rope(theta=10000.0)
    assert config.windows == (None, None, None)
    assert not config.ties_embeddings
    assert not config.has_attention_bias
    assert config.layer_specs() == (Paged(num_kv_heads=2, head_dim=8),) * 3


def test_keys_that_are_null_count_as_absent():
    config = read(LLAMA, num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)


def test_head_dim_need_not_be_the_hidden_size_over_the_heads():
    assert read(LLAMA, head_dim=64).head_dim == 64


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
    assert read(LLAMA, **rope).rope == Rope(theta=5e5)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_scaled_ropes_are_found_in_both_layouts(place):
    linear = {"type" if place == "rope_scaling" else "rope_type": "linear", "factor": 4}
    assert read(LLAMA, rope_theta=7.0, **{place: linear}).rope == Rope(theta=7.0, kind="linear", factor=4.0)
    assert read(LLAMA, rope_theta=7.0, **{place: LLAMA3}).rope == Rope(
        theta=7.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "proportional"])
def test_other_ropes_are_refused_by_name(place, kind):
    assert f"rope_type '{kind}'" in refusal(LLAMA, **{place: {"rope_type": kind, "factor": 2.0}})


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
def test_partial_rotation_is_refused(where):
    assert "partial_rotary_factor = 0.5" in refusal(LLAMA, **where)
    assert read(LLAMA, partial_rotary_factor=1.0).rope.theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "windows"),
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
    ],
)
def test_windows_are_found_in_both_layouts(changes, windows):
    config = read(QWEN2, **changes)
    assert config.windows == windows
    kinds = tuple(type(spec) for spec in config.layer_specs())
    assert kinds == tuple(Paged if window is None else Windowed for window in windows)


def test_unknown_layer_types_are_refused_by_name():
    kinds = ["full_attention", "linear_attention", "full_attention"]
    assert "'linear_attention'" in refusal(QWEN2, layer_types=kinds)


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
        (["Qwen3MoeForCausalLM"], "Qwen3MoeForCausalLM"),
        ([], "missing"),
        (None, "missing"),
    ],
)
def test_unknown_architectures_are_refused_by_name_with_those_that_work(architectures, named):
    message = refusal(LLAMA, architectures=architectures)
    assert named in message
    assert "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in message


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes"])
def test_quantised_checkpoints_are_refused_by_scheme(method):
    message = refusal(LLAMA, quantization_config={"quant_method": method, "bits": 4})
    assert f"({method})" in message
    assert "bf16" in message


def test_an_unnamed_quantisation_is_refused_too():
    assert "quantised" in refusal(LLAMA, quantization_config={"bits": 4})


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh", ["silu"]])
def test_other_activations_are_refused(activation):
    assert f"hidden_act = {activation!r}" in refusal(LLAMA, hidden_act=activation)


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
        ({"sliding_window": "9"}, "sliding_window = '9', expected int"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8', expected an object"),
    ],
)
def test_values_of_another_type_are_refused_with_the_value(changes, named):
    assert named in refusal(LLAMA, **changes)


def test_heads_that_cannot_share_are_refused():
    assert "4 query heads for 3 key/value heads" in refusal(LLAMA, num_key_value_heads=3)


def test_an_odd_head_cannot_be_rotated():
    assert "head_dim = 7" in refusal(LLAMA, head_dim=7)


def test_tensor_parallel_leftovers_are_refused():
    assert "pretraining_tp = 2" in refusal(LLAMA, pretraining_tp=2)


def test_the_switch_for_sliding_windows_overrules_the_layer_types():
    raw = {**LLAMA, "layer_types": ["sliding_attention"] * LLAMA["num_hidden_layers"], "sliding_window": 4}
    assert set(read_model_config({**raw, "use_sliding_window": False}, name="m").windows) == {None}
    assert set(read_model_config({**raw, "use_sliding_window": True}, name="m").windows) == {4}
    assert set(read_model_config(raw, name="m").windows) == {4}


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_a_rope_factor_of_zero_is_refused(kind):
    scaling = {
        "rope_type": kind,
        "factor": 0.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(ModelError, match=r"factor = 0\.0"):
        read_model_config({**LLAMA, "rope_scaling": scaling}, name="m")


def test_rope_factors_must_be_one_per_pair():
    with pytest.raises(ModelError, match="3 rope factors"):
        read_model_config({**LLAMA, "rope_scaling": {"rope_type": "factors", "factors": [1.0] * 3}}, name="m")
