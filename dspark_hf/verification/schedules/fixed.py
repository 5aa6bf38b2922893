"""FixedSchedule: the same number of tokens every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState


class FixedSchedule:
    """Verifies the same number of tokens every round."""

    def __init__(self, num_tokens: int) -> None:
        """Set the length, in tokens."""
        self.num_tokens = num_tokens

    def ask(self, rows: Sequence[RowState]) -> list[int]:
        """Ask for the fixed length where there is room."""
        return [min(self.num_tokens, row.room) for row in rows]

    def cut(
        self,
        rows: Sequence[RowState],  # noqa: ARG002 - the protocol's signature
        drafts: Sequence[Draft],
    ) -> list[int]:
        """Verify everything that was drafted."""
        return [draft.num_tokens for draft in drafts]

    def observe(
        self, outcomes: Sequence[RowOutcome], num_tokens: int, context: int, verify_s: float | None
    ) -> None:
        """Learn nothing."""

    def observe_draft(self, num_tokens: int, seconds: float, num_rows: int = 1) -> None:
        """Learn nothing."""

    def free(self, row_id: int) -> None:
        """Keep nothing per row."""
