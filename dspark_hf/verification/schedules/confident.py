"""The published schedules: a threshold, the prefix scheduler and its budgeted variant.

All three decide by confidence what is verified. Where a drafter gives no confidences, the
acceptance of past drafts of the same signal stands in for them, and a signal that is held back is
tried now and then.
"""

from __future__ import annotations

from collections import deque
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.schedules.accounts import PROBE_TOKENS, Probes
from dspark_hf.verification.schedules.asking import lengths_to_ask, whole_blocks
from dspark_hf.verification.schedules.base import total_context
from dspark_hf.verification.schedules.lag import lag_weights, weighted
from dspark_hf.verification.schedules.selection import best_lengths, frontier
from dspark_hf.verification.survival import SurvivalEstimates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.verification.costs import StepCosts
    from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState
    from dspark_hf.verification.schedules.selection import Rate

ROUNDS_BACK = 2
"""The budget of a round follows from confidences that are at least this many rounds old."""
AVERAGED = 8
"""Rounds whose drafts a row's budget is averaged over; where they held none, the latest counts."""
DRAFTS_APART, FURTHEST_APART = 8, 64
"""Rounds from one draft to the next while none is worth verifying: drafting costs as well. Each
that changes nothing doubles them, up to the furthest; one accepted as a whole takes them back."""


