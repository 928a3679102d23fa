"""From tensors by name to parameters: each in its place, each shape checked, none left over."""

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from blockdraft.checkpoints import weights
from blockdraft.checkpoints.checkpoint import TensorInfo
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.checkpoints.weights import load_checkpoint
from blockdraft.errors import ModelError
from blockdraft.models.dflash import body_type
from blockdraft.models.packed import Packed
from blockdraft.models.packed_groups import quantise_int4
from blockdraft.models.registry import build_decoder
from tests.fixtures.make_pair import dflash2_config, draft_config, draft_weights
from tests.matrix import slow_but
from tests.models.families import BASE, CASES, CONFIGS

CPU = torch.device("cpu")
META = torch.device("meta")
DENSE = {"llama": "llama-biases", "qwen2": "qwen2-full", "qwen3": "qwen3-tied-bias"}
FAMILIES = DENSE | {
    "qwen3_moe": "qwen3_moe-some-dense",
    "qwen3_next": "qwen3_next-unnormalised",
    "qwen3_5": "qwen3_5-mrope",
    "qwen3_5_moe": "qwen3_5_moe-tied",
    "gemma4": "gemma4-mixture",
    "gemma4-shared": "gemma4-shared",
    "gemma4-keys-are-values": "gemma4-keys-are-values",
    "gpt_oss": "gpt_oss-whole",
}


class Tensors:
    """A checkpoint in memory."""

    name = "some/model"
    quant_file = None

    def __init__(self, tensors, config=None):
        self.held = tensors
        self.config = config or {}

    def tensors(self):
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self.held.items()}

    def read(self, name, begin=0, end=None):
        tensor = self.held[name]
        return tensor[begin:end].clone() if tensor.ndim else tensor.clone()

    def ggml_type(self, name):
        return None

    def without(self, name):
        return Tensors({key: value for key, value in self.held.items() if key != name}, self.config)

    def with_(self, **changes):
        return Tensors(self.held | changes, self.config)


def make(family, **changes):
    """Random tensors, under the names that transformers stores, and the config that goes with them."""
    case_family, overrides = CASES[FAMILIES[family]]
    config = CONFIGS[case_family](**{**BASE, **overrides, **changes})
    with META:
        model = AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in revert_weight_conversion(model, state).items()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    raw = json.loads(json.dumps(config.to_dict())) | {"architectures": [type(model).__name__]}
    return Tensors(tensors, raw)


def build(checkpoint):
    """A target of its config, on the meta device."""
    with META:
        config = read_model_config(checkpoint.config, name=checkpoint.name)
        return build_decoder(config, taps=(), max_positions=8, device=CPU)


def stored_names(checkpoint):
    """The names of the tensors that loading reads."""
    slots = weights.match_tensors(build(checkpoint), checkpoint, checkpoint.tensors())
    return {name for slot in slots for piece in slot.pieces for name in piece.stored()}


def load(checkpoint, storage="none"):
    model = build(checkpoint)
    load_checkpoint(model, checkpoint, storage=storage, device=CPU)
    return model


def make_drafter(raw=None, *, has_head=False):
    config = read_draft_config(raw or draft_config(), name="some/drafter")
    with META:
        return body_type(config)(config, first_layer=4, max_positions=8, device=CPU, has_head=has_head)


def fill(drafter, tensors):
    load_checkpoint(drafter, Tensors(tensors), storage="none", device=CPU)


