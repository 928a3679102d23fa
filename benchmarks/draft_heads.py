"""The cost of the heads of DFlash2 and DSpark in a step: `python -m benchmarks.draft_heads`.

The default pair with its own drafter, and with a DFlash2 and a DSpark drafter as they are made of it before
training: what they compute takes as long as after it. `selector` is DFlash2 without convolutions, which is
how one serves whose selector alone was trained. With `--shape` random weights instead. A step is timed as it
is served: captured, of a fixed width, `--rows` rows behind `--context` tokens.

On a CPU the kinds take turns within a round, and the best round counts. With OMP_NUM_THREADS=1 it is the
processor's time that is taken, which foreign load hardly touches. On a card each kind has a process of its
own, and a number is the median of rounds of replays back to back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from blockdraft.settings.settings import Settings, pin_threads

pin_threads()

import torch  # noqa: E402
from safetensors.torch import save  # noqa: E402

from benchmarks import record  # noqa: E402
from benchmarks.shapes import SHAPES, write_shape  # noqa: E402
from blockdraft.cache.rows import RowSampling  # noqa: E402
from blockdraft.checkpoints.read_draft_config import read_draft_config  # noqa: E402
from blockdraft.engine.engine import Engine  # noqa: E402
from blockdraft.models.draft_config import DraftKind  # noqa: E402
from blockdraft.settings.shipped import shipped_drafter  # noqa: E402
from blockdraft.start.loading import load_models, resolve_device  # noqa: E402
from blockdraft.step.pairs import DFlash2Drafter  # noqa: E402
from blockdraft.training.drafter import as_kind, load_weights, new_drafter  # noqa: E402
from blockdraft.training.export import named_weights  # noqa: E402
from blockdraft.training.job import DrafterShape  # noqa: E402

KINDS: dict[str, DraftKind] = {
    "dflash": "dflash",
    "dflash2": "dflash2",
    "selector": "dflash2",
    "dspark": "dspark",
}
RULES = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "as the default model": {"temperature": 0.2, "top_p": 0.9, "seed": 1},
}
REPLAYS = 20  # of a card, at a time
FIRST_PAGE = 2  # the others are reserved
Times = dict[tuple[str, int], dict[str, list[float]]]  # by rules and width, then by kind


def write_drafter(kind: DraftKind, source: Path, folder: Path, *, has_weights: bool) -> Path:
    """Write the drafter in `source` as another kind, with neutral new weights."""
    if kind == "dflash":
        return source
    folder.mkdir(parents=True)
    raw = json.loads((source / "config.json").read_text())
    config = as_kind(raw, kind, DrafterShape(), name=source.name)
    (folder / "config.json").write_text(json.dumps(config))
    if has_weights:
        device, read = torch.device("cpu"), read_draft_config(config, name=kind)
        model = new_drafter(read, None, max_positions=1, device=device, init="random", seed=0)
        load_weights(model, str(source), device)
        (folder / "model.safetensors").write_bytes(save(named_weights(model, torch.bfloat16)))
    return folder


def source_of(options: argparse.Namespace, scratch: Path) -> tuple[str, Path]:
    """A target, and the folder of its DFlash drafter."""
    if options.shape is not None:
        target, draft = write_shape(options.shape, scratch / "shape")
        return str(target), draft
    shipped = shipped_drafter("default")
    assert shipped is not None, "the default drafter is not here"
    return "default", shipped


def engine_of(options: argparse.Namespace, target: str, draft: Path, *, is_convolved: bool) -> Engine:
    settings = Settings(
        model=target,
        draft=str(draft),
        device=options.device,
        load_format="auto" if options.shape is None else "dummy",
        max_num_seqs=options.rows,
        max_model_len=options.context + 512,
        prefix_cache=False,
    )
    models, plan = load_models(settings, lambda line: None)
    if isinstance(models.drafter, DFlash2Drafter):
        models.drafter.model.is_convolved = is_convolved
    each = -(-(options.context + 64) // plan.page_size) + 1
    plan = replace(plan, num_pages=FIRST_PAGE + options.rows * each)
    engine = Engine(models, plan)
    engine.capture([options.rows], options.width)
    return engine


def place(engine: Engine, options: argparse.Namespace, rules: dict[str, float]) -> None:
    """Rows behind as many tokens, whose pages hold numbers."""
    rows, each = engine.rows, (engine.plan.num_pages - FIRST_PAGE) // options.rows
    for storage in engine.cache.storage:
        for tensor in vars(storage).values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.normal_(std=0.1)
    for row in range(options.rows):
        text = [1 + row] * (options.context + 1)
        rows.place(row, text, options.context, RowSampling(output_start=options.context, **rules))
        first = FIRST_PAGE + row * each
        rows.set_pages([(row, 0, range(first, first + each))])
    rows.activate(range(options.rows))


def replay_s(engine: Engine, options: argparse.Namespace, width: int) -> float:
    """Seconds of a step of rows that are at the same place each time."""
    graph = engine.graphs.captured_for(options.rows, width)
    engine.rows.activate(range(options.rows), graph.size.rows)
    engine.rows.length[: options.rows] = options.context
    if engine.models.device.type == "cpu":
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin_s = clock()
        graph.replay()
        return clock() - begin_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPLAYS


@torch.inference_mode()
def time_steps(engines: dict[str, Engine], options: argparse.Namespace) -> Times:
    found: Times = {}
    for rules in RULES:
        for engine in engines.values():
            place(engine, options, RULES[rules])
        for width in options.width:
            for engine in engines.values():
                replay_s(engine, options, width)
            for _ in range(options.rounds):
                for kind, engine in engines.items():
                    seconds = replay_s(engine, options, width)
                    found.setdefault((rules, width), {}).setdefault(kind, []).append(seconds * 1e3)
    return found


def time_kinds(options: argparse.Namespace, scratch: Path, kinds: Sequence[str]) -> tuple[Times, str]:
    """Time some kinds in turns; return also how weights are stored."""
    target, source = source_of(options, scratch)
    engines = {}
    for kind in kinds:
        has_weights = options.shape is None
        draft = write_drafter(KINDS[kind], source, scratch / kind, has_weights=has_weights)
        engines[kind] = engine_of(options, target, draft, is_convolved=kind == "dflash2")
    return time_steps(engines, options), engines[kinds[0]].plan.quantization


def time_alone(options: argparse.Namespace, kind: str) -> tuple[Times, str]:
    """One kind in a process of its own: in one process the third engine's steps of width 16 took longer."""
    with tempfile.TemporaryDirectory() as scratch:
        return time_kinds(options, Path(scratch), [kind])


