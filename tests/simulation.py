"""A simulated target of known costs and acceptance, for tests of schedules."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState, Schedule


@dataclass
class Simulation:
    """Rows decoded with a schedule against known costs and acceptance.

    Attributes:
        schedule: The schedule under test.
        verify_s: Seconds of a forward by number of tokens.
        draft_s: Seconds of a draft by its length.
        accept: Probability that a draft token is accepted, given the round and the row.
        num_rows: Rows decoded together.
        signal: Signal of a row's proposals.
        states: Draws what a drafter states as a token's confidence; None for one that does not.
        truth: Probability that a token with this stated confidence is accepted; `accept` is then
            not asked.
        is_drawn: Whether drafts are drawn and verified by rejection.
        left: Tokens each row has to go, the same in every round; None where none waits for others.
    """

    schedule: Schedule
    verify_s: Callable[[int], float]
    accept: Callable[[int, int], float] = lambda i, row: 0.0
    draft_s: Callable[[int], float] = lambda length: 0.0
    num_rows: int = 1
    signal: Callable[[int], int] = lambda row: 0
    states: Callable[[random.Random], float] | None = None
    truth: Callable[[float], float] = lambda stated: stated
    is_drawn: bool = False
    left: Sequence[int] | None = None
    context: int = 200
    stream: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311
    verified: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0

    def run(self, num_rounds: int) -> None:
        """Decode a number of rounds, checking every answer against what was possible."""
        for _ in range(num_rounds):
            left = self.left or [None] * self.num_rows
            rows = [RowState(row, self.context, 12, left[row]) for row in range(self.num_rows)]
            asked = self.schedule.ask(rows)
            assert all(0 <= length <= 12 for length in asked)
            if any(asked):
                seconds = self.draft_s(max(asked))
                self.schedule.observe_draft(max(asked), seconds, sum(map(bool, asked)))
                self.seconds += seconds
            signals = [self.signal(row) for row in range(self.num_rows)]
            drafts = [
                Draft(length, signal, self.stated(length), self.is_drawn)
                for length, signal in zip(asked, signals, strict=True)
            ]
            lengths = self.schedule.cut(rows, drafts)
            assert all(0 <= n <= most for n, most in zip(lengths, asked, strict=True))
            self.finish_round(lengths, drafts)

    def stated(self, length: int) -> tuple[float, ...]:
        """State a confidence for each token of a draft."""
        if self.states is None:
            return ()
        return tuple(self.states(self.stream) for _ in range(length))

    def finish_round(self, lengths: list[int], drafts: list[Draft]) -> None:
        """Accept what is accepted and tell the schedule."""
        outcomes = []
        for row, (length, draft) in enumerate(zip(lengths, drafts, strict=True)):
            accepted = 0
            while accepted < length and self.stream.random() < self.chance(row, draft, accepted):
                accepted += 1
            told = draft.confidence[:length]
            outcomes.append(RowOutcome(row, draft.signal, length, accepted, told))
            self.tokens += accepted + 1
        width = self.num_rows + sum(lengths)
        self.schedule.observe(outcomes, width, self.context, self.verify_s(width))
        self.seconds += self.verify_s(width)
        self.verified.append(lengths)

    def chance(self, row: int, draft: Draft, k: int) -> float:
        """Return the probability that a draft token is accepted."""
        if draft.confidence:
            return self.truth(draft.confidence[k])
        return self.accept(len(self.verified), row)

    @property
    def speed_up(self) -> float:
        """Tokens per second over plain decoding's."""
        return self.tokens / self.seconds * self.verify_s(self.num_rows) / self.num_rows

    def share_verifying(self, first: int = 0, last: int | None = None) -> float:
        """Return the share of rounds that verified anything."""
        rounds = self.verified[first:last]
        return sum(any(lengths) for lengths in rounds) / len(rounds)


def nearly_flat(width: int) -> float:
    return 1 + 0.02 * width


def proportional(width: int) -> float:
    return float(width)


def rows(count: int = 1) -> list[RowState]:
    """Rows of 100 cached tokens with room for 12 drafts."""
    return [RowState(row, 100, 12) for row in range(count)]


def known(curve: Callable[[int], float], num_rows: int = 1, context: int = 100) -> StepCosts:
    """Step costs that know a curve: each width was seen twice, plain forwards four times."""
    costs = StepCosts()
    for width in [num_rows, num_rows, *range(num_rows, 17), *range(num_rows, 17)]:
        costs.observe(width, context * num_rows, curve(width), num_rows)
    return costs
