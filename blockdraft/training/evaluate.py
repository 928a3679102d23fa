"""Measures the tokens a drafter commits on documents of the target, by simulation and in the engine.

The simulation tries every answer token as an anchor, all at once; then each document is walked as the engine
would walk it: from the last prompt token on, each step commits the drafts that match and one token more. What
the exported drafter commits in the engine must be the same.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.bench.weak_spots import DraftCounts, where_reached
from blockdraft.cache.spec import bytes_per_token
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import Delta, Metrics, SamplingParams
from blockdraft.models.draft_config import DraftConfig
from blockdraft.planner.plan import ELEMENT_BYTES
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.step.pairs import MOST_WALKED
from blockdraft.training.answers import Document
from blockdraft.training.features import FeatureReader
from blockdraft.training.packing import PackedRows, TrainingBatch, pack, with_anchors
from blockdraft.training.trainer import BlockForward

SLICE = 512  # blocks whose logits are in memory at a time
ENGINE_ROWS = MOST_WALKED  # with more, the selector is not used


@dataclass(frozen=True, slots=True)
class DrafterFit:
    """Counts tokens, steps, and accepted drafts by position."""

    num_documents: int
    num_tokens: int
    num_steps: int
    accepted: tuple[int, ...]  # [i]: steps whose draft at position i + 1 was accepted

    @property
    def committed(self) -> float:
        """Return the mean tokens per step, the target's own included."""
        return self.num_tokens / max(self.num_steps, 1)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Return the share of the steps that accepted each position."""
        return tuple(count / max(self.num_steps, 1) for count in self.accepted)

    @property
    def counts(self) -> DraftCounts:
        """Return the counts for `weak_spots`; every step drafts the whole block."""
        return DraftCounts(
            self.num_steps, self.committed, (self.num_steps, *self.accepted)[:-1], self.accepted
        )

    @property
    def where_reached(self) -> tuple[float | None, ...]:
        """Return the share of right drafts at each position, of those reached; None: never reached."""
        return tuple(where_reached(self.accepted, self.counts.reached))


def walk(runs: Sequence[int], width: int) -> list[int]:
    """Return the tokens that each step commits over an answer; `runs[i]` drafts match after its token i - 1.

    runs[0] belongs to the last prompt token as the anchor, and len(runs) is the answer's length.
    """
    place, steps = 0, []
    while place < len(runs):
        committed = min(runs[place], width - 1, len(runs) - place - 1) + 1
        steps.append(committed)
        place += committed
    return steps


Choice = Callable[[Tensor, Tensor, TrainingBatch, list[int], Tensor], Tensor]
"""Drafts [n, B - 1] of hidden states [n, B - 1, E] behind tokens [n, B - 1]: some blocks of some rows."""


def simulate(
    forward: BlockForward,
    documents: Sequence[Document],
    *,
    length: int,
    rows_per_step: int = 8,
    num_anchors: int = 128,
    choose: Choice | None = None,
    report: Callable[[float], None] = lambda share: None,
) -> dict[str, DrafterFit]:
    """Return the drafter's fit on `documents` by category, and on "all". Documents past `length` are cut.

    `choose` drafts as the answers were sampled; None: greedily, as they were written. With the rows and
    anchors of the training steps before it, nothing has to be compiled again.
    """
    head = forward.head()
    if choose is None:

        def choose(hidden: Tensor, before: Tensor, *_: object) -> Tensor:
            return forward.draft_logits(head, hidden, before).detach().argmax(dim=-1)

    rows, places = pack(documents, length)
    runs = _runs(forward, rows.to(head.weight.device), rows_per_step, num_anchors, choose, report)
    steps: dict[str, list[list[int]]] = defaultdict(list)
    everything: list[list[int]] = []
    for place in places:
        first = place.begin + len(documents[place.document].prompt_ids) - 1
        end = int(rows.ends[place.row, place.begin])
        mine = walk(runs[place.row, first : end - 1].tolist(), forward.block)
        steps[documents[place.document].category].append(mine)
        everything.append(mine)
    steps["all"] = everything  # documents of category "all" are among them
    return {name: fit_of_steps(listed, forward.block) for name, listed in sorted(steps.items())}


def fit_of_steps(steps: Sequence[Sequence[int]], block: int) -> DrafterFit:
    """Return the fit, given the tokens that each step of each document committed."""
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
    """Answer the documents' prompts again, greedily and at the same length, with the drafter in `folder`."""
    specs = like.config.layer_specs() + config.layer_specs()
    room = max((len(one.prompt_ids) + len(one.answer_ids) for one in documents), default=0) + 4 * config.block
    settings = Settings(
        model=model,
        draft=str(folder),
        width=config.block,
        device=str(like.device),
        dtype=like.dtype,
        quantization="none",
        max_num_seqs=ENGINE_ROWS,
        cache_bytes=2 * ENGINE_ROWS * room * bytes_per_token(specs, ELEMENT_BYTES[like.dtype]),
        graphs=False,  # a few steps: not worth their capture
    )
    engine = Engine(*load_models(settings, lambda line: None))
    asked = [
        (one.prompt_ids, SamplingParams(temperature=0.0, max_tokens=len(one.answer_ids))) for one in documents
    ]
    ended: list[Metrics] = []
    for delta in itertools.chain.from_iterable(run_engine(engine, asked)):
        if delta.metrics is not None:
            ended.append(delta.metrics)
            report(len(ended))
    return fit_of_metrics(ended)


