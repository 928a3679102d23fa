"""The check of layers on a card: sound models pass in every dtype, and each fault is refused."""

import pytest

from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.doctor.shapes import SHAPES
from blockdraft.settings.settings import cache_dir
from tests.check import test_layers as test_layercheck
from tests.faults import FAULTS, engine, worst
from tests.lossless.families import NAMES

needs_default = pytest.mark.skipif(
    not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched: blockdraft fetch"
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["pair", "int8", "fp8", *NAMES])
def test_sound_models_pass(name, dtype):
    found = worst(engine(name, dtype, "cuda"))
    assert found.off < test_layercheck.ROOM, found


@needs_default
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        ("bfloat16", "none"),
        ("float16", "none"),
        ("float32", "none"),
        ("bfloat16", "fp8"),
        ("bfloat16", "int8"),
    ],
)
def test_the_shipped_pair_passes(dtype, quantization):
    found = worst(test_layercheck.shipped(dtype, quantization, "cuda"))
    assert found.off < test_layercheck.ROOM, found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_random_weights_of_real_shapes_pass(shape, tmp_path):
    found = worst(test_layercheck.dummy(shape, "bfloat16", tmp_path, "cuda"))
    assert found.off < test_layercheck.ROOM, found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_massive_activations_pass(dtype):
    found = worst(test_layercheck.massive(dtype, "cuda"))
    assert found.off < test_layercheck.ROOM, found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused(name, monkeypatch):
    which, inject = FAULTS[name]
    found = worst(inject(monkeypatch, engine(which, "bfloat16", "cuda")))
    assert not found.is_passed, found
