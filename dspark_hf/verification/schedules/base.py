"""What schedules see, and the protocol they answer.

A schedule may look at tokens before a proposal, at its `signal` and number of tokens, and at what
past rounds cost and accepted. Of the confidences it may use all where a draft is not drawn at
random or nothing depends on the draft (`Draft.is_drawn` False); of a drawn draft, only those the
tokens chosen so far speak of: see `schedules/selection.py`. The drafted tokens themselves are
never shown to it, or sampling would no longer be exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class RowState:
    """What a schedule knows of a row.

    Attributes:
        row_id: The row.
        context: Tokens it has cached.
        room: Most draft tokens it may verify.
        left: Tokens up to its limit, where the caller waits for the last of the rows.
    """

    row_id: int
    context: int
    room: int
    left: int | None = None


def total_context(rows: Sequence[RowState]) -> int:
    """Return the tokens all rows have cached."""
    return sum(row.context for row in rows)


@dataclass(frozen=True)
class Draft:
    """What a schedule knows of a row's draft.

    Attributes:
        num_tokens: Drafted tokens.
        signal: Of the proposal.
        confidence: Of the proposal: for each token the probability that it survives given that
            those before it did; empty where the drafter gives none.
        is_drawn: Whether choosing its length must not look ahead: its tokens were drawn at random
            and are verified by rejection sampling. Greedy and coupled rows are exempt, as their
            text is the same for any length, and so are drafts that follow from the text alone.
    """

    num_tokens: int
    signal: int = 0
    confidence: Sequence[float] = ()
    is_drawn: bool = False


@dataclass(frozen=True)
class RowOutcome:
    """What became of a row's draft.

    Attributes:
        row_id: The row.
        signal: Of the proposal.
        verified: Draft tokens the target scored.
        accepted: Draft tokens committed.
        confidence: Of the verified tokens, as the drafter gave them; empty when it gave none.
        is_cut: Whether the round ended at an accepted token, so that none was refused.
    """

    row_id: int
    signal: int
    verified: int
    accepted: int
    confidence: Sequence[float] = ()
    is_cut: bool = False

    @property
    def tested(self) -> int:
        """Draft tokens that were accepted or refused; behind these nothing is known."""
        return self.accepted if self.is_cut else min(self.accepted + 1, self.verified)


class Schedule(Protocol):
    """Chooses draft lengths before drafting (`ask`) and before verifying (`cut`)."""

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Return how many tokens each row should draft, at most its room; 0 for none."""

    def cut(self, rows: Sequence[RowState], drafts: Sequence[Draft]) -> list[int]:
        """Return how many of each row's drafted tokens to verify."""

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float | None
    ) -> None:
        """Learn from a finished round: outcomes, tokens fed, cached tokens, seconds.

        Seconds are None where the forward did other work too.
        """

    def observe_draft(self, num_tokens: int, seconds: float, num_rows: int = 1) -> None:
        """Learn what drafting cost: the longest draft of the round, seconds, rows drafted for."""

    def free(self, row_id: int) -> None:
        """Forget a row."""
