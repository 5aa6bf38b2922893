"""Request: a submitted call inside the queue."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dspark_hf.errors import DeadlineError
from dspark_hf.processing import restart
from dspark_hf.serving.handle import FAILED
from dspark_hf.serving.order import PROMPT_WEIGHT, Lengths, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from dspark_hf.attention.sparse import SparseRow
    from dspark_hf.rows import Row
    from dspark_hf.serving.handle import RequestHandle
    from dspark_hf.serving.prepare import Prepared

BROKEN = "\ufffd"
"""Stands for bytes that are no character, or none yet."""
UNBOUNDED_TOKENS = 1 << 20
"""New tokens a row without a length limit counts as."""


class TextPieces:
    """Cuts a growing text into pieces that join to what all of its tokens come to.

    A token's text may depend on those before it, as the space that begins a word does: tokens are
    decoded behind those of the piece before. A character that is not whole yet is waited for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, give: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            tokenizer: Decodes; special tokens are left out.
            give: Called with each piece.
        """
        self.tokenizer, self.give = tokenizer, give
        self._before: list[int] = []
        self._new: list[int] = []

    def put(self, token: int) -> None:
        """Add a token."""
        self._new.append(token)
        self._cut(is_last=False)

    def end(self) -> None:
        """Give what is left."""
        self._cut(is_last=True)

    def _cut(self, *, is_last: bool) -> None:
        known, text = self._decoded(self._before), self._decoded(self._before + self._new)
        is_whole = is_last or not text.endswith(BROKEN)
        if is_whole and len(text) > len(known):
            self.give(text[len(known) :])
            self._before, self._new = self._new, []

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


@dataclass(eq=False)
class Request:
    """A submitted call.

    Attributes:
        prepared: What is decoded.
        handle: What the caller holds.
        priority: Higher goes first.
        deadline: On the clock of time.monotonic(); None without.
        error: What its own code raised; it then fails alone.
        pieces: Cuts its text into pieces; None where ids are given.
        sparse: What its rows have read sparsely, by row id; it outlives their being parked.
        refusals: Times in a row that memory ran out under it alone.
    """

    prepared: Prepared
    handle: RequestHandle
    priority: int = 0
    deadline: float | None = None
    error: Exception | None = None
    pieces: TextPieces | None = None
    sparse: dict[int, SparseRow] = field(default_factory=dict)
    refusals: int = 0

    @property
    def keeps_caches(self) -> bool:
        """Whether its finished rows' caches are part of its result."""
        return bool(self.prepared.call.generation_config.return_dict_in_generate)

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
                pieces.put(token)
            pieces.give = self.handle.add
            give = pieces.put
        streaming = self.rows[0].on_token

        def on_token(token: int) -> None:
            if self.handle.stats.first_token is None:
                self.handle.stats.first_token = self.handle.stats.since_submitted()
            give(token)
            if streaming is not None:
                streaming(token)

        self.rows[0].on_token = on_token

    def is_late(self) -> bool:
        """Tell whether its deadline has passed; it has ended then."""
        if self.deadline is None or time.monotonic() < self.deadline:
            return False
        waited = self.handle.stats.since_submitted()
        error = DeadlineError(
            f"deadline_s passed {waited:.2f} s after submit(). Give it more time, or a higher "
            "priority."
        )
        self.handle.end(FAILED, error=error)
        return True

    def begin(self) -> None:
        """Start clocks that run from here: a time limit does not count the wait."""
        if self.handle.stats.started is not None:
            return
        self.handle.stats.started = self.handle.stats.since_submitted()
        for row in self.rows:
            row.criteria.restart()
        if not self.rows:
            restart(self.prepared.call.criteria)

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
        total = 0.0 if self.rows else self._remaining_alone()
        for row in self.active_rows:
            made = row.num_new_tokens
            most = self.most_tokens(row) - row.num_prompt_tokens
            total += lengths.remaining(made, most)
            if not made:
                total += PROMPT_WEIGHT * row.num_prompt_tokens
        return total

    def _remaining_alone(self) -> float:
        """Return what the model's own loop may have to do at most."""
        call = self.prepared.call
        num_rows, length = call.input_ids.shape
        most = call.generation_config.max_length
        new = UNBOUNDED_TOKENS if most is None else max(most - length, 1)
        return num_rows * (new + PROMPT_WEIGHT * length)
