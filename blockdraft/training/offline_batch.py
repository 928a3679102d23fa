"""OfflineBatch answers many prompts at once, for callers that need only the finished answers.

It uses the step, cache and kernels of Engine.step, without text, streaming, prefix cache and preemption. Each
slot keeps its pages, and steps run in rounds without the host: Engine.step spends about ten microseconds per
sequence and step, too much for thousands of sequences. On a GPU the slots are split into two halves: while
the device runs a round of one half, the host handles the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from blockdraft.cache.rows import RowSampling
from blockdraft.cache.spec import NUM_RESERVED_PAGES
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.errors import CapacityError, RequestError
from blockdraft.kernels.transfer import to_device
from blockdraft.planner.plan import Plan
from blockdraft.step.prefill import prefill_step

ROUND = 16  # steps; longer rounds need the host less often, but waste more steps of ended sequences


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt. Its answer ends at an end-of-sequence token, or after `max_tokens`.

    With `max_repeat`, the answer also ends (after a round) if its last `max_repeat` tokens occurred before:
    a greedy answer that loops seldom leaves the loop.
    """

    key: int  # chosen by the caller
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_repeat: int | None = None


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    """The target's answer to a question, including the end token."""

    question: Question
    token_ids: tuple[int, ...]
    is_whole: bool  # the answer has an end token


