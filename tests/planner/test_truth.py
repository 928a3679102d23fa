"""The plan against what is really allocated: on the CPU, with the shape of SmolLM2 and of every family."""

import functools
import gc
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from blockdraft.cache.spec import row_table_bytes
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.engine.engine import Engine
from blockdraft.machine.machine import Machine
from blockdraft.planner.memory_fit import fit_native
from blockdraft.planner.pair import Case, open_pair
from blockdraft.settings.settings import Settings, cache_dir
from blockdraft.start import loading
from blockdraft.start.loading import open_models
from tests import tiny
from tests.matrix import slow_but
from tests.planner.shapes import asked, opened

GIB = 1 << 30
MACHINE = Machine(memory_bytes=8 * GIB)
LARGE = ("smollm2", "default", "default-packed")
WORKING = ("activations", "graphs", "driver", "reserve")  # not there between two steps
_ALLOCATE = """
import gc, json, sys
import torch
from blockdraft.engine.engine import Engine
from blockdraft.start.loading import load_models
from blockdraft.settings.settings import Settings

def allocated():
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())

found = {}
for name, settings in json.loads(sys.argv[1]).items():
    before = allocated()
    models, plan = load_models(Settings(**settings), lambda line: None)
    engine = Engine(models, plan)
    found[name] = [allocated() - before, plan.num_pages]
    del engine, models
print(json.dumps(found))
"""


def cases():
    wanted = asked("smollm2-135m")
    dummy = {"model": wanted.model, "draft": wanted.draft, "load_format": "dummy"}
    pair = {
        "model": tiny.TARGET,
        "draft": tiny.DRAFT,
        "device": "cpu",
        "max_num_seqs": 2,
        "max_model_len": 256,
    }
    found = {
        "smollm2": dummy | {"device": "cpu", "max_num_seqs": 4, "max_model_len": 2048},
        "pair": pair,
        "pair-tq4": pair | {"kv_dtype": "tq4", "draft_kv_dtype": "int8"},
        "pair-int8": pair | {"quantization": "int8", "draft_quantization": "int8"},
    }
    if (cache_dir() / SMOLLM2.gguf).exists():
        default = {"model": "default", "device": "cpu", "max_num_seqs": 4, "max_model_len": 512}
        found |= {"default": default, "default-packed": default | {"quantization": "keep"}}
    return found


@functools.cache
def allocated(is_large):
    """By case, the bytes of every tensor that an engine holds (weights, cache, rows, tables); its pages."""
    wanted = {name: settings for name, settings in cases().items() if (name in LARGE) is is_large}
    command = [sys.executable, "-c", _ALLOCATE, json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name", slow_but([*LARGE, "pair", "pair-tq4", "pair-int8"], "pair", "pair-tq4", "pair-int8")
)
def test_an_engine_takes_what_was_planned(name):
    if name not in cases():
        pytest.skip("default model not fetched: blockdraft fetch")
    settings = Settings(**cases()[name])
    fit = fit_native(Case(settings, MACHINE, open_pair(settings)))
    planned = sum(item.num_bytes for item in fit.items if item.name not in WORKING)
    found, num_pages = allocated(name in LARGE)[name]
    assert fit.problem is None
    assert fit.plan.num_pages == num_pages
    assert planned == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("shape", ["qwen3-8b", "smollm2-135m", "qwen3.5-35b-a3b", "gpt-oss-20b"])
def test_the_engine_follows_the_plan_that_was_shown(monkeypatch, shape):
    """Field by field: nothing is resolved twice in two ways."""
    machine = Machine(memory_bytes=200 * GIB)
    monkeypatch.setattr(loading, "read_machine", lambda: machine)
    wanted, pair = opened(shape, device="cpu")
    opened_models = open_models(wanted, lambda line: None)
    assert fit_native(Case(wanted, machine, pair)).plan == opened_models.plan
    gc.collect()


def test_weights_are_counted_as_make_plan_counts_them(monkeypatch):
    """A packed checkpoint stays packed in the plan exactly where the engine leaves it packed."""
    seen = []
    real = loading.resolve

    def noting(*args, **kwargs):
        seen.append((kwargs["weights"], kwargs["draft_weights"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(loading, "resolve", noting)
    settings = Settings(model=tiny.TARGET, draft=tiny.DRAFT, device="cpu")
    open_models(settings, lambda line: None)
    pair = open_pair(settings)
    assert seen == [(pair.target.weights, pair.draft.weights)]


def test_planning_does_not_depend_on_how_torch_counts():
    """float32 on a CPU, bfloat16 on a card: the same values at other widths."""
    wanted, pair = opened("smollm2-135m")
    on_cpu = fit_native(Case(replace(wanted, device="cpu"), MACHINE, pair))
    on_gpu = fit_native(Case(wanted, Machine(8 * GIB, gpu_bytes=80 * GIB, gpu_free_bytes=80 * GIB), pair))
    assert on_cpu.parts[0].text == 2 * on_gpu.parts[0].text
    assert torch.float32.itemsize == 2 * torch.bfloat16.itemsize


@pytest.mark.parametrize(
    "kept",
    [
        {"kv_dtype": "int8"},
        {"kv_dtype": "tq4"},
        {"kv_dtype": "tq4v3", "draft_kv_dtype": "tq4", "kv_window": 40},
        {"draft_kv_dtype": "tq4"},
    ],
)
def test_a_compressed_cache_takes_what_was_planned_to_the_byte(kept):
    given = {
        "model": tiny.TARGET,
        "draft": tiny.DRAFT,
        "device": "cpu",
        "max_num_seqs": 2,
        "max_model_len": 256,
    }
    settings = Settings(**given, **kept)
    fit = fit_native(Case(settings, MACHINE, open_pair(settings)))
    engine = Engine(loading.load_models(settings, lambda line: None)[0], fit.plan)
    caches = ("target cache", "drafter cache", "exact windows")
    planned = {item.name: item.num_bytes for item in fit.items}
    assert sum(planned[name] for name in caches) == engine.cache.num_bytes
    tables = (engine.rows.page_table, engine.rows.exact_table)
    per_row = row_table_bytes(engine.models.config.vocab_size, sum(table.shape[1] for table in tables))
    assert planned["row tables"] == (fit.plan.max_num_seqs + 1) * per_row
