"""Recipe files: what they may hold, how they are found, and that all of ours load."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import blockdraft
from blockdraft.errors import SettingsError
from blockdraft.machine.cards import card_by_key
from blockdraft.machine.machine import Machine
from blockdraft.planner.memory_fit import machine_of
from blockdraft.settings import recipe as recipes
from blockdraft.settings import shipped
from blockdraft.settings.merge import merge_settings
from blockdraft.settings.recipe import Expectation, check_recipe_card, load_recipe, read_recipe, recipe_names
from blockdraft.settings.settings import SETTING_NAMES, Settings

ROOT = Path(blockdraft.__file__).parents[1]
FULL = """
title = "Everything"
notes = " Two\\nlines. "
cards = ["DGX Spark", "h200"]
model = "org/target"
max_num_seqs = 4
gpu_memory_utilization = 0.85
overlap = "auto"
prefix_cache = false
max_stall_ms = 50
attention_backend = "FLASH_ATTN"
tensor_parallel = 2
[draft]
model = "org/draft"
width = 16
quantization = "keep"
attention_backend = "TRITON_ATTN"
[engine]
name = "vllm"
version = "0.32.0"
args = ["--limit-mm-per-prompt", '{"image": 4}']
env = { VLLM_A = " 1" }
[[expect]]
card = "spark"
workload = "code"
tokens_per_second = 64
source = "somewhere"
"""


def card_warnings(settings, machine):
    return check_recipe_card(settings.recipe, settings.model, settings.device, machine)


def test_a_recipe_holds_settings_and_what_is_known_about_them():
    recipe = read_recipe(FULL, name="full")
    assert recipe.settings == {
        "model": "org/target",
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.85,
        "overlap": "auto",
        "prefix_cache": False,
        "max_stall_ms": 50,
        "attention_backend": "FLASH_ATTN",
        "tensor_parallel": 2,
        "draft": "org/draft",
        "width": 16,
        "draft_quantization": "keep",
        "draft_attention_backend": "TRITON_ATTN",
        "engine": "vllm",
        "engine_version": "0.32.0",
        "engine_args": ("--limit-mm-per-prompt", '{"image": 4}'),
        "engine_env": (("VLLM_A", " 1"),),
    }
    Settings(**recipe.settings)
    assert (recipe.name, recipe.title, recipe.notes) == ("full", "Everything", "Two\nlines.")
    assert recipe.cards == ("gb10", "h200")
    assert recipe.expect == (
        Expectation(card="gb10", workload="code", tokens_per_second=64, source="somewhere"),
    )


def test_every_setting_has_its_place_in_a_recipe():
    places = {*recipes._PLAIN, *recipes.DRAFT_KEYS.values(), *recipes.ENGINE_KEYS.values(), "recipe"}
    assert places == set(SETTING_NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('modle = "x"', "modle is no key of a recipe: did you mean model?"),
        ("qqq = 1", "qqq is no key of a recipe: known are model, "),
        ('[draft]\nmodle = "x"', "[draft] modle is no key of a recipe: did you mean model?"),
        ('[engine]\nengine_args = ["x"]', "[engine] engine_args is no key of a recipe: known are name, "),
        ('draft = "x"', "draft is a table: write [draft] and below it model = 'x'."),
        ('engine = "vllm"', "engine is a table: write [engine] and below it name = 'vllm'."),
        ("width = 16", "width belongs into a table: write it as [draft] width."),
        ("[draft]\nwidth = true", '[draft] width = True is not a whole number or "auto".'),
        ('page_size = "auto"', "page_size = 'auto' is not a whole number."),
        ("model = 8", "model = 8 is not text: put it in quotes."),
        ("prefix_cache = 1", "prefix_cache = 1 is not true or false."),
        ('gpu_memory_utilization = "0.9"', "gpu_memory_utilization = '0.9' is not a number."),
        ('dtype = "int3"', "dtype = 'int3' is unknown: use one of auto, "),
        ('[engine]\nargs = "--a b"', "[engine] args = '--a b' is not a list of texts."),
        ("[engine]\nenv = { A = 1 }", "[engine] env A = 1 is not text: put it in quotes."),
        ('[engine]\nenv = ["A=1"]', "[engine] env is a table of text"),
        ('cards = ["h2000"]', "cards names 'h2000', a card that is not known: did you mean h200?"),
        ('[expect]\nsource = "x"', "expect is a list of tables: write [[expect]]."),
        ("[[expect]]\nspeedup = 2.0", "[[expect]] without source"),
        ('[[expect]]\nsource = "x"', "[[expect]] without a number: give one of tokens_per_second, "),
        ('[[expect]]\nspedup = 2.0\nsource = "x"', "[[expect]] spedup is no key of a recipe: did you mean "),
        ('[[expect]]\nspeedup = "2"\nsource = "x"', "[[expect]] speedup = '2' is not a number."),
        ('[[expect]]\nspeedup = 2\ncard = "x"\nsource = "x"', "[[expect]] card names 'x'"),
        ('title = "y"', "is not TOML"),
        ("vllm = 3", "vllm is a table: write [vllm]"),
        (
            "[vllm]\nmax_prefill_token = 3",
            "[vllm] max_prefill_token is no key of a recipe: did you mean",
        ),
        ('[sglang]\nmodel = "x"', "[sglang] model is no key of a recipe"),
        ('[vllm]\nchunk = "x"', "[vllm] max_prefill_tokens = 'x' is not a whole number"),
        ('[[excludes]]\ncards = ["hoper"]\nwhy = "x"', "[[excludes]] cards names 'hoper', a card that"),
        ('[[excludes]]\ncards = ["hopper"]', "[[excludes]] needs cards and why"),
        ('[[excludes]]\ncard = "hopper"', "[[excludes]] card is no key of a recipe: did you mean cards?"),
    ],
)
def test_what_does_not_belong_into_a_recipe_is_named(text, message):
    with pytest.raises(SettingsError) as error:
        read_recipe(f'title = "x"\nseed = 1\n{text}\n', name="bad")
    assert str(error.value).startswith("recipe 'bad'")
    assert message in str(error.value)


EXCLUDING = """
title = "x"
model = "a/b"
cards = ["dgx-spark", "h100"]
[[excludes]]
cards = ["ampere", "h200"]
why = "it does not"
"""


def test_a_recipe_says_which_cards_it_is_for(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(EXCLUDING)
    settings = Settings(model="a/b", recipe=str(path))

    def on(card, **changes):
        return card_warnings(replace(settings, **changes), machine_of(card_by_key(card)))

    for as_good in ("dgx-spark", "h100", "h100-nvl", "gh200"):
        assert on(as_good) == ()
    warning = "recipe 'own' is for DGX Spark (GB10), H100 SXM: nobody has reported it to run on RTX 5090"
    assert on("rtx-5090") == (warning,)
    for excluded, title in (("a100", "A100 80 GB (Ampere)"), ("h200", "H200 (Hopper)")):
        with pytest.raises(SettingsError) as error:
            on(excluded)
        assert str(error.value) == f"recipe 'own' will not work on {title}: it does not."
        assert len(on(excluded, model="another/model")) == (excluded != "h200")  # h200 is as good as h100
    assert card_warnings(settings, Machine(memory_bytes=1)) == ()
    assert on("a100", device="cpu") == ()
    assert on("a100", recipe=None) == ()


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_ours_makes_settings_and_runs_on_its_own_cards(name):
    recipe = load_recipe(name)
    settings = merge_settings({"recipe": name}, uses_environment=False).settings
    assert settings.model == recipe.settings["model"]
    for key in recipe.cards:
        assert card_warnings(settings, machine_of(card_by_key(key))) == ()


@pytest.mark.parametrize("title", ["", 'title = ""', "title = 3", 'title = "a\\nb"'])
def test_a_recipe_has_a_title_of_one_line_and_sets_something(title):
    with pytest.raises(SettingsError, match="recipe 'bad': title must be one line of text"):
        read_recipe(f'{title}\nmodel = "x"\n', name="bad")
    with pytest.raises(SettingsError, match="recipe 'bad': the file sets nothing: name a model at least"):
        read_recipe('title = "x"\nnotes = "y"\n', name="bad")


# ---- where they are


def test_recipes_are_found_by_name_and_by_path(tmp_path, monkeypatch):
    assert load_recipe("smollm2").settings["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.chdir(tmp_path)
    Path("smollm2.toml").write_text('title = "mine"\nmodel = "mine"\n')
    for path in ("smollm2.toml", "./smollm2.toml", str(tmp_path / "smollm2.toml")):
        assert load_recipe(path).title == "mine"
    assert load_recipe("smollm2").title != "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "there is no recipe 'smolm2': did you mean smollm2?"),
        ("zzz", "there is no recipe 'zzz': `blockdraft recipes` lists the known ones; or give a path"),
        ("./zzz.toml", "recipe './zzz.toml' cannot be read (No such file or directory): check the path."),
        ("./bytes.toml", "recipe './bytes.toml' cannot be read (it is not UTF-8 text)"),
        ("/", "recipe '/' cannot be read (Is a directory)"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_named(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    Path("bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError) as error:
        load_recipe(name)
    assert message in str(error.value)


def test_recipes_and_drafters_travel_in_the_package():
    """Their folders are reached through the package, and the build's patterns take all of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["blockdraft"]
    taken = {path.resolve() for pattern in patterns for path in (ROOT / "blockdraft").glob(pattern)}
    for folder in (recipes.FOLDER, shipped.FOLDER):
        assert taken >= {path.resolve() for path in folder.rglob("*") if path.is_file()}
        assert folder.parent == Path(blockdraft.__file__).parent
    assert any(Path("drafters/one/dflash2/head.safetensors").match(pattern) for pattern in patterns)
