"""The exported drafter in the real engine: what it commits there must be what the simulation said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from blockdraft.cache.spec import bytes_per_token
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded import Models
from blockdraft.engine.request import Metrics, SamplingParams
from blockdraft.models.draft_config import DraftConfig
from blockdraft.planner.plan import ELEMENT_BYTES
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.training.answers import Document
from blockdraft.training.evaluate import Fit

NUM_ROWS = 8


def sample(documents: Sequence[Document], count: int) -> list[Document]:
    """A few documents of all kinds, the same ones every time."""
    return random.Random(0).sample(list(documents), min(count, len(documents)))


def fit_in_engine(
    folder: Path, documents: Sequence[Document], *, model: str, config: DraftConfig, like: Models
) -> Fit:
    """Answer the documents' prompts again, greedily, with the drafter in `folder`, as long as they are."""
    specs = like.config.layer_specs() + config.layer_specs()
    room = max((len(one.prompt_ids) + len(one.answer_ids) for one in documents), default=0) + 4 * config.block
    settings = Settings(
        model=model,
        draft=str(folder),
        width=config.block,
        device=str(like.device),
        dtype=like.plan.dtype,
        quantization="none",
        max_rows=NUM_ROWS,
        cache_bytes=2 * NUM_ROWS * room * bytes_per_token(specs, ELEMENT_BYTES[like.plan.dtype]),
        graphs=False,  # a few steps: not worth their capture
    )
    engine = Engine(load_models(settings, lambda line: None))
    finished: list[Metrics] = []
    for one in documents:
        while not engine.scheduler.has_room(1):
            finished += _step(engine)
        engine.add(one.prompt_ids, SamplingParams(temperature=0.0, max_tokens=len(one.answer_ids)))
    while engine.has_work:
        finished += _step(engine)
    return Fit(
        num_documents=len(finished),
        num_tokens=sum(metrics.num_tokens for metrics in finished),
        num_steps=sum(metrics.steps for metrics in finished),
        accepted=tuple(
            sum(metrics.accepted[place] for metrics in finished) for place in range(config.block - 1)
        ),
    )


def _step(engine: Engine) -> list[Metrics]:
    return [delta.metrics for delta in engine.step() if delta.metrics is not None]