class _ConfidenceSchedule:
    """What the three have in common: asking, learning and probing."""

    needs_costs = True
    """Whether step costs enter, so that a round without drafts must be seen now and then."""

    def __init__(self, max_tokens: int, costs: StepCosts) -> None:
        """Start from priors.

        Args:
            max_tokens: Most draft tokens per row and round.
            costs: Measured step costs, shared by calls of one model.
        """
        self.max_tokens = max_tokens
        self.costs = costs
        self.estimates = SurvivalEstimates()
        self.probes = Probes()

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Ask for as many tokens as there is room for."""
        if self.needs_costs and self.costs.needs_plain(len(rows), total_context(rows)):
            return [0] * len(rows)
        return [min(self.max_tokens, row.room) for row in rows]

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float | None
    ) -> None:
        """Update step costs and survival."""
        if verify_s is not None:
            self.costs.observe(num_tokens, context, verify_s, len(outcomes))
        self.estimates.observe(outcomes)
        self.probes.observe(outcomes)

    def observe_draft(self, num_tokens: int, seconds: float, num_rows: int = 1) -> None:
        """Learn nothing: the drafts are paid for when the length is chosen."""

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self.estimates.free(row_id)

    def _survivals(self, rows: Sequence[RowState], drafts: Sequence[Draft]) -> list[list[float]]:
        return [
            self.estimates.survival(row.row_id, draft)
            for row, draft in zip(rows, drafts, strict=True)
        ]

    def _rate(self, rows: Sequence[RowState], draft_s: float = 0.0) -> Rate:
        """Return the tokens per second, tau * SPS(N), of rounds that are drafted in `draft_s`."""
        num_rows, context = len(rows), total_context(rows)

        def rate(tokens: float, num_drafts: int) -> float:
            verify_s = self.costs.predict(num_rows + num_drafts, context, num_rows)
            return tokens / (verify_s + draft_s)

        return rate


class ThresholdSchedule(_ConfidenceSchedule):
    """Verifies each draft up to the first token whose confidence is below a threshold.

    The confidence is that of the token given those before it, as the drafter states it: what a
    threshold means does not shift while decoding. The decision on a token looks at its own
    confidence and those before it, which depend on tokens that are verified; so it is adapted.
    """

    needs_costs = False

    def __init__(self, max_tokens: int, costs: StepCosts, threshold: float) -> None:
        """Start from priors.

        Args:
            max_tokens: Most draft tokens per row and round.
            costs: Measured step costs.
            threshold: Least confidence of a token that is verified, 0 to 1.
        """
        super().__init__(max_tokens, costs)
        self.threshold = threshold

    def cut(self, rows: Sequence[RowState], drafts: Sequence[Draft]) -> list[int]:
        """Verify the longest prefix of confident tokens; drafts without confidences get probes."""
        lengths = []
        for row, draft in zip(rows, drafts, strict=True):
            stated = draft.confidence or self.estimates.confidence(row.row_id, draft)
            lengths.append(sum(1 for _ in takewhile(lambda c: c >= self.threshold, stated)))
        probed = self.probes.added(drafts, lengths)
        return [
            length if draft.confidence else probe
            for draft, length, probe in zip(drafts, lengths, probed, strict=True)
        ]


class PrefixSchedule(_ConfidenceSchedule):
    """The hardware-aware prefix scheduler: the likeliest tokens, up to the first drop of speed.

    On a cost curve of stairs it stops before the first step up, as on processors where two tokens
    cost far more than one; `BudgetSchedule` looks past it.

    Source: DSpark, arXiv:2607.05147, Algorithm 1.
    """

    def cut(self, rows: Sequence[RowState], drafts: Sequence[Draft]) -> list[int]:
        """Take tokens by descending survival while Theta = tau * SPS(N) grows."""
        lengths, tokens = [0] * len(rows), float(len(rows))
        rate_of = self._rate(rows)
        rate = rate_of(tokens, 0)
        for r, survival in frontier(self._survivals(rows, drafts)):
            tokens += survival
            longer = rate_of(tokens, sum(lengths) + 1)
            if longer <= rate:
                break
            lengths[r], rate = lengths[r] + 1, longer
        return self.probes.added(drafts, lengths)


class BudgetSchedule(_ConfidenceSchedule):
    """The deployed variant: how many tokens follows from older rounds, which ones from this one.

    The budget is the best number over all: for a drawn draft by the mean survivals of the row's
    drafts up to two rounds earlier, where a row that had none counts as drafts of its signal
    usually went; for an exempt one by its own. Rows may join and leave at any time. The current
    survivals of drawn drafts only rank (`selection.frontier`). What drafting takes counts as well:
    of all lengths, for all rows or for those that lag, the best is asked for; where
    none pays, one row's draft is tried now and then, and verified whatever it says.

    Source: DSpark, arXiv:2607.05147, section 5; the mean in place of the one draft before last
    steadies the budget of few rows.
    """

    def __init__(
        self, max_tokens: int, costs: StepCosts, draft_costs: DraftCosts | None = None
    ) -> None:
        """Start from priors.

        Args:
            max_tokens: Most draft tokens per row and round.
            costs: Measured step costs, shared by calls of one model.
            draft_costs: Of the drafter, nothing measured yet; of one without blocks when None.
        """
        super().__init__(max_tokens, costs)
        self.draft_costs = draft_costs or DraftCosts()
        self._past: dict[int, deque[tuple[int, list[float]]]] = {}
        self._rounds = self._idle = 0
        self._apart, self._is_trial, self._draft_s = DRAFTS_APART, False, 0.0

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Ask for the lengths that pay best by past rounds."""
        self._rounds += 1
        room, self._is_trial = super().ask(rows), False
        asked = self._lengths(rows, room) if any(room) else room
        # Known before the round's draft: what that takes may depend on the tokens drawn.
        self._draft_s = self.draft_costs.predict(max(asked), sum(map(bool, asked)))
        return asked

    def _lengths(self, rows: Sequence[RowState], room: Sequence[int]) -> list[int]:
        if probe := self.draft_costs.probe(max(room)):
            return [min(probe, most) for most in room]
        best, _ = lengths_to_ask(rows, room, self.estimates, self.costs, self.draft_costs)
        if any(best):
            self._idle, self._apart = 0, DRAFTS_APART
            return whole_blocks(best, room) if self.draft_costs.is_whole else best
        self._idle += 1
        if self._idle < self._apart:
            return best
        self._idle, self._apart = 0, min(2 * self._apart, FURTHEST_APART)
        self._is_trial = True
        weights = lag_weights(rows)
        tried = max((r for r, most in enumerate(room) if most), key=lambda r: weights[r])
        return [min(PROBE_TOKENS, most) if r == tried else 0 for r, most in enumerate(room)]

    def cut(self, rows: Sequence[RowState], drafts: Sequence[Draft]) -> list[int]:
        """Spend the budget on the likeliest tokens of this round."""
        survivals = self._survivals(rows, drafts)
        known = [
            self._older(row.row_id, draft, survival) if draft.is_drawn else survival
            for row, draft, survival in zip(rows, drafts, survivals, strict=True)
        ]
        rate = self._rate(rows, self._draft_s)
        budget = sum(best_lengths(weighted(rows, known), rate))
        lengths = [0] * len(rows)
        for r, _ in islice(frontier(weighted(rows, survivals)), budget):
            lengths[r] += 1
        for row, draft, survival in zip(rows, drafts, survivals, strict=True):
            self.estimates.note(row.row_id, draft)
            if draft.confidence:
                kept = AVERAGED + ROUNDS_BACK - 1
                past = self._past.setdefault(row.row_id, deque(maxlen=kept))
                past.append((self._rounds, survival))
        if self._is_trial:
            # Confidences that misled are put right by nothing but verifying.
            return [draft.num_tokens for draft in drafts]
        return self.probes.added(drafts, lengths)

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float | None
    ) -> None:
        """Update step costs and survival; after a trial that went well the next one comes soon."""
        super().observe(outcomes, num_tokens, context, verify_s)
        tried = [o for o in outcomes if o.verified] if self._is_trial else []
        if tried and all(outcome.accepted == outcome.verified for outcome in tried):
            self._apart = DRAFTS_APART

    def observe_draft(self, num_tokens: int, seconds: float, num_rows: int = 1) -> None:
        """Remember what a draft of this length took for so many rows."""
        self.draft_costs.observe(num_tokens, seconds, num_rows)

    def free(self, row_id: int) -> None:
        """Forget a row."""
        super().free(row_id)
        self._past.pop(row_id, None)

    def _older(self, row_id: int, draft: Draft, survival: list[float]) -> list[float]:
        """Return what the row's draft looks like from older rounds."""
        if not draft.confidence:
            # An estimate from past rounds already.
            return survival
        past = self._past.get(row_id, ())
        old = [(at, found) for at, found in past if at <= self._rounds - ROUNDS_BACK]
        if not old:
            return self.estimates.expected(row_id, draft.signal, draft.num_tokens)
        recent = [found for at, found in old if at > self._rounds - ROUNDS_BACK - AVERAGED]
        recent = recent or [old[-1][1]]
        means: list[float] = []
        for k in range(draft.num_tokens):
            found = [survival[k] for survival in recent if len(survival) > k]
            if not found:
                break
            # Shorter drafts say nothing of later tokens, which survive no oftener than earlier.
            means.append(min(sum(found) / len(found), means[-1] if means else 1.0))
        return means
