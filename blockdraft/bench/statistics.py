"""Computes the figures of a cell from its answers, and of a cell paired with its baseline.

`figures.DEFINITIONS` defines each figure.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar, cast

import numpy as np

from blockdraft.bench.bootstrap import RESAMPLES, Floats, Resamples, ratio
from blockdraft.bench.figures import (
    Agreed,
    Agreement,
    AnswerColumns,
    ArmPair,
    Asked,
    Cell,
    Distribution,
    Divergence,
    Estimate,
    Failures,
    Interval,
    SpeculationFigures,
    Speedup,
    Verdict,
    headline_speedup,
    make_estimate,
)
from blockdraft.bench.over_time import over_time
from blockdraft.bench.records import PLAIN, SPECULATIVE, Answer, Group, Speculation
from blockdraft.bench.speculation import reached_by, total_of
from blockdraft.bench.weak_spots import where_reached

MAX_DIVERGENCES = 5
_DIGITS = 6  # decimals of seconds: microseconds
EXCERPT = 40  # characters shown of each side of a divergence
QUANTILES = tuple(step / 20 for step in range(21))  # 0, 0.05, ... 1

Value = TypeVar("Value")
Conversation = tuple[str, int, int]  # prompt, number, and count of earlier ones with both equal


def summarise(group: Group, *, seed: int) -> Cell:
    """Compute the figures of one cell."""
    asked, group = group.answers, _ended(group)
    answers = group.answers
    good = [answer for answer in answers if answer.is_ok]
    draws = Resamples(_prompt_ids(answers), seed=seed)
    speed, speeds = _throughput_samples(group, answers, draws)
    return {
        "key": group.key,
        "arm": group.arm,
        "asked": _asked(asked),
        "num_prompts": draws.num_prompts,
        "num_requests": len(answers),
        "num_failed": len(answers) - len(good),
        "num_not_sent": _num_not_sent(asked),
        "num_not_ended": sum(answer.is_sent and not answer.is_ended for answer in asked),
        "errors": _failures(answers),
        "tokens_out": _total(answer.completion_tokens for answer in good),
        "tokens_in": _total(answer.prompt_tokens for answer in good),
        "cached_tokens": _total_known(answer.cached_tokens for answer in good),
        "busy_s": group.busy_s,
        "tokens_per_s": make_estimate(speed, None if speed is None else draws.interval(speeds)),
        "request_tokens_per_s": _distribution(_known(good, lambda one: one.tokens_per_s), draws),
        "ttft_s": _distribution(_known(good, lambda one: one.ttft_s), draws),
        "tpot_s": _distribution(_known(good, lambda one: one.tpot_s), draws),
        "itl_s": _distribution([(one.ask.prompt.id, gap_s) for one in good for gap_s in one.gaps_s], None),
        "latency_s": _distribution(_known(good, lambda one: one.latency_s), draws),
        "send_lag_s": _distribution(_known(answers, lambda one: one.sent_s - one.planned_s), None),
        "speculation": _speculation(group, good, draws),
        "answers": _columns(answers),
        "runs": [],
        "over_time": over_time(group),
        "vllm": {},
    }


def pair(speculative: Group, plain: Group, *, seed: int) -> ArmPair:
    """Compute the speedup of speculation, and compare the texts of both arms."""
    assert speculative.key == plain.key
    assert (speculative.arm, plain.arm) == (SPECULATIVE, PLAIN)
    both, key = _SharedPrompts(speculative, plain, seed=seed), speculative.key
    gain = both.speedup()
    return {
        "key": key,
        "num_prompts": both.draws.num_prompts,
        "num_unmatched": both.num_unmatched,
        "speedup": gain,
        "verdict": _verdict(headline_speedup(key, gain)["interval"]),
        "agreement": _agreement(*both.answers) if key["temperature"] == 0 else None,
    }


def speedup(group: Group, other: Group, *, seed: int) -> Speedup:
    """Return the speed of `group` over that of `other`, on the prompts that both answered."""
    return _SharedPrompts(group, other, seed=seed).speedup()


class _SharedPrompts:
    """The answers of two groups to the prompts that are in both."""

    def __init__(self, *groups: Group, seed: int) -> None:
        self._groups = [_ended(group) for group in groups]
        ids, other_ids = (set(_prompt_ids(group.answers)) for group in self._groups)
        self.num_unmatched = len(ids ^ other_ids)
        self.draws = Resamples(sorted(ids & other_ids), seed=seed)
        self.answers = [
            [answer for answer in group.answers if answer.ask.prompt.id in self.draws.index]
            for group in self._groups
        ]

    def speedup(self) -> Speedup:
        draws = self.draws
        speeds = [
            _throughput_samples(group, answers, draws)
            for group, answers in zip(self._groups, self.answers, strict=True)
        ]
        tpots = [
            _median_samples(_known([one for one in answers if one.is_ok], lambda one: one.tpot_s), draws)
            for answers in self.answers
        ]
        return {
            "tokens_per_s": _ratio(speeds[0], speeds[1], draws),
            "tpot": _ratio(tpots[1], tpots[0], draws),
        }


def split_by_category(group: Group) -> list[Group]:
    """Return one group per class of prompts, in order of appearance; empty if there is only one class.

    Classes that ran together share the busy time in proportion to the time of their requests. The server's
    counters cannot be divided among classes.
    """
    classes: dict[str, list[Answer]] = defaultdict(list)
    for answer in group.answers:
        classes[answer.ask.prompt.category].append(answer)
    if len(classes) < 2:
        return []
    total_s = sum(answer.latency_s for answer in group.answers)
    return [
        Group(
            key={**group.key, "category": category},
            arm=group.arm,
            answers=answers,
            busy_s=group.busy_s * _share(sum(answer.latency_s for answer in answers), total_s),
        )
        for category, answers in classes.items()
    ]


def _ended(group: Group) -> Group:
    """Return the group without requests that were not sent or were given up, and without their busy time."""
    if all(answer.is_ended for answer in group.answers):
        return group
    ended = [answer for answer in group.answers if answer.is_ended]
    work, all_work = _work(group, ended), _work(group, (one for one in group.answers if one.is_sent))
    return replace(group, answers=ended, busy_s=group.busy_s * _share(work, all_work))


def _throughput_samples(
    group: Group, answers: Sequence[Answer], draws: Resamples
) -> tuple[float | None, Floats]:
    """Return the aggregate tok/s of some of a group's answers, and of each of their resamples.

    A resample with longer conversations also has a longer busy time: at a fixed concurrency, busy time is
    proportional to the summed time of all requests, failed ones included. At a given rate it is proportional
    to the number of conversations, so resampling gives no interval.
    """
    good = [answer for answer in answers if answer.is_ok]
    tokens = _total(answer.completion_tokens for answer in good)
    if tokens is None or group.busy_s <= 0:
        return None, np.full(RESAMPLES, np.nan)
    all_work = _work(group, group.answers)
    busy_s = group.busy_s * _share(_work(group, answers), all_work)
    value = tokens / busy_s if busy_s > 0 else None
    if group.key["rate"] is not None:
        return value, np.full(RESAMPLES, np.nan)
    drawn_s = group.busy_s * draws.sums(_known(answers, lambda one: one.latency_s)) / (all_work or 1)
    drawn_tokens = draws.sums(_known(good, lambda one: one.completion_tokens))
    return value, ratio(drawn_tokens, drawn_s)


def _work(group: Group, answers: Iterable[Answer]) -> float:
    """Return the weight for sharing busy time: summed latency, or at a rate the number of conversations."""
    if group.key["rate"] is None:
        return sum(answer.latency_s for answer in answers)
    return sum(answer.turn == 0 for answer in answers)


def _median_samples(values: Sequence[tuple[str, float]], draws: Resamples) -> tuple[float | None, Floats]:
    value = float(np.median([number for _, number in values])) if values else None
    return value, draws.medians(values)


def _ratio(
    above: tuple[float | None, Floats], below: tuple[float | None, Floats], draws: Resamples
) -> Estimate:
    if above[0] is None or not below[0]:
        return make_estimate()
    return make_estimate(above[0] / below[0], draws.interval(ratio(above[1], below[1])))


def _verdict(interval: Interval) -> Verdict:
    if interval is None:
        return "too little"
    if interval[0] <= 1 <= interval[1]:
        return "unclear"
    return "pays" if interval[0] > 1 else "loses"


def _distribution(values: Sequence[tuple[str, float]], draws: Resamples | None) -> Distribution:
    """Return the distribution of values, each paired with its prompt. Without draws it has no intervals."""
    if not values:
        return cast(
            "Distribution", {**dict.fromkeys(Distribution.__annotations__), "count": 0, "quantiles": []}
        )
    numbers = np.array([value for _, value in values])
    means = medians = None
    if draws is not None:
        counts = draws.sums((prompt, 1) for prompt, _ in values)
        means = draws.interval(ratio(draws.sums(values), counts))
        medians = draws.interval(draws.medians(values))
    p50, p90, p99 = (float(bound) for bound in np.quantile(numbers, [0.5, 0.9, 0.99]))
    return {
        "count": len(values),
        "mean": float(numbers.mean()),
        "mean_interval": means,
        "p50": p50,
        "p50_interval": medians,
        "p90": p90,
        "p99": p99,
        "std": float(numbers.std()),
        "quantiles": [float(bound) for bound in np.quantile(numbers, QUANTILES)],
    }


def _speculation(group: Group, good: Sequence[Answer], draws: Resamples) -> SpeculationFigures:
    said = [(answer.ask.prompt.id, answer.speculation) for answer in good if answer.speculation is not None]
    total = total_of(speculation for _, speculation in said)
    if total.steps:
        figures = _speculation_figures("answers", total, num_answers=len(said))
        steps = draws.sums((prompt, one.steps) for prompt, one in said)
        accepted = draws.sums((prompt, sum(one.accepted)) for prompt, one in said)
        figures["committed_per_step"]["interval"] = draws.interval(1 + ratio(accepted, steps))
        return figures
    if group.metered is not None and group.metered.steps:
        return _speculation_figures("metered", group.metered, num_answers=0)
    nothing = dict.fromkeys(SpeculationFigures.__annotations__)
    counted_none = group.metered is not None and not group.metered.steps  # the server made no drafts
    acceptance = "none" if group.arm == PLAIN or counted_none else "unknown"
    known = {"acceptance": acceptance, "num_answers": 0, "committed_per_step": make_estimate()}
    return cast("SpeculationFigures", {**nothing, **known})


def _speculation_figures(
    source: Literal["answers", "metered"], total: Speculation, *, num_answers: int
) -> SpeculationFigures:
    accepted = sum(total.accepted)
    reached = [total.steps, *total.accepted]  # steps that accepted at least 0, 1, ... drafts
    exactly = [max(0, here - after) for here, after in zip(reached, [*reached[1:], 0], strict=True)]
    shares = [count / total.steps for count in total.accepted]
    came_to = reached_by(total)
    return {
        "acceptance": source,
        "num_answers": num_answers,
        "steps": total.steps,
        "drafted": total.drafted,
        "accepted": accepted,
        "committed_per_step": make_estimate(1 + accepted / total.steps),
        "draft_acceptance_rate": accepted / total.drafted if total.drafted else None,
        "acceptance_by_position": shares if total.has_positions else None,
        "acceptance_histogram": [count / total.steps for count in exactly] if total.has_positions else None,
        "reached_by_position": None if came_to is None else [count / total.steps for count in came_to],
        "acceptance_where_reached": None if came_to is None else where_reached(total.accepted, came_to),
    }


def _agreement(speculative: Sequence[Answer], plain: Sequence[Answer]) -> Agreement:
    first, later = _nothing_compared(), _nothing_compared()
    divergences: list[Divergence] = []
    diverged: set[Conversation] = set()
    others = _by_turn(plain)
    for (turn, conversation), answer in sorted(_by_turn(speculative).items()):
        other = others.get((turn, conversation))
        if other is None:
            continue
        counts = first if turn == 0 else later
        if conversation in diverged:
            counts["num_after_divergence"] += 1
        elif not (answer.is_ok and other.is_ok):
            counts["num_failed"] += 1
        else:
            counts["num_compared"] += 1
            if (answer.thinking, answer.text) == (other.thinking, other.text):
                counts["num_equal"] += 1
            else:
                diverged.add(conversation)
                divergences.append(_divergence(answer, other))
    for counts in (first, later):
        if counts["num_compared"]:
            counts["share_equal"] = counts["num_equal"] / counts["num_compared"]
    return {"first_turns": first, "later_turns": later, "divergences": divergences[:MAX_DIVERGENCES]}


def _nothing_compared() -> Agreed:
    return cast("Agreed", {**dict.fromkeys(Agreed.__annotations__, 0), "share_equal": None})


def _by_turn(answers: Sequence[Answer]) -> dict[tuple[int, Conversation], Answer]:
    """Return the answers by turn and conversation, so that both arms can be matched.

    Sending times do not match them: the arm's speed decides which conversation sends its second turn first.
    Conversations with equal prompt and number are matched by the order in which they were sent.
    """
    repetitions: Counter[tuple[int, str, int]] = Counter()
    found = {}
    for answer in answers:
        turn, prompt, number = answer.turn, answer.ask.prompt.id, answer.ask.number
        found[turn, (prompt, number, repetitions[turn, prompt, number])] = answer
        repetitions[turn, prompt, number] += 1
    return found


def _divergence(answer: Answer, other: Answer) -> Divergence:
    mine, theirs = answer.thinking + answer.text, other.thinking + other.text
    position = next(
        (place for place, (one, two) in enumerate(zip(mine, theirs, strict=False)) if one != two),
        min(len(mine), len(theirs)),
    )
    return {
        "prompt": answer.ask.prompt.id,
        "turn": answer.turn,
        "position": position,
        "speculative": mine[position : position + EXCERPT],
        "plain": theirs[position : position + EXCERPT],
    }


def _failures(answers: Sequence[Answer]) -> list[Failures]:
    """Group errors by the text before ": " (ports contain colons too), most frequent first."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for answer in answers:
        if answer.error is not None:
            kinds[answer.error.split(": ")[0].strip()[:80]].append(answer.error)
    ordered = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    return [{"kind": kind, "count": len(errors), "example": errors[0][:400]} for kind, errors in ordered]


