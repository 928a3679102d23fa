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
from blockdraft.planner.estimate import ANSWER_TOKENS, PROMPT_TOKENS, unpacks_weights
from blockdraft.planner.kv_formats import token_bytes
from blockdraft.planner.memory import cache_specs
from blockdraft.planner.memory_fit import Fit
from blockdraft.planner.pair import Case, Pair
from blockdraft.planner.plan import ELEMENT_BYTES
from blockdraft.planner.shape import Kind, kinds
from blockdraft.settings.settings import NGRAM

COUNTED = (
    f"tokens of all users together, over HTTP: greedy answers of {ANSWER_TOKENS} tokens, the time of their "
    f"prompts ({PROMPT_TOKENS} tokens) included; a step with {TYPICAL_CONTEXT:,} tokens behind each user"
)
Verdict = Literal["fits", "tight", "does not fit"]


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
        unpacks_weights=unpacks_weights(fit, pair),
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
        "counted": COUNTED,
        "speeds": [
            {
                "rows": rows,
                "context": speed.step.context,
                "width": speed.step.width,
                "step_ms": round(speed.step.seconds * 1e3, 3),
                "plain_tokens_per_s": round(speed.plain, 1),
                "tokens_per_s": {kind: round(value, 1) for kind, value in speed.by_kind.items()},
            }
            for rows, speed in report.speeds
        ],
    }
