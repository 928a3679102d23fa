"""Quantised checkpoints end to end: packed, unpacked at load and never packed are one model, bit for bit."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.checkpoints.schemes import CompressedIntScheme
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.errors import ModelError, SettingsError
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.packed_speeds import MEASURED, KernelSpeed
from blockdraft.models.layers import Linear
from blockdraft.models.moe import ExpertLinear
from blockdraft.models.packed import Packed, Stacked
from blockdraft.models.packed_words import Words
from blockdraft.planner.pair import open_pair
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import open_models, read_weights
from blockdraft.start.slower_parts import slower_parts
from blockdraft.step.dflash import DFlashDrafter
from tests.checkpoints import packers
from tests.checkpoints.quantised import (
    FORMATS,
    FP8_CHANNEL,
    GGUF_FORMATS,
    W4_ASYMMETRIC,
    Format,
    GgufFormat,
    GgufPair,
    Pair,
    compress,
    compressed,
    write_pair,
)
from tests.fixtures import make_pair
from tests.matrix import slow_but
from tests.models.checkpoints import bench_of, load_pair, write_target
from tests.models.families import BASE, CONFIGS, GPT_OSS, HYBRID, MOE, SHARED_EXPERT
from tests.start.load_memory import resident_bytes

LIMITS = {"max_model_len": 100, "page_size": 4, "max_prefill_tokens": 9, "max_num_seqs": 2}
PROMPTS = ([5, 9, 2, 40, 41, 42, 43], [1, 3])


def loaded(folder, quantization="none", **settings):
    return load_pair(folder, quantization=quantization, **{"dtype": "float32", **LIMITS, **settings})


def loaded_as(storage, folder):
    """A pair in bfloat16 whose plan holds the target's weights as a plan for a card would."""
    settings = Settings(model=str(folder), draft=None, device="cpu", dtype="bfloat16", **LIMITS)
    opened = open_models(settings, lambda _: None)
    opened = replace(opened, plan=replace(opened.plan, quantization=storage))
    return read_weights(opened, lambda _: None), opened.plan


def logits(pair):
    """Of two rows in uneven chunks."""
    models = pair[0]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 90, (length,), generator=generator) for length in (17, 11)]
    rows, _ = bench_of(models, 2, 20, page_size=3).prefill(models.target, sequences, [[3, 13, 1], [7, 1, 3]])
    return torch.cat(rows)


def tokens(pair):
    """Greedy and sampled answers."""
    return run(pair)[0]


def run(pair):
    """The answers, and how many drafts were accepted at each position."""
    engine = Engine(pair[0], replace(pair[1], num_pages=40))
    answers = {}
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=8, ignore_eos=True)
        for prompt in PROMPTS:
            answers[engine.add(list(prompt), params)] = []
    while engine.has_work:
        for delta in engine.step():
            answers[delta.request_id].extend(delta.token_ids)
    return list(answers.values()), engine.stats.accepted


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.fixture(scope="module", params=[*FORMATS, *GGUF_FORMATS])
def pair(request, tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), request.param)


@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "bfloat16"))
def test_packed_and_unpacked_weights_are_the_dense_ones_and_stay_packed(pair, dtype):
    """Weights that are not quantised take as much as in a dense model; the others, as much as in the file."""
    dense = loaded(pair.dense, dtype=dtype)
    unpacked, kept = (loaded(pair.packed, storage, dtype=dtype) for storage in ("none", "keep"))
    expected = logits(dense)
    assert expected.isfinite().all()
    assert expected.float().std() > 0.1  # logits that say something
    assert same(logits(unpacked), expected)
    assert same(logits(kept), expected)
    num_bytes, *others = (resident_bytes(one[0].target) for one in (dense, unpacked, kept))
    num_dense_bytes = sum(pair.num_dense_values.values()) * getattr(torch, dtype).itemsize
    assert others == [num_bytes, num_bytes - num_dense_bytes + pair.packed_bytes()]


def codes_of(folder):
    """The code of the weights as a start knows it, and as `plan` does."""
    settings = Settings(model=str(folder), draft=None, device="cpu", dtype="bfloat16", **LIMITS)
    return [open_models(settings, lambda _: None).target.weights.code, open_pair(settings).target.code]


def test_a_start_and_a_plan_know_the_same_code(pair):
    started, planned = codes_of(pair.packed)
    assert started == planned


@pytest.mark.parametrize(
    "pair",
    slow_but([*FORMATS, *GGUF_FORMATS], "fp8-block-hybrid-moe", "gguf-llama-tied"),
    indirect=True,
    scope="module",
)
def test_packed_weights_write_the_same_tokens(pair):
    expected = tokens(loaded(pair.dense))
    assert tokens(loaded(pair.packed, "none")) == expected
    assert tokens(loaded(pair.packed, "keep")) == expected