@dataclass(slots=True)
class _Row:
    question: Question
    num_tokens: int = 0
    pieces: list[np.ndarray] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return whether to cut the answer here, although it has no end token."""
        count = self.question.max_repeat
        if self.num_tokens >= self.question.max_tokens:
            return True
        if count is None or self.num_tokens <= count:
            return False
        said = np.concatenate(self.pieces)
        return said[-count:].tobytes() in said[:-1].tobytes()


@dataclass(slots=True)
class _Half:
    """Sequences that run together, and their current round on the device."""

    places: range
    rows: dict[int, _Row] = field(default_factory=dict)
    round: _Round | None = None


@dataclass(frozen=True, slots=True)
class _Round:
    rows: list[int]
    tokens: Tensor  # [ROUND, R], on its way to the host
    event: torch.cuda.Event | None


def make_offline_batch(models: LoadedPair, plan: Plan, *, graphs: bool = True) -> OfflineBatch:
    """Return an OfflineBatch with as many sequences as the cache has space for, each with a whole context."""
    per_row = -(-plan.max_positions // plan.page_size)
    rows = min(plan.max_num_seqs, plan.num_pages // per_row)
    if rows < 1:
        raise CapacityError(
            f"the cache holds {plan.num_pages} pages, but one context of {plan.max_model_len} tokens takes "
            f"{per_row}: raise --cache-bytes or lower the context."
        )
    engine = Engine(models, replace(plan, max_num_seqs=rows, num_pages=rows * per_row))
    if graphs and models.why_not_captured() is None:
        engine.capture(sorted({max(1, rows // share) for share in (32, 8, 2)}), [1])
    return OfflineBatch(engine)


class OfflineBatch:
    """Uses the rows and pages of an idle `engine` directly, without its scheduler."""

    def __init__(self, engine: Engine) -> None:
        plan = engine.plan
        self._engine = engine
        self._num_pages = min(plan.num_pages // plan.max_num_seqs, engine.rows.page_table.shape[1])
        # An ended sequence runs on to the end of its round, which also needs cache slots and angles.
        self.max_model_len = min(self._num_pages * plan.page_size, plan.max_positions) - ROUND
        self._end_ids = tuple(sorted(engine.models.tokenizer.eos_ids))
        middle = plan.max_num_seqs // 2 if engine.models.device.type == "cuda" else 0
        self._halves = [_Half(range(middle)), _Half(range(middle, plan.max_num_seqs))]
        for row in range(plan.max_num_seqs):
            first = NUM_RESERVED_PAGES + row * self._num_pages
            engine.rows.set_pages([(row, 0, range(first, first + self._num_pages))])

    def close(self) -> None:
        """Drop the CUDA graphs, which keep the cache in memory."""
        self._engine.drop_graphs()

    def answer(self, questions: Iterable[Question]) -> Iterator[OfflineAnswer]:
        """Yield answers as they end, not in the order of the questions."""
        waiting = iter(questions)
        while True:
            for half in self._halves:
                yield from self._collect(half)
                self._admit(half, waiting)
                self._launch(half)
            if not any(half.rows for half in self._halves):
                return

    def _admit(self, half: _Half, waiting: Iterator[Question]) -> None:
        """Assign waiting questions to the free slots, and prefill their prompts."""
        asked: list[tuple[int, Question]] = []
        for row in half.places:
            if row in half.rows:
                continue
            question = next(waiting, None)
            if question is None:
                break
            self._check(question)
            half.rows[row] = _Row(question)
            asked.append((row, question))
        self._engine.rows.place_all([(row, one.prompt_ids, 0, self._sampling(one)) for row, one in asked])
        self._prefill(asked)

    def _check(self, question: Question) -> None:
        length = len(question.prompt_ids) + question.max_tokens
        if not question.prompt_ids or length > self.max_model_len:
            raise RequestError(
                f"a prompt of {len(question.prompt_ids)} tokens and {question.max_tokens} of answer: "
                f"a row holds 1 to {self.max_model_len} tokens."
            )

    def _sampling(self, question: Question) -> RowSampling:
        return RowSampling(
            temperature=question.temperature,
            top_p=question.top_p,
            seed=question.seed,
            output_start=len(question.prompt_ids),
            min_end=len(question.prompt_ids),
            stop_ids=self._end_ids,
        )

    def _prefill(self, asked: list[tuple[int, Question]]) -> None:
        """Prefill all but the last token of each prompt, several prompts at a time."""
        group: list[tuple[int, Question]] = []
        size = 0
        for row, question in asked:
            count = len(question.prompt_ids) - 1
            if count == 0:
                continue
            if group and size + count > self._engine.plan.max_prefill_tokens:
                self._prefill_group(group)
                group, size = [], 0
            group.append((row, question))
            size += count
        if group:
            self._prefill_group(group)

    def _prefill_group(self, group: list[tuple[int, Question]]) -> None:
        engine, prompts = self._engine, [question.prompt_ids for _, question in group]
        engine.rows.activate([row for row, _ in group])
        prefill_step(
            target=engine.models.target,
            drafter=engine.models.drafter,
            cache=engine.cache,
            rows=engine.rows,
            token_ids=to_device([t for ids in prompts for t in ids[:-1]], engine.models.device),
            next_ids=to_device([t for ids in prompts for t in ids[1:]], engine.models.device),
            counts=tuple(len(ids) - 1 for ids in prompts),
        )

    @torch.inference_mode()
    def _launch(self, half: _Half) -> None:
        """Launch ROUND steps of all sequences of `half`, without waiting for the results."""
        engine, rows = self._engine, sorted(half.rows)
        if not rows:
            return
        graph = None if engine.graphs is None else engine.graphs.find(len(rows), 1)
        engine.rows.activate(rows, None if graph is None else graph.size.rows)
        steps = []
        for _ in range(ROUND):
            sampled = engine.decode(1).token_ids if graph is None else graph.replay()[:, 1:]
            steps.append(sampled[: len(rows), 0].clone())
        tokens = torch.stack(steps)
        event = None
        if tokens.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            tokens = torch.empty_like(tokens, device="cpu", pin_memory=True).copy_(tokens, non_blocking=True)
            event.record()
        half.round = _Round(rows, tokens, event)

    def _collect(self, half: _Half) -> Iterator[OfflineAnswer]:
        """Yield the answers that ended in the last round of `half`."""
        if half.round is None:
            return
        if half.round.event is not None:
            half.round.event.synchronize()
        tokens, rows = half.round.tokens.numpy(), half.round.rows
        half.round = None
        ended = set(np.flatnonzero(np.isin(tokens, self._end_ids).any(axis=0)).tolist())
        for column, number in enumerate(rows):
            row = half.rows[number]
            row.pieces.append(tokens[:, column])
            row.num_tokens += ROUND
            if column in ended or row.is_over():
                del half.rows[number]
                yield self._finished(row)

    def _finished(self, row: _Row) -> OfflineAnswer:
        tokens = np.concatenate(row.pieces)[: row.question.max_tokens]
        ends = np.flatnonzero(np.isin(tokens, self._end_ids))
        if len(ends):
            tokens = tokens[: ends[0] + 1]
        return OfflineAnswer(row.question, tuple(tokens.tolist()), is_whole=len(ends) > 0)
