"""Names the load from which requests wait in a queue: their first token then takes many times as long."""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.bench.figures import BenchReport, Cell
from blockdraft.bench.report_rows import arm_names, whole_rows
from blockdraft.bench.sheet import full_label, milliseconds

MIN_TTFT_S = 1.0  # below, nobody calls it waiting
FACTOR = 10.0  # over the lowest load; a healthy DGX Spark has 4 at 16 streams, one that queues has 60 at 8
ADVICE = (
    "requests wait in a queue. Let more run at once: --max-num-seqs (vLLM --max-num-seqs, SGLang "
    "--max-running-requests) and --max-prefill-tokens (--max-num-batched-tokens, --chunked-prefill-size)."
)


def saturation_warnings(report: BenchReport) -> list[str]:
    """Return a line for each workload and arm whose time to first token saturates, from which load on."""
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
    """Judge cells that differ in their concurrency alone, the lowest first."""
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
    """One load has nothing to be compared with: it waits where waiting is most of an answer's time."""
    ttft_s, latency_s = cell["ttft_s"]["p50"], cell["latency_s"]["p50"]
    is_plain_load = cell["key"]["concurrency"] > 1 and cell["key"]["depth"] == 0
    if not is_plain_load or ttft_s is None or latency_s is None:
        return None
    if ttft_s < MIN_TTFT_S or ttft_s < latency_s / 2:
        return None
    return f"TTFT p50 is {milliseconds(ttft_s)} ms, most of an answer's time; {ADVICE}"
