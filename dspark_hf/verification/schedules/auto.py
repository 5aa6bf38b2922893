"""CostAwareSchedule: verifies what pays, by survival and step cost; stops where nothing does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_hf.verification.costs import DraftCosts
from dspark_hf.verification.schedules.accounts import Accounts
from dspark_hf.verification.schedules.selection import adaptive_lengths
from dspark_hf.verification.survival import SurvivalEstimates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.verification.costs import StepCosts
    from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState

MIN_GAIN = 1.05
"""Drafting must promise this many times plain decoding's speed: estimates are noisy."""
CHEAP = 0.05
"""Drafting that costs less than this share of a step is done even when nothing may come of it."""


class CostAwareSchedule:
    """Verifies what pays: expected tokens per second by survival and step cost.

    Survival comes from the drafter's confidences, calibrated by what was accepted, or from past
    rounds where it gives none. Exempt drafts get the best number over all lengths; of drawn ones
    no more is used than has been chosen (`selection.adaptive_lengths`). Each signal keeps an
    account of what drafting brought and cost, drafts that were not verified included.

    Source: the paper's Algorithm 1 (arXiv:2607.05147), with the best prefix of the ranking taken
    over all lengths instead of up to the first drop.
    """

    def __init__(
        self,
        max_tokens: int,
        costs: StepCosts,
        draft_costs: DraftCosts | None = None,
        *,
        may_pause: bool = True,
    ) -> None:
        """Start from priors.

        Args:
            max_tokens: Most draft tokens per row and round.
            costs: Measured step costs, shared by calls of one model.
            draft_costs: Of the drafter, nothing measured yet; of one without blocks when None.
            may_pause: Whether to stop drafting where it does not pay.
        """
        self.max_tokens = max_tokens
        self.costs = costs
        self.draft_costs = draft_costs or DraftCosts()
        self.estimates = SurvivalEstimates()
        self.accounts = Accounts(may_pause=may_pause)
        self._drafts: dict[int, Draft] = {}

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Ask for the common length that promises most, drafting cost included."""
        room = [min(self.max_tokens, row.room) for row in rows]
        longest = max(room, default=0)
        if self.accounts.may_pause and self.costs.needs_plain(len(rows)):
            return [0] * len(rows)
        if probe := self.draft_costs.probe(longest):
            return [min(probe, most) for most in room]
        step = self._step_s(rows, 0)
        if longest == 0 or self.draft_costs.predict(longest) < CHEAP * step:
            return room
        signal = self.estimates.usual_signal()
        best, best_rate = 0, len(rows) / step * MIN_GAIN
        for length, rate in enumerate(self._rates(rows, room, signal), start=1):
            if rate > best_rate:
                best, best_rate = length, rate
        best = self.accounts.allowed(signal, best)
        if best == 0:
            self.accounts.refill({signal})
        elif self.draft_costs.is_whole:
            best = longest
        return [min(best, most) for most in room]

    def cut(self, rows: Sequence[RowState], drafts: Sequence[Draft]) -> list[int]:
        """Verify what promises most; a signal that is held back long enough gets a probe."""
        estimates = self.estimates
        survivals = [
            estimates.survival(row.row_id, draft) for row, draft in zip(rows, drafts, strict=True)
        ]
        active = [
            [] if self.accounts.is_paused(draft.signal) else survival
            for draft, survival in zip(drafts, survivals, strict=True)
        ]
        expected = [
            estimates.expected(row.row_id, draft.signal, draft.num_tokens)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        lengths = adaptive_lengths(
            drafts,
            active,
            expected,
            lambda tokens, count: tokens / self._step_s(rows, count),
            min_gain=MIN_GAIN,
        )
        idle = {d.signal for d, n in zip(drafts, lengths, strict=True) if d.num_tokens and not n}
        hopeful = [r for r, survival in enumerate(active) if survival]
        if hopeful and not any(lengths):
            favourite = max(hopeful, key=lambda r: active[r][0])
            signal = drafts[favourite].signal
            tried = self.accounts.allowed(signal, 0)
            lengths[favourite] = min(tried, drafts[favourite].num_tokens)
            idle -= {signal} if tried else set()
        self.accounts.refill(idle)
        for row, draft in zip(rows, drafts, strict=True):
            estimates.note(row.row_id, draft)
        self._drafts = {row.row_id: draft for row, draft in zip(rows, drafts, strict=True)}
        return lengths

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float | None
    ) -> None:
        """Update step costs, survival and the account of every signal that drafted."""
        num_rows = len(outcomes)
        if verify_s is not None:
            self.costs.observe(num_tokens, context, verify_s, num_rows)
        self.estimates.observe(outcomes)
        drafted = {
            outcome.row_id: self._drafts[outcome.row_id].num_tokens
            for outcome in outcomes
            if outcome.row_id in self._drafts and self._drafts[outcome.row_id].num_tokens
        }
        if not drafted:
            return
        plain = self.costs.predict(num_rows, context, num_rows)
        wider = self.costs.predict(num_tokens, context, num_rows) - plain
        verified = sum(outcome.verified for outcome in outcomes)
        per_verified = wider / plain * num_rows / max(verified, 1)
        drafting_s = self.draft_costs.predict(max(drafted.values()))
        drafting = drafting_s / plain * num_rows / sum(drafted.values())
        for outcome in outcomes:
            # What is drafted in any case is free for a held-back signal, or it would never return.
            is_paid = outcome.verified > 0 or drafting_s >= CHEAP * plain
            if is_paid and outcome.row_id in drafted:
                spent = per_verified * outcome.verified + drafting * drafted[outcome.row_id]
                self.accounts.settle(outcome.signal, outcome.accepted, spent)

    def observe_draft(self, num_tokens: int, seconds: float) -> None:
        """Remember what a draft of this length took."""
        self.draft_costs.observe(num_tokens, seconds)

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self.estimates.free(row_id)
        self._drafts.pop(row_id, None)

    def _step_s(self, rows: Sequence[RowState], num_drafts: int) -> float:
        context = sum(row.context for row in rows)
        return self.costs.predict(len(rows) + num_drafts, context, len(rows))

    def _rates(self, rows: Sequence[RowState], room: Sequence[int], signal: int) -> list[float]:
        """Return tokens per second of drafting 1, 2, ... tokens a row, over drafts that may come.

        Of each draft the part is counted that would be verified.
        """
        longest = max(room)
        steps = [
            self._step_s(rows, sum(min(length, most) for most in room))
            for length in range(longest + 1)
        ]
        drafting = [self.draft_costs.predict(length) for length in range(1, longest + 1)]
        likely = [self.estimates.likely(row.row_id, signal, longest) for row in rows]
        tokens_of, seconds_of = [0.0] * longest, [0.0] * longest
        for drafts in zip(*likely, strict=True):
            expected = best_tokens = float(len(rows))
            best_step = steps[0]
            for k in range(longest):
                pairs = zip(drafts, room, strict=True)
                expected += sum(draft[k] for draft, most in pairs if k < most)
                if expected * best_step > best_tokens * steps[k + 1]:
                    best_tokens, best_step = expected, steps[k + 1]
                tokens_of[k] += best_tokens
                seconds_of[k] += best_step + drafting[k]
        return [tokens / seconds for tokens, seconds in zip(tokens_of, seconds_of, strict=True)]
