"""Counters of an engine since it started: what /metrics, the live page and the benchmark read."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from blockdraft.engine.request import Delta
from blockdraft.engine.scheduler import Batch


@dataclass(slots=True)
class Stats:
    """Totals. `accepted[i]` counts the drafts at position i + 1 that were accepted."""

    num_prefill_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_steps: int = 0
    num_blocks: int = 0  # rows verified, over all decode steps
    num_drafted: int = 0
    num_emitted: int = 0
    num_finished: int = 0
    accepted: list[int] = field(default_factory=list)

    def count(self, batch: Batch, committed: Items[tuple[int, ...]], deltas: Items[Delta]) -> None:
        """One step: `committed` are the tokens of each block that was looked at."""
        if batch.kind == "prefill":
            self.num_prefill_steps += 1
            self.num_prefill_tokens += sum(batch.counts)
            return
        self.num_decode_steps += 1
        self.num_blocks += len(committed)
        self.num_drafted += len(committed) * (batch.width - 1)
        self.num_emitted += sum(len(delta.token_ids) for delta in deltas)
        self.num_finished += sum(delta.finish_reason is not None for delta in deltas)
        self.accepted.extend([0] * (batch.width - 1 - len(self.accepted)))
        for token_ids in committed:
            for position in range(len(token_ids) - 1):
                self.accepted[position] += 1
