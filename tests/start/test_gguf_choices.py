"""A GGUF file that is given by its path: what a start chooses for it, and that it says so."""

import json
import shutil

import numpy as np
import pytest

from blockdraft.cli.main import main
from blockdraft.planner.pair import open_pair
from blockdraft.settings import model_source, shipped
from blockdraft.settings.model_source import DEFAULT_SHA256
from blockdraft.settings.settings import Settings
from blockdraft.start import loading
from blockdraft.start.loading import open_models
from tests import tiny
from tests.checkpoints.gguf_files import BPE_TOKENS, HIDDEN, weights, write

SMALL = {"device": "cpu", "max_model_len": 64}
QWEN = {"general.name": "Qwen3 8B"}
DRAFTER = "z-lab/Qwen3-8B-DFlash-b16"


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """The hub's cache, empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def file(tmp_path):
    return str(write(tmp_path / "mine.gguf"))


def chosen(file, **settings):
    return open_models(Settings(model=str(file), **SMALL, **settings), lambda line: None).labels.chosen


def put_drafter(hub):
    """A drafter with weights, as the hub's client leaves it."""
    snapshot = hub / f"models--{DRAFTER.replace('/', '--')}" / "snapshots" / "0123"
    shutil.copytree(tiny.DRAFT, snapshot)
    return snapshot


def test_what_is_chosen_is_said_with_its_reason(file):
    drafter, stored, sampling = chosen(file)
    assert drafter == "drafter: none, so decoding is plain: none is known for this model"
    assert stored.startswith("weights: F32, computed in float32: the file is GGUF; unpacked it fits easily")
    assert "temperature 0.8, top_p 0.95, top_k 40, min_p 0.05 (llama.cpp's defaults" in sampling


def test_what_the_user_has_set_is_not_told(file):
    assert chosen(file, draft="none", quantization="none", sampling_defaults="openai") == ()
    assert chosen(tiny.TARGET) == (), "a folder says itself how to sample"


def test_the_files_own_sampling_is_named_as_such(tmp_path):
    path = write(tmp_path / "x.gguf", metadata={"general.sampling.temp": 0.6})
    assert "temperature 0.6, " in chosen(path)[-1]
    assert "(temperature from the file, the rest llama.cpp's defaults)" in chosen(path)[-1]


def test_a_drafter_that_is_known_but_not_here_is_named_with_how_to_fetch_it(tmp_path):
    drafter = chosen(write(tmp_path / "x.gguf", metadata=QWEN))[0]
    assert f"`blockdraft fetch {DRAFTER}` brings it" in drafter
    assert "was made for Qwen/Qwen3-8B" in drafter


def test_a_known_drafter_that_does_not_match_is_left_out_and_the_start_goes_on(tmp_path, hub, monkeypatch):
    snapshot = put_drafter(hub)
    monkeypatch.setattr("blockdraft.checkpoints.fetch.hub_folder", lambda repo, **_: snapshot)
    settings = Settings(model=str(write(tmp_path / "x.gguf", metadata=QWEN)), **SMALL)
    opened = open_models(settings, lambda line: None)
    assert opened.draft is None
    assert f"{DRAFTER} cannot be used (" in opened.labels.chosen[0]
    assert open_pair(settings).draft is None


def test_a_known_drafter_that_is_here_is_taken(tmp_path, hub, monkeypatch):
    snapshot = put_drafter(hub)
    monkeypatch.setattr("blockdraft.checkpoints.fetch.hub_folder", lambda repo, **_: snapshot)
    monkeypatch.setattr(loading, "check_pair", lambda *_: None)
    monkeypatch.setattr("blockdraft.planner.pair.check_pair", lambda *_: None)
    monkeypatch.setattr("blockdraft.planner.stored.read_remote", lambda *_, **__: (snapshot, None))
    settings = Settings(model=str(write(tmp_path / "x.gguf", metadata=QWEN)), **SMALL)
    opened = open_models(settings, lambda line: None)
    assert opened.draft.config.name == DRAFTER
    assert opened.labels.chosen[0] == "drafter: Qwen3-8B-DFlash-b16, which was made for this model"
    assert open_pair(settings).draft.stored.name == DRAFTER


def test_the_default_models_file_is_served_as_the_default_model_is(file, tmp_path, monkeypatch):
    monkeypatch.setattr(model_source, "_is_default_file", lambda path: path == file)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    shutil.copytree(tiny.DRAFT, tmp_path / "smollm2-135m-instruct")
    monkeypatch.setattr(loading, "check_pair", lambda *_: None)
    opened = open_models(Settings(model=file, **SMALL), lambda line: None)
    assert opened.draft.config.name == str(tmp_path / "smollm2-135m-instruct")
    assert opened.plan.quantization == "int8"
    assert opened.target.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert opened.labels.chosen[0] == f"file: '{file}' is the default model's: served as --model default is"
    assert "(as its model card says)" in opened.labels.chosen[-1]


def test_the_command_says_it_on_stderr_and_in_the_answer(tmp_path, capsys):
    embedding = np.random.default_rng(0).standard_normal((len(BPE_TOKENS), HIDDEN), np.float32)
    tensors = weights() | {"token_embd.weight": embedding}
    file = str(write(tmp_path / "whole.gguf", tensors=tensors))
    flags = ["--device", "cpu", "--max-model-len", "64", "--max-tokens", "2", "--raw", "--json"]
    assert main(["generate", "--model", file, *flags, "ab"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["sampling_defaults"]["temperature"] == 0.8
    assert captured.err.splitlines()[: len(answer["chosen"])] == answer["chosen"]


def test_the_digest_is_that_of_the_download():
    from blockdraft.checkpoints.fetch import SMOLLM2

    assert SMOLLM2.gguf_sha256 == DEFAULT_SHA256
