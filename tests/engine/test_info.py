"""EngineInfo: what runs, and which weights draft."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from blockdraft.check.selfcheck import without_drafter
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.checkpoints.opening import StoredForm, open_checkpoint, stored_form
from blockdraft.engine.describe import engine_info, fingerprint, kv_text
from blockdraft.engine.engine import Engine
from blockdraft.settings.settings import cache_dir
from blockdraft.step.ngram import NgramDrafter
from tests import tiny


def test_a_drafter_is_known_by_its_weights():
    known = engine_info(tiny.engine()).draft_hash
    assert engine_info(tiny.engine(max_num_seqs=2)).draft_hash == known
    assert len(known) == 16
    assert engine_info(tiny.engine("random")).draft_hash != known
    assert engine_info(tiny.engine(dtype="float32")).draft_hash != known
    assert engine_info(tiny.engine("none")).draft_hash is None


def test_what_drafts_is_named():
    assert engine_info(tiny.engine()).draft_kind == "DFlash"
    assert engine_info(tiny.engine(draft_ngram=3)).draft_kind == "DFlash and n-grams of 3"
    engine = tiny.engine()
    models, plan = without_drafter(engine.models, engine.plan)
    assert engine_info(Engine(models, plan)).draft_kind is None
    models = replace(models, drafter=NgramDrafter(8, 1))
    assert engine_info(Engine(models, replace(plan, draft_ngram=1))).draft_kind == "n-grams"


def test_a_pair_has_names_formats_and_sizes():
    info = engine_info(tiny.engine(dtype="float32"))
    assert (info.target_title, info.draft_title) == ("target", "draft")  # folders, without the way there
    assert info.target_format == "safetensors float32"
    assert info.target_computed == "computed in float32"
    assert info.target_bytes == pytest.approx(
        (Path(tiny.TARGET) / "model.safetensors").stat().st_size, rel=0.2
    )
    engine = tiny.engine()
    alone = engine_info(Engine(*without_drafter(engine.models, engine.plan)))
    assert (alone.draft_title, alone.draft_format, alone.draft_bytes) == (None, None, None)


def test_how_keys_and_values_are_kept_is_told():
    exact, small = (
        engine_info(tiny.engine(dtype="float32", num_pages=16, **kept)) for kept in ({}, {"kv_dtype": "int8"})
    )
    assert (exact.kv_dtype, exact.draft_kv_dtype, exact.kv_window) == ("float32", "float32", None)
    assert exact.kv_compression == 1.0
    assert (small.kv_dtype, small.draft_kv_dtype, small.kv_window) == ("int8", "float32", 128)
    assert small.kv_compression == pytest.approx(exact.kv_bytes_per_token / small.kv_bytes_per_token)
    assert small.kv_compression > 1


def test_the_log_names_compressed_keys_and_values():
    exact = tiny.engine(dtype="float32")
    assert kv_text(exact.models, exact.plan) == ""
    both = tiny.engine(dtype="float32", num_pages=16, kv_dtype="int8", draft_kv_dtype="tq4")
    assert re.fullmatch(
        r"keys and values in int8, the drafter's in tq4 \(\d\.\dx\)", kv_text(both.models, both.plan)
    )


def test_a_folder_is_named_by_how_it_is_quantised():
    checkpoint = SimpleNamespace(tensors=dict)
    assert stored_form(checkpoint, "org/Empty", None) == StoredForm("Empty", "safetensors empty", 0)
    assert stored_form(checkpoint, "org/Small", "fp8").format == "safetensors fp8"
    assert stored_form(None, "default", None) == StoredForm("SmolLM2-135M-Instruct", "random weights", 0)


@pytest.mark.skipif(not (cache_dir() / SMOLLM2.gguf).exists(), reason="the default model is not on this disk")
def test_the_default_model_has_its_own_name():
    form = stored_form(open_checkpoint("default"), "default", None)
    assert form == StoredForm("SmolLM2-135M-Instruct", "GGUF Q4_1", SMOLLM2.gguf_bytes)


def test_a_fingerprint_sees_names_shapes_dtypes_and_values():
    def model(weight, name="weight"):
        found = nn.Module()
        found.register_buffer(name, weight)
        return found

    zeros = torch.zeros(4, 6)
    kinds = [
        model(zeros),
        model(zeros, "other"),
        model(zeros.view(6, 4)),
        model(zeros.half()),
        model(zeros.bfloat16()),
        model(zeros + 1),
        model(torch.zeros(0)),
        model(torch.zeros(())),
        model(zeros.to(torch.float8_e4m3fn)),
    ]
    assert len({fingerprint(kind) for kind in kinds}) == len(kinds)
    large = torch.zeros(100_000)
    large[-1] = 1  # the ends are always looked at
    assert fingerprint(model(large)) != fingerprint(model(torch.zeros(100_000)))
