"""StepCosts: what the target's forwards cost, learned online."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from dspark_hf.verification.cost_curves import Measured, borrow, interpolate, steadied

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dspark_hf.verification.profile import StepSeconds

KEPT = 31
"""Observations kept per cell: their median shrugs off stalls and follows a real change."""
EXACT_WIDTHS = 16
"""Up to this many tokens each width has its own cell; beyond, widths share cells of 8."""
EXACT_ROWS = 4
"""Up to this many rows each number has its own cell; beyond, a cell spans a doubling."""
CONTEXT_UNIT = 512
"""Contexts of fewer tokens share one range; each range above spans a doubling."""
ROWS_APART = 2
"""A doubling of rows makes two groups as unlike as this many doublings of context."""
MOST_CONTRADICTION = 1.5
"""A profile is given up when forwards take this many times what it says, or a part as small."""
PLAIN_ROUNDS, WIDE_ROUNDS, WIDE_ROUNDS_BETWEEN = 4, 3, 20
"""Forwards without drafts wanted of each number of rows, forwards with drafts before the first two
of them, and those between later ones: one slow forward alone would make all drafts look good."""
RATIOS_JUDGED, RATIOS_KEPT = 16, 32
"""Forwards compared before a profile is judged, and the latest ones it is judged by."""

_Group = tuple[int, int]
"""Cell of the number of rows, range of context."""


class StepCosts:
    """Seconds of a forward over N new tokens, per number of rows and range of cached context.

    A group that lacks a width borrows it from the nearest group that has it, scaled by a width
    both know, so that neither growing context nor a row that leaves looks like growing width. What
    a width seen once takes more than the others say counts half: after a single slow forward, as
    the first of a width often is, it would never be tried again. Differences that noise may explain
    are made smaller (`steadied`).
    """

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._seconds: dict[_Group, dict[int, deque[float]]] = {}
        self._seeds: dict[_Group, dict[int, float]] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self._ratios: deque[float] = deque(maxlen=RATIOS_KEPT)
        self._on_stale: Callable[[], None] | None = None
        self._predicted: dict[tuple[_Group, int], float] = {}
        self._measured: dict[_Group, dict[int, Measured]] = {}
        self._curves: dict[_Group, dict[int, float]] = {}
        self._nearest: dict[_Group, list[_Group]] = {}

    def observe(self, num_tokens: int, context: int, seconds: float, num_rows: int = 1) -> None:
        """Add one measured forward.

        Args:
            num_tokens: New tokens it fed, over all rows.
            context: Cached tokens of all rows before it.
            seconds: What it took.
            num_rows: Rows among which the tokens were.
        """
        group, cell = (rows_cell(num_rows), _range(context)), _cell(num_tokens)
        if group not in self._seconds:
            self._nearest.clear()
        widths = self._seconds.setdefault(group, {})
        widths.setdefault(cell, deque(maxlen=KEPT)).append(seconds)
        self._predicted.clear()
        self._measured.get(group, {}).pop(cell, None)
        self._curves.pop(group, None)
        self._count(num_rows, num_tokens)
        seed = self._seeds.get(group, {}).get(cell)
        if seed is not None:
            self._compare(seconds / seed)

    def seed(
        self, entries: Sequence[StepSeconds], on_stale: Callable[[], None] | None = None
    ) -> None:
        """Take over what a profile says; each entry counts as one observation.

        Args:
            entries: Of the profile; those of an earlier one are dropped.
            on_stale: Called once if forwards contradict the profile, which is then dropped.
        """
        self._drop_seeds()
        self._on_stale = on_stale
        for entry in entries:
            group = (rows_cell(entry.num_rows), _range(entry.context))
            self._seeds.setdefault(group, {})[_cell(entry.num_tokens)] = entry.seconds
        self._nearest.clear()

    @property
    def is_seeded(self) -> bool:
        """Whether a profile was taken over and has not been given up."""
        return bool(self._seeds)

    def predict(self, num_tokens: int, context: int, num_rows: int = 1) -> float:
        """Return the expected seconds of a forward.

        Args:
            num_tokens: New tokens over all rows, at least 1.
            context: Cached tokens of all rows.
            num_rows: Rows among which the tokens are.

        Returns:
            float: Seconds; 1.0 before anything was measured.
        """
        return self.predict_widths(range(num_tokens, num_tokens + 1), context, num_rows)[0]

    def predict_widths(self, widths: range, context: int, num_rows: int = 1) -> list[float]:
        """Return the expected seconds of forwards over each of several numbers of tokens.

        Args:
            widths: New tokens over all rows, each at least 1.
            context: Cached tokens of all rows.
            num_rows: Rows among which the tokens are.

        Returns:
            list[float]: Seconds, as `predict` gives them.
        """
        group = rows_cell(num_rows), _range(context)
        return [self._at(group, _cell(num_tokens)) for num_tokens in widths]

    def _at(self, group: _Group, cell: int) -> float:
        found = self._predicted.get((group, cell))
        if found is None:
            found = self._predicted[group, cell] = self._predict(group, cell)
        return found

    def needs_plain(self, num_rows: int, context: int) -> bool:
        """Tell whether a round without drafts is due: what drafts are compared with.

        A schedule that drafts from the first round on would otherwise never see one, and could
        not tell that drafting is slower.

        Args:
            num_rows: Rows of the round.
            context: Cached tokens of all rows.

        Returns:
            bool: True a few times in the life of a number of rows, unless a profile measured it.
        """
        group = (rows_cell(num_rows), _range(context))
        if _cell(num_rows) in self._seeds.get(group, {}):
            return False
        plain, wide = self._counts.get(rows_cell(num_rows), (0, 0))
        wanted_after = WIDE_ROUNDS + WIDE_ROUNDS_BETWEEN * max(plain - 1, 0)
        return plain < PLAIN_ROUNDS and wide >= wanted_after

    def _predict(self, group: _Group, cell: int) -> float:
        here = self._known(group)
        if cell in here:
            return here[cell]
        known = [(other, self._known(other)) for other in self._others(group)]
        # The same rows at another context; then this group's own neighbours; then anything.
        for other, there in known:
            if other[0] == group[0] and cell in there:
                borrowed = borrow(here, there, cell)
                if borrowed is not None:
                    return borrowed
        if here and min(here) < cell < max(here):
            return interpolate(here, cell)
        for _, there in known:
            if min(there) <= cell <= max(there):
                borrowed = borrow(here, there, cell)
                if borrowed is not None:
                    return borrowed
        return interpolate(here or (known[0][1] if known else {}), cell)

    def _others(self, group: _Group) -> list[_Group]:
        """Return the groups of which something is known but this one, the nearest first."""
        if group not in self._nearest:
            others = [g for g in {**self._seconds, **self._seeds} if g != group]
            self._nearest[group] = sorted(others, key=lambda other: _distance(other, group))
        return self._nearest[group]

    def _known(self, group: _Group) -> dict[int, float]:
        if group not in self._curves:
            self._curves[group] = self._curve(group)
        return self._curves[group]

    def _curve(self, group: _Group) -> dict[int, float]:
        seeds, times = self._seeds.get(group, {}), self._seconds.get(group, {})
        measured = self._measured.setdefault(group, {})
        for cell, found in times.items():
            if cell not in measured:
                measured[cell] = Measured.of(found)
        known = seeds | {
            cell: median([*found, seeds[cell]]) if cell in seeds else measured[cell].seconds
            for cell, found in times.items()
        }
        once = {cell for cell, found in times.items() if len(found) == 1 and cell not in seeds}
        settled = {cell: seconds for cell, seconds in known.items() if cell not in once}
        if settled:
            for cell in once:
                known[cell] = min(known[cell], (known[cell] + interpolate(settled, cell)) / 2)
        # Between a forward without drafts and one with them there may be a true stair.
        compared = {c: seconds for c, seconds in known.items() if group[0] < c <= EXACT_WIDTHS}
        return known | steadied(compared, measured)

    def _count(self, num_rows: int, num_tokens: int) -> None:
        plain, wide = self._counts.get(rows_cell(num_rows), (0, 0))
        is_plain = num_tokens == num_rows
        self._counts[rows_cell(num_rows)] = (plain + is_plain, wide + (not is_plain))

    def _compare(self, ratio: float) -> None:
        """Give the profile up when what is observed differs from it by too much."""
        self._ratios.append(ratio)
        if len(self._ratios) < RATIOS_JUDGED:
            return
        if not 1 / MOST_CONTRADICTION <= median(self._ratios) <= MOST_CONTRADICTION:
            on_stale = self._on_stale
            self._drop_seeds()
            if on_stale is not None:
                on_stale()

    def _drop_seeds(self) -> None:
        self._seeds, self._on_stale = {}, None
        self._ratios.clear()
        self._predicted.clear()
        self._curves.clear()
        self._nearest.clear()


def _distance(one: _Group, other: _Group) -> float:
    return ROWS_APART * abs(math.log2(one[0] / other[0])) + abs(one[1] - other[1])


def _cell(num_tokens: int) -> int:
    if num_tokens <= EXACT_WIDTHS:
        return num_tokens
    return -(-num_tokens // 8) * 8


def rows_cell(num_rows: int) -> int:
    """Return the cell of a number of rows: what is learned of it holds for all in the cell."""
    return num_rows if num_rows <= EXACT_ROWS else 1 << (num_rows - 1).bit_length()


def _range(context: int) -> int:
    return (context // CONTEXT_UNIT).bit_length()
