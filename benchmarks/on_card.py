"""What benchmarks on a card share: published shapes with random weights, and times of kernels."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.shapes import write_shape
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.planner.plan import Plan
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.start.memory import release

PAGE_SIZE = 16


def load(
    shape: str,
    *,
    has_drafter: bool,
    max_num_seqs: int,
    max_model_len: int,
    device: str = "cuda",
    **settings: object,
) -> tuple[LoadedPair, Plan]:
    """Random weights of a published shape, and a plan for them."""
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_shape(shape, Path(folder))
        stretch(target / "config.json", max_model_len)
        wanted = Settings(
            model=str(target),
            draft=str(draft) if has_drafter else None,
            load_format="dummy",
            device=device,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            page_size=PAGE_SIZE,
            cache_bytes=1 << 40,  # num_pages is set below: this program knows what it needs
            **{"prefix_cache": False, **settings},
        )
        models, plan = load_models(wanted, lambda line: None)
    num_pages = max_num_seqs * (-(-(max_model_len + 2 * plan.block) // PAGE_SIZE) + 1)
    return models, replace(plan, num_pages=num_pages)


def stretch(config: Path, max_model_len: int) -> None:
    """Allow so many positions, whatever the model was trained for: a step takes the same time."""
    raw = json.loads(config.read_text())
    text = raw.get("text_config", raw)  # where the model also sees or hears
    text["max_position_embeddings"] = max(text["max_position_embeddings"], max_model_len)
    config.write_text(json.dumps(raw))


def freed(
    measure: Callable[..., dict[str, object]], pair: tuple[LoadedPair, Plan], **how: object
) -> dict[str, object]:
    """Measure with an engine of its own, and free that: a cache of 128 rows takes 40 GB.

    What an engine's own stream has cached no other one takes, and during a capture nothing is given back:
    without this, a later and larger step runs out of memory.
    """
    found = measure(pair, **how)
    release()
    return found


def copy_ceiling() -> float:
    """Bytes per second of a large device-to-device copy, read and written."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        times.append(timed(lambda: target.copy_(source)))
    return 2 * source.numel() / statistics.median(times[3:])


def timed(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def kernels_of(run: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Return name, launches and seconds of each kernel in one `run`, the slowest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name][0] += 1
            totals[event.name][1] += event.device_time / 1e6
    found = [(name, round(count / 3), seconds / 3) for name, (count, seconds) in totals.items()]
    return sorted(found, key=lambda item: -item[2])