# Four bits in the order of a card's kernel, once it was measured

MXFP4 = {**packers.FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
TILES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def gguf_of(kind):
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return GgufFormat("llama", "llama", TILES, dict.fromkeys(names, kind))


IN_WORDS = {
    "nvfp4-modelopt": (FORMATS["nvfp4-modelopt"], "nvfp4"),
    "nvfp4-awq": (replace(FORMATS["nvfp4-awq-moe"], family="qwen3"), "nvfp4"),
    "nvfp4-compressed": (replace(FORMATS["nvfp4-compressed-moe"], family="qwen3"), "nvfp4"),
    "mxfp4-compressed": (
        Format(
            "qwen3",
            {},
            compress("mxfp4-pack-quantized", MXFP4),
            compressed("mxfp4-pack-quantized", MXFP4),
        ),
        "mxfp4",
    ),
    "gptq-symmetric": (FORMATS["gptq-symmetric"], "int4"),
    "awq-biases": (FORMATS["awq-biases"], "int4"),
    "auto-round-unnamed": (FORMATS["auto-round-unnamed"], "int4"),
    "int4-compressed": (
        replace(FORMATS["int4-asymmetric"], pack=lambda weight, seed: compress_in_half(weight)),
        "int4",
    ),
    "gguf-q4_0": (gguf_of(packers.Type.Q4_0), "q4_0"),
    "gguf-q4_1": (gguf_of(packers.Type.Q4_1), "q4_1"),
    "gguf-q8_0": (gguf_of(packers.Type.Q8_0), "q8_0"),
}


def in_tiles(folder, name):
    """The pair of files of IN_WORDS[name], whose projections are whole tiles."""
    form, _ = IN_WORDS[name]
    if isinstance(form, GgufFormat):
        return GgufPair(folder, form)
    return Pair(folder, replace(form, overrides={**TILES, "attention_bias": name == "awq-biases"}))


def compress_in_half(weight):
    """As compressed-tensors writes a model in half precision."""
    tensors, _ = packers.compress("pack-quantized", W4_ASYMMETRIC, weight)
    scale = tensors[".weight_scale"].half()
    scheme = CompressedIntScheme("int4", 4, 16, is_symmetric=False)
    tensors[".weight_scale"] = scale
    return tensors, scheme.pack(tensors, tuple(weight.shape)).dequantise(torch.float32)


@pytest.mark.parametrize(
    "name",
    slow_but(
        list(IN_WORDS),
        "nvfp4-modelopt",
        "mxfp4-compressed",
        "awq-biases",
        "int4-compressed",
        "gguf-q4_1",
        "gguf-q8_0",
    ),
)
def test_files_of_four_bits_become_words_that_are_the_dense_weights(tmp_path, name, monkeypatch):
    pair, code = in_tiles(tmp_path, name), IN_WORDS[name][1]
    if not name.startswith("gguf"):  # most of these small files is no block
        assert codes_of(pair.packed) == [code, code]
    before = loaded(pair.packed, "keep", dtype="bfloat16")
    assert not any(isinstance(weight, Words) for _, weight in top_packed(before[0].target))
    monkeypatch.setitem(MEASURED, ((0, 0), code), KernelSpeed(16))
    kept, dense = (loaded(pair.packed, storage, dtype="bfloat16") for storage in ("keep", "none"))
    weights = dict(top_packed(kept[0].target))
    num_layers = dense[0].config.num_layers
    assert len(weights) == num_layers * 4, "qkv, out, gate and up, down of each layer"
    # With factors of their own, projections of one input stay apart, in groups.
    found = {type(weight) for weight in weights.values()}
    assert found == ({Words, Stacked} if name == "nvfp4-awq" else {Words})
    assert same(logits(kept), logits(dense))
    for path, weight in weights.items():
        expected = dense[0].target.get_submodule(path.removesuffix(".weight")).weight
        assert same(weight.dequantise(torch.bfloat16), expected.data)
    both = loaded_as("both", pair.packed)
    assert same(logits(both), logits(dense))
    found = dict(top_packed(both[0].target))
    assert found.keys() == {path for path, weight in weights.items() if isinstance(weight, Words)}
    linears = [part for part in both[0].target.modules() if isinstance(part, Linear)]
    whys = {part.why_unpacked for part in linears}
    assert whys == ({"", "parts with column factors of their own"} if name == "nvfp4-awq" else {""})
    named = " ".join(
        slower_parts(both[0].with_kernels(kernels_for(torch.bfloat16, torch.device("cuda"))), both[1])
    )
    assert ("weights are held unpacked only" in named) == (name == "nvfp4-awq")
    for path, weight in found.items():
        expected = dense[0].target.get_submodule(path.removesuffix(".weight")).weight
        assert same(weight.weight.values, expected.data)
        assert same(weight.stored().dequantise(torch.bfloat16), expected.data)


# What cannot be read is refused, with the checkpoint and the module in the message


def refusal(folder, **settings):
    with pytest.raises(ModelError) as caught:
        loaded(folder, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"'{folder}'")
    return message


GATE = "model.layers.1.mlp.gate_proj"
Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.1.mlp.experts.down_proj"
REFUSALS = {
    "a scale is missing": (
        "fp8-block",
        {f"{GATE}.weight_scale_inv": None},
        f"'{GATE}.weight_scale_inv' (packed",
    ),
    "a grid has another shape": (
        "fp8-block",
        {f"{GATE}.weight_scale_inv": torch.ones(3, 2)},
        f"'{GATE}.weight_scale_inv' has shape [3, 2], but config.json asks for [2, 2]",
    ),
    "a scale has another dtype": (
        "nvfp4-modelopt",
        {f"{GATE}.weight_scale": torch.ones(48, 2)},
        f"'{GATE}.weight_scale' is stored as float32, expected float8_e4m3fn",
    ),
    "factors that are not announced": (
        "nvfp4-modelopt",
        {f"{GATE}.pre_quant_scale": torch.ones(32, dtype=torch.bfloat16)},
        f"1 tensors that .* '{GATE}.pre_quant_scale'",
    ),
    "a tensor is left over": (
        "awq-biases",
        {f"{GATE}.g_idx": torch.ones(32)},
        f"1 tensors that .* '{GATE}.g_idx'",
    ),
    "a bias says something": (
        "gptq-symmetric",
        {f"{GATE}.bias": torch.arange(48.0)},
        f"1 tensors that .* '{GATE}.bias'",
    ),
    "zero points are not symmetric": (
        "auto-round-unnamed",
        {f"{Q}.qzeros": torch.full((2, 8), 0x12345678, dtype=torch.int32)},
        f"'{Q}': .*sym = true",
    ),
    "a group does not exist": (
        "gptq-reordered",
        {f"{Q}.g_idx": torch.full((32,), 2, dtype=torch.int32)},
        f"'{Q}': .*g_idx names group 2",
    ),
    "another shape was packed": (
        "int4-asymmetric",
        {f"{Q}.weight_shape": torch.tensor([64, 31])},
        f"'{Q}': .*31",
    ),
    "a global scale is zero": (
        "nvfp4-compressed-moe",
        {"model.layers.1.mlp.experts.3.up_proj.weight_global_scale": torch.zeros(1)},
        r"'model\.layers\.1\.mlp\.experts\.3\.up_proj': .*weight_global_scale is 0",
    ),
    "a scale is no number": (
        "int4-asymmetric",
        {f"{Q}.weight_scale": torch.full((64, 2), float("nan"))},
        f"'{Q}': .*weight_scale holds infinite or undefined values",
    ),
    "an fp8 scale is no number": (
        "nvfp4-modelopt",
        {f"{GATE}.weight_scale": torch.full((48, 2), float("nan")).to(torch.float8_e4m3fn)},
        f"'{GATE}': .*weight_scale holds infinite or undefined values",
    ),
    "a scale for the matrix is infinite": (
        "nvfp4-modelopt",
        {f"{GATE}.weight_scale_2": torch.tensor(float("inf"))},
        f"'{GATE}': .*weight_scale_2 holds infinite or undefined values",
    ),
    "a block scale is no number": (
        "mxfp4-gpt-oss",
        {f"{DOWN}_scales": torch.full((5, 32, 2), 255, dtype=torch.uint8)},
        f"'{DOWN}': a block scale is 255",
    ),
}


@pytest.mark.parametrize("storage", slow_but(["keep", "none"], "keep"))
@pytest.mark.parametrize("case", REFUSALS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, case, storage):
    name, changes, words = REFUSALS[case]
    pair = write_pair(tmp_path, name)
    tensors = {key: value for key, value in (pair.tensors | changes).items() if value is not None}
    pair.write(tensors)
    assert re.search(words if ".*" in words else re.escape(words), refusal(pair.packed, quantization=storage))


def test_biases_of_zeros_that_gptq_writes_are_passed_over(tmp_path):
    pair = write_pair(tmp_path, "gptq-symmetric")
    pair.write(pair.tensors | {f"{GATE}.bias": torch.zeros(48), f"{Q}.bias": torch.zeros(64)})
    assert tokens(loaded(pair.packed, "keep")) == tokens(loaded(pair.dense))


def change_config(folder, **changes):
    file = folder / "config.json"
    config = {k: v for k, v in (json.loads(file.read_text()) | changes).items() if v is not None}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["fp8-block", "mxfp4-gpt-oss"])
