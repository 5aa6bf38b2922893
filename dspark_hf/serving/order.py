"""Which request goes first, and how many rows are decoded together. Pure: times come from outside.

Order, within a queue: what has waited longer than the patience, by arrival; then what a deadline
presses, by deadline; then by priority, and within one by remaining work or by arrival. So nothing
that came after a request starts before it once it has lost its patience: it starts, at the latest,
when what came before it and what ran at that moment have ended, and is not parked any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.queue_settings import QueueConfig

HISTORY = 256
"""Finished rows that expected lengths follow from."""
LONGEST_EXPECTED = 4096
"""New tokens that a request without a limit is expected to get at most."""
MIN_HISTORY = 8
"""Finished rows below which a row is expected to use all tokens it may."""
PROMPT_WEIGHT = 0.125
"""Work of a prompt token, in new tokens: prompts are read many at a time."""
SHORTER = 0.5
"""Share of a running request's remaining work below which a waiting one may take its place."""
SHRINK, PRESSURE = 0.8, 1.5
"""Factor on the rows when tokens come too late; slack, in expected durations, at which a deadline
presses."""
SMOOTHING = 0.2
"""Weight of the newest step in the average time per token."""


@dataclass(frozen=True)
class Ticket:
    """What the order sees of a request.

    Attributes:
        arrival: When it was submitted, in seconds of any clock.
        priority: Higher goes first.
        remaining: Its remaining work, in new tokens.
        deadline: When it is wanted, on the same clock; None without.
    """

    arrival: float
    priority: int = 0
    remaining: float = 0.0
    deadline: float | None = None


Key = tuple[float, ...]
"""Compares two requests: the smaller goes first. Its first number is the class."""
IMPATIENT, PRESSED, OTHER = 0.0, 1.0, 2.0
"""Classes of requests, in their order."""


class Order:
    """Compares requests."""

    def __init__(self, settings: QueueConfig) -> None:
        """Take order and patience from the settings."""
        self.settings = settings

    def key(self, ticket: Ticket, now: float, token_s: float = 0.0) -> Key:
        """Return what to sort by.

        Args:
            ticket: The request.
            now: The present.
            token_s: Expected seconds per new token.
        """
        if self.is_impatient(ticket, now):
            return (IMPATIENT, ticket.arrival)
        if ticket.deadline is not None:
            slack = ticket.deadline - now
            if slack < PRESSURE * ticket.remaining * token_s:
                return (PRESSED, ticket.deadline, ticket.arrival)
        first = ticket.remaining if self.settings.order == "shortest" else 0.0
        return (OTHER, -float(ticket.priority), first, ticket.arrival)

    def is_impatient(self, ticket: Ticket, now: float) -> bool:
        """Tell whether a request has waited longer than the patience."""
        return now - ticket.arrival >= self.settings.patience_s

    def may_replace(self, waiting: Ticket, running: Ticket, now: float, token_s: float) -> bool:
        """Tell whether a waiting request may take a running one's place, which is parked.

        An impatient request is never parked. Otherwise the waiting one must go first by the order,
        and not have a lower priority. Within a priority two requests would take turns if that were
        enough: there the waiting one must be impatient, or pressed by a deadline where the running
        one has none, or have much less to do.
        """
        if not self.settings.preempt or self.is_impatient(running, now):
            return False
        first = self.key(waiting, now, token_s)
        if not first < self.key(running, now, token_s):
            return False
        if waiting.priority != running.priority:
            return waiting.priority > running.priority
        if first[0] == IMPATIENT or (first[0] == PRESSED and running.deadline is None):
            return True
        is_shorter = waiting.remaining < SHORTER * running.remaining
        return self.settings.order == "shortest" and is_shorter


class Lengths:
    """How many tokens rows get, from those that ended."""

    def __init__(self) -> None:
        """Start without history."""
        self._ended: deque[int] = deque(maxlen=HISTORY)
        self._sorted: list[int] = []
        self._sums: list[int] = [0]

    def add(self, num_tokens: int) -> None:
        """Note a row that ended."""
        self._ended.append(num_tokens)
        self._sorted = sorted(self._ended)
        self._sums = list(accumulate(self._sorted, initial=0))

    def remaining(self, made: int, most: int) -> float:
        """Return the expected further tokens of a row.

        Args:
            made: Tokens it has.
            most: Tokens it may get in all.
        """
        shorter = bisect_right(self._sorted, made)
        longer = len(self._sorted) - shorter
        if len(self._ended) < MIN_HISTORY or not longer:
            return float(most - made)
        mean = (self._sums[-1] - self._sums[shorter]) / longer
        return max(min(mean, most) - made, 1.0)


def expected_delay_s(remaining: Sequence[float], rows: int, token_s: float) -> float:
    """Return how long a request that is submitted now is expected to wait for its turn.

    Args:
        remaining: Remaining work of each request that is there, in new tokens.
        rows: Rows decoded together.
        token_s: Expected seconds per new token of a row.
    """
    if len(remaining) < rows:
        return 0.0
    return token_s * sum(min(tokens, LONGEST_EXPECTED) for tokens in remaining) / rows


class BatchSize:
    """How many rows are decoded together.

    With a latency to keep, one row more is allowed while others wait, and a fifth fewer as soon as
    a row's tokens come too late; without one it is always `max_rows`.
    """

    def __init__(self, settings: QueueConfig) -> None:
        """Start with all rows allowed."""
        self.settings = settings
        self._limit = settings.max_rows
        self.token_s = 0.0

    @property
    def limit(self) -> int:
        """Most rows now."""
        return self._limit

    def observe(self, seconds: float, tokens_per_row: Sequence[int], waiting: int) -> None:
        """Learn from a step.

        Args:
            seconds: What it took.
            tokens_per_row: Tokens that each decoding row got.
            waiting: Requests that wait.
        """
        if not tokens_per_row:
            return
        latency = seconds * len(tokens_per_row) / max(sum(tokens_per_row), 1)
        old = self.token_s or latency
        self.token_s = (1 - SMOOTHING) * old + SMOOTHING * latency
        target = self.settings.target_latency_ms
        if not self.settings.dynamic or target is None:
            return
        if self.token_s * 1000 > target:
            fewer = int(min(self._limit, len(tokens_per_row)) * SHRINK)
            self._limit = max(self.settings.min_rows, fewer)
        elif waiting:
            self._limit = min(self._limit + 1, self.settings.max_rows)

    def patience_s(self, waiting: int, oldest_wait_s: float) -> float:
        """Return how long an idle queue should still wait for more rows."""
        if waiting >= self.settings.min_rows:
            return 0.0
        return max(self.settings.max_wait_ms / 1000 - oldest_wait_s, 0.0)
