"""What several queues count, added up; and how requests ended, where one queue alone can't say."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dspark_hf.errors import DeadlineError
from dspark_hf.serving.handle import CANCELLED, DONE, FAILED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dspark_hf.serving.handle import RequestHandle

EXPIRED, REFUSED = "expired", "refused"
OUTCOMES = (DONE, FAILED, EXPIRED, CANCELLED, REFUSED)
TOTALS = (
    "steps", "seconds", "draft_s", "verify_s", "new_tokens", "prompt_tokens", "rounds", "drafted",
    "verified", "accepted",
)  # fmt: skip
COUNTERS = (
    ("alone",), ("preemptions",), ("prefix", "asked"), ("prefix", "found"), ("kv", "damaged_files"),
    *(("total", name) for name in TOTALS),
)  # fmt: skip
"""Where a queue's metrics count since its start; outcomes aside, which a move would change."""


def outcome_of(status: str, error: BaseException | None) -> str:
    """Return one of OUTCOMES for how a request ended.

    Args:
        status: DONE, FAILED or CANCELLED.
        error: Why it failed; None if it is done.
    """
    return EXPIRED if isinstance(error, DeadlineError) else status


class Outcomes:
    """Counts how requests ended; any thread may tell it."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._ended = dict.fromkeys(OUTCOMES, 0)

    def end(self, _: RequestHandle, status: str, error: BaseException | None) -> None:
        """Count a request that has ended, as `RequestHandle` says it."""
        self._add(outcome_of(status, error))

    def refuse(self) -> None:
        """Count a request that found no room."""
        self._add(REFUSED)

    def counts(self) -> dict[str, int]:
        """Return all of them, by outcome."""
        with self._lock:
            return dict(self._ended)

    def _add(self, outcome: str) -> None:
        with self._lock:
            self._ended[outcome] += 1


class CounterSums:
    """Adds up the counters of queues that end and are started again at zero: no sum ever falls."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._present: dict[int, tuple[Any, dict[tuple[str, ...], float]]] = {}
        self._past: dict[tuple[str, ...], float] = dict.fromkeys(COUNTERS, 0)

    def note(self, place: int, life: Any, metrics: Mapping[str, Any]) -> None:
        """Take what a queue counts.

        Args:
            place: Of the queue; another life in its place begins at zero.
            life: Tells lives of a place apart.
            metrics: Of `GenerationQueue.metrics()`.
        """
        told = {path: _value(metrics, path) for path in COUNTERS}
        with self._lock:
            before, known = self._present.get(place, (life, told))
            if before != life:
                self._past = {path: self._past[path] + known[path] for path in COUNTERS}
            else:
                # Two who ask at once may hear the older answer last.
                told = {path: max(told[path], known[path]) for path in COUNTERS}
            self._present[place] = life, told

    def totals(self) -> dict[str, Any]:
        """Return the sums where a queue's metrics have its own; nested likewise."""
        with self._lock:
            told = [counters for _, counters in self._present.values()]
            sums = {
                path: self._past[path] + sum(counters[path] for counters in told)
                for path in COUNTERS
            }
        totals: dict[str, Any] = {}
        for path, value in sums.items():
            part = totals
            for key in path[:-1]:
                part = part.setdefault(key, {})
            part[path[-1]] = value
        return totals


def _value(metrics: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = metrics
    for key in path:
        value = value[key]
    number: float = value
    return number
