"""The container's entrypoint in an environment of its own: no container engine, no network."""

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from blockdraft.cli import container as entrypoint
from blockdraft.cli.container import _fetch, serve_words
from blockdraft.cli.flags import masked
from blockdraft.errors import SettingsError
from blockdraft.launch import container
from blockdraft.launch.container import check_model, read_container

ROOT = Path(__file__).parents[2]
KEY = "sk-very-secret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Place:
    """Stands for the container: notes what `blockdraft` would be called with."""

    def __init__(self, folder, monkeypatch, capsys):
        self.folder, self._patch, self._capsys = folder, monkeypatch, capsys
        self.model = folder / "models" / "target"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        self.calls = []  # of each its words and its environment
        self.planned, self.plan_code = {}, 0  # by the size of a prefill step the longest context
        monkeypatch.setattr(entrypoint.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(entrypoint, "subprocess", SimpleNamespace(run=self._start))
        monkeypatch.setattr(entrypoint.os, "execve", self._become)

    def _start(self, words, *, env, **_):
        self.calls.append((words[1:], dict(env)))
        if "--json" not in words:
            return SimpleNamespace(returncode=self.plan_code if words[1] == "plan" else 0)
        flag = "--max-prefill-tokens"
        size = words[words.index(flag) + 1] if flag in words else "own"
        found = json.dumps({"capacity": {"max_model_len": self.planned.get(size, 0)}})
        return SimpleNamespace(returncode=0 if size in self.planned else 2, stdout=found)

    def _become(self, program, words, env):
        self.calls.append((words[1:], dict(env)))
        raise SystemExit(0)

    def run(self, *words, **variables):
        """Run the entrypoint with these variables; return its exit code and what it wrote."""
        given = {name: str(value) for name, value in variables.items()}
        with self._patch.context() as patch:
            for name in os.environ:
                patch.delenv(name)
            for name, value in (given | {"PATH": "/bin", "HOME": str(self.folder)}).items():
                patch.setenv(name, value)
            try:
                code = entrypoint.main(words)
            except SystemExit as end:
                code = end.code
        wrote = self._capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=wrote.out, stderr=wrote.err)

    def serve(self, *words, **variables):
        """Run it as far as the server; return the server's words and environment."""
        done = self.run(*words, **variables)
        assert done.returncode == 0, done.stderr
        self.stdout = done.stdout
        assert self.calls[-1][0][0] == "serve"
        return self.calls[-1]


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    return Place(tmp_path, monkeypatch, capsys)


