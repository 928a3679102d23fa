"""What one forward of k tokens costs: through the engine's captured step, and the lean one."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from benchmarks.cpu_ours import CONTEXT
from benchmarks.cpu_pytorch import Lean
from blockdraft.cache.rows import RowSampling
from blockdraft.engine.engine import Engine
from blockdraft.models.decoder import Decoder
from blockdraft.step.captures import Graph, capturing
from blockdraft.step.decode import decode_parts, run_all_parts
from blockdraft.step.drafter import NoDrafter

WIDTHS = (1, 2, 4, 8, 16)


@torch.inference_mode()
def forward_costs(engines: Mapping[str, Engine], exact: Decoder, rounds: int) -> list[dict[str, float]]:
    """Best milliseconds by engine, and of the lean forward with the weights of `exact`, for every width."""
    costs = []
    for width in WIDTHS:
        best = dict.fromkeys((*engines, "lean"), float("inf"))
        plain = Lean(exact, CONTEXT + 64)
        steps = {name: captured_step(engine, width) for name, engine in engines.items()}
        for _ in range(rounds * 5):
            for name, engine in engines.items():
                best[name] = min(best[name], step_s(engine, steps[name]))
            plain.length = CONTEXT
            tokens = torch.zeros(width, dtype=torch.int64)
            start = time.perf_counter()
            plain.forward(tokens).argmax(-1)
            best["lean"] = min(best["lean"], time.perf_counter() - start)
        costs.append({"tokens": width, **{name: seconds * 1e3 for name, seconds in best.items()}})
    return costs


def captured_step(engine: Engine, width: int) -> Graph:
    """A step of width `width` without a drafter, as it is replayed."""
    models, rows = engine.models, engine.rows
    rows.activate((), 1)

    def step() -> object:
        drafter = NoDrafter(width)
        return run_all_parts(
            decode_parts(target=models.target, drafter=drafter, cache=engine.cache, rows=rows, width=width)
        )

    return capturing(models.device).capture(step)[0]


def step_s(engine: Engine, step: Graph) -> float:
    rows = engine.rows
    pages = list(range(2, 2 + (CONTEXT + 64) // engine.cache.page_size))
    rows.place(0, [1], CONTEXT, RowSampling(output_start=1, min_end=1))
    rows.set_pages([(0, 0, pages)])
    rows.activate([0])
    start = time.perf_counter()
    step.replay()
    return time.perf_counter() - start
