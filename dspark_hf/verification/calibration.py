"""How far confidences can be trusted, and a map learned while decoding that puts them right.

A *confidence* c_k is the probability that draft token k survives given that those before it did;
the *survival* a_k is the product of the first k. Calibrated means: of the tokens said to survive
with probability p, the share p does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dspark_hf.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

BINS = 15
"""Equal bins of a probability when none are asked for, as is usual for this error."""
EDGES = (0.02, 0.05, *(0.1 * k for k in range(1, 10)), 0.95, 0.98)
"""Inner edges of the online map's bins: finer at the ends, where confidences gather."""
PRIOR_TESTS = 4.0
"""Weight of the given confidence in each bin, in tokens: a handful of outcomes outvotes it."""
UNSEEN_WEIGHT = 0.25
"""Weight, in tokens, of a bin without outcomes where bins are made monotone."""
FORGETTING = 0.998
"""Factor on a bin's older outcomes per new one: it remembers about 500."""


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of a reliability diagram.

    Attributes:
        low: Its lower edge.
        high: Its upper edge.
        count: Predictions in it, at least 1.
        mean_probability: What they said.
        frequency: What came true.
    """

    low: float
    high: float
    count: int
    mean_probability: float
    frequency: float


def reliability(
    probabilities: ArrayLike, outcomes: ArrayLike, bins: int = BINS
) -> list[ReliabilityBin]:
    """Compare what was predicted with what came true, by equal bins of the prediction.

    Args:
        probabilities: Predictions in [0, 1], of any shape.
        outcomes: 0 or 1 (or False and True) for each, of the same shape.
        bins: Number of bins; the last includes 1.

    Returns:
        list[ReliabilityBin]: The bins that hold predictions, in order.

    Raises:
        ShapeError: If the shapes differ.
    """
    said, came = _pair(probabilities, outcomes)
    places = np.minimum((said * bins).astype(np.int64), bins - 1)
    return [
        ReliabilityBin(
            place / bins,
            (place + 1) / bins,
            int(found.sum()),
            float(said[found].mean()),
            float(came[found].mean()),
        )
        for place in np.unique(places).tolist()
        for found in [places == place]
    ]


def expected_calibration_error(
    probabilities: ArrayLike, outcomes: ArrayLike, bins: int = BINS
) -> float:
    """The mean gap between prediction and frequency: sum over bins of n_b / n |p_b - f_b|.

    Args:
        probabilities: Predictions in [0, 1], of any shape.
        outcomes: 0 or 1 for each, of the same shape.
        bins: Number of equal bins.

    Returns:
        float: From 0 (calibrated) to 1; 0 for no predictions. Chance alone gives about
        sqrt(bins / n) / 4.

    Raises:
        ShapeError: If the shapes differ.

    Source: Naeini et al., "Obtaining well calibrated probabilities using Bayesian binning" (2015).
    """
    said, came = _pair(probabilities, outcomes)
    if said.size == 0:
        return 0.0
    places = np.minimum((said * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(places, weights=said - came, minlength=bins)
    return float(np.abs(gaps).sum() / said.size)


def error_by_chance(
    probabilities: ArrayLike, bins: int = BINS, *, draws: int = 200, seed: int = 0
) -> float:
    """The calibration error that these predictions have on average where they are right.

    Few outcomes never come as often as was said; an error near this one tells of no fault.

    Args:
        probabilities: Predictions in [0, 1], of any shape.
        bins: Number of equal bins.
        draws: Times that outcomes are drawn by the predictions.
        seed: Of the draws.

    Returns:
        float: The mean of `expected_calibration_error` over the draws; 0 for no predictions.
    """
    said = np.asarray(probabilities, dtype=np.float64).ravel()
    stream = np.random.default_rng(seed)
    came = (stream.random(said.size) < said for _ in range(draws))
    return float(np.mean([expected_calibration_error(said, drawn, bins) for drawn in came]))


def area_under_curve(probabilities: ArrayLike, outcomes: ArrayLike) -> float:
    """The probability that a random true case is ranked above a random false one; ties count half.

    Args:
        probabilities: Predictions, of any shape; only their order matters.
        outcomes: 0 or 1 for each, of the same shape.

    Returns:
        float: 0.5 for a useless ranking, 1 for a perfect one; NaN if all outcomes are the same.

    Raises:
        ShapeError: If the shapes differ.

    Source: the Mann-Whitney statistic.
    """
    said, came = _pair(probabilities, outcomes)
    num_true = int((came > 0.5).sum())
    num_false = came.size - num_true
    if not num_true or not num_false:
        return math.nan
    _, inverse, counts = np.unique(said, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    ranks = mean_ranks[inverse.reshape(-1)]
    above = ranks[came > 0.5].sum() - num_true * (num_true + 1) / 2
    return float(above / (num_true * num_false))


class OnlineCalibration:
    """Maps a drafter's confidence to the acceptance that was observed at such confidences.

    Outcomes are counted in bins of the confidence, with forgetting, together with `PRIOR_TESTS`
    tokens that behave as the confidence says. The bins' frequencies are made monotone (pool
    adjacent violators) and joined by straight lines, so that the map never reverses an order.
    Before anything is observed it returns what it is given, up to half a bin at the two ends.
    """

    def __init__(self) -> None:
        """Start from trust."""
        num_bins = len(EDGES) + 1
        self._tested = [0.0] * num_bins
        self._accepted = [0.0] * num_bins
        self._said = [0.0] * num_bins
        self._nodes: tuple[list[float], list[float]] | None = None

    def observe(self, confidence: Sequence[float], tested: int, accepted: int) -> None:
        """Add one verified draft.

        Args:
            confidence: As the drafter gave it, for at least the tested tokens.
            tested: Tokens that were accepted or refused; each was reached, so that its outcome is
                conditional on those before it, as its confidence is.
            accepted: Tokens accepted, the first ones of those tested.
        """
        for k in range(tested):
            place = bisect_right(EDGES, confidence[k])
            for table, value in (
                (self._tested, 1.0),
                (self._accepted, float(k < accepted)),
                (self._said, float(confidence[k])),
            ):
                table[place] = table[place] * FORGETTING + value
        if tested:
            self._nodes = None

    def __call__(self, confidence: Sequence[float]) -> list[float]:
        """Return the calibrated confidences, each in [0, 1]."""
        if self._nodes is None:
            self._nodes = self._fit()
        mapped: list[float] = np.interp(np.asarray(confidence), *self._nodes).tolist()
        return mapped

    def _fit(self) -> tuple[list[float], list[float]]:
        """Return the corners of the map: mean confidence and smoothed frequency of each bin."""
        bounds = (0.0, *EDGES, 1.0)
        said, pools = [], []
        for i, tested in enumerate(self._tested):
            centre, weight = (bounds[i] + bounds[i + 1]) / 2, tested + PRIOR_TESTS
            said.append((self._said[i] + PRIOR_TESTS * centre) / weight)
            found = (self._accepted[i] + PRIOR_TESTS * centre) / weight
            # A bin nobody has seen yields to its neighbours rather than holding them up.
            pools.append([(tested + UNSEEN_WEIGHT) * found, tested + UNSEEN_WEIGHT, 1.0])
            while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                last = pools.pop()
                pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
        return said, [total / weight for total, weight, size in pools for _ in range(int(size))]


def _pair(
    probabilities: ArrayLike, outcomes: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    said = np.asarray(probabilities, dtype=np.float64)
    came = np.asarray(outcomes, dtype=np.float64)
    if said.shape != came.shape:
        raise ShapeError(
            f"outcomes must have the shape of probabilities, {said.shape}; got {came.shape}."
        )
    return said.reshape(-1), came.reshape(-1)