def test_the_script_of_the_image_plans_and_serves_what_is_in_the_hubs_cache(tmp_path):
    """The only test with the shell, and with the hub's library as it is."""
    log, folder = tmp_path / "calls", tmp_path / "bin"
    folder.mkdir()
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'  # no link: Python would not find its packages
    for name, text in (("python3", python), ("blockdraft", f'#!/bin/sh\necho "$@" >> {log}\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for repo in ("models--org--name", "models--org--draft"):  # as a download leaves it
        snapshot = tmp_path / "hub/hub" / repo / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs/main").write_text(COMMIT)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    environment |= {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    def run(*words, **variables):
        command = ["/bin/sh", str(ROOT / "container/entrypoint"), *words]
        return subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, timeout=60
        )

    done = run(MODEL_PATH="org/name", DFLASH_DRAFTER="org/draft")
    assert done.returncode == 0, done.stderr
    plan, serve = log.read_text().splitlines()
    assert plan.startswith("plan ")
    assert serve.endswith(f"--model=org/name@{COMMIT} --draft=org/draft@{COMMIT}")
    assert "--served-model-name=name" in serve
    assert f"org/name is org/name@{COMMIT}" in done.stdout
    done = run(MODEL_PATH="org/other")
    assert done.returncode == 2
    assert "'org/other' is not in the hub's cache, and the hub cannot be reached" in done.stderr
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["plan", "serve", "plan"]
    done = run("sh", "-c", "echo $0 $1", "a", "b c")  # a first word that is no flag is a command
    assert (done.returncode, done.stdout) == (0, "a b c\n")


def test_the_line_that_people_copy_plans_and_then_serves(place):
    serve, environment = place.serve(
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
    ((plan, _), _) = place.calls
    assert plan[0] == "plan"
    assert serve[:3] == ["serve", "--host=0.0.0.0", "--port=8000"]
    assert {
        *(f"--model={place.model}", f"--draft={place.model}", "--width=16", "--max-model-len=65536"),
        *("--max-num-seqs=16", "--max-prefill-tokens=32768", "--gpu-memory-utilization=0.85"),
        *("--kv-dtype=auto", "--served-model-name=qwen35-dflash"),
    } <= set(serve)
    assert plan[plan.index("--width") + 1] == "16"
    assert environment["BLOCKDRAFT_API_KEY"] == KEY
    assert not set(environment) & set(container.VARIABLES)
    assert not any("attention" in word for word in serve)
    assert "ATTENTION_BACKEND is ignored: the native engine has its own" in place.stdout
    assert KEY not in place.stdout + json.dumps([plan, serve])


def test_another_engine_gets_its_own_words(place):
    serve, environment = place.serve(
        MODEL_PATH=place.model,
        BLOCKDRAFT_ENGINE="vllm",
        ATTENTION_BACKEND="flash_attn",
        KV_CACHE_DTYPE="fp8_e4m3",
        QUANTIZATION="modelopt",
        EXTRA_ARGS="""--limit-mm-per-prompt '{"image": 4}'""",
    )
    assert {"--attention-backend=flash_attn", "--kv-dtype=fp8_e4m3"} <= set(serve)
    extra = """--engine-args=--limit-mm-per-prompt '{"image": 4}' --quantization modelopt"""
    assert extra in serve
    assert environment["BLOCKDRAFT_ENGINE"] == "vllm"
    plan, plan_environment = place.calls[0]
    assert extra in plan
    assert "BLOCKDRAFT_ENGINE" not in plan_environment, "it has all of them as flags"


def tuned(place, kind="qwen3_5", planned=None, **variables):
    (place.model / "config.json").write_text(json.dumps({"model_type": kind}))
    place.planned = {"32768": 4096} if planned is None else planned
    variables = {"DFLASH_DRAFTER": place.model, "BLOCKDRAFT_ENGINE": "vllm", **variables}
    serve, _ = place.serve(MODEL_PATH=place.model, **variables)
    names = ("--max-model-len", "--max-num-seqs", "--max-prefill-tokens", "--attention-backend", "--width")
    return {word.partition("=")[0][2:]: word.partition("=")[2] for word in serve if word.startswith(names)}


@pytest.mark.parametrize(
    ("planned", "variables", "length", "rows", "chunk"),
    [
        ({"32768": 262144}, {}, "65536", "16", "32768"),
        ({"32768": 4096}, {}, "4096", "16", "32768"),
        ({"own": 8192}, {}, "8192", None, None),  # steps of 32,768 leave no room
        ({"512": 8192}, {"MAX_NUM_BATCHED_TOKENS": 512}, "8192", "16", "512"),
        ({"32768": 4096}, {"MAX_MODEL_LEN": 9, "MAX_NUM_SEQS": 2}, "9", "2", "32768"),
    ],
)
def test_vllm_gets_what_the_documents_tuned_as_far_as_model_memory_and_user_allow(
    place, planned, variables, length, rows, chunk
):
    found = tuned(place, planned=planned, **variables)
    expected = {"max-model-len": length, "max-num-seqs": rows, "max-prefill-tokens": chunk}
    kept = {name: value for name, value in expected.items() if value is not None}
    assert found == kept | {"attention-backend": "flash_attn"}  # no width: the drafter's block decides
    plan = place.calls[-2][0]
    assert plan[plan.index("--max-model-len") + 1] == length, "the plan is made of what will be served"


@pytest.mark.parametrize(
    "variables",
    [{"DFLASH_DRAFTER": "off"}, {"BLOCKDRAFT_ENGINE": "sglang"}, {"BLOCKDRAFT_ENGINE": "native"}, {}],
)
def test_other_starts_are_as_they_were(place, variables):
    planned = {} if not variables else None  # the last one: no plan, no tuning
    assert tuned(place, planned=planned, **variables) == {}


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_text", "gpt_oss"])
def test_models_made_for_another_backend_keep_it(place, kind):
    assert "attention-backend" not in tuned(place, kind)
    assert tuned(place, kind, ATTENTION_BACKEND="triton_attn")["attention-backend"] == "triton_attn"


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
    serve, _ = place.serve(MODEL_PATH=place.model, BLOCKDRAFT_ENGINE=engine, QUANTIZATION=asked)
    plan, _ = place.calls[-2]
    assert expected in serve
    assert expected in plan or expected.partition("=")[2] == plan[plan.index("--quantization") + 1]


def test_flags_after_the_image_go_before_variables_and_extra_arguments_reach_our_server(place):
    extra = "--no-graphs --access-log"
    serve, _ = place.serve("--max-num-seqs", "2", MODEL_PATH=place.model, MAX_NUM_SEQS=16, EXTRA_ARGS=extra)
    assert "--access-log" in serve
    assert serve.index("--max-num-seqs=16") < serve.index("--max-num-seqs")
    plan, _ = place.calls[0]
    assert plan[plan.index("--max-num-seqs") + 1] == "2"
    assert "--no-graphs" in plan


def test_a_plan_that_does_not_fit_starts_and_fetches_nothing(place):
    place.plan_code = 2
    done = place.run(MODEL_PATH="org/name")
    assert done.returncode == 2
    assert [words[0] for words, _ in place.calls] == ["plan"]
    assert "fetching" not in done.stdout


def test_the_default_model_is_fetched_before_the_plan_reads_it(place):
    place.serve(MODEL_PATH="default", DFLASH_DRAFTER="dflash2")
    assert [words[0] for words, _ in place.calls] == ["fetch", "plan", "serve"]


def test_another_engine_is_kept_to_what_was_fetched_by_being_offline(monkeypatch):
    fetched = []

    def hub_folder(repo, *, revision, is_whole):
        fetched.append((repo, revision, is_whole))
        return Path("/cache", COMMIT)

    monkeypatch.setattr("blockdraft.checkpoints.fetch.hub_folder", hub_folder)
    pair = {"model": "org/name", "draft": "org/draft"}
    assert _fetch(pair, "sglang", (), {"A": "b"}) == ([], {"A": "b", "HF_HUB_OFFLINE": "1"})
    assert fetched == [("org/name", None, True), ("org/draft", None, True)], "with what only it reads"
    assert _fetch(pair, "vllm", ("--revision", "v1"), {}) == ([], {}), "it fetches that one itself"
    native = {"model": "org/name@v1", "draft": None}
    assert _fetch(native, "native", (), {}) == ([f"--model=org/name@{COMMIT}"], {})
    assert fetched[2:] == [("org/name", "v1", False)]


def test_a_recipe_names_the_models(place):
    recipe = place.folder / "own.toml"
    recipe.write_text(
        f'title = "x"\nmodel = "{place.model}"\nmax_rows = 3\n[engine]\nname = "vllm"\nargs = ["--a"]\n'
    )
    serve, _ = place.serve(BLOCKDRAFT_RECIPE=recipe, EXTRA_ARGS="--b", MAX_NUM_SEQS="")
    plan, _ = place.calls[0]
    assert plan[plan.index("--max-num-seqs") + 1] == "3"
    assert "--engine-args=--a --b" in plan
    assert "--served-model-name=target" in serve


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "MODEL_PATH is not set: give a hub id (-e MODEL_PATH=org/name)"),
        ({"MODEL_PATH": "/models/targt"}, "'/models/targt' is no folder in this container and no hub id"),
        (
            {"MODEL_PATH": "models/target"},
            "'models/target' looks like a folder in this container, not",
        ),
        ({"DFLASH_DRAFTER": "tmp/x"}, "DFLASH_DRAFTER = 'tmp/x' looks like a folder"),
        ({"ENABLE_TURBOQUANT": "1", "BLOCKDRAFT_ENGINE": "vllm"}, "does not work with vllm and a drafter"),
        ({"DFLASH_DRAFTR": "x"}, "DFLASH_DRAFTR is no variable of this container: did you mean"),
        ({"BLOCKDRAFT_WIDHT": "8"}, "did you mean BLOCKDRAFT_WIDTH?"),
        ({"MAX_MODEL_LENGTH": "8"}, "did you mean MAX_MODEL_LEN?"),
        ({"MODELPATH": "default"}, "did you mean MODEL_PATH?"),
        ({"EXTRA_ARGS": "--port 9000"}, "--port is fixed in the container: set PORT instead"),
        ({"MAX_MODEL_LEN": "64k"}, "MAX_MODEL_LEN: '64k' is not a whole number or 'auto'."),
        ({"EXTRA_ARGS": "--tensor-parallel=2"}, "tensor_parallel = 2 is not for the native engine"),
        ({"EXTRA_ARGS": "--gpu-layers 3"}, "unknown flag --gpu-layers"),
        ({"PORT": "http"}, "PORT: 'http' is not a whole number from 1 to 65535"),
        ({"QUANTIZATION": "bitsandbytes"}, "QUANTIZATION = bitsandbytes: our engine keeps what a checkpoint"),
        ({"MODEL_PATH": "org/name@v1", "BLOCKDRAFT_ENGINE": "vllm"}, "--revision v1 into EXTRA_ARGS"),
    ],
)
def test_what_cannot_work_is_named_before_anything_is_started(place, variables, message):
    done = place.run(**({"MODEL_PATH": "default"} if variables else {}) | variables, VLLM_API_KEY=KEY)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert place.calls == []


