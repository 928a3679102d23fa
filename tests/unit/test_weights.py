"""From tensors by name to parameters: each in its place, each shape checked, none left over."""

import pytest
import torch

from blockdraft.errors import ModelError
from blockdraft.models.config import read_model_config
from blockdraft.models.dflash import DFlash
from blockdraft.models.draft_config import read_draft_config
from blockdraft.models.registry import build_decoder
from blockdraft.models.weights import decoder_sources, drafter_sources, load_decoder, load_drafter
from tests.fixtures.make_pair import draft_config, draft_weights


class Tensors:
    """A checkpoint in memory."""

    name = "some/model"

    def __init__(self, tensors):
        self.tensors = tensors

    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name):
        return self.tensors[name]


ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_decoder(family="llama", **changes):
    raw = {
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **changes,
    }
    return build_decoder(read_model_config(raw, name="some/model"), taps=(), max_positions=8)


def complete(model, sources):
    """A tensor of random numbers for every name that `model` reads."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        names = sources(name)
        module = model.get_submodule(name.rpartition(".")[0])
        parts = getattr(module, "parts", (parameter.shape[0],))
        for source, rows in zip(names, parts, strict=True):
            tensors[source] = torch.randn(rows, *parameter.shape[1:], generator=generator)
    return tensors


def make_drafter(**kwargs):
    config = read_draft_config(draft_config(), name="some/drafter")
    return DFlash(config, first_layer=4, max_positions=8, **{"has_head": False, **kwargs})


def refusal(load, *args, **kwargs):
    with pytest.raises(ModelError) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("'some/model'")
    return message


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_stacked_projections_hold_their_parts_in_order(family):
    model = make_decoder(family, **({} if family == "qwen2" else {"attention_bias": True}))
    tensors = complete(model, decoder_sources)
    load_decoder(model, Tensors(tensors), is_tied=False)
    prefix = "model.layers.1."
    for kind in ("weight", "bias"):
        parts = [tensors[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(getattr(model.layers[1].attention.qkv, kind), torch.cat(parts))
    gate_up = [tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(model.layers[1].mlp.gate_up.weight, torch.cat(gate_up))
    assert torch.equal(model.layers[1].mlp.down.weight, tensors[f"{prefix}mlp.down_proj.weight"])
    assert torch.equal(model.layers[1].attention_norm.weight, tensors[f"{prefix}input_layernorm.weight"])
    assert torch.equal(model.layers[1].mlp_norm.weight, tensors[f"{prefix}post_attention_layernorm.weight"])
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])
    assert torch.equal(model.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


def test_a_drafter_reads_the_names_of_the_published_files():
    model, tensors = make_drafter(), draft_weights(draft_config())
    load_drafter(model, Tensors(tensors))
    layer = model.layers[1]
    attention = {part: tensors[f"layers.1.self_attn.{part}_proj.weight"] for part in "qkvo"}
    assert torch.equal(layer.q.weight, attention["q"])
    assert torch.equal(layer.kv.weight, torch.cat([attention["k"], attention["v"]]))
    assert torch.equal(layer.out.weight, attention["o"])
    assert torch.equal(model.fc.weight, tensors["fc.weight"])
    assert set(tensors) == set(complete(model, drafter_sources))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_missing_tensor_is_named(family):
    model = make_decoder(family)
    tensors = complete(model, decoder_sources)
    for name in tensors:
        rest = {key: value for key, value in tensors.items() if key != name}
        message = refusal(load_decoder, model, Tensors(rest), is_tied=False)
        assert f"has no tensor '{name}'" in message
        assert "Fetch the checkpoint again." in message


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_wrong_shape_is_named_with_both_shapes(family):
    model = make_decoder(family)
    tensors = complete(model, decoder_sources)
    for name, tensor in tensors.items():
        wrong = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        message = refusal(load_decoder, model, Tensors(tensors | {name: wrong}), is_tied=False)
        assert (
            f"'{name}' has shape {list(wrong.shape)}, but config.json asks for {list(tensor.shape)}"
            in message
        )


def test_a_scalar_does_not_pass_for_a_vector():
    model = make_decoder()
    tensors = complete(model, decoder_sources) | {"model.norm.weight": torch.ones(())}
    assert "has shape [], but config.json asks for [8]" in refusal(
        load_decoder, model, Tensors(tensors), is_tied=False
    )


def test_a_transposed_matrix_is_refused():
    model = make_decoder(intermediate_size=16)
    tensors = complete(model, decoder_sources)
    name = "model.layers.0.mlp.down_proj.weight"
    message = refusal(load_decoder, model, Tensors(tensors | {name: tensors[name].T}), is_tied=False)
    assert "has shape [16, 8], but config.json asks for [8, 16]" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # a bias the configuration does not mention
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.input_layernorm.weight",  # a third layer of two
        "model.layers.0.mlp.gate_proj.weight_scale",
        "visual.patch_embed.weight",
    ],
)
def test_tensors_without_a_place_are_refused(name):
    model = make_decoder()
    tensors = complete(model, decoder_sources) | {name: torch.ones(3), "zzz": torch.ones(1)}
    message = refusal(load_decoder, model, Tensors(tensors), is_tied=False)
    assert f"2 tensors that this architecture does not use, '{name}' first" in message


def test_derived_tensors_may_be_stored():
    model = make_decoder()
    tensors = complete(model, decoder_sources)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
    load_decoder(model, Tensors(tensors), is_tied=False)


def test_a_tied_head_may_be_stored_and_is_not_read():
    model = make_decoder(tie_word_embeddings=True)
    tensors = complete(model, decoder_sources)
    assert "lm_head.weight" not in tensors
    load_decoder(model, Tensors(tensors), is_tied=True)
    load_decoder(model, Tensors(tensors | {"lm_head.weight": torch.ones(20, 8)}), is_tied=True)
    assert torch.equal(model.logits(torch.eye(8)), tensors["model.embed_tokens.weight"].T)


def test_stored_precision_is_converted_to_the_parameters():
    model = make_decoder()
    tensors = {name: t.bfloat16() for name, t in complete(model, decoder_sources).items()}
    load_decoder(model, Tensors(tensors), is_tied=False)
    assert model.embedding.dtype == torch.float32
    assert torch.equal(model.embedding, tensors["model.embed_tokens.weight"].float())


def test_a_drafter_may_bring_what_it_borrows_and_no_more():
    tensors = draft_weights(draft_config())
    extra = {"embed_tokens.weight": torch.ones(1), "d2t": torch.ones(1), "t2d": torch.ones(1)}
    extra |= {"verifier_norm.weight": torch.ones(1), "verifier_lm_head.weight": torch.ones(1)}
    load_drafter(make_drafter(), Tensors(tensors | extra))
    for name in (
        "layers.0.attention_conv.base_kernel",
        "candidate_selector.hidden_projection.weight",
        "fc.bias",
    ):
        message = refusal(load_drafter, make_drafter(), Tensors(tensors | {name: torch.ones(1)}))
        assert f"'{name}' first" in message


def test_every_missing_tensor_of_a_drafter_is_named():
    tensors = draft_weights(draft_config())
    for name in tensors:
        rest = {key: value for key, value in tensors.items() if key != name}
        assert f"has no tensor '{name}'" in refusal(load_drafter, make_drafter(), Tensors(rest))
    assert "'lm_head.weight'" in refusal(load_drafter, make_drafter(has_head=True), Tensors(tensors))
