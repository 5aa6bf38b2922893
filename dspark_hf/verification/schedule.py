"""Schedules: how many draft tokens each row asks for and verifies.

A schedule may look at tokens before a proposal, at its `signal` and number of tokens, and at what
past rounds cost and accepted; never at the drafted tokens themselves, or sampling would no longer
be exact.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

from dspark_hf.verification.costs import KEPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.verification.costs import StepCosts

PRIOR_ROUNDS = 4.0
"""Weight of the prior, in rounds: a handful of observations outvotes it."""
PRIOR_FIRST = {0: 0.6, 1: 0.15, 2: 0.3, 3: 0.45, 4: 0.55, 5: 0.65, 6: 0.75, 7: 0.85}
"""Expected acceptance of a proposal's first token by signal, before anything is observed."""
PRIOR_NEXT = 0.7
"""Expected acceptance of each further token, given the one before."""
FORGETTING = 0.99
"""Factor on older observations per round, so that estimates follow the text."""
MIN_GAIN = 1.05
"""Drafting must promise this many times plain decoding's speed: estimates are noisy."""
START_CREDIT, MOST_CREDIT = 0.5, 2.0
"""Tokens a signal may lose before it is paused, at first and after wins."""
PROBE_CREDIT = 1.5
"""Credit at which a signal is tried although its estimate speaks against it."""
REFILL = 0.02
"""Credit a held-back proposal earns, in tokens: the share of speed that trying again may cost."""
WORST_ROUND = 20.0
"""Most tokens one round may cost a signal: a stall of the machine is not the draft's fault."""
PROBE_TOKENS = 4
"""Draft tokens a probe verifies at most, and a drafter of unknown cost is asked for."""
CHEAP = 0.05
"""Drafting that costs less than this share of a step is done even when nothing may come of it."""


@dataclass(frozen=True)
class RowState:
    """What a schedule knows of a row.

    Attributes:
        row_id: The row.
        context: Tokens it has cached.
        room: Most draft tokens it may verify.
    """

    row_id: int
    context: int
    room: int


@dataclass(frozen=True)
class RowOutcome:
    """What became of a row's draft.

    Attributes:
        row_id: The row.
        signal: Of the proposal.
        verified: Draft tokens the target scored.
        accepted: Draft tokens committed.
    """

    row_id: int
    signal: int
    verified: int
    accepted: int


class Schedule(Protocol):
    """Chooses draft lengths before drafting (`ask`) and before verifying (`cut`)."""

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Return how many tokens each row should draft, at most its room; 0 for none."""

    def cut(
        self, rows: Sequence[RowState], drafted: Sequence[int], signals: Sequence[int]
    ) -> list[int]:
        """Return how many of each row's drafted tokens to verify."""

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float
    ) -> None:
        """Learn from a finished round: outcomes, tokens fed, cached tokens, seconds."""

    def observe_draft(self, num_tokens: int, seconds: float) -> None:
        """Learn what drafting cost: the longest draft of the round, seconds."""

    def free(self, row_id: int) -> None:
        """Forget a row."""


