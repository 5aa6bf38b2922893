"""Accounts: each signal's gains and losses in tokens, and when it is paused and tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dspark_hf.verification.schedules.base import Draft, RowOutcome

START_CREDIT, MOST_CREDIT = 0.5, 3.0
"""Tokens a row a signal may lose before it is paused, at first and after wins."""
WORST_STREAK = 4
"""Rounds without an accepted token that a signal may survive after wins, whatever they cost."""
PROBE_CREDIT = 1.5
"""What a signal must have earned by waiting to be tried although its estimate speaks against it."""
REFILL = 0.02
"""Credit a held-back signal earns a round, in tokens: the share of speed another try may cost."""
PATIENCE, MOST_PROMISED = 12.0, 0.25
"""Tokens a row that a signal may owe for a promise of twice plain decoding's speed, in proportion,
and the most that is believed: where drafts pay on the whole, luck alone runs into debt."""
REFILL_PROMISED = 0.1
"""Credit more that it earns a round for the same promise."""
WORST_ROUND = 20.0
"""Most tokens one round may cost a signal: a stall of the machine is not the draft's fault."""
PROBE_TOKENS = 4
"""Draft tokens a probe verifies at most, and a drafter of unknown cost is asked for."""
SOONEST_PROBE, LATEST_PROBE = 2, 64
"""Held-back drafts of a signal before one is tried, where no account is kept: doubled by a probe
that failed, up to the latest; the soonest again after one that was accepted as a whole."""


class Accounts:
    """Accepted drafts are earned, the plain tokens their seconds would have bought are spent.

    All is counted in tokens a row, so that a round of many rows weighs as much as a round of one.

    A signal in debt is paused and earns its next try slowly, so that text on which drafting never
    pays loses a few tokens and then about `REFILL` of its speed, whatever the estimates say. What
    it earns by waiting is kept apart from what it won: only that buys a try of drafts that do not
    look like paying. A promise, made by estimates that enough verified tokens speak for, lets a
    signal owe more and earn its next try sooner.
    """

    def __init__(self, *, may_pause: bool = True) -> None:
        """Open no accounts yet.

        Args:
            may_pause: Whether to stop drafting where it does not pay.
        """
        self.may_pause = may_pause
        self._credit: dict[int, float] = {}
        self._waited: dict[int, float] = {}

    def is_paused(self, signal: int, promise: float = 0.0) -> bool:
        """Tell whether a signal is in debt, by more than its promise allows.

        Args:
            signal: Of the drafts.
            promise: Part of plain decoding's speed that drafts are expected to bring beyond it.
        """
        patience = PATIENCE * min(promise, MOST_PROMISED)
        return self.may_pause and self._of(signal) < -patience

    def allowed(self, signal: int, wanted: int, promise: float = 0.0) -> int:
        """Return how many tokens to try: what is wanted, nothing when paused, a probe when due."""
        if not self.may_pause:
            return max(wanted, 1)
        if wanted and not self.is_paused(signal, promise):
            return wanted
        return PROBE_TOKENS if self._waited_of(signal) >= PROBE_CREDIT else 0

    def refill(self, signals: Iterable[int], promise: float = 0.0) -> None:
        """Let held-back signals earn a little, more where something is promised."""
        earned = REFILL + REFILL_PROMISED * min(promise, MOST_PROMISED)
        for signal in signals:
            credit = self._of(signal)
            self._credit[signal] = max(credit, min(credit + earned, PROBE_CREDIT))
            self._waited[signal] = min(self._waited_of(signal) + REFILL, PROBE_CREDIT)

    def settle(self, signal: int, gained: float, spent: float) -> None:
        """Book a round's drafts of a signal.

        Args:
            signal: Of the drafts.
            gained: Tokens a row they brought.
            spent: Tokens a row that plain decoding would have had in the time they took.
        """
        credit = self._of(signal) + max(gained - spent, -WORST_ROUND)
        self._credit[signal] = min(credit, max(MOST_CREDIT, WORST_STREAK * spent))
        # Wins are no reason to try what does not look like paying; a debt is paid back first.
        waited = self._waited_of(signal) + min(gained - spent, 0.0)
        self._waited[signal] = max(waited, min(self._of(signal), 0.0))

    def _of(self, signal: int) -> float:
        return self._credit.get(signal, START_CREDIT)

    def _waited_of(self, signal: int) -> float:
        return self._waited.get(signal, 0.0)


class Probes:
    """Tries held-back signals now and then, as what is never verified can never be learned.

    A probe is due by counts of past rounds alone and verifies a number of tokens fixed beforehand:
    it looks at no draft.
    """

    def __init__(self) -> None:
        """Start counting."""
        self._held_back: dict[int, int] = {}
        self._interval: dict[int, int] = {}

    def added(self, drafts: Sequence[Draft], lengths: Sequence[int]) -> list[int]:
        """Return the lengths with a probe for each signal that is due.

        Args:
            drafts: Per row.
            lengths: What the schedule chose.

        Returns:
            list[int]: Lengths; only zeros are raised.
        """
        probed = list(lengths)
        verified = {d.signal for d, length in zip(drafts, lengths, strict=True) if length}
        for r, draft in enumerate(drafts):
            signal = draft.signal
            if not draft.num_tokens or signal in verified:
                continue
            self._held_back[signal] = self._held_back.get(signal, 0) + 1
            if self._held_back[signal] >= self._interval.get(signal, SOONEST_PROBE):
                probed[r] = min(PROBE_TOKENS, draft.num_tokens)
                self._held_back[signal] = 0
                verified.add(signal)
        return probed

    def observe(self, outcomes: Sequence[RowOutcome]) -> None:
        """Set when a signal is tried next by how its drafts went."""
        for outcome in outcomes:
            if outcome.verified:
                is_good = outcome.accepted == outcome.verified
                longer = 2 * self._interval.get(outcome.signal, SOONEST_PROBE)
                self._interval[outcome.signal] = (
                    SOONEST_PROBE if is_good else min(longer, LATEST_PROBE)
                )