def _num_not_sent(answers: Sequence[Answer]) -> int:
    """Count the turns that should have been sent but were not."""
    due = sum(
        1 if answer.ask.is_raw else len(answer.ask.prompt.turns) for answer in answers if answer.turn == 0
    )
    return max(0, due - sum(answer.is_sent for answer in answers))


def _asked(answers: Sequence[Answer]) -> Asked:
    asks = [answer.ask for answer in answers]
    return {
        "max_tokens": _common([ask.max_tokens for ask in asks]),
        "seed": _common([ask.seed for ask in asks]),
        "ignores_eos": _common([ask.ignores_eos for ask in asks]),
        "thinking": _common([ask.thinking for ask in asks]),
        "is_raw": _common([ask.is_raw for ask in asks]),
        "is_salted": _common([ask.cache_salt is not None for ask in asks]),
        "prompts_hash": _prompts_hash(answers),
    }


def _common(values: Sequence[Value]) -> Value | None:
    """Return the value if all are equal, else None."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _prompts_hash(answers: Sequence[Answer]) -> str:
    """Hash the questions without their salts, which differ in every run."""
    prompts = {answer.ask.original or answer.ask.prompt for answer in answers}
    texts = sorted([prompt.id, prompt.system or "", *prompt.turns] for prompt in prompts)
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _prompt_ids(answers: Sequence[Answer]) -> list[str]:
    """Return the ids without duplicates, in an order that does not depend on the answers' order."""
    return sorted({answer.ask.prompt.id for answer in answers})


