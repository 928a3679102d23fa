"""The container's entrypoint, run by a shell in a clean environment: no container engine, no network."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from blockdraft.cli.container import _fetch, serve_words
from blockdraft.cli.masking import masked
from blockdraft.errors import SettingsError
from blockdraft.launch import container
from blockdraft.launch.container import check_model, read_container
from blockdraft.settings.settings import Settings

ROOT = Path(__file__).parents[2]
ENTRYPOINT = ROOT / "container" / "entrypoint"
KEY = "sk-very-secret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

STUB = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    print(json.dumps([sys.argv[1:], dict(os.environ)]), file=log)
if "--json" in sys.argv:
    positions = json.loads(os.environ.get("PLANNED", "{{}}"))
    flag = "--max-prefill-tokens"
    chunk = sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else "own"
    if chunk not in positions:
        sys.exit(2)
    print(json.dumps({{"capacity": {{"max_model_len": positions[chunk]}}}}))
sys.exit(int(os.environ.get("PLAN_CODE", "0")) if sys.argv[1] == "plan" else 0)
"""


class Place:
    """A folder that stands for the container: a stub of `blockdraft` that notes what it was called with."""

    def __init__(self, folder):
        self.folder = folder
        self.log = folder / "calls"
        self.model = folder / "models" / "target"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        stub = bin_folder / "blockdraft"
        stub.write_text(STUB.format(python=sys.executable, log=str(self.log)))
        stub.chmod(0o755)
        # Not a link, through which Python would not find the packages of its environment.
        (bin_folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (bin_folder / "python3").chmod(0o755)
        self.environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "HF_HOME": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
        }

    def cached(self, repo, *, files=("config.json",)):
        """A model in the hub's cache, as a download leaves it."""
        home = self.folder / "hub" / "hub" / f"models--{repo.replace('/', '--')}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(COMMIT)
        snapshot = home / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        for name in files:
            (snapshot / name).write_text("{}")

    def run(self, *words, **variables):
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        return subprocess.run(
            ["/bin/sh", str(ENTRYPOINT), *words], env=environment, capture_output=True, text=True, timeout=60
        )

    def calls(self):
        """Of each call its arguments and its environment."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_the_line_that_people_copy_plans_and_then_serves(place):
    done = place.run(
        MODEL_PATH=place.model,
        SERVED_MODEL_NAME="qwen35-dflash",
        DFLASH_DRAFTER=place.model,
        DFLASH_NUM_SPEC_TOKENS=15,
        MAX_MODEL_LEN=65536,
        MAX_NUM_SEQS=16,
        MAX_NUM_BATCHED_TOKENS=32768,
        GPU_MEMORY_UTILIZATION=0.85,
        ATTENTION_BACKEND="flash_attn",
        KV_CACHE_DTYPE="auto",
        VLLM_API_KEY=KEY,
    )
    assert done.returncode == 0, done.stderr
    (plan, _), (serve, environment) = place.calls()
    assert plan[0] == "plan"
    assert serve[:3] == ["serve", "--host=0.0.0.0", "--port=8000"]
    assert {
        f"--model={place.model}",
        f"--draft={place.model}",
        "--width=16",
        "--max-model-len=65536",
        "--max-num-seqs=16",
        "--max-prefill-tokens=32768",
        "--gpu-memory-utilization=0.85",
        "--kv-dtype=auto",
        "--served-model-name=qwen35-dflash",
    } <= set(serve)
    assert plan[plan.index("--width") + 1] == "16"
    assert environment["BLOCKDRAFT_API_KEY"] == KEY
    assert not set(environment) & set(container.VARIABLES)
    assert not any("attention" in word for word in serve)
    assert "ATTENTION_BACKEND is ignored: the native engine has its own" in done.stdout
    assert KEY not in done.stdout + done.stderr + json.dumps([plan, serve])


def test_another_engine_gets_its_own_words(place):
    done = place.run(
        MODEL_PATH=place.model,
        BLOCKDRAFT_ENGINE="vllm",
        ATTENTION_BACKEND="flash_attn",
        KV_CACHE_DTYPE="fp8_e4m3",
        QUANTIZATION="modelopt",
        EXTRA_ARGS="""--limit-mm-per-prompt '{"image": 4}'""",
    )
    assert done.returncode == 0, done.stderr
    serve, environment = place.calls()[-1]
    assert "--attention-backend=flash_attn" in serve
    assert "--kv-dtype=fp8_e4m3" in serve
    extra = """--engine-args=--limit-mm-per-prompt '{"image": 4}' --quantization modelopt"""
    assert extra in serve
    assert environment["BLOCKDRAFT_ENGINE"] == "vllm"
    plan, plan_environment = place.calls()[0]
    assert extra in plan
    assert "BLOCKDRAFT_ENGINE" not in plan_environment, "it has all of them as flags"


def tuned(place, kind="qwen3_5", **variables):
    (place.model / "config.json").write_text(json.dumps({"model_type": kind}))
    variables = {"DFLASH_DRAFTER": place.model, "BLOCKDRAFT_ENGINE": "vllm", **variables}
    done = place.run(MODEL_PATH=place.model, **variables)
    assert done.returncode == 0, done.stderr
    serve = place.calls()[-1][0]
    names = ("--max-model-len", "--max-num-seqs", "--max-prefill-tokens", "--attention-backend", "--width")
    return {word.partition("=")[0][2:]: word.partition("=")[2] for word in serve if word.startswith(names)}


def test_where_only_models_are_named_vllm_gets_what_the_documents_tuned(place):
    found = tuned(place, PLANNED='{"32768": 262144}')
    assert found == {
        "max-model-len": "65536",
        "max-num-seqs": "16",
        "max-prefill-tokens": "32768",
        "attention-backend": "flash_attn",
    }  # and drafts as many as the drafter's block has: 15
    plan = place.calls()[-2][0]
    assert plan[plan.index("--max-model-len") + 1] == "65536", "the plan is made of what will be served"


@pytest.mark.slow  # a process each
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"PLANNED": '{"32768": 4096}'},
            {"max-model-len": "4096", "max-num-seqs": "16", "max-prefill-tokens": "32768"},
        ),
        ({"PLANNED": '{"own": 8192}'}, {"max-model-len": "8192"}),  # steps of 32,768 leave no room
        (
            {"PLANNED": '{"512": 8192}', "MAX_NUM_BATCHED_TOKENS": 512},
            {"max-model-len": "8192", "max-num-seqs": "16", "max-prefill-tokens": "512"},
        ),
        (
            {"PLANNED": '{"32768": 4096}', "MAX_MODEL_LEN": 9, "MAX_NUM_SEQS": 2},
            {"max-model-len": "9", "max-num-seqs": "2", "max-prefill-tokens": "32768"},
        ),
    ],
)
def test_the_tuned_values_give_way_to_model_memory_and_user(place, variables, expected):
    assert tuned(place, **variables) == {**expected, "attention-backend": "flash_attn"}


@pytest.mark.slow  # a process each
@pytest.mark.parametrize(
    "variables",
    [{"DFLASH_DRAFTER": "off"}, {"BLOCKDRAFT_ENGINE": "sglang"}, {"BLOCKDRAFT_ENGINE": "native"}, {}],
)
def test_other_starts_are_as_they_were(place, variables):
    planned = {"PLANNED": '{"32768": 4096}'} if variables else {}  # the last one: no plan, no tuning
    assert tuned(place, **variables, **planned) == {}


@pytest.mark.slow  # a process each
@pytest.mark.parametrize("kind", ["gemma4", "gemma4_text", "gpt_oss"])
def test_models_made_for_another_backend_keep_it(place, kind):
    assert "attention-backend" not in tuned(place, kind, PLANNED='{"32768": 4096}')
    found = tuned(place, kind, PLANNED='{"32768": 4096}', ATTENTION_BACKEND="triton_attn")
    assert found["attention-backend"] == "triton_attn"


@pytest.mark.slow  # a process each
@pytest.mark.parametrize(
    ("engine", "asked", "expected"),
    [
        ("vllm", "fp8", "--quantization=fp8"),  # a setting of ours, which the plan and known problems see
        ("native", "fp8", "--quantization=fp8"),
        ("native", "int8", "--quantization=int8"),
        ("native", "modelopt_fp4", "--quantization=keep"),
        ("native", "compressed-tensors", "--quantization=keep"),
        ("vllm", "modelopt", "--engine-args=--quantization modelopt"),
    ],
)
def test_quantization_reaches_the_plan_and_the_server(place, engine, asked, expected):
    done = place.run(MODEL_PATH=place.model, BLOCKDRAFT_ENGINE=engine, QUANTIZATION=asked)
    assert done.returncode == 0, done.stderr
    (plan, _), (serve, _) = place.calls()[-2:]
    assert expected in serve
    assert expected in plan or expected.partition("=")[2] == plan[plan.index("--quantization") + 1]


def test_a_quantization_that_our_engine_does_not_have_is_refused(place):
    done = place.run(MODEL_PATH=place.model, QUANTIZATION="bitsandbytes")
    assert done.returncode == 2
    assert "QUANTIZATION = bitsandbytes: our engine keeps what a checkpoint has" in done.stderr
    assert place.calls() == []


def test_flags_after_the_image_go_before_variables_and_extra_arguments_reach_our_server(place):
    done = place.run(
        "--max-num-seqs", "2", MODEL_PATH=place.model, MAX_NUM_SEQS=16, EXTRA_ARGS="--no-graphs --access-log"
    )
    assert done.returncode == 0, done.stderr
    serve, _ = place.calls()[1]
    assert "--access-log" in serve
    assert serve.index("--max-num-seqs=16") < serve.index("--max-num-seqs")
    plan, _ = place.calls()[0]
    assert plan[plan.index("--max-num-seqs") + 1] == "2"
    assert "--no-graphs" in plan


def test_a_plan_that_does_not_fit_starts_and_fetches_nothing(place):
    done = place.run(MODEL_PATH="org/name", PLAN_CODE=2)
    assert done.returncode == 2
    assert [call[0][0] for call in place.calls()] == ["plan"]
    assert "fetching" not in done.stdout


def test_the_default_model_is_fetched_before_the_plan_reads_it(place):
    done = place.run(MODEL_PATH="default", DFLASH_DRAFTER="dflash2")
    assert done.returncode == 0, done.stderr
    assert [words[0] for words, _ in place.calls()] == ["fetch", "plan", "serve"]


def test_a_model_of_the_hub_is_fetched_into_the_cache_and_served_as_it_was_fetched(place):
    place.cached("org/name")
    place.cached("org/draft")
    done = place.run(MODEL_PATH="org/name", DFLASH_DRAFTER="org/draft")
    assert done.returncode == 0, done.stderr
    serve, _ = place.calls()[1]
    assert serve[-2:] == [f"--model=org/name@{COMMIT}", f"--draft=org/draft@{COMMIT}"]
    assert "--served-model-name=name" in serve
    assert f"org/name is org/name@{COMMIT}" in done.stdout


def test_another_engine_is_kept_to_what_was_fetched_by_being_offline(monkeypatch):
    fetched = []

    def hub_folder(repo, *, revision, is_whole):
        fetched.append((repo, revision, is_whole))
        return Path("/cache", COMMIT)

    monkeypatch.setattr("blockdraft.checkpoints.fetch.hub_folder", hub_folder)
    settings = Settings(engine="sglang", model="org/name", draft="org/draft")
    assert _fetch(settings, {"A": "b"}) == ([], {"A": "b", "HF_HUB_OFFLINE": "1"})
    assert fetched == [("org/name", None, True), ("org/draft", None, True)], "with what only it reads"
    native = replace(settings, engine="native", model="org/name@v1", draft=None)
    assert _fetch(native, {}) == ([f"--model=org/name@{COMMIT}"], {})
    assert fetched[2:] == [("org/name", "v1", False)]


def test_a_revision_is_left_to_the_engine_that_is_told_it(monkeypatch):
    def hub_folder(*_, **__):
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr("blockdraft.checkpoints.fetch.hub_folder", hub_folder)
    settings = Settings(engine="vllm", model="org/name", engine_args=("--revision", "v1"))
    assert _fetch(settings, {}) == ([], {})


def test_a_revision_that_the_engine_would_not_understand_is_refused_before_the_plan(place):
    done = place.run("--engine=vllm", MODEL_PATH="org/name@v1")
    assert done.returncode == 2
    assert "--revision v1 into EXTRA_ARGS" in done.stderr
    assert place.calls() == []


def test_a_hub_that_cannot_be_reached_is_named_and_nothing_is_served(place):
    done = place.run(MODEL_PATH="org/name")
    assert done.returncode == 2
    assert "'org/name' is not in the hub's cache, and the hub cannot be reached" in done.stderr
    assert [call[0][0] for call in place.calls()] == ["plan"]


def test_a_recipe_names_the_models(place):
    recipe = place.folder / "own.toml"
    recipe.write_text(
        f'title = "x"\nmodel = "{place.model}"\nmax_rows = 3\n[engine]\nname = "vllm"\nargs = ["--a"]\n'
    )
    done = place.run(BLOCKDRAFT_RECIPE=recipe, EXTRA_ARGS="--b", MAX_NUM_SEQS="")
    assert done.returncode == 0, done.stderr
    plan, _ = place.calls()[0]
    assert plan[plan.index("--max-num-seqs") + 1] == "3"
    assert "--engine-args=--a --b" in plan
    assert "--served-model-name=target" in place.calls()[1][0]


def test_a_first_word_that_is_no_flag_is_a_command(place):
    done = place.run("sh", "-c", "echo $0 $1", "a", "b c")
    assert (done.returncode, done.stdout) == (0, "a b c\n")
    assert place.calls() == []


@pytest.mark.slow  # a process each
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "MODEL_PATH is not set: give a hub id (-e MODEL_PATH=org/name)"),
        ({"MODEL_PATH": ""}, "MODEL_PATH is not set"),
        (
            {"MODEL_PATH": "/models/targt"},
            "MODEL_PATH = '/models/targt' is no folder in this container and no hub id",
        ),
        (
            {"MODEL_PATH": "models/target"},
            "'models/target' looks like a folder in this container, not like a hub id",
        ),
        (
            {"MODEL_PATH": "default", "DFLASH_DRAFTER": "tmp/x"},
            "DFLASH_DRAFTER = 'tmp/x' looks like a folder",
        ),
        (
            {"MODEL_PATH": "default", "ENABLE_TURBOQUANT": "1", "BLOCKDRAFT_ENGINE": "vllm"},
            "ENABLE_TURBOQUANT does not work with vllm and a drafter",
        ),
        (
            {"MODEL_PATH": "default", "DFLASH_DRAFTR": "x"},
            "DFLASH_DRAFTR is no variable of this container: did you mean",
        ),
        ({"MODEL_PATH": "default", "BLOCKDRAFT_WIDHT": "8"}, "did you mean BLOCKDRAFT_WIDTH?"),
        ({"MODEL_PATH": "default", "MAX_NUM_SEQ": "8"}, "did you mean MAX_NUM_SEQS?"),
        ({"MODEL_PATH": "default", "MAX_MODEL_LENGTH": "8"}, "did you mean MAX_MODEL_LEN?"),
        ({"MODELPATH": "default"}, "did you mean MODEL_PATH?"),
        (
            {"MODEL_PATH": "default", "EXTRA_ARGS": "--port 9000"},
            "--port is fixed in the container: set PORT instead",
        ),
        (
            {"MODEL_PATH": "default", "BLOCKDRAFT_ENGINE": "vllm", "EXTRA_ARGS": "--host=::"},
            "set PORT instead",
        ),
        (
            {"MODEL_PATH": "default", "MAX_MODEL_LEN": "64k"},
            "MAX_MODEL_LEN: '64k' is not a whole number or 'auto'.",
        ),
        (
            {"MODEL_PATH": "default", "EXTRA_ARGS": "--tensor-parallel=2"},
            "tensor_parallel = 2 is not for the native engine",
        ),
        ({"MODEL_PATH": "default", "EXTRA_ARGS": "--gpu-layers 3"}, "unknown flag --gpu-layers"),
        ({"MODEL_PATH": "default", "PORT": "http"}, "PORT: 'http' is not a number"),
    ],
)
def test_what_cannot_work_is_named_before_anything_is_started(place, variables, message):
    done = place.run(**variables, VLLM_API_KEY=KEY)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert place.calls() == []


@pytest.mark.parametrize("flag", [["--port", "9000"], ["--host=::1"]])
def test_the_port_is_a_variable(place, flag):
    done = place.run(*flag, MODEL_PATH="default")
    assert done.returncode == 2
    assert "set PORT instead" in done.stderr
    place.run(MODEL_PATH="default", PORT=9000)
    assert "--port=9000" in place.calls()[-1][0]


def test_keys_in_extra_arguments_and_flags_are_not_printed(place):
    done = place.run("--api-key", KEY, MODEL_PATH="default", EXTRA_ARGS=f"--api-key={KEY}")
    assert done.returncode == 0, done.stderr
    assert "--api-key '***'" in done.stdout
    assert KEY not in done.stdout + done.stderr
    done = place.run(MODEL_PATH="default", EXTRA_ARGS=f"--api-key '{KEY}")
    assert "EXTRA_ARGS cannot be split into words (No closing quotation)" in done.stderr
    assert KEY not in done.stdout + done.stderr


# ---- single variables


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({"DFLASH_DRAFTER": ""}, {"draft": "none"}),
        ({"DFLASH_DRAFTER": "off"}, {"draft": "none"}),
        ({"DFLASH_DRAFTER": " org/draft "}, {"draft": "org/draft"}),
        ({}, {}),
        ({"DFLASH_NUM_SPEC_TOKENS": "0"}, {"width": "1"}),
        ({"MAX_NUM_SEQS": ""}, {}),
        ({"MAX_NUM_SEQS": "auto"}, {"max_num_seqs": "auto"}),
        ({"ENABLE_TURBOQUANT": "0"}, {}),
    ],
)
def test_a_variable_becomes_a_setting(variables, settings):
    assert read_container(variables).settings == settings


def test_variables_of_others_are_none_of_ours():
    others = (
        "VLLM_API_KEYS",
        "MODULEPATH",
        "MODEL_NAME",
        "SUPPORT",
        "EXTRA_CFLAGS",
        "MODEL_SERVICE_PORT",
        "REPORT",
    )
    assert read_container(dict.fromkeys(others, "x")).settings == {}


def test_turboquant_without_its_switch_has_no_effect_and_says_so():
    wanted = read_container({"TQ_MODE": "hybrid", "TQ_KEY_BITS": "4"})
    assert wanted.notes == ("TQ_MODE, TQ_KEY_BITS: no effect without ENABLE_TURBOQUANT=1",)
    assert wanted.turboquant == {}
    with pytest.raises(SettingsError, match=r"TQ_BITS is no variable of this container"):
        read_container({"TQ_BITS": "4"})


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({}, {"kv_dtype": "tq4v3"}),  # as in the documents' container
        ({"TQ_MODE": "hybrid", "TQ_KEY_BITS": "4", "TQ_VALUE_BITS": "3"}, {"kv_dtype": "tq4v3"}),
        ({"TQ_MODE": "FULL_TQ", "TQ_VALUE_BITS": "4"}, {"kv_dtype": "tq4"}),
        ({"TQ_KEY_BITS": "8", "TQ_VALUE_BITS": "8"}, {"kv_dtype": "int8"}),
        ({"TQ_RING_CAPACITY": "256"}, {"kv_dtype": "tq4v3", "kv_window": "256"}),
        ({"TQ_INITIAL_LAYERS": "0", "KV_CACHE_DTYPE": "auto"}, {"kv_dtype": "tq4v3"}),
    ],
)
def test_turboquant_is_a_format_of_our_engine(variables, settings):
    wanted = read_container({"ENABLE_TURBOQUANT": "1", **variables})
    assert (wanted.turboquant, wanted.notes) == (settings, ())


@pytest.mark.parametrize(
    ("variables", "note"),
    [
        ({"TQ_MODE": "off"}, "TQ_MODE = off: keys and values are not compressed"),
        ({"TQ_MODE": "capture_only"}, "TQ_MODE = capture_only: served with exact .* `blockdraft kv MODEL`"),
        ({"TQ_INITIAL_LAYERS": "4"}, "TQ_INITIAL_LAYERS = 4: no effect, all layers are kept alike"),
        (
            {"TQ_VALUE_GROUP_SIZE": "32"},
            "TQ_VALUE_GROUP_SIZE = 32: no effect, each key and each value has one",
        ),
    ],
)
def test_what_turboquant_does_not_do_here_is_said(variables, note):
    wanted = read_container({"ENABLE_TURBOQUANT": "1", **variables})
    assert re.match(note, wanted.notes[0])
    assert bool(wanted.turboquant) == ("TQ_MODE" not in variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TQ_MODE": "fast"}, "TQ_MODE = fast is unknown: use one of hybrid, full_tq, capture_only, off"),
        ({"TQ_KEY_BITS": "3"}, r"TQ_KEY_BITS = 3 with TQ_VALUE_BITS = 3: .* 4/3 \(tq4v3\), 4/4 \(tq4\), 8/8"),
        ({"TQ_VALUE_BITS": "2"}, "TQ_KEY_BITS = 4 with TQ_VALUE_BITS = 2: there is no such format"),
        ({"TQ_RING_CAPACITY": "8"}, "TQ_RING_CAPACITY: '8' is not a whole number of at least 16"),
        ({"TQ_RING_CAPACITY": "many"}, "TQ_RING_CAPACITY: 'many' is not"),
        ({"KV_CACHE_DTYPE": "fp8"}, "KV_CACHE_DTYPE = fp8, but TurboQuant is tq4v3: set one of them"),
    ],
)
def test_turboquant_that_does_not_exist_is_refused_with_what_does(variables, message):
    with pytest.raises(SettingsError, match=message):
        read_container({"ENABLE_TURBOQUANT": "1", **variables})


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({"ENABLE_TURBOQUANT": "1", "TQ_RING_CAPACITY": "64"}, {"--kv-dtype=tq4v3", "--kv-window=64"}),
        ({"KV_CACHE_DTYPE": "int8"}, {"--kv-dtype=int8"}),
    ],
)
def test_our_engine_is_told_how_to_keep_keys_and_values(variables, flags):
    argv, _, _ = serve_words(read_container({"MODEL_PATH": "org/name", **variables}), [])
    assert flags <= set(argv)


@pytest.mark.parametrize(
    ("path", "name"), [("/models/target/", "target"), ("org/name@v1", "name"), ("default", "default")]
)
def test_clients_call_the_model_by_the_end_of_its_path(path, name):
    assert read_container({"MODEL_PATH": path}).served_name == name


def test_two_keys_that_differ_are_refused_without_showing_them():
    with pytest.raises(SettingsError) as error:
        read_container({"VLLM_API_KEY": KEY, "BLOCKDRAFT_API_KEY": "other"})
    assert KEY not in str(error.value)
    assert KEY not in repr(read_container({"VLLM_API_KEY": KEY}))
    assert read_container({"VLLM_API_KEY": KEY, "BLOCKDRAFT_API_KEY": KEY}).api_key == KEY


def test_bad_numbers_are_named():
    with pytest.raises(SettingsError, match="DFLASH_NUM_SPEC_TOKENS: '-1' is not a whole number"):
        read_container({"DFLASH_NUM_SPEC_TOKENS": "-1"})
    with pytest.raises(SettingsError, match="GPU_MEMORY_UTILIZATION: 'most' is not a number"):
        read_container({"GPU_MEMORY_UTILIZATION": "most"})


def test_a_turned_off_drafter_overrules_a_recipe():
    argv, resolved, _ = serve_words(read_container({"DFLASH_DRAFTER": "off"}), ["--recipe", "qwen3-8b"])
    assert resolved.settings.draft == "none"
    assert "--served-model-name=Qwen3-8B" in argv


def test_keys_are_masked_wherever_they_stand():
    words = ["--api-key", "a", "--hf-token=b", "--engine-args=--api-key c --x d", "--engine-env=HF_TOKEN=e"]
    assert masked(words) == (
        "--api-key",
        "***",
        "--hf-token=***",
        "--engine-args=--api-key '***' --x d",
        "--engine-env=HF_TOKEN=***",
    )
    harmless = (
        "--max-num-batched-tokens",
        "8",
        "--api-key-file",
        "f",
        "--tokenizer",
        "t",
        "--engine-env=A=b",
    )
    assert masked(harmless) == harmless


# ---- folders


def test_folders_that_hold_no_model_are_told_apart(tmp_path):
    def told(folder):
        with pytest.raises(SettingsError) as error:
            check_model(str(folder), variable="MODEL_PATH")
        return str(error.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is an empty folder: engines make one where the host's folder of -v does not exist" in told(empty)
    (empty / "x").write_text("")
    assert "has no config.json" in told(empty)
    (empty / "snapshots" / COMMIT).mkdir(parents=True)
    assert f"give {empty}/snapshots/{COMMIT}, or the id" in told(empty)
    (empty / "config.json").symlink_to("../../blobs/abc")
    assert "config.json is a link to ../../blobs/abc, which is not mounted" in told(empty)
    (empty / "config.json").unlink()
    (empty / "config.json").write_text("{}")
    check_model(str(empty), variable="MODEL_PATH")


@pytest.mark.parametrize("source", ["a/b/c", "./x", "~/x", "name", "/no/such/folder", "C:\\models", "x.gguf"])
def test_what_is_neither_here_nor_a_hub_id_is_not_looked_for_on_the_hub(source):
    with pytest.raises(SettingsError, match="is no folder in this container and no hub id"):
        check_model(source, variable="MODEL_PATH")


def test_hub_ids_and_files_pass(tmp_path):
    (tmp_path / "m.gguf").write_text("")
    for source in ("default", "z-lab/Qwen3.5-27B-DFlash", "org/name@refs/pr/1", str(tmp_path / "m.gguf")):
        check_model(source, variable="MODEL_PATH")


# ---- health


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_whether_the_server_is_ready(status, code):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        done = health(server.server_port)
        server.shutdown()
    assert (done.returncode, asked) == (code, ["/health"])


def test_the_health_check_of_a_server_that_is_not_there_fails_in_one_line():
    done = health(1)
    assert done.returncode == 1
    assert re.fullmatch(r"not ready: .*\n", done.stderr)


def health(port):
    environment = {"PORT": str(port), "http_proxy": "http://127.0.0.1:9", "PATH": os.environ["PATH"]}
    script = ROOT / "container" / "healthcheck"
    return subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=30
    )
