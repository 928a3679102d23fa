"""A start with the MTP head of the target's own checkpoint: asked for, taken by "auto", or left out."""

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.cli.main import main
from blockdraft.engine.describe import engine_info
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.errors import ModelError, SettingsError
from blockdraft.llm import LLM
from blockdraft.machine.machine import Machine
from blockdraft.phases import StartProgress
from blockdraft.planner.memory_fit import fit_native
from blockdraft.planner.pair import Case, drafts, open_pair
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models, open_models
from blockdraft.start.start_engine import start_engine
from blockdraft.step.drafter import NoDrafter
from blockdraft.step.mtp import MtpDrafter
from tests import tiny
from tests.checkpoints.quantised import FP8_SECTION, W4, blockwise, compress, compressed
from tests.matrix import slow_but
from tests.models.mtp import change_config, change_tensors, write_mtp_target

SMALL = {"device": "cpu", "dtype": "float32", "max_model_len": 100, "max_num_seqs": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[3, 5, 7], [8, 13, 2, 40]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_mtp_target(folder, "qwen3_5-mrope")
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy to change."""
    return shutil.copytree(whole, tmp_path / "target")


def load(folder, **settings):
    """The pair, its plan, and the lines of its start."""
    lines = []
    models, plan = load_models(Settings(model=str(folder), **SMALL | settings), lines.append)
    return models, plan, lines


def fit_of(folder, **asked):
    settings = Settings(model=str(folder), **SMALL | asked)
    return fit_native(Case(settings, Machine(memory_bytes=8 << 30), open_pair(settings)))


# ---- a head that fits


def test_auto_takes_it_and_says_so(whole):
    models, plan, lines = load(whole)
    assert isinstance(models.drafter, MtpDrafter)
    assert (models.draft_name, plan.block) == ("mtp", 8)
    assert plan.reasons["draft"] == "the model's own MTP head, as no drafter ships for it"
    assert "the model's own MTP head drafts" in lines
    assert drafts(Settings(model=str(whole)))
    plain, _, lines = load(whole, draft="none")
    assert isinstance(plain.drafter, NoDrafter)
    assert not [line for line in lines if "MTP" in line]


@pytest.mark.parametrize("asked", slow_but(["mtp", "auto"], "mtp"))
def test_a_start_verifies_it_and_the_answers_are_those_without_it(whole, asked):
    startup = StartProgress()
    settings = Settings(model=str(whole), draft=asked, width=4, verify="full", **SMALL)
    engine = start_engine(settings, startup)
    info = engine_info(engine)
    assert (info.draft, info.draft_kind, info.block) == ("mtp", "MTP", 8)
    assert info.draft_title.startswith("MTP head of ")
    assert 0 < info.draft_bytes < info.target_bytes
    assert not [one for one in startup.warnings if "drafter" in one]
    expected = LLM(str(whole), "none", verify="off", **SMALL).generate(PROMPTS, PARAMS)
    found, _ = tiny.watched_run(engine, [(prompt, PARAMS) for prompt in PROMPTS])
    assert [choices[0][0] for choices in found] == [list(one.token_ids) for one in expected]
    assert engine.stats.num_emitted > engine.stats.num_blocks


def test_a_width_beyond_the_usual_one_is_allowed(whole):
    assert load(whole, draft="mtp", width=12)[1].block == 12
    assert fit_of(whole, draft="mtp", width=12).plan.block == 12


def test_it_drafts_beside_n_grams(whole):
    models, plan, _ = load(whole, draft="mtp", draft_ngram=1, width=6)
    requests = [([4, 5, 6] * 6, PARAMS)]
    engine = Engine(models, plan)
    assert tiny.run(engine, requests) == tiny.run(Engine(load(whole, draft="none")[0], plan), requests)


@pytest.mark.parametrize(
    "kept", [{"kv_dtype": "int8"}, {"kv_dtype": "tq4", "draft_kv_dtype": "tq4"}], ids=str
)
def test_it_drafts_with_compressed_keys(whole, kept):
    models, plan, _ = load(whole, draft="mtp", max_model_len=300, kv_window=16, **kept)
    requests = [([(7 * i) % 90 for i in range(200)], PARAMS)]
    plain = Engine(
        load(whole, draft="none", max_model_len=300, kv_window=16, kv_dtype=kept["kv_dtype"])[0], plan
    )
    assert tiny.run(Engine(models, plan), requests) == tiny.run(plain, requests)


def test_random_weights_need_no_file(whole, tmp_path):
    shutil.copy(whole / "config.json", tmp_path)
    models, _, _ = load(tmp_path, draft="mtp", load_format="dummy")
    assert isinstance(models.drafter, MtpDrafter)
    assert fit_of(tmp_path, draft="mtp", load_format="dummy").plan.block == 8


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_it_is_quantised_while_loading(whole, form):
    weights, answers = [], []
    for draft_quantization in ("none", form):
        models, plan, _ = load(whole, draft="mtp", draft_quantization=draft_quantization)
        weights.append(type(models.drafter.model.fc.weight).__name__)
        answers.append(tiny.run(Engine(models, plan), [(prompt, PARAMS) for prompt in PROMPTS]))
    assert weights[0] == "Parameter"
    assert weights[1] != "Parameter"
    assert answers[0] == answers[1]


def pack(tensors, modules, how=blockwise):
    """Round these projections, to fp8 in blocks, as a checkpoint stores them."""
    found = dict(tensors)
    for seed, module in enumerate(modules):
        stored, _ = how(found.pop(f"{module}.weight"), seed)
        found |= {module + suffix: tensor.contiguous() for suffix, tensor in stored.items()}
    return found


def projections(folder, begin):
    names = load_file(folder / "model.safetensors")
    found = [name.removesuffix(".weight") for name in names if name.startswith(begin) and "proj" in name]
    assert found
    return found


@pytest.mark.parametrize("is_head_packed", [False, True])
def test_the_head_of_a_quantised_checkpoint_loads(folder, is_head_packed):
    """A head beside packed weights is often plain, and no exporter lists it."""
    begin = "mtp.layers" if is_head_packed else "model.layers.0.self_attn"
    change_tensors(folder, functools.partial(pack, modules=projections(folder, begin)))
    change_config(folder, quantization_config=FP8_SECTION)
    for how in ("none", "keep"):
        models, plan, _ = load(folder, draft="mtp", quantization=how, draft_quantization=how)
        is_kept = how == "keep" and is_head_packed
        assert (type(models.drafter.model.layer.mlp.down.weight).__name__ == "Scaled") is is_kept
        assert isinstance(models.drafter.model.fc.weight, torch.nn.Parameter)
        [[(tokens, _, _)]] = tiny.run(Engine(models, plan), [([3, 4, 5], PARAMS)])
        assert len(tokens) == 20


def test_a_start_and_a_plan_know_the_code_of_a_packed_head(folder):
    named = projections(folder, "mtp.layers")
    change_tensors(folder, functools.partial(pack, modules=named, how=compress("pack-quantized", W4)))
    change_config(folder, quantization_config=compressed("pack-quantized", W4))
    settings = Settings(model=str(folder), draft="mtp", **SMALL)
    assert open_models(settings, lambda _: None).draft.weights.code == "int4"
    assert open_pair(settings).draft.code == "int4"


# ---- a head that is refused


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if not key.startswith(name)}


def replaced(name, change):
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


BROKEN = {
    "missing": (without("mtp."), "no tensor 'mtp.fc.weight'"),
    "cut": (without("mtp.layers.0.self_attn.k_norm"), "'mtp.layers.0.self_attn.k_norm.weight'"),
    "of another width": (
        replaced("mtp.fc.weight", lambda fc: fc[:, ::2]),
        "'mtp.fc.weight' has shape [32, 32]",
    ),
    "of two layers": (
        lambda tensors: tensors | {"mtp.layers.1.input_layernorm.weight": torch.ones(32)},
        "'mtp.layers.1.input_layernorm.weight'",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_head_that_does_not_fit_is_refused_by_its_tensor_and_auto_serves_without_it(folder, broken):
    change, told = BROKEN[broken]
    change_tensors(folder, change)
    with pytest.raises(ModelError) as refused:
        load(folder, draft="mtp")
    assert told in str(refused.value)
    models, plan, lines = load(folder)
    assert isinstance(models.drafter, NoDrafter)
    assert (plan.block, models.draft_config) == (1, None)
    [line] = [line for line in lines if "MTP" in line]
    assert told in line
    assert tiny.run(Engine(models, plan), [([3, 4], PARAMS)])


@pytest.mark.parametrize("broken", [one for one in BROKEN if one != "of two layers"])
def test_a_plan_has_no_head_where_a_start_has_none(folder, broken):
    change_tensors(folder, BROKEN[broken][0])
    assert fit_of(folder).plan.block == 1
    with pytest.raises(ModelError, match="mtp"):
        fit_of(folder, draft="mtp")


@pytest.mark.parametrize(
    ("key", "value"), [("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)]
)
def test_a_head_that_we_do_not_compute_is_refused_by_its_key(folder, key, value):
    change_config(folder, **{key: value})
    with pytest.raises(ModelError, match=f"{key} = {value}"):
        load(folder, draft="mtp")
    assert isinstance(load(folder)[0].drafter, NoDrafter)


def test_a_model_of_another_family_has_none():
    with pytest.raises(ModelError, match="only Qwen3-Next"):
        load(tiny.TARGET, draft="mtp")
    _, _, lines = load(tiny.TARGET)
    assert not [line for line in lines if "MTP" in line]


def test_other_engines_are_not_started_with_it():
    with pytest.raises(SettingsError, match="leave out --draft mtp"):
        Settings(model="a/b", engine="vllm", draft="mtp")


def test_a_head_that_knows_nothing_is_dropped_by_the_start(folder):
    change_tensors(folder, replaced("mtp.fc.weight", torch.zeros_like))
    startup = StartProgress()
    engine = start_engine(Settings(model=str(folder), verify="full", **SMALL), startup)
    assert isinstance(engine.models.drafter, NoDrafter)
    [line] = [one for one in startup.warnings if "drafter is not used" in one]
    assert "left as it was when the model was trained further" in line


# ---- plan, fit and train


def test_the_plan_counts_its_memory_to_the_byte(whole):
    fit = fit_of(whole, draft="mtp")
    engine = Engine(load(whole, draft="mtp")[0], fit.plan)
    planned = {item.name: item.num_bytes for item in fit.items}
    model, rows = engine.models.drafter.model, engine.rows
    assert planned["drafter weights"] == sum(one.nbytes for one in model.parameters())
    assert planned["drafter cache"] == engine.cache.storage[-1].num_bytes
    without = {item.name: item.num_bytes for item in fit_of(whole, draft="none").items}
    assert planned["row tables"] - without["row tables"] >= rows.last_hidden.nbytes


def test_plan_names_it(whole, capsys):
    words = [str(whole), "--max-model-len", "100", "--card", "h200", "--dtype", "bfloat16"]
    assert main(["plan", *words, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "+ its own MTP head, native" in text
    assert "MTP head" in next(line for line in text.splitlines() if "acceptance:" in line)
    assert main(["plan", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    seconds = {}
    for width in (2, 4, 8):
        assert main(["plan", *words, "--json", "--width", str(width), "--load-format", "dummy"]) == 0
        [speed, *_] = json.loads(capsys.readouterr().out)["estimate"]["speeds"]
        seconds[width] = speed["step_ms"]
    assert (report["draft"], report["draft_kind"]) == ("mtp", "mtp")
    assert (seconds[8] - seconds[4]) / (seconds[4] - seconds[2]) == pytest.approx(2, rel=0.3), "a run a draft"


def test_fit_measures_it_and_says_that_nobody_trains_it_here(whole, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "t3 t5 t7 t9", "category": "any"}) + "\n")
    flags = ("--prompts", str(prompts), "--max-tokens", "24", "--dtype", "float32", "--width", "3")
    assert main(["fit", str(whole), "mtp", *flags]) in (0, 1)
    text = capsys.readouterr().out
    assert text.startswith(f"mtp for {whole}: MTP, width 3, float32\n")
    assert "`blockdraft train` trains none" in text
    train = ["--prompts", str(prompts), "--out", str(tmp_path / "out"), "--steps", "1", "--from", "mtp"]
    assert main(["train", str(whole), *train]) == 2
    assert "trained with its model" in capsys.readouterr().err