def test_a_quantised_file_without_its_configuration_is_refused(tmp_path, name):
    pair = write_pair(tmp_path, name)
    change_config(pair.packed, quantization_config=None)
    message = refusal(pair.packed)
    if name.startswith("fp8"):
        assert "is stored as float8_e4m3fn, expected bfloat16" in message
    else:
        assert "has no tensor 'model.layers.0." in message


@pytest.mark.parametrize(("family", "module"), [("llama", GATE), ("qwen3_moe", DOWN)])
def test_a_weight_that_cannot_be_quantised_is_named(tmp_path, family, module):
    write_target(tmp_path, CONFIGS[family](**BASE | (MOE if family == "qwen3_moe" else {})), seed=3)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(tensors) if re.match(module.replace("experts.", "experts.*"), name))
    tensors[name][-1, ..., -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    assert f"'{name.removesuffix('.weight')}': a weight holds" in refusal(tmp_path, quantization="fp8")


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    pair = write_pair(tmp_path, "fp8-block")
    with pytest.raises(SettingsError, match="quantization = int8, but the checkpoint is quantised"):
        loaded(pair.packed, "int8")


@pytest.mark.parametrize("name", slow_but(["gguf-llama-tied", "gguf-qwen3moe"], "gguf-llama-tied"))
@pytest.mark.parametrize("storage", ["fp8", "int8", "int4"])
def test_a_gguf_file_is_quantised_from_its_values(tmp_path, name, storage, monkeypatch):
    """As the same values in a file of floats are. Only a GGUF file may be: it is what many models come in."""
    monkeypatch.setattr("blockdraft.checkpoints.weights.why_no_llvm", lambda *_: "as on a card")
    pair = write_pair(tmp_path, name)
    found, expected = (loaded_as(storage, folder) for folder in (pair.packed, pair.dense))
    assert same(logits(found), logits(expected))
    packed, plain = (dict(top_packed(one[0].target)) for one in (found, expected))
    assert packed.keys() == plain.keys()
    assert len(packed) >= 2 * 4
    for path, weight in packed.items():
        assert same(weight.dequantise(torch.bfloat16), plain[path].dequantise(torch.bfloat16))


def test_projections_left_plain_without_being_listed_are_read_as_they_are(tmp_path):
    """Exporters do so where a shape does not fit the format: 20 columns of down_proj are no groups of 16."""
    form = replace(FORMATS["nvfp4-modelopt-moe"], overrides=MOE, modules=r".*\.(k|v|gate|up)_proj")
    pair = Pair(tmp_path, form)
    assert pair.tensors["model.layers.0.mlp.experts.0.down_proj.weight"].shape == (32, 20)
    assert same(logits(loaded(pair.packed, "keep")), logits(loaded(pair.dense)))


# Quantised by us


def by_rows(weight, storage):
    """The weight [..., rows, columns] as it is after quantisation, by the definition of each storage."""
    largest = {"fp8": 448.0, "int8": 127.0}[storage]
    scale = weight.float().abs().amax(-1, keepdim=True) / largest
    scaled = weight.float() / scale
    codes = scaled.to(torch.float8_e4m3fn) if storage == "fp8" else scaled.round()
    return codes.float() * scale


ALL_PROJECTIONS = r".*\.((q|k|v|o|gate|up|down|out)_proj|in_proj_\w+)(\.weight)?|.*\.gate_up_proj|fc\.weight"
RUN_TIME = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3_moe": MOE,
    "qwen3_5_moe": {**HYBRID, **MOE, **SHARED_EXPERT},
    "gpt_oss": GPT_OSS,
}


