"""Makes the report of `blockdraft plan`, as values; cli/plan.py prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from blockdraft.planner.acceptance import Acceptance
from blockdraft.planner.advice import (
    TYPICAL_CONTEXT,
    Advice,
    Fix,
    Speed,
    advise,
    best_width,
    estimate_speed,
    fit_pair,
    fixes,
    wanted,
)
from blockdraft.planner.draft_title import drafting_title
from blockdraft.planner.engine_step import calibration, not_calibrated
from blockdraft.planner.estimate import ANSWER_TOKENS, PROMPT_TOKENS, tokens_per_s, unpacks_weights
from blockdraft.planner.kv_formats import token_bytes
from blockdraft.planner.memory import cache_specs
from blockdraft.planner.memory_fit import Fit
from blockdraft.planner.pair import Case, Pair
from blockdraft.planner.plan import ELEMENT_BYTES
from blockdraft.planner.shape import Kind, kinds
from blockdraft.settings.recipe import Expectation
from blockdraft.settings.settings import NGRAM

COUNTED = (
    f"tokens of all users together, over HTTP: greedy answers of {ANSWER_TOKENS} tokens, the time of their "
    f"prompts ({PROMPT_TOKENS} tokens) included; a step with {TYPICAL_CONTEXT:,} tokens behind each user"
)
ENGINE_COUNTED = (
    "tokens of all users together, as in the published runs: greedy answers of some hundred to 4,096 tokens, "
    f"the time of their prompts included; a step with {TYPICAL_CONTEXT:,} tokens behind each user"
)
Verdict = Literal["fits", "tight", "does not fit"]
_KIND_OF = {"code": "code", "reasoning": "maths", "dialogue": "chat"}  # by a published run's workload


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is known before a start."""

    case: Case
    title: str | None  # of the drafter; None: there is none, or its kind is unknown
    fit: Fit
    verdict: Verdict
    sentence: str  # the verdict in words
    caches: Mapping[str, tuple[Kind, ...]]  # a token's bytes by kind of layer, for "target" and "drafter"
    acceptance: Acceptance | None  # None: no drafter
    speeds: tuple[tuple[int, Speed], ...]  # by rows
    unpacks_weights: bool  # weights are unpacked in each forward, which is slow
    advice: tuple[Advice, ...]
    fixes: tuple[Fix, ...]


def make_report(case: Case) -> Report:
    """Return the plan, estimates and advice for a case. Raise SettingsError or ModelError."""
    pair, fit = case.pair, fit_pair(case)
    verdict, sentence = _verdict(case, fit)
    return Report(
        case=case,
        title=drafting_title(pair.draft_config, 0 if fit.plan is None else fit.plan.draft_ngram),
        fit=fit,
        verdict=verdict,
        sentence=sentence,
        caches=_caches(pair, fit),
        acceptance=None if pair.block == 1 else pair.acceptance,
        speeds=_speeds(case, fit) if verdict != "does not fit" else (),
        unpacks_weights=unpacks_weights(fit, pair, case.card),
        advice=advise(case),
        fixes=() if verdict == "fits" else fixes(case),
    )


def _verdict(case: Case, fit: Fit) -> tuple[Verdict, str]:
    if fit.problem is not None:
        return "does not fit", fit.problem
    context = fit.max_model_len
    count = fit.sequences(context)
    asked = case.settings.max_num_seqs
    whole = f"{count} sequence{'s' if count != 1 else ''} of {context:,} tokens at once"
    if asked != "auto" and count < asked:
        return "tight", f"{whole}, of {asked} that are asked for: the others wait, or are shorter"
    return "fits", whole


def _caches(pair: Pair, fit: Fit) -> dict[str, tuple[Kind, ...]]:
    plan = fit.plan
    if plan is None:
        all_specs = [model.shape.specs for model in pair.models]
        found = [kinds(specs, 2, fit.width, token_bytes(specs, fit.kv_dtype)) for specs in all_specs]
    else:
        found = [kinds(specs, ELEMENT_BYTES[plan.dtype], plan.block) for specs in cache_specs(pair, plan)]
    return {"target": found[0], "drafter": found[1] if pair.draft is not None else ()}


def _speeds(case: Case, fit: Fit) -> tuple[tuple[int, Speed], ...]:
    """Estimate the speed for one user and for many (as requested, or 16), at a usual context.

    Our engine chooses the fastest width; other engines keep the width that they were started with.
    """
    context = min(TYPICAL_CONTEXT, fit.max_model_len)
    _, asked = wanted(case)
    counts = (1, min(asked if asked > 1 else 16, max(fit.sequences(context), 1)))
    found = []
    for rows in dict.fromkeys(counts):
        speed = estimate_speed(case, fit, rows=rows, context=context, width=fit.width)
        if case.settings.engine == "native":
            _, speed = best_width(case, fit, rows=rows, context=context)
        if speed is not None:
            found.append((rows, speed))
    return tuple(found)


