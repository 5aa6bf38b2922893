"""StepCosts: what a target forward costs, learned from the forwards themselves."""

from __future__ import annotations

from collections import deque
from statistics import median

KEPT = 9
"""Observations kept per cell: a median of nine shrugs off a stall and follows a real change."""
OPTIMISTIC_SLOPE = 0.01
"""Assumed extra cost per token beyond what was measured; low, so that widths get tried once."""
EXACT_WIDTHS = 16
"""Up to this many tokens each width has its own cell; beyond, widths share cells of 8."""
CONTEXT_UNIT = 512
"""Contexts of fewer tokens share one range; each range above spans a doubling."""


class StepCosts:
    """Seconds of a forward over N new tokens, per range of cached context.

    A range that lacks a width borrows it from the nearest range that has it, scaled by a width
    both have measured, so that growing context does not look like growing width.
    """

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        self._predicted: dict[tuple[int, int], float] = {}

    def observe(self, num_tokens: int, context: int, seconds: float) -> None:
        """Add one measured forward.

        Args:
            num_tokens: New tokens it fed, over all rows.
            context: Cached tokens of all rows before it.
            seconds: What it took.
        """
        widths = self._seconds.setdefault(_range(context), {})
        widths.setdefault(_cell(num_tokens), deque(maxlen=KEPT)).append(seconds)
        self._predicted.clear()

    def measured(self, num_tokens: int, context: int) -> bool:
        """Tell whether this width was measured in this range of context."""
        return _cell(num_tokens) in self._seconds.get(_range(context), {})

    def predict(self, num_tokens: int, context: int) -> float:
        """Return the expected seconds of a forward.

        Args:
            num_tokens: New tokens over all rows, at least 1.
            context: Cached tokens of all rows.

        Returns:
            float: Seconds; 1.0 before anything was measured.
        """
        key = (_cell(num_tokens), _range(context))
        if key not in self._predicted:
            self._predicted[key] = self._predict(*key)
        return self._predicted[key]

    def _predict(self, cell: int, context_range: int) -> float:
        here = self._known(context_range)
        if cell in here:
            return here[cell]
        ranges = sorted(self._seconds, key=lambda r: abs(r - context_range))
        for other in ranges:
            there = self._known(other)
            if cell in there and not here:
                return there[cell]
            shared = here.keys() & there.keys()
            if cell in there and shared:
                anchor = min(shared, key=lambda c: abs(c - cell))
                return there[cell] * here[anchor] / there[anchor]
        if not here:
            here = self._known(ranges[0]) if ranges else {}
        return _interpolate(here, cell)

    def _known(self, key: int) -> dict[int, float]:
        return {cell: median(times) for cell, times in self._seconds.get(key, {}).items()}


def _interpolate(known: dict[int, float], cell: int) -> float:
    if not known:
        return 1.0
    below = max((c for c in known if c < cell), default=None)
    above = min((c for c in known if c > cell), default=None)
    if below is None:
        return known[above] if above is not None else 1.0
    if above is None:
        return known[below] * (1 + OPTIMISTIC_SLOPE * (cell - below))
    share = (cell - below) / (above - below)
    return known[below] * (1 - share) + known[above] * share


def _cell(num_tokens: int) -> int:
    if num_tokens <= EXACT_WIDTHS:
        return num_tokens
    return -(-num_tokens // 8) * 8


def _range(context: int) -> int:
    return (context // CONTEXT_UNIT).bit_length()
