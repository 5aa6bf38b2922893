"""GuardedDrafter: the drafters of a queue's rows behind circuit breakers.

A drafter that raises, answers nonsense, or takes far longer than a target step, is switched off
after a few failures in a row and tried again later. Texts stay what they are: a row without a draft
decodes plainly.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import torch

from dspark_hf.drafting.base import FeatureDrafter
from dspark_hf.drafting.checks import checked_proposal
from dspark_hf.errors import CheckpointError
from dspark_hf.values import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dspark_hf.drafting.base import Drafter
    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.values import DraftRequest

logger = logging.getLogger(__name__)

SIGNALS = 1024
"""Signals set aside per drafter: statistics of one say nothing of another."""
CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
LOST = -1
"""In place of a drafter: the row has none any more, as its features were not taken."""
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
        if self.state == OPEN:
            # Of a call that nobody chose to make: features come, rows leave.
            return False
        self.failures += 1
        if self.opened is not None or self.failures >= self.most:
            self.times_opened += 1
            self.opened = self.clock()
            return True
        return False


class GuardedDrafter:
    """Asks each row's own drafter, unless its breaker is open."""

    def __init__(self, main: Drafter | None, settings: QueueConfig, vocab_size: int) -> None:
        """Guard a drafter.

        Args:
            main: The model's; rows that were given none of their own use it.
            settings: When breakers open.
            vocab_size: Token ids the target knows.
        """
        self.main, self.settings, self.vocab_size = main, settings, vocab_size
        self.name = "none" if main is None else main.name
        self.step_s = 0.0
        self._drafters: list[Drafter] = [] if main is None else [main]
        self._breakers: list[Breaker] = [self._breaker() for _ in self._drafters]
        self._rows: dict[int, int] = {}

    def states(self) -> dict[str, str]:
        """Return each drafter's breaker state by name; further ones of a name are numbered."""
        states: dict[str, str] = {}
        for drafter, breaker in zip(self._drafters, self._breakers, strict=True):
            same = sum(name.split("#")[0] == drafter.name for name in states)
            states[f"{drafter.name}#{same + 1}" if same else drafter.name] = breaker.state
        return states

    def assign(self, row_id: int, drafter: Drafter | None) -> None:
        """Say which drafter a row uses; None for none. What a row uses does not change."""
        if drafter is None or row_id in self._rows:
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
                proposals[i] = answer
        return proposals

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Drop features: the main drafter reads none."""

    def free(self, row_id: int) -> None:
        """Forget a row."""
        place = self._rows.pop(row_id, LOST)
        if place != LOST:
            self._try(place, lambda: self._drafters[place].free(row_id))

    def name_of(self, signal: int) -> str:
        """Return the name of the drafter whose proposal has this signal."""
        if not self._drafters:
            return ""
        drafter = self._drafters[signal // SIGNALS]
        inner: Callable[[int], str] | None = getattr(drafter, "name_of", None)
        return drafter.name if inner is None else inner(signal % SIGNALS)

    def _ask(
        self, place: int, drafter: Drafter, requests: Sequence[DraftRequest]
    ) -> list[Proposal]:
        begin = perf_counter()
        try:
            answers = list(drafter.propose(requests))
            if len(answers) != len(requests):
                raise CheckpointError(f"{len(answers)} proposals for {len(requests)} rows")
        except Exception as error:  # noqa: BLE001 - whatever a drafter raises
            self._fail(place, _raised(error))
            return [Proposal() for _ in requests]
        seconds = perf_counter() - begin
        wrong = ""
        for i, request in enumerate(requests):
            try:
                answers[i] = self._checked(place, drafter, request, answers[i])
            except Exception as error:  # noqa: BLE001 - whatever it gave instead of a proposal
                answers[i], wrong = Proposal(), _raised(error)
        longest = self.settings.drafter_slow_factor * self.step_s or SLOWEST_START_S
        if wrong:
            self._fail(place, wrong)
        elif seconds > longest:
            self._fail(place, f"a draft took {seconds:.3f} s, over {longest:.3f} s")
        else:
            self._breakers[place].succeed()
        return answers

    def _checked(
        self, place: int, drafter: Drafter, request: DraftRequest, answer: Proposal
    ) -> Proposal:
        """Return a proposal that can be verified, under this drafter's signals."""
        name, count = drafter.name, len(answer.ids)
        proposal = checked_proposal(answer, request.max_tokens, self.vocab_size, name)
        if proposal.probs is not None and count:
            if proposal.probs.shape[1:] != (self.vocab_size,):
                raise CheckpointError(f"probs of shape {tuple(proposal.probs.shape)}")
            ids = proposal.probs.new_tensor(list(proposal.ids), dtype=torch.long)
            drawn = proposal.probs[: len(ids)].gather(1, ids[:, None])
            # NaN is not above 0 either.
            if not bool((drawn > 0).all()):
                raise CheckpointError("a token that its own distribution gives no probability")
        return replace(proposal, signal=place * SIGNALS + int(proposal.signal))

    def _try(self, place: int, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(place, _raised(error))
            return False
        return True

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

    def __init__(self, main: FeatureDrafter, settings: QueueConfig, vocab_size: int) -> None:
        """Guard a drafter; see `GuardedDrafter`."""
        super().__init__(main, settings, vocab_size)
        self.reader, self.target_layers = main, main.target_layers

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Pass features of the main drafter's rows on; a row that misses some gets no drafts."""
        if self._rows.get(row_id) != 0:
            return
        if not self._try(0, lambda: self.reader.take(row_id, start, features)):
            self.free(row_id)
            self._rows[row_id] = LOST


def guard(main: Drafter | None, settings: QueueConfig, vocab_size: int) -> GuardedDrafter:
    """Put a model's drafter behind a breaker.

    Args:
        main: The drafter; None for none.
        settings: When breakers open.
        vocab_size: Token ids the target knows.
    """
    if isinstance(main, FeatureDrafter):
        return GuardedFeatureDrafter(main, settings, vocab_size)
    return GuardedDrafter(main, settings, vocab_size)


def _raised(error: Exception) -> str:
    return f"it raised or gave {type(error).__name__}: {error}"
