"""Computes the ranges of tok/s and acceptance over short windows of a cell's time."""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.bench.figures import Interval, OverTime
from blockdraft.bench.records import Answer, Block, Group

WINDOWS_S = (10.0, 1.0)  # the first length with MIN_WINDOWS windows is used; vLLM logs every 10 s
MIN_WINDOWS = 3

Window = tuple[float, float]


def over_time(group: Group) -> OverTime | None:
    """Return the ranges; None if the cell is too short."""
    answers = [answer for answer in group.answers if answer.is_ok]
    for window_s in WINDOWS_S:
        windows = [window for block in group.blocks for window in _windows(block, window_s)]
        if len(windows) >= MIN_WINDOWS:
            tokens = [
                sum(_share_in(answer, window) * (answer.completion_tokens or 0) for answer in answers)
                for window in windows
            ]
            # Without counts in the answers, use the server's counters, block by block.
            metered = [block.metered for block in group.blocks if block.metered and block.metered.drafted]
            return {
                "window_s": window_s,
                "num_windows": len(windows),
                "tokens_per_s": _range([count / window_s for count in tokens]),
                "draft_acceptance_rate": _range(
                    _rates(answers, windows) or [sum(one.accepted) / one.drafted for one in metered]
                ),
            }
    return None


def _windows(block: Block, window_s: float) -> list[Window]:
    """Cut a block into whole windows; ignore the rest at its end."""
    count = int((block.end_s - block.start_s) // window_s)
    starts = [block.start_s + place * window_s for place in range(count)]
    return [(start_s, start_s + window_s) for start_s in starts]


def _share_in(answer: Answer, window: Window) -> float:
    """Return the share of an answer written in a window, assuming a constant speed after the first token."""
    begin_s, end_s = answer.end_s if answer.first_s is None else answer.first_s, answer.end_s
    if end_s <= begin_s:
        return float(window[0] <= end_s < window[1])
    return max(0.0, min(end_s, window[1]) - max(begin_s, window[0])) / (end_s - begin_s)


def _rates(answers: Sequence[Answer], windows: Sequence[Window]) -> list[float]:
    """Return the acceptance rate of each window with drafts; empty if the answers report no drafts."""
    said = [(answer, answer.speculation) for answer in answers if answer.speculation is not None]
    rates = []
    for window in windows:
        shares = [(_share_in(answer, window), drafts) for answer, drafts in said]
        drafted = sum(share * drafts.drafted for share, drafts in shares)
        if drafted > 0:
            rates.append(sum(share * sum(drafts.accepted) for share, drafts in shares) / drafted)
    return rates


def _range(values: Sequence[float]) -> Interval:
    return [min(values), max(values)] if values else None
