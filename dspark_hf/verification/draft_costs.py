"""DraftCosts: what drafts cost by their length and the rows drafted for, learned online."""

from __future__ import annotations

from collections import deque
from statistics import median

from dspark_hf.verification.cost_curves import interpolate
from dspark_hf.verification.costs import rows_cell

KEPT = 9
"""Drafts kept per length and number of rows, of which the median counts."""
PROBE_TOKENS = 4
"""Tokens of a first draft where nothing is known of its cost."""
SHORT_TOKENS, PROBES = 2, 2
"""The short length at which a block drafter's cost is measured, and how often each is at first."""
FIXED_SHARE = 0.5
"""Part of a draft's seconds taken not to depend on the number of rows, until two are measured."""


class DraftCosts:
    """Seconds of a draft by its length and by how many rows it is for.

    A drafter without blocks is taken to cost in proportion to the length. A block costs the same
    for any length, or, where its tokens are chosen one by one, a base and something per token:
    then two lengths are tried (`probe`) and others lie on the line between what was measured. Rows
    share the cells of `StepCosts`: what a cell lacks follows from its neighbours.
    """

    def __init__(self, block_size: int | None = None, *, grows: bool = False) -> None:
        """Start with nothing measured.

        Args:
            block_size: Set for a drafter that computes a whole block for any length.
            grows: Whether a longer part of the block costs more nevertheless.
        """
        self.block_size, self.grows = block_size, grows
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        self._lines: dict[int, dict[int, float]] = {}
        self._predicted: dict[tuple[int, int], float] = {}

    @property
    def is_whole(self) -> bool:
        """Whether a whole block costs no more than a part of it."""
        return self.block_size is not None and not self.grows

    @property
    def is_known(self) -> bool:
        """Whether any draft was measured."""
        return bool(self._seconds)

    def probe(self, longest: int) -> int:
        """Return the length to try next, 0 if enough is known: that of the first drafts.

        Args:
            longest: Most tokens there is room for.
        """
        if self.block_size is None:
            return 0 if self.is_known else min(PROBE_TOKENS, longest)
        if not self.grows:
            return 0 if self.is_known else longest
        lengths = {n for found in self._seconds.values() for n in found}
        tried = [n for n in lengths if self._times_tried(n) >= PROBES]
        if len(tried) > 1:
            return 0
        whole, short = min(longest, self.block_size), min(longest, SHORT_TOKENS)
        return short if tried and tried != [short] else whole

    def observe(self, num_tokens: int, seconds: float, num_rows: int = 1) -> None:
        """Add one measured draft: the longest of its round, in tokens, and what it took.

        Args:
            num_tokens: Of the longest draft.
            seconds: What all took together.
            num_rows: Rows that were drafted for.
        """
        if num_tokens < 1:
            return
        key = num_tokens if self.grows or self.block_size is None else self.block_size
        lengths = self._seconds.setdefault(rows_cell(num_rows), {})
        lengths.setdefault(key, deque(maxlen=KEPT)).append(seconds)
        self._lines.pop(rows_cell(num_rows), None)
        self._predicted.clear()

    def predict(self, length: int, num_rows: int = 1) -> float:
        """Return the expected seconds of a draft, by what was measured of other ones.

        Args:
            length: Tokens of the longest; 0 for no draft.
            num_rows: Rows to draft for.
        """
        if not self._seconds or length == 0:
            return 0.0
        key = rows_cell(num_rows), length
        if key not in self._predicted:
            self._predicted[key] = self._predict(*key)
        return self._predicted[key]

    def _predict(self, cell: int, length: int) -> float:
        if cell in self._seconds:
            return self._of_cell(cell, length)
        below = max((c for c in self._seconds if c < cell), default=None)
        above = min((c for c in self._seconds if c > cell), default=None)
        if below is not None and above is not None:
            ends = {below: self._of_cell(below, length), above: self._of_cell(above, length)}
            return interpolate(ends, cell)
        nearest = below or above or cell
        growth = (1 - FIXED_SHARE) * cell / nearest
        return self._of_cell(nearest, length) * (FIXED_SHARE + growth)

    def _of_cell(self, cell: int, length: int) -> float:
        """Return the seconds of a length for a number of rows that was measured."""
        known = self._line(cell)
        if self.block_size is None:
            nearest = min(known, key=lambda n: abs(n - length))
            return known[nearest] * length / nearest
        anchor = min(max(length, min(known)), max(known))
        level = interpolate(known, anchor)
        # How seconds grow beyond what was measured here, another number of rows tells.
        widest = self._line(max(self._seconds, key=self._span))
        there = _within(widest, anchor)
        return level * _within(widest, length) / there if there else level

    def _span(self, cell: int) -> int:
        lengths = self._seconds[cell]
        return max(lengths) - min(lengths)

    def _line(self, cell: int) -> dict[int, float]:
        if cell not in self._lines:
            self._lines[cell] = {n: median(found) for n, found in self._seconds[cell].items()}
        return self._lines[cell]

    def _times_tried(self, length: int) -> int:
        return sum(len(found.get(length, ())) for found in self._seconds.values())


def _within(known: dict[int, float], length: int) -> float:
    """Return the seconds of a length, of one beyond those measured the nearest's."""
    return interpolate(known, min(max(length, min(known)), max(known)))
