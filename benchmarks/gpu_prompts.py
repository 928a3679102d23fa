"""Prompts alone on a card, kernel by kernel and by a graph: `python -m benchmarks.gpu_step --prefill`."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import record
from benchmarks.on_card import freed, kernels_of, load
from blockdraft.cache.rows import RowSampling
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.kernels.transfer import to_device
from blockdraft.planner.plan import Plan
from blockdraft.step.prefill_graphs import PrefillGraph


class Prompt:
    """A prompt in row 0 of one engine, to be prefilled again and again."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self.engine = engine
        vocab_size = engine.models.config.vocab_size
        self.ids = [(7919 * index + 31) % vocab_size for index in range(num_tokens)]
        pages = range(2, 2 + engine.plan.num_pages)  # the first ones are reserved
        engine.rows.place(0, [*self.ids, 1], 0, RowSampling())
        engine.rows.set_pages([(0, 0, pages[: engine.rows.page_table.shape[1]])])

    def by_kernels(self) -> None:
        self._begin(num_rows=1)
        size = self.engine.plan.max_prefill_tokens
        for begin in range(0, len(self.ids), size):
            chunk = self.ids[begin : begin + size]
            token_ids = to_device(chunk, self.engine.models.device)
            self.engine.prefill(token_ids, token_ids, (len(chunk),))

    def by_graph(self, graph: PrefillGraph) -> None:
        self._begin(num_rows=graph.num_rows)
        graph.replay(self.ids, self.ids, (len(self.ids),))

    def _begin(self, *, num_rows: int) -> None:
        self.engine.rows.activate([0], num_rows)
        self.engine.rows.length[0] = 0

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the time until the device is done, launches by the host included."""
        times = []
        for _ in range(7):
            self.engine.wait()
            begin = time.perf_counter()
            run()
            self.engine.wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])


def time_prefill(pair: tuple[LoadedPair, Plan], *, num_tokens: int) -> dict[str, object]:
    """A prompt alone, kernel by kernel and, where the engine has one, by a graph."""
    engine = Engine(*pair)
    prompt = Prompt(engine, num_tokens)
    run: Callable[[], object] = prompt.by_kernels
    found: dict[str, object] = {"tokens": num_tokens, "by_kernels_ms": prompt.seconds(run) * 1e3}
    if engine.models.device.type != "cuda":
        return found
    engine.capture([1], [1], now=())
    graph = None if engine.prefill_graphs is None else engine.prefill_graphs.find(num_tokens, 1)
    if graph is not None:
        run = functools.partial(prompt.by_graph, graph)
        found["by_graph_ms"] = prompt.seconds(run) * 1e3
    kernels = kernels_of(run)
    found["num_kernels"] = sum(item[1] for item in kernels)
    found["busy_ms"] = sum(item[2] for item in kernels) * 1e3
    found["kernels"] = [{"name": n[:80], "launches": c, "ms": s * 1e3} for n, c, s in kernels[:24]]
    engine.drop_graphs()
    return found


def time_prompts(args: argparse.Namespace) -> None:
    pair = load(
        args.shape,
        has_drafter=max(args.width) > 1,
        max_num_seqs=1,
        max_model_len=max(args.prefill) + 1024,
        quantization=args.quantization,
        draft_quantization=args.draft_quantization,
        kv_dtype=args.kv_dtype[-1],
    )
    found = [freed(time_prefill, pair, num_tokens=count) for count in args.prefill]
    result = {
        "what": "random weights; one prompt alone",
        "gpu": torch.cuda.get_device_name(),
        "settings": vars(args),
        **record.context(),
        "prefills": found,
    }
    record.save(args.json, result)
    print(f"{result['gpu']}; RANDOM WEIGHTS, timing only")
    for one in found:
        rows = [[kernel["name"][:60], kernel["launches"], kernel["ms"]] for kernel in one["kernels"][:12]]
        print(record.table([f"kernel, {one['tokens']} tokens", "launches", "ms"], rows))
    keys = ("by_kernels_ms", "by_graph_ms", "busy_ms", "num_kernels")
    header = ["prompt", "kernel by kernel, ms", "by graph, ms", "kernels, ms", "kernels"]
    print(
        record.table(
            header, [[f"{one['tokens']} tokens", *(one.get(key, "") for key in keys)] for one in found]
        )
    )
