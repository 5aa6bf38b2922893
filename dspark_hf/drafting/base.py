"""The Drafter protocol: everything a drafter must do, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dspark_hf.values import DraftRequest, Proposal


@runtime_checkable
class Drafter(Protocol):
    """Guesses the next tokens of each row; the target decides which guesses stand.

    A drafter may be wrong about everything and the text stays the target's. Two rules only, both
    for rejection sampling: `Proposal.probs` is exactly the distribution the tokens were drawn from
    (None when they were not drawn at random), and what else the proposal says looks at no token it
    speaks of: its `signal` and number of tokens depend only on tokens before it, the confidence of
    a token only on tokens before that one. `docs/drafters.md` tells why.

    A drafter may have an attribute `block_size`, the tokens of the block that it computes for any
    number: fewer cost it the same, so that a schedule asks for a whole block or for nothing. With
    `draft_cost_grows = True` beside it, fewer cost somewhat less, and what they cost is measured.

    Calls for one model come one at a time; `row_id` is unique in the process, so that one object
    may draft for several models.
    """

    name: str
    """Short name used in logs and statistics."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Propose up to `max_tokens` tokens for each row.

        Args:
            requests: One per row that wants a draft this round.

        Returns:
            list[Proposal]: One per request, in order; an empty proposal says nothing. Tokens beyond
            `max_tokens` are dropped; ids the target does not know are a CheckpointError.
        """

    def free(self, row_id: int) -> None:
        """Forget a row that has finished; called once for every row, drafted or not."""


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads the target's own features while the target verifies."""

    target_layers: tuple[int, ...]
    """Tapped blocks: i is the output of block i, -1 the embedding output."""

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Take in the features of a row's tokens.

        Args:
            row_id: The row.
            start: Position of the first; tokens that were rejected, or fed again, come again.
            features: Of shape (T, m * d), concatenated in the order of `target_layers`.
        """
