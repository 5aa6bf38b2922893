"""Every reported quantity, defined once.

* *round*: one target forward over a row's newest token and its draft tokens. The forward over the
  prompt is not a round.
* *drafted*: draft tokens proposed. *verified*: those the target scored. *accepted*: those kept and
  committed; drafted >= verified >= accepted. A draft token behind a stop is not accepted.
* *accepted length*: tokens committed per round, the target's own token included: new tokens after
  the prompt's first / rounds.
* *hit rate*: accepted / drafted.
* *acceptance by position*: of the rounds that tested draft position k (all before it accepted and
  it was verified), the share that accepted it.

Identities a caller can check: `new_tokens == 1 + accepted + own_tokens` where own_tokens (the
target's corrections and bonuses) is `rounds` less the rounds that a stop cut at an accepted draft
token (`cut_rounds`); `sum(accepted_per_round) == accepted`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpeculationRecord:
    """Statistics of one row, in tokens, rounds and seconds.

    Attributes:
        path: "flat", "rowwise", or "transformers" when the model's own loop ran.
        new_tokens: Tokens committed after the prompt.
        rounds: Target forwards after the prompt's.
        drafted: Draft tokens proposed.
        verified: Draft tokens the target scored.
        accepted: Draft tokens committed.
        cut_rounds: Rounds that ended at an accepted draft token (none of the target's own).
        rechecks: Near-ties decided by a one-token forward.
        flips: Rechecks that chose another token than the verify forward would have.
        accepted_per_round: One count per round, in order.
        tested_by_position: Rounds that tested draft position k.
        accepted_by_position: Rounds that accepted draft position k.
        draft_s: Seconds in the drafter, shared equally by the rows of a round.
        verify_s: Seconds in target forwards, prompt included, shared in the same way.
        other_s: Seconds elsewhere in the loop.
        accepted_mask: One flag per new token: True where a draft token was accepted.
    """

    path: str = "flat"
    new_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    cut_rounds: int = 0
    rechecks: int = 0
    flips: int = 0
    accepted_per_round: list[int] = field(default_factory=list)
    tested_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    accepted_mask: list[bool] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens committed per round, the target's own token included; 0 before any round."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share accepted of the rounds that tested each draft position."""
        return [
            accepted / tested
            for accepted, tested in zip(
                self.accepted_by_position, self.tested_by_position, strict=True
            )
        ]

    def count_round(self, drafted: int, verified: int, accepted: int, *, cut: bool) -> None:
        """Add one round.

        Args:
            drafted: Draft tokens proposed, at least `verified`.
            verified: Draft tokens scored by the target.
            accepted: Draft tokens committed.
            cut: Whether the round ended at an accepted draft token.
        """
        self.rounds += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.cut_rounds += cut
        self.accepted_per_round.append(accepted)
        tested = accepted if cut else min(verified, accepted + 1)
        while len(self.tested_by_position) < tested:
            self.tested_by_position.append(0)
            self.accepted_by_position.append(0)
        for position in range(tested):
            self.tested_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted


@dataclass
class LifetimeMetrics:
    """Sums over every row a wrapped model has decoded.

    Attributes:
        rows: Rows finished by this package's loop; the sums below are over these rows.
        new_tokens: Tokens committed after the prompts.
        rounds: Target forwards after the prompts', counted once for each row in them.
        drafted: Draft tokens proposed.
        verified: Draft tokens the target scored.
        accepted: Draft tokens committed.
        draft_s: Seconds in the drafter.
        verify_s: Seconds in target forwards, prompts included.
        other_s: Seconds elsewhere in the loop.
        fallback_calls: Calls that ran in the model's own loop.
        fallback_reasons: How often each reason sent a call there.
        last: Records of the latest call, one per row, whichever loop ran it.
    """

    rows: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    fallback_calls: int = 0
    fallback_reasons: dict[str, int] = field(default_factory=dict)
    last: list[SpeculationRecord] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens committed per round over all rows, the target's own token included; 0 if none."""
        return (self.new_tokens - self.rows) / self.rounds if self.rounds else 0.0

    def add(self, records: list[SpeculationRecord]) -> None:
        """Add the rows of one finished call.

        Args:
            records: One per row; kept as `last`.
        """
        self.last = records
        for record in records:
            self.rows += 1
            for name in (
                "new_tokens", "rounds", "drafted", "verified", "accepted",
                "draft_s", "verify_s", "other_s",
            ):  # fmt: skip
                setattr(self, name, getattr(self, name) + getattr(record, name))

    def count_fallback(self, reason: str) -> None:
        """Count a call that the model's own loop ran.

        Args:
            reason: Why; a key of `fallback_reasons`.
        """
        self.fallback_calls += 1
        self.fallback_reasons[reason] = self.fallback_reasons.get(reason, 0) + 1