def run_engine(
    engine: Engine, asked: Iterable[tuple[Sequence[int], SamplingParams]]
) -> Iterator[Sequence[Delta]]:
    """Run `engine` until all prompts are answered. They are requests "0", "1", …, and join in order."""
    waiting = deque(enumerate(asked))
    while waiting or engine.has_work:
        while waiting and engine.scheduler.has_room(1):
            number, (prompt_ids, params) = waiting.popleft()
            engine.add(prompt_ids, params, str(number))
        yield engine.step()


def _runs(
    forward: BlockForward,
    rows: PackedRows,
    rows_per_step: int,
    num_anchors: int,
    choose: Choice,
    report: Callable[[float], None],
) -> Tensor:
    """Return how many drafts match the document after each place: [rows, length]."""
    length = rows.tokens.shape[1]
    reader = FeatureReader(forward.target, num_rows=rows_per_step, length=length)
    out = torch.zeros(rows.tokens.shape, dtype=torch.int64)
    for first in range(0, len(rows), rows_per_step):
        chosen = list(range(first, min(first + rows_per_step, len(rows))))
        chosen += [chosen[-1]] * (rows_per_step - len(chosen))  # one shape for all
        _, features = reader.read(rows, chosen)
        for anchors in torch.split(anchor_places(rows, chosen), num_anchors, dim=1):
            anchors = functional.pad(anchors, (0, num_anchors - anchors.shape[1]), value=length)
            batch = with_anchors(rows, chosen, anchors, forward.block)
            # Not under no_grad, so that the code compiled for training is reused.
            hidden = forward(batch, features).detach()
            blocks = torch.split(torch.arange(len(hidden), device=hidden.device), SLICE)
            before = batch.tokens_before()  # drafts that count follow right ones only
            drafts = torch.cat([choose(hidden[part], before[part], batch, chosen, part) for part in blocks])
            matches = drafts == batch.labels.flatten(0, 1)
            found = matches.long().cumprod(dim=1).sum(dim=1).view(batch.anchors.shape)
            row = torch.tensor(chosen)[:, None].expand(batch.anchors.shape)
            is_real = batch.is_real.cpu()
            out[row[is_real], batch.anchors.cpu()[is_real]] = found.cpu()[is_real]
        report(min(first + rows_per_step, len(rows)) / len(rows))
    return out


def anchor_places(rows: PackedRows, chosen: list[int]) -> Tensor:
    """Return all possible anchor places, in order, padded with the row's length: [R, n]."""
    length = rows.tokens.shape[1]
    is_anchor = rows.is_anchor[torch.tensor(chosen, device=rows.tokens.device)]
    place = torch.arange(length, device=is_anchor.device)
    places = torch.where(is_anchor, place, length).sort(dim=1).values
    return places[:, : int(is_anchor.sum(dim=1).max())]
