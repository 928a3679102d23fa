"""Counts the tokens that a drafter commits, and runs an exported drafter in the engine."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.bench.weak_spots import DraftCounts, where_reached
from blockdraft.cache.spec import bytes_per_token
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import Deltas, Metrics, SamplingParams
from blockdraft.models.draft_config import DraftConfig
from blockdraft.planner.plan import ELEMENT_BYTES
from blockdraft.start.loading import load_pair
from blockdraft.step.pairs import MOST_WALKED
from blockdraft.training.answers import Document

ENGINE_ROWS = MOST_WALKED  # with more sequences, the engine does not use the selector


@dataclass(frozen=True, slots=True)
class DrafterFit:
    """The numbers of tokens, steps, and accepted drafts by position."""

    num_documents: int
    num_tokens: int
    num_steps: int
    accepted: tuple[int, ...]  # [i]: steps whose draft at position i + 1 was accepted

    @property
    def committed(self) -> float:
        """Return the mean number of tokens per step, including the target's own token."""
        return self.num_tokens / max(self.num_steps, 1)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Return, for each position, the share of all steps that accepted the draft there."""
        return tuple(count / max(self.num_steps, 1) for count in self.accepted)

    @property
    def counts(self) -> DraftCounts:
        """Return the counts for `weak_spots`, which assume that every step drafts a whole block."""
        return DraftCounts(
            self.num_steps, self.committed, (self.num_steps, *self.accepted)[:-1], self.accepted
        )

    @property
    def where_reached(self) -> tuple[float | None, ...]:
        """Return, for each position, the share of right drafts among those reached, or None if none was."""
        return tuple(where_reached(self.accepted, self.counts.reached))


def fit_of_steps(steps: Sequence[Sequence[int]], block: int) -> DrafterFit:
    """Return the fit; `steps` has, for each document, the number of tokens that each step committed."""
    accepted = [0] * (block - 1)
    for step in (step for document in steps for step in document):
        for position in range(step - 1):
            accepted[position] += 1
    return DrafterFit(
        num_documents=len(steps),
        num_tokens=sum(sum(document) for document in steps),
        num_steps=sum(len(document) for document in steps),
        accepted=tuple(accepted),
    )


def fit_of_metrics(metrics: Sequence[Metrics]) -> DrafterFit:
    """Return the fit that the engine counted over several answers."""
    positions = itertools.zip_longest(*(one.accepted for one in metrics), fillvalue=0)
    return DrafterFit(
        num_documents=len(metrics),
        num_tokens=sum(one.num_tokens for one in metrics),
        num_steps=sum(one.steps for one in metrics),
        accepted=tuple(sum(each) for each in positions),
    )


def fit_in_engine(
    folder: Path,
    documents: Sequence[Document],
    *,
    model: str,
    config: DraftConfig,
    like: LoadedPair,
    report: Callable[[int], None] = lambda num_done: None,
) -> DrafterFit:
    """Measure the drafter in `folder` in the engine, on greedy answers as long as those of `documents`."""
    specs = like.config.layer_specs() + config.layer_specs()
    room = max((len(one.prompt_ids) + len(one.answer_ids) for one in documents), default=0) + 4 * config.block
    models, plan = load_pair(
        model=model,
        draft=str(folder),
        width=config.block,
        device=str(like.device),
        dtype=like.dtype,
        quantization="none",
        max_num_seqs=ENGINE_ROWS,
        cache_bytes=2 * ENGINE_ROWS * room * bytes_per_token(specs, ELEMENT_BYTES[like.dtype]),
        graphs=False,  # too few steps to repay the capture
    )
    engine = Engine(models, plan)
    asked = [
        (one.prompt_ids, SamplingParams(temperature=0.0, max_tokens=len(one.answer_ids))) for one in documents
    ]
    ended: list[Metrics] = []
    for delta in itertools.chain.from_iterable(run_engine(engine, asked)):
        if delta.metrics is not None:
            ended.append(delta.metrics)
            report(len(ended))
    return fit_of_metrics(ended)


def run_engine(engine: Engine, asked: Iterable[tuple[Sequence[int], SamplingParams]]) -> Iterator[Deltas]:
    """Run `engine` until all prompts are answered. Request ids are "0", "1", … in prompt order."""
    waiting = deque(enumerate(asked))
    while waiting or engine.has_work:
        while waiting and engine.scheduler.has_room(1):
            number, (prompt_ids, params) = waiting.popleft()
            engine.add(prompt_ids, params, str(number))
        yield engine.step()
