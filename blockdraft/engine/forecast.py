"""RowForecast: how a row's next drafts will fare, by how its last ones fared and by how sure the drafter was.

A drafter with a confidence head says of every draft how likely it is right, also of those behind the first
wrong one, which nobody looks at. It may exaggerate, or know nothing, so what it says is never taken for a
chance. It is one of two opinions of a row, and what each is worth is learnt from the drafts that follow:

    log(chance of a row at a place) = log(chance of all rows) * exp(worth @ (opinions - their mean there))

The mean is that of the rows whose drafts were put to the test at the place: much was expected of those that
came so far. To begin with, how drafts fared is worth 1, as where nobody says more, and confidence is worth 0.
"""

from __future__ import annotations

import math

import numpy as np

FADE = 0.95  # what a step leaves of what was known before it
FEW = 3  # rows, whose steps are forgotten more slowly: they say less
PRIOR = 4.0  # drafts put to the test that what is expected of a place counts for
FADE_WORTH = 0.998
CAUTION = 20.0  # information, as Fisher's, that what an opinion is worth to begin with counts for
MOST_WORTH = (1.5, 3.0)
FAR = 3.0  # standard deviations; more confidence says no more
MOST = 2.0  # of what opinions say together, either way: a chance of 0.9 is then between 0.46 and 0.99


class RowForecast:
    """Powers of all rows' chances, by row and place."""

    def __init__(self, num_places: int) -> None:
        self.worth = np.array([1.0, 0.0])
        self._information = np.zeros((2, 2))
        self._tried = np.zeros(num_places)
        self._opinions = np.zeros((num_places, 2))  # summed over those that were tried
        self._means = np.zeros((num_places, 2))
        self._said = np.zeros(num_places)
        self._odds = np.zeros(num_places)  # summed over those that were drafted
        self._squares = self._num_squares = 1.0

    def powers(self, fared: np.ndarray, sureness: np.ndarray) -> np.ndarray:
        """[R, places]; `fared` [R]: the same by how drafts fared alone; `sureness` [R]: of the last ones."""
        return self._factors(_opinions(fared, sureness)[:, None] - self._means)

    def _factors(self, differences: np.ndarray) -> np.ndarray:
        """[...] of opinions against their mean [..., 2]."""
        return np.exp(_between(differences @ self.worth, -MOST, MOST))  # type: ignore[no-any-return]

    def learn(
        self,
        fared: np.ndarray,
        sureness: np.ndarray,
        logs: np.ndarray,
        num_right: np.ndarray,
        odds: np.ndarray,
    ) -> np.ndarray:
        """From a step that opinions do not know of yet, nor all rows' chances, `logs` [places].

        `num_right` [R] of its drafts were right, of which the drafter said the log-odds `odds` [R, drafts].
        Returns how sure it was of each row [R]: sums over drafts, in standard deviations.
        """
        count, places = len(odds), np.arange(odds.shape[1])
        is_tried = num_right[:, None] >= places
        opinions = _opinions(fared, sureness)
        differences = opinions[:, None] - self._means[: len(places)]
        self._weigh(differences, logs[: len(places)], is_tried, num_right[:, None] > places)
        self._fade(FADE ** (count / (count + FEW)))
        self._tried[: len(places)] += is_tried.sum(axis=0)
        self._opinions[: len(places)] += is_tried.T @ opinions
        self._average()
        return self._against_others(odds)

    def _weigh(
        self, differences: np.ndarray, logs: np.ndarray, is_tried: np.ndarray, is_right: np.ndarray
    ) -> None:
        """A step of Newton's towards the worths by which these drafts, and those before, are likeliest."""
        expected = _between(np.exp(self._factors(differences) * logs), 0.01, 0.99)
        log = np.log(expected)
        slope = log / (1 - expected) * is_tried  # of a draft's log-likelihood
        flat = differences.reshape(-1, 2)
        gradient = ((is_right - expected) * slope).ravel() @ flat
        self._information *= FADE_WORTH ** (len(expected) / (len(expected) + FEW))
        self._information += flat.T @ (flat * (expected * log * slope).reshape(-1, 1))
        (first, both), (_, second) = (self._information + CAUTION * np.eye(2)).tolist()
        inverse = np.array([[second, -both], [-both, first]]) / (first * second - both * both)
        self.worth = _between(self.worth + inverse @ gradient, 0.0, MOST_WORTH)

    def _average(self) -> None:
        """Opinions in the mean of the rows that come so far; few say as much as the place before does."""
        tried, sums, fared, sure = self._tried.tolist(), self._opinions.tolist(), 0.0, 0.0
        for place, (count, (its_fared, its_sure)) in enumerate(zip(tried, sums, strict=True)):
            fared = (its_fared + PRIOR * fared) / (count + PRIOR)
            sure = (its_sure + PRIOR * sure) / (count + PRIOR)
            self._means[place] = fared, sure

    def _fade(self, fade: float) -> None:
        for sums in (self._tried, self._opinions, self._said, self._odds):
            sums *= fade
        self._squares *= fade
        self._num_squares *= fade

    def _against_others(self, odds: np.ndarray) -> np.ndarray:
        """[R]: sums over drafts, each against those of all rows at its place."""
        places = odds.shape[1]
        self._said[:places] += len(odds)
        self._odds[:places] += odds.sum(axis=0)
        away = odds - self._odds[:places] / self._said[:places]
        self._squares += float((away**2).sum())
        self._num_squares += odds.size
        return _between(away / math.sqrt(self._squares / self._num_squares), -FAR, FAR).sum(axis=1)  # type: ignore[no-any-return]


def _opinions(fared: np.ndarray, sureness: np.ndarray) -> np.ndarray:
    """[R, 2]; the higher, the worse."""
    return np.array((np.log(fared), -sureness)).T


def _between(values: np.ndarray, low: float, high: float | tuple[float, ...]) -> np.ndarray:
    """np.clip, which takes ten times as long for so few."""
    return np.minimum(np.maximum(values, low), high)  # type: ignore[no-any-return]
