"""Computes intervals by a bootstrap over prompts.

Whole prompts are resampled, not turns or tokens. The turns and tokens of one prompt are correlated, so
resampling them separately would make the interval too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from blockdraft.bench.figures import Interval

RESAMPLES = 1_000
MIN_PROMPTS = 3  # with fewer prompts there is no interval
CONFIDENCE = 0.95
_CHUNK_ENTRIES = 4_000_000  # most entries of one table of draws: bounds memory

Floats = NDArray[np.float64]


class Resamples:
    """Counts how often each prompt was drawn in each resample; all figures of a cell share the draws."""

    def __init__(self, prompt_ids: Sequence[str], *, seed: int) -> None:
        self.index = {prompt: position for position, prompt in enumerate(prompt_ids)}
        self.num_prompts = len(self.index)
        generator = np.random.default_rng(seed)
        columns = max(1, self.num_prompts)  # numpy refuses zero columns
        draws = generator.multinomial(self.num_prompts, np.full(columns, 1 / columns), size=RESAMPLES)
        self._draws = draws[:, : self.num_prompts]  # [resamples, prompts]

    def sums(self, values: Iterable[tuple[str, float]]) -> Floats:
        """Return the sum of each resample. `values` are pairs of prompt and value."""
        by_prompt = np.zeros(self.num_prompts)
        for prompt, value in values:
            by_prompt[self.index[prompt]] += value
        return np.asarray(self._draws @ by_prompt, dtype=np.float64)

    def medians(self, values: Sequence[tuple[str, float]]) -> Floats:
        """Return the median of each resample's values; NaN if a resample has no values."""
        numbers = np.array([value for _, value in values])
        order = np.argsort(numbers, kind="stable")
        columns = np.array([self.index[prompt] for prompt, _ in values], dtype=np.int64)[order]
        medians = np.full(RESAMPLES, np.nan)
        if not numbers.size:
            return medians
        rows = max(1, _CHUNK_ENTRIES // numbers.size)
        for start in range(0, RESAMPLES, rows):
            part = slice(start, start + rows)
            medians[part] = _counted_medians(numbers[order], self._draws[part][:, columns])
        return medians

    def interval(self, samples: Floats) -> Interval:
        """Return the 95 % interval of a figure, given its value in each resample."""
        finite = samples[np.isfinite(samples)]
        if self.num_prompts < MIN_PROMPTS or finite.size < RESAMPLES / 2:
            return None
        tail = _tail(self.num_prompts)
        return [float(bound) for bound in np.quantile(finite, [tail, 1 - tail])]


def ratio(above: Floats, below: Floats) -> Floats:
    """Return above / below. The result may be infinite or NaN: intervals ignore such values."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / below


def _counted_medians(ordered: Floats, counts: NDArray[np.int64]) -> Floats:
    """Return the median of each row. In a row, ordered[j] occurs counts[row, j] times."""
    below = np.cumsum(counts, axis=1)
    totals = below[:, -1:]
    last = len(ordered) - 1
    lower = np.minimum((2 * below < totals).sum(axis=1), last)
    upper = np.minimum((2 * below <= totals).sum(axis=1), last)
    medians = (ordered[lower] + ordered[upper]) / 2
    return np.where(totals[:, 0] > 0, medians, np.nan)


def _tail(num_prompts: int) -> float:
    """Return the share of resamples to cut at each end.

    Plain percentiles are too narrow for few prompts: they lack the factor n / (n - 1) of the variance and the
    heavier tails of Student's t. After Hesterberg, "What teachers should know about the bootstrap" (2015).
    """
    degrees = num_prompts - 1
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    # Student's quantile by the Cornish-Fisher expansion: within 0.03 for 3 degrees, 0.001 for 7.
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return NormalDist().cdf(-t * sqrt(num_prompts / degrees))
