"""The figures of a report: what each is called, what it means, and what it is made of."""

from __future__ import annotations

from typing import Literal, TypedDict

from blockdraft.bench.records import Arm, Key

Interval = list[float] | None
Acceptance = Literal["answers", "metered", "none", "unknown"]
Verdict = Literal["pays", "loses", "unclear", "too little"]

DEFINITIONS: dict[str, str] = {
    "num_requests": "Requests sent and answered: one per turn of a conversation, failures included.",
    "num_failed": "Requests that ended in an error, without a whole answer or without usage: counted, in no "
    "time below.",
    "num_not_sent": "Turns never sent: an earlier one of the conversation failed, or the run ended.",
    "num_not_ended": "Requests given up when the run was stopped: in no other figure, nor is their share of "
    "busy_s.",
    "num_prompts": "Different prompts; the unit that the bootstrap draws.",
    "tokens_out": "Completion tokens of good answers, as the server's usage says (reasoning included).",
    "tokens_in": "Prompt tokens of good answers, as the server's usage says, cached ones included.",
    "cached_tokens": "Prompt tokens that the server found in its prefix cache; null: it does not say.",
    "busy_s": "Seconds from first request to last answer, summed over the blocks of this arm; at a rate the "
    "server may have been idle in between. Of one class "
    "of a workload: its share of them, by the time its requests took.",
    "tokens_per_s": "Aggregate: completion tokens of good answers over busy_s. At a rate the arrivals decide "
    "it, not the server: without an interval there.",
    "request_tokens_per_s": "Of each good request alone: its completion tokens over its end-to-end time.",
    "ttft_s": "Time to first token: from sending a request to the first delta with text (reasoning is text).",
    "tpot_s": "Time per output token after the first: (last byte - first delta) / (completion tokens - 1), "
    "of requests with two tokens or more.",
    "itl_s": "Time between deltas. A speculative server sends several tokens in one: compare TPOT instead.",
    "latency_s": "End to end: from sending a request to its last byte.",
    "send_lag_s": "How late a request was sent: the load generator's own delay.",
    "committed_per_step": "Tokens committed per verify step: accepted drafts + 1, the bonus token included. "
    "Others report accepted drafts alone, one less. As in vLLM, drafts accepted past the end of an answer "
    "count: with short answers it promises more than comes out.",
    "acceptance": 'Where the figures come from: "answers" (each answer says), "metered" (the server\'s '
    'counters before and after), "none" (an arm without speculation), "unknown" (the server does not say).',
    "acceptance_by_position": "Share of verify steps that accepted the draft at each position.",
    "acceptance_histogram": "Share of verify steps that accepted exactly 0, 1, 2, ... drafts.",
    "draft_acceptance_rate": "Accepted drafts over drafted tokens.",
    "speedup.tokens_per_s": "Aggregate tok/s with speculation over that without, same prompts, same run.",
    "speedup.tpot": "TPOT p50 without speculation over that with: above 1, speculation is faster.",
    "verdict": '"pays": the interval of speedup.tokens_per_s (at a rate: of speedup.tpot) lies above 1; '
    '"loses": below; "unclear": 1 is inside; "too little": no interval.',
    "agreement": "At temperature 0, turns in which both arms gave the same text, reasoning included, where "
    "both succeeded. A later turn is compared only where those before it agreed: else the prompts differ.",
    "interval": "95 % by bootstrap over prompts (1,000 resamples, percentiles widened for few prompts after "
    "Hesterberg 2015); null with fewer than 3 prompts. A resample's busy time is scaled by the time its "
    "requests took, so that the requests in flight stay the same.",
    "percentiles": "p50, p90, p99 interpolated linearly; std of the population; quantiles at 0, 5, ... 100 %",
}


class Estimate(TypedDict):
    """A figure and its 95 % interval."""

    value: float | None
    interval: Interval


