"""The figures of a report: their names, meanings (definitions.toml) and types."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal, NotRequired  # NotRequired: older reports lack it

from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from blockdraft.bench.records import Arm, Key

Interval = list[float] | None
Acceptance = Literal["answers", "metered", "none", "unknown"]
Verdict = Literal["pays", "loses", "unclear", "too little"]

_TEXTS = Path(__file__).with_name("definitions.toml").read_text(encoding="utf-8")
DEFINITIONS: dict[str, str] = tomllib.loads(_TEXTS)


class Estimate(TypedDict):
    """A figure and its 95 % interval."""

    value: float | None
    interval: Interval


class Distribution(TypedDict):
    """The distribution of a figure over requests; all null if no request has it."""

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
    """Errors of one kind: their texts are equal up to the first ": "."""

    kind: str
    count: int
    example: str


class SpeculationFigures(TypedDict):
    """Counts and rates of drafts; null if unknown."""

    acceptance: Acceptance
    num_answers: int
    steps: int | None
    drafted: int | None
    accepted: int | None
    committed_per_step: Estimate
    draft_acceptance_rate: float | None
    acceptance_by_position: list[float] | None
    acceptance_histogram: list[float] | None
    reached_by_position: NotRequired[list[float] | None]
    acceptance_where_reached: NotRequired[list[float | None] | None]


class Asked(TypedDict):
    """The request parameters of a cell; null if requests differ."""

    max_tokens: int | None
    seed: int | None
    ignores_eos: bool | None
    thinking: bool | None
    is_raw: bool | None
    is_salted: bool | None
    prompts_hash: str


class AnswerColumns(TypedDict):
    """The answers of a cell, one list per figure. Failed answers have no tokens and no hash of the text."""

    prompt: list[str]
    number: list[int]
    turn: list[int]
    tokens: list[int | None]
    ttft_s: list[float | None]
    latency_s: list[float]
    text_hash: list[str | None]


class RunFigures(TypedDict):
    """One of several runs of a cell; times are medians."""

    tokens_per_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    committed_per_step: float | None


class OverTime(TypedDict):
    """The lowest and highest value of a figure over short windows of the cell's time."""

    window_s: float
    num_windows: int
    tokens_per_s: Interval
    draft_acceptance_rate: Interval


class Cell(TypedDict):
    """One row of the report: one workload at one load in one arm."""

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
    vllm: dict[str, object]  # these figures under the names of `vllm bench serve`
    answers: NotRequired[AnswerColumns]
    runs: NotRequired[list[RunFigures]]
    over_time: NotRequired[OverTime | None]


class Speedup(TypedDict):
    """Ratios of speculation to plain decoding; above 1 if speculation is faster."""

    tokens_per_s: Estimate
    tpot: Estimate


class Agreed(TypedDict):
    """Counts of turns that were compared between the arms."""

    num_compared: int
    num_equal: int
    share_equal: float | None
    num_failed: int
    num_after_divergence: int


class Divergence(TypedDict):
    """The first place where two answers to one prompt differ."""

    prompt: str
    turn: int
    position: int
    speculative: str
    plain: str


class Agreement(TypedDict):
    """How many answers are equal in both arms at temperature 0."""

    first_turns: Agreed
    later_turns: Agreed
    divergences: list[Divergence]


class ArmPair(TypedDict):
    """The comparison of a speculative cell with its plain cell."""

    key: Key
    num_prompts: int
    num_unmatched: int
    speedup: Speedup
    verdict: Verdict
    agreement: Agreement | None


class GraphGain(TypedDict):
    """A cell on two warm servers, of which one runs without CUDA graphs (--also-eager)."""

    key: Key
    arm: Arm
    eager_tokens_per_s: Estimate
    graphs_tokens_per_s: Estimate
    gain: Speedup  # of graphs over eager


class PhaseTime(TypedDict):
    """One part of a start-up."""

    name: str
    seconds: float


class Startup(TypedDict):
    """One start of the server, and its first request."""

    label: str
    phases: list[PhaseTime]
    ready_s: float | None
    first_ttft_s: float | None
    first_latency_s: float | None


class Warmup(TypedDict):
    """The requests before the measurement; the first one is cold."""

    num_requests: int
    num_failed: int
    first_ttft_s: float | None
    first_latency_s: float | None
    first_tokens_per_s: float | None
    rest_ttft_s: float | None
    rest_latency_s: float | None


class GeneratorFigures(TypedDict):
    """How fast the load generator reads at one load, measured with a server that computes nothing."""

    concurrency: int
    rate: float | None
    num_processes: int
    events_per_s: float
    used: float | None


class BenchReport(TypedDict):
    """The JSON file. A report of one workload at one load also has vLLM's keys."""

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
    pairs: list[ArmPair]
    warnings: list[str]
    notes: list[str]
    definitions: dict[str, str]
    generator: NotRequired[list[GeneratorFigures]]
    graph_gains: NotRequired[list[GraphGain]]


def make_estimate(value: float | None = None, interval: Interval = None) -> Estimate:
    return {"value": value, "interval": interval}


def headline_speedup(key: Key, speedup: Speedup) -> Estimate:
    """Return the speedup of TPOT at a given rate (arrivals fix tok/s), else the speedup of tok/s."""
    return speedup["tokens_per_s"] if key["rate"] is None else speedup["tpot"]