def test_the_port_is_a_variable(place):
    for flag in (["--port", "9000"], ["--host=::1"]):
        done = place.run(*flag, MODEL_PATH="default")
        assert done.returncode == 2
        assert "set PORT instead" in done.stderr
    assert "--port=9000" in place.serve(MODEL_PATH="default", PORT=9000)[0]


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
    others = "VLLM_API_KEYS MODULEPATH MODEL_NAME SUPPORT EXTRA_CFLAGS MODEL_SERVICE_PORT REPORT"
    assert read_container(dict.fromkeys(others.split(), "x")).settings == {}


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
        ({"TQ_RING_CAPACITY": "8"}, "TQ_RING_CAPACITY: '8' is not a whole number of at least 16"),
        ({"KV_CACHE_DTYPE": "fp8"}, "KV_CACHE_DTYPE = fp8, but TurboQuant is tq4v3: set one of them"),
    ],
)
def test_turboquant_that_does_not_exist_is_refused_with_what_does(variables, message):
    with pytest.raises(SettingsError, match=message):
        read_container({"ENABLE_TURBOQUANT": "1", **variables})


def test_clients_call_the_model_by_the_end_of_its_path():
    names = {"/models/target/": "target", "org/name@v1": "name", "default": "default"}
    assert {path: read_container({"MODEL_PATH": path}).served_name for path in names} == names


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


