"""defaults < recipe < environment < flags, and of each value where it comes from."""

import json
import re
from dataclasses import fields

import pytest

from blockdraft import LLM
from blockdraft.cli.flags import given_settings, noted
from blockdraft.cli.main import main, parse
from blockdraft.errors import SettingsError
from blockdraft.settings.merge import merge_settings
from blockdraft.settings.settings import (
    LAUNCH_SETTINGS,
    OTHER_VARIABLES,
    Settings,
    environment_api_key,
    forget_environment_settings,
    read_variables,
    variable_of,
)
from tests import tiny

VLLM = """
title = "A test"
model = "org/target"
max_num_seqs = 4
kv_dtype = "fp8"
attention_backend = "FLASH_ATTN"
[draft]
model = "org/draft"
width = 9
attention_backend = "TRITON_ATTN"
[engine]
name = "vllm"
version = "0.32.0"
args = ["--tool-call-parser", "hermes"]
env = { VLLM_A = "1", VLLM_B = "2" }
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(VLLM)
    return str(path)


def test_each_layer_goes_before_the_one_below_it(recipe, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_MAX_ROWS", "5")
    monkeypatch.setenv("BLOCKDRAFT_WIDTH", "10")
    resolved = merge_settings({"recipe": recipe, "width": 11})
    found = {name: (getattr(resolved.settings, name), resolved.sources[name]) for name in resolved.sources}
    assert found["width"] == (11, "--width")
    assert found["max_num_seqs"] == (5, "BLOCKDRAFT_MAX_NUM_SEQS")
    assert found["draft"] == ("org/draft", f"recipe {recipe}")
    assert found["page_size"] == (16, "default")
    assert set(found) == {item.name for item in fields(Settings)}


def test_the_environment_may_name_the_recipe_and_a_flag_another(recipe, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_RECIPE", recipe)
    assert merge_settings({}).settings.model == "org/target"
    assert merge_settings({}).sources["recipe"] == "BLOCKDRAFT_RECIPE"
    assert merge_settings({"recipe": "smollm2"}).settings.model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_flag_can_take_a_value_back_to_its_default(recipe):
    args = ["--recipe", recipe, "--max-num-seqs", "auto", "--attention-backend", "none", "--no-verify"]
    resolved = _resolved(args)
    assert resolved.settings.max_num_seqs == "auto"
    assert resolved.settings.attention_backend is None
    assert (resolved.sources["max_num_seqs"], resolved.sources["verify"]) == ("--max-num-seqs", "--verify")


def test_more_engine_flags_add_to_those_of_the_recipe(recipe, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_ENGINE_ENV", "VLLM_B=3 VLLM_C='x y'")
    resolved = _resolved(["--recipe", recipe, "--engine-args=--max-log-len 10", "--engine-env", "VLLM_A=4 5"])
    assert resolved.settings.engine_args == ("--tool-call-parser", "hermes", "--max-log-len", "10")
    assert resolved.settings.engine_env == (("VLLM_A", "4 5"), ("VLLM_B", "3"), ("VLLM_C", "x y"))
    assert resolved.sources["engine_args"] == f"recipe {recipe}, --engine-args"


@pytest.mark.parametrize("layer", ["flag", "environment"])
def test_values_in_the_words_of_one_engine_do_not_reach_another(recipe, layer, monkeypatch):
    if layer == "environment":
        monkeypatch.setenv("BLOCKDRAFT_ENGINE", "sglang")
    resolved = merge_settings({"recipe": recipe} | ({"engine": "sglang"} if layer == "flag" else {}))
    settings = resolved.settings
    assert settings.engine == "sglang"
    assert (settings.engine_version, settings.engine_args, settings.engine_env) == (None, (), ())
    assert (settings.attention_backend, settings.draft_attention_backend) == (None, None)
    assert (settings.width, settings.kv_dtype) == (9, "fp8"), "these mean the same to all"
    assert "engine_args" in resolved.notes[0]
    assert "for vllm, not for sglang" in resolved.notes[0]


def test_neither_do_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_ENGINE_VERSION", "0.32.0")
    assert merge_settings({"engine": "vllm"}).settings.engine_version == "0.32.0", "for whichever is named"
    monkeypatch.setenv("BLOCKDRAFT_ENGINE", "vllm")
    assert merge_settings({}).settings.engine_version == "0.32.0"
    resolved = merge_settings({"engine": "native"})
    assert resolved.settings == Settings()
    assert resolved.notes == ("engine_version of the environment left out: for vllm, not for native",)


def test_what_is_left_out_of_a_recipe_is_said_by_every_command(capsys):
    settings = noted(merge_settings({"recipe": "gpt-oss-20b", "engine": "vllm"}))
    assert settings.engine_version is None
    words = "engine_version, engine_args, attention_backend, draft_attention_backend"
    assert f"note: {words} of the recipe left out" in capsys.readouterr().err


def test_a_recipe_may_have_settings_for_another_engine_in_that_ones_words(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(VLLM + '[sglang]\nversion = "0.5.23"\nmax_rows = 8\nattention_backend = "triton"\n')
    resolved = merge_settings({"recipe": str(path), "engine": "sglang"})
    found = resolved.settings
    assert (found.engine_version, found.max_num_seqs, found.attention_backend) == ("0.5.23", 8, "triton")
    assert (found.engine_args, found.engine_env, found.draft_attention_backend) == ((), (), None)
    assert (found.width, found.kv_dtype) == (9, "fp8"), "what it does not say stays"
    assert resolved.sources["max_num_seqs"] == f"recipe {path}"
    assert resolved.notes == ()
    own = merge_settings({"recipe": str(path), "engine": "vllm"})
    assert own.notes == ()
    found = own.settings
    assert (found.engine, found.max_num_seqs, found.attention_backend) == ("vllm", 4, "FLASH_ATTN")
    assert found.engine_args == ("--tool-call-parser", "hermes")
    flags = {"recipe": str(path), "engine": "sglang", "max_num_seqs": 2}
    assert merge_settings(flags).settings.max_num_seqs == 2


def test_an_error_says_which_layer_to_mend(tmp_path, monkeypatch):
    path = tmp_path / "two.toml"
    path.write_text(VLLM.replace("max_num_seqs = 4", "max_num_seqs = 4\ntensor_parallel = 2"))
    with pytest.raises(SettingsError, match=r"tensor_parallel = 2 .* \(tensor_parallel is from recipe "):
        merge_settings({"recipe": str(path), "engine": "native"})
    monkeypatch.setenv("BLOCKDRAFT_MAX_ROWS", "0")
    with pytest.raises(SettingsError, match=r"max_num_seqs is from BLOCKDRAFT_MAX_NUM_SEQS"):
        merge_settings({})
    with pytest.raises(SettingsError) as error:
        merge_settings({"max_num_seqs": 0})
    assert "is from" not in str(error.value), "of a flag the user knows it"


# ---- the environment


def test_every_setting_has_a_variable_and_other_variables_are_left_alone():
    values = {"model": "m", "draft": "none", "device": "cpu", "dtype": "float16", "quantization": "fp8"}
    values |= {"draft_quantization": "int8", "load_format": "dummy", "engine": "vllm", "overlap": "auto"}
    for item in fields(Settings):
        text = values.get(item.name, "A=1" if item.name == "engine_env" else "1")
        assert item.name in read_variables({variable_of(item.name): text})
    others = dict.fromkeys(OTHER_VARIABLES, "x") | {"BLOCKDRAFT_TEST_VLLM": "1", "PATH": "/", "VLLM_A": "1"}
    assert read_variables(others | {"BLOCKDRAFT_WIDTH": ""}) == {}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("width", "auto", "auto"),
        ("width", "8", 8),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("prefix_cache", "off", False),
        ("prefix_cache", "True", True),
        ("overlap", "auto", "auto"),
        ("max_stall_ms", "none", None),
        ("head_address", "none", None),
        ("draft", "none", "none"),
        ("engine_args", "--a '{\"b\": 1}'", ("--a", '{"b": 1}')),
    ],
)
def test_text_of_the_environment_is_read_by_its_type(name, text, value):
    found = read_variables({variable_of(name): text})
    assert found == {name: value}
    assert type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("BLOCKDRAFT_WIDHT", "8", "BLOCKDRAFT_WIDHT is not a setting: did you mean BLOCKDRAFT_WIDTH?"),
        ("BLOCKDRAFT_CACHES", "/x", "did you mean BLOCKDRAFT_CACHE?"),
        ("BLOCKDRAFT_QQQ", "", "BLOCKDRAFT_QQQ is not a setting: see docs/settings.md"),
        ("BLOCKDRAFT_WIDTH", "wide", "BLOCKDRAFT_WIDTH: 'wide' is not a whole number or 'auto'."),
        ("BLOCKDRAFT_GRAPHS", "maybe", "BLOCKDRAFT_GRAPHS: 'maybe' is not on or off."),
        ("BLOCKDRAFT_ENGINE_ENV", "A", "BLOCKDRAFT_ENGINE_ENV: 'A' is not NAME=VALUE."),
        ("BLOCKDRAFT_ENGINE_ARGS", "'", "BLOCKDRAFT_ENGINE_ARGS: "),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused(variable, text, message):
    with pytest.raises(SettingsError) as error:
        read_variables({variable: text})
    assert message in str(error.value)


def test_settings_are_taken_out_of_the_environment_and_nothing_else(monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_WIDTH", "8")
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", "secret")
    forget_environment_settings()
    assert merge_settings({}).settings == Settings()
    assert environment_api_key() == "secret"


# ---- engines


@pytest.mark.parametrize("name", sorted(LAUNCH_SETTINGS))
def test_the_native_engine_refuses_what_only_others_understand(name):
    values = {"engine_args": ("--a",), "engine_env": (("A", "1"),), "head_address": "h"}
    values |= {"engine_version": "1", "attention_backend": "x", "draft_attention_backend": "x"}
    value = values.get(name, 2)
    with pytest.raises(SettingsError, match=f"{name} = .* is not for the native engine: add --engine vllm"):
        Settings(**{name: value})
    rest = {"node_rank": {"num_nodes": 3, "head_address": "h"}, "num_nodes": {"head_address": "h"}}
    assert getattr(Settings(engine="vllm", **{name: value}, **rest.get(name, {})), name) == value


def test_machines_are_counted_and_must_meet():
    with pytest.raises(SettingsError, match=r"node_rank = 2 of num_nodes = 2: ranks count from 0 to 1"):
        Settings(engine="vllm", num_nodes=2, node_rank=2, head_address="h")
    with pytest.raises(SettingsError, match=r"num_nodes = 2, .* add --head-address"):
        Settings(engine="vllm", num_nodes=2)
    with pytest.raises(SettingsError, match=r"engine 'vlm' is unknown: use one of native, vllm, sglang"):
        Settings(engine="vlm")


def test_the_python_api_reads_recipes_but_not_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "tiny.toml"
    path.write_text(f'title = "tiny"\nmodel = "{tiny.TARGET}"\nmax_rows = 2\nmax_context = 64\n')
    monkeypatch.setenv("BLOCKDRAFT_MAX_ROWS", "3")
    llm = LLM(recipe=str(path), dtype="float32", max_model_len=32)
    assert (llm.settings.max_num_seqs, llm.settings.max_model_len) == (2, 32)
    with pytest.raises(SettingsError, match="engine = 'vllm' does not run in this process"):
        LLM(tiny.TARGET, engine="vllm")


# ---- blockdraft settings


def test_the_table_shows_values_with_their_sources(recipe, capsys, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_MAX_ROWS", "5")
    assert main(["settings", "other/model", "--recipe", recipe, "--engine", "sglang"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["model", "other/model", "--model"] in rows
    assert ["max_num_seqs", "5", "BLOCKDRAFT_MAX_NUM_SEQS"] in rows
    assert ["width", "9", f"recipe {recipe}"] in rows
    assert ["page_size", "16", "default"] in rows
    assert rows[-1][0] == "note:"
    main(["settings"])
    assert len(capsys.readouterr().out.splitlines()) == len(fields(Settings))


def test_the_table_can_leave_out_what_nobody_set_and_the_json_has_every_setting(capsys):
    main(["settings", "--changed", "--width", "4"])
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [["width", "4", "--width"]]
    assert last == f"{len(fields(Settings)) - 1} other settings have their defaults"
    main(["settings", "--width", "4", "--json"])
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found["width"] == {"value": 4, "source": "--width"}
    assert found["prefix_cache"] == {"value": True, "source": "default"}
    assert list(found) == [item.name for item in fields(Settings)]


@pytest.mark.parametrize("form", [[], ["--json"], ["--changed"]])
def test_secrets_are_not_shown(form, capsys):
    words = "--engine-args=--api-key hush --ssl-key=hush --a b"
    main(["settings", "--engine=vllm", "--engine-env=HF_TOKEN=hush", words, *form])
    out = capsys.readouterr().out
    assert "hush" not in out
    assert out.count("***") == 3
    assert "--a" in out


def _resolved(words):
    return merge_settings(given_settings(parse(["serve", *words])))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gpu", "device 'gpu' is unknown"),
        ("cuda:x", "device 'cuda:x' is unknown"),
        ("CUDA", "device 'CUDA' is unknown"),
        ("mps", "device 'mps' is Apple's GPU, which our engine does not compute on"),
        ("rocm", "device 'rocm' is an AMD GPU, which our engine does not compute on"),
        ("xpu", "device 'xpu' is an Intel GPU, which our engine does not compute on"),
    ],
)
def test_another_device_is_refused_with_those_that_there_are(name, what, capsys):
    message = f"{what}: use auto, cpu, cuda, or cuda:N for the card of that number."
    with pytest.raises(SettingsError, match=re.escape(message)):
        Settings(device=name)
    assert main(["generate", "--device", name, "hi"]) == 2
    assert message in capsys.readouterr().err
    assert Settings(device=name, engine="sglang").device == name, "it may know it"
    for known in ("auto", "cpu", "cuda", "cuda:0", "cuda:12", "cpu:0"):
        assert Settings(device=known).device == known
