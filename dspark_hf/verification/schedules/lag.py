"""What tokens are worth to a call that ends with its last row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.verification.schedules.base import RowState

LAG_POWER = 8
"""Rows' remaining tokens enter by their mean of this power: the most to go count most, and rows
that might still fall behind count something."""


def lag_weights(rows: Sequence[RowState]) -> list[float]:
    """Return what a token of each row is worth beside one of the others; 1 on average.

    A forward over two rows takes little longer than over one: what counts is the row with most to
    go, and a row that is ahead gains nothing by getting further ahead. Rows without a limit count
    alike.
    """
    left = _left(rows)
    if left is None or min(left) == max(left):
        return [1.0] * len(rows)
    shares = [(tokens / max(left)) ** LAG_POWER for tokens in left]
    return [share * len(rows) / sum(shares) for share in shares]


def weighted(rows: Sequence[RowState], survivals: Sequence[list[float]]) -> list[list[float]]:
    """Return what each draft token is expected to bring: survivals times the row's weight."""
    return [
        [weight * survival for survival in found] if weight != 1.0 else found
        for weight, found in zip(lag_weights(rows), survivals, strict=True)
    ]


def tokens_gained(rows: Sequence[RowState], accepted: Sequence[int]) -> float:
    """Return how many rounds of plain decoding a round's accepted drafts are worth.

    Where rows end together it is how much nearer the end is, by the mean of powers of what each has
    left: over a call these add up to the rounds saved, while a sum of what rows gained would count
    what only those ahead got. Otherwise it is the accepted tokens of a mean row.

    Args:
        rows: As they were before the round.
        accepted: Draft tokens each committed beside the one that any round brings.
    """
    left = _left(rows)
    if left is None:
        return sum(accepted) / len(rows)
    longest = max(left)

    def distance(remaining: Sequence[int]) -> float:
        return float(sum((max(n, 0) / longest) ** LAG_POWER for n in remaining) ** (1 / LAG_POWER))

    plain = distance(left) - distance([n - 1 for n in left])
    drafted = distance([n - 1 - a for n, a in zip(left, accepted, strict=True)])
    return (distance(left) - drafted) / plain - 1


def _left(rows: Sequence[RowState]) -> list[int] | None:
    """Return the tokens each row has left; None unless several rows end together."""
    left = [row.left for row in rows if row.left]
    return left if len(rows) > 1 and len(left) == len(rows) else None
