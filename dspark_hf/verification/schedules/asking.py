"""What to ask a drafter for: the rows and the length that promise most, drafting included."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from dspark_hf.verification.schedules.base import total_context
from dspark_hf.verification.schedules.lag import lag_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.verification.costs import StepCosts
    from dspark_hf.verification.draft_costs import DraftCosts
    from dspark_hf.verification.schedules.base import RowState
    from dspark_hf.verification.survival import SurvivalEstimates

Drafts = list[list[float]]
"""Drafts that may come together: survivals per row."""


UNLIKE = 2.0
"""Weights so many times apart, the highest to the lowest, make asking for a few rows an option."""


def lengths_to_ask(
    rows: Sequence[RowState],
    room: Sequence[int],
    estimates: SurvivalEstimates,
    costs: StepCosts,
    draft_costs: DraftCosts,
    *,
    min_gain: float = 1.0,
) -> list[int]:
    """Return the draft lengths worth most, of what past rounds tell: one length for some rows.

    Args:
        rows: Of the round.
        room: Most tokens each may be asked for.
        estimates: What is known of drafts.
        costs: Of verifying.
        draft_costs: Of drafting; something must have been measured.
        min_gain: How many times plain decoding's speed drafting must promise.

    Returns:
        list[int]: Tokens per row, at most its room; zeros where nothing pays.
    """
    count, longest = len(rows), max(room)
    context, signal = total_context(rows), estimates.usual_signal()
    steps = [costs.predict(count + n, context, count) for n in range(sum(room) + 1)]
    weights = lag_weights(rows)
    likely = [
        [[weight * s for s in found] for found in estimates.likely(row.row_id, signal, longest)]
        for row, weight in zip(rows, weights, strict=True)
    ]
    best, best_rate = [0] * count, count / steps[0] * min_gain
    for chosen in _choices(weights, room):
        allowed = [most if r in chosen else 0 for r, most in enumerate(room)]
        drafting = [draft_costs.predict(n, len(chosen)) for n in range(1, longest + 1)]
        rates = rates_by_length(_together(likely, allowed), steps, drafting)
        for length, rate in enumerate(rates, start=1):
            if rate > best_rate:
                best, best_rate = [min(length, most) for most in allowed], rate
    return best


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
    rounds: Sequence[Drafts], steps: Sequence[float], drafting: Sequence[float]
) -> list[float]:
    """Return tokens per second of drafting 1, 2, ... tokens a row, over rounds that may come.

    Of each round the tokens are counted that would be verified: those that pay.

    Args:
        rounds: Drafts that may come.
        steps: Seconds of verifying 0, 1, ... draft tokens.
        drafting: Seconds of drafting 1, 2, ... tokens a row.

    Returns:
        list[float]: One rate per entry of `drafting`.
    """
    rates = []
    for length, draft_s in enumerate(drafting, start=1):
        tokens = seconds = 0.0
        for drafts in rounds:
            ranked = sorted((s for row in drafts for s in row[:length]), reverse=True)
            gained = accumulate(ranked, initial=float(len(drafts)))
            paired = ((found, draft_s + step) for found, step in zip(gained, steps, strict=False))
            found, took = max(paired, key=lambda pair: pair[0] / pair[1])
            tokens, seconds = tokens + found, seconds + took
        rates.append(tokens / seconds)
    return rates


def _together(likely: Sequence[Sequence[list[float]]], room: Sequence[int]) -> list[Drafts]:
    """Make rounds of the drafts each row may have, unlike ones together.

    Rows are not lucky all at once; with several of them, few rounds show what to expect.
    """
    count = len(likely)
    num_rounds = max(1, max(map(len, likely)) // count)
    return [
        [
            drafts[(turn * count + r) % len(drafts)][:most]
            for r, (drafts, most) in enumerate(zip(likely, room, strict=True))
        ]
        for turn in range(num_rounds)
    ]
