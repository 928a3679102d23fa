"""Warns of failures, cache hits, a busy client and queues: they make the figures of a report doubtful."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from blockdraft.bench.figures import ArmPair, BenchReport, Cell
from blockdraft.bench.records import PLAIN, Group
from blockdraft.bench.report_rows import arm_names, key_text, whole_rows
from blockdraft.bench.sheet import full_label, load_text, milliseconds, row_name

MAX_CACHED_SHARE = 0.1  # of the prompt tokens of first turns; a cached chat template stays below
MAX_SEND_LAG_S = 0.005
MAX_GENERATOR_USED = 0.6  # of the client's reading speed; above it, events wait for the client
MAX_COMMITTED = 1.1  # committed over output tokens; tokens after an answer's end are cut off
MIN_TTFT_S = 1.0  # a shorter TTFT does not mean a queue
FACTOR = 10.0  # times the lowest load's TTFT; a DGX Spark has 4 at 16 streams, and 60 at 8 if requests queue
ADVICE = (
    "requests wait in a queue. Let more run at once: --max-num-seqs (vLLM --max-num-seqs, SGLang "
    "--max-running-requests) and --max-prefill-tokens (--max-num-batched-tokens, --chunked-prefill-size)."
)


def warnings_of(report: BenchReport, groups: Sequence[Group]) -> list[str]:
    """Return a line for everything that makes a report's figures doubtful."""
    cached = {(key_text(group.key), group.arm): _cached_share(group) for group in groups}
    warnings = [
        *_endpoint_warnings(report["endpoint"]),
        *_generator_warnings(report),
        *_saturation_warnings(report),
    ]
    names = arm_names(report["cells"])
    for row in whole_rows(report):
        for cell in row.cells:
            share = cached[key_text(cell["key"]), cell["arm"]]
            warnings += _cell_warnings(cell, arm=names[cell["arm"]], cached=share)
        if row.pair is not None:
            warnings += pair_warnings(row.pair)
    return warnings


def _endpoint_warnings(endpoint: Mapping[str, object]) -> list[str]:
    url = endpoint["url"]
    host = urlsplit(url).hostname if isinstance(url, str) else None
    if host in (None, "localhost", "::1", "0.0.0.0") or str(host).startswith("127."):
        return []
    return [f"the server is at {host}: 'machine' describes the machine that measured, not the server's."]


def _cell_warnings(cell: Cell, *, arm: str, cached: float) -> list[str]:
    name = f"{row_name(cell['key'])}, {arm}"
    warnings = []
    if cell["num_failed"]:
        kinds = ", ".join(f"{error['kind']} ({error['count']})" for error in cell["errors"])
        warnings.append(f"{name}: {cell['num_failed']} of {cell['num_requests']} requests failed: {kinds}.")
    if cell["num_not_ended"]:
        warnings.append(f"{name}: the run was stopped; {cell['num_not_ended']} requests were given up.")
    if cell["num_not_sent"]:
        warnings.append(f"{name}: {cell['num_not_sent']} requests were never sent.")
    if cell["arm"] == PLAIN and cell["speculation"]["drafted"]:
        warnings.append(f"{name}: the baseline speculated as well; the speedup means nothing.")
    speculation = cell["speculation"]
    committed = (speculation["steps"] or 0) + (speculation["accepted"] or 0)
    if cell["tokens_out"] is not None and committed > MAX_COMMITTED * cell["tokens_out"]:
        is_metered = speculation["acceptance"] == "metered"
        others = ", as do requests that failed or are not ours" if is_metered else ""
        warnings.append(
            f"{name}: steps committed {committed:,} tokens, answers have {cell['tokens_out']:,}: drafts past "
            f"the end of answers count{others}, and committed/step is too high."
        )
    if cached > MAX_CACHED_SHARE:
        warnings.append(f"{name}: {cached:.0%} of the prompt tokens of first turns came from a cache.")
    lag_s = cell["send_lag_s"]["p99"] or 0.0
    if lag_s > MAX_SEND_LAG_S:
        warnings.append(f"{name}: requests left up to {milliseconds(lag_s)} ms late (p99 of the send lag).")
    return warnings


def _cached_share(group: Group) -> float:
    first = [answer for answer in group.answers if answer.is_ok and answer.turn == 0]
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in first)
    return sum(answer.cached_tokens or 0 for answer in first) / prompt_tokens if prompt_tokens else 0.0


def pair_warnings(pair: ArmPair) -> list[str]:
    name = row_name(pair["key"])
    warnings = []
    if pair["num_unmatched"]:
        warnings.append(f"{name}: {pair['num_unmatched']} prompts are in one arm only, and not compared.")
    if pair["agreement"] is not None:
        turns = pair["agreement"]["first_turns"]
        if turns["num_equal"] < turns["num_compared"]:
            warnings.append(
                f"{name}: with and without speculation, {turns['num_compared'] - turns['num_equal']} of "
                f"{turns['num_compared']} greedy answers differ."
            )
    return warnings


def _generator_warnings(report: BenchReport) -> list[str]:
    return [
        f"at {load_text(one)} the load generator read {one['used']:.0%} of what it can: the server may be "
        "faster than what was measured. Give it more --processes, or another machine."
        for one in report.get("generator", [])
        if one["used"] is not None and one["used"] > MAX_GENERATOR_USED
    ]


def _saturation_warnings(report: BenchReport) -> list[str]:
    """Return a line for each workload and arm whose TTFT shows saturation, with the load where it begins."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for row in whole_rows(report):
        for cell in row.cells if row.key["rate"] is None else []:
            found.setdefault((full_label(row.key), cell["arm"]), []).append(cell)
    names = arm_names(report["cells"])
    lines = []
    for (label, _), cells in found.items():
        ordered = sorted(cells, key=lambda cell: cell["key"]["concurrency"])
        if (why := _why_saturated(ordered)) is not None:
            lines.append(f"{label}, {names[ordered[0]['arm']]}: {why}")
    return lines


def _why_saturated(cells: Sequence[Cell]) -> str | None:
    """Return why these cells saturate, else None. They differ only in concurrency, lowest first."""
    if len(cells) == 1:
        return _why_alone(cells[0])
    lowest_s = cells[0]["ttft_s"]["p50"]
    for cell in cells[1:]:
        ttft_s = cell["ttft_s"]["p50"]
        if lowest_s and ttft_s is not None and ttft_s > max(MIN_TTFT_S, FACTOR * lowest_s):
            return (
                f"TTFT saturates from {cell['key']['concurrency']} at a time on: p50 {milliseconds(ttft_s)} "
                f"ms, {ttft_s / lowest_s:.0f} times that at {cells[0]['key']['concurrency']}; {ADVICE}"
            )
    return None


def _why_alone(cell: Cell) -> str | None:
    """Return why a single load saturates, else None: most of an answer's time is before its first token."""
    ttft_s, latency_s = cell["ttft_s"]["p50"], cell["latency_s"]["p50"]
    is_plain_load = cell["key"]["concurrency"] > 1 and cell["key"]["depth"] == 0
    if not is_plain_load or ttft_s is None or latency_s is None:
        return None
    if ttft_s < MIN_TTFT_S or ttft_s < latency_s / 2:
        return None
    return f"TTFT p50 is {milliseconds(ttft_s)} ms, most of an answer's time; {ADVICE}"
