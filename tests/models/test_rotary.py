"""Rotary frequencies against transformers: its ROPE_INIT_FUNCTIONS, and the models' own default rule."""

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from blockdraft.checkpoints.config_fields import Fields, rope_of
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.models.config import Rope
from blockdraft.models.rotary import Rotary, inverse_frequencies

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear by less than one": {"rope_type": "linear", "factor": 0.7},
    "llama3": LLAMA3,
    "llama3 of Llama 3.2": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "llama3 with a narrow band": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.5, "factor": 1.7},
    "yarn": YARN,
    "yarn by less than one": YARN | {"factor": 0.5},
    "yarn with other borders": YARN | {"beta_fast": 8, "beta_slow": 0.25},
    "yarn with equal borders": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn with borders exchanged": YARN | {"beta_fast": 1.0, "beta_slow": 32.0, "truncate": False},
    "yarn at fractions of pairs": YARN | {"truncate": False},
    "yarn with zero borders": YARN | {"beta_fast": 0, "beta_slow": 0},  # counts as absent
    "yarn of gpt-oss": YARN | {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    "yarn with its own scale": YARN | {"attention_factor": 1.75},
    "yarn with mscale and its twin": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn with mscale alone": YARN | {"mscale": 0.707},  # not used
    "yarn with the twin alone": YARN | {"mscale_all_dim": 0.707},
    "yarn with a twin of zero": YARN | {"mscale": 0.707, "mscale_all_dim": 0},
    "yarn with all of them": YARN | {"mscale": 0.5, "mscale_all_dim": 0.3, "attention_factor": 0.9},
    "proportional": {"rope_type": "proportional"},
    "proportional by a factor": {"rope_type": "proportional", "factor": 8.0},
}


def ours(section, *, head_dim, theta, part=1.0):
    fields = Fields(section, owner="m", prefix="rope_parameters.")
    return rope_of(fields, Fields({}, owner="m"), head_dim=head_dim, theta=theta, part=part)


def assert_same(rope, head_dim, expected, scale):
    actual = inverse_frequencies(rope, head_dim)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.cpu(), rtol=1e-6, atol=0)
    assert rope.attention_scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("part", [1.0, 0.25])
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 1e4), (16, 150000.0)])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_frequencies_are_those_of_transformers(name, head_dim, theta, part):
    section = SCALED[name]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={**section, "rope_theta": theta, "partial_rotary_factor": part},
    )
    expected, scale = ROPE_INIT_FUNCTIONS[section["rope_type"]](config, CPU)
    rope = ours(section, head_dim=head_dim, theta=theta, part=part)
    # A whole head for the proportional kind: what does not turn has frequency zero.
    size = head_dim if rope.kind == "proportional" else int(head_dim * part)
    assert expected.shape == (size // 2,)
    assert_same(rope, head_dim, expected, scale)


@pytest.mark.parametrize("theta", [1e4, 150000.0])
@pytest.mark.parametrize("head_dim", [2, 80])
@pytest.mark.parametrize(
    ("config_class", "rotary"), [(LlamaConfig, LlamaRotaryEmbedding), (Qwen3Config, Qwen3RotaryEmbedding)]
)
def test_default_frequencies_are_those_of_the_models(config_class, rotary, head_dim, theta):
    rope_parameters = {"rope_type": "default", "rope_theta": theta}
    config = config_class(head_dim=head_dim, rope_parameters=rope_parameters)
    assert_same(Rope(theta=theta), head_dim, rotary(config).inv_freq, 1.0)


@pytest.mark.parametrize(("part", "head_dim"), [(0.25, 16), (0.75, 256), (0.3, 256)])
@pytest.mark.parametrize(
    ("config_class", "rotary"),
    [(Qwen3NextConfig, Qwen3NextRotaryEmbedding), (Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding)],
)
def test_partial_frequencies_are_those_of_the_hybrids(config_class, rotary, head_dim, part):
    rope_parameters = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": part}
    config = config_class(head_dim=head_dim, rope_parameters=rope_parameters)
    expected = rotary(config).inv_freq
    assert expected.shape == (int(head_dim * part) // 2,)
    assert_same(Rope(theta=1e7, part=part), head_dim, expected, 1.0)


def test_ropes_of_gemmas_two_kinds_of_layers_are_those_of_the_model():
    config = Gemma4TextConfig(hidden_size_per_layer_input=0, global_head_dim=512, head_dim=256)
    theirs = Gemma4TextRotaryEmbedding(config)
    raw = config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    raw["per_layer_config"] = {str(key): value for key, value in raw["per_layer_config"].items()}
    layers = read_model_config(raw, name="m").layers
    for mixer, kind in ((layers[0].mixer, "sliding_attention"), (layers[5].mixer, "full_attention")):
        expected = getattr(theirs, f"{kind}_inv_freq")
        scale = getattr(theirs, f"{kind}_attention_scaling")
        assert_same(mixer.rope, mixer.head_dim, expected, scale)
    still = inverse_frequencies(layers[5].mixer.rope, 512)
    assert int((still == 0).sum()) == 192  # of 256 pairs


@pytest.mark.parametrize("part", [0.1, 0.26, 0.99])
def test_proportional_shares_of_odd_size_are_rounded_as_in_transformers(part):
    config = LlamaConfig(
        head_dim=100,
        rope_parameters={"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": part},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config, CPU)
    assert_same(Rope(theta=1e6, kind="proportional", part=part), 100, expected, 1.0)


def test_factors_divide_the_frequencies_one_by_one():
    factors = (1.0, 2.0, 0.5, 32.0)
    actual = inverse_frequencies(Rope(theta=1e4, kind="factors", factors=factors), 8)
    assert torch.equal(actual, inverse_frequencies(Rope(theta=1e4), 8) / torch.tensor(factors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tables_hold_scaled_cosines_and_sines_by_position(dtype):
    rope = ours(SCALED["yarn"], head_dim=16, theta=1e4)
    assert rope.attention_scale > 1.1
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):  # as models are built
            rotary = Rotary(rope, 16, 40, CPU)
    finally:
        torch.set_default_dtype(before)
    positions = torch.tensor([0, 39, 7])
    cos, sin = rotary(positions)
    angle = positions.float()[:, None] * inverse_frequencies(rope, 16)
    assert cos.shape == sin.shape == (3, 1, 8)
    assert cos.dtype == sin.dtype == dtype
    assert torch.equal(cos[:, 0], (angle.cos() * rope.attention_scale).to(dtype))
    assert torch.equal(sin[:, 0], (angle.sin() * rope.attention_scale).to(dtype))