def test_turboquant_reaches_our_engine_and_a_turned_off_drafter_overrules_a_recipe():
    turboquant = {"ENABLE_TURBOQUANT": "1", "TQ_RING_CAPACITY": "64", "MODEL_PATH": "org/name"}
    assert {"--kv-dtype=tq4v3", "--kv-window=64"} <= set(serve_words(read_container(turboquant), [])[0])
    argv, resolved, _ = serve_words(read_container({"DFLASH_DRAFTER": "off"}), ["--recipe", "qwen3-8b"])
    assert resolved.settings.draft == "none"
    assert "--served-model-name=Qwen3-8B" in argv


def test_keys_are_masked_wherever_they_stand():
    words = ["--api-key", "a", "--hf-token=b", "--engine-args=--api-key c --x d", "--engine-env=HF_TOKEN=e"]
    hidden = "--api-key *** --hf-token=*** --engine-args=--api-key '***' --x d --engine-env=HF_TOKEN=***"
    assert " ".join(masked(words)) == hidden
    harmless = "--max-num-batched-tokens 8 --api-key-file f --tokenizer t --engine-env=A=b"
    assert masked(harmless.split()) == tuple(harmless.split())


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
    (tmp_path / "m.gguf").write_text("")
    ids = ("default", "z-lab/Qwen3.5-27B-DFlash", "org/name@refs/pr/1")
    for source in (str(empty), str(tmp_path / "m.gguf"), *ids):
        check_model(source, variable="MODEL_PATH")


@pytest.mark.parametrize("source", ["a/b/c", "./x", "~/x", "name", "C:\\models", "x.gguf"])
def test_what_is_neither_here_nor_a_hub_id_is_not_looked_for_on_the_hub(source):
    with pytest.raises(SettingsError, match="is no folder in this container and no hub id"):
        check_model(source, variable="MODEL_PATH")


# ---- health


def test_the_health_check_asks_whether_the_server_is_ready():
    asked, codes = [], {200: 0, 503: 1}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(list(codes)[len(asked)])
            asked.append(self.path)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        assert [health(server.server_port).returncode for _ in codes] == list(codes.values())
        server.shutdown()
    assert asked == ["/health"] * 2
    done = health(1)  # nobody is there
    assert done.returncode == 1
    assert re.fullmatch(r"not ready: .*\n", done.stderr)


def health(port):
    environment = {"PORT": str(port), "http_proxy": "http://127.0.0.1:9", "PATH": os.environ["PATH"]}
    script = ROOT / "container" / "healthcheck"
    return subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=30
    )
