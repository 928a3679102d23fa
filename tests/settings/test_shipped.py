"""The drafter of "auto": the one that ships for the model, or none."""

import shutil

import pytest
from safetensors.torch import load_file

from blockdraft import LLM, SamplingParams
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.cli.main import main
from blockdraft.errors import SettingsError
from blockdraft.planner.pair import open_pair
from blockdraft.planner.resolver import with_drafter
from blockdraft.settings import shipped
from blockdraft.settings.settings import Settings, cache_dir
from blockdraft.settings.shipped import shipped_drafter
from tests import tiny

SMALL = {"device": "cpu", "dtype": "float64", "max_model_len": 64}


@pytest.fixture
def pair_ships(tmp_path, monkeypatch):
    """The pair's drafter as the one that ships for the pair's target."""
    shutil.copytree(tiny.DRAFT, tmp_path / "tiny")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(shipped, "DRAFTERS", {tiny.TARGET: "tiny", "default": "not-here"})
    return str(tmp_path / "tiny")


def test_auto_is_the_drafter_that_ships_for_the_model(pair_ships):
    assert with_drafter(Settings(model=tiny.TARGET)).draft == pair_ships
    assert open_pair(Settings(model=tiny.TARGET)).draft.stored.name == pair_ships
    llm = LLM(tiny.TARGET, **SMALL)
    assert llm.engine.models.draft_config.name == pair_ships
    assert llm.engine.plan.width == 8


@pytest.mark.parametrize("draft", [None, "none"])
def test_none_is_no_drafter_and_other_models_have_none(pair_ships, draft):
    lines = []
    assert with_drafter(Settings(model=tiny.TARGET, draft=draft)).draft == draft
    assert LLM(tiny.TARGET, draft, **SMALL).engine.models.draft_config is None
    assert with_drafter(Settings(model="org/other"), lines.append).draft == "none"
    assert with_drafter(Settings(model="org/other", draft="org/draft"), lines.append).draft == "org/draft"
    assert lines == []


@pytest.fixture
def head_ships(tmp_path, monkeypatch):
    """The pair's drafter with a DFlash2 head in it."""
    head = tiny.write_head(tmp_path / "tiny")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(shipped, "DRAFTERS", {tiny.TARGET: "tiny"})
    return head


def test_dflash2_is_the_head_of_the_drafter_that_ships_with_its_body(head_ships):
    settings = Settings(model=tiny.TARGET, draft="dflash2")
    assert with_drafter(settings).draft == str(head_ships)
    assert with_drafter(Settings(model=tiny.TARGET)).draft == str(head_ships.parent), "on a CPU"
    assert with_drafter(Settings(model=tiny.TARGET), on_card=True).draft == str(head_ships)
    random = Settings(model=tiny.TARGET, load_format="dummy")
    assert with_drafter(random, on_card=True).draft == str(head_ships.parent), "weights that no head has"
    pair = open_pair(settings)
    assert (pair.draft.stored.name, pair.draft_config.kind) == (str(head_ships), "dflash2")
    files = (head_ships / "head.safetensors", head_ships.parent / "model.safetensors")
    num_bytes = sum(weight.nbytes for file in files for weight in load_file(file).values())
    assert sum(size.num_bytes for size in pair.draft.stored.sizes.values()) == num_bytes
    models = LLM(tiny.TARGET, "dflash2", **SMALL).engine.models
    assert models.draft_config.kind == "dflash2"
    assert (models.draft_stored.title, models.draft_stored.num_bytes) == ("dflash2", num_bytes)


def test_plan_names_the_kind_that_a_start_would_draft_with(head_ships, capsys):
    for flags, kind in (
        (["--draft", "dflash2", "--device", "cpu"], "DFlash2"),
        (["--device", "cpu"], "DFlash"),
        (["--card", "h200"], "DFlash2"),
        (["--card", "h200", "--engine", "vllm"], "DFlash"),
    ):
        main(["plan", "--model", tiny.TARGET, *flags])
        assert f" + the drafter that comes with it ({kind}), " in capsys.readouterr().out, flags


def test_a_folder_that_is_called_like_a_word_is_named_with_a_dot(head_ships, tmp_path, monkeypatch):
    (tmp_path / "here/dflash2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert with_drafter(Settings(model=tiny.TARGET, draft="dflash2")).draft == str(head_ships)
    assert with_drafter(Settings(model=tiny.TARGET, draft="./dflash2")).draft == "./dflash2"


@pytest.mark.parametrize("model", ["org/other", tiny.TARGET])
def test_a_head_that_does_not_ship_is_refused_with_what_to_do(pair_ships, model):
    refused = f"no DFlash2 head ships for '{model}', only for .*'default': name a drafter"
    with pytest.raises(SettingsError, match=refused):
        with_drafter(Settings(model=model, draft="dflash2"))


def test_one_that_should_be_here_and_is_not_is_missed_aloud(pair_ships):
    lines = []
    assert with_drafter(Settings(), lines.append).draft == "none"
    assert len(lines) == 1
    assert "'not-here' is not in" in lines[0]


def test_what_needs_a_drafter_is_refused_where_none_ships(pair_ships):
    settings = Settings(model="org/other", synthetic_acceptance="mean:3")
    with pytest.raises(SettingsError, match="there is no drafter whose"):
        with_drafter(settings)
    assert with_drafter(Settings(model=tiny.TARGET, synthetic_acceptance="mean:3")).draft == pair_ships


@pytest.mark.slow
@pytest.mark.skipif(shipped_drafter("default") is None, reason="the default drafter is not in the package")
@pytest.mark.skipif(not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched")
def test_the_default_model_writes_the_same_with_its_drafter():
    llm = LLM(device="cpu", width=4, max_model_len=256)
    assert llm.engine.models.draft_config.name == str(shipped_drafter("default"))
    question = [{"role": "user", "content": "Count from one to ten in words."}]
    drafted, plain = (
        llm.chat(question, SamplingParams(temperature=0.0, max_tokens=24, width=width))[0] for width in (4, 1)
    )
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.metrics.accepted) > 0
    assert drafted.metrics.steps < plain.metrics.steps


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("default", "SmolLM2-135M-Instruct"),
        (str(shipped.FOLDER / "smollm2-135m-instruct"), "SmolLM2-135M-Instruct-DFlash-b16"),
        (str(shipped.FOLDER / "smollm2-135m-instruct/dflash2"), "SmolLM2-135M-Instruct-DFlash2-b16"),
        ("org/Some-4B@main", "Some-4B"),
        ("/srv/models/Some-4B/", "Some-4B"),
        ("files/Some-4B.Q4_K_M.gguf", "Some-4B"),
        ("files/some.gguf", "some"),
        ("hub/models--org--Some-4B/snapshots/0123abc", "Some-4B"),
    ],
)
def test_a_title_is_what_people_call_a_model(name, title):
    assert shipped.model_title(name) == title
