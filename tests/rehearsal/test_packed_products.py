"""The benchmark of packed products compares bits and picks the fastest division; interpreted, on a CPU."""

import pytest
import torch

from blockdraft.kernels.kernels import kernels_for
from tests.kernels.implementations import CPU, HAS_CARD, quiet
from tests.kernels.test_triton_packed import one_of_each

pytestmark = [quiet, pytest.mark.skipif(HAS_CARD, reason="a card runs the benchmark itself")]
pytest.importorskip("triton")
benchmark = pytest.importorskip("benchmarks.packed_products")


@pytest.fixture
def bench(monkeypatch):
    """Times are 1, 2, 3 … seconds, so the first division is the fastest. Tokens of one value round no sum."""
    times = iter(range(1, 1000))
    monkeypatch.setattr(benchmark, "FEW", ((2, 2, 1, 2), (1, 4, 1, 2)))
    monkeypatch.setattr(torch, "randn", lambda count, columns, device: one_of_each(count, columns))
    kernels = kernels_for(torch.float16, CPU, is_interpreted=True)
    return benchmark.Bench(CPU, torch.float16, kernels, lambda calls: float(next(times)), 1, 1e12)


SHAPES = [benchmark.Shape("qkv", 48, 192, 2), benchmark.Shape("mlp.gate_up", 64, 128, 3)]


def test_all_products_are_timed_and_have_the_bits_of_unpacked_weights(bench, capsys):
    assert len(benchmark.measure(bench, ["q8_0"], SHAPES[:1], [1])) == 1
    found = benchmark.measure(bench, ["int4-32", "nvfp4"], SHAPES, [1, 3])
    assert bench.wrong == []
    assert [(one["code"], one["product"], one["tokens"]) for one in found] == [
        (code, shape.name, tokens) for code in ("int4-32", "nvfp4") for shape in SHAPES for tokens in (1, 3)
    ]
    assert all(benchmark.best(one)["config"] == "8/2/2/1/2" for one in found)
    assert all(len(one["tried"]) == 2 for one in found)
    first, *_ = sums = benchmark.totals(found)
    qkv, gate_up = found[0], found[2]
    assert first["bf16_ms"] == pytest.approx((2 * qkv["bf16_us"] + 3 * gate_up["bf16_us"]) / 1e3)
    assert benchmark.most_tokens(sums) == {"int4-32": 3, "nvfp4": 3}
    gate_up["bf16_us"] = found[3]["bf16_us"] = 0.0
    limits = {"int4-32": {"plain": 3, "gated": 0}, "nvfp4": {"plain": 3, "gated": 3}}
    assert benchmark.most_tokens_of_both(found) == limits
    benchmark.show("a model", found)
    assert "int4-32 qkv 48 x 192" in capsys.readouterr().out


def test_a_division_with_other_bits_is_named_and_never_the_best(bench, monkeypatch):
    linear = benchmark.kernel.linear

    def wrong(x, weight, *, gate, config):
        return linear(x, weight, gate=gate, config=config) + (config.tiles == 2)

    monkeypatch.setattr(benchmark.kernel, "linear", wrong)
    (one,) = benchmark.measure(bench, ["mxfp4"], SHAPES[:1], [2])
    assert benchmark.best(one)["config"] == "8/1/4/1/2"
    assert bench.wrong == ["mxfp4 qkv 48 x 192, 2 tokens 8/2/2/1/2: 1.00e+00 of the outputs differ"]


def test_the_kernel_is_not_taken_where_it_loses():
    def sums(*rows):
        names = ("tokens", "kernel_ms", "bf16_ms", "unpacked_ms")
        return [{"code": "int4", **dict(zip(names, row, strict=True))} for row in rows]

    assert benchmark.most_tokens(sums((1, 5, 4, 6), (16, 5, 4, 6))) == {"int4": 0}
    assert benchmark.most_tokens(sums((1, 3, 4, 6), (16, 5, 4, 6), (512, 7, 4, 6))) == {"int4": 16}


@pytest.mark.parametrize("model", benchmark.MODELS)
def test_every_product_of_the_models_is_taken(model):
    found = benchmark.shapes(model)
    assert {"mixer.qkv", "mixer.out", "mlp.gate_up", "mlp.down"} <= {one.name for one in found}
    assert all(one.columns % 64 == 0 for one in found)
