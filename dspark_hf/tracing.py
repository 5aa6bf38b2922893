"""RoundTrace: one round of one row, token by token, for whoever asked to see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from dspark_hf.drafting.base import Drafter
    from dspark_hf.rows import Row
    from dspark_hf.values import Proposal


@dataclass(frozen=True)
class RoundTrace:
    """One round of one row; the counts are those of `metrics`.

    Attributes:
        row_id: The row, unique in the process.
        row: Its place in the batch of its call.
        index: Round of the row, from 0.
        context: Tokens committed before the round, the prompt included.
        drafter: Who drafted; empty without a drafter.
        signal: Of the proposal.
        drafted: Proposed tokens, also those that were not verified.
        confidence: The drafter's, one per proposed token; empty where it gave none.
        verified: Draft tokens the target scored.
        accepted: Draft tokens committed.
        emitted: Tokens committed: those accepted, then the target's own unless `is_cut`.
        is_cut: Whether the round ended at an accepted draft token.
    """

    row_id: int
    row: int
    index: int
    context: int
    drafter: str
    signal: int
    drafted: tuple[int, ...]
    confidence: tuple[float, ...]
    verified: int
    accepted: int
    emitted: tuple[int, ...]
    is_cut: bool

    @classmethod
    def of(
        cls, row: Row, proposal: Proposal, drafter: Drafter | None, *, verified: int, cut: bool
    ) -> RoundTrace:
        """Describe the round a row has just counted.

        Args:
            row: The row, its tokens committed.
            proposal: All that was drafted.
            drafter: Who drafted; None for nobody.
            verified: Draft tokens scored.
            cut: Whether the round ended at an accepted draft token.
        """
        accepted = row.record.accepted_per_round[-1]
        num_emitted = accepted + (not cut)
        return cls(
            row_id=row.row_id,
            row=row.place,
            index=row.record.rounds - 1,
            context=len(row.ids) - num_emitted,
            drafter="" if drafter is None else _name_of(drafter, proposal.signal),
            signal=proposal.signal,
            drafted=tuple(proposal.ids),
            confidence=tuple(proposal.confidence),
            verified=verified,
            accepted=accepted,
            emitted=tuple(row.ids[len(row.ids) - num_emitted :]),
            is_cut=cut,
        )

    @property
    def own(self) -> int | None:
        """The target's own token, a correction or bonus; None where a draft token ended the row."""
        return None if self.is_cut else self.emitted[-1]

    def num_known(self, ends: Collection[int] = ()) -> int:
        """Return for how many draft positions it is settled whether they could survive.

        Nothing can be accepted behind a drafted end token, whether it stood or fell, nor behind the
        place where another stop cut the round. Counting only what is settled keeps shares unbiased:
        behind an end token a refusal would be counted and an acceptance never.

        Args:
            ends: End tokens of the text.
        """
        known = self.verified
        for k, token in enumerate(self.drafted[:known]):
            if token in ends:
                known = k + 1
                break
        return min(known, self.accepted) if self.is_cut else known


def _name_of(drafter: Drafter, signal: int) -> str:
    """Return who made a proposal; a choice of drafters tells by its signal."""
    name_of = getattr(drafter, "name_of", None)
    return drafter.name if name_of is None else str(name_of(signal))