def refusal(function, *args, **kwargs):
    with pytest.raises(ModelError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("'some/model'")
    return message


# ---- each in its place


@pytest.mark.parametrize("family", DENSE)
def test_stacked_projections_hold_their_parts_in_order(family):
    checkpoint = make(family, tie_word_embeddings=False)
    model, tensors = load(checkpoint), checkpoint.held
    layer, prefix = model.layers[1], "model.layers.1."
    for kind in ("weight", "bias"):
        parts = [tensors[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(getattr(layer.mixer.qkv, kind), torch.cat(parts))
    gate_up = [tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up.weight, torch.cat(gate_up))
    assert torch.equal(layer.mixer.out.weight, tensors[f"{prefix}self_attn.o_proj.weight"])
    assert torch.equal(layer.mlp.down.weight, tensors[f"{prefix}mlp.down_proj.weight"])
    assert torch.equal(layer.mixer_norm.weight, tensors[f"{prefix}input_layernorm.weight"])
    assert torch.equal(layer.mlp_norm.weight, tensors[f"{prefix}post_attention_layernorm.weight"])
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])
    assert torch.equal(model.embedding.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_in_slices_changes_nothing(family, monkeypatch):
    checkpoint = make(family)
    model = load(checkpoint)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    whole = model.state_dict()
    monkeypatch.setattr(weights, "_SLICE_BYTES", 1)
    sliced = load(checkpoint).state_dict()
    assert whole.keys() == sliced.keys()
    assert all(torch.equal(whole[name], sliced[name]) for name in whole)


def test_zero_centred_norms_get_their_one():
    checkpoint = make("qwen3_5")
    layer = load(checkpoint).layers[0]
    prefix = "model.layers.0."
    assert torch.equal(layer.mixer_norm.weight, checkpoint.held[f"{prefix}input_layernorm.weight"] + 1)
    assert torch.equal(layer.mixer.q_norm.weight, checkpoint.held[f"{prefix}self_attn.q_norm.weight"] + 1)
    delta = load(checkpoint).layers[1].mixer
    assert torch.equal(delta.norm.weight, checkpoint.held["model.layers.1.linear_attn.norm.weight"])


def test_experts_may_be_stored_one_by_one_or_together():
    single = make("qwen3_5_moe")
    prefix = "model.layers.0.mlp.experts."
    parts = {}
    for part in ("gate_proj", "up_proj", "down_proj"):
        names = [f"{prefix}{expert}.{part}.weight" for expert in range(6)]
        parts[part] = torch.stack([single.held[name] for name in names])
    rest = {name: tensor for name, tensor in single.held.items() if not name.startswith(prefix)}
    halves = rest | {f"{prefix}{part}": tensor for part, tensor in parts.items()}
    fused = rest | {
        f"{prefix}gate_up_proj": torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1),
        f"{prefix}down_proj": parts["down_proj"],
    }
    expected = load(single).layers[0].mlp.experts
    assert torch.equal(expected.gate_up.weight, fused[f"{prefix}gate_up_proj"])
    for tensors in (halves, fused):
        experts = load(Tensors(tensors, single.config)).layers[0].mlp.experts
        assert torch.equal(experts.gate_up.weight, expected.gate_up.weight)
        assert torch.equal(experts.down.weight, expected.down.weight)


def test_experts_of_gpt_oss_are_turned_and_their_alternating_rows_sorted():
    checkpoint = make("gpt_oss")
    experts = load(checkpoint).layers[2].mlp.experts
    prefix = "model.layers.2.mlp.experts."
    stored = checkpoint.held[f"{prefix}gate_up_proj"].transpose(1, 2)  # [E, in, out] in the file
    assert torch.equal(experts.gate_up.weight, torch.cat([stored[:, 0::2], stored[:, 1::2]], dim=1))
    bias = checkpoint.held[f"{prefix}gate_up_proj_bias"]
    assert torch.equal(experts.gate_up.bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1))
    assert torch.equal(experts.down.weight, checkpoint.held[f"{prefix}down_proj"].transpose(1, 2))
    assert torch.equal(experts.down.bias, checkpoint.held[f"{prefix}down_proj_bias"])


def test_a_drafter_reads_the_names_of_the_published_files():
    model, tensors = make_drafter(), draft_weights(draft_config())
    fill(model, tensors)
    layer = model.layers[1]
    attention = {part: tensors[f"layers.1.self_attn.{part}_proj.weight"] for part in "qkvo"}
    assert torch.equal(layer.qkv.weight, torch.cat([attention["q"], attention["k"], attention["v"]]))
    assert torch.equal(layer.out.weight, attention["o"])
    assert torch.equal(layer.mlp_norm.weight, tensors["layers.1.post_attention_layernorm.weight"])
    assert torch.equal(model.fc.weight, tensors["fc.weight"])
    assert torch.equal(model.hidden_norm.weight, tensors["hidden_norm.weight"])
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in model.parameters())


# ---- what does not fit is named


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "qwen3_5", "gemma4-shared", "gpt_oss"))
def test_every_missing_tensor_is_named(family):
    checkpoint = make(family)
    model = build(checkpoint)
    for name in stored_names(checkpoint):
        message = refusal(load_checkpoint, model, checkpoint.without(name), storage="none", device=CPU)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # Without it, the experts are looked for one by one.
            assert f"has no tensor '{name.rpartition('.')[0]}.0." in message
        else:
            assert f"has no tensor '{name}'" in message
        assert "Fetch the checkpoint again." in message


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "qwen3_5", "gemma4-shared", "gpt_oss"))
def test_every_wrong_shape_is_named_with_both_shapes(family):
    checkpoint = make(family)
    model = build(checkpoint)
    for name in stored_names(checkpoint):
        tensor = checkpoint.held[name]
        wrong = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        message = refusal(
            load_checkpoint, model, checkpoint.with_(**{name: wrong}), storage="none", device=CPU
        )
        shapes = f"'{name}' has shape {list(wrong.shape)}, but config.json asks for {list(tensor.shape)}"
        assert shapes in message


