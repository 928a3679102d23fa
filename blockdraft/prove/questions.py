"""The questions that are sent in every way: the first turns of the benchmark's built-in prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

from blockdraft.bench.workloads import load_all
from blockdraft.errors import BenchError

SEEDED = 0.7  # temperature of the seeded half of the questions
FIRST_SEED = 1000


@dataclass(frozen=True, slots=True)
class ProveQuestion:
    """One prompt at one temperature."""

    number: int
    prompt: str
    max_tokens: int
    temperature: float = 0.0

    @property
    def seed(self) -> int:
        return FIRST_SEED + self.number

    @property
    def is_seeded(self) -> bool:
        return self.temperature > 0

    @property
    def messages(self) -> list[Mapping[str, str]]:
        return [{"role": "user", "content": self.prompt}]


def make_questions(count: int, max_tokens: int) -> list[ProveQuestion]:
    """Return `count` greedy questions, from all built-in classes in turn; then each again with a seed."""
    columns = [[prompt.turns[0] for prompt in workload.prompts] for workload in load_all(is_offline=True)]
    prompts = [prompt for row in zip_longest(*columns) for prompt in row if prompt is not None]
    if not 1 <= count <= len(prompts):
        raise BenchError(f"--num-prompts {count}: give 1 to {len(prompts)}, as many as are built in.")
    greedy = [ProveQuestion(number, prompt, max_tokens) for number, prompt in enumerate(prompts[:count])]
    return greedy + [replace(question, temperature=SEEDED) for question in greedy]