def counted(report: Report) -> str:
    """Return what the estimates count."""
    return COUNTED if report.case.settings.engine == "native" else ENGINE_COUNTED


def spread(report: Report) -> float | None:
    """Return the factor of the estimates' interval, or None if there is none."""
    case = report.case
    return None if case.settings.engine == "native" or not_calibrated(case) else calibration().spread


def times_estimate(report: Report, run: Expectation) -> tuple[float | None, float | None]:
    """Return a published run's tok/s without and with the drafter, as times our estimate for the same load.

    None: the run has no such number, or is of another engine, format, width, context or cache.
    """
    case, fit = report.case, report.fit
    is_same = (run.width or case.pair.block) == fit.width and _has_format(case, run)
    is_same = is_same and run.depth is None and run.kv is None
    if run.engine != case.settings.engine or run.engine == "native" or not is_same:
        return None, None
    context = min(TYPICAL_CONTEXT, fit.max_model_len)
    speed = estimate_speed(case, fit, rows=run.concurrency, context=context, width=fit.width)
    if speed is None:
        return None, None
    kind = _KIND_OF.get(run.workload or "")
    drafted = speed.by_kind.get(kind or "")
    if run.tokens_per_step is not None and fit.width > 1:
        drafted = tokens_per_s(speed.step, run.tokens_per_step)
    return _ratio(run.baseline_tokens_per_second, speed.plain), _ratio(run.tokens_per_second, drafted)


def _has_format(case: Case, run: Expectation) -> bool:
    """Return whether a published run was of weights in the planned format."""
    is_fp8 = case.settings.quantization == "fp8"
    if run.quantization is None:
        return not is_fp8
    return run.quantization in ("fp8" if is_fp8 else case.pair.target.stored.method or "bf16").lower()


def _ratio(published: float | None, estimated: float | None) -> float | None:
    return None if published is None or estimated is None else published / estimated


def as_json(report: Report) -> dict[str, object]:
    """Return the report as plain values."""
    fit, case, pair = report.fit, report.case, report.case.pair
    return {
        "model": case.settings.model,
        "draft": pair.draft_name if pair.block > 1 else None,
        "draft_kind": _kind(pair),
        "drafts_with": report.title,
        "engine": case.settings.engine,
        "device": fit.device,
        "card": None if case.card is None else case.card.key,
        "verdict": report.verdict,
        "reason": report.sentence,
        "memory": {
            "budget_bytes": fit.budget,
            "budget": fit.budget_how,
            "total_bytes": fit.num_bytes,
            "items": [asdict(item) for item in fit.items],
        },
        "cache": {
            "bytes": fit.cache_bytes,
            "bytes_per_token": fit.footprint.per_token,
            "target": [asdict(kind) for kind in report.caches["target"]],
            "draft": [asdict(kind) for kind in report.caches["drafter"]],
        },
        "capacity": {
            "max_model_len": fit.max_model_len,
            "max_num_seqs": fit.max_num_seqs,
            "sequences_at_max_context": fit.sequences(fit.max_model_len),
        },
        "plan": None if fit.plan is None else asdict(fit.plan),
        "choices": [asdict(choice) for choice in fit.choices],
        "estimate": _estimates(report),
        "advice": [asdict(advice) for advice in report.advice],
        "fixes": [asdict(fix) for fix in report.fixes],
    }


def _kind(pair: Pair) -> str | None:
    """Return the drafter's kind, or None if there is no drafter or its kind is unknown."""
    if pair.draft_config is None:
        return NGRAM if pair.is_ngram else None
    return pair.draft_config.kind


def _estimates(report: Report) -> dict[str, object]:
    acceptance = report.acceptance
    return {
        "is_estimate": True,
        "unpacks_weights": report.unpacks_weights,
        "acceptance": None if acceptance is None else asdict(acceptance),
        "counted": counted(report),
        "interval": None if spread(report) is None else asdict(calibration()),
        "speeds": [
            {
                "rows": rows,
                "context": speed.step.context,
                "width": speed.step.width,
                "tree": speed.step.tree,
                "step_ms": round(speed.step.seconds * 1e3, 3),
                "plain_tokens_per_s": round(speed.plain, 1),
                "tokens_per_s": {kind: round(value, 1) for kind, value in speed.by_kind.items()},
                "parts_ms": {name: round(seconds * 1e3, 3) for name, seconds in speed.step.parts},
            }
            for rows, speed in report.speeds
        ],
    }