def quantised_twin(folder, twin, storage, dtype):
    """Rewrite `folder` in `dtype`, and `twin` with the weights that quantisation leaves, in float32."""
    shutil.copytree(folder, twin)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    changed = {name: tensor.float() for name, tensor in tensors.items()}
    for name, weight in changed.items():
        if re.fullmatch(ALL_PROJECTIONS, name):
            is_transposed = weight.ndim == 3  # gpt-oss alone
            weight = weight.transpose(1, 2) if is_transposed else weight
            found = by_rows(weight, storage)
            changed[name] = (found.transpose(1, 2) if is_transposed else found).contiguous()
    save_file(tensors, folder / "model.safetensors")
    save_file(changed, twin / "model.safetensors")


@pytest.mark.parametrize("storage", slow_but(["fp8", "int8"], "int8"))
@pytest.mark.parametrize("family", RUN_TIME)
def test_a_target_quantised_at_load_has_the_logits_of_the_quantised_weights(
    tmp_path, family, storage, monkeypatch
):
    monkeypatch.setattr("blockdraft.checkpoints.weights.why_no_llvm", lambda *_: "as on a card")
    folder, twin = tmp_path / "plain", tmp_path / "twin"
    write_target(folder, CONFIGS[family](**BASE | RUN_TIME[family]), seed=5)
    quantised_twin(folder, twin, storage, torch.bfloat16 if storage == "fp8" else torch.float32)
    found = loaded(folder, storage)
    assert same(logits(found), logits(loaded(twin)))
    assert tokens(found) == tokens(loaded(twin))
    projections = {
        name
        for name, module in found[0].target.named_modules()
        if isinstance(module, Linear | ExpertLinear) and not re.search("head|router", name)
    }
    packed = {name.removesuffix(".weight") for name, module in top_packed(found[0].target)}
    assert packed == projections


