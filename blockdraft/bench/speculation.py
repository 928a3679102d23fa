"""Reads counts of drafts from stream chunks and /metrics, in the formats of several servers.

blockdraft, vLLM   chunk.metrics.speculative_decoding; counters vllm:spec_decode_*
SGLang             chunk.usage or chunk.sglext.spec_tokens_details; counters sglang:spec_verify_calls_total
llama.cpp          chunk.timings
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from blockdraft.bench.records import Speculation
from blockdraft.bench.wire import Json, inside
from blockdraft.prometheus_text import samples

UNEVEN = 0.01  # share of drafts that may be missing (as at an answer's end) if all steps have equal widths
_VLLM = "vllm:spec_decode_num_"
_SGLANG = "sglang:"


def read_chunk(chunk: Json) -> Speculation | None:
    """Return a chunk's counts of the whole answer; None if the chunk has no counts."""
    if drafts := inside(chunk, "metrics", "speculative_decoding"):
        return _by_histogram(
            inside(drafts, "acceptance_histogram"),
            steps=_count(drafts, "num_spec_steps"),
            drafted=_count(drafts, "num_draft_tokens"),
            accepted=_count(drafts, "num_accepted_draft_tokens"),
            reached=inside(drafts, "reached_by_position"),
        )
    drafts = inside(chunk, "sglext", "spec_tokens_details") or inside(chunk, "usage")
    if steps := _count(drafts, "spec_verify_ct"):
        return _by_histogram(
            inside(drafts, "spec_correct_drafts_histogram"),
            steps=steps,
            drafted=_count(drafts, "spec_num_proposed_drafts"),
            accepted=_count(drafts, "spec_num_correct_drafts"),
        )
    return _by_timings(inside(chunk, "timings"))


def _by_histogram(
    histogram: object, *, steps: int, drafted: int, accepted: int, reached: object = None
) -> Speculation | None:
    """Count by `histogram[i]`, the steps that accepted exactly i drafts. Without it, return only the sum."""
    if not steps:
        return None
    if _is_counts(histogram):
        at_least = tuple(sum(histogram[position:]) for position in range(1, len(histogram)))
        counts = tuple(reached) if _is_counts(reached) else None
        return Speculation(steps=steps, drafted=drafted, accepted=at_least, reached=counts)
    return Speculation(steps=steps, drafted=drafted, accepted=(accepted,), has_positions=False)


def _is_counts(found: object) -> TypeGuard[list[int]]:
    return isinstance(found, list) and bool(found) and all(isinstance(count, int) for count in found)


def _by_timings(timings: object) -> Speculation | None:
    """Derive the steps from llama.cpp's tokens.

    Each step commits one token in addition to its drafts; an answer's first token comes from the prompt.
    """
    drafted, accepted = _count(timings, "draft_n"), _count(timings, "draft_n_accepted")
    steps = _count(timings, "predicted_n") - 1 - accepted
    if drafted <= 0 or steps <= 0:
        return None
    return Speculation(steps=steps, drafted=drafted, accepted=(accepted,), has_positions=False)


def _count(parent: object, key: str) -> int:
    value = inside(parent, key)
    return int(value) if isinstance(value, int | float) else 0


# ---- /metrics


def read_metrics(text: str, model: str | None = None) -> Speculation | None:
    """Return the counts since the server's start, of `model` if counters name models; None if no counts."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in samples(text):
        if model is not None and labels.get("model_name", model) != model:
            continue
        totals[name] = totals.get(name, 0.0) + value
        if name == f"{_VLLM}accepted_tokens_per_pos_total" and labels.get("position", "").isdecimal():
            position = int(labels["position"])
            positions[position] = positions.get(position, 0.0) + value
    if f"{_VLLM}drafts_total" in totals:
        return _vllm_counters(totals, positions)
    if f"{_SGLANG}spec_verify_calls_total" in totals:
        return _sglang_counters(totals)
    return None


def _vllm_counters(totals: Mapping[str, float], positions: Mapping[int, float]) -> Speculation:
    accepted = totals.get(f"{_VLLM}accepted_tokens_total", 0.0)
    by_position = tuple(int(positions.get(i, 0.0)) for i in range(max(positions, default=-1) + 1))
    return Speculation(
        steps=int(totals[f"{_VLLM}drafts_total"]),
        drafted=int(totals.get(f"{_VLLM}draft_tokens_total", 0.0)),
        accepted=by_position or (int(accepted),),
        has_positions=bool(by_position),
    )


def _sglang_counters(totals: Mapping[str, float]) -> Speculation:
    """Derive accepted drafts from SGLang's counts of verifications and tokens; it does not count drafts.

    A verification commits one token in addition to its drafts; a request's first token comes from its prompt.
    """
    steps = totals[f"{_SGLANG}spec_verify_calls_total"]
    tokens = totals.get(f"{_SGLANG}generation_tokens_total", 0.0)
    accepted = max(0.0, tokens - totals.get(f"{_SGLANG}num_requests_total", 0.0) - steps)
    width = totals.get(f"{_SGLANG}spec_num_draft_tokens", 0.0)  # the anchor included
    drafted = steps * max(0.0, width - 1)
    return Speculation(steps=int(steps), drafted=int(drafted), accepted=(int(accepted),), has_positions=False)


def difference(before: Speculation | None, after: Speculation | None) -> Speculation | None:
    """Return the counts between two readings; None if they cannot be subtracted, as after a restart."""
    if before is None or after is None or (before.has_positions != after.has_positions and before.steps):
        return None
    size = max(len(before.accepted), len(after.accepted))
    old, new = (reading.accepted + (0,) * (size - len(reading.accepted)) for reading in (before, after))
    accepted = tuple(later - earlier for earlier, later in zip(old, new, strict=True))
    steps, drafted = after.steps - before.steps, after.drafted - before.drafted
    if steps < 0 or drafted < 0 or any(count < 0 for count in accepted):
        return None
    return Speculation(steps=steps, drafted=drafted, accepted=accepted, has_positions=after.has_positions)


def total_of(parts: Iterable[Speculation]) -> Speculation:
    """Return the sum of all counts."""
    found = list(parts)
    reached = [part.reached for part in found if part.reached is not None]
    return Speculation(
        steps=sum(part.steps for part in found),
        drafted=sum(part.drafted for part in found),
        accepted=_sums(part.accepted for part in found),
        has_positions=all(part.has_positions for part in found),
        reached=_sums(reached) if len(reached) == len(found) else None,
    )


def _sums(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))


def reached_by(one: Speculation) -> tuple[int, ...] | None:
    """Return, for each position, how many steps drafted it and accepted all drafts before it.

    If the server does not report this, compute it from equal widths of all steps. Return None if unknown.
    """
    if one.reached is not None or not one.has_positions or not one.steps:
        return one.reached
    num_drafts = round(one.drafted / one.steps)
    is_even = abs(one.drafted - num_drafts * one.steps) <= UNEVEN * one.drafted
    if not num_drafts or not is_even or any(one.accepted[num_drafts:]):
        return None
    return (one.steps, *one.accepted)[:num_drafts]