class Distribution(TypedDict):
    """A figure that every request has; all null where there is no request that has it."""

    count: int
    mean: float | None
    mean_interval: Interval
    p50: float | None
    p50_interval: Interval
    p90: float | None
    p99: float | None
    std: float | None
    quantiles: list[float]


class Failures(TypedDict):
    """Errors that begin alike."""

    kind: str
    count: int
    example: str


class SpeculationFigures(TypedDict):
    """How the drafts fared; all null where it is not known."""

    acceptance: Acceptance
    num_answers: int
    steps: int | None
    drafted: int | None
    accepted: int | None
    committed_per_step: Estimate
    draft_acceptance_rate: float | None
    acceptance_by_position: list[float] | None
    acceptance_histogram: list[float] | None


class Asked(TypedDict):
    """What was asked of the server; null where requests differ."""

    max_tokens: int | None
    seed: int | None
    ignores_eos: bool | None
    thinking: bool | None
    is_raw: bool | None
    is_salted: bool | None
    prompts_hash: str


class Cell(TypedDict):
    """One row of the report: one workload at one load, of one arm."""

    key: Key
    arm: Arm
    asked: Asked
    num_prompts: int
    num_requests: int
    num_failed: int
    num_not_sent: int
    num_not_ended: int
    errors: list[Failures]
    tokens_out: int | None
    tokens_in: int | None
    cached_tokens: int | None
    busy_s: float
    tokens_per_s: Estimate
    request_tokens_per_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    latency_s: Distribution
    send_lag_s: Distribution
    speculation: SpeculationFigures
    vllm: dict[str, object]  # the same under the names of `vllm bench serve`


class Speedup(TypedDict):
    """Speculation against plain decoding, above 1 where speculation is faster."""

    tokens_per_s: Estimate
    tpot: Estimate


class Agreed(TypedDict):
    """Turns compared between the arms."""

    num_compared: int
    num_equal: int
    share_equal: float | None
    num_failed: int
    num_after_divergence: int


class Divergence(TypedDict):
    """The place where two answers to one prompt begin to differ."""

    prompt: str
    turn: int
    position: int
    speculative: str
    plain: str


class Agreement(TypedDict):
    """Whether both arms gave the same text at temperature 0."""

    first_turns: Agreed
    later_turns: Agreed
    divergences: list[Divergence]


class Pair(TypedDict):
    """A cell with speculation and the same without."""

    key: Key
    num_prompts: int
    num_unmatched: int
    speedup: Speedup
    verdict: Verdict
    agreement: Agreement | None


class Phase(TypedDict):
    """One part of a start-up."""

    name: str
    seconds: float


class Startup(TypedDict):
    """One start of the server, and the first request it answered."""

    label: str
    phases: list[Phase]
    ready_s: float | None
    first_ttft_s: float | None
    first_latency_s: float | None


class Warmup(TypedDict):
    """Requests before the measured ones; the first is the cold one."""

    num_requests: int
    num_failed: int
    first_ttft_s: float | None
    first_latency_s: float | None
    first_tokens_per_s: float | None
    rest_ttft_s: float | None
    rest_latency_s: float | None


class BenchReport(TypedDict):
    """The JSON file. A report of one workload at one load has vLLM's keys beside these."""

    schema: str
    date: str
    versions: dict[str, str]
    machine: dict[str, object]
    endpoint: dict[str, object]
    baseline: dict[str, object] | None
    options: dict[str, object]
    startup: list[Startup]
    warmup: Warmup
    cells: list[Cell]
    pairs: list[Pair]
    warnings: list[str]
    notes: list[str]
    definitions: dict[str, str]


def make_estimate(value: float | None = None, interval: Interval = None) -> Estimate:
    return {"value": value, "interval": interval}


def headline_speedup(key: Key, speedup: Speedup) -> Estimate:
    """Return the one to judge by: at a rate the arrivals decide the aggregate tok/s, whichever arm serves."""
    return speedup["tokens_per_s"] if key["rate"] is None else speedup["tpot"]