def _known(answers: Sequence[Answer], figure: Callable[[Answer], float | None]) -> list[tuple[str, float]]:
    """Return pairs of prompt and figure for the answers that have the figure."""
    values = ((answer.ask.prompt.id, figure(answer)) for answer in answers)
    return [(prompt, value) for prompt, value in values if value is not None]


def _total(counts: Iterable[int | None]) -> int | None:
    """Return the sum of counts; None if a count is None."""
    found = list(counts)
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


def _total_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _columns(answers: Sequence[Answer]) -> AnswerColumns:
    """Return a cell's answers as columns without texts, so that two runs can be paired later."""
    return {
        "prompt": [answer.ask.prompt.id for answer in answers],
        "number": [answer.ask.number for answer in answers],
        "turn": [answer.turn for answer in answers],
        "tokens": [answer.completion_tokens if answer.is_ok else None for answer in answers],
        "ttft_s": [None if answer.ttft_s is None else round(answer.ttft_s, _DIGITS) for answer in answers],
        "latency_s": [round(answer.latency_s, _DIGITS) for answer in answers],
        "text_hash": [_text_hash(answer) if answer.is_ok else None for answer in answers],
    }


def _text_hash(answer: Answer) -> str:
    return hashlib.sha256(f"{answer.thinking}\0{answer.text}".encode("utf-8", "surrogatepass")).hexdigest()[
        :16
    ]
