"""CostAwareSchedule: verifies what pays, by survival and step cost; stops where nothing does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_hf.verification.costs import rows_cell
from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.schedules.accounts import MOST_PROMISED, Accounts
from dspark_hf.verification.schedules.asking import lengths_to_ask, whole_blocks
from dspark_hf.verification.schedules.base import total_context
from dspark_hf.verification.schedules.lag import lag_weights, tokens_gained, weighted
from dspark_hf.verification.schedules.selection import adaptive_lengths
from dspark_hf.verification.survival import SurvivalEstimates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.verification.costs import StepCosts
    from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState

MIN_GAIN, MIN_GAIN_OF_PAID = 1.05, 1.02
"""Verifying drafts that cost nothing must promise this many times plain decoding's speed, as
estimates are noisy; asking for drafts that cost time, so many times: less, as nothing is spent yet
and an account is kept of what will be."""
CHEAP = 0.05
"""Drafting that costs less than this share of a step is done even when nothing may come of it."""


class CostAwareSchedule:
    """Verifies what pays: expected tokens per second by survival and step cost.

    Survival comes from the drafter's confidences, calibrated by what was accepted, or from past
    rounds where it gives none. Exempt drafts get the best number over all lengths; of drawn ones
    no more is used than has been chosen (`selection.adaptive_lengths`). Each signal keeps an
    account of what drafting brought and cost, drafts that were not verified included: one for each
    number of rows, as what pays for one row may not for sixteen.

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
        self.may_pause = may_pause
        self._accounts: dict[int, Accounts] = {}
        self._drafts: dict[int, tuple[RowState, Draft]] = {}
        self._draft_s = 0.0
        self._promises: dict[int, float] = {}

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Ask for the lengths that promise most, drafting cost included."""
        room = [min(self.max_tokens, row.room) for row in rows]
        asked = self._lengths(rows, room) if any(room) else room
        # Known before the round's draft: what that takes may depend on the tokens drawn.
        self._draft_s = self.draft_costs.predict(max(asked), sum(map(bool, asked)))
        return asked

    def _lengths(self, rows: Sequence[RowState], room: Sequence[int]) -> list[int]:
        longest = max(room)
        self._promises.clear()
        if self.may_pause and self.costs.needs_plain(len(rows), total_context(rows)):
            return [0] * len(rows)
        if probe := self.draft_costs.probe(longest):
            return [min(probe, most) for most in room]
        if self.draft_costs.predict(longest, sum(map(bool, room))) < CHEAP * self._step_s(rows, 0):
            return list(room)
        signal, accounts = self.estimates.usual_signal(), self._accounts_of(len(rows))
        best, promise = [0] * len(rows), 0.0
        if not accounts.is_paused(signal, MOST_PROMISED):
            best, promise = lengths_to_ask(
                rows, room, self.estimates, self.costs, self.draft_costs, min_gain=MIN_GAIN_OF_PAID
            )
            promise = max(promise, 0.0) * self.estimates.evidence(signal)
            self._promises[signal] = promise
            if accounts.is_paused(signal, promise):
                best = [0] * len(rows)
        tried = accounts.allowed(signal, max(best), promise)
        if tried and not any(best):
            best = [min(tried, most) for most in room]
        elif not tried:
            accounts.refill({signal}, promise)
            best = [0] * len(rows)
        return whole_blocks(best, room) if self.draft_costs.is_whole else best

    def cut(self, rows: Sequence[RowState], drafts: Sequence[Draft]) -> list[int]:
        """Verify what promises most; a signal that is held back long enough gets a probe."""
        estimates, accounts = self.estimates, self._accounts_of(len(rows))
        survivals = [
            estimates.survival(row.row_id, draft) for row, draft in zip(rows, drafts, strict=True)
        ]
        active = [
            []
            if accounts.is_paused(draft.signal, self._promises.get(draft.signal, 0.0))
            else survival
            for draft, survival in zip(drafts, survivals, strict=True)
        ]
        expected = [
            estimates.expected(row.row_id, draft.signal, draft.num_tokens)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        lengths = adaptive_lengths(
            drafts,
            weighted(rows, active),
            expected,
            lambda tokens, count: tokens / (self._draft_s + self._step_s(rows, count)),
            # What cost time was decided for when it was asked for.
            min_gain=MIN_GAIN if self._draft_s < CHEAP * self._step_s(rows, 0) else 1.0,
        )
        idle = {d.signal for d, n in zip(drafts, lengths, strict=True) if d.num_tokens and not n}
        hopeful = [r for r, survival in enumerate(active) if survival]
        if hopeful and not any(lengths):
            favourite = max(hopeful, key=lambda r: active[r][0])
            signal = drafts[favourite].signal
            tried = accounts.allowed(signal, 0)
            lengths[favourite] = min(tried, drafts[favourite].num_tokens)
            idle -= {signal} if tried else set()
        accounts.refill(idle)
        for row, draft in zip(rows, drafts, strict=True):
            estimates.note(row.row_id, draft)
        self._drafts = {row.row_id: (row, draft) for row, draft in zip(rows, drafts, strict=True)}
        return lengths

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float | None
    ) -> None:
        """Update step costs, survival and the account of every signal that drafted."""
        if verify_s is not None:
            self.costs.observe(num_tokens, context, verify_s, len(outcomes))
        self.estimates.observe(outcomes)
        spent = self._spent(outcomes, num_tokens, context)
        gained = self._gained(outcomes) if spent else {}
        accounts = self._accounts_of(len(outcomes))
        for signal, tokens in spent.items():
            accounts.settle(signal, gained.get(signal, 0.0), tokens)

    def _spent(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int
    ) -> dict[int, float]:
        """Return the rounds of plain decoding that each signal's drafts took; none, no entry."""
        num_rows = len(outcomes)
        drafted = {
            outcome.row_id: self._drafts[outcome.row_id][1].num_tokens
            for outcome in outcomes
            if outcome.row_id in self._drafts and self._drafts[outcome.row_id][1].num_tokens
        }
        if not drafted:
            return {}
        plain = self.costs.predict(num_rows, context, num_rows)
        wider = self.costs.predict(num_tokens, context, num_rows) - plain
        verified = sum(outcome.verified for outcome in outcomes)
        per_verified = wider / plain / max(verified, 1)
        drafting_s = self.draft_costs.predict(max(drafted.values()), len(drafted))
        drafting = drafting_s / plain / sum(drafted.values())
        spent: dict[int, float] = {}
        for outcome in outcomes:
            # What is drafted in any case is free for a held-back signal, or it would never return.
            is_paid = outcome.verified > 0 or drafting_s >= CHEAP * plain
            if is_paid and outcome.row_id in drafted:
                cost = per_verified * outcome.verified + drafting * drafted[outcome.row_id]
                spent[outcome.signal] = spent.get(outcome.signal, 0.0) + cost
        return spent

    def _gained(self, outcomes: Sequence[RowOutcome]) -> dict[int, float]:
        """Return the rounds of plain decoding that each signal's accepted drafts are worth."""
        known = [outcome for outcome in outcomes if outcome.row_id in self._drafts]
        rows = [self._drafts[outcome.row_id][0] for outcome in known]
        total = tokens_gained(rows, [outcome.accepted for outcome in known])
        shares = [w * o.accepted for w, o in zip(lag_weights(rows), known, strict=True)]
        gained: dict[int, float] = {}
        for share, outcome in zip(shares, known, strict=True):
            if share:
                part = total * share / sum(shares)
                gained[outcome.signal] = gained.get(outcome.signal, 0.0) + part
        return gained

    def observe_draft(self, num_tokens: int, seconds: float, num_rows: int = 1) -> None:
        """Remember what a draft of this length took for so many rows."""
        self.draft_costs.observe(num_tokens, seconds, num_rows)

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self.estimates.free(row_id)
        self._drafts.pop(row_id, None)

    def _step_s(self, rows: Sequence[RowState], num_drafts: int) -> float:
        return self.costs.predict(len(rows) + num_drafts, total_context(rows), len(rows))

    def _accounts_of(self, num_rows: int) -> Accounts:
        cell = rows_cell(num_rows)
        if cell not in self._accounts:
            self._accounts[cell] = Accounts(may_pause=self.may_pause)
        return self._accounts[cell]
