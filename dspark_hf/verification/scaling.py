"""Sequential temperature scaling: a drafter's confidences put right once, on rounds held out.

A *confidence* c_k is the probability that draft token k survives given that those before it did;
the *survival* a_k is the product of the first k. Greedy texts accept a draft that equals the best
token, sampled ones by chance; so the same logits mean different things, and each has its own table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_hf.errors import CheckpointError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

TEMPERATURES = np.exp(np.linspace(math.log(0.2), math.log(5), 81))
"""The grid that `fit_sts` searches; neighbours differ by 4 %."""
MOST_SHIFT = 8.0
"""Shifts end here: where all tokens survived, or none, no finite one would do."""
NEWTON_STEPS = 10
"""Steps in which a shift is sought: from the middle, five or six are as exact as can be."""
MIN_SURVIVORS = 30
"""Rounds whose drafts before a position survived, below which the position is left as it is."""


@dataclass(frozen=True)
class Scaling:
    """Confidence k is sigmoid(logit_k / temperatures[k] + shifts[k]).

    Attributes:
        temperatures: One per draft position, above 0.
        shifts: One per draft position.
    """

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what is no scaling."""
        numbers = (*self.temperatures, *self.shifts)
        is_sound = all(math.isfinite(x) for x in numbers) and all(t > 0 for t in self.temperatures)
        if len(self.temperatures) != len(self.shifts) or not is_sound:
            raise CheckpointError(
                "calibration must give one temperature above 0 and one shift per draft token; got "
                f"temperatures {list(self.temperatures)} and shifts {list(self.shifts)}. Calibrate "
                "the drafter again."
            )

    @classmethod
    def plain(cls, num_positions: int) -> Scaling:
        """Return the one that changes nothing."""
        return cls((1.0,) * num_positions, (0.0,) * num_positions)

    def apply(self, logits: ArrayLike) -> NDArray[np.float64]:
        """Return confidences (..., N) of logits (..., N).

        Raises:
            ShapeError: If the logits' last size is not N.
        """
        given = np.asarray(logits, dtype=np.float64)
        if given.shape[-1:] != (len(self.temperatures),):
            raise ShapeError(
                f"logits must have one entry per temperature, {len(self.temperatures)}, on their "
                f"last axis; got shape {given.shape}. Fit on drafts of the same length."
            )
        return _sigmoid(given / np.asarray(self.temperatures) + np.asarray(self.shifts))

    def to_dict(self) -> dict[str, list[float]]:
        """Return it as JSON."""
        return {
            "temperatures": [round(t, 6) for t in self.temperatures],
            "shifts": [round(s, 6) for s in self.shifts],
        }


@dataclass(frozen=True)
class Scalings:
    """A drafter's scalings, by how its target's text is decoded.

    Attributes:
        greedy: Of texts that take the best token.
        sampled: Of texts that draw.
    """

    greedy: Scaling
    sampled: Scaling

    def of(self, *, is_drawn: bool) -> Scaling:
        """Return the one for a text."""
        return self.sampled if is_drawn else self.greedy

    @property
    def num_positions(self) -> int:
        """Draft positions they are for."""
        return len(self.greedy.temperatures)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Scalings:
        """Read the content of a calibration.json.

        Raises:
            CheckpointError: If a table is missing or none.
        """
        found = []
        for name in ("greedy", "sampled"):
            try:
                entry = stored[name]
                tables = [tuple(map(float, entry[key])) for key in ("temperatures", "shifts")]
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"calibration.json must hold 'temperatures' and 'shifts' under {name!r}; got "
                    f"{stored.get(name)!r}. Calibrate the drafter again."
                ) from error
            found.append(Scaling(*tables))
        return cls(*found)


def fit_sts(
    confidence_logits: ArrayLike, accepted: ArrayLike, *, with_shifts: bool = True
) -> Scaling:
    """Fit a temperature and a shift per draft position so that survivals are calibrated.

    For k = 1..N in order, with the positions before it fixed: to every temperature belongs the
    shift that makes the mean of a_k = prod_{i<=k} c_i the share that survived; of these pairs the
    one with the least log loss of a_k is taken.

    Args:
        confidence_logits: Logits of shape (rounds, N), of rounds that verified all N tokens.
        accepted: Accepted draft tokens of each round, 0..N, of shape (rounds,).
        with_shifts: Whether to shift at all; without, it is the published form with another loss.

    Returns:
        Scaling: A position that fewer than `MIN_SURVIVORS` rounds reached is left as it is.

    Raises:
        ShapeError: If the shapes do not fit, or there are no rounds.

    Cost: about 1,000 * N passes over the rounds.
    Source: DSpark, arXiv:2607.05147, sequential temperature scaling; shifts as Platt (1999).
    """
    logits = np.asarray(confidence_logits, dtype=np.float64)
    counts = np.asarray(accepted)
    if logits.ndim != 2 or not len(logits) or counts.shape != logits.shape[:1]:
        raise ShapeError(
            "confidence_logits must have shape (rounds, N) with accepted of shape (rounds,), at "
            f"least one round; got {logits.shape} and {counts.shape}."
        )
    before = np.ones(len(logits))
    temperatures, shifts = [], []
    for k in range(logits.shape[1]):
        temperature, shift = 1.0, 0.0
        if (counts >= k).sum() >= MIN_SURVIVORS:
            temperature, shift = _fit_position(logits[:, k], before, counts > k, with_shifts)
        temperatures.append(temperature)
        shifts.append(shift)
        before = before * _sigmoid(logits[:, k] / temperature + shift)
    return Scaling(tuple(temperatures), tuple(shifts))


def _fit_position(
    logits: NDArray[np.float64],
    before: NDArray[np.float64],
    survived: NDArray[np.bool_],
    with_shifts: bool,
) -> tuple[float, float]:
    """Return the temperature and shift of one position.

    Args:
        logits: Of shape (R,).
        before: Survival of the tokens before it, (R,).
        survived: Whether it survived, (R,).
        with_shifts: Whether to shift.
    """
    scaled = logits / TEMPERATURES[:, None]  # [G, R]
    shifts = np.zeros(len(TEMPERATURES))
    if with_shifts:
        low, high = np.full_like(shifts, -MOST_SHIFT), np.full_like(shifts, MOST_SHIFT)
        for _ in range(NEWTON_STEPS):
            chance = _sigmoid(scaled + shifts[:, None])
            missing = survived.mean() - (before * chance).mean(axis=1)
            low, high = np.where(missing > 0, shifts, low), np.where(missing > 0, high, shifts)
            slope = (before * chance * (1 - chance)).mean(axis=1)
            step = shifts + missing / np.maximum(slope, 1e-12)
            # Where the curve is too flat to follow, half of what is left.
            shifts = np.where((low < step) & (step < high), step, (low + high) / 2)
    stated = np.clip(before * _sigmoid(scaled + shifts[:, None]), 1e-9, 1 - 1e-9)
    losses = -np.where(survived, np.log(stated), np.log1p(-stated)).mean(axis=1)
    best = int(np.argmin(losses))
    return float(TEMPERATURES[best]), float(shifts[best])


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    # tanh cannot overflow.
    return 0.5 * (1 + np.tanh(0.5 * logits))
