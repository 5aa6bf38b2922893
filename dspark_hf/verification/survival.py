"""SurvivalEstimates: how likely draft tokens survive, from confidences and from past rounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from dspark_hf.verification.calibration import OnlineCalibration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.verification.schedules.base import Draft, RowOutcome

PRIOR_ROUNDS = 4.0
"""Weight of the prior, in rounds: a handful of observations outvotes it."""
PRIOR_FIRST = {0: 0.6, 1: 0.15, 2: 0.3, 3: 0.45, 4: 0.55, 5: 0.65, 6: 0.75, 7: 0.85}
"""Expected acceptance of a proposal's first token by signal, before anything is observed."""
PRIOR_NEXT = 0.7
"""Expected acceptance of each further token, given the one before."""
FORGETTING = 0.99
"""Factor on older observations per round, so that estimates follow the text."""
CONVINCING = 20.0
"""Verified tokens that half convince."""
RECENT = 16
"""Drafts with confidences that what is expected of the next one follows from."""


@dataclass
class _Acceptance:
    """Decayed counts of first and further draft tokens tested and accepted."""

    first_tested: float = 0.0
    first_accepted: float = 0.0
    next_tested: float = 0.0
    next_accepted: float = 0.0

    def add(self, tested: int, accepted: int) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) * FORGETTING)
        self.first_tested += 1
        self.first_accepted += accepted > 0
        self.next_tested += max(tested - 1, 0)
        self.next_accepted += max(accepted - 1, 0)


@dataclass
class _Recent:
    """The latest drafts with confidences, verified or not, as survivals given the tokens before."""

    drafts: deque[list[float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    known: dict[int, list[list[float]]] = field(default_factory=dict)

    def add(self, confidence: list[float]) -> None:
        self.drafts.append(confidence)
        self.known.clear()

    def survivals(self, length: int) -> list[list[float]]:
        """Return each draft's survivals; one that was shorter goes on like the next ones."""
        if length not in self.known:
            found, count = list(self.drafts), len(self.drafts)
            self.known[length] = []
            for start in range(count):
                row: list[float] = []
                for step in range(length):
                    row += found[(start + step) % count]
                    if len(row) >= length:
                        break
                self.known[length].append(list(accumulate(row[:length], mul)))
        return self.known[length]


class SurvivalEstimates:
    """What is known of drafts: calibrated confidences where a drafter gives them, else statistics.

    Everything here follows from past rounds and from the confidences asked about, each from its
    own only: entry k of an answer depends on no confidence behind entry k.
    """

    def __init__(self) -> None:
        """Start from priors."""
        self._by_signal: dict[int, _Acceptance] = {}
        self._by_row: dict[int, _Acceptance] = {}
        self._calibration: dict[int, OnlineCalibration] = {}
        self._recent: dict[int, _Recent] = {}

    def confidence(self, row_id: int, draft: Draft) -> list[float]:
        """Return for each token the probability that it survives given that those before it did."""
        if not draft.confidence:
            first, further = self._chances(row_id, draft.signal)
            return [first, *[further] * (draft.num_tokens - 1)][: draft.num_tokens]
        calibration = self._calibration.get(draft.signal)
        if calibration is None:
            return list(draft.confidence)
        return calibration(draft.confidence)

    def survival(self, row_id: int, draft: Draft) -> list[float]:
        """Return the probability that the first 1, 2, ... tokens all survive; never increasing."""
        return list(accumulate(self.confidence(row_id, draft), mul))

    def expected(self, row_id: int, signal: int, length: int) -> list[float]:
        """Return the survival of a draft that is not known yet, from past rounds only."""
        likely = self.likely(row_id, signal, length)
        return [sum(values) / len(likely) for values in zip(*likely, strict=True)]

    def likely(self, row_id: int, signal: int, length: int) -> list[list[float]]:
        """Return survivals of drafts that may come, one as likely as another."""
        if signal in self._recent:
            return self._recent[signal].survivals(length)
        first, further = self._chances(row_id, signal)
        return [[first * further**k for k in range(length)]]

    def usual_signal(self) -> int:
        """Return the signal that was tested most of late; 0 before any was."""
        return max(self._by_signal, key=lambda s: self._by_signal[s].first_tested, default=0)

    def evidence(self, signal: int) -> float:
        """Return how far what is said of a signal rests on verified tokens: from 0 to nearly 1."""
        seen = self._by_signal.get(signal, _Acceptance())
        tested = seen.first_tested + seen.next_tested
        return tested / (tested + CONVINCING)

    def note(self, row_id: int, draft: Draft) -> None:
        """Remember a draft for later rounds; call it when its length is decided."""
        if draft.confidence:
            recent = self._recent.setdefault(draft.signal, _Recent())
            recent.add(self.confidence(row_id, draft))

    def observe(self, outcomes: Sequence[RowOutcome]) -> None:
        """Learn from a finished round."""
        for outcome in outcomes:
            if not outcome.verified:
                continue
            for table, key in ((self._by_signal, outcome.signal), (self._by_row, outcome.row_id)):
                table.setdefault(key, _Acceptance()).add(outcome.tested, outcome.accepted)
            if outcome.confidence:
                calibration = self._calibration.setdefault(outcome.signal, OnlineCalibration())
                calibration.observe(outcome.confidence, outcome.tested, outcome.accepted)

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self._by_row.pop(row_id, None)

    def _chances(self, row_id: int, signal: int) -> tuple[float, float]:
        """Return the acceptance of a first token and of each further one."""
        shared = self._by_signal.get(signal, _Acceptance())
        own = self._by_row.get(row_id, _Acceptance())
        first = _estimate(shared.first_accepted, shared.first_tested, PRIOR_FIRST.get(signal, 0.5))
        first = _estimate(own.first_accepted, own.first_tested, first, weight=2 * PRIOR_ROUNDS)
        further = _estimate(shared.next_accepted, shared.next_tested, PRIOR_NEXT)
        further = _estimate(own.next_accepted, own.next_tested, further, weight=2 * PRIOR_ROUNDS)
        return first, further


def _estimate(accepted: float, tested: float, prior: float, weight: float = PRIOR_ROUNDS) -> float:
    return (accepted + weight * prior) / (tested + weight)
