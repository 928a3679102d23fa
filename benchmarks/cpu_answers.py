"""Answers to the prompts that ship, by several engines in turn: how fast, and which are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cpu_ours import Answer


@dataclass(frozen=True, slots=True)
class Arm:
    answer: Callable[[list[int]], Answer]
    plain: str  # the arm with the same weights and without drafts, whose answers this one must give


def answers_of(
    arms: Mapping[str, Arm], questions: Sequence[list[int]], rounds: int
) -> dict[str, list[Answer]]:
    """Every question is answered by one arm directly after the other; of each, the best round counts."""
    for arm in arms.values():
        arm.answer(questions[0])  # warms it
    best: dict[str, list[Answer]] = {name: [] for name in arms}
    for ids in questions:
        found = [{name: arm.answer(ids) for name, arm in arms.items()} for _ in range(rounds)]
        for name in arms:
            best[name].append(min((one[name] for one in found), key=lambda one: one.seconds_per_token))
    return best


def figures(arms: Mapping[str, Arm], best: Mapping[str, list[Answer]], exact: str) -> dict[str, dict]:
    return {
        name: {
            "tokens_per_s": sum(one.num_timed for one in answers) / sum(one.seconds for one in answers),
            "tokens_per_step": sum(one.num_timed for one in answers) / sum(one.steps for one in answers),
            "tokens": sum(len(one.tokens) for one in answers),
            "answers": len(answers),
            "same_as_plain": num_same(answers, best[arms[name].plain]),
            "same_as_float32": num_same(answers, best[exact]),
        }
        for name, answers in best.items()
    }


def num_same(answers: Sequence[Answer], others: Sequence[Answer]) -> int:
    return sum(one.tokens == other.tokens for one, other in zip(answers, others, strict=True))


def cells(found: Mapping[str, Mapping[str, dict]], name: str) -> list[object]:
    """Return an arm's speed by workload, and how many of its answers agree."""
    each = [workload[name] for workload in found.values()]
    speeds = [f"{one['tokens_per_s']:.1f} ({one['tokens_per_step']:.2f})" for one in each]
    total = sum(one["answers"] for one in each)
    same = [f"{sum(one[key] for one in each)}/{total}" for key in ("same_as_plain", "same_as_float32")]
    return [name, *speeds, *same]
