"""Seconds by width: read between measured widths, borrowed from other curves, freed of noise."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPTIMISTIC_SLOPE = 0.01
"""Assumed extra cost per token beyond what was measured; low, so that widths get tried once."""
REACH = 5
"""Widths this far apart say nothing of each other's noise; nearer ones, the nearer the more."""
FEWEST_TIMES = 3
"""Forwards of a width from which their spread is known."""
SPREAD_TO_SIGMA, MEDIAN_TO_MEAN = 1.48, 1.57
"""Standard deviation over median deviation, and variance of a median over that of a mean, of a
normal distribution."""


@dataclass(frozen=True)
class Measured:
    """What the forwards of a width took.

    Attributes:
        seconds: Their median.
        spread: Median distance from it, as a part of it.
        count: How many there were.
    """

    seconds: float
    spread: float
    count: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Measured:
        """Summarise measured forwards."""
        middle = median(times)
        return cls(middle, median(abs(time / middle - 1) for time in times), len(times))


def interpolate(known: Mapping[int, float], cell: int) -> float:
    """Return the seconds of a width, by the line between its neighbours among those known."""
    if not known:
        return 1.0
    if cell in known:
        return known[cell]
    below = max((c for c in known if c < cell), default=None)
    above = min((c for c in known if c > cell), default=None)
    if below is None:
        return known[above] if above is not None else 1.0
    if above is None:
        return known[below] * (1 + OPTIMISTIC_SLOPE * (cell - below))
    share = (cell - below) / (above - below)
    return known[below] * (1 - share) + known[above] * share


def borrow(here: Mapping[int, float], there: Mapping[int, float], cell: int) -> float | None:
    """Return another group's cost of a width, scaled by the nearest width that both know."""
    if not here:
        return interpolate(there, cell)
    common = [c for c in here if min(there) <= c <= max(there)]
    if not common:
        return None
    anchor = min(common, key=lambda c: abs(c - cell))
    return interpolate(there, cell) * here[anchor] / interpolate(there, anchor)


def steadied(known: Mapping[int, float], measured: Mapping[int, Measured]) -> dict[int, float]:
    """Move widths towards the line through their neighbours, as far as noise may explain it.

    One token more costs less than single forwards differ by, and whoever takes the best of many
    widths takes the luckiest. A width that lies off the line by more than noise does stays where it
    was measured: stairs remain stairs.

    Args:
        known: Seconds by width, of the widths to compare.
        measured: What is known of the noise of some of them.

    Returns:
        dict[int, float]: Seconds of the same widths.

    Source: the positive part of James & Stein (1961), towards a local line.
    """
    spread = _shared_spread(measured)
    if not spread:
        return dict(known)
    counts = {cell: measured[cell].count if cell in measured else 1 for cell in known}
    return {cell: _pulled(cell, known, counts, spread) for cell in known}


def _shared_spread(measured: Mapping[int, Measured]) -> float:
    """Return the spread of single forwards over all widths, 0 if nothing tells."""
    telling = [found for found in measured.values() if found.count >= FEWEST_TIMES]
    total = sum(found.count for found in telling)
    return sum(found.spread * found.count for found in telling) / total if total else 0.0


def _pulled(
    cell: int, known: Mapping[int, float], counts: Mapping[int, int], spread: float
) -> float:
    weights = {
        c: counts[c] * (1 - abs(c - cell) / REACH) for c in known if 0 < abs(c - cell) < REACH
    }
    if len(weights) < 2:
        return known[cell]
    total = sum(weights.values())
    middle = sum(c * w for c, w in weights.items()) / total
    level = sum(known[c] * w for c, w in weights.items()) / total
    width = sum(w * (c - middle) ** 2 for c, w in weights.items())
    slope = sum(w * (c - middle) * (known[c] - level) for c, w in weights.items()) / width
    line = level + slope * (cell - middle)
    noise = MEDIAN_TO_MEAN * (SPREAD_TO_SIGMA * spread * known[cell]) ** 2
    by_chance = noise * (1 / counts[cell] + 1 / total)
    off = (known[cell] - line) ** 2
    # Its own forwards count as much as those of its neighbours at least.
    kept = max(1 - by_chance / off if off else 1.0, counts[cell] / (counts[cell] + total))
    return kept * known[cell] + (1 - kept) * line