def time_all(options: argparse.Namespace) -> tuple[Times, str]:
    """On a CPU all kinds in turns, on a card one after the other."""
    if resolve_device(options.device) == "cpu":
        with tempfile.TemporaryDirectory() as scratch:
            return time_kinds(options, Path(scratch), list(KINDS))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        alone = list(pool.map(time_alone, [options] * len(KINDS), KINDS))
    found: Times = {}
    for times, _ in alone:
        for step, each in times.items():
            found.setdefault(step, {}).update(each)
    return found, alone[0][1]


def summary(times: dict[str, list[float]], *, is_cpu: bool) -> dict[str, float]:
    middle = {kind: statistics.median(each) for kind, each in times.items()}
    counted = {kind: min(each) for kind, each in times.items()} if is_cpu else middle
    return {
        **{f"{kind}_ms": counted[kind] for kind in KINDS},
        **{f"{kind}_median_ms": middle[kind] for kind in KINDS},
        **{f"{kind}_share": 1 - counted["dflash"] / counted[kind] for kind in list(KINDS)[1:]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights instead of the default pair")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--width", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="auto", help="cpu, cuda (default: cuda where there is one)")
    parser.add_argument("--json")
    options = parser.parse_args()
    context = record.context()
    times, quantization = time_all(options)
    is_cpu = resolve_device(options.device) == "cpu"
    steps = [
        {"rules": rules, "width": width, **summary(found, is_cpu=is_cpu)}
        for (rules, width), found in times.items()
    ]
    result = {
        "what": "a captured step: milliseconds, and what share of them a kind takes beyond DFlash",
        "clock": "processor time" if is_cpu and context["threads"] == 1 else "time",
        "settings": vars(options),
        **context,
        "device": "cpu" if is_cpu else torch.cuda.get_device_name(),
        "quantization": quantization,
        "steps": steps,
    }
    record.save(options.json, result)
    header = ["step", "v1 ms", "dflash2 ms", "share %", "selector ms", "share %", "dspark ms", "share %"]
    rows = [
        [
            f"{one['rules']}, width {one['width']}", one["dflash_ms"], one["dflash2_ms"],
            100 * one["dflash2_share"], one["selector_ms"], 100 * one["selector_share"],
            one["dspark_ms"], 100 * one["dspark_share"],
        ]
        for one in steps
    ]  # fmt: skip
    print(record.table(header, rows))


if __name__ == "__main__":
    main()
