"""What the heads of DFlash2 and DSpark add to a step: `python -m benchmarks.draft_heads`.

The default pair with its own drafter, and with a DFlash2 and a DSpark drafter that are made of it and say
nothing new, so all three draft the same; what they compute takes as long as if they did. A step is timed as
it is served: captured, one row behind `--context` tokens, with one set of sampling rules. On a CPU the arms
take turns within a round, and the best round counts: it survives foreign load. On a card a number is the
median of replays back to back. `--shape qwen3-8b`, on a card, has random weights instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
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
from blockdraft.start.loading import load_models  # noqa: E402
from blockdraft.training.drafter import as_kind, load_weights, new_drafter  # noqa: E402
from blockdraft.training.export import named_weights  # noqa: E402
from blockdraft.training.job import DrafterShape  # noqa: E402

KINDS: tuple[DraftKind, ...] = ("dflash", "dflash2", "dspark")
RULES = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1}}
REPLAYS = 20  # of a card, at a time
FIRST_PAGE = 2  # the others are reserved


def write_drafter(kind: DraftKind, source: Path, folder: Path, *, has_weights: bool) -> Path:
    """The drafter in `source` as one of another kind, with weights that change nothing."""
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


def engines_of(options: argparse.Namespace, scratch: Path) -> dict[DraftKind, Engine]:
    """An engine with each kind of drafter."""
    target, source = "default", shipped_drafter("default")
    if options.shape is not None:
        folder, source = write_shape(options.shape, scratch / "shape")
        target = str(folder)
    assert source is not None, "the default drafter is not here"
    engines = {}
    for kind in KINDS:
        draft = write_drafter(kind, source, scratch / kind, has_weights=options.shape is None)
        settings = Settings(
            model=target,
            draft=str(draft),
            device=options.device,
            load_format="auto" if options.shape is None else "dummy",
            max_rows=options.rows,
            max_context=options.context + 512,
            prefix_cache=False,
        )
        models = load_models(settings, lambda line: None)
        page = models.plan.page_size
        num_pages = FIRST_PAGE + options.rows * (-(-(options.context + 64) // page) + 1)
        engines[kind] = Engine(replace(models, plan=replace(models.plan, num_pages=num_pages)))
        engines[kind].capture([options.rows], options.width)
    return engines


def place(engine: Engine, options: argparse.Namespace, rules: dict[str, float]) -> None:
    """Rows behind as many tokens, whose pages hold numbers."""
    rows, each = engine.rows, (engine.models.plan.num_pages - FIRST_PAGE) // options.rows
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
    """Seconds of a step of rows at the same place each time."""
    graph = engine.graphs.find(options.rows, width)
    engine.rows.activate(range(options.rows))
    engine.rows.length[: options.rows] = options.context
    if engine.models.device.type == "cpu":
        begin = time.perf_counter()
        graph.replay()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPLAYS


def time_steps(engines: dict[DraftKind, Engine], options: argparse.Namespace) -> list[dict[str, object]]:
    found = []
    for name, rules in RULES.items():
        for engine in engines.values():
            place(engine, options, rules)
        for width in options.width:
            times: dict[DraftKind, list[float]] = {kind: [] for kind in engines}
            for _ in range(options.rounds):
                for kind, engine in engines.items():
                    times[kind].append(replay_s(engine, options, width) * 1e3)
            is_cpu = next(iter(engines.values())).models.device.type == "cpu"
            middle = {kind: statistics.median(each) for kind, each in times.items()}
            best = {kind: min(each) for kind, each in times.items()} if is_cpu else middle
            found.append(
                {
                    "rules": name,
                    "width": width,
                    **{f"{kind}_ms": best[kind] for kind in KINDS},
                    **{f"{kind}_median_ms": middle[kind] for kind in KINDS},
                    **{f"{kind}_share": 1 - best["dflash"] / best[kind] for kind in KINDS[1:]},
                }
            )
    return found


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
    with tempfile.TemporaryDirectory() as scratch:
        engines = engines_of(options, Path(scratch))
        with torch.inference_mode():
            steps = time_steps(engines, options)
        models = engines["dflash"].models
        result = {
            "what": "a captured step: milliseconds, and what share of them a kind takes beyond DFlash",
            "settings": vars(options),
            **context,
            "device": torch.cuda.get_device_name() if models.device.type == "cuda" else "cpu",
            "quantization": models.plan.quantization,
            "steps": steps,
        }
        record.save(options.json, result, scratch=scratch)
    header = ["step", "v1 ms", "dflash2 ms", "share", "dspark ms", "share"]
    keys = ("dflash_ms", "dflash2_ms", "dflash2_share", "dspark_ms", "dspark_share")
    rows = [[f"{one['rules']}, width {one['width']}", *(one[key] for key in keys)] for one in steps]
    print(record.table(header, rows))


if __name__ == "__main__":
    main()
