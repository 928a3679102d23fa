"""Random weights: config.json is enough, every family computes, and nothing passes for the real thing."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from blockdraft.check.selfcheck import verify_engine
from blockdraft.checkpoints import fetch
from blockdraft.checkpoints.dummy import byte_tokenizer, vocab_map
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.engine.describe import engine_info
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.errors import ModelError, SettingsError
from blockdraft.kernels.packed_speeds import MEASURED, KernelSpeed
from blockdraft.models.packed import Packed, Scaled
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.models.packed_words import Words
from blockdraft.settings.settings import Settings
from blockdraft.start import loading
from blockdraft.start.loading import load_models, resolve_device
from blockdraft.text.tokenizer import Tokenizer
from tests import tiny
from tests.checkpoints.gguf_files import QUANTISED, write
from tests.fixtures.make_pair import draft_config
from tests.matrix import slow_but
from tests.models.checkpoints import write_target
from tests.models.families import BASE, CASES, CONFIGS

# Between them: every kind of layer, and so every parameter that needs a value of its own.
FAMILIES = ["llama-biases", "qwen3-slides", "qwen3_moe-some-dense", "qwen3_next-whole", "qwen3_5-whole"]
FAMILIES += ["qwen3_5_moe-tied", "gemma4-keys-are-values", "gemma4-mixture", "gemma4-shared", "gpt_oss-whole"]
SMALL = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2}


def ignore(*_):
    pass


def dummy(model, draft=None, **settings):
    settings = {**SMALL, "dtype": "float32", "load_format": "dummy", **settings}
    draft = None if draft is None else str(draft)
    return load_models(Settings(model=str(model), draft=draft, **settings), ignore)[0]


def dummy_engine(model, draft=None, num_pages=None, **settings):
    settings = {**SMALL, "dtype": "float32", "load_format": "dummy", **settings}
    models, plan = load_models(Settings(model=str(model), draft=draft, **settings), ignore)
    return Engine(models, plan if num_pages is None else replace(plan, num_pages=num_pages))


def bare(source, folder):
    """A folder with the config.json of another and nothing else."""
    folder.mkdir()
    shutil.copy(f"{source}/config.json", folder)
    return folder


def named(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# ---- what is needed, and what is not


def test_config_json_is_all_that_a_pair_needs(tmp_path):
    target, draft = bare(tiny.TARGET, tmp_path / "target"), bare(tiny.DRAFT, tmp_path / "draft")
    engine = dummy_engine(target, str(draft))
    ((tokens, text, reason),) = tiny.run(engine, [([1, 2, 3], SamplingParams(max_tokens=9))])[0]
    assert (len(tokens), reason) == (9, "length")
    assert text == Tokenizer(byte_tokenizer(64)).decode(tokens)
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        load_models(Settings(model=str(target), **SMALL), ignore)


def test_weights_that_are_there_are_neither_read_nor_checked(tmp_path):
    folder = shutil.copytree(tiny.TARGET, tmp_path / "target")
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(b"damaged")
    whole, damaged = dummy(tiny.TARGET), dummy(folder)
    for name, value in named(whole.target).items():
        torch.testing.assert_close(named(damaged.target)[name], value, rtol=0, atol=0)
    assert whole.tokenizer.encode("t1 t2") == damaged.tokenizer.encode("t1 t2") == [1, 2]
    real = tiny.load("float32").target
    assert not torch.equal(whole.target.embedding.weight, real.embedding.weight)


def test_of_a_hub_id_only_the_small_files_are_fetched(monkeypatch, tmp_path):
    asked = []

    def download(repo, **kwargs):
        asked.append(kwargs["allow_patterns"])
        return str(bare(tiny.TARGET, tmp_path / f"hub{len(asked)}"))

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    dummy("some/model")
    assert {"config.json", "hf_quant_config.json", "tokenizer.json", "chat_template.jinja"} <= set(asked[0])
    assert not any("safetensors" in pattern for pattern in asked[0])
    fetch.hub_folder("some/model", revision=None)
    assert set(asked[1]) - set(asked[0]) == {"*.safetensors", "model.safetensors.index.json"}


# ---- the weights


@pytest.mark.parametrize("name", slow_but(FAMILIES, "qwen3_next-whole", "gemma4-mixture", "gpt_oss-whole"))
def test_every_family_passes_the_checks_of_the_start(name, tmp_path):
    family, overrides = CASES[name]
    write_target(tmp_path, CONFIGS[family](**BASE | overrides), seed=5)
    engine = dummy_engine(tmp_path, num_pages=60)
    assert all(value.device.type == "cpu" for value in named(engine.models.target).values())
    found = verify_engine(engine, ignore)
    assert "model" in [check.name for check in found.checks]


@pytest.mark.parametrize("storage", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["qwen3_moe-plain", "qwen3_next-whole"])
def test_what_is_quantised_and_how_is_as_in_loading(name, storage, tmp_path):
    family, overrides = CASES[name]
    write_target(tmp_path, CONFIGS[family](**BASE | overrides), seed=5)
    random = dummy(tmp_path, quantization=storage).target
    settings = Settings(model=str(tmp_path), dtype="float32", quantization=storage, **SMALL)
    loaded = load_models(settings, ignore)[0].target

    def layout(module):
        kinds = {name: type(part) for name, part in module.named_modules() if isinstance(part, Packed)}
        return kinds, {name: (value.shape, value.dtype) for name, value in named(module).items()}

    assert layout(random) == layout(loaded)
    assert {Scaled, Int8Matrix} & set(layout(random)[0].values())


def test_a_slice_at_a_time_draws_and_scales_every_row(monkeypatch, tmp_path):
    from blockdraft.checkpoints import dummy as dummy_module

    monkeypatch.setattr(dummy_module, "_SLICE_BYTES", 400)  # three rows of 32
    monkeypatch.setattr("blockdraft.checkpoints.weights.why_no_llvm", lambda *_: "as on a card")
    target = dummy(tiny.TARGET, quantization="int8").target
    down = target.layers[0].mlp.down.weight
    assert isinstance(down, Scaled)
    rows = down.dequantise(torch.float64)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    assert bool((down.values.abs().amax(dim=-1) == 127).all())
    share = 32**-0.5 * (2 * len(target.layers)) ** -0.5
    assert float(rows.std()) == pytest.approx(share * rows.shape[1] ** -0.5, rel=0.1)


def test_two_starts_are_equal_and_no_two_parameters_are(tmp_path):
    first, second = (named(dummy(tiny.TARGET).target) for _ in range(2))
    matrices = {name: value for name, value in first.items() if name.endswith("weight") and value.ndim > 1}
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    beginnings = {tuple(value.flatten()[:8].div(value.std()).tolist()) for value in matrices.values()}
    assert len(beginnings) == len(matrices) > 8


def test_drafts_of_a_block_differ(tmp_path):
    """Equal tokens would read far fewer experts than the drafts of a real drafter."""
    engine = dummy_engine(tiny.TARGET, tiny.DRAFT, width=8, synthetic_acceptance="0.9")
    blocks, draft = [], engine.models.drafter.draft

    def watched(*args):
        blocks.append(draft(*args)[0].tolist())
        return draft(*args)

    engine.models.drafter.draft = watched
    tiny.run(engine, [([5, 9, 2, 33, 17], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))])
    distinct = [len(set(block[1:])) for block in blocks]
    assert sum(distinct) / len(distinct) > 3  # of seven


def test_a_reduced_head_gets_a_map_of_its_own(tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(draft_config() | {"draft_vocab_size": 24}))
    drafter = dummy(tiny.TARGET, draft).drafter
    assert drafter.model.head.weight.shape[0] == 24
    ids = drafter.vocab_map.tolist()
    assert len(set(ids)) == 24
    assert (min(ids), max(ids) < 64) == (0, True)
    assert vocab_map(64, 64, torch.device("cpu")) is None


# ---- what is said of it


def test_the_engine_says_that_it_is_for_timing_only():
    info = engine_info(dummy_engine(tiny.TARGET, tiny.DRAFT, synthetic_acceptance="mean:3"))
    assert (info.is_dummy, info.synthetic_acceptance) == (True, "mean:3")
    assert len(info.notices) == 2
    assert all(notice.endswith("for timing only") for notice in info.notices)
    info = engine_info(tiny.engine())
    assert (info.is_dummy, info.synthetic_acceptance, info.notices) == (False, None, ())


def test_real_weights_with_synthetic_acceptance_are_labelled_too():
    settings = Settings(model=tiny.TARGET, draft=tiny.DRAFT, synthetic_acceptance="0.5", **SMALL)
    models = load_models(settings, ignore)[0]
    assert (models.labels.is_dummy, models.labels.synthetic_acceptance) == (False, "0.5")
    assert models.rates == (0.5, 0, 0, 0, 0, 0, 0)
    (notice,) = models.labels.notices
    assert "not the model's" in notice


def test_a_quantised_checkpoint_is_unpacked_and_that_is_said(tmp_path):
    folder = bare(tiny.TARGET, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    for asked, planned in (("auto", "none"), ("keep", "none"), ("int8", "int8")):
        engine = dummy_engine(folder, quantization=asked)
        assert engine.plan.quantization == planned
        assert any("fp8" in notice for notice in engine.models.labels.notices)


def test_both_forms_are_int4_beside_its_values(tmp_path, monkeypatch):
    """So that a card can time them without files; only where int4 was measured."""
    tiles = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    write_target(tmp_path / "target", CONFIGS["qwen3"](**BASE | tiles), seed=3)
    with pytest.raises(SettingsError, match="quantization = both, but on this device no kernel was measured"):
        dummy(tmp_path / "target", quantization="both")
    monkeypatch.setitem(MEASURED, ((0, 0), "int4"), KernelSpeed(16))
    settings = Settings(model=str(tmp_path / "target"), dtype="bfloat16", load_format="dummy", **SMALL)
    opened = loading.open_models(settings, ignore)
    opened = replace(opened, plan=replace(opened.plan, quantization="both"))
    target = loading.read_weights(opened, ignore).target
    words = [part.weight for part in target.modules() if isinstance(getattr(part, "weight", None), Words)]
    assert len(words) == 4 * opened.target.config.num_layers
    for one in words:
        assert one.weight.code == "int4"
        assert torch.equal(one.weight.values, one.stored().dequantise(torch.bfloat16))


def test_a_gguf_gives_its_shape_and_its_tokenizer(tmp_path):
    path = write(tmp_path / "a.gguf", kinds=QUANTISED)
    engine = dummy_engine(path)
    models = engine.models
    assert engine.plan.quantization == "none"
    assert [notice.split(":")[0] for notice in models.labels.notices] == [
        "weights are random",
        "the checkpoint is quantised (GGUF), its dummy weights are not",
    ]
    assert models.tokenizer.encode("ab") == Tokenizer(open_checkpoint(path).tokenizer_parts()).encode("ab")
    assert len(tiny.run(engine, [([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))])[0][0][0]) == 3


# ---- acceptance


def test_committed_tokens_follow_the_profile():
    engine = dummy_engine(tiny.TARGET, tiny.DRAFT, width=8, synthetic_acceptance="mean:3", max_num_seqs=16)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    tiny.run(engine, [([1 + number, 2], params) for number in range(32)])
    found = engine.snapshot()
    assert 1 + found.num_accepted / found.num_drafts == pytest.approx(3, abs=0.25)


def test_a_profile_that_the_drafters_block_cannot_hold_stops_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(loading, "read_weights", None)
    with pytest.raises(SettingsError, match="commits at most 8"):
        dummy(tiny.TARGET, tiny.DRAFT, synthetic_acceptance="mean:9")


def test_the_drafter_stays_although_it_knows_nothing():
    notes = []
    found = verify_engine(dummy_engine(tiny.TARGET, tiny.DRAFT), notes.append)
    assert found.keeps_drafter
    assert found.tokens_per_step < 1.2
    assert "drafter" in [check.name for check in found.checks]
    found = verify_engine(dummy_engine(tiny.TARGET, tiny.DRAFT, synthetic_acceptance="0.1"), notes.append)
    assert (found.keeps_drafter, found.tokens_per_step) == (True, None)
    assert notes[-1] == "drafter: not checked, since acceptance is synthetic"


# ---- a tokenizer of bytes


def test_bytes_come_back_and_other_tokens_show_as_numbers():
    tokenizer = Tokenizer(byte_tokenizer(1000))
    ids = tokenizer.encode("naïve 300\n")
    assert max(ids) < 256
    assert len(ids) == len("naïve 300\n".encode())
    assert tokenizer.decode(ids) == "naïve 300\n"
    assert tokenizer.decode([300, *ids[:2], 999]) == " 300na 999"
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "hi\n"
    assert tokenizer.eos_ids == ()


def test_a_folder_without_a_tokenizer_is_said_to_have_none(tmp_path):
    folder = bare(tiny.TARGET, tmp_path / "target")
    models = dummy(folder)
    assert any("no tokenizer" in notice for notice in models.labels.notices)
    assert not any("no tokenizer" in notice for notice in dummy(tiny.TARGET).labels.notices)
    assert not open_checkpoint(folder, needs_weights=False).has_tokenizer
    (folder / "tokenizer.json").write_text("damaged")
    with pytest.raises(ModelError, match="cannot be read"):
        dummy(folder)


# ---- the device


@pytest.mark.parametrize("has_cuda", [True, False])
def test_auto_takes_the_gpu_where_there_is_one(monkeypatch, has_cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert resolve_device("auto") == ("cuda" if has_cuda else "cpu")
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("cuda:1") == "cuda:1"
