"""What to ask a drafter for: the rows and the length that promise most, drafting included."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dspark_hf.verification.schedules.base import total_context
from dspark_hf.verification.schedules.lag import lag_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dspark_hf.verification.costs import StepCosts
    from dspark_hf.verification.draft_costs import DraftCosts
    from dspark_hf.verification.schedules.base import RowState
    from dspark_hf.verification.survival import SurvivalEstimates


UNLIKE = 2.0
"""Weights so many times apart, the highest to the lowest, make asking for a few rows an option."""


class Asked(NamedTuple):
    """What to ask for, and what drafting promises.

    Attributes:
        lengths: Tokens per row, at most its room; zeros where nothing pays.
        promise: Part of plain decoding's speed that is expected beyond it; negative where drafting
            is expected to be slower.
    """

    lengths: list[int]
    promise: float


def lengths_to_ask(
    rows: Sequence[RowState],
    room: Sequence[int],
    estimates: SurvivalEstimates,
    costs: StepCosts,
    draft_costs: DraftCosts,
    *,
    min_gain: float = 1.0,
) -> Asked:
    """Return the draft lengths worth most, of what past rounds tell: one length for some rows.

    Args:
        rows: Of the round.
        room: Most tokens each may be asked for.
        estimates: What is known of drafts.
        costs: Of verifying.
        draft_costs: Of drafting; something must have been measured.
        min_gain: How many times plain decoding's speed drafting must promise.

    Returns:
        Asked: Lengths and promise.
    """
    count, longest = len(rows), max(room)
    context, signal = total_context(rows), estimates.usual_signal()
    steps = costs.predict_widths(range(count, count + sum(room) + 1), context, count)
    weights = lag_weights(rows)
    likely = [estimates.likely(row.row_id, signal, longest) for row in rows]
    rounds = _together(likely) * np.array(weights)[:, None]
    plain = count / steps[0]
    best, best_rate, promised = [0] * count, plain * min_gain, 0.0
    for chosen in _choices(weights, room):
        allowed = [most if r in chosen else 0 for r, most in enumerate(room)]
        drafting = [draft_costs.predict(n, len(chosen)) for n in range(1, longest + 1)]
        is_allowed = np.arange(longest) < np.array(allowed)[:, None]
        rates = rates_by_length(rounds * is_allowed, steps, drafting)
        promised = max(promised, *rates)
        for length, rate in enumerate(rates, start=1):
            if rate > best_rate:
                best, best_rate = [min(length, most) for most in allowed], rate
    return Asked(best, promised / plain - 1)


def whole_blocks(lengths: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return the lengths of a drafter whose whole block costs no more than a part of it."""
    return [most if length else 0 for length, most in zip(lengths, room, strict=True)]


def _choices(weights: Sequence[float], room: Sequence[int]) -> list[set[int]]:
    """Return the sets of rows that may be asked for: all, and where they are unlike, the first."""
    able = sorted((r for r, most in enumerate(room) if most), key=lambda r: -weights[r])
    choices = [set(able)]
    if weights[able[0]] > UNLIKE * weights[able[-1]]:
        few = 1
        while few < len(able):
            choices.append(set(able[:few]))
            few *= 2
    return choices


def rates_by_length(
    rounds: NDArray[np.float64], steps: Sequence[float], drafting: Sequence[float]
) -> list[float]:
    """Return tokens per second of drafting 1, 2, ... tokens a row, over rounds that may come.

    Of each round the tokens are counted that would be verified: those that pay.

    Args:
        rounds: What each token of the drafts that may come brings, of shape (rounds, rows, tokens);
            0 for what is not asked for.
        steps: Seconds of verifying 0, 1, ... draft tokens.
        drafting: Seconds of drafting 1, 2, ... tokens a row.

    Returns:
        list[float]: One rate per entry of `drafting`.
    """
    num_rounds, num_rows, longest = rounds.shape
    lengths = np.arange(1, len(drafting) + 1)
    drafted = rounds * (np.arange(longest) < lengths[:, None])[:, None, None]
    ranked = -np.sort(-drafted.reshape(len(lengths), num_rounds, -1), axis=-1)
    ranked = ranked[..., : len(steps) - 1]
    gained = np.pad(ranked.cumsum(axis=-1), ((0, 0), (0, 0), (1, 0))) + num_rows
    seconds = np.array(steps[: gained.shape[-1]]) + np.array(drafting)[:, None, None]
    best = (gained / seconds).argmax(axis=-1)[..., None]
    tokens = np.take_along_axis(gained, best, axis=-1).sum(axis=(1, 2))
    took = np.take_along_axis(np.broadcast_to(seconds, gained.shape), best, axis=-1)
    return [float(rate) for rate in tokens / took.sum(axis=(1, 2))]


def _together(likely: Sequence[Sequence[list[float]]]) -> NDArray[np.float64]:
    """Make rounds of the drafts each row may have, unlike ones together.

    Rows are not lucky all at once; with several of them, few rounds show what to expect.

    Args:
        likely: Per row, survivals of drafts that may come, all of one length.

    Returns:
        NDArray: Of shape (rounds, rows, tokens).
    """
    count = len(likely)
    num_rounds = max(1, max(map(len, likely)) // count)
    return np.array(
        [
            [drafts[(turn * count + r) % len(drafts)] for r, drafts in enumerate(likely)]
            for turn in range(num_rounds)
        ]
    )