class FixedSchedule:
    """Verifies the same number of tokens every round."""

    def __init__(self, num_tokens: int) -> None:
        """Set the length, in tokens."""
        self.num_tokens = num_tokens

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Ask for the fixed length where there is room."""
        return [min(self.num_tokens, row.room) for row in rows]

    def cut(
        self,
        rows: Sequence[RowState],  # noqa: ARG002 - the protocol's signature
        drafted: Sequence[int],
        signals: Sequence[int],  # noqa: ARG002 - as above
    ) -> list[int]:
        """Verify everything that was drafted."""
        return list(drafted)

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float
    ) -> None:
        """Learn nothing."""

    def observe_draft(self, num_tokens: int, seconds: float) -> None:
        """Learn nothing."""

    def free(self, row_id: int) -> None:
        """Keep nothing per row."""


@dataclass
class _Acceptance:
    """Decayed counts of first and further draft tokens tested and accepted."""

    first_tested: float = 0.0
    first_accepted: float = 0.0
    next_tested: float = 0.0
    next_accepted: float = 0.0

    def add(self, verified: int, accepted: int) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) * FORGETTING)
        self.first_tested += 1
        self.first_accepted += accepted > 0
        self.next_tested += min(accepted, verified - 1)
        self.next_accepted += max(accepted - 1, 0)


class CostAwareSchedule:
    """Verifies what pays: expected tokens per second by measured acceptance and step cost.

    Each signal keeps an account in tokens: accepted drafts are earned, the plain tokens that
    drafting and wider forwards would have bought are spent. A signal in debt is paused and earns
    its next try slowly, so that text on which drafting never pays loses a few tokens and then
    about `REFILL` of its speed, whatever the estimates say.

    Source: the paper's Algorithm 1 (arXiv:2607.05147) with survival estimated from past rounds
    instead of a confidence head, and the best prefix of the ranking taken over all lengths.
    """

    def __init__(self, max_tokens: int, costs: StepCosts, *, may_pause: bool = True) -> None:
        """Start from priors.

        Args:
            max_tokens: Most draft tokens per row and round.
            costs: Measured step costs, shared by calls of one model.
            may_pause: Whether to stop drafting where it does not pay.
        """
        self.max_tokens = max_tokens
        self.costs = costs
        self.may_pause = may_pause
        self._by_signal: dict[int, _Acceptance] = {}
        self._by_row: dict[int, _Acceptance] = {}
        self._draft_s: dict[int, deque[float]] = {}
        self._credit: dict[int, float] = {}

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Ask for the common length that promises most, drafting cost included."""
        room = [min(self.max_tokens, row.room) for row in rows]
        if not self._draft_s:
            return [min(PROBE_TOKENS, most) for most in room]
        longest, step = max(room, default=0), self.costs.predict(len(rows), _context(rows))
        if longest == 0 or self._cost(longest) < CHEAP * step:
            return room
        signal = self._usual_signal()
        best, best_rate = 0, len(rows) / step * MIN_GAIN
        for length in range(1, longest + 1):
            rate = self._rate(rows, [min(length, most) for most in room], signal)
            if rate > best_rate:
                best, best_rate = length, rate
        best = self._allowed(signal, best)
        if best == 0:
            self._refill({signal})
        return [min(best, most) for most in room]

    def cut(
        self, rows: Sequence[RowState], drafted: Sequence[int], signals: Sequence[int]
    ) -> list[int]:
        """Verify the ranked tokens up to the count that promises most."""
        context, num_rows = _context(rows), len(rows)
        ranked = sorted(
            (
                (survival, i)
                for i, row in enumerate(rows)
                if not self._is_paused(signals[i])
                for survival in self._survival(row.row_id, signals[i], drafted[i])
            ),
            reverse=True,
        )
        expected, taken = float(num_rows), 0
        best_rate = expected / self.costs.predict(num_rows, context) * MIN_GAIN
        for count, (survival, _) in enumerate(ranked, start=1):
            expected += survival
            rate = expected / self.costs.predict(num_rows + count, context)
            if rate > best_rate:
                taken, best_rate = count, rate
        best = [0] * num_rows
        for _, i in ranked[:taken]:
            best[i] += 1
        idle = {signals[i] for i in range(num_rows) if drafted[i] and not best[i]}
        if ranked and not any(best):
            favourite = ranked[0][1]
            tried = self._allowed(signals[favourite], 0)
            best[favourite] = min(tried, drafted[favourite])
            idle -= {signals[favourite]} if tried else set()
        self._refill(idle)
        return best

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float
    ) -> None:
        """Update step costs, acceptance and every verified signal's account."""
        self.costs.observe(num_tokens, context, verify_s)
        verified = sum(outcome.verified for outcome in outcomes)
        if not verified:
            return
        plain = self.costs.predict(len(outcomes), context)
        extra = self.costs.predict(num_tokens, context) - plain
        extra += self._cost(max(outcome.verified for outcome in outcomes))
        price = extra / plain * len(outcomes) / verified
        for outcome in outcomes:
            if not outcome.verified:
                continue
            for table, key in ((self._by_signal, outcome.signal), (self._by_row, outcome.row_id)):
                table.setdefault(key, _Acceptance()).add(outcome.verified, outcome.accepted)
            earned = max(outcome.accepted - price * outcome.verified, -WORST_ROUND)
            credit = self._credit.get(outcome.signal, START_CREDIT) + earned
            self._credit[outcome.signal] = min(credit, MOST_CREDIT)

    def observe_draft(self, num_tokens: int, seconds: float) -> None:
        """Remember what a draft of this length took."""
        self._draft_s.setdefault(num_tokens, deque(maxlen=KEPT)).append(seconds)

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self._by_row.pop(row_id, None)

    def _is_paused(self, signal: int) -> bool:
        return self.may_pause and self._credit.get(signal, START_CREDIT) < 0

    def _allowed(self, signal: int, wanted: int) -> int:
        """Return how many tokens to try: what is wanted, nothing when paused, a probe when due."""
        if not self.may_pause:
            return max(wanted, 1)
        if wanted and not self._is_paused(signal):
            return wanted
        return PROBE_TOKENS if self._credit.get(signal, START_CREDIT) >= PROBE_CREDIT else 0

    def _refill(self, signals: set[int]) -> None:
        for signal in signals:
            credit = self._credit.get(signal, START_CREDIT)
            self._credit[signal] = max(credit, min(credit + REFILL, PROBE_CREDIT))

    def _cost(self, length: int) -> float:
        """Return the expected seconds of a draft, by the nearest measured length."""
        if not self._draft_s or length == 0:
            return 0.0
        nearest = min(self._draft_s, key=lambda n: abs(n - length))
        return median(self._draft_s[nearest]) * length / nearest

    def _usual_signal(self) -> int:
        return max(self._by_signal, key=lambda s: self._by_signal[s].first_tested, default=0)

    def _rate(self, rows: Sequence[RowState], lengths: Sequence[int], signal: int) -> float:
        expected = len(rows) + sum(
            sum(self._survival(row.row_id, signal, length))
            for row, length in zip(rows, lengths, strict=True)
        )
        seconds = self.costs.predict(len(rows) + sum(lengths), _context(rows))
        return expected / (seconds + self._cost(max(lengths)))

    def _survival(self, row_id: int, signal: int, length: int) -> list[float]:
        """Return the probability that a row's first 1..length draft tokens are all accepted."""
        shared = self._by_signal.get(signal, _Acceptance())
        own = self._by_row.get(row_id, _Acceptance())
        first = _estimate(shared.first_accepted, shared.first_tested, PRIOR_FIRST.get(signal, 0.5))
        first = _estimate(own.first_accepted, own.first_tested, first, weight=2 * PRIOR_ROUNDS)
        further = _estimate(shared.next_accepted, shared.next_tested, PRIOR_NEXT)
        further = _estimate(own.next_accepted, own.next_tested, further, weight=2 * PRIOR_ROUNDS)
        return [first * further**k for k in range(length)]


def _estimate(accepted: float, tested: float, prior: float, weight: float = PRIOR_ROUNDS) -> float:
    return (accepted + weight * prior) / (tested + weight)


def _context(rows: Sequence[RowState]) -> int:
    return sum(row.context for row in rows)