def top_packed(model):
    """Packed weights by name, without the parts that they are made of."""
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, Packed)]
    return [(name, module) for name, module in packed if ".parts" not in name]


@pytest.fixture
def pair_folders(tmp_path):
    for part in ("target", "draft"):
        shutil.copytree(make_pair.FOLDER / part, tmp_path / part)
    return tmp_path / "target", tmp_path / "draft"


QUANTISED_PAIRS = slow_but(
    [("none", "int8"), ("fp8", "none"), ("fp8", "int8"), ("int8", "fp8")], ("int8", "fp8")
)


@pytest.mark.parametrize(("storage", "draft_storage"), QUANTISED_PAIRS)
def test_a_quantised_drafter_changes_no_token(pair_folders, storage, draft_storage):
    target, draft = pair_folders
    plain = loaded(target, storage)
    assert not isinstance(plain[0].drafter, DFlashDrafter)
    both = loaded(target, storage, draft=draft, draft_quantization=draft_storage)
    assert bool(top_packed(both[0].target)) == (storage != "none")
    assert bool(top_packed(both[0].drafter.model)) == (draft_storage != "none")
    assert tokens(both) == tokens(plain)


@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_a_drafter_quantised_at_load_has_the_quantised_weights(pair_folders, storage, monkeypatch):
    monkeypatch.setattr("blockdraft.checkpoints.weights.why_no_llvm", lambda *_: "as on a card")
    target, draft = pair_folders
    twin = draft.with_name("twin")
    quantised_twin(draft, twin, storage, torch.float32)
    quantised, dense = loaded(target, draft=draft, draft_quantization=storage), loaded(target, draft=twin)
    assert run(quantised) == run(dense)
    found, expected = quantised[0].drafter.model, dense[0].drafter.model
    linears = {name for name, module in expected.named_modules() if isinstance(module, Linear)}
    packed = {name.removesuffix(".weight"): module for name, module in top_packed(found)}
    assert packed.keys() == linears
    for name, module in packed.items():
        assert same(module.dequantise(torch.float32), expected.get_submodule(name).weight.data), name


def test_a_packed_drafter_drafts_as_its_dense_weights_do(pair_folders):
    target, draft = pair_folders
    dense = draft.with_name("dense")
    shutil.copytree(draft, dense)
    plain, stored = load_file(draft / "model.safetensors"), {}
    for name, weight in plain.items():
        if re.fullmatch(ALL_PROJECTIONS, name):
            tensors, plain[name] = compress("float-quantized", FP8_CHANNEL)(weight, 0)
            stored |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in tensors.items()}
        else:
            stored[name] = weight
    save_file(plain, dense / "model.safetensors")
    save_file(stored, draft / "model.safetensors")
    change_config(draft, quantization_config=compressed("float-quantized", FP8_CHANNEL))
    expected = run(loaded(target, draft=dense))
    assert sum(expected[1]) > 0
    assert run(loaded(target, draft=draft, draft_quantization="keep")) == expected
    assert run(loaded(target, draft=draft, draft_quantization="none")) == expected
    assert expected[0] == tokens(loaded(target))
    with pytest.raises(SettingsError, match="draft_quantization = int8, but the checkpoint is quantised"):
        loaded(target, draft=draft, draft_quantization="int8")