def test_a_scalar_does_not_pass_for_a_vector():
    checkpoint = make("llama").with_(**{"model.norm.weight": torch.ones(())})
    assert "has shape [], but config.json asks for [32]" in refusal(load, checkpoint)


def test_a_transposed_matrix_is_refused():
    checkpoint = make("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    message = refusal(load, checkpoint.with_(**{name: checkpoint.held[name].T}))
    assert "has shape [48, 32], but config.json asks for [32, 48]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn])
def test_packed_tensors_without_a_word_in_the_config_are_refused(dtype):
    name = "model.layers.0.mlp.down_proj.weight"
    message = refusal(load, make("llama").with_(**{name: torch.ones(32, 48).to(dtype)}))
    kind = str(dtype).removeprefix("torch.")
    assert f"'{name}' is stored as {kind}, expected bfloat16, float16, float32, float64" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.3.input_layernorm.weight",  # a fourth layer of three
        "model.layers.0.mlp.gate_proj.weight_scale",
        "model.layers.0.self_attn.sinks",
        "visual.patch_embed.weight",
        "model.vision_tower.patch_embed.weight",
        "model.language_model.norm.weight",
    ],
)
def test_tensors_without_a_place_are_refused(name):
    checkpoint = make("llama").with_(**{name: torch.ones(3), "zzz": torch.ones(1)})
    message = refusal(load, checkpoint)
    assert f"2 tensors that this architecture does not use, '{name}' first" in message


# ---- what may be there


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_scale",
        "mtp.layers.0.mlp.gate_proj.weight",
    ],
)
def test_some_tensors_are_left_aside(name):
    checkpoint = make("llama")
    assert stored_names(checkpoint.with_(**{name: torch.ones(1)})) == checkpoint.held.keys()


def test_layers_that_share_keys_may_bring_projections_that_nobody_reads():
    checkpoint = make("gemma4-shared")
    prefix = "model.layers.5.self_attn."
    names = [f"{prefix}k_proj.weight", f"{prefix}v_proj.weight", f"{prefix}k_norm.weight"]
    larger = checkpoint.with_(**{name: torch.ones(1) for name in names})
    assert stored_names(larger) == stored_names(checkpoint)
    assert "'model.layers.5.self_attn.surprise.weight' first" in refusal(
        load, checkpoint.with_(**{f"{prefix}surprise.weight": torch.ones(1)})
    )
    own = "model.layers.1.self_attn.k_proj.weight"
    assert f"has no tensor '{own}'" in refusal(load, larger.without(own))


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe", "gemma4"])
def test_a_tied_head_may_be_stored_and_is_not_read(family):
    checkpoint = make(family, tie_word_embeddings=True)
    assert "lm_head.weight" not in checkpoint.held
    same = checkpoint.held["model.embed_tokens.weight"].clone()
    for held in (checkpoint, checkpoint.with_(**{"lm_head.weight": same})):
        model = load(held)
        assert model.head is None
        rows = model.head_logits(torch.eye(32))
        torch.testing.assert_close(rows, checkpoint.held["model.embed_tokens.weight"].T)


def test_a_tied_head_that_is_not_the_embedding_is_refused():
    checkpoint = make("llama", tie_word_embeddings=True)
    other = checkpoint.held["model.embed_tokens.weight"].clone()
    other[-1, -1] += 1
    assert "tie_word_embeddings" in refusal(load, checkpoint.with_(**{"lm_head.weight": other}))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_text_part_is_found_under_the_names_of_both_layouts(prefix):
    checkpoint = make("qwen3_5")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in checkpoint.held.items()}
    if prefix == "language_model.model.":
        renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
    expected = load(checkpoint).state_dict()
    actual = load(Tensors(renamed, checkpoint.config)).state_dict()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# ---- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_precision_is_converted_to_the_parameters(dtype):
    checkpoint = make("llama")
    stored = Tensors({name: tensor.to(dtype) for name, tensor in checkpoint.held.items()}, checkpoint.config)
    model = load(stored)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.embedding.weight, stored.held["model.embed_tokens.weight"].float())


QUANTISED = [
    *itertools.product(("llama", "qwen3_moe", "qwen3_5_moe", "gemma4", "gpt_oss"), ("fp8", "int8")),
    ("llama", "int4"),
]


