"""Choosing tokens of several drafts without looking ahead.

Why a drawn draft restricts the choice, and why what is done here is exact. Rows r draft tokens
x_{r,1}, x_{r,2}, ...; the survival a_{r,k} is a function of the tokens x_{r,1..k-1}, the committed
text and past rounds. Call a choice *adapted* if the decision to verify (r, k) is a function of past
rounds and of tokens x_{s,j} whose own (s, j) was decided for before.

*Adapted choices are exact.* Order the round's decisions; let F be everything known before the
decision on (r, k): past rounds and the tokens chosen so far, among them x_{r,1..k-1} but not
x_{r,k}. Given F, x_{r,k} is still drawn from the distribution q it was drawn from, as nothing in F
depends on it, and tokens of other rows are independent of it. If (r, k) is chosen, accept-or-
resample turns a draw from q into a draw from the target's p; if it is not, the position (if it is
reached) is drawn from p directly. Both give p given F, and later decisions see x_{r,k} only when
its position is verified anyway. By induction over the decisions, and over rounds, every row's text
follows the target, independently of the other rows. A choice that is not adapted compares F's two
cases after seeing x_{r,k}: then the drafts verified are no longer draws from q, and (0.7, 0.3)
becomes (0.85, 0.15) (DSpark, arXiv:2607.05147, appendix A).

*`frontier` is adapted*, for any rule that stops it by what it has seen. It holds one candidate per
row, the first token not chosen yet: a_{r,k} for k - 1 tokens chosen. The highest is offered; ties
go to the lower k and then to the lower row, which are fixed beforehand and tell nothing. Only when
the candidate is taken is a_{r,k+1}, which depends on x_{r,k}, read. As survivals never increase
along a row, the order is that of sorting all candidates by (-a, k, r), so that a number of tokens
fixed before the round ("budget") may be taken from the sorted list.

Drafts that are not drawn, and rows whose text no choice can change (greedy, coupled), are exempt:
their survivals are part of what is known before the round.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark_hf.verification.schedules.base import Draft

Rate = Callable[[float, int], float]
"""Tokens per second of a round: from the tokens expected of it and the draft tokens verified."""


def frontier(survivals: Sequence[Sequence[float]]) -> Iterator[tuple[int, float]]:
    """Offer draft tokens by descending survival; asking for the next one takes the last one.

    Args:
        survivals: Per row, of its first 1, 2, ... tokens; never increasing. An entry is read only
            when the tokens before it have been taken.

    Yields:
        tuple[int, float]: The row, and the survival of its first token not taken yet.

    Source: DSpark, arXiv:2607.05147, Algorithm 1.
    """
    heap = [(-row[0], 0, r) for r, row in enumerate(survivals) if len(row)]
    heapq.heapify(heap)
    while heap:
        negated, k, r = heap[0]
        yield r, -negated
        if k + 1 < len(survivals[r]):
            heapq.heapreplace(heap, (-survivals[r][k + 1], k + 1, r))
        else:
            heapq.heappop(heap)


def best_lengths(
    survivals: Sequence[Sequence[float]],
    rate: Rate,
    *,
    taken: Sequence[int] | None = None,
    min_gain: float = 1.0,
) -> list[int]:
    """Return the lengths that promise most, over all numbers of tokens.

    This looks at every survival it is given: for drawn drafts, give it no more than is known.

    Args:
        survivals: Per row, as for `frontier`.
        rate: Tokens per second of a round.
        taken: Tokens per row that are verified in any case.
        min_gain: Verifying anything beyond `taken` must promise this many times the speed of not
            doing so.

    Returns:
        list[int]: Tokens to verify per row, at least `taken`.
    """
    lengths = [0] * len(survivals) if taken is None else list(taken)
    count = sum(lengths)
    expected = len(survivals) + sum(
        sum(row[:length]) for row, length in zip(survivals, lengths, strict=True)
    )
    candidates = sorted(
        (-survival, k, r)
        for r, row in enumerate(survivals)
        for k, survival in enumerate(row)
        if k >= lengths[r]
    )
    best, best_rate = 0, rate(expected, count) * min_gain
    for place, (negated, _, _) in enumerate(candidates, start=1):
        expected -= negated
        found = rate(expected, count + place)
        if found > best_rate:
            best, best_rate = place, found
    for _, _, r in candidates[:best]:
        lengths[r] += 1
    return lengths


def adaptive_lengths(
    drafts: Sequence[Draft],
    survivals: Sequence[Sequence[float]],
    expected: Sequence[Sequence[float]],
    rate: Rate,
    *,
    min_gain: float = 1.0,
) -> list[int]:
    """Return the lengths that promise most as far as an adapted choice can know.

    Plans are made over all numbers of tokens, so that a cost curve of stairs is no obstacle. A
    plan sees of a drawn draft the survivals up to its first token not taken yet; behind it, it
    expects what past rounds had there. Of a plan, each drawn row's next token is taken; then those
    rows tell more and a new plan is made, until none wants a further token of a drawn row. The
    choice is adapted: a plan is a function of what was known when it was made, and takes no token
    that it has looked behind.

    Args:
        drafts: Per row.
        survivals: Per row, of its draft.
        expected: Per row, of drafts like this one in past rounds; as long as the draft. Only how
            each goes on from token to token counts.
        rate: Tokens per second of a round.
        min_gain: As for `best_lengths`; what has been taken is paid for and needs none.

    Returns:
        list[int]: Tokens to verify per row.
    """
    guarded = [r for r, draft in enumerate(drafts) if draft.is_drawn and len(draft.confidence)]
    taken, known = [0] * len(drafts), [list(row) for row in survivals]
    while True:
        for r in guarded:
            known[r] = _extended(survivals[r][: taken[r] + 1], expected[r])
        gain = 1.0 if any(taken) else min_gain
        planned = best_lengths(known, rate, taken=taken, min_gain=gain)
        going = [r for r in guarded if planned[r] > taken[r]]
        if not going:
            return planned
        for r in going:
            taken[r] += 1


def _extended(revealed: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Continue survivals as past rounds went on from there."""
    row = list(revealed)
    if row:
        for before, after in zip(expected[len(row) - 1 :], expected[len(row) :], strict=False):
            row.append(row[-1] * after / before if before > 0 else 0.0)
    return row
