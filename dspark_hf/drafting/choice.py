"""DrafterChoice: several drafters, the one that promises most per row and round.

Each member's right tokens are counted per row and signal, as they show in the committed text of
the next round; a new row starts from what was usual. A draft that costs time must promise more than
one that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter
from typing import TYPE_CHECKING

from dspark_hf.drafting.base import Drafter, FeatureDrafter
from dspark_hf.errors import ConfigError
from dspark_hf.values import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dspark_hf.values import DraftRequest

SIGNALS = 16
"""Signals set aside per member: member i's signal s is i * SIGNALS + s."""
PRIOR_ACCEPTED, PRIOR_ROUNDS = 1.0, 2.0
"""Draft tokens a member is believed to get accepted before it was tried, for how many rounds."""
FORGETTING = 0.95
"""Factor on a row's counts per round, tried or not: what was not tried lately becomes likelier."""
SMOOTHING = 0.1
"""Weight of the newest measured time."""


@dataclass
class _Count:
    rounds: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: int) -> None:
        self.rounds += 1
        self.accepted += accepted

    def fade(self) -> None:
        self.rounds *= FORGETTING
        self.accepted *= FORGETTING

    def mean(self, prior: float = PRIOR_ACCEPTED) -> float:
        return (self.accepted + PRIOR_ROUNDS * prior) / (self.rounds + PRIOR_ROUNDS)


@dataclass
class _Row:
    """What members proposed last, chosen or not, and what came of it earlier, by signal."""

    counts: dict[int, _Count] = field(default_factory=dict)
    answers: dict[int, Sequence[int]] = field(default_factory=dict)
    known: int = 0
    asked: set[int] = field(default_factory=set)


class DrafterChoice:
    """A drafter made of drafters."""

    block_size = 64
    """Drafting fewer tokens costs the same: members draft whole blocks or for nothing."""

    def __init__(self, members: Sequence[Drafter]) -> None:
        """Prepare.

        Args:
            members: At least two, and at most one that reads the target's features. Those that
                cost nothing, like lookup, are told by their times.

        Raises:
            ConfigError: If there are fewer than two, or several read features.
        """
        if len(members) < 2:
            raise ConfigError(
                f"drafter must name at least two drafters to choose from; got {len(members)}. "
                "Pass a single one by itself."
            )
        self.members = list(members)
        self.name = "+".join(member.name for member in members)
        self._seconds: dict[int, float] = {}
        self._round_s = 0.0
        self._left_at = 0.0
        self._rows: dict[int, _Row] = {}
        self._counts: dict[int, _Count] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Ask the cheap members first, each only for rows where it promises more than in hand.

        At first nothing is in hand: decoding without a draft is what a member has to beat.
        """
        begin = perf_counter()
        if self._left_at and not any(self._has_paused(request) for request in requests):
            self._round_s = _smooth(self._round_s, begin - self._left_at)
        rows = [self._settle(request) for request in requests]
        best = [Proposal() for _ in requests]
        rate = [1.0 / max(self._round_s, 1e-9)] * len(requests)
        order = sorted(range(len(self.members)), key=lambda i: self._seconds.get(i, 0.0))
        for member in order:
            cost = self._seconds.get(member, 0.0)
            places = [i for i, row in enumerate(rows) if self._promise(row, member, cost) > rate[i]]
            if not places:
                continue
            start = perf_counter()
            answers = self.members[member].propose([requests[i] for i in places])
            # A row's first draft also pays for reading its prompt.
            if all(member in rows[i].asked for i in places):
                self._seconds[member] = _smooth(cost, perf_counter() - start)
            for i, answer in zip(places, answers, strict=True):
                rows[i].asked.add(member)
                signal = member * SIGNALS + min(answer.signal, SIGNALS - 1)
                promise = self._rate(rows[i], signal, cost)
                if answer.ids:
                    rows[i].answers[signal] = answer.ids
                if answer.ids and (promise > rate[i] or not best[i].ids):
                    rate[i] = promise
                    best[i] = Proposal(answer.ids, answer.probs, signal, answer.confidence)
        for request, row in zip(requests, rows, strict=True):
            row.known = len(request.ids)
        self._left_at = perf_counter()
        return best

    def name_of(self, signal: int) -> str:
        """Return the name of the member whose proposal has this signal."""
        return self.members[signal // SIGNALS].name

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self._rows.pop(row_id, None)
        self._left_at = 0.0
        for member in self.members:
            member.free(row_id)

    def _has_paused(self, request: DraftRequest) -> bool:
        """Tell whether more than a round has passed since the row's last proposal."""
        row = self._rows.get(request.row_id)
        if row is None:
            return False
        longest = max(map(len, row.answers.values()), default=0)
        return len(request.ids) > row.known + longest + 1

    def _settle(self, request: DraftRequest) -> _Row:
        """Count how much of what members proposed last is now in the row's text.

        What was not chosen is judged as well, as far as the text goes: a member that was never
        chosen could not show what it is worth otherwise.
        """
        row = self._rows.setdefault(request.row_id, _Row())
        for count in row.counts.values():
            count.fade()
        for signal, ids in row.answers.items():
            new = request.ids[row.known : row.known + len(ids)]
            same = takewhile(lambda pair: pair[0] == pair[1], zip(new, ids, strict=False))
            right = sum(1 for _ in same)
            row.counts.setdefault(signal, _Count()).add(right)
            usual = self._counts.setdefault(signal, _Count())
            usual.fade()
            usual.add(right)
        row.answers = {}
        return row

    def _promise(self, row: _Row, member: int, cost: float) -> float:
        """Return the most tokens per second the member may give, over its signals seen so far."""
        signals = [s for s in self._counts if s // SIGNALS == member] or [member * SIGNALS]
        return max(self._rate(row, signal, cost) for signal in signals)

    def _rate(self, row: _Row, signal: int, cost: float) -> float:
        usual = self._counts.get(signal, _Count()).mean()
        accepted = row.counts.get(signal, _Count()).mean(usual)
        return (1.0 + accepted) / max(self._round_s + cost, 1e-9)


class FeatureDrafterChoice(DrafterChoice):
    """A choice of which one member reads the target's features."""

    def __init__(self, members: Sequence[Drafter], reader: FeatureDrafter) -> None:
        """Prepare.

        Args:
            members: All of them.
            reader: The one that reads features.
        """
        super().__init__(members)
        self.reader = reader
        self.target_layers = reader.target_layers

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Pass features on."""
        self.reader.take(row_id, start, features)


def choose_between(members: Sequence[Drafter]) -> DrafterChoice:
    """Make a choice of drafters.

    Args:
        members: At least two.

    Raises:
        ConfigError: If several of them read the target's features.
    """
    readers = [member for member in members if isinstance(member, FeatureDrafter)]
    if len(readers) > 1:
        raise ConfigError(
            f"at most one drafter of a list may read the target's features; got "
            f"{[reader.name for reader in readers]}. Keep the better one."
        )
    return FeatureDrafterChoice(members, readers[0]) if readers else DrafterChoice(members)


def _smooth(old: float, new: float) -> float:
    return new if not old else (1 - SMOOTHING) * old + SMOOTHING * new
