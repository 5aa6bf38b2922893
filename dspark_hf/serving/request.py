"""Request: a submitted call inside the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import TextStreamer

from dspark_hf.serving.order import PROMPT_WEIGHT, Lengths, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from dspark_hf.rows import Row
    from dspark_hf.serving.handle import RequestHandle
    from dspark_hf.serving.prepare import Prepared

UNBOUNDED_TOKENS = 1 << 20
"""New tokens a row without a length limit counts as."""


class TextPieces(TextStreamer):
    """Cuts a growing text into pieces that later tokens do not change."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, give: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            tokenizer: Decodes; special tokens are left out.
            give: Called with each piece.
        """
        super().__init__(tokenizer, skip_special_tokens=True)
        self.give = give

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002 - Transformers' signature
        """Give a piece away."""
        if text:
            self.give(text)


@dataclass
class Request:
    """A submitted call.

    Attributes:
        prepared: What is decoded.
        handle: What the caller holds.
        priority: Higher goes first.
        deadline: On the clock of time.monotonic(); None without.
        error: What its own code raised; it then fails alone.
    """

    prepared: Prepared
    handle: RequestHandle
    priority: int = 0
    deadline: float | None = None
    error: Exception | None = None
    pieces: TextPieces | None = None

    @property
    def rows(self) -> list[Row]:
        """Its rows; none if it runs alone."""
        return self.prepared.rows

    @property
    def active_rows(self) -> list[Row]:
        """Rows that are not finished."""
        return [row for row in self.rows if not row.finished]

    def listen(
        self, tokenizer: PreTrainedTokenizerBase | None, committed: Sequence[int] = ()
    ) -> None:
        """Give the first row's tokens to the handle as they are committed.

        Args:
            tokenizer: Of the queue.
            committed: Tokens that the first row has had, of which pieces were given elsewhere.
        """
        if not self.rows:
            return
        give: Callable[[int], None] = self.handle.add
        if self.prepared.returns_text and tokenizer is not None:
            pieces = self.pieces = TextPieces(tokenizer, lambda _: None)
            for token in committed:
                pieces.put(torch.tensor([token]))
            pieces.give = self.handle.add
            give = lambda token: pieces.put(torch.tensor([token]))  # noqa: E731 - one of two
        streaming = self.rows[0].on_token

        def on_token(token: int) -> None:
            if self.handle.stats.first_token is None:
                self.handle.stats.first_token = self.handle.stats.since_submitted()
            give(token)
            if streaming is not None:
                streaming(token)

        self.rows[0].on_token = on_token

    def begin(self) -> None:
        """Start clocks that run from here: a time limit does not count the wait."""
        if self.handle.stats.started is not None:
            return
        self.handle.stats.started = self.handle.stats.since_submitted()
        for row in self.rows:
            row.criteria.restart()

    def ticket(self, lengths: Lengths) -> Ticket:
        """Return what the order sees."""
        return Ticket(
            self.handle.stats.submitted, self.priority, self._remaining(lengths), self.deadline
        )

    def most_tokens(self, row: Row) -> int:
        """Return the longest a row may get, in tokens."""
        most = UNBOUNDED_TOKENS if row.criteria.max_tokens is None else row.criteria.max_tokens
        return most if row.limit is None else min(most, row.limit)

    def _remaining(self, lengths: Lengths) -> float:
        total = 0.0
        for row in self.active_rows:
            made = row.num_new_tokens
            most = self.most_tokens(row) - row.num_prompt_tokens
            total += lengths.remaining(made, most)
            if not made:
                total += PROMPT_WEIGHT * row.num_prompt_tokens
        return total or float(UNBOUNDED_TOKENS)
