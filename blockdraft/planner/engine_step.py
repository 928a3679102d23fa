"""Estimates a step of vLLM and SGLang from throughput that others published.

The seconds of a step are a sum: reading weights, reading caches, dense products, experts' products, updates
of recurrent states, a fixed time for each layer of the target, and one for drafting. The constants of the sum
(engine_speeds.toml) were fitted to the runs of known_pairs.toml and published_tables.toml, for both engines
together: constants for each engine alone met fewer of the runs that were held out.
tests/planner/published_speeds.py makes the fit, and test_engine_step.py repeats it without each source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blockdraft.cache.spec import Recurrent
from blockdraft.machine.cards import has_fp4, has_fp8
from blockdraft.planner.estimate import (
    INDEPENDENT_SHARE,
    Step,
    attended_bytes,
    cache_token_bytes,
    experts_touched,
    layer_values,
    state_bytes,
)
from blockdraft.planner.memory_fit import Fit
from blockdraft.planner.pair import Case
from blockdraft.planner.shape import Shape
from blockdraft.planner.stored import WeightParts

FILE = Path(__file__).with_name("engine_speeds.toml")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The constants of a step, and how well they meet runs that were held out."""

    constants: Mapping[str, float]  # by term
    spread: float  # the interval of an estimate: that many times less to that many times more
    share: float  # of the held-out numbers that lie in the interval
    num_numbers: int
    num_sources: int
    cards: tuple[str, ...]


@cache
def calibration() -> Calibration:
    """Read engine_speeds.toml once."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return Calibration(**table | {"cards": tuple(table["cards"])})


def not_calibrated(case: Case) -> str:
    """Return what of this case no published run had, or "" if nothing."""
    if case.settings.tensor_parallel * case.settings.pipeline_parallel > 1:
        return "no published run with several GPUs was compared"
    return "" if case.settings.graphs else "without CUDA graphs a step may take several times as long"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one GPU reads and computes in a step."""

    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    dense_flops: float = 0.0  # a product of fp8 or NVFP4 counts as the bf16 product of the same time
    expert_flops: float = 0.0
    updates: float = 0.0  # of values of recurrent states

    def __add__(self, other: EngineLoad) -> EngineLoad:
        return EngineLoad(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def estimate_engine_step(case: Case, fit: Fit, *, rows: int, context: int, width: int) -> Step:
    """Estimate one step of vLLM or SGLang; `width` 1 is plain decoding, without the drafter."""
    load = engine_load(case, fit, rows=rows, context=context, width=width)
    terms = step_terms(case, load, width=width)
    parts = tuple((name, value * calibration().constants[name]) for name, value in terms.items() if value)
    return Step(
        rows=rows,
        context=context,
        width=width,
        seconds=sum(seconds for _, seconds in parts),
        weight_bytes=int(load.weight_bytes),
        cache_bytes=int(load.cache_bytes),
        flops=load.dense_flops + load.expert_flops,
        parts=parts,
    )


def step_terms(case: Case, load: EngineLoad, *, width: int) -> dict[str, float]:
    """Return the terms of the sum, in seconds, before they are multiplied with their constants."""
    assert case.card is not None
    shape, stages = case.pair.target.shape, case.settings.pipeline_parallel  # a token passes all stages
    return {
        "weights": stages * load.weight_bytes / case.card.bandwidth,
        "keys, values and states": stages * load.cache_bytes / case.card.bandwidth,
        "dense products": stages * load.dense_flops / case.card.bf16_flops,
        "experts' products": stages * load.expert_flops / case.card.bf16_flops,
        "updates of states": stages * load.updates * 1e-12,
        "plain layers": shape.num_layers * 1e-6 if shape.is_plain else 0.0,
        "other layers": 0.0 if shape.is_plain else shape.num_layers * 1e-6,
        "drafting": 1e-3 if width > 1 else 0.0,
    }


def engine_load(case: Case, fit: Fit, *, rows: int, context: int, width: int) -> EngineLoad:
    """Return the load of a step of `rows` sequences with `context` tokens each."""
    assert case.card is not None
    pair, parts, sizes = case.pair, fit.parts, cache_token_bytes(fit, case.pair)
    target, head = pair.target.shape, parts[0].head or parts[0].embedding  # tied: the embedding is the head
    num_gpus = case.settings.tensor_parallel * case.settings.pipeline_parallel
    rate = product_rate(case)
    found = _dense(target, parts[0], head, num_gpus, tokens=rows * width, rate=rate)
    found += _experts(target, parts[0], num_gpus, rows=rows, width=width, rate=rate)
    found += _cache(target, sizes[0], num_gpus, rows=rows, context=context, tokens=rows * width)
    if width > 1 and pair.draft is not None:
        draft = pair.draft.shape
        found += _dense(draft, parts[1], parts[1].head or head, num_gpus, tokens=rows * pair.block, rate=1)
        found += _cache(draft, sizes[1], num_gpus, rows=rows, context=context, tokens=rows * pair.block)
    return found


def product_rate(case: Case) -> int:
    """Return how many times as fast as bf16 the card multiplies the target's format (1: it is unpacked)."""
    assert case.card is not None
    stored, capability = case.pair.target.stored, case.card.capability
    section = f"{stored.method} {stored.config.get('quantization_config')}".lower()
    if "nvfp4" in section:
        return 4 if has_fp4(capability) else 1
    is_fp8 = case.settings.quantization == "fp8" or "fp8" in section or "float-quantized" in section
    return 2 if is_fp8 and has_fp8(capability) else 1


def _dense(
    shape: Shape, parts: WeightParts, head: int, num_gpus: int, *, tokens: int, rate: int
) -> EngineLoad:
    """Return the products with the head, and with all weights of the layers but the experts."""
    values = layer_values(parts, shape) / (1 if shape.values is None else num_gpus)
    tables = 0 if shape.values is None else shape.values.tables
    head_values = shape.vocab_size * shape.hidden_size / num_gpus
    return EngineLoad(
        weight_bytes=parts.layers + head - 2 * tables,  # a step reads only a few rows of the tables
        dense_flops=2.0 * tokens * (values / rate + head_values),
    )


def _experts(
    shape: Shape, parts: WeightParts, num_gpus: int, *, rows: int, width: int, rate: int
) -> EngineLoad:
    values = parts.experts / 2 if shape.values is None else shape.values.experts / num_gpus
    touched = experts_touched(shape, rows * (1 + INDEPENDENT_SHARE * (width - 1)))
    share = shape.num_chosen / max(shape.num_experts, 1)
    return EngineLoad(
        weight_bytes=parts.experts * touched, expert_flops=2.0 * values * rows * width * share / rate
    )


def _cache(
    shape: Shape, sizes: tuple[int, ...], num_gpus: int, *, rows: int, context: int, tokens: int
) -> EngineLoad:
    """Return keys and values that are read, and recurrent states, which are read, written and updated."""
    states = [spec for spec in shape.specs if isinstance(spec, Recurrent)]
    updates = tokens * sum(spec.num_heads * spec.key_dim * spec.value_dim for spec in states)
    num_bytes = rows * (attended_bytes(shape, context, sizes) + 2 * state_bytes(shape))
    return EngineLoad(cache_bytes=num_bytes / num_gpus, updates=updates / num_gpus)
