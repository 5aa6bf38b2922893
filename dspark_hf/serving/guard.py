"""GuardedDrafter: the drafters of a queue's rows behind circuit breakers.

A drafter that raises, or takes far longer than a target step, is switched off after a few failures
in a row and tried again later. Texts stay what they are: a row without a draft decodes plainly.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from dspark_hf.drafting.base import FeatureDrafter
from dspark_hf.values import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dspark_hf.drafting.base import Drafter
    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.values import DraftRequest

logger = logging.getLogger(__name__)

SIGNALS = 1024
"""Signals set aside per drafter: statistics of one say nothing of another."""
CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
SLOWEST_START_S = 1.0
"""A draft may take so long while no target step was timed."""


@dataclass
class Breaker:
    """Counts failures in a row; open, it lets one try through after a while.

    Attributes:
        most: Failures in a row that open it.
        retry_s: Seconds it stays open.
        clock: Seconds that only grow.
    """

    most: int
    retry_s: float
    clock: Callable[[], float] = monotonic
    failures: int = 0
    opened: float | None = None
    times_opened: int = 0

    @property
    def state(self) -> str:
        """closed, open, or half-open: the next call is a try."""
        if self.opened is None:
            return CLOSED
        return HALF_OPEN if self.clock() - self.opened >= self.retry_s else OPEN

    def allows(self) -> bool:
        """Tell whether a call may be made."""
        return self.state != OPEN

    def succeed(self) -> None:
        """Note a call that went well."""
        self.failures, self.opened = 0, None

    def fail(self) -> bool:
        """Note a failure; tell whether it opened the breaker."""
        self.failures += 1
        if self.opened is not None or self.failures >= self.most:
            self.times_opened += 1
            self.opened = self.clock()
            return True
        return False


class GuardedDrafter:
    """Asks each row's own drafter, unless its breaker is open."""

    def __init__(self, main: Drafter | None, settings: QueueConfig) -> None:
        """Guard a drafter.

        Args:
            main: The model's; rows that were given none of their own use it.
            settings: When breakers open.
        """
        self.main, self.settings = main, settings
        self.name = "none" if main is None else main.name
        self.step_s = 0.0
        self._drafters: list[Drafter] = [] if main is None else [main]
        self._breakers: list[Breaker] = [self._breaker() for _ in self._drafters]
        self._rows: dict[int, int] = {}

    def states(self) -> dict[str, str]:
        """Return each drafter's breaker state by name."""
        return {d.name: b.state for d, b in zip(self._drafters, self._breakers, strict=True)}

    def assign(self, row_id: int, drafter: Drafter | None) -> None:
        """Say which drafter a row uses; None for none."""
        if drafter is None:
            return
        for place, known in enumerate(self._drafters):
            if known is drafter:
                self._rows[row_id] = place
                return
        self._rows[row_id] = len(self._drafters)
        self._drafters.append(drafter)
        self._breakers.append(self._breaker())

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Propose as the rows' drafters do; nothing for rows whose drafter is switched off."""
        proposals = [Proposal() for _ in requests]
        for place, drafter in enumerate(self._drafters):
            asked = [i for i, r in enumerate(requests) if self._rows.get(r.row_id) == place]
            if not asked or not self._breakers[place].allows():
                continue
            answers = self._ask(place, drafter, [requests[i] for i in asked])
            for i, answer in zip(asked, answers, strict=True):
                signal = place * SIGNALS + answer.signal
                proposals[i] = Proposal(answer.ids, answer.probs, signal, answer.confidence)
        return proposals

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Drop features: the main drafter reads none."""

    def free(self, row_id: int) -> None:
        """Forget a row."""
        place = self._rows.pop(row_id, None)
        if place is not None:
            self._try(place, lambda: self._drafters[place].free(row_id))

    def name_of(self, signal: int) -> str:
        """Return the name of the drafter whose proposal has this signal."""
        return self._drafters[signal // SIGNALS].name

    def _ask(
        self, place: int, drafter: Drafter, requests: Sequence[DraftRequest]
    ) -> list[Proposal]:
        begin = perf_counter()
        nothing = [Proposal() for _ in requests]
        try:
            answers = drafter.propose(requests)
        except Exception as error:  # noqa: BLE001 - whatever a drafter raises
            self._fail(place, f"it raised {type(error).__name__}: {error}")
            return nothing
        if len(answers) != len(requests):
            self._fail(place, f"it gave {len(answers)} proposals for {len(requests)} rows")
            return nothing
        seconds = perf_counter() - begin
        longest = self.settings.drafter_slow_factor * self.step_s or SLOWEST_START_S
        if seconds > longest:
            self._fail(place, f"a draft took {seconds:.3f} s, over {longest:.3f} s")
        else:
            self._breakers[place].succeed()
        return answers

    def _try(self, place: int, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(place, f"it raised {type(error).__name__}: {error}")

    def _fail(self, place: int, why: str) -> None:
        if self._breakers[place].fail():
            logger.warning(
                "Drafter %s is switched off for %g s: %s. Rows decode plainly meanwhile.",
                self._drafters[place].name,
                self.settings.drafter_retry_s,
                why,
            )

    def _breaker(self) -> Breaker:
        return Breaker(self.settings.drafter_failures, self.settings.drafter_retry_s)


class GuardedFeatureDrafter(GuardedDrafter):
    """A guard whose main drafter reads the target's features."""

    def __init__(self, main: FeatureDrafter, settings: QueueConfig) -> None:
        """Guard a drafter; see `GuardedDrafter`."""
        super().__init__(main, settings)
        self.reader, self.target_layers = main, main.target_layers

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Pass the features of the main drafter's rows on."""
        if self._rows.get(row_id) == 0:
            self._try(0, lambda: self.reader.take(row_id, start, features))


def guard(main: Drafter | None, settings: QueueConfig) -> GuardedDrafter:
    """Put a model's drafter behind a breaker."""
    if isinstance(main, FeatureDrafter):
        return GuardedFeatureDrafter(main, settings)
    return GuardedDrafter(main, settings)
