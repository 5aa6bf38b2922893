"""DrafterChoice: several drafters, the one that promises most per row and round.

Each member's accepted tokens are counted per row and signal, as they show in the committed text of
the next round. A draft that costs time must promise more than one that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
"""Draft tokens a member is believed to get accepted before it was tried, and for how many rounds."""
FORGETTING = 0.95
"""Factor on a row's counts per round, tried or not: what was not tried lately becomes likelier."""
SMOOTHING = 0.1
"""Weight of the newest measured time."""


@dataclass
class _Count:
    rounds: float = 0.0
    accepted: float = 0.0

    def mean(self) -> float:
        return (self.accepted + PRIOR_ROUNDS * PRIOR_ACCEPTED) / (self.rounds + PRIOR_ROUNDS)


@dataclass
class _Row:
    """What was proposed last and what came of earlier proposals, by member and signal."""

    counts: dict[int, _Count] = field(default_factory=dict)
    signal: int = -1
    ids: Sequence[int] = ()
    known: int = 0


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

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Ask the cheap members first; the dear ones only for rows where they promise more."""
        begin = perf_counter()
        if self._left_at:
            self._round_s = _smooth(self._round_s, begin - self._left_at)
        rows = [self._settle(request) for request in requests]
        best = [Proposal() for _ in requests]
        rate = [1.0 / max(self._round_s, 1e-9)] * len(requests)
        order = sorted(range(len(self.members)), key=lambda i: self._seconds.get(i, 0.0))
        for member in order:
            cost = self._seconds.get(member, 0.0)
            places = [
                i
                for i, row in enumerate(rows)
                if self._promise(row, member, cost) > rate[i] or not best[i].ids
            ]
            if not places:
                continue
            start = perf_counter()
            answers = self.members[member].propose([requests[i] for i in places])
            self._seconds[member] = _smooth(cost, perf_counter() - start)
            for i, answer in zip(places, answers, strict=True):
                signal = member * SIGNALS + min(answer.signal, SIGNALS - 1)
                promise = self._rate(rows[i], signal, cost)
                if answer.ids and (promise > rate[i] or not best[i].ids):
                    rate[i] = promise
                    best[i] = Proposal(answer.ids, answer.probs, signal, answer.confidence)
        for request, row, proposal in zip(requests, rows, best, strict=True):
            row.signal, row.ids, row.known = proposal.signal, proposal.ids, len(request.ids)
            if not proposal.ids:
                row.signal = -1
        self._left_at = perf_counter()
        return best

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self._rows.pop(row_id, None)
        self._left_at = 0.0
        for member in self.members:
            member.free(row_id)

    def _settle(self, request: DraftRequest) -> _Row:
        """Count what became of the row's last proposal."""
        row = self._rows.setdefault(request.row_id, _Row())
        for count in row.counts.values():
            count.rounds *= FORGETTING
            count.accepted *= FORGETTING
        if row.signal >= 0:
            new = request.ids[row.known : row.known + len(row.ids)]
            accepted = 0
            while accepted < min(len(new), len(row.ids)) and new[accepted] == row.ids[accepted]:
                accepted += 1
            count = row.counts.setdefault(row.signal, _Count())
            count.rounds += 1
            count.accepted += accepted
        row.signal = -1
        return row

    def _promise(self, row: _Row, member: int, cost: float) -> float:
        """Return the most tokens per second the member may give, over its signals seen so far."""
        signals = [s for s in row.counts if s // SIGNALS == member] or [member * SIGNALS]
        return max(self._rate(row, signal, cost) for signal in signals)

    def _rate(self, row: _Row, signal: int, cost: float) -> float:
        accepted = row.counts.get(signal, _Count()).mean()
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
