"""Trials on a few documents: the engine's own steps, exactly, at the cost of those steps."""

import json
import shutil
from dataclasses import replace

import pytest

from blockdraft import LLM
from blockdraft.models.dflash import DFlash
from blockdraft.training import probe as probe_module
from blockdraft.training.answers import Document
from blockdraft.training.probe import AcceptanceProbe
from tests import tiny
from tests.training import pairs

PROMPTS = [[0, 2, 4, 6], [7], [1, 4, 7, 10, 13], [50, 3, 21], [30, 31, 32, 33, 34, 35]]
MAX_TOKENS = (33, 9, 20, 33, 2)  # documents of very different lengths


def load(folder, **changes):
    shutil.copytree(tiny.DRAFT, folder)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return LLM(tiny.TARGET, str(folder), dtype="float64", device="cpu", prefix_cache=False, max_model_len=200)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return load(tmp_path_factory.mktemp("pair") / "draft")


def answered(llm):
    return pairs.engine_steps(llm.engine, PROMPTS, max_tokens=MAX_TOKENS, temperature=0.0, width=8)


def test_another_configuration_is_tried_as_if_it_were_loaded(llm, tmp_path):
    """Taps in another order, another mask, causal: on the same documents, with the same features."""
    documents, own = answered(llm)
    models = llm.engine.models
    raw = json.loads((tiny.PAIR / "draft" / "config.json").read_text())["dflash_config"]
    dflash = raw | {"target_layer_ids": [2, 0, 1], "mask_token_id": 5}
    other = load(tmp_path / "draft", dflash_config=dflash, is_causal=True)
    config = replace(models.draft_config, taps=(2, 0, 1), mask_token_id=5, is_causal=(True, True))
    assert config == replace(other.engine.models.draft_config, name=config.name)
    again, found = answered(other)
    assert again == documents
    assert found != own
    probe = AcceptanceProbe(models.drafter, documents, (3, 2, 1, 0))
    assert probe.walk(models.draft_config, 8) == own
    assert probe.walk(config, 8) == found
    assert models.drafter.model.config == models.draft_config


def test_features_are_read_once_and_only_blocks_of_steps_are_drafted(llm, monkeypatch):
    documents, found = answered(llm)
    num_read, num_drafted = [], []
    read, forward = probe_module.FeatureReader.read, DFlash.forward
    monkeypatch.setattr(
        probe_module.FeatureReader, "read", lambda *args: (num_read.append(1), read(*args))[1]
    )
    monkeypatch.setattr(
        DFlash, "forward", lambda self, x, *rest: (num_drafted.append(len(x)), forward(self, x, *rest))[1]
    )
    models = llm.engine.models
    probe = AcceptanceProbe(models.drafter, documents, range(4))
    for mask in (63, 5, 6):
        probe.walk(replace(models.draft_config, mask_token_id=mask), 8)
    assert len(num_read) == len(documents)
    num_drafted.clear()
    probe.walk(models.draft_config, 8)
    assert sum(num_drafted) == tiny.BLOCK * found.num_steps


def test_the_target_keeps_its_taps(llm, monkeypatch):
    models, seen = llm.engine.models, []

    def interrupted(reader, rows, chosen):
        seen.append(models.target.taps)
        raise KeyboardInterrupt

    monkeypatch.setattr(probe_module.FeatureReader, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AcceptanceProbe(models.drafter, [Document((1, 2), (3, 4), "all", True)], (3, 2, 3))
    assert seen == [(2, 3)]
    assert models.target.taps == (0, 1, 2)
