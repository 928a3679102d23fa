"""QueueWait: predicts how long a new request would wait for a row."""

from __future__ import annotations

import math

WEIGHT = 1 / 16  # of the newest answer in the mean; arbitrary
MAX_RETRY_AFTER_S = 60  # clients of OpenAI's library wait no longer


class QueueWait:
    """Learns how long an answer keeps its row."""

    def __init__(self) -> None:
        self._row_s: float | None = None  # None: no answer has ended

    def learn(self, seconds: float) -> None:
        """Note that an answer has ended, `seconds` after it got its row."""
        self._row_s = seconds if self._row_s is None else self._row_s + WEIGHT * (seconds - self._row_s)

    def expected_s(self, num_ahead: int, num_running: int) -> float:
        """Return how long the request behind `num_ahead` others waits, while `num_running` answers run.

        Rows get free once per row and `_row_s`. The result is 0 if nothing is known.
        """
        if self._row_s is None or num_ahead < 0:
            return 0.0
        return (num_ahead + 1) * self._row_s / max(num_running, 1)


def retry_after_s(seconds: float) -> int:
    """Return whole seconds for the header Retry-After."""
    return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S)
