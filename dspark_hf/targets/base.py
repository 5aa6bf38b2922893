"""The Target protocol: a model that can be asked about several tokens of several rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from transformers.cache_utils import Cache

    from dspark_hf.attention.sparse import SparseReading, SparseRow
    from dspark_hf.values import Feed

    TakeFeatures = Callable[[int, int, torch.Tensor], None]
    """Row id, position of the first token, features of shape (T, m * d)."""


class Taps(Protocol):
    """Catches what some of the model's blocks put out, see `drafting.block.taps`."""

    def catching(self) -> AbstractContextManager[Any]:
        """Catch inside the context."""

    def features(self) -> torch.Tensor:
        """Return the latest forward's features (B, T, m * d)."""


@dataclass(frozen=True)
class CachedRow:
    """A row's place in an exported cache.

    Attributes:
        row_id: The row.
        length: Tokens it takes along.
        offset: Position of the first of them: the row's left padding.
    """

    row_id: int
    length: int
    offset: int


class Target(Protocol):
    """Runs a model over rows of any length; rows join at their first feed and leave by `free`."""

    path: str
    """Name in statistics: "flat" or "rowwise"."""

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Append tokens to rows and return their logits.

        If the model raises, rows hold what they held before; one that cannot be put back holds
        nothing, and must be fed its tokens again.

        Args:
            feeds: At most one per row, each with at least one token.

        Returns:
            list[torch.Tensor]: Per feed, float32 logits of shape (keep, V) of its last tokens.
        """

    def listen(self, taps: Taps, take: TakeFeatures) -> None:
        """Hand the features of every token fed from now on to a drafter.

        Args:
            taps: Which blocks' outputs.
            take: Called once per feed and forward, after it, also for tokens fed again.
        """

    def read_all_sparsely(self, reading: SparseReading) -> None:
        """Read the rows' long contexts by a policy.

        Raises:
            NotImplementedError: If the target cannot.
        """

    def read_sparsely(self, row_id: int, sparse: SparseRow | None) -> None:
        """Read one row's context by a policy from now on; None reads all of it.

        Raises:
            NotImplementedError: If the target cannot.
        """

    def length(self, row_id: int) -> int:
        """Return the tokens the row has cached; 0 for an unknown row."""

    def rollback(self, row_id: int, length: int) -> None:
        """Drop a row's cached tokens beyond `length`: those of its latest feed, or since `hold`."""

    def hold(self, row_id: int) -> None:
        """Allow the next rollback to reach back to here, over any number of feeds."""

    def free(self, row_id: int) -> None:
        """Release everything held for a row."""

    def adopt(self, row_id: int, cache: Cache, ids: Sequence[int]) -> None:
        """Start a row from a batch-1 cache that already holds `ids`."""

    def export(self, rows: Sequence[CachedRow], width: int, cache: Cache) -> Cache:
        """Write rows' cached tokens into a Transformers cache, as plain decoding leaves it.

        Args:
            rows: One per batch entry.
            width: Positions of the result.
            cache: Empty, or the batch-1 cache the row adopted, which gets what was added.

        Returns:
            Cache: The filled cache; positions outside a row's span hold zeros.

        Raises:
            NotImplementedError: If the rows' caches cannot be put side by side.
        """