@pytest.mark.parametrize(("family", "storage"), QUANTISED)
def test_projections_are_quantised_and_nothing_else(storage, family, monkeypatch):
    monkeypatch.setattr("blockdraft.checkpoints.weights.why_no_llvm", lambda *_: "as on a card")
    checkpoint = make(family, tie_word_embeddings=False)
    plain, model = load(checkpoint), load(checkpoint, storage=storage)
    packed = {
        name for name, module in model.named_modules() if isinstance(getattr(module, "weight", 0), Packed)
    }
    routed = {
        f"layers.{i}.mlp.experts.{part}" for i in range(len(model.layers)) for part in ("gate_up", "down")
    }
    linears = {name for name, module in plain.named_modules() if type(module).__name__ == "Linear"}
    names = {name for name, _ in plain.named_modules()}
    routers = {name for name in names if name.endswith("router")}
    assert packed == (linears | (routed & names)) - {"head"} - routers
    assert torch.equal(model.head.weight, plain.head.weight)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    gate_up = "layers.0.mlp.gate_up" if "layers.0.mlp.gate_up" in names else "layers.0.mlp.experts.gate_up"
    args = (x,) if gate_up == "layers.0.mlp.gate_up" else (x, 1)
    expected, actual = plain.get_submodule(gate_up)(*args), model.get_submodule(gate_up)(*args)
    assert not torch.equal(actual, expected)
    assert (actual - expected).abs().max() < (0.2 if storage == "int4" else 0.1) * expected.abs().max()


def test_int4_made_in_loading_is_rounded_row_by_row():
    """In slices or whole, to the codes of one rule."""
    checkpoint = make("llama")
    plain, model = load(checkpoint), load(checkpoint, storage="int4")
    for name in ("layers.0.mlp.gate_up", "layers.0.mlp.down"):
        made, weight = model.get_submodule(name).weight, plain.get_submodule(name).weight
        expected = quantise_int4(weight)
        assert torch.equal(made.dequantise(torch.float32), expected.dequantise(torch.float32))


def test_plain_weights_that_are_kept_stay_plain():
    model = load(make("llama"), storage="keep")
    assert not any(isinstance(getattr(module, "weight", 0), Packed) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_packed_weights_are_kept_or_unpacked_as_asked(family):
    checkpoint = make(family)
    config = checkpoint.config | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
        | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.3.mlp.gate"]}
    }
    stored, values = {}, {}
    for name, tensor in checkpoint.held.items():
        stored[name] = values[name] = tensor
        if name.endswith("_proj.weight"):
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
            values[name] = stored[name].float() * 0.5
    packed_file, plain_file = Tensors(stored, config), Tensors(values, checkpoint.config)
    expected, unpacked, kept = load(plain_file), load(packed_file), load(packed_file, storage="keep")
    state = unpacked.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    projections = [
        (expected.get_submodule(name).weight, module.weight)
        for name, module in kept.named_modules()
        if isinstance(getattr(module, "weight", None), Packed)
    ]
    assert len(projections) == 4 * len(kept.layers)
    for plain, packed in projections:
        assert torch.equal(packed.dequantise(torch.float32), plain)
    del stored["model.layers.1.self_attn.o_proj.weight_scale_inv"]
    message = refusal(load, Tensors(stored, config), storage="keep")
    assert "model.layers.1.self_attn.o_proj.weight" in message


# ---- drafters


def test_a_drafter_may_bring_what_it_borrows_and_no_more():
    tensors = draft_weights(draft_config())
    extra = {"embed_tokens.weight": torch.ones(1), "d2t": torch.ones(1), "t2d": torch.ones(1)}
    extra |= {"verifier_norm.weight": torch.ones(1), "verifier_lm_head.weight": torch.ones(1)}
    fill(make_drafter(), tensors | extra)
    for name in (
        "layers.0.attention_conv.base_kernel",
        "candidate_selector.hidden_projection.weight",
        "fc.bias",
    ):
        message = refusal(fill, make_drafter(), tensors | {name: torch.ones(1)})
        assert f"'{name}' first" in message


@pytest.mark.parametrize("raw", [draft_config(), dflash2_config()], ids=["DFlash", "DFlash2"])
def test_tensors_of_a_drafter_that_are_missing_or_of_another_shape_are_named(raw):
    tensors = draft_weights(raw)
    for name, tensor in tensors.items():
        rest = {key: value for key, value in tensors.items() if key != name}
        assert f"has no tensor '{name}'" in refusal(fill, make_drafter(raw), rest)
        wrong = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        message = refusal(fill, make_drafter(raw), tensors | {name: wrong})
        shapes = f"has shape {list(wrong.shape)}, but config.json asks for {list(tensor.shape)}"
        assert f"'{name}' {shapes}" in message
    assert "'lm_head.weight'" in refusal(fill, make_drafter(raw, has_head=True), tensors)
